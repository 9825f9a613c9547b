"""Scores of Block-GTQ and pair-widths per pair, in fp64 from exact sums (FORMATS section 6)."""

import numpy as np

from ..errors import require
from ..stats import UNIT, ChannelSums, HeadStats, PairSums
from .pnmix import need_sides

KEY_ONLY = ("k-only", "k-var")
QUERY_ONLY = ("q-only",)
SCORES = ("qk-avg", "qk-max", "qk-product", "k-only", "q-only", "k-var", "q-var", "q-geo", "q-range")


def _doubles(integers: np.ndarray) -> np.ndarray:
    return np.array([float(i) for i in integers])


def _mean_energy(sums: PairSums) -> np.ndarray:
    return _doubles(sums.second) / UNIT / sums.count


def _key_variance(k: np.ndarray, sums: ChannelSums, pairs: np.ndarray) -> np.ndarray:
    mean = _doubles(sums.sum) / UNIT / sums.count
    mu, mv = mean[pairs[:, 0]], mean[pairs[:, 1]]
    return np.maximum(0.0, (k - mu * mu) - mv * mv)


def _half_squared_range(sums: ChannelSums, pairs: np.ndarray) -> np.ndarray:
    spread = sums.max.astype(np.float64) - sums.min.astype(np.float64)
    ru, rv = spread[pairs[:, 0]], spread[pairs[:, 1]]
    return (ru * ru + rv * rv) / 2


def width_scores(stats: HeadStats, score: str) -> np.ndarray:
    """fp64 score of every pair."""
    require(score in SCORES, f"no score {score}")
    need_sides(stats, keys=score not in QUERY_ONLY, queries=score not in KEY_ONLY)
    if score == "q-only":
        return _mean_energy(stats.query_pairs)
    k = _mean_energy(stats.key_pairs)
    if score == "k-only":
        return k
    if score == "k-var":
        return _key_variance(k, stats.keys, stats.pairs)
    q = _mean_energy(stats.query_pairs)
    if score == "qk-avg":
        return (q + k) / 2
    if score == "qk-max":
        return np.maximum(q, k)
    if score == "qk-product":
        return np.sqrt(q * k)
    if score == "q-range":
        return q * _half_squared_range(stats.keys, stats.pairs)
    weight = np.sqrt(q) if score == "q-geo" else q
    return weight * _key_variance(k, stats.keys, stats.pairs)
