"""Packed runs of tokens of all layers and KV heads (FORMATS sections 5 and 7).

A run is immutable; `cut` is truncation. `Place` here is (layer, KV head, tensor).
"""

from dataclasses import dataclass, replace

import numpy as np

from .codecs import Block, Codec, codec
from .head import Head

Place = tuple[int, int, str]


@dataclass(frozen=True)
class Coder:
    """One frozen codec and the mean it needs, if any."""

    codec: Codec
    mu: np.ndarray | None = None

    def pack(self, rows: np.ndarray) -> Block:
        return self.codec.quantize(rows, self.mu)

    def values(self, block: Block) -> np.ndarray:
        return self.codec.values(block, self.mu)


@dataclass(frozen=True)
class PlainRun:
    """Tokens that one codec per place packs."""

    coders: dict[Place, Coder]
    blocks: dict[Place, Block]
    valid: int

    @staticmethod
    def pack(coders: dict[Place, Coder], rows: dict[Place, np.ndarray], tokens: int) -> "PlainRun":
        return PlainRun(coders, {place: coders[place].pack(x) for place, x in rows.items()}, tokens)

    def values(self, place: Place) -> np.ndarray:
        return self.coders[place].values(self.blocks[place])[: self.valid]

    def wire(self, place: Place) -> bytes:
        return self.coders[place].codec.to_wire(self.blocks[place])

    def cut(self, valid: int) -> "PlainRun":
        blocks = {place: self.coders[place].codec.cut(block, valid) for place, block in self.blocks.items()}
        return PlainRun(self.coders, blocks, valid)


@dataclass(frozen=True)
class ClassRun:
    """SemKV: high-class and low-class tokens as one block each, and a flag per token."""

    flags: np.ndarray
    low: PlainRun
    high: PlainRun

    @property
    def valid(self) -> int:
        return len(self.flags)

    @staticmethod
    def pack(low: dict[Place, Coder], high: dict[Place, Coder], rows: dict[Place, np.ndarray], flags: np.ndarray):
        def part(coders, chosen):
            return PlainRun.pack(coders, {place: x[chosen] for place, x in rows.items()}, int(chosen.sum()))

        return ClassRun(flags, part(low, ~flags), part(high, flags))

    def values(self, place: Place) -> np.ndarray:
        low, high = self.low.values(place), self.high.values(place)
        x = np.empty((self.valid, low.shape[1]), np.float32)
        x[~self.flags], x[self.flags] = low, high
        return x

    def wire(self, place: Place) -> bytes:
        """Flags, then the block of each class that has tokens."""
        parts = [run.wire(place) for run in (self.low, self.high) if run.valid]
        return np.packbits(self.flags, bitorder="little").tobytes() + b"".join(parts)

    def cut(self, valid: int) -> "ClassRun":
        flags = self.flags[:valid]
        high = int(flags.sum())
        return ClassRun(flags, self.low.cut(valid - high), self.high.cut(high))


@dataclass(frozen=True)
class ShrinkingRun:
    """PM-KVQ: rows as they entered; every layer's width decides what they are worth (section 2.5)."""

    heads: dict[str, Head]
    rows: dict[Place, np.ndarray]
    widths: tuple[int, ...]
    valid: int

    def _coder(self, place: Place) -> Coder:
        return Coder(codec(f"progressive(bits={self.widths[place[0]]})", self.heads[place[2]]))

    def values(self, place: Place) -> np.ndarray:
        coder = self._coder(place)
        return coder.values(coder.pack(self.rows[place]))

    def wire(self, place: Place) -> bytes:
        coder = self._coder(place)
        return coder.codec.to_wire(coder.pack(self.rows[place]))

    def cut(self, valid: int) -> "ShrinkingRun":
        return replace(self, rows={place: x[:valid] for place, x in self.rows.items()}, valid=valid)

    def at_widths(self, widths: tuple[int, ...]) -> "ShrinkingRun":
        return replace(self, widths=widths)
