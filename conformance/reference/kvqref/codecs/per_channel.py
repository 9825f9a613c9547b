"""Quantization and code runs shared by the per-channel codecs (FORMATS sections 2.1 and 5).

A block of n tokens is n/G groups; every channel of a group has its own s and z.
"""

import numpy as np

from .. import bits
from ..affine import affine_codes, affine_parameters, affine_values
from .base import Block


def quantize_groups(x: np.ndarray, group: int, levels, midpoint, fmt) -> Block:
    """[tokens, channels] -> codes [tokens, channels] and s, z [groups, channels].

    levels and midpoint are per channel, or [groups, channels]."""
    y = x.reshape(-1, group, x.shape[1])
    s, z = affine_parameters(y.min(axis=1), y.max(axis=1), levels, midpoint, fmt)
    top = np.broadcast_to(levels, s.shape)[:, None]
    codes = affine_codes(y, s[:, None], z[:, None], top)
    return Block(codes.reshape(x.shape), (s, z))


def group_values(block: Block, group: int) -> np.ndarray:
    """z + code*s, [tokens, channels]."""
    s, z = block.params[:2]
    codes = block.codes.reshape(-1, group, block.codes.shape[1])
    return affine_values(codes, s[:, None], z[:, None]).reshape(block.codes.shape)


def by_channel(codes: np.ndarray, group: int) -> np.ndarray:
    """[tokens, channels] -> [groups, channels, G], the order of the wire."""
    return codes.reshape(-1, group, codes.shape[1]).transpose(0, 2, 1)


def by_token(codes: np.ndarray) -> np.ndarray:
    """The inverse of `by_channel`."""
    groups, channels, group = codes.shape
    return codes.transpose(0, 2, 1).reshape(groups * group, channels)


def pack_plane(codes: np.ndarray, levels: int) -> np.ndarray:
    """[groups, channels, G] -> [groups, bytes], one padded stream per channel."""
    groups, channels, group = codes.shape
    return bits.pack(codes.reshape(-1, group), levels).reshape(groups, channels * bits.stream_bytes(group, levels))


def unpack_plane(data: np.ndarray, channels: int, group: int, levels: int) -> np.ndarray:
    """The inverse of `pack_plane`."""
    streams = data.reshape(len(data) * channels, bits.stream_bytes(group, levels))
    return bits.unpack(streams, group, levels).reshape(len(data), channels, group)


class ChannelRuns:
    """[group][channel] runs of G codes; channel i has levels[i] levels, one level takes no bytes."""

    def __init__(self, levels: np.ndarray, group: int):
        self.levels, self.group = levels, group
        sizes = [bits.stream_bytes(group, int(L)) if L > 1 else 0 for L in levels]
        self.ends = np.cumsum(sizes)
        self.starts = self.ends - sizes
        self.group_bytes = int(self.ends[-1])

    def _columns(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """(levels, channels, their byte positions in a group) of every level count present."""
        columns = []
        for L in np.unique(self.levels[self.levels > 1]):
            channels = np.flatnonzero(self.levels == L)
            places = self.starts[channels][:, None] + np.arange(bits.stream_bytes(self.group, int(L)))
            columns.append((int(L), channels, places.reshape(-1)))
        return columns

    def pack(self, codes: np.ndarray) -> bytes:
        planes = by_channel(codes, self.group)
        out = np.zeros((len(planes), self.group_bytes), np.uint8)
        for L, channels, places in self._columns():
            out[:, places] = pack_plane(planes[:, channels], L)
        return out.tobytes()

    def unpack(self, data: bytes, groups: int) -> np.ndarray:
        rows = np.frombuffer(data, np.uint8).reshape(groups, self.group_bytes)
        planes = np.zeros((groups, len(self.levels), self.group), np.uint8)
        for L, channels, places in self._columns():
            planes[:, channels] = unpack_plane(rows[:, places], len(channels), self.group, L)
        return by_token(planes)
