"""Caches, sequences and steps, against attention in float64 over what the library says it stores."""

import numpy as np
import pytest

import kvq

LAYERS, KV, Q, D = 2, 2, 4, 64


def attention(q, k, v, scale=None, softcap=0, window=0, sinks=None):
    """out [n, q_heads, dim_v] and lse of the newest n tokens; k, v [kv_heads, tokens, dim]."""
    n, heads, dim = q.shape
    tokens = k.shape[1]
    out, lse = np.zeros((n, heads, v.shape[2])), np.zeros((n, heads))
    for i in range(n):
        end = tokens - n + i + 1
        begin = max(0, end - window) if window else 0
        for h in range(heads):
            g = h * k.shape[0] // heads
            logits = (k[g, begin:end].astype(float) @ q[i, h].astype(float)) * (scale or dim**-0.5)
            if softcap:
                logits = softcap * np.tanh(logits / softcap)
            every = logits if sinks is None else np.append(logits, sinks[h])
            lse[i, h] = np.logaddexp.reduce(every)
            out[i, h] = np.exp(logits - lse[i, h]) @ v[g, begin:end].astype(float)
    return out, lse


def stored(seq, layer):
    """K and V of a layer as the library decodes them: [kv_heads, tokens, dim]."""
    return [np.stack([seq.values(layer, head, which) for head in range(KV)]) for which in "kv"]


@pytest.fixture
def cache():
    with kvq.Cache("tq-3", n_layers=LAYERS, kv_heads=KV, q_heads=Q, dim_k=D) as cache:
        yield cache


@pytest.fixture
def prompt(cache, rows):
    """A committed sequence of 100 tokens."""
    seq = cache.create()
    seq.commit([rows(100, KV, D) for _ in range(LAYERS)], [rows(100, KV, D) for _ in range(LAYERS)])
    return seq


def test_a_prompt_and_a_step_attend_to_what_is_stored(cache, prompt, rows):
    with cache.step([prompt], [3]) as step:
        for layer in range(LAYERS):
            k, v, q = rows(3, KV, D), rows(3, KV, D), rows(3, Q, D) / 16
            step.append(layer, k, v)
            out, lse = step.attend(layer, q, lse=True)
            before = stored(prompt, layer)
            new = [x.transpose(1, 0, 2) for x in (k, v)]
            expected, sums = attention(q, *(np.concatenate([a, b], 1) for a, b in zip(before, new, strict=True)))
            assert np.abs(out - expected).max() < 1e-3 * np.abs(before[1]).max()
            assert np.abs(lse - sums).max() < 1e-3 * max(1, np.abs(sums).max())
        step.end()
    assert prompt.lengths.total == len(prompt) == 103


def test_options_of_attention_are_obeyed(cache, prompt, rows):
    q = rows(1, Q, D) / 16
    sinks = np.array([0.5, -1, 2, 8], np.float32)
    k, v = stored(prompt, 0)
    with cache.step([prompt], [1], query_only=True) as step:
        for options in ({}, {"scale": 0.3}, {"softcap": 5.0}, {"window": 7}, {"sinks": sinks}):
            out = step.attend(0, q, **options)
            expected, _ = attention(q, k, v, **options)
            assert np.abs(out - expected).max() < 1e-3 * np.abs(v).max(), options


def test_window_0_lifts_the_window_of_a_layer(rows):
    with kvq.Cache("tq-3", kv_heads=KV, q_heads=Q, dim_k=D, window=5) as cache:
        seq = cache.create()
        seq.prefill(0, rows(40, KV, D), rows(40, KV, D), final=True)
        q = rows(1, Q, D) / 16
        k, v = stored(seq, 0)
        with cache.step([seq], [1], query_only=True) as step:
            for given, window in ((None, 5), (0, 0), (9, 9)):
                error = np.abs(step.attend(0, q, window=given) - attention(q, k, v, window=window)[0]).max()
                assert error < 1e-3 * np.abs(v).max()


def test_attend_writes_to_a_given_array(cache, prompt, rows):
    q = rows(1, Q, D)
    with cache.step([prompt], [1], query_only=True) as step:
        expected = step.attend(0, q)
        for dtype in (np.float32, np.float16):
            out = np.full((1, Q, D), 7, dtype)
            assert step.attend(0, q, out=out) is out
            assert np.array_equal(out, expected.astype(dtype))
        with pytest.raises(ValueError, match="out has shape"):
            step.attend(0, q, out=np.empty((1, Q, D + 1), np.float32))


def test_leaving_a_step_without_end_forgets_its_tokens(cache, prompt, rows):
    with cache.step([prompt], [2]) as step:
        for layer in range(LAYERS):
            step.append(layer, rows(2, KV, D), rows(2, KV, D))
    assert len(prompt) == 100
    with pytest.raises(RuntimeError), cache.step([prompt], [2]):
        raise RuntimeError
    with cache.step([prompt], [0]) as step:  # nothing is open
        step.end()


def test_keep_drops_rejected_drafts_of_each_sequence(cache, prompt, rows):
    other = prompt.fork(50)
    k = rows(5, KV, D)
    with cache.step([prompt, other], [3, 2]) as step:
        assert step.n_tokens == 5
        for layer in range(LAYERS):
            step.append(layer, k, k)
        with pytest.raises(ValueError, match="keep"):
            step.end(keep=[1])
        step.end(keep=[1, 2])
    assert (len(prompt), len(other)) == (101, 52)
    assert np.array_equal(other.values(0, 1, "k", 50), k[3:, 1])


def test_fork_truncate_and_remove(cache, prompt):
    child = prompt.fork()
    assert child.lengths == prompt.lengths
    child.truncate(10)
    assert (len(child), len(prompt)) == (10, 100)
    child.remove()
    with pytest.raises(kvq.Error) as failure:
        len(child)
    assert failure.value.status == kvq.E_STALE
    assert "STALE" in str(failure.value) and failure.value.detail


def test_lengths_divide_the_tokens(cache, prompt):
    lengths = prompt.lengths
    assert lengths.committed and lengths.total == lengths.sinks + lengths.packed + lengths.tail == 100
    assert not cache.create().lengths.committed


def test_wire_bytes_decode_to_the_exported_values(cache, prompt):
    for head in range(KV):
        wire, tokens = prompt.wire(1, head, "v", 0, with_tokens=True)
        assert wire == prompt.wire(1, head, "v", 0)
        assert np.array_equal(kvq.codec_decode("lloyd(levels=8)", wire, tokens, D, "v"), prompt.values(1, head, "v", 0, tokens))
    with pytest.raises(kvq.Error) as failure:
        prompt.wire(1, 0, "v", 1000)
    assert failure.value.status == kvq.E_INVALID


def test_refusals_name_what_was_wrong():
    with pytest.raises(kvq.Error) as failure:
        kvq.Cache("kvq-9", kv_heads=1)
    assert failure.value.status == kvq.E_INVALID
    assert "kvq-9" in failure.value.detail
    with pytest.raises(ValueError, match="layout"):
        kvq.Cache(kv_heads=1, layout="diagonal")
    with pytest.raises(ValueError, match="kv_heads"):
        kvq.Cache()


def test_nonfinite_input_is_refused(cache, rows):
    k = rows(3, KV, D)
    k[1, 1, 5] = np.nan
    with pytest.raises(kvq.Error) as failure:
        cache.create().prefill(0, k, rows(3, KV, D))
    assert failure.value.status == kvq.E_NONFINITE


def test_layers_may_differ(rows):
    layers = [dict(kv_heads=2, q_heads=4, dim_k=64, dim_v=32), kvq.Layer(kv_heads=1, q_heads=8, dim_k=128, layout="adjacent")]
    with kvq.Cache("tq-4", layers=layers) as cache:
        seq = cache.create()
        seq.prefill(0, rows(70, 2, 64), rows(70, 2, 32))
        seq.prefill(1, rows(70, 1, 128), rows(70, 1, 128))
        seq.finish()
        assert seq.values(0, 1, "v").shape == (70, 32)
        with cache.step([seq], [1], query_only=True) as step:
            assert step.attend(0, rows(1, 4, 64)).shape == (1, 4, 32)
            assert step.attend(1, rows(1, 8, 128)).shape == (1, 8, 128)


def test_stats_follow_the_tokens(cache, prompt):
    stats = cache.stats()
    assert stats.sequences == 1 and stats.tokens == 100 and 0 < stats.bytes_used <= stats.bytes_peak
    prompt.remove()
    assert cache.stats().tokens == 0


def test_a_policy_is_calibrated_and_moves_to_another_cache(rows):
    geometry = dict(kv_heads=KV, q_heads=Q, dim_k=D)
    with kvq.Cache("blockgtq-k3v3", **geometry) as first, kvq.Cache("blockgtq-k3v3", **geometry) as second:
        first.calibrate(0, rows(200, KV, D), q=rows(200, Q, D))
        first.calibrate_finish()
        second.set_policy(first.policy())
        assert second.policy() == first.policy()


def test_semkv_takes_scores_and_ends_turns(rows):
    with kvq.Cache("semkv", kv_heads=KV, q_heads=Q, dim_k=D) as cache:
        seq = cache.create()
        seq.prefill(0, rows(40, KV, D), rows(40, KV, D), scores=np.arange(40), final=True)
        with cache.step([seq], [5]) as step:
            step.append(0, rows(5, KV, D), rows(5, KV, D))
            step.end(scores=np.arange(5))
        assert seq.lengths.tail == 5
        seq.end_turn()
        assert seq.lengths.tail == 0


def test_a_closed_cache_refuses_and_closing_twice_is_fine(prompt, cache):
    cache.close()
    cache.close()
    with pytest.raises(kvq.Error) as failure:
        cache.create()
    assert failure.value.status == kvq.E_INVALID
