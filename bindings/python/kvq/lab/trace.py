"""Recorded queries, keys and values of a few layers of a real model, and what a recipe does to attention on them.

The file is an npz of fp16 arrays: q [layers][tokens][q_heads][dim], k and v [layers][tokens][kv_heads][dim], all after
the rotary embedding (adjacent pairs); `layers` [layers] are their indices in the model; the first `prompt` tokens are
committed at once, the others arrive one by one.  `python -m kvq.lab.record` writes it.
"""

import time
from dataclasses import dataclass

import numpy as np

import kvq

from .model import causal_attention
from .places import trace_file


@dataclass
class Trace:
    """One recorded text; arrays as in the file, fp16."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    layers: np.ndarray
    prompt: int

    @property
    def tokens(self):
        """Tokens in all."""
        return self.k.shape[1]

    def geometry(self):
        """Keyword arguments for `kvq.Cache`."""
        return dict(
            n_layers=len(self.k),
            kv_heads=self.k.shape[2],
            q_heads=self.q.shape[2],
            dim_k=self.k.shape[3],
            dim_v=self.v.shape[3],
            layout="adjacent",
        )

    def exact(self):
        """Causal attention of every query, float32 [layers][tokens][q_heads][dim]."""
        rows = (self.q, self.k, self.v)
        return np.stack([causal_attention(*(x.astype(np.float32) for x in layer)) for layer in zip(*rows, strict=True)])


def load(path=None):
    """The trace in `path`, or the one of this project."""
    with np.load(path or trace_file()) as file:
        return Trace(file["q"], file["k"], file["v"], file["layers"], int(file["prompt"]))


def save(trace, path):
    """Write a trace."""
    np.savez_compressed(path, q=trace.q, k=trace.k, v=trace.v, layers=trace.layers, prompt=trace.prompt)


def token_scores(trace):
    """A score per token [tokens] for recipes that rank tokens: the mean norm of its keys."""
    return np.linalg.norm(trace.k.astype(np.float32), axis=-1).mean(axis=(0, 2)).astype(np.float32)


@dataclass
class Replay:
    """Attention over a cache of the tokens behind the prompt."""

    out: np.ndarray  # [layers][tokens - prompt][q_heads][dim]
    seconds: float  # of attention calls, per token and layer
    sequence: object  # the sequence, at its full length


def replay(trace, cache):
    """Commit the trace's prompt, then append and attend its other tokens one at a time."""
    layers = len(trace.k)
    scores = token_scores(trace) if "semkv" in cache.recipe else None
    sequence, prompt = cache.create(), slice(0, trace.prompt)
    for i in range(layers):
        first = scores[prompt] if scores is not None and i == 0 else None
        sequence.prefill(i, trace.k[i, prompt], trace.v[i, prompt], q=trace.q[i, prompt], scores=first)
    sequence.commit()
    out = np.empty((layers, trace.tokens - trace.prompt, *trace.q.shape[2:3], trace.v.shape[3]), np.float32)
    seconds = 0.0
    for t in range(trace.prompt, trace.tokens):
        now = slice(t, t + 1)
        with cache.step([sequence], [1]) as step:
            for i in range(layers):
                step.append(i, trace.k[i, now], trace.v[i, now])
                start = time.perf_counter()
                out[i, t - trace.prompt] = step.attend(i, trace.q[i, now])[0]
                seconds += time.perf_counter() - start
            step.end(scores=scores[now] if scores is not None else None)
    return Replay(out, seconds / (trace.tokens - trace.prompt) / layers, sequence)


def relative_error(out, exact):
    """sum (out - exact)^2 / sum exact^2 over everything, float64."""
    exact = exact.astype(np.float64)
    return float(((out - exact) ** 2).sum() / (exact**2).sum())


def attention_errors(trace, recipe, **options):
    """Error of attention under a recipe against fp16: (relative squared error, seconds per token and layer)."""
    with kvq.Cache(recipe, **trace.geometry(), **options) as cache:
        result = replay(trace, cache)
        return relative_error(result.out, trace.exact()[:, trace.prompt :]), result.seconds
