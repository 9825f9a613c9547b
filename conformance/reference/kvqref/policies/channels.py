"""Policies that choose channels or heads: Kitty, channel-split and the ChanMix profile (FORMATS section 6)."""

import numpy as np

from ..errors import require
from ..ratio import Ratio
from ..stats import ChannelSums
from .select import largest


def boosted_channels(x: np.ndarray, boost) -> np.ndarray:
    """Kitty: the floor(D*p/q) channels of a group with the largest sum of abs."""
    sums = ChannelSums.empty(x.shape[1]).plus(x)
    return largest(list(sums.abs), Ratio.share(boost).floor_of(x.shape[1]))


def split_channels(sums: ChannelSums, r="1/2") -> np.ndarray:
    """channel-split: the floor(D*r) channels with the largest sum of abs are high."""
    return largest(list(sums.abs), Ratio.share(r).floor_of(len(sums.abs)))


def chanmix_heads(scores, r_h) -> np.ndarray:
    """ChanMix: the floor(n*r_h) heads [layer*head] with the highest retrieval score have 4 bits."""
    values = [float(s) for s in scores]
    require(all(v == v for v in values), "a retrieval score is NaN")
    return largest(values, Ratio.share(r_h).floor_of(len(values)))


def chanmix_widths(spread, share="1/4") -> np.ndarray:
    """ChanMix, other heads: 3 bits for the widest channels, 1 bit for as many narrowest, 2 bits between."""
    values = [float(v) for v in spread]
    require(all(v == v for v in values), "a range is NaN")
    count = Ratio.share(share).floor_of(len(values))
    require(2 * count <= len(values), f"share {share} is above one half")
    wide = largest(values, count)
    narrow = largest([float("-inf") if wide[i] else -v for i, v in enumerate(values)], count)
    return np.where(wide, 3, np.where(narrow, 1, 2))
