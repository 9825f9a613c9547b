"""What the set must cover: every preset of SPEC section 8, every codec, level count, policy, operation and refusal."""

import json
from functools import lru_cache

import pytest
from conformance_paths import CONFORMANCE

from kvqref.bits import WORDS
from kvqref.codecs import CODECS
from kvqref.presets import PRESETS
from kvqref.text import parse_call

VECTORS = CONFORMANCE / "vectors" / "v1"
DIMS = {16, 64, 72, 80, 96, 112, 128, 192, 256, 320, 512, 576}


@lru_cache
def steps() -> list[dict]:
    """Every step of the set."""
    files = [json.loads(path.read_text()) for path in VECTORS.glob("*.json") if path.name != "manifest.json"]
    return [step for file in files for group in file["groups"] for test in group["tests"] for step in test["steps"]]


def presets_of(*ops: str) -> set[str]:
    return {step["preset"] for step in steps() if step["op"] in ops and "preset" in step}


def codecs_of(preset: str) -> set[str]:
    """Names of the codecs of a preset, SemKV's rows included."""
    recipe = PRESETS[preset]
    texts = [recipe[key] for key in "kv" if key in recipe]
    texts += [value for key, value in parse_call(recipe.get("policy", "uniform"))[1].items() if key in ("low", "high")]
    return {parse_call(text)[0] for text in texts}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_row_of_section_8_has_accounting_codec_policy_and_sequence_tests(preset):
    assert preset in presets_of("account") and preset in presets_of("create")
    encoded = {parse_call(step["codec"])[0] for step in steps() if step["op"] == "encode" and "expect" in step}
    assert codecs_of(preset) <= encoded
    decided = {step["name"] for step in steps() if step["op"] == "policy" and "expect" in step}
    policy = parse_call(PRESETS[preset].get("policy", "uniform"))[0]
    named = {"uniform": set(), "semkv": {"semkv-prompt", "semkv-block"}, "pmkvq": {"pmkvq-shrink"}}.get(policy, {policy})
    assert named <= decided


def test_every_codec_is_encoded_and_decoded_at_every_head_size_that_fits():
    for op in ("encode", "decode"):
        for name in ("lloyd", "affine-token"):
            assert {step["dim"] for step in steps() if step["op"] == op and step["codec"].startswith(name + "(")} >= DIMS
        assert {parse_call(step["codec"])[0] for step in steps() if step["op"] == op and "expect" in step} == set(CODECS)


@pytest.mark.parametrize("name", ["affine-channel", "affine-token", "lloyd"])
def test_every_level_count(name):
    texts = {
        step["codec"] for step in steps() if step["op"] == "encode" and step["codec"].startswith(name + "(") and "expect" in step
    }
    assert {int(parse_call(text)[1]["levels"]) for text in texts} == set(WORDS)


def test_every_operation_and_every_status_that_a_format_gives():
    assert {step["op"] for step in steps()} == set(
        "encode decode stats policy account create commit append end_turn truncate fork remove export attend save load".split()
    )
    assert {step.get("status", "OK") for step in steps()} == {"OK", "INVALID", "STATE", "STALE", "NONFINITE", "CORRUPT"}


def test_attention_has_bounds_everywhere():
    expected = [step["expect"] for step in steps() if step["op"] == "attend" and "expect" in step]
    assert len(expected) > 200 and all({"out", "lse", "nmse", "max_abs", "lse_abs"} <= set(e) for e in expected)


def test_both_layouts_and_partial_rotary_parts_reach_the_codecs_by_pair():
    for name in ("width-groups", "channel-widths", "pair-mix", "polar"):
        heads = {
            (step.get("layout", "half"), step.get("rotary_dim"), step.get("rotary_first"))
            for step in steps()
            if step["op"] == "encode" and step["codec"].startswith(name + "(") and "expect" in step
        }
        assert {layout for layout, _, _ in heads} == {"half", "adjacent"}
        assert any(r and r < 16 for _, r, _ in heads) and any(first for _, _, first in heads)
