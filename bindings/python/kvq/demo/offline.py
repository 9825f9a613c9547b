"""The demo without the model: attention over recorded queries, keys and values."""

import kvq
from kvq.lab import accounting, show, trace


def run(recipes, threads, picture):
    """Replay the trace over every recipe, print the table, write the picture."""
    from kvq.lab.plot import Point, quality_picture  # matplotlib takes a while to load

    recorded = trace.load()
    exact = recorded.exact()[:, recorded.prompt :]
    rows, points = [], []
    with show.progress("Replaying the trace", len(recipes)) as advance:
        for recipe in recipes:
            with kvq.Cache(recipe, n_threads=threads, **recorded.geometry()) as cache:
                result = trace.replay(recorded, cache)
                cost = accounting.cost(cache, recorded.tokens)
            error = trace.relative_error(result.out, exact)
            rows.append(
                (
                    recipe,
                    f"{cost.bits:.2f}",
                    f"{cost.bytes / 2**10:.0f}",
                    f"{cost.fp16_bytes / cost.bytes:.1f}x",
                    f"{error:.1e}",
                    f"{1e6 * result.seconds:.0f}",
                )
            )
            if recipe != "fp16":
                points.append(Point(recipe, cost.bits, error))
            advance()
    layers = ", ".join(map(str, recorded.layers))
    title = f"SmolLM2 layers {layers}: {recorded.tokens} recorded tokens, {recorded.prompt} of them the prompt"
    show.table(title, ("recipe", "bits", "KiB", "ratio", "error", "µs"), rows)
    show.console.print(
        "bits: per element of a long cache.  KiB, ratio: of this one, raw tail included.\n"
        "error: squared error of attention outputs over their energy.  µs: attention per token and layer."
    )
    quality_picture(points, picture, "relative squared error of attention", title)
    show.console.print(f"Picture: {picture}")
