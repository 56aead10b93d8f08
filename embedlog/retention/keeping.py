"""Who may not be overtaken: queries and snapshots with a lease, groups that must consume first.

A lease is a row in `live` for each partition: from which offset on, and until
when, by the clock that goes on while a machine sleeps.  It is looked at in the
transaction that moves the start of the partition, so it holds from the moment
it is granted.  It ends by itself if nobody renews it, and with a reboot.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Self

from embedlog import kv, offsets
from embedlog.catalog import PARTITION_KEY
from embedlog.errors import CorruptionError, OffsetOutOfRangeError
from embedlog.log import PartitionLog, tail
from embedlog.log.context import Context
from embedlog.log.root import Root
from embedlog.record import TopicPartition

LEASES = b"H"
"""First letter of the keys in `live`."""
LONGEST_NAME = 200
ANY = (1 << 63) - 1
"""A limit that limits nothing."""

_ROW = struct.Struct(">QQ")


class Keeper(NamedTuple):
    """Somebody for whose sake records stay, and from which offset on."""

    offset: int
    why: str


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
        self, root: Root, name: str, held: Mapping[TopicPartition, int], seconds: float
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


def hold(root: Root, name: str, held: Mapping[TopicPartition, int], seconds: float) -> Lease:
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


def leases(root: Root) -> list[LeaseInfo]:
    """Return the leases that did not end, by name."""
    now = root.context.files.uptime_ms()
    names = {info.id: info.name for info in root.topics().values()}
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


def keepers(log: PartitionLog, txn: kv.Txn, saved: Mapping[bytes, int]) -> Iterator[Keeper]:
    """Yield who may not be overtaken in a partition, in a transaction of `live`.

    Args:
        log: The partition.
        txn: The transaction.
        saved: What `saved_positions` returned.
    """
    now = log.context.files.uptime_ms()
    for row_key, offset, until in _rows(txn, log.key):
        if until > now:
            seconds = (until - now) // 1000
            yield Keeper(offset, f"lease {_name(row_key)!r} holds it for another {seconds} s")
    wanted = log.config.retention_min_consumed
    if not wanted:
        return
    positions = dict(saved) | {
        group: offsets.unpack(row).position.offset
        for group, row in offsets.in_partition(txn, log.key).items()
    }
    groups = positions if wanted == "all" else [name.encode() for name in wanted.split(",")]
    for group in groups:
        if group in positions:
            yield Keeper(positions[group], f"group {group.decode()!r} has not consumed it")
        else:
            yield Keeper(0, f"group {group.decode()!r} has consumed nothing here")


def saved_positions(log: PartitionLog) -> dict[bytes, int]:
    """Return what groups committed as of the last checkpoint: nobody used them since the boot."""
    if not log.config.retention_min_consumed:
        return {}
    rows = log.context.state.read(lambda txn: offsets.in_partition(txn, log.key))
    found = {}
    for group, row in rows.items():
        try:
            value = kv.unseal(row, "a committed offset", offsets.key(group, log.key))
        except CorruptionError:
            # Nobody knows what it consumed: nothing, then.
            found[group] = 0
        else:
            found[group] = offsets.unpack(value).position.offset
    return found


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


def _partition_key(root: Root, one: TopicPartition) -> bytes:
    return root.partition(*one).key


def _key(partition: bytes, name: str) -> bytes:
    return LEASES + partition + name.encode()


def _name(row_key: bytes) -> str:
    return row_key[1 + PARTITION_KEY.size :].decode()


def _rows(txn: kv.Txn, partition: bytes) -> Iterator[tuple[bytes, int, int]]:
    for row_key, row in kv.rows(txn, LEASES + partition):
        offset, until = _ROW.unpack(row)
        yield bytes(row_key), offset, until
