"""Section 7 through the cache model, and section 9's attention."""

import math

import numpy as np
import pytest

from kvqref import Head, KvqError, codec
from kvqref.attention import attend
from kvqref.cache import Cache
from kvqref.geometry import Geometry
from kvqref.recipe import parse_recipe

SMALL = Geometry.of({"layers": 2, "kv_heads": 2, "q_heads": 4, "dim_k": 16, "dim_v": 8})
CHAN = "k=affine-channel(levels=4,group=4);v=affine-token(levels=4,group=8);block=8"
ROW = "k=lloyd(levels=4);v=lloyd(levels=4);block=8"
SEMKV = "policy=semkv(r=1/4,low=lloyd(levels=3),high=lloyd(levels=8));block=8"


def cache_of(text, geometry=SMALL, options=None):
    return Cache(parse_recipe(text, geometry, options), geometry)


def tokens(seed, count, geometry=SMALL):
    rng = np.random.default_rng(seed)
    g = geometry
    return {
        "k": rng.standard_normal((g.layers, g.kv_heads, count, g.dim_k)),
        "v": rng.standard_normal((g.layers, g.kv_heads, count, g.dim_v)),
        "q": rng.standard_normal((g.layers, g.q_heads, count, g.dim_k)),
    }


def part(x, first, end):
    return {key: value[..., first:end] if key == "scores" else value[:, :, first:end] for key, value in x.items()}


def state(cache, name):
    """Everything that a caller can see."""
    seq = cache.sequence(name)
    places = [(layer, head, t) for layer, head in cache.geometry.places() for t in "kv"]
    wires = [run.wire(place) for run in seq.runs for place in places]
    return seq.lengths, wires, [seq.values(place).tobytes() for place in places]


def raw(x, key="k", layer=0, head=0):
    return x[key][layer, head].astype(np.float16).astype(np.float32)


def test_packed_count_follows_the_formula():
    for sinks, recent in ((0, 0), (3, 0), (0, 5), (4, 9)):
        x = tokens(1, 60)
        for total in range(0, 60, 7):
            cache = cache_of(f"{CHAN};sinks={sinks};recent={recent}")
            lengths = cache.commit("a", **part(x, 0, total))
            packed = 8 * (max(0, total - sinks - recent) // 8)
            assert lengths == {"sinks": min(total, sinks), "packed": packed, "tail": total - min(total, sinks) - packed}


def test_bytes_do_not_depend_on_the_pieces():
    x = tokens(2, 53)
    whole = cache_of(CHAN + ";sinks=3")
    whole.commit("a", **x)
    pieces = cache_of(CHAN + ";sinks=3")
    pieces.commit("a", **part(x, 0, 1))
    at = 1
    for step in (1, 2, 3, 5, 7, 11, 23):
        pieces.append("a", **part(x, at, at + step))
        at += step
    assert at == 53 and state(whole, "a") == state(pieces, "a")


def test_blocks_are_the_codec_of_their_tokens():
    x = tokens(3, 21)
    cache = cache_of(CHAN + ";sinks=2")
    cache.commit("a", **x)
    c = codec("affine-channel(levels=4,group=4)", Head(16))
    for block, first in ((0, 2), (1, 10)):
        assert cache.export_wire("a", 1, 0, "k", block) == c.encode(x["k"][1, 0, first : first + 8])
    values = cache.export_values("a", 1, 0, "k")
    assert np.array_equal(values[:2], raw(x, "k", 1)[:2]) and np.array_equal(values[18:], raw(x, "k", 1)[18:])
    assert np.array_equal(cache.export_values("a", 1, 0, "k", 5, 4), values[5:9])
    with pytest.raises(KvqError, match="INVALID"):
        cache.export_wire("a", 0, 0, "k", 2)
    with pytest.raises(KvqError, match="INVALID"):
        cache.export_values("a", 0, 0, "k", 20, 2)


def test_before_the_commit_all_is_raw():
    x = tokens(4, 40)
    cache = cache_of(CHAN + ";sinks=3")
    assert cache.append("a", **part(x, 0, 2)) == {"sinks": 2, "packed": 0, "tail": 0}
    assert cache.commit("a", **part(x, 2, 40), final=False) == {"sinks": 3, "packed": 0, "tail": 37}
    assert np.array_equal(cache.export_values("a", 0, 0, "k"), raw(x))
    with pytest.raises(KvqError, match="STATE"):
        cache.end_turn("a")
    assert cache.commit("a") == {"sinks": 3, "packed": 32, "tail": 5}


def test_prompt_chunks_give_the_policy_of_the_whole_prompt():
    text = "k=pair-mix(low=1,high=3,group=8,midpoint=1);v=affine-token(levels=4,group=8);sinks=3;block=8;policy=pnmix(r=1/2)"
    x = tokens(5, 40)
    x["k"][0, 1, :, 3] *= 40
    one, three = cache_of(text), cache_of(text)
    one.commit("a", **x)
    three.commit("a", **part(x, 0, 1), final=False)
    three.append("a", **part(x, 1, 25))
    three.commit("a", **part(x, 25, 40))
    assert state(one, "a") == state(three, "a")
    mask = one.sequence("a").frozen[0, 1, "k"].codec.salient
    assert mask[3] and mask[11] and mask.sum() == 8
    # later energies change nothing
    before = one.sequence("a").frozen
    one.append("a", **tokens(6, 30))
    assert one.sequence("a").frozen == before


def test_prompt_inside_the_sinks_gives_a_mask():
    text = "pnmix;block=128"
    cache = cache_of(text)
    assert cache.commit("a", **tokens(5, 3)) == {"sinks": 3, "packed": 0, "tail": 0}
    assert cache.sequence("a").frozen[0, 0, "k"].codec.salient.sum() == 8


def test_missing_statistics_are_refused_and_change_nothing():
    x = tokens(7, 10)
    cache = cache_of("pnmix")
    cache.append("a", x["k"], x["v"])
    before = state(cache, "a")
    with pytest.raises(KvqError, match="STATE"):
        cache.commit("a", x["k"], x["v"])
    assert state(cache, "a") == before and not cache.sequence("a").committed
    cache.commit("a", **x)
    # a given mask needs none
    given = cache_of("k=pair-mix(low=1,high=3,group=8,mask=0f);v=raw;policy=pnmix(r=1/2)")
    given.commit("a", x["k"], x["v"])


def test_statistics_outlive_truncation():
    text = "k=pair-mix(low=1,high=3,group=8);v=raw;policy=pnmix(r=1/8)"
    x, y = tokens(8, 8), tokens(9, 8)
    x["k"][:, :, :, [5, 13]] = 1000
    cache = cache_of(text)
    cache.append("a", **x)
    cache.truncate("a", 0)
    cache.commit("a", **y)
    assert np.flatnonzero(cache.sequence("a").frozen[0, 0, "k"].codec.salient).tolist() == [5, 13]


def test_block_gtq_belongs_to_the_cache_and_pair_widths_to_the_sequence():
    for text, shared in (
        ("k=width-groups;v=raw;policy=blockgtq(avg=3)", True),
        ("k=channel-widths(group=8);v=raw;policy=pair-widths(avg=3)", False),
    ):
        cache = cache_of(text)
        for name, loud in (("a", 2), ("b", 5)):
            x = tokens(10, 8)
            x["k"][:, :, :, [loud, loud + 8]] *= 100
            cache.commit(name, **x)
        first, second = (cache.sequence(name).frozen[0, 0, "k"].codec for name in "ab")
        assert (first == second) is shared
        # the second sequence of a frozen cache needs no queries
        if shared:
            cache.commit("c", x["k"], x["v"])


def test_centre_is_the_mean_behind_the_sinks():
    cache = cache_of("k=lloyd(levels=4,center=1);v=lloyd(levels=4);sinks=2;block=8")
    x = tokens(11, 12)
    cache.append("a", **x)
    cache.truncate("a", 6)
    cache.commit("a", **part(x, 6, 9))
    mu = cache.sequence("a").frozen[1, 1, "k"].mu
    assert np.array_equal(mu, raw(x, "k", 1, 1)[2:9].astype(float).mean(axis=0).astype(np.float16))
    assert cache.sequence("a").frozen[1, 1, "v"].mu is None
    cache.fork("a", "b")
    assert cache.sequence("b").frozen is cache.sequence("a").frozen


def test_truncation_of_a_row_block():
    x, y = tokens(12, 10), tokens(13, 10)
    cache = cache_of(ROW)
    cache.commit("a", **x)
    before = cache.export_values("a", 0, 1, "v")
    assert cache.truncate("a", 4) == {"sinks": 0, "packed": 4, "tail": 0}
    assert np.array_equal(cache.export_values("a", 0, 1, "v"), before[:4])
    c = codec("lloyd(levels=4)", Head(8, "v"))
    assert cache.export_wire("a", 0, 1, "v", 0) == c.encode(x["v"][0, 1, :4])
    assert cache.append("a", **y) == {"sinks": 0, "packed": 12, "tail": 2}
    assert cache.export_wire("a", 0, 1, "v", 1) == c.encode(y["v"][0, 1, :8])
    assert np.array_equal(cache.export_values("a", 0, 1, "v")[:4], before[:4])


def test_truncation_of_a_channel_block():
    x = tokens(14, 8)
    cache = cache_of(CHAN)
    cache.commit("a", **x)
    whole = cache.export_wire("a", 0, 0, "k", 0)
    values = cache.export_values("a", 0, 0, "k")
    cache.truncate("a", 6)
    # both groups stay, codes of tokens 6 and 7 (the high bits of each second byte run) are 0, s and z stay
    codes = np.frombuffer(whole[:32], np.uint8).copy()
    codes[16:] &= 0x0F
    assert cache.export_wire("a", 0, 0, "k", 0) == codes.tobytes() + whole[32:]
    assert np.array_equal(cache.export_values("a", 0, 0, "k"), values[:6])
    cache.truncate("a", 3)
    # one group is left; token 3 is cleared
    codes[:16] &= 0x3F
    assert cache.export_wire("a", 0, 0, "k", 0) == codes[:16].tobytes() + whole[32 : 32 + 64]
    assert np.array_equal(cache.export_values("a", 0, 0, "k"), values[:3])


@pytest.mark.parametrize(
    "text",
    [
        "k=pair-mix(low=1,high=3,group=8,mask=35);v=raw;block=8",
        "k=kitty(boost=1/4,group=8);v=raw;block=8",
        "k=polar(radius=4,angle=8,group=8);v=raw;block=8",
        "k=channel-widths(bits=01234567,group=8);v=raw;block=8",
    ],
)
def test_ragged_groups_stay_decodable(text):
    x = tokens(15, 8)
    cache = cache_of(text)
    cache.commit("a", **x)
    values = cache.export_values("a", 0, 0, "k")
    cache.truncate("a", 3)
    made = cache.sequence("a").frozen[0, 0, "k"].codec
    decoded = made.decode(cache.export_wire("a", 0, 0, "k", 0), 8)
    assert np.array_equal(decoded[:3], values[:3]) and np.array_equal(cache.export_values("a", 0, 0, "k"), values[:3])
    zeros = made.from_wire(cache.export_wire("a", 0, 0, "k", 0), 8).codes[3:]
    assert not zeros.any()


def test_truncation_into_the_sinks_fills_them_again():
    x = tokens(16, 20)
    cache = cache_of(ROW + ";sinks=4")
    cache.commit("a", **x)
    assert cache.truncate("a", 2) == {"sinks": 2, "packed": 0, "tail": 0}
    assert cache.append("a", **part(x, 2, 20)) == {"sinks": 4, "packed": 16, "tail": 0}
    fresh = cache_of(ROW + ";sinks=4")
    fresh.commit("a", **x)
    assert state(cache, "a") == state(fresh, "a")
    for bad in (-1, 21):
        with pytest.raises(KvqError, match="INVALID"):
            cache.truncate("a", bad)


def test_forks_are_independent():
    x = tokens(17, 30)
    cache = cache_of(CHAN)
    cache.commit("a", **part(x, 0, 11))
    cache.fork("a", "b")
    cache.append("a", **part(x, 11, 20))
    cache.append("b", **part(x, 20, 30))
    cache.truncate("a", 3)
    cache.remove("a")
    fresh = cache_of(CHAN)
    joined = {key: np.concatenate([part(x, 0, 11)[key], part(x, 20, 30)[key]], axis=2) for key in x}
    fresh.commit("b", **joined)
    assert state(cache, "b") == state(fresh, "b")
    with pytest.raises(KvqError, match="STALE"):
        cache.append("a", **x)
    with pytest.raises(KvqError, match="INVALID"):
        cache.fork("b", "b")


def with_scores(x, scores):
    return x | {"scores": np.asarray(scores, np.float32)}


def flags(cache, block, name="a"):
    return cache.sequence(name).runs[block].flags.tolist()


def test_semkv_prompt_blocks_and_turn():
    cache = cache_of(SEMKV + ";sinks=1")
    x = with_scores(tokens(18, 12), [99, *range(11)])
    # 11 tokens behind the sink: floor(11/4) = 2 high, the last two
    assert cache.commit("a", **x) == {"sinks": 1, "packed": 11, "tail": 0}
    assert flags(cache, 0) == [False] * 9 + [True] * 2
    assert cache.append("a", **with_scores(tokens(19, 7), [7, 6, 5, 4, 3, 2, 1])) == {"sinks": 1, "packed": 11, "tail": 7}
    assert cache.append("a", **with_scores(tokens(20, 2), [0, 9])) == {"sinks": 1, "packed": 19, "tail": 1}
    assert flags(cache, 1) == [True, True] + [False] * 6
    cache.append("a", **with_scores(tokens(21, 5), [0, 1, 2, 3, 4]))
    # 6 pending: 6/4 = 1.5 to the even 2
    assert cache.end_turn("a") == {"sinks": 1, "packed": 25, "tail": 0}
    assert flags(cache, 2) == [True, False, False, False, False, True]
    assert cache.end_turn("a") == {"sinks": 1, "packed": 25, "tail": 0} and len(cache.sequence("a").runs) == 3


def test_semkv_wire_is_flags_low_high():
    cache = cache_of(SEMKV)
    x = with_scores(tokens(22, 8), [0, 5, 0, 0, 0, 0, 6, 0])
    cache.commit("a", **x)
    low, high = codec("lloyd(levels=3)", Head(16)), codec("lloyd(levels=8)", Head(16))
    rows = x["k"][1, 1]
    chosen = np.array([0, 1, 0, 0, 0, 0, 1, 0], bool)
    expected = bytes([0b01000010]) + low.encode(rows[~chosen]) + high.encode(rows[chosen])
    assert cache.export_wire("a", 1, 1, "k", 0) == expected
    values = cache.export_values("a", 1, 1, "k")
    assert np.array_equal(values[chosen], high.decode(high.encode(rows[chosen]), 2))
    cache.truncate("a", 5)
    chosen = chosen[:5]
    expected = bytes([0b00010]) + low.encode(rows[:5][~chosen]) + high.encode(rows[:5][chosen])
    assert cache.export_wire("a", 1, 1, "k", 0) == expected
    assert np.array_equal(cache.export_values("a", 1, 1, "k"), values[:5])
    cache.truncate("a", 1)
    assert cache.export_wire("a", 1, 1, "k", 0) == b"\0" + low.encode(rows[:1])


def test_semkv_later_prompt():
    cache = cache_of(SEMKV)
    cache.commit("a", **with_scores(tokens(23, 4), range(4)))
    cache.append("a", **with_scores(tokens(24, 3), [1, 2, 3]))
    # the turn ends first: 3/4 = .75 to 1 high
    assert cache.commit("a", **with_scores(tokens(25, 10), range(10)), final=False) == {"sinks": 0, "packed": 7, "tail": 10}
    assert flags(cache, 1) == [False, False, True]
    for refused in (lambda: cache.append("a", **with_scores(tokens(1, 1), [1])), lambda: cache.end_turn("a")):
        with pytest.raises(KvqError, match="STATE"):
            refused()
    assert cache.commit("a", **with_scores(tokens(26, 1), [50])) == {"sinks": 0, "packed": 18, "tail": 0}
    # floor(11/4) = 2: the last of the first chunk and the new one
    assert flags(cache, 2) == [False] * 9 + [True, True]
    cache.append("a", **with_scores(tokens(27, 1), [0]))


def test_semkv_scores_must_be_there():
    cache = cache_of(SEMKV)
    x = tokens(28, 4)
    for bad in (x, with_scores(x, [1, 2, 3]), with_scores(x, [1, 2, 3, np.nan])):
        with pytest.raises(KvqError, match="INVALID"):
            cache.commit("a", **bad)
    assert cache.sequence("a").length == 0
    cache.commit("a", **with_scores(x, [-np.inf, np.inf, 0, 0]))
    assert flags(cache, 0) == [False, True, False, False]


def test_semkv_truncated_tail_restarts_like_a_fresh_one():
    x = with_scores(tokens(29, 13), range(13))
    a, b = cache_of(SEMKV), cache_of(SEMKV)
    a.commit("a", **part(x, 0, 4))
    a.append("a", **with_scores(tokens(30, 7), [90] * 7))
    a.truncate("a", 4)
    a.append("a", **part(x, 4, 13))
    b.commit("a", **part(x, 0, 4))
    b.append("a", **part(x, 4, 13))
    assert state(a, "a") == state(b, "a")


def test_pmkvq_shrinks_layer_by_layer():
    # one block of 4 tokens: 2 heads * (16 + 8 channels): 16 bits 4*2*48 = 384; 8 bits 4*2*(24+8) = 256
    cache = cache_of("pmkvq;block=4", options={"budgets": [10**6, 400]})
    x = tokens(31, 12)
    cache.commit("a", **part(x, 0, 4))
    assert cache.sequence("a").frozen == (16, 16)
    assert np.array_equal(cache.export_values("a", 1, 0, "k"), raw(x, "k", 1)[:4])
    cache.append("a", **part(x, 4, 8))
    # 8 tokens: 8 bits 512, 4 bits 8*2*(12+8) = 320
    assert cache.sequence("a").frozen == (16, 4)
    four = codec("progressive(bits=4)", Head(16))
    assert cache.export_wire("a", 1, 0, "k", 0) == four.encode(x["k"][1, 0, :4])
    cache.truncate("a", 2)
    cache.append("a", **part(x, 2, 6))
    assert cache.sequence("a").frozen == (16, 4), "a width never grows again"
    cache.fork("a", "b")
    assert cache.sequence("b").frozen == (16, 4)


def test_channel_split_for_both_tensors():
    cache = cache_of("k=channel-split(high=8,low=4);v=channel-split(high=8,low=4);policy=channel-split(r=1/4)")
    x = tokens(32, 4)
    x["k"][0, 0, :, [3, 9, 10, 15]] *= 50
    x["v"][0, 0, :, [0, 7]] *= 50
    cache.commit("a", **x)
    frozen = cache.sequence("a").frozen
    assert frozen[0, 0, "k"].codec.classes[1][0].tolist() == [3, 9, 10, 15]
    assert frozen[0, 0, "v"].codec.classes[1][0].tolist() == [0, 7]


def test_nonfinite_input_changes_nothing():
    cache = cache_of(CHAN)
    cache.commit("a", **tokens(33, 10))
    before = state(cache, "a")
    for key, value in (("k", np.nan), ("v", np.inf), ("q", -np.inf)):
        x = tokens(34, 5)
        x[key][1, 1, 4, 3] = value
        with pytest.raises(KvqError, match="NONFINITE"):
            cache.append("a", **x)
    assert state(cache, "a") == before


def test_snapshot_restores():
    cache = cache_of(CHAN)
    cache.commit("a", **tokens(35, 10))
    saved, before = cache.snapshot(), state(cache, "a")
    cache.append("a", **tokens(36, 10))
    cache.remove("a")
    cache.restore(saved)
    assert state(cache, "a") == before


# --- attention -----------------------------------------------------------------------------------


def naive(q, k, v, scale, window, cap, sink):
    """One query at a time, plain Python sums."""
    out, lse = [], []
    for j, query in enumerate(q):
        own = len(k) - len(q) + j
        weights, total = np.zeros(v.shape[1]), 0.0 if sink is None else math.exp(sink)
        for i in range(len(k)):
            if i > own or (window and i <= own - window):
                continue
            x = scale * float(query @ k[i])
            x = cap * math.tanh(x / cap) if cap else x
            total += math.exp(x)
            weights += math.exp(x) * v[i]
        out.append(weights / total)
        lse.append(math.log(total))
    return np.array(out), np.array(lse)


@pytest.mark.parametrize(
    "window, cap, sink", [(None, None, None), (3, None, None), (None, 2.0, None), (4, 1.5, 0.7), (1, None, -1.0)]
)
def test_attention_against_plain_sums(window, cap, sink, rng):
    q, k, v = rng.standard_normal((4, 6)), rng.standard_normal((9, 6)), rng.standard_normal((9, 5))
    got, expected = attend(q, k, v, 0.5, window, cap, sink), naive(q, k, v, 0.5, window, cap, sink)
    assert np.allclose(got[0], expected[0]) and np.allclose(got[1], expected[1])


def test_attention_of_a_cache():
    cache = cache_of(CHAN)
    x = tokens(37, 20)
    cache.commit("a", **x)
    out, lse = cache.attend("a", 1, x["q"][1, :, -3:])
    k, v = cache.export_values("a", 1, 1, "k"), cache.export_values("a", 1, 1, "v")
    q = x["q"][1, 2, -3:].astype(np.float16).astype(float)
    expected = naive(q, k.astype(float), v.astype(float), 1 / 4, None, None, None)
    assert np.allclose(out[2], expected[0]) and np.allclose(lse[2], expected[1])


def test_attention_of_nothing():
    cache = cache_of(CHAN)
    out, lse = cache.attend("a", 0, np.ones((4, 2, 16)))
    assert not out.any() and out.shape == (4, 2, 8) and (lse == -np.inf).all()
    out, lse = cache.attend("a", 0, np.ones((4, 2, 16)), sinks=np.arange(4.0))
    assert not out.any() and lse[:, 0].tolist() == [0, 1, 2, 3]
    cache.commit("a", **tokens(38, 1))
    with pytest.raises(KvqError, match="INVALID"):
        cache.attend("a", 0, np.ones((4, 2, 16)))
