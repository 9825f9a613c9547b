"""Vectors of the width policies, Block-GTQ and pair-widths: scores from statistics, and the greedy allotment."""

import itertools
import math

import numpy as np

from .codecs_channel import ROTARY
from .data import Stream, array, hexed, made
from .script import Group, Suite

SCORES = ("qk-avg", "qk-max", "qk-product", "k-only", "q-only", "k-var", "q-var", "q-geo", "q-range")


def widths_test(g: Group, slug: str, comment: str, budget: int | None = None, **arguments) -> np.ndarray:
    bits = array(g.test(slug, comment).ok("policy", **arguments)["bits"])
    low, high = arguments.get("bmin", 1), arguments.get("bmax", 8)
    assert bits.min() >= low and bits.max() <= high
    assert budget is None or bits.sum() == budget, f"{slug}: {bits.sum()} bits, not {budget}"
    return bits


def _cost(scores, bits) -> float:
    return float(sum(s * 4.0**-b for s, b in zip(scores, bits)))


def blockgtq() -> Suite:
    return _suite("policy-blockgtq", "blockgtq", 1)


def pair_widths() -> Suite:
    return _suite("policy-pair-widths", "pair-widths", 0)


def _suite(suite_name: str, name: str, lowest: int) -> Suite:
    suite = Suite(suite_name)
    g = suite.group("scores", "Every score from the statistics of k and q")
    for i, score in enumerate(SCORES):
        for j, (dim, tokens, heads) in enumerate(((16, 4, 1), (64, 5, 2), (80, 6, 4), (128, 4, 1))):
            k = made(
                700 + 10 * i + j, (tokens, dim), 1.0, chan_mul=1 + np.arange(dim) * 5 % 13, chan_add=np.arange(dim) * 3 % 7 - 3.0
            )
            q = made(800 + 10 * i + j, (heads, tokens, dim), 1.0, chan_mul=1 + np.arange(dim) * 3 % 11 / 2)
            widths_test(
                g, f"{score}-D{dim}", f"score={score}, {heads} query heads", 3 * dim // 2, name=name, avg=3, score=score, k=k, q=q
            )
    k, q = (
        made(690, (6, 16), 1.0, chan_mul=np.arange(16) % 5 + 1, chan_add=np.arange(16) % 3),
        made(691, (1, 6, 16), 1.0, chan_mul=np.arange(16) % 7 + 1),
    )
    default = "qk-avg" if lowest else "q-var"
    absent = widths_test(g, "default", f"score= is {default} unless given", 20, name=name, avg="5/2", k=k, q=q)
    assert np.array_equal(
        absent, widths_test(g, "default-named", f"score={default}", 20, name=name, avg="5/2", score=default, k=k, q=q)
    )
    _degenerate(suite, name)
    _given(suite, name, lowest)
    _budgets(suite, name, lowest)
    _units(suite, name)
    g = suite.group("pairs", "Pairs by layout and rotary part")
    for i, (layout, r, first) in enumerate(ROTARY):
        k, q = made(860 + i, (4, 16), 1.0, chan_mul=np.arange(16) * 5 % 11 + 1), made(870 + i, (2, 4, 16), 1.0)
        widths_test(
            g,
            f"{layout}-{r}-{first}",
            "Widths by pair number",
            20,
            name=name,
            avg="5/2",
            k=k,
            q=q,
            layout=layout,
            rotary_dim=r or None,
            rotary_first=first or None,
        )
    _refused(suite, name, lowest)
    return suite


def _degenerate(suite: Suite, name: str) -> None:
    g = suite.group("degenerate", "Constant, zero and extreme statistics")
    ones = np.ones((3, 16))
    ramp = np.arange(16.0)
    inputs = {
        "zeros": (0 * ones, 0 * ones),
        "zero-keys": (0 * ones, ones),
        "zero-queries": (ones, 0 * ones),
        "constant": (ones, ones),
        "constant-channels": (ones * ramp, ones),
        "one-pair": (np.where(ramp == 3, 50.0, 0)[None].repeat(3, 0), ones),
        "largest": (65504 * ones * np.where(ramp % 2, 1, -1), 65504 * ones),
        "subnormal": (2.0**-24 * ones * ramp, 2.0**-24 * ones),
        "below-one-unit": (2.0**-13 * ones, 2.0**-14 * ones * ramp),
        "biased": (921 + ones * np.array([[0.5], [-0.5], [0]]), ones),
    }
    for slug, (k, q) in inputs.items():
        for score in SCORES:
            widths_test(
                g,
                f"{slug}-{score}",
                f"{slug}, score={score}: the budget is spent all the same",
                20,
                name=name,
                avg="5/2",
                score=score,
                k=hexed(k),
                q=hexed(q[None]),
            )


def _given(suite: Suite, name: str, lowest: int) -> None:
    g = suite.group("given", "Scores given in fp64; ties to the pair with fewer bits, then the lower pair")
    equal = widths_test(g, "equal-3", "64 equal scores at 3 bits: all 3", 192, name=name, avg=3, scores=hexed(np.ones(64), "f64"))
    assert (equal == 3).all()
    half = widths_test(
        g, "equal-5-of-2", "2.5 bits: pairs 0..31 get 3", 160, name=name, avg="5/2", scores=hexed(np.ones(64), "f64")
    )
    assert (half[:32] == 3).all() and (half[32:] == 2).all()
    zeros = widths_test(
        g, "zeros", "Zero scores: the budget is still spent, evenly", 20, name=name, avg="5/2", scores=hexed(np.zeros(8), "f64")
    )
    assert zeros.tolist() == [3, 3, 3, 3, 2, 2, 2, 2]
    ratio4 = widths_test(
        g, "powers-of-4", "Scores 4^i: ties everywhere", None, name=name, avg=3, scores=hexed(4.0 ** np.arange(8), "f64")
    )
    assert ratio4.sum() == 24
    lists = {
        "huge-and-tiny": 10.0 ** np.array([-30, 30, 0, -300, 300, 10, -10, 5]),
        "subnormal": np.array([5e-324, 1e-323, 0, 1.5e-323, 5e-324, 0, 2e-323, 1e-320]),
        "one-step": np.array([1, 1, 1 + 2.0**-52, 1, 1, 1, 1, 1]),
        "fp32-would-tie": 1 + 2.0**-30 * np.arange(8),
        "largest": np.array([1.7e308, 1e308, 1, 0, 1.7e308, 1e-308, 1, 1]),
        "minus-zero": np.array([-0.0, 0, -0.0, 0, 1, 0, -0.0, 1]),
    }
    for slug, scores in lists.items():
        for avg in ("2/1", "7/2"):
            widths_test(
                g,
                f"{slug}-{avg.replace('/', '-')}",
                f"{slug}",
                int(8 * eval_ratio(avg)),
                name=name,
                avg=avg,
                scores=hexed(scores, "f64"),
            )
    stream = Stream(84)
    for budget in range(4 if lowest else 2, 17, 2):
        scores = np.abs(stream.uniform(4)) + 0.01
        low = min(1, lowest)
        bits = widths_test(
            g,
            f"optimal-{budget}",
            "4 pairs: no other choice of widths costs less",
            budget,
            name=name,
            avg=f"{budget}/4",
            bmin=low,
            bmax=4,
            scores=hexed(scores, "f64"),
        )
        best = min(_cost(scores, choice) for choice in itertools.product(range(low, 5), repeat=4) if sum(choice) <= budget)
        assert math.isclose(_cost(scores, bits), best)


def eval_ratio(text: str) -> float:
    p, q = map(int, text.split("/"))
    return p / q


def _budgets(suite: Suite, name: str, lowest: int) -> None:
    g = suite.group("budgets", "B = floor(avg * D/2), bounds of a width")
    scores = np.abs(Stream(85).uniform(8)) + 0.001
    for avg in ("1/1", "9/8", "17/16", "5/2", "21/8", "3/1", "8/1", "20/1"):
        for bmin, bmax in ((lowest, 8), (1, 4), (1, 1), (lowest, 6)):
            total = int(8 * eval_ratio(avg))
            widths_test(
                g,
                f"avg-{avg.replace('/', '-')}-{bmin}-{bmax}",
                f"avg {avg}, widths {bmin}..{bmax}: what cannot be spent is left",
                min(total, 8 * bmax),
                name=name,
                avg=avg,
                bmin=bmin,
                bmax=bmax,
                scores=hexed(scores, "f64"),
            )


def _units(suite: Suite, name: str) -> None:
    g = suite.group("units", "unit=n: runs of n pairs in sorted order move together")
    stream = Stream(86)
    for pairs in (8, 12, 64):
        for unit in (1, 2, 4):
            for avg in ("2/1", "11/4", "41/12"):
                scores = np.abs(stream.uniform(pairs)) * 10 ** (2 * stream.uniform(pairs))
                bits = widths_test(
                    g,
                    f"P{pairs}-U{unit}-avg-{avg.replace('/', '-')}",
                    f"{pairs} pairs in runs of {unit}",
                    None,
                    name=name,
                    avg=avg,
                    unit=unit,
                    bmin=1,
                    bmax=6,
                    scores=hexed(scores, "f64"),
                )
                left = int(pairs * eval_ratio(avg)) - bits.sum()
                assert 0 <= left < unit, "less than one move is left"
                order = np.argsort(-scores, kind="stable").reshape(-1, unit)
                assert all(len(set(bits[run])) == 1 for run in order), "a run has one width"
    ties = widths_test(
        g, "ties", "Equal scores: runs of ascending pairs", None, name=name, avg="9/4", unit=2, scores=hexed(np.ones(8), "f64")
    )
    assert ties.tolist() == [3, 3, 2, 2, 2, 2, 2, 2]
    widths_test(g, "sum-in-sorted-order", "A run's score is summed in fp64 in sorted order", None, name=name, avg="2/1", unit=4,
                scores=hexed([2.0**53, 1, 1, 1, 2.0**53 - 1, 2, 1, 1], "f64"))  # fmt: skip
    k, q = made(880, (4, 16), 1.0, chan_mul=np.arange(16) + 1), made(881, (1, 4, 16))
    widths_test(g, "from-statistics", "Runs from statistics", None, name=name, avg="5/2", unit=2, k=k, q=q)


def _refused(suite: Suite, name: str, lowest: int) -> None:
    g = suite.group("refused", "Scores, budgets and bounds that are INVALID; statistics that are missing")
    good = hexed(np.ones(8), "f64")
    for slug, value in (
        ("nan", math.nan),
        ("infinity", math.inf),
        ("minus-infinity", -math.inf),
        ("negative", -1.0),
        ("smallest-negative", -5e-324),
    ):
        scores = np.ones(8)
        scores[5] = value
        g.test(slug, f"A score is {slug}").refused("INVALID", "policy", name=name, avg=3, scores=hexed(scores, "f64"))
    for slug, bounds in (("bmin-above-bmax", dict(bmin=4, bmax=3)), ("bmax-9", dict(bmax=9)), ("budget-below-bmin", dict(avg="3/2", bmin=2)), ("budget-below-1", dict(avg="7/8", bmin=1)), ("unit-3", dict(unit=3)),
                         ("unit-16", dict(unit=16)), ("unit-0", dict(unit=0))):  # fmt: skip
        g.test(slug, f"{bounds}").refused("INVALID", "policy", name=name, **{"avg": 3, "scores": good} | bounds)
    if lowest:
        g.test("bmin-0", "Width 0 is for channel-widths only").refused("INVALID", "policy", name=name, avg=3, bmin=0, scores=good)
    for i, avg in enumerate(("1/0", "2.5", "-3", "x")):
        g.test(f"avg-{i}", f"avg = {avg}").refused("INVALID", "policy", name=name, avg=avg, scores=good)
    k, q = made(890, (2, 8)), made(891, (1, 2, 8))
    g.test("score", "No such score").refused("INVALID", "policy", name=name, avg=3, score="kq-avg", k=k, q=q)
    for score in SCORES:
        if score != "q-only":
            g.test(f"no-keys-{score}", f"score={score} without k").refused("STATE", "policy", name=name, avg=3, score=score, q=q)
        if score not in ("k-only", "k-var"):
            g.test(f"no-queries-{score}", f"score={score} without q").refused(
                "STATE", "policy", name=name, avg=3, score=score, k=k
            )
    widths_test(g, "k-only-without-q", "k-only needs no queries", 12, name=name, avg=3, score="k-only", k=k)
    widths_test(g, "q-only-without-k", "q-only needs no keys", 12, name=name, avg=3, score="q-only", q=q)


def suites() -> list[Suite]:
    return [blockgtq(), pair_widths()]
