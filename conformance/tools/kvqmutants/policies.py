"""Faults of statistics and policies (FORMATS section 6)."""

import numpy as np

from kvqref.policies import widths
from kvqref.ratio import Ratio
from kvqref.stats import ChannelSums, PairSums

from .patch import function, method, mutation


@mutation("ties-to-the-higher", "of equal values the higher index is taken", "policy-pnmix/ties/qk-pair-equal")
def _():
    def largest(values, count):
        order = sorted(range(len(values)), key=lambda i: (-values[i], -i))
        marked = np.zeros(len(values), bool)
        marked[order[:count]] = True
        return marked

    function("policies.select", "largest", lambda old: largest)


@mutation("share-rounded", "floor(r * n) is rounded to nearest", "policy-pnmix/shares/D64-r-2-5-k-pair")
def _():
    method(Ratio, "floor_of", lambda old: lambda self, n: (2 * self.p * n + self.q) // (2 * self.q))


@mutation("share-in-floating-point", "floor(r * n) is computed with a floating-point ratio", "policy-semkv/prompt/T100-r-29-100")
def _():
    method(Ratio, "floor_of", lambda old: lambda self, n: int(self.p / self.q * n))


@mutation("block-share-floored", "generated blocks take floor(r * n) as prompts do", "policy-semkv/block/T6-r-1-4")
def _():
    method(Ratio, "half_even_of", lambda old: lambda self, n: self.floor_of(n))


@mutation("block-share-half-up", "generated blocks round halves up", "policy-semkv/block/T10-r-1-4")
def _():
    method(Ratio, "half_even_of", lambda old: lambda self, n: (2 * self.p * n + self.q) // (2 * self.q))


@mutation("lowest-scores", "SemKV keeps the tokens with the lowest scores", "policy-semkv/scores/ascending-prompt")
def _():
    function("policies.semkv", "_highest", lambda old: lambda scores, count: old(-scores, count))


@mutation("scores-nan-accepted", "NaN scores are taken for the lowest", "policy-semkv/scores/nan-0-prompt")
def _():
    function(
        "policies.semkv",
        "check_scores",
        lambda old: (
            lambda scores, tokens: old(np.nan_to_num(np.asarray(scores), nan=-1e30, posinf=np.inf, neginf=-np.inf), tokens)
        ),
    )


@mutation("sums-in-fp32", "pair sums are accumulated in fp32", "statistics/sums/D16-T33-H4")
def _():
    def plus(self, x, pairs):
        u, v = x[:, pairs[:, 0]], x[:, pairs[:, 1]]
        r2 = u * u + v * v
        first, second = (np.add.accumulate(np.concatenate([t[:0] if not len(t) else t]), axis=0) for t in (np.sqrt(r2), r2))
        totals = [
            np.array([int(float(c) * (1 << 24)) for c in (t[-1] if len(t) else np.zeros(len(pairs)))], object)
            for t in (first, second)
        ]
        return PairSums(self.first + totals[0], self.second + totals[1], self.count + len(x))

    method(PairSums, "plus", lambda old: plus)


@mutation("terms-rounded", "a term of a sum is rounded to the nearest 2^-24 instead of down", "statistics/torture/floors")
def _():
    function("stats", "fixed", lambda old: lambda v: np.rint(v.astype(np.float64) * (1 << 24)).astype(np.int64))


@mutation("queries-of-first-head", "only the first query head of a KV head counts", "policy-pnmix/heads/one-strong-head")
def _():
    from kvqref.stats import HeadStats

    method(HeadStats, "with_queries", lambda old: lambda self, q: old(self, q.reshape(-1, *q.shape[-2:])[:1]))


@mutation("energies-for-norms", "qk-pair multiplies squared norms", "policy-pnmix/shares/D16-r-1-2-qk-pair")
def _():
    from kvqref.stats import HeadStats

    def pnmix_mask(old):
        def mask(stats, r, criterion="qk-pair"):
            swap = {"key_pairs": stats.key_pairs, "query_pairs": stats.query_pairs}
            swapped = {name: s and PairSums(s.second, s.first, s.count) for name, s in swap.items()}
            return old(HeadStats(**stats.__dict__ | swapped), r, criterion)

        return mask

    function("policies.pnmix", "pnmix_mask", pnmix_mask)


@mutation("variance-about-zero", "k-var keeps the squared mean", "policy-pair-widths/scores/k-var-D16")
def _():
    function("policies.width_scores", "_key_variance", lambda old: lambda k, sums, pairs: k)


@mutation("half-a-bit-costs-half", "a bit divides a score by 2 instead of 4", "policy-blockgtq/given/powers-of-4")
def _():
    def allot(old):
        def allot_widths(scores, budget, lowest):
            return old([float(s) ** 2 for s in scores], budget, lowest)

        return allot_widths

    function("policies.widths", "allot_widths", allot)


@mutation(
    "greedy-ties-to-lower-pair", "a tie goes to the lower pair whatever its bits", "policy-blockgtq/degenerate/zeros-qk-avg"
)
def _():
    def allot_widths(scores, budget, lowest):
        scores = [float(s) for s in scores]
        budget.check(len(scores), lowest)
        bits = [budget.bmin] * len(scores)
        left = budget.total(len(scores)) - sum(bits)
        while left > 0 and min(bits) < budget.bmax:
            best = min((i for i, b in enumerate(bits) if b < budget.bmax), key=lambda i: (-(scores[i] * 4.0 ** -bits[i]), i))
            bits[best] += 1
            left -= 1
        return np.array(bits)

    function("policies.widths", "allot_widths", lambda old: allot_widths)


@mutation(
    "runs-in-pair-order",
    "unit=n moves runs of neighbouring pairs instead of pairs of like score",
    "policy-pair-widths/units/P8-U2-avg-11-4",
)
def _():
    function(
        "policies.widths",
        "_runs",
        lambda old: lambda scores, unit: [list(range(i, i + unit)) for i in range(0, len(scores), unit)],
    )


@mutation("budget-unspent", "zero scores receive no bits", "policy-blockgtq/given/zeros")
def _():
    def allot(old):
        def allot_widths(scores, budget, lowest):
            result = old(scores, budget, lowest)
            return np.where(np.asarray(scores, float) == 0, budget.bmin, result)

        return allot_widths

    function("policies.widths", "allot_widths", allot)
    assert widths.allot_widths


@mutation("mean-in-fp16", "the mean is summed in fp16", "policy-selections/center/D16-T7")
def _():
    def center_mean(k):
        total = np.zeros(k.shape[1], np.float16)
        for row in k:
            total = (total + row.astype(np.float16)).astype(np.float16)
        return (total / np.float16(max(len(k), 1))).astype(np.float32) + np.float32(0)

    function("policies.center", "center_mean", lambda old: center_mean)


@mutation("budget-exclusive", "a width fits only below its budget", "policy-selections/pmkvq-shrink/H1-D8-8-T64")
def _():
    function("policies.pmkvq", "layer_bytes", lambda old: lambda *args: old(*args) + 1)


@mutation("split-by-range", "channel-split ranks by range instead of the sum of abs", "policy-selections/channel-split/D16-1-3-k")
def _():
    def split(sums, r="1/2"):
        from kvqref.policies.select import largest

        return largest(list(np.float64(sums.max) - np.float64(sums.min)), Ratio.share(r).floor_of(len(sums.max)))

    assert ChannelSums
    function("policies.channels", "split_channels", lambda old: split)


@mutation("narrowest-first", "chanmix gives ties at both ends to the narrow side", "policy-selections/chanmix-widths/ties-equal")
def _():
    def chanmix_widths(old):
        def swapped(spread, share="1/4"):
            values = np.array([float(v) for v in spread])
            result = np.full(len(values), 2)
            count = Ratio.share(share).floor_of(len(values))
            result[np.argsort(-values, kind="stable")[:count]] = 3
            result[np.argsort(values, kind="stable")[:count]] = 1
            return result

        return swapped

    function("policies.channels", "chanmix_widths", chanmix_widths)
