"""Recipes with data of their own (chanmix, pmkvq, given scores) against the independent reference: bytes, values and accounts."""

import os

import numpy as np
import pytest

import kvq
import kvqref.account
import kvqref.cache
from kvqref.geometry import Geometry
from kvqref.recipe import parse_recipe

SEED = int(os.environ.get("KVQ_TEST_SEED", "1"), 0)
LAYERS, KV, Q = 3, 2, 2


def chanmix(rng, dim):
    widths = rng.integers(0, 9, (LAYERS, KV, dim)).astype(np.uint8)
    lists = [["".join(map(str, head)) for head in layer] for layer in widths]
    recipe = "k=channel-widths(group=8,params=e4m3,unit=channel);v=lloyd(levels=3);block=16;sinks=3;recent=2;policy=chanmix"
    return recipe, {"bits": widths}, {"bits": lists}


def pmkvq(rng, dim):
    budgets = [int(b) for b in rng.integers(0, KV * 60 * 2 * dim * 2, LAYERS)]
    return "k=progressive;v=progressive;block=8;sinks=2;policy=pmkvq", {"budgets": budgets}, {"budgets": budgets}


def given_scores(codec, policy):
    def case(rng, dim):
        scores = rng.random((LAYERS, KV, dim // 2))
        recipe = f"k={codec};v=raw;block=8;sinks=1;policy={policy}"
        return recipe, {"scores": scores}, {"scores": scores.tolist()}

    return case


CASES = {
    "chanmix": chanmix,
    "pmkvq": pmkvq,
    "blockgtq": given_scores("width-groups(center=1)", "blockgtq(avg=7/2,bmin=2,bmax=6)"),
    "pair-widths": given_scores("channel-widths(group=8,midpoint=1)", "pair-widths(avg=5/2,bmin=0,bmax=5,unit=2)"),
}


class Both:
    """The library and the reference, driven together; sequences by name."""

    def __init__(self, case, dim, rng):
        recipe, data, options = CASES[case](rng, dim)
        self.rng, self.dim = rng, dim
        self.library = kvq.Cache(recipe, n_layers=LAYERS, kv_heads=KV, q_heads=Q, dim_k=dim, dim_v=dim, **data)
        geometry = Geometry(LAYERS, KV, Q, dim, dim)
        self.reference = kvqref.cache.Cache(parse_recipe(recipe, geometry, options), geometry)
        self.seqs = {"a": self.library.create()}

    def rows(self, n):
        return [self.rng.normal(1, 3, (LAYERS, n, KV, self.dim)).astype(np.float32) for _ in "kv"]

    def commit(self, name, n):
        k, v = self.rows(n)
        self.seqs[name].commit(list(k), list(v))
        self.reference.commit(name, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))

    def append(self, name, n):
        k, v = self.rows(n)
        with self.library.step([self.seqs[name]], [n]) as step:
            for layer in range(LAYERS):
                step.append(layer, k[layer], v[layer])
            step.end()
        self.reference.append(name, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))

    def fork(self, name, to):
        self.seqs[to] = self.seqs[name].fork()
        self.reference.fork(name, to)

    def truncate(self, name, length):
        self.seqs[name].truncate(length)
        self.reference.truncate(name, length)

    def check(self):
        for name, seq in self.seqs.items():
            known = self.reference.sequence(name)
            assert (seq.lengths.sinks, seq.lengths.packed, seq.lengths.tail) == tuple(known.lengths.values())
            for layer in range(LAYERS):
                for head in range(KV):
                    for which in "kv":
                        for block in range(len(known.runs)):
                            wanted = self.reference.export_wire(name, layer, head, which, block)
                            assert seq.wire(layer, head, which, block) == wanted, (name, layer, head, which, block)
                        wanted = self.reference.export_values(name, layer, head, which)
                        assert seq.values(layer, head, which).tobytes() == wanted.tobytes(), (name, layer, head, which)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dim", (16, 20))
@pytest.mark.parametrize("case", CASES)
def test_forks_and_truncations_keep_to_the_reference(case, dim, seed):
    rng = np.random.default_rng([SEED, seed, dim, list(CASES).index(case)])
    both = Both(case, dim, rng)
    both.commit("a", int(rng.integers(0, 60)))
    both.check()
    for fork in "bcd":
        for _ in range(3):
            both.append(str(rng.choice(list(both.seqs))), int(rng.integers(1, 20)))
        name = str(rng.choice(list(both.seqs)))
        both.fork(name, fork)
        both.truncate(fork, int(rng.integers(0, len(both.seqs[fork]) + 1)))
        both.append(fork, int(rng.integers(1, 30)))
        both.check()
    both.commit("a", int(rng.integers(1, 50)))  # a plain append
    both.check()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("case", CASES)
def test_accounts_are_those_of_the_reference(case, seed):
    rng = np.random.default_rng([SEED, seed, list(CASES).index(case)])
    dim = int(rng.choice([8, 20, 64]))
    recipe, data, options = CASES[case](rng, dim)
    geometry = Geometry(LAYERS, KV, Q, dim, dim)
    for tokens in (0, 5, int(rng.integers(1, 3000))):
        wanted = kvqref.account.account(parse_recipe(recipe, geometry, options), geometry, tokens)
        got = kvq.account(recipe, {"n_layers": LAYERS, "kv_heads": KV, "q_heads": Q, "dim_k": dim}, tokens, **data)
        assert {name: getattr(got, name) for name in wanted} == wanted
