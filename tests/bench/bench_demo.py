"""What attention takes of the demo's decode steps: SmolLM2-135M-Instruct in NumPy, a context of random keys and values.

    ./dev bench-demo [--tokens 4096] [--recipes ...] [--paths ...] [--json FILE]

One step at a time, all in one thread, round by round over every recipe and code path.  `decode` is the way without attention on
packed pages: every head's keys and values are exported as float32, and NumPy attends.
"""

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

import kvq
from kvq.lab import streams
from kvq.lab.model import Model


class Decoding:
    """A step's interface over exported values, as `streams.decode` uses it."""

    def __init__(self, sequence, step, heads):
        self._sequence, self._step, self._heads = sequence, step, heads

    def append(self, layer, k, v):
        self._step.append(layer, k, v)

    def attend(self, layer, q):
        out = np.empty(q.shape, np.float32)
        group = q.shape[1] // self._heads
        for head in range(self._heads):
            k, v = (self._sequence.values(layer, head, which) for which in "kv")
            rows = slice(head * group, (head + 1) * group)
            logits = q[0, rows] @ k.T * q.shape[2] ** -0.5
            weights = np.exp(logits - logits.max(1, keepdims=True))
            out[0, rows] = weights / weights.sum(1, keepdims=True) @ v
        return out


def make_prompt(model, tokens):
    random = np.random.default_rng(5)
    s = model.shape

    def rows(heads):
        return [random.standard_normal((tokens, heads, s.dim), np.float32).astype(np.float16) for _ in range(s.layers)]

    scores = random.standard_normal(tokens).astype(np.float32)
    return streams.Prompt(np.zeros(tokens, int), rows(s.kv_heads), rows(s.kv_heads), rows(s.q_heads), scores, None)


def one_step(model, stream, path):
    """Seconds of a decode step, and of attention in it; the cache forgets the token."""
    cache, s = stream.cache, model.shape
    start, attention = time.perf_counter(), 0.0
    x = model.embed(np.zeros(1, int))
    with cache.step([stream.sequence], [1]) as step:
        way = Decoding(stream.sequence, step, s.kv_heads) if path == "decode" else step
        for layer in range(s.layers):
            q, k, v = model.project(layer, x, np.array([stream.length]))
            before = time.perf_counter()
            way.append(layer, k, v)
            out = way.attend(layer, q)
            attention += time.perf_counter() - before
            x = model.finish(layer, x, out)
        model.logits(x)
        step.abort()
    return time.perf_counter() - start, attention


def parse():
    parser = argparse.ArgumentParser(
        prog="./dev bench-demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--recipes", type=lambda text: text.split(","), default=["kvq-3", "tq-3", "semkv", "fp16"])
    parser.add_argument(
        "--paths", type=lambda text: text.split(","), default=["decode", *reversed(kvq.backends()[0].paths.split())]
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="write the results to this file")
    return parser.parse_args()


def main():
    options, model = parse(), Model()
    prompt = make_prompt(model, options.tokens)
    report = {
        "command": " ".join(["./dev bench-demo", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "revision": os.environ.get("KVQ_REVISION", ""),
        "results": [],
    }
    for recipe in options.recipes:
        lines = {}
        for path in options.paths:
            cache = kvq.Cache(recipe, path=None if path == "decode" else path, **model.shape.geometry())
            lines[path] = streams.commit(model, cache, prompt)
        times = {path: [one_step(model, line, path) for _ in range(1)] for path, line in lines.items()}
        for _ in range(options.rounds):
            for path, line in lines.items():
                times[path].append(one_step(model, line, path))
        for path, pairs in times.items():
            step, attention = (statistics.median(column) * 1e3 for column in zip(*pairs[1:], strict=True))
            row = {"recipe": recipe, "path": path, "tokens": options.tokens, "step_ms": step, "attention_ms": attention}
            report["results"].append(row)
            print(
                f"{recipe:8s} {path:9s} step {step:8.2f} ms, attention {attention:8.2f} ms, {attention / step:6.1%}", flush=True
            )
        for line in lines.values():
            line.cache.close()
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
