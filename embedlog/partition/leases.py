"""Leases: what is at an offset and after it stays as it is, for a while (C1, D22).

A lease is a row in `live` for each partition: from which offset on, and until
when, by the clock that goes on while a machine sleeps.  Retention looks at it in
the transaction that moves the start of the partition, compaction before it swaps
segments, and no file is unlinked while one covers it: so it holds from the moment
it is granted.  It ends by itself if nobody renews it, and with a reboot.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Self

from embedlog import kv
from embedlog.catalog import PARTITION_KEY
from embedlog.errors import OffsetOutOfRangeError
from embedlog.partition import tail
from embedlog.partition.context import Context
from embedlog.partition.extents import size_bytes
from embedlog.partition.partitions import Partitions
from embedlog.partition.state import PartitionState
from embedlog.record import TopicPartition

LEASES = b"H"
"""First letter of the keys in `live`."""
LONGEST_NAME = 200

_ROW = struct.Struct(">QQ")


class LeaseHold(NamedTuple):
    """What one lease keeps of one partition."""

    name: str
    offset: int
    """From here on."""
    ms_left: int


class LeaseInfo(NamedTuple):
    """A lease as it is now."""

    name: str
    offsets: dict[TopicPartition, int]
    """Nothing from here on is deleted."""
    ms_left: int


class Lease:
    """Keeps records from being deleted until it is released, or not renewed in time.

    Made by `hold`; a context manager, which releases it.
    """

    def __init__(
        self, root: Partitions, name: str, held: Mapping[TopicPartition, int], seconds: float
    ) -> None:
        self._root, self.name, self.offsets, self.seconds = root, name, dict(held), seconds
        self.renew()

    def renew(self, seconds: float | None = None) -> None:
        """Let it last ``seconds`` from now, or as long as it was made for.

        Raises:
            OffsetOutOfRangeError: It had ended, and what it kept is deleted.
        """
        if seconds is not None:
            self.seconds = seconds
        context = self._root.context
        context.check_writable()
        until = context.files.uptime_ms() + int(self.seconds * 1000)
        keys = {_partition_key(self._root, one): one for one in self.offsets}

        def step(txn: kv.Txn) -> None:
            for key, one in keys.items():
                _check(txn, key, one, self.offsets[one])
                txn.put(_key(key, self.name), _ROW.pack(self.offsets[one], until))

        context.live.write(step)

    def release(self) -> None:
        """End it now; a second time does nothing."""
        release(self._root.context, self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Lease {self.name}: {len(self.offsets)} partitions, {self.seconds:g} s>"


def hold(root: Partitions, name: str, held: Mapping[TopicPartition, int], seconds: float) -> Lease:
    """Keep what is at these offsets and after, for so many seconds; one of that name is replaced.

    Raises:
        ValueError: The name is empty or longer than 200 bytes, or the time is not positive.
        OffsetOutOfRangeError: Some of it is deleted already; nothing is held.
        UnknownTopicOrPartitionError: There is no such partition.
    """
    if not 1 <= len(name.encode()) <= LONGEST_NAME or not seconds > 0:
        raise ValueError(f"a lease has a name of 1 to {LONGEST_NAME} bytes, and a time above 0")
    release(root.context, name, but={_partition_key(root, one) for one in held})
    return Lease(root, name, held, seconds)


def release(context: Context, name: str, but: Iterable[bytes] = ()) -> None:
    """End the lease of that name, save for some partitions."""
    kept = {_key(each, name) for each in but}

    def step(txn: kv.Txn) -> None:
        for row_key, _, _ in list(_rows(txn, b"")):
            if _name(row_key) == name and row_key not in kept:
                txn.delete(row_key)

    context.live.write(step)


def leases(root: Partitions) -> list[LeaseInfo]:
    """Return the leases that did not end, by name."""
    now = root.context.files.uptime_ms()
    names = {info.id: info.name for info in root.context.catalog.topics().values()}
    found: dict[str, LeaseInfo] = {}
    for row_key, offset, until in root.context.live.read(lambda txn: list(_rows(txn, b""))):
        number, partition = PARTITION_KEY.unpack_from(row_key, 1)
        if until > now and number in names:
            one = found.setdefault(_name(row_key), LeaseInfo(_name(row_key), {}, until - now))
            one.offsets[TopicPartition(names[number], partition)] = offset
    return [found[name] for name in sorted(found)]


def forget_ended(context: Context) -> None:
    """Drop the rows of leases that ended."""
    now = context.files.uptime_ms()
    ended = context.live.read(
        lambda txn: [row_key for row_key, _, until in _rows(txn, b"") if until <= now]
    )

    def step(txn: kv.Txn) -> None:
        for row_key in ended:
            row = txn.get(row_key)
            if row is not None and _ROW.unpack(row)[1] <= now:  # not renewed meanwhile
                txn.delete(row_key)

    if ended:
        context.live.write(step)


def held_in(txn: kv.Txn, partition: bytes, uptime_ms: int) -> Iterator[LeaseHold]:
    """Yield the leases on a partition, in a transaction of `live`."""
    for row_key, offset, until in _rows(txn, partition):
        if until > uptime_ms:
            yield LeaseHold(_name(row_key), offset, until - uptime_ms)


def held_from(log: PartitionState) -> LeaseHold | None:
    """Return the lease that reaches back furthest in a partition; None if nobody holds any.

    Nor does anybody beyond ``retention.bytes.hard``.
    """
    now = log.context.files.uptime_ms()
    found = log.context.live.read(lambda txn: list(held_in(txn, log.key, now)))
    hard = log.config.retention_bytes_hard
    if not found or 0 <= hard < size_bytes(log):
        return None
    return min(found, key=lambda one: one.offset)


def _check(txn: kv.Txn, key: bytes, one: TopicPartition, offset: int) -> None:
    known = tail.ends(txn, key)
    start, end = (0, None) if known is None else known
    if offset < start or offset < 0 or (end is not None and offset > end):
        raise OffsetOutOfRangeError(
            f"the log holds offsets {start} to {end}",
            topic=one.topic,
            partition=one.partition,
            offset=offset,
            todo="nothing is held",
        )


def _partition_key(root: Partitions, one: TopicPartition) -> bytes:
    return root.partition(*one).key


def _key(partition: bytes, name: str) -> bytes:
    return LEASES + partition + name.encode()


def _name(row_key: bytes) -> str:
    return row_key[1 + PARTITION_KEY.size :].decode()


def _rows(txn: kv.Txn, partition: bytes) -> Iterator[tuple[bytes, int, int]]:
    for row_key, row in kv.rows(txn, LEASES + partition):
        offset, until = _ROW.unpack(row)
        yield bytes(row_key), offset, until
