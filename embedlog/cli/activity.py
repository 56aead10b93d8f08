"""`embedlog activity`: print the events of the topic ``__activity``."""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from embedlog.api import Log
from embedlog.api.topic import TopicView
from embedlog.catalog import ACTIVITY
from embedlog.cli import argument_types as types
from embedlog.cli.open_log import rounds, to_follow, to_read
from embedlog.cli.parser import OK, CommandParser, add_flag, add_list, add_option
from embedlog.cli.printing import note, say, say_json
from embedlog.display import moment, plural
from embedlog.errors import InvalidConfigError
from embedlog.maintenance.activity import KINDS
from embedlog.progress import format_bytes
from embedlog.record import Record

EVENTS = """\
kinds: created altered deleted (topics), rolled recovered retained compacted (partitions),
rebalanced expired (groups), mirrored skipped failover (mirrors), offline online removed
(directories), elected isr reassigned (copies), owner failed (maintenance).  The events are the
records of the topic __activity; the process that does the maintenance writes them, within a few
seconds, and a mirror its own.
"""

Event = tuple[Record, dict[str, Any]]
"""The record of an event, and the facts in it."""


def activity_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = EVENTS
    add_flag(command, "-f --follow", "wait for new events")
    about = "only the last N events; by default 10 with -f, otherwise all"
    add_option(command, "-n --last", "N", about, type=types.count)
    add_list(command, "--topic", "TOPIC", "only events of this topic")
    add_list(command, "--kind", "KIND", "only events of this kind")
    add_option(command, "--max -m", "N", "end after N events", type=types.count)


def activity(args: argparse.Namespace) -> int:
    """Print events, the oldest first."""
    unknown = [kind for kind in args.kind if kind not in KINDS]
    if unknown:
        raise InvalidConfigError(
            f"There is no event kind {unknown[0]!r}", todo=f"The kinds are {', '.join(KINDS)}."
        )
    with to_follow(args) if args.follow else to_read(args) as log:
        if ACTIVITY not in log:
            note("There is no activity yet: no process has done the maintenance of this log")
        for event in islice(_events(log, args), args.max):
            _print(*event, args.json)
            if args.follow:
                sys.stdout.flush()
    return OK


def _events(log: Log, args: argparse.Namespace) -> Iterator[Event]:
    """Yield the selected events: the last ones until now, then new ones."""
    batches = _batches(log, follow=args.follow)
    until_now = _select(next(batches), args)
    last = args.last if args.last is not None or not args.follow else 10
    yield from until_now if last is None else deque(until_now, maxlen=last)
    for records in batches:
        yield from _select(records, args)


def _batches(log: Log, *, follow: bool) -> Iterator[Iterable[Record]]:
    """Yield the records until now, and with ``follow`` new ones without an end."""
    start = 0
    for _ in rounds(log, follow=follow):
        if ACTIVITY in log:
            part = log.topic(ACTIVITY).ranges()[0]
            first = part._replace(start=max(start, part.start))
            yield TopicView(log.root, ACTIVITY, [first], raw=True)
            start = part.stop
        else:
            yield ()


def _select(records: Iterable[Record], args: argparse.Namespace) -> Iterator[Event]:
    for record in records:
        facts = json.loads(record.value or b"{}")
        of_topic = not args.topic or facts.get("topic") in args.topic
        if of_topic and (not args.kind or facts.get("kind") in args.kind):
            yield record, facts


def _print(record: Record, facts: dict[str, Any], as_json: bool) -> None:
    key = (record.key or b"").decode(errors="replace")
    if as_json:
        say_json({"timestamp": record.timestamp, "key": key, **facts})
        return
    kind = str(facts.get("kind"))
    time = moment(record.timestamp).replace(" ", "T")
    say(f"{time}  {kind:<10}  {key}  {_describe(kind, facts)}".rstrip())


def _describe(kind: str, facts: dict[str, Any]) -> str:
    """Return an event in words; of an event of a later version, its facts."""
    try:
        return _DESCRIPTIONS[kind](facts)
    except (KeyError, TypeError, ValueError):
        return ", ".join(f"{name} {value}" for name, value in facts.items() if name != "kind")


def _settings(config: dict[str, Any]) -> str:
    return "".join(f", {name}={value}" for name, value in config.items())


def _altered(facts: dict[str, Any]) -> str:
    changes = {"partitions": facts["partitions"]} if "partitions" in facts else {}
    changes |= facts["config"]
    default = "the default"
    return ", ".join(
        f"{name} from {default if old is None else old} to {default if new is None else new}"
        for name, (old, new) in changes.items()
    )


def _leader(directory: int | None) -> str:
    return "no leader" if directory is None else f"directory {directory}"


def _ids(directories: list[int]) -> str:
    return ",".join(map(str, directories)) or "none"


_DESCRIPTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "created": lambda facts: (
        f"id {facts['id']}, {plural(facts['partitions'], 'partition')}{_settings(facts['config'])}"
    ),
    "altered": _altered,
    "deleted": lambda facts: f"id {facts['id']}",
    "rolled": lambda facts: (
        f"{plural(facts['segments'], 'new segment')}, the active one begins at {facts['offset']}"
    ),
    "recovered": lambda facts: (
        facts.get("reason")
        or f"truncated to {facts['offset']}, where leader epoch {facts['leader_epoch']} begins"
    ),
    "retained": lambda facts: (
        f"{plural(facts['segments'], 'segment')} with {format_bytes(facts['bytes'])} deleted, "
        f"the log begins at {facts['start_offset']}"
    ),
    "compacted": lambda facts: (
        f"{facts['records_read'] - facts['records_kept']} of "
        f"{plural(facts['records_read'], 'record')} removed, "
        f"{format_bytes(facts['bytes_before'])} became {format_bytes(facts['bytes_after'])}, "
        f"dirty from {facts['first_dirty']} on"
    ),
    "rebalanced": lambda facts: (
        f"generation {facts['generation']}, {plural(facts['members'], 'member')}, "
        f"{plural(facts['partitions'], 'partition')}"
    ),
    "expired": lambda facts: f"{plural(facts['offsets'], 'committed offset')} deleted",
    "owner": lambda facts: f"process {facts['pid']}",
    "failed": lambda facts: str(facts["error"]),
    "offline": lambda facts: f"directory {facts['directory']}: {facts['reason']}",
    "online": lambda facts: f"directory {facts['directory']}",
    "removed": lambda facts: f"directory {facts['directory']}",
    "elected": lambda facts: (
        f"{_leader(facts['before'])} was replaced by {_leader(facts['leader'])}, leader epoch "
        f"{facts['leader_epoch']}{', not in sync' if facts['unclean'] else ''}"
    ),
    "isr": lambda facts: f"from {_ids(facts['before'])} to {_ids(facts['isr'])}",
    "reassigned": lambda facts: f"from {_ids(facts['before'])} to {_ids(facts['replicas'])}",
    "mirrored": lambda facts: (
        f"{facts['state']}, {plural(facts['records'], 'record')} copied, "
        f"{facts['records_per_second']:,}/s, lag {facts['lag']:,}"
    ),
    "skipped": lambda facts: (
        f"{plural(facts['offsets'], 'offset')} of {facts['source_topic']}-{facts['partition']}, "
        f"from {facts['first_offset']} on, deleted at the source before they were copied"
    ),
    "failover": lambda facts: (
        f"{', '.join(facts['topics'])} may be written to"
        if "topics" in facts
        else f"by {facts['strategy']}: repeats {facts['repeats']} to {facts['may_repeat']} "
        f"offsets, skips up to {facts['may_skip']}"
    ),
}
