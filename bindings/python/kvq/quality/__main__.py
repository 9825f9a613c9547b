"""Measure every recipe on SmolLM2-135M-Instruct and write docs/quality.md's table, its picture and tests/bench/results/quality.json.

The protocol is in docs/quality.md.  Results are kept in build/quality/; a run that was stopped goes on where it was.
"""

import argparse
import sys
import time

from kvq.lab import places, show, text
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
    policies = {}  # Block-GTQ's frozen policies by recipe
    with show.progress("Measuring", len(missing)) as advance:
        for number in sorted({w for w, _ in missing}):
            window = measure.Window.read(model, windows[number])
            for row in (row for w, row in missing if w == number):
                with measure.open_cache(model, row.recipe, threads) as cache:
                    if row.calibrated and row.recipe in policies:
                        cache.set_policy(policies[row.recipe])
                    elif row.calibrated:
                        measure.calibrate(model, cache, windows[list(text.CALIBRATION)])
                        policies[row.recipe] = cache.policy()
                    store.save(row, number, *measure.measure(model, window, cache))
                advance()
    show.console.print(f"{len(missing)} measurements in {(time.perf_counter() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
