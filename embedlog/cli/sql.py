"""`embedlog sql`: prints the result of a query."""

from __future__ import annotations

import argparse
import json

from embedlog.cli.open_log import to_read
from embedlog.cli.parser import OK, CommandParser, add_flag, add_table_format
from embedlog.cli.printing import say, table
from embedlog.lazy import pa

SQL = """\
Every topic is a table, and Polars runs the query: pip install "embedlog[polars]".  A typed topic
has its own columns, a topic of bytes key and value; each has offset, partition and timestamp.
Write a name such as "my-topic" in double quotes.

examples:
  embedlog sql "select carrier, avg(dep_delay) from flights group by carrier"
  embedlog sql "select * from flights where carrier = 'UA'" --format csv > united.csv
"""


def sql_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = SQL
    command.add_argument("query", metavar="QUERY")
    about = "let the query read files and URLs, with read_csv and the like"
    add_flag(command, "--files", about)
    add_table_format(command, "a list of JSON objects")


def sql(args: argparse.Namespace) -> int:
    """Run a query over the topics, and print its result."""
    from embedlog.cli.write_files import write_result
    from embedlog.schemas.json_columns import json_objects

    with to_read(args) as log:
        rows = _plain(log.sql(args.query, files=args.files).to_arrow())
    if args.json or args.format == "json":
        say(json.dumps(list(json_objects(rows)), ensure_ascii=False))
    elif args.format == "table":
        names = rows.column_names
        cells = (list(row.values()) for row in json_objects(rows))
        say(*table(names, (list(map(_cell, row)) for row in cells)))
    else:
        write_result(rows, args.format)
    return OK


def _plain(rows: pa.Table) -> pa.Table:
    """Return a result of Polars in the types of topics; bytes become text if they are UTF-8."""
    from embedlog.schemas.column_types import stored_type

    columns = []
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        null = pa.types.is_null(column.type)
        column = column.cast(pa.string() if null else stored_type(column.type, name))
        if pa.types.is_binary(column.type):
            try:
                column = column.cast(pa.string())
            except pa.ArrowInvalid:
                pass  # It becomes base64.
        columns.append(column)
    return pa.table(columns, names=rows.column_names)


def _cell(item: object) -> str | None:
    if item is None:
        return None
    text = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
    return text.replace("\r", "\\r").replace("\n", "\\n")
