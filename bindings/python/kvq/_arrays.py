"""NumPy arrays as the library takes them."""

import numpy as np

_READY = frozenset(np.dtype(t) for t in (np.float16, np.float32, np.float64))
_UINT16 = np.dtype(np.uint16)
TENSORS = {"k": 0, "v": 1}
LAYOUTS = {"half": 0, "adjacent": 1}


def choice(table, value, name):
    """Number of a named choice."""
    try:
        return table[value]
    except KeyError:
        raise ValueError(f"{name} is {value!r}, must be one of {', '.join(map(repr, table))}") from None


def tensor(x, shape, bf16, name):
    """x as an array [token, head, channel] of this shape, without a copy where the library can read it as it is."""
    if type(x) is not np.ndarray:
        x = np.asarray(x)
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}, must be {shape}: [tokens, heads, channels]")
    dtype = x.dtype
    if dtype not in _READY:
        x = _converted(x, bf16, name)
    strides = x.strides
    if x.size and (strides[2] != x.itemsize or strides[0] <= 0 or strides[1] <= 0):
        x = np.ascontiguousarray(x)  # the library knows no negative strides, and 0 means "packed" to it
    return x


def _converted(x, bf16, name):
    if x.dtype == _UINT16:
        if bf16:
            return x
        raise TypeError(f"{name} is uint16: pass bf16=True if that is bfloat16")
    if x.dtype.name == "bfloat16":
        return x.view(_UINT16)
    native = x.dtype.newbyteorder("=")
    if native in _READY:
        return x.astype(native)
    raise TypeError(f"{name} is {x.dtype}, must be float16, float32, float64 or bfloat16")


def rows(x, bf16, name, heads=1):
    """x [tokens, channels] or [tokens, heads, channels] as a tensor."""
    x = np.asarray(x)
    if x.ndim == 2:
        x = x[:, None, :]
    if x.ndim != 3 or x.shape[1] != heads:
        raise ValueError(f"{name} has shape {x.shape}, must be [tokens, {heads}, channels]")
    return tensor(x, x.shape, bf16, name)


def vector(x, dtype, length, name):
    """x as a contiguous one-dimensional array of this type, or None; length None: any."""
    if x is None:
        return None
    x = np.ascontiguousarray(x, dtype)
    if x.ndim != 1 or length not in (None, len(x)):
        raise ValueError(f"{name} has shape {x.shape}, must be ({'any' if length is None else length},)")
    return x


def recipe_data(bits, scores, budgets):
    """The arrays of kvq_recipe_data and their lengths, in turn: flat, of any nesting, or None."""
    arguments = []
    for x, dtype in ((bits, np.uint8), (scores, np.float64), (budgets, np.uint64)):
        x = None if x is None else np.ascontiguousarray(x, dtype).reshape(-1)
        arguments += [x, 0 if x is None else len(x)]
    return arguments


def sized(function, *arguments, guess=512):
    """Result of a function that writes (buf, cap, needed) as its last argument: the bytes, and what else it returns."""
    buffer = bytearray(guess)
    result = function(*arguments, buffer)
    needed = result[0] if isinstance(result, (list, tuple)) else result
    if needed > len(buffer):
        buffer = bytearray(needed)
        result = function(*arguments, buffer)
    data = bytes(memoryview(buffer)[:needed])
    return (data, *result[1:]) if isinstance(result, (list, tuple)) else data


def text(function, *arguments):
    """As sized(), for text."""
    return sized(function, *arguments)[:-1].decode()
