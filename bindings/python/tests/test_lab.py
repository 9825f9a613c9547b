"""The parts of kvq.lab, kvq.demo and kvq.quality that need no model."""

import numpy as np
import pytest

import kvq
from kvq.lab import accounting, metrics, places, text, trace

GEOMETRY = dict(n_layers=2, kv_heads=2, q_heads=4, dim_k=64, layout="adjacent")


# ---------------------------------------------------------------------------------------------------------------- metrics


def test_divergence_of_two_known_distributions():
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]))
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]])) + 3  # logits have no zero
    scores = metrics.compare(other, reference, np.array([0, 2]))
    np.testing.assert_allclose(scores.kl, [0.5 * np.log(2) - 0.25 * np.log(2), 0], atol=1e-12)
    assert scores.same.tolist() == [False, True]
    np.testing.assert_allclose(scores.nll, -np.log([0.25, 0.1]))
    np.testing.assert_allclose(scores.excess, [np.log(2), 0], atol=1e-12)


def test_one_reference_serves_many_streams():
    rng = np.random.default_rng(1)
    steps = [rng.standard_normal((3, 7)) for _ in range(5)]
    columns = metrics.Scores.columns([metrics.compare(x, x[:1], np.array([4, 4, 4])) for x in steps])
    alone = metrics.compare(np.stack([x[2] for x in steps]), np.stack([x[0] for x in steps]), np.full(5, 4))
    assert len(columns) == 3
    np.testing.assert_allclose(columns[0].kl, 0, atol=1e-12)
    np.testing.assert_allclose(columns[2].kl, alone.kl)
    np.testing.assert_allclose(columns[2].excess, alone.excess)


def test_errors_come_from_runs_of_64_tokens():
    runs = np.repeat([1.0, 3.0, 2.0], 64)
    mean, error = metrics.mean_and_error(runs)
    assert (mean, error) == (2.0, pytest.approx(1 / np.sqrt(3)))
    assert np.isnan(metrics.mean_and_error(runs[:100])[1])


def test_summary_of_two_parts():
    part = metrics.Scores(np.full(64, 0.1), np.arange(64) % 2 == 0, np.full(64, np.log(1.5)), np.full(64, 2.0))
    whole = metrics.summarize(metrics.Scores.join([part, part]))
    assert whole["tokens"] == 128
    assert whole["kl"] == pytest.approx(0.1)
    assert whole["ppl_ratio"] == pytest.approx(1.5)
    assert whole["ppl"] == pytest.approx(np.exp(2))
    assert whole["top1"] == 0.5


# ------------------------------------------------------------------------------------------------------------------- text


def test_only_prose_of_the_handbook_counts(tmp_path):
    long = "The package manager <em>resolves</em> dependencies &amp; installs what is needed. " * 4
    page = f'<div class="para">{long}</div><pre class="screen">{"# apt update " * 40}</pre><p class="para">Short.</p>'
    (tmp_path / "b.html").write_text(page)
    (tmp_path / "a.html").write_text(page.replace("package manager", "file system"))
    (tmp_path / "legal-notice.html").write_text(page.replace("package manager", "licence"))
    found = text.handbook_text(tmp_path).split("\n\n")
    assert [p[:16] for p in found] == ["The file system ", "The package mana"]
    assert "apt update" not in found[1] and "& installs" in found[1] and "<em>" not in found[1]


def test_the_story_is_there():
    assert len(text.own_prose().split()) > 1000


# ------------------------------------------------------------------------------------------------------------- accounting


def filled(recipe, tokens=200):
    rng = np.random.default_rng(3)
    cache = kvq.Cache(recipe, **GEOMETRY)
    k, v, q = ([rng.standard_normal((tokens, h, 64)).astype(np.float16) for _ in range(2)] for h in (2, 2, 4))
    for rows in k:
        rows *= np.linspace(0.2, 3, 64, dtype=np.float16)
    sequence = cache.create()
    sequence.commit(k, v, q)
    return cache, sequence, k, q


def test_cost_of_a_recipe_whose_bytes_do_not_depend_on_data():
    cache, sequence, _, _ = filled("tq-2")
    cost = accounting.cost(cache, len(sequence))
    assert cost.bits == pytest.approx(2.25)  # two bits a code and 16 bits a row of 64
    assert cost.fp16_bytes == 200 * 2 * 2 * 64 * 2 * 2
    assert cost.bytes == 192 * 2 * 2 * 64 * 2 * 2.25 / 8 + 8 * 2 * 2 * 64 * 2 * 2


def test_width_lists_are_read_from_the_policy():
    cache, _, k, q = filled("blockgtq-k2v2")
    widths = accounting.policy_tables(cache.policy())
    assert widths.shape == (2, 2, 32)
    for layer in range(2):
        for head in range(2):
            heads = q[layer][:, 2 * head : 2 * head + 2]
            decided = kvq.policy_decide("blockgtq(avg=2)", k[layer][:, head], heads, layout="adjacent")
            assert widths[layer, head].tobytes() == decided
    assert widths.mean() == 2 and accounting.cost(cache, 200).bits_k > 2.25


# ------------------------------------------------------------------------------------------------------------------ trace


@pytest.fixture(scope="module")
def recorded():
    return trace.load()


def test_the_trace_is_small_and_whole(recorded):
    assert places.trace_file().stat().st_size < 4e6
    assert recorded.q.dtype == recorded.k.dtype == recorded.v.dtype == np.float16
    assert recorded.q.shape == (3, recorded.tokens, 9, 64)
    assert recorded.k.shape == recorded.v.shape == (3, recorded.tokens, 3, 64)
    assert 0 < recorded.prompt < recorded.tokens


def test_a_saved_trace_comes_back(recorded, tmp_path):
    trace.save(recorded, tmp_path / "trace.npz")
    again = trace.load(tmp_path / "trace.npz")
    np.testing.assert_array_equal(again.k, recorded.k)
    assert again.prompt == recorded.prompt


def test_attention_on_the_trace_gets_better_with_bits(recorded):
    errors = {recipe: trace.attention_errors(recorded, recipe)[0] for recipe in ("fp16", "kvq-3", "kvq-2.5", "kvq-2", "tq-2")}
    assert errors["fp16"] < 1e-6
    assert errors["fp16"] < errors["kvq-3"] < errors["kvq-2.5"] < errors["kvq-2"] < errors["tq-2"] < 1


def test_recipes_that_rank_tokens_can_be_replayed(recorded):
    error, seconds = trace.attention_errors(recorded, "semkv-tq")
    assert 0 < error < 1 and seconds > 0
