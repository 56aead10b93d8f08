"""The command line of `python -m embedlog.pipeline`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from embedlog.cli import code_of
from embedlog.cli.argument_types import seconds
from embedlog.cli.parser import FAILED, INTERRUPTED, OK
from embedlog.cli.printing import note, say, say_json
from embedlog.display import plural
from embedlog.errors import EmbedlogError
from embedlog.progress import ProgressBar

if TYPE_CHECKING:
    from embedlog.pipeline.parquet_audit import AuditReport

_MAX_HOURS = 24
_ABOUT = """\
Load topics into Parquet, by topic and day (UTC) of the record's timestamp, exactly
once: the records that are new since the last run, each in one file.  It may be killed
at any time and started again.  At the end, new files are compared with the log, offset
by offset and hour by hour.  Needs Java, and pip install 'embedlog[spark]'.
"""
_EXIT_CODES = """\
exit codes: 0 done, and files and log agree; 1 they do not agree, or Spark failed; 2 wrong
usage, name or setting; 3 no such log or topic; 4 a problem with the disk or a lock;
130 interrupted.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    args = argparse.ArgumentParser(
        prog="python -m embedlog.pipeline",
        description=_ABOUT,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    root = os.environ.get("EMBEDLOG_ROOT")
    add = args.add_argument
    add("topics", nargs="*", metavar="TOPIC", help="a topic to load")
    add("--pattern", help="instead of topics, a regular expression of whole names")
    add(
        *("--root", "-r"),
        metavar="DIR",
        default=root,
        required=root is None,
        help="the directory of the log (or set EMBEDLOG_ROOT)",
    )
    add("--into", metavar="DIR", required=True, help="the directory of the files")
    add(
        "--checkpoint",
        metavar="DIR",
        help="the directory of Spark's checkpoint, by default in the output",
    )
    add(
        "--max-records-per-trigger",
        type=_positive,
        metavar="N",
        default=1_000_000,
        help="publish at most this many records at once (a million)",
    )
    add("--follow", action="store_true", help="keep loading until interrupted, then report")
    add(
        "--every",
        type=seconds,
        default=10.0,
        metavar="SECONDS",
        help="with --follow: the time between micro-batches (10)",
    )
    add(
        "--fail-on-data-loss",
        choices=("true", "false"),
        default="true",
        help="whether to stop if records were deleted before they were loaded (true)",
    )
    audit = args.add_mutually_exclusive_group()
    audit.add_argument(
        "--no-audit", action="store_true", help="do not compare the files with the log"
    )
    audit.add_argument(
        "--full-audit",
        action="store_true",
        help="compare also unchanged files that an earlier run compared",
    )
    add("--json", action="store_true", help="write the report as JSON, with all hours")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Load, report, and return the exit code."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as exit_:  # argparse: 0 after --help, 2 after a usage error
        return exit_.code if isinstance(exit_.code, int) else 0
    try:
        report = _load(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (EmbedlogError, OSError) as error:
        note(f"embedlog.pipeline: {error}")
        return code_of(error)
    if args.json:
        say_json(report.to_json())
    elif args.no_audit:
        say(f"loaded {plural(report.loaded, 'record')}")
    else:
        say(*table(report))
    sys.stdout.flush()
    note(*(f"embedlog.pipeline: {problem}" for problem in report.problems))
    return FAILED if report.problems else OK


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of records of at least 1, got {text!r}")
    return int(text)


def _load(args: argparse.Namespace) -> AuditReport:
    from embedlog.pipeline.load_query import load

    # A warning of pyspark's imports; this program does not use pandas.
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    with ProgressBar("load", lambda count: f"{count:,.0f} records") as bar:
        return load(
            args.root,
            args.into,
            args.topics,
            pattern=args.pattern,
            checkpoint=args.checkpoint,
            max_records_per_trigger=args.max_records_per_trigger,
            follow=args.every if args.follow else None,
            fail_on_data_loss=args.fail_on_data_loss == "true",
            progress=bar,
            check=not args.no_audit,
            check_all=args.full_audit,
        )


def table(report: AuditReport) -> list[str]:
    """Return the lines of a report: the last hours that have records, and the totals."""
    rows = list(report.hours())
    width = max([len("topic"), *(len(topic) for topic, *_ in rows)])
    lines = [f"{'topic':<{width}}  {'hour (UTC)':<16}  {'in files':>12}  {'in the log':>12}"]
    if len(rows) > _MAX_HOURS:
        lines.append(f"… {len(rows) - _MAX_HOURS:,} earlier hours (--json shows all)")
    for topic, hour, in_files, in_log in rows[-_MAX_HOURS:]:
        lines.append(f"{topic:<{width}}  {hour}  {in_files:>12,}  {in_log:>12,}")
    gone = f", {report.gone:,} of them no longer in the log" if report.gone else ""
    known = f", {report.known:,} of them compared before" if report.known else ""
    verdict = "they do not agree" if report.problems else "files and log agree"
    lines.append(f"loaded {report.loaded:,}, in files {report.records:,}{gone}{known}: {verdict}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
