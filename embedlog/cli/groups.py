"""`embedlog groups`: list, describe, lag, reset, alter and delete.

The first columns are those of kafka-consumer-groups.sh, in the same order, for scripts that
count columns.
"""

from __future__ import annotations

import argparse
import sys
import threading
from operator import attrgetter
from typing import TYPE_CHECKING

from embedlog.cli import argument_types as types
from embedlog.cli.open_log import to_follow, to_read, to_write
from embedlog.cli.parser import OK, CommandParser, add_flag, add_list, add_option
from embedlog.cli.printing import note, say, say_json, say_result, say_rows, table
from embedlog.cli.topics import parse_settings
from embedlog.display import moment
from embedlog.errors import GroupIdNotFoundError
from embedlog.record import TopicPartition

if TYPE_CHECKING:
    from embedlog.api import Log
    from embedlog.api.consumer_group import GroupDescription

RESETS = """\
A target outside of the log means its nearer end.  A time without a zone is UTC.
"""

_LAG = ("GROUP", "TOPIC", "PARTITION", "CURRENT-OFFSET", "LOG-END-OFFSET", "LAG")
_OWNERS = ("CONSUMER-ID", "PID", "CLIENT-ID", "LAG-MS", "COMMITTED", "METADATA")
_MEMBERS = ("GROUP", "CONSUMER-ID", "INSTANCE-ID", "PID", "CLIENT-ID", "#PARTITIONS", "TOPICS")
_RESET = ("GROUP", "TOPIC", "PARTITION", "NEW-OFFSET", "OLD-OFFSET")
_PROGRESS_FIELDS = ("topic", "partition", "current_offset", "log_end_offset", "lag")
"""The fields of a `PartitionDescription` under the heads `_LAG`."""
_progress = attrgetter(*_PROGRESS_FIELDS)
_CLEAR = "\x1b[H\x1b[J"


def list_options(command: CommandParser) -> None:
    """Add the options."""
    add_flag(command, "--state", "also print state, number of members and type")


def list_(args: argparse.Namespace) -> int:
    """Print the names of all groups; with --state also state, number of members and type."""
    with to_read(args) as log:
        names = list(log.groups)
        groups = [log.groups[name].describe() for name in names if args.state]
    if not args.state:
        say_result(args, names, names)
        return OK
    rows = [(group.group, group.state, len(group.members), group.kind) for group in groups]
    heads = ("GROUP", "STATE", "#MEMBERS", "TYPE")
    say_rows(args, heads, ("group", "state", "members", "kind"), rows)
    return OK


def describe_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("groups", metavar="GROUP", nargs="*", help="by default all groups")


def describe(args: argparse.Namespace) -> int:
    """Print state, partitions and members."""
    with to_read(args) as log:
        groups = [log.groups[name].describe() for name in args.groups or list(log.groups)]
    if args.json:
        say_json([group.to_dict() for group in groups])
        return OK
    for number, group in enumerate(groups):
        say(*([""] if number else []), group.title)
        if group.partitions:
            say("", *table((*_LAG, *_OWNERS), _partition_rows(group)))
        if group.members:
            say("", *table(_MEMBERS, _member_rows(group)))
    return OK


def _partition_rows(group: GroupDescription) -> list[tuple[object, ...]]:
    owners = {member.member_id: (member.pid, member.client_id) for member in group.members}
    return [
        (
            *(group.group, *_progress(part), part.member_id),
            *owners.get(part.member_id or "", (None, None)),
            part.lag_ms,
            None if part.committed_ms is None else moment(part.committed_ms).replace(" ", "T"),
            part.metadata,
        )
        for part in group.partitions
    ]


def _member_rows(group: GroupDescription) -> list[tuple[object, ...]]:
    return [
        (
            *(group.group, member.member_id, member.group_instance_id, member.pid),
            *(member.client_id, len(member.partitions), ",".join(member.topics)),
        )
        for member in group.members
    ]


def lag_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("groups", metavar="GROUP", nargs="*", help="by default all groups")
    about = "repeat, by default every second"
    add_option(command, "--watch -w", "SECONDS", about, nargs="?", type=types.seconds, const=1.0)


def lag(args: argparse.Namespace) -> int:
    """Print the lag of groups; with --watch repeatedly."""
    if args.watch is None:
        with to_read(args) as log:
            _print_lag(args, log)
        return OK
    timer = threading.Event()
    # Attached: a read-only reader would not notice a log that is used again after a reboot.
    with to_follow(args) as log:
        while True:
            _print_lag(args, log)
            sys.stdout.flush()
            timer.wait(args.watch)


def _print_lag(args: argparse.Namespace, log: Log) -> None:
    rows = []
    for name in args.groups or list(log.groups):
        try:
            group = log.groups[name].describe()
        except GroupIdNotFoundError:
            if args.groups and args.watch is None:
                raise
            continue  # It may be created later.
        rows += [(name, *_progress(part), part.lag_ms) for part in group.partitions]
    if args.watch is not None and not args.json and sys.stdout.isatty():
        sys.stdout.write(_CLEAR)
    say_rows(args, (*_LAG, "LAG-MS"), ("group", *_PROGRESS_FIELDS, "lag_ms"), rows)


def reset_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = RESETS
    command.add_argument("group", metavar="GROUP")
    to = command.add_mutually_exclusive_group(required=True)
    for word, about in (
        ("earliest", "to the first record"),
        ("latest", "to the log end"),
        ("current", "to the committed offset; without a commit, to the log end"),
    ):
        to.add_argument(f"--to-{word}", action="store_const", dest="to", const=word, help=about)
    add_option(to, "--to-offset", "N", "to this offset", type=types.count)
    add_option(
        to, "--to-datetime", "ISO", "to the first record at or after this time", type=types.moment
    )
    about = "to the first record since this long ago, as PT1H30M, 90m or 2d"
    add_option(to, "--by-duration", "DURATION", about, type=types.duration)
    add_option(
        to, "--shift-by", "N", "N offsets from the committed one, back if negative", type=int
    )
    about = "only this topic or partition; by default all with a commit"
    add_list(command, "--topic", "TOPIC[:N,N]", about, type=types.topic)
    add_flag(command, "--execute", "commit the new offsets")


def reset(args: argparse.Namespace) -> int:
    """Print the new offsets of a group; with --execute commit them."""
    topics, partitions = _split(args.topic)
    targets = (args.to, args.to_offset, args.to_datetime, args.by_duration)
    with to_write(args) if args.execute else to_read(args) as log:
        group = log.groups[args.group]
        changes = group.reset_offsets(
            next((target for target in targets if target is not None), None),
            shift=args.shift_by,
            topics=topics or None,
            partitions=partitions or None,
            dry_run=not args.execute,
        )
    moved = [{**part._asdict(), **change._asdict()} for part, change in changes.items()]
    document = {"group": args.group, "dry_run": not args.execute, "partitions": moved}
    rows = [(args.group, *part, change.after, change.before) for part, change in changes.items()]
    say_result(args, document, table(_RESET, rows))
    if not args.execute:
        note("Dry run, nothing was changed; repeat the command with --execute")
    return OK


def _split(options: list[tuple[str, list[int]]]) -> tuple[list[str], list[TopicPartition]]:
    """Return the topics without partitions, and the partitions."""
    topics = [name for name, numbers in options if not numbers]
    return topics, [TopicPartition(name, number) for name, numbers in options for number in numbers]


def alter_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("group", metavar="GROUP")
    about = "a setting of share groups, such as share.delivery.count.limit=3; may be repeated"
    add_list(command, "--config -c", "NAME=VALUE", about)
    add_list(command, "--reset", "NAME", "set a setting back to its default")


def alter(args: argparse.Namespace) -> int:
    """Change settings of a share group, and print those that differ from their defaults."""
    changes = {**parse_settings(args.config), **dict.fromkeys(args.reset)}
    with to_write(args) if changes else to_read(args) as log:
        group = log.groups[args.group]
        config = (group.alter(changes) if changes else group.config).overrides()
    say_result(args, config, [f"{name}={value}" for name, value in config.items()])
    return OK


def delete_offsets_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("group", metavar="GROUP")
    command.add_argument("topic", metavar="TOPIC[:N,N]", nargs="+", type=types.topic)


def delete_offsets(args: argparse.Namespace) -> int:
    """Delete the committed offsets of topics or partitions."""
    topics, partitions = _split(args.topic)
    with to_write(args) as log:
        log.groups[args.group].delete_offsets(partitions, topics=topics)
    names = [f"{name}-{number}" for name, number in partitions]
    note(f"Deleted offsets of {args.group}: {', '.join([*topics, *names])}")
    if args.json:
        say_json({"group": args.group, "topics": topics, "partitions": names})
    return OK


def delete_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("groups", metavar="GROUP", nargs="+")
    about = "delete only the committed offsets of this topic or partition"
    add_list(command, "--topic", "TOPIC[:N,N]", about, type=types.topic)


def delete(args: argparse.Namespace) -> int:
    """Delete groups; with --topic only their committed offsets for it."""
    topics, partitions = _split(args.topic)
    with to_write(args) as log:
        groups = [log.groups[name] for name in args.groups]
        for group in groups:
            group.members()  # Raises before any is deleted if one does not exist.
        for group in groups:
            if args.topic:
                group.delete_offsets(partitions, topics=topics)
            else:
                group.delete()
            note(f"Deleted {'offsets of ' if args.topic else ''}{group.name}")
    if args.json:
        say_json({"deleted": args.groups})
    return OK
