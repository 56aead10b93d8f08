"""`embedlog convert`: copies the records of a topic to one of another form."""

from __future__ import annotations

import argparse
from typing import Any

from embedlog.cli.open_log import to_write
from embedlog.cli.parser import OK
from embedlog.cli.printing import note, say, say_json
from embedlog.display import plural
from embedlog.errors import InvalidConfigError
from embedlog.progress import ProgressBar


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
