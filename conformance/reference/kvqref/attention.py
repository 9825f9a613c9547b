"""float64 attention over exported keys and values (FORMATS section 9)."""

import numpy as np


def visible(queries: int, tokens: int, window: int | None) -> np.ndarray:
    """[queries, tokens]: causal among the newest tokens; the newest `window` positions of each query."""
    own = tokens - queries + np.arange(queries)[:, None]
    position = np.arange(tokens)[None]
    seen = position <= own
    return seen if not window else seen & (position > own - window)


def attend(q, k, v, scale: float, window=None, softcap=None, sink=None) -> tuple[np.ndarray, np.ndarray]:
    """One query head: q [n, dim], k and v [tokens, dim] -> out [n, dim_v], lse [n], float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    if len(k) == 0:
        return np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf if sink is None else float(sink))
    logits = scale * (q @ k.T)
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    logits = np.where(visible(len(q), len(k), window), logits, -np.inf)
    top = logits.max(axis=1)
    if sink is not None:
        top = np.maximum(top, sink)
    weights = np.exp(logits - top[:, None])
    total = weights.sum(axis=1) + (0 if sink is None else np.exp(sink - top))
    return weights @ v / total[:, None], top + np.log(total)
