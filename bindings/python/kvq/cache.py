"""A quantized KV cache, its sequences, and the steps of generation."""

from array import array
from collections import namedtuple

import numpy as np

from . import capi
from ._arrays import TENSORS, choice, recipe_data, sized, tensor, text, vector
from .geometry import Layer, c_layers, layers_of

Lengths = namedtuple("Lengths", "total sinks packed tail committed")
Lengths.__doc__ = "Lengths of a sequence in tokens: total = sinks + packed + tail; committed says whether the prompt is packed."

_STATS = [
    name for name, value in vars(capi.kvq_stats).items() if isinstance(value, property) and name not in ("thisown", "struct_size")
]
Stats = namedtuple("Stats", _STATS)
Stats.__doc__ = "Memory and events of a cache: struct kvq_stats of kvq.h."

# Looked up once: these are called once per layer and step.
_append, _attend, _prefill = capi._capi.kvq_append, capi._capi.call_attend, capi._capi.call_prefill
_ALL = 0xFFFFFFFF


class Cache:
    """A cache for the sequences of one model.

    recipe       how numbers are kept: a preset ("kvq-3", "tq-2", ... see kvq.presets()) or recipe text
    n_layers, kv_heads, q_heads, dim_k, dim_v, layout, rotary_dim, rotary_first, window
                 geometry of the layers if all are alike, see kvq.Layer
    layers       or a list of kvq.Layer or of dicts with its fields, one per layer
    n_threads    threads of attention calls; 0 or 1: only the calling thread
    max_bytes, max_tokens, max_sequences
                 limits of memory, of tokens of one sequence, of sequences; 0: none (4096 sequences)
    bf16         uint16 arrays hold bfloat16
    bits         widths of the keys, [layer][kv_head][dim_k] for chanmix; [dim_k/2] for blockgtq and pair-widths, which then decide
                 nothing themselves
    scores       of the keys' pairs, [layer][kv_head][dim_k/2], for blockgtq and pair-widths instead of statistics
    budgets      bytes of the packed tokens of one sequence by layer, for pmkvq
    path         code path of the CPU, one of backends()[0].paths.split(); None: the best, or what the environment variable KVQ_CPU names

    Raises kvq.Error: INVALID, UNSUPPORTED, NOMEM, FULL.  close() or leaving a with block frees everything at once.
    """

    _cache = None

    def __init__(
        self,
        recipe="kvq-3",
        n_layers=1,
        kv_heads=None,
        q_heads=0,
        dim_k=128,
        dim_v=None,
        layout="half",
        rotary_dim=0,
        rotary_first=0,
        window=0,
        n_threads=1,
        max_bytes=0,
        layers=None,
        *,
        max_tokens=0,
        max_sequences=0,
        bf16=False,
        bits=None,
        scores=None,
        budgets=None,
        path=None,
    ):
        if layers is None:
            if kv_heads is None:
                raise ValueError("give kv_heads, or the list layers")
            layers = [Layer(kv_heads, q_heads, dim_k, dim_v or 0, layout, rotary_dim, rotary_first, window)] * n_layers
        self.layers = layers_of(layers)
        self.bf16 = bf16
        c = c_layers(self.layers)  # kept until kvq_create has copied it
        config = capi.kvq_config()
        config.n_layers = config.n_layer_structs = len(self.layers)
        config.layers = c.cast()
        config.recipe = recipe
        config.n_threads = n_threads
        config.max_bytes = max_bytes
        config.max_tokens = max_tokens
        config.max_sequences = max_sequences
        config.path = path
        self._cache = capi.call_create(config, *recipe_data(bits, scores, budgets))

    def close(self):
        """End all sequences and steps and free the memory; may be called twice."""
        if self._cache is not None:
            capi.kvq_destroy(self._cache)
            self._cache = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __del__(self):
        self.close()

    def __repr__(self):
        return f"kvq.Cache({self.recipe!r}, {len(self.layers)} layers)"

    @property
    def recipe(self):
        """The recipe in full, as canonical text."""
        return text(capi.kvq_cache_recipe, self._cache)

    def create(self):
        """A new, empty Sequence.  Raises FULL beyond max_sequences."""
        return Sequence(self, capi.kvq_seq_create(self._cache))

    def step(self, seqs, n_new, query_only=False):
        """Begin a step that adds n_new[i] tokens to seqs[i]; all memory is reserved here, for all sequences or for none.

        Use it as a context manager, or call end() or abort().  query_only: nothing is appended, the queries are those of the
        newest n_new[i] tokens.  Raises STATE, STALE, BUSY, FULL, NOMEM.
        """
        return Step(self, seqs, n_new, query_only)

    def stats(self):
        """Memory and events, as kvq.cache.Stats: bytes_used, bytes_peak, pages, tokens, saturated elements, ..."""
        c = capi.kvq_stats()
        capi.kvq_stats_get(self._cache, c)
        return Stats(*(getattr(c, name) for name in _STATS))

    def calibrate(self, layer, k, v=None, q=None):
        """Add statistics of calibration text, for policies that belong to the cache (Block-GTQ).

        k [tokens, kv_heads, dim_k], v [tokens, kv_heads, dim_v], q [tokens, q_heads, dim_k], K and Q after RoPE.
        """
        k, v, q = self._kvq(layer, len(k), k, v, q)
        capi.call_calibrate(self._cache, layer, len(k), k, v, q)

    def calibrate_finish(self):
        """Freeze the cache's policy from the statistics so far."""
        capi.kvq_calibrate_finish(self._cache)

    def policy(self):
        """The cache's frozen policy, as bytes for set_policy().  Raises STATE before it is frozen."""
        return sized(capi.kvq_policy_get, self._cache, 0)

    def set_policy(self, blob):
        """Freeze the cache's policy from the bytes of policy()."""
        capi.kvq_policy_set(self._cache, 0, blob)

    def _kvq(self, layer, n, k, v, q):
        """K, V and Q (V and Q may be None) of n tokens of a layer, checked."""
        g = self.layers[layer]
        bf16 = self.bf16
        return (
            tensor(k, (n, g.kv_heads, g.dim_k), bf16, "k"),
            None if v is None else tensor(v, (n, g.kv_heads, g.dim_v), bf16, "v"),
            None if q is None else tensor(q, (n, g.q_heads, g.dim_k), bf16, "q"),
        )


class Sequence:
    """The tokens of one text.  It lives until remove() or until its cache is closed."""

    __slots__ = ("cache", "id")

    def __init__(self, cache, id):
        self.cache = cache
        self.id = id

    def __repr__(self):
        return f"kvq.Sequence({self.id:#x})"

    def prefill(self, layer, k, v, q=None, scores=None, final=False):
        """Hand over the next chunk of a prompt for one layer; with final=True the layer's prompt is complete and is packed.

        k       [tokens, kv_heads, dim_k] after RoPE
        v       [tokens, kv_heads, dim_v]
        q       [tokens, q_heads, dim_k] after RoPE, only for statistics; recipes of the kvq-* and pnmix kind need it
        scores  [tokens], SemKV's token scores: once per chunk, with any layer
        Raises INVALID, NONFINITE, STALE, STATE, BUSY, FULL, NOMEM.
        """
        n = len(k)
        k, v, q = self.cache._kvq(layer, n, k, v, q)
        scores = vector(scores, np.float32, n, "scores")
        _prefill(self.cache._cache, self.id, layer, 1 if final else 0, n, k, v, q, scores, None)

    def commit(self, k=None, v=None, q=None, scores=None):
        """The prompt is complete in all layers: freeze the policy and pack.

        With k, v (and q): hand over the whole prompt first, each a list with one array per layer as in prefill().
        """
        for layer in range(0 if k is None else len(k)):
            self.prefill(layer, k[layer], v[layer], None if q is None else q[layer], scores if layer == 0 else None)
        _prefill(self.cache._cache, self.id, _ALL, 1, 0, None, None, None, None, None)

    finish = commit

    def fork(self, keep=None):
        """A new Sequence that begins with the first `keep` tokens of this one (None: all); packed pages are shared."""
        everything = 0xFFFFFFFFFFFFFFFF
        return Sequence(self.cache, capi.kvq_seq_fork(self.cache._cache, self.id, everything if keep is None else keep))

    def truncate(self, n):
        """Forget all tokens from position n on."""
        capi.kvq_seq_truncate(self.cache._cache, self.id, n)

    def remove(self):
        """End the sequence and give its memory back; afterwards its methods raise STALE."""
        capi.kvq_seq_remove(self.cache._cache, self.id)

    def end_turn(self):
        """End of a turn (SemKV): pack the whole tail.  Nothing happens with other recipes."""
        capi.kvq_end_turn(self.cache._cache, self.id)

    @property
    def lengths(self):
        """Lengths(total, sinks, packed, tail, committed) in tokens."""
        c = capi.kvq_lengths()
        capi.kvq_seq_length(self.cache._cache, self.id, c)
        return Lengths(c.total, c.sinks, c.packed, c.tail, bool(c.committed))

    def __len__(self):
        return self.lengths.total

    def values(self, layer, head, which, first=0, count=None):
        """Decoded values of positions [first, first + count), as attention uses them: float32 [count, dim].

        which: "k" or "v"; head: a KV head; count None: to the end.
        """
        which = choice(TENSORS, which, "which")
        if count is None:
            count = len(self) - first
        g = self.cache.layers[layer]
        out = np.empty((count, (g.dim_k, g.dim_v)[which]), np.float32)
        capi.kvq_export_values(self.cache._cache, self.id, layer, head, which, first, count, out)
        return out

    def wire(self, layer, head, which, block, with_tokens=False):
        """Wire bytes of packed block number `block` (0 is the first that was packed).

        with_tokens=True: (bytes, valid tokens of the block).  Raises INVALID if there is no such block.
        """
        buffer = bytearray(4096)
        arguments = self.cache._cache, self.id, layer, head, choice(TENSORS, which, "which"), block
        needed, tokens = capi.kvq_export_wire(*arguments, buffer)
        if needed > len(buffer):
            buffer = bytearray(needed)
            needed, tokens = capi.kvq_export_wire(*arguments, buffer)
        data = bytes(memoryview(buffer)[:needed])
        return (data, tokens) if with_tokens else data

    def policy(self):
        """The frozen policy of this sequence, as bytes for set_policy()."""
        return sized(capi.kvq_policy_get, self.cache._cache, self.id)

    def set_policy(self, blob):
        """Freeze the policy of this sequence, that has no tokens yet, from the bytes of policy()."""
        capi.kvq_policy_set(self.cache._cache, self.id, blob)


class Step:
    """A step of generation: per layer append() and then attend(), at last end().  Leaving a with block without end() aborts it.

    n_tokens: N, the sum of the new tokens; every array has that many rows, sequence 0's first, then sequence 1's, ...
    """

    __slots__ = ("cache", "id", "n_tokens", "_n_new")

    def __init__(self, cache, seqs, n_new, query_only):
        self.cache = cache
        self._n_new = array("I", n_new)
        ids = array("Q", [seq.id for seq in seqs])
        if len(ids) != len(self._n_new):
            raise ValueError(f"{len(ids)} sequences and {len(self._n_new)} token counts")
        self.n_tokens = sum(self._n_new)
        self.id = 0
        self.id = capi.kvq_step_begin(cache._cache, ids, self._n_new, len(ids), 1 if query_only else 0)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.id:
            self.abort()

    def append(self, layer, k, v, q=None):
        """Store the step's tokens in one layer, once per layer.

        k [N, kv_heads, dim_k] after RoPE, v [N, kv_heads, dim_v]; q [N, q_heads, dim_k] only for the statistics of a prompt
        that is not committed yet.  Raises INVALID, NONFINITE, STALE, STATE, BUSY.
        """
        k, v, q = self.cache._kvq(layer, self.n_tokens, k, v, q)
        _append(self.cache._cache, self.id, layer, k, v, q, None)

    def attend(self, layer, q, scale=0, softcap=0, window=None, sinks=None, lse=False, out=None):
        """Attention of the step's tokens in one layer, over everything stored and causally over the step's own tokens.

        q        [N, q_heads, dim_k] after RoPE
        scale    of the logits; 0: 1/sqrt(dim_k)
        softcap  0: none; else logits become softcap * tanh(logit / softcap), after scale
        window   None: the layer's own; 0: all; else the newest `window` positions, the query's own included
        sinks    learned sink logits [q_heads], or None
        out      None, or a float32 or float16 array [N, q_heads, dim_v] to write to
        Returns float32 [N, q_heads, dim_v]; with lse=True (that, lse float32 [N, q_heads]): natural logarithms of the sums of exp.
        Raises INVALID, NONFINITE, STALE, STATE, BUSY.
        """
        cache, n = self.cache, self.n_tokens
        g = cache.layers[layer]
        q = tensor(q, (n, g.q_heads, g.dim_k), cache.bf16, "q")
        shape = (n, g.q_heads, g.dim_v)
        if out is None:
            out = np.empty(shape, np.float32)
        elif out.shape != shape:
            raise ValueError(f"out has shape {out.shape}, must be {shape}: [tokens, heads, channels]")
        sums = np.empty(shape[:2], np.float32) if lse else None
        sinks = vector(sinks, np.float32, g.q_heads, "sinks")
        window = 0 if window is None else window or _ALL
        _attend(cache._cache, self.id, layer, q, out, sums, window, scale, softcap, sinks, None)
        return (out, sums) if lse else out

    def end(self, keep=None, scores=None):
        """End the step: the first keep[i] new tokens of sequence i stay (None: all); then what became due is packed.

        scores: of the kept tokens, sequence by sequence; SemKV needs them.  Raises INVALID, STALE, STATE, BUSY, NOMEM, FULL.
        """
        kept = self._n_new
        if keep is not None:
            kept = array("I", keep)
            if len(kept) != len(self._n_new):
                raise ValueError(f"{len(kept)} entries of keep for {len(self._n_new)} sequences")
        scores = vector(scores, np.float32, sum(kept), "scores")
        capi.kvq_step_end(self.cache._cache, self.id, None if keep is None else kept, scores)
        self.id = 0

    def abort(self):
        """End the step and forget its tokens."""
        capi.kvq_step_abort(self.cache._cache, self.id)
        self.id = 0
