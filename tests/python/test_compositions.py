"""Any K codec with any V codec, any sinks, recent window and block: the library against the independent reference, byte for byte,
and its attention against float64 over what it exports."""

import math
import os

import numpy as np
import pytest

import kvq
import kvqref.cache
from kvqref.geometry import Geometry
from kvqref.recipe import parse_recipe

SEED = int(os.environ.get("KVQ_TEST_SEED", "1"), 0)
KV, Q = 2, 4
DIMS = (32, 16), (24, 40)


def mask(entries, rng):
    return np.packbits(rng.integers(0, 2, entries), bitorder="little").tobytes().hex()


def digits(entries, low, high, rng):
    return "".join(map(str, rng.integers(low, high + 1, entries)))


def codecs(dim, rng):
    """Every codec that fits both tensors: text -> tokens that it packs together."""
    return {
        "raw": 1,
        "affine-channel(levels=3,group=8)": 8,
        "affine-channel(levels=16,group=12,midpoint=1)": 12,
        f"affine-token(levels=5,group={dim // 2})": 1,
        "affine-token(levels=4,group=D,rotate=1)": 1,
        "lloyd(levels=6,params=e5m3)": 1,
        "lloyd(levels=16,scale=unbiased,rotate=0)": 1,
        f"pair-mix(low=1,high=3,group=8,mask={mask(dim // 2, rng)},midpoint=1)": 8,
        f"pair-mix(low=1,high=3,group=16,mask={mask(dim, rng)},unit=channel)": 16,
        f"width-groups(bits={digits(dim // 2, 1, 6, rng)})": 1,
        f"channel-split(high=8,low=4,mask={mask(dim, rng)},scale=ls)": 1,
        "kitty(boost=1/8,group=4)": 4,
        f"channel-widths(bits={digits(dim // 2, 0, 6, rng)},group=8,midpoint=1)": 8,
        f"channel-widths(bits={digits(dim, 0, 8, rng)},group=16,params=e4m3,unit=channel)": 16,
        "polar(radius=4,angle=8,group=8)": 8,
        "progressive(bits=4)": 1,
    }


KEYS_ONLY = {"affine-token(levels=6,group=D,center=1)": 1, "lloyd(levels=8,center=1)": 1, "width-groups(center=1,bits=LIST)": 1}


class Pair:
    """The library and the reference, driven together."""

    def __init__(self, recipe, dims, layout, rng):
        self.recipe, self.rng, self.dims = recipe, rng, dims
        self.library = kvq.Cache(recipe, kv_heads=KV, q_heads=Q, dim_k=dims[0], dim_v=dims[1], layout=layout)
        geometry = Geometry(1, KV, Q, dims[0], dims[1], layout)
        self.reference = kvqref.cache.Cache(parse_recipe(recipe, geometry), geometry)
        self.seq = self.library.create()

    def rows(self, n):
        """K, V [tokens, heads, dim] and Q; the second head is larger and off centre."""
        k, v = (self.rng.standard_normal((n, KV, dim)).astype(np.float32) for dim in self.dims)
        k[:, 1], v[:, 1] = 5 * k[:, 1] + 3, 5 * v[:, 1] - 1
        q = self.rng.standard_normal((n, Q, self.dims[0])).astype(np.float32)
        q[:, Q // 2 :] /= 5
        return k, v, q

    @staticmethod
    def of_reference(x):
        return x.transpose(1, 0, 2)[None]

    def commit(self, n):
        k, v, _ = self.rows(n)
        cut = int(self.rng.integers(0, n + 1))
        for part in (slice(0, cut), slice(cut, n)):
            self.seq.prefill(0, k[part], v[part])
        self.seq.commit()
        self.reference.commit("s", self.of_reference(k), self.of_reference(v))

    def step(self, n):
        k, v, q = self.rows(n)
        with self.library.step([self.seq], [n]) as step:
            step.append(0, k, v)
            out, lse = step.attend(0, q, lse=True)
            self.check_attention(q, k, v, out, lse)
            step.end()
        self.reference.append("s", self.of_reference(k), self.of_reference(v))

    def truncate(self, length):
        self.seq.truncate(length)
        self.reference.truncate("s", length)

    def check_attention(self, q, k, v, out, lse):
        """Section 9, over the exported cache and the step's own rows (fp16, as they enter)."""
        q, k, v = (x.astype(np.float16).astype(float) for x in (q, k, v))
        n, scale = len(q), 1 / math.sqrt(self.dims[0])
        for h in range(Q):
            g = h * KV // Q
            keys, values = (
                np.concatenate([self.seq.values(0, g, which).astype(float), new[:, g]]) for which, new in (("k", k), ("v", v))
            )
            for i in range(n):
                visible = len(keys) - n + i + 1
                logits = scale * keys[:visible] @ q[i, h]
                expected_lse = np.logaddexp.reduce(logits)
                expected = np.exp(logits - expected_lse) @ values[:visible]
                error = out[i, h] - expected
                bound = 1e-7 * max(1, logits.var())
                assert error @ error <= bound * (expected @ expected), f"{self.recipe}: query {i} of {visible} tokens, head {h}"
                assert np.abs(error).max() <= 1e-3 * np.abs(values).max()
                assert abs(lse[i, h] - expected_lse) <= 1e-3 * max(1, np.abs(logits).max() / 16)

    def check(self):
        lengths = self.seq.lengths
        seq = self.reference.sequence("s")
        assert (lengths.sinks, lengths.packed, lengths.tail) == tuple(seq.lengths.values()), self.recipe
        for head in range(KV):
            for which in "kv":
                for block in range(len(seq.runs)):
                    wanted = self.reference.export_wire("s", 0, head, which, block)
                    assert self.seq.wire(0, head, which, block) == wanted, f"{self.recipe}: block {block} of {which}, head {head}"
                values = self.reference.export_values("s", 0, head, which)
                assert self.seq.values(0, head, which).tobytes() == values.tobytes(), f"{self.recipe}: values of {which}"


def live(recipe, dims, block, rng):
    """A prompt, steps across block boundaries, and a truncation in the middle of a block."""
    layout = ("half", "adjacent")[rng.integers(2)]
    pair = Pair(recipe, dims, layout, rng)
    pair.commit(int(rng.integers(0, 3 * block)))
    for _ in range(3):
        pair.step(int(rng.integers(1, block + 1)))
    pair.check()
    pair.truncate(int(rng.integers(0, len(pair.seq) + 1)))
    pair.check()
    for _ in range(2):
        pair.step(int(rng.integers(1, block + 1)))
    pair.check()


CASES = [(dims, i) for dims in DIMS for i in range(len(codecs(8, np.random.default_rng(0))) + len(KEYS_ONLY))]


@pytest.mark.parametrize(("dims", "which"), CASES)
def test_a_key_codec_with_every_value_codec(dims, which):
    rng = np.random.default_rng([SEED, dims[0], which])
    keys = codecs(dims[0], rng) | KEYS_ONLY
    k, group = list(keys.items())[which]
    k = k.replace("LIST", digits(dims[0] // 2, 1, 4, rng))
    for v, value_group in codecs(dims[1], rng).items():
        block = math.lcm(group, value_group) * int(rng.integers(1, 3))
        if block == 1:
            block = int(rng.integers(1, 20))
        sinks, recent = (int(x) for x in rng.integers(0, [9, 20]))
        live(f"k={k};v={v};sinks={sinks};recent={recent};block={block}", dims, block, rng)
