"""The bookkeeping of kvq.quality (rows, checks, results on disk, what is written), and what the demo prints."""

import json

import numpy as np
import pytest
from rich.console import Console

import kvq
from kvq.demo import offline
from kvq.lab import show
from kvq.lab.accounting import Cost, cost
from kvq.lab.metrics import Scores, summarize
from kvq.lab.streams import Prompt
from kvq.quality import checks, profiles, report, rows
from kvq.quality.store import Store

GEOMETRY = dict(n_layers=30, kv_heads=3, q_heads=9, dim_k=64, layout="adjacent")


def scores(kl, spread=0.0, seed=0):
    noise = np.random.default_rng(seed).standard_normal(256) * spread
    return Scores(kl + noise, np.ones(256, bool), np.full(256, kl), np.full(256, 3.0))


def result(row, kl, spread=0.0, seed=0):
    s = scores(kl, spread, seed)
    return report.Result(row, s, Cost(2.0, 2.2, 1.8, 1000, 8000), summarize(s))


def test_every_row_is_a_recipe_of_this_library_and_has_its_own_name():
    table = rows.all_rows()
    assert len({row.name for row in table}) == len(table)
    assert {row.name for row in table} >= set(kvq.presets()) | set(rows.TARGETS) | {
        n for chain in rows.ORDERS.values() for n in chain
    }
    for row in table:
        assert "k=" in kvq.recipe(row.recipe, GEOMETRY)


def test_a_result_is_kept_for_its_row_and_window_only(tmp_path):
    store, row = Store(tmp_path), rows.Row("a", "tq-2")
    store.save(row, 2, scores(0.1), Cost(2.25, 2.25, 2.25, 10, 80))
    found, cost = store.load(row, 2)
    np.testing.assert_array_equal(found.kl, scores(0.1).kl)
    assert cost == Cost(2.25, 2.25, 2.25, 10, 80)
    assert store.load(row, 6) is None and store.load(rows.Row("a", "tq-3"), 2) is None


def test_a_half_written_result_is_measured_again(tmp_path):
    store, row = Store(tmp_path), rows.Row("a", "tq-2")
    store.save(row, 2, scores(0.1), Cost(2.25, 2.25, 2.25, 10, 80))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert store.load(row, 2) is None


def everything(kl):
    return {row.name: result(row, kl(row)) for row in rows.all_rows()}


def good(row):
    """A divergence with which every check passes."""
    orders = [name for chain in rows.ORDERS.values() for name in chain]
    if row.name == rows.SCALARS[0]:
        return 0.4  # above the known figure, which lies between two rows
    return row.known.kl if row.known else 0.001 * (1 + orders.index(row.name)) if row.name in orders else 0.001


def known_ratio(results):
    """Give the rows with known figures their known perplexity ratio too."""
    for r in results.values():
        if r.row.known:
            r.summary["ppl_ratio"] = r.row.known.ppl_ratio
    results[rows.SCALARS[0]].summary["ppl_ratio"] = 1.5
    return results


def test_checks_pass_where_everything_is_as_known():
    results = known_ratio(everything(good))
    results["tq-2"] = result(results["tq-2"].row, 0.2)  # in two chains: above Block-GTQ, below affine rows
    results["rotated affine rows, 4 levels"] = result(results["rotated affine rows, 4 levels"].row, 0.7)
    assert [v.text for v in checks.check(results) if not v.passed] == []


@pytest.mark.parametrize(
    "name, kl, says",
    [
        ("kvq-2", 0.046, "kvq-2: KL 0.0460"),
        ("TQ K2V2", 0.25, "TQ K2V2: KL 0.25"),
        ("TQ K2V2", 0.15, "TQ K2V2: KL 0.15"),  # too good is off as well
        ("SemKV on TQ 4/3, r = 3/4", 0.33, "SemKV on TQ 4/3, r = 3/4: known KL 0.297 between 0.33"),
        ("SemKV on TQ 4/3, unbiased scalars", 0.26, "SemKV on TQ 4/3, r = 3/4: known KL 0.297 between 0.297"),
        ("PN-Mix keys, qk", 0.5, "PN-Mix's criterion"),
    ],
)
def test_checks_fail_where_something_is_off(name, kl, says):
    results = known_ratio(everything(good))
    results[name] = result(results[name].row, kl)
    assert any(v.text.startswith(says) and not v.passed for v in checks.check(results))


def test_an_order_may_be_reversed_within_its_error_only():
    a, b = (rows.Row(name, "tq-2") for name in "ab")
    noisy = checks._order("x", result(a, 0.101, 0.05, 1), result(b, 0.1, 0.05, 2))
    clear = checks._order("x", result(a, 0.2, 0.05, 1), result(b, 0.1, 0.05, 2))
    assert noisy.passed and not clear.passed


def test_the_page_keeps_its_own_words(tmp_path):
    page = tmp_path / report.PAGE
    page.parent.mkdir()
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    results = known_ratio(everything(good))
    for _ in range(2):
        written = list(report.write(results, checks.check(results), tmp_path))
    assert all((tmp_path / name).stat().st_size > 0 for name in written)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert text.count(report.BEGIN) == 1 and "| kvq-2 | 2.00 | 2.20 / 1.80 |" in text
    document = json.loads((tmp_path / report.RESULTS).read_text())
    assert {row["name"] for row in document["rows"]} == set(results)


# --------------------------------------------------------------------------------------------------------------- profiles


def prompts(tokens=300, layers=5, kv_heads=2, group=2, dim=16):
    rng = np.random.default_rng(9)
    k, v, q = ([rng.standard_normal((tokens, h, dim)).astype(np.float16) for _ in range(layers)] for h in (kv_heads, kv_heads, 4))
    for layer in k:
        layer *= np.linspace(0.5, 3, dim, dtype=np.float16)
    return [Prompt(np.arange(tokens), k, v, q, np.zeros(tokens, np.float32), np.zeros((tokens, 8), np.float32))]


def test_far_attention_is_the_share_of_old_tokens_behind_the_sinks():
    rng = np.random.default_rng(2)
    k = rng.standard_normal((200, 1, 4)).astype(np.float32)
    q = np.zeros((200, 2, 4), np.float32)  # attends to everything alike
    places = np.arange(132, 200, 16)
    expected = np.mean([(place - 128 - 4) / (place + 1) for place in places])
    assert profiles.far_attention(q, k)[0] == pytest.approx(expected)


def test_chanmix_keeps_retrieval_heads_at_4_bits_and_the_others_at_2_on_average():
    bits = profiles.chanmix(prompts())["bits"]
    assert bits.shape == (5, 2, 16) and bits.dtype == np.uint8
    whole = (bits == 4).all(axis=2)
    assert whole.sum() == 1  # a tenth of ten heads
    for widths in bits[~whole]:
        assert sorted(widths) == [1] * 4 + [2] * 8 + [3] * 4
        assert widths[:4].mean() < widths[-4:].mean()  # later channels have wider ranges


def test_profiles_fit_their_recipes():
    texts = prompts(dim=64)
    geometry = dict(n_layers=5, kv_heads=2, q_heads=4, dim_k=64, layout="adjacent")
    for name in ("chanmix", "pmkvq"):
        data = getattr(profiles, name)(texts)
        with kvq.Cache(name, **geometry, **data) as cache:
            sequence = cache.create()
            sequence.commit(texts[0].k, texts[0].v, texts[0].q)
            assert sequence.lengths.packed > 0
            assert 2 < cost(cache, len(sequence), 2048, **data).bits < 5


# ------------------------------------------------------------------------------------------------------------------- demo


def test_the_demo_without_a_model_prints_a_row_per_recipe_and_draws(tmp_path, capsys):
    offline.run(["fp16", "kvq-2", "semkv-tq-2"], 1, tmp_path / "picture.png")
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if line.startswith(("  fp16", "  kvq-2", "  semkv"))] == [
        "fp16",
        "kvq-2",
        "semkv-tq-2",
    ]
    assert "\x1b" not in printed and "\r" not in printed
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_words_go_below_a_table_that_leaves_no_room(monkeypatch, capsys):
    rows_ = [("fp16", "16.00"), ("kvq-2", "1.97")]
    for width, below in ((160, False), (50, True)):
        monkeypatch.setattr(show, "console", Console(width=width, highlight=False))
        show.table("title", ("recipe", "bits"), rows_, "answer", ["a [b] c " * 30, "d"])
        printed = capsys.readouterr().out
        assert "16.00" in printed and "a [b] c" in printed
        assert ("fp16: a [b] c" in printed) is below
        assert max(map(len, printed.splitlines())) <= width
