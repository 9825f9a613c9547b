"""Prose for the measurements.

`handbook_windows` cuts windows of tokens out of the Debian Administrator's Handbook (package `debian-handbook`, fetched
with apt and unpacked into the build folder, not installed).  Only paragraphs count: no listings, tables or licences.
`own_prose` is a short story that belongs to this project, for places without apt.
"""

import html
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np

from .places import build, one_at_a_time

PACKAGE = "debian-handbook"
SKIPPED_PAGES = ("foreword", "index", "legal", "license", "licence", "copyright", "foundation-documents")
SHORTEST = 200  # characters of a paragraph

WINDOW = 2048  # tokens
WINDOWS = 10  # cut from the whole book, evenly spaced
HELD_OUT = (2, 6)  # nothing was ever chosen on these two
CALIBRATION = (8, 9)  # for policies that belong to a cache


class TextMissing(RuntimeError):
    """The handbook cannot be fetched here."""


def own_prose():
    """A short story of 1414 tokens."""
    return (Path(__file__).parent / "prose.txt").read_text(encoding="utf-8")


def fetch_handbook(folder):
    """Path of the handbook's English pages, below `folder`; fetched on first use."""
    folder = Path(folder)
    pages = folder / PACKAGE / "usr/share/doc/debian-handbook/html/en-US"
    if pages.is_dir():
        return pages
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise TextMissing("apt-get and dpkg are needed to fetch the text")
    folder.mkdir(parents=True, exist_ok=True)
    for command in (["apt-get", "download", PACKAGE], ["apt-get", "update"], ["apt-get", "download", PACKAGE]):
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        archives = list(folder.glob(PACKAGE + "_*.deb"))
        if archives:
            subprocess.run(["dpkg", "-x", archives[0], folder / PACKAGE], check=True)
            return pages
    raise TextMissing(f"cannot download {PACKAGE}: {result.stderr.strip()}")


def paragraphs(page):
    """Texts of the longer paragraphs of one HTML page."""
    source = re.sub(r"(?s)<(pre|table|script|style|dl)\b.*?</\1>", " ", page.read_text(encoding="utf-8"))
    for match in re.finditer(r'(?s)<div class="para">(.*?)</div>|<p class="para">(.*?)</p>', source):
        text = html.unescape(re.sub(r"<[^>]+>", "", match[1] or match[2]))
        text = re.sub(r"\s+", " ", text).strip()
        if len(text) > SHORTEST:
            yield text


def handbook_text(pages):
    """All paragraphs in the order of the pages, each once, separated by blank lines."""
    unique = {}
    for page in sorted(Path(pages).glob("*.html")):
        if not any(word in page.name for word in SKIPPED_PAGES):
            unique.update(dict.fromkeys(paragraphs(page)))
    return "\n\n".join(unique)


def handbook_windows(tokens, folder=None):
    """Windows [WINDOWS][WINDOW + 1] of token ids; the last id of a window is only ever predicted.

    tokens: a `kvq.lab.tokens.Tokens`.  The ids are kept in a file below `folder`.
    """
    folder = folder or build("text")
    kept = Path(folder) / "windows.npy"
    with one_at_a_time(folder):
        if not kept.exists():
            ids = tokens.encode(handbook_text(fetch_handbook(folder)))
            step = (len(ids) - WINDOW - 1) // (WINDOWS - 1)
            assert step >= WINDOW, "windows must not overlap"
            np.save(kept, np.stack([ids[i * step : i * step + WINDOW + 1] for i in range(WINDOWS)]))
    return np.load(kept)
