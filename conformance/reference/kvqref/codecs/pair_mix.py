"""`pair-mix`: 3 bits for salient pairs or channels, 1 bit for the rest, in planes (PN-Mix; FORMATS section 5)."""

import numpy as np

from ..errors import require
from ..head import Head
from ..param_formats import Fp16, decode_affine, encode_affine
from ..text import Arguments
from .base import Block, Codec
from .per_channel import by_channel, by_token, group_values, pack_plane, quantize_groups, unpack_plane


class PairMix(Codec):
    def __init__(self, args: Arguments, head: Head):
        self.head = head
        args.integer("low", low=1, high=1)
        args.integer("high", low=3, high=3)
        self.group = args.integer("group", low=8)
        require(self.group % 8 == 0, f"group {self.group} is not divisible by 8")
        midpoint = args.flag("midpoint")
        self.salient = self._take_salient(args)
        args.finish()
        self.levels = np.where(self.salient, 8, 2)
        self.midpoint = ~self.salient & midpoint
        self.high_channels = np.flatnonzero(self.salient)

    def _take_salient(self, args: Arguments) -> np.ndarray:
        """One boolean per channel."""
        if args.choice("unit", ("channel",), None):
            return args.mask("mask", self.head.dim)
        pairs = self.head.pairs()
        salient = np.zeros(self.head.dim, bool)
        salient[pairs] = args.mask("mask", len(pairs))[:, None]
        return salient

    def quantize(self, x, mu):
        return quantize_groups(x, self.group, self.levels, self.midpoint, Fp16)

    def values(self, block, mu):
        return group_values(block, self.group)

    def _low_bytes(self) -> int:
        return self.head.dim * self.group // 8

    def _code_bytes(self) -> int:
        """Bytes of both planes of a group."""
        return self._low_bytes() + len(self.high_channels) * self.group // 4

    def size(self, tokens):
        return tokens // self.group * (self._code_bytes() + self.head.dim * 4)

    def to_wire(self, block):
        codes = by_channel(block.codes, self.group)
        low = pack_plane(codes & 1, 2)
        high = pack_plane(codes[:, self.high_channels] >> 1, 4)
        return np.concatenate([low, high], axis=1).tobytes() + encode_affine(Fp16, *block.params)

    def from_wire(self, data, tokens):
        groups = tokens // self.group
        end = groups * self._code_bytes()
        planes = np.frombuffer(data[:end], np.uint8).reshape(groups, self._code_bytes())
        codes = unpack_plane(planes[:, : self._low_bytes()], self.head.dim, self.group, 2)
        high = unpack_plane(planes[:, self._low_bytes() :], len(self.high_channels), self.group, 4)
        codes[:, self.high_channels] |= high << 1
        return Block(by_token(codes), decode_affine(Fp16, data[end:], (groups, self.head.dim)))
