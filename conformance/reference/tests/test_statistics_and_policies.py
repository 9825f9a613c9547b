"""Section 6 against exact rationals, exhaustive search and the worked numbers of the test cases V29-V36."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from kvqref.errors import KvqError
from kvqref.fp import entry
from kvqref.head import Head
from kvqref.policies.center import center_mean
from kvqref.policies.channels import boosted_channels, chanmix_heads, chanmix_widths, split_channels
from kvqref.policies.pmkvq import shrink_width
from kvqref.policies.pnmix import pnmix_mask
from kvqref.policies.semkv import block_flags, prompt_flags, random_scores
from kvqref.policies.width_scores import width_scores
from kvqref.policies.widths import WidthBudget, allot_widths
from kvqref.ratio import Ratio
from kvqref.stats import HeadStats


def stats_of(k, q=None, layout="half"):
    stats = HeadStats.empty(k.shape[1], k.shape[1], Head(k.shape[1], layout=layout).pairs()).with_keys(entry(k))
    return stats if q is None else stats.with_queries(entry(q)[None])


def test_sums_are_exact(rng):
    k = (rng.standard_normal((300, 8)) * 10.0 ** rng.uniform(-6, 4, (300, 8))).astype(np.float16)
    stats = stats_of(k, layout="adjacent")
    exact = [[Fraction(float(v)) for v in row] for row in k]
    for c in range(8):
        assert stats.keys.sum[c] == sum(row[c] for row in exact) * 2**24
        assert stats.keys.abs[c] == sum(abs(row[c]) for row in exact) * 2**24
    for p in range(4):
        squares, norms = 0, 0
        for row in k.astype(np.float32):
            r2 = np.float32(np.float32(row[2 * p] * row[2 * p]) + np.float32(row[2 * p + 1] * row[2 * p + 1]))
            squares += int(Fraction(float(r2)) * 2**24)
            norms += int(Fraction(float(np.sqrt(r2))) * 2**24)
        assert stats.key_pairs.second[p] == squares and stats.key_pairs.first[p] == norms


def test_sums_exceed_64_bits():
    k = np.full((3000, 2), 65504, np.float16)
    r2 = np.float32(np.float32(65504.0**2) * np.float32(2))
    total = stats_of(k).key_pairs.second[0]
    assert total == 3000 * int(r2) * 2**24 and total > 2**64


def test_sums_ignore_order_and_pieces(rng):
    k = rng.standard_normal((100, 8)).astype(np.float32)
    whole = stats_of(k, k)
    parts = stats_of(k[40:], k[40:]).with_keys(entry(k[:40])).with_queries(entry(k[None, :40]))
    assert (whole.key_pairs.second == parts.key_pairs.second).all() and (whole.keys.sum == parts.keys.sum).all()
    assert whole.query_pairs.count == parts.query_pairs.count == 100


def test_pnmix_counts_and_ties():
    ones = np.ones((4, 128))
    mask = pnmix_mask(stats_of(ones, ones), "40/100")
    assert mask.tolist() == [True] * 25 + [False] * 39


def test_pnmix_query_times_key():
    k, q = np.ones((2, 8)), np.ones((2, 8))
    k[:, [1, 5]], q[:, [1, 5]] = 10, 0.01  # product 0.1
    q[:, [2, 6]] = 3
    stats = stats_of(k, q)
    assert pnmix_mask(stats, "1/4").tolist() == [False, False, True, False]
    assert pnmix_mask(stats, "1/4", "k-pair").tolist() == [False, True, False, False]


def test_pnmix_channel_criteria():
    k = np.zeros((2, 4))
    k[:, 0] = [5, 5]  # magnitude 10, range 0
    k[:, 3] = [-1, 1]  # magnitude 2, range 2
    assert pnmix_mask(stats_of(k), "1/4", "k-range").tolist() == [False, False, False, True]
    assert pnmix_mask(stats_of(k), "1/4", "k-magnitude").tolist() == [True, False, False, False]


def test_policy_without_statistics_is_refused():
    with pytest.raises(KvqError, match="STATE"):
        pnmix_mask(stats_of(np.ones((1, 4))), "1/2")
    with pytest.raises(KvqError, match="STATE"):
        width_scores(stats_of(np.ones((1, 4))), "q-var")


def test_width_scores_against_float64(rng):
    k = (rng.standard_normal((50, 8)) + 3).astype(np.float16)
    q = rng.standard_normal((50, 8)).astype(np.float16)
    stats = stats_of(k, q)
    k64, q64 = k.astype(float), q.astype(float)
    u, v = np.arange(4), np.arange(4) + 4
    ek, eq = (k64[:, u] ** 2 + k64[:, v] ** 2).mean(0), (q64[:, u] ** 2 + q64[:, v] ** 2).mean(0)
    var = k64.var(0)[u] + k64.var(0)[v]
    spread = (np.ptp(k64, axis=0)[u] ** 2 + np.ptp(k64, axis=0)[v] ** 2) / 2
    expected = {
        "qk-avg": (ek + eq) / 2,
        "qk-max": np.maximum(ek, eq),
        "qk-product": np.sqrt(ek * eq),
        "k-only": ek,
        "q-only": eq,
        "k-var": var,
        "q-var": eq * var,
        "q-geo": np.sqrt(eq) * var,
        "q-range": eq * spread,
    }
    for name, value in expected.items():
        assert np.allclose(width_scores(stats, name), value, rtol=2e-5), name


def widths(scores, avg, bmin=1, bmax=8, unit=1, lowest=1):
    return allot_widths(scores, WidthBudget(Ratio.of(avg), bmin, bmax, unit), lowest).tolist()


def test_equal_scores():
    assert widths([1.0] * 64, 3) == [3] * 64
    assert widths([1.0] * 64, "5/2") == [3] * 32 + [2] * 32
    assert widths([0.0] * 64, "5/2") == [3] * 32 + [2] * 32
    assert widths([1.0] + [0.0] * 3, 5) == [8, 4, 4, 4]


def test_greedy_costs_what_exhaustive_search_finds(rng):
    for _ in range(20):
        scores = 10.0 ** rng.uniform(-2, 2, 4)
        for budget in range(4, 17):
            cost = sum(s * 4.0**-b for s, b in zip(scores, widths(scores, f"{budget}/4", 1, 4)))
            best = min(
                sum(s * 4.0**-b for s, b in zip(scores, bits))
                for bits in itertools.product(range(1, 5), repeat=4)
                if sum(bits) <= budget
            )
            assert cost == pytest.approx(best, rel=1e-12)


def test_runs_of_pairs():
    # sorted: pairs 1, 3 (run of 200), then 0, 2 (run of 2); 8 bits of budget, 4 at the start
    assert widths([1.0, 100.0, 1.0, 100.0], 2, unit=2) == [1, 3, 1, 3]
    # less than two bits left: the odd bit stays
    assert widths([1.0, 100.0, 1.0, 100.0], "9/4", unit=2) == [1, 3, 1, 3]
    assert widths([1.0] * 4, "3/2", unit=2) == [2, 2, 1, 1]


def test_extreme_and_bad_scores():
    assert widths([1e-30, 1e30], 3) == [1, 5]
    for bad in (np.nan, np.inf, -1.0):
        with pytest.raises(KvqError, match="INVALID"):
            widths([bad, 1.0], 3)


@pytest.mark.parametrize(
    "arguments", [dict(avg="1/2"), dict(avg=3, bmin=0), dict(avg=3, bmin=4, bmax=3), dict(avg=3, bmax=9), dict(avg=3, unit=3)]
)
def test_bad_budgets(arguments):
    with pytest.raises(KvqError, match="INVALID"):
        widths([1.0] * 4, **arguments)


def test_semkv_prompt_counts():
    for r, t, count in (("35/100", 180, 63), ("29/100", 100, 29), ("58/100", 50, 29)):
        assert prompt_flags(np.arange(t), r).sum() == count


def test_semkv_block_counts():
    for r, n, count in (("35/100", 90, 32), ("35/100", 30, 10), ("1/4", 6, 2), ("1/4", 10, 2), ("1/4", 64, 16), ("1/4", 7, 2)):
        assert block_flags(np.arange(n), r).sum() == count


def test_semkv_ties_and_odd_scores():
    assert prompt_flags([1, 1, 1, 1], "1/2").tolist() == [True, True, False, False]
    assert prompt_flags([-np.inf, np.inf, 0, -0.0], "1/2").tolist() == [False, True, True, False]
    assert prompt_flags([1, 2], "0").sum() == 0 and prompt_flags([1, 2], 1).sum() == 2
    assert prompt_flags([], "1/2").tolist() == [] and prompt_flags([3], "1/2").tolist() == [False]
    # equal as fp32
    assert prompt_flags(np.array([1.0, 1.0 + 1e-12]), "1/2").tolist() == [True, False]
    with pytest.raises(KvqError, match="INVALID"):
        prompt_flags([np.nan, 1], "1/2")


def test_random_scores_are_24_bit():
    scores = random_scores(1234567, 1)
    assert scores.dtype == np.float32 and int(scores[0]) == 6457827717110365317 >> 40


def test_boosted_channels():
    assert boosted_channels(np.ones((4, 80), np.float32), "1/32").tolist() == [True] * 2 + [False] * 78
    x = np.ones((4, 8), np.float32)
    x[:, 5] = -2
    assert np.flatnonzero(boosted_channels(x, "1/4")).tolist() == [0, 5]


def test_split_and_chanmix():
    x = np.array([[1, -4, 2, 3]], np.float32)
    stats = stats_of(x)
    assert split_channels(stats.keys).tolist() == [False, True, False, True]
    assert chanmix_heads([0.1, 0.5, 0.5, 0.2], "1/4").tolist() == [False, True, False, False]
    assert chanmix_widths([5, 1, 7, 1, 7, 3, 3, 7]).tolist() == [2, 1, 3, 1, 3, 2, 2, 2]
    assert chanmix_widths([1, 1, 1, 1]).tolist() == [3, 1, 2, 2]


def test_center_mean_rounds_once_per_step():
    k = np.array([[1, 2**-24], [2, 0], [2, 0]], np.float16)
    expected = np.float16(np.float32(5 / 3))
    assert center_mean(entry(k)).tolist() == [float(expected), 0.0]
    assert center_mean(np.zeros((0, 2), np.float32)).tolist() == [0, 0]


def test_pmkvq_widths():
    # one head of 8 and 8 channels: 16 bits: 32 bytes a token; 8: 2*(8+4); 4: 2*(4+4); 2: 2*(2+4)
    sizes = {16: 3200, 8: 2400, 4: 1600, 2: 1200}
    for bits, size in sizes.items():
        assert shrink_width(100, size, 1, 8, 8) == bits
    assert shrink_width(100, 10, 1, 8, 8) == 2
    assert shrink_width(1, 10**9, 1, 8, 8, current=4) == 4
