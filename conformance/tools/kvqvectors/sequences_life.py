"""Vectors of sequences on small heads, continued: turns, later prompts, refusals, random scripts."""

import numpy as np

from .data import hexed
from .script import Suite
from .sequences import ORDERED, RECIPES, SEMKV, SEMKV_LLOYD, recipe_blocks, story
from .story import SMALL, Story, scores_of


def turns() -> Suite:
    suite = Suite("sequence-turns", "L2")
    g = suite.group(
        "blocks", "SemKV: floor for a prompt, every B generated tokens a block with half-even, the rest at the end of turn"
    )
    for i, name in enumerate(SEMKV):
        block = recipe_blocks(name)[0]
        for rest in (0, 1, 2, block - 1):
            s = story(g, f"{name}-rest-{rest}", f"Prompt of 13, {block} + {rest} tokens, end of turn, once more", name, 500 + i)
            s.commit("a", 13)
            s.append("a", block - 1)
            s.append("a", 1)
            if rest:
                s.append("a", rest)
            s.change("end_turn", "a")
            s.change("end_turn", "a")
            s.append("a", block)
            for b in range(s.count_blocks("a")):
                s.block("a", b)
            s.values("a", 0, 5)
    _later_prompts(suite)
    _cut_turns(suite)
    return suite


def _later_prompts(suite: Suite) -> None:
    g = suite.group("prompts", "SemKV: a later commit ends the turn first and is a prompt of its own")
    for i, name in enumerate(SEMKV):
        block = recipe_blocks(name)[0]
        s = story(g, f"{name}-at-once", "5 generated tokens, then a prompt of 11", name, 510 + i)
        s.commit("a", 10)
        s.append("a", 5)
        s.commit("a", 11)
        for b in range(3):
            s.block("a", b)
        s = story(
            g,
            f"{name}-chunks",
            "The later prompt in three chunks: no block of B inside, append and end_turn refused",
            name,
            515 + i,
        )
        s.commit("a", 10)
        s.append("a", 3)
        s.commit("a", block + 2, final=False)
        s.script.refused("STATE", "append", seq="a", **s.tokens(1, False))
        s.script.refused("STATE", "end_turn", seq="a")
        s.commit("a", block + 1, final=False)
        s.commit("a", 4)
        assert s.count_blocks("a") == 3
        for b in range(3):
            s.block("a", b)
        s.append("a", 2)
        s.look("a")
        s = story(g, f"{name}-final-alone", "FINAL without tokens packs what was staged", name, 520 + i)
        s.commit("a", 9, final=False)
        s.commit("a", 0)
        s.append("a", 2)
        s.commit("a", 7, final=False)
        s.commit("a", 0)
        for b in range(s.count_blocks("a")):
            s.block("a", b)
    _scores(suite)


def _cut_turns(suite: Suite) -> None:
    g = suite.group("truncation", "SemKV: pending tokens go with their scores; flags of a cut block stay")
    for i, name in enumerate(SEMKV):
        block, sinks, _ = recipe_blocks(name)
        s = story(
            g, f"{name}-pending", "Pending tokens taken back, then on to the end of the block: as in a fresh cache", name, 530 + i
        )
        s.commit("a", 12)
        s.append("a", block - 2)
        s.change("truncate", "a", length=sinks + 12 - sinks + 2)
        s.append("a", block - 2)
        s.block("a", 1)
        s = story(g, f"{name}-packed", "Cut inside a block, twice; the flags are those of the valid tokens", name, 540 + i)
        s.commit("a", 17)
        s.append("a", 2 * block)
        for length in (17 + block + 3, 17 + 2, 9, 3):
            s.change("truncate", "a", length=length)
            s.block("a", s.count_blocks("a") - 1)
            s.values("a", length - 2, 2)
        s.append("a", block)
        s.look("a")
    g = suite.group("others", "Other recipes: end_turn changes nothing, later commits are plain appends")
    for i, name in enumerate(ORDERED):
        block = recipe_blocks(name)[0]
        s = story(g, name, "end_turn with a tail; a later commit; one in chunks", name, 550 + i)
        s.commit("a", block + 1)
        before = s.lengths["a"]
        assert s.change("end_turn", "a") == before
        s.commit("a", block + 2)
        s.script.ok("commit", expect=(), seq="a", **s.tokens(3), final=False)
        s.script.refused("STATE", "append", seq="a", **s.tokens(1, False))
        s.script.refused("STATE", "end_turn", seq="a")
        s.given.clear()
        s.commit("a", 2)
        s.given.clear()
        s.look("a")


def _scores(suite: Suite) -> None:
    g = suite.group("scores", "Ties, infinities and odd shapes of scores in a cache")
    shapes = {
        "equal": lambda n: np.ones(n),
        "ascending": lambda n: np.arange(n),
        "descending": lambda n: -np.arange(n),
        "infinite": lambda n: np.where(np.arange(n) % 3 == 0, np.inf, np.where(np.arange(n) % 3 == 1, -np.inf, 0)),
        "signed-zeros": lambda n: np.where(np.arange(n) % 2, 0.0, -0.0),
    }
    for i, name in enumerate(SEMKV):
        block = recipe_blocks(name)[0]
        for slug, scores in shapes.items():
            s = story(g, f"{name}-{slug}", f"{slug} scores for prompt, block and rest", name, 560 + i)
            for op, count in (("commit", 14), ("append", block), ("append", 3)):
                s.script.ok(op, seq="a", **s.tokens(count) | {"scores": scores_of(scores(count))})
            s.script.ok("end_turn", seq="a")
            for b in range(3):
                s.block("a", b, [dict(layer=0, head=1, tensor="k"), dict(layer=1, head=0, tensor="v")])
    for i, name in enumerate(SEMKV):
        s = story(g, f"{name}-refused", "Scores that are missing, too few or NaN: refused, and nothing changes", name, 570 + i)
        s.commit("a", 10)
        s.append("a", 2)
        tokens = s.tokens(4, False)
        without = {key: value for key, value in tokens.items() if key != "scores"}
        s.script.refused("INVALID", "append", seq="a", **without)
        s.script.refused("INVALID", "append", seq="a", **without, scores=scores_of([1, np.nan, 2, 3]))
        s.append("a", 3)
        s.change("end_turn", "a")
        s.block("a", 1)


# ---- refusals


def refusals() -> Suite:
    suite = Suite("sequence-refusals", "L2")
    g = suite.group("stale", "A removed sequence is STALE in every call, and its name may be the target of a fork")
    for i, name in enumerate(("rows", "kivi", "semkv", "pnmix")):
        s = story(g, name, "Every step on a removed sequence", name, 600 + i)
        s.commit("a", 12)
        s.commit("b", 9)
        s.script.ok("remove", seq="a")
        s.script.refused("STALE", "append", seq="a", **s.tokens(1, False))
        s.script.refused("STALE", "commit", seq="a", **s.tokens(2))
        s.script.refused("STALE", "end_turn", seq="a")
        s.script.refused("STALE", "truncate", seq="a", length=0)
        s.script.refused("STALE", "fork", seq="a", to="c")
        s.script.refused("STALE", "export", seq="a", layer=0, head=0, tensor="k", first=0, count=1)
        s.script.refused("STALE", "export", seq="a", layer=0, head=0, tensor="k", block=0)
        s.script.refused("STALE", "remove", seq="a")
        s.change("fork", "b", to="a")
        s.append("a", 1)
        s.look("a")
        s.look("b")
    g = suite.group("ranges", "Lengths, positions and blocks that are not there: INVALID, and nothing changes")
    for i, name in enumerate(RECIPES):
        s = story(g, name, "One too many everywhere", name, 620 + i)
        total = sum(recipe_blocks(name)) + 1
        s.commit("a", total)
        s.script.refused("INVALID", "truncate", seq="a", length=total + 1)
        at = dict(layer=0, head=0, tensor="k")
        s.script.refused("INVALID", "export", seq="a", **at, first=total, count=1)
        s.script.refused("INVALID", "export", seq="a", **at, first=0, count=total + 1)
        s.script.refused("INVALID", "export", seq="a", **at, block=s.count_blocks("a"))
        s.script.refused("INVALID", "export", seq="a", layer=2, head=0, tensor="k", first=0, count=1)
        s.script.refused("INVALID", "export", seq="a", layer=0, head=2, tensor="v", first=0, count=1)
        s.script.refused("INVALID", "export", seq="a", layer=0, head=2, tensor="v", block=0)
        s.values("a", total - 1, 1)
    _nonfinite(suite)
    _states(suite)
    return suite


def _nonfinite(suite: Suite) -> None:
    g = suite.group("nonfinite", "NaN and infinity are refused; nothing changes")
    one = SMALL | {"layers": 1, "kv_heads": 1, "q_heads": 2}
    for i, name in enumerate(("rows", "kivi", "semkv", "pnmix", "blockgtq", "raw")):
        s = story(g, name, "In k, v and q, before and after the commit", name, 640 + i, one)
        s.append("a", 5, queries=True)
        for key, dim, heads in (("k", 16, 1), ("v", 8, 1), ("q", 16, 2)):
            bad = s.tokens(2)
            values = np.zeros((1, heads, 2, dim))
            values[0, -1, 1, dim - 1] = np.nan if key != "v" else np.inf
            s.script.refused("NONFINITE", "append", seq="a", **bad | {key: hexed(values)})
        s.commit("a", 14)
        for key, dim in (("k", 16), ("v", 8)):
            bad = s.tokens(1, False)
            values = np.zeros((1, 1, 1, dim))
            values[0, 0, 0, 3] = -np.inf
            s.script.refused("NONFINITE", "append", seq="a", **bad | {key: hexed(values)})
        s.append("a", 3)
        s.look("a")


def _states(suite: Suite) -> None:
    g = suite.group("state", "What the state of a sequence forbids")
    for i, name in enumerate(RECIPES):
        s = story(g, f"{name}-turn", "end_turn before the commit", name, 650 + i)
        s.append("a", 3, queries=True)
        s.script.refused("STATE", "end_turn", seq="a")
        s.commit("a", 4)
        s.change("end_turn", "a")
    for i, name in enumerate(("pnmix", "pair-widths", "blockgtq", "blockgtq-fast")):
        s = story(
            g,
            f"{name}-no-queries",
            "A policy that needs queries and has none: the commit is refused, the prompt stays",
            name,
            670 + i,
        )
        s.append("a", 5)
        s.script.refused("STATE", "commit", seq="a")
        s.append("a", sum(recipe_blocks(name)))
        s.script.refused("STATE", "commit", seq="a")
        s.commit("a", 3)
        s.look("a")
    for i, name in enumerate(("pnmix", "pnmix-range", "pair-widths", "blockgtq", "channel-split")):
        s = story(g, f"{name}-empty", "Statistics of no token: the commit of an empty sequence is refused", name, 680 + i)
        s.script.refused("STATE", "commit", seq="a")
        s.commit("a", 5)
    _create(suite)


def _create(suite: Suite) -> None:
    g = suite.group("create", "INVALIDs that follow from recipe and geometry alone")
    good = {"k": "affine-channel(levels=4,group=8)", "v": "lloyd(levels=4)"}
    bad = {
        "group-of-block": good | {"block": 12},
        "block-0": {"k": "raw", "v": "raw", "block": 0},
        "codec": good | {"k": "affine-channel(levels=9,group=8)"},
        "group-of-head": good | {"v": "affine-token(levels=4,group=3)"},
        "mask-length": {"k": "pair-mix(low=1,high=3,group=8,mask=ffff)", "v": "raw"},
        "center-of-values": {"k": "raw", "v": "lloyd(levels=4,center=1)"},
        "no-such-policy": good | {"policy": "kvzip(r=1/2)"},
        "semkv-recent": {"policy": SEMKV_LLOYD, "recent": 4},
        "semkv-ratio": {"policy": SEMKV_LLOYD.replace("3/8", "9/8")},
        "semkv-no-low": {"policy": "semkv(r=1/4,high=lloyd(levels=8))"},
        "pnmix-no-ratio": {"k": "pair-mix(low=1,high=3,group=8)", "v": "raw", "policy": "pnmix"},
        "pnmix-ratio": {"k": "pair-mix(low=1,high=3,group=8)", "v": "raw", "policy": "pnmix(r=3/2)"},
        "budget": {"k": "width-groups", "v": "raw", "policy": "blockgtq(avg=1/2)"},
        "bmin-0": {"k": "width-groups", "v": "raw", "policy": "blockgtq(avg=3,bmin=0)"},
        "bmin-above-bmax": {"k": "channel-widths(group=8)", "v": "raw", "policy": "pair-widths(avg=3,bmin=5,bmax=4)"},
        "unit": {"k": "channel-widths(group=8)", "v": "raw", "policy": "pair-widths(avg=3,unit=3)"},
        "unknown-key": {"k": "width-groups", "v": "raw", "policy": "blockgtq(avg=3,foo=1)"},
        "mask-missing": {"k": "pair-mix(low=1,high=3,group=8)", "v": "raw"},
        "bits-missing": {"k": "width-groups", "v": "raw"},
        "split-mask-missing": {"k": "raw", "v": "channel-split(high=8,low=4)"},
    }
    for slug, recipe in bad.items():
        g.test(slug, f"{recipe}").refused("INVALID", "create", recipe=recipe, geometry=SMALL)
    rows = {"k": "lloyd(levels=4)", "v": "lloyd(levels=4)"}
    shapes = {
        "query-heads": {"q_heads": 3},
        "no-kv-heads": {"kv_heads": 0},
        "no-dim": {"dim_k": 0},
        "no-layers": {"layers": 0},
        "rotary-odd": {"rotary_dim": 7},
        "rotary-too-large": {"rotary_dim": 18},
        "rotary-first-odd": {"rotary_dim": 8, "rotary_first": 3},
        "rotary-beyond": {"rotary_dim": 8, "rotary_first": 10},
    }
    for slug, change in shapes.items():
        g.test(slug, f"{change}").refused("INVALID", "create", recipe=rows, geometry=SMALL | change)
    pairs = {"k": "width-groups(bits=1234123)", "v": "raw"}
    g.test("odd-head-with-pairs", "An odd head has no pairs").refused(
        "INVALID", "create", recipe=pairs, geometry=SMALL | {"dim_k": 15}
    )
    g.test("no-such-preset", "A name that is no preset").refused("INVALID", "create", preset="kvq-9", geometry=SMALL)


# ---- random scripts


def scripts() -> Suite:
    suite = Suite("sequence-scripts", "L2")
    for i, name in enumerate(RECIPES):
        g = suite.group(name, "Random scripts: chunks, steps, truncation, forks, removal, turns; a look after every change")
        for n in range(5):
            s = story(g, f"script-{n}", "14 random changes", name, 700 + 10 * i + n)
            random_script(s, *recipe_blocks(name), changes=14)
    return suite


def random_script(s: Story, block: int, sinks: int, recent: int, changes: int) -> None:
    """Any order of operations that is legal; sequences a, b, c, ... come and go."""
    committed: set[str] = set()
    names = iter("bcdefghijklmnop")
    s.append("a", 1 + s.stream.below(block + 2), queries=True)
    for _ in range(changes):
        seq = s.stream.choice(sorted(s.total))
        dice = s.stream.below(100)
        if seq not in committed and dice < 45:
            s.commit(seq, 1 + s.stream.below(2 * block + sinks + recent))
            committed.add(seq)
        elif dice < 55:
            s.append(seq, s.stream.choice((1, 1, 2, 3, block, block + 1)), queries=seq not in committed)
        elif dice < 72:
            back = s.stream.below(block + 3) if s.stream.below(4) else s.stream.below(s.total[seq] + 1)
            s.change("truncate", seq, length=max(0, s.total[seq] - back))
        elif dice < 82:
            child = next(names)
            s.change("fork", seq, to=child)
            committed |= {child} if seq in committed else set()
        elif dice < 88 and len(s.total) > 1:
            s.script.ok("remove", seq=seq)
            del s.total[seq]
            continue
        elif dice < 94 and seq in committed:
            s.change("end_turn", seq)
        elif seq in committed:
            s.commit(seq, 1 + s.stream.below(block))
        else:
            s.append(seq, 2, queries=True)
        if s.total[seq]:
            s.look(seq)


def suites() -> list[Suite]:
    return [turns(), refusals(), scripts()]
