"""The numbers that two presets need beside their text, from exact passes over the calibration windows.

A profile is a dict of keyword arguments for `kvq.Cache` and `kvq.account`.  texts: list of Prompt.
"""

import numpy as np

import kvq
from kvq.lab import text

FAR = 128  # positions back: attention beyond them counts as retrieval
SINKS = 4  # positions that draw attention whatever they hold
RETRIEVAL_HEADS = "1/10"


def chanmix(texts):
    """ChanMix's widths, uint8 [layer][kv_head][channel]: 4 bits for retrieval heads, else 3, 2 and 1 by the channel's range.

    The retrieval score of a KV head is the attention that its query heads give to far tokens; ChanMix's own profile is not public
    for this model.
    """
    scores = np.mean([[far_attention(q, k) for q, k in zip(t.q, t.k, strict=True)] for t in texts], axis=0)
    dim = texts[0].k[0].shape[2]
    mask = kvq.policy_decide(f"chanmix(r_h={RETRIEVAL_HEADS})", pair_scores=scores.ravel(), dim=dim)
    retrieval = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: scores.size].reshape(scores.shape)
    keys = [np.concatenate(layer) for layer in zip(*(t.k for t in texts), strict=True)]
    ranges = np.array([np.ptp(k.astype(np.float64), axis=0) for k in keys])
    bits = np.full(ranges.shape, 4, np.uint8)
    for at in zip(*np.nonzero(retrieval == 0), strict=True):
        bits[at] = np.frombuffer(kvq.policy_decide("chanmix(share=1/4)", pair_scores=ranges[at], dim=dim), np.uint8)
    return dict(bits=bits)


def far_attention(q, k, stride=16):
    """Mean attention [kv_heads] of every stride-th query to tokens more than FAR back; q, k [tokens][heads][dim]."""
    tokens, kv_heads, dim = k.shape
    places = np.arange(FAR + SINKS, tokens, stride)
    ages = places[:, None] - np.arange(tokens)
    far = (ages > FAR) & (np.arange(tokens) >= SINKS)
    q = q[places].reshape(len(places), kv_heads, -1, dim).astype(np.float32) * dim**-0.5
    logits = np.einsum("nhgd,thd->hgnt", q, k.astype(np.float32), optimize=True)
    logits[..., ages < 0] = -np.inf
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights * far).sum(axis=-1).mean(axis=(1, 2))


def pmkvq(texts):
    """A budget per layer that holds a whole window at 4 bits: 8 bits at the end of the prompt, 4 soon after."""
    _, kv_heads, dim = texts[0].k[0].shape
    row = dim // 2 + 4  # bytes: codes, scale and zero point
    return dict(budgets=[text.WINDOW * kv_heads * 2 * row] * len(texts[0].k))
