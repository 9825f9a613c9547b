"""The papers' orderings of key quantizers on the recorded trace."""

import numpy as np
import pytest

from kvq.lab import simulate, trace

BY_NAME = {method.name: method for method in simulate.METHODS}


@pytest.fixture(scope="module")
def layers():
    recorded = trace.load()
    return list(zip(recorded.q, recorded.k, strict=True))


def mean(name, layers, column):
    return simulate.measure(BY_NAME[name], layers)[0][:, column].mean()


def test_better_keys_do_less_to_attention(layers):
    for better, worse, column, what in simulate.ORDERINGS:
        assert mean(better, layers, column) < mean(worse, layers, column), (better, worse, what)


def test_levels_at_bin_middles_cut_the_error_of_one_bit_channels_by_three(layers):
    assert 3 * mean("PN-Mix, qk-pair", layers, 1) < mean("PN-Mix, qk-pair, no midpoint", layers, 1)


def test_keys_that_are_not_changed_have_no_error():
    k = np.random.default_rng(1).standard_normal((200, 8), dtype=np.float32)
    q = np.random.default_rng(2).standard_normal((200, 2, 8), dtype=np.float32)
    assert simulate.head_errors(q, k, k, 150) == (0, 0)


def test_errors_are_those_of_a_direct_sum():
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((70, 1, 4), dtype=np.float32), rng.standard_normal((70, 4), dtype=np.float32)
    changed = k.copy()
    changed[simulate.SINKS :] += np.float32(0.1)
    mae, kl = simulate.head_errors(q, k, changed, 68)
    differences, divergences = [], []
    for t in (68, 69):
        a, b = (np.float64(keys[: t + 1]) @ np.float64(q[t, 0]) / 2 for keys in (k, changed))
        differences.extend(abs(a - b)[simulate.SINKS :])
        p, r = (np.exp(x) / np.exp(x).sum() for x in (a, b))
        divergences.append((p * np.log(p / r)).sum())
    assert mae == pytest.approx(np.mean(differences), rel=1e-5)
    assert kl == pytest.approx(np.mean(divergences), rel=1e-3)
