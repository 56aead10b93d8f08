"""`embedlog export`: writes the records of a topic to a file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from embedlog.cli import argument_types as types
from embedlog.cli.file_formats import FILES, PARQUET, STANDARD_STREAM, add_file_format, format_of
from embedlog.cli.open_log import offset_range, partitions, to_read, view_of
from embedlog.cli.parser import OK, CommandParser, add_flag, add_option, add_rows
from embedlog.cli.printing import note, say, say_json
from embedlog.display import plural
from embedlog.errors import InvalidConfigError
from embedlog.lazy import pc
from embedlog.progress import ProgressBar, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from embedlog.api import Log
    from embedlog.api.topic import TopicView
    from embedlog.api.typed_topic import TypedTopicView
    from embedlog.cli.write_files import Write

    Source = tuple[Iterator[Any], Callable[[IO[bytes]], AbstractContextManager[Write]]]
    """The tables of records to export, and what writes them to a file."""

EXPORT = f"""\
{FILES}
Of a typed topic, the columns of the file are those of the topic, or of --columns, with their
types in Parquet; in CSV and JSON lines, times are text and binary values base64, and in JSON NaN
is null.  Tombstones are left out.  --where is a condition in SQL, and needs Polars.

TIME is a date, with a time or without, in UTC unless it has a zone; or how long ago: 90m, 2d.

examples:
  embedlog export flights flights.parquet --from 2026-01-31 --until 90m
  embedlog export flights --to united.parquet --where "carrier = 'UA'" --columns dest,dep_delay
  embedlog export flights:0,1 - | jq .value
"""


def export_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = EXPORT
    command.add_argument("topic", metavar="TOPIC[:N,N]", type=types.topic)
    command.add_argument("file", metavar="FILE", nargs="?", help="- is stdout")
    add_option(command, "--to", "FILE", "another way to name FILE", dest="to")
    add_file_format(command)
    add_flag(command, "--raw", "write keys and values as they are stored, without serializers")
    add_option(
        command, "--from", "N|TIME", "from this offset or time on", dest="first", type=types.point
    )
    about = "up to this offset or time, without the record at it"
    add_option(command, "--until", "N|TIME", about, dest="stop", type=types.point)
    add_rows(command)
    add_flag(command, "--force", "replace FILE if it exists")


def export(args: argparse.Namespace) -> int:
    """Write the records that the log has now, and print how many."""
    from embedlog.api.typed_topic import TypedTopicView

    name, numbers = args.topic
    files = [file for file in (args.file, args.to) if file is not None]
    if len(files) != 1:
        what = "FILE and --to were both given" if files else "No file was given"
        raise InvalidConfigError(what, todo="Name one file, or - for stdout.")
    path = files[0]
    file_format = format_of(path, args.format)
    bar = ProgressBar(f"export {name}", lambda count: plural(int(count), "record"))
    with to_read(args) as log, bar:
        logs = partitions(log, name, numbers)
        ranges = [offset_range(part, args.first, args.stop) for part in logs]
        view = view_of(log, name, ranges)
        total, counts = len(view), dict.fromkeys((part.partition for part in ranges), 0)
        if isinstance(view, TypedTopicView):
            tables, writer = _typed(view, args, file_format)
        else:
            tables, writer = _stored(log, view, args, file_format)
        with destination(path, force=args.force) as file, writer(file) as write:
            for table in tables:
                for entry in pc.value_counts(table["partition"]).to_pylist():
                    counts[entry["values"]] += entry["counts"]
                write(table)
                bar(sum(counts.values()), total)
    written = sum(counts.values())
    if path == STANDARD_STREAM:
        if sys.stderr.isatty():
            note(f"Exported {plural(written, 'record')} of {name}")
        return OK
    size = os.path.getsize(path)
    if args.json:
        parts = [{**part._asdict(), "records": counts[part.partition]} for part in ranges]
        document = {"topic": name, "file": path, "format": file_format, "records": written}
        say_json({**document, "bytes": size, "partitions": parts})
        return OK
    say(f"Exported {plural(written, 'record')} of {name} to {path} ({format_bytes(size)})")
    for part in ranges:
        records = plural(counts[part.partition], "record")
        say(f"  partition {part.partition}: offsets [{part.start}, {part.stop}), {records}")
    return OK


def _stored(
    log: Log, view: TopicView[Any, Any], args: argparse.Namespace, file_format: str
) -> Source:
    """Return the records of a topic of bytes, with decoded keys and values.

    Raises:
        InvalidConfigError, InvalidQueryError: An option is wrong, or for typed topics.
    """
    from embedlog.api.frames import decoded_items
    from embedlog.cli.read_files import tables_of
    from embedlog.cli.write_files import records_writer
    from embedlog.registry import binder

    if args.columns is not None:
        raise InvalidConfigError(
            "--columns is for typed topics, and the values of this one are bytes",
            topic=view.name,
            todo="Leave it out: the file has keys, values, headers, timestamps and offsets.",
        )
    config = log.root.topic(view.name).config
    names = ("bytes", "bytes") if args.raw else (config.key_serializer, config.value_serializer)
    decode = partial(decoded_items, topic=view.name, serializers=names, bind=binder(log.root))
    schema = decode(view.schema().empty_table()).schema
    tables = map(decode, tables_of(view.batches()))
    if args.where is not None:
        from embedlog.schemas.row_filter import row_filter

        tables = map(row_filter(args.where, schema, view.name).keep, tables)
    return tables, lambda file: records_writer(file, file_format, schema, view.name, names)


def _typed(view: TypedTopicView, args: argparse.Namespace, file_format: str) -> Source:
    """Return the rows of a typed topic; CSV and JSON lines have timestamps in milliseconds.

    Raises:
        InvalidConfigError, InvalidQueryError: There is no such column, or an option is wrong.
    """
    from embedlog.api.typed_topic import no_bytes
    from embedlog.cli.read_files import tables_of
    from embedlog.cli.write_files import rows_writer, with_plain_timestamp

    if args.raw:
        raise no_bytes(view.name)
    try:
        schema = view.schema(args.columns)
    except KeyError as error:
        raise InvalidConfigError(error.args[0], topic=view.name) from None
    view._condition(args.where)  # Raises if it is wrong.

    def chosen(table: Any) -> Any:
        table = table.select(schema.names)
        return table if file_format == PARQUET else with_plain_timestamp(table)

    names = list(dict.fromkeys([*schema.names, "partition"]))
    return tables_of(view.batches(names, where=args.where)), lambda file: rows_writer(
        file, file_format, schema, chosen
    )


@contextmanager
def destination(path: str, *, force: bool) -> Iterator[IO[bytes]]:
    """Yield the file to write, which replaces ``path`` only once it is complete.

    Raises:
        InvalidConfigError: The file exists, and is not to be replaced.
    """
    if path == STANDARD_STREAM:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    elif os.path.exists(path) and not os.path.isfile(path):  # a pipe, or a device
        with open(path, "wb") as file:
            yield file
    else:
        if os.path.exists(path) and not force:
            raise InvalidConfigError(
                "The file exists", path=path, todo="Use --force to replace it."
            )
        part = f"{path}.part"
        try:
            with open(part, "wb") as file:
                yield file
            os.replace(part, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(part)
            raise
