"""The state of one sequence: sinks, packed runs, tail (FORMATS section 7).

Arrays and runs are never changed in place, so a shallow copy is a fork or a saved state.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from .fp import F32
from .geometry import Geometry
from .stats import HeadStats
from .storage import Place

Rows = dict[Place, np.ndarray]


def no_rows(geometry: Geometry) -> Rows:
    return {
        (layer, head, tensor): np.zeros((0, geometry.dim(tensor)), F32)
        for layer, head in geometry.places()
        for tensor in ("k", "v")
    }


def join_rows(a: Rows, b: Rows) -> Rows:
    return {place: np.concatenate([a[place], b[place]]) for place in a}


def slice_rows(rows: Rows, first: int, end: int | None) -> Rows:
    return {place: x[first:end] for place, x in rows.items()}


def count_rows(rows: Rows) -> int:
    return len(next(iter(rows.values())))


@dataclass
class Sequence:
    sinks: Rows
    tail: Rows
    stats: dict[tuple[int, int], HeadStats]
    runs: list = field(default_factory=list)
    scores: np.ndarray = field(default_factory=lambda: np.zeros(0, F32))  # of the tail's tokens, SemKV only
    committed: bool = False
    staging: bool = False  # between the chunks of a later prompt
    frozen: object = None  # what the scheme needs to pack: coders, or widths

    def copy(self) -> "Sequence":
        return replace(self, runs=list(self.runs))

    @property
    def lengths(self) -> dict[str, int]:
        packed = sum(run.valid for run in self.runs)
        return {"sinks": count_rows(self.sinks), "packed": packed, "tail": count_rows(self.tail)}

    @property
    def length(self) -> int:
        return sum(self.lengths.values())

    def add(self, rows: Rows, scores: np.ndarray | None, sinks: int) -> None:
        """New tokens: positions below `sinks` fill first, the others join the tail."""
        room = max(0, sinks - self.length)
        self.sinks = join_rows(self.sinks, slice_rows(rows, 0, room))
        self.tail = join_rows(self.tail, slice_rows(rows, room, None))
        if scores is not None:
            self.scores = np.concatenate([self.scores, scores[room:]])

    def take_tail(self, count: int) -> tuple[Rows, np.ndarray]:
        """Removes the oldest tokens of the tail and returns them with their scores."""
        rows, scores = slice_rows(self.tail, 0, count), self.scores[:count]
        self.tail, self.scores = slice_rows(self.tail, count, None), self.scores[count:]
        return rows, scores

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; a packed run may become ragged."""
        sinks, packed, _ = self.lengths.values()
        tail = max(0, length - sinks - packed)
        self.tail, self.scores = slice_rows(self.tail, 0, tail), self.scores[:tail]
        kept, left = [], max(0, length - sinks)
        for run in self.runs:
            valid = min(run.valid, left)
            if valid:
                kept.append(run if valid == run.valid else run.cut(valid))
            left -= valid
        self.runs = kept
        self.sinks = slice_rows(self.sinks, 0, length)

    def values(self, place: Place) -> np.ndarray:
        """What export returns: float32 [length, dim] in position order."""
        parts = [self.sinks[place], *(run.values(place) for run in self.runs), self.tail[place]]
        return np.concatenate(parts)
