"""How views picture themselves: tables for terminals and notebooks."""

from __future__ import annotations

import html
import importlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from embedlog.errors import EmbedlogError

NONE = "-"
"""What stands where there is nothing, as in the tables of Kafka's own tools."""


def html_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a title and a table for notebooks."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_filled(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<b>{html.escape(title)}</b>{table}"


def text_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a table as lines: columns two blanks apart, nothing after the last."""
    cells = [list(heads), *([told(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def told(cell: object) -> str:
    """Return what stands in a table for a value; never nothing, so that columns can be counted."""
    return NONE if cell is None or cell == "" else str(cell)


def _filled(cell: object) -> str:
    return NONE if cell is None else str(cell)


def moment(timestamp: int) -> str:
    """Return a time as text; a producer may write one that no calendar has."""
    try:
        found = datetime.fromtimestamp(timestamp / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{timestamp} ms"
    return found.isoformat(sep=" ", timespec="milliseconds")


def short(data: bytes | None) -> str:
    """Return the beginning of a key or a value as text."""
    if data is None:
        return "None"
    text = data[:80].decode("utf-8", "replace")
    return text + "…" if len(data) > 80 else text


def need(package: str) -> Any:
    """Import what is not always installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise EmbedlogError(f"{package} is not installed", todo=f"pip install {package}") from error
