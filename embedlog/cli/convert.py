"""`embedlog convert`: copies the records of a topic to one of another form."""

from __future__ import annotations

import argparse
from typing import Any

from embedlog.cli import argument_types as types
from embedlog.cli.open_log import to_write
from embedlog.cli.parser import OK, CommandParser, add_flag, add_list, add_option
from embedlog.cli.printing import note, say, say_json
from embedlog.display import plural
from embedlog.errors import InvalidConfigError
from embedlog.progress import ProgressBar

CONVERT = """\
Columns of a typed topic come from values of Avro, by the latest schema of TOPIC-value, or of JSON;
and go back to them.  Each record is copied once: a conversion that was interrupted continues when
the command is repeated, and one that is complete copies what has been appended since.  Keys,
timestamps, headers, tombstones, partitions and the settings of the topic stay the same.

examples:
  embedlog convert orders orders-columns --key order_id
  embedlog convert orders-columns orders-avro
  embedlog convert clicks clicks-columns --key user --timestamp at --rename timestamp=at
"""


def convert_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = CONVERT
    command.add_argument("topic", metavar="TOPIC")
    command.add_argument("target", metavar="NEW_TOPIC")
    about = "the form of the new topic; by default typed, or avro if TOPIC is typed"
    command.add_argument("--to", choices=("typed", "avro", "json"), help=about)
    about = "the columns with the keys; ones that the values do not have are added"
    add_option(command, "--key", "COLUMN,COLUMN", about, type=types.column_names)
    about = "the column with the timestamps of the records, instead of those of TOPIC"
    add_option(command, "--timestamp", "COLUMN", about)
    about = "the number of partitions, by default that of TOPIC"
    add_option(command, "--partitions -p", "N", about, type=int)
    about = "the columns of JSON: those of this Parquet, CSV or JSON lines file; else inferred"
    add_option(command, "--schema-from", "FILE", about)
    add_list(command, "--rename", "OLD=NEW", "another name for a column; may be repeated")
    add_flag(command, "--skip-invalid", "leave out records that do not fit, instead of ending")


def convert(args: argparse.Namespace) -> int:
    """Copy the records, and print how many."""
    schema = None
    if args.schema_from is not None:
        from embedlog.cli.topics import schema_of

        schema = schema_of(args.schema_from)
    with (
        to_write(args) as log,
        ProgressBar(f"convert {args.topic}", lambda count: plural(int(count), "record")) as bar,
    ):
        result = log.convert(
            args.topic,
            args.target,
            to=args.to,
            key=args.key,
            timestamp=args.timestamp,
            partitions=args.partitions,
            schema=schema,
            rename=_renamed(args.rename),
            skip_invalid=args.skip_invalid,
            progress=bar,
        )
    if args.json:
        say_json(
            {
                "source": result.source,
                "target": result.target,
                "to": result.to,
                "records": result.records,
                "skipped": result.skipped,
                "partitions": [partition._asdict() for partition in result.partitions],
            }
        )
        return OK
    if result.skipped:
        note(f"Left out {plural(result.skipped, 'record')} that did not fit")
    say(
        f"Converted {plural(result.records, 'record')} of {result.source} to {result.target} "
        f"({result.to})"
    )
    for partition in result.partitions:
        say(
            f"  partition {partition.partition}: offsets [{partition.start_offset}, "
            f"{partition.end_offset}), {plural(partition.records, 'record')}"
        )
    return OK


def _renamed(options: list[str]) -> dict[str, Any]:
    names = {}
    for option in options:
        before, separator, after = option.partition("=")
        if not separator or not before or not after:
            raise InvalidConfigError(f"--rename must be OLD=NEW, got {option!r}")
        names[before] = after
    return names
