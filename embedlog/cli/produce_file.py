"""`embedlog produce`: appends the lines of stdin, or the rows of a file."""

from __future__ import annotations

import argparse
import shlex
from typing import IO

from embedlog.cli import argument_types as types
from embedlog.cli import produce as produce_lines
from embedlog.cli.file_formats import add_file_format
from embedlog.cli.open_log import to_read, to_write
from embedlog.cli.parser import OK, CommandParser, add_flag, add_option
from embedlog.errors import InvalidConfigError, UnknownTopicOrPartitionError

LINES = """\
Without --from, each line of stdin is a record.  With --json each line is an object with value,
key, headers ({name: value} or [[name, value], ...]), partition and timestamp (ms); all of them are
optional.

The rows of a Parquet, CSV or JSON lines file become records of a typed topic, each column by its
name; -z compresses them.  Of a topic of bytes, the lines of a file of JSON lines are the values.

examples:
  embedlog produce flights --from flights.parquet -z zstd
  echo '{"key": "UA", "value": "United"}' | embedlog produce airlines --json
"""


def produce_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = LINES
    command.add_argument("topic", metavar="TOPIC")
    add_option(command, "--key-separator -K", "TEXT", "each line is key, TEXT, value")
    add_option(command, "--partition -p", "N", "append to this partition only", type=int)
    command.add_argument(
        *("--compression", "-z"),
        choices=("none", "lz4", "zstd"),
        default="none",
        help="the codec of batches, by default none",
    )
    about = "append the rows of this Parquet, CSV or JSON lines file to a typed topic; - is stdin"
    add_option(command, "--from", "FILE", about, dest="source")
    add_file_format(command, dest="file_format")
    add_option(command, "--skip", "N", "skip the first N rows of FILE", type=types.count, default=0)
    add_flag(command, "--sync", "flush to the disk before the command ends, to survive a power cut")


def produce(args: argparse.Namespace) -> int:
    """Append the rows of a file to a typed topic; without a file, the lines of stdin."""
    if args.source is None:
        for option, value in (("--format", args.file_format), ("--skip", args.skip)):
            if value:
                raise InvalidConfigError(f"{option} is for --from FILE")
        return produce_lines.produce(args)
    # Imported here: lines of stdin do not need them.
    from embedlog.cli.file_formats import JSONL, format_of
    from embedlog.cli.import_file import opened

    file_format = format_of(args.source, args.file_format)
    with opened(args.source) as file:
        if _is_typed(args):
            return _produce_rows(args, file, file_format)
        if file_format == JSONL and not args.skip:
            return produce_lines.produce(args, file)
    name, source = shlex.quote(args.topic), shlex.quote(args.source)
    raise InvalidConfigError(
        "The values of the topic are bytes, and not columns",
        topic=args.topic,
        todo=f"Use `embedlog import {name} {source}` for a file of `embedlog export`, or create a "
        f"topic of columns with `embedlog topics create NAME --schema-from {source}`.",
    )


def _is_typed(args: argparse.Namespace) -> bool:
    name, source = shlex.quote(args.topic), shlex.quote(args.source)
    with to_read(args) as log:
        try:
            return bool(log.root.topic(args.topic).schema_version)
        except UnknownTopicOrPartitionError as error:
            raise UnknownTopicOrPartitionError(
                error.what,
                topic=args.topic,
                todo=f"Create it with `embedlog topics create {name} --schema-from {source}`.",
            ) from None


def _produce_rows(args: argparse.Namespace, file: IO[bytes], file_format: str) -> int:
    from embedlog.cli.file_formats import file_size
    from embedlog.cli.import_file import ImportTarget, append_all, report, rows_of

    if args.key_separator is not None:
        raise InvalidConfigError(
            "--key-separator is for topics of bytes", todo="The topic's columns have the keys."
        )
    with to_write(args, durability="fsync" if args.sync else "os") as log:
        target = ImportTarget(
            log,
            args.topic,
            # Keys choose the partitions of new records, also of those that were exported.
            repartition=args.partition is None,
            raw=False,
            compression_type=args.compression,
        )
        chunks = rows_of(target, file, file_format, args.partition)
        append_all(target, chunks, "produce", file_size(file), args.skip)
    report(target, args.source, file_format, "produce", as_json=args.json)
    return OK
