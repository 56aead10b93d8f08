"""`embedlog offsets` and `embedlog delete-records`."""

from __future__ import annotations

import argparse

from embedlog.cli import argument_types as types
from embedlog.cli.open_log import deletion_point, first_at, partitions, to_read, to_write
from embedlog.cli.parser import OK, CommandParser, add_flag, add_option
from embedlog.cli.printing import note, say_result, table
from embedlog.display import moment, plural
from embedlog.record import TopicPartition

TIMES = """\
TIME is a date, with a time or without, in UTC unless it has a zone; or how long ago: 90m, 2d,
PT1H30M.

examples:
  embedlog offsets flights --at 2026-01-31T12:00:00Z
  embedlog delete-records flights --at 30d --yes
  embedlog delete-records flights:0 --before 1000 --yes
"""

_ENDS = ("TOPIC", "PARTITION", "EARLIEST", "LATEST")
_AT = ("TOPIC", "PARTITION", "OFFSET", "TIMESTAMP")
_DELETED = ("TOPIC", "PARTITION", "NEW-START", "OLD-START", "LATEST")


def offsets_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = TIMES
    about = "by default all topics"
    command.add_argument("topics", metavar="TOPIC[:N,N]", nargs="*", type=types.topic, help=about)
    add_option(command, "--at", "TIME", "the first offset at or after this time", type=types.time)


def offsets(args: argparse.Namespace) -> int:
    """Print where partitions begin and end; with --at the first offset at or after a time."""
    rows: list[tuple[str, int, int, int | None]] = []
    with to_read(args) as log:
        topics = args.topics or [(name, []) for name in log.topics()]
        for name, numbers in topics:
            for part in partitions(log, name, numbers):
                where = name, part.partition
                if args.at is None:
                    rows.append((*where, part.start_offset(), part.end_offset()))
                else:
                    rows.append((*where, *first_at(part, args.at)))
    heads = _ENDS if args.at is None else _AT
    documents = [dict(zip(map(str.lower, heads), row, strict=True)) for row in rows]
    if args.at is not None:
        say_result(args, documents, table(heads, [(*row[:3], _time(row[3])) for row in rows]))
    else:
        say_result(args, documents, table(heads, rows))
    return OK


def _time(timestamp: int | None) -> str:
    return "at the end" if timestamp is None else moment(timestamp).replace(" ", "T")


def delete_records_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = TIMES
    command.add_argument("topic", metavar="TOPIC[:N,N]", type=types.topic)
    to = command.add_mutually_exclusive_group(required=True)
    add_option(to, "--before", "N", "delete the records below this offset", type=types.count)
    add_option(
        to, "--at", "TIME", "delete up to the first record at or after this time", type=types.time
    )
    add_flag(command, "--yes", "delete the records")


def delete_records(args: argparse.Namespace) -> int:
    """Print which records would be deleted; with --yes delete them."""
    name, numbers = args.topic
    with to_write(args) if args.yes else to_read(args) as log:
        rows = []
        for part in partitions(log, name, numbers):
            # All points first: if one is past the end, nothing is deleted.
            point = deletion_point(part, args.before if args.at is None else args.at)
            rows.append((name, part.partition, point, part.start_offset(), part.end_offset()))
        if args.yes:
            log.delete_records({TopicPartition(name, row[1]): row[2] for row in rows})
    fields = ("topic", "partition", "after", "before", "latest")
    changes = [dict(zip(fields, row, strict=True)) for row in rows]
    document = {"dry_run": not args.yes, "partitions": changes}
    say_result(args, document, table(_DELETED, rows))
    count = plural(sum(after - before for _, _, after, before, _ in rows), "offset")
    if args.yes:
        note(f"Deleted {count}")
    else:
        note(f"Dry run, {count} would be deleted; repeat the command with --yes")
    return OK
