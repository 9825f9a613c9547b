"""The cache model: sequences by name, every operation all or nothing (FORMATS sections 7 and 10)."""

import math

import numpy as np

from .attention import attend
from .errors import KvqError, require
from .fp import entry
from .geometry import Geometry
from .policies.semkv import check_scores
from .recipe import Recipe
from .schemes import Scheme, scheme
from .sequence import Rows, Sequence, no_rows
from .stats import HeadStats


class Cache:
    """One cache of one recipe. An operation works on a copy of the sequence and keeps it only if it succeeds."""

    def __init__(self, recipe: Recipe, geometry: Geometry):
        self.geometry = geometry
        self.recipe = recipe
        self.scheme: Scheme = scheme(recipe, geometry)
        self.sequences: dict[str, Sequence] = {}
        self.removed: set[str] = set()
        self.shared: dict = {}  # codec texts that belong to the cache (Block-GTQ)

    def snapshot(self) -> tuple:
        return dict(self.sequences), set(self.removed), dict(self.shared)

    def restore(self, state: tuple) -> None:
        sequences, removed, shared = state
        self.sequences, self.removed, self.shared = dict(sequences), set(removed), dict(shared)

    # --- sequences -------------------------------------------------------------------------------

    def _new_sequence(self) -> Sequence:
        g = self.geometry
        pairs = g.head("k").pairs() if self.scheme.needs_pairs else None
        empty = HeadStats.empty(g.dim_k, g.dim_v, pairs)
        return Sequence(no_rows(g), no_rows(g), {place: empty for place in g.places()})

    def sequence(self, name: str) -> Sequence:
        """A copy to work on; a sequence begins with the first step that names it."""
        if name in self.removed:
            raise KvqError("STALE", f"{name} was removed")
        if name not in self.sequences:
            self.sequences[name] = self._new_sequence()
        return self.sequences[name].copy()

    # --- tokens ----------------------------------------------------------------------------------

    def commit(self, name: str, k=None, v=None, q=None, scores=None, final: bool = True) -> dict:
        seq = self.sequence(name)
        if seq.committed:
            self._later_commit(seq, k, v, q, scores, final)
        else:
            self._add(seq, k, v, q, scores)
            if final:
                shared = dict(self.shared)
                self.scheme.freeze(seq, shared)
                seq.committed = True
                self.scheme.pack_prompt(seq)
                self.shared = shared
        self.sequences[name] = seq
        return seq.lengths

    def _later_commit(self, seq: Sequence, k, v, q, scores, final: bool) -> None:
        """SemKV: a prompt of its own, behind the end of the turn; other recipes: a plain append."""
        if self.scheme.scored and not seq.staging:
            self.scheme.end_turn(seq)
        self._add(seq, k, v, q, scores)
        seq.staging = not final
        if not self.scheme.scored:
            self.scheme.pack_due(seq)
        elif final:
            self.scheme.pack_prompt(seq)

    def append(self, name: str, k=None, v=None, q=None, scores=None) -> dict:
        """Before the first commit a chunk of the prompt, behind it generated tokens."""
        seq = self.sequence(name)
        self._refuse_open_prompt(seq)
        self._add(seq, k, v, q, scores)
        if seq.committed:
            self.scheme.pack_due(seq)
        self.sequences[name] = seq
        return seq.lengths

    def end_turn(self, name: str) -> dict:
        seq = self.sequence(name)
        if not seq.committed:
            raise KvqError("STATE", "end_turn before the commit")
        self._refuse_open_prompt(seq)
        self.scheme.end_turn(seq)
        self.sequences[name] = seq
        return seq.lengths

    def _refuse_open_prompt(self, seq: Sequence) -> None:
        if seq.staging:
            raise KvqError("STATE", "a later prompt waits for its last chunk")

    def _add(self, seq: Sequence, k, v, q, scores) -> None:
        """Enters the tokens of one call; statistics cover those before the first commit."""
        g = self.geometry
        require((k is None) == (v is None), "k and v come together")
        tokens = 0 if k is None else np.shape(k)[2]
        rows: Rows = no_rows(g)
        if k is not None:
            for tensor, x in (("k", k), ("v", v)):
                require(np.shape(x) == (g.layers, g.kv_heads, tokens, g.dim(tensor)), f"shape of {tensor}: {np.shape(x)}")
        if q is not None:
            require(np.shape(q) == (g.layers, g.q_heads, tokens, g.dim_k), f"shape of q: {np.shape(q)}")
        if self.scheme.scored:
            scores = check_scores([] if scores is None and tokens == 0 else scores, tokens)
        if k is not None:
            entered = {"k": entry(k), "v": entry(v)}
            rows = {place: entered[place[2]][place[0], place[1]] for place in rows}
        queries = None if q is None else entry(q)
        if not seq.committed:
            seq.stats = self._with_tokens(seq.stats, rows, queries)
        seq.add(rows, scores if self.scheme.scored else None, self.recipe.sinks)

    def _with_tokens(self, stats: dict, rows: Rows, queries) -> dict:
        size = self.geometry.group_size
        result = {}
        for (layer, head), old in stats.items():
            new = old.with_keys(rows[layer, head, "k"]).with_values(rows[layer, head, "v"])
            if queries is not None:
                new = new.with_queries(queries[layer, head * size : (head + 1) * size])
            result[layer, head] = new
        return result

    # --- rollback --------------------------------------------------------------------------------

    def truncate(self, name: str, length: int) -> dict:
        seq = self.sequence(name)
        require(0 <= length <= seq.length, f"length {length} of {seq.length}")
        seq.truncate(length)
        self.sequences[name] = seq
        return seq.lengths

    def fork(self, name: str, to: str) -> dict:
        seq = self.sequence(name)
        require(to not in self.sequences, f"{to} exists")
        self.sequences[to] = seq
        self.removed.discard(to)
        return seq.lengths

    def remove(self, name: str) -> None:
        self.sequence(name)
        del self.sequences[name]
        self.removed.add(name)

    # --- reading ---------------------------------------------------------------------------------

    def _check_place(self, layer: int, head: int, heads: int) -> None:
        require(0 <= layer < self.geometry.layers and 0 <= head < heads, f"layer {layer}, head {head}")

    def export_values(self, name: str, layer: int, head: int, tensor: str, first: int = 0, count: int | None = None):
        """float32 [count, dim] of positions first, first + 1, ..."""
        seq = self.sequence(name)
        self._check_place(layer, head, self.geometry.kv_heads)
        require(tensor in ("k", "v"), f"tensor {tensor}")
        count = seq.length - first if count is None else count
        require(first >= 0 and count >= 0 and first + count <= seq.length, f"tokens {first}+{count} of {seq.length}")
        return seq.values((layer, head, tensor))[first : first + count]

    def export_wire(self, name: str, layer: int, head: int, tensor: str, block: int) -> bytes:
        """The wire bytes of one stored block, numbered in the order of packing."""
        seq = self.sequence(name)
        self._check_place(layer, head, self.geometry.kv_heads)
        require(tensor in ("k", "v"), f"tensor {tensor}")
        require(0 <= block < len(seq.runs), f"block {block} of {len(seq.runs)}")
        return seq.runs[block].wire((layer, head, tensor))

    def attend(self, name: str, layer: int, q, scale=None, window=None, softcap=None, sinks=None):
        """q [query heads, n, dim_k] of the newest n tokens -> out [query heads, n, dim_v], lse, float64."""
        seq = self.sequence(name)
        g = self.geometry
        self._check_place(layer, 0, g.kv_heads)
        require(np.ndim(q) == 3 and np.shape(q)[::2] == (g.q_heads, g.dim_k), f"shape of q: {np.shape(q)}")
        require(seq.length == 0 or np.shape(q)[1] <= seq.length, "more queries than tokens")
        require(sinks is None or np.shape(sinks) == (g.q_heads,), "one learned sink per query head")
        require((window or 0) >= 0 and (softcap or 0) >= 0, "window and softcap are not negative")
        q = entry(q)
        scale = 1 / math.sqrt(g.dim_k) if scale is None else scale
        out, lse = [], []
        for head in range(g.q_heads):
            kv = head // g.group_size
            k, v = (seq.values((layer, kv, tensor)) for tensor in ("k", "v"))
            sink = None if sinks is None else sinks[head]
            head_out, head_lse = attend(q[head], k, v, scale, window, softcap, sink)
            out.append(head_out)
            lse.append(head_lse)
        return np.array(out), np.array(lse)
