"""Every preset as a cache: its first blocks, growth, rollback and fork (FORMATS section 8); options; snapshots."""

from .accounting import FIGURES
from .data import made
from .script import Suite
from .sequences import RECIPES, recipe_blocks
from .story import SMALL, Story

BLOCK_GTQ = ("blockgtq-k3v3", "blockgtq-k3v2", "blockgtq-k2v2", "blockgtq-k3v3-fast", "blockgtq-k2v2-fast")
PRESETS = (*FIGURES, *BLOCK_GTQ)
# preset: (sinks, recent, block) where it is not (0, 0, 64)
RULES = {
    "kivi-2": (0, 0, 128),
    "kivi-2-g32": (0, 96, 32),
    "polar-2": (0, 0, 128),
    "kitty": (32, 0, 128),
    "pnmix": (32, 0, 128),
    "pnmix-g64": (32, 0, 128),
    "kvq-2": (32, 32, 128),
    "kvq-2.5": (32, 32, 128),
    "kvq-3": (32, 32, 128),
    "tq-2c": (4, 32, 64),
    "tq-3c": (4, 32, 64),
    "blockgtq-k3v3-fast": (4, 32, 64),
    "blockgtq-k2v2-fast": (4, 32, 64),
}


def _geometry(dim_k: int, dim_v: int, kv_heads: int = 1, layers: int = 1) -> dict:
    return {"layers": layers, "kv_heads": kv_heads, "q_heads": 2 * kv_heads, "dim_k": dim_k, "dim_v": dim_v}


def presets() -> Suite:
    suite = Suite("sequence-presets", "L2")
    g = suite.group("first-block", "One token short of the first block, then the token that fills it")
    for i, preset in enumerate(PRESETS):
        sinks, recent, block = RULES.get(preset, (0, 0, 64))
        dim = 32 if preset == "fp16" else 128
        s = Story(
            g,
            f"{preset}-D{dim}",
            f"sinks {sinks}, recent {recent}, block {block}",
            {"preset": preset},
            _geometry(dim, dim),
            1000 + i,
        )
        semkv = preset.startswith("semkv")
        lengths = s.commit("a", 1 if semkv else sinks + recent + block - 1)
        assert lengths["packed"] == (1 if semkv else 0)
        lengths = s.append("a", 64 if semkv else 1)
        assert lengths["packed"] == (65 if semkv else block)
        s.block("a", s.count_blocks("a") - 1)
        s.values("a", max(0, sinks - 1), 2)
    g = suite.group("life", "Two heads: a longer prompt, steps, a cut inside a packed block, a fork, going on")
    for i, preset in enumerate(PRESETS):
        sinks, recent, block = RULES.get(preset, (0, 0, 64))
        s = Story(g, preset, "Lengths, blocks and borders all the way", {"preset": preset}, _geometry(32, 16, 2), 1050 + i)
        s.commit("a", sinks + recent + 2 * block + 5)
        s.look("a")
        s.append("a", 3)
        s.change("fork", "a", to="b")
        s.change("truncate", "a", length=sinks + block + block // 2 + 1)
        s.look("a")
        s.append("a", block + recent)
        s.look("a")
        s.change("end_turn", "a")
        s.look("b")
        s.look("a")
    _preset_shapes(suite)
    return suite


def _preset_shapes(suite: Suite) -> None:
    g = suite.group("heads", "Head sizes at which groups and units shrink")
    for i, preset in enumerate(PRESETS):
        sinks, recent, block = RULES.get(preset, (0, 0, 64))
        s = Story(g, preset, "80 channels of K, 48 of V", {"preset": preset}, _geometry(80, 48), 1100 + i)
        s.commit("a", sinks + recent + block)
        s.block(
            "a", 0, [dict(layer=0, head=0, tensor=t) for t in "kv"] if preset != "fp16" else [dict(layer=0, head=0, tensor="v")]
        )
        s.values("a", sinks, 1)
    g = suite.group("layouts", "Rotary layouts reach the policies and codecs by pair")
    for i, preset in enumerate(("polar-2", "pnmix", "kvq-2", "kvq-3", "blockgtq-k3v3", "blockgtq-k2v2-fast")):
        sinks, recent, block = RULES.get(preset, (0, 0, 64))
        for layout, r, first in (("adjacent", 0, 0), ("half", 16, 0), ("adjacent", 8, 8)):
            geometry = _geometry(32, 32) | {"layout": layout, "rotary_dim": r, "rotary_first": first}
            s = Story(
                g,
                f"{preset}-{layout}-{r}-{first}",
                f"layout {layout}, rotary part {first}+{r or 32}",
                {"preset": preset},
                geometry,
                1150 + i,
            )
            s.commit("a", sinks + recent + block)
            s.block("a", 0, [dict(layer=0, head=0, tensor="k")])
            s.values("a", sinks, 1)


def with_options() -> Suite:
    """chanmix and pmkvq: the profile, the budgets and given scores are options of the recipe."""
    suite = Suite("sequence-options", "L2")
    needs = ("options",)
    g = suite.group("chanmix", "bits [layer][head] = LIST by channel", needs)
    bits = [["4" * 16, "3311222233112222"], ["2231221322312213", "4" * 16]]
    recipe = {
        "k": "channel-widths(group=8,params=e4m3,unit=channel)",
        "v": "affine-token(levels=4,group=4)",
        "block": 16,
        "policy": "chanmix",
        "options": {"bits": bits},
    }
    for i, slug in enumerate(("prompt", "life")):
        s = Story(g, slug, "Heads of four bits and mixed heads", {"recipe": recipe}, SMALL, 1200 + i)
        s.commit("a", 35)
        s.block("a", 0)
        if slug == "life":
            s.change("fork", "a", to="b")
            s.change("truncate", "a", length=12)
            s.append("a", 20)
            s.look("a")
            s.look("b")
    preset = Story(g, "preset", "The preset with a profile", {"preset": "chanmix", "options": {"bits": bits}}, SMALL, 1210)
    preset.commit("a", 140)
    preset.block("a", 0)
    for slug, wrong in (
        ("no-bits", None),
        ("too-few-layers", bits[:1]),
        ("too-few-heads", [row[:1] for row in bits]),
        ("too-short", [[row[0], "333"] for row in bits]),
    ):
        g.test(slug, "A profile that does not fit").refused(
            "INVALID", "create", preset="chanmix", geometry=SMALL, options=None if wrong is None else {"bits": wrong}
        )
    _pmkvq(suite, needs)
    _given_scores(suite, needs)
    return suite


def _pmkvq(suite: Suite, needs: tuple[str, ...]) -> None:
    g = suite.group("pmkvq", "A layer shrinks when its packed tokens exceed its budget, and never grows again", needs)
    recipe = {"k": "progressive", "v": "progressive", "block": 4, "policy": "pmkvq"}
    # bytes of one token of a layer: 2 heads x 24 channels: 96 raw, 48 + 16, 24 + 16, 12 + 16
    token = {16: 96, 8: 64, 4: 40, 2: 28}
    for i, budgets in enumerate(
        (
            [10**9, 10**9],
            [8 * token[16], 16 * token[8]],
            [8 * token[16] - 1, 8 * token[8] - 1],
            [20 * token[4], 4 * token[2]],
            [0, 12 * token[8]],
        )
    ):
        s = Story(
            g, f"budgets-{i}", f"budgets {budgets}", {"recipe": recipe | {"options": {"budgets": budgets}}}, SMALL, 1220 + i
        )
        s.commit("a", 6)
        for _ in range(4):
            s.append("a", 4)
            s.block("a", 0, [dict(layer=0, head=1, tensor="k"), dict(layer=1, head=0, tensor="v")])
        s.change("fork", "a", to="b")
        s.change("truncate", "a", length=5)
        s.append("a", 7)
        s.look("a")
        s.block("b", 3, [dict(layer=0, head=0, tensor="k"), dict(layer=1, head=0, tensor="k")])
        s.block("a", 0, [dict(layer=0, head=0, tensor="k"), dict(layer=1, head=0, tensor="k")])
    budgets = [64 * token[8], 128 * token[4]]
    s = Story(
        g, "preset", f"The preset with budgets {budgets}", {"preset": "pmkvq", "options": {"budgets": budgets}}, SMALL, 1230
    )
    s.commit("a", 70)
    s.look("a")
    s.append("a", 60)
    s.block("a", 0, [dict(layer=0, head=0, tensor="k"), dict(layer=1, head=1, tensor="v")])
    s.look("a")


def _given_scores(suite: Suite, needs: tuple[str, ...]) -> None:
    g = suite.group("scores", "Scores of pairs given in fp64 instead of statistics", needs)
    for i, (name, k) in enumerate((("blockgtq", "width-groups"), ("pair-widths", "channel-widths(group=8)"))):
        scores = made(1250 + i, (2, 2, 8), 1.0, 1.5, dtype="f64")
        recipe = {"k": k, "v": "lloyd(levels=4)", "block": 8, "policy": f"{name}(avg=5/2)", "options": {"scores": scores}}
        s = Story(g, name, "No queries are needed", {"recipe": recipe}, SMALL, 1240 + i)
        s.commit("a", 20, queries=False)
        s.block("a", 1)
        s.look("a")


def snapshots() -> Suite:
    suite = Suite("snapshots", "L4")
    g = suite.group("save-load", "After save, change and load everything is as it was saved", ("snapshot",))
    for i, (name, recipe) in enumerate(RECIPES.items()):
        block, sinks, recent = recipe_blocks(name)
        s = Story(g, name, "Saved in the middle of a life, loaded, and on", {"recipe": recipe}, SMALL, 1300 + i)
        s.commit("a", sinks + recent + block + 3)
        s.change("fork", "a", to="b")
        s.change("truncate", "b", length=sinks + max(1, block // 2))
        state = dict(s.total), dict(s.lengths), {key: list(value) for key, value in s.given.items()}
        s.script.ok("save")
        s.append("a", block)
        s.change("truncate", "b", length=0)
        s.script.ok("load")
        s.total, s.lengths, s.given = state
        s.block("a", 0, [dict(layer=1, head=1, tensor=t) for t in "kv"])
        s.look("b")
        s.append("a", block)
        s.look("a")
    return suite


def suites() -> list[Suite]:
    return [presets(), with_options(), snapshots()]
