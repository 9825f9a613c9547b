"""`affine-token`: affine rows, g channels of one token share s and z (FORMATS sections 2.1 and 5)."""

import numpy as np

from .. import bits
from ..affine import affine_codes, affine_parameters, affine_values
from ..errors import require
from ..fp import plus_zero
from ..head import Head
from ..param_formats import Fp16, decode_affine, encode_affine
from ..rotation import rotate, unrotate
from ..text import Arguments
from .base import Block, Codec, RowOptions, centered, uncentered


class AffineToken(Codec):
    def __init__(self, args: Arguments, head: Head):
        self.head = head
        self.levels = args.levels("levels", bits.WORDS)
        self.width = args.integer("group", low=1)
        require(head.dim % self.width == 0, f"group {self.width} does not divide {head.dim}")
        self.options = RowOptions.take(args, head, rotate_default=0)
        self.center = self.options.center
        args.finish()

    def _groups(self, tokens: int) -> tuple[int, int, int]:
        return tokens, self.head.dim // self.width, self.width

    def quantize(self, x, mu):
        y = centered(x, mu)
        if self.options.rotate:
            y = rotate(y, 0, self.head.tensor_index, self.options.seed)
        y = y.reshape(self._groups(len(x)))
        s, z = affine_parameters(y.min(axis=2), y.max(axis=2), self.levels, False, Fp16)
        codes = affine_codes(y, s[..., None], z[..., None], self.levels)
        return Block(codes.reshape(x.shape), (s, z))

    def values(self, block, mu):
        s, z = block.params
        y = affine_values(block.codes.reshape(self._groups(block.tokens)), s[..., None], z[..., None])
        y = y.reshape(block.codes.shape)
        if self.options.rotate:
            y = unrotate(y, 0, self.head.tensor_index, self.options.seed)
        return plus_zero(uncentered(y, mu))

    def _code_bytes(self, tokens: int) -> int:
        return bits.stream_bytes(tokens * self.head.dim, self.levels)

    def size(self, tokens):
        return self._code_bytes(tokens) + tokens * self.head.dim // self.width * 2 * Fp16.size

    def to_wire(self, block):
        codes = bits.pack(block.codes.reshape(1, -1), self.levels).tobytes()
        return codes + encode_affine(Fp16, *block.params)

    def from_wire(self, data, tokens):
        end = self._code_bytes(tokens)
        stream = np.frombuffer(data[:end], np.uint8)[None]
        codes = bits.unpack(stream, tokens * self.head.dim, self.levels)
        shape = self._groups(tokens)[:2]
        return Block(codes.reshape(tokens, self.head.dim), decode_affine(Fp16, data[end:], shape))
