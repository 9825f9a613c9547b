"""Decode attention on the CPU, libkvq against ggml's flash attention, side by side in one process.

    ./dev bench-peers --lib DIR [--recipes ...] [--tokens ...] [--json FILE]
    ./dev bench-peers --plot FILE.json PICTURE

Every recipe holds the same prompt on every code path of the CPU at once.  Each round runs ggml's f16 and then every one of them,
below 40K tokens three times in a row, of which the best counts; ratios are taken within a round and their median is reported, so that a
machine whose speed changes harms nobody.  One thread is timed by its processor time, several by the wall.  DIR holds libggml (README.md);
without it only libkvq is measured.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import ggml
import numpy as np

import kvq

RECIPES = "tq-3,tq-4,tq-2,pnmix,semkv,kivi-2,kvq-2,kvq-2.5,kvq-3,blockgtq-k3v3-fast,fp16"
SHORT, CALLS = 40000, 3  # contexts of fewer tokens run so often in a row, since others would have pushed them out of the caches
BLOCK = 2048  # tokens of random numbers; longer contexts repeat them, shifted by a channel


def read_rate(size):
    """Bytes per second at which one core reads an array of this size: the best of some sums."""
    x = np.ones(size // 8, np.uint64)
    best = 0.0
    for _ in range(max(3, (1 << 29) // size)):
        start = time.thread_time_ns()
        x.max()
        best = max(best, x.nbytes / (time.thread_time_ns() - start) * 1e9)
    return best


class Prompt:
    """Keys, values [kv_heads, tokens, dim] and one query [q_heads, dim]."""

    def __init__(self, tokens, kv_heads, q_heads, dim):
        random = np.random.default_rng(7)
        block = random.standard_normal((2, kv_heads, min(tokens, BLOCK), dim), np.float32).astype(np.float16)
        parts = [np.roll(block, shift, axis=3) for shift in range(-(-tokens // block.shape[2]))]
        self.k, self.v = (np.concatenate([part[i] for part in parts], axis=1)[:, :tokens] for i in (0, 1))
        self.q = random.standard_normal((q_heads, dim), np.float32)
        self.statistics = random.standard_normal((tokens, 1, dim), np.float32).astype(np.float16)
        self.scores = random.standard_normal(tokens).astype(np.float32)

    def exact(self, k, v, group):
        """Attention of the first KV head's queries over its k, v [tokens, dim], in float64."""
        q = self.q[:group].astype(np.float16).astype(np.float64)
        logits = q @ k.T.astype(np.float64) * k.shape[1] ** -0.5
        weights = np.exp(logits - logits.max(1, keepdims=True))
        return weights / weights.sum(1, keepdims=True) @ v.astype(np.float64)


class Ours:
    """A committed prompt under a recipe at one instruction set, and a step of its newest token's queries."""

    def __init__(self, recipe, level, prompt, threads):
        kv_heads, tokens, dim = prompt.k.shape
        q_heads = len(prompt.q)
        self.level, self.group, self.prompt = level, q_heads // kv_heads, prompt
        self.cache = kvq.Cache(recipe, kv_heads=kv_heads, q_heads=q_heads, dim_k=dim, n_threads=threads, path=level)
        self.sequence = self.cache.create()
        q = np.broadcast_to(prompt.statistics, (tokens, q_heads, dim))  # memory for one head; chunks of it are copied
        for first in range(0, tokens, BLOCK):
            part = slice(first, first + BLOCK)
            k, v = (np.ascontiguousarray(x[:, part].transpose(1, 0, 2)) for x in (prompt.k, prompt.v))
            self.sequence.prefill(0, k, v, q[part], prompt.scores[part])
        self.sequence.commit()
        stats = self.cache.stats()
        self.bytes = (stats.page_bytes_raw + stats.page_bytes_packed) / (tokens * kv_heads)
        self.step = self.cache.step([self.sequence], [1], query_only=True)
        self._q, self._out = prompt.q[None], np.empty((1, q_heads, dim), np.float32)

    def run(self):
        return self.step.attend(0, self._q, out=self._out)[0]

    def error(self):
        """Relative to float64 attention over the exported values of the first KV head."""
        k, v = (self.sequence.values(0, 0, which) for which in "kv")
        expected = self.prompt.exact(k, v, self.group)
        return float(np.linalg.norm(self.run()[: self.group] - expected) / np.linalg.norm(expected))

    def close(self):
        self.step.abort()
        self.cache.close()


def timed(subject, clock):
    start = clock()
    subject.run()
    return clock() - start


def timed_rounds(subjects, rounds, threads, tokens):
    """Nanoseconds [subject][round] of subjects that run in turn, after two rounds of warming up."""
    clock = time.thread_time_ns if threads == 1 else time.perf_counter_ns
    calls = CALLS if tokens < SHORT else 1
    times = [[] for _ in subjects]
    for _ in range(rounds + 2):
        for subject, mine in zip(subjects, times):
            mine.append(min(timed(subject, clock) for _ in range(calls)))
    return [mine[2:] for mine in times]


def row(name, level, subject, times, base, shape, threads, error):
    tokens, kv_heads, q_heads, dim = shape
    rows = tokens * kv_heads
    ns = statistics.median(times) / rows
    return {
        "recipe": name,
        "level": level,
        "tokens": tokens,
        "kv_heads": kv_heads,
        "q_heads": q_heads,
        "dim": dim,
        "threads": threads,
        "ns_per_token_head": ns,
        "ns_best": min(times) / rows,
        "bytes_per_token_head": subject.bytes,
        "bytes_per_second": subject.bytes / ns * 1e9,
        "times_ggml_f16": statistics.median(b / t for b, t in zip(base, times)) if base else None,
        "error": error,
    }


def show(result):
    ratio = f"{result['times_ggml_f16']:6.2f}x" if result["times_ggml_f16"] else " " * 7
    print(
        f"{result['tokens']:7d} {result['q_heads']:3d}/{result['kv_heads']} {result['dim']:4d} {result['threads']} "
        f"{result['recipe']:20s} {result['level']:9s} {result['ns_per_token_head']:8.2f} ns {result['bytes_per_token_head']:7.1f} B "
        f"{result['bytes_per_second'] * 1e-9:6.2f} GB/s {ratio} {'' if result['error'] is None else format(result['error'], '.1e')}",
        flush=True,
    )


def measure(options, library, levels, tokens, group, dim, threads):
    """All rows of one shape."""
    kv_heads, q_heads = options.kv_heads, options.kv_heads * group
    shape = tokens, kv_heads, q_heads, dim
    prompt = Prompt(tokens, kv_heads, q_heads, dim)
    results = []

    def record(name, level, subject, times, base, error=None):
        results.append(row(name, level, subject, times, base, shape, threads, error))
        show(results[-1])

    peers = []
    if library:
        peers = [ggml.Attention(library, kind, prompt.q, prompt.k, prompt.v, threads) for kind in options.types]
        times = timed_rounds(peers, options.rounds, threads, tokens)
        for kind, peer, mine in zip(options.types, peers, times):
            record(f"ggml {kind}", "", peer, mine, times[0])
        for peer in peers[1:]:
            peer.close()
    for recipe in options.recipes:
        ours = [Ours(recipe, level, prompt, threads) for level in levels]
        times = timed_rounds(peers[:1] + ours, options.rounds, threads, tokens)
        base = times.pop(0) if peers else None
        for subject, mine in zip(ours, times):
            record(recipe, subject.level, subject, mine, base, subject.error())
            subject.close()
    for peer in peers[:1]:
        peer.close()
    return results


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def numbers(text):
    return [int(part) for part in text.split(",")]


def parse():
    parser = argparse.ArgumentParser(
        prog="./dev bench-peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lib", help="folder with libggml-base.so and libggml-cpu.so")
    parser.add_argument("--recipes", type=lambda text: text.split(","), default=RECIPES.split(","))
    parser.add_argument("--types", type=lambda text: text.split(","), default=["f16", "q8_0", "q4_0"], help="of ggml; f16 first")
    parser.add_argument("--levels", type=lambda text: text.split(","), help="code paths; all that run here")
    parser.add_argument("--tokens", type=numbers, default=[8192, 32768, 131072])
    parser.add_argument("--group", type=numbers, default=[1, 4, 8], help="query heads of a KV head")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=numbers, default=[64, 128, 256])
    parser.add_argument("--threads", type=numbers, default=[1])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--plot", nargs=2, metavar=("JSON", "PICTURE"), help="draw the results of a file; measures nothing")
    return parser.parse_args()


def main():
    options = parse()
    if options.plot:
        from plot_peers import draw  # matplotlib takes a while to load

        return draw(*options.plot)
    library = ggml.Library(options.lib) if options.lib else None
    levels = options.levels or kvq.backends()[0].paths.split()
    report = {
        "command": " ".join(["./dev bench-peers", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "revision": os.environ.get("KVQ_REVISION", ""),
        "device": processor(),
        "cores": os.cpu_count(),
        "peer": {"name": library.name, "features": library.features} if library else None,
        "read_bytes_per_second": {size: read_rate(size) for size in (1 << 20, 1 << 25, 1 << 30)},
        "results": [],
    }
    for threads in options.threads:
        for dim in options.dim:
            for group in options.group:
                for tokens in options.tokens:
                    report["results"] += measure(options, library, levels, tokens, group, dim, threads)
                    if options.json:  # after every shape: a long run that ends early has what it measured
                        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
