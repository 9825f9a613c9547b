"""Vectors on real data: keys, values and queries that a language model produced (tests/data/trace.npz)."""

from functools import lru_cache
from pathlib import Path

import numpy as np

from . import facts
from .coding import round_trip, wire_only
from .data import hexed
from .script import Suite
from .story import Story

TRACE = Path(__file__).resolve().parents[3] / "tests" / "data" / "trace.npz"
DIM, HEADS_PER_KV = 64, 3


@lru_cache
def _recorded() -> dict[str, np.ndarray]:
    """q, k, v [layer][token][head][channel], float64."""
    with np.load(TRACE) as file:
        return {name: np.float64(file[name]) for name in "qkv"}


def tokens(layer: int, head: int, first: int, count: int) -> dict[str, np.ndarray]:
    """k, v [token][channel] and q [query head][token][channel] of one KV head."""
    data = _recorded()
    span = slice(first, first + count)
    q = data["q"][layer, span, head * HEADS_PER_KV : (head + 1) * HEADS_PER_KV].transpose(1, 0, 2)
    return {"k": data["k"][layer, span, head], "v": data["v"][layer, span, head], "q": q}


def codecs() -> Suite:
    suite = Suite("trace-codecs")
    keys = {
        "kivi": "affine-channel(levels=4,group=32)",
        "polar": "polar(radius=4,angle=4,group=32)",
        "kitty": "kitty(boost=1/32,group=32)",
        "pnmix": "pair-mix(low=1,high=3,group=32,mask=a5c3a5c3,midpoint=1)",
        "widths": "channel-widths(bits=12304512304123041230412304123041,group=32,midpoint=1)",
        "tq": "lloyd(levels=4)",
        "blockgtq": "width-groups(bits=24351323243513232435132324351323)",
        "split": "channel-split(high=8,low=4,mask=00ff00ff00ff00ff)",
        "semkv": "affine-token(levels=6,group=64,rotate=1)",
    }
    g = suite.group("keys", "Keys of three layers: channels with offsets and outliers, as models have them")
    for i, (name, text) in enumerate(keys.items()):
        x = tokens(i % 3, i % 3, 96, 32)["k"]
        wire_only(g, name, text, text, hexed(x))
    g = suite.group("key-values", "The same, decoded: 8 tokens")
    for i, (name, text) in enumerate(keys.items()):
        x = tokens((i + 1) % 3, (i + 2) % 3, 64, 8)["k"]
        round_trip(g, name, text, text.replace("group=32", "group=8"), hexed(x))
    g = suite.group("values", "Values")
    for i, text in enumerate(
        (
            "affine-token(levels=4,group=32)",
            "lloyd(levels=3,params=e5m3)",
            "lloyd(levels=8)",
            "channel-split(high=8,low=4,mask=ffffffff00000000)",
            "progressive(bits=4)",
        )
    ):
        round_trip(g, text.split("(")[0] + f"-{i}", text, text, hexed(tokens(i % 3, i % 3, 200, 8)["v"]), tensor="v")
    return suite


def policies() -> Suite:
    suite = Suite("trace-policies")
    g = suite.group(
        "decisions", "Masks, widths and means of real statistics; equal to a choice made in float64 where that is clear"
    )
    for layer in range(3):
        x = tokens(layer, layer, 32 * layer, 16)
        k, q = hexed(x["k"]), hexed(x["q"])
        mask = g.test(f"pnmix-{layer}", "Half of the pairs by query times key").ok("policy", name="pnmix", r="1/2", k=k, q=q)[
            "mask"
        ]
        pairs = facts.pairs_of(DIM)
        norms = [np.hypot(y[..., pairs[:, 0]], y[..., pairs[:, 1]]).reshape(-1, DIM // 2).sum(axis=0) for y in (x["k"], x["q"])]
        order = np.argsort(-norms[0] * norms[1], kind="stable")[: DIM // 4]
        assert set(order) == {i for i in range(DIM // 2) if int.from_bytes(bytes.fromhex(mask), "little") >> i & 1}
    x = tokens(1, 2, 300, 16)
    k, q = hexed(x["k"]), hexed(x["q"])
    for score in ("qk-avg", "q-var", "q-geo", "q-range"):
        g.test(f"widths-{score}", f"score={score}").ok(
            "policy", name="pair-widths", avg="21/8", bmin=0, bmax=6, unit=4, score=score, k=k, q=q
        )
    mu = g.test("center", "The mean of real keys").ok("policy", name="center", k=k)["mu"]
    assert np.allclose(np.frombuffer(bytes.fromhex(mu["hex"]), "<f2"), x["k"].mean(axis=0), rtol=2**-10, atol=2**-20)
    g.test("channel-split", "Half of the channels").ok("policy", name="channel-split", k=k)
    g.test("kitty", "Boosted channels").ok("policy", name="kitty", boost="1/8", k=k)
    g.test("stats", "Exact sums").ok("stats", k=k, q=q)
    return suite


RECIPES = {
    "kivi": {"k": "affine-channel(levels=4,group=16)", "v": "affine-token(levels=4,group=32)", "block": 16},
    "pnmix": {"k": "pair-mix(low=1,high=3,group=16,midpoint=1)", "v": "affine-token(levels=4,group=32)", "sinks": 4, "block": 16, "policy": "pnmix(r=1/2)"},
    "kvq": {"k": "channel-widths(group=16,midpoint=1)", "v": "lloyd(levels=6,params=e5m3)", "sinks": 4, "recent": 4, "block": 16,
            "policy": "pair-widths(avg=3,bmin=0,bmax=6,unit=4)"},
    "blockgtq": {"k": "width-groups(center=1,params=e5m3)", "v": "lloyd(levels=8)", "sinks": 4, "block": 16, "policy": "blockgtq(avg=3,score=q-geo)"},
    "tq": {"k": "lloyd(levels=4,center=1)", "v": "lloyd(levels=4)", "sinks": 4, "recent": 4, "block": 16},
    "semkv": {"block": 16, "policy": "semkv(r=1/4,low=lloyd(levels=5),high=lloyd(levels=6))"},
}  # fmt: skip


def sequences() -> Suite:
    suite = Suite("trace-sequences", "L3")
    g = suite.group("prompt", "A real prompt: policy, packing, and attention with real queries")
    geometry = {"layers": 1, "kv_heads": 1, "q_heads": HEADS_PER_KV, "dim_k": DIM, "dim_v": DIM}
    for i, (name, recipe) in enumerate(RECIPES.items()):
        s = Story(g, name, f"{recipe}", {"recipe": recipe}, geometry, 3000 + i)
        x = tokens(i % 3, (i + 1) % 3, 0, 42)
        given = {"k": hexed(x["k"][None, None]), "v": hexed(x["v"][None, None])}
        if "policy" in recipe and name != "semkv":
            given["q"] = hexed(x["q"][None])
        if name == "semkv":
            given["scores"] = hexed(np.linalg.norm(x["k"], axis=1), "f32")
        s.note("a", s.script.ok("commit", seq="a", **given)["lengths"], given)
        s.block("a", 0)
        s.values("a", 30, 2)
        s.attend("a", 2, q=hexed(x["q"][:, -2:]))
    return suite


def suites() -> list[Suite]:
    return [codecs(), policies(), sequences()] if TRACE.exists() else []
