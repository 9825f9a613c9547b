"""Exact statistics of keys, queries and values (FORMATS section 6).

A nonnegative fp32 value v adds floor(v * 2^24) to its accumulator; accumulators are Python integers.
"""

from dataclasses import dataclass, replace

import numpy as np

from .fp import F32

UNIT = 1 << 24


def exact_sum(terms: np.ndarray) -> np.ndarray:
    """Sum of int64 terms over axis 0 as Python integers: halves of 32 bits cannot overflow."""
    low = (terms & 0xFFFFFFFF).sum(axis=0, dtype=np.int64)
    high = (terms >> 32).sum(axis=0, dtype=np.int64)
    return low.astype(object) + high.astype(object) * (1 << 32)


def fixed(v: np.ndarray) -> np.ndarray:
    """floor(v * 2^24); exact, the product of an fp32 value and a power of two is."""
    return np.floor(v.astype(np.float64) * UNIT).astype(np.int64)


@dataclass(frozen=True)
class PairSums:
    """Sums over tokens of the norm (first) and the squared norm (second) of every pair."""

    first: np.ndarray
    second: np.ndarray
    count: int

    @staticmethod
    def empty(pairs: int) -> "PairSums":
        zero = np.zeros(pairs, object)
        return PairSums(zero, zero, 0)

    def plus(self, x: np.ndarray, pairs: np.ndarray) -> "PairSums":
        """With the entered rows x [tokens, dim] added."""
        u, v = x[:, pairs[:, 0]], x[:, pairs[:, 1]]
        r2 = u * u + v * v
        return PairSums(self.first + exact_sum(fixed(np.sqrt(r2))), self.second + exact_sum(fixed(r2)), self.count + len(x))


@dataclass(frozen=True)
class ChannelSums:
    """Per channel: sum of x * 2^24, sum of its absolute value, minimum, maximum."""

    sum: np.ndarray
    abs: np.ndarray
    min: np.ndarray
    max: np.ndarray
    count: int

    @staticmethod
    def empty(channels: int) -> "ChannelSums":
        zero = np.zeros(channels, object)
        return ChannelSums(zero, zero, np.full(channels, np.inf, F32), np.full(channels, -np.inf, F32), 0)

    def plus(self, x: np.ndarray) -> "ChannelSums":
        """With the entered rows x [tokens, dim] added."""
        if len(x) == 0:
            return self
        terms = fixed(x)
        return ChannelSums(
            self.sum + exact_sum(terms),
            self.abs + exact_sum(np.abs(terms)),
            np.minimum(self.min, x.min(axis=0)),
            np.maximum(self.max, x.max(axis=0)),
            self.count + len(x),
        )


@dataclass(frozen=True)
class HeadStats:
    """Statistics of one layer and KV head; the pair sums exist where the head has pairs."""

    pairs: np.ndarray | None
    key_pairs: PairSums | None
    query_pairs: PairSums | None
    keys: ChannelSums
    values: ChannelSums

    @staticmethod
    def empty(dim_k: int, dim_v: int, pairs: np.ndarray | None) -> "HeadStats":
        sums = None if pairs is None else PairSums.empty(len(pairs))
        return HeadStats(pairs, sums, sums, ChannelSums.empty(dim_k), ChannelSums.empty(dim_v))

    def with_keys(self, k: np.ndarray) -> "HeadStats":
        pair_sums = self.key_pairs and self.key_pairs.plus(k, self.pairs)
        return replace(self, key_pairs=pair_sums, keys=self.keys.plus(k))

    def with_values(self, v: np.ndarray) -> "HeadStats":
        return replace(self, values=self.values.plus(v))

    def with_queries(self, q: np.ndarray) -> "HeadStats":
        """q [query heads of the KV head, tokens, dim]."""
        pair_sums = self.query_pairs and self.query_pairs.plus(q.reshape(-1, q.shape[-1]), self.pairs)
        return replace(self, query_pairs=pair_sums)
