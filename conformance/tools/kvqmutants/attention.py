"""Faults of attention (FORMATS section 9)."""

import numpy as np

from kvqref import attention, cache

from .patch import function, method, mutation


@mutation("causal-off-by-one", "a query sees the token behind its own", "attention-options/causal/raw-5-of-20")
def _():
    def visible(old):
        def ahead(queries, tokens, window):
            seen = old(queries, tokens, window)
            return seen | np.roll(seen, 1, axis=1)

        return ahead

    function("attention", "visible", visible)


@mutation("not-causal", "every query sees every token", "attention-options/causal/rows-9-of-9")
def _():
    function("attention", "visible", lambda old: lambda queries, tokens, window: np.ones((queries, tokens), bool))


@mutation("window-without-own", "a window of w sees w tokens before the query's own", "attention-options/window/raw-3")
def _():
    function("attention", "visible", lambda old: lambda queries, tokens, window: old(queries, tokens, window and window + 1))


@mutation("window-of-newest", "all queries of a step share the window of the newest", "attention-options/window/rows-8")
def _():
    def visible(old):
        def shared(queries, tokens, window):
            seen = old(queries, tokens, None)
            return seen & (np.arange(tokens) >= tokens - window)[None] if window else seen

        return shared

    function("attention", "visible", visible)


def _attend(change):
    """Replace the arguments of one head's attention."""

    def make(old):
        def attend(q, k, v, scale, window=None, softcap=None, sink=None):
            return old(**change(dict(q=q, k=k, v=v, scale=scale, window=window, softcap=softcap, sink=sink)))

        return attend

    function("attention", "attend", make)


@mutation("softcap-before-scale", "the cap is applied before the scale", "attention-options/softcap/raw-5.0")
def _():
    def attend(q, k, v, scale, window=None, softcap=None, sink=None):
        logits = np.asarray(q, np.float64) @ np.asarray(k, np.float64).T
        logits = scale * (softcap * np.tanh(logits / softcap) if softcap else logits)
        logits = np.where(attention.visible(len(q), len(k), window), logits, -np.inf)
        top = logits.max(axis=1)
        weights = np.exp(logits - top[:, None])
        return weights @ np.asarray(v, np.float64) / weights.sum(axis=1)[:, None], top + np.log(weights.sum(axis=1))

    function("attention", "attend", lambda old: attend)


@mutation("softcap-ignored", "the soft cap is accepted and ignored", "attention-options/softcap/rows-1.0")
def _():
    _attend(lambda a: a | {"softcap": None})


@mutation("sinks-scaled", "learned sinks are multiplied by the scale", "attention-options/sinks/raw-small")
def _():
    _attend(lambda a: a | {"sink": None if a["sink"] is None else a["sink"] * a["scale"]})


@mutation("sinks-not-in-lse", "LSE leaves the learned sinks out", "attention-options/sinks/raw-large")
def _():
    def make(old):
        def attend(q, k, v, scale, window=None, softcap=None, sink=None):
            return old(q, k, v, scale, window, softcap, sink)[0], old(q, k, v, scale, window, softcap, None)[1]

        return attend

    function("attention", "attend", make)


@mutation("lse-to-base-2", "LSE is a logarithm to base 2", "attention-states/lengths/raw-T7")
def _():
    function("attention", "attend", lambda old: lambda *a, **k: (old(*a, **k)[0], old(*a, **k)[1] / np.log(2)))


@mutation("empty-lse-zero", "the LSE of an empty sequence is 0", "attention-states/empty/raw-new")
def _():
    function("attention", "attend", lambda old: lambda *a, **k: (old(*a, **k)[0], np.nan_to_num(old(*a, **k)[1], neginf=0.0)))


@mutation("heads-interleaved", "query head h reads KV head h mod n", "attention-options/heads/rows-4-on-2")
def _():
    def attend(old):
        def interleaved(self, name, layer, q, *rest):
            g = self.geometry
            order = np.argsort([h % g.kv_heads for h in range(g.q_heads)], kind="stable")
            out, lse = old(self, name, layer, np.asarray(q)[order], *rest)
            back = np.argsort(order)
            return out[back], lse[back]

        return interleaved

    method(cache.Cache, "attend", attend)


@mutation("scale-of-values", "the default scale is 1/sqrt of the size of V", "attention-options/heads/raw-D192-128")
def _():
    method(
        cache.Cache,
        "attend",
        lambda old: (
            lambda self, name, layer, q, scale=None, *rest: old(
                self, name, layer, q, self.geometry.dim_v**-0.5 if scale is None else scale, *rest
            )
        ),
    )


@mutation("query-not-entered", "queries are not rounded to fp16", "attention-options/entry/saturated")
def _():
    def attend(old):
        def direct(self, name, layer, q, scale=None, *rest):
            factor = max(1.0, float(np.abs(np.asarray(q, np.float64)).max(initial=0)) / 60000)
            scale = np.shape(q)[2] ** -0.5 if scale is None else scale
            return old(self, name, layer, np.asarray(q, np.float64) / factor, scale * factor, *rest)

        return direct

    method(cache.Cache, "attend", attend)


@mutation("weights-in-bf16", "softmax weights are rounded to bf16", "attention-states/lengths/raw-T130")
def _():
    def attend(q, k, v, scale, window=None, softcap=None, sink=None):
        out, lse = original(q, k, v, scale, window, softcap, sink)
        if len(k) == 0:
            return out, lse
        logits = scale * (np.asarray(q, np.float64) @ np.asarray(k, np.float64).T)
        weights = np.where(attention.visible(len(q), len(k), window), np.exp(logits - logits.max(axis=1)[:, None]), 0)
        bits = np.float32(weights / weights.sum(axis=1)[:, None]).view(np.uint32)
        weights = np.float64((bits + 0x8000 & 0xFFFF0000).astype(np.uint32).view(np.float32))
        return weights @ np.asarray(v, np.float64), lse

    original = attention.attend
    function("attention", "attend", lambda old: attend)


@mutation("newest-token-unseen", "attention leaves out the newest token", "attention-states/lengths/rows-T9")
def _():
    _attend(
        lambda a: (
            a | {"k": a["k"][: len(a["k"]) - 1], "v": a["v"][: len(a["v"]) - 1], "q": a["q"]} if len(a["k"]) > len(a["q"]) else a
        )
    )
