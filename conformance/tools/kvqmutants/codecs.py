"""Faults of codecs: groups, planes, pairs, classes (FORMATS sections 2.4, 2.5 and 5)."""

import numpy as np

from kvqref import polar_math
from kvqref.codecs import affine_token, base, kitty, pair_mix, per_channel, progressive
from kvqref.codecs.row_classes import WidthGroups
from kvqref.head import Head

from .patch import function, method, mutation

F32 = np.float32


@mutation("group-off-by-one", "the range of a group misses its last token", "codec-affine-channel/levels/L4-D16")
def _():
    def quantize(x, group, levels, midpoint, fmt):
        y = x.reshape(-1, group, x.shape[1])
        seen = y[:, : max(1, group - 1)]
        s, z = per_channel.affine_parameters(seen.min(axis=1), seen.max(axis=1), levels, midpoint, fmt)
        codes = per_channel.affine_codes(y, s[:, None], z[:, None], np.broadcast_to(levels, s.shape)[:, None])
        return base.Block(codes.reshape(x.shape), (s, z))

    function("codecs.per_channel", "quantize_groups", lambda old: quantize)


@mutation("tokens-before-channels", "the codes of a group are written token by token", "codec-affine-channel/levels/L2-D16")
def _():
    function(
        "codecs.per_channel",
        "by_channel",
        lambda old: lambda codes, group: codes.reshape(-1, group, codes.shape[1]).reshape(-1, codes.shape[1], group),
    )


@mutation(
    "midpoint-of-all", "pair-mix applies midpoint to the 3-bit channels too", "codec-pair-mix/by-hand/midpoint-is-for-one-bit"
)
def _():
    def init(old):
        def __init__(self, args, head):
            old(self, args, head)
            if self.midpoint.any():
                self.midpoint = np.ones_like(self.midpoint)

        return __init__

    method(pair_mix.PairMix, "__init__", init)


@mutation("mask-inverted", "a set bit of the mask means one bit", "codec-pair-mix/masks/D16-25")
def _():
    method(pair_mix.PairMix, "_take_salient", lambda old: lambda self, args: ~old(self, args))


@mutation(
    "high-plane-of-high-bit", "pair-mix keeps the low two bits of a 3-bit code in the high plane", "codec-pair-mix/masks/D16-100"
)
def _():
    def to_wire(self, block):
        codes = pair_mix.by_channel(block.codes, self.group)
        low = pair_mix.pack_plane(np.where(self.salient[None, :, None], codes >> 2, codes & 1), 2)
        high = pair_mix.pack_plane(codes[:, self.high_channels] & 3, 4)
        return np.concatenate([low, high], axis=1).tobytes() + pair_mix.encode_affine(pair_mix.Fp16, *block.params)

    method(pair_mix.PairMix, "to_wire", lambda old: to_wire)


@mutation("layout-swapped", "half and adjacent pairs are taken for each other", "codec-width-groups/pairs/adjacent-0-0")
def _():
    def pairs(old):
        def swapped(self):
            other = {"half": "adjacent", "adjacent": "half"}[self.layout]
            return old(Head(self.dim, self.tensor, other, self.rotary_dim, self.rotary_first))

        return swapped

    method(Head, "pairs", pairs)


@mutation("rotary-part-ignored", "pairs cover the whole head whatever the rotary part", "codec-channel-widths/pairs/half-8-4-G8")
def _():
    method(Head, "_rotary_part", lambda old: lambda self: (self.dim, 0))


@mutation(
    "rest-paired-by-halves",
    "the channels behind the rotary part pair up by layout instead of by neighbours",
    "codec-pair-mix/pairs/half-8-0-pair-7",
)
def _():
    def pairs(old):
        def halves(self):
            result = old(self)
            rotary, _ = self._rotary_part()
            rest = np.sort(result[rotary // 2 :].reshape(-1))
            return np.concatenate([result[: rotary // 2], np.stack([rest[: len(rest) // 2], rest[len(rest) // 2 :]], axis=1)])

        return halves

    method(Head, "pairs", pairs)


@mutation("rotary-part-of-values", "values pair up by the rotary part of the keys", "codec-width-groups/pairs/values")
def _():
    method(Head, "_rotary_part", lambda old: lambda self: (self.rotary_dim or self.dim, self.rotary_first))


@mutation("widths-descending", "the classes of width-groups come widest first", "codec-width-groups/widths/D64-1-to-8")
def _():
    method(WidthGroups, "take_classes", lambda old: lambda self, args: old(self, args)[::-1])


@mutation(
    "channels-of-class-sorted", "the channels of a width ascend instead of u0, v0, u1, v1", "codec-width-groups/pairs/half-0-0"
)
def _():
    method(
        WidthGroups,
        "take_classes",
        lambda old: lambda self, args: [(np.sort(channels), levels) for channels, levels in old(self, args)],
    )


@mutation("mean-subtracted-in-fp16", "x - mu is rounded to fp16", "codec-affine-token/center/plain-large")
def _():
    function("codecs.base", "centered", lambda old: lambda x, mu: x if mu is None else (x - mu).astype(np.float16).astype(F32))


@mutation("mean-added-before-inverse", "the mean is added before the inverse rotation", "codec-affine-token/center/rotated-small")
def _():
    def values(self, block, mu):
        s, z = block.params
        y = affine_token.affine_values(block.codes.reshape(self._groups(block.tokens)), s[..., None], z[..., None])
        y = affine_token.uncentered(y.reshape(block.codes.shape), mu)
        return affine_token.unrotate(y, 0, self.head.tensor_index, self.options.seed) if self.options.rotate else y

    method(affine_token.AffineToken, "values", lambda old: values)


@mutation("kitty-by-energy", "kitty boosts the channels with the largest sum of squares", "codec-kitty/boost/D16-1-of-3")
def _():
    def boosted(x, boost):
        from kvqref.policies.select import largest
        from kvqref.ratio import Ratio

        return largest(list((np.float64(x) ** 2).sum(axis=0)), Ratio.share(boost).floor_of(x.shape[1]))

    function("policies.channels", "boosted_channels", lambda old: boosted)


@mutation("kitty-once", "kitty chooses its channels from the first group for all", "codec-kitty/choice/two-groups")
def _():
    def quantize(self, x, mu):
        first = kitty.boosted_channels(x[: self.group], self.boost) if len(x) else np.zeros(self.head.dim, bool)
        boosted = np.repeat(first[None], len(x) // self.group, axis=0)
        block = kitty.quantize_groups(x, self.group, np.where(boosted, 16, 4), False, kitty.Fp16)
        return base.Block(block.codes, block.params + (boosted,))

    method(kitty.Kitty, "quantize", lambda old: quantize)


@mutation("kitty-positions-unchecked", "decoding accepts inconsistent positions", "codec-corrupt/kitty/swapped")
def _():
    function("errors", "intact", lambda old: lambda condition, detail: old(condition or "kitty" in detail, detail))


@mutation("angle-signed", "polar angles lie in (-pi, pi]", "codec-polar/angles/axes-and-diagonals-A256")
def _():
    def atan2p(old):
        def signed(v, u):
            theta = old(v, u)
            return np.where(theta > F32(np.pi), theta - F32(2 * np.pi), theta)

        return signed

    function("polar_math", "atan2p", atan2p)


@mutation("angle-of-other-axis", "polar angles are those of (v, u)", "codec-polar/levels/R16-A256")
def _():
    function("polar_math", "atan2p", lambda old: lambda v, u: old(u, v))


@mutation("angles-beside-radii", "polar writes radius and angle of a pair beside each other", "codec-polar/heads/D16-half")
def _():
    assert polar_math.to_polar

    def swap(old):
        def to_wire(self, block):
            half = block.codes.shape[1] // 2
            order = np.arange(2 * half).reshape(2, half).T.reshape(-1)
            return old(self, base.Block(block.codes[:, order], tuple(p[:, order] for p in block.params)))

        return to_wire

    from kvqref.codecs.channel_runs import Polar, RunCodec

    Polar.to_wire = swap(RunCodec.to_wire)


@mutation("shrink-rounds-down", "the shrink from 8 to 4 bits drops the low bits", "codec-progressive/chain/b4")
def _():
    function(
        "codecs.progressive", "shrink", lambda old: lambda codes, s, to: (codes >> (4 if to == 4 else 2), old(codes, s, to)[1])
    )


@mutation("shrink-skipped", "4-bit codes are quantized afresh instead of shrunk from 8 bits", "codec-progressive/heads/b4-D64")
def _():
    def quantize(self, x, mu):
        return self._stored.quantize(x, mu)

    method(progressive.Progressive, "quantize", lambda old: quantize)
