"""The two steps that pin a codec: encode an input to wire bytes, decode them to values; and what is known about both."""

import numpy as np

from kvqref.text import parse_call

from . import facts
from .data import array, entered
from .script import Group, Script

HEAD_KEYS = ("layout", "rotary_dim", "rotary_first")


def encode(script: Script, text: str, x: dict, tensor: str = "k", mu: dict | None = None, **head) -> str:
    """Pins the wire bytes."""
    return script.ok("encode", codec=text, dim=x["shape"][1], tensor=tensor, x=x, mu=mu, **head)["wire"]


def decode(script: Script, text: str, dim: int, tokens: int, wire: str, tensor: str = "k", mu: dict | None = None, **head):
    """Pins the values; returns them as float64."""
    step = script.ok("decode", codec=text, dim=dim, tensor=tensor, tokens=tokens, wire=wire, mu=mu, **head)
    return array(step["values"])


def wire_only(group: Group, slug: str, comment: str, text: str, x: dict, **more) -> str:
    """For long inputs: only the bytes, whose number is checked by its formula."""
    wire = encode(group.test(slug, comment), text, x, **more)
    _check_size(text, x, wire, more)
    return wire


def round_trip(group: Group, slug: str, comment: str, text: str, x: dict, close: bool = True, **more) -> np.ndarray:
    """Bytes and values, held against what float64 says about them; `close=False` where saturation makes that void."""
    script = group.test(slug, comment)
    wire = encode(script, text, x, **more)
    values = decode(script, text, x["shape"][1], x["shape"][0], wire, **more)
    _check_size(text, x, wire, more)
    if close:
        _check_values(text, entered(x), values, more)
    return values


def _pairs(dim: int, more: dict) -> np.ndarray:
    if more.get("tensor") == "v":
        return facts.pairs_of(dim, more.get("layout", "half"))
    return facts.pairs_of(dim, *(more.get(key) or default for key, default in zip(HEAD_KEYS, ("half", 0, 0))))


def bits_of_mask(text: str, n: int) -> np.ndarray:
    data = np.frombuffer(bytes.fromhex(text), np.uint8)
    return np.unpackbits(data, bitorder="little")[:n].astype(bool)


def channel_levels(text: str, dim: int, more: dict) -> np.ndarray:
    """Levels of every channel of a per-channel codec other than kitty."""
    name, values = parse_call(text)
    if name == "affine-channel":
        return np.full(dim, int(values["levels"]))
    pairs = _pairs(dim, more)
    by_channel = values.get("unit") == "channel"
    if name == "pair-mix":
        unit = np.where(bits_of_mask(values["mask"], dim if by_channel else dim // 2), 8, 2)
    else:
        unit = 2 ** np.array([int(d) for d in values["bits"]])
    levels = np.zeros(dim, np.int64)
    levels[np.arange(dim) if by_channel else pairs.T] = unit
    return levels


def kitty_levels(x: np.ndarray, group: int, boost: str) -> np.ndarray:
    """[groups, dim]: float64 holds the sums of abs exactly."""
    p, q = map(int, boost.split("/"))
    levels = np.full((len(x) // group, x.shape[1]), 4)
    for row, sums in zip(levels, np.abs(x).reshape(-1, group, x.shape[1]).sum(axis=1)):
        row[np.argsort(-sums, kind="stable")[: x.shape[1] * p // q]] = 16
    return levels


def _check_size(text: str, x: dict, wire: str, more: dict) -> None:
    assert len(wire) == 2 * wire_size(text, *x["shape"], more), f"{text}: {len(wire) // 2} bytes"


def wire_size(text: str, tokens: int, dim: int, more: dict) -> int:
    """Section 5's tables as formulas."""
    name, values = parse_call(text)
    number = {key: int(value) for key, value in values.items() if value.isdigit()}
    stream = facts.stream_bytes
    scalar = 1 if values.get("params") in ("e5m3", "e4m3") else 2
    if name == "raw" or text == "progressive(bits=16)":
        return tokens * dim * 2
    if name == "progressive":
        return stream(tokens * dim, 2 ** number["bits"]) + 4 * tokens
    if name == "affine-token":
        return stream(tokens * dim, number["levels"]) + 4 * tokens * dim // number["group"]
    if name == "lloyd":
        return stream(tokens * dim, number["levels"]) + scalar * tokens
    if name == "width-groups":
        widths = [int(d) for d in values["bits"]]
        return sum(stream(tokens * 2 * widths.count(w), 2**w) + scalar * tokens for w in set(widths))
    if name == "channel-split":
        high = int(bits_of_mask(values["mask"], dim).sum())
        classes = [(dim - high, number["low"]), (high, number["high"])]
        return sum(stream(tokens * n, levels) + scalar * tokens for n, levels in classes if n)
    groups, G = tokens // number["group"], number["group"]
    if name == "polar":
        return groups * (dim // 2 * (stream(G, number["radius"]) + stream(G, number["angle"])) + 4 * dim)
    if name == "kitty":
        p, q = map(int, values["boost"].split("/"))
        return groups * (dim * G // 4 + dim * p // q * G // 4 + dim + 4 * dim)
    levels = channel_levels(text, dim, more)
    return groups * (sum(stream(G, int(L)) for L in levels if L > 1) + 2 * scalar * dim)


def _check_values(text: str, x: np.ndarray, values: np.ndarray, more: dict) -> None:
    name, options = parse_call(text)
    number = {key: int(value) for key, value in options.items() if value.isdigit()}
    dim = x.shape[1]
    if name == "raw" or text == "progressive(bits=16)":
        assert np.array_equal(x, values), "raw values must come back"
    elif name == "kitty":
        facts.groups_within(x, values, number["group"], kitty_levels(x, number["group"], options["boost"]))
    elif name in ("affine-channel", "channel-widths", "pair-mix"):
        levels = channel_levels(text, dim, more)
        midpoint = options.get("midpoint") == "1"
        store = facts.e4m3 if options.get("params") == "e4m3" else facts.half
        facts.groups_within(x, values, number["group"], levels, midpoint & ((levels == 2) | (name != "pair-mix")), store)
    elif name == "affine-token" and options.get("rotate") != "1" and options.get("center") != "1":
        facts.rows_within(x, values, number["group"], number["levels"])
    elif name == "polar":
        facts.polar_within(x, values, _pairs(dim, more), number["group"], number["radius"], number["angle"])
    elif name == "lloyd" and options.get("scale", "matched") == "matched" and not {"center", "params"} & set(options):
        facts.norms_kept(x, values)
