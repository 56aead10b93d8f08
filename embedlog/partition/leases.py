"""Leases: records from an offset on are neither deleted nor rewritten, for a time.

A lease has a row in `live` for each of its partitions: an offset, and the time when it
ends, by the clock that continues while the machine sleeps.  Retention reads it in the
transaction that moves the start of the partition, compaction before it swaps segments, and
no file is unlinked while a lease covers it, so a lease is effective immediately.  It ends if it
is not renewed, and with a reboot.

The hold of a snapshot is a lease that ends only when the snapshot is deleted.  Snapshots are rows
of `state`, and whenever `live` is created again, it begins with their leases.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Self

from embedlog import kv
from embedlog.display import plural
from embedlog.errors import OffsetOutOfRangeError
from embedlog.keyspace import LEASES, PARTITION_KEY, SNAPSHOTS
from embedlog.partition import tail
from embedlog.partition.lookup import size_bytes
from embedlog.partition.state import Context, Partitions
from embedlog.record import TopicPartition

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

LONGEST_NAME = 200
"""In bytes."""
SNAPSHOT = "snapshot:"
"""What the name of a snapshot's lease begins with."""
UNTIL_DELETED = (1 << 63) - 1
"""The end of a snapshot's lease."""


class LeaseHold(NamedTuple):
    """What a lease keeps of one partition."""

    name: str
    offset: int
    """The lease keeps the records from this offset on."""
    ms_left: int

    def __str__(self) -> str:
        if self.name.startswith(SNAPSHOT):
            return f"snapshot {self.name.removeprefix(SNAPSHOT)!r} holds them"
        return f"lease {self.name!r} holds them for another {self.ms_left // 1000} s"


class LeaseInfo(NamedTuple):
    """A lease as it is now."""

    name: str
    offsets: dict[TopicPartition, int]
    """The records from these offsets on are not deleted."""
    ms_left: int


class Lease:
    """Keeps records from being deleted until it is released, or not renewed in time.

    Made by `hold`; a context manager, which releases it.
    """

    def __init__(
        self, root: Partitions, name: str, offsets: Mapping[TopicPartition, int], seconds: float
    ) -> None:
        self._root, self.name, self.offsets, self.seconds = root, name, dict(offsets), seconds
        self.renew()

    def renew(self, seconds: float | None = None) -> None:
        """Extend it to ``seconds`` from now; by default, to as many as the last time.

        Raises:
            OffsetOutOfRangeError: The lease had ended, and records that it kept were deleted.
        """
        if seconds is not None:
            self.seconds = seconds
        context = self._root.context
        context.check_writable()
        until_ms = context.files.uptime_ms() + int(self.seconds * 1000)
        keys = {self._root.partition(*partition).key: partition for partition in self.offsets}

        def step(txn: kv.Txn) -> None:
            for key, partition in keys.items():
                offset = self.offsets[partition]
                _check_offset(txn, key, partition, offset)
                LEASES.put(txn, key, self.name, value=(offset, until_ms))

        context.live.write(step)

    def release(self) -> None:
        """End the lease; does nothing if it has ended."""
        release(self._root.context, self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Lease {self.name}: {plural(len(self.offsets), 'partition')}, {self.seconds:g} s>"


def hold(
    root: Partitions, name: str, offsets: Mapping[TopicPartition, int], seconds: float
) -> Lease:
    """Keep records from these offsets on for ``seconds``; replaces a lease of the same name.

    Raises:
        ValueError: The name is empty, longer than 200 bytes, or a snapshot's, or the time is not
            positive.
        OffsetOutOfRangeError: Some of the records are deleted already; nothing is held.
        UnknownTopicOrPartitionError: There is no such partition.
    """
    if not 1 <= len(name.encode()) <= LONGEST_NAME or not seconds > 0:
        raise ValueError(
            f"A lease needs a name of 1 to {LONGEST_NAME} bytes and a positive time, "
            f"got {name!r} and {seconds!r}"
        )
    if name.startswith(SNAPSHOT):
        raise ValueError(f"Only snapshots have leases whose names begin with {SNAPSHOT!r}")
    keep = [root.partition(*partition).key for partition in offsets]
    release(root.context, name, keep=keep)
    return Lease(root, name, offsets, seconds)


def extend(
    root: Partitions, name: str, offsets: Mapping[TopicPartition, int], until_ms: int
) -> None:
    """Have a lease keep records from these offsets on, too, at least until a time since boot.

    Several readers can share such a lease.  It writes nothing if the lease covers them already;
    otherwise it also deletes the rows of leases on these partitions that have ended.

    Raises:
        OffsetOutOfRangeError: Some of the records are deleted already; nothing has changed.
        UnknownTopicOrPartitionError: There is no such partition.
    """
    context = root.context
    context.check_writable()
    keys = {root.partition(*partition).key: partition for partition in offsets}

    def uncovered(txn: kv.Txn) -> list[bytes]:
        missing = []
        for key, partition in keys.items():
            _check_offset(txn, key, partition, offsets[partition])
            row = LEASES.get(txn, key, name)
            if row is None or row.until_ms < until_ms or row.offset > offsets[partition]:
                missing.append(key)
        return missing

    def step(txn: kv.Txn) -> None:
        now_ms = context.files.uptime_ms()
        for key in uncovered(txn):
            offset, until = offsets[keys[key]], until_ms
            for (_, lease), row in list(LEASES.scan(txn, key)):
                if row.until_ms <= now_ms:
                    LEASES.delete(txn, key, lease)
                elif lease == name:
                    offset, until = min(offset, row.offset), max(until, row.until_ms)
            LEASES.put(txn, key, name, value=(offset, until))

    if context.live.read(uncovered):
        context.live.write(step)


def _check_offset(txn: kv.Txn, key: bytes, partition: TopicPartition, offset: int) -> None:
    start, end = tail.ends(txn, key) or (0, None)
    if offset < start or offset < 0 or (end is not None and offset > end):
        raise OffsetOutOfRangeError(
            f"The log holds offsets [{start}, {end})",
            **partition._asdict(),
            offset=offset,
            todo="Nothing is held; pass an offset that the log has.",
        )


def release(context: Context, name: str, keep: Collection[bytes] = ()) -> None:
    """End the lease of that name, except in the partitions ``keep``, which are keys."""

    def step(txn: kv.Txn) -> None:
        for partition, lease in list(LEASES.keys(txn)):
            if lease == name and partition not in keep:
                LEASES.delete(txn, partition, lease)

    context.live.write(step)


def release_all(context: Context, prefix: str) -> None:
    """End the leases whose names begin with a text."""

    def held(txn: kv.Txn) -> list[tuple[bytes, str]]:
        return [(key, name) for key, name in LEASES.keys(txn) if name.startswith(prefix)]

    def step(txn: kv.Txn) -> None:
        for row in held(txn):
            LEASES.delete(txn, *row)

    if context.live.read(held):
        context.live.write(step)


def leases(root: Partitions) -> list[LeaseInfo]:
    """Return the leases that have not ended, by name; without those of snapshots."""
    now_ms = root.context.files.uptime_ms()
    topics = {topic.id: topic.name for topic in root.context.catalog.topics().values()}
    infos: dict[str, LeaseInfo] = {}
    for (key, name), row in root.context.live.read(lambda txn: list(LEASES.scan(txn))):
        topic_id, partition = PARTITION_KEY.unpack(key)
        if now_ms < row.until_ms < UNTIL_DELETED and topic_id in topics:
            info = infos.setdefault(name, LeaseInfo(name, {}, row.until_ms - now_ms))
            info.offsets[TopicPartition(topics[topic_id], partition)] = row.offset
    return [infos[name] for name in sorted(infos)]


def hold_snapshot(txn: kv.Txn, name: str, offsets: Mapping[bytes, int]) -> None:
    """Keep the records of a snapshot, in a transaction of `live`.

    Args:
        txn: The transaction.
        name: The snapshot.
        offsets: The first offset to keep in each partition, by its key.
    """
    for key, offset in offsets.items():
        LEASES.put(txn, key, f"{SNAPSHOT}{name}", value=(offset, UNTIL_DELETED))


def rows_of_snapshots(txn: kv.Txn) -> dict[bytes, bytes]:
    """Return the rows with which `live` begins, from a transaction of `state`."""
    rows = {}
    for (name,), snapshot in SNAPSHOTS.scan_valid(txn):
        for topic in snapshot["topics"].values() if snapshot["complete"] else ():
            for number, (start, _) in enumerate(topic["ranges"]):
                key = LEASES.key(PARTITION_KEY.pack(topic["id"], number), f"{SNAPSHOT}{name}")
                rows[key] = LEASES.dump(key, (start, UNTIL_DELETED))
    return rows


def forget_ended(context: Context) -> None:
    """Delete the rows of leases that have ended."""
    now_ms = context.files.uptime_ms()

    def ended(txn: kv.Txn) -> list[tuple[bytes, str]]:
        return [(*key,) for key, row in LEASES.scan(txn) if row.until_ms <= now_ms]

    def step(txn: kv.Txn) -> None:
        # Again: some may have been renewed meanwhile.
        for key in ended(txn):
            LEASES.delete(txn, *key)

    if context.live.read(ended):
        context.live.write(step)


def held_in(txn: kv.Txn, partition: bytes, uptime_ms: int) -> Iterator[LeaseHold]:
    """Yield the leases on a partition, in a transaction of `live`."""
    for (_, name), row in LEASES.scan(txn, partition):
        if row.until_ms > uptime_ms:
            yield LeaseHold(name, row.offset, row.until_ms - uptime_ms)


def held_from(log: PartitionLog) -> LeaseHold | None:
    """Return the lease with the lowest offset in a partition, if any.

    Leases do not count while the partition is larger than ``retention.bytes.hard``.
    """
    now_ms = log.context.files.uptime_ms()
    holds = log.context.live.read(lambda txn: list(held_in(txn, log.key, now_ms)))
    hard = log.config.retention_bytes_hard
    if not holds or 0 <= hard < size_bytes(log):
        return None
    return min(holds, key=lambda hold: hold.offset)
