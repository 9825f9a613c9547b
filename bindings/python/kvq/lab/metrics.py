"""How far one next-token distribution is from another, over a text.

Every figure is a mean over tokens; its standard error comes from means over runs of 64 tokens, because neighbouring
tokens are correlated.
"""

from dataclasses import dataclass

import numpy as np

RUN = 64
FIELDS = ("kl", "same", "excess", "nll")


@dataclass
class Scores:
    """Per scored token: one entry for every token that was fed."""

    kl: np.ndarray  # KL(reference || this), nats
    same: np.ndarray  # bool: the most likely next token is the reference's
    excess: np.ndarray  # NLL of the token that really came, minus the reference's, nats
    nll: np.ndarray  # NLL of the token that really came, nats

    @staticmethod
    def join(parts):
        """One after the other."""
        return Scores(*(np.concatenate([getattr(p, name) for p in parts]) for name in FIELDS))

    @staticmethod
    def columns(parts):
        """From a list of scores of the same m streams, one part a token: m Scores, one a stream."""
        stacked = [np.stack([getattr(p, name) for p in parts]) for name in FIELDS]
        return [Scores(*(column[:, i] for column in stacked)) for i in range(len(parts[0].kl))]


def log_softmax(x):
    """Natural logarithm of softmax over the last axis."""
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def compare(logits, reference, targets):
    """Scores of logits [n][vocab] against reference logits [n or 1][vocab]; targets [n]: the tokens that really came."""
    p = log_softmax(logits)
    r = np.broadcast_to(log_softmax(reference), p.shape)
    rows = np.arange(len(p))
    nll = -p[rows, targets]
    return Scores(
        kl=(np.exp(r) * (r - p)).sum(axis=-1), same=p.argmax(axis=-1) == r.argmax(axis=-1), excess=nll + r[rows, targets], nll=nll
    )


def mean_and_error(x):
    """Mean of x [n] and its standard error from runs of RUN values (nan below two runs)."""
    x = np.asarray(x, np.float64)
    runs = x[: len(x) // RUN * RUN].reshape(-1, RUN).mean(axis=1)
    error = runs.std(ddof=1) / np.sqrt(len(runs)) if len(runs) > 1 else np.nan
    return float(x.mean()), float(error)


def summarize(scores):
    """KL, perplexity ratio (each with its standard error), perplexity, and agreement of the top token (0 to 1)."""
    kl, kl_error = mean_and_error(scores.kl)
    excess, excess_error = mean_and_error(scores.excess)
    ratio = float(np.exp(excess))
    return dict(
        kl=kl,
        kl_error=kl_error,
        ppl=float(np.exp(scores.nll.mean(dtype=np.float64))),
        ppl_ratio=ratio,
        ppl_ratio_error=ratio * excess_error,
        top1=float(scores.same.mean()),
        tokens=len(scores.kl),
    )
