"""The mean that centred keys are stored without (FORMATS section 2.2)."""

import numpy as np

from ..fp import F32, hp, plus_zero
from ..stats import UNIT, ChannelSums


def center_mean(k: np.ndarray) -> np.ndarray:
    """mu per channel over entered rows [tokens, dim]; 0 without tokens."""
    sums = ChannelSums.empty(k.shape[1]).plus(k)
    mean = np.array([float(s) for s in sums.sum]) / UNIT / max(sums.count, 1)
    return plus_zero(hp(mean.astype(F32)))
