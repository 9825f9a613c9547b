"""What a codec must know of the tensor it packs: dimension, side, and the rotary pairs (FORMATS section 5)."""

from dataclasses import dataclass

import numpy as np

from .errors import require


@dataclass(frozen=True)
class Head:
    """One head of keys or values. rotary_dim None means the whole head."""

    dim: int
    tensor: str = "k"
    layout: str = "half"
    rotary_dim: int | None = None
    rotary_first: int = 0

    def __post_init__(self):
        require(isinstance(self.dim, int) and self.dim > 0, f"head dimension {self.dim}")
        require(self.tensor in ("k", "v"), f"tensor {self.tensor}")
        require(self.layout in ("half", "adjacent"), f"layout {self.layout}")
        rotary, first = self._rotary_part()
        fits = rotary is None or (rotary % 2 == 0 and 0 <= rotary and first + rotary <= self.dim)
        require(fits and first % 2 == 0 and 0 <= first <= self.dim, f"rotary part {first}+{rotary} of {self.dim}")

    def _rotary_part(self) -> tuple[int | None, int]:
        """rotary_dim and rotary_first; values have none."""
        return (self.rotary_dim, self.rotary_first) if self.tensor == "k" else (None, 0)

    @property
    def tensor_index(self) -> int:
        """t of the rotation's signs: 0 keys, 1 values."""
        return 0 if self.tensor == "k" else 1

    def pairs(self) -> np.ndarray:
        """[dim/2, 2] channels (u, v) of every pair, in the order of the pair numbers."""
        rotary, first = self._rotary_part()
        rotary = self.dim if rotary is None else rotary
        require(self.dim % 2 == 0, f"pairs need an even dim, not {self.dim}")
        require(first + rotary <= self.dim, f"rotary part {first}+{rotary} of {self.dim}")
        i = np.arange(rotary // 2)
        u, v = (i, i + rotary // 2) if self.layout == "half" else (2 * i, 2 * i + 1)
        rest = np.array([ch for ch in range(self.dim) if not first <= ch < first + rotary], np.int64).reshape(-1, 2)
        return np.concatenate([np.stack([u, v], axis=1) + first, rest])
