"""What encode and decode must refuse: texts, shapes, and wire bytes that no encoder writes (FORMATS section 5)."""

import re

import numpy as np

from kvqref.exec import Interpreter

from .coding import decode
from .data import hexed, made
from .script import Suite

GOOD = {
    "raw": "raw",
    "affine-channel": "affine-channel(levels=4,group=8)",
    "affine-token": "affine-token(levels=4,group=16)",
    "lloyd": "lloyd(levels=4)",
    "pair-mix": "pair-mix(low=1,high=3,group=8,mask=0f)",
    "width-groups": "width-groups(bits=12341234)",
    "channel-split": "channel-split(high=8,low=4,mask=00ff)",
    "kitty": "kitty(boost=1/4,group=8)",
    "channel-widths": "channel-widths(bits=12341234,group=8)",
    "polar": "polar(radius=4,angle=4,group=8)",
    "progressive": "progressive(bits=8)",
}
REQUIRED = {
    "affine-channel": ("levels", "group"),
    "affine-token": ("levels", "group"),
    "lloyd": ("levels",),
    "pair-mix": ("low", "high", "group", "mask"),
    "width-groups": ("bits",),
    "channel-split": ("high", "low", "mask"),
    "kitty": ("boost", "group"),
    "channel-widths": ("bits", "group"),
    "polar": ("radius", "angle", "group"),
    "progressive": ("bits",),
}


def _without(text: str, key: str) -> str:
    text = re.sub(rf"{key}=[^,)]*,?", "", text).replace(",)", ")")
    return text.replace("()", "")


def texts() -> Suite:
    suite = Suite("codec-texts")
    x = made(1, (8, 16))

    def refuse(g, slug: str, comment: str, text: str, **head) -> None:
        script = g.test(slug, comment)
        arguments = {"codec": text, "dim": 16, "tensor": "k", "x": x} | head
        script.refused("INVALID", "encode", **arguments)

    g = suite.group("good", "The texts that the refusals below are made of")
    for name, text in GOOD.items():
        g.test(name, f"{text} is legal").ok("encode", codec=text, dim=16, tensor="k", x=x)
    for flag in ("rotate=0", "rotate=1", "center=0", "params=e5m3", "scale=ls", "seed=0", "seed=18446744073709551615"):
        g.test(f"lloyd-{flag.replace('=', '-')}", f"{flag} is legal").ok(
            "encode", codec=f"lloyd(levels=4,{flag})", dim=16, tensor="k", x=x
        )
    orders = (
        "lloyd(scale=ls,levels=4)",
        "pair-mix(mask=0f,group=8,high=3,low=1)",
        "kitty(group=8,boost=2/8)",
        "affine-channel(group=8,midpoint=0,levels=4)",
    )
    for i, text in enumerate(orders):
        g.test(f"any-order-{i}", "Keys stand in any order").ok("encode", codec=text, dim=16, tensor="k", x=x)

    g = suite.group("missing-keys", "A missing key is INVALID unless it stands in brackets")
    for name, keys in REQUIRED.items():
        for key in keys:
            refuse(g, f"{name}-{key}", f"{name} without {key}=", _without(GOOD[name], key))
    g = suite.group("unknown-keys", "Unknown and repeated keys are INVALID")
    for name, text in GOOD.items():
        more = f"{text[:-1]}," if text.endswith(")") else f"{text}("
        refuse(g, f"{name}-unknown", "A key that no codec has", f"{more}foo=1)")
        if name in REQUIRED:
            key = REQUIRED[name][0]
            value = re.search(rf"{key}=([^,)]*)", text)[1]
            refuse(g, f"{name}-repeated", f"{key}= twice", f"{more}{key}={value})")
    others = {
        "midpoint-of-rows": "affine-token(levels=4,group=16,midpoint=1)",
        "scale-of-affine": "affine-token(levels=4,group=16,scale=ls)",
        "rotate-of-channels": "affine-channel(levels=4,group=8,rotate=1)",
        "center-of-channels": "affine-channel(levels=4,group=8,center=1)",
        "group-of-lloyd": "lloyd(levels=4,group=16)",
        "levels-of-raw": "raw(levels=4)",
        "unit-of-width-groups": "width-groups(bits=12341234,unit=channel)",
        "e4m3-of-rows": "lloyd(levels=4,params=e4m3)",
        "e5m3-of-channels": "channel-widths(bits=12341234,group=8,params=e5m3)",
        "mask-of-lloyd": "lloyd(levels=4,mask=00ff)",
    }
    for slug, text in others.items():
        refuse(g, slug, "A key of another codec", text)
    _bad_values(suite, refuse)
    _bad_shapes(suite, refuse)
    return suite


def _bad_values(suite: Suite, refuse) -> None:
    g = suite.group("values", "Values outside what is allowed")
    bad = {
        "affine-channel(levels={},group=8)": (
            "0",
            "1",
            "9",
            "10",
            "12",
            "15",
            "17",
            "24",
            "33",
            "512",
            "-4",
            "4.0",
            "four",
            "0x4",
            "+4",
            "",
        ),
        "affine-channel(levels=4,group={})": ("0", "-8", "3", "16"),
        "affine-token(levels=4,group={})": ("0", "3", "5", "32"),
        "affine-token(levels=4,group=16,rotate={})": ("2", "yes", "-1"),
        "affine-channel(levels=4,group=8,midpoint={})": ("2", "true"),
        "lloyd(levels={})": ("0", "1", "9", "20", "512"),
        "lloyd(levels=4,scale={})": ("max", "MATCHED", "1"),
        "lloyd(levels=4,params={})": ("e4m4", "fp32"),
        "lloyd(levels=4,seed={})": ("18446744073709551616", "-1", "0x1", "1.5"),
        "pair-mix(low={},high=3,group=8,mask=0f)": ("0", "2"),
        "pair-mix(low=1,high={},group=8,mask=0f)": ("2", "4"),
        "pair-mix(low=1,high=3,group={},mask=0f)": ("4", "12"),
        "pair-mix(low=1,high=3,group=8,mask={})": ("0f0f", "f", "0g", "", "0x0f"),
        "pair-mix(low=1,high=3,group=8,mask=0f,unit={})": ("pairs", "2"),
        "pair-mix(low=1,high=3,group=8,unit=channel,mask={})": ("0f", "0f0f0f"),
        "width-groups(bits={})": ("1234123", "123412341", "12341230", "12341239", "1234 123", "1,2,3,4"),
        "channel-split(high=8,low=4,mask={})": ("0f", "00ff00"),
        "channel-split(high={},low=4,mask=00ff)": ("9", "1"),
        "kitty(boost={},group=8)": ("2/1", "1/0", "1.5", "-1/4", "1/4/2", "/4", "1/"),
        "kitty(boost=1/4,group={})": ("0", "2", "6"),
        "channel-widths(bits={},group=8)": ("1234123", "12341239", "1234123412341234"),
        "channel-widths(bits=12341234,group={})": ("4", "12"),
        "channel-widths(unit=channel,group=8,bits={})": ("12341234",),
        "channel-widths(bits=12341234,group=8,params={})": ("e4m2", "1"),
        "polar(radius={},angle=4,group=8)": ("1", "9"),
        "polar(radius=4,angle={},group=8)": ("0", "11"),
        "progressive(bits={})": ("1", "3", "6", "32"),
    }
    used: dict[str, int] = {}
    for text, values in bad.items():
        for value in values:
            slug = text.split("(")[0] + "-" + re.search(r"(\w+)=\{\}", text)[1]
            used[slug] = used.get(slug, 0) + 1
            refuse(g, f"{slug}-{used[slug]}", text.format(value), text.format(value))
    g = suite.group("syntax", "name, or name(key=value,...), without spaces")
    for i, text in enumerate(("", "lloid(levels=4)", "Lloyd(levels=4)", "lloyd(levels=4", "lloyd levels=4)", "lloyd(levels=4))", "lloyd(levels=4);", "lloyd( levels=4)",
                              " lloyd(levels=4)", "lloyd(levels=4) ", "lloyd(levels =4)", "lloyd(levels= 4)", "lloyd(levels)", "lloyd(levels=)", "lloyd(=4)", "lloyd(levels=4,)",
                              "lloyd(,levels=4)", "lloyd(levels:4)", "(levels=4)", "lloyd(levels=4)(scale=ls)", "raw,raw")):  # fmt: skip
        refuse(g, f"text-{i}", repr(text), text)


def _bad_shapes(suite: Suite, refuse) -> None:
    g = suite.group("shapes", "Token counts and rotary parts")
    for name in ("affine-channel", "pair-mix", "kitty", "channel-widths", "polar"):
        for tokens in (7, 9, 12):
            refuse(g, f"{name}-{tokens}-tokens", f"{tokens} tokens are no whole groups of 8", GOOD[name], x=made(2, (tokens, 16)))
    for name in ("width-groups", "pair-mix", "channel-widths", "polar", "lloyd", "affine-channel"):
        for r, first in ((3, None), (18, None), (8, 1), (8, 10), (16, 2), (None, 2)):
            refuse(
                g,
                f"{name}-rotary-{r}-first-{first}",
                "The rotary part must be even and fit into the head",
                GOOD[name],
                rotary_dim=r,
                rotary_first=first,
            )
    for name in ("width-groups", "channel-widths", "polar", "pair-mix"):
        script = g.test(f"{name}-odd-head", "Pairs need an even head")
        script.refused("INVALID", "encode", codec=GOOD[name], dim=15, tensor="k", x=made(3, (8, 15)))
    refuse(
        g,
        "kitty-256-boosted",
        "A position byte cannot hold 256 boosted channels",
        "kitty(boost=1/1,group=4)",
        x=made(6, (4, 256)),
        dim=256,
    )
    g = suite.group("center", "center=1 needs a mean, and keys")
    for text in (
        "lloyd(levels=4,center=1)",
        "affine-token(levels=4,group=16,center=1)",
        "width-groups(bits=12341234,center=1)",
        "channel-split(high=8,low=4,mask=00ff,center=1)",
    ):
        name = text.split("(")[0]
        refuse(g, f"{name}-no-mean", "Encoding without mu", text)
        refuse(g, f"{name}-values", "Values have no mean", text, tensor="v", mu=hexed(np.zeros(16)))
        script = g.test(f"{name}-decode-no-mean", "Decoding without mu")
        wire = Interpreter().step(
            {"op": "encode", "codec": text, "dim": 16, "tensor": "k", "x": made(4, (2, 16)), "mu": hexed(np.zeros(16))}
        )["result"]["wire"]
        script.refused("INVALID", "decode", codec=text, dim=16, tensor="k", tokens=2, wire=wire)


class Wire:
    """Wire bytes of a good block, to be spoiled."""

    def __init__(self, text: str, tokens: int, dim: int = 16, x: dict | None = None, **head):
        self.text, self.tokens, self.dim, self.head = text, tokens, dim, head
        x = x or made(5, (tokens, dim), 2.0)
        answer = Interpreter().step({"op": "encode", "codec": text, "dim": dim, "tensor": "k", "x": x, **head})
        self.data = bytes.fromhex(answer["result"]["wire"])

    def step(self, data: bytes) -> dict:
        return dict(codec=self.text, dim=self.dim, tensor="k", tokens=self.tokens, wire=data.hex(), **self.head)

    def spoiled(self, at: int, value: bytes) -> bytes:
        at %= len(self.data)
        assert self.data[at : at + len(value)] != value
        return self.data[:at] + value + self.data[at + len(value) :]


def corrupt() -> Suite:
    suite = Suite("codec-corrupt")
    sizes = suite.group("size", "A wire of another size")
    blocks = {name: Wire(text, 8) for name, text in GOOD.items()}
    blocks |= {
        "progressive-16": Wire("progressive(bits=16)", 8),
        "lloyd-e5m3": Wire("lloyd(levels=4,params=e5m3)", 8),
        "e4m3": Wire("channel-widths(bits=12341234,group=8,params=e4m3)", 8),
    }
    for name, wire in blocks.items():
        script = sizes.test(name, "Complete, then one byte less, one more, none, and twice")
        decode(script, wire.text, 16, 8, wire.data.hex())
        for data in (wire.data[:-1], wire.data + b"\0", b"", wire.data * 2):
            script.refused("CORRUPT", "decode", **wire.step(data))
    _words(suite)
    _padding(suite)
    _parameters(suite)
    _kitty(suite)
    groups = suite.group("groups", "A token count that is no whole group is INVALID, whatever the bytes")
    for name in ("affine-channel", "pair-mix", "kitty", "channel-widths", "polar"):
        wire = blocks[name]
        script = groups.test(name, "7 tokens with groups of 8")
        script.refused("INVALID", "decode", **wire.step(wire.data) | {"tokens": 7})
    return suite


def _words(suite: Suite) -> None:
    """Mixed radix: full words >= L^m, and a short last word >= L^t."""
    g = suite.group("words", "A word that no digits make")
    for L, digits, bits in ((3, 5, 8), (5, 3, 7), (6, 5, 13), (7, 6, 17)):
        for tokens in (1, 3):
            dim = 2 * digits if tokens == 1 else 2
            wire = Wire(f"lloyd(levels={L})", tokens, dim)
            count = tokens * dim
            stream = int.from_bytes(wire.data[: -2 * tokens], "little")
            size = len(wire.data) - 2 * tokens
            script = g.test(f"L{L}-T{tokens}-full", f"The first word is {L}^{digits}, and the largest of {bits} bits")
            if count >= digits:
                for word in (L**digits, (1 << bits) - 1):
                    bad = stream >> bits << bits | word
                    script.refused("CORRUPT", "decode", **wire.step(bad.to_bytes(size, "little") + wire.data[size:]))
                last = stream >> bits << bits | (L**digits - 1)
                decode(script, wire.text, dim, tokens, (last.to_bytes(size, "little") + wire.data[size:]).hex())
            else:
                decode(script, wire.text, dim, tokens, wire.data.hex())
        for short in range(1, digits):
            codes = digits + short
            if codes % 2:
                codes += digits if digits % 2 else 0
            if codes % 2:
                continue
            t = codes % digits
            wire = Wire(f"affine-token(levels={L},group={codes})", 1, codes)
            size = len(wire.data) - 4
            at = codes // digits * bits
            width = (L**t - 1).bit_length()
            stream = int.from_bytes(wire.data[:size], "little") & ((1 << at) - 1)
            script = g.test(f"L{L}-short-{t}", f"A short last word of {t} digits: {L}^{t} in {width} bits")
            best = stream | (L**t - 1) << at
            decode(script, wire.text, codes, 1, (best.to_bytes(size, "little") + wire.data[size:]).hex())
            if L**t < 1 << width:
                script.refused(
                    "CORRUPT", "decode", **wire.step((stream | L**t << at).to_bytes(size, "little") + wire.data[size:])
                )


def _padding(suite: Suite) -> None:
    g = suite.group("padding", "Bits that pad a stream to a byte must be 0")
    cases = {
        "affine-channel": ("affine-channel(levels=4,group=3)", 3, 0),
        "affine-channel-last": ("affine-channel(levels=8,group=1)", 2, -(2 * 16 * 4) - 1),
        "affine-token": ("affine-token(levels=8,group=2)", 1, 0),
        "lloyd": ("lloyd(levels=4)", 1, 0),
        "width-groups-first-class": ("width-groups(bits=1344)", 1, 0),
        "channel-split": ("channel-split(high=8,low=2,mask=03)", 1, 0),
        "polar": ("polar(radius=4,angle=4,group=3)", 3, 0),
    }
    for name, (text, tokens, at) in cases.items():
        dim = {"affine-token": 2, "lloyd": 2, "width-groups-first-class": 8, "channel-split": 8}.get(name, 16)
        wire = Wire(text, tokens, dim)
        script = g.test(name, "The highest bit of a padded byte is set")
        script.refused("CORRUPT", "decode", **wire.step(wire.spoiled(at, bytes([wire.data[at % len(wire.data)] | 0x80]))))


NOT_FINITE = {"infinity": "007c", "minus-infinity": "00fc", "nan": "007e", "minus-nan": "00fe", "signalling-nan": "017c"}
BAD_SCALES = NOT_FINITE | {"minus-zero": "0080", "negative": "00bc", "smallest-negative": "0180"}


def _parameters(suite: Suite) -> None:
    g = suite.group("parameters", "Not finite; s or h negative or -0")
    with_s = {
        "affine-channel": Wire(GOOD["affine-channel"], 8),
        "affine-token": Wire(GOOD["affine-token"], 2),
        "pair-mix": Wire(GOOD["pair-mix"], 8),
        "kitty": Wire(GOOD["kitty"], 8),
        "channel-widths": Wire(GOOD["channel-widths"], 8),
        "polar": Wire(GOOD["polar"], 8),
        "progressive": Wire(GOOD["progressive"], 2),
    }
    for name, wire in with_s.items():
        script = g.test(f"{name}-scale", "The last s")
        for value in BAD_SCALES.values():
            script.refused("CORRUPT", "decode", **wire.step(wire.spoiled(-4, bytes.fromhex(value))))
        script = g.test(f"{name}-zero", "The last z")
        for value in NOT_FINITE.values():
            script.refused("CORRUPT", "decode", **wire.step(wire.spoiled(-2, bytes.fromhex(value))))
        script = g.test(f"{name}-legal", "z of -0, negative and large parameters, s = 0: all decode, and no value is -0")
        for at, value in ((-2, "0080"), (-2, "00c0"), (-2, "ff7b"), (-4, "0000"), (-4, "ff7b"), (-4, "0100")):
            values = decode(script, wire.text, 16, wire.tokens, wire.spoiled(at, bytes.fromhex(value)).hex())
            assert not (np.signbit(values) & (values == 0)).any()
    for name, text in (
        ("lloyd", GOOD["lloyd"]),
        ("width-groups", GOOD["width-groups"]),
        ("channel-split", GOOD["channel-split"]),
    ):
        wire = Wire(text, 2)
        script = g.test(f"{name}-scalar", "The last h")
        for value in BAD_SCALES.values():
            script.refused("CORRUPT", "decode", **wire.step(wire.spoiled(-2, bytes.fromhex(value))))
        decode(script, text, 16, 2, wire.spoiled(-2, bytes.fromhex("0000")).hex())
    for name, text in (("raw", "raw"), ("progressive-16", "progressive(bits=16)")):
        wire = Wire(text, 2)
        script = g.test(f"{name}-values", "A value that is not finite; -0 decodes to +0")
        for value in NOT_FINITE.values():
            script.refused("CORRUPT", "decode", **wire.step(wire.spoiled(6, bytes.fromhex(value))))
        values = decode(script, text, 16, 2, wire.spoiled(6, bytes.fromhex("0080")).hex())
        assert values[0, 3] == 0 and not np.signbit(values[0, 3])
    _small_parameters(g)


def _small_parameters(g) -> None:
    wire = Wire("channel-widths(bits=12341234,group=8,params=e4m3)", 8)
    script = g.test("e4m3", "0x7F and 0xFF are never written; s must not be negative or 0x80")
    for at, value in ((-1, "7f"), (-1, "ff"), (-2, "7f"), (-2, "ff"), (-2, "80"), (-2, "b8"), (-2, "81")):
        script.refused("CORRUPT", "decode", **wire.step(wire.spoiled(at, bytes.fromhex(value))))
    for at, value in ((-1, "80"), (-1, "7e"), (-1, "fe"), (-2, "7e"), (-2, "01"), (-2, "00")):
        decode(script, wire.text, 16, 8, wire.spoiled(at, bytes.fromhex(value)).hex())
    wire = Wire("lloyd(levels=4,params=e5m3)", 1)
    script = g.test("e5m3", "Every byte is a value: 0 to 3840")
    for value in (0x00, 0x01, 0x07, 0x08, 0x80, 0xFF):
        decode(script, wire.text, 16, 1, (wire.data[:-1] + bytes([value])).hex())
    for params, size in (("", 2), (",params=e4m3", 1)):
        wire = Wire(f"channel-widths(bits=00001111,group=8{params})", 8)
        script = g.test(f"width-0{'-e4m3' if params else ''}", "s of a channel without bits is 0")
        first = len(wire.data) - 16 * 2 * size
        one = bytes.fromhex("003c")[-size:]
        script.refused("CORRUPT", "decode", **wire.step(wire.data[:first] + one + wire.data[first + size :]))
        decode(script, wire.text, 16, 8, (wire.data[: first + size] + one + wire.data[first + 2 * size :]).hex())


def _kitty(suite: Suite) -> None:
    g = suite.group("kitty", "Positions: 0xFF, or 0, 1, 2, ... in ascending channel order, as many as are boosted")
    wire = Wire("kitty(boost=1/4,group=8)", 8)
    first = 16 * 8 // 4 + 4 * 8 // 4
    positions = list(wire.data[first : first + 16])
    assert sorted(p for p in positions if p != 255) == [0, 1, 2, 3]
    boosted = [i for i, p in enumerate(positions) if p != 255]
    plain = [i for i, p in enumerate(positions) if p == 255]

    def changed(**to: int) -> bytes:
        spoiled = positions.copy()
        for key, value in to.items():
            spoiled[int(key[1:])] = value
        return wire.data[:first] + bytes(spoiled) + wire.data[first + 16 :]

    cases = {
        "swapped": {f"c{boosted[0]}": 1, f"c{boosted[1]}": 0},
        "one-missing": {f"c{boosted[3]}": 255},
        "one-too-many": {f"c{plain[-1]}": 4},
        "repeated": {f"c{boosted[1]}": 0},
        "gap": {f"c{boosted[3]}": 4},
        "another-mark": {f"c{plain[0]}": 254},
        "none": {f"c{i}": 255 for i in boosted},
    }
    for slug, change in cases.items():
        g.test(slug, f"positions {change}").refused("CORRUPT", "decode", **wire.step(changed(**change)))
    moved = {f"c{boosted[3]}": 255, f"c{plain[-1]}": 3} if plain[-1] > boosted[3] else {f"c{boosted[0]}": 255, f"c{plain[0]}": 0}
    decode(
        g.test("other-channels", "Other channels than the encoder would choose are consistent"),
        wire.text,
        16,
        8,
        changed(**moved).hex(),
    )


def suites() -> list[Suite]:
    return [texts(), corrupt()]
