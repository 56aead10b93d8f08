"""Tables and values as text, for terminals and notebooks."""

from __future__ import annotations

import html
import importlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from embedlog.errors import EmbedlogError

NONE = "-"
"""The text for a missing value, as in the tables of Kafka's own tools."""


def html_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a title and a table for notebooks."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(NONE if cell is None else str(cell))}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<b>{html.escape(title)}</b>{table}"


def text_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a table as lines: columns are two blanks apart, without trailing blanks."""
    # No cell is empty, so that columns can be counted.
    texts = ([NONE if cell in (None, "") else str(cell) for cell in row] for row in rows)
    cells = [list(heads), *texts]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def moment(timestamp: int) -> str:
    """Return a timestamp as text; in milliseconds if it is outside of the calendar."""
    try:
        time = datetime.fromtimestamp(timestamp / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{timestamp} ms"
    return time.isoformat(sep=" ", timespec="milliseconds")


def plural(count: int, noun: str) -> str:
    """Return a number with a noun, such as ``2 topics``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def short(item: Any) -> str:
    """Return the first 80 bytes or characters of a key or value as text."""
    text = item[:80].decode("utf-8", "replace") if isinstance(item, bytes) else str(item)[:80]
    length = len(item) if isinstance(item, bytes) else len(str(item))
    return text + "…" if length > 80 else text


def need(package: str) -> Any:
    """Import an optional dependency."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise EmbedlogError(
            f"{package} is not installed", todo=f"Run pip install {package}."
        ) from error
