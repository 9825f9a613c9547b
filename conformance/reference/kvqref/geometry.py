"""The shape of a cache: layers, heads, dimensions and rotary layout (FORMATS section 10, create)."""

from dataclasses import dataclass, fields

from .errors import require
from .head import Head


@dataclass(frozen=True)
class Geometry:
    layers: int
    kv_heads: int
    q_heads: int
    dim_k: int
    dim_v: int
    layout: str = "half"
    rotary_dim: int | None = None
    rotary_first: int = 0

    def __post_init__(self):
        for name in ("layers", "kv_heads", "q_heads", "dim_k", "dim_v"):
            value = getattr(self, name)
            require(isinstance(value, int) and value > 0, f"{name} {value}")
        require(self.q_heads % self.kv_heads == 0, f"{self.q_heads} query heads on {self.kv_heads} KV heads")

    @staticmethod
    def of(values: dict) -> "Geometry":
        """dim_v defaults to dim_k, q_heads to kv_heads, the rest to the class's defaults."""
        known = {f.name for f in fields(Geometry)}
        require(set(values) <= known, f"geometry does not know {set(values) - known}")
        filled = {"dim_v": values.get("dim_k"), "q_heads": values.get("kv_heads")} | values
        missing = {"layers", "kv_heads", "dim_k"} - set(values)
        require(not missing, f"geometry lacks {missing}")
        return Geometry(**filled)

    def dim(self, tensor: str) -> int:
        return self.dim_k if tensor == "k" else self.dim_v

    def head(self, tensor: str) -> Head:
        return Head(self.dim(tensor), tensor, self.layout, self.rotary_dim, self.rotary_first)

    def places(self) -> list[tuple[int, int]]:
        """(layer, KV head) of the whole cache."""
        return [(layer, head) for layer in range(self.layers) for head in range(self.kv_heads)]

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads
