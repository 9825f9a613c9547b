"""Every worked example of SPEC.md, run by the reference: the page and the bytes cannot drift apart."""

import re
from pathlib import Path

import numpy as np
import pytest

from kvqref import Head, codec

SPEC = Path(__file__).parents[1] / "SPEC.md"
EXAMPLES = re.findall(r"```example\n(.*?)```", SPEC.read_text(), re.S)


def rows(text: str) -> np.ndarray:
    return np.array([[float(x) for x in row.split()] for row in text.split("/")])


def fields(example: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in example.strip().splitlines())


def test_there_is_an_example_for_every_codec():
    names = {fields(e)["codec"].split("(")[0] for e in EXAMPLES}
    assert names == {
        "raw", "affine-channel", "affine-token", "lloyd", "pair-mix", "width-groups", "channel-split", "kitty",
        "channel-widths", "polar", "progressive",
    }  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: fields(e)["codec"])
def test_example(example):
    f = fields(example)
    x = rows(f["x"])
    mu = np.float16(f["mu"].split()) if "mu" in f else None
    made = codec(f["codec"], Head(x.shape[1], "k", "half", None, 0))
    wire = made.encode(x, mu)
    assert wire.hex() == re.sub(r"[ |]", "", f["wire"])
    np.testing.assert_allclose(made.decode(wire, len(x), mu), rows(f["values"]), rtol=1e-5, atol=5e-7)
