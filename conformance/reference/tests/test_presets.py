"""Section 8: the effective bits of every preset at D = 128, T = sinks + 32768; recipes as text and dictionary."""

import pytest

from kvqref.account import account
from kvqref.errors import KvqError
from kvqref.geometry import Geometry
from kvqref.presets import PRESETS, fit_preset
from kvqref.recipe import parse_recipe
from kvqref.schemes import scheme

ONE = Geometry.of({"layers": 1, "kv_heads": 1, "q_heads": 4, "dim_k": 128})

# preset -> K bits, V bits (None where the table is silent and the default V is meant)
TABLE = {
    "fp16": ("16", "16"),
    "kivi-2": ("2.25", "2.25"),
    "kivi-2-g32": ("3.0", "3.0"),
    "polar-2": ("2.25", None),
    "kitty": ("2.3883", None),
    "pnmix": ("2.2634", None),
    "pnmix-g64": ("2.2946", None),
    "tq-2": ("2.125", "2.125"),
    "tq-3": ("3.125", "3.125"),
    "tq-4": ("4.125", "4.125"),
    "tq-1.585": ("1.725", "1.725"),
    "tq-2.322": ("2.458", "2.458"),
    "tq-2.585": ("2.725", "2.725"),
    "tq-split": ("2.75", "2.75"),
    "semkv": ("2.65", "2.65"),
    "semkv-tq": ("2.525", "2.525"),
    "semkv-tq-2": ("2.025", "2.025"),
    "kvq-2": ("2.2635", "1.6765"),
    "kvq-2.5": ("2.8879", "2.0762"),
    "kvq-3": ("3.2625", "2.6756"),
    "tq-2c": ("2.1267", "2.1267"),
    "tq-3c": ("3.1266", "3.1266"),
}


def effective(preset, geometry=ONE, options=None):
    recipe = parse_recipe(preset, geometry, options)
    return account(recipe, geometry, recipe.sinks + 32768)


@pytest.mark.parametrize("preset", sorted(TABLE))
def test_effective_bits(preset):
    result = effective(preset)
    for key, expected in zip(("effective_bits_k", "effective_bits_v"), TABLE[preset]):
        if expected is not None:
            digits = len(expected.partition(".")[2])
            assert f"{result[key]:.{digits}f}" == f"{float(expected):.{digits}f}"


def test_unnamed_values_have_four_levels_over_the_head():
    for preset in ("polar-2", "kitty"):
        # 2 + 32/128 bits; kitty's 32 raw sinks among 32800 tokens
        sinks = 32 if preset == "kitty" else 0
        assert effective(preset)["effective_bits_v"] == pytest.approx((sinks * 16 + 32768 * 2.25) / (32768 + sinks))


@pytest.mark.parametrize("preset, bits", [("kvq-2", 1.970), ("kvq-2.5", 2.482), ("kvq-3", 2.969)])
def test_mean_of_both_sides(preset, bits):
    result = effective(preset)
    assert round((result["effective_bits_k"] + result["effective_bits_v"]) / 2, 3) == bits


def test_semkv_ratios():
    assert round(16 / effective("semkv")["effective_bits_k"], 2) == 6.04
    assert round(16 / effective("semkv-tq-2")["effective_bits_k"], 1) == 7.9


def test_kitty_positions_are_wire():
    assert round(effective("kitty")["effective_bits_k"] - 128 * 256 * 8 / (32800 * 128), 4) == 2.3259


def test_chanmix_at_32_layers_of_8_heads():
    geometry = Geometry.of({"layers": 32, "kv_heads": 8, "dim_k": 128})
    mixed, four = "3" * 32 + "2" * 64 + "1" * 32, "4" * 128
    bits = [[four if 8 * layer + head < 25 else mixed for head in range(8)] for layer in range(32)]
    assert round(effective("chanmix", geometry, {"bits": bits})["effective_bits_k"], 4) == 2.3203


@pytest.mark.parametrize("preset, v", [("blockgtq-k3v3", 3.125), ("blockgtq-k3v2", 2.125), ("blockgtq-k2v2", 2.125)])
def test_blockgtq_pays_for_the_widths_present(preset, v):
    average = int(preset[10])
    for text, present in (("".join([str(average)] * 64), 1), (f"{average - 1}{average + 1}" * 32, 2)):
        override = f"{preset};k=width-groups(bits={text})"
        result = effective(override)
        assert result["effective_bits_k"] == average + present / 8 and result["effective_bits_v"] == v


@pytest.mark.parametrize("preset, average, v", [("blockgtq-k3v3-fast", 3, 3.0641), ("blockgtq-k2v2-fast", 2, 2.0642)])
def test_blockgtq_fast(preset, average, v):
    text = f"{average - 1}{average + 1}" * 32
    result = effective(f"{preset};k=width-groups(bits={text},center=1,params=e5m3)")
    assert result["effective_bits_k"] == (64 + 32704 * (average + 2 / 16)) / 32708
    assert round(result["effective_bits_v"], 4) == v
    # a width list of 64 bytes and a mean of 256
    assert result["metadata_bytes"] == 64 + 256


def test_blockgtq_without_a_list_has_no_size():
    with pytest.raises(KvqError, match="STATE"):
        effective("blockgtq-k3v3")
    scores = [[[1.0] * 64]]
    assert effective("blockgtq-k3v3", options={"scores": scores})["effective_bits_k"] == 3.125


def test_pmkvq_by_layer():
    geometry = Geometry.of({"layers": 4, "kv_heads": 2, "dim_k": 128})
    n = 32768
    # two heads of keys and values: 2 * 2 * (codes + 4 bytes a row below 16 bits)
    sizes = {16: 4 * n * 256, 8: 4 * n * 132, 4: 4 * n * 68, 2: 4 * n * 36}
    result = effective("pmkvq", geometry, {"budgets": [sizes[16], sizes[16] - 1, sizes[4], 0]})
    assert result["wire_bytes"] == sizes[16] + sizes[8] + sizes[4] + sizes[2]


def test_metadata():
    def metadata(text, tokens=0, geometry=Geometry.of({"layers": 2, "kv_heads": 3, "dim_k": 128})):
        return account(parse_recipe(text, geometry), geometry, tokens)["metadata_bytes"]

    assert metadata("pnmix") == 6 * 8
    assert metadata("kvq-2") == 6 * 64
    assert metadata("tq-2c") == 6 * 256
    assert metadata("tq-split") == 6 * 2 * 16
    assert metadata("kitty") == metadata("tq-2") == metadata("kivi-2") == 0
    assert metadata("semkv", 100) == 13 and metadata("semkv") == 0
    given = "k=pair-mix(low=1,high=3,group=32,mask=" + "0f" * 8 + ");v=raw"
    assert metadata(given) == 6 * 8


def test_every_preset_is_buildable_at_other_dimensions():
    for dim in (64, 80, 96, 256):
        geometry = Geometry.of({"layers": 1, "kv_heads": 1, "dim_k": dim})
        options = {"chanmix": {"bits": [["2" * dim]]}, "pmkvq": {"budgets": [0]}}
        for preset in PRESETS:
            scheme(parse_recipe(preset, geometry, options.get(preset)), geometry)


def test_groups_and_units_fit_the_head():
    assert fit_preset("kivi-2", 80, 80)["v"] == "affine-token(levels=4,group=80)"
    assert fit_preset("kivi-2", 192, 192)["v"] == "affine-token(levels=4,group=96)"
    assert fit_preset("kivi-2-g32", 80, 80)["v"] == "affine-token(levels=4,group=20)"
    # the largest divisor of 64, 36, 40, 4 not above 8, 4.5, 5, .5
    for dim, unit in ((128, 8), (72, 4), (80, 5), (8, 1)):
        assert f"unit={unit})" in fit_preset("kvq-2", dim, dim)["policy"]


def test_text_and_dictionary_say_the_same():
    as_text = (
        "k=pair-mix(low=1,high=3,group=128,midpoint=1);v=affine-token(levels=4,group=D);sinks=32;recent=0;"
        "block=128;policy=pnmix(r=1/2,criterion=qk-pair)"
    )
    as_dict = {
        "k": "pair-mix(low=1,high=3,group=128,midpoint=1)",
        "v": "affine-token(levels=4,group=128)",
        "sinks": 32,
        "recent": 0,
        "block": 128,
        "policy": "pnmix",
        "options": {"r": "1/2", "criterion": "qk-pair"},
    }
    assert parse_recipe(as_text, ONE) == parse_recipe(as_dict, ONE) == parse_recipe("pnmix", ONE)
    assert parse_recipe("pnmix;sinks=4;block=256", ONE).block == 256


def test_semkv_text():
    text = "policy=semkv(r=1/4,low=affine-token(levels=5,group=D,rotate=1),high=affine-token(levels=6,group=D,rotate=1));block=64"
    assert account(parse_recipe(text, ONE), ONE, 32768) == effective("semkv")


BAD = [
    "nothing",
    "pnmix;colour=1",
    "pnmix;sinks=1;sinks=2",
    "k=lloyd(levels=4)",
    "k=lloyd(levels=4);v=lloyd(levels=4);policy=kitty(boost=1/32)",
    "k=lloyd(levels=4);v=lloyd(levels=4);policy=pnmix(r=1/2)",
    "k=lloyd(levels=4);v=lloyd(levels=4,center=1)",
    "k=lloyd(levels=4);v=lloyd(levels=4);block=0",
    "k=affine-channel(levels=4,group=32);v=raw;block=48",
    "k=affine-token(levels=4,group=48);v=raw",
    "k=pair-mix(low=1,high=3,group=32);v=raw",
    "pnmix;policy=pnmix(r=3/2)",
    "pnmix;policy=pnmix(r=1/2,criterion=k-range)",
    "pnmix;policy=pnmix(r=1/2,colour=1)",
    "kvq-2;policy=pair-widths(avg=1/2)",
    "blockgtq-k3v3;policy=blockgtq(avg=3,bmin=0)",
    "semkv;recent=1",
    "chanmix",
    "pmkvq",
    "policy=semkv(r=1/4,low=raw,high=raw)",
]


@pytest.mark.parametrize("text", BAD)
def test_recipes_that_create_refuses(text):
    with pytest.raises(KvqError, match="INVALID"):
        scheme(parse_recipe(text, ONE), ONE)


def test_bad_geometries():
    for bad in ({"kv_heads": 4, "q_heads": 10}, {"kv_heads": 0}, {"dim_k": 0}, {"layers": -1}, {"kv_heads": 1, "q_heads": 0}):
        with pytest.raises(KvqError, match="INVALID"):
            Geometry.of({"layers": 1, "kv_heads": 1, "dim_k": 8} | bad)
    odd = Geometry.of({"layers": 1, "kv_heads": 1, "dim_k": 65})
    scheme(parse_recipe("k=lloyd(levels=4);v=lloyd(levels=4)", odd), odd)
    with pytest.raises(KvqError, match="INVALID"):
        scheme(parse_recipe("kvq-2", odd), odd)
