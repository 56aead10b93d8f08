"""`embedlog groups`: list, describe, lag, reset and delete.

The first columns are those of kafka-consumer-groups.sh, in the same order, for scripts that
count columns.
"""

from __future__ import annotations

import argparse
import sys
import threading
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from embedlog.api.display import moment, text_table
from embedlog.cli.open_log import to_follow, to_read, to_write
from embedlog.cli.parser import OK
from embedlog.cli.printing import note, say, say_json
from embedlog.errors import GroupIdNotFoundError
from embedlog.record import TopicPartition

if TYPE_CHECKING:
    from embedlog.api import Log
    from embedlog.api.consumer_group import ConsumerGroup, GroupDescription

_LAG = ("GROUP", "TOPIC", "PARTITION", "CURRENT-OFFSET", "LOG-END-OFFSET", "LAG")
_OWNERS = ("CONSUMER-ID", "PID", "CLIENT-ID", "LAG-MS", "COMMITTED", "METADATA")
_MEMBERS = ("GROUP", "CONSUMER-ID", "INSTANCE-ID", "PID", "CLIENT-ID", "#PARTITIONS", "TOPICS")
_RESET = ("GROUP", "TOPIC", "PARTITION", "NEW-OFFSET", "OLD-OFFSET")
_CLEAR = "\x1b[H\x1b[J"


def show_names(args: argparse.Namespace) -> int:
    """Print the names of all groups; with --state also state and number of members."""
    with to_read(args) as log:
        names = log.groups()
        states = [_state(log.group(name)) for name in names] if args.state else []
    if args.json:
        say_json(states if args.state else names)
    elif args.state:
        heads = ("GROUP", "STATE", "#MEMBERS")
        say(*text_table(heads, [tuple(state.values()) for state in states]))
    else:
        say(*names)
    return OK


def _state(group: ConsumerGroup) -> dict[str, Any]:
    group_now = group.describe()
    return {
        "group": group_now.group,
        "state": group_now.state,
        "members": len(group_now.members),
    }


def describe(args: argparse.Namespace) -> int:
    """Print state, partitions and members."""
    with to_read(args) as log:
        groups = [log.group(name).describe() for name in args.groups or log.groups()]
    if args.json:
        say_json([group.to_dict() for group in groups])
        return OK
    for number, group in enumerate(groups):
        say(*([""] if number else []), group.title)
        if group.partitions:
            say("", *text_table((*_LAG, *_OWNERS), _partition_rows(group)))
        if group.members:
            say("", *text_table(_MEMBERS, _member_rows(group)))
    return OK


def _partition_rows(group: GroupDescription) -> list[tuple[object, ...]]:
    owners = {member.member_id: (member.pid, member.client_id) for member in group.members}
    return [
        (
            *(group.group, part.topic, part.partition),
            *(part.current_offset, part.log_end_offset, part.lag),
            part.member_id,
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
            *(group.group, member.member_id, member.group_instance_id),
            *(member.pid, member.client_id),
            len(member.partitions),
            ",".join(member.topics),
        )
        for member in group.members
    ]


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
    for name in args.groups or log.groups():
        try:
            group = log.group(name).describe()
        except GroupIdNotFoundError:
            if args.groups and args.watch is None:
                raise
            continue  # It may be created later.
        rows += [(name, part) for part in group.partitions]
    if args.json:
        fields = ("topic", "partition", "current_offset", "log_end_offset", "lag", "lag_ms")
        say_json([{"group": name, **{f: getattr(part, f) for f in fields}} for name, part in rows])
        return
    lines = text_table(
        (*_LAG, "LAG-MS"),
        [
            (
                *(name, part.topic, part.partition),
                *(part.current_offset, part.log_end_offset, part.lag, part.lag_ms),
            )
            for name, part in rows
        ],
    )
    if args.watch is not None and sys.stdout.isatty():
        sys.stdout.write(_CLEAR)
    say(*lines)


def reset(args: argparse.Namespace) -> int:
    """Print the new offsets of a group; with --execute commit them."""
    with to_write(args) if args.execute else to_read(args) as log:
        group = log.group(args.group)
        topics, partitions = _split(args.topic)
        changes = group.reset_offsets(
            _target(args),
            shift=args.shift_by,
            topics=topics if args.topic else None,
            partitions=partitions if args.topic else None,
            dry_run=not args.execute,
        )
    if args.json:
        moved = [{**part._asdict(), **change._asdict()} for part, change in changes.items()]
        say_json({"group": args.group, "dry_run": not args.execute, "partitions": moved})
    else:
        rows = [
            (args.group, *part, change.after, change.before) for part, change in changes.items()
        ]
        say(*text_table(_RESET, rows))
    if not args.execute:
        note("Dry run, nothing was changed; repeat the command with --execute")
    return OK


def _target(args: argparse.Namespace) -> str | int | datetime | timedelta | None:
    for option in (args.to, args.to_offset, args.to_datetime, args.by_duration):
        if option is not None:
            target: str | int | datetime | timedelta = option
            return target
    return None


def _split(options: list[tuple[str, list[int]]]) -> tuple[list[str], list[TopicPartition]]:
    """Return the topics without partitions, and the partitions."""
    topics = [name for name, numbers in options if not numbers]
    return topics, [TopicPartition(name, number) for name, numbers in options for number in numbers]


def delete(args: argparse.Namespace) -> int:
    """Delete groups; with --topic only their committed offsets for it."""
    topics, partitions = _split(args.topic)
    with to_write(args) as log:
        groups = [log.group(name) for name in args.groups]
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
