"""PM-KVQ: the width of a layer under its budget (FORMATS section 2.5)."""

from ..codecs.progressive import WIDTHS, Progressive
from ..head import Head
from ..text import Arguments


def layer_bytes(bits: int, tokens: int, kv_heads: int, dim_k: int, dim_v: int) -> int:
    """Wire bytes of the packed tokens of one layer of one sequence, as one block."""
    sizes = [Progressive(Arguments("progressive", {"bits": str(bits)}), Head(dim)).size(tokens) for dim in (dim_k, dim_v)]
    return kv_heads * sum(sizes)


def shrink_width(tokens: int, budget: int, kv_heads: int, dim_k: int, dim_v: int, current: int = 16) -> int:
    """The widest width, not above the current one, whose bytes fit the budget; 2 if none does."""
    for bits in WIDTHS:
        if bits <= current and layer_bytes(bits, tokens, kv_heads, dim_k, dim_v) <= budget:
            return bits
    return WIDTHS[-1]
