"""The step interpreter: `python3 -m kvqref.exec` reads JSON lines and answers one line each.

    {"cmd": "begin", "flags": [...]}      a new test: forget everything        -> {"ok": true}
    {"cmd": "step", "step": {...}}        one step of FORMATS section 10       -> {"status": "OK", "result": {...}}
    {"cmd": "end"}                        the test is over                     -> {"ok": true}

A refused step answers its status, an empty result and the reason as "detail". A message that is no step
at all answers {"error": ...}.
"""

import json
import sys

from .arrays import read_array, write_array
from .cache import Cache
from .errors import KvqError, require
from .geometry import Geometry
from .steps import STEPS, given_recipe, needed


class Interpreter:
    """Executes the steps of one test."""

    def __init__(self):
        self._cache: Cache | None = None
        self._saved: tuple | None = None
        self._steps = STEPS | {
            "create": self._create,
            "commit": self._commit,
            "append": self._append,
            "end_turn": lambda s: {"lengths": self.cache.end_turn(needed(s, "seq"))},
            "truncate": lambda s: {"lengths": self.cache.truncate(needed(s, "seq"), needed(s, "length"))},
            "fork": lambda s: {"lengths": self.cache.fork(needed(s, "seq"), needed(s, "to"))},
            "remove": self._remove,
            "export": self._export,
            "attend": self._attend,
            "save": self._save,
            "load": self._load,
        }

    @property
    def cache(self) -> Cache:
        require(self._cache is not None, "no cache was created")
        return self._cache

    def step(self, step: dict) -> dict:
        """The answer to one step."""
        op = step.get("op")
        if op not in self._steps:
            raise ValueError(f"no op {op}")
        try:
            return {"status": "OK", "result": self._steps[op](step)}
        except KvqError as refusal:
            return {"status": refusal.status, "result": {}, "detail": str(refusal)}

    def _create(self, step: dict) -> dict:
        geometry = Geometry.of(needed(step, "geometry"))
        self._cache = Cache(given_recipe(step, geometry), geometry)
        return {}

    def _tokens(self, step: dict) -> dict:
        return {key: read_array(step.get(key)) for key in ("k", "v", "q", "scores")}

    def _commit(self, step: dict) -> dict:
        final = step.get("final", True)
        return {"lengths": self.cache.commit(needed(step, "seq"), **self._tokens(step), final=final)}

    def _append(self, step: dict) -> dict:
        return {"lengths": self.cache.append(needed(step, "seq"), **self._tokens(step))}

    def _remove(self, step: dict) -> dict:
        self.cache.remove(needed(step, "seq"))
        return {}

    def _export(self, step: dict) -> dict:
        place = [needed(step, key) for key in ("seq", "layer", "head", "tensor")]
        if "block" in step:
            return {"wire": self.cache.export_wire(*place, step["block"]).hex()}
        values = self.cache.export_values(*place, step.get("first", 0), step.get("count"))
        return {"values": write_array(values, "f32")}

    def _attend(self, step: dict) -> dict:
        out, lse = self.cache.attend(
            needed(step, "seq"),
            needed(step, "layer"),
            read_array(needed(step, "q")),
            step.get("scale"),
            step.get("window"),
            step.get("softcap"),
            read_array(step.get("sinks")),
        )
        return {"out": write_array(out, "f32"), "lse": write_array(lse, "f32")}

    def _save(self, step: dict) -> dict:
        self._saved = self.cache.snapshot()
        return {}

    def _load(self, step: dict) -> dict:
        require(self._saved is not None, "nothing was saved")
        self.cache.restore(self._saved)
        return {}


def answer(interpreter: Interpreter, message: dict) -> tuple[Interpreter, dict]:
    """The interpreter to go on with, and the reply."""
    command = message.get("cmd")
    if command in ("begin", "end"):
        return Interpreter(), {"ok": True}
    if command != "step":
        raise ValueError(f"no cmd {command}")
    return interpreter, interpreter.step(message["step"])


def main() -> None:
    interpreter = Interpreter()
    for line in sys.stdin:
        if not line.strip():
            continue
        try:
            interpreter, reply = answer(interpreter, json.loads(line))
        except Exception as error:  # one bad message must not end the conversation
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
