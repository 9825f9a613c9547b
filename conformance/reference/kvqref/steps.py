"""The stateless steps of FORMATS section 10: encode, decode, stats, policy, account."""

import numpy as np

from .account import account
from .arrays import read_array, write_array
from .codecs import codec
from .errors import require
from .fp import entry
from .geometry import Geometry
from .head import Head
from .policies.center import center_mean
from .policies.channels import boosted_channels, chanmix_heads, chanmix_widths, split_channels
from .policies.pmkvq import shrink_width
from .policies.pnmix import pnmix_mask
from .policies.semkv import block_flags, check_scores, prompt_flags
from .policies.width_scores import width_scores
from .policies.widths import WidthBudget, allot_widths
from .ratio import Ratio
from .recipe import parse_recipe
from .stats import ChannelSums, HeadStats
from .text import mask_to_hex


def head_of(step: dict, dim: int) -> Head:
    return Head(dim, step.get("tensor", "k"), step.get("layout", "half"), step.get("rotary_dim"), step.get("rotary_first", 0))


def needed(step: dict, key: str):
    require(key in step, f"{key} is missing")
    return step[key]


def rows_of(step: dict, key: str) -> np.ndarray:
    """An entered array [..., tokens, dim]."""
    x = read_array(needed(step, key))
    require(x.ndim >= 2, f"{key} must be [tokens][dim]")
    return entry(x)


def encode(step: dict) -> dict:
    made = codec(needed(step, "codec"), head_of(step, needed(step, "dim")))
    return {"wire": made.encode(read_array(needed(step, "x")), read_array(step.get("mu"))).hex()}


def decode(step: dict) -> dict:
    made = codec(needed(step, "codec"), head_of(step, needed(step, "dim")))
    wire = bytes.fromhex(needed(step, "wire"))
    return {"values": write_array(made.decode(wire, needed(step, "tokens"), read_array(step.get("mu"))), "f32")}


def head_stats(step: dict) -> HeadStats:
    """Statistics of k [tokens][dim] and q [tokens][dim] or [query heads][tokens][dim]."""
    sides = {key: rows_of(step, key) for key in ("k", "q") if step.get(key) is not None}
    require(bool(sides), "neither k nor q")
    dim = next(iter(sides.values())).shape[-1]
    require(all(x.shape[-1] == dim for x in sides.values()), "k and q differ in dimension")
    stats = HeadStats.empty(dim, dim, head_of(step, dim).pairs())
    if "k" in sides:
        stats = stats.with_keys(sides["k"].reshape(-1, dim))
    if "q" in sides:
        stats = stats.with_queries(sides["q"])
    return stats


def stats(step: dict) -> dict:
    s = head_stats(step)
    sums = {
        "K1": s.key_pairs.first, "K2": s.key_pairs.second, "Q1": s.query_pairs.first, "Q2": s.query_pairs.second,
        "sum": s.keys.sum, "abs": s.keys.abs,
    }  # fmt: skip
    return {name: [str(value) for value in values] for name, values in sums.items()} | {
        "nk": s.key_pairs.count,
        "nq": s.query_pairs.count,
        "min": write_array(s.keys.min, "f16"),
        "max": write_array(s.keys.max, "f16"),
    }


def _bits(widths) -> dict:
    return {"bits": write_array(np.asarray(widths), "u8")}


def _widths(step: dict, default_score: str, lowest: int) -> dict:
    given = read_array(step.get("scores"))
    scores = width_scores(head_stats(step), step.get("score", default_score)) if given is None else given
    number = {key: int(step[key]) for key in ("bmin", "bmax", "unit") if key in step}
    return _bits(allot_widths(scores, WidthBudget(Ratio.of(needed(step, "avg")), **number), lowest))


def _flags(step: dict, choose) -> dict:
    scores = read_array(needed(step, "scores"))
    return {"flags": mask_to_hex(choose(check_scores(scores, scores.size), needed(step, "r")))}


def _channel_split(step: dict) -> dict:
    k = rows_of(step, "k" if "k" in step else "v")
    return {"mask": mask_to_hex(split_channels(ChannelSums.empty(k.shape[1]).plus(k), step.get("r", "1/2")))}


def _chanmix(step: dict) -> dict:
    if "range" in step:
        return _bits(chanmix_widths(read_array(step["range"]), step.get("share", "1/4")))
    return {"mask": mask_to_hex(chanmix_heads(read_array(needed(step, "scores")).reshape(-1), needed(step, "r_h")))}


def _pmkvq_shrink(step: dict) -> dict:
    shape = [needed(step, key) for key in ("kv_heads", "dim_k", "dim_v")]
    budgets = step["budgets"] if isinstance(needed(step, "budgets"), list) else read_array(step["budgets"]).tolist()
    return _bits([shrink_width(needed(step, "tokens"), int(budget), *shape) for budget in budgets])


POLICIES = {
    "pnmix": lambda s: {"mask": mask_to_hex(pnmix_mask(head_stats(s), needed(s, "r"), s.get("criterion", "qk-pair")))},
    "blockgtq": lambda s: _widths(s, "qk-avg", 1),
    "pair-widths": lambda s: _widths(s, "q-var", 0),
    "semkv-prompt": lambda s: _flags(s, prompt_flags),
    "semkv-block": lambda s: _flags(s, block_flags),
    "kitty": lambda s: {"mask": mask_to_hex(boosted_channels(rows_of(s, "k"), needed(s, "boost")))},
    "chanmix": _chanmix,
    "channel-split": _channel_split,
    "center": lambda s: {"mu": write_array(center_mean(rows_of(s, "k")), "f16")},
    "pmkvq-shrink": _pmkvq_shrink,
}


def policy(step: dict) -> dict:
    name = needed(step, "name")
    require(name in POLICIES, f"no policy {name}")
    return POLICIES[name](step)


def given_recipe(step: dict, geometry: Geometry):
    """recipe (dictionary or text) or preset, with the step's options on top."""
    value = step["recipe"] if "recipe" in step else needed(step, "preset")
    recipe = parse_recipe(value, geometry, step.get("options"))
    scores = recipe.options.get("scores")
    if scores is not None:
        recipe.options["scores"] = read_array(scores)
    return recipe


def account_step(step: dict) -> dict:
    geometry = Geometry.of(needed(step, "geometry"))
    tokens = needed(step, "tokens")
    require(tokens >= 0, "negative tokens")
    return account(given_recipe(step, geometry), geometry, tokens)


STEPS = {"encode": encode, "decode": decode, "stats": stats, "policy": policy, "account": account_step}
