"""What the housekeeping did and saw, as records of the topic ``__activity``.

Nobody who appends, creates or joins has anything to do with it.  The process
that does the housekeeping compares the catalogue and the groups with what was
told of them before, and tells the difference; what it does itself it tells
when it is done.  So a process that is killed takes nothing with it that others
could not see, and the path of an append is as it was.

What was told is noted first and written second: whoever is killed in between
leaves an event out, but none is told twice, and none that was not.  Several
rolls or rebalances since the last look are one event.  A log to which nothing
happens has nothing written, not even the topic.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from embedlog import batch, catalog, kv
from embedlog.catalog import ACTIVITY, TopicInfo
from embedlog.config import TopicConfig
from embedlog.errors import (
    ClosedError,
    CorruptionError,
    DiskFullError,
    EmbedlogError,
    FencedError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
)
from embedlog.groups.membership import GROUPS, Membership
from embedlog.keyspace import (
    GROUP_VERSIONS,
    REPORTED_GROUPS,
    REPORTED_LIVE,
    REPORTED_OWNER,
    REPORTED_TOPICS,
    REPORTED_VERSION,
)
from embedlog.partition import PartitionLog
from embedlog.retention import RetentionResult
from embedlog.root.root import Root

if TYPE_CHECKING:
    from embedlog.compaction import CleanResult

KINDS: Final = (
    *("created", "altered", "deleted", "rolled", "recovered", "retained", "compacted"),
    *("rebalanced", "expired", "owner", "failed"),
)
SETTINGS: Final[Mapping[str, object]] = {
    "segment.bytes": 4 << 20,
    "retention.ms": 7 * 86_400_000,
    "retention.bytes": 16 << 20,
}
"""Of the topic, when it is made; they can be altered like any other's."""

_PATIENCE_SECONDS = 1.0
_NEW: Final[Mapping[str, Any]] = {"config": {}, "places": []}
"""What was told of a topic of which nothing was."""
_MOST_AT_ONCE = 1_000
"""Events a batch, so that none is over ``max.message.bytes``."""
_LEAST_BYTES = 1 << 20
"""On a disk with less nothing is told: what there is, the housekeeping needs."""
_log = logging.getLogger("embedlog")

Fence = Callable[[kv.Txn], None]


class Event(NamedTuple):
    """Something that happened to a log."""

    kind: str
    """One of `KINDS`."""
    key: str
    """What it happened to: ``topic-partition``, a topic, a group, or a job."""
    facts: dict[str, Any]
    """Everything else there is to say, for JSON."""

    def value(self) -> bytes:
        """Return the record's value."""
        return json.dumps({"kind": self.kind, **self.facts}, ensure_ascii=False).encode()


# Telling


def tell(root: Root, events: Iterable[Event], pid: int | None = None) -> None:
    """Append events to the topic, which is made if need be.

    Whatever is in the way of that is logged and forgotten: it is no reason for the
    housekeeping to fail.

    Args:
        root: The open log.
        events: What to tell; nothing is done if there are none.
        pid: The process that does the housekeeping: told if the last one was another.

    Raises:
        ClosedError: The log was closed meanwhile.
    """
    found = list(events)
    if not found:
        return
    try:
        if root.context.files.free_bytes() < _LEAST_BYTES:
            raise DiskFullError("the disk is full", path=root.path)
        if pid is not None and _is_new_owner(root, pid):
            found.insert(0, Event("owner", "maintenance", {"pid": pid}))
        log, now = _topic(root), root.clock()
        for first in range(0, len(found), _MOST_AT_ONCE):
            some = found[first : first + _MOST_AT_ONCE]
            values, keys = [one.value() for one in some], [one.key.encode() for one in some]
            encoded = batch.encode_lists(values, keys, now)
            log.append([encoded], timeout=_PATIENCE_SECONDS)
    except ClosedError:
        raise
    except Exception as error:  # noqa: BLE001 - the housekeeping itself was done
        _log.warning("%d events of %s are not told: %s", len(found), root.path, error)


def _topic(root: Root) -> PartitionLog:
    try:
        return root.partition(ACTIVITY, 0)
    except UnknownTopicOrPartitionError:
        with suppress(TopicAlreadyExistsError):
            root.create_topic(ACTIVITY, 1, TopicConfig.parse(SETTINGS))
        return root.partition(ACTIVITY, 0)


def _is_new_owner(root: Root, pid: int) -> bool:
    live = root.context.live
    if REPORTED_OWNER.get(live) == pid:
        return False
    live.write(lambda txn: REPORTED_OWNER.put(txn, value=pid))
    return True


# What jobs did


def done(result: object) -> list[Event]:
    """Return the events of what a job of the housekeeping returned: a list of what it did."""
    return [one for each in result for one in _done(each)] if isinstance(result, list) else []


def expired(group_id: str, count: int) -> Event:
    """Return the event of committed offsets that were forgotten."""
    return Event("expired", group_id, {"group": group_id, "offsets": count})


def _done(one: object) -> Iterator[Event]:
    if isinstance(one, Event):
        yield one
    elif isinstance(one, RetentionResult):
        yield from _of(one.topic, one.partition, "retained", one._asdict())
    else:
        # Only now: it loads numpy, and is there already if this is what compaction did.
        from embedlog.compaction import CleanResult

        if isinstance(one, CleanResult):
            yield from _cleaned(one)


def _cleaned(one: CleanResult) -> Iterator[Event]:
    if one.error is not None and not isinstance(one.error, FencedError):
        yield from _of(one.topic, one.partition, "failed", {"error": one.why, "job": "compaction"})
    elif one.passes:
        wanted = (
            *("first_dirty", "passes", "bytes_before", "bytes_after", "records_read"),
            *("records_kept", "tombstones", "segments_before", "segments_after"),
        )
        facts = {name: getattr(one, name) for name in wanted}
        yield from _of(one.topic, one.partition, "compacted", facts)


def _of(topic: str, partition: int, kind: str, facts: Mapping[str, Any]) -> Iterator[Event]:
    # Of the topic itself nothing is told: that would never end.
    if topic != ACTIVITY:
        at = {"topic": topic, "partition": partition}
        yield Event(kind, f"{topic}-{partition}", at | dict(facts))


def failed(job: str, error: Exception) -> Event:
    """Return the event of a job that failed."""
    return Event("failed", job, {"job": job, "error": str(error)})


# What others did


def look(root: Root, fence: Fence) -> list[Event]:
    """Return what happened to the topics and groups of a log since the last look, and note it.

    Args:
        root: The open log.
        fence: Raises if another process does the housekeeping now, which tells it then.

    Raises:
        FencedError: It does.
        ClosedError: The log was closed meanwhile.
    """
    events: list[Event] = []
    for each in (_look_at_live, _look_at_topics, _look_at_groups):
        try:
            events += each(root, fence)
        except (ClosedError, FencedError):
            raise
        except EmbedlogError as error:
            # A full disk, or damage that whoever needs the row is told of.
            _log.warning("what happened to %s is not told: %s", root.path, error)
    return events


def _look_at_live(root: Root, fence: Fence) -> list[Event]:
    """Return whether `live` is another one than that of the last look: it lasts for one boot."""
    live = root.context.live
    if REPORTED_LIVE.exists(live):
        return []

    def step(txn: kv.Txn) -> bool:
        fence(txn)
        new = not REPORTED_LIVE.exists(txn)
        REPORTED_LIVE.put(txn, value=None)
        return new

    known = root.context.state.read(REPORTED_TOPICS.any)
    if not live.write(step) or not known:
        return []
    reason = "after a reboot, or because it was damaged, live was built anew"
    return [Event("recovered", "live", {"reason": reason})]


def _look_at_topics(root: Root, fence: Fence) -> list[Event]:
    state, live = root.context.state, root.context.live
    if REPORTED_VERSION.get(live) == state.version():
        return []
    found, version = state.read(lambda txn: (_compare(txn), txn.id()))
    if found.rows:
        live.read(fence)
        # Compared again where it is noted: so of two that look, one tells.
        found, number = state.write(partial(_note, found.rows.keys()))
        # What others changed in between is for the next look.
        version = number if number == version + 1 else version
    live.write(lambda txn: REPORTED_VERSION.put(txn, value=version))
    return found.events


class ActivityChange(NamedTuple):
    events: list[Event]
    rows: dict[bytes, dict[str, Any] | None]
    """What will say that they were told, by key."""


def _note(wanted: Collection[bytes], txn: kv.Txn) -> tuple[ActivityChange, int]:
    found = _compare(txn, wanted)
    for key, row in found.rows.items():
        if row is None:
            txn.delete(key)
        else:
            txn.put(key, REPORTED_TOPICS.dump(key, row))
    # Without a change this transaction is none, and its number another one's.
    return found, txn.id() if found.rows else -1


def _compare(txn: kv.Txn, wanted: Collection[bytes] | None = None) -> ActivityChange:
    """Return what is different from what was told of all topics, or of some, by their rows."""
    told = dict(kv.rows(txn, REPORTED_TOPICS.prefix()))
    if wanted is not None:
        told = {key: row for key, row in told.items() if key in wanted}
    found = ActivityChange([], {})
    for info in catalog.topics(txn):
        key = REPORTED_TOPICS.key(info.id)
        if info.name == ACTIVITY or (wanted is not None and key not in wanted):
            continue
        before, places = told.pop(key, None), _places(txn, info)
        row = _told_row(info, places)
        if before != REPORTED_TOPICS.dump(key, row):
            found.rows[key] = row
            known = _NEW if before is None else _unpack(key, before)
            if known is not None:
                found.events.extend(_changes(info, known))
                found.events.extend(_moves(txn, info, known, places))
    found.rows.update(dict.fromkeys(told))
    # First, for one that is made anew has the name of one that is gone.
    found.events[:0] = [event for each in told.items() for event in _deleted(*each)]
    return found


def _deleted(key: bytes, row: bytes) -> Iterator[Event]:
    known = _unpack(key, row)
    if known is not None:
        yield Event("deleted", known["name"], {"topic": known["name"], "id": known["id"]})


def _told_row(info: TopicInfo, places: list[list[int]]) -> dict[str, Any]:
    return {"name": info.name, "id": info.id, "config": info.config.overrides(), "places": places}


def _unpack(key: bytes, row: bytes) -> dict[str, Any] | None:
    """Return what was told of a topic; None if that is damaged: then it begins anew from now."""
    try:
        known: dict[str, Any] = REPORTED_TOPICS.load(key, row)
    except CorruptionError as error:
        _log.warning("%s; what happened since is not told", error)
        return None
    return known


def _places(txn: kv.Txn, info: TopicInfo) -> list[list[int]]:
    """Return of each partition where its active segment begins, and its leader epoch."""
    places = []
    for number in range(info.partitions):
        key = info.key(number)
        last, durable = catalog.last_segment(txn, key), catalog.PARTITIONS.get(txn, key)
        if last is not None and durable is not None:
            places.append([last.base_offset, durable.leader_epoch])
    return places


def _changes(info: TopicInfo, known: Mapping[str, Any]) -> Iterator[Event]:
    config = info.config.overrides()
    facts: dict[str, Any] = {"topic": info.name, "id": info.id}
    if known is _NEW:
        facts |= {"partitions": info.partitions, "config": config, "created_ms": info.created_ms}
        yield Event("created", info.name, facts)
        return
    before = known["config"]
    changes = {
        name: [before.get(name), config.get(name)]
        for name in sorted(before.keys() | config.keys())
        if before.get(name) != config.get(name)
    }
    count = len(known["places"])
    if changes or count != info.partitions:
        facts["config"] = changes
        facts |= {"partitions": [count, info.partitions]} if count != info.partitions else {}
        yield Event("altered", info.name, facts)


def _moves(
    txn: kv.Txn, info: TopicInfo, known: Mapping[str, Any], places: list[list[int]]
) -> Iterator[Event]:
    """Yield what happened in the partitions: new segments, and epochs, which begin with a cut."""
    before = known["places"]
    for number, (base, epoch) in enumerate(places):
        old_base, old_epoch = before[number] if number < len(before) else (0, 0)
        if epoch > old_epoch:
            for each, start in catalog.epochs(txn, info.key(number)):
                if each > old_epoch:
                    facts = {"leader_epoch": each, "offset": start}
                    yield from _of(info.name, number, "recovered", facts)
        if base > old_base:
            # Each of them begins at a roll, also if compaction has rewritten it since.
            count = catalog.count_after(txn, info.key(number), old_base)
            yield from _of(info.name, number, "rolled", {"offset": base, "segments": count})


def _look_at_groups(root: Root, fence: Fence) -> list[Event]:
    live = root.context.live
    if not live.read(_unseen):
        return []

    def step(txn: kv.Txn) -> list[Event]:
        fence(txn)
        events = []
        for name, version in _unseen(txn).items():
            found = GROUPS.get(txn, name)
            if found is None or version is None:
                REPORTED_GROUPS.delete(txn, name)
                continue
            before = REPORTED_GROUPS.get(txn, name)
            generation = 0 if before is None else before.generation
            if found.settled and found.generation != generation:
                events.append(_rebalanced(name, found))
                generation = found.generation
            REPORTED_GROUPS.put(txn, name, value=(version, generation))
        return events

    return live.write(step)


def _unseen(txn: kv.Txn) -> dict[str, int | None]:
    """Return the versions of the groups that changed since the last look; None: it is gone."""
    versions = {name: version for (name,), version in GROUP_VERSIONS.scan(txn)}
    told = {name: before.version for (name,), before in REPORTED_GROUPS.scan(txn)}
    gone = dict.fromkeys(told.keys() - versions.keys())
    return gone | {name: seen for name, seen in versions.items() if told.get(name) != seen}


def _rebalanced(name: str, found: Membership) -> Event:
    facts = {
        "group": name,
        "generation": found.generation,
        "assignor": found.assignor,
        "topics": sorted(found.topics),
        "members": len(found.members),
        "partitions": sum(map(len, found.target.values())),
    }
    return Event("rebalanced", name, facts)
