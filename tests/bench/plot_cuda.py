"""Pictures of a report of bench_cuda.py: plot_cuda.py REPORT.json PICTURE.  Left, one sequence: time against context length.  Right, the
largest shape: times faster than cuDNN's FP16 attention, and the limit that the bytes set."""

import json
import sys

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402  (the backend comes first)

BASELINE, OURS, LIMIT = "#000000", "#D55E00", "#BBBBBB"


def fp16_bytes(row):
    """Bytes of K and V of a token and KV head in FP16."""
    return 4 * row["dim"]


def time_against_context(axes, results, baselines):
    names = dict.fromkeys(row["recipe"] for row in results)
    lines = {name: [row for row in results if row["recipe"] == name] for name in names}
    lines = {"cuDNN FP16": [row for row in baselines if row["what"] == "cudnn"], **lines}
    for i, (name, rows) in enumerate(lines.items()):
        style = (
            {"color": BASELINE, "linestyle": "--", "marker": "s"}
            if i == 0
            else {"color": plt.get_cmap("tab20")(i % 20), "marker": "o"}
        )
        points = sorted((row["context"], row["microseconds"]) for row in rows if row["batch"] == 1)
        axes.plot(*zip(*points), label=name, ms=4, lw=1.2, **style)
    ticks = sorted({row["context"] for row in results if row["batch"] == 1})
    axes.set(
        xscale="log", yscale="log", title="one sequence", xlabel="tokens in the cache", ylabel="microseconds of a decode step"
    )
    axes.set_xticks(ticks, [f"{t // 1024}K" for t in ticks])
    axes.set_yticks(micro := [10, 20, 50, 100, 200], map(str, micro))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)


def ratio_against_limit(axes, results):
    batch, context = max(((row["batch"], row["context"]) for row in results), key=lambda shape: shape[0] * shape[1])
    rows = [row for row in results if (row["batch"], row["context"]) == (batch, context)]
    rows.sort(key=lambda row: row["times_fp16"])
    names = [row["recipe"] for row in rows]
    axes.barh(
        names, [fp16_bytes(row) / row["bytes_per_token_head"] for row in rows], color=LIMIT, label="limit: the ratio of the bytes"
    )
    bars = axes.barh(names, [row["times_fp16"] for row in rows], height=0.5, color=OURS, label="measured")
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axes.axvline(1, color=BASELINE, lw=1, ls="--")
    axes.set(title=f"{batch} sequences of {context // 1024}K tokens", xlabel="times faster than cuDNN FP16")
    axes.legend(fontsize=8, frameon=False, loc="lower right")


def main(source, picture):
    with open(source) as file:
        report = json.load(file)
    results = [row for row in report["results"] if "microseconds" in row]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.4), layout="constrained")
    time_against_context(left, results, report["baselines"])
    ratio_against_limit(right, results)
    device = report["device"].split(",")[0]
    figure.suptitle(f"Decode attention on {device}, heads {report['heads']}, {report['revision']}", fontsize=10)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
