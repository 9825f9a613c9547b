"""Results on disk, one file per recipe and window, so that an interrupted run goes on where it stopped.

A file counts only for the library that it was measured with.
"""

import hashlib
import json
import zipfile
from pathlib import Path

import numpy as np

import kvq
from kvq.lab.accounting import Cost
from kvq.lab.metrics import FIELDS, Scores


class Store:
    """The results below `folder`."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self._library = hashlib.sha256(Path(kvq.library).read_bytes()).hexdigest()

    def _file(self, row, window):
        key = json.dumps([self._library, row.recipe, row.calibrated, window])
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.npz"

    def save(self, row, window, scores, cost):
        """Keep the result of one row on one window."""
        file = self._file(row, window)
        part = file.with_suffix(".part.npz")
        np.savez(part, cost=json.dumps(vars(cost)), **{name: getattr(scores, name) for name in FIELDS})
        part.rename(file)

    def load(self, row, window):
        """(Scores, Cost), or None if it has not been measured."""
        try:
            with np.load(self._file(row, window)) as file:
                return Scores(*(file[name] for name in FIELDS)), Cost(**json.loads(str(file["cost"])))
        except (FileNotFoundError, zipfile.BadZipFile):
            return None
