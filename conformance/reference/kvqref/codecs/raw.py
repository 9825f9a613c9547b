"""`raw`: fp16 [token][channel] (FORMATS section 5)."""

import numpy as np

from ..errors import intact
from ..fp import F32, plus_zero
from ..head import Head
from ..text import Arguments
from .base import Block, Codec


class Raw(Codec):
    """The codes of its blocks are the entered values themselves."""

    def __init__(self, args: Arguments, head: Head):
        self.head = head
        args.finish()

    def quantize(self, x, mu):
        return Block(x, ())

    def values(self, block, mu):
        return block.codes

    def size(self, tokens):
        return tokens * self.head.dim * 2

    def to_wire(self, block):
        return block.codes.astype("<f2").tobytes()

    def from_wire(self, data, tokens):
        x = np.frombuffer(data, "<f2").astype(F32).reshape(tokens, self.head.dim)
        intact(bool(np.isfinite(x).all()), "a raw value is not finite")
        return Block(plus_zero(x), ())
