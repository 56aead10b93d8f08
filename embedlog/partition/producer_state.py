"""Idempotence: the last batches of each producer of a partition (KIP-98, G15-G19)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from embedlog import keyspace
from embedlog.errors import InvalidProducerEpochError, OutOfOrderSequenceError

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
    """A producer as one partition knows it: its row, and what every append reads from it."""

    epoch: int
    due: int | None
    """The sequence number of its next record; None if no batch is remembered."""
    row: bytes
    """As stored: epoch, the time of the last batch, and the last five batches, oldest first."""

    @property
    def batches(self) -> tuple[SentBatch, ...]:
        """Its last five batches, oldest first."""
        return tuple(map(SentBatch._make, _BATCH.iter_unpack(self.row[_HEAD.size :])))

    @property
    def last_ms(self) -> int:
        """When it sent its last batch, by the log's clock."""
        return last_ms(self.row)


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
    """Return the sequence ``count`` records later; it wraps to 0 (G15)."""
    return (sequence + count) & LAST_SEQUENCE


def check(known: ProducerState | None, epoch: int, sequence: int, count: int) -> SentBatch | None:
    """Return the batch that this one repeats, or None if it is the next in order (G16, G17).

    Raises:
        InvalidProducerEpochError: A newer producer of that name took over.
        OutOfOrderSequenceError: A gap, a partial repeat, or older than what is remembered.
    """
    # The next number in order repeats none of the five batches before it.
    if known is None or (known.epoch == epoch and known.due in (sequence, None)):
        return None
    if epoch < known.epoch:
        raise InvalidProducerEpochError(
            f"Epoch {epoch} was fenced by epoch {known.epoch}",
            todo="A newer producer has this name; close this one.",
        )
    if epoch > known.epoch:
        if sequence != 0:
            raise OutOfOrderSequenceError(f"Epoch {epoch} begins at sequence {sequence}, not 0")
        return None
    last = after(sequence, count - 1)
    for sent in known.batches:
        if (sent.first_sequence, sent.last_sequence) == (sequence, last):
            return sent
    raise OutOfOrderSequenceError(
        f"Sequence {sequence} where {known.due} is next",
        todo="Records before it failed or were sent too long ago; create a new producer.",
    )


def note(
    known: ProducerState | None, epoch: int, sent: tuple[int, int, int, int], now_ms: int
) -> ProducerState:
    """Return the state of a producer after a batch, passed as the fields of `SentBatch`.

    A new epoch that continues the sequence keeps the batches of the one before; one that
    starts over at 0, as in Kafka, must not mistake its batches for those.
    """
    first, last, _, _ = sent
    before, due, row = (epoch, None, b"") if known is None else known
    if before != epoch and due != first:
        row = b""
    # In one go for a producer with five batches: that is nearly every append, under the lock.
    if len(row) == _FULL.size:
        row = _FULL.pack(epoch, now_ms, row[-_KEPT:], *sent)
    else:
        row = _HEAD.pack(epoch, now_ms) + row[_HEAD.size :][-_KEPT:] + _BATCH.pack(*sent)
    return tuple.__new__(ProducerState, (epoch, last + 1 & LAST_SEQUENCE, row))


def below(known: ProducerState, offset: int) -> ProducerState:
    """Return the state of a producer after the log was cut at ``offset``."""
    kept = [sent for sent in known.batches if sent.next_offset <= offset]
    return remembered(known.epoch, known.last_ms, kept)


def pack_all(producers: dict[int, ProducerState]) -> bytes:
    """Return the producers of a partition as one value (G18)."""
    parts = []
    for producer_id, state in producers.items():
        parts += [_SNAPSHOT_HEAD.pack(producer_id, len(state.row)), state.row]
    return b"".join(parts)


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
