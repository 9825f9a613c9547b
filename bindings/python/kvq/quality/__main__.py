"""Measure every recipe on SmolLM2-135M-Instruct and write docs/quality.md's table, its picture and tests/bench/results/quality.json.

The protocol is in docs/quality.md.  Results are kept in build/quality/; a run that was stopped goes on where it was.
"""

import argparse
import sys
import time

from kvq.lab import places, show, streams, text
from kvq.lab.model import Model, read_gguf
from kvq.lab.tokens import Tokens

from . import checks, measure, report, rows
from .store import Store


def main():
    parser = argparse.ArgumentParser(
        prog="python -m kvq.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="only rows whose name contains this; nothing is written")
    parser.add_argument("--threads", type=int, default=2, help="threads of a cache's attention (default %(default)s)")
    args = parser.parse_args()
    wanted = [row for row in rows.all_rows() if args.only in row.name]
    store = Store(places.build("quality"))
    missing = [(w, row) for w in text.HELD_OUT for row in wanted if store.load(row, w) is None]
    if missing:
        fill(store, missing, args.threads)
    results = report.collect(store, wanted)
    report.show_table(results)
    if args.only:
        return
    verdicts = checks.check(results)
    for verdict in verdicts:
        show.console.print(f"{'pass' if verdict.passed else 'FAIL'}  {verdict.text}")
    for file in report.write(results, verdicts, places.root()):
        show.console.print(f"wrote {file}")
    sys.exit(not all(verdict.passed for verdict in verdicts))


def fill(store, missing, threads):
    """Measure what is missing: window by window, since an exact pass comes first."""
    start = time.perf_counter()
    reader = read_gguf()
    model = Model(reader)
    windows = text.handbook_windows(Tokens(reader))
    policies = Policies(model, windows)
    with show.progress("Measuring", len(missing)) as advance:
        for number in sorted({w for w, _ in missing}):
            window = measure.Window.read(model, windows[number])
            for row in (row for w, row in missing if w == number):
                with measure.open_cache(model, row.recipe, threads) as cache:
                    if row.calibrated:
                        policies.freeze(cache)
                    scores, cost = measure.measure(model, window, cache)
                store.save(row, number, scores, cost)
                advance(f"{row.name}, window {number}: {cost.bits:.2f} bits, KL {scores.kl.mean():.4f}")
    show.console.print(f"{len(missing)} measurements in {(time.perf_counter() - start) / 60:.1f} minutes")


class Policies:
    """Policies that belong to a cache: made once per recipe, from one exact pass over the calibration windows."""

    def __init__(self, model, windows):
        self._model, self._windows = model, windows
        self._texts, self._frozen = [], {}

    def freeze(self, cache):
        """Give `cache` its policy."""
        if cache.recipe in self._frozen:
            cache.set_policy(self._frozen[cache.recipe])
            return
        if not self._texts:
            chosen = self._windows[list(text.CALIBRATION), : text.WINDOW]
            self._texts = [streams.read_prompt(self._model, ids) for ids in chosen]
        measure.calibrate(cache, self._texts)
        self._frozen[cache.recipe] = cache.policy()


if __name__ == "__main__":
    main()
