"""What demo and quality print: progress on a terminal, tables everywhere."""

import contextlib
import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

WIDTH = 160  # columns where there is no terminal to ask
GAP = 3  # columns between cells
ROOM = 40  # columns that make words beside a table worth reading

console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)


@contextlib.contextmanager
def progress(label, total):
    """A bar on a terminal, plain lines otherwise; yields a function that advances it by one step.

    That function takes a note about the step: beside the bar, or a line of its own.
    """
    if not console.is_terminal:
        console.print(f"{label} ...")
        yield lambda note="": note and console.print(f"  {note}", markup=False)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(label, total=total, note="")
        yield lambda note="": bars.update(task, advance=1, note=note)


def table(title, headings, rows, words_heading="", words=()):
    """Print a table of strings; the first column is text, the others are numbers.  The kvq recipes stand out.

    words: a text for every row, cut off at the right edge; below the table where it is too narrow for them.
    """
    out = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1))
    room = console.width - 2 * GAP
    for i, heading in enumerate(headings):
        width = max(len(row[i]) for row in [headings, *rows])
        out.add_column(heading, justify="right" if i else "left", no_wrap=True)
        room -= width + GAP
    beside = words and room >= ROOM
    if beside:
        out.add_column(words_heading, no_wrap=True)
    for i, row in enumerate(rows):
        cells = [*row]
        if beside:
            cells.append(Text(words[i]))
            cells[-1].truncate(room, overflow="ellipsis")
        out.add_row(*cells, style="bold" if row[0].startswith("kvq") else None)
    console.print(out)
    if words and not beside:
        console.print(f"{words_heading}\n")
        for row, text in zip(rows, words, strict=True):
            console.print(f"{row[0]}: {text}", markup=False)
