"""`embedlog import` and `embedlog produce`: append records from files, and lines of stdin."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from embedlog.cli import argument_types as types
from embedlog.cli.file_formats import (
    FILES,
    JSONL,
    add_file_format,
    file_size,
    format_of,
    input_lines,
    keyed,
    opened,
)
from embedlog.cli.open_log import existing_topic, to_read, to_write
from embedlog.cli.parser import OK, CommandParser, add_flag, add_option
from embedlog.cli.printing import note, say, say_json
from embedlog.display import plural
from embedlog.errors import InvalidConfigError, UnknownTopicOrPartitionError
from embedlog.progress import ProgressBar

if TYPE_CHECKING:
    from embedlog.api import Log
    from embedlog.cli.import_target import ImportTarget
    from embedlog.cli.read_files import FileRows
    from embedlog.producer import Producer

IMPORT = f"""\
{FILES}
examples:
  embedlog import flights flights.parquet
  embedlog import flights flights.csv --skip 1000
"""

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

_PAST = {"import": "imported", "produce": "produced"}


def import_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = IMPORT
    command.add_argument("topic", metavar="TOPIC")
    command.add_argument("file", metavar="FILE", help="- is stdin")
    add_file_format(command)
    add_flag(command, "--raw", "store keys and values as they are, without serializers")
    add_option(command, "--skip", "N", "skip the first N records", type=types.count, default=0)
    about = "choose partitions by key, as for new records, not those in the file"
    add_flag(command, "--repartition", about)
    add_flag(command, "--sync", "flush to the disk before the command ends, to survive a power cut")


def import_(args: argparse.Namespace) -> int:
    """Append the records, and print how many, and where; also if the import fails."""
    from embedlog.cli.import_target import ImportTarget, to_partition
    from embedlog.cli.input_records import InputSerializers, file_records
    from embedlog.cli.read_files import read_rows

    file_format = format_of(args.file, args.format)
    with (
        opened(args.file) as file,
        to_write(args, create=True, durability="fsync" if args.sync else "os") as log,
        existing_topic(log, args.topic) as is_new,
    ):
        serializers = InputSerializers(log, args.topic, raw=args.raw)
        target = ImportTarget(log, args.topic, serializers.names, raw=args.raw, is_new=is_new)
        if target.schema is None:
            rows = file_records(file, file_format, serializers)
        else:
            rows = read_rows(file, file_format, target.schema)
        if args.repartition:
            rows = (part._replace(table=to_partition(part.table, None)) for part in rows)
        _append_all(target, rows, "import", file_size(file), args.skip)
    _report(target, args.file, file_format, "import", as_json=args.json)
    return OK


def _append_all(
    target: ImportTarget, parts: Iterable[FileRows], action: str, size: int, skip: int
) -> None:
    """Append the rows of a file, and show the progress; after an error, say how to continue.

    Args:
        target: Where to append.
        parts: The rows of the file.
        action: The command, ``"import"`` or ``"produce"``.
        size: The bytes of the file.
        skip: How many of the first rows are not appended.
    """
    with ProgressBar(f"{action} {target.topic}") as bar:
        try:
            left = skip
            for rows in parts:
                skipped = min(left, rows.table.num_rows)
                left -= skipped
                target.append(rows.table.slice(skipped))
                bar(rows.done, size)
            target.close()
        except BaseException:
            text = f"Nothing was {_PAST[action]}"
            if target.records or target.uncertain:
                count = plural(target.records, "record")
                text = f"{_PAST[action].capitalize()} {count} before the {action} ended"
                if target.uncertain:
                    text += f", and perhaps some of the next {target.uncertain}"
                text += f"; to continue, repeat the command with --skip {skip + target.records}"
            note(text)
            raise


def _report(
    target: ImportTarget, file: str, file_format: str, action: str, *, as_json: bool
) -> None:
    """Print how many records were appended, and where."""
    parts = sorted(target.appended.items())
    if as_json:
        fields = ("first_offset", "next_offset", "records")
        document = {"topic": target.topic, "file": file, "format": file_format}
        partitions = [
            {"partition": number, **dict(zip(fields, part, strict=True))} for number, part in parts
        ]
        say_json({**document, "records": target.records, "partitions": partitions})
        return
    new = " (a new topic)" if target.is_new else ""
    say(f"{_PAST[action].capitalize()} {plural(target.records, 'record')} into {target.topic}{new}")
    for number, (first, stop, records) in parts:
        say(f"  partition {number}: offsets [{first}, {stop}), {plural(records, 'record')}")


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
        return _produce_lines(args, sys.stdin.buffer)
    file_format = format_of(args.source, args.file_format)
    name, source = shlex.quote(args.topic), shlex.quote(args.source)
    with opened(args.source) as file:
        with to_read(args) as log:
            try:
                is_typed = bool(log.root.topic(args.topic).schema_version)
            except UnknownTopicOrPartitionError as error:
                todo = f"Create it with `embedlog topics create {name} --schema-from {source}`."
                raise UnknownTopicOrPartitionError(
                    error.what, topic=args.topic, todo=todo
                ) from None
        if is_typed:
            return _produce_rows(args, file, file_format)
        if file_format == JSONL and not args.skip:
            return _produce_lines(args, file)
    raise InvalidConfigError(
        "The values of the topic are bytes, and not columns",
        topic=args.topic,
        todo=f"Use `embedlog import {name} {source}` for a file of `embedlog export`, or create a "
        f"topic of columns with `embedlog topics create NAME --schema-from {source}`.",
    )


def _produce_rows(args: argparse.Namespace, file: IO[bytes], file_format: str) -> int:
    """Append rows; their keys choose the partitions, also of those that were exported."""
    from embedlog.cli.import_target import ImportTarget, to_partition
    from embedlog.cli.read_files import read_rows

    if args.key_separator is not None:
        raise InvalidConfigError(
            "--key-separator is for topics of bytes", todo="The topic's columns have the keys."
        )
    with to_write(args, durability="fsync" if args.sync else "os") as log:
        target = ImportTarget(log, args.topic, compression_type=args.compression)
        assert target.schema is not None
        rows = (
            part._replace(table=to_partition(part.table, args.partition))
            for part in read_rows(file, file_format, target.schema)
        )
        _append_all(target, rows, "produce", file_size(file), args.skip)
    _report(target, args.source, file_format, "produce", as_json=args.json)
    return OK


def _send_lines(
    producer: Producer[bytes, bytes], args: argparse.Namespace, file: IO[bytes], separator: Any
) -> Iterator[tuple[int, int]]:
    """Send lines as they are; yield how many, and the bytes so far."""
    done = 0
    for lines in input_lines(file):
        values, keys = keyed(lines, separator)
        producer.send_batch(args.topic, values, keys, partition=args.partition).result()
        done += sum(map(len, lines)) + len(lines)
        yield len(lines), done


def _send_tables(
    log: Log,
    producer: Producer[bytes, bytes],
    args: argparse.Namespace,
    file: IO[bytes],
    separator: Any,
) -> Iterator[tuple[int, int]]:
    """As `_send_lines`, for JSON, and lines that serializers convert."""
    from embedlog.cli.import_target import by_partition
    from embedlog.cli.input_records import InputSerializers, json_records, text_records
    from embedlog.cli.read_files import lines_as_rows

    serializers = InputSerializers(log, args.topic, of_file=False)
    parse = partial(text_records, serializers=serializers, separator=separator)
    if args.json:
        parse = partial(json_records, serializers=serializers)
    for rows in lines_as_rows(file, parse):
        for partition, table in by_partition(rows.table, args.partition):
            producer.append_table(args.topic, table, value="value", partition=partition).result()
        yield rows.table.num_rows, rows.done


def _produce_lines(args: argparse.Namespace, file: IO[bytes]) -> int:
    """Append the lines of a file by chunks; one with an invalid line is not sent at all."""
    from embedlog.config import INT_MAX

    size, count = file_size(file), 0
    key_separator = args.key_separator and args.key_separator.encode("utf-8", "surrogateescape")
    with (
        to_write(args, create=True, durability="fsync" if args.sync else "os") as log,
        existing_topic(log, args.topic),
        ProgressBar("produce") as bar,
    ):
        if log.root.topic(args.topic).schema_version:
            raise InvalidConfigError(
                "Rows of a typed topic come from a file",
                topic=args.topic,
                todo="Use --from FILE, or --from - for JSON lines of stdin.",
            )
        # The setting max.message.bytes of the topic is the only limit of a record's size.
        with log.producer(compression_type=args.compression, max_request_size=INT_MAX) as producer:
            config = log.root.topic(args.topic).config
            if args.json or (config.key_serializer, config.value_serializer) != ("bytes", "bytes"):
                chunks = _send_tables(log, producer, args, file, key_separator)
            else:
                chunks = _send_lines(producer, args, file, key_separator)
            for records, done in chunks:
                count += records
                bar(done, size)
    if args.json:
        say_json({"records": count})
    elif sys.stderr.isatty():
        note(plural(count, "record"))
    return OK
