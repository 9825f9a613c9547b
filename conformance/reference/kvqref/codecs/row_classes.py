"""Codebook rows (FORMATS sections 2.2 and 5): lloyd, width-groups and channel-split.

All three cut the head into classes of channels; each class is one codebook row per token with its own
stream of codes, and every token has one scalar per class. lloyd has one class.
"""

import numpy as np

from .. import bits
from ..books import books
from ..fp import F32, plus_zero
from ..head import Head
from ..param_formats import decode_nonnegative
from ..rotation import rotate, unrotate
from ..rows import SCALES, row_codes, row_values
from ..text import Arguments
from .base import Block, Codec, RowOptions, centered, take_row_format, uncentered


class RowClasses(Codec):
    """`classes`: (channels in stream order, levels) of the classes present, in wire order."""

    classes: list[tuple[np.ndarray, int]]

    def __init__(self, args: Arguments, head: Head):
        self.head = head
        self.scale = args.choice("scale", SCALES, "matched")
        self.format = take_row_format(args)
        self.options = RowOptions.take(args, head, rotate_default=1)
        self.center = self.options.center
        self.classes = self.take_classes(args)
        args.finish()

    def take_classes(self, args: Arguments) -> list[tuple[np.ndarray, int]]:
        raise NotImplementedError

    def _turn(self, rows: np.ndarray, k: int, direction) -> np.ndarray:
        if not self.options.rotate:
            return rows
        return direction(rows, k, self.head.tensor_index, self.options.seed)

    def quantize(self, x, mu):
        x = centered(x, mu)
        codes, scalars = [], []
        for k, (channels, levels) in enumerate(self.classes):
            row = x[:, channels]
            code, h = row_codes(row, self._turn(row, k, rotate), books()[levels], self.scale, self.format)
            codes.append(code)
            scalars.append(h)
        return Block(np.concatenate(codes, axis=1), (np.stack(scalars, axis=1),))

    def _class_codes(self, codes: np.ndarray) -> list[np.ndarray]:
        return np.split(codes, np.cumsum([len(channels) for channels, _ in self.classes])[:-1], axis=1)

    def values(self, block, mu):
        x = np.empty(block.codes.shape, F32)
        for k, codes in enumerate(self._class_codes(block.codes)):
            channels, levels = self.classes[k]
            row = row_values(codes, block.params[0][:, k], books()[levels])
            x[:, channels] = self._turn(row, k, unrotate)
        return plus_zero(uncentered(x, mu))

    def _stream_sizes(self, tokens: int) -> list[int]:
        return [bits.stream_bytes(tokens * len(channels), levels) for channels, levels in self.classes]

    def size(self, tokens):
        return sum(self._stream_sizes(tokens)) + tokens * len(self.classes) * self.format.size

    def to_wire(self, block):
        streams = [
            bits.pack(codes.reshape(1, -1), levels).tobytes()
            for codes, (_, levels) in zip(self._class_codes(block.codes), self.classes)
        ]
        return b"".join(streams) + self.format.encode(block.params[0])

    def from_wire(self, data, tokens):
        codes, start = [], 0
        for (channels, levels), size in zip(self.classes, self._stream_sizes(tokens)):
            stream = np.frombuffer(data[start : start + size], np.uint8)[None]
            codes.append(bits.unpack(stream, tokens * len(channels), levels).reshape(tokens, len(channels)))
            start += size
        h = decode_nonnegative(self.format, data[start:]).reshape(tokens, len(self.classes))
        return Block(np.concatenate(codes, axis=1), (h,))


class Lloyd(RowClasses):
    """`lloyd(levels=L)`: the whole head is one row."""

    def take_classes(self, args):
        return [(np.arange(self.head.dim), args.levels("levels", books()))]


class WidthGroups(RowClasses):
    """`width-groups(bits=LIST)`: one row per width present, widths ascending (Block-GTQ)."""

    def take_classes(self, args):
        pairs = self.head.pairs()
        widths = args.digits("bits", len(pairs), 1, 8)
        return [(pairs[widths == width].reshape(-1), 1 << int(width)) for width in np.unique(widths)]


class ChannelSplit(RowClasses):
    """`channel-split(high=L1,low=L2,mask=HEX)`: low class first; an empty class is absent."""

    def take_classes(self, args):
        high, low = args.levels("high", books()), args.levels("low", books())
        mask = args.mask("mask", self.head.dim)
        both = [(np.flatnonzero(~mask), low), (np.flatnonzero(mask), high)]
        return [(channels, levels) for channels, levels in both if len(channels)]
