"""The benchmark against ggml measures, checks and draws, here without ggml."""

import json
import subprocess
import sys
from pathlib import Path

DRIVER = Path(__file__).resolve().parents[1] / "bench" / "peers" / "bench_peers.py"


def drive(*arguments):
    subprocess.run([sys.executable, DRIVER, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def test_a_short_run_has_a_row_for_every_level_and_a_picture(tmp_path):
    results, picture = tmp_path / "peers.json", tmp_path / "peers.svg"
    shape = ["--tokens", "200,400", "--group", 4, "--dim", 64, "--kv-heads", 2, "--rounds", 2]
    drive("--recipes", "tq-3,kvq-3", *shape, "--json", results)
    report = json.loads(results.read_text())
    rows = report["results"]
    levels = {row["level"] for row in rows}
    assert "portable" in levels and len(rows) == 2 * 2 * len(levels)
    assert all(row["error"] < 1e-3 and row["ns_per_token_head"] > 0 for row in rows)
    assert set(report["read_bytes_per_second"]) == {"1048576", "33554432", "1073741824"}
    drive("--plot", results, picture)
    assert picture.stat().st_size > 1000
