"""The same bits once more by scalar loops over single fp32 numbers: a head of 12 channels, two rotation passes.

The rows are written as the text writes them, one rounded operation after the other, so a silent
promotion or another order of summation in the vectorized code shows.
"""

import math
from fractions import Fraction

import numpy as np
import pytest

from kvqref import Head, codec
from kvqref.books import books

D = 12
SEED = 0x6B76715F73656564


def f32(value: Fraction) -> Fraction:
    """Round an exact rational to fp32 (normal range), ties to even."""
    if value == 0:
        return Fraction(0)
    exponent = math.floor(math.log2(abs(value)))
    while Fraction(2) ** exponent > abs(value):
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= abs(value):
        exponent += 1
    ulp = Fraction(2) ** (exponent - 23)
    return round(value / ulp) * ulp


def f16(value: Fraction) -> Fraction:
    exponent = max(math.floor(math.log2(abs(value))), -14) if value else 0
    ulp = Fraction(2) ** (exponent - 10)
    return round(value / ulp) * ulp


def sqrt32(value: Fraction) -> Fraction:
    """Correctly rounded: 80 extra bits decide every tie here."""
    scale = 1 << 200
    return f32(Fraction(math.isqrt(int(value * scale * scale)), scale))


def c(w):
    return Fraction(float(np.float32(1 / math.sqrt(w))))


def sign(i, q):
    x = (SEED ^ (q << 40) ^ (i // 64)) + 0x9E3779B97F4A7C15 & (1 << 64) - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    x = (x ^ x >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return -1 if (x ^ x >> 31) >> i % 64 & 1 else 1


def butterfly(y, first):
    for d in (1, 2, 4):
        for i in range(8):
            if not i & d:
                a, b = y[first + i], y[first + i + d]
                y[first + i], y[first + i + d] = f32(a + b), f32(a - b)
    for i in range(8):
        y[first + i] = f32(y[first + i] * c(8))


def rotate(x):
    y = list(x)
    for q, first in ((0, 0), (1, 4)):
        y = [v * sign(i, q) for i, v in enumerate(y)]
        butterfly(y, first)
    return y


def unrotate(y):
    x = list(y)
    for q, first in ((1, 4), (0, 0)):
        butterfly(x, first)
        x = [v * sign(i, q) for i, v in enumerate(x)]
    return x


def tree(v):
    v = list(v) + [Fraction(0)] * (16 - len(v))
    while len(v) > 1:
        v = [f32(a + b) for a, b in zip(v[::2], v[1::2])]
    return v[0]


def rows(rng):
    return rng.standard_normal((12, D)).astype(np.float16)


@pytest.mark.parametrize("scale", ["plain", "matched", "ls", "unbiased"])
@pytest.mark.parametrize("levels", [4, 5, 16])
def test_codebook_rows(levels, scale, rng):
    book = books()[levels]
    a = Fraction(float(book.scale))
    made = codec(f"lloyd(levels={levels},scale={scale})", Head(D))
    for row in rows(rng):
        x = [Fraction(float(v)) for v in row]
        y = rotate(x)
        n = sqrt32(tree([f32(v * v) for v in x]))
        sigma = f32(n * c(D))
        thresholds = [f32(Fraction(float(t)) * sigma) for t in book.thresholds]
        m = [int(book.levels[sum(v > t for t in thresholds)]) for v in y]
        total, p = Fraction(sum(v * v for v in m)), tree([f32(v * k) for v, k in zip(y, m)])
        h = {
            "plain": lambda: sigma,
            "matched": lambda: f32(n / f32(a * sqrt32(total))),
            "ls": lambda: f32(p / f32(a * total)),
            "unbiased": lambda: f32(f32(n * n) / f32(a * p)),
        }[scale]()
        h = f16(h)
        xhat = unrotate([f32(f32(h * a) * k) for k in m])
        wire = made.encode(row[None])
        assert Fraction(float(np.frombuffer(wire[-2:], "<f2")[0])) == h
        assert [Fraction(float(v)) for v in made.decode(wire, 1)[0]] == xhat


def test_rotated_affine_rows(rng):
    made = codec("affine-token(levels=6,group=6,rotate=1)", Head(D))
    for row in rows(rng):
        y = rotate([Fraction(float(v)) for v in row])
        yhat = []
        for part in (y[:6], y[6:]):
            s, z = f16(f32(f32(max(part) - min(part)) / 5)), f16(min(part))
            codes = [min(5, max(0, round(f32(f32(v - z) / s)))) for v in part]
            yhat += [f32(z + code * s) for code in codes]
        assert [Fraction(float(v)) for v in made.decode(made.encode(row[None]), 1)[0]] == unrotate(yhat)


@pytest.mark.parametrize("levels", [2, 4, 16])
def test_midpoint_channels(levels, rng):
    made = codec(f"affine-channel(levels={levels},group=12,midpoint=1)", Head(D))
    x = rows(rng)
    decoded = made.decode(made.encode(x), 12)
    for channel in range(D):
        v = [Fraction(float(t)) for t in x[:, channel]]
        mn, mx = min(v), max(v)
        s = f16(f32(f32(mx - mn) / levels))
        z = f16(f32(f32(f32((2 * levels - 1) * mn) + mx) / (2 * levels)))
        expected = [f32(z + min(levels - 1, max(0, round(f32(f32(t - z) / s)))) * s) for t in v]
        assert [Fraction(float(t)) for t in decoded[:, channel]] == expected
