"""The presets of FORMATS section 8, as recipe dictionaries."""

from .text import parse_call

_VALUES = "affine-token(levels=4,group=D)"
_SEMKV_ROWS = "affine-token(levels={},group=D,rotate=1)"
_SEMKV_BOOK_ROWS = "lloyd(levels={})"


def _semkv(row: str, high: int, low: int, r: str) -> dict:
    return {"block": 64, "policy": f"semkv(r={r},low={row.format(low)},high={row.format(high)})"}


def _block_gtq(average: int, v_levels: int) -> dict:
    return {"k": "width-groups", "v": f"lloyd(levels={v_levels})", "policy": f"blockgtq(avg={average})"}


def _block_gtq_fast(average: int, v_levels: int) -> dict:
    return {
        "k": "width-groups(center=1,params=e5m3)",
        "v": f"lloyd(levels={v_levels},params=e5m3)",
        "sinks": 4,
        "recent": 32,
        "policy": f"blockgtq(avg={average},bmax=6,score=q-geo,unit=UNIT)",
    }


def _kvq(average: str, bmin: int, bmax: int, v_levels: int) -> dict:
    return {
        "k": "channel-widths(group=128,midpoint=1)",
        "v": f"lloyd(levels={v_levels},params=e5m3)",
        "sinks": 32,
        "recent": 32,
        "block": 128,
        "policy": f"pair-widths(avg={average},bmin={bmin},bmax={bmax},score=q-var,unit=UNIT)",
    }


def _tq(levels: int) -> dict:
    return {"k": f"lloyd(levels={levels})", "v": f"lloyd(levels={levels})"}


def _tq_centered(levels: int) -> dict:
    return {"k": f"lloyd(levels={levels},center=1)", "v": f"lloyd(levels={levels})", "sinks": 4, "recent": 32}


PRESETS: dict[str, dict] = {
    "fp16": {"k": "raw", "v": "raw"},
    "kivi-2": {
        "k": "affine-channel(levels=4,group=128)",
        "v": "affine-token(levels=4,group=128)",
        "block": 128,
    },
    "kivi-2-g32": {
        "k": "affine-channel(levels=4,group=32)",
        "v": "affine-token(levels=4,group=32)",
        "block": 32,
        "recent": 96,
    },
    "polar-2": {"k": "polar(radius=4,angle=4,group=128)", "block": 128},
    "chanmix": {"k": "channel-widths(group=128,params=e4m3,unit=channel)", "policy": "chanmix"},
    "kitty": {"k": "kitty(boost=1/32,group=128)", "sinks": 32},
    "pnmix": {
        "k": "pair-mix(low=1,high=3,group=128,midpoint=1)",
        "v": "affine-token(levels=4,group=128)",
        "sinks": 32,
        "block": 128,
        "policy": "pnmix(r=1/2,criterion=qk-pair)",
    },
    "pnmix-g64": {
        "k": "pair-mix(low=1,high=3,group=64,midpoint=1)",
        "v": "affine-token(levels=4,group=128)",
        "sinks": 32,
        "block": 128,
        "policy": "pnmix(r=2/5,criterion=qk-pair)",
    },
    "tq-2": _tq(4),
    "tq-3": _tq(8),
    "tq-4": _tq(16),
    "tq-1.585": _tq(3),
    "tq-2.322": _tq(5),
    "tq-2.585": _tq(6),
    "tq-split": {"k": "channel-split(high=8,low=4)", "v": "channel-split(high=8,low=4)", "policy": "channel-split(r=1/2)"},
    "semkv": _semkv(_SEMKV_ROWS, 6, 5, "1/4"),
    "semkv-tq": _semkv(_SEMKV_BOOK_ROWS, 6, 5, "1/4"),
    "semkv-tq-2": _semkv(_SEMKV_BOOK_ROWS, 4, 3, "3/4"),
    "blockgtq-k3v3": _block_gtq(3, 8),
    "blockgtq-k3v2": _block_gtq(3, 4),
    "blockgtq-k2v2": _block_gtq(2, 4),
    "blockgtq-k3v3-fast": _block_gtq_fast(3, 8),
    "blockgtq-k2v2-fast": _block_gtq_fast(2, 4),
    "pmkvq": {"k": "progressive", "v": "progressive", "policy": "pmkvq"},
    "kvq-2": _kvq("2", 1, 4, 3),
    "kvq-2.5": _kvq("21/8", 0, 6, 4),
    "kvq-3": _kvq("3", 0, 6, 6),
    "tq-2c": _tq_centered(4),
    "tq-3c": _tq_centered(8),
}


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n not above the limit, at least 1."""
    return max(d for d in range(1, max(limit, 1) + 1) if n % d == 0)


def _fit_groups(text: str, dim: int) -> str:
    """Where g does not divide D, the largest divisor of D not above g."""
    name, values = parse_call(text)
    if name != "affine-token" or values["group"] == "D":
        return text
    return text.replace(f"group={values['group']}", f"group={largest_divisor(dim, int(values['group']))}")


def fit_preset(name: str, dim_k: int, dim_v: int) -> dict:
    """The preset's recipe for these head dimensions."""
    recipe = dict(PRESETS[name])
    if "k" in recipe:
        recipe["v"] = _fit_groups(recipe.get("v", _VALUES), dim_v)
    if "policy" in recipe:
        unit = largest_divisor(dim_k // 2, dim_k // 16)
        recipe["policy"] = recipe["policy"].replace("UNIT", str(unit))
    return recipe
