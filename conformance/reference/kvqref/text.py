"""The text form `name(key=value,...)` (FORMATS section 5) and the kinds of values in it."""

import re

import numpy as np

from .errors import require
from .ratio import Ratio

_NAME = re.compile(r"[a-z][a-z0-9-]*")
_KEY = re.compile(r"[a-z][a-z0-9_]*")


def split_outside_parentheses(text: str, separator: str) -> list[str]:
    """Split at separators that are in no parentheses."""
    parts, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        depth += (ch == "(") - (ch == ")")
        require(depth >= 0, f"unbalanced parentheses in {text}")
        if ch == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    require(depth == 0, f"unbalanced parentheses in {text}")
    return parts + [text[start:]]


def parse_call(text: str) -> tuple[str, dict[str, str]]:
    """`name` or `name(key=value,...)` -> name and values."""
    require(isinstance(text, str), "a codec or policy must be text")
    name, bracket, rest = text.partition("(")
    require(_NAME.fullmatch(name) is not None, f"no name in {text!r}")
    if not bracket:
        return name, {}
    require(rest.endswith(")"), f"no closing parenthesis in {text!r}")
    values: dict[str, str] = {}
    for part in split_outside_parentheses(rest[:-1], ","):
        key, equals, value = part.partition("=")
        require(equals == "=" and _KEY.fullmatch(key) is not None and value != "", f"{part!r} is no key=value")
        require(re.search(r"\s", value) is None, f"space in {text!r}")
        require(key not in values, f"key {key} is repeated")
        values[key] = value
    return name, values


def with_value(text: str, key: str, value: str) -> str:
    """The call text with one more key=value at its end."""
    return f"{text[:-1]},{key}={value})" if text.endswith(")") else f"{text}({key}={value})"


class Arguments:
    """The values of one call, taken one by one; `finish` refuses what nobody took."""

    def __init__(self, name: str, values: dict[str, str]):
        self.name = name
        self._left = dict(values)

    def _take(self, key: str, default):
        value = self._left.pop(key, default)
        require(value is not None, f"{self.name} lacks {key}=")
        return value

    def integer(self, key: str, default: int | None = None, low: int = 0, high: int = (1 << 64) - 1) -> int:
        text = self._take(key, None if default is None else str(default))
        require(re.fullmatch(r"[0-9]{1,20}", text) is not None, f"{key}={text} is no decimal number")
        require(low <= int(text) <= high, f"{key}={text} is out of range")
        return int(text)

    def levels(self, key: str, allowed) -> int:
        value = self.integer(key)
        require(value in allowed, f"{key}={value} is no level count")
        return value

    def flag(self, key: str, default: int = 0) -> bool:
        return bool(self.integer(key, default, 0, 1))

    def choice(self, key: str, allowed: tuple[str, ...], default: str | None) -> str | None:
        """One of the allowed words; the default (which may be None) when absent."""
        if key not in self._left:
            return default
        value = self._left.pop(key)
        require(value in allowed, f"{key}={value} is not one of {', '.join(allowed)}")
        return value

    def ratio(self, key: str) -> Ratio:
        return Ratio.of(self._take(key, None))

    def mask(self, key: str, n: int) -> np.ndarray:
        """n booleans from hex."""
        return mask_from_hex(self._take(key, None), n)

    def digits(self, key: str, n: int, low: int, high: int) -> np.ndarray:
        """A LIST of n entries."""
        text = self._take(key, None)
        require(re.fullmatch(r"[0-9]+", text) is not None and len(text) == n, f"{key} must have {n} digits")
        values = np.array([int(ch) for ch in text])
        require(bool((values >= low).all() and (values <= high).all()), f"{key} has an entry outside {low}..{high}")
        return values

    def finish(self) -> None:
        require(not self._left, f"{self.name} does not know {', '.join(self._left)}")


def mask_from_hex(text: str, n: int) -> np.ndarray:
    """Bit i is bit i mod 8 of byte i div 8; exactly ceil(n/8) bytes, unused bits 0."""
    size = (n + 7) // 8
    require(re.fullmatch(r"[0-9a-fA-F]*", text) is not None and len(text) == 2 * size, f"mask must be {size} bytes in hex")
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), bitorder="little")
    require(not bits[n:].any(), "unused mask bits are set")
    return bits[:n].astype(bool)


def mask_to_hex(mask: np.ndarray) -> str:
    return np.packbits(np.asarray(mask, np.uint8), bitorder="little").tobytes().hex()
