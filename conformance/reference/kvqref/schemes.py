"""How a recipe packs: plain blocks, SemKV's token classes, PM-KVQ's shrinking layers (FORMATS sections 6, 7).

A scheme checks recipe and geometry (create), freezes a sequence at its first commit, and packs.
"""

from .codecs import codec
from .errors import require
from .geometry import Geometry
from .plan import FILLS
from .policies.center import center_mean
from .policies.pmkvq import shrink_width
from .policies.semkv import block_flags, prompt_flags
from .ratio import Ratio
from .recipe import Recipe, default_block, with_head_dimension
from .sequence import Sequence
from .storage import ClassRun, Coder, PlainRun, ShrinkingRun
from .text import parse_call


class Scheme:
    """What all schemes share: packing of what is due."""

    scored = False  # whether tokens come with scores
    needs_pairs = False

    def __init__(self, recipe: Recipe, geometry: Geometry):
        self.recipe, self.geometry = recipe, geometry
        self.heads = {tensor: geometry.head(tensor) for tensor in ("k", "v")}
        groups = self.check()
        self.block = default_block(groups) if recipe.block is None else recipe.block
        require(self.block >= 1, "block 0")
        for group in groups:
            require(group is None or self.block % group == 0, f"block {self.block} is no multiple of group {group}")

    def check(self) -> list[int | None]:
        """INVALID where recipe and geometry do not fit; returns the token groups of the codecs."""
        raise NotImplementedError

    def freeze(self, seq: Sequence, shared: dict) -> None:
        """Sets seq.frozen at the first commit; `shared` holds what belongs to the cache."""
        raise NotImplementedError

    def pack_oldest(self, seq: Sequence, count: int, prompt: bool) -> None:
        """Packs the oldest tokens of the tail as one run."""
        raise NotImplementedError

    def pack_due(self, seq: Sequence) -> None:
        """While tail length - recent >= block, the oldest block of the tail is packed."""
        while seq.lengths["tail"] - self.recipe.recent >= self.block:
            self.pack_oldest(seq, self.block, prompt=False)

    def pack_prompt(self, seq: Sequence) -> None:
        """FINAL of a commit: packing by the same rule."""
        self.pack_due(seq)

    def end_turn(self, seq: Sequence) -> None:
        """A no-op for other recipes than SemKV."""


class PlainScheme(Scheme):
    """One codec per tensor; the policy fills its text per layer and KV head."""

    def check(self):
        self.fill = FILLS[self.recipe.policy](self.recipe.options, self.geometry)
        self.needs_pairs = self.fill.needs_pairs
        if self.needs_pairs:
            self.heads["k"].pairs()
        samples = [self.sample(tensor, place) for place in self.geometry.places() for tensor in ("k", "v")]
        return [sample.group for sample in samples[:2]]

    def sample(self, tensor: str, place: tuple[int, int]):
        """A codec of the size that the frozen one will have."""
        text = self.fill.sample(tensor, self.recipe.codec_text(tensor), place)
        return codec(text, self.heads[tensor])

    def _texts(self, seq: Sequence) -> dict:
        return {
            (*place, tensor): self.fill.fill(tensor, self.recipe.codec_text(tensor), place, seq.stats[place])
            for place in self.geometry.places()
            for tensor in ("k", "v")
        }

    def freeze(self, seq, shared):
        texts = dict(shared) or self._texts(seq)
        if self.fill.per_cache:
            shared.update(texts)
        seq.frozen = {}
        for place, text in texts.items():
            made = codec(text, self.heads[place[2]])
            seq.frozen[place] = Coder(made, center_mean(seq.tail[place]) if made.center else None)

    def pack_oldest(self, seq, count, prompt):
        rows, _ = seq.take_tail(count)
        seq.runs.append(PlainRun.pack(seq.frozen, rows, count))


class SemKvScheme(Scheme):
    """Two classes of rows by token score."""

    scored = True

    def check(self):
        options = self.recipe.options
        require(set(options) <= {"r", "low", "high"}, "semkv knows r, low and high")
        require(self.recipe.recent == 0, "recent > 0 with SemKV")
        self.r = Ratio.share(options.get("r"))
        self.low, self.high = self._coders(options.get("low")), self._coders(options.get("high"))
        return [None]

    def _coders(self, text) -> dict:
        """Coders of one class; the rows are whole-head affine rows or codebook rows."""
        require(text is not None, "semkv needs low and high")
        name, values = parse_call(text)
        require(name in ("affine-token", "lloyd"), "SemKV's rows are affine-token or lloyd")
        coders = {}
        for layer, head in self.geometry.places():
            for tensor in ("k", "v"):
                full = with_head_dimension(text, self.geometry.dim(tensor))
                made = codec(full, self.heads[tensor])
                require(not made.center, "SemKV's rows are not centred")
                coders[layer, head, tensor] = Coder(made)
        return coders

    def freeze(self, seq, shared):
        """Nothing: flags are chosen run by run."""

    def pack_oldest(self, seq, count, prompt):
        rows, scores = seq.take_tail(count)
        flags = (prompt_flags if prompt else block_flags)(scores, self.r)
        seq.runs.append(ClassRun.pack(self.low, self.high, rows, flags))

    def _pack_tail(self, seq: Sequence, prompt: bool) -> None:
        if seq.lengths["tail"]:
            self.pack_oldest(seq, seq.lengths["tail"], prompt)

    def pack_prompt(self, seq):
        """A commit packs the whole prompt."""
        self._pack_tail(seq, prompt=True)

    def end_turn(self, seq):
        self._pack_tail(seq, prompt=False)


class ShrinkScheme(Scheme):
    """Progressive rows; seq.frozen holds the width of every layer."""

    def check(self):
        options = self.recipe.options
        require(set(options) <= {"budgets"}, "pmkvq knows budgets")
        budgets = options.get("budgets")
        shaped = isinstance(budgets, list) and len(budgets) == self.geometry.layers
        require(shaped, "pmkvq needs options.budgets [layer]")
        self.budgets = [int(budget) for budget in budgets]
        require(all(budget >= 0 for budget in self.budgets), "a budget is negative")
        for tensor in ("k", "v"):
            name, values = parse_call(self.recipe.codec_text(tensor))
            require(name == "progressive", "pmkvq shrinks progressive codecs")
            require(values in ({}, {"bits": "16"}), "pmkvq starts at 16 bits")
        return [None]

    def widths(self, tokens: int, current: tuple[int, ...]) -> tuple[int, ...]:
        """Width of every layer with so many packed tokens."""
        g = self.geometry
        return tuple(
            shrink_width(tokens, budget, g.kv_heads, g.dim_k, g.dim_v, width) for budget, width in zip(self.budgets, current)
        )

    def freeze(self, seq, shared):
        seq.frozen = (16,) * self.geometry.layers

    def pack_oldest(self, seq, count, prompt):
        rows, _ = seq.take_tail(count)
        seq.frozen = self.widths(seq.lengths["packed"] + count, seq.frozen)
        seq.runs.append(ShrinkingRun(self.heads, rows, seq.frozen, count))
        seq.runs = [run.at_widths(seq.frozen) for run in seq.runs]


def scheme(recipe: Recipe, geometry: Geometry) -> Scheme:
    kinds = {"semkv": SemKvScheme, "pmkvq": ShrinkScheme}
    known = recipe.policy in kinds or recipe.policy in FILLS
    require(known, f"no policy {recipe.policy}")
    return kinds.get(recipe.policy, PlainScheme)(recipe, geometry)
