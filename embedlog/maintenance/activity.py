"""Records in the topic ``__activity`` what happened to a log.

The maintenance owner writes it, so appending, creating a topic or joining a group costs
nothing for it.  The owner compares the catalog and the groups with what was reported
before and reports the differences; its own work it reports when that is done.  So no event
is lost because the process that caused it was killed.

An event is noted as reported first and written second: a crash in between loses an event,
but none is reported twice, and none that did not happen.  Several rolls or rebalances
between two rounds are one event.  An idle log gets no events, and not even the topic.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from embedlog import batch, catalog, group, kv
from embedlog.catalog import ACTIVITY, TOLD, TopicInfo
from embedlog.checksum import seal, unseal
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
from embedlog.groups import membership
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
"""Settings of the new topic; they can be altered like those of any other."""
SEEN: Final = b"A"
"""The key in `live` of what was inspected last; with a group's name, of what was reported of it."""

_LOCK_SECONDS = 1.0
_NEW: Final[Mapping[str, Any]] = {"config": {}, "places": []}
"""What was reported of a topic that is new."""
_MAX_BATCH = 1_000
"""Events per batch, so that no batch is larger than ``max.message.bytes``."""
_MIN_FREE_BYTES = 1 << 20
"""With less free space nothing is reported: the jobs need what is left."""
_log = logging.getLogger("embedlog")

Fence = Callable[[kv.Txn], None]


class Event(NamedTuple):
    """Something that happened to a log."""

    kind: str
    """One of `KINDS`."""
    key: str
    """What it happened to: ``topic-partition``, a topic, a group, or a job."""
    facts: dict[str, Any]
    """The details, for JSON."""

    def value(self) -> bytes:
        """Return the value of the record."""
        return json.dumps({"kind": self.kind, **self.facts}, ensure_ascii=False).encode()


# Reporting


def report(root: Root, events: Iterable[Event], pid: int | None = None) -> None:
    """Append events to the topic, which is created if necessary.

    Errors are only logged: no job should fail because of them.

    Args:
        root: The open log.
        events: What to report; does nothing if there are none.
        pid: The process that does the maintenance; reported if it is a new one.

    Raises:
        ClosedError: The log was closed meanwhile.
    """
    events = list(events)
    if not events:
        return
    try:
        if root.context.files.free_bytes() < _MIN_FREE_BYTES:
            raise DiskFullError("The disk is full", path=root.path)
        if pid is not None and _is_new_owner(root, pid):
            events.insert(0, Event("owner", "maintenance", {"pid": pid}))
        log, now_ms = _topic(root), root.clock()
        for first in range(0, len(events), _MAX_BATCH):
            part = events[first : first + _MAX_BATCH]
            values, keys = [event.value() for event in part], [event.key.encode() for event in part]
            log.append([batch.encode_lists(values, keys, now_ms)], timeout=_LOCK_SECONDS)
    except ClosedError:
        raise
    except Exception as error:  # noqa: BLE001 - the job itself was done
        _log.warning("Cannot report %d events of %s: %s", len(events), root.path, error)


def _topic(root: Root) -> PartitionLog:
    try:
        return root.partition(ACTIVITY, 0)
    except UnknownTopicOrPartitionError:
        with suppress(TopicAlreadyExistsError):
            root.create_topic(ACTIVITY, 1, TopicConfig.parse(SETTINGS))
        return root.partition(ACTIVITY, 0)


def _is_new_owner(root: Root, pid: int) -> bool:
    live, key, row = root.context.live, SEEN + b"\0owner", pid.to_bytes(4, "big")
    if live.get(key) == row:
        return False
    live.write(lambda txn: txn.put(key, row))
    return True


# What jobs did


def events_of(result: object) -> list[Event]:
    """Return the events for the result of a job."""
    if not isinstance(result, list):
        return []
    return [event for item in result for event in _events_of_item(item)]


def expired(group_id: str, count: int) -> Event:
    """Return the event of committed offsets that expired."""
    return Event("expired", group_id, {"group": group_id, "offsets": count})


def _events_of_item(item: object) -> Iterator[Event]:
    if isinstance(item, Event):
        yield item
    elif isinstance(item, RetentionResult):
        yield from _partition_event(item.topic, item.partition, "retained", item._asdict())
    else:
        # Imported here: it loads numpy, unless the compaction job has done that already.
        from embedlog.compaction import CleanResult

        if isinstance(item, CleanResult):
            yield from _compaction_event(item)


def _compaction_event(result: CleanResult) -> Iterator[Event]:
    topic, partition = result.topic, result.partition
    if result.error is not None and not isinstance(result.error, FencedError):
        facts: dict[str, Any] = {"error": result.why, "job": "compaction"}
        yield from _partition_event(topic, partition, "failed", facts)
    elif result.passes:
        names = (
            *("first_dirty", "passes", "bytes_before", "bytes_after", "records_read"),
            *("records_kept", "tombstones", "segments_before", "segments_after"),
        )
        facts = {name: getattr(result, name) for name in names}
        yield from _partition_event(topic, partition, "compacted", facts)


def _partition_event(
    topic: str, partition: int, kind: str, facts: Mapping[str, Any]
) -> Iterator[Event]:
    # Nothing is reported of the activity topic itself: that would never end.
    if topic != ACTIVITY:
        where = {"topic": topic, "partition": partition}
        yield Event(kind, f"{topic}-{partition}", where | dict(facts))


def failed(job: str, error: Exception) -> Event:
    """Return the event of a job that failed."""
    return Event("failed", job, {"job": job, "error": str(error)})


# What other processes did


def detect_changes(root: Root, fence: Fence) -> list[Event]:
    """Return what changed in the topics and groups of a log since the last call, and note it.

    Args:
        root: The open log.
        fence: Raises if another process is the maintenance owner now.

    Raises:
        FencedError: Raised by the fence; the new owner reports the changes.
        ClosedError: The log was closed meanwhile.
    """
    events: list[Event] = []
    for detect in (_detect_new_live, _detect_topic_changes, _detect_rebalances):
        try:
            events += detect(root, fence)
        except (ClosedError, FencedError):
            raise
        except EmbedlogError as error:
            # A full disk, or damage that is reported by the code that needs the row.
            _log.warning("Cannot report what happened to %s: %s", root.path, error)
    return events


def _detect_new_live(root: Root, fence: Fence) -> list[Event]:
    """Report that `live` is new, as after each reboot."""
    live, key = root.context.live, SEEN + b"\0live"
    if live.get(key) is not None:
        return []

    def step(txn: kv.Txn) -> bool:
        fence(txn)
        new = txn.get(key) is None
        txn.put(key, b"1")
        return new

    known = root.context.state.read(lambda txn: any(True for _ in kv.rows(txn, TOLD)))
    if not live.write(step) or not known:
        return []
    reason = "live was rebuilt after a reboot, or because it was damaged"
    return [Event("recovered", "live", {"reason": reason})]


def _detect_topic_changes(root: Root, fence: Fence) -> list[Event]:
    state, live, seen = root.context.state, root.context.live, SEEN + b"\0state"
    if live.get(seen) == state.version().to_bytes(8, "big"):
        return []
    changes, version = state.read(lambda txn: (_compare(txn), txn.id()))
    if changes.rows:
        live.read(fence)
        # Compared again in the transaction that notes it: of two processes only one reports it.
        changes, number = state.write(partial(_note, changes.rows.keys()))
        # What others changed in between is reported in the next round.
        version = number if number == version + 1 else version
    live.write(lambda txn: txn.put(seen, version.to_bytes(8, "big")))
    return changes.events


class TopicChanges(NamedTuple):
    """Events, and the rows of `state` that note them as reported."""

    events: list[Event]
    rows: dict[bytes, bytes | None]


def _note(wanted: Collection[bytes], txn: kv.Txn) -> tuple[TopicChanges, int]:
    changes = _compare(txn, wanted)
    for key, row in changes.rows.items():
        if row is None:
            txn.delete(key)
        else:
            txn.put(key, seal(row, key))
    # A transaction that writes nothing does not exist, and its number is that of another.
    return changes, txn.id() if changes.rows else -1


def _compare(txn: kv.Txn, wanted: Collection[bytes] | None = None) -> TopicChanges:
    """Return the differences to what was reported of all topics, or of those wanted."""
    reported = {bytes(key): bytes(row) for key, row in kv.rows(txn, TOLD)}
    if wanted is not None:
        reported = {key: row for key, row in reported.items() if key in wanted}
    changes = TopicChanges([], {})
    for info in map(catalog.topic_of_row, kv.rows(txn, catalog.TOPIC)):
        key = TOLD + info.id.to_bytes(8, "big")
        if info.name == ACTIVITY or (wanted is not None and key not in wanted):
            continue
        before, positions = reported.pop(key, None), _positions(txn, info)
        row = _pack(info, positions)
        if before is None or row != before[4:]:
            changes.rows[key] = row
            known = _NEW if before is None else _unpack(key, before)
            if known is not None:
                changes.events.extend(_topic_events(info, known))
                changes.events.extend(_segment_events(txn, info, known, positions))
    changes.rows.update(dict.fromkeys(reported))
    # First, since a topic that was created again has the name of one that was deleted.
    changes.events[:0] = [event for item in reported.items() for event in _deleted(*item)]
    return changes


def _deleted(key: bytes, row: bytes) -> Iterator[Event]:
    known = _unpack(key, row)
    if known is not None:
        yield Event("deleted", known["name"], {"topic": known["name"], "id": known["id"]})


def _pack(info: TopicInfo, positions: list[list[int]]) -> bytes:
    config = info.config.overrides()
    known = {"name": info.name, "id": info.id, "config": config, "places": positions}
    return json.dumps(known).encode()


def _unpack(key: bytes, row: bytes) -> dict[str, Any] | None:
    """Return what was reported of a topic; None if that is damaged: events begin with now then."""
    try:
        known: dict[str, Any] = json.loads(unseal(row, "what was reported of a topic", key))
    except CorruptionError as error:
        _log.warning("%s; what happened to the topic since then is not reported", error)
        return None
    return known


def _positions(txn: kv.Txn, info: TopicInfo) -> list[list[int]]:
    """Return the base offset of the active segment and the leader epoch of each partition."""
    positions = []
    for number in range(info.partitions):
        key = info.key(number)
        last, durable = catalog.last_segment(txn, key), catalog.partition(txn, key)
        if last is not None and durable is not None:
            positions.append([last.base_offset, durable.leader_epoch])
    return positions


def _topic_events(info: TopicInfo, known: Mapping[str, Any]) -> Iterator[Event]:
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


def _segment_events(
    txn: kv.Txn, info: TopicInfo, known: Mapping[str, Any], positions: list[list[int]]
) -> Iterator[Event]:
    """Yield the new segments and the new leader epochs, each of which begins at a truncation."""
    before = known["places"]
    for number, (base, epoch) in enumerate(positions):
        old_base, old_epoch = before[number] if number < len(before) else (0, 0)
        if epoch > old_epoch:
            for new_epoch, start in catalog.epochs(txn, info.key(number)):
                if new_epoch > old_epoch:
                    facts = {"leader_epoch": new_epoch, "offset": start}
                    yield from _partition_event(info.name, number, "recovered", facts)
        if base > old_base:
            # Segments begin at rolls, even if compaction has rewritten them since.
            count = catalog.count_after(txn, info.key(number), old_base)
            facts = {"offset": base, "segments": count}
            yield from _partition_event(info.name, number, "rolled", facts)


def _detect_rebalances(root: Root, fence: Fence) -> list[Event]:
    live = root.context.live
    if not live.read(_changed_groups):
        return []

    def step(txn: kv.Txn) -> list[Event]:
        fence(txn)
        events = []
        for key, version in _changed_groups(txn).items():
            row = txn.get(group.DOCUMENT + key)
            if row is None or version is None:
                txn.delete(SEEN + key)
                continue
            members, reported = membership.unpack(row), (txn.get(SEEN + key) or bytes(16))[8:]
            generation = members.generation.to_bytes(8, "big")
            if members.settled and generation != reported:
                events.append(_rebalanced(key.decode(), members))
                reported = generation
            txn.put(SEEN + key, version + reported)
        return events

    return live.write(step)


def _changed_groups(txn: kv.Txn) -> dict[bytes, bytes | None]:
    """Return the versions of the groups that changed; None for a group that was deleted."""
    versions = {bytes(key[1:]): bytes(row) for key, row in kv.rows(txn, group.VERSION)}
    # The other rows under this key begin with NUL, as no name of a group does.
    seen = {bytes(key[1:]): bytes(row[:8]) for key, row in kv.rows(txn, SEEN) if key[1:2] != b"\0"}
    deleted = dict.fromkeys(seen.keys() - versions.keys())
    return deleted | {key: row for key, row in versions.items() if seen.get(key) != row}


def _rebalanced(name: str, members: membership.Membership) -> Event:
    facts = {
        "group": name,
        "generation": members.generation,
        "assignor": members.assignor,
        "topics": sorted(members.topics),
        "members": len(members.members),
        "partitions": sum(map(len, members.target.values())),
    }
    return Event("rebalanced", name, facts)
