"""Arrays of vector files (FORMATS section 10): hex or generated, into numpy and back."""

import math

import numpy as np

from .errors import require
from .fp import F32, hp, to_f32
from .rotation import splitmix64

_DTYPES = {"f16": "<f2", "bf16": "<u2", "f32": "<f4", "f64": "<f8", "i32": "<i4", "u8": "u1"}


def _bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(F32)


def _f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """Nearest even, as float32 values."""
    bits = to_f32(x).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return _bf16_to_f32(rounded.astype(np.uint16))


def _generate(shape: tuple[int, ...], gen: dict) -> np.ndarray:
    """kind splitmix: hp(float((a*u + b) * chan_mul[c] + chan_add[c])), c the last index."""
    require(gen.get("kind") == "splitmix", f"no generator {gen.get('kind')}")
    count = math.prod(shape)
    indices = np.arange(count, dtype=np.uint64) + np.uint64(int(gen["seed"]))
    u = (splitmix64(indices) >> np.uint64(40)).astype(np.float64) / 2**23 - 1
    value = (float(gen["mul"]) * u[:count] + float(gen["add"])).reshape(shape)
    if "chan_mul" in gen:
        value = value * np.array(gen["chan_mul"], np.float64)
    if "chan_add" in gen:
        value = value + np.array(gen["chan_add"], np.float64)
    return hp(to_f32(value))


def read_array(obj) -> np.ndarray | None:
    """An array object, a nested list of numbers, or None."""
    if obj is None:
        return None
    if isinstance(obj, list):
        return np.array(obj, np.float64)
    dtype, shape = obj["dtype"], tuple(obj["shape"])
    require(dtype in _DTYPES, f"no dtype {dtype}")
    if "gen" in obj:
        value = _generate(shape, obj["gen"])
        return _f32_to_bf16(value) if dtype == "bf16" else value.astype(_DTYPES[dtype])
    flat = np.frombuffer(bytes.fromhex(obj["hex"]), _DTYPES[dtype])
    require(flat.size == math.prod(shape), f"hex holds {flat.size} elements, not {shape}")
    return (_bf16_to_f32(flat) if dtype == "bf16" else flat).reshape(shape)


def write_array(x: np.ndarray, dtype: str) -> dict:
    """The array object with hex bytes."""
    data = np.ascontiguousarray(x).astype(_DTYPES[dtype])
    return {"dtype": dtype, "shape": list(data.shape), "hex": data.tobytes().hex()}
