"""Tests as they are made: a suite has groups, a group has tests, a test has steps that the reference has executed."""

from kvqref.exec import Interpreter


class Script:
    """One test. Every step is executed by the reference at once, and its answer becomes what is expected."""

    def __init__(self, slug: str, comment: str, flags: list[str]):
        self.slug, self.comment, self.flags = slug, comment, flags
        self.steps: list[dict] = []
        self.reference = Interpreter()

    def _run(self, op: str, arguments: dict) -> tuple[dict, dict]:
        step = {"op": op} | {key: value for key, value in arguments.items() if value is not None}
        return step, self.reference.step(step)

    def ok(self, op: str, expect: tuple[str, ...] | None = None, **arguments) -> dict:
        """A step that must succeed; `expect` names the results to pin (default: all). Returns the results."""
        step, answer = self._run(op, arguments)
        if answer["status"] != "OK":
            raise AssertionError(f"{self.slug}: {op} is refused: {answer['detail']} ({str(arguments)[:300]})")
        result = answer["result"]
        pinned = result if expect is None else {key: result[key] for key in expect}
        self.steps.append(step | ({"expect": pinned} if pinned else {}))
        return result

    def refused(self, status: str, op: str, **arguments) -> None:
        """A step that must be refused with this status."""
        step, answer = self._run(op, arguments)
        if answer["status"] != status:
            raise AssertionError(f"{self.slug}: {op} gives {answer['status']}, not {status}: {answer.get('detail')}")
        self.steps.append(step | {"status": status})

    def bound(self, **bounds) -> None:
        """Bounds of the last step, beside its expected results."""
        self.steps[-1]["expect"] |= bounds


class Group:
    def __init__(self, name: str, note: str, level: str, needs: tuple[str, ...]):
        self.name, self.note = name, note
        self._flags = [level, *needs]
        self.tests: list[Script] = []

    def test(self, slug: str, comment: str) -> Script:
        script = Script(slug, comment, self._flags)
        self.tests.append(script)
        return script


class Suite:
    """One vector file."""

    def __init__(self, name: str, level: str = "L1"):
        self.name, self._level = name, level
        self.groups: list[Group] = []

    def group(self, name: str, note: str, needs: tuple[str, ...] = (), level: str | None = None) -> Group:
        """`needs` are flags of what an implementation may lack; it then skips the tests."""
        group = Group(name, note, level or self._level, needs)
        self.groups.append(group)
        return group
