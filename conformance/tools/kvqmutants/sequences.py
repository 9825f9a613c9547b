"""Faults of sequences: when tokens are packed, what truncation, forks and turns leave (FORMATS sections 7 and 8)."""

import numpy as np

from kvqref import cache, schemes, sequence, storage
from kvqref.codecs.base import Block, Codec
from kvqref.errors import KvqError

from .patch import function, method, mutation


@mutation(
    "packs-one-late", "a block is packed only when the tail is longer than block + recent", "sequence-packing/commit/rows-T11"
)
def _():
    def pack_due(self, seq):
        while seq.lengths["tail"] - self.recipe.recent > self.block:
            self.pack_oldest(seq, self.block, prompt=False)

    method(schemes.Scheme, "pack_due", lambda old: pack_due)


@mutation("recent-ignored", "recent tokens are packed like all others", "sequence-packing/commit/rows-of-five-T12")
def _():
    def pack_due(self, seq):
        while seq.lengths["tail"] >= self.block:
            self.pack_oldest(seq, self.block, prompt=False)

    method(schemes.Scheme, "pack_due", lambda old: pack_due)


@mutation("sinks-packed", "sinks are packed with the other tokens", "sequence-packing/commit/rows-T3")
def _():
    method(sequence.Sequence, "add", lambda old: lambda self, rows, scores, sinks: old(self, rows, scores, 0))


@mutation(
    "sinks-not-refilled", "positions below sinks stay empty after truncation", "sequence-truncation/everywhere/rows-nothing"
)
def _():
    def add(old):
        def refused(self, rows, scores, sinks):
            old(self, rows, scores, sinks if not self.committed else len(next(iter(self.sinks.values()))))

        return refused

    method(sequence.Sequence, "add", add)


@mutation("whole-tail-packed", "a prompt is packed as one block", "sequence-packing/commit/rows-T20")
def _():
    def pack_due(self, seq):
        due = (seq.lengths["tail"] - self.recipe.recent) // self.block * self.block
        if due > 0:
            self.pack_oldest(seq, due, prompt=False)

    method(schemes.Scheme, "pack_due", lambda old: pack_due)


@mutation(
    "newest-packed", "the newest tokens of the tail are packed instead of the oldest", "sequence-packing/commit/centred-T23"
)
def _():
    def take_tail(self, count):
        rows = {place: x[len(x) - count :] for place, x in self.tail.items()}
        scores = self.scores[len(self.scores) - count :] if len(self.scores) else self.scores
        self.tail = {place: x[: len(x) - count] for place, x in self.tail.items()}
        self.scores = self.scores[: len(self.scores) - count] if len(self.scores) else self.scores
        return rows, scores

    method(sequence.Sequence, "take_tail", lambda old: take_tail)


@mutation(
    "cut-block-dropped", "truncation inside a packed block drops the whole block", "sequence-truncation/everywhere/kivi-middle"
)
def _():
    def truncate(old):
        def dropped(self, length):
            old(self, length)
            self.runs = [run for i, run in enumerate(self.runs) if i < len(self.runs) - 1 or not getattr(run, "cut_short", False)]

        return dropped

    method(storage.PlainRun, "cut", lambda old: lambda self, valid: _marked(old(self, valid)))
    method(sequence.Sequence, "truncate", truncate)


def _marked(run):
    object.__setattr__(run, "cut_short", True)
    return run


@mutation(
    "removed-codes-kept",
    "the wire of a cut block still has the codes of removed tokens",
    "sequence-truncation/everywhere/kivi-first-of-block",
)
def _():
    def cut(old):
        def kept(self, block, valid):
            if self.group is None:
                return old(self, block, valid)
            groups = -(-valid // self.group)
            return Block(block.codes[: groups * self.group], tuple(p[:groups] for p in block.params))

        return kept

    method(Codec, "cut", cut)


@mutation(
    "cut-block-requantized",
    "a cut block is quantized again from its values",
    "sequence-truncation/everywhere/kivi-first-of-block",
)
def _():
    def cut(self, valid):
        rows = {place: self.values(place) for place in self.blocks}
        rows = {place: np.where(np.arange(len(x))[:, None] < valid, x, 0).astype(np.float32) for place, x in rows.items()}
        blocks = {place: self.coders[place].codec.cut(self.coders[place].pack(x), valid) for place, x in rows.items()}
        return storage.PlainRun(self.coders, blocks, valid)

    method(storage.PlainRun, "cut", lambda old: cut)


@mutation("cut-refilled", "new tokens fill the place of removed ones in a cut block", "sequence-truncation/again/rows")
def _():
    def pack_due(old):
        def refill(self, seq):
            if (
                seq.runs
                and seq.runs[-1].valid < self.block
                and seq.lengths["tail"] > self.recipe.recent
                and isinstance(seq.runs[-1], storage.PlainRun)
            ):
                run = seq.runs.pop()
                values = {place: run.values(place) for place in run.blocks}
                seq.tail = {place: np.concatenate([values[place], x]) for place, x in seq.tail.items()}
            old(self, seq)

        return refill

    method(schemes.Scheme, "pack_due", pack_due)


@mutation("fork-shares-writes", "parent and child write into the same sequence", "sequence-forks/fork/rows-both-go-on")
def _():
    def fork(old):
        def shared(self, name, to):
            lengths = old(self, name, to)
            self.alias = getattr(self, "alias", {}) | {to: name}
            return lengths

        return shared

    method(cache.Cache, "fork", fork)
    method(
        cache.Cache,
        "append",
        lambda old: lambda self, name, *a, **k: old(self, getattr(self, "alias", {}).get(name, name), *a, **k),
    )


@mutation("fork-without-statistics", "a fork of a prompt begins with empty statistics", "sequence-forks/uncommitted/pnmix")
def _():
    def fork(old):
        def bare(self, name, to):
            lengths = old(self, name, to)
            self.sequences[to] = self.sequences[to].copy()
            self.sequences[to].stats = self._new_sequence().stats
            return lengths

        return bare

    method(cache.Cache, "fork", fork)


@mutation(
    "statistics-truncated",
    "truncation before the commit takes tokens out of the statistics",
    "sequence-truncation/uncommitted/pnmix",
)
def _():
    def truncate(old):
        def recount(self, name, length):
            lengths = old(self, name, length)
            seq = self.sequences[name]
            if not seq.committed:
                rows = sequence.join_rows(seq.sinks, seq.tail)
                queries = {place: stats.query_pairs for place, stats in seq.stats.items()}
                fresh = self._with_tokens(self._new_sequence().stats, rows, None)
                seq.stats = {place: type(s)(**s.__dict__ | {"query_pairs": queries[place]}) for place, s in fresh.items()}
            return lengths

        return recount

    method(cache.Cache, "truncate", truncate)


@mutation("policy-not-frozen", "the mask is chosen again at every later commit", "sequence-turns/others/pnmix-range")
def _():
    def later(old):
        def refreeze(self, seq, k, v, q, scores, final):
            if q is not None and not self.scheme.scored:
                seq.committed = False
                self._add(seq, k, v, q, scores)
                self.scheme.freeze(seq, {})
                seq.committed, seq.staging = True, not final
                self.scheme.pack_due(seq)
            else:
                old(self, seq, k, v, q, scores, final)

        return refreeze

    method(cache.Cache, "_later_commit", later)


@mutation("cache-policy-of-sequence", "Block-GTQ chooses widths for every sequence", "sequence-forks/cache-policy/blockgtq-fast")
def _():
    method(schemes.PlainScheme, "freeze", lambda old: lambda self, seq, shared: old(self, seq, {}))


@mutation("mean-over-sinks", "the mean of centred keys includes the sinks", "sequence-packing/commit/centred-T14")
def _():
    def freeze(old):
        def with_sinks(self, seq, shared):
            tail = seq.tail
            seq.tail = sequence.join_rows(seq.sinks, seq.tail)
            old(self, seq, shared)
            seq.tail = tail

        return with_sinks

    method(schemes.PlainScheme, "freeze", freeze)


@mutation(
    "turn-not-ended", "SemKV: a later prompt is packed together with the pending tokens", "sequence-turns/prompts/semkv-at-once"
)
def _():
    def later(self, seq, k, v, q, scores, final):
        self._add(seq, k, v, q, scores)
        seq.staging = not final
        if final:
            (self.scheme.pack_prompt if self.scheme.scored else self.scheme.pack_due)(seq)

    method(cache.Cache, "_later_commit", lambda old: later)


@mutation("blocks-inside-a-prompt", "SemKV: chunks of a prompt form blocks of B", "sequence-turns/prompts/semkv-chunks")
def _():
    def later(old):
        def eager(self, seq, k, v, q, scores, final):
            old(self, seq, k, v, q, scores, final)
            if self.scheme.scored:
                self.scheme.pack_due(seq)

        return eager

    method(cache.Cache, "_later_commit", later)


@mutation("block-as-prompt", "SemKV: generated blocks take floor(r * B)", "sequence-turns/blocks/semkv-rest-7")
def _():
    function("policies.semkv", "block_flags", lambda old: schemes.prompt_flags)


@mutation("high-before-low", "SemKV writes the high class first", "sequence-turns/blocks/semkv-rest-0")
def _():
    def wire(self, place):
        parts = [run.wire(place) for run in (self.high, self.low) if run.valid]
        return np.packbits(self.flags, bitorder="little").tobytes() + b"".join(parts)

    method(storage.ClassRun, "wire", lambda old: wire)


@mutation("scores-outlive-tokens", "SemKV: scores of removed tokens stay pending", "sequence-turns/truncation/semkv-pending")
def _():
    def truncate(old):
        def kept(self, length):
            scores = self.scores
            old(self, length)
            self.scores = (
                np.concatenate([scores[len(self.scores) - len(scores) :][::-1], self.scores])[: len(self.scores)]
                if len(scores) > len(self.scores)
                else self.scores
            )

        return kept

    method(sequence.Sequence, "truncate", truncate)


@mutation("turn-after-removal", "a removed sequence comes back empty when it is named again", "sequence-refusals/stale/rows")
def _():
    method(cache.Cache, "remove", lambda old: lambda self, name: (old(self, name), self.removed.discard(name))[0])


@mutation("end-turn-before-commit", "end_turn before the commit is accepted", "sequence-refusals/state/rows-turn")
def _():
    def end_turn(old):
        def lenient(self, name):
            try:
                return old(self, name)
            except KvqError as refusal:
                if "before the commit" not in str(refusal):
                    raise
                return self.sequence(name).lengths

        return lenient

    method(cache.Cache, "end_turn", end_turn)


@mutation("refused-step-stays", "the tokens of a refused step stay in the sequence", "sequence-turns/scores/semkv-refused")
def _():
    def append(old):
        def leaky(self, name, k=None, v=None, q=None, scores=None):
            try:
                return old(self, name, k, v, q, scores)
            except KvqError:
                count = np.shape(k)[2]
                old(self, name, k, v, q, np.zeros(count, np.float32))
                raise

        return leaky

    method(cache.Cache, "append", append)


@mutation("truncate-beyond-end", "truncating to more than the length is a no-op", "sequence-refusals/ranges/rows")
def _():
    method(
        cache.Cache, "truncate", lambda old: lambda self, name, length: old(self, name, min(length, self.sequence(name).length))
    )


@mutation("width-grows-again", "PM-KVQ chooses the width afresh at every packing", "sequence-options/pmkvq/budgets-1")
def _():
    method(schemes.ShrinkScheme, "widths", lambda old: lambda self, tokens, current: old(self, tokens, (16,) * len(current)))


@mutation("shrink-of-new-tokens-only", "PM-KVQ leaves older tokens at their width", "sequence-options/pmkvq/budgets-2")
def _():
    method(storage.ShrinkingRun, "at_widths", lambda old: lambda self, widths: self)


@mutation("tail-counted", "accounting counts the raw tail as wire bytes", "accounting-presets/lengths/kvq-3")
def _():
    def account(old):
        def with_tail(recipe, geometry, tokens):
            result = old(recipe, geometry, tokens)
            made = schemes.scheme(recipe, geometry)
            tail = max(0, tokens - min(tokens, recipe.sinks)) % made.block
            return result | {"wire_bytes": result["wire_bytes"] + tail * 2 * (geometry.dim_k + geometry.dim_v)}

        return with_tail

    function("account", "account", account)


@mutation("sinks-uncounted", "accounting leaves the sinks out", "accounting-presets/paper/kvq-2")
def _():
    def account(old):
        def without_sinks(recipe, geometry, tokens):
            return old(type(recipe)(**recipe.__dict__ | {"sinks": 0}), geometry, max(0, tokens - recipe.sinks))

        return without_sinks

    function("account", "account", account)


@mutation("snapshot-without-policy", "a loaded sequence has lost its tail", "snapshots/save-load/rows")
def _():
    def restore(old):
        def lossy(self, state):
            old(self, state)
            for name, seq in self.sequences.items():
                copy = seq.copy()
                copy.tail = sequence.slice_rows(copy.tail, 0, 0)
                self.sequences[name] = copy

        return lossy

    method(cache.Cache, "restore", restore)
