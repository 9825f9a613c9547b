"""Vectors of statistics and stateless policy decisions (FORMATS section 6)."""

import math
from fractions import Fraction

import numpy as np

from . import facts
from .codecs_channel import ROTARY
from .coding import bits_of_mask
from .data import Stream, array, entered, hexed, made
from .script import Group, Suite

UNIT = 1 << 24
TINY = 2.0**-24


# ---- statistics


def _exact_sums(x: np.ndarray) -> tuple[list[int], list[int]]:
    """Sum and sum of abs per channel, times 2^24, by fractions."""
    columns = [[int(Fraction(float(v)) * UNIT) for v in column] for column in x.T]
    return [sum(c) for c in columns], [sum(map(abs, c)) for c in columns]


def _pair_sums(x: np.ndarray, pairs: np.ndarray) -> tuple[list[int], list[int]]:
    """Sum of floor(sqrt(r2) * 2^24) and floor(r2 * 2^24), one fp32 operation at a time."""
    first, second = [], []
    f = np.float32
    for u, v in pairs:
        r2 = [f(f(f(a) * f(a)) + f(f(b) * f(b))) for a, b in zip(x[:, u], x[:, v])]
        second.append(sum(math.floor(Fraction(float(r)) * UNIT) for r in r2))
        first.append(sum(math.floor(Fraction(float(np.sqrt(r))) * UNIT) for r in r2))
    return first, second


def stats_test(g: Group, slug: str, comment: str, k: dict | None, q: dict | None, **head) -> dict:
    result = g.test(slug, comment).ok("stats", k=k, q=q, **head)
    dim = (k or q)["shape"][-1]
    pairs = facts.pairs_of(dim, head.get("layout", "half"), head.get("rotary_dim") or 0, head.get("rotary_first") or 0)
    if k is not None:
        x = entered(k)
        total, magnitude = _exact_sums(x)
        assert result["sum"] == [str(v) for v in total] and result["abs"] == [str(v) for v in magnitude]
        assert [result["K1"], result["K2"]] == [[str(v) for v in sums] for sums in _pair_sums(x, pairs)]
    if q is not None:
        sums = _pair_sums(entered(q).reshape(-1, dim), pairs)
        assert [result["Q1"], result["Q2"]] == [[str(v) for v in s] for s in sums]
    return result


def statistics() -> Suite:
    suite = Suite("statistics")
    g = suite.group("sums", "Exact integer sums of keys and queries, per pair and channel")
    for i, (dim, tokens, heads) in enumerate(
        ((2, 1, 1), (8, 5, 1), (16, 3, 2), (16, 33, 4), (64, 3, 1), (80, 4, 3), (128, 4, 2))
    ):
        k, q = made(100 + i, (tokens, dim), 2.0, 0.3), made(200 + i, (heads, tokens, dim), 1.5)
        stats_test(g, f"D{dim}-T{tokens}-H{heads}", f"{tokens} tokens, {heads} query heads of one KV head", k, q)
    stats_test(g, "flat-queries", "q without a head axis is one head", made(300, (4, 8)), made(301, (4, 8)))
    g = suite.group("sides", "Keys alone, queries alone: the other side counts 0")
    only_k = stats_test(g, "keys", "nq 0, and sums of 0", made(310, (4, 8)), None)
    assert only_k["nq"] == 0 and only_k["Q1"] == ["0"] * 4 and only_k["nk"] == 4
    only_q = stats_test(g, "queries", "nk 0; minimum +inf, maximum -inf", None, made(311, (2, 4, 8)))
    assert only_q["nk"] == 0 and only_q["nq"] == 8 and only_q["sum"] == ["0"] * 8
    g = suite.group("pairs", "Which channels make a pair")
    for i, (layout, r, first) in enumerate(ROTARY):
        head = dict(layout=layout, rotary_dim=r or None, rotary_first=first or None)
        stats_test(
            g,
            f"{layout}-{r}-{first}",
            "Pair numbers by layout and rotary part",
            made(320 + i, (3, 16), 3.0),
            made(330 + i, (1, 3, 16)),
            **head,
        )
    g = suite.group("torture", "Rounding of the terms")
    ramp = np.arange(8.0)
    inputs = {
        "subnormals": TINY * np.array([ramp, -ramp, 3 * ramp]),
        "floors": np.array([[TINY, 0.0, 2.0**-12, 2.0**-13, 3 * 2.0**-13, 1.5 * 2.0**-12, 0.01, 1e-3]]),
        "largest": np.where(ramp % 2, 65504.0, -65504.0)[None].repeat(5, 0),
        "saturated": np.where(ramp % 3, 1e6, -7e4)[None].repeat(2, 0),
        "zeros": np.array([[0.0, -0.0] * 4]),
        "one-and-tiny": np.array([[2048.0, TINY] * 4]).repeat(3, 0),
        "pythagoras": np.array([[3.0, 5, 8, 20, 4, 12, 15, 21]]),
    }
    for name, x in inputs.items():
        stats_test(g, name, f"{name} on both sides", hexed(x, "f32"), hexed(x[None], "f32"))
    many = made(340, (200, 4), 60000.0)
    stats_test(
        g,
        "beyond-64-bits",
        "K2 of 200 large pairs needs more than 64 bits" if 200 * 2 * 3.6e9 * UNIT > 2**64 else "Large sums",
        many,
        None,
    )
    g = suite.group("order", "Any order of tokens and heads gives the same sums")
    x = entered(made(350, (12, 8), 3.0))
    answers = []
    for slug, order in (("forwards", slice(None)), ("backwards", slice(None, None, -1))):
        heads = np.stack([x[order], 2 * x[order][::-1]])[:: -1 if slug == "backwards" else 1]
        answers.append(stats_test(g, slug, "The same tokens and heads in another order", hexed(x[order]), hexed(heads)))
    assert answers[0] == answers[1]
    g = suite.group("refused", "NaN and infinity")
    for slug, bits in (("nan", "007e"), ("infinity", "007c")):
        bad = {"dtype": "f16", "shape": [1, 2], "hex": "003c" + bits}
        g.test(f"{slug}-k", f"{slug} in k").refused("NONFINITE", "stats", k=bad, q=made(1, (1, 1, 2)))
        g.test(f"{slug}-q", f"{slug} in q").refused("NONFINITE", "stats", k=made(1, (1, 2)), q=bad)
    return suite


# ---- masks


def mask_test(g: Group, slug: str, comment: str, units: int, count: int, **arguments) -> np.ndarray:
    """A policy whose mask has `count` of `units` bits set."""
    mask = bits_of_mask(g.test(slug, comment).ok("policy", **arguments)["mask"], units)
    assert mask.sum() == count, f"{slug}: {mask.sum()} of {units}, not {count}"
    return mask


CRITERIA = ("qk-pair", "k-pair", "k-range", "k-magnitude")


def _floor(r: str, n: int) -> int:
    p, q = map(int, r.split("/"))
    return p * n // q


def pnmix() -> Suite:
    suite = Suite("policy-pnmix")
    g = suite.group("shares", "floor(r * n) of pairs or channels, exactly")
    for i, (dim, r) in enumerate(
        (dim, r) for dim in (16, 64, 80, 128) for r in ("0/1", "1/2", "2/5", "1/3", "29/50", "7/8", "1/1")
    ):
        for criterion in CRITERIA:
            if dim > 16 and (i + CRITERIA.index(criterion)) % 2:
                continue
            units = dim if criterion in ("k-range", "k-magnitude") else dim // 2
            k = made(400 + i, (3, dim), 1.0, 0.2, chan_mul=1 + np.arange(dim) * 5 % 13 / 4)
            q = made(500 + i, (2, 3, dim), 1.0)
            mask_test(
                g,
                f"D{dim}-r-{r.replace('/', '-')}-{criterion}",
                f"r = {r}, {criterion}",
                units,
                _floor(r, units),
                name="pnmix",
                r=r,
                criterion=criterion,
                k=k,
                q=q,
            )
    g = suite.group("ties", "Equal values: the lower unit")
    ones = np.ones((4, 16))
    for criterion in CRITERIA:
        units = 16 if criterion in ("k-range", "k-magnitude") else 8
        for slug, k in (("equal", ones), ("zero", 0 * ones), ("signs", ones * np.where(np.arange(16) % 3, 1, -1))):
            mask = mask_test(
                g,
                f"{criterion}-{slug}",
                f"All {slug}: the lowest {units // 2}",
                units,
                units // 2,
                name="pnmix",
                r="1/2",
                criterion=criterion,
                k=hexed(k),
                q=hexed(ones),
            )
            assert mask[: units // 2].all()
        k = ones.copy()
        k[3, 15] = 1 + 2.0**-10
        mask = mask_test(
            g,
            f"{criterion}-one-step",
            "One fp16 step more in the last channel",
            units,
            1,
            name="pnmix",
            r=f"1/{units}",
            criterion=criterion,
            k=hexed(k),
            q=hexed(ones),
        )
        assert mask[-1]
    _exact_comparisons(suite)
    _pnmix_sides(suite, ones)
    _pnmix_refusals(suite)
    return suite


def _pnmix_sides(suite: Suite, ones: np.ndarray) -> None:
    g = suite.group("default", "criterion= is qk-pair unless given")
    k, q = made(560, (4, 16), 1.0, chan_mul=np.arange(16) % 5 + 1), made(561, (1, 4, 16), 1.0, chan_mul=np.arange(16) % 7 + 1)
    mask_test(g, "absent", "Queries weigh", 8, 4, name="pnmix", r="1/2", k=k, q=q)
    g = suite.group("heads", "The queries of all heads of the KV head add up")
    q = np.ones((4, 4, 16))
    q[2, :, [7, 15]] = 100
    mask = mask_test(
        g, "one-strong-head", "One head of four is strong in pair 7", 8, 1, name="pnmix", r="1/8", k=hexed(ones), q=hexed(q)
    )
    assert mask[7]
    g = suite.group("pairs", "Pairs by layout and rotary part")
    for i, (layout, r, first) in enumerate(ROTARY):
        head = dict(layout=layout, rotary_dim=r or None, rotary_first=first or None)
        k = made(570 + i, (3, 16), 1.0, chan_mul=np.arange(16) * 5 % 11 + 1)
        mask_test(
            g, f"{layout}-{r}-{first}", "The mask counts pairs", 8, 4, name="pnmix", r="1/2", criterion="k-pair", k=k, **head
        )


def _pnmix_refusals(suite: Suite) -> None:
    g = suite.group("refused", "Statistics of a missing side; ratios; names")
    k, q = made(580, (2, 8)), made(581, (1, 2, 8))
    g.test("no-queries", "qk-pair without q").refused("STATE", "policy", name="pnmix", r="1/2", k=k)
    for criterion in CRITERIA:
        g.test(f"no-keys-{criterion}", f"{criterion} without k").refused(
            "STATE", "policy", name="pnmix", r="1/2", criterion=criterion, q=q
        )
    g.test("no-tokens", "k and q of no tokens").refused(
        "STATE", "policy", name="pnmix", r="1/2", k=made(1, (0, 8)), q=made(1, (1, 0, 8))
    )
    for i, r in enumerate(("3/2", "1/0", "-1/2", "0.5", "x", "1/2/3")):
        g.test(f"ratio-{i}", f"r = {r}").refused("INVALID", "policy", name="pnmix", r=r, k=k, q=q)
    g.test("criterion", "No such criterion").refused("INVALID", "policy", name="pnmix", r="1/2", criterion="v-pair", k=k, q=q)
    g.test("name", "No such policy").refused("INVALID", "policy", name="pnmax", r="1/2", k=k, q=q)


def _exact_comparisons(suite: Suite) -> None:
    """Comparisons that fp32 sums, or products in another type, decide otherwise."""
    g = suite.group("exact", "Values are compared as the text writes them")
    k = np.full((4, 8), 2048.0)
    k[0, 6] += 2
    k[1, 6] -= 2
    k[2, 7] += 2
    script = g.test("k-magnitude-sums", "8192 against 8194: told apart whatever the order of the sum")
    assert script.ok("policy", name="pnmix", r="1/8", criterion="k-magnitude", k=hexed(k))["mask"] == "80"
    big = np.full((40, 8), 60000.0)
    big[7, 5] = 60032
    script = g.test("k-magnitude-large", "One step of 32 in 2.4 million, beyond fp32's 24 bits of 2^-24")
    assert script.ok("policy", name="pnmix", r="1/8", criterion="k-magnitude", k=hexed(big))["mask"] == "20"
    small = big.copy()
    small[7, 5] = 60000
    small[:, 3] = np.where(np.arange(40) == 0, 60000.0, 60000.0)
    small[0, 6] = 60000
    script = g.test("k-range-large", "max - min over channels far from zero")
    small[0, 2], small[0, 4] = 59968, 59936
    assert script.ok("policy", name="pnmix", r="1/8", criterion="k-range", k=hexed(small))["mask"] == "10"
    k, q = np.ones((3, 8)), np.ones((3, 8))
    k[:, [1, 5]], q[:, [1, 5]] = 3, 1
    k[:, [2, 6]], q[:, [2, 6]] = 1, 3
    script = g.test("qk-product-ties", "3 * 1 against 1 * 3: the product ties, the lower pair wins")
    assert script.ok("policy", name="pnmix", r="1/4", k=hexed(k), q=hexed(q))["mask"] == "02"


def selections() -> Suite:
    """kitty, channel-split, chanmix, center, pmkvq-shrink as stateless steps."""
    suite = Suite("policy-selections")
    g = suite.group("kitty", "The floor(D * p/q) channels with the largest sum of abs")
    for i, (dim, boost) in enumerate((dim, boost) for dim in (16, 80, 128) for boost in ("1/32", "1/8", "1/3", "0/1", "1/1")):
        k = made(600 + i, (4, dim), 1.0, chan_mul=np.arange(dim) * 7 % 17 + 1)
        mask_test(
            g,
            f"D{dim}-{boost.replace('/', '-')}",
            f"boost {boost} of {dim}",
            dim,
            _floor(boost, dim),
            name="kitty",
            boost=boost,
            k=k,
        )
    mask = mask_test(g, "ties", "Equal sums: the lower channels", 16, 4, name="kitty", boost="1/4", k=hexed(np.ones((4, 16))))
    assert mask[:4].all()
    g.test("boost", "boost above 1").refused("INVALID", "policy", name="kitty", boost="5/4", k=made(1, (4, 16)))
    g = suite.group("channel-split", "The D/2, or floor(D * p/q), channels with the largest sum of abs; of keys or values")
    for i, (dim, r) in enumerate((dim, r) for dim in (16, 80, 128) for r in (None, "1/4", "1/3", "0/1", "1/1")):
        for tensor in "kv":
            x = made(620 + i, (5, dim), 1.0, chan_mul=np.arange(dim) * 7 % 17 + 1)
            mask_test(
                g,
                f"D{dim}-{(r or 'default').replace('/', '-')}-{tensor}",
                f"r = {r or '1/2'}",
                dim,
                _floor(r or "1/2", dim),
                name="channel-split",
                r=r,
                **{tensor: x},
            )
    mask = mask_test(g, "ties", "Equal sums: the lower channels", 16, 8, name="channel-split", k=hexed(-np.ones((4, 16))))
    assert mask[:8].all()
    _chanmix(suite)
    _center(suite)
    _shrink(suite)
    return suite


def _chanmix(suite: Suite) -> None:
    g = suite.group("chanmix-heads", "floor(layers * heads * r_h) heads with the highest retrieval score keep 4 bits")
    scores = Stream(81).uniform(256)
    for r_h in ("1/10", "0/1", "1/4", "1/1"):
        mask_test(
            g,
            f"256-heads-{r_h.replace('/', '-')}",
            f"r_h = {r_h} of 32 layers x 8 heads",
            256,
            _floor(r_h, 256),
            name="chanmix",
            r_h=r_h,
            scores=hexed(scores, "f64"),
        )
    mask = mask_test(g, "ties", "Equal scores: the lower heads", 8, 2, name="chanmix", r_h="1/4", scores=hexed(np.ones(8), "f64"))
    assert mask[:2].all()
    step = np.ones(8)
    step[6] = 1 + 2.0**-52
    mask = mask_test(g, "one-step", "fp64: one step is more", 8, 1, name="chanmix", r_h="1/8", scores=hexed(step, "f64"))
    assert mask[6]
    g = suite.group("chanmix-widths", "A quarter of widest range has 3 bits, as many of narrowest 1 bit, the others 2")
    for dim in (4, 16, 80, 128):
        for share in (None, "1/3", "1/2", "0/1"):
            spread = np.abs(Stream(82 + dim).uniform(dim))
            bits = array(
                g.test(f"D{dim}-{(share or 'default').replace('/', '-')}", f"share {share or '1/4'}").ok(
                    "policy", name="chanmix", share=share, range=hexed(spread, "f64")
                )["bits"]
            )
            count = _floor(share or "1/4", dim)
            order = np.argsort(-spread, kind="stable")
            assert (bits == 3).sum() == (bits == 1).sum() == count and set(order[:count]) == set(np.flatnonzero(bits == 3))
    for slug, spread in (("equal", np.ones(8)), ("two-values", np.array([1.0, 2, 1, 2, 1, 2, 1, 2])), ("zeros", np.zeros(8))):
        g.test(f"ties-{slug}", "Ties to the lower channel at both ends").ok("policy", name="chanmix", range=hexed(spread, "f64"))
    g.test("share", "A share above one half").refused(
        "INVALID", "policy", name="chanmix", share="2/3", range=hexed(np.ones(8), "f64")
    )


def _center(suite: Suite) -> None:
    g = suite.group("center", "hp(float(double(sum of x * 2^24) / 2^24 / count)) per channel")
    for i, (dim, tokens) in enumerate(((8, 1), (8, 3), (16, 7), (80, 5), (128, 6))):
        k = made(640 + i, (tokens, dim), 2.0, chan_add=np.arange(dim) % 9 * 100 - 400)
        mu = array(g.test(f"D{dim}-T{tokens}", f"Mean of {tokens} tokens").ok("policy", name="center", k=k)["mu"])
        x = entered(k)
        assert np.array_equal(
            mu, facts.half(np.float32([float(Fraction(sum(Fraction(float(v)) for v in c), tokens)) for c in x.T]))
        ), "the exact mean rounds alike"
    cases = {
        "ties": np.array(
            [[1.0, 1 + 2.0**-10, 2048, 2050, TINY, 2 * TINY, -TINY, 0], [1 + 2.0**-10, 1 + 2.0**-9, 2050, 2052, 0, TINY, 0, 0]]
        ),
        "cancelling": np.array([[65504.0, -65504, 1, -1, TINY, 0, -0.0, 5], [-65504.0, 65504, -1, 1, -TINY, 0, -0.0, -5]]),
        "thirds": np.array([[1.0, 2, 1, 1, TINY, -TINY, 100, 0]] * 1 + [[0.0] * 8] * 2),
        "saturated": np.full((3, 8), 1e6),
    }
    for slug, k in cases.items():
        mu = array(g.test(slug, f"{slug}; a mean of -0 becomes +0").ok("policy", name="center", k=hexed(k, "f32"))["mu"])
        assert not (np.signbit(mu) & (mu == 0)).any()
    g.test("no-tokens", "0 without tokens").ok("policy", name="center", k=made(1, (0, 8)))


def _shrink(suite: Suite) -> None:
    g = suite.group("pmkvq-shrink", "The widest of 16, 8, 4, 2 bits whose bytes do not exceed the budget; 2 if none fits")
    for kv_heads, dim_k, dim_v in ((1, 8, 8), (2, 128, 128), (3, 80, 64), (8, 192, 128)):
        for tokens in (1, 64, 65, 1000):
            sizes = [kv_heads * tokens * 2 * (dim_k + dim_v)]
            sizes += [kv_heads * sum(math.ceil(tokens * d * b / 8) + 4 * tokens for d in (dim_k, dim_v)) for b in (8, 4, 2)]
            budgets = [b for size in sizes for b in (size + 1, size, size - 1)] + [0]
            script = g.test(f"H{kv_heads}-D{dim_k}-{dim_v}-T{tokens}", "At, above and below the bytes of every width")
            bits = array(
                script.ok(
                    "policy", name="pmkvq-shrink", tokens=tokens, budgets=budgets, kv_heads=kv_heads, dim_k=dim_k, dim_v=dim_v
                )["bits"]
            )
            assert bits.tolist() == [16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 2, 2, 2]


# ---- token flags


def semkv() -> Suite:
    suite = Suite("policy-semkv")
    g = suite.group("prompt", "floor(r * T) tokens with the highest score, ties to the lower index")
    ratios = ("35/100", "29/100", "58/100", "1/4", "3/4", "0/1", "1/1", "1/3", "999999999/1000000000")
    for i, (tokens, r) in enumerate((tokens, r) for tokens in (1, 7, 50, 64, 100, 180) for r in ratios):
        _flags_test(
            g,
            f"T{tokens}-r-{r.replace('/', '-')}",
            f"r = {r} of {tokens}",
            "semkv-prompt",
            r,
            Stream(90 + i).uniform(tokens),
            _floor(r, tokens),
        )
    g = suite.group("block", "round_half_even(r * n) of a block, or of the rest of a turn")
    for i, (tokens, r) in enumerate(
        (tokens, r) for tokens in (1, 2, 6, 10, 30, 64, 90) for r in ("35/100", "1/4", "3/4", "1/2", "0/1", "1/1", "5/12")
    ):
        _flags_test(
            g,
            f"T{tokens}-r-{r.replace('/', '-')}",
            f"r = {r} of {tokens}",
            "semkv-block",
            r,
            Stream(190 + i).uniform(tokens),
            round(Fraction(*map(int, r.split("/"))) * tokens),
        )
    _semkv_scores(suite)
    return suite


def _semkv_scores(suite: Suite) -> None:
    g = suite.group("scores", "Compared as numbers")
    inf = math.inf
    cases = {
        "equal": [1.0] * 9,
        "zeros": [0.0, -0.0, 0.0, -0.0, 0.0, -0.0, 0.0],
        "infinities": [1, inf, -inf, 3, inf, -inf, 2, inf],
        "minus-infinity-everywhere": [-inf] * 6,
        "subnormal": [0, 1e-45, -1e-45, 2e-45, 0, 1e-38, -1e-38, 3e-45],
        "one-step": [1, 1, 1 + 2.0**-23, 1, 1, 1, 1, 1],
        "negative": [-3, -1, -2, -1, -5, -1, -4, -2],
        "large": [3e38, -3e38, 3.4e38, 1, 3.4e38, 2, 3e38, 0],
        "ascending": list(range(16)),
        "descending": list(range(16))[::-1],
    }
    for slug, values in cases.items():
        for name in ("semkv-prompt", "semkv-block"):
            n = len(values)
            _flags_test(
                g,
                f"{slug}-{name[6:]}",
                f"Scores: {slug}",
                name,
                "1/2",
                np.array(values),
                n // 2 if name == "semkv-prompt" else round(Fraction(n, 2)),
            )
    for name in ("semkv-prompt", "semkv-block"):
        g.test(f"no-tokens-{name[6:]}", "No token, no flag").ok(
            "policy", name=name, r="1/4", scores={"dtype": "f32", "shape": [0], "hex": ""}
        )
        for at in (0, 4):
            scores = np.ones(5)
            scores[at] = math.nan
            g.test(f"nan-{at}-{name[6:]}", "NaN is refused").refused(
                "INVALID", "policy", name=name, r="1/4", scores=hexed(scores, "f32")
            )
        for i, r in enumerate(("5/4", "1/0", "0.25")):
            g.test(f"ratio-{i}-{name[6:]}", f"r = {r}").refused(
                "INVALID", "policy", name=name, r=r, scores=hexed(np.ones(4), "f32")
            )


def _flags_test(g: Group, slug: str, comment: str, name: str, r: str, scores: np.ndarray, count: int) -> None:
    scores = np.asarray(scores, np.float32)
    result = g.test(slug, comment).ok("policy", name=name, r=r, scores=hexed(scores, "f32"))
    expected = np.zeros(len(scores), bool)
    expected[sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]] = True
    assert np.array_equal(bits_of_mask(result["flags"], len(scores)), expected), slug


def suites() -> list[Suite]:
    return [statistics(), pnmix(), selections(), semkv()]
