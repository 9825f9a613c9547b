"""Recipes, codecs, policies and scores."""

import numpy as np
import pytest

import kvq

GEOMETRY = dict(n_layers=2, kv_heads=2, q_heads=4, dim_k=128)


def test_presets_resolve_to_text_that_resolves_to_itself():
    assert {"fp16", "kivi-2", "tq-3", "pnmix", "kvq-3"} <= set(kvq.presets())
    for preset in set(kvq.presets()) - {"chanmix", "pmkvq"}:  # these need a profile
        text = kvq.recipe(preset, GEOMETRY)
        assert kvq.recipe(text, GEOMETRY) == text, preset


def test_a_geometry_may_be_a_dict_a_list_or_a_cache():
    with kvq.Cache("tq-3", **GEOMETRY) as cache:
        texts = {kvq.recipe("kvq-2", g) for g in (GEOMETRY, [kvq.Layer(2, 4, 128)] * 2, cache)}
    assert len(texts) == 1


def test_account_counts_bits():
    account = kvq.account("tq-3", GEOMETRY, 64 * 100)
    assert account.effective_bits == 3.125
    assert account.wire_bytes == 2 * 2 * 2 * 6400 * 50
    assert account.fp16_bytes == 2 * 2 * 2 * 6400 * 256
    with pytest.raises(kvq.Error, match="n_bits=3"):
        kvq.account("blockgtq-k3v3", GEOMETRY, 1000, bits=[3, 3, 3])


def test_account_with_a_profile_and_with_budgets():
    geometry = {"n_layers": 32, "kv_heads": 8, "dim_k": 128}
    bits = np.tile(np.repeat([3, 1, 2, 2], 32), (256, 1))
    bits[:25] = 4  # a tenth of the heads
    assert round(kvq.account("chanmix", geometry, 32768, bits=bits).effective_bits_k, 4) == 2.3203
    budgets = [1 << 40, 0] * 16
    assert kvq.account("pmkvq", geometry, 32768, budgets=budgets).effective_bits == (16 + 2 + 32 / 128) / 2


def test_the_cpu_is_a_backend():
    assert kvq.backends()[0].name == "cpu" and kvq.backends()[0].available


def test_codecs_encode_and_decode(rng):
    x = rng.standard_normal((64, 128)).astype(np.float32)
    for codec, most in (("raw", 1e-3), ("lloyd(levels=16)", 0.11), ("affine-token(levels=16,group=32)", 0.09)):
        wire = kvq.codec_encode(codec, x)
        y = kvq.codec_decode(codec, wire, 64, 128)
        assert np.linalg.norm(y - x) < most * np.linalg.norm(x), codec
    assert kvq.codec_encode("raw", x) == x.astype(np.float16).tobytes()
    with pytest.raises(kvq.Error) as failure:
        kvq.codec_decode("raw", wire[:-1], 64, 128)
    assert failure.value.status == kvq.E_CORRUPT


def test_a_centre_is_taken_from_float16(rng):
    x = (rng.standard_normal((8, 64)) + 5).astype(np.float16)
    mu = np.full(64, 5, np.float16)
    codec = "lloyd(levels=16,center=1)"
    y = kvq.codec_decode(codec, kvq.codec_encode(codec, x, mu=mu), 8, 64, mu=mu)
    assert np.abs(y - x).max() < 0.6
    with pytest.raises(ValueError, match="mu"):
        kvq.codec_encode(codec, x, mu=mu[:3])


def test_policies_decide_from_scores_and_from_data(rng):
    flags = kvq.policy_decide("semkv-prompt(r=1/4)", token_scores=np.arange(16), dim=64)
    assert np.array_equal(np.unpackbits(np.frombuffer(flags, np.uint8), bitorder="little"), np.arange(16) >= 12)
    widths = kvq.policy_decide("blockgtq(avg=3)", pair_scores=np.ones(32), dim=64)
    assert list(widths) == [3] * 32
    k = rng.standard_normal((50, 64)) * np.repeat([1, 9], 32)
    mask = kvq.policy_decide("pnmix(r=1/2,criterion=k-magnitude)", k)
    assert np.array_equal(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"), np.arange(64) >= 32)


def test_statistics_are_exact_sums(rng):
    k = np.round(rng.standard_normal((30, 8)) * 64) / 64
    stats = kvq.policy_stats(k, np.repeat(k[:, None], 3, 1))
    assert stats["sum"] == [int(s) for s in np.round(k.sum(0) * 2**24)]
    assert stats["abs"] == [int(s) for s in np.round(np.abs(k).sum(0) * 2**24)]
    assert np.array_equal(stats["min"], k.min(0)) and np.array_equal(stats["max"], k.max(0))
    assert (stats["nk"], stats["nq"]) == (30, 90)
    energy = (k[:, :4] ** 2 + k[:, 4:] ** 2).sum(0)
    assert np.allclose(np.array(stats["k2"], float) / 2**24, energy, rtol=1e-5)
    assert stats["q2"] == [3 * s for s in stats["k2"]]


def test_token_scores_agree_with_their_definitions(rng):
    hidden = rng.standard_normal((4, 10, 32)).astype(np.float32)
    steps = np.diff(hidden.astype(float), axis=0)
    norms = np.linalg.norm(hidden.astype(float), axis=2)
    cosine = 1 - (hidden[1:].astype(float) * hidden[:-1]).sum(2) / (norms[1:] * norms[:-1])
    for kind, expected in (
        ("delta-norm", np.linalg.norm(steps, axis=2).mean(0)),
        ("cosine-delta", cosine.mean(0)),
        ("norm", norms[-1]),
        ("variance", hidden[-1].astype(float).var(1)),
    ):
        assert np.allclose(kvq.scores_hidden(kind, hidden), expected, rtol=1e-5), kind
    keys = [rng.standard_normal((10, 2, 16)).astype(np.float16) for _ in range(3)]
    expected = np.mean([np.linalg.norm(k.astype(float), axis=2).mean(1) for k in keys], 0)
    assert np.allclose(kvq.scores_norms(keys), expected, rtol=1e-5)


def test_self_information_and_accumulated_attention(rng):
    logits = rng.standard_normal((10, 50)).astype(np.float32)
    targets = rng.integers(0, 50, 10)
    expected = np.logaddexp.reduce(logits.astype(float), 1) - logits[np.arange(10), targets]
    assert np.allclose(kvq.scores_self_information(logits, targets), expected, rtol=1e-5)
    weights = rng.random((2, 5, 7)).astype(np.float32)
    once = kvq.scores_attention(weights)
    assert np.allclose(once, weights.sum((0, 1)), rtol=1e-5)
    assert np.allclose(kvq.scores_attention(weights, once), 2 * once, rtol=1e-5)


def test_random_scores_do_not_depend_on_the_cut():
    assert np.array_equal(kvq.scores_random(3, 0, 10)[4:], kvq.scores_random(3, 4, 6))
