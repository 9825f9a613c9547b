"""Selection of the largest, ties to the lower index (FORMATS section 6)."""

import numpy as np


def largest(values, count: int) -> np.ndarray:
    """Booleans that mark the `count` largest values; values are compared as Python numbers."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    marked = np.zeros(len(values), bool)
    marked[order[:count]] = True
    return marked
