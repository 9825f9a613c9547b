"""The Lloyd-Max books of the normal distribution (FORMATS section 2.3), read from data/codebooks.json."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from .fp import F32, f32_from_hex


@dataclass(frozen=True)
class Book:
    levels: np.ndarray  # small integers m, int64, ascending
    thresholds: np.ndarray  # t_j, float32
    scale: np.float32  # a


@cache
def books() -> dict[int, Book]:
    """Number of levels -> book."""
    text = (files(__package__) / "data" / "codebooks.json").read_text()
    return {
        b["levels_count"]: Book(
            np.array(b["levels"], np.int64),
            np.array([f32_from_hex(t) for t in b["thresholds_f32"]], F32),
            f32_from_hex(b["scale_f32"]),
        )
        for b in json.loads(text)["books"]
    }
