"""Find libkvq and the extension, and load them: KVQ_LIBRARY, else beside this package, else the build tree, else the system's."""

import os
from pathlib import Path

_here = Path(__file__).resolve().parent
_build = _here.parents[2] / "build" / "release"  # exists only where the package is used from its source tree
SONAME = "libkvq.so.1"


def _candidates():
    if "KVQ_LIBRARY" in os.environ:
        return [os.environ["KVQ_LIBRARY"]]  # who names a library wants that one
    return [str(f) for f in (_here / SONAME, _build / SONAME) if f.exists()] + [SONAME]


def _load():
    problems = []
    for candidate in _candidates():
        problem = capi.load(candidate)
        if not problem:
            return candidate
        problems.append(problem)
    raise ImportError("cannot load libkvq: " + "; ".join(problems) + " (KVQ_LIBRARY names the file to load)")


if not list(_here.glob("_capi.*")):
    __import__(__package__).__path__.append(str(_build / "python" / "kvq"))
try:
    from . import capi
except ImportError as error:
    raise ImportError("the extension of kvq is not built: run ./dev build, or install the wheel") from error

file = _load()
version = capi.kvq_version_string()
