"""Wire bytes, metadata and effective bits of a recipe at a length (FORMATS section 8)."""

from .codecs import codec
from .errors import KvqError
from .geometry import Geometry
from .recipe import Recipe
from .schemes import PlainScheme, Scheme, SemKvScheme, scheme
from .text import parse_call


def packed_tokens(made: Scheme, tokens: int) -> int:
    """Packed tokens of a prompt of that length without truncation (section 7)."""
    behind = max(0, tokens - made.recipe.sinks)
    if isinstance(made, SemKvScheme):
        return behind
    return made.block * (max(0, behind - made.recipe.recent) // made.block)


def _plain_bytes(made: PlainScheme, tensor: str, place, packed: int) -> int:
    if not made.fill.known_size(made.recipe.codec_text("k")):
        raise KvqError("STATE", "the bytes depend on widths that are not given")
    return made.sample(tensor, place).size(packed)


def _packed_bytes(made: Scheme, tensor: str, place, packed: int) -> int:
    """Wire bytes of the packed tokens as one block (SemKV: one per class)."""
    if isinstance(made, PlainScheme):
        return _plain_bytes(made, tensor, place, packed)
    if isinstance(made, SemKvScheme):
        high = made.r.floor_of(packed)
        key = (*place, tensor)
        return made.low[key].codec.size(packed - high) + made.high[key].codec.size(high)
    width = made.widths(packed, (16,) * made.geometry.layers)[place[0]]
    return codec(f"progressive(bits={width})", made.heads[tensor]).size(packed)


def _metadata_bytes(made: Scheme, packed: int) -> int:
    """Masks ceil(n/8), width lists a byte an entry, mu 2*dim per layer and KV head; SemKV's flags once."""
    if isinstance(made, SemKvScheme):
        return (packed + 7) // 8
    if not isinstance(made, PlainScheme):
        return 0
    total = 0
    for place in made.geometry.places():
        for tensor in ("k", "v"):
            name, values = parse_call(made.fill.sample(tensor, made.recipe.codec_text(tensor), place))
            total += len(values.get("mask", "")) // 2
            total += len(values["bits"]) if name in ("width-groups", "channel-widths") else 0
            total += 2 * made.geometry.dim(tensor) if values.get("center") == "1" else 0
    return total


def account(recipe: Recipe, geometry: Geometry, tokens: int) -> dict:
    """wire_bytes of the whole cache, metadata_bytes, effective bits per element of sinks and packed tokens."""
    made = scheme(recipe, geometry)
    sinks, packed = min(tokens, recipe.sinks), packed_tokens(made, tokens)
    wire = {}
    for tensor in ("k", "v"):
        raw = len(geometry.places()) * sinks * geometry.dim(tensor) * 2
        wire[tensor] = raw + sum(_packed_bytes(made, tensor, place, packed) for place in geometry.places())

    def bits(tensor: str) -> float:
        elements = len(geometry.places()) * (sinks + packed) * geometry.dim(tensor)
        return 8 * wire[tensor] / elements if elements else 0.0

    return {
        "wire_bytes": wire["k"] + wire["v"],
        "metadata_bytes": _metadata_bytes(made, packed),
        "effective_bits_k": bits("k"),
        "effective_bits_v": bits("v"),
    }
