"""One recipe on one window, as a streaming system would hold its cache."""

from dataclasses import dataclass

import numpy as np

from kvq.lab import accounting, metrics, streams, text

PROMPT = 1024  # tokens that are committed at once; the rest of a window is fed behind them
CHUNK = 64  # most tokens of a step, and rows of logits at once


@dataclass
class Window:
    """One window after an exact pass."""

    ids: np.ndarray  # [WINDOW + 1]
    prompt: streams.Prompt
    exact: np.ndarray  # [WINDOW - PROMPT][embed] last activations of the fed tokens

    @staticmethod
    def read(model, ids):
        """Run the window exactly."""
        whole = streams.read_prompt(model, ids[: text.WINDOW])
        return Window(ids, whole.head(PROMPT), whole.last[PROMPT:])


def calibrate(cache, texts):
    """Freeze the cache's policy from exact passes over texts, a list of Prompt."""
    for whole in texts:
        for layer, (k, v, q) in enumerate(zip(whole.k, whole.v, whole.q, strict=True)):
            cache.calibrate(layer, k, v, q)
    cache.calibrate_finish()


def measure(model, window, cache, length=accounting.LONG, **data):
    """(Scores of the window's fed tokens, Cost of the whole window) over a cache; length, data: as for `accounting.cost`.

    A step never goes beyond the token after which something is packed, so every token sees what it would see if tokens came
    one at a time.
    """
    stream = streams.commit(model, cache, window.prompt)
    parts, first = [], PROMPT
    while first < text.WINDOW:
        last = first + min(stream.room(), CHUNK, text.WINDOW - first)
        x = streams.decode(model, [stream], window.ids[None, first:last])[0]
        exact = window.exact[first - PROMPT : last - PROMPT]
        parts.append(metrics.compare(model.logits(x), model.logits(exact), window.ids[first + 1 : last + 1]))
        first = last
    return metrics.Scores.join(parts), accounting.cost(cache, text.WINDOW, length, **data)
