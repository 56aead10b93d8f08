"""Records in the topic ``__activity`` what happened to a log.

The maintenance owner writes it, so an append, a new topic or a new member costs nothing
extra.  The owner compares the catalog and the groups with what was reported before and
reports the differences, so no event is lost because the process that caused it was
killed.  It also reports its own work.

An event is noted as reported first and written second: a crash in between loses an event,
but no event is reported twice or without having happened.  Several rolls or rebalances
between two rounds are one event.  An idle log gets no events, and not even the topic.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
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
from embedlog.failures import Failures
from embedlog.groups.membership import GROUPS
from embedlog.keyspace import (
    GROUP_VERSIONS,
    REPORTED_GROUPS,
    REPORTED_LIVE,
    REPORTED_OWNER,
    REPORTED_REPLICAS,
    REPORTED_TOPICS,
    REPORTED_VERSION,
)
from embedlog.lazy import logging
from embedlog.partition import PartitionLog
from embedlog.retention import RetentionResult
from embedlog.root.root import Root

if TYPE_CHECKING:
    from embedlog.replication.metadata import DirectoryInfo

KINDS: Final = (
    *("created", "altered", "deleted", "rolled", "recovered", "retained", "compacted"),
    *("rebalanced", "expired", "owner", "failed", "mirrored", "skipped", "failover"),
    *("offline", "online", "removed", "elected", "isr", "reassigned"),
)
SETTINGS: Final[Mapping[str, object]] = {
    "segment.bytes": 4 << 20,
    "retention.ms": 7 * 86_400_000,
    "retention.bytes": 16 << 20,
}
"""Settings of the new topic; they can be altered like those of any other."""

_LOCK_SECONDS = 1.0
_NEW: Final[Mapping[str, Any]] = {"config": {}, "partitions": []}
"""What was reported of a topic that is new."""
_MAX_BATCH = 1_000
"""Events per batch, so that no batch is larger than ``max.message.bytes``."""
_MIN_FREE_BYTES = 1 << 20
"""If less space is free, nothing is reported: the jobs need that space."""
_log = logging.getLogger("embedlog.maintenance")

Fence = Callable[[kv.Txn], None]


class Event(NamedTuple):
    """Something that happened to a log."""

    kind: str
    """One of `KINDS`."""
    key: str
    """What it happened to: ``topic-partition``, a topic, a group, or a job."""
    facts: dict[str, Any]
    """The details, for JSON."""


# Reporting


def report(
    root: Root,
    events: Sequence[Event],
    pid: int | None = None,
    failures: Failures | None = None,
) -> None:
    """Append events to the topic, which is created if necessary.

    Errors are only logged: no job should fail because of them.

    Args:
        root: The open log.
        events: What to report; does nothing if there are none.
        pid: The process that does the maintenance; reported if it is a new one.
        failures: Notes whether this failed.

    Raises:
        ClosedError: The log was closed meanwhile.
    """
    if not events:
        return
    failures, work = failures or Failures(_log), f"Report of what happened to {root.path}"
    try:
        if root.context.files.free_bytes() < _MIN_FREE_BYTES:
            raise DiskFullError("The disk is full", path=root.path)
        live = root.context.live
        if pid is not None and REPORTED_OWNER.get(live) != pid:
            live.write(lambda txn: REPORTED_OWNER.put(txn, value=pid))
            events = [Event("owner", "maintenance", {"pid": pid}), *events]
        log, now_ms = _topic(root), root.clock()
        for first in range(0, len(events), _MAX_BATCH):
            part = events[first : first + _MAX_BATCH]
            records = [{"kind": event.kind, **event.facts} for event in part]
            values = [json.dumps(record, ensure_ascii=False).encode() for record in records]
            keys = [event.key.encode() for event in part]
            log.append([batch.encode_lists(values, keys, now_ms)], timeout=_LOCK_SECONDS)
    except ClosedError:
        raise
    except Exception as error:  # noqa: BLE001 - the job itself was done
        failures.note(work, error)
    else:
        failures.end(work)


def _topic(root: Root) -> PartitionLog:
    try:
        return root.partition(ACTIVITY, 0)
    except UnknownTopicOrPartitionError:
        with suppress(TopicAlreadyExistsError):
            root.create_topic(ACTIVITY, 1, TopicConfig.parse(SETTINGS))
        return root.partition(ACTIVITY, 0)


# What jobs did


def events_of(result: object) -> list[Event]:
    """Return the events for the result of a job."""
    items = result if isinstance(result, list) else []
    return [event for item in items for event in _events_of_item(item)]


def _events_of_item(item: object) -> Iterator[Event]:
    if isinstance(item, Event):
        yield item
        return
    if isinstance(item, RetentionResult):
        yield from _partition_event(item.topic, item.partition, "retained", item._asdict())
        return
    # Imported here: it loads numpy, unless the compaction job has done that already.
    from embedlog.compaction import CleanResult

    if not isinstance(item, CleanResult):
        return
    if item.passes and item.error is None:
        names = (
            *("first_dirty", "passes", "bytes_before", "bytes_after", "records_read"),
            *("records_kept", "tombstones", "segments_before", "segments_after"),
        )
        facts = {name: getattr(item, name) for name in names}
        yield from _partition_event(item.topic, item.partition, "compacted", facts)


def failures_of(topic: str, partition: int, job: str, error: EmbedlogError) -> list[Event]:
    """Return the event of a partition with which a job failed, unless it is that of the events."""
    facts = {"error": str(error), "job": job}
    return list(_partition_event(topic, partition, "failed", facts))


def _partition_event(
    topic: str, partition: int, kind: str, facts: Mapping[str, Any]
) -> Iterator[Event]:
    # Nothing is reported about the activity topic itself: that would never end.
    if topic != ACTIVITY:
        where = {"topic": topic, "partition": partition}
        yield Event(kind, f"{topic}-{partition}", where | dict(facts))


# What other processes did


def detect_changes(root: Root, fence: Fence, failures: Failures) -> list[Event]:
    """Return the changes of topics and groups since the last call, and note them.

    Args:
        root: The open log.
        fence: Raises if another process is the maintenance owner now.
        failures: Notes the comparisons that fail: a full disk, or damage that is reported by the
            code that needs the row.

    Raises:
        FencedError: Raised by the fence; the new owner reports the changes.
        ClosedError: The log was closed meanwhile.
    """
    events: list[Event] = []
    for what, detect in _DETECTORS.items():
        work = f"Comparison of the {what} of {root.path} with those that were reported"
        try:
            events += detect(root, fence)
            failures.end(work)
        except (ClosedError, FencedError):
            raise
        except EmbedlogError as error:
            # What the others found is noted, so it must be reported.
            failures.note(work, error)
    return events


def _detect_new_live(root: Root, fence: Fence) -> list[Event]:
    """Report that `live` is new, as after each reboot."""
    live = root.context.live
    if REPORTED_LIVE.exists(live):
        return []

    def step(txn: kv.Txn) -> bool:
        fence(txn)
        new = not REPORTED_LIVE.exists(txn)
        REPORTED_LIVE.put(txn, value=None)
        return new

    had_topics = root.context.state.read(REPORTED_TOPICS.any)
    if not live.write(step) or not had_topics:
        return []
    facts = {"reason": "live was rebuilt after a reboot, or because it was damaged"}
    return [Event("recovered", "live", facts)]


def _detect_topic_changes(root: Root, fence: Fence) -> list[Event]:
    state, live = root.context.state, root.context.live
    if REPORTED_VERSION.get(live) == state.version():
        return []
    changes, version = state.read(lambda txn: (_compare(txn), txn.id()))
    if changes.rows:
        live.read(fence)
        # Compared again in the transaction that notes it: of two processes only one reports it.
        wanted = changes.rows.keys()
        changes, number = state.write(lambda txn: _note(txn, wanted))
        # What others changed in between is reported in the next round.
        version = number if number == version + 1 else version
    live.write(lambda txn: REPORTED_VERSION.put(txn, value=version))
    return changes.events


class TopicChanges(NamedTuple):
    """Events, and the rows of `state` that note them as reported."""

    events: list[Event]
    rows: dict[bytes, dict[str, Any] | None]
    """By key."""


def _note(txn: kv.Txn, wanted: Collection[bytes]) -> tuple[TopicChanges, int]:
    changes = _compare(txn, wanted)
    for key, fields in changes.rows.items():
        if fields is None:
            txn.delete(key)
        else:
            txn.put(key, REPORTED_TOPICS.dump(key, fields))
    # The number of a transaction that writes nothing is used again.
    return changes, txn.id() if changes.rows else -1


def _compare(txn: kv.Txn, wanted: Collection[bytes] | None = None) -> TopicChanges:
    """Return the differences to what was reported of all topics, or of those wanted."""
    reported = {
        key: row
        for key, row in kv.rows(txn, REPORTED_TOPICS.prefix())
        if wanted is None or key in wanted
    }
    changes = TopicChanges([], {})
    for info in catalog.topics(txn):
        key = REPORTED_TOPICS.key(info.id)
        if info.name == ACTIVITY or (wanted is not None and key not in wanted):
            continue
        row, config, ends = reported.pop(key, None), info.config.overrides(), _ends(txn, info)
        fields = {"name": info.name, "id": info.id, "config": config, "partitions": ends}
        if row == REPORTED_TOPICS.dump(key, fields):
            continue
        changes.rows[key] = fields
        before = _NEW if row is None else _load(key, row)
        if before is not None:
            changes.events.extend(_topic_events(info, before))
            changes.events.extend(_segment_events(txn, info, before["partitions"], ends))
    changes.rows.update(dict.fromkeys(reported))
    deleted = filter(None, (_load(key, row) for key, row in reported.items()))
    # First, since a topic that was created again has the name of one that was deleted.
    changes.events[:0] = [
        Event("deleted", fields["name"], {"topic": fields["name"], "id": fields["id"]})
        for fields in deleted
    ]
    return changes


def _load(key: bytes, row: bytes) -> Mapping[str, Any] | None:
    """Return the last report of a topic; None if it is damaged, to skip the comparison."""
    try:
        fields: Mapping[str, Any] = REPORTED_TOPICS.load(key, row)
    except CorruptionError as error:
        _log.warning("%s; what happened to the topic since then is not reported", error)
        return None
    return fields


def _ends(txn: kv.Txn, info: TopicInfo) -> list[list[int]]:
    """Return the base offset of the active segment and the leader epoch of each partition."""
    ends = []
    for number in range(info.partitions):
        key = info.key(number)
        last, durable = catalog.last_segment(txn, key), catalog.PARTITIONS.get(txn, key)
        if last is not None and durable is not None:
            ends.append([last.base_offset, durable.leader_epoch])
    return ends


def _topic_events(info: TopicInfo, before: Mapping[str, Any]) -> Iterator[Event]:
    config = info.config.overrides()
    facts: dict[str, Any] = {"topic": info.name, "id": info.id}
    if before is _NEW:
        facts |= {"partitions": info.partitions, "config": config, "created_ms": info.created_ms}
        yield Event("created", info.name, facts)
        return
    old_config, count = before["config"], len(before["partitions"])
    changes = {
        name: [old_config.get(name), config.get(name)]
        for name in sorted(old_config.keys() | config.keys())
        if old_config.get(name) != config.get(name)
    }
    if changes or count != info.partitions:
        facts["config"] = changes
        facts |= {"partitions": [count, info.partitions]} if count != info.partitions else {}
        yield Event("altered", info.name, facts)


def _segment_events(
    txn: kv.Txn, info: TopicInfo, before: list[list[int]], after: list[list[int]]
) -> Iterator[Event]:
    """Yield the new segments and the new leader epochs, each of which begins at a truncation."""
    for number, (base, epoch) in enumerate(after):
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


def _detect_replica_changes(root: Root, fence: Fence) -> list[Event]:
    """Report directories that went offline or came back, leaders, ISRs and reassignments."""
    if not root.replicated:
        return []
    from embedlog.replication.describe import DIRECTORIES_KEY
    from embedlog.replication.root import ReplicatedRoot

    assert isinstance(root, ReplicatedRoot)
    image, live = root.controller.current().image, root.context.live
    noted = REPORTED_REPLICAS.get(live, DIRECTORIES_KEY)
    if noted is not None and noted["epoch"] >= image.epoch:
        return []
    topics: dict[int, tuple[str, list[dict[str, Any]]]] = {}
    for info, _, assignment in root.assignments():
        topics.setdefault(info.id, (info.name, []))[1].append(
            {
                "leader": assignment.leader,
                "epoch": assignment.leader_epoch,
                "isr": sorted(assignment.isr),
                "replicas": list(assignment.target_replicas),
                "moving": assignment.is_reassigning,
            }
        )

    def step(txn: kv.Txn) -> list[Event]:
        fence(txn)
        before = REPORTED_REPLICAS.get(txn, DIRECTORIES_KEY)
        changes = _directory_changes(image.directories, {} if before is None else before["online"])
        counts = Counter[str]({} if before is None else before["changes"])
        if before is None:
            changes.clear()  # all of them are new
        for topic_id, (name, partitions) in topics.items():
            reported = REPORTED_REPLICAS.get(txn, topic_id)
            if reported is not None and reported["partitions"] == partitions:
                continue
            REPORTED_REPLICAS.put(txn, topic_id, value={"partitions": partitions})
            # New partitions have no history.
            old = partitions if reported is None else reported["partitions"]
            for number, pair in enumerate(zip(old, partitions, strict=False)):
                if pair[0] != pair[1]:
                    changes += _partition_changes(name, number, *pair, counts)
        for (topic_id,) in list(REPORTED_REPLICAS.keys(txn)):
            if topic_id not in topics and topic_id != DIRECTORIES_KEY:
                REPORTED_REPLICAS.delete(txn, topic_id)
        online = {str(each): [info.path, info.online] for each, info in image.directories.items()}
        row = {"epoch": image.epoch, "online": online, "changes": counts}
        REPORTED_REPLICAS.put(txn, DIRECTORIES_KEY, value=row)
        return changes

    return live.write(step)


def _directory_changes(
    directories: Mapping[int, DirectoryInfo], before: Mapping[str, Any]
) -> list[Event]:
    changes = []
    for each, info in directories.items():
        _, was_online = before.get(str(each), (info.path, not info.online))
        if info.online != was_online:
            facts: dict[str, Any] = {"directory": each, "path": info.path}
            if not info.online:
                facts["reason"] = info.reason
            changes.append(Event("online" if info.online else "offline", info.path, facts))
    for name, (path, _) in before.items():
        if int(name) not in directories:
            changes.append(Event("removed", path, {"directory": int(name), "path": path}))
    return changes


def _partition_changes(
    topic: str,
    number: int,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    counts: Counter[str],
) -> list[Event]:
    """Return the changes of one partition, and count them."""
    where, key = {"topic": topic, "partition": number}, f"{topic}-{number}"
    changes = []
    if before["leader"] != after["leader"]:
        unclean = after["leader"] is not None and after["leader"] not in before["isr"]
        # A new copy that was made in the meantime was in sync when it was elected.
        unclean = unclean and after["leader"] in before["replicas"]
        counts["elections"] += 1
        counts["unclean"] += unclean
        facts = {
            "leader": after["leader"],
            "before": before["leader"],
            "leader_epoch": after["epoch"],
            "unclean": unclean,
        }
        changes.append(Event("elected", key, where | facts))
    if before["isr"] != after["isr"]:
        counts["shrinks"] += len(set(before["isr"]) - set(after["isr"]))
        counts["expands"] += len(set(after["isr"]) - set(before["isr"]))
        facts = {"isr": after["isr"], "before": before["isr"]}
        changes.append(Event("isr", key, where | facts))
    if not after["moving"] and (before["moving"] or before["replicas"] != after["replicas"]):
        facts = {"replicas": after["replicas"], "before": before["replicas"]}
        changes.append(Event("reassigned", key, where | facts))
    return [] if topic == ACTIVITY else changes  # as in `_partition_event`


def _detect_rebalances(root: Root, fence: Fence) -> list[Event]:
    live = root.context.live
    if not live.read(_changed_groups):
        return []

    def step(txn: kv.Txn) -> list[Event]:
        fence(txn)
        events = []
        for name, version in _changed_groups(txn).items():
            group = GROUPS.get(txn, name)
            if group is None or version is None:
                REPORTED_GROUPS.delete(txn, name)
                continue
            reported = REPORTED_GROUPS.get(txn, name)
            generation = 0 if reported is None else reported.generation
            if group.target_is_current and group.generation != generation:
                generation = group.generation
                facts = {
                    "group": name,
                    "generation": generation,
                    "assignor": group.assignor,
                    "topics": sorted(group.topics),
                    "members": len(group.members),
                    "partitions": sum(map(len, group.target.values())),
                }
                events.append(Event("rebalanced", name, facts))
            REPORTED_GROUPS.put(txn, name, value=(version, generation))
        return events

    return live.write(step)


_DETECTORS: Final[Mapping[str, Callable[[Root, Fence], list[Event]]]] = {
    "databases": _detect_new_live,
    "topics": _detect_topic_changes,
    "groups": _detect_rebalances,
    "replicas": _detect_replica_changes,
}


def _changed_groups(txn: kv.Txn) -> dict[str, int | None]:
    """Return the versions of the groups that changed; None for a group that was deleted."""
    versions = {name: version for (name,), version in GROUP_VERSIONS.scan(txn)}
    reported = {name: row.version for (name,), row in REPORTED_GROUPS.scan(txn)}
    deleted = dict.fromkeys(reported.keys() - versions.keys())
    return deleted | {
        name: version for name, version in versions.items() if reported.get(name) != version
    }
