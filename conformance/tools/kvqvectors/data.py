"""Inputs of vectors: generated arrays, arrays in hex, and a deterministic stream of numbers for choices."""

import numpy as np

from kvqref.arrays import read_array, write_array
from kvqref.rotation import splitmix64


def made(seed: int, shape, mul=1.0, add=0.0, chan_mul=None, chan_add=None, dtype="f16") -> dict:
    """A generated array: uniform in [add - mul, add + mul), then by channel."""
    gen = {"kind": "splitmix", "seed": seed if seed < 1 << 53 else str(seed), "mul": mul, "add": add}
    if chan_mul is not None:
        gen["chan_mul"] = [float(v) for v in chan_mul]
    if chan_add is not None:
        gen["chan_add"] = [float(v) for v in chan_add]
    return {"dtype": dtype, "shape": list(shape), "gen": gen}


def hexed(values, dtype="f16") -> dict:
    """Exactly these values."""
    values = np.asarray(values, np.float64)
    if dtype == "bf16":
        bits = np.ascontiguousarray(values.astype(np.float32)).view(np.uint32)
        assert not (bits & 0xFFFF).any(), "these values are no bf16"
        return {"dtype": "bf16", "shape": list(values.shape), "hex": (bits >> 16).astype("<u2").tobytes().hex()}
    return write_array(values, dtype)


def array(obj) -> np.ndarray:
    """float64 values of either."""
    return np.asarray(read_array(obj), np.float64)


def entered(obj) -> np.ndarray:
    """What section 1.4 makes of an array, by numpy alone: float64 holding fp16 values."""
    with np.errstate(over="ignore"):
        half = np.asarray(read_array(obj)).astype(np.float32).astype(np.float16).astype(np.float64)
    return np.clip(half, -65504, 65504)


class Stream:
    """Numbers that are the same on every machine and numpy."""

    def __init__(self, seed: int):
        self._at = seed << 32

    def words(self, count: int) -> np.ndarray:
        words = splitmix64(np.arange(count, dtype=np.uint64) + np.uint64(self._at))
        self._at += count
        return words

    def uniform(self, *shape: int) -> np.ndarray:
        """In [-1, 1)."""
        count = int(np.prod(shape))
        return ((self.words(count) >> np.uint64(40)).astype(np.float64) / 2**23 - 1).reshape(shape)

    def below(self, limit: int) -> int:
        return int(self.words(1)[0] % np.uint64(limit))

    def choice(self, options):
        return options[self.below(len(options))]

    def halves(self, *shape: int) -> np.ndarray:
        """Finite fp16 values of all magnitudes, as float64."""
        bits = (self.words(int(np.prod(shape))) >> np.uint64(48)).astype(np.uint16)
        values = bits.view(np.float16).astype(np.float64)
        return np.where(np.isfinite(values), values, 0.0).reshape(shape)

    def normal(self, *shape: int) -> np.ndarray:
        """Close enough to normal: a sum of twelve uniforms, rounded to fp16."""
        return np.float64(np.float16(self.uniform(12, *shape).sum(axis=0) / 2))
