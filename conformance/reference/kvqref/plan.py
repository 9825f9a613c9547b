"""What a recipe means for one geometry: checked at create, filled with masks and widths at the first commit.

Every policy of FORMATS section 6 that fills a codec text is one small class: `fill` returns the text for
one layer and KV head from its statistics, `sample` a text of the same size without statistics (for the
checks of create and for accounting).
"""

import numpy as np

from .errors import KvqError, require
from .geometry import Geometry
from .policies.channels import split_channels
from .policies.pnmix import CHANNEL_CRITERIA, CRITERIA, pnmix_mask
from .policies.width_scores import SCORES, width_scores
from .policies.widths import WidthBudget, allot_widths, list_text
from .ratio import Ratio
from .stats import HeadStats
from .text import mask_to_hex, parse_call, with_value

Place = tuple[int, int]


class Fill:
    """Base: fills nothing (uniform). `options` lists what the policy knows."""

    options: tuple[str, ...] = ()
    per_cache = False  # True: the texts belong to the cache, False: to the sequence
    needs_pairs = False

    def __init__(self, options: dict, geometry: Geometry):
        unknown = set(options) - set(self.options)
        require(not unknown, f"the policy does not know {', '.join(sorted(unknown))}")
        self.geometry = geometry
        self.take(options)

    def take(self, options: dict) -> None:
        """Read and check the options."""

    def applies(self, tensor: str, name: str, values: dict) -> bool:
        """Whether the policy fills this codec text (and the text does not bring its own)."""
        return False

    def from_stats(self, tensor: str, values: dict, place: Place, stats: HeadStats) -> tuple[str, str]:
        """(key, value) to add to the text."""
        raise NotImplementedError

    def from_size(self, tensor: str, values: dict, place: Place) -> tuple[str, str]:
        """The same from the options alone, of equal size."""
        raise NotImplementedError

    def fill(self, tensor: str, text: str, place: Place, stats: HeadStats) -> str:
        name, values = parse_call(text)
        return with_value(text, *self.from_stats(tensor, values, place, stats)) if self.applies(tensor, name, values) else text

    def sample(self, tensor: str, text: str, place: Place) -> str:
        name, values = parse_call(text)
        return with_value(text, *self.from_size(tensor, values, place)) if self.applies(tensor, name, values) else text

    def known_size(self, text: str) -> bool:
        """Whether `sample` has the size that `fill` will have."""
        return True


def _first(n: int, count: int) -> str:
    return mask_to_hex(np.arange(n) < count)


class PnMix(Fill):
    options = ("r", "criterion")

    def take(self, options):
        self.r = Ratio.share(options.get("r"))
        self.criterion = options.get("criterion", "qk-pair")
        require(self.criterion in CRITERIA, f"no PN-Mix criterion {self.criterion}")
        self.by_channel = self.criterion in CHANNEL_CRITERIA
        self.needs_pairs = not self.by_channel

    def applies(self, tensor, name, values):
        if tensor != "k":
            return False
        require(name == "pair-mix", "pnmix fills pair-mix keys")
        if "mask" in values:
            return False
        fits = self.by_channel == ("unit" in values)
        require(fits, f"criterion {self.criterion} and unit={values.get('unit', 'pair')} do not fit")
        return True

    def from_stats(self, tensor, values, place, stats):
        return "mask", mask_to_hex(pnmix_mask(stats, self.r, self.criterion))

    def from_size(self, tensor, values, place):
        n = self.geometry.dim_k if self.by_channel else self.geometry.dim_k // 2
        return "mask", _first(n, self.r.floor_of(n))


class WidthFill(Fill):
    """blockgtq and pair-widths."""

    options = ("avg", "bmin", "bmax", "score", "unit", "scores")
    needs_pairs = True
    codec: str
    default_score: str
    lowest: int

    def take(self, options):
        number = {key: Ratio.of(options[key]) for key in ("bmin", "bmax", "unit") if key in options}
        require(all(r.q == 1 for r in number.values()), "bmin, bmax and unit are integers")
        self.budget = WidthBudget(Ratio.of(options.get("avg")), **{key: r.p for key, r in number.items()})
        self.score = options.get("score", self.default_score)
        require(self.score in SCORES, f"no score {self.score}")
        self.scores = options.get("scores")
        self.budget.check(self.geometry.dim_k // 2, self.lowest)

    def applies(self, tensor, name, values):
        if tensor != "k":
            return False
        require(name == self.codec and "unit" not in values, f"the policy fills {self.codec} keys by pair")
        return "bits" not in values

    def _given(self, place: Place) -> np.ndarray | None:
        return None if self.scores is None else np.asarray(self.scores, np.float64)[place]

    def from_stats(self, tensor, values, place, stats):
        given = self._given(place)
        scores = width_scores(stats, self.score) if given is None else given
        return "bits", list_text(allot_widths(scores, self.budget, self.lowest))

    def from_size(self, tensor, values, place):
        given = self._given(place)
        scores = np.ones(self.geometry.dim_k // 2) if given is None else given
        return "bits", list_text(allot_widths(scores, self.budget, self.lowest))


class BlockGtq(WidthFill):
    codec = "width-groups"
    default_score = "qk-avg"
    lowest = 1
    per_cache = True

    def known_size(self, text):
        """The number of scalars depends on the widths that occur."""
        return self.scores is not None or "bits" in parse_call(text)[1]


class PairWidths(WidthFill):
    codec = "channel-widths"
    default_score = "q-var"
    lowest = 0


class ChannelSplit(Fill):
    options = ("r",)

    def take(self, options):
        self.r = Ratio.share(options.get("r", "1/2"))

    def applies(self, tensor, name, values):
        return name == "channel-split" and "mask" not in values

    def from_stats(self, tensor, values, place, stats):
        sums = stats.keys if tensor == "k" else stats.values
        if sums.count == 0:
            raise KvqError("STATE", "channel-split needs statistics that no token has given")
        return "mask", mask_to_hex(split_channels(sums, self.r))

    def from_size(self, tensor, values, place):
        n = self.geometry.dim(tensor)
        return "mask", _first(n, self.r.floor_of(n))


class ChanMix(Fill):
    """bits [layer][head] = LIST, given."""

    options = ("bits",)

    def take(self, options):
        self.bits = options.get("bits")

    def applies(self, tensor, name, values):
        if tensor != "k":
            return False
        require(name == "channel-widths" and "unit" in values, "chanmix fills channel-widths keys by channel")
        return "bits" not in values

    def from_stats(self, tensor, values, place, stats):
        return self.from_size(tensor, values, place)

    def from_size(self, tensor, values, place):
        layers, heads = self.geometry.layers, self.geometry.kv_heads
        shaped = isinstance(self.bits, list) and len(self.bits) == layers and all(len(row) == heads for row in self.bits)
        require(shaped, "chanmix needs options.bits [layer][head]")
        return "bits", self.bits[place[0]][place[1]]


FILLS = {
    "uniform": Fill,
    "pnmix": PnMix,
    "blockgtq": BlockGtq,
    "pair-widths": PairWidths,
    "channel-split": ChannelSplit,
    "chanmix": ChanMix,
}
