"""Measure every recipe on SmolLM2-135M-Instruct and write docs/quality.md's table, its picture and tests/bench/results/quality.json.

The protocol is in docs/quality.md.  Results are kept in build/quality/; a run that was stopped goes on where it was.
"""

import argparse
import functools
import sys
import time

import kvq
from kvq.lab import places, show, streams, text
from kvq.lab.model import Model, read_gguf
from kvq.lab.tokens import Tokens

from . import checks, measure, profiles, report, rows
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
    calibration = Calibration(model, windows)
    with show.progress("Measuring", len(missing)) as advance:
        for number in sorted({w for w, _ in missing}):
            window = measure.Window.read(model, windows[number])
            for row in (row for w, row in missing if w == number):
                data = calibration.profile(row.profile) if row.profile else {}
                with kvq.Cache(row.recipe, n_threads=threads, **model.shape.geometry(), **data) as cache:
                    if row.calibrated:
                        calibration.freeze(cache)
                    scores, cost = measure.measure(model, window, cache, row.length, **data)
                store.save(row, number, scores, cost)
                advance(f"{row.name}, window {number}: {cost.bits:.2f} bits, KL {scores.kl.mean():.4f}")
    show.console.print(f"{len(missing)} measurements in {(time.perf_counter() - start) / 60:.1f} minutes")


class Calibration:
    """What comes from the calibration windows, each made once: an exact pass, and from it profiles and frozen policies."""

    def __init__(self, model, windows):
        self._model, self._windows = model, windows
        self._profiles, self._policies = {}, {}

    @functools.cached_property
    def texts(self):
        """The windows after an exact pass."""
        chosen = self._windows[list(text.CALIBRATION), : text.WINDOW]
        return [streams.read_prompt(self._model, ids) for ids in chosen]

    def profile(self, name):
        """Arguments for the cache of a recipe that needs them."""
        if name not in self._profiles:
            self._profiles[name] = getattr(profiles, name)(self.texts)
        return self._profiles[name]

    def freeze(self, cache):
        """Give `cache` its policy."""
        if cache.recipe in self._policies:
            cache.set_policy(self._policies[cache.recipe])
            return
        measure.calibrate(cache, self.texts)
        self._policies[cache.recipe] = cache.policy()


if __name__ == "__main__":
    main()
