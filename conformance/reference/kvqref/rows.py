"""Codebook rows (FORMATS section 2.2): codes and row scalar of rotated rows, and back."""

import numpy as np

from .books import Book
from .fp import F32, c, tree

SCALES = ("plain", "matched", "ls", "unbiased")


def row_codes(x: np.ndarray, y: np.ndarray, book: Book, scale: str, fmt) -> tuple[np.ndarray, np.ndarray]:
    """Rows x [tokens, w] and their rotation y -> codes [tokens, w] and stored scalars h [tokens]."""
    n = np.sqrt(tree(x * x))
    sigma = n * c(x.shape[1])
    codes = np.zeros(y.shape, np.uint8)
    for t in book.thresholds:
        codes += y > (t * sigma)[:, None]
    m = book.levels[codes]
    total = (m * m).sum(axis=1)
    live = (total != 0) & (n != 0)
    h = _scalar(n, sigma, tree(y * m.astype(F32)), total, book.scale, scale)
    return codes, fmt.store(np.where(live, h, F32(0)))


def _scalar(n, sigma, projection, total, a, scale: str) -> np.ndarray:
    """h before it is stored; meaningless where n or the sum of squared levels is 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if scale == "plain":
            return sigma
        if scale == "matched":
            return n / (a * np.sqrt(total.astype(F32)))
        if scale == "ls":
            return projection / (a * total.astype(F32))
        return np.where(projection > 0, (n * n) / (a * projection), F32(0))


def row_values(codes: np.ndarray, h: np.ndarray, book: Book) -> np.ndarray:
    """yhat = (h * a) * m, still rotated."""
    return (h * book.scale)[:, None] * book.levels[codes].astype(F32)
