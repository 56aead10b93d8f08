"""Tables and values as text, for terminals and notebooks."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from types import ModuleType

from embedlog.errors import EmbedlogError

NONE = "-"
"""The text for a missing value, as in the tables of Kafka's own tools."""


_EXTRAS = dict.fromkeys(("avro", "fastavro"), '"embedlog[avro]"') | {
    "polars": '"embedlog[polars]"',
    "confluent_kafka": '"embedlog[kafka]"',
}
"""What to install for packages of which embedlog needs some version, or more than them."""
_STYLE = """\
<style scoped>
.embedlog {overflow-x: auto}
.embedlog td, .embedlog th {text-align: left}
.embedlog td {white-space: nowrap}
</style>"""


def html_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a title and a table for notebooks; one that is too wide gets a scroll bar.

    Without rows it is only the title.
    """
    import html

    body = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(NONE if cell is None else str(cell))}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads if body)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'{_STYLE}<div class="embedlog"><b>{html.escape(title)}</b>{table}</div>'


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
    from datetime import UTC, datetime

    try:
        time = datetime.fromtimestamp(timestamp / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{timestamp} ms"
    return time.isoformat(sep=" ", timespec="milliseconds")


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """Return a number with a noun, such as ``2 topics``.

    Args:
        count: The number.
        noun: The noun for one.
        nouns: That for several; by default with an s.
    """
    return f"{count:,} {noun if count == 1 else nouns or f'{noun}s'}"


def cut(text: str, width: int = 60) -> str:
    """Return a text that is at most `width` characters long: its middle is left out.

    >>> cut("consumer-1-4f7b1c9a-6a5e-4b3b-9d0e-0c3a5e7d9f11", 21)
    'consumer-1…3a5e7d9f11'
    """
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def short(item: object) -> str:
    """Return a key or value as text of at most 60 characters; of more its middle is left out."""
    if isinstance(item, bytes):
        # 60 characters take at most 240 bytes.
        data = item if len(item) <= 320 else item[:160] + item[-160:]
        return cut(data.decode("utf-8", "replace"))
    return cut(str(item))


def need(package: str) -> ModuleType:
    """Import an optional dependency, or a module of one.

    Raises:
        EmbedlogError: It is not installed; the error says how to install it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        command = f"pip install {_EXTRAS.get(name, name)}"
        raise EmbedlogError(f"{name} is not installed", todo=f"Run {command}.") from error


def public_names(item: object, *fields: str) -> list[str]:
    """Return the names that programs may use: those of the class, and some fields of the object."""
    owner = type(item)
    # Methods of other libraries, for which there is a hint only, are in `dir` of the class.
    names = (name for name in dir(owner) if not name.startswith("_") and hasattr(owner, name))
    return [*fields, *names]
