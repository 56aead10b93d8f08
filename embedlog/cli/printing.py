"""The output of the commands: lines, JSON, and tables that fit the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from embedlog.display import NONE, cut, text_table

_MIN_WIDTH = 8
"""No cell is shortened to fewer characters, and no heading at all."""


def say(*lines: str) -> None:
    """Print lines to stdout."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def note(*lines: str) -> None:
    """Print lines to stderr, which are not part of the result."""
    sys.stderr.write("".join(f"{line}\n" for line in lines))


def say_json(result: Any) -> None:
    """Print one JSON document on one line."""
    import json  # Imported here: commands without JSON start faster.

    say(json.dumps(result, ensure_ascii=False))


def say_result(args: argparse.Namespace, document: Any, lines: Iterable[str]) -> None:
    """Print a result to stdout: as one JSON document with --json, otherwise as lines."""
    if args.json:
        say_json(document)
    else:
        say(*lines)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a table as lines; on a terminal, long cells are shortened so that the lines fit.

    Columns for which there is no room are left out, the last ones first; the last line then
    names them.
    """
    if not sys.stdout.isatty():
        return text_table(heads, rows)
    import shutil

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


def say_rows(
    args: argparse.Namespace,
    heads: Sequence[str],
    fields: Sequence[str],
    rows: Sequence[Sequence[object]],
) -> None:
    """Print rows: as a table, or with --json as objects with these fields."""
    documents = [dict(zip(fields, row, strict=True)) for row in rows]
    say_result(args, documents, table(heads, rows))
