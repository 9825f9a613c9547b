"""Per-channel codecs whose codes are plain runs: affine-channel, channel-widths and polar (FORMATS section 5)."""

import numpy as np

from .. import bits, polar_math
from ..errors import intact, require
from ..head import Head
from ..param_formats import E4m3, Fp16, decode_affine, encode_affine
from ..text import Arguments
from .base import Block, Codec
from .per_channel import ChannelRuns, group_values, quantize_groups


class RunCodec(Codec):
    """Rule 2.1 on every quantized channel; polar quantizes other channels than it is given."""

    format = Fp16
    midpoint = False

    def __init__(self, args: Arguments, head: Head):
        self.head = head
        levels = self.take_levels(args)
        args.finish()
        self.runs = ChannelRuns(levels, self.group)

    def take_levels(self, args: Arguments) -> np.ndarray:
        """Sets `group` and options; returns the levels of every quantized channel."""
        raise NotImplementedError

    def quantize(self, x, mu):
        return quantize_groups(x, self.group, self.runs.levels, self.midpoint, self.format)

    def values(self, block, mu):
        return group_values(block, self.group)

    def size(self, tokens):
        return tokens // self.group * (self.runs.group_bytes + self.head.dim * 2 * self.format.size)

    def to_wire(self, block):
        return self.runs.pack(block.codes) + encode_affine(self.format, *block.params)

    def from_wire(self, data, tokens):
        groups = tokens // self.group
        end = groups * self.runs.group_bytes
        codes = self.runs.unpack(data[:end], groups)
        s, z = decode_affine(self.format, data[end:], (groups, self.head.dim))
        intact(not s[:, self.runs.levels == 1].any(), "s of a width-0 channel is not 0")
        return Block(codes, (s, z))


class AffineChannel(RunCodec):
    """`affine-channel(levels=L,group=G[,midpoint=1])`."""

    def take_levels(self, args):
        self.group = args.integer("group", low=1)
        self.midpoint = args.flag("midpoint")
        return np.full(self.head.dim, args.levels("levels", bits.WORDS))


class ChannelWidths(RunCodec):
    """`channel-widths(bits=LIST,group=G[,midpoint=1][,params=e4m3][,unit=channel])`."""

    def take_levels(self, args):
        self.group = args.integer("group", low=8)
        require(self.group % 8 == 0, f"group {self.group} is not divisible by 8")
        self.midpoint = args.flag("midpoint")
        self.format = E4m3 if args.choice("params", ("e4m3",), None) else Fp16
        if args.choice("unit", ("channel",), None):
            return 1 << args.digits("bits", self.head.dim, 0, 8)
        pairs = self.head.pairs()
        levels = np.zeros(self.head.dim, np.int64)
        levels[pairs] = 1 << args.digits("bits", len(pairs), 0, 8)[:, None]
        return levels


class Polar(RunCodec):
    """`polar(radius=L1,angle=L2,group=G)`: channels 0..D/2-1 are radii, the others angles."""

    def take_levels(self, args):
        self.group = args.integer("group", low=1)
        self.pairs = self.head.pairs()
        radius, angle = args.levels("radius", bits.WORDS), args.levels("angle", bits.WORDS)
        return np.repeat([radius, angle], len(self.pairs))

    def quantize(self, x, mu):
        rho, theta = polar_math.to_polar(x[:, self.pairs[:, 0]], x[:, self.pairs[:, 1]])
        return super().quantize(np.concatenate([rho, theta], axis=1), mu)

    def values(self, block, mu):
        rho, theta = np.split(super().values(block, mu), 2, axis=1)
        x = np.empty(block.codes.shape, np.float32)
        x[:, self.pairs[:, 0]], x[:, self.pairs[:, 1]] = polar_math.from_polar(rho, theta)
        return x
