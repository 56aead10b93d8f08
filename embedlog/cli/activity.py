"""`embedlog activity`: what the housekeeping did, and saw others do."""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from embedlog.api import Log
from embedlog.api.display import moment
from embedlog.api.topic import TopicView
from embedlog.catalog import ACTIVITY
from embedlog.cli.open_log import to_follow, to_read
from embedlog.cli.parser import OK
from embedlog.cli.printing import note, say, say_json
from embedlog.errors import InvalidConfigError
from embedlog.maintenance.activity import KINDS
from embedlog.progress import format_bytes
from embedlog.record import Record

_WAIT_SECONDS = 60.0


class PrintedEvents(NamedTuple):
    timestamp: int
    key: str
    facts: dict[str, Any]


def show(args: argparse.Namespace) -> int:
    """Print events, the oldest first."""
    unknown = [kind for kind in args.kind if kind not in KINDS]
    if unknown:
        raise InvalidConfigError(
            f"there are no {unknown[0]!r} events", todo=f"the kinds are {', '.join(KINDS)}"
        )
    with to_follow(args) if args.follow else to_read(args) as log:
        if ACTIVITY not in log:
            note("nothing was told yet: no process has done the housekeeping of this log")
        for told in islice(_wanted(log, args), args.max):
            _say(told, args.json)
            if args.follow:
                sys.stdout.flush()
    return OK


def _wanted(log: Log, args: argparse.Namespace) -> Iterator[PrintedEvents]:
    """Yield the events that were asked for: the last ones so far, then those that come."""
    rounds = _rounds(log, follow=args.follow)
    so_far = _chosen(next(rounds), args)
    last = args.last if args.last is not None or not args.follow else 10
    yield from so_far if last is None else deque(so_far, maxlen=last)
    for records in rounds:
        yield from _chosen(records, args)


def _rounds(log: Log, *, follow: bool) -> Iterator[Iterable[Record]]:
    """Yield what there is, and for a follower for ever what has come since."""
    start = 0
    if follow:
        log.root.wake.join()
    while True:
        seen = log.root.wake.value()
        if ACTIVITY in log:
            part = log.topic(ACTIVITY).ranges()[0]
            yield TopicView(log.root, ACTIVITY, [part._replace(start=max(start, part.start))])
            start = part.stop
        else:
            yield ()
        if not follow:
            return
        log.root.wake.wait(seen, _WAIT_SECONDS)


def _chosen(records: Iterable[Record], args: argparse.Namespace) -> Iterator[PrintedEvents]:
    for record in records:
        facts = json.loads(record.value or b"{}")
        told = PrintedEvents(record.timestamp, (record.key or b"").decode(errors="replace"), facts)
        of_topic = not args.topic or facts.get("topic") in args.topic
        if of_topic and (not args.kind or facts.get("kind") in args.kind):
            yield told


def _say(told: PrintedEvents, as_json: bool) -> None:
    if as_json:
        say_json({"timestamp": told.timestamp, "key": told.key, **told.facts})
        return
    kind = str(told.facts.get("kind"))
    at = moment(told.timestamp).replace(" ", "T")
    say(f"{at}  {kind:<10}  {told.key}  {_words(kind, told.facts)}".rstrip())


def _words(kind: str, facts: dict[str, Any]) -> str:
    """Return what there is to say of an event; of one of a later version, its facts."""
    try:
        return _WORDS[kind](facts)
    except (KeyError, TypeError, ValueError):
        return ", ".join(f"{name} {value}" for name, value in facts.items() if name != "kind")


def _settings(config: dict[str, Any]) -> str:
    return "".join(f", {name}={value}" for name, value in config.items())


def _altered(facts: dict[str, Any]) -> str:
    changes = {"partitions": facts["partitions"]} if "partitions" in facts else {}
    changes |= facts["config"]
    usual = "the default"
    return ", ".join(
        f"{name} from {usual if old is None else old} to {usual if new is None else new}"
        for name, (old, new) in changes.items()
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


_WORDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "created": lambda it: (
        f"id {it['id']}, {_many(it['partitions'], 'partition')}{_settings(it['config'])}"
    ),
    "altered": _altered,
    "deleted": lambda it: f"id {it['id']}",
    "rolled": lambda it: (
        f"{_many(it['segments'], 'new segment')}, the last one begins at {it['offset']}"
    ),
    "recovered": lambda it: (
        it.get("reason") or f"cut at {it['offset']}, where leader epoch {it['leader_epoch']} begins"
    ),
    "retained": lambda it: (
        f"{_many(it['segments'], 'segment')} with {format_bytes(it['bytes'])} deleted, "
        f"it begins at {it['start_offset']} now"
    ),
    "compacted": lambda it: (
        f"{it['records_read'] - it['records_kept']} of {it['records_read']} records left out, "
        f"{format_bytes(it['bytes_before'])} became {format_bytes(it['bytes_after'])}, "
        f"dirty from {it['first_dirty']} on"
    ),
    "rebalanced": lambda it: (
        f"generation {it['generation']}, {_many(it['members'], 'member')}, "
        f"{_many(it['partitions'], 'partition')}"
    ),
    "expired": lambda it: f"{_many(it['offsets'], 'committed offset')} forgotten",
    "owner": lambda it: f"process {it['pid']} does it",
    "failed": lambda it: str(it["error"]),
}
