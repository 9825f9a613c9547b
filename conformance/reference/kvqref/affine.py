"""The affine quantizer of FORMATS section 2.1.

`levels` may be one number or an array that broadcasts against the parameters; one level is width 0.
"""

import numpy as np

from .fp import F32, plus_zero


def affine_parameters(mn, mx, levels, midpoint, fmt) -> tuple[np.ndarray, np.ndarray]:
    """Stored s and z of vectors with minimum mn and maximum mx; `midpoint` may be an array of booleans too."""
    L = np.asarray(levels, F32)
    span = mx - mn
    ends = span / np.maximum(L - F32(1), F32(1)), mn
    middles = span / L, ((F32(2) * L - F32(1)) * mn + mx) / (F32(2) * L)
    s = np.where(midpoint, middles[0], ends[0])
    z = np.where(midpoint, middles[1], ends[1])
    s = np.where(L == 1, F32(0), s)
    z = np.where(L == 1, (mn + mx) / F32(2), z)
    return fmt.store(s), fmt.store(z)


def affine_codes(x: np.ndarray, s, z, levels) -> np.ndarray:
    """Codes against the stored s and z; 0 where s is 0."""
    top = np.asarray(levels, F32) - F32(1)
    quotient = (x - z) / np.where(s == 0, F32(1), s)
    codes = np.clip(np.rint(quotient), F32(0), top)
    return np.where(s == 0, F32(0), codes).astype(np.uint8)


def affine_values(codes: np.ndarray, s, z) -> np.ndarray:
    """z + code*s, never -0."""
    return plus_zero(z + codes.astype(F32) * s)
