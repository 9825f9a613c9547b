"""The codecs of FORMATS section 5, by the names of their text form."""

from functools import lru_cache

from ..errors import require
from ..head import Head
from ..text import Arguments, parse_call
from .affine_token import AffineToken
from .base import Block, Codec
from .channel_runs import AffineChannel, ChannelWidths, Polar
from .kitty import Kitty
from .pair_mix import PairMix
from .progressive import Progressive
from .raw import Raw
from .row_classes import ChannelSplit, Lloyd, WidthGroups

CODECS = {
    "raw": Raw,
    "affine-channel": AffineChannel,
    "affine-token": AffineToken,
    "lloyd": Lloyd,
    "pair-mix": PairMix,
    "width-groups": WidthGroups,
    "channel-split": ChannelSplit,
    "kitty": Kitty,
    "channel-widths": ChannelWidths,
    "polar": Polar,
    "progressive": Progressive,
}


@lru_cache(maxsize=4096)
def codec(text: str, head: Head) -> Codec:
    """The codec that a text form means for one head; INVALID if it means none."""
    name, values = parse_call(text)
    require(name in CODECS, f"no codec {name}")
    return CODECS[name](Arguments(name, values), head)


__all__ = ["Block", "Codec", "CODECS", "codec"]
