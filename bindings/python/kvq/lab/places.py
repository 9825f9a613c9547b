"""Where things are: in a checkout below its root, elsewhere below the current folder."""

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


def trace_file():
    """The recorded trace."""
    return root() / "tests/data/trace.npz"
