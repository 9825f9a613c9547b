"""`progressive`: the shrink chain 16 (raw), 8, 4, 2 bits of PM-KVQ (FORMATS section 2.5)."""

import numpy as np

from ..errors import require
from ..fp import F32, hp, plus_zero
from ..head import Head
from ..text import Arguments
from .affine_token import AffineToken
from .base import Block, Codec
from .raw import Raw

WIDTHS = (16, 8, 4, 2)
# width after the step -> (multiplier, addend, divisor) of the codes and the factor of s
_SHRINK = {4: (2, 17, 34, 17), 2: (2, 5, 10, 5)}


def shrink(codes: np.ndarray, s: np.ndarray, to: int) -> tuple[np.ndarray, np.ndarray]:
    """One shrink step, 8 to 4 or 4 to 2 bits; z is kept."""
    multiplier, addend, divisor, factor = _SHRINK[to]
    shrunk = (multiplier * codes.astype(np.int64) + addend) // divisor
    return shrunk.astype(np.uint8), plus_zero(hp(F32(factor) * s))


def _affine(levels: int, head: Head) -> AffineToken:
    return AffineToken(Arguments("affine-token", {"levels": str(levels), "group": str(head.dim)}), head)


class Progressive(Codec):
    def __init__(self, args: Arguments, head: Head):
        self.head = head
        self.bits = args.integer("bits")
        require(self.bits in WIDTHS, f"bits={self.bits} is not 16, 8, 4 or 2")
        args.finish()
        self._stored = Raw(Arguments("raw", {}), head) if self.bits == 16 else _affine(1 << self.bits, head)

    def quantize(self, x, mu):
        if self.bits == 16:
            return self._stored.quantize(x, mu)
        first = _affine(256, self.head).quantize(x, mu)
        codes, (s, z) = first.codes, first.params
        for width in (4, 2):
            if self.bits <= width:
                codes, s = shrink(codes, s, width)
        return Block(codes, (s, z))

    def values(self, block, mu):
        return self._stored.values(block, mu)

    def size(self, tokens):
        return self._stored.size(tokens)

    def to_wire(self, block):
        return self._stored.to_wire(block)

    def from_wire(self, data, tokens):
        return self._stored.from_wire(data, tokens)
