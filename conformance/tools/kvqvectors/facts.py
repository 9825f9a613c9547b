"""What must hold whatever the reference says: bounds and sizes from float64 and the text of FORMATS alone.

Nothing here is taken from kvqref; a wrong reference stops the generation with the name of the test.
"""

import math

import numpy as np

# Section 4: digits and bits of a word
WORD = {2: (1, 1), 3: (5, 8), 4: (1, 2), 5: (3, 7), 6: (5, 13), 7: (6, 17), 8: (1, 3), 16: (1, 4)}
WORD |= {32: (1, 5), 64: (1, 6), 128: (1, 7), 256: (1, 8)}


def stream_bytes(n: int, levels: int) -> int:
    digits, bits = WORD[levels]
    short = n % digits
    return math.ceil((n // digits * bits + math.ceil(math.log2(levels**short) - 1e-9)) / 8)


def half(x) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.clip(np.float64(np.asarray(x, np.float32).astype(np.float16)), -65504, 65504)


def _small_float(exponents: int, bias: int, top: float) -> np.ndarray:
    values = [m / 8 * 2.0 ** (1 - bias) for m in range(8)]
    values += [(1 + m / 8) * 2.0 ** (e - bias) for e in range(1, exponents) for m in range(8)]
    return np.array([v for v in values if v <= top])


_E4M3 = _small_float(16, 7, 448)


def e4m3(x) -> np.ndarray:
    """Nearest value (any of two at a tie: only bounds are made of it)."""
    x = np.asarray(x, np.float64)
    return np.sign(x) * _E4M3[np.abs(np.abs(x)[..., None] - _E4M3).argmin(axis=-1)]


def affine_bound(x: np.ndarray, levels, midpoint=False, store=half) -> np.ndarray:
    """Section 2.1's error bound of vectors along axis 1 of x [.., n, ..]; `levels` broadcasts, 1 is width 0."""
    mn, mx = x.min(axis=1), x.max(axis=1)
    L = np.asarray(levels, np.float64)
    ends_s = (mx - mn) / np.maximum(L - 1, 1)
    middle_s, middle_z = (mx - mn) / L, ((2 * L - 1) * mn + mx) / (2 * L)
    s32, z32 = np.where(midpoint, middle_s, ends_s), np.where(midpoint, middle_z, mn)
    s, z = store(s32), store(z32)
    reach = np.where(midpoint, L - 0.5, L - 1)
    bound = s / 2 + reach * np.maximum(0, s32 - s) + np.abs(z - z32)
    flat = (mx - mn) / 2 + np.abs(store((mx + mn) / 2) - (mx + mn) / 2)
    bound = np.where(L == 1, flat, bound)
    return bound + 2.0**-20 * np.maximum(np.abs(mn), np.abs(mx)) + 2.0**-24


def within(x: np.ndarray, values: np.ndarray, bound: np.ndarray) -> None:
    worst = (np.abs(x - values) - bound).max(initial=-1)
    assert worst <= 0, f"an error exceeds its bound by {worst}"


def groups_within(x, values, group: int, levels, midpoint=False, store=half) -> None:
    """Per-channel quantizers: x [tokens, dim], levels and midpoint per channel or one for all."""
    y, v = (a.reshape(-1, group, a.shape[1]) for a in (x, values))
    within(y, v, affine_bound(y, levels, midpoint, store)[:, None])


def rows_within(x, values, width: int, levels: int) -> None:
    """Per-token affine quantizers without rotation."""
    y, v = (a.reshape(-1, width) for a in (x, values))
    within(y, v, affine_bound(y, levels)[:, None])


# Relative error energy of the normal book, times a slack for rows that are not normal
BOOK_ENERGY = {2: 0.3634, 3: 0.1902, 4: 0.1175, 5: 0.0799, 6: 0.058, 7: 0.044, 8: 0.0345, 16: 0.0095, 32: 0.0025, 64: 0.00065}


def book_rows_close(x: np.ndarray, values: np.ndarray, levels: int, slack: float) -> None:
    """Rows of normal data after rotation: the table of Lloyd-Max errors; a row scaled to its true norm has a little more."""
    error = ((x - values) ** 2).sum() / (x**2).sum()
    expected = BOOK_ENERGY.get(levels, 0.0004)
    assert error <= 1.2 * slack * expected + 1e-6, f"error energy {error}, about {expected} expected"


def norms_kept(x: np.ndarray, values: np.ndarray) -> None:
    """scale=matched: the decoded row has the norm of the row, to the rounding of h, unless h saturates."""
    n, m = np.sqrt((x**2).sum(axis=1)), np.sqrt((values**2).sum(axis=1))
    large = n > 2e4 * np.sqrt(x.shape[1])
    off = np.abs(n - m) > n * 2.0**-10 + 2.0**-24 * np.sqrt(x.shape[1])
    assert not (off & ~large).any(), "a decoded row has another norm"


def polar_within(x, values, pairs, group: int, radius: int, angle: int) -> None:
    """The error of radius and angle together, in float64."""
    u, v = x[:, pairs[:, 0]], x[:, pairs[:, 1]]
    rho, theta = half(np.hypot(u, v)), half(np.mod(np.arctan2(v, u), 2 * np.pi))
    blocks = [a.reshape(-1, group, a.shape[1]) for a in (rho, theta)]
    d_rho = affine_bound(blocks[0], radius)[:, None]
    d_theta = affine_bound(blocks[1], angle)[:, None] + 2.0**-8  # fp16 angles up to 2 pi
    bound = (d_rho + (blocks[0] + d_rho) * np.minimum(d_theta, 2)).reshape(rho.shape)
    off = np.hypot(u - values[:, pairs[:, 0]], v - values[:, pairs[:, 1]])
    lost = np.maximum(0, np.hypot(u, v) - 65504)  # a radius saturates like any stored number
    assert (off <= bound + lost + rho * 2.0**-10 + 2.0**-20).all(), "a pair is farther away than radius and angle allow"


def pairs_of(dim: int, layout: str = "half", rotary_dim: int = 0, rotary_first: int = 0) -> np.ndarray:
    """Section 5's pairs: the rotary part by layout, then the other channels by neighbours."""
    r = rotary_dim or dim
    part = range(rotary_first, rotary_first + r)
    if layout == "half":
        pairs = [(part[i], part[i + r // 2]) for i in range(r // 2)]
    else:
        pairs = [(part[2 * i], part[2 * i + 1]) for i in range(r // 2)]
    rest = [ch for ch in range(dim) if ch not in part]
    return np.array(pairs + list(zip(rest[::2], rest[1::2])))
