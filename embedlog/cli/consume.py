"""`embedlog consume` and `embedlog tail`: print records to stdout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from embedlog.cli import argument_types as types
from embedlog.cli.open_log import rounds, to_follow, to_read, view_of
from embedlog.cli.parser import OK, CommandParser, add_flag, add_option, add_rows
from embedlog.errors import InvalidConfigError, OffsetOutOfRangeError

if TYPE_CHECKING:
    from embedlog.api import Log
    from embedlog.api.offset_range import OffsetRange
    from embedlog.api.topic import TopicView
    from embedlog.record import Record

    Start = Callable[[Log, OffsetRange], OffsetRange]
    """Takes the offsets of a partition, and returns those to print first."""

FORMATS = """\
FORMAT is kcat's:  %t topic  %p partition  %o offset  %k key  %s value  %T timestamp (ms)
                   %h headers (a=b,c=d)  %K %S lengths of key and value, -1 for none  %%
with the escapes   \\n \\t \\r \\0 \\\\ \\xHH
"""

ROWS = """
Of a typed topic, %s is a JSON object of the columns, or of those of --columns; these may be offset,
partition and timestamp, too.  --where is a condition in SQL, and needs Polars.

examples:
  embedlog consume flights --columns carrier,dep_delay --where "distance between 100 and 200"
  embedlog consume airlines -f '%k: %s\\n'
"""


def _selection(command: CommandParser, format_names: str) -> None:
    add_option(command, "--partition -p", "N", "only this partition", type=int)
    about = "the format of a record; see below"
    add_option(command, format_names, "FORMAT", about, default="%s\\n")


def consume_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = FORMATS + ROWS
    command.add_argument("topic", metavar="TOPIC")
    start = command.add_mutually_exclusive_group()
    add_flag(start, "--from-beginning", "begin with the first record; the default without --follow")
    about = "where to begin in each partition; -N is N records before the end"
    add_option(start, "--offset -o", "N|earliest|latest|-N", about)
    add_option(command, "--max -m", "N", "end after N records", type=types.count)
    add_flag(command, "--follow", "wait for new records; by default begin at the end")
    _selection(command, "-f --format")
    add_rows(command)


def consume(args: argparse.Namespace) -> int:
    """Print records from an offset on."""
    return _run(args, _start(args), args.max)


def tail_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = FORMATS
    command.add_argument("topic", metavar="TOPIC")
    add_option(
        command, "-n", "N", "how many, by default 10", dest="last", type=types.count, default=10
    )
    add_flag(command, "-f --follow", "wait for new records")
    _selection(command, "--format")


def tail(args: argparse.Namespace) -> int:
    """Print the last records, and with --follow new ones."""
    return _run(args, _before_end(args.topic, args.last), None)


def _start(args: argparse.Namespace) -> Start:
    word = args.offset or ("latest" if args.follow and not args.from_beginning else "earliest")
    if word == "earliest":
        return _from_beginning
    try:
        number = 0 if word == "latest" else int(word)
    except ValueError:
        raise InvalidConfigError(
            f"--offset must be a number, -number, earliest or latest, got {word!r}"
        ) from None
    if number < 0 or word in ("latest", "-0"):
        return _before_end(args.topic, -number)

    def start(_: Log, part: OffsetRange) -> OffsetRange:
        # Without --partition, partitions that do not have this offset begin at the nearest one.
        if args.partition is not None and not part.start <= number <= part.stop:
            what = f"The log holds offsets [{part.start}, {part.stop})"
            where = {"topic": args.topic, "partition": part.partition, "offset": number}
            raise OffsetOutOfRangeError(what, **where)
        return part._replace(start=min(max(number, part.start), part.stop))

    return start


def _from_beginning(_: Log, part: OffsetRange) -> OffsetRange:
    return part


def _before_end(topic: str, count: int) -> Start:
    """Start with the last ``count`` records; compaction may have left gaps between them."""

    def start(log: Log, part: OffsetRange) -> OffsetRange:
        records = log.partition(topic, part.partition).record_counts
        return part._replace(start=records.before(part.start, part.stop, count))

    return start


def _run(args: argparse.Namespace, start: Start, max_records: int | None) -> int:
    from embedlog.cli.formats import CHUNK_RECORDS, writer

    write, out, printed = writer(args.format, args.json), sys.stdout.buffer, 0
    with to_follow(args) if args.follow else to_read(args) as log:
        read = _reader(log, args)
        for view in _views(log, args, start):
            records = islice(read(view), None if max_records is None else max_records - printed)
            while chunk := list(islice(records, CHUNK_RECORDS)):
                out.write(write(chunk))
                printed += len(chunk)
            out.flush()
            if printed == max_records:
                break
    return OK


def _reader(log: Log, args: argparse.Namespace) -> Callable[[TopicView], Iterator[Record]]:
    """Return a function that yields a view's records, with keys and values for `writer`."""
    from embedlog.cli.formats import CHUNK_RECORDS, TypedRecords, decoder
    from embedlog.registry import binder

    columns, where = getattr(args, "columns", None), getattr(args, "where", None)
    info = log.root.topic(args.topic)
    if info.schema_version:
        return TypedRecords(args.topic, columns, where, as_json=args.json).read
    for option, value in (("--columns", columns), ("--where", where)):
        if value is not None:
            raise InvalidConfigError(
                f"{option} is for typed topics, and the values of this one are bytes",
                topic=args.topic,
                todo="Use --format for a part of each record, or `embedlog sql`.",
            )
    decode = decoder(args.topic, info.config, binder(log.root), args.json)

    def read(view: TopicView) -> Iterator[Record]:
        records = iter(view)
        while chunk := list(islice(records, CHUNK_RECORDS)):
            yield from decode(chunk)

    return read


def _views(log: Log, args: argparse.Namespace, start: Start) -> Iterator[TopicView]:
    """Yield the records up to the end, and with ``--follow`` new ones without an end."""
    ends: dict[int, int] = {}
    for _ in rounds(log, follow=args.follow):
        topic = log.topic(args.topic)
        view = topic if args.partition is None else topic.partition(args.partition)
        parts = [
            part._replace(start=max(ends[part.partition], part.start))
            if part.partition in ends
            else start(log, part)
            for part in view.ranges()
        ]
        yield view_of(log, args.topic, parts)
        ends = {part.partition: part.stop for part in parts}
        # Partitions that are added from now on are printed from their beginning.
        start = _from_beginning
