"""Section 1, 3 and 4: roundings, sums, small floats, rotation, bit streams."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from kvqref import bits
from kvqref.errors import KvqError
from kvqref.fp import entry, hp, tree
from kvqref.param_formats import E4m3, E5m3
from kvqref.rotation import rotate, signs, splitmix64, unrotate


def test_hp_rounds_to_even_and_clamps():
    x = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, -1e9, 2**-25, 3 * 2**-25], np.float32)
    assert hp(x).tolist() == [1, 1 + 2**-9, 65504, 65504, -65504, 0, 2**-23]


def test_entry_goes_through_fp32_and_refuses_nonfinite():
    # 1 + 2^-11 + 2^-40 is above the tie, but fp32 drops the last term first
    assert entry(np.array([1 + 2**-11 + 2**-40]))[0] == 1
    assert not np.signbit(entry(np.array([-0.0])))[0]
    for bad in (np.nan, np.inf, 1e300):
        with pytest.raises(KvqError, match="NONFINITE"):
            entry(np.array([bad]))


def test_tree_adds_neighbours_first():
    big = np.float32(2**24)
    # ((big + 1) + (1 + 1)): big + 1 ties to big, then + 2
    assert tree(np.array([big, 1, 1, 1], np.float32)) == big + 2
    # padded to 4: (big + 1) + (1 + 0) = big + 1 = big
    assert tree(np.array([big, 1, 1], np.float32)) == big
    assert tree(np.array([3], np.float32)) == 3


def _reference_nearest(values, x):
    """Exhaustive: smallest distance, ties to the even code."""
    return min(range(len(values)), key=lambda i: (abs(Fraction(float(values[i])) - Fraction(float(x))), i % 2))


def _probes(values):
    mids = [(a + b) / 2 for a, b in zip(values, values[1:])]
    near = [np.nextafter(np.float32(m), d) for m in mids for d in (np.float32(0), np.float32(1e9))]
    return np.array(list(values) + mids + near + [1e6, 1e-30], np.float32)


def test_e5m3_values_and_rounding():
    values = [m / 8 * 2.0**-19 if e == 0 else (1 + m / 8) * 2.0 ** (e - 20) for e in range(32) for m in range(8)]
    assert values[-1] == 3840
    x = _probes(values)
    assert list(E5m3.encode(x)) == [_reference_nearest(values, v) for v in x]
    assert E5m3.decode(bytes(range(256))).tolist() == values


def test_e4m3_values_and_rounding():
    values = [m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]
    assert values[-1] == 448
    x = _probes(values)
    assert list(E4m3.encode(x)) == [_reference_nearest(values, v) for v in x]
    # a negative value that rounds to zero is +0
    assert E4m3.encode(np.array([-(2.0**-11), -1, -1000], np.float32)) == bytes([0, 0x80 | 0x38, 0xFE])
    for nan in (0x7F, 0xFF):
        with pytest.raises(KvqError, match="CORRUPT"):
            E4m3.decode(bytes([nan]))


def test_splitmix64_known_values():
    # the published first outputs of splitmix64 seeded with 1234567: state advances by the golden gamma
    gamma = 0x9E3779B97F4A7C15
    states = [(1234567 + i * gamma) % 2**64 for i in range(3)]
    assert [int(v) for v in splitmix64(states)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def _sign_matrix(w, q, k, t, seed):
    def mix(x):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) % 2**64
        return x ^ x >> 31

    return np.diag([-1.0 if mix(seed ^ (t << 48 | q << 40 | k << 16 | i // 64)) >> (i % 64) & 1 else 1.0 for i in range(w)])


def _rotation_matrix(w, k, t, seed):
    """float64, from the Sylvester matrix."""
    p = 2 ** int(math.log2(w))
    h = np.ones((1, 1))
    while len(h) < p:
        h = np.kron(np.array([[1, 1], [1, -1]]), h)
    first = np.eye(w)
    first[:p, :p] = h / math.sqrt(p)
    m = first @ _sign_matrix(w, 0, k, t, seed)
    if p < w:
        second = np.eye(w)
        second[w - p :, w - p :] = h / math.sqrt(p)
        m = second @ _sign_matrix(w, 1, k, t, seed) @ m
    return m


@pytest.mark.parametrize("w", [1, 2, 6, 40, 46, 64, 72, 80, 90, 96, 112, 128, 192, 320])
def test_rotation_is_the_signed_hadamard_matrix(w):
    m = _rotation_matrix(w, 3, 1, 77)
    assert np.abs(m @ m.T - np.eye(w)).max() < 1e-12
    got = rotate(np.eye(w, dtype=np.float32), 3, 1, 77)
    assert got.dtype == np.float32
    assert np.abs(got - m.T).max() < 1e-6
    assert np.abs(unrotate(got, 3, 1, 77) - np.eye(w)).max() < 1e-6


def test_signs_differ_by_side_pass_and_group():
    base = signs(128, 0, 0, 0, 5)
    for other in (signs(128, 1, 0, 0, 5), signs(128, 0, 1, 0, 5), signs(128, 0, 0, 1, 5), signs(128, 0, 0, 0, 6)):
        assert 30 < (base != other).sum() < 98


@pytest.mark.parametrize("levels", [3, 5, 6, 7])
def test_every_full_word_round_trips(levels):
    m, width = {3: (5, 8), 5: (3, 7), 6: (5, 13), 7: (6, 17)}[levels]
    digits = np.array(list(itertools.product(range(levels), repeat=m)), np.uint8)
    packed = bits.pack(digits, levels)
    words = [int.from_bytes(row.tobytes(), "little") for row in packed]
    assert words == [sum(int(d) * levels**i for i, d in enumerate(row)) for row in digits]
    assert max(words) < 2**width
    assert (bits.unpack(packed, m, levels) == digits).all()


def test_mixed_radix_stream_by_hand():
    # base 3: 5 digits in 8 bits; 7 digits = one word and a short one of 2 digits in 4 bits
    codes = np.array([[2, 1, 0, 2, 1, 2, 2]], np.uint8)
    first = 2 + 3 * 1 + 27 * 2 + 81 * 1
    assert bits.pack(codes, 3).tolist() == [[first, 8]]
    assert bits.stream_bits(7, 3) == 12
    # base 5: 3 digits in 7 bits, two words span bytes
    codes = np.array([[4, 4, 4, 1, 2, 3]], np.uint8)
    stream = 124 | (1 + 10 + 75) << 7
    assert bits.pack(codes, 5).tobytes() == stream.to_bytes(2, "little")


@pytest.mark.parametrize(
    "data, n, levels", [([243], 5, 3), ([9], 2, 3), ([0x10], 2, 3), ([125], 3, 5), ([0x80], 3, 5), ([0x08], 3, 2)]
)
def test_bad_words_and_padding_are_refused(data, n, levels):
    with pytest.raises(KvqError, match="CORRUPT"):
        bits.unpack(np.array([data], np.uint8), n, levels)
