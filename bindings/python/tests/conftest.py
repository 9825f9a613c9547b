"""Seeded data for the tests of the package; KVQ_TEST_SEED repeats a run."""

import os

import numpy as np
import pytest

import kvq

SEED = int(os.environ.get("KVQ_TEST_SEED", "1"), 0)


def pytest_report_header():
    return f"KVQ_TEST_SEED={SEED}, {kvq.library} {kvq.__version__}"


@pytest.fixture
def rng():
    return np.random.default_rng(SEED)


@pytest.fixture
def rows(rng):
    """Makes K, V or Q [tokens, heads, dim] whose heads differ in scale and offset, in values that fp16 holds exactly."""

    def make(tokens, heads, dim):
        x = rng.standard_normal((tokens, heads, dim))
        x[:, 1:] = 10 * x[:, 1:] + 3
        return x.astype(np.float16).astype(np.float32)

    return make
