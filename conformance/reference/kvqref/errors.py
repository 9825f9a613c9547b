"""Refusals. Every refused operation raises one `KvqError` whose status is a word of FORMATS section 10."""


class KvqError(Exception):
    """A refusal: `status` is INVALID, STATE, STALE, NONFINITE or CORRUPT; the text says why."""

    def __init__(self, status: str, detail: str):
        super().__init__(f"{status}: {detail}")
        self.status = status


def require(condition: bool, detail: str) -> None:
    """Refuse an argument: INVALID unless the condition holds."""
    if not condition:
        raise KvqError("INVALID", detail)


def intact(condition: bool, detail: str) -> None:
    """Refuse wire bytes: CORRUPT unless the condition holds (FORMATS section 5, "Decoding refuses")."""
    if not condition:
        raise KvqError("CORRUPT", detail)
