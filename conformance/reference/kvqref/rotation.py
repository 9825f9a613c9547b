"""splitmix64 and the signed Walsh-Hadamard rotation of a row (FORMATS section 3)."""

from functools import cache

import numpy as np

from .fp import F32, c

DEFAULT_SEED = 0x6B76715F73656564
_MASK = (1 << 64) - 1


def splitmix64(x) -> np.ndarray:
    """splitmix64 of every element of an array of integers mod 2^64."""
    x = np.atleast_1d(np.asarray(x, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@cache
def signs(w: int, pass_: int, group: int, tensor: int, seed: int) -> np.ndarray:
    """+1 or -1 per channel; group is the row's index k, tensor 0 for keys and 1 for values."""
    words = splitmix64([(seed ^ (tensor << 48 | pass_ << 40 | group << 16 | j)) & _MASK for j in range((w + 63) // 64)])
    i = np.arange(w)
    negative = (words[i // 64] >> (i % 64).astype(np.uint64)) & np.uint64(1)
    return np.where(negative == 1, F32(-1), F32(1))


def _butterfly(y: np.ndarray, first: int, p: int) -> None:
    """In place on channels [first, first + p): distances 1, 2, ..., p/2, then the factor c(p)."""
    part = y[:, first : first + p]
    d = 1
    while d < p:
        v = part.reshape(len(y), p // (2 * d), 2, d)
        a, b = v[:, :, 0], v[:, :, 1]
        part = np.stack([a + b, a - b], axis=2).reshape(len(y), p)
        d *= 2
    y[:, first : first + p] = part * c(p)


def _passes(w: int) -> list[tuple[int, int, int]]:
    """(pass, first channel, p) in the order of the forward rotation."""
    p = 1 << (w.bit_length() - 1)
    return [(0, 0, p)] + ([(1, w - p, p)] if p < w else [])


def rotate(x: np.ndarray, group: int, tensor: int, seed: int) -> np.ndarray:
    """Rows of w channels -> rotated rows."""
    y = x
    for q, first, p in _passes(x.shape[1]):
        y = y * signs(x.shape[1], q, group, tensor, seed)
        _butterfly(y, first, p)
    return y


def unrotate(y: np.ndarray, group: int, tensor: int, seed: int) -> np.ndarray:
    """The inverse of `rotate`: pass 1 (if any), then pass 0; butterfly, factor, signs."""
    x = y
    for q, first, p in reversed(_passes(y.shape[1])):
        x = x.copy()
        _butterfly(x, first, p)
        x = x * signs(y.shape[1], q, group, tensor, seed)
    return x
