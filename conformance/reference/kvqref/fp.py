"""fp32 and fp16 arithmetic (FORMATS section 1).

Every array here is float32, so every numpy operation is one correctly rounded fp32 operation; sums
over elements use `tree`, never numpy's own reduction, whose order is not defined by the format.
"""

import math

import numpy as np

from .errors import KvqError

F32 = np.float32
HALF_MAX = F32(65504)


def hp(x) -> np.ndarray:
    """fp32 to fp16, nearest even, clamped to +-65504 (1.2); returned as float32."""
    with np.errstate(over="ignore"):
        half = np.asarray(x, F32).astype(np.float16)
    return np.clip(half.astype(F32), -HALF_MAX, HALF_MAX)


def plus_zero(x: np.ndarray) -> np.ndarray:
    """Turn -0 into +0 (1.5)."""
    return x + F32(0)


def to_f32(x) -> np.ndarray:
    """float(x): the conversion to fp32 that precedes the entry rule."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(F32)


def entry(x) -> np.ndarray:
    """Entry rule 1.4: hp(float(x)) + 0; NaN and infinities are refused."""
    f = to_f32(x)
    if not np.isfinite(f).all():
        raise KvqError("NONFINITE", "an element is NaN or infinite")
    return plus_zero(hp(f))


def tree(v: np.ndarray) -> np.ndarray:
    """Pairwise fp32 sum over the last axis, padded with +0 to a power of two (1.3)."""
    n = v.shape[-1]
    width = 1 << max(0, n - 1).bit_length()
    if width != n:
        padding = np.zeros(v.shape[:-1] + (width - n,), F32)
        v = np.concatenate([v, padding], axis=-1)
    while v.shape[-1] > 1:
        v = v[..., 0::2] + v[..., 1::2]
    return v[..., 0]


def c(w: int) -> np.float32:
    """The fp32 nearest to 1/sqrt(w) (2.2)."""
    return F32(1.0 / math.sqrt(w))


def f32_from_hex(text: str) -> np.float32:
    """The fp32 with the given bits, as the data files write them."""
    return np.array(int(text, 16), np.uint32).view(F32)[()]
