"""`embedlog verify` and `embedlog repair`."""

from __future__ import annotations

import argparse

from embedlog.cli.open_log import to_read, to_write
from embedlog.cli.parser import FAILED, OK
from embedlog.cli.printing import note, say, say_json
from embedlog.progress import ProgressBar


def verify(args: argparse.Namespace) -> int:
    """Print the findings; change nothing."""
    with to_read(args) as log, ProgressBar("verify") as bar:
        findings = log.verify(progress=bar)
        topics = len(log.topics())
    if args.json:
        say_json({"findings": [finding._asdict() for finding in findings]})
        return FAILED if findings else OK
    say(*map(str, findings))
    note(f"findings: {len(findings)}" if findings else f"healthy; topics: {topics}")
    return FAILED if findings else OK


def repair(args: argparse.Namespace) -> int:
    """Print what is dropped, or would be."""
    with to_write(args) as log, ProgressBar("repair") as bar:
        mended = log.root.startup_report
        repaired = log.repair(dry_run=not args.yes, progress=bar)
    if args.json:
        say_json({"mended": mended, "repaired": repaired, "dry_run": not args.yes})
    else:
        say(*mended, *repaired)
        if not repaired:
            note("Nothing to repair")
        elif not args.yes:
            note("Dry run, nothing was changed; repeat the command with --yes")
    return FAILED if repaired and not args.yes else OK
