"""lint.py [--fix]: formatting, file sizes and dependency directions of the files that git knows."""

import re
import subprocess
import sys
from pathlib import Path

MAX_LINES = 600

# What a folder of src/ may include besides itself, kvq.h and the standard library.
PARTS = {"recipe", "policy", "codec", "backend", "util"}
MAY_INCLUDE = {
    "util": set(),
    "codec": {"util"},
    "policy": PARTS,
    "recipe": PARTS,
    "backend": PARTS,
    "cpu": {"backend", "codec", "policy", "util"},
    "engine": PARTS,
    "capi": PARTS | {"engine"},
}
DOORS = {"cpu/cpu_backend.h", "cuda/cuda_backend.h"}  # how capi gets at a backend


def tracked(*patterns):
    listing = subprocess.run(["git", "ls-files", *patterns], check=True, capture_output=True, text=True).stdout
    return [name for name in listing.splitlines() if Path(name).exists()]


def sizes(files):
    for name in files:
        lines = len(Path(name).read_text().splitlines())
        if lines > MAX_LINES:
            yield f"{name}: {lines} lines, at most {MAX_LINES}"


def directions(files):
    for name in files:
        _, folder, *rest = name.split("/")
        for number, line in enumerate(Path(name).read_text().splitlines(), 1):
            included = re.match(r'#include "((\w+)/[^"]+)"', line)
            if not rest or not included or included[1] in DOORS and folder == "capi":
                continue
            if included[2] not in {folder, "kvq"} | MAY_INCLUDE.get(folder, set()):
                yield f"{name}:{number}: {folder} must not include {included[2]}"


def formatting(fix):
    tools = Path(sys.executable).parent
    native = tracked("*.c", "*.h", "*.cc", "*.cpp", "*.hpp")
    commands = [
        [tools / "clang-format", *(["-i"] if fix else ["--dry-run", "--Werror"]), *native],
        [tools / "ruff", "format", *([] if fix else ["--check"]), "."],
        [tools / "ruff", "check", *(["--fix"] if fix else []), "."],
    ]
    for command in commands:
        if subprocess.run(command).returncode:
            yield f"{Path(command[0]).name} is not content; ./dev lint --fix formats"


sources = tracked("src/*")
texts = tracked("*.c", "*.h", "*.cc", "*.cpp", "*.hpp", "*.cu", "*.cuh", "*.py", "*.i", "dev", "*.sh")
problems = [*sizes(texts), *directions(sources), *formatting("--fix" in sys.argv)]
print("\n".join(problems) or "lint: clean")
sys.exit(bool(problems))
