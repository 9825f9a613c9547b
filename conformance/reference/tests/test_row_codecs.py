"""Sections 2.2 to 2.5: codebook rows, centring, polar pairs, the shrink chain."""

import math
import struct

import numpy as np
import pytest

from kvqref import Head, KvqError, codec
from kvqref.books import books
from kvqref.polar_math import atan2p, sincosp


def halves(*values):
    return np.array(values, "<f2").tobytes()


OPTIMA = {2: 0.36338, 3: 0.19017, 4: 0.11748, 5: 0.07994, 6: 0.05798, 7: 0.04400, 8: 0.03455,
          16: 0.009501, 32: 0.0025047, 64: 0.00064424}  # fmt: skip


def _normal_mse(book):
    """Mean squared error on N(0,1), by closed integrals over the cells."""
    edges = [-np.inf, *book.thresholds.astype(float), np.inf]
    phi = lambda x: 0.0 if math.isinf(x) else math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    cdf = lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2)))
    xphi = lambda x: 0.0 if math.isinf(x) else x * phi(x)
    total = 0.0
    for a, b, m in zip(edges, edges[1:], book.levels):
        v, p = float(book.scale) * int(m), cdf(b) - cdf(a)
        total += p - xphi(b) + xphi(a) - 2 * v * (phi(a) - phi(b)) + v * v * p
    return total


def test_books_are_antisymmetric_and_near_the_optimum():
    assert sorted(books()) == [2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256]
    for levels, book in books().items():
        assert (book.levels == -book.levels[::-1]).all() and (np.diff(book.levels) > 0).all()
        middles = float(book.scale) * (book.levels[1:] + book.levels[:-1]) / 2
        assert np.allclose(book.thresholds, middles, rtol=2e-7, atol=0)
        slack = {16: 1.001, 32: 1.01, 64: 1.03}.get(levels, 1.0001)
        if levels in OPTIMA:
            assert _normal_mse(book) <= OPTIMA[levels] * slack + 5e-6


def test_two_level_row_by_hand():
    # no rotation; norm 5 exact, book -1, +1 with a = 0.7978846
    c = codec("lloyd(levels=2,rotate=0)", Head(4))
    wire = c.encode(np.array([[3, -4, 0, 0]]))
    # codes 1 0 0 0 (zero goes down); matched: 5 / (a * 2)
    assert wire == b"\x01" + halves(5 / (0.7978846 * 2))
    out = c.decode(wire, 1)[0].astype(float)
    assert np.linalg.norm(out) == pytest.approx(5, rel=1e-3)


@pytest.mark.parametrize("levels", [2, 3, 4, 5, 8, 16, 64, 128])
def test_scalars_by_their_definition(levels, rng):
    x = rng.standard_normal((20, 96)).astype(np.float16).astype(float)
    book = books()[levels]
    a = float(book.scale)
    for scale in ("plain", "matched", "ls", "unbiased"):
        c = codec(f"lloyd(levels={levels},scale={scale},rotate=0)", Head(96))
        wire = c.encode(x)
        h = np.frombuffer(wire[-40:], "<f2").astype(float)
        n = np.linalg.norm(x, axis=1)
        sigma = n / math.sqrt(96)
        m = book.levels[(x[..., None] > book.thresholds.astype(float) * sigma[:, None, None]).sum(axis=-1)].astype(float)
        total, product = (m**2).sum(1), (x * m).sum(1)
        exact = {
            "plain": sigma,
            "matched": n / (a * np.sqrt(total)),
            "ls": product / (a * total),
            "unbiased": n * n / (a * product),
        }
        assert np.allclose(h, exact[scale], rtol=6e-4)
        assert np.allclose(c.decode(wire, 20), h[:, None] * a * m, rtol=1e-6)


def test_rotated_row_keeps_norm_or_product(rng):
    x = rng.standard_normal((50, 80)).astype(np.float16).astype(float)
    matched = codec("lloyd(levels=4)", Head(80))
    out = matched.decode(matched.encode(x), 50).astype(float)
    assert np.allclose(np.linalg.norm(out, axis=1), np.linalg.norm(x, axis=1), rtol=1e-3)
    unbiased = codec("lloyd(levels=4,scale=unbiased)", Head(80))
    out = unbiased.decode(unbiased.encode(x), 50).astype(float)
    assert np.allclose((out * x).sum(1), (x * x).sum(1), rtol=1e-3)


def test_value_on_a_threshold_takes_the_lower_code():
    book = books()[4]
    # sigma of (8, 8, 8, 8) is 16 * 1/2 = 8; of four levels the middle threshold is 0
    c = codec("lloyd(levels=4,rotate=0)", Head(4))
    codes = c.encode(np.array([[0, -0.0, 8, -8]]))[0]
    # sigma = sqrt(128)/2 = 5.66, outer threshold .98 * 5.66 = 5.55
    assert [codes >> 2 * i & 3 for i in range(4)] == [1, 1, 3, 0]
    assert book.thresholds[1] == 0


def test_odd_rows():
    c = codec("lloyd(levels=4)", Head(128))
    zero = c.encode(np.zeros((1, 128)))
    assert zero[-2:] == b"\0\0" and not c.decode(zero, 1).any()
    for value in (6e-8, 3e4):
        x = np.zeros((1, 128))
        x[0, 9] = value
        out = c.decode(c.encode(x), 1).astype(float)
        assert np.isfinite(out).all()
    assert np.linalg.norm(out) == pytest.approx(3e4, rel=1e-3)
    # three levels, all inside the middle cell
    small = codec("lloyd(levels=3,rotate=0)", Head(4)).encode(np.array([[0.0, 0, 0, 0]]))
    assert small[-2:] == b"\0\0"


ROT_TABLE = {2: 0.633, 3: 0.444, 4: 0.344, 5: 0.282, 6: 0.239, 7: 0.208, 8: 0.184, 16: 0.096}


@pytest.mark.parametrize("levels", sorted(ROT_TABLE))
def test_error_table(levels, rng):
    x = rng.standard_normal((2048, 128)).astype(np.float16).astype(float)
    c = codec(f"lloyd(levels={levels})", Head(128))
    error = np.sqrt(((c.decode(c.encode(x), 2048) - x) ** 2).sum() / (x**2).sum())
    assert error == pytest.approx(ROT_TABLE[levels], rel=0.03)


@pytest.mark.parametrize("w, energies", [(2, (0.0556, 0.0111, 0.0033)), (4, (0.0607, 0.0196, 0.0053))])
def test_small_groups(w, energies, rng):
    x = rng.standard_normal((40000, w)).astype(np.float16).astype(float)
    for levels, expected in zip((4, 8, 16), energies):
        c = codec(f"lloyd(levels={levels})", Head(w))
        energy = ((c.decode(c.encode(x), 40000) - x) ** 2).sum() / (x**2).sum()
        assert energy == pytest.approx(expected, rel=0.05)


def test_e5m3_scalars(rng):
    x = rng.standard_normal((9, 64))
    fp16, e5m3 = codec("lloyd(levels=4)", Head(64)), codec("lloyd(levels=4,params=e5m3)", Head(64))
    a, b = fp16.encode(x), e5m3.encode(x)
    assert a[:-18] == b[:-9]
    h = np.frombuffer(a[-18:], "<f2").astype(float)
    byte = np.frombuffer(b[-9:], np.uint8).astype(int)
    assert np.allclose((1 + (byte & 7) / 8) * 2.0 ** ((byte >> 3) - 20), h, rtol=1 / 16)


def test_width_groups_order():
    # half layout of 8 channels: pairs (0,4) 2 bits, (1,5) 1 bit, (2,6) 2 bits, (3,7) 1 bit
    c = codec("width-groups(bits=2121,rotate=0)", Head(8))
    x = np.array([[1, 2, -1, 2, 9, -2, -9, -2], [1, 1, 1, 1, 1, 1, 1, 1]])
    wire = c.encode(x)
    assert len(wire) == 1 + 2 + 2 * 2 * 2 == c.size(2)
    # width 1 first: channels 1, 5, 3, 7 of both tokens
    assert wire[0] == 0b11110101
    # width 2: channels 0, 4, 2, 6; row norm sqrt(164), sigma 6.4: codes 2 3 1 0; second token 3 3 3 3 (1 > .98)
    assert wire[1:3] == bytes([0b00011110, 0b11111111])
    h = struct.unpack("<4e", wire[3:])
    assert h[0] == np.float16(4 / (0.7978846 * 2)) and h[2] == np.float16(2 / (0.7978846 * 2))


def test_width_groups_index_counts_present_widths(rng):
    x = rng.standard_normal((4, 8))
    both = codec("width-groups(bits=1133)", Head(8)).decode(codec("width-groups(bits=1133)", Head(8)).encode(x), 4)
    # widths 1 and 3 are groups 0 and 1, so a head that has 2 and 3 rotates its 3-bit row alike
    other = codec("width-groups(bits=2233)", Head(8)).decode(codec("width-groups(bits=2233)", Head(8)).encode(x), 4)
    three_bit = [2, 6, 3, 7]
    assert np.array_equal(both[:, three_bit], other[:, three_bit])


def test_width_groups_of_all_widths(rng):
    bits = "1" + "2" * 9 + "3" * 9 + "4" * 9 + "5" * 9 + "6" * 9 + "7" * 9 + "8" * 9
    c = codec(f"width-groups(bits={bits})", Head(128))
    x = rng.standard_normal((65, 128))
    expected = sum((65 * n * w + 7) // 8 for w, n in [(1, 2)] + [(w, 18) for w in range(2, 9)]) + 65 * 8 * 2
    wire = c.encode(x)
    assert len(wire) == expected
    error = (c.decode(wire, 65) - x) ** 2
    pairs = Head(128).pairs()
    by_width = [error[:, pairs[[i for i, b in enumerate(bits) if b == str(w)]].reshape(-1)].mean() for w in range(2, 9)]
    assert all(a > 2 * b for a, b in zip(by_width, by_width[1:]))


def test_channel_split(rng):
    x = rng.standard_normal((3, 8))
    c = codec("channel-split(high=8,low=4,mask=0f)", Head(8))
    assert len(c.encode(x)) == 3 + (3 * 4 * 3 + 7) // 8 + 3 * 4
    # an empty class is absent and the other has k = 0: the same as one row of the whole head
    assert codec("channel-split(high=8,low=4,mask=00)", Head(8)).encode(x) == codec("lloyd(levels=4)", Head(8)).encode(x)
    assert codec("channel-split(high=8,low=4,mask=ff)", Head(8)).encode(x) == codec("lloyd(levels=8)", Head(8)).encode(x)


@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128])
def test_sizes_of_fractional_levels(dim, rng):
    words = {3: (5, 8), 5: (3, 7), 6: (5, 13), 7: (6, 17)}
    for levels, (m, width) in words.items():
        for tokens in (1, 2, 3, 7):
            full, rest = divmod(tokens * dim, m)
            code_bits = full * width + math.ceil(math.log2(levels**rest))
            c = codec(f"lloyd(levels={levels})", Head(dim))
            wire = c.encode(rng.standard_normal((tokens, dim)))
            assert len(wire) == c.size(tokens) == -(-code_bits // 8) + 2 * tokens
            assert c.to_wire(c.from_wire(wire, tokens)) == wire


def test_tensors_rotate_differently(rng):
    x = rng.standard_normal((1, 64))
    assert codec("lloyd(levels=4)", Head(64)).encode(x) != codec("lloyd(levels=4)", Head(64, "v")).encode(x)
    assert codec("lloyd(levels=4)", Head(64)).encode(x) != codec("lloyd(levels=4,seed=1)", Head(64)).encode(x)


def test_centring(rng):
    x = rng.integers(-8, 9, (5, 64)) / 4
    mu = np.arange(64) / 2.0
    for text in ("lloyd(levels=4", "affine-token(levels=16,group=64,rotate=1", "width-groups(bits=" + "23" * 16):
        plain, centred = codec(text + ")", Head(64)), codec(text + ",center=1)", Head(64))
        assert centred.encode(x + mu, mu) == plain.encode(x)
        wire = plain.encode(x)
        assert np.array_equal(centred.decode(wire, 5, mu), plain.decode(wire, 5) + mu.astype(np.float32))
    with pytest.raises(KvqError, match="INVALID"):
        centred.encode(x)
    with pytest.raises(KvqError, match="INVALID"):
        codec("lloyd(levels=4,center=1)", Head(64, "v"))


def test_polar_functions_are_as_exact_as_stated():
    angle = np.linspace(0, 2 * np.pi, 20001)[:-1]
    u, v = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    got = atan2p(v, u).astype(float)
    exact = np.arctan2(v.astype(float), u.astype(float)) % (2 * np.pi)
    gap = np.abs(got - exact)
    assert np.minimum(gap, 2 * np.pi - gap).max() <= 6e-7 and got.min() >= 0 and got.max() < 2 * np.pi
    theta = np.linspace(0, 6.3, 20001).astype(np.float32)
    s, c = sincosp(theta)
    assert np.abs(s - np.sin(theta.astype(float))).max() <= 1.2e-7
    assert np.abs(c - np.cos(theta.astype(float))).max() <= 1.2e-7
    s, c = sincosp(-theta)
    assert np.abs(s - np.sin(-theta.astype(float))).max() <= 1.2e-7


def test_atan2p_at_the_axes():
    u = np.array([0, 1, 0, -1, 0, -0.0, 1], np.float32)
    v = np.array([0, 0, 1, 0, -1, 1, -0.0], np.float32)
    half_pi = np.float32(np.pi / 2)
    got = atan2p(v, u)
    assert got[0] == 0 and got[1] == 0 and got[6] == 0 and got[2] == half_pi and got[5] == half_pi
    assert got[3] == np.float32(np.pi) and got[4] == np.float32(2 * np.pi) - half_pi


def test_polar_block():
    # adjacent pairs (3, 4) and (0, 0): radius 5 and 0
    c = codec("polar(radius=4,angle=4,group=2)", Head(4, layout="adjacent"))
    wire = c.encode(np.array([[3, 4, 0, 0], [6, 8, 0, 0]]))
    theta = np.float16(math.atan2(4, 3))
    # radii 5, 10: codes 0 3; the angle is constant
    assert wire == bytes([0b1100, 0, 0, 0]) + halves(np.float16(5 / 3), 5, 0, 0, 0, theta, 0, 0)
    out = c.decode(wire, 2)
    assert np.allclose(out, [[3, 4, 0, 0], [6, 8, 0, 0]], rtol=2e-3) and not np.signbit(out).any()


def test_polar_wrap_is_finite():
    # angles +-0.01 alternating: range nearly 2 pi, as the formula gives
    c = codec("polar(radius=4,angle=4,group=4)", Head(2, layout="adjacent"))
    x = np.array([[1, 0.01], [1, -0.01]] * 2)
    wire = c.encode(x)
    assert wire[1] == 0b11001100
    big = c.encode(np.full((4, 2), 6e4))
    assert np.isfinite(c.decode(big, 4)).all()


def test_shrink_chain_over_all_codes():
    x = np.arange(256.0)[None]
    eight = codec("progressive(bits=8)", Head(256))
    wire = eight.encode(x)
    assert wire == bytes(range(256)) + halves(1, 0)
    nibbles = codec("progressive(bits=4)", Head(256)).encode(x)
    got = [nibbles[i // 2] >> 4 * (i % 2) & 15 for i in range(256)]
    assert got == [(2 * i + 17) // 34 for i in range(256)]
    assert nibbles[-4:] == halves(17, 0) and got[0] == 0 and got[255] == 15
    assert all(abs(17 * g - i) <= 8.5 for i, g in enumerate(got))
    two = codec("progressive(bits=2)", Head(256)).encode(x)
    last = [two[i // 4] >> 2 * (i % 4) & 3 for i in range(256)]
    assert last == [(2 * g + 5) // 10 for g in got] and last[0] == 0 and last[255] == 3
    assert two[-4:] == halves(85, 0)
    assert all(abs(85 * b - 17 * a) <= 42.5 for a, b in zip(got, last))


def test_shrink_rounds_the_scale_at_each_step():
    x = np.array([[0.0, 2047 * 2.0**-11]])
    s8 = np.float16(np.float32(2047 * 2.0**-11) / np.float32(255))
    s4 = np.float16(np.float32(17) * np.float32(s8))
    s2 = np.float16(np.float32(5) * np.float32(s4))
    for bits, s in ((8, s8), (4, s4), (2, s2)):
        assert codec(f"progressive(bits={bits})", Head(2)).encode(x)[-4:] == halves(s, 0)
    assert codec("progressive(bits=16)", Head(2)).encode(x) == halves(*x[0])
