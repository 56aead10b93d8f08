"""`embedlog verify`, `repair` and `doctor`: is it well, and if not, what then."""

from __future__ import annotations

import argparse

from embedlog.cli.open_log import to_read, to_write
from embedlog.cli.parser import FAILED, OK
from embedlog.cli.printing import note, say, say_json
from embedlog.progress import ProgressBar


def verify(args: argparse.Namespace) -> int:
    """Print what is wrong; change nothing."""
    with to_read(args) as log, ProgressBar("verify") as bar:
        found = log.verify(progress=bar)
        topics = len(log.topics())
    if args.json:
        say_json({"findings": [one._asdict() for one in found]})
        return FAILED if found else OK
    say(*map(str, found))
    note(f"findings: {len(found)}" if found else f"healthy; topics: {topics}")
    return FAILED if found else OK


def repair(args: argparse.Namespace) -> int:
    """Print what is, or would be, left out."""
    with to_write(args) as log, ProgressBar("repair") as bar:
        mended = log.root.startup_report
        told = log.repair(dry_run=not args.yes, progress=bar)
    if args.json:
        say_json({"mended": mended, "repaired": told, "dry_run": not args.yes})
    else:
        say(*mended, *told)
        if not told:
            note("nothing to repair")
        elif not args.yes:
            note("nothing was changed: repeat it with --yes")
    return FAILED if told and not args.yes else OK
