"""Time against context length, one panel per instruction set, from the JSON of bench_peers.py."""

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


def panel(axes, rows, level, colours):
    for name in dict.fromkeys(row["recipe"] for row in rows):
        mine = sorted(
            (row["tokens"], row["ns_per_token_head"]) for row in rows if row["recipe"] == name and row["level"] in ("", level)
        )
        style = (
            {"color": GREY[name], "linestyle": "--", "marker": "s"} if name in GREY else {"color": colours[name], "marker": "o"}
        )
        axes.plot(*zip(*mine), label=name, ms=4, lw=1.2, **style)
    axes.set(xscale="log", yscale="log", title=level, xlabel="tokens in the cache")
    ticks = sorted({row["tokens"] for row in rows})
    axes.set_xticks(ticks, [f"{t // 1024}K" if t >= 1024 else str(t) for t in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def draw(source, picture):
    with open(source) as file:
        report = json.load(file)
    (dim, group, threads), rows = select(report["results"])
    levels = list(dict.fromkeys(row["level"] for row in rows if row["level"]))
    names = list(dict.fromkeys(row["recipe"] for row in rows if row["recipe"] not in GREY))
    colours = {name: plt.get_cmap("tab20")(i % 20) for i, name in enumerate(names)}
    figure, panels = plt.subplots(
        1, len(levels), figsize=(2 + 3.6 * len(levels), 4.8), sharey=True, layout="constrained", squeeze=False
    )
    for axes, level in zip(panels[0], levels):
        panel(axes, rows, level, colours)
    panels[0][0].set_ylabel("ns per token and KV head")
    panels[0][0].set_yticks(ticks := [5, 10, 20, 50, 100, 200, 500], map(str, ticks))
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.suptitle(
        f"Decode attention on {report['device']}: D = {dim}, {group} query heads per KV head, {threads} thread(s), {report['revision']}",
        fontsize=10,
    )
    figure.savefig(picture)
