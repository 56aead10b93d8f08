"""Idempotence: the last batches of each producer of a partition (KIP-98).

Every producer has a new id, so the rows would grow without limit.  A producer that was
idle for ``producer.id.expiration.ms`` is forgotten by `expire_producers`, and when
the partition is rolled, flushed or recovered, which reads all of them anyway.

A named producer that restarts continues where its sequence numbers ended, so that a
batch it sends again can be told from a new one.  To read that end safely it must first
fence older producers of that name; `fence_producer` does both in one step.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from embedlog import keyspace, kv
from embedlog.errors import InvalidProducerEpochError, OutOfOrderSequenceError

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

REMEMBERED = 5
"""Batches per producer: as many as it may have in flight, as in Kafka."""
LAST_SEQUENCE = (1 << 31) - 1

_HEAD = keyspace.PRODUCERS.value_layout.head
_BATCH = struct.Struct(">iiqq")
_KEPT = _BATCH.size * (REMEMBERED - 1)
_FULL = struct.Struct(f">hq{_KEPT}siiqq")
_SNAPSHOT_HEAD = struct.Struct(">qI")


class SentBatch(NamedTuple):
    """A batch of a producer: its sequence numbers and its offsets."""

    first_sequence: int
    last_sequence: int
    base_offset: int
    next_offset: int


class ProducerState(NamedTuple):
    """A producer in one partition: its row, and what every append reads from it."""

    epoch: int
    due: int | None
    """The sequence number of its next record; None if no batch is remembered."""
    row: bytes
    """As stored: epoch, the time of the last batch, and the last five batches, oldest first."""

    @property
    def batches(self) -> tuple[SentBatch, ...]:
        """Its last five batches, oldest first."""
        return tuple(map(SentBatch._make, _BATCH.iter_unpack(self.row[_HEAD.size :])))


def remembered(epoch: int, last_ms: int, batches: Iterable[SentBatch] = ()) -> ProducerState:
    """Return the state of a producer that sent ``batches``, oldest first."""
    return unpack(_HEAD.pack(epoch, last_ms) + b"".join(_BATCH.pack(*sent) for sent in batches))


def unpack(row: bytes) -> ProducerState:
    """Return a stored row."""
    due = None
    if len(row) > _HEAD.size:
        due = after(_BATCH.unpack_from(row, len(row) - _BATCH.size)[1], 1)
    return ProducerState(_HEAD.unpack_from(row)[0], due, row)


def last_ms(row: bytes) -> int:
    """Return when the producer of a row last appended."""
    stored: int = _HEAD.unpack_from(row)[1]
    return stored


def after(sequence: int, count: int) -> int:
    """Return the sequence ``count`` records later; it wraps to 0."""
    return (sequence + count) & LAST_SEQUENCE


def check(
    producer: ProducerState | None, epoch: int, sequence: int, count: int
) -> SentBatch | None:
    """Return the batch that this one repeats, or None if it is the next in order.

    Raises:
        InvalidProducerEpochError: A newer producer of that name took over.
        OutOfOrderSequenceError: A gap, a partial repeat, or older than what is remembered.
    """
    # The next number in order repeats none of the five batches before it.
    if producer is None or (producer.epoch == epoch and producer.due in (sequence, None)):
        return None
    if epoch < producer.epoch:
        raise InvalidProducerEpochError(
            f"Epoch {epoch} was fenced by epoch {producer.epoch}",
            todo="A newer producer has this name; close this one.",
        )
    if epoch > producer.epoch:
        if sequence != 0:
            raise OutOfOrderSequenceError(f"Epoch {epoch} begins at sequence {sequence}, not 0")
        return None
    last = after(sequence, count - 1)
    for sent in producer.batches:
        if (sent.first_sequence, sent.last_sequence) == (sequence, last):
            return sent
    raise OutOfOrderSequenceError(
        f"Sequence {sequence} where {producer.due} is next",
        todo="Records before it failed or were sent too long ago; create a new producer.",
    )


def note(
    producer: ProducerState | None, epoch: int, sent: tuple[int, int, int, int], now_ms: int
) -> ProducerState:
    """Return the state of a producer after a batch, passed as the fields of `SentBatch`.

    A new epoch that continues the sequence keeps the batches of the one before; one that
    starts over at 0, as in Kafka, must not mistake its batches for those.
    """
    first, last, _, _ = sent
    before, due, row = (epoch, None, b"") if producer is None else producer
    if before != epoch and due != first:
        row = b""
    # One call for a producer with five batches, which is nearly every append, under the lock.
    if len(row) == _FULL.size:
        row = _FULL.pack(epoch, now_ms, row[-_KEPT:], *sent)
    else:
        row = _HEAD.pack(epoch, now_ms) + row[_HEAD.size :][-_KEPT:] + _BATCH.pack(*sent)
    return tuple.__new__(ProducerState, (epoch, last + 1 & LAST_SEQUENCE, row))


def below(producer: ProducerState, offset: int) -> ProducerState:
    """Return the state of a producer after the log was truncated at ``offset``."""
    batches = [sent for sent in producer.batches if sent.next_offset <= offset]
    return remembered(producer.epoch, last_ms(producer.row), batches)


def pack_all(producers: dict[int, ProducerState]) -> bytes:
    """Return the producers of a partition as one value."""
    return b"".join(
        _SNAPSHOT_HEAD.pack(producer_id, len(producer.row)) + producer.row
        for producer_id, producer in producers.items()
    )


def unpack_all(data: bytes) -> dict[int, ProducerState]:
    """Return the producers that `pack_all` packed."""
    producers, position = {}, 0
    while position < len(data):
        producer_id, length = _SNAPSHOT_HEAD.unpack_from(data, position)
        position += _SNAPSHOT_HEAD.size
        producers[producer_id] = unpack(data[position : position + length])
        position += length
    return producers


PRODUCERS = keyspace.PRODUCERS.coded(lambda state: state.row, unpack)
"""In `live`."""
SNAPSHOTS = keyspace.PRODUCER_SNAPSHOTS.coded(pack_all, unpack_all)
"""In `state`, by partition."""
key = PRODUCERS.key


# Steps of a transaction on `live`


def active_since(txn: kv.Txn, partition_key: bytes, oldest: int) -> dict[int, ProducerState]:
    """Return the producers of a partition that appended or were fenced since a time."""
    return {
        int.from_bytes(row_key[-8:], "big"): unpack(row)
        for row_key, row in kv.rows(txn, PRODUCERS.prefix(partition_key))
        if last_ms(row) >= oldest
    }


def idle_keys(txn: kv.Txn, partition_key: bytes, oldest: int) -> list[bytes]:
    """Return the keys of the producers that neither appended nor were fenced since a time."""
    rows = kv.rows(txn, PRODUCERS.prefix(partition_key))
    return [row_key for row_key, row in rows if last_ms(row) < oldest]


def expire(txn: kv.Txn, partition_key: bytes, oldest: int) -> int:
    """Delete the rows of idle producers; return how many."""
    keys = idle_keys(txn, partition_key, oldest)
    for row_key in keys:
        txn.delete(row_key)
    return len(keys)


# Operations on one producer of a partition: read it, fence its older epochs, forget it


def read_producer(log: PartitionLog, producer_id: int) -> ProducerState | None:
    """Return the partition's state of a producer."""
    log.tail()  # recovers the partition after a reboot
    return PRODUCERS.get(log.context.live, log.key, producer_id)


def fence_producer(
    log: PartitionLog, producer_id: int, epoch: int, timeout: float | None = None
) -> ProducerState:
    """Fence all older epochs of a producer, and return what it has sent so far.

    Waits ``timeout`` seconds for the partition, or the ``lock_timeout`` of the log.

    Raises:
        InvalidProducerEpochError: A producer with a newer epoch was fenced already.
        LockTimeoutError, StorageError: Nothing was changed.
    """
    live = log.context.live
    with log.owned(timeout):
        producer = PRODUCERS.get(live, log.key, producer_id)
        if producer is not None and producer.epoch > epoch:
            raise InvalidProducerEpochError(
                f"Epoch {epoch} was fenced by epoch {producer.epoch}",
                **log.where,
                todo="A newer producer has this name; close this one.",
            )
        if producer is None or producer.epoch < epoch:
            batches = () if producer is None else producer.batches
            fenced = remembered(epoch, log.context.clock(), batches)
            live.write(lambda txn: PRODUCERS.put(txn, log.key, producer_id, value=fenced))
            return fenced
        return producer


def expire_producers(
    log: PartitionLog,
    now_ms: int,
    *,
    fence: Callable[[kv.Txn], None] | None = None,
    timeout: float | None = None,
) -> int:
    """Forget the producers that were idle for ``producer.id.expiration.ms``; return how many.

    The next batch of one of them is accepted with any sequence number, like the first
    batch of a new producer.

    Args:
        log: The partition.
        now_ms: The time, in milliseconds since 1970.
        fence: Called in the transaction that deletes; raises if the caller lost its right to.
        timeout: Seconds to wait for the partition; ``lock_timeout`` by default.

    Raises:
        LockTimeoutError: Another process holds the partition.
        FencedError: Raised by the fence.
    """
    log.context.check_writable()
    log.refresh()
    live, oldest = log.context.live, now_ms - log.config.producer_id_expiration_ms + 1
    # Without the lock: usually there are none, and a commit makes every
    # process read the tail again.
    if not live.read(lambda txn: idle_keys(txn, log.key, oldest)):
        return 0

    def step(txn: kv.Txn) -> int:
        if fence is not None:
            fence(txn)
        return expire(txn, log.key, oldest)

    # With the lock: an append in progress has read its producers already, and writes
    # their rows again.
    with log.owned(timeout):
        return live.write(step)
