"""`kitty`: per group, the channels of largest magnitude have 16 levels, the rest 4 (FORMATS section 5)."""

import numpy as np

from ..errors import intact, require
from ..head import Head
from ..param_formats import Fp16, decode_affine, encode_affine
from ..policies.channels import boosted_channels
from ..ratio import Ratio
from ..text import Arguments
from .base import Block, Codec
from .per_channel import by_channel, by_token, group_values, pack_plane, quantize_groups, unpack_plane

NOT_BOOSTED = 0xFF


class Kitty(Codec):
    """params of its blocks: s, z and the boosted flags, each [groups, channels]."""

    def __init__(self, args: Arguments, head: Head):
        self.head = head
        self.boost = Ratio.share(args.ratio("boost"))
        self.group = args.integer("group", low=4)
        require(self.group % 4 == 0, f"group {self.group} is not divisible by 4")
        self.count = self.boost.floor_of(head.dim)
        require(self.count <= 255, f"{self.count} boosted channels are more than 255")
        args.finish()

    def quantize(self, x, mu):
        groups = x.reshape(-1, self.group, self.head.dim)
        boosted = np.array([boosted_channels(g, self.boost) for g in groups], bool)
        boosted = boosted.reshape(len(groups), self.head.dim)
        block = quantize_groups(x, self.group, np.where(boosted, 16, 4), False, Fp16)
        return Block(block.codes, block.params + (boosted,))

    def values(self, block, mu):
        return group_values(block, self.group)

    def _plane_bytes(self) -> tuple[int, int, int]:
        """Low plane, high plane and positions of a group."""
        return self.head.dim * self.group // 4, self.count * self.group // 4, self.head.dim

    def size(self, tokens):
        return tokens // self.group * (sum(self._plane_bytes()) + self.head.dim * 4)

    def to_wire(self, block):
        s, z, boosted = block.params
        codes = by_channel(block.codes, self.group)
        low = pack_plane(codes & 3, 4)
        high = pack_plane((codes >> 2)[boosted].reshape(len(codes), self.count, self.group), 4)
        positions = np.where(boosted, np.cumsum(boosted, axis=1) - 1, NOT_BOOSTED).astype(np.uint8)
        return np.concatenate([low, high, positions], axis=1).tobytes() + encode_affine(Fp16, s, z)

    def from_wire(self, data, tokens):
        groups = tokens // self.group
        end = groups * sum(self._plane_bytes())
        planes = np.frombuffer(data[:end], np.uint8).reshape(groups, sum(self._plane_bytes()))
        low, high, positions = np.split(planes, np.cumsum(self._plane_bytes())[:2], axis=1)
        boosted = positions != NOT_BOOSTED
        expected = np.where(boosted, np.cumsum(boosted, axis=1) - 1, NOT_BOOSTED)
        consistent = (boosted.sum(axis=1) == self.count).all() and (positions == expected).all()
        intact(bool(consistent), "kitty positions are inconsistent")
        codes = unpack_plane(low, self.head.dim, self.group, 4)
        codes[boosted] |= unpack_plane(high, self.count, self.group, 4).reshape(-1, self.group) << 2
        params = decode_affine(Fp16, data[end:], (groups, self.head.dim))
        return Block(by_token(codes), params + (boosted,))
