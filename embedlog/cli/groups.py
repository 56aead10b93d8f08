"""`embedlog groups`: who reads, how far they are, and where they go on.

The first columns are those of kafka-consumer-groups.sh, in its order, so that
scripts which count them still fit.
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
    """Print the names of all groups, with --state what they are doing."""
    with to_read(args) as log:
        names = log.groups()
        states = [_state(log.group(name)) for name in names] if args.state else []
    if args.json:
        say_json(states if args.state else names)
    elif args.state:
        heads = ("GROUP", "STATE", "#MEMBERS")
        say(*text_table(heads, [tuple(each.values()) for each in states]))
    else:
        say(*names)
    return OK


def _state(group: ConsumerGroup) -> dict[str, Any]:
    found = group.describe()
    return {"group": found.group, "state": found.state, "members": len(found.members)}


def describe(args: argparse.Namespace) -> int:
    """Print state, partitions and members."""
    with to_read(args) as log:
        found = [log.group(name).describe() for name in args.groups or log.groups()]
    if args.json:
        say_json([each.to_dict() for each in found])
        return OK
    for number, each in enumerate(found):
        say(*([""] if number else []), each.title)
        if each.partitions:
            say("", *text_table((*_LAG, *_OWNERS), _partitions(each)))
        if each.members:
            say("", *text_table(_MEMBERS, _members(each)))
    return OK


def _partitions(found: GroupDescription) -> list[tuple[object, ...]]:
    owners = {each.member_id: (each.pid, each.client_id) for each in found.members}
    return [
        (
            *(found.group, each.topic, each.partition),
            *(each.current_offset, each.log_end_offset, each.lag),
            each.member_id,
            *owners.get(each.member_id or "", (None, None)),
            each.lag_ms,
            None if each.committed_ms is None else moment(each.committed_ms).replace(" ", "T"),
            each.metadata,
        )
        for each in found.partitions
    ]


def _members(found: GroupDescription) -> list[tuple[object, ...]]:
    return [
        (
            *(found.group, each.member_id, each.group_instance_id, each.pid, each.client_id),
            len(each.partitions),
            ",".join(each.topics),
        )
        for each in found.members
    ]


def lag(args: argparse.Namespace) -> int:
    """Print how far groups are behind, with --watch again and again."""
    if args.watch is None:
        with to_read(args) as log:
            _say_lag(args, log)
        return OK
    nobody = threading.Event()
    # Attached: a reader from outside would not see a log that is used again after a reboot.
    with to_follow(args) as log:
        while True:
            _say_lag(args, log)
            sys.stdout.flush()
            nobody.wait(args.watch)


def _say_lag(args: argparse.Namespace, log: Log) -> None:
    rows = []
    for name in args.groups or log.groups():
        try:
            found = log.group(name).describe()
        except GroupIdNotFoundError:
            if args.groups and args.watch is None:
                raise
            continue  # it may come yet, or come back
        rows += [(name, each) for each in found.partitions]
    if args.json:
        wanted = ("topic", "partition", "current_offset", "log_end_offset", "lag", "lag_ms")
        say_json([{"group": name, **{k: getattr(each, k) for k in wanted}} for name, each in rows])
        return
    lines = text_table(
        (*_LAG, "LAG-MS"),
        [
            (
                *(name, each.topic, each.partition),
                *(each.current_offset, each.log_end_offset, each.lag, each.lag_ms),
            )
            for name, each in rows
        ],
    )
    if args.watch is not None and sys.stdout.isatty():
        sys.stdout.write(_CLEAR)
    say(*lines)


def reset(args: argparse.Namespace) -> int:
    """Print where a group would go on; with --execute it does."""
    with to_write(args) if args.execute else to_read(args) as log:
        group = log.group(args.group)
        topics, partitions = _named(args.topic)
        done = group.reset_offsets(
            _to(args),
            shift=args.shift_by,
            topics=topics if args.topic else None,
            partitions=partitions if args.topic else None,
            dry_run=not args.execute,
        )
    rows = [(args.group, *one, move.after, move.before) for one, move in done.items()]
    if args.json:
        moves = [{**one._asdict(), **move._asdict()} for one, move in done.items()]
        say_json({"group": args.group, "dry_run": not args.execute, "partitions": moves})
    else:
        say(*text_table(_RESET, rows))
    if not args.execute:
        note("nothing was changed: repeat it with --execute")
    return OK


def _to(args: argparse.Namespace) -> str | int | datetime | timedelta | None:
    for found in (args.to, args.to_offset, args.to_datetime, args.by_duration):
        if found is not None:
            to: str | int | datetime | timedelta = found
            return to
    return None


def _named(given: list[tuple[str, list[int]]]) -> tuple[list[str], list[TopicPartition]]:
    """Return the whole topics, and the partitions, that were named."""
    topics = [name for name, numbers in given if not numbers]
    return topics, [TopicPartition(name, number) for name, numbers in given for number in numbers]


def delete(args: argparse.Namespace) -> int:
    """Remove groups; with --topic only what they committed for it."""
    topics, partitions = _named(args.topic)
    with to_write(args) as log:
        groups = [log.group(name) for name in args.groups]
        for group in groups:
            group.members()  # none of them, if one is not there
        for group in groups:
            if args.topic:
                group.delete_offsets(partitions, topics=topics)
            else:
                group.delete()
            note(f"deleted {'offsets of ' if args.topic else ''}{group.name}")
    if args.json:
        say_json({"deleted": args.groups})
    return OK
