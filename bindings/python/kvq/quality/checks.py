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
    verdicts += [_known(result) for result in results.values() if result.row.known]
    for what, chain in ORDERS.items():
        verdicts += [_order(what, results[a], results[b]) for a, b in pairwise(chain)]
    return verdicts


def _target(found, name, kl, ratio):
    text = f"{name}: KL {found['kl']:.4f} (at most {kl}), PPL ratio {found['ppl_ratio']:.4f} (at most {ratio})"
    return Verdict(found["kl"] <= kl and found["ppl_ratio"] <= ratio, text)


def _known(result):
    found, known = result.summary, result.row.known
    passed = found["kl"] <= known.kl + 2 * known.kl_error and found["ppl_ratio"] <= known.ppl_ratio + 2 * known.ppl_ratio_error
    text = (
        f"{result.row.name}: KL {found['kl']:.4f} (known {known.kl} ± {known.kl_error}), "
        f"PPL ratio {found['ppl_ratio']:.3f} (known {known.ppl_ratio} ± {known.ppl_ratio_error}), at most two standard errors worse"
    )
    return Verdict(passed, text)


def _order(what, low, high):
    gap, error = mean_and_error(high.scores.kl - low.scores.kl)
    text = (
        f"{what}: {low.row.name} {low.summary['kl']:.4f} < {high.row.name} {high.summary['kl']:.4f}, gap {gap:.4f} ± {error:.4f}"
    )
    return Verdict(gap > -2 * error, text)
