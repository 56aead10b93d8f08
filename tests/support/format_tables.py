"""The tables of rows in docs/format.md, made from `keyspace.TABLES`.

``make docs-tables`` (or ``python tests/support/format_tables.py``) writes them into the page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from embedlog import keyspace
from embedlog.keyspace import FieldType, Table

PAGE = Path(__file__).parents[2] / "docs" / "format.md"
_BLOCK = re.compile(r"(<!-- tables of (\w+): .*? -->\n).*?(<!-- end -->)", re.DOTALL)


def render(database: str) -> str:
    """Return the rows of a database as a table of Markdown."""
    lines = ["| table | key | value | |", "|---|---|---|---|"]
    for table in keyspace.TABLES:
        if table.database == database:
            value = _fields(table.value_layout.fields) or "empty"
            lines.append(f"| {table.name} | {_key(table)} | {value} | {table.purpose} |")
    return "\n".join(lines) + "\n"


def _key(table: Table) -> str:
    fields = _fields(table.key_layout.fields)
    return f"`{table.letter.decode()}` {fields}".rstrip()


def _fields(fields: Mapping[str, FieldType]) -> str:
    return ", ".join(f"{name}: {field.name}" for name, field in fields.items())


def with_tables(page: str) -> str:
    """Return the page with its tables as they must be."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{render(match[2])}\n{match[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"wrote the tables of {PAGE.name}\n")
