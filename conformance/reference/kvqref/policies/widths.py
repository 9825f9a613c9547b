"""The greedy allotment of widths to pairs: Block-GTQ and pair-widths (FORMATS section 6)."""

from dataclasses import dataclass

import numpy as np

from ..errors import require
from ..ratio import Ratio


@dataclass(frozen=True)
class WidthBudget:
    """avg bits per pair's channel, limits of a width, pairs per move."""

    avg: Ratio
    bmin: int = 1
    bmax: int = 8
    unit: int = 1

    def total(self, pairs: int) -> int:
        """B = floor(avg * D/2)."""
        return self.avg.floor_of(pairs)

    def check(self, pairs: int, lowest: int) -> None:
        """INVALID where limits, unit and budget do not fit; lowest is 0 for pair-widths, 1 for Block-GTQ."""
        require(lowest <= self.bmin <= self.bmax <= 8, f"widths {self.bmin}..{self.bmax} are no limits")
        require(self.unit >= 1 and pairs % self.unit == 0, f"unit {self.unit} does not divide {pairs} pairs")
        require(self.total(pairs) >= self.bmin * pairs, f"the budget is below {self.bmin} bits a pair")


def _runs(scores: list[float], unit: int) -> list[list[int]]:
    """Pairs that move together, by descending score; single pairs stay in their order."""
    if unit == 1:
        return [[pair] for pair in range(len(scores))]
    order = sorted(range(len(scores)), key=lambda pair: (-scores[pair], pair))
    return [order[i : i + unit] for i in range(0, len(order), unit)]


def _run_score(scores: list[float], run: list[int]) -> float:
    total = scores[run[0]]
    for pair in run[1:]:
        total += scores[pair]
    return total


def allot_widths(scores, budget: WidthBudget, lowest: int) -> np.ndarray:
    """Width of every pair: from bmin everywhere, the run of largest score * 4^-bits gets one more bit."""
    scores = [float(s) for s in scores]
    budget.check(len(scores), lowest)
    require(all(0 <= s < float("inf") for s in scores), "a score is NaN, negative or infinite")
    runs = _runs(scores, budget.unit)
    sums = [_run_score(scores, run) for run in runs]
    bits = [budget.bmin] * len(runs)
    left = budget.total(len(scores)) - budget.bmin * len(scores)
    while left >= budget.unit:
        open_runs = [i for i, b in enumerate(bits) if b < budget.bmax]
        if not open_runs:
            break
        best = min(open_runs, key=lambda i: (-(sums[i] * 4.0 ** -bits[i]), bits[i], i))
        bits[best] += 1
        left -= budget.unit
    widths = np.zeros(len(scores), np.int64)
    for run, b in zip(runs, bits):
        widths[run] = b
    return widths


def list_text(widths) -> str:
    """The LIST of a codec text: one digit per entry."""
    return "".join(str(int(w)) for w in widths)
