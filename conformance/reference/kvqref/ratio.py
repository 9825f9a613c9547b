"""Rational parameters as pairs of integers (FORMATS section 1.6)."""

import re
from dataclasses import dataclass

from .errors import require


@dataclass(frozen=True)
class Ratio:
    p: int
    q: int

    @staticmethod
    def of(value) -> "Ratio":
        """From "p/q", "p", an integer or a Ratio; never from a float."""
        if isinstance(value, Ratio):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        require(isinstance(value, str), f"{value!r} is no ratio p/q")
        match = re.fullmatch(r"([0-9]{1,18})(?:/([0-9]{1,18}))?", value)
        require(match is not None, f"{value!r} is no ratio p/q")
        p, q = int(match[1]), int(match[2] or 1)
        require(q > 0, f"{value!r} divides by zero")
        return Ratio(p, q)

    @staticmethod
    def share(value) -> "Ratio":
        """A ratio between 0 and 1."""
        ratio = Ratio.of(value)
        require(ratio.p <= ratio.q, f"{ratio.p}/{ratio.q} is above 1")
        return ratio

    def floor_of(self, n: int) -> int:
        """floor(ratio * n)."""
        return self.p * n // self.q

    def half_even_of(self, n: int) -> int:
        """ratio * n rounded to the nearest integer, ties to even."""
        whole, rest = divmod(self.p * n, self.q)
        return whole + (2 * rest > self.q or (2 * rest == self.q and whole % 2 == 1))
