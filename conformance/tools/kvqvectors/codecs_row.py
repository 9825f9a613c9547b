"""Vectors of the row codecs: raw, affine-token, lloyd, width-groups, channel-split, progressive."""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np

from kvqref.rotation import DEFAULT_SEED, rotate

from . import torture
from .codecs_channel import ROTARY, mask_text
from .coding import decode, encode, round_trip, wire_only
from .data import Stream, array, entered, hexed, made
from .facts import WORD, book_rows_close
from .script import Suite

LEVELS = tuple(WORD)
DIMS = (2, 16, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256, 320, 512, 576)
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 31, 33, 63, 64, 65, 127, 128, 129)
SCALES = ("plain", "matched", "ls", "unbiased")


@lru_cache
def thresholds(levels: int) -> list[float]:
    """Of the book, from the reference's copy of codebooks.json."""
    data = Path(__file__).parents[2] / "reference" / "kvqref" / "data" / "codebooks.json"
    book = next(b for b in json.loads(data.read_text())["books"] if b["levels_count"] == levels)
    return np.array([int(t, 16) for t in book["thresholds_f32"]], np.uint32).view(np.float32).tolist()


def head_sizes(suite: Suite, texts: dict[str, str], note: str, seed: int, dims=DIMS) -> None:
    """Every text at every head size; fewer tokens where rows are long.  `{D}` stands for the head size."""
    g = suite.group("heads", note)
    for i, (name, text) in enumerate(texts.items()):
        for dim in dims:
            tokens = 3 if dim <= 80 else 1
            x = made(seed + 16 * i, (tokens, dim), 2.0, 0.1)
            round_trip(g, f"{name}-D{dim}", f"{tokens} tokens of {dim} channels", text.replace("{D}", str(dim)), x)


def torture_rows(suite: Suite, texts: dict[str, str], dim: int = 16, **head) -> None:
    g = suite.group("torture", "Inputs that have broken quantizers, one token each")
    for name, text in texts.items():
        for kind, make in torture.PLAIN.items():
            x = hexed(make(dim), "f32")
            round_trip(g, f"{name}-{kind}", f"{make.__doc__.splitlines()[0]} ({name})", text, x, **head)


def lengths(suite: Suite, texts: dict[str, str], note: str, seed: int, dim: int = 6) -> None:
    """One stream for the block, padded once at its end, whatever the number of tokens."""
    g = suite.group("lengths", note)
    for i, (name, text) in enumerate(texts.items()):
        for tokens in LENGTHS:
            wire_only(g, f"{name}-T{tokens}", f"{tokens} tokens", text, made(seed + i, (tokens, dim), 2.0))


def raw() -> Suite:
    suite = Suite("codec-raw")
    head_sizes(suite, {"raw": "raw"}, "fp16 as it entered", 7000, DIMS[:9])
    torture_rows(suite, {"raw": "raw"})
    lengths(suite, {"raw": "raw"}, "fp16 [token][channel]", 7050)
    g = suite.group("entry", "Section 1.4: the type in which tokens arrive does not matter")
    half = Stream(41).halves(3, 16)
    small = np.round(Stream(42).uniform(3, 16) * 64) / 32
    for dtype in ("f16", "f32", "f64"):
        round_trip(g, f"halves-{dtype}", f"The same fp16 values given as {dtype}", "raw", hexed(half, dtype))
    for dtype in ("f16", "bf16", "f32", "f64"):
        round_trip(g, f"small-{dtype}", f"Multiples of 1/32 given as {dtype}", "raw", hexed(small, dtype))
        x = made(7060, (2, 16), 3.0, dtype=dtype)
        round_trip(g, f"generated-{dtype}", f"A generated array of {dtype}", "raw", x)
    _rounding(g)
    return suite


def _rounding(g) -> None:
    """fp32 and fp64 input: to fp16 by way of fp32, nearest even, saturating."""
    step = 2.0**-10
    ties = [
        1 + step / 2,
        1 + 1.5 * step,
        1 + step / 2 + 2.0**-23,
        1 + step / 2 - 2.0**-23,
        -1 - step / 2,
        2.0**-25,
        1.5 * 2.0**-24,
        3 * 2.0**-26,
    ]
    round_trip(g, "fp32-ties", "Ties go to the even mantissa, down to 2^-25 and 3 * 2^-26", "raw", hexed([ties], "f32"))
    edge = [65504, 65519.996, 65520, 65536, 1e5, 3.4e38, -65520, -1e38]
    round_trip(g, "saturation", "Beyond 65504: saturated, not infinite", "raw", hexed([edge], "f32"))
    double = [1 + step / 2 + 2.0**-40, 1 + step / 2 - 2.0**-40, 1e300, -1e300, 5e-324, 2.0**-25 + 2.0**-60, 65520 - 1e-9, 0.1]
    script = g.test(
        "through-fp32",
        "fp64 is rounded twice: 1 + 2^-11 + 2^-40 becomes a tie in fp32; 1e300 overflows to infinity there: refused",
    )
    script.refused("NONFINITE", "encode", codec="raw", dim=8, tensor="k", x=hexed([double], "f64"))
    finite = [v if abs(v) < 1e30 else 1.0 for v in double]
    assert encode(script, "raw", hexed([finite], "f64"))[:8] == "003c003c", "both round to 1 by way of fp32"
    for slug, bits in (("nan", "007e"), ("infinity", "007c"), ("minus-infinity", "00fc"), ("signalling-nan", "017c")):
        x = {"dtype": "f16", "shape": [1, 4], "hex": "003c" * 3 + bits}
        g.test(slug, f"{slug} is refused").refused("NONFINITE", "encode", codec="raw", dim=4, tensor="k", x=x)
    for slug, dtype, bits in (
        ("nan-f32", "f32", "0000c07f"),
        ("infinity-bf16", "bf16", "807f"),
        ("nan-f64", "f64", "000000000000f87f"),
    ):
        x = {"dtype": dtype, "shape": [1, 2], "hex": "00" * (len(bits) // 2) + bits}
        g.test(slug, f"{slug} is refused").refused("NONFINITE", "encode", codec="raw", dim=2, tensor="k", x=x)


def affine_token() -> Suite:
    suite = Suite("codec-affine-token")
    g = suite.group("levels", "Every level count; groups that divide the head")
    for i, L in enumerate(LEVELS):
        for dim, width in ((16, 16), (16, 4), (80, 40), (80, 16), (128, 32), (6, 3), (6, 1)):
            text = f"affine-token(levels={L},group={width})"
            tokens = 5 if dim <= 16 else 2 if L < 16 else 1
            round_trip(
                g, f"L{L}-D{dim}-g{width}", f"{L} levels, {width} channels a group", text, made(7100 + i, (tokens, dim), 3.0, 0.5)
            )
    head_sizes(
        suite, {"whole": "affine-token(levels=4,group={D})", "five": "affine-token(levels=5,group={D})"}, "One group a head", 7200
    )
    rotated = {"rotated": "affine-token(levels=6,group={D},rotate=1)"}
    g = suite.group("rotated", "rotate=1: the whole head is rotated, groups are cut from the rotated row (SemKV)")
    for i, dim in enumerate(DIMS):
        tokens = 2 if dim <= 128 else 1
        text = rotated["rotated"].replace("{D}", str(dim))
        x = made(7300 + i, (tokens, dim), 2.0)
        round_trip(g, f"D{dim}", f"{dim} channels" + (", two passes" if dim & (dim - 1) else ""), text, x)
        if dim in (16, 80, 128):
            round_trip(g, f"D{dim}-values", "Values have other signs than keys", text, x, tensor="v")
            part = text.replace(f"group={dim}", f"group={dim // 2}")
            round_trip(g, f"D{dim}-half", "Two groups of one rotated row", part, x)
            round_trip(g, f"D{dim}-seed", "Another seed", part.replace("rotate=1", "rotate=1,seed=12345678901234567890"), x)
    _centred(
        suite,
        {"plain": "affine-token(levels=4,group=8,center=1)", "rotated": "affine-token(levels=5,group=16,rotate=1,center=1)"},
        7400,
    )
    lengths(suite, {f"L{L}": f"affine-token(levels={L},group=6)" for L in (2, 3, 5, 6, 7, 8)}, "One stream for the block", 7500)
    g = suite.group("ties", "Quotients at and beside a half")
    for L in LEVELS:
        n = min(L + 2 + L % 2, 34)
        text = f"affine-token(levels={L},group={n})"
        round_trip(
            g, f"L{L}-half", f"Exact halves with {L} levels: to the even code", text, hexed(torture.half_ties(n, L), "f32")
        )
        if L > 2:
            text = f"affine-token(levels={L},group=4)"
            round_trip(g, f"L{L}-near", "fp32 quotients within two steps of a half", text, hexed(torture.near_ties(4, L), "f32"))
            round_trip(
                g,
                f"L{L}-odd-scale",
                "Exact halves of odd scales: a division, no product with a reciprocal",
                text,
                hexed(torture.odd_ties(4, L)),
            )
        if 3 < L < 256:
            x = hexed(torture.lost_differences(L))
            round_trip(g, f"L{L}-lost-difference", "x - z in fp32 falls on a half", f"affine-token(levels={L},group=4)", x)
    torture_rows(
        suite,
        {f"L{L}": f"affine-token(levels={L},group=8)" for L in (2, 4, 5, 16, 256)}
        | {"rotated": "affine-token(levels=6,group=16,rotate=1)"},
    )
    return suite


def _centred(suite: Suite, texts: dict[str, str], seed: int) -> None:
    g = suite.group("center", "center=1: mu is subtracted first in fp32 and added last")
    mus = {
        "small": made(seed, (16,), 2.0),
        "large": hexed(np.where(np.arange(16) % 5 == 0, 921.0, -0.25)),
        "zero": hexed(np.zeros(16)),
        "extreme": hexed(np.where(np.arange(16) % 2, 65504.0, -65504.0)),
    }
    for name, text in texts.items():
        for kind, mu in mus.items():
            x = made(seed + 1, (3, 16), 1.0, chan_add=np.clip(array(mu), -60000, 60000))
            round_trip(g, f"{name}-{kind}", f"{kind} mean", text, x, mu=mu)
        round_trip(
            g, f"{name}-off", "center=0 is legal and needs no mean", text.replace("center=1", "center=0"), made(seed + 2, (2, 16))
        )
        exact = made(seed + 3, (1, 16))
        round_trip(g, f"{name}-at-the-mean", "A row equal to the mean comes back exactly", text, exact, mu=hexed(array(exact)[0]))


def lloyd() -> Suite:
    suite = Suite("codec-lloyd")
    g = suite.group("levels", "Every book at four head sizes")
    for i, L in enumerate(LEVELS):
        for dim in (16, 80, 128, 256):
            x = made(8000 + i, (3 if dim < 80 else 1, dim), 2.0)
            values = round_trip(g, f"L{L}-D{dim}", f"{L} levels, {dim} channels", f"lloyd(levels={L})", x)
            if dim >= 80:
                book_rows_close(entered(x), values, L, slack=1.6)
    head_sizes(
        suite,
        {"L4": "lloyd(levels=4)", "L3": "lloyd(levels=3)"},
        "Rotation of every head size; two passes where it is no power of two",
        8100,
    )
    g = suite.group("scale", "The four rules for the row scalar")
    for scale in SCALES:
        for i, (L, dim) in enumerate(((2, 16), (4, 16), (4, 80), (8, 64), (16, 16), (5, 16), (256, 16))):
            for plain in ("", ",rotate=0"):
                text = f"lloyd(levels={L},scale={scale}{plain})"
                round_trip(
                    g, f"{scale}-L{L}-D{dim}{'-plain' if plain else ''}", f"scale={scale}", text, made(8200 + i, (2, dim), 2.0)
                )
    g = suite.group("rotation", "Signs by tensor, seed and channel; rotate=0 turns it off")
    for dim in (2, 16, 40, 80, 96, 128, 192, 320):
        x = made(8300, (1, dim), 2.0)
        round_trip(g, f"D{dim}-values", "Values: t = 1", "lloyd(levels=8)", x, tensor="v")
        round_trip(g, f"D{dim}-seed", "seed=1", "lloyd(levels=8,seed=1)", x)
        round_trip(g, f"D{dim}-plain", "rotate=0", "lloyd(levels=8,rotate=0)", x)
    for dim in (16, 40, 128):
        for channel in (0, 1, dim // 2, dim - 1):
            x = np.zeros((1, dim))
            x[0, channel] = 1
            round_trip(
                g,
                f"D{dim}-unit-{channel}",
                f"A unit vector on channel {channel}: all rotated values have the same size",
                "lloyd(levels=256)",
                hexed(x),
            )
    _sums(suite)
    _e5m3(suite)
    _centred(suite, {"L4": "lloyd(levels=4,center=1)", "L8-plain-e5m3": "lloyd(levels=8,rotate=0,params=e5m3,center=1)"}, 8500)
    lengths(suite, {f"L{L}": f"lloyd(levels={L})" for L in (2, 3, 5, 6, 7, 8)}, "One stream for the block, padded once", 8600)
    _thresholds(suite)
    torture_rows(
        suite,
        {f"L{L}": f"lloyd(levels={L})" for L in (2, 3, 4, 8, 16)}
        | {f"L4-{s}": f"lloyd(levels=4,scale={s},rotate=0)" for s in SCALES},
    )
    return suite


def _sums(suite: Suite) -> None:
    g = suite.group("sums", "The sum of squares is the tree of section 1.3 over the row before rotation")

    def from_left(x):
        return np.add.accumulate(x * x, axis=1)[:, -1]

    def exact(x):
        return (np.float64(x) ** 2).sum(axis=1).astype(np.float32)

    def rotated(x):
        return torture.tree_sum(np.square(rotate(x, 0, 0, DEFAULT_SEED)))

    for width in (6, 16, 80, 128):
        for slug, other, text in (
            ("from-left", from_left, "rotate=0"),
            ("exact", exact, "rotate=0"),
            ("after-rotation", rotated, "rotate=1"),
        ):
            x = hexed(torture.telling_norms(width, other))
            round_trip(
                g,
                f"D{width}-not-{slug}",
                f"Rows of {width} whose stored norm would differ if the sum was taken {slug}",
                f"lloyd(levels=4,scale=plain,{text})",
                x,
            )


def _e5m3(suite: Suite) -> None:
    g = suite.group("e5m3", "h in one byte: 2^-22 to 3840, nearest even, saturating")
    for i, exponent in enumerate((-24, -22, -20, -18, -10, 0, 6, 11, 12, 15)):
        for scale in ("matched", "plain"):
            x = made(8400 + i, (4, 16), 2.0**exponent)
            text = f"lloyd(levels=4,params=e5m3,scale={scale})"
            round_trip(g, f"{scale}-2^{exponent}", f"Rows of size 2^{exponent}", text, x)
    # w = 4, rotate=0, scale=plain: h is the norm over 2, which a single value gives exactly
    for slug, norms in (("ties", [1.0625, 1.1875, 1.9375, 31.0, 15.5, 3776, 3712, 3840]), ("subnormal", [2.0**-23, 3 * 2.0**-23, 5 * 2.0**-23, 2.0**-22, 15 * 2.0**-23, 2.0**-19]),
                        ("saturation", [3840, 3968, 3969, 5000, 30000])):  # fmt: skip
        x = np.zeros((len(norms), 4))
        x[:, 1] = 2 * np.array(norms)
        round_trip(g, slug, f"h = {norms}", "lloyd(levels=4,params=e5m3,scale=plain,rotate=0)", hexed(x, "f32"))


def _thresholds(suite: Suite) -> None:
    g = suite.group("thresholds", "T_j = t_j * sigma in fp32; a value on it takes the lower code, one step above it the higher")
    for L in (2, 3, 4, 5, 6, 7, 8, 16):
        inner = [t for t in thresholds(L) if abs(t) < 1.6]
        for j, t in enumerate(inner):
            if t == 0:
                x = hexed([[0.0, 1, 2, 3], [-0.0, 1, -2, 3], [torture.SMALLEST, 1, 2, 3], [-torture.SMALLEST, 1, 2, 3]])
                round_trip(
                    g,
                    f"L{L}-zero",
                    "+0 and -0 lie on the middle threshold: the lower code for both",
                    f"lloyd(levels={L},rotate=0)",
                    x,
                )
                continue
            if L == 16 and j % 4:
                continue
            for side, rows in torture.threshold_rows(t, 100 * L + j).items():
                script = g.test(f"L{L}-threshold-{j}-{side}", f"The first value lies {side} threshold {j} of {L} levels in fp32")
                text = f"lloyd(levels={L},rotate=0)"
                wire = encode(script, text, hexed(rows))
                values = decode(script, text, 4, len(rows), wire)
                nth = np.searchsorted(thresholds(L), t) + (side == "above")
                assert (_first_codes(wire, L, len(rows)) == nth).all(), f"threshold {j} of {L}: {values}"


def _first_codes(wire: str, levels: int, tokens: int) -> np.ndarray:
    """Code of the first channel of every token of 4 channels, unpacked by integer arithmetic."""
    digits, bits = WORD[levels]
    stream = int.from_bytes(bytes.fromhex(wire), "little")
    count = 4 * tokens
    codes = []
    for i in range(count):
        word = stream >> (i // digits * bits)
        word &= (1 << bits) - 1
        if i // digits == count // digits:
            word &= (1 << (levels ** (count % digits) - 1).bit_length()) - 1
        codes.append(word // levels ** (i % digits) % levels)
    return np.array(codes[::4])


def width_groups() -> Suite:
    suite = Suite("codec-width-groups")
    stream = Stream(51)
    g = suite.group("widths", "One width 1..8 a pair; widths ascending, each a row of its own with the next rotation index")
    for i, dim in enumerate((16, 64, 72, 80, 96, 128, 192, 256)):
        for span in ((2, 4), (1, 8), (3, 3)):
            bits = "".join(str(span[0] + stream.below(span[1] - span[0] + 1)) for _ in range(dim // 2))
            x = made(9000 + i, (2 if dim <= 128 else 1, dim), 2.0)
            round_trip(g, f"D{dim}-{span[0]}-to-{span[1]}", f"Widths {span[0]}..{span[1]}", f"width-groups(bits={bits})", x)
    for width in range(1, 9):
        round_trip(
            g,
            f"all-{width}",
            f"{width} bits everywhere",
            f"width-groups(bits={str(width) * 8})",
            made(9100 + width, (3, 16), 2.0),
        )
        alone = "3" * 7 + str(width)
        round_trip(
            g,
            f"one-pair-of-{width}",
            f"A class of two channels at {width} bits beside 3 bits",
            f"width-groups(bits={alone})",
            made(9120 + width, (3, 16), 2.0),
        )
    g = suite.group("classes", "Class sizes that are no power of two: 2, 6, 46, 90 channels")
    for n in (1, 3, 23, 45):
        dim = 2 * n + 2
        round_trip(
            g,
            f"{2 * n}-channels",
            f"{2 * n} channels at 2 bits, two at 5",
            f"width-groups(bits={'2' * n}5)",
            made(9200 + n, (2, dim), 2.0),
        )
    _width_group_pairs(suite)
    return suite


def _width_group_pairs(suite: Suite) -> None:
    g = suite.group("pairs", "Pair numbers by layout and rotary part; u0, v0, u1, v1, ... within a class")
    for i, (layout, r, first) in enumerate(ROTARY):
        head = dict(layout=layout, rotary_dim=r or None, rotary_first=first or None)
        for plain in ("", ",rotate=0"):
            round_trip(
                g,
                f"{layout}-{r}-{first}{'-plain' if plain else ''}",
                "Eight pairs, four widths",
                f"width-groups(bits=12341234{plain})",
                made(9300 + i, (3, 16), 2.0),
                **head,
            )
    text = "width-groups(bits=12341234)"
    round_trip(
        g, "values", "Values pair up over the whole head", text, made(9350, (3, 16)), tensor="v", rotary_dim=8, rotary_first=4
    )
    round_trip(g, "rotary-0", "rotary_dim 0 means the whole head", text, made(9351, (3, 16)), rotary_dim=0)
    g = suite.group("options", "scale, params, seed")
    for scale in SCALES:
        for params in ("", ",params=e5m3"):
            text = f"width-groups(bits=12348765,scale={scale}{params})"
            round_trip(g, f"{scale}{'-e5m3' if params else ''}", f"scale={scale}{params}", text, made(9400, (3, 16), 2.0))
    round_trip(g, "seed", "Another seed", "width-groups(bits=12341234,seed=77)", made(9410, (3, 16), 2.0))
    _centred(
        suite,
        {"mixed": "width-groups(bits=12341234,center=1)", "mixed-e5m3": "width-groups(bits=33335555,center=1,params=e5m3)"},
        9500,
    )
    lengths(
        suite,
        {"mixed": "width-groups(bits=1357)", "three": "width-groups(bits=3332)"},
        "Every class is a stream, padded to a byte",
        9600,
        dim=8,
    )
    torture_rows(suite, {"mixed": "width-groups(bits=12345678)", "plain": "width-groups(bits=22334455,rotate=0)"})


def channel_split() -> Suite:
    suite = Suite("codec-channel-split")
    stream = Stream(61)
    g = suite.group("masks", "Low class first, then high; k counts the classes present")
    for i, dim in enumerate((16, 64, 80, 128, 256)):
        for percent in (0, 25, 50, 100):
            mask = mask_text([stream.below(100) < percent for _ in range(dim)])
            x = made(10000 + i, (2 if dim <= 80 else 1, dim), 2.0)
            round_trip(g, f"D{dim}-{percent}", f"{percent} % high", f"channel-split(high=8,low=4,mask={mask})", x)
    g = suite.group("levels", "Level counts of both classes, and classes of odd sizes")
    for i, (high, low) in enumerate(((8, 4), (4, 8), (16, 2), (5, 3), (7, 6), (256, 128), (4, 4))):
        for mask in ("0f0f", "0100", "ff7f"):
            round_trip(
                g,
                f"H{high}-L{low}-{mask}",
                f"{high} and {low} levels",
                f"channel-split(high={high},low={low},mask={mask})",
                made(10100 + i, (3, 16), 2.0),
            )
    g = suite.group("options", "scale, params, rotate, seed, values")
    for i, extra in enumerate(
        (*(f"scale={s}" for s in SCALES), "params=e5m3", "rotate=0", "seed=3", "rotate=0,scale=unbiased", "params=e5m3,scale=ls")
    ):
        for tensor in "kv":
            round_trip(
                g,
                f"{extra.replace(',', '-').replace('=', '-')}-{tensor}",
                extra,
                f"channel-split(high=8,low=4,mask=3a5c,{extra})",
                made(10200 + i, (3, 16), 2.0),
                tensor=tensor,
            )
    _centred(suite, {"half": "channel-split(high=8,low=4,mask=5555,center=1)"}, 10300)
    lengths(suite, {"mixed": "channel-split(high=5,low=3,mask=29)"}, "Two streams, each padded to a byte", 10400)
    torture_rows(
        suite, {"half": "channel-split(high=8,low=4,mask=5555)", "plain": "channel-split(high=8,low=4,mask=00ff,rotate=0)"}
    )
    return suite


def progressive() -> Suite:
    suite = Suite("codec-progressive")
    head_sizes(
        suite,
        {f"b{b}": f"progressive(bits={b})" for b in (16, 8, 4, 2)},
        "Every width at every head size",
        11000,
        DIMS[:9] + (256,),
    )
    torture_rows(suite, {f"b{b}": f"progressive(bits={b})" for b in (8, 4, 2)})
    lengths(suite, {f"b{b}": f"progressive(bits={b})" for b in (8, 4, 2)}, "affine-token with one group", 11100)
    g = suite.group("chain", "All 256 codes through the chain: 255 ends at 3, 0 at 0, ties never occur")
    ramp = hexed([np.arange(256.0)])
    for bits, last in ((8, 255), (4, 15), (2, 3)):
        values = round_trip(g, f"b{bits}", f"The codes 0..255 at {bits} bits", f"progressive(bits={bits})", ramp)
        step = {8: 1, 4: 17, 2: 85}[bits]
        assert values[0].tolist() == [step * round(c / step) for c in range(256)] and values[0, 255] == last * step
    round_trip(
        g,
        "scale-saturates",
        "5 * hp(17 s) beyond fp16",
        "progressive(bits=2)",
        hexed([np.linspace(-65504, 65504, 16)]),
        close=False,
    )
    round_trip(
        g,
        "subnormal-scale",
        "s = 2^-24 grows to 17 and 85 steps",
        "progressive(bits=2)",
        hexed([torture.SMALLEST * np.arange(256)]),
    )
    return suite


def suites() -> list[Suite]:
    return [raw(), affine_token(), lloyd(), width_groups(), channel_split(), progressive()]
