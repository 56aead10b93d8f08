"""Idempotence: what a partition remembers of each producer (KIP-98, G15-G19)."""

from __future__ import annotations

import struct
from itertools import chain
from typing import NamedTuple

from embedlog.errors import InvalidProducerEpochError, OutOfOrderSequenceError

ROWS = b"P"
REMEMBERED = 5
"""Batches per producer; Kafka's number, the most it may have in flight."""
LAST_SEQUENCE = (1 << 31) - 1

_HEAD = struct.Struct(">hq")
_BATCH = struct.Struct(">iiqq")
_ROWS = tuple(struct.Struct(">hq" + "iiqq" * count) for count in range(REMEMBERED + 1))
_OWNER = struct.Struct(">qI")


class Sent(NamedTuple):
    """A batch a producer sent: its sequence numbers, and the offsets it got."""

    first_sequence: int
    last_sequence: int
    base_offset: int
    next_offset: int


class Producer(NamedTuple):
    """A producer as one partition knows it; ``batches`` are its last five, oldest first."""

    epoch: int
    last_ms: int
    batches: tuple[Sent, ...]

    def pack(self) -> bytes:
        """Return the row as stored."""
        row = _ROWS[len(self.batches)]
        return row.pack(self.epoch, self.last_ms, *chain.from_iterable(self.batches))


def unpack(row: bytes) -> Producer:
    """Return a stored row."""
    epoch, last_ms = _HEAD.unpack_from(row)
    batches = tuple(map(Sent._make, _BATCH.iter_unpack(row[_HEAD.size :])))
    return Producer(epoch, last_ms, batches)


def after(sequence: int, count: int) -> int:
    """Return the sequence ``count`` records later; it wraps to 0 (G15)."""
    return (sequence + count) % (LAST_SEQUENCE + 1)


def check(known: Producer | None, epoch: int, sequence: int, count: int) -> Sent | None:
    """Return the batch this one repeats, or None if it is the next in order (G16, G17).

    Raises:
        InvalidProducerEpochError: A newer producer of that name took over.
        OutOfOrderSequenceError: A gap, a partial repeat, or older than remembered.
    """
    if known is None or (not known.batches and epoch == known.epoch):
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
    due = after(known.batches[-1].last_sequence, 1)
    if sequence != due:
        raise OutOfOrderSequenceError(
            f"sequence {sequence} where {due} is next",
            todo="records before it failed or were sent too long ago; make a new producer",
        )
    return None


def note(known: Producer | None, epoch: int, sent: Sent, now_ms: int) -> Producer:
    """Return what is known of a producer after it sent a batch.

    A new epoch that goes on counting remembers what the one before it sent; one
    that starts again at 0 (Kafka's way) must not mistake its batches for those.
    """
    kept = known.batches if known is not None else ()
    if kept and known is not None and known.epoch != epoch:
        kept = kept if sent.first_sequence == after(kept[-1].last_sequence, 1) else ()
    return Producer(epoch, now_ms, (*kept, sent)[-REMEMBERED:])


def below(known: Producer, offset: int) -> Producer:
    """Return what is known of a producer after the log was cut at ``offset``."""
    kept = tuple(sent for sent in known.batches if sent.next_offset <= offset)
    return Producer(known.epoch, known.last_ms, kept)


def pack_all(producers: dict[int, Producer]) -> bytes:
    """Return the producers of a partition as one blob (G18)."""
    parts = []
    for number, producer in producers.items():
        row = producer.pack()
        parts += [_OWNER.pack(number, len(row)), row]
    return b"".join(parts)


def unpack_all(blob: bytes) -> dict[int, Producer]:
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
