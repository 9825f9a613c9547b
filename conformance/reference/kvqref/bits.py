"""Bit streams and mixed-radix words (FORMATS section 4).

A stream is one row of a 2-d array: many streams of equal length are packed at once.
"""

import numpy as np

from .errors import intact

# L -> (digits per word, bits per word)
WORDS = {2: (1, 1), 3: (5, 8), 4: (1, 2), 5: (3, 7), 6: (5, 13), 7: (6, 17), 8: (1, 3),
         16: (1, 4), 32: (1, 5), 64: (1, 6), 128: (1, 7), 256: (1, 8)}  # fmt: skip


def _short_bits(levels: int, digits: int) -> int:
    """The fewest bits that hold levels^digits values."""
    return (levels**digits - 1).bit_length()


def stream_bits(n: int, levels: int) -> int:
    """Bits of n codes, without the padding at the end."""
    m, width = WORDS[levels]
    return n // m * width + _short_bits(levels, n % m)


def stream_bytes(n: int, levels: int) -> int:
    """Bytes of a stream of n codes."""
    return (stream_bits(n, levels) + 7) // 8


def _word_bits(digits: np.ndarray, levels: int, width: int) -> np.ndarray:
    """[..., digits] -> [..., width] bits of the word, lowest first."""
    word = digits.astype(np.int64) @ levels ** np.arange(digits.shape[-1], dtype=np.int64)
    return (word[..., None] >> np.arange(width) & 1).astype(np.uint8)


def pack(codes: np.ndarray, levels: int) -> np.ndarray:
    """[streams, n] codes -> [streams, bytes] uint8."""
    streams, n = codes.shape
    m, width = WORDS[levels]
    full = n // m
    bits = _word_bits(codes[:, : full * m].reshape(streams, full, m), levels, width).reshape(streams, full * width)
    if n % m:
        short = _word_bits(codes[:, full * m :], levels, _short_bits(levels, n % m))
        bits = np.concatenate([bits, short], axis=1)
    return np.packbits(bits, axis=1, bitorder="little")


def _digits(bits: np.ndarray, levels: int, count: int) -> np.ndarray:
    """[..., width] bits -> [..., count] digits; a word of levels^count or more is refused."""
    word = bits.astype(np.int64) @ (np.int64(1) << np.arange(bits.shape[-1], dtype=np.int64))
    intact(not (word >= levels**count).any(), f"a word holds no {count} digits of base {levels}")
    return word[..., None] // levels ** np.arange(count, dtype=np.int64) % levels


def unpack(data: np.ndarray, n: int, levels: int) -> np.ndarray:
    """[streams, bytes] -> [streams, n] codes; refuses bad words and padding bits that are set."""
    streams = len(data)
    m, width = WORDS[levels]
    full = n // m
    bits = np.unpackbits(data, axis=1, bitorder="little")
    intact(not bits[:, stream_bits(n, levels) :].any(), "padding bits are set")
    codes = _digits(bits[:, : full * width].reshape(streams, full, width), levels, m).reshape(streams, full * m)
    if n % m:
        short = _digits(bits[:, full * width : stream_bits(n, levels)], levels, n % m)
        codes = np.concatenate([codes, short], axis=1)
    return codes.astype(np.uint8)
