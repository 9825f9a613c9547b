"""Vectors of accounting (FORMATS section 8): every preset, and every codec as a recipe."""

from .script import Suite

GEOMETRY = {"layers": 2, "kv_heads": 2, "q_heads": 8, "dim_k": 128, "dim_v": 128}
PAPER = 32768

# preset: (sinks, effective bits of K and V at D = 128 and sinks + 32768 tokens as the table of section 8 prints them)
FIGURES = {
    "fp16": (0, 16, 16),
    "kivi-2": (0, 2.25, 2.25),
    "kivi-2-g32": (0, 3.0, 3.0),
    "polar-2": (0, 2.25, None),
    "kitty": (32, 2.3883, None),
    "pnmix": (32, 2.2634, None),
    "pnmix-g64": (32, 2.2946, None),
    "tq-2": (0, 2.125, 2.125),
    "tq-3": (0, 3.125, 3.125),
    "tq-4": (0, 4.125, 4.125),
    "tq-1.585": (0, 1.725, 1.725),
    "tq-2.322": (0, 2.458, 2.458),
    "tq-2.585": (0, 2.725, 2.725),
    "tq-split": (0, 2.75, 2.75),
    "semkv": (0, 2.65, 2.65),
    "semkv-tq": (0, 2.525, 2.525),
    "semkv-tq-2": (0, 2.025, 2.025),
    "kvq-2": (32, 2.2635, 1.6765),
    "kvq-2.5": (32, 2.8879, 2.0762),
    "kvq-3": (32, 3.2625, 2.6756),
    "tq-2c": (4, 2.1267, None),
    "tq-3c": (4, 3.1266, None),
}
BLOCK_GTQ = {"blockgtq-k3v3": (0, 3, 3.125), "blockgtq-k3v2": (0, 3, 2.125), "blockgtq-k2v2": (0, 2, 2.125),
             "blockgtq-k3v3-fast": (4, 3, 3.0641), "blockgtq-k2v2-fast": (4, 2, 2.0642)}  # fmt: skip
HEADS = (
    ("D64", 64, 64),
    ("D80", 80, 80),
    ("D96", 96, 96),
    ("D256", 256, 256),
    ("D192-128", 192, 128),
    ("D16", 16, 16),
)
LENGTHS = (0, 1, 4, 31, 32, 33, 63, 64, 65, 96, 128, 129, 160, 191, 192, 330, 1000, 32768)


def _geometry(dim_k: int = 128, dim_v: int = 128, **more) -> dict:
    return GEOMETRY | {"dim_k": dim_k, "dim_v": dim_v} | more


def _close(value: float, printed: float | None) -> None:
    """Equal to the printed digits."""
    if printed is not None:
        digits = len(f"{printed}".partition(".")[2])
        assert abs(value - printed) <= 0.5 * 10**-digits + 1e-9, f"{value}, not {printed}"


def _bytes_only(g, slug: str, comment: str, **arguments) -> dict:
    """Effective bits of no element are left open."""
    keys = ("wire_bytes", "metadata_bytes") if arguments["tokens"] == 0 else None
    return g.test(slug, comment).ok("account", expect=keys, **arguments)


def presets() -> Suite:
    suite = Suite("accounting-presets")
    g = suite.group("paper", "Effective bits of the table of section 8, at D = 128 and sinks + 32768 tokens")
    for preset, (sinks, k, v) in FIGURES.items():
        result = _bytes_only(g, preset, f"{preset}: {k} bits K", preset=preset, geometry=GEOMETRY, tokens=sinks + PAPER)
        _close(result["effective_bits_k"], k)
        _close(result["effective_bits_v"], v)
    g = suite.group(
        "lengths",
        "Sinks are raw and counted, the tail is not; a prompt shorter than sinks, recent and block costs nothing packed",
    )
    for preset in FIGURES:
        script = g.test(preset, f"Tokens {LENGTHS}")
        for tokens in LENGTHS:
            expect = ("wire_bytes", "metadata_bytes") if tokens in (0, 1, 4, 31) else None
            script.ok("account", expect=expect, preset=preset, geometry=GEOMETRY, tokens=tokens)
    g = suite.group("heads", "Other head sizes: groups that do not divide D shrink, units follow D/16")
    for name, dim_k, dim_v in HEADS:
        for preset in FIGURES:
            _bytes_only(
                g,
                f"{preset}-{name}",
                f"{preset} at {dim_k}/{dim_v} channels",
                preset=preset,
                geometry=_geometry(dim_k, dim_v),
                tokens=FIGURES[preset][0] + 1024,
            )
    g = suite.group("shapes", "Layers and heads multiply; query heads do not count; SemKV's flags are counted once")
    for preset in ("kvq-3", "semkv", "pnmix", "tq-2c", "tq-split", "kitty"):
        one = _bytes_only(
            g,
            f"{preset}-one",
            "One layer, one KV head",
            preset=preset,
            geometry=_geometry(layers=1, kv_heads=1, q_heads=1),
            tokens=2048,
        )
        many = _bytes_only(
            g,
            f"{preset}-many",
            "3 layers, 5 KV heads",
            preset=preset,
            geometry=_geometry(layers=3, kv_heads=5, q_heads=20),
            tokens=2048,
        )
        assert many["wire_bytes"] == 15 * one["wire_bytes"]
        assert many["metadata_bytes"] == one["metadata_bytes"] * (1 if preset.startswith("semkv") else 15)
    _block_gtq(suite)
    return suite


def _block_gtq(suite: Suite) -> None:
    g = suite.group("blockgtq", "The scalars depend on the widths that occur: STATE without a list")
    lists = {
        3: {"all-3": "3" * 64, "mixed": "2" * 16 + "3" * 32 + "4" * 16, "eight": "12345678" + "3" * 52 + "1" * 4},
        2: {"all-2": "2" * 64, "mixed": "1" * 16 + "2" * 32 + "3" * 16},
    }
    values = {"blockgtq-k3v3": "lloyd(levels=8)", "blockgtq-k3v2": "lloyd(levels=4)", "blockgtq-k2v2": "lloyd(levels=4)"}
    for preset, (sinks, average, v) in BLOCK_GTQ.items():
        g.test(f"{preset}-state", "No list").refused("STATE", "account", preset=preset, geometry=GEOMETRY, tokens=sinks + PAPER)
        fast = preset.endswith("fast")
        for name, bits in lists[average].items():
            widths = len(set(bits))
            k = f"width-groups(bits={bits}{',center=1,params=e5m3' if fast else ''})"
            v_text = values[preset.removesuffix("-fast")]
            recipe = {
                "k": k,
                "v": v_text.replace(")", ",params=e5m3)") if fast else v_text,
                "sinks": sinks,
                "recent": 32 if fast else 0,
                "policy": f"blockgtq(avg={average})",
            }
            result = _bytes_only(
                g, f"{preset}-{name}", f"{preset} with {widths} widths", recipe=recipe, geometry=GEOMETRY, tokens=sinks + PAPER
            )
            spent = sum(map(int, bits)) / 64
            expected = (64 + 32704 * (spent + widths / 16)) / 32708 if fast else spent + widths / 8
            assert abs(result["effective_bits_k"] - expected) < 1e-9, "the formula of section 8"
            _close(result["effective_bits_v"], v)


def recipes() -> Suite:
    suite = Suite("accounting-recipes")
    g = suite.group("codecs", "Every codec as K and as V; all packed tokens of a layer, head and tensor are one block")
    texts = [f"affine-channel(levels={L},group=32)" for L in (2, 3, 4, 5, 6, 7, 8, 16, 256)]
    texts += [f"affine-token(levels={L},group=16)" for L in (2, 3, 5, 6, 7, 16)]
    texts += [f"lloyd(levels={L})" for L in (2, 3, 4, 5, 6, 7, 8, 16, 256)]
    texts += [
        "lloyd(levels=3,params=e5m3)",
        "raw",
        "polar(radius=4,angle=8,group=32)",
        "kitty(boost=1/8,group=32)",
        "progressive(bits=4)",
        "progressive(bits=16)",
    ]
    texts += [
        "pair-mix(low=1,high=3,group=32,mask=a5c3)",
        "pair-mix(low=1,high=3,group=32,unit=channel,mask=a5c3a5c3)",
        "width-groups(bits=1122334455667788)",
    ]
    texts += [
        "channel-widths(bits=0123456801234568,group=32)",
        "channel-widths(bits=0123456801234568,group=32,params=e4m3)",
        "channel-split(high=8,low=3,mask=ff00ff00)",
    ]
    texts += [
        "channel-split(high=5,low=3,mask=00000000,params=e5m3)",
        "channel-widths(unit=channel,bits=01234568012345680123456801234568,group=32)",
    ]
    geometry = {"layers": 2, "kv_heads": 3, "q_heads": 6, "dim_k": 32, "dim_v": 32}
    for i, text in enumerate(texts):
        for tokens in (7, 77, 1029):
            recipe = {"k": text, "v": texts[(i + 7) % len(texts)], "sinks": 5, "recent": 0, "block": 32}
            _bytes_only(
                g,
                f"{i:02d}-{text.split('(')[0]}-T{tokens}",
                f"K {recipe['k']}, V {recipe['v']}",
                recipe=recipe,
                geometry=geometry,
                tokens=tokens,
            )
    _recipe_rules(suite, geometry)
    return suite


def _recipe_rules(suite: Suite, geometry: dict) -> None:
    g = suite.group("center", "mu is metadata: 2 * dim a layer and KV head")
    for text in (
        "lloyd(levels=4,center=1)",
        "affine-token(levels=4,group=32,center=1)",
        "width-groups(bits=2222222233333333,center=1)",
    ):
        recipe = {"k": text, "v": "lloyd(levels=4)", "block": 64}
        result = _bytes_only(g, text.split("(")[0], text, recipe=recipe, geometry=geometry, tokens=130)
        assert result["metadata_bytes"] == 2 * 3 * (64 + (16 if "width" in text else 0))
    g = suite.group("defaults", "block: 64 for row codecs, G for the others, the least common multiple of two")
    for slug, k, v, packed in (("rows", "lloyd(levels=4)", "lloyd(levels=4)", 128), ("groups", "affine-channel(levels=4,group=48)", "lloyd(levels=4)", 144),
                               ("two-groups", "affine-channel(levels=4,group=24)", "affine-channel(levels=4,group=36)", 144)):  # fmt: skip
        result = _bytes_only(g, slug, f"{k}, {v}", recipe={"k": k, "v": v}, geometry=geometry, tokens=150)
        per_token = {"rows": 2 * (8 + 2), "groups": 8 + 128 / 48 + 8 + 2, "two-groups": 8 + 128 / 24 + 8 + 128 / 36}[slug]
        assert result["wire_bytes"] == round(2 * 3 * packed * per_token)
    g = suite.group("refused", "What recipe and geometry alone make INVALID")
    bad = {
        "block-below-group": {"k": "affine-channel(levels=4,group=32)", "v": "raw", "block": 16},
        "block-no-multiple": {"k": "affine-channel(levels=4,group=32)", "v": "raw", "block": 48},
        "group-of-head": {"k": "affine-token(levels=4,group=24)", "v": "raw"},
        "semkv-recent": {"policy": "semkv(r=1/4,low=lloyd(levels=3),high=lloyd(levels=4))", "recent": 8},
        "unknown-policy": {"k": "raw", "v": "raw", "policy": "kvzip"},
        "unknown-codec": {"k": "int4", "v": "raw"},
    }
    for slug, recipe in bad.items():
        g.test(slug, f"{recipe}").refused("INVALID", "account", recipe=recipe, geometry=geometry, tokens=100)
    g.test("no-preset", "No such preset").refused("INVALID", "account", preset="kvq-9", geometry=geometry, tokens=100)


def with_options() -> Suite:
    """chanmix and pmkvq: the profile and the budgets are options of the recipe."""
    suite = Suite("accounting-options")
    g = suite.group("chanmix", "The profile is given: bits [layer][head] = LIST by channel", needs=("options",))
    geometry = _geometry(layers=32, kv_heads=8, q_heads=32)
    plain, full = "3" * 32 + "1" * 32 + "2" * 64, "4" * 128
    bits = [
        [full if (layer * 8 + head) % 10 == 0 and layer * 8 + head < 250 else plain for head in range(8)] for layer in range(32)
    ]
    assert sum(row.count(full) for row in bits) == 25, "floor(256 / 10) heads have 4 bits"
    result = g.test("paper", "r_h = 1/10 of 32 x 8 heads: 2.3203 bits").ok(
        "account", preset="chanmix", options={"bits": bits}, geometry=geometry, tokens=PAPER
    )
    _close(result["effective_bits_k"], 2.3203)
    small = {"layers": 1, "kv_heads": 2, "q_heads": 2, "dim_k": 16, "dim_v": 16}
    for tokens in (0, 127, 128, 300):
        _bytes_only(
            g,
            f"T{tokens}",
            f"{tokens} tokens",
            preset="chanmix",
            options={"bits": [["4" * 16, "3311222233112222"]]},
            geometry=small,
            tokens=tokens,
        )
    g = suite.group("pmkvq", "The width of a layer follows from its budget", needs=("options",))
    for tokens in (0, 64, 128, 1024):
        budgets = [10**9, 64 * 2 * 16 * 2 * 2, 64 * 2 * 2 * 20, 100]
        _bytes_only(
            g,
            f"T{tokens}",
            f"Budgets {budgets}",
            preset="pmkvq",
            options={"budgets": budgets},
            geometry=small | {"layers": 4},
            tokens=tokens,
        )
    for budgets in (None, [1], [1, 2, 3]):
        script = g.test(f"budgets-{0 if budgets is None else len(budgets)}", "One budget a layer")
        script.refused(
            "INVALID",
            "account",
            preset="pmkvq",
            options=None if budgets is None else {"budgets": budgets},
            geometry=small | {"layers": 2},
            tokens=64,
        )
    return suite


def suites() -> list[Suite]:
    return [presets(), recipes(), with_options()]
