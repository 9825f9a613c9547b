"""How stored parameters (s, z, h) become bytes: fp16, e4m3 and e5m3 (FORMATS sections 2.2 and 5)."""

import numpy as np

from .errors import intact
from .fp import F32, hp, plus_zero


class Fp16:
    """Two bytes, hp rounding."""

    size = 2

    @staticmethod
    def store(x: np.ndarray) -> np.ndarray:
        """The value that storage keeps of x, as float32."""
        return plus_zero(hp(x))

    @staticmethod
    def encode(values: np.ndarray) -> bytes:
        return values.astype("<f2").tobytes()

    @staticmethod
    def decode(data: bytes) -> np.ndarray:
        """float32 values, the sign of zero kept so that the caller can refuse -0."""
        values = np.frombuffer(data, "<f2").astype(F32)
        intact(bool(np.isfinite(values).all()), "a parameter is not finite")
        return values


def _nearest_code(table: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Index of the nearest entry of an ascending table, ties to the even index, saturating at the top."""
    x = x.astype(np.float64)
    low = np.clip(np.searchsorted(table, x, side="right") - 1, 0, len(table) - 2)
    middle = (table[low] + table[low + 1]) / 2
    up = (x > middle) | ((x == middle) & (low % 2 == 1))
    return (low + up).astype(np.uint8)


def _e4m3_magnitudes() -> np.ndarray:
    code = np.arange(127)
    e, m = code >> 3, code & 7
    return np.where(e == 0, m / 8 * 2.0**-6, (1 + m / 8) * 2.0 ** (e - 7))


def _e5m3_values() -> np.ndarray:
    code = np.arange(256)
    e, m = code >> 3, code & 7
    return np.where(e == 0, m / 8 * 2.0**-19, (1 + m / 8) * 2.0 ** (e - 20))


class E4m3:
    """One byte, FP8 E4M3: bias 7, subnormals, saturating at 448, 0x7F and 0xFF never written."""

    size = 1
    magnitudes = _e4m3_magnitudes()

    @classmethod
    def _code(cls, x: np.ndarray) -> np.ndarray:
        code = _nearest_code(cls.magnitudes, np.abs(x))
        negative = (x < 0) & (code != 0)
        return code | (negative.astype(np.uint8) << 7)

    @classmethod
    def _value(cls, code: np.ndarray) -> np.ndarray:
        magnitude = cls.magnitudes[code & 0x7F].astype(F32)
        return np.where(code & 0x80, -magnitude, magnitude)

    @classmethod
    def store(cls, x: np.ndarray) -> np.ndarray:
        return cls._value(cls._code(x))

    @classmethod
    def encode(cls, values: np.ndarray) -> bytes:
        return cls._code(values).tobytes()

    @classmethod
    def decode(cls, data: bytes) -> np.ndarray:
        code = np.frombuffer(data, np.uint8)
        intact(not ((code & 0x7F) == 0x7F).any(), "0x7F or 0xFF among E4M3 parameters")
        return cls._value(code)


class E5m3:
    """One byte e*8 + m without a sign, saturating at 3840 (2.2)."""

    size = 1
    table = _e5m3_values()

    @classmethod
    def store(cls, x: np.ndarray) -> np.ndarray:
        return cls.table[_nearest_code(cls.table, x)].astype(F32)

    @classmethod
    def encode(cls, values: np.ndarray) -> bytes:
        return _nearest_code(cls.table, values).tobytes()

    @classmethod
    def decode(cls, data: bytes) -> np.ndarray:
        return cls.table[np.frombuffer(data, np.uint8)].astype(F32)


def decode_nonnegative(fmt, data: bytes) -> np.ndarray:
    """Row scalars h: negative values and -0 are refused."""
    values = fmt.decode(data)
    intact(not np.signbit(values).any(), "h is negative or -0")
    return values


def encode_affine(fmt, s: np.ndarray, z: np.ndarray) -> bytes:
    """s, z of every vector, in that order."""
    return fmt.encode(np.stack([s, z], axis=-1))


def decode_affine(fmt, data: bytes, shape: tuple) -> tuple[np.ndarray, np.ndarray]:
    """s and z; s must not be negative or -0, a z of -0 decodes to +0."""
    both = fmt.decode(data).reshape(shape + (2,))
    s, z = both[..., 0], both[..., 1]
    intact(not np.signbit(s).any(), "s is negative or -0")
    return s, plus_zero(z)
