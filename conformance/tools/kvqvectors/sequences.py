"""Vectors of sequences (FORMATS section 7) on small heads: packing, chunks, truncation, forks."""

import numpy as np

from .data import array, hexed
from .script import Group, Suite
from .story import SMALL, Story

VALUES = "affine-token(levels=4,group=4)"
SEMKV_AFFINE = "semkv(r=1/4,low=affine-token(levels=5,group=D,rotate=1),high=affine-token(levels=6,group=D,rotate=1))"
SEMKV_LLOYD = "semkv(r=3/8,low=lloyd(levels=3),high=lloyd(levels=8))"

# name: recipe.  Blocks of several groups, sinks and recent windows of all kinds, on 16 channels of K and 8 of V.
RECIPES: dict[str, dict] = {
    "raw": {"k": "raw", "v": "raw", "block": 4},
    "kivi": {"k": "affine-channel(levels=4,group=8)", "v": VALUES, "block": 16, "recent": 3},
    "chan-odd": {"k": "affine-channel(levels=5,group=3)", "v": "affine-channel(levels=3,group=5,midpoint=1)", "block": 15, "sinks": 2},
    "rows": {"k": "lloyd(levels=4)", "v": "lloyd(levels=3,params=e5m3)", "block": 8, "sinks": 3},
    "rows-of-one": {"k": "lloyd(levels=5)", "v": "affine-token(levels=7,group=8,rotate=1)", "block": 1},
    "rows-of-five": {"k": "affine-token(levels=3,group=4)", "v": "lloyd(levels=6)", "block": 5, "recent": 7, "sinks": 1},
    "centred": {"k": "lloyd(levels=8,center=1)", "v": "lloyd(levels=4)", "block": 8, "sinks": 4, "recent": 2},
    "polar": {"k": "polar(radius=4,angle=8,group=4)", "v": VALUES, "block": 8},
    "kitty": {"k": "kitty(boost=1/8,group=8)", "v": VALUES, "block": 16, "sinks": 2},
    "pnmix": {"k": "pair-mix(low=1,high=3,group=8,midpoint=1)", "v": VALUES, "block": 16, "sinks": 3, "policy": "pnmix(r=1/2)"},
    "pnmix-range": {"k": "pair-mix(low=1,high=3,group=8,unit=channel)", "v": "lloyd(levels=4)", "block": 8, "policy": "pnmix(r=2/5,criterion=k-range)"},
    "blockgtq": {"k": "width-groups", "v": "lloyd(levels=8)", "block": 8, "policy": "blockgtq(avg=3)"},
    "blockgtq-fast": {"k": "width-groups(center=1,params=e5m3)", "v": "lloyd(levels=4,params=e5m3)", "block": 8, "sinks": 2, "recent": 4,
                      "policy": "blockgtq(avg=5/2,bmax=6,score=q-geo,unit=2)"},
    "pair-widths": {"k": "channel-widths(group=8,midpoint=1)", "v": "lloyd(levels=3)", "block": 16, "sinks": 2, "recent": 4, "policy": "pair-widths(avg=21/8,bmin=0,bmax=6,unit=2)"},
    "channel-split": {"k": "channel-split(high=8,low=4)", "v": "channel-split(high=8,low=4)", "block": 8, "policy": "channel-split"},
    "semkv": {"policy": SEMKV_AFFINE, "block": 8},
    "semkv-tq": {"policy": SEMKV_LLOYD, "block": 6, "sinks": 2},
    "progressive": {"k": "progressive(bits=4)", "v": "progressive(bits=2)", "block": 8, "recent": 1},
}  # fmt: skip
SEMKV = ("semkv", "semkv-tq")
ONE_LAYER = SMALL | {"layers": 1}
ORDERED = tuple(name for name in RECIPES if name not in SEMKV)  # bytes depend on the tokens and the first commit only


def recipe_blocks(name: str) -> tuple[int, int, int]:
    recipe = RECIPES[name]
    return recipe["block"], recipe.get("sinks", 0), recipe.get("recent", 0)


def story(g: Group, slug: str, comment: str, name: str, seed: int, geometry: dict | None = None) -> Story:
    return Story(g, slug, comment, {"recipe": RECIPES[name]}, geometry or SMALL, seed)


def packed_count(name: str, total: int) -> int:
    block, sinks, recent = recipe_blocks(name)
    behind = max(0, total - sinks)
    return behind if name in SEMKV else block * (max(0, behind - recent) // block)


# ---- packing and chunks


def packing() -> Suite:
    suite = Suite("sequence-packing", "L2")
    g = suite.group("commit", "A prompt at once: lengths by the formula, bytes of every block, values at the borders")
    for i, name in enumerate(RECIPES):
        block, sinks, recent = recipe_blocks(name)
        for total in sorted({1, sinks, sinks + recent + block - 1, sinks + recent + block, sinks + recent + 2 * block + 1} - {0}):
            s = story(g, f"{name}-T{total}", f"{total} tokens: sinks {sinks}, recent {recent}, block {block}", name, 100 + i)
            lengths = s.commit("a", total)
            assert lengths["packed"] == packed_count(name, total) and lengths["sinks"] == min(total, sinks)
            for b in range(s.count_blocks("a")):
                one_block = total == sinks + recent + block
                s.block("a", b, None if one_block else [s.stream.choice(list(s.places()))])
            s.look("a")
    g = suite.group("append", "Generation token by token and in steps: packed when due, never earlier")
    for i, name in enumerate(RECIPES):
        block, sinks, recent = recipe_blocks(name)
        s = story(g, f"{name}-one-by-one", "One token at a time over a border", name, 130 + i)
        s.commit("a", sinks + recent + block - 2 if block > 2 else 3)
        for _ in range(4):
            s.append("a", 1)
        s.look("a")
        s = story(g, f"{name}-steps", "Steps of many sizes, one of them over several blocks", name, 150 + i)
        s.commit("a", 2)
        for count in (1, 3, 2 * block + 1, 5, block):
            s.append("a", count)
            s.look("a")
    _same_bytes(suite)
    return suite


def _same_bytes(suite: Suite) -> None:
    """Chunks of a prompt, and (but for SemKV) steps behind a commit: the bytes of one call."""
    g = suite.group(
        "chunks", "The bytes never depend on how tokens were chunked: prompt at once, in chunks, by append before the commit"
    )
    for i, name in enumerate(RECIPES):
        total = 2 * recipe_blocks(name)[0] + sum(recipe_blocks(name)[1:]) + 3
        exports = []
        for way, sizes in (
            ("whole", [total]),
            ("three", [1, total // 2, total - total // 2 - 1]),
            ("by-append", [2, total - 5, 3]),
        ):
            s = story(g, f"{name}-{way}", f"{total} tokens as {sizes}", name, 170 + i, ONE_LAYER)
            whole = s.tokens(total)
            _hand_over(s, whole, sizes, way)
            place = [dict(layer=0, head=0, tensor="k"), dict(layer=0, head=1, tensor="v")]
            exports.append(
                s.block("a", s.count_blocks("a") - 1, place) + [v.tobytes() for v in s.values("a", total - 2, 2, place)]
            )
        assert exports[0] == exports[1] == exports[2], f"{name}: chunking changed the bytes"
    g = suite.group("appended", "Tokens behind the first commit: one step or many give the same bytes")
    for i, name in enumerate(ORDERED):
        block = recipe_blocks(name)[0]
        total = 2 * block + sum(recipe_blocks(name)[1:]) + 1
        exports = []
        for way, sizes in (("one-step", [total]), ("many", [1, 2, total // 2, total - total // 2 - 4, 1])):
            s = story(g, f"{name}-{way}", f"A prompt of 4, then {sizes}", name, 200 + i, ONE_LAYER)
            prompt, rest = s.tokens(4), s.tokens(total)
            s.script.ok("commit", seq="a", **prompt)
            _pieces(
                s,
                rest,
                sizes,
                lambda tokens, last: s.script.ok("append", seq="a", **{key: v for key, v in tokens.items() if key != "q"}),
            )
            exports.append(s.block("a", s.count_blocks("a") - 1))
        assert exports[0] == exports[1], f"{name}: steps changed the bytes"


def _pieces(s: Story, tokens: dict, sizes: list[int], use) -> None:
    """Cuts one batch of tokens into pieces, as hex arrays."""
    whole = {key: array(value) for key, value in tokens.items()}
    at = 0
    for n, size in enumerate(sizes):
        piece = {
            key: hexed(
                x[..., at : at + size] if key == "scores" else x[:, :, at : at + size], "f32" if key == "scores" else "f16"
            )
            for key, x in whole.items()
        }
        use(piece, n == len(sizes) - 1)
        at += size
    assert at == whole["k"].shape[2]


def _hand_over(s: Story, tokens: dict, sizes: list[int], way: str) -> None:
    if way == "whole":
        s.note("a", s.script.ok("commit", seq="a", **tokens)["lengths"], tokens)
        return

    def use(piece, last):
        if way == "by-append" and not last:
            lengths = s.script.ok("append", seq="a", **piece)["lengths"]
        else:
            lengths = s.script.ok("commit", seq="a", **piece, final=None if last else False)["lengths"]
        s.note("a", lengths, piece)

    _pieces(s, tokens, sizes, use)


# ---- truncation


def truncation() -> Suite:
    suite = Suite("sequence-truncation", "L2")
    g = suite.group(
        "everywhere", "Truncation in tail, packed blocks, sinks and to nothing; a packed block that is cut stays as it is"
    )
    for i, name in enumerate(RECIPES):
        block, sinks, recent = recipe_blocks(name)
        total = sinks + 2 * block + recent + 3
        inside = {"tail": total - 1, "border": sinks + 2 * block, "last-of-block": sinks + 2 * block - 1, "middle": sinks + block + block // 2, "first-of-block": sinks + block + 1,
                  "block-border": sinks + block, "first-block": sinks + 1, "sinks": max(0, sinks - 1), "nothing": 0, "all": total}  # fmt: skip
        for where, length in inside.items():
            if where == "sinks" and sinks == 0:
                continue
            s = story(g, f"{name}-{where}", f"Truncate {total} to {length}, look, go on", name, 300 + i)
            s.commit("a", total)
            lengths = s.change("truncate", "a", length=length)
            assert sum(lengths.values()) == length
            place = [s.stream.choice(list(s.places()))]
            if s.count_blocks("a"):
                s.block("a", s.count_blocks("a") - 1, place)
            if length:
                s.values("a", max(0, length - 3), min(3, length), place)
            s.append("a", block + recent + 2)
            s.look("a")
    g = suite.group("again", "A block cut twice, with tokens in between; kept tokens never change")
    for i, name in enumerate(RECIPES):
        block, sinks, recent = recipe_blocks(name)
        s = story(g, name, "Cut, append, cut into the same block, append over a border", name, 330 + i)
        s.commit("a", sinks + block + recent + 2)
        place = [dict(layer=1, head=0, tensor="k")]
        first = s.values("a", 0, 1, place)[0]
        for keep, more in ((max(1, block - 1), 3), (max(1, block // 2), block + recent), (1, 2 * block + recent)):
            s.change("truncate", "a", length=sinks + min(keep, s.total["a"] - sinks))
            s.append("a", more)
            assert np.array_equal(first, s.values("a", 0, 1, place)[0])
        s.look("a")
    g = suite.group("uncommitted", "Before the first commit: tokens go, their statistics stay")
    for i, name in enumerate(RECIPES):
        block = recipe_blocks(name)[0]
        s = story(g, name, "Append, truncate, commit the rest", name, 350 + i)
        s.append("a", 9, queries=True)
        s.change("truncate", "a", length=4)
        s.commit("a", 2 * block + 12)
        s.look("a")
        s.block("a", 0)
    g = suite.group("drafts", "Four drafts, three rejected, again and again")
    for i, name in enumerate(RECIPES):
        s = story(g, name, "append 4, truncate 3", name, 370 + i)
        s.commit("a", sum(recipe_blocks(name)) - 1)
        for _ in range(4):
            s.append("a", 4)
            s.change("truncate", "a", length=s.total["a"] - 3)
        s.look("a")
    return suite


# ---- forks


def forks() -> Suite:
    suite = Suite("sequence-forks", "L2")
    g = suite.group("fork", "A fork shares packed blocks and copies what it will write")
    for i, name in enumerate(RECIPES):
        block, sinks, recent = recipe_blocks(name)
        s = story(g, f"{name}-both-go-on", "Parent and child append different tokens", name, 400 + i)
        s.commit("a", sinks + block + recent + 2)
        s.change("fork", "a", to="b")
        s.append("a", block)
        s.append("b", block + 1)
        s.look("a")
        s.look("b")
        s = story(
            g,
            f"{name}-parent-changes",
            "The parent is cut inside a shared block, extended and removed; the child stays",
            name,
            420 + i,
        )
        s.commit("a", sinks + 2 * block + recent + 1)
        s.change("fork", "a", to="b")
        newest = s.count_blocks("b") - 1
        before = s.values("b", sinks, 2) + s.block("b", newest)
        s.change("truncate", "a", length=sinks + block + block // 2)
        s.append("a", block + 1)
        s.look("a")
        s.script.ok("remove", seq="a")
        after = s.values("b", sinks, 2) + s.block("b", newest)
        assert all(np.array_equal(x, y) for x, y in zip(before, after))
        s = story(g, f"{name}-child-changes", "The child is cut and refilled; the parent stays", name, 440 + i)
        s.commit("a", sinks + block + recent + 2)
        s.change("fork", "a", to="b")
        s.change("truncate", "b", length=sinks + max(1, block - 1))
        s.append("b", block + 2)
        s.look("b")
        s.look("a")
    _more_forks(suite)
    return suite


def _more_forks(suite: Suite) -> None:
    g = suite.group("uncommitted", "A fork of a prompt copies its statistics")
    for i, name in enumerate(RECIPES):
        block = recipe_blocks(name)[0]
        s = story(g, name, "Both go on with other tokens and commit", name, 460 + i)
        s.append("a", 7, queries=True)
        s.change("fork", "a", to="b")
        s.commit("a", 2 * block + 12)
        s.commit("b", 2 * block + 13)
        s.block("a", 0)
        s.block("b", 0)
    g = suite.group("chain", "Forks of forks, one token each, removed from the oldest on")
    for i, name in enumerate(("kivi", "rows", "pnmix", "pair-widths", "semkv", "blockgtq", "centred", "kitty")):
        s = story(g, name, "Six forks deep", name, 480 + i)
        s.commit("s0", sum(recipe_blocks(name)) - 3)
        for n in range(6):
            s.change("fork", f"s{n}", to=f"s{n + 1}")
            s.append(f"s{n + 1}", 1)
            s.script.ok("remove", seq=f"s{n}")
        s.look("s6")
        s.append("s6", recipe_blocks(name)[0])
        s.look("s6")
    g = suite.group("cache-policy", "Block-GTQ's widths belong to the cache, the others' masks to the sequence")
    for i, name in enumerate(("blockgtq", "blockgtq-fast", "pnmix", "pair-widths", "channel-split", "centred")):
        s = story(g, name, "A second prompt with other tokens", name, 490 + i)
        total = sum(recipe_blocks(name)) + 1
        s.commit("a", total)
        s.commit("b", total, queries=name != "blockgtq", mul=5.0, add=-1.0)
        s.block("a", 0)
        s.block("b", 0)


def suites() -> list[Suite]:
    return [packing(), truncation(), forks()]
