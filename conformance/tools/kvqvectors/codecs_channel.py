"""Vectors of the per-channel codecs: affine-channel, channel-widths, pair-mix, kitty, polar."""

import numpy as np

from . import torture
from .coding import round_trip, wire_only
from .data import Stream, hexed, made
from .facts import WORD
from .script import Suite

LEVELS = tuple(WORD)
DIMS = (16, 64, 72, 80, 96, 112, 128, 192, 256)
ROTARY = (
    ("half", 0, 0),
    ("adjacent", 0, 0),
    ("half", 8, 0),
    ("half", 8, 4),
    ("adjacent", 8, 8),
    ("adjacent", 12, 2),
    ("half", 2, 14),
)


def padded_columns(vectors: np.ndarray, dim: int) -> np.ndarray:
    """[count][n] -> [n][dim]: one vector a channel, repeated to fill an even head."""
    return np.resize(vectors, (dim, vectors.shape[1])).T


def mask_text(bits) -> str:
    return np.packbits(np.asarray(bits, np.uint8), bitorder="little").tobytes().hex()


def torture_tests(suite: Suite, name: str, note: str, variants: dict[str, str], group: int, dim: int = 16) -> None:
    """Every torture input through every variant of a codec; one channel each."""
    g = suite.group(name, note)
    for variant, text in variants.items():
        for kind, make in torture.PLAIN.items():
            x = hexed(padded_columns(make(group), dim), "f32")
            round_trip(g, f"{variant}-{kind}", f"{make.__doc__.splitlines()[0]} ({variant})", text, x)


def affine_channel() -> Suite:
    suite = Suite("codec-affine-channel")
    g = suite.group("levels", "Every level count and head size; two groups")
    for i, (L, dim) in enumerate((L, dim) for L in LEVELS for dim in DIMS if dim <= 80 or L in (2, 4, 5, 16)):
        x = made(1000 + i, (16 if dim == 16 else 4, dim), 2.5, 0.25)
        text = f"affine-channel(levels={L},group={8 if dim == 16 else 2})"
        round_trip(g, f"L{L}-D{dim}", f"{L} levels, {dim} channels: order of groups, channels and codes", text, x)
    g = suite.group("groups", "A run is padded to a byte whatever G is; short last words of mixed radix")
    for i, (L, G) in enumerate((L, G) for L in LEVELS for G in (1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 31, 33, 64)):
        x = made(2000 + i, (2 * G, 2), 3.0, -1.0)
        round_trip(
            g, f"L{L}-G{G}", f"{G} codes of base {L}: full words, then the short one", f"affine-channel(levels={L},group={G})", x
        )
    g = suite.group("long", "Groups as in presets, many groups in one block")
    for i, (G, groups) in enumerate(((32, 1), (32, 5), (64, 3), (128, 1), (128, 4), (256, 2))):
        text = f"affine-channel(levels=4,group={G})"
        wire_only(
            g,
            f"G{G}-{groups}-groups",
            "All codes of all groups first, then all parameters",
            text,
            made(3000 + i, (G * groups, 8), 4.0),
        )
    g = suite.group("midpoint", "Levels at bin middles at every level count")
    for i, L in enumerate(LEVELS):
        text = f"affine-channel(levels={L},group=8,midpoint=1)"
        round_trip(g, f"L{L}", f"midpoint with {L} levels: s over L, not L - 1", text, made(3100 + i, (16, 8), 5.0, 1.0))
        ties = hexed(padded_columns(torture.middle_ties(max(9, min(L + 2, 40)), L), 4), "f32")
        G = ties["shape"][0]
        round_trip(
            g,
            f"L{L}-edges",
            "Values at the edges of bins: ties go to the even code",
            f"affine-channel(levels={L},group={G},midpoint=1)",
            ties,
        )
    g = suite.group("ties", "Quotients at and beside a half: rint, never floor(q + 0.5); division, never a reciprocal")
    for L in LEVELS:
        G = min(L + 2, 34)
        x = hexed(padded_columns(torture.half_ties(G, L), 4), "f32")
        round_trip(g, f"L{L}-half", f"Exact halves with {L} levels: to the even code", f"affine-channel(levels={L},group={G})", x)
        if L > 2:
            text = f"affine-channel(levels={L},group=4)"
            round_trip(
                g,
                f"L{L}-near",
                "fp32 quotients within two steps of a half",
                text,
                hexed(padded_columns(torture.near_ties(4, L), 4), "f32"),
            )
            x = hexed(padded_columns(torture.odd_ties(4, L), 4))
            round_trip(g, f"L{L}-odd-scale", "Exact halves of odd scales: a division, no product with a reciprocal", text, x)
        if 3 < L < 256:
            x = hexed(padded_columns(torture.lost_differences(L), 2))
            round_trip(g, f"L{L}-lost-difference", "x - z in fp32 falls on a half", f"affine-channel(levels={L},group=4)", x)
    variants = {f"L{L}": f"affine-channel(levels={L},group=12)" for L in (2, 3, 4, 5, 8, 16, 256)}
    variants |= {f"L{L}-midpoint": f"affine-channel(levels={L},group=12,midpoint=1)" for L in (2, 3, 4)}
    torture_tests(suite, "torture", "Inputs that have broken quantizers", variants, 12)
    _hand_computed(suite)
    return suite


def _hand_computed(suite: Suite) -> None:
    g = suite.group("by-hand", "Small enough to check on paper")
    ramp = np.array([[0, 0.5], [15, 2.5], [1.5, 15], [0.5, 0]])
    values = round_trip(
        g, "half-to-even", "s = 1: 0.5, 1.5 and 2.5 become 0, 2 and 2", "affine-channel(levels=16,group=4)", hexed(ramp)
    )
    assert values.tolist() == [[0, 0], [15, 2], [2, 15], [0, 0]]
    tiny = np.array([[2.0**-24], [30], [1], [2.0**-24]]).repeat(2, axis=1)
    values = round_trip(
        g, "below-a-half", "(1 - 2^-24) / 2 is below a half: code 0", "affine-channel(levels=16,group=4)", hexed(tiny)
    )
    assert values[2, 0] == 2.0**-24
    middle = np.array([[-3, 0], [5, 1], [1, 0.5], [0.5, 0.75]])
    values = round_trip(g, "one-bit-midpoint", "{-3, 5}: s 4, z -1, values -1 and 3; {0, 1}: .25 and .75, and 0.5 gets code 0",
                        "affine-channel(levels=2,group=4,midpoint=1)", hexed(middle))  # fmt: skip
    assert values.tolist() == [[-1, 0.25], [3, 0.75], [-1, 0.25], [-1, 0.75]]
    script = g.test("bytes", "G = 2, L = 16: one byte of codes (the first in the low bits), then s and z")
    assert (
        script.ok("encode", codec="affine-channel(levels=16,group=2)", dim=2, tensor="k", x=hexed([[0, -15], [15, 0]]))["wire"]
        == "f0f0003c0000003c80cb"
    )
    script = g.test(
        "base-3", "Five digits in a byte: 0 1 2 1 0 = 0 + 3 + 18 + 27 + 0 = 48; then a short word of two digits in 4 bits"
    )
    x = hexed([[0, 0], [1, 1], [2, 2], [1, 1], [0, 0], [2, 2], [1, 1]])
    wire = script.ok("encode", codec="affine-channel(levels=3,group=7)", dim=2, tensor="k", x=x)["wire"]
    assert wire == "3005" * 2 + "003c0000" * 2


def channel_widths() -> Suite:
    suite = Suite("codec-channel-widths")
    stream = Stream(31)
    g = suite.group("widths", "One width 0..8 a pair; nothing is stored for width 0 but its zero")
    for i, dim in enumerate((16, 64, 80, 128)):
        for midpoint in ("", ",midpoint=1"):
            bits = "".join(str(stream.below(9)) for _ in range(dim // 2))
            text = f"channel-widths(bits={bits},group=8{midpoint})"
            x = made(3200 + i, (8 if dim > 16 else 24, dim), 3.0, 0.5)
            round_trip(g, f"D{dim}{'-midpoint' if midpoint else ''}", "Random widths by pair", text, x)
    for width in range(9):
        for params in ("", ",params=e4m3"):
            text = f"channel-widths(bits={str(width) * 4},group=16,midpoint=1{params})"
            round_trip(
                g, f"all-{width}{'-e4m3' if params else ''}", f"{width} bits everywhere", text, made(3300 + width, (16, 8), 9.0)
            )
    g = suite.group("pairs", "Pair numbers by layout and rotary part")
    for i, (layout, r, first) in enumerate(ROTARY):
        for G in (8, 32):
            text = f"channel-widths(bits=01234568,group={G},midpoint=1)"
            head = dict(layout=layout, rotary_dim=r or None, rotary_first=first or None)
            round_trip(
                g,
                f"{layout}-{r}-{first}-G{G}",
                f"layout {layout}, rotary channels {first}..{first + (r or 16) - 1}",
                text,
                made(3400 + i, (G, 16), 2.0),
                **head,
            )
    text = "channel-widths(bits=01234568,group=8)"
    round_trip(
        g,
        "values",
        "Values pair up over the whole head, whatever the rotary part of the keys",
        text,
        made(3450, (8, 16)),
        tensor="v",
        rotary_dim=8,
        rotary_first=4,
    )
    _widths_by_channel(suite, stream)
    return suite


def _widths_by_channel(suite: Suite, stream: Stream) -> None:
    g = suite.group("by-channel", "unit=channel: one width a channel (ChanMix, with e4m3 parameters)")
    for i, dim in enumerate((6, 16, 64, 128)):
        for params in ("", ",params=e4m3"):
            bits = "".join(str(stream.choice((1, 2, 3, 4, 0, 8))) for _ in range(dim))
            text = f"channel-widths(bits={bits},group=8,unit=channel{params})"
            round_trip(
                g,
                f"D{dim}{'-e4m3' if params else ''}",
                "Random widths by channel",
                text,
                made(3500 + i, (16, dim) if dim < 64 else (8, dim), 4.0),
            )
    g = suite.group("e4m3", "Parameters in FP8 E4M3 straight from fp32: nearest even, saturating at 448")
    for i, (mul, add) in enumerate(
        ((1e-3, 0), (0.01, 0.02), (1, 0), (3, 921), (3, -921), (5000, 0), (60000, 0), (0.2, -447), (30, 448), (100, 460))
    ):
        for midpoint in ("", ",midpoint=1"):
            text = f"channel-widths(bits=0123,group=8,params=e4m3{midpoint})"
            slug = f"range-{mul}-offset-{add}{'-midpoint' if midpoint else ''}"
            round_trip(g, slug, f"Range {mul} around {add}", text, made(3600 + i, (8, 8), mul, add))
    _e4m3_ties(suite)
    variants = {
        "mixed": "channel-widths(bits=01234568,group=12,midpoint=1)".replace("12", "16"),
        "mixed-e4m3": "channel-widths(bits=01234568,group=16,params=e4m3)",
        "one-bit": "channel-widths(bits=11111111,group=16,midpoint=1)",
        "no-bits": "channel-widths(bits=00000000,group=16)",
    }
    torture_tests(suite, "torture", "Inputs that have broken quantizers, one channel each", variants, 16)
    g = suite.group("long", "Groups as in presets")
    for i, (G, groups) in enumerate(((128, 1), (128, 3), (64, 2))):
        text = f"channel-widths(bits=41230123,group={G},midpoint=1)"
        wire_only(
            g,
            f"G{G}-{groups}-groups",
            "Groups follow each other; parameters of all groups last",
            text,
            made(3700 + i, (G * groups, 16), 4.0),
        )


def _e4m3_ties(suite: Suite) -> None:
    """Zeros of width-0 channels are (mn + mx) / 2: choose them between two e4m3 values."""
    g = suite.group(
        "e4m3-ties", "A zero exactly between two E4M3 values goes to the even mantissa; subnormals down to 2^-9; never -0"
    )
    cases = {
        "normal": [1.0625, 1.1875, -1.0625, -1.1875, 1.9375, 15.5, 248.0, 232.0],
        "subnormal": [2.0**-10, 3 * 2.0**-10, 5 * 2.0**-10, 2.0**-9, 2.0**-11, -(2.0**-10), 2.0**-6, 15 * 2.0**-10],
        "saturation": [448.0, 464.0, 465.0, 480.0, -464.0, -500.0, 65504.0, 440.0],
    }
    for slug, values in cases.items():
        x = hexed(np.repeat(np.array(values)[None], 8, axis=0))
        round_trip(g, slug, f"zeros {values}", "channel-widths(bits=00000000,group=8,params=e4m3,unit=channel)", x)
    low = np.array([1.0625, 1.3125, -1.0625, 17.0])
    apart = low + np.where(np.abs(low) < 2, np.sign(low) * 2.0**-10, 2.0**-6)
    x = hexed(np.stack([np.minimum(low, apart), np.maximum(low, apart)] * 4))
    round_trip(
        g,
        "no-fp16-between",
        "(mn + mx) / 2 beside a tie in fp32 and on it in fp16: rounded straight from fp32",
        "channel-widths(bits=0000,group=8,params=e4m3,unit=channel)",
        x,
    )
    span = np.zeros((8, 8))
    span[1] = [1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, 464, 500, 2.0**-11, 15.5]
    round_trip(
        g,
        "scales",
        "The same for scales (one bit: s is the range)",
        "channel-widths(bits=11111111,group=8,params=e4m3,unit=channel)",
        hexed(span),
    )


def pair_mix() -> Suite:
    suite = Suite("codec-pair-mix")
    stream = Stream(32)
    text = "pair-mix(low=1,high=3,group={},mask={}{})".format
    g = suite.group("masks", "Share of salient pairs from none to all, with and without midpoint")
    for i, dim in enumerate((16, 64, 80, 128)):
        for percent in (0, 25, 50, 100):
            for midpoint in ("", ",midpoint=1"):
                if dim > 64 and percent in (0, 100):
                    continue
                mask = mask_text([stream.below(100) < percent for _ in range(dim // 2)])
                x = made(4000 + i, (8 if dim > 16 else 24, dim), 2.0, 0.1)
                round_trip(
                    g, f"D{dim}-{percent}{'-midpoint' if midpoint else ''}", f"{percent} % salient", text(8, mask, midpoint), x
                )
    g = suite.group("pairs", "Which channels a mask bit means, by layout and rotary part")
    for i, (layout, r, first) in enumerate(ROTARY):
        for bit in (0, 3, 7):
            mask = mask_text(np.arange(8) == bit)
            head = dict(layout=layout, rotary_dim=r or None, rotary_first=first or None)
            round_trip(
                g,
                f"{layout}-{r}-{first}-pair-{bit}",
                f"pair {bit} alone is salient",
                text(8, mask, ",midpoint=1"),
                made(4100 + i, (8, 16)),
                **head,
            )
    g = suite.group("by-channel", "unit=channel: one mask bit a channel")
    for i, dim in enumerate((6, 16, 64, 80)):
        mask = mask_text([stream.below(2) for _ in range(dim)])
        round_trip(g, f"D{dim}", "Random channels", text(8, mask, ",unit=channel,midpoint=1"), made(4200 + i, (16, dim)))
    _pair_mix_planes(suite, text)
    return suite


def _pair_mix_planes(suite: Suite, text) -> None:
    g = suite.group("planes", "Token 8j+i of a channel at bit i of byte j of the low plane; 4j+i at bits 2i of the high plane")
    for token in (0, 1, 7, 8, 15):
        x = np.zeros((16, 4))
        x[15 - token] = 0.001
        x[token] = 7
        wire_only(g, f"token-{token}", f"token {token} alone has the highest code", text(16, "02", ""), hexed(x))
    g = suite.group("groups", "G from 8 to 128, several groups: planes of each group, then all parameters")
    for i, (G, groups) in enumerate(((8, 1), (8, 3), (16, 2), (24, 1), (32, 2), (64, 2), (128, 1), (128, 2))):
        wire_only(
            g,
            f"G{G}-{groups}-groups",
            "Low plane, high plane, per group",
            text(G, "a5", ",midpoint=1"),
            made(4300 + i, (G * groups, 16), 3.0),
        )
    g = suite.group("ties", "Halves in both widths")
    for G in (8, 16):
        three = hexed(padded_columns(torture.half_ties(G, 8), 8), "f32")
        round_trip(g, f"three-bits-G{G}", "Exact halves of 8 levels", text(G, "0f", ""), three)
        one = hexed(padded_columns(torture.middle_ties(G, 2), 8), "f32")
        round_trip(g, f"one-bit-G{G}", "Exactly between the two levels: code 0", text(G, "00", ",midpoint=1"), one)
    variants = {
        "half": text(16, "0f", ""),
        "half-midpoint": text(16, "0f", ",midpoint=1"),
        "low": text(16, "00", ",midpoint=1"),
        "high": text(16, "ff", ""),
    }
    torture_tests(suite, "torture", "Inputs that have broken quantizers, one channel each", variants, 16)
    g = suite.group("by-hand", "Small enough to check on paper")
    values = round_trip(g, "midpoint-is-for-one-bit", "{-3, 4} at one bit: -1.25 and 2.25; at three bits the end points stay", text(8, "02", ",midpoint=1"),
                        hexed(np.array([[-3.0] * 4, [4.0] * 4] * 4)))  # fmt: skip
    assert values[:2].tolist() == [[-1.25, -3, -1.25, -3], [2.25, 4, 2.25, 4]], "half layout: pair 1 is channels 1 and 3"


def kitty() -> Suite:
    suite = Suite("codec-kitty")
    g = suite.group("boost", "The floor(D*p/q) channels of largest sum of abs have 16 levels, chosen group by group")
    for i, (dim, boost) in enumerate((dim, boost) for dim in (16, 64, 80, 128) for boost in ("0/1", "1/32", "1/8", "1/3", "1/1")):
        tokens = 8 if dim <= 64 else 4
        x = made(5000 + i, (tokens, dim), 1.0, 0.0, chan_mul=1 + (np.arange(dim) * 7 % 11) / 4)
        round_trip(g, f"D{dim}-{boost.replace('/', '-of-')}", f"boost {boost}", f"kitty(boost={boost},group=4)", x)
    g = suite.group("choice", "Equal sums go to the lower channel; groups choose apart; the sum is exact")
    for slug, comment, x in _kitty_choices():
        round_trip(g, slug, comment, "kitty(boost=1/4,group=4)", hexed(x, "f32"))
    g = suite.group("groups", "Planes and positions of a group, then the next group, then all parameters")
    for i, (G, groups) in enumerate(((4, 1), (4, 3), (8, 2), (12, 1), (32, 1), (64, 2), (128, 1), (128, 2))):
        wire_only(
            g, f"G{G}-{groups}-groups", "Order of a block", f"kitty(boost=1/4,group={G})", made(5100 + i, (G * groups, 16), 3.0)
        )
    g = suite.group("ties", "Halves in both level counts")
    x = hexed(
        np.concatenate([padded_columns(torture.half_ties(8, 4), 4), padded_columns(8 * torture.half_ties(8, 16), 4)], axis=1),
        "f32",
    )
    round_trip(g, "halves", "Exact halves of 4 and of 16 levels", "kitty(boost=1/2,group=8)", x)
    torture_tests(
        suite,
        "torture",
        "Inputs that have broken quantizers, one channel each",
        {"quarter": "kitty(boost=1/4,group=16)", "all": "kitty(boost=1/1,group=16)"},
        16,
    )
    return suite


def _kitty_choices():
    ones = np.ones((4, 8))
    yield "equal-sums", "All sums equal: channels 0 and 1", ones * [1, -1, 1, 1, -1, 1, 1, 1]
    last = ones.copy()
    last[2, 7] = 1 + 2.0**-10
    yield "one-step-more", "Channel 7 has one fp16 step more than the others", last
    tiny = np.zeros((4, 8))
    tiny[0, 5], tiny[0, 2] = 2 * torture.SMALLEST, torture.SMALLEST
    yield "subnormal-sums", "Sums of 2^-23 and 2^-24 are told apart", tiny
    big = np.full((4, 8), 65504.0)
    big[0, 6] = 65504
    big[:, 0] = -65504
    big[3, 1] = 65472
    yield "large-sums", "65504 four times against one step less: fp16 or fp32 sums would tie", big
    two = np.concatenate([ones * np.arange(8), ones * np.arange(8)[::-1]])
    yield "two-groups", "The second group has the opposite order", two
    mixed = np.full((4, 8), 1000.0)
    mixed[0] += np.arange(8) * 0.5
    mixed[1] -= np.arange(8) * 0.5
    yield "cancelling", "Differences that cancel: a tie again", mixed


def polar() -> Suite:
    suite = Suite("codec-polar")
    g = suite.group("levels", "Radius and angle levels")
    for i, (r, a) in enumerate((r, a) for r in (2, 3, 4, 8, 16, 256) for a in (2, 4, 5, 16, 256)):
        round_trip(
            g,
            f"R{r}-A{a}",
            f"{r} radius and {a} angle levels",
            f"polar(radius={r},angle={a},group=8)",
            made(6000 + i, (16, 8), 2.0),
        )
    g = suite.group("heads", "Head sizes, layouts and rotary parts; radii of all pairs first, then angles")
    for i, dim in enumerate((2, 16, 64, 80, 128, 256)):
        for layout in ("half", "adjacent"):
            text = f"polar(radius=4,angle=4,group={4 if dim > 64 else 8})"
            round_trip(
                g, f"D{dim}-{layout}", f"{dim} channels", text, made(6100 + i, (4 if dim > 64 else 8, dim), 2.0), layout=layout
            )
    for i, (layout, r, first) in enumerate(ROTARY[2:]):
        head = dict(layout=layout, rotary_dim=r, rotary_first=first or None)
        round_trip(
            g,
            f"{layout}-{r}-{first}",
            "Pairs by rotary part",
            "polar(radius=16,angle=16,group=4)",
            made(6200 + i, (8, 16)),
            **head,
        )
    g = suite.group("groups", "Any G")
    for i, G in enumerate((1, 2, 3, 5, 7, 8, 31, 33, 128)):
        round_trip(
            g, f"G{G}", f"{G} tokens a group", f"polar(radius=4,angle=4,group={G})", made(6300 + i, (G if G > 8 else 2 * G, 4))
        )
    g = suite.group("angles", "atan2p and sincosp at every corner: axes, diagonals, signs, the wrap at 2 pi")
    for slug, comment, x in _polar_angles():
        for levels in (4, 256):
            text = f"polar(radius={levels},angle={levels},group={len(x)})"
            round_trip(g, f"{slug}-A{levels}", comment, text, hexed(x, "f32"), close=slug != "just-below-the-axis")
    torture_tests(
        suite,
        "torture",
        "Inputs that have broken quantizers, one channel each",
        {"L4": "polar(radius=4,angle=4,group=12)", "L256": "polar(radius=256,angle=256,group=12)"},
        12,
    )
    return suite


def _polar_angles():
    """[tokens][2]: one pair."""
    yield "origin", "The pair (0, 0) has angle 0", np.zeros((4, 2))
    axes = np.array([[1, 0], [0, 1], [-1, 0], [0, -1], [1, 1], [-1, 1], [-1, -1], [1, -1]], float)
    yield "axes-and-diagonals", "Multiples of 45 degrees", axes
    yield (
        "signed-zeros",
        "-0 enters as +0: (-1, -0) is pi, not -pi",
        np.array([[1, -0.0], [-1, -0.0], [-0.0, 1], [-0.0, -1], [-0.0, -0.0], [2, 0]]),
    )
    yield "wrap", "Angles +-0.01 in turn: 0.01 and 2 pi - 0.01", np.array([[1, 0.01 * (-1) ** i] for i in range(8)])
    tiny = torture.SMALLEST
    yield (
        "just-below-the-axis",
        "v = -2^-24 below a large u: r rounds to 2 pi and becomes 0",
        np.array([[6e4, -tiny], [1, -tiny], [tiny, -tiny], [6e4, tiny]]),
    )
    yield "large", "Radius beyond fp16 saturates", np.array([[6e4, 6e4], [65504, 65504], [-65504, 1], [1, 1], [3e4, -5e4]])
    yield (
        "subnormal",
        "u*u underflows in no fp32 product of fp16 values",
        np.array([[tiny, 0], [0, tiny], [tiny, tiny], [-3 * tiny, 5 * tiny]]),
    )
    turn = np.arange(64) * (2 * np.pi / 64) + 0.013
    yield "full-turn", "64 directions", np.stack([np.cos(turn), np.sin(turn)], axis=1) * 3
    stream = Stream(74)
    yield "all-magnitudes", "u and v of all magnitudes", stream.halves(32, 2)


def suites() -> list[Suite]:
    return [affine_channel(), channel_widths(), pair_mix(), kitty(), polar()]
