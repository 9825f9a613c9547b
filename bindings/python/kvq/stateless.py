"""Calls that need no cache: recipes, accounting, codecs, policies, token scores."""

from collections import namedtuple

import numpy as np

from . import capi
from ._arrays import LAYOUTS, TENSORS, choice, recipe_data, rows, sized, text, vector
from .geometry import c_layers, layers_of


def _fields(struct):
    """Names of the fields of a C struct that say something."""
    return [n for n, p in vars(struct).items() if isinstance(p, property) and n not in ("thisown", "struct_size", "reserved")]


Account = namedtuple("Account", _fields(capi.kvq_account))
Backend = namedtuple("Backend", _fields(capi.kvq_backend_info))


def presets():
    """Names of all preset recipes."""
    names = []
    while name := capi.kvq_recipe_preset(len(names)):
        names.append(name)
    return names


def recipe(recipe_text, geometry):
    """A recipe in full, as canonical text, for a geometry (a Cache, a dict of kvq.Layer's fields and n_layers, or a list).

    Raises kvq.Error INVALID, naming the key and what is allowed, or UNSUPPORTED.
    """
    layers = layers_of(geometry)
    array = c_layers(layers)  # must live during the call
    return text(capi.kvq_recipe_parse, recipe_text, array.cast(), len(layers))


def account(recipe_text, geometry, tokens, bits=None, scores=None, budgets=None):
    """Exact bytes of one sequence of `tokens` tokens under a recipe, as a namedtuple with the fields of kvq_account.

    bits, scores, budgets: as in kvq.Cache, where the bytes depend on them.  Raises STATE if they are missing, INVALID if they do
    not fit.
    """
    layers = layers_of(geometry)
    array = c_layers(layers)  # must live during the call
    c = capi.kvq_account()
    capi.call_recipe_account(recipe_text, array.cast(), len(layers), tokens, *recipe_data(bits, scores, budgets), c)
    return Account(*(getattr(c, name) for name in Account._fields))


def backends():
    """What this build can run on here: namedtuples with the fields of kvq_backend_info."""
    found = []
    while True:
        c = capi.kvq_backend_info()
        try:
            capi.kvq_backend_query(len(found), c)
        except Exception as error:
            if found and getattr(error, "status", None) == capi.KVQ_E_INVALID:
                return found
            raise
        found.append(Backend(*(getattr(c, name) for name in Backend._fields)))


def codec_encode(codec, x, tensor="k", layout="half", rotary_dim=0, rotary_first=0, mu=None, bf16=False):
    """Wire bytes of a block of tokens under a codec ("lloyd(levels=8)", ...).

    x [tokens, channels]; tensor "k" or "v"; layout and rotary_* as in kvq.Layer; mu: float16 [channels] where the codec centres.
    Raises INVALID, NONFINITE.
    """
    x = rows(x, bf16, "x")
    arguments = _codec(codec, x.shape[2], tensor, layout, rotary_dim, rotary_first, mu)
    return sized(capi.call_codec_encode, *arguments, x, len(x), guess=x.size * 2 + 64)


def codec_decode(codec, wire, tokens, dim, tensor="k", layout="half", rotary_dim=0, rotary_first=0, mu=None):
    """Decode the wire bytes of a block of `tokens` tokens: float32 [tokens, dim].  Raises INVALID, CORRUPT."""
    out = np.empty((tokens, dim), np.float32)
    capi.call_codec_decode(*_codec(codec, dim, tensor, layout, rotary_dim, rotary_first, mu), wire, tokens, out)
    return out


def _codec(codec, dim, tensor, layout, rotary_dim, rotary_first, mu):
    layout = choice(LAYOUTS, layout, "layout")
    mu = vector(mu, np.float16, dim, "mu")
    return choice(TENSORS, tensor, "tensor"), codec, dim, layout, rotary_dim, rotary_first, mu


def policy_decide(
    policy,
    k=None,
    q=None,
    pair_scores=None,
    token_scores=None,
    dim=None,
    layout="half",
    rotary_dim=0,
    rotary_first=0,
    bf16=False,
):
    """What a policy ("pnmix(r=1/2)", "blockgtq(avg=3)", "semkv-prompt(r=1/4)", ...) decides for one layer and KV head, as bytes.

    k [tokens, dim] and q [tokens, q_heads, dim] give the statistics, or pair_scores (float64) or token_scores (float32) the
    scores; dim is needed where k is not given.  The result is a mask or flags (1 bit per unit, LSB first), widths (1 byte per
    pair), or a centre (float16 [dim]).  Raises INVALID, STATE, NONFINITE, UNSUPPORTED.
    """
    geometry, k, q = _statistics(k, q, dim, layout, rotary_dim, rotary_first, bf16)
    pair_scores = vector(pair_scores, np.float64, None, "pair_scores")
    token_scores = vector(token_scores, np.float32, None, "token_scores")
    given = pair_scores if token_scores is None else token_scores
    n_scores = 0 if given is None else len(given)
    return sized(capi.call_policy_decide, policy, *geometry, k, q, pair_scores, token_scores, n_scores)


def policy_stats(k=None, q=None, dim=None, layout="half", rotary_dim=0, rotary_first=0, bf16=False):
    """Exact statistics of one layer and KV head, as a dict.

    k1, k2, q1, q2      [dim/2] integers: sums over rotary pairs, times 2^24
    sum, abs, min, max  [dim]: of the channels of K; sum and abs are integers, times 2^24
    nk, nq              how many rows they cover
    """
    geometry, k, q = _statistics(k, q, dim, layout, rotary_dim, rotary_first, bf16)
    dim = geometry[1]
    pairs = np.zeros((dim // 2, 4, 2), np.uint64)
    channels = np.zeros(dim, [("sum", "u8", 2), ("abs", "u8", 2), ("min", "f4"), ("max", "f4")])
    counts = np.zeros(2, np.uint64)
    capi.call_policy_stats(*geometry, k, q, pairs, channels, counts)
    stats = {name: [_wide(pair[i]) for pair in pairs] for i, name in enumerate(("k1", "k2", "q1", "q2"))}
    stats["sum"] = [_wide(s, signed=True) for s in channels["sum"]]
    stats["abs"] = [_wide(s) for s in channels["abs"]]
    stats["min"], stats["max"] = channels["min"], channels["max"]
    stats["nk"], stats["nq"] = map(int, counts)
    return stats


def _wide(words, signed=False):
    """A 128-bit number, low word first."""
    value = int(words[0]) | int(words[1]) << 64
    return value - (1 << 128) if signed and value >> 127 else value


def _statistics(k, q, dim, layout, rotary_dim, rotary_first, bf16):
    """The arguments q_heads ... n_tokens, and K and Q as tensors."""
    k = None if k is None else rows(k, bf16, "k")
    if q is not None:
        q = np.asarray(q)
        q = rows(q, bf16, "q", heads=q.shape[1] if q.ndim == 3 else 1)
    some = k if k is not None else q
    if some is not None:
        dim = some.shape[2]
    elif dim is None:
        raise ValueError("give dim, or k or q")
    if k is not None and q is not None and (len(k) != len(q) or q.shape[2] != dim):
        raise ValueError(f"k has shape {k.shape} and q {q.shape}: tokens and channels must agree")
    q_heads = 1 if q is None else q.shape[1]
    n_tokens = 0 if some is None else len(some)
    return (q_heads, dim, choice(LAYOUTS, layout, "layout"), rotary_dim, rotary_first, n_tokens), k, q


# ---------------------------------------------------------------------------------------------------- token scores (SemKV)

SCORES = {"delta-norm": 0, "cosine-delta": 1, "norm": 2, "variance": 3}


def scores_hidden(kind, hidden):
    """Scores from hidden states: kind "delta-norm", "cosine-delta", "norm" or "variance".

    hidden: list of [tokens, dim], one per layer, ascending; the delta kinds use all, the others the last.  -> [tokens]
    """
    hidden = [rows(h, False, "hidden") for h in hidden]
    tokens, _, dim = hidden[0].shape if hidden else (0, 1, 1)
    if any(h.shape != (tokens, 1, dim) for h in hidden):
        raise ValueError("every layer of hidden must have the same shape [tokens, dim]")
    scores = np.empty(tokens, np.float32)
    capi.kvq_scores_hidden(choice(SCORES, kind, "kind"), hidden, tokens, dim, scores, None)
    return scores


def scores_norms(layers, bf16=False):
    """key-norm or value-norm: the mean over layers and KV heads of the norms.  layers: list of [tokens, heads, dim].  -> [tokens]"""
    layers = [rows(x, bf16, "layers", heads=np.shape(x)[1]) for x in layers]
    if any(x.shape != layers[0].shape for x in layers):
        raise ValueError("every layer must have the same shape [tokens, heads, dim]")
    tokens, heads, dim = layers[0].shape if layers else (0, 0, 0)
    scores = np.empty(tokens, np.float32)
    capi.kvq_scores_norms(layers, tokens, heads, dim, scores, None)
    return scores


def scores_self_information(logits, targets):
    """-ln p(token | before): logits [tokens, vocab], row i predicting targets[i].  -> [tokens]"""
    logits = np.asarray(logits)
    if logits.ndim != 2:
        raise ValueError(f"logits has shape {logits.shape}, must be [tokens, vocab]")
    targets = vector(targets, np.uint32, len(logits), "targets")
    scores = np.empty(len(logits), np.float32)
    capi.kvq_scores_self_information(rows(logits, False, "logits"), targets, *logits.shape, scores, None)
    return scores


def scores_attention(weights, scores=None):
    """Accumulated attention: scores plus the attention that each key receives; weights [heads, queries, keys].  -> [keys]"""
    weights = np.asarray(weights)
    if weights.ndim != 3:
        raise ValueError(f"weights has shape {weights.shape}, must be [heads, queries, keys]")
    heads, queries, keys = weights.shape
    given = vector(scores, np.float32, keys, "scores")
    total = np.zeros(keys, np.float32) if given is None else given.copy()
    capi.kvq_scores_attention(rows(weights.transpose(1, 0, 2), False, "weights", heads), heads, queries, keys, total, None)
    return total


def scores_random(seed, first, n_tokens):
    """Random scores of tokens first, first + 1, ...: the same for the same seed on every machine.  -> [n_tokens]"""
    scores = np.empty(n_tokens, np.float32)
    capi.kvq_scores_random(seed, first, n_tokens, 0, scores, None)
    return scores
