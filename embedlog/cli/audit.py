"""`embedlog audit`: compare what the tiers counted of a topic, and print the differences."""

from __future__ import annotations

import argparse
import shlex
import sys

from embedlog.cli.open_log import to_read
from embedlog.cli.parser import FAILED, OK
from embedlog.cli.printing import note, say, say_json
from embedlog.cli.tables import table
from embedlog.cli.typed_files import CsvRows, JsonRows


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
        rows = result.to_arrow()
        out = sys.stdout.buffer
        writer = JsonRows(out) if args.format == "jsonl" else CsvRows(out, rows.schema)
        writer.write(rows)
        writer.close()
        out.flush()
    if result.hint:
        command = f"embedlog topics alter {shlex.quote(args.topic)} -c audit=true"
        note(f"{result.hint}; to have them do so: {command}")
    return FAILED if differences else OK
