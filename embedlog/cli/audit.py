"""`embedlog audit`: compare what the tiers counted of a topic, and print the differences."""

from __future__ import annotations

import argparse
import shlex

from embedlog.cli import argument_types as types
from embedlog.cli.open_log import to_read
from embedlog.cli.parser import FAILED, OK, CommandParser, add_flag, add_list, add_option
from embedlog.cli.printing import note, say, say_json
from embedlog.cli.tables import table
from embedlog.cli.typed_files import add_table_format, write_result

AUDIT = """\
Producers and groups count only if the topic has audit=true.  Exits with 1 if tiers differ.  TIME is
a date, with a time or without, in UTC unless it has a zone; or how long ago: 90m, 2d, PT1H30M.

examples:
  embedlog topics alter flights -c audit=true
  embedlog audit flights --window 1h --since 2d
  embedlog audit flights --differences
"""


def audit_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = AUDIT
    command.add_argument("topic", metavar="TOPIC")
    about = "the width of a window, of whole minutes; by default 1h"
    add_option(command, "--window", "DURATION", about, type=types.duration, default="1h")
    add_option(command, "--since", "TIME", "only windows that end after this time", type=types.time)
    add_option(
        command, "--until", "TIME", "only windows that begin before this time", type=types.time
    )
    about = "only this tier: log, producer, copy, group, pipeline or mirror"
    add_list(command, "--tier", "TIER", about)
    add_flag(command, "--differences", "print only the differences, without the table")
    add_table_format(command, "one JSON object with rows and differences")


def audit(args: argparse.Namespace) -> int:
    """Print a row per window and tier, and a line per difference."""
    with to_read(args) as log:
        result = log.audit(
            args.topic,
            args.window,
            since=args.since,
            until=args.until,
            tiers=args.tier or None,
        )
    differences = result.differences
    if args.json or args.format == "json":
        say_json(result.to_dict())
    elif args.differences:
        say(*differences)
    elif args.format == "table":
        heads, rows = result.table()
        say(*table([head.upper() for head in heads], rows))
        say(*differences)
    else:
        write_result(result.to_arrow(), args.format)
    if result.hint:
        command = f"embedlog topics alter {shlex.quote(args.topic)} -c audit=true"
        note(f"{result.hint}; to have them do so: {command}")
    return FAILED if differences else OK
