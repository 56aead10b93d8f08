"""`embedlog compact`, `maintain`, `explain`, `verify`, `repair` and `share`."""

from __future__ import annotations

import argparse
from itertools import chain
from typing import TYPE_CHECKING, Any

from embedlog.cli.open_log import to_read, to_write
from embedlog.cli.parser import FAILED, OK, CommandParser, add_flag
from embedlog.cli.printing import note, say_result
from embedlog.display import plural
from embedlog.progress import ProgressBar, format_bytes

if TYPE_CHECKING:
    from embedlog.compaction import CleanResult

_FIELDS = (
    *("topic", "partition", "bytes_before", "bytes_after", "records_read", "records_kept"),
    *("tombstones", "why"),
)


def compact_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("topics", metavar="TOPIC", nargs="+")
    add_flag(command, "--force", "compact what is not due too, and the active segment")


def compact(args: argparse.Namespace) -> int:
    """Compact topics, and print the result for each partition."""
    with to_write(args) as log:
        results = [
            result
            for name in args.topics
            for result in log.housekeeping.compact(name, force=args.force)
        ]
    say_result(args, *_results(results))
    if not results:
        note("No partition is due; see embedlog explain, or use --force")
    return OK


def _results(results: list[CleanResult]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the results of compactions as documents and as lines."""
    documents = [{name: getattr(result, name) for name in _FIELDS} for result in results]
    return documents, [f"{each.topic}-{each.partition}: {each.why}" for each in results]


def maintain(args: argparse.Namespace) -> int:
    """Run all jobs once, and print what was deleted and compacted."""
    with to_write(args) as log:
        results = log.housekeeping.run()
    deleted, compacted = results["retention"], results["compaction"]
    documents, compactions = _results(compacted)
    document = {
        "deleted": [result._asdict() for result in deleted],
        "compacted": documents,
        "offsets_expired": results["offsets"],
    }
    lines = [
        f"{result.topic}-{result.partition}: deleted {plural(result.segments, 'segment')}, "
        f"{result.bytes:,} bytes; the log begins at {result.start_offset}"
        for result in deleted
    ]
    say_result(args, document, (*lines, *compactions))
    if not (args.json or deleted or compacted):
        note("Nothing was due")
    return FAILED if any(result.error is not None for result in compacted) else OK


def explain_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("topics", metavar="TOPIC", nargs="*", help="by default all topics")


def explain(args: argparse.Namespace) -> int:
    """Print what retention and compaction will do with topics, and why."""
    with to_read(args) as log:
        lines = {}
        for name in args.topics or log.topics():
            topic = log.topic(name)
            compacts = "compact" in topic.config["cleanup.policy"]
            compaction = topic.explain_compaction() if compacts else []
            lines[name] = [*topic.describe_retention(), *compaction]
    say_result(args, lines, chain.from_iterable(lines.values()))
    return OK


def verify_options(command: CommandParser) -> None:
    """Add the options."""
    add_flag(command, "--replicas", "read and compare all copies that are in sync instead")


def verify(args: argparse.Namespace) -> int:
    """Print the findings, or where copies differ first; change nothing."""
    unit = "{:,.0f} partitions".format if args.replicas else format_bytes
    with to_read(args) as log, ProgressBar("verify", unit) as bar:
        if args.replicas:
            name, findings = (
                "differences",
                list[Any](log.housekeeping.verify(replicas=True, progress=bar)),
            )
            healthy = f"the copies are equal; directories: {len(log.replicas)}"
        else:
            name, findings = "findings", log.housekeeping.verify(progress=bar)
            healthy = f"healthy; topics: {len(log.topics())}"
    document = {name: [finding._asdict() for finding in findings]}
    say_result(args, document, map(str, findings))
    if not args.json:
        note(f"{name}: {len(findings)}" if findings else healthy)
    return FAILED if findings else OK


def repair_options(command: CommandParser) -> None:
    """Add the options."""
    add_flag(command, "--yes", "repair the log")


def repair(args: argparse.Namespace) -> int:
    """Print what is dropped, or would be."""
    with to_write(args) as log, ProgressBar("repair") as bar:
        mended = log.root.startup_report
        repaired = log.housekeeping.repair(dry_run=not args.yes, progress=bar)
    document = {"mended": mended, "repaired": repaired, "dry_run": not args.yes}
    say_result(args, document, (*mended, *repaired))
    if not args.json and not repaired:
        note("Nothing to repair")
    elif not args.json and not args.yes:
        note("Dry run, nothing was changed; repeat the command with --yes")
    return FAILED if repaired and not args.yes else OK


def share_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("group", metavar="GROUP", help="its name or number")
    command.add_argument("--mode", choices=("rw", "r", "none"), default="rw", help="default rw")


def share(args: argparse.Namespace) -> int:
    """Let a group read the records of the log, and stage others."""
    with to_write(args) as log:
        log.housekeeping.share(int(args.group) if args.group.isdecimal() else args.group, args.mode)
    return OK
