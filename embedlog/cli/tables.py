"""Tables that fit the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence

from embedlog.display import NONE, cut, text_table

_MIN_WIDTH = 8
"""No column is cut to fewer characters."""


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a table as lines; on a terminal, long cells are cut so that the lines fit."""
    if not sys.stdout.isatty():
        return text_table(heads, rows)
    texts = [[NONE if cell in (None, "") else str(cell) for cell in row] for row in rows]
    widths = _widths([heads, *texts], shutil.get_terminal_size().columns)
    cells = [list(map(cut, row, widths)) for row in (heads, *texts)]
    return text_table(cells[0], cells[1:])


def _widths(rows: Sequence[Sequence[str]], limit: int) -> list[int]:
    """Return widths for the columns, the widest made narrower until all fit."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > limit and max(widths) > _MIN_WIDTH:
        widths[widths.index(max(widths))] -= 1
    return widths
