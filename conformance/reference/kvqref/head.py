"""What a codec must know of the tensor it packs: dimension, side, and the rotary pairs (FORMATS section 5)."""

from dataclasses import dataclass

import numpy as np

from .errors import require


@dataclass(frozen=True)
class Head:
    """One head of keys or values. rotary_dim None or 0 means the whole head."""

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
        even = rotary % 2 == 0 and first % 2 == 0
        whole = (rotary, first) == (self.dim, 0)  # of an odd head, which has no pairs
        require(whole or (even and 0 <= first and 0 < rotary <= self.dim - first), f"rotary part {first}+{rotary} of {self.dim}")

    def _rotary_part(self) -> tuple[int, int]:
        """Size and first channel of the rotary part; values have no other than the whole head."""
        return (self.rotary_dim or self.dim, self.rotary_first) if self.tensor == "k" else (self.dim, 0)

    @property
    def tensor_index(self) -> int:
        """t of the rotation's signs: 0 keys, 1 values."""
        return 0 if self.tensor == "k" else 1

    def pairs(self) -> np.ndarray:
        """[dim/2, 2] channels (u, v) of every pair, in the order of the pair numbers."""
        rotary, first = self._rotary_part()
        require(self.dim % 2 == 0, f"pairs need an even dim, not {self.dim}")
        i = np.arange(rotary // 2)
        u, v = (i, i + rotary // 2) if self.layout == "half" else (2 * i, 2 * i + 1)
        rest = np.array([ch for ch in range(self.dim) if not first <= ch < first + rotary], np.int64).reshape(-1, 2)
        return np.concatenate([np.stack([u, v], axis=1) + first, rest])
