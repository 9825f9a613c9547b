"""Time against context length, and what is read per second against what the machine can read, one column of panels per code path, from the
JSON of bench_peers.py."""

import json

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402  (the backend comes first)

GREY = {"ggml f16": "#000000", "ggml q8_0": "#7F7F7F", "ggml q4_0": "#B0B0B0"}


def select(results):
    """The shape that PERFORMANCE's table has (D = 128, 4 query heads per KV head, 1 thread), or else the one with most rows."""

    def shape(result):
        return result["dim"], result["q_heads"] // result["kv_heads"], result["threads"]

    wanted = (128, 4, 1)
    shapes = [shape(result) for result in results]
    if wanted not in shapes:
        wanted = max(set(shapes), key=shapes.count)
    return wanted, [result for result in results if shape(result) == wanted]


def lines(rows, level, number):
    """Name -> points of it, of libkvq on one code path and of ggml."""
    mine = [row for row in rows if row["level"] in ("", level)]
    return {
        name: sorted((row["tokens"], number(row)) for row in mine if row["recipe"] == name)
        for name in dict.fromkeys(row["recipe"] for row in mine)
    }


def panel(axes, drawn, colours, tokens):
    for name, points in drawn.items():
        style = (
            {"color": GREY[name], "linestyle": "--", "marker": "s"} if name in GREY else {"color": colours[name], "marker": "o"}
        )
        axes.plot(*zip(*points), label=name, ms=4, lw=1.2, **style)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(tokens, [f"{t // 1024}K" if t >= 1024 else str(t) for t in tokens])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def ticks(axes, label, values):
    axes.set_ylabel(label)
    axes.set_yticks(values, map(str, values))


def draw(source, picture):
    with open(source) as file:
        report = json.load(file)
    (dim, group, threads), rows = select(report["results"])
    levels = list(dict.fromkeys(row["level"] for row in rows if row["level"]))
    names = list(dict.fromkeys(row["recipe"] for row in rows if row["recipe"] not in GREY))
    colours = {name: plt.get_cmap("tab20")(i % 20) for i, name in enumerate(names)}
    tokens = sorted({row["tokens"] for row in rows})
    figure, panels = plt.subplots(
        2, len(levels), figsize=(2 + 3.6 * len(levels), 8), sharex=True, sharey="row", layout="constrained", squeeze=False
    )
    for time, speed, level in zip(*panels, levels):
        panel(time, lines(rows, level, lambda row: row["ns_per_token_head"]), colours, tokens)
        panel(speed, lines(rows, level, lambda row: row["bytes_per_second"] * 1e-9), colours, tokens)
        for size, rate in report["read_bytes_per_second"].items():
            speed.axhline(rate * 1e-9, color="black", lw=0.8, ls=":")
            speed.annotate(f"reads {int(size) >> 20} MiB", (tokens[0], rate * 1e-9), fontsize=7, va="bottom")
        time.set_title(level)
        speed.set_xlabel("tokens in the cache")
    ticks(panels[0][0], "ns per token and KV head", [5, 10, 20, 50, 100, 200, 500])
    ticks(panels[1][0], "GB/s", [0.5, 1, 2, 5, 10, 20, 50])
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.suptitle(
        f"Decode attention on {report['device']}: D = {dim}, {group} query heads per KV head, {threads} thread(s), {report['revision']}",
        fontsize=10,
    )
    figure.savefig(picture)
