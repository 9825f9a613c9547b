"""The runner, and how to call it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conformance_paths import CONFORMANCE, PACKAGES


@pytest.fixture(scope="session")
def runner(tmp_path_factory) -> Path:
    """kvq-conform: the one of the build tree, else compiled here."""
    built = CONFORMANCE.parent / "build" / "release" / "conformance" / "runner" / "kvq-conform"
    given = os.environ.get("KVQ_CONFORM")
    if given or built.exists():
        return Path(given or built)
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.fail("no build/release and no C compiler")
    program = tmp_path_factory.mktemp("runner") / "kvq-conform"
    sources = sorted(map(str, (CONFORMANCE / "runner").glob("*.c")))
    flags = ["-std=c99", "-D_POSIX_C_SOURCE=200809L", "-I", str(CONFORMANCE.parent / "include")]
    subprocess.run([compiler, *flags, *sources, "-lcjson", "-ldl", "-lm", "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="session")
def conform(runner):
    """Run kvq-conform against a Python module that answers steps."""

    def run(module: str, *arguments: str) -> subprocess.CompletedProcess:
        command = f"exec {sys.executable} -m {module}"
        return subprocess.run(
            [str(runner), "--exec", command, *arguments],
            capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(PACKAGES)},
        )  # fmt: skip

    return run
