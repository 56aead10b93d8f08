"""Idempotence: what a partition remembers of each producer (KIP-98, G15-G19)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from embedlog.errors import InvalidProducerEpochError, OutOfOrderSequenceError

ROWS = b"P"
REMEMBERED = 5
"""Batches per producer; Kafka's number, the most it may have in flight."""
LAST_SEQUENCE = (1 << 31) - 1

_HEAD = struct.Struct(">hq")
_BATCH = struct.Struct(">iiqq")
_KEPT = _BATCH.size * (REMEMBERED - 1)
_FULL = struct.Struct(f">hq{_KEPT}siiqq")
_OWNER = struct.Struct(">qI")


class SentBatch(NamedTuple):
    """A batch a producer sent: its sequence numbers, and the offsets it got."""

    first_sequence: int
    last_sequence: int
    base_offset: int
    next_offset: int


class ProducerState(NamedTuple):
    """A producer as one partition knows it: its row, and what every append asks of that."""

    epoch: int
    due: int | None
    """The number that its next record has; None if no batch is remembered."""
    row: bytes
    """As stored: epoch, the time of the last batch, and the last five batches, oldest first."""

    @property
    def batches(self) -> tuple[SentBatch, ...]:
        """Its last five, oldest first."""
        return tuple(map(SentBatch._make, _BATCH.iter_unpack(self.row[_HEAD.size :])))

    @property
    def last_ms(self) -> int:
        """When it sent the last one, by the log's clock."""
        return last_ms(self.row)


def remembered(epoch: int, last_ms: int, batches: Iterable[SentBatch] = ()) -> ProducerState:
    """Return what is known of a producer that sent these, oldest first."""
    return unpack(_HEAD.pack(epoch, last_ms) + b"".join(_BATCH.pack(*sent) for sent in batches))


def unpack(row: bytes) -> ProducerState:
    """Return a stored row."""
    due = None
    if len(row) > _HEAD.size:
        due = after(_BATCH.unpack_from(row, len(row) - _BATCH.size)[1], 1)
    return ProducerState(_HEAD.unpack_from(row)[0], due, row)


def last_ms(row: bytes) -> int:
    """Return when a stored producer last appended."""
    stored: int = _HEAD.unpack_from(row)[1]
    return stored


def after(sequence: int, count: int) -> int:
    """Return the sequence ``count`` records later; it wraps to 0 (G15)."""
    return (sequence + count) & LAST_SEQUENCE


def check(known: ProducerState | None, epoch: int, sequence: int, count: int) -> SentBatch | None:
    """Return the batch this one repeats, or None if it is the next in order (G16, G17).

    Raises:
        InvalidProducerEpochError: A newer producer of that name took over.
        OutOfOrderSequenceError: A gap, a partial repeat, or older than remembered.
    """
    # The number that is due repeats none of the five before it.
    if known is None or (known.epoch == epoch and known.due in (sequence, None)):
        return None
    if epoch < known.epoch:
        raise InvalidProducerEpochError(
            f"epoch {epoch} was fenced by epoch {known.epoch}",
            todo="a newer producer has this name; close this one",
        )
    if epoch > known.epoch:
        if sequence != 0:
            raise OutOfOrderSequenceError(f"epoch {epoch} begins at sequence {sequence}, not 0")
        return None
    last = after(sequence, count - 1)
    for sent in known.batches:
        if (sent.first_sequence, sent.last_sequence) == (sequence, last):
            return sent
    raise OutOfOrderSequenceError(
        f"sequence {sequence} where {known.due} is next",
        todo="records before it failed or were sent too long ago; make a new producer",
    )


def note(
    known: ProducerState | None, epoch: int, sent: tuple[int, int, int, int], now_ms: int
) -> ProducerState:
    """Return what is known of a producer after it sent a batch, given as the fields of `SentBatch`.

    A new epoch that goes on counting remembers what the one before it sent; one
    that starts again at 0 (Kafka's way) must not mistake its batches for those.
    """
    first, last, _, _ = sent
    before, due, row = (epoch, None, b"") if known is None else known
    if before != epoch and due != first:
        row = b""
    # Of a producer with five batches in one go: that is nearly every append, under the lock.
    if len(row) == _FULL.size:
        row = _FULL.pack(epoch, now_ms, row[-_KEPT:], *sent)
    else:
        row = _HEAD.pack(epoch, now_ms) + row[_HEAD.size :][-_KEPT:] + _BATCH.pack(*sent)
    return tuple.__new__(ProducerState, (epoch, last + 1 & LAST_SEQUENCE, row))


def below(known: ProducerState, offset: int) -> ProducerState:
    """Return what is known of a producer after the log was cut at ``offset``."""
    kept = [sent for sent in known.batches if sent.next_offset <= offset]
    return remembered(known.epoch, known.last_ms, kept)


def pack_all(producers: dict[int, ProducerState]) -> bytes:
    """Return the producers of a partition as one blob (G18)."""
    parts = []
    for number, producer in producers.items():
        parts += [_OWNER.pack(number, len(producer.row)), producer.row]
    return b"".join(parts)


def unpack_all(blob: bytes) -> dict[int, ProducerState]:
    """Return the producers of a partition from their blob."""
    producers, place = {}, 0
    while place < len(blob):
        number, length = _OWNER.unpack_from(blob, place)
        place += _OWNER.size
        producers[number] = unpack(blob[place : place + length])
        place += length
    return producers


def key(partition_key: bytes, producer_id: int) -> bytes:
    """Return the key of a producer's row in `live`."""
    return ROWS + partition_key + producer_id.to_bytes(8, "big")
