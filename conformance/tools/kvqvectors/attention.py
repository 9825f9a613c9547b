"""Vectors of attention (FORMATS section 9): float64 over the exported cache, with the bounds of section 9."""

import numpy as np

from . import facts
from .data import array, entered, hexed, made
from .script import Group, Suite
from .sequences import RECIPES, recipe_blocks
from .sequences_presets import PRESETS, RULES
from .story import SMALL, Story

RAW = {"recipe": {"k": "raw", "v": "raw", "block": 8}}
ROWS = {"recipe": {"k": "lloyd(levels=8)", "v": "lloyd(levels=4)", "block": 8}}
CHANNELS = {
    "recipe": {
        "k": "affine-channel(levels=4,group=8)",
        "v": "affine-token(levels=4,group=8)",
        "block": 16,
        "sinks": 2,
        "recent": 4,
    }
}
KINDS = {"raw": RAW, "rows": ROWS, "channels": CHANNELS}


def geometry(q_heads: int = 2, kv_heads: int = 1, dim_k: int = 32, dim_v: int = 32, layers: int = 1) -> dict:
    return {"layers": layers, "kv_heads": kv_heads, "q_heads": q_heads, "dim_k": dim_k, "dim_v": dim_v}


def _brute(k: np.ndarray, v: np.ndarray, query: np.ndarray, scale: float) -> tuple[np.ndarray, float]:
    """One query over all tokens, written as the formula; a shift keeps exp in range."""
    logits = [scale * float(np.dot(query, row)) for row in k]
    weights = [np.exp(x - max(logits)) for x in logits]
    return sum(w * row for w, row in zip(weights, v)) / sum(weights), float(np.log(sum(weights))) + max(logits)


def states() -> Suite:
    """Attention at every state a sequence can be in."""
    suite = Suite("attention-states", "L3")
    g = suite.group("recipes", "Every kind of recipe: sinks, packed blocks and tail in one softmax")
    for i, name in enumerate(RECIPES):
        block, sinks, recent = recipe_blocks(name)
        s = Story(g, name, "Prompt, steps, a cut inside a block, going on", {"recipe": RECIPES[name]}, SMALL, 2000 + i)
        s.commit("a", sinks + recent + 2 * block + 3)
        s.attend("a", 1)
        s.append("a", 2)
        s.attend("a", 2, layer=1)
        s.change("truncate", "a", length=sinks + block + max(1, block // 2))
        s.attend("a", 1)
        s.append("a", block)
        s.attend("a", 3)
    g = suite.group("presets", "Every preset at 64 channels")
    for i, preset in enumerate(PRESETS):
        sinks, recent, block = RULES.get(preset, (0, 0, 64))
        s = Story(
            g, preset, f"sinks {sinks}, recent {recent}, block {block}", {"preset": preset}, geometry(4, 2, 64, 64), 2050 + i
        )
        s.commit("a", sinks + recent + block + 7)
        s.attend("a", 1)
        s.append("a", 1)
        s.attend("a", 2, mul=2.0)
    g = suite.group("lengths", "From one token on: tail only, tail and packed, packed only")
    for kind, create in KINDS.items():
        for total in (1, 2, 3, 7, 8, 9, 15, 16, 17, 22, 31, 33, 63, 65, 130):
            s = Story(g, f"{kind}-T{total}", f"{total} tokens", create, geometry(), 2100 + total)
            s.commit("a", total)
            s.attend("a", min(total, 2))
    g = suite.group("uncommitted", "Before the commit all tokens are raw and can be attended to")
    for kind, create in KINDS.items():
        s = Story(g, kind, "append, attend, append, attend, commit, attend", create, geometry(), 2150)
        s.append("a", 5, queries=True)
        s.attend("a", 2)
        s.append("a", 20, queries=True)
        s.attend("a", 1)
        s.commit("a", 0)
        s.attend("a", 1)
    _empty(suite)
    g = suite.group("forks", "Forks attend to what they share and to their own")
    for kind, create in KINDS.items():
        s = Story(g, kind, "Parent and child after the fork", create, geometry(), 2160)
        s.commit("a", 37)
        s.change("fork", "a", to="b")
        s.append("a", 3)
        s.append("b", 9)
        q = made(2161, (2, 2, 32), 1.0)
        for seq in "ab":
            s.attend(seq, 2, q=q)
        s.change("truncate", "b", length=21)
        s.attend("b", 2, q=q)
        s.attend("a", 2, q=q)
    return suite


def _empty(suite: Suite) -> None:
    g = suite.group("empty", "An empty sequence gives out 0 and LSE -inf, or the learned sink alone")
    for kind, create in KINDS.items():
        s = Story(g, f"{kind}-new", "Never filled", create, geometry(), 2170)
        s.commit("b", 3)
        for queries in (1, 3):
            result = s.attend("a", queries)
            assert not array(result["out"]).any() and np.isneginf(array(result["lse"])).all()
        s = Story(g, f"{kind}-emptied", "Truncated to nothing; then filled again", create, geometry(), 2171)
        s.commit("a", 20)
        s.change("truncate", "a", length=0)
        s.attend("a", 1)
        s.attend("a", 2, sinks=hexed([0.5, -3.0], "f32"))
        s.append("a", 3)
        s.attend("a", 2)
    g = suite.group(
        "refused", "More queries than tokens is INVALID unless the sequence is empty; NaN is NONFINITE; a removed sequence STALE"
    )
    for kind, create in KINDS.items():
        s = Story(g, kind, "3 tokens, 4 queries", create, geometry(), 2180)
        s.commit("a", 3)
        s.script.refused("INVALID", "attend", seq="a", layer=0, q=made(1, (2, 4, 32)))
        s.script.refused("INVALID", "attend", seq="a", layer=1, q=made(1, (2, 1, 32)))
        values = np.zeros((2, 1, 32))
        values[1, 0, 31] = np.nan
        s.script.refused("NONFINITE", "attend", seq="a", layer=0, q=hexed(values))
        s.attend("a", 3)
        s.script.ok("remove", seq="a")
        s.script.refused("STALE", "attend", seq="a", layer=0, q=made(1, (2, 1, 32)))


def options() -> Suite:
    suite = Suite("attention-options", "L3")
    g = suite.group("causal", "Row i sees the tokens up to its own; the newest n tokens are the queries'")
    for kind, create in KINDS.items():
        for total, n in ((1, 1), (4, 4), (9, 9), (20, 5), (33, 33), (40, 17)):
            s = Story(g, f"{kind}-{n}-of-{total}", f"{n} queries of {total} tokens", create, geometry(), 2200 + total)
            s.commit("a", total)
            s.attend("a", n)
    g = suite.group("window", "The newest w positions, the query's own included")
    for kind, create in KINDS.items():
        for window in (1, 2, 3, 8, 17, 39, 40, 41, 1000):
            s = Story(g, f"{kind}-{window}", f"window {window} over 40 tokens, 3 queries", create, geometry(), 2250)
            s.commit("a", 40)
            s.attend("a", 3, window=window)
    g = suite.group("softcap", "c * tanh(x / c) of the scaled logits")
    for kind, create in KINDS.items():
        for cap in (0.5, 1.0, 5.0, 50.0):
            s = Story(g, f"{kind}-{cap}", f"softcap {cap}", create, geometry(), 2260)
            s.commit("a", 30)
            s.attend("a", 2, mul=6.0, softcap=cap)
            s.attend("a", 2, mul=6.0, softcap=cap, scale=1.0)
    g = suite.group("sinks", "One learned logit a query head, neither scaled nor capped; it takes weight and gives no value")
    for kind, create in KINDS.items():
        for slug, sinks in (
            ("small", [0.5, -1.0]),
            ("large", [20.0, 3.0]),
            ("vanishing", [-50.0, -1000.0]),
            ("zero", [0.0, -0.0]),
        ):
            s = Story(g, f"{kind}-{slug}", f"Learned sinks {sinks}", create, geometry(), 2270)
            s.commit("a", 25)
            s.attend("a", 2, sinks=hexed(sinks, "f32"))
            s.attend("a", 1, mul=3.0, sinks=hexed(sinks, "f32"), scale=0.5, softcap=2.0, window=6)
    g = suite.group("scale", "The scale of the logits; 1/sqrt(D of K) unless given")
    for kind, create in KINDS.items():
        for scale in (0.01, 0.125, 1.0):
            s = Story(g, f"{kind}-{scale}", f"scale {scale}", create, geometry(), 2280)
            s.commit("a", 30)
            s.attend("a", 2, scale=scale)
    _heads(suite)
    _extremes(suite)
    return suite


def _heads(suite: Suite) -> None:
    g = suite.group("heads", "Query heads per KV head; several layers; K and V of different size")
    for q_heads, kv_heads in ((1, 1), (2, 1), (3, 1), (4, 2), (5, 1), (6, 2), (7, 1), (8, 1), (8, 4), (10, 5), (16, 2)):
        for kind in ("rows", "channels"):
            s = Story(
                g,
                f"{kind}-{q_heads}-on-{kv_heads}",
                f"{q_heads} query heads on {kv_heads}",
                KINDS[kind],
                geometry(q_heads, kv_heads, 16, 16),
                2300 + q_heads,
            )
            s.commit("a", 27)
            s.attend("a", 2)
    shapes = (
        (2, 2),
        (40, 24),
        (64, 64),
        (72, 72),
        (80, 80),
        (96, 96),
        (112, 112),
        (120, 120),
        (128, 128),
        (160, 160),
        (192, 128),
        (256, 256),
    )
    for dim_k, dim_v in shapes:
        for kind, create in KINDS.items():
            if kind == "channels" and dim_v % 8:
                continue
            s = Story(
                g,
                f"{kind}-D{dim_k}-{dim_v}",
                f"{dim_k} channels of K, {dim_v} of V",
                create,
                geometry(2, 1, dim_k, dim_v),
                2350 + dim_k,
            )
            s.commit("a", 26)
            s.attend("a", 1)
    s = Story(g, "layers", "Three layers, each its own keys", ROWS, geometry(2, 1, 16, 16, 3), 2390)
    s.commit("a", 21)
    for layer in (2, 0, 1):
        s.attend("a", 1, layer=layer)


def _aligned(g: Group, slug: str, comment: str, keys: np.ndarray, queries: np.ndarray, values: np.ndarray, **options) -> None:
    """Raw tokens [token][dim] and one query head [n][dim], held against the formula."""
    keys, queries, values = facts.half(keys), facts.half(queries), facts.half(values)
    s = Story(g, slug, comment, RAW, geometry(1, 1, keys.shape[1], values.shape[1]), 2400)
    s.script.ok("commit", seq="a", k=hexed(keys[None, None]), v=hexed(values[None, None]))
    result = s.attend("a", len(queries), q=hexed(queries[None]), **options)
    if len(queries) == 1 and not options:
        out, lse = _brute(keys, values, queries[0], keys.shape[1] ** -0.5)
        assert np.allclose(out, array(result["out"])[0, 0], rtol=1e-6, atol=1e-6)
        assert abs(lse - array(result["lse"])[0, 0]) < 1e-4 * max(1, abs(lse))


def _extremes(suite: Suite) -> None:
    g = suite.group("extremes", "Sums in fp32 or wider; overflow of exp avoided; one token that takes all")
    values = entered(made(2401, (20, 16), 2.0))
    keys = entered(made(2402, (20, 16), 1.0))
    query = entered(made(2403, (1, 16), 1.0))
    _aligned(g, "plain", "Against the formula", keys, query, values)
    _aligned(g, "zero-keys", "All weights equal: the mean of V", 0 * keys, query, values)
    _aligned(g, "zero-query", "All weights equal: the mean of V", keys, 0 * query, values)
    _aligned(g, "equal-keys", "Equal keys, large logits", np.ones((20, 16)) * 30, np.ones((1, 16)) * 20, values)
    _aligned(
        g,
        "one-takes-all",
        "A logit of 1000 among small ones",
        np.where(np.arange(20)[:, None] == 13, 50.0, keys),
        np.full((1, 16), 5.0),
        values,
    )
    _aligned(
        g, "last-takes-all", "The newest token", np.where(np.arange(20)[:, None] == 19, 40.0, keys), np.full((1, 16), 4.0), values
    )
    _aligned(
        g, "first-takes-all", "The oldest token", np.where(np.arange(20)[:, None] == 0, 40.0, keys), np.full((1, 16), 4.0), values
    )
    _aligned(g, "negative", "All logits far below zero", -np.abs(keys) * 40 - 40, np.full((1, 16), 10.0), values)
    _aligned(
        g,
        "large-dot",
        "|q| = |k| = 316: a dot product of 1e5",
        np.full((20, 100), 31.6) + entered(made(2404, (20, 100), 0.01)),
        np.full((1, 100), 31.6),
        entered(made(2405, (20, 16), 1.0)),
        scale=1e-4,
    )
    _aligned(g, "large-values", "Values of 60000", keys, query, np.where(np.arange(16) % 2, 60000.0, -60000.0) * np.ones((20, 1)))
    _aligned(g, "small-values", "Values of 2^-24", keys, query, np.full((20, 16), 2.0**-24))
    _aligned(
        g,
        "causal-extremes",
        "Rows in which the newest token dominates, or vanishes",
        np.where(np.arange(20)[:, None] % 2, 30.0, -30.0) * np.ones((1, 16)),
        np.full((6, 16), 3.0),
        values,
    )
    _aligned(g, "softcap-of-large", "softcap 30 of logits of 1e4", keys * 100, query * 100, values, softcap=30.0, scale=1.0)
    _mixed_scales(suite)
    g = suite.group("entry", "Queries enter by section 1.4 whatever their type")
    for dtype in ("f16", "bf16", "f32", "f64"):
        s = Story(g, dtype, f"q, k and v given as {dtype}", ROWS, geometry(2, 1, 16, 16), 2410)
        tokens = {key: value | {"dtype": dtype} for key, value in s.tokens(19, queries=False).items()}
        s.note("a", s.script.ok("commit", seq="a", **tokens)["lengths"], tokens)
        s.attend("a", 2, q=made(2411, (2, 2, 16), 2.0, dtype=dtype))
    s = Story(g, "saturated", "A query beyond fp16 saturates", ROWS, geometry(2, 1, 16, 16), 2412)
    s.commit("a", 12)
    s.attend("a", 1, q=hexed(np.where(np.arange(16) == 3, 1e5, 0.5) * np.ones((2, 1, 1)), "f32"), scale=1e-5)


def _mixed_scales(suite: Suite) -> None:
    g = suite.group("mixed-scales", "Rows of very different size in one block: the small ones keep their precision")
    recipes = {
        "affine-16": ({"k": "raw", "v": "affine-token(levels=16,group=16)", "block": 32}, 64, 64),
        "lloyd-16": ({"k": "lloyd(levels=16)", "v": "lloyd(levels=16)", "block": 32}, 64, 64),
        "lloyd-e5m3": ({"k": "lloyd(levels=8)", "v": "lloyd(levels=3,params=e5m3)", "block": 32}, 64, 64),
        "channels": ({"k": "affine-channel(levels=4,group=32)", "v": "affine-channel(levels=4,group=32)", "block": 32}, 64, 64),
        "two-channels": ({"k": "lloyd(levels=16)", "v": "lloyd(levels=16)", "block": 32}, 128, 2),
    }
    for i, (name, (recipe, dim_k, dim_v)) in enumerate(recipes.items()):
        position = np.arange(40)
        factors = {
            "one-outlier": position * 0 + 1.0,
            "half-large": np.where(position % 2, 1.0, 1000.0),
            "ramp": 10 ** (3 * position / 40),
        }
        for slug, factor in factors.items():
            s = Story(
                g, f"{name}-{slug}", f"Values: {slug}, 40 tokens", {"recipe": recipe}, geometry(2, 1, dim_k, dim_v), 2500 + i
            )
            tokens = s.tokens(40, queries=False)
            values = entered(tokens["v"]) * factor[:, None]
            if slug == "one-outlier":
                values[0, 0, 3, dim_v // 2] = 65504
            s.script.ok("commit", seq="a", k=tokens["k"], v=hexed(values))
            s.attend("a", 2)
            s.attend("a", 1, mul=0.0)
    _cancelling(g)


def _cancelling(g: Group) -> None:
    """Outputs that are far smaller than the values that make them, under every rounding that a backend may do to weights."""
    recipes = {
        "polar-kitty": ("polar(radius=4,angle=8,group=32)", "kitty(boost=1/8,group=32)", 64, 2),
        "kitty": ("kitty(boost=1/8,group=32)", "kitty(boost=1/8,group=32)", 64, 16),
        "kitty-pair-mix": ("kitty(boost=1/8,group=32)", "pair-mix(low=1,high=3,group=32,mask=01,midpoint=1)", 32, 2),
        "progressive": ("progressive(bits=4)", "affine-token(levels=4,group=32)", 64, 64),
        "lloyd-raw": ("lloyd(levels=16)", "raw", 64, 8),
        "e5m3-raw": ("lloyd(levels=8,params=e5m3)", "raw", 64, 16),
        "affine-channel": ("affine-channel(levels=3,group=32)", "affine-channel(levels=2,group=32)", 32, 16),
        "lloyd-affine": ("lloyd(levels=5)", "affine-channel(levels=8,group=32)", 32, 2),
        "affine-progressive": ("affine-channel(levels=3,group=32)", "progressive(bits=8)", 32, 128),
        "channel-lloyd": ("affine-channel(levels=4,group=32)", "lloyd(levels=3)", 64, 16),
    }
    position = np.arange(70)
    for i, (name, (k, v, dim_k, dim_v)) in enumerate(recipes.items()):
        channel = np.arange(dim_v)
        recipe = {"k": k, "v": v, "block": 32, "recent": 5}
        patterns = {
            "saturated": np.ones((70, dim_v)),
            "channel-large": np.where(channel == 0, 500.0, 1.0)[None] * np.where(position % 2, 1.0, 1000.0)[:, None],
            "falling": (10.0 ** (-3 * position / 70))[:, None] * np.where(channel % 3, 1.0, 100.0)[None],
        }
        for slug, factor in patterns.items():
            s = Story(g, f"{name}-{slug}", f"Values: {slug}", {"recipe": recipe}, geometry(3, 1, dim_k, dim_v), 2520 + i)
            tokens = s.tokens(70, queries=False)
            values = np.clip(entered(tokens["v"]) * factor, -65504, 65504)
            if slug == "saturated":
                values[0, 0, 40, dim_v // 2] = 65504
            s.script.ok("commit", seq="a", k=tokens["k"], v=hexed(values))
            s.attend("a", 2)
            s.attend("a", 1, mul=8.0)


def suites() -> list[Suite]:
    return [states(), options()]
