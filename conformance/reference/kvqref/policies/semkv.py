"""SemKV: which tokens are of the high class (FORMATS section 6)."""

import numpy as np

from ..errors import require
from ..fp import to_f32
from ..ratio import Ratio
from ..rotation import splitmix64


def check_scores(scores, tokens: int) -> np.ndarray:
    """fp32 scores of so many tokens; missing ones and NaN are INVALID, infinities are numbers."""
    require(scores is not None, "SemKV needs a score for every token")
    scores = to_f32(scores)
    require(scores.shape == (tokens,), f"{scores.shape} scores for {tokens} tokens")
    require(not np.isnan(scores).any(), "a score is NaN")
    return scores


def _highest(scores: np.ndarray, count: int) -> np.ndarray:
    """Flags of the highest scores, ties to the lower index."""
    flags = np.zeros(len(scores), bool)
    flags[np.argsort(-scores, kind="stable")[:count]] = True
    return flags


def prompt_flags(scores, r) -> np.ndarray:
    """A prompt (each commit): floor(r*T) tokens are high."""
    scores = check_scores(scores, len(scores))
    return _highest(scores, Ratio.share(r).floor_of(len(scores)))


def block_flags(scores, r) -> np.ndarray:
    """A block of generated tokens, or the rest at the end of a turn: round_half_even(r*n) are high."""
    scores = check_scores(scores, len(scores))
    return _highest(scores, Ratio.share(r).half_even_of(len(scores)))


def random_scores(seed: int, tokens: int) -> np.ndarray:
    """The `random` indicator: float(splitmix64(seed + index) >> 40)."""
    indices = [(seed + i) & 0xFFFFFFFFFFFFFFFF for i in range(tokens)]
    return (splitmix64(np.array(indices, np.uint64)) >> np.uint64(40)).astype(np.float32)
