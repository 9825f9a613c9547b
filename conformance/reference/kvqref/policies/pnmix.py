"""PN-Mix: which pairs or channels are salient (FORMATS section 6)."""

import numpy as np

from ..errors import KvqError, require
from ..ratio import Ratio
from ..stats import HeadStats
from .select import largest

PAIR_CRITERIA = ("qk-pair", "k-pair")
CHANNEL_CRITERIA = ("k-range", "k-magnitude")
CRITERIA = PAIR_CRITERIA + CHANNEL_CRITERIA


def need_sides(stats: HeadStats, keys: bool, queries: bool) -> None:
    """STATE where a needed side has no tokens."""
    missing = (keys and stats.keys.count == 0) or (queries and stats.query_pairs.count == 0)
    if missing:
        raise KvqError("STATE", "the policy needs statistics that no token has given")


def pnmix_mask(stats: HeadStats, r, criterion: str = "qk-pair") -> np.ndarray:
    """Booleans per pair (qk-pair, k-pair) or per channel (k-range, k-magnitude)."""
    require(criterion in CRITERIA, f"no PN-Mix criterion {criterion}")
    need_sides(stats, keys=True, queries=criterion == "qk-pair")
    if criterion == "qk-pair":
        values = [float(q) * float(k) for q, k in zip(stats.query_pairs.first, stats.key_pairs.first)]
    elif criterion == "k-pair":
        values = list(stats.key_pairs.first)
    elif criterion == "k-range":
        values = list(stats.keys.max.astype(np.float64) - stats.keys.min.astype(np.float64))
    else:
        values = list(stats.keys.abs)
    return largest(values, Ratio.share(r).floor_of(len(values)))
