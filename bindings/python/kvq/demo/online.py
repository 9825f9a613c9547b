"""The demo with the model: quality, bytes, speed and an answer for every recipe."""

import time
from itertools import pairwise
from pathlib import Path

import numpy as np

import kvq
from kvq.lab import accounting, metrics, show, streams, text
from kvq.lab.model import Model, ModelMissing, read_gguf  # noqa: F401  (ModelMissing is for the caller)
from kvq.lab.tokens import Tokens

PROMPT = 1024  # tokens
ANSWER = 28  # tokens at most
QUESTION = "...\n\nSummarize this text in one sentence."


def run(recipes, source, scored, threads, picture):
    """Do everything and print it."""
    start = time.perf_counter()
    show.console.print("Loading SmolLM2-135M-Instruct ...")
    reader = read_gguf()
    model, tokens = Model(reader), Tokens(reader)
    prompt, rest = passage(tokens, source, scored)
    show.console.print(f"Reading {len(prompt)} tokens of the prompt ...")
    read = streams.read_prompt(model, prompt)
    lines = []
    with show.progress("Committing it to every cache", len(recipes)) as advance:
        for recipe in recipes:
            cache = kvq.Cache(recipe, n_threads=threads, **model.shape.geometry())
            lines.append(streams.commit(model, cache, read))
            advance()
    forks = [line.fork() for line in lines]
    scores = compare(model, lines, rest)
    answers = answer(model, forks, tokens)
    rows = [
        Row(recipe, line, metrics.summarize(score), tokens.decode(words))
        for recipe, line, score, words in zip(recipes, lines, scores, answers, strict=True)
    ]
    rows.sort(key=lambda row: -row.cost.bits)
    report(rows, len(prompt), scored, picture)
    show.console.print(f"Picture: {picture}\n{time.perf_counter() - start:.0f} seconds in all.")


def passage(tokens, source, scored):
    """The prompt [PROMPT] (a user's turn that quotes a text) and how the text goes on [scored + 1]."""
    opening = tokens.turn("user")
    need = PROMPT - len(opening) + scored + 1
    if source == "story":
        ids = tokens.encode(text.own_prose())
    elif source == "handbook":
        ids = text.handbook_windows(tokens)[text.HELD_OUT[0]]
    else:
        ids = tokens.encode(Path(source).read_text(encoding="utf-8"))
    if len(ids) < need:
        raise SystemExit(f"the text has {len(ids)} tokens, {need} are needed: take fewer with --tokens")
    cut = PROMPT - len(opening)
    return np.concatenate([opening, ids[:cut]]), ids[cut:need]


def compare(model, lines, rest):
    """Feed the text's own tokens one by one to every stream; Scores against the first stream, for each."""
    parts = []
    with show.progress(f"Reading {len(rest) - 1} more tokens over {len(lines)} caches", len(rest) - 1) as advance:
        for token, target in pairwise(rest):
            logits = model.logits(streams.decode(model, lines, np.full((len(lines), 1), token))[:, 0])
            parts.append(metrics.compare(logits, logits[:1], np.full(len(lines), target)))
            advance()
    return metrics.Scores.columns(parts)


def answer(model, lines, tokens):
    """The token ids of every stream's answer to the question."""
    question = np.concatenate([tokens.encode(QUESTION), tokens.hand_over()])
    with show.progress("Answering a question about it", ANSWER) as advance:
        return streams.generate(model, lines, question, ANSWER, tokens.end_of_turn, advance)


class Row:
    """What the table says about one recipe."""

    def __init__(self, recipe, line, quality, answer):
        self.recipe, self.quality, self.answer = recipe, quality, " ".join(answer.split())
        self.cost = accounting.cost(line.cache, line.length)
        self.milliseconds = 1e3 * line.seconds / line.steps

    def cells(self):
        """Strings for the table, COLUMNS."""
        q, exact = self.quality, self.recipe == "fp16"
        return (
            self.recipe,
            f"{self.cost.bits:.2f}",
            f"{self.cost.bytes / 2**20:.2f}",
            f"{self.cost.fp16_bytes / self.cost.bytes:.1f}x",
            f"{q['ppl']:.2f}",
            "" if exact else f"{q['kl']:.4f}" + (f" ±{q['kl_error']:.4f}" if np.isfinite(q["kl_error"]) else ""),
            "" if exact else f"{100 * q['top1']:.1f} %",
            f"{self.milliseconds:.1f}",
        )


COLUMNS = ("recipe", "bits", "MiB", "ratio", "PPL", "KL", "top-1", "ms")
LEGEND = """\
bits   per element of a long cache, parameters and sinks included     PPL    perplexity of the text that was read
MiB    of this cache at the end, raw tail included                    KL     of next-token predictions from fp16's, nats
ratio  of fp16's bytes to that                                        top-1  how often the likeliest token is fp16's
ms     attention and packing per token, all 30 layers"""


def report(rows, prompt, scored, picture):
    """Print the table and write the picture."""
    from kvq.lab.plot import Point, quality_picture  # matplotlib takes a while to load

    title = f"SmolLM2-135M-Instruct, prompt of {prompt} tokens, {scored} more read one by one"
    show.table(title, COLUMNS, [row.cells() for row in rows], "answer: a summary in one sentence", [row.answer for row in rows])
    show.console.print(LEGEND)
    points = [Point(r.recipe, r.cost.bits, r.quality["kl"], r.quality["kl_error"]) for r in rows if r.recipe != "fp16"]
    quality_picture(points, picture, "KL divergence from fp16, nats per token", title)
