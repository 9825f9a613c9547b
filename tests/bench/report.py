"""Reports of the device's benchmarks: how they begin, how a row is printed, how they are kept."""

import datetime
import json
import os
import subprocess
import sys

CLOCKS = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw"


def begin(**facts):
    """What was run, when, of which revision (KVQ_REVISION) and on which device; then `facts`, and no results yet."""
    query = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader"]
    return {
        "command": " ".join(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "revision": os.environ.get("KVQ_REVISION", ""),
        "device": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        **facts,
        "results": [],
    }


def show(row):
    """Print a row on one line."""
    print(
        " ".join(f"{key}={value:.5g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()), flush=True
    )


def keep(report, path):
    """Write the report to `path`, if there is one."""
    if path:
        with open(path, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
