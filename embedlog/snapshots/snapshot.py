"""Snapshots: the ends of partitions as of one instant, and a hold that keeps their records.

In order, under the lock of all snapshots:

1. A row of `state` names the snapshot, not *complete* yet.
2. One transaction of `live` reads the tails of all partitions and puts a lease on each, which has
   no end (`leases.hold_snapshot`).  A publication moves all its tails in one such transaction, so
   a snapshot has all of it or nothing.
3. What is not on the disk yet is flushed, so that no power cut takes records of the snapshot.
4. The manifest is written to ``snapshots/NAME.json``, and the row is *complete*.

A deletion goes the other way: the row is no longer complete, file and leases are removed, and then
the row.  So there is a row whenever there is a lease, and a complete one has its leases, in each
boot: `live` begins with those of all complete rows.  What a killed process leaves is not complete;
the next one to take the lock removes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from embedlog import kv
from embedlog.catalog import INTERNAL, NAME, TopicInfo
from embedlog.errors import (
    EmbedlogError,
    InvalidConfigError,
    SnapshotAlreadyExistsError,
    UnknownSnapshotError,
)
from embedlog.hints import Hint
from embedlog.keyspace import SNAPSHOTS
from embedlog.partition import flush, leases
from embedlog.partition.state import Context
from embedlog.partition.tail import ends_of
from embedlog.record import TopicPartition
from embedlog.root.root import Root
from embedlog.snapshots import manifest
from embedlog.snapshots.export import StateExport, Tails
from embedlog.snapshots.manifest import Json, SnapshotTopic

_LOCK = "locks/snapshots"


class Snapshot(NamedTuple):
    """The offsets of some topics as of one instant; `Log.at` shows their records."""

    name: str
    created_ms: int
    """Milliseconds since 1970."""
    expires_ms: int | None
    """When it is deleted; None is never."""
    topics: Mapping[str, SnapshotTopic]

    @property
    def ends(self) -> dict[TopicPartition, int]:
        """The offset after the last one of each partition, as consumers take it for ``until``."""
        return {partition: end for partition, (_, end) in self.offsets().items()}

    def offsets(self) -> dict[TopicPartition, tuple[int, int]]:
        """Return the first offset of each partition, and the one after its last."""
        return {
            TopicPartition(name, number): part
            for name, topic in self.topics.items()
            for number, part in enumerate(topic.ranges)
        }

    def __repr__(self) -> str:
        records = sum(end - start for start, end in self.offsets().values())
        return f"<Snapshot {self.name}: topics {', '.join(self.topics)}; {records:,} offsets>"


def _from_fields(fields: Mapping[str, Any], name: str) -> Snapshot:
    topics = {
        topic: SnapshotTopic(
            of_topic["id"], of_topic["schema_version"], tuple(map(tuple, of_topic["ranges"]))
        )
        for topic, of_topic in fields["topics"].items()
    }
    return Snapshot(name, fields["created_ms"], fields["expires_ms"], topics)


def _put(context: Context, snapshot: Snapshot, *, complete: bool) -> None:
    topics = {name: topic._asdict() for name, topic in snapshot.topics.items()}
    fields = {**snapshot._asdict(), "complete": complete, "topics": topics}
    del fields["name"]  # it is the key
    context.state.write(lambda txn: SNAPSHOTS.put(txn, snapshot.name, value=fields))


def snapshots(context: Context) -> list[Snapshot]:
    """Return all snapshots, by name.

    Raises:
        CorruptionError: A row is damaged.
    """
    rows = context.state.read(lambda txn: list(SNAPSHOTS.scan(txn)))
    return [_from_fields(fields, name) for (name,), fields in rows if fields["complete"]]


def find(context: Context, name: str) -> Snapshot:
    """Return a snapshot.

    Raises:
        UnknownSnapshotError: There is none of this name.
    """
    fields = SNAPSHOTS.get(context.state, name)
    if fields is None or not fields["complete"]:
        raise UnknownSnapshotError(
            f"There is no snapshot {name!r}",
            todo=Hint("log.snapshots lists all.", "`embedlog snapshots list` lists all."),
        )
    return _from_fields(fields, name)


def check_name(name: object) -> str:
    """Return the name of a snapshot that a program takes.

    Raises:
        InvalidConfigError: It is no such name.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name) or name.startswith(INTERNAL):
        raise InvalidConfigError(
            f"{name!r} is not a valid name of a snapshot",
            todo="Use 1 to 200 letters, digits, '.', '_' or '-', not starting with '.', '-' or "
            "'__'.",
        )
    return name


@contextmanager
def _locked(context: Context) -> Iterator[None]:
    with context.files.opened(_LOCK, write=True, create=True) as fd:
        context.files.lock(fd, context.lock_timeout)
        yield


def take(
    root: Root,
    name: str,
    topics: Iterable[TopicInfo],
    keep_ms: int | None,
    *,
    replace: bool = False,
    export: StateExport | None = None,
) -> tuple[Snapshot, Json]:
    """Take a snapshot; return it, and its manifest.

    Args:
        root: The open log.
        name: Its name.
        topics: The topics.
        keep_ms: After how long it expires; None is never.
        replace: Replace one of the same name.
        export: Reads the rows of `state` as of the same instant.

    Raises:
        SnapshotAlreadyExistsError: There is one of this name.
        DurabilityError, StorageError, LockTimeoutError: Nothing was left.
    """
    context = root.context
    context.check_writable()
    infos = {info.name: info for info in topics}
    with _locked(context):
        fields = SNAPSHOTS.get(context.state, name)
        if fields is not None and fields["complete"] and not replace:
            raise SnapshotAlreadyExistsError(
                f"There is a snapshot {name!r} already",
                todo=Hint(
                    f"Delete it with log.snapshots.delete({name!r}), or take another name.",
                    f"Delete it with `embedlog snapshots delete {name}`, or take another name.",
                ),
            )
        _drop(context, name)
        expires_ms = None if keep_ms is None else context.bounded_ms() + keep_ms
        known = {info.name: SnapshotTopic(info.id, info.schema_version) for info in infos.values()}
        snapshot = Snapshot(name, context.clock(), expires_ms, known)
        _put(context, snapshot, complete=False)
        try:

            def hold(txn: kv.Txn, tails: Tails) -> None:
                starts = {
                    infos[topic].key(number): ends_of(found)[0]
                    for (topic, number), found in tails.items()
                }
                leases.hold_snapshot(txn, name, starts)
                if export is not None:
                    export.note(txn, tails)

            if export is None:
                tails: Tails = root.tails([*infos.values()], hold)
            else:
                tails = export.run(lambda: root.tails([*infos.values()], hold, recover=False))
            for topic in known:
                ranges = (
                    ends_of(tails[TopicPartition(topic, number)])
                    for number in range(infos[topic].partitions)
                )
                known[topic] = known[topic]._replace(ranges=tuple(ranges))
            _flush(root, tails)
            document = manifest.describe(root, snapshot, tails)
            manifest.write(context.files, name, document)
            _put(context, snapshot, complete=True)
        except BaseException:
            with suppress(EmbedlogError):
                _drop(context, name)
            raise
        return snapshot, document


def _flush(root: Root, tails: Tails) -> None:
    unflushed = [
        root.partition(*partition)
        for partition, found in tails.items()
        if found is not None and found.durable_offset < found.high_watermark
    ]
    if unflushed:
        flush.flush(unflushed)


def delete(context: Context, name: str) -> None:
    """Delete a snapshot: its records are held no longer.

    Raises:
        UnknownSnapshotError: There is none of this name.
    """
    context.check_writable()
    with _locked(context):
        find(context, name)
        _drop(context, name)


def _drop(context: Context, name: str) -> None:
    """Remove what there is of a snapshot, under the lock."""
    fields = SNAPSHOTS.get(context.state, name)
    if fields is None:
        return
    if fields["complete"]:
        _put(context, _from_fields(fields, name), complete=False)
    manifest.remove(context.files, name)
    leases.release(context, f"{leases.SNAPSHOT}{name}")
    context.state.write(lambda txn: SNAPSHOTS.delete(txn, name))


def expire(context: Context) -> None:
    """Delete the snapshots that have expired, and what killed processes left of others."""

    def due(txn: kv.Txn) -> list[str]:
        return [
            name
            for (name,), fields in SNAPSHOTS.scan_valid(txn)
            if not fields["complete"]
            or (fields["expires_ms"] is not None and fields["expires_ms"] <= now_ms)
        ]

    now_ms = context.bounded_ms()
    if not context.state.read(due):
        return
    with context.files.opened(_LOCK, write=True, create=True) as fd:
        # Otherwise one is being taken, and the next round does it.
        if context.files.try_lock(fd):
            for name in context.state.read(due):
                _drop(context, name)
