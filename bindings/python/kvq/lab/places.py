"""Where things are: in a checkout below its root, elsewhere below the current folder."""

import contextlib
import fcntl
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[4]


def root():
    """The checkout's root, or the current folder for an installed package."""
    return _ROOT if (_ROOT / "include/kvq/kvq.h").exists() else Path.cwd()


def build(name):
    """A folder for generated files, made on first use."""
    folder = root() / "build" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def one_at_a_time(folder):
    """While one process is in here, others that want the same folder wait: whoever comes second finds it filled."""
    with open(Path(folder) / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with the file
        yield


def trace_file():
    """The recorded trace."""
    return root() / "tests/data/trace.npz"
