"""Quality against bits: one point per recipe, divergence on a logarithmic axis, labels that keep clear of each other."""

from dataclasses import dataclass

import matplotlib
import numpy as np

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402  (the backend comes first)
import textalloc  # noqa: E402

# Colours that stay apart for colour-blind eyes (Okabe and Ito), by the system that a recipe belongs to.
SYSTEMS = {
    "kvq": "#D55E00",
    "PN-Mix": "#0072B2",
    "Block-GTQ": "#009E73",
    "SemKV": "#CC79A7",
    "TQ": "#56B4E9",
    "others": "#7F7F7F",
}
_PREFIXES = {"kvq": "kvq", "pn": "PN-Mix", "block": "Block-GTQ", "sem": "SemKV", "tq": "TQ"}


@dataclass
class Point:
    """One recipe."""

    name: str
    bits: float  # effective, per element
    value: float  # what goes up: the smaller the better
    error: float = 0.0  # standard error of value

    @property
    def system(self):
        """Which of SYSTEMS it belongs to."""
        return next((s for prefix, s in _PREFIXES.items() if self.name.startswith(prefix)), "others")


def quality_picture(points, path, ylabel, title):
    """Write the picture of `points` to `path` (any format that matplotlib knows)."""
    figure, axes = plt.subplots(figsize=(9.6, 6.0), layout="constrained")
    for system, colour in SYSTEMS.items():
        mine = [p for p in points if p.system == system]
        if mine:
            axes.errorbar(
                [p.bits for p in mine],
                [p.value for p in mine],
                yerr=[min(p.error, 0.9 * p.value) for p in mine],
                fmt="o" if system != "kvq" else "D",
                ms=7 if system == "kvq" else 5,
                color=colour,
                capsize=2,
                elinewidth=1,
                label=system,
            )
    axes.set_yscale("log")
    axes.set_xlabel("bits per element of a long cache (codes, parameters and sinks)")
    axes.set_ylabel(ylabel)
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(True, which="major", color="#E5E5E5")
    axes.grid(True, which="minor", axis="y", color="#F3F3F3")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.08, y=0.08)
    axes.legend(frameon=False, loc="upper right")
    figure.canvas.draw()
    _label(axes, points)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label(axes, points):
    """Write the names beside the points, away from points, bars and each other."""
    bars = [(p.bits, np.clip([p.value - p.error, p.value + p.error], 0.1 * p.value, None)) for p in points]
    textalloc.allocate(
        axes,
        [p.bits for p in points],
        [p.value for p in points],
        [p.name for p in points],
        x_scatter=[p.bits for p in points],
        y_scatter=[p.value for p in points],
        x_lines=[[x, x] for x, _ in bars],
        y_lines=[list(ends) for _, ends in bars],
        textsize=8.5,
        textcolor=[SYSTEMS[p.system] for p in points],
        linecolor="#AAAAAA",
        linewidth=0.6,
        max_distance=0.25,
        min_distance=0.012,
        margin=0.004,
        avoid_label_lines_overlap=True,
    )
