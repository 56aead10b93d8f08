"""`embedlog mirror` and `embedlog failover`."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import embedlog
from embedlog.cli import argument_types as types
from embedlog.cli.argument_types import topic as parse_topic
from embedlog.cli.open_log import to_read, to_write
from embedlog.cli.parser import FAILED, OK, CommandParser, add_flag, add_list, add_option
from embedlog.cli.printing import note, say, say_json, say_result, table
from embedlog.errors import InvalidConfigError
from embedlog.record import TopicPartition

if TYPE_CHECKING:
    from embedlog.api.run_mirror import MirrorRun
    from embedlog.mirrors.status import MirrorStatus

MIRROR = """\
SOURCE and TARGET are directories of logs, or kafka://HOST:PORT.  Copies in a log have the offsets
of their source, and no other program may write to them, until `embedlog failover`.  A mirror that
was interrupted continues where it was when the command is repeated.

`embedlog mirror status` prints what the mirrors to a log have copied, and how far they are behind.

examples:
  embedlog mirror /data/log /backup/log --follow --groups '.*'
  embedlog mirror /site-a/log /hub/log --topics 'orders.*' --as a
  embedlog mirror /site-a/log /site-b/log --merge --follow
  embedlog mirror status --root /backup/log
"""

FAILOVER = """\
From then on programs may write to the copies, and their mirrors may not.  The strategy says where
groups continue: at the offsets that the mirror copied (offsets), at the first record at or after a
time (time, with --at), at the first record or at the log end (earliest, latest).  With --offset, a
group continues at that offset of the partition, and at the copied offsets in all others.

Without GROUP, programs may write to the copies, and no group is moved.  A group that does not exist
in this log needs --topic, and a strategy other than offsets.

  repeats     offsets that the group certainly gets again
  may-repeat  those that it gets again at most, if it had read all that was copied
  may-skip    offsets of the copy that it may never get
  not-copied  offsets that the source had and the copy has not, as last known

examples:
  embedlog failover billing --root /backup/log
  embedlog failover billing --strategy time --at 10m --root /backup/log --execute
  embedlog failover --topic orders --root /backup/log --execute
"""

_STATUS = "status"
_CHECK_SECONDS = 0.5
_TOPIC_HEADS = ("TOPIC", "COPY", "RECORDS", "LAG", "SKIPPED", "ERROR")
_FAILOVER_HEADS = (
    *("GROUP", "TOPIC", "PARTITION", "COMMITTED", "NEW-OFFSET"),
    *("REPEATS", "MAY-REPEAT", "MAY-SKIP", "NOT-COPIED"),
)


def mirror_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = MIRROR
    command.add_argument("source", metavar="SOURCE", help="a log, kafka://HOST:PORT, or: status")
    command.add_argument("target", metavar="TARGET", nargs="?", help="a log, or kafka://HOST:PORT")
    about = "a regular expression of the whole names of topics, by default all"
    add_option(command, "--topics", "REGEX", about, default=".*")
    about = "the name of the source at the target: TOPIC becomes SITE.TOPIC"
    add_option(command, "--as", "SITE", about, dest="site")
    add_option(command, "--groups", "REGEX", "also copy the committed offsets of these groups")
    add_flag(command, "--follow -f", "continue until the command is interrupted")
    add_flag(command, "--merge", "append to topics that others write to, too")
    add_flag(command, "--relay", "with --merge, also copy what came to the source from other sites")
    add_option(command, "--name", "NAME", "the name of the mirror in its status")
    add_flag(command, "--sync", "flush each copied batch to the disk, to survive a power cut")


def mirror(args: argparse.Namespace) -> int:
    """Run a mirror, and print what it copied; or print the status of mirrors."""
    if args.source == _STATUS:
        return show_status(args)
    if args.target is None:
        raise InvalidConfigError(
            "A mirror needs a source and a target", todo="Or: embedlog mirror status."
        )
    if args.must_exist and not args.target.startswith("kafka:"):
        embedlog.open(args.target, maintenance=False, must_exist=True).close()
    with _warnings_with_commands():
        run = embedlog.mirror(
            args.source,
            args.target,
            topics=args.topics,
            site=args.site,
            groups=args.groups,
            follow=args.follow,
            merge=args.merge,
            relay=args.relay,
            name=args.name,
            durability="fsync" if args.sync else None,
        )
        if args.follow:
            _until_interrupted(run)
    status = run.status
    say_result(args, status.to_dict(), _lines([status]))
    return FAILED if run.errors else OK


@contextmanager
def _warnings_with_commands() -> Iterator[None]:
    """Print what is logged as a warning to stderr, with commands instead of Python calls."""
    if logging.root.handlers:  # Those of a program that runs the command in its process.
        yield
        return
    handler = _Warnings(logging.WARNING)
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(self.format(record))


def _until_interrupted(run: MirrorRun) -> None:
    """Wait for SIGINT or SIGTERM, or for the mirror to end by itself."""
    interrupted = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    note("Copying; stop with Ctrl-C")
    while not interrupted.is_set() and not run.wait(_CHECK_SECONDS):
        pass
    run.stop()


def show_status(args: argparse.Namespace) -> int:
    """Print the mirrors of a log, with their topics; exit code 1 if one died or has errors."""
    place = args if args.target is None else argparse.Namespace(root=args.target)
    with to_read(place) as log:
        statuses = list(log.mirrors)
    if args.json:
        say_json([status.to_dict() for status in statuses])
    else:
        say(*_lines(statuses))
        sys.stdout.flush()
    if not statuses:
        note("No mirror has reported to this log since the last reboot")
    failing = any(
        status.state in ("died", "failed") or any(t.error for t in status.by_topic.values())
        for status in statuses
    )
    return FAILED if failing else OK


def _lines(statuses: list[MirrorStatus]) -> list[str]:
    from embedlog.mirrors.status import HEADS

    if not statuses:
        return []
    lines = table([head.upper() for head in HEADS], [status.cells() for status in statuses])
    for status in statuses:
        topics = [
            (
                *(name, topic.target, topic.records, topic.lag, topic.skipped),
                topic.error,
            )
            for name, topic in sorted(status.by_topic.items())
        ]
        if topics:
            lines += ["", *table(_TOPIC_HEADS, topics)]
        lines += [f"error: {error}" for error in status.errors]
    return lines


def failover_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = FAILOVER
    about = "the groups to move; without any, programs may write to the copies, and no more"
    command.add_argument("groups", metavar="GROUP", nargs="*", help=about)
    command.add_argument(
        "--strategy",
        choices=("offsets", "time", "earliest", "latest"),
        help="where groups continue, by default offsets",
    )
    add_option(command, "--at", "TIME", "with the strategy time: the time", type=types.time)
    about = "where groups continue in a partition; may be repeated"
    add_list(command, "--offset", "TOPIC:P=N", about)
    add_list(
        command,
        "--topic",
        "TOPIC",
        "only this copy; by default those that the groups read, or all",
    )
    add_flag(command, "--execute", "do it")


def failover(args: argparse.Namespace) -> int:
    """Print what a failover would do to each group; with --execute do it."""
    if not args.groups and (args.strategy is not None or args.offset):
        raise InvalidConfigError(
            "--strategy and --offset set where groups continue, and no GROUP is named",
            todo="Name the groups; without GROUP, programs may write to the copies, and no more.",
        )
    strategy: Any = args.strategy or "offsets"
    if args.offset:
        if args.strategy is not None:
            raise InvalidConfigError("Pass either --strategy or --offset")
        strategy = dict(map(_offset, args.offset))
    with to_write(args) if args.execute else to_read(args) as log:
        result = log.mirrors.failover(
            args.groups,
            strategy,
            at=args.at,
            topics=args.topic or None,
            dry_run=not args.execute,
        )
    if args.json:
        say_json(result.to_dict())
    else:
        say(result.title)
        say(*(f"  {name}" for name in result.topics))
        if result.partitions:
            say(*table(_FAILOVER_HEADS, result.partitions))
    if not args.execute:
        note("Dry run, nothing was changed; repeat the command with --execute")
    return OK


def _offset(option: str) -> tuple[TopicPartition, int]:
    place, separator, offset = option.rpartition("=")
    if not separator or not offset.isdecimal():
        raise InvalidConfigError(f"--offset must be TOPIC:P=N, got {option!r}")
    name, numbers = parse_topic(place)
    if len(numbers) != 1:
        raise InvalidConfigError(f"--offset must name one partition, got {option!r}")
    return TopicPartition(name, numbers[0]), int(offset)
