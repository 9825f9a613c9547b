"""The Python of the README runs as it stands there."""

import re
from pathlib import Path

import numpy as np

README = Path(__file__).parents[2] / "README.md"


def test_the_readmes_python_runs():
    (source,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    exec(source, names)
    assert names["out"].shape == (1, 8, 128) and np.isfinite(names["out"]).all()
    assert len(names["seq"]) == 1001
