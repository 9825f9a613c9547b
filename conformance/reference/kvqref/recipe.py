"""Recipes as dictionaries (FORMATS section 10, create), as text, and by preset name (section 8).

Text: `k=CODEC;v=CODEC;sinks=N;recent=N;block=N;policy=NAME(args)`, or a preset name followed by
`;key=value` overrides.
"""

import math
from dataclasses import dataclass, field

from .errors import require
from .geometry import Geometry
from .presets import PRESETS, fit_preset
from .text import parse_call, split_outside_parentheses

_KEYS = {"k", "v", "sinks", "recent", "block", "policy", "options"}


@dataclass(frozen=True)
class Recipe:
    """Texts of the codecs before a policy fills masks and widths; k and v are None where SemKV's classes stand."""

    k: str | None
    v: str | None
    sinks: int
    recent: int
    block: int | None
    policy: str
    options: dict = field(default_factory=dict)

    def codec_text(self, tensor: str) -> str:
        text = self.k if tensor == "k" else self.v
        require(text is not None, f"recipe lacks {tensor}")
        return text


def with_head_dimension(text: str, dim: int) -> str:
    """In a recipe, group=D means the tensor's own head dimension (section 6)."""
    name, values = parse_call(text)
    if values.get("group") != "D":
        return text
    values["group"] = str(dim)
    return f"{name}({','.join(f'{key}={value}' for key, value in values.items())})"


def _count(value, name: str) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    require(isinstance(value, int) and not isinstance(value, bool) and value >= 0, f"{name}={value!r}")
    return value


def recipe_from_dict(values: dict, geometry: Geometry) -> Recipe:
    require(set(values) <= _KEYS, f"recipe does not know {set(values) - _KEYS}")
    policy, arguments = parse_call(values.get("policy") or "uniform")
    texts = {
        tensor: None if values.get(tensor) is None else with_head_dimension(values[tensor], geometry.dim(tensor))
        for tensor in ("k", "v")
    }
    return Recipe(
        texts["k"],
        texts["v"],
        _count(values.get("sinks", 0), "sinks"),
        _count(values.get("recent", 0), "recent"),
        _count(values["block"], "block") if values.get("block") is not None else None,
        policy,
        arguments | (values.get("options") or {}),
    )


def _overrides(parts: list[str]) -> dict:
    values: dict = {}
    for part in parts:
        key, equals, value = part.partition("=")
        require(equals == "=" and key in _KEYS - {"options"} and value != "", f"{part!r} is no key=value of a recipe")
        require(key not in values, f"key {key} is repeated")
        values[key] = value
    return values


def recipe_from_text(text: str, geometry: Geometry) -> Recipe:
    first, *rest = split_outside_parentheses(text, ";")
    if "=" in first:
        return recipe_from_dict(_overrides([first, *rest]), geometry)
    require(first in PRESETS, f"no preset {first}")
    return recipe_from_dict(fit_preset(first, geometry.dim_k, geometry.dim_v) | _overrides(rest), geometry)


def parse_recipe(value, geometry: Geometry, options: dict | None = None) -> Recipe:
    """Any of the forms; extra options (budgets, bits, scores) come on top."""
    parse = recipe_from_dict if isinstance(value, dict) else recipe_from_text
    recipe = parse(value, geometry)
    return Recipe(**{**recipe.__dict__, "options": recipe.options | (options or {})})


def default_block(groups: list[int | None]) -> int:
    """64 for row codecs, G for the others."""
    sizes = [group for group in groups if group is not None]
    return math.lcm(*sizes) if sizes else 64
