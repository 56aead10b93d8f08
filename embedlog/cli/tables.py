"""Tables that fit the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence

from embedlog.display import NONE, cut, text_table

_MIN_WIDTH = 8
"""No cell is cut to fewer characters, and no heading at all."""


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a table as lines; on a terminal, long cells are cut so that the lines fit.

    Columns for which there is no room are left out, the last ones first; the last line then
    names them.
    """
    if not sys.stdout.isatty():
        return text_table(heads, rows)
    limit = shutil.get_terminal_size().columns
    texts = [[NONE if cell in (None, "") else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *texts, strict=True)]
    least = [
        min(width, max(len(head), _MIN_WIDTH)) for head, width in zip(heads, widths, strict=True)
    ]
    count = len(heads)
    while count > 1 and _width(least[:count]) > limit:
        count -= 1
    widths = widths[:count]
    while _width(widths) > limit and widths != least[:count]:
        widest = max(range(count), key=lambda column: widths[column] - least[column])
        widths[widest] -= 1
    lines = text_table(heads[:count], (list(map(cut, row[:count], widths)) for row in texts))
    if count < len(heads):
        lines.append(f"No room for {', '.join(heads[count:])}: use a wider terminal, or --json")
    return lines


def _width(columns: Sequence[int]) -> int:
    return sum(columns) + 2 * (len(columns) - 1)
