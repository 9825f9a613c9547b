"""Decoding with `kvq.lab.model` over kvq sequences.

A stream is one text over one cache.  `decode` advances many streams at once, each by the same number of tokens: their
rows share one matrix product per layer, since reading the weights costs far more than the arithmetic, and only the
attention is done stream by stream.
"""

import contextlib
import re
import time
from dataclasses import dataclass, field

import numpy as np

import kvq

from .model import Model

SCORE_LAYERS = 4  # SemKV's indicator looks at what the last 4 layers changed (its Eq. 3)


@dataclass
class Prompt:
    """What an exact pass over a prompt leaves for a cache.  T tokens, L layers."""

    tokens: np.ndarray  # [T]
    k: list  # L arrays [T][kv_heads][dim], fp16
    v: list
    q: list  # L arrays [T][q_heads][dim], fp16
    scores: np.ndarray  # [T] importance of the tokens, for recipes that rank them
    last: np.ndarray  # [T][embed] activations after the last layer

    def head(self, n):
        """The first n tokens of it."""
        k, v, q = ([x[:n] for x in rows] for rows in (self.k, self.v, self.q))
        return Prompt(self.tokens[:n], k, v, q, self.scores[:n], self.last[:n])


def read_prompt(model: Model, tokens) -> Prompt:
    """Run a text exactly and keep what the caches need."""
    k, v, q, hidden = [], [], [], []

    def visit(layer, q_rows, k_rows, v_rows, x):
        k.append(k_rows.astype(np.float16))
        v.append(v_rows.astype(np.float16))
        q.append(q_rows.astype(np.float16))
        if layer >= model.shape.layers - 1 - SCORE_LAYERS:
            hidden.append(x)

    last = model.forward(tokens, visit)
    return Prompt(np.asarray(tokens), k, v, q, kvq.scores_hidden("delta-norm", hidden), last)


@dataclass
class Stream:
    """A committed sequence, and how long its attention took so far."""

    cache: object
    sequence: object
    seconds: float = 0.0  # of kvq calls inside `decode`
    steps: int = 0
    packing: dict = field(init=False)  # "block", "recent": tokens

    def __post_init__(self):
        text = self.cache.recipe
        self.packing = {key: int(value) for key, value in re.findall(r"\b(block|recent)=(\d+)", text)}
        self.ranks_tokens = "semkv" in text

    def fork(self):
        """Another stream that begins with this one's tokens."""
        return Stream(self.cache, self.sequence.fork())

    @property
    def length(self):
        """Tokens so far."""
        return self.sequence.lengths.total

    def room(self):
        """Tokens that one step may add before something is packed.

        A step of that many tokens sees the same cache as that many steps of one token.
        """
        return self.packing["block"] + self.packing.get("recent", 0) - self.sequence.lengths.tail


def commit(model: Model, cache, prompt: Prompt) -> Stream:
    """Hand a prompt to a new sequence of `cache` and pack it."""
    sequence = cache.create()
    stream = Stream(cache, sequence)
    for layer in range(model.shape.layers):
        scores = prompt.scores if stream.ranks_tokens and layer == 0 else None
        sequence.prefill(layer, prompt.k[layer], prompt.v[layer], q=prompt.q[layer], scores=scores)
    sequence.commit()
    return stream


def decode(model: Model, streams, tokens):
    """Advance every stream by n tokens; the last layer's activations [B][n][embed].

    streams: B of them, each over a cache of its own or not; tokens [B][n] ids.
    """
    tokens = np.asarray(tokens)
    count, n = tokens.shape
    s = model.shape
    positions = np.concatenate([stream.length + np.arange(n) for stream in streams])
    x = model.embed(tokens.reshape(-1))
    hidden = []
    attention = np.empty((count, n, s.q_heads, s.dim), np.float32)
    with contextlib.ExitStack() as stack:
        steps = []
        for stream in streams:
            with _timed(stream):
                steps.append(stack.enter_context(stream.cache.step([stream.sequence], [n])))
        for layer in range(s.layers):
            q, k, v = (rows.reshape(count, n, *rows.shape[1:]) for rows in model.project(layer, x, positions))
            for i, (stream, step) in enumerate(zip(streams, steps, strict=True)):
                with _timed(stream):
                    step.append(layer, k[i], v[i])
                    attention[i] = step.attend(layer, q[i])
            x = model.finish(layer, x, attention.reshape(count * n, s.q_heads, s.dim))
            if layer >= s.layers - 1 - SCORE_LAYERS:
                hidden.append(x.reshape(count, n, -1))
        for i, (stream, step) in enumerate(zip(streams, steps, strict=True)):
            scores = kvq.scores_hidden("delta-norm", [h[i] for h in hidden]) if stream.ranks_tokens else None
            with _timed(stream):
                step.end(scores=scores)
            stream.steps += 1
    return x.reshape(count, n, -1)


def generate(model: Model, streams, tokens, count, stop, advance=lambda: None):
    """Greedy continuation of every stream after it has read `tokens` [n]; B lists of up to `count` ids.

    stop: the id that ends an answer; it is not returned.  advance(): called after every token.
    """
    answers = [[] for _ in streams]
    feed = np.repeat(np.asarray(tokens)[None], len(streams), axis=0)
    for _ in range(count):
        choice = model.logits(decode(model, streams, feed)[:, -1]).argmax(axis=1)
        for answer, token in zip(answers, choice, strict=True):
            if stop not in answer:
                answer.append(int(token))
        advance()
        if all(stop in answer for answer in answers):
            break
        feed = choice[:, None]
    return [answer[: answer.index(stop)] if stop in answer else answer for answer in answers]


@contextlib.contextmanager
def _timed(stream):
    start = time.perf_counter()
    yield
    stream.seconds += time.perf_counter() - start
