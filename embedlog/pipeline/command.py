"""`python -m embedlog.pipeline`: what can be typed, and what comes back."""

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
from embedlog.errors import EmbedlogError
from embedlog.progress import ProgressBar

if TYPE_CHECKING:
    from embedlog.pipeline.audit import AuditReport

_HOURS = 24
_ABOUT = """\
Load topics into Parquet, by topic and day (UTC) of the record's time, exactly
once: what is new since the last run, each record in one file.  It may be killed
at any time and started again.  At the end what is new in the files is compared with
the log, offset by offset and hour by hour.  Needs Java, and pip install 'embedlog[spark]'.
"""
_EXITS = """\
exit codes: 0 done, and files and log agree; 1 they do not, or Spark failed; 2 the command,
a name or a setting is wrong; 3 no such log or topic; 4 the disk or a lock stands in the way;
130 interrupted.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m embedlog.pipeline",
        description=_ABOUT,
        epilog=_EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    root = os.environ.get("EMBEDLOG_ROOT")
    top.add_argument("topics", nargs="*", metavar="TOPIC", help="what to load")
    top.add_argument("--pattern", help="or a regular expression of whole names")
    top.add_argument(
        *("--root", "-r"),
        metavar="DIR",
        default=root,
        required=root is None,
        help="the directory of the log (or set EMBEDLOG_ROOT)",
    )
    top.add_argument("--into", metavar="DIR", required=True, help="the directory of the files")
    top.add_argument("--checkpoint", metavar="DIR", help="Spark's, if not in the output")
    top.add_argument(
        "--max-records-per-trigger",
        type=_positive,
        metavar="N",
        default=1_000_000,
        help="publish at most so many records at once (a million)",
    )
    top.add_argument("--follow", action="store_true", help="go on until interrupted, then report")
    top.add_argument(
        "--every",
        type=seconds,
        default=10.0,
        metavar="SECONDS",
        help="with --follow: how often (10)",
    )
    top.add_argument(
        "--fail-on-data-loss",
        choices=("true", "false"),
        default="true",
        help="whether to stop where records were deleted before they were loaded (true)",
    )
    audit = top.add_mutually_exclusive_group()
    audit.add_argument("--no-audit", action="store_true", help="load, and compare nothing")
    audit.add_argument(
        "--full-audit",
        action="store_true",
        help="compare also the files that an earlier run compared, and that are as they were",
    )
    top.add_argument("--json", action="store_true", help="write the report as JSON, with all hours")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Load, report, and return the exit code."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as stop:  # argparse: 0 after --help, 2 after a wrong word
        return stop.code if isinstance(stop.code, int) else 0
    try:
        report = _load(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (EmbedlogError, OSError) as error:
        note(f"embedlog.pipeline: {error}")
        return code_of(error)
    show(report, as_json=args.json, checked=not args.no_audit)
    return FAILED if report.problems else OK


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of records, from 1 on")
    return int(text)


def _load(args: argparse.Namespace) -> AuditReport:
    from embedlog.pipeline.load import load

    # Of pyspark's own imports; no pandas is used here.
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


def show(report: AuditReport, *, as_json: bool = False, checked: bool = True) -> None:
    """Print a report: the last hours, or all as JSON."""
    if as_json:
        say_json(report.to_json())
    elif checked:
        say(*table(report))
    else:
        say(f"loaded {report.loaded:,} records")
    sys.stdout.flush()
    note(*(f"embedlog.pipeline: {problem}" for problem in report.problems))


def table(report: AuditReport) -> list[str]:
    """Return the lines of a report: the last hours that have records, and the sums."""
    rows = list(report.hours())
    width = max([len("topic"), *(len(topic) for topic, *_ in rows)])
    lines = [f"{'topic':<{width}}  {'hour (UTC)':<16}  {'in files':>12}  {'in the log':>12}"]
    if len(rows) > _HOURS:
        lines.append(f"… {len(rows) - _HOURS:,} hours before these (--json has them)")
    for topic, hour, records, log in rows[-_HOURS:]:
        lines.append(f"{topic:<{width}}  {hour}  {records:>12,}  {log:>12,}")
    gone = f", {report.gone:,} of them no longer in the log" if report.gone else ""
    known = f", {report.known:,} of them compared before" if report.known else ""
    agree = "they do not agree" if report.problems else "files and log agree"
    lines.append(f"loaded {report.loaded:,}, in files {report.records:,}{gone}{known}: {agree}")
    return lines
