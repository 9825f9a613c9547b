"""Does what was measured meet the targets, agree with what is known, and keep the papers' orders?"""

from dataclasses import dataclass
from itertools import pairwise

from kvq.lab.metrics import mean_and_error

from .rows import ORDERS, TARGETS


@dataclass
class Verdict:
    """One check; text says what was asked and what was found."""

    passed: bool
    text: str


def check(results):
    """All verdicts on a dict of results by row name."""
    verdicts = [_target(results[name].summary, name, *limits) for name, limits in TARGETS.items()]
    for result in results.values():
        known = result.row.known
        if known and known.between:
            verdicts.append(_between(result, known, results[known.between[0]]))
        elif known:
            verdicts.append(_known(result.summary, known, result.row.name))
    for what, chain in ORDERS.items():
        verdicts += [_order(what, results[a], results[b]) for a, b in pairwise(chain)]
    return verdicts


def _target(found, name, kl, ratio):
    text = f"{name}: KL {found['kl']:.4f} (at most {kl}), PPL ratio {found['ppl_ratio']:.4f} (at most {ratio})"
    return Verdict(found["kl"] <= kl and found["ppl_ratio"] <= ratio, text)


def _known(found, known, name):
    off = [(found["kl"] - known.kl) / known.kl_error, (found["ppl_ratio"] - known.ppl_ratio) / known.ppl_ratio_error]
    text = (
        f"{name}: KL {found['kl']:.4f} (known {known.kl} ± {known.kl_error}: {off[0]:+.1f} standard errors), "
        f"PPL ratio {found['ppl_ratio']:.3f} (known {known.ppl_ratio} ± {known.ppl_ratio_error}: {off[1]:+.1f}), at most 2 off"
    )
    return Verdict(max(map(abs, off)) <= 2, text)


def _between(low, known, high):
    """What is known was measured between two rows that this library has."""
    sides = (low.summary, high.summary)
    kl, ratio = ([side[key] for side in sides] for key in ("kl", "ppl_ratio"))
    text = (
        f"{low.row.name}: known KL {known.kl} between {kl[0]:.4f} and {kl[1]:.4f} ({high.row.name}), "
        f"known PPL ratio {known.ppl_ratio} between {ratio[0]:.3f} and {ratio[1]:.3f}, within 2 standard errors: {known.between[1]}"
    )
    inside = kl[0] - 2 * known.kl_error <= known.kl <= kl[1] + 2 * known.kl_error
    inside &= ratio[0] - 2 * known.ppl_ratio_error <= known.ppl_ratio <= ratio[1] + 2 * known.ppl_ratio_error
    return Verdict(inside, text)


def _order(what, low, high):
    gap, error = mean_and_error(high.scores.kl - low.scores.kl)
    text = (
        f"{what}: {low.row.name} {low.summary['kl']:.4f} < {high.row.name} {high.summary['kl']:.4f}, gap {gap:.4f} ± {error:.4f}"
    )
    return Verdict(gap > -2 * error, text)
