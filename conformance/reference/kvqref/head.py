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

    @property
    def tensor_index(self) -> int:
        """t of the rotation's signs: 0 keys, 1 values."""
        return 0 if self.tensor == "k" else 1

    def pairs(self) -> np.ndarray:
        """[dim/2, 2] channels (u, v) of every pair, in the order of the pair numbers."""
        keys = self.tensor == "k"
        rotary = self.rotary_dim if keys and self.rotary_dim is not None else self.dim
        first = self.rotary_first if keys else 0
        even = self.dim % 2 == 0 and rotary % 2 == 0 and first % 2 == 0
        require(even, f"dim {self.dim}, rotary_dim {rotary} and rotary_first {first} must be even")
        require(rotary >= 0 and first >= 0 and first + rotary <= self.dim, f"rotary part {first}+{rotary} leaves dim {self.dim}")
        i = np.arange(rotary // 2)
        u, v = (i, i + rotary // 2) if self.layout == "half" else (2 * i, 2 * i + 1)
        rest = np.array([ch for ch in range(self.dim) if not first <= ch < first + rotary], np.int64).reshape(-1, 2)
        return np.concatenate([np.stack([u, v], axis=1) + first, rest])
