"""A cache and what happens to its sequences, with generated tokens and exports at chosen places."""

import math

import numpy as np

from .data import Stream, array, entered, hexed, made
from .script import Group, Script

SMALL = {"layers": 2, "kv_heads": 2, "q_heads": 4, "dim_k": 16, "dim_v": 8}


class Story:
    """One test on one cache. Every batch of tokens has its own seed; nothing is drawn twice."""

    def __init__(self, group: Group, slug: str, comment: str, create: dict, geometry: dict, seed: int):
        self.script: Script = group.test(slug, comment)
        self.geometry = geometry
        self.scored = "semkv" in str(create)
        self.seed, self.batches = seed, 0
        self.stream = Stream(seed)
        self.total: dict[str, int] = {}
        self.lengths: dict[str, dict] = {}
        self.given: dict[str, list] = {}  # per sequence: entered k and v, [layer][head][token][dim] each
        self.script.ok("create", **create, geometry=geometry)

    # ---- tokens

    def tokens(self, count: int, queries: bool = True, mul: float = 2.0, add: float = 0.25) -> dict:
        g = self.geometry
        self.batches += 1
        first = (self.seed << 24) + (self.batches << 18)
        result = {
            "k": made(first, (g["layers"], g["kv_heads"], count, g["dim_k"]), mul, add),
            "v": made(first + (1 << 16), (g["layers"], g["kv_heads"], count, g["dim_v"]), 1.5),
        }
        if queries:
            result["q"] = made(first + (1 << 17), (g["layers"], g["q_heads"], count, g["dim_k"]), 1.0)
        if self.scored:
            result["scores"] = made(first + 3 * (1 << 16), (count,), 1.0, dtype="f32")
        return result

    def note(self, seq: str, lengths: dict, tokens: dict) -> None:
        self.lengths[seq] = lengths
        self.total[seq] = sum(lengths.values())
        if "k" in tokens:
            self.given.setdefault(seq, []).append((entered(tokens["k"]), entered(tokens["v"])))

    def commit(self, seq: str, count: int, **more) -> dict:
        final = more.pop("final", None)
        tokens = self.tokens(count, **more) if count else {}
        lengths = self.script.ok("commit", seq=seq, **tokens, final=final)["lengths"]
        self.note(seq, lengths, tokens)
        return lengths

    def append(self, seq: str, count: int, queries: bool = False) -> dict:
        tokens = self.tokens(count, queries)
        lengths = self.script.ok("append", seq=seq, **tokens)["lengths"]
        self.note(seq, lengths, tokens)
        return lengths

    def change(self, op: str, seq: str, **more) -> dict:
        """end_turn, truncate, fork."""
        lengths = self.script.ok(op, seq=seq, **more)["lengths"]
        name = more.get("to", seq)
        self.lengths[name], self.total[name] = lengths, sum(lengths.values())
        if op == "fork":
            self.given[name] = list(self.given.get(seq, []))
        if op == "truncate":
            self.given[seq] = (
                [tuple(np.concatenate([a[i] for a in self.given[seq]], axis=2)[:, :, : more["length"]] for i in (0, 1))]
                if self.given.get(seq)
                else []
            )
        return lengths

    # ---- exports

    def places(self):
        for layer in range(self.geometry["layers"]):
            for head in range(self.geometry["kv_heads"]):
                for tensor in "kv":
                    yield dict(layer=layer, head=head, tensor=tensor)

    def block(self, seq: str, block: int, places=None) -> list[str]:
        """Wire bytes of one block, everywhere or at some places."""
        return [self.script.ok("export", seq=seq, **place, block=block)["wire"] for place in places or self.places()]

    def values(self, seq: str, first: int, count: int, places=None) -> list[np.ndarray]:
        """Values of some positions; those that are raw must be what entered."""
        result = []
        for place in places or self.places():
            values = array(self.script.ok("export", seq=seq, **place, first=first, count=count)["values"])
            self._check_raw(seq, first, place, values)
            result.append(values)
        return result

    def _check_raw(self, seq: str, first: int, place: dict, values: np.ndarray) -> None:
        if not self.given.get(seq):
            return
        lengths = self.lengths[seq]
        x = np.concatenate([a["kv".index(place["tensor"])] for a in self.given[seq]], axis=2)[place["layer"], place["head"]]
        for i, row in enumerate(values):
            position = first + i
            if position < lengths["sinks"] or position >= lengths["sinks"] + lengths["packed"]:
                assert np.array_equal(row, x[position]), f"raw position {position} is not what entered"

    def look(self, seq: str) -> None:
        """A glance at one random place: the newest block, and values around the border of packed and raw."""
        place = [self.stream.choice(list(self.places()))]
        blocks = self.count_blocks(seq)
        if blocks:
            self.block(seq, self.stream.below(blocks), place)
        border = self.lengths[seq]["sinks"] + self.lengths[seq]["packed"]
        first = max(0, min(border - 2, self.total[seq] - 3))
        self.values(seq, first, min(3, self.total[seq] - first), place)

    def count_blocks(self, seq: str) -> int:
        """From the reference: how many blocks the sequence has now."""
        return len(self.script.reference.cache.sequence(seq).runs)

    # ---- attention

    def attend(self, seq: str, count: int, layer: int = 0, mul: float = 1.0, q: dict | None = None, **options) -> dict:
        """Attention of the newest tokens, with section 9's bounds from float64."""
        g = self.geometry
        self.batches += 1
        if q is None:
            q = made((self.seed << 24) + (self.batches << 18), (g["q_heads"], count, g["dim_k"]), mul)
        result = self.script.ok("attend", seq=seq, layer=layer, q=q, **options)
        self.script.bound(**self._bounds(seq, layer, entered(q), options))
        return result

    def _bounds(self, seq: str, layer: int, q: np.ndarray, options: dict) -> dict:
        """nmse, max_abs, lse_abs of section 9, one number if all rows agree."""
        cache = self.script.reference.cache
        per_kv = self.geometry["q_heads"] // self.geometry["kv_heads"]
        rows: dict[str, list[float]] = {"nmse": [], "max_abs": [], "lse_abs": []}
        for head, queries in enumerate(q):
            k, v = (np.float64(cache.export_values(seq, layer, head // per_kv, tensor)) for tensor in "kv")
            for i, query in enumerate(queries):
                own = len(k) - len(queries) + i
                first = max(0, own + 1 - (options.get("window") or len(k) + 1))
                logits = options.get("scale", 1 / math.sqrt(q.shape[2])) * (k[first : own + 1] @ query)
                cap = options.get("softcap")
                capped = cap * np.tanh(logits / cap) if cap else logits
                rows["nmse"].append(1e-7 * max(1.0, float(logits.var()) if len(logits) else 0.0))
                rows["max_abs"].append(1e-3 * float(np.abs(v).max(initial=0)))
                rows["lse_abs"].append(1e-3 * max(1.0, float(np.abs(capped).max(initial=0)) / 16))
        short = {name: [float(f"{b:.4g}") for b in bounds] for name, bounds in rows.items()}
        return {name: bounds[0] if len(set(bounds)) == 1 else bounds for name, bounds in short.items()}


def scores_of(values) -> dict:
    return hexed(np.array(values), "f32")
