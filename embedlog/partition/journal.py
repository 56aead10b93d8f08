"""What a publication over several partitions is about to do, and has done, in each of them.

A publication writes past the ends of its partitions, and then moves all ends
at once; but the ends are in `live`, what must outlive a power cut is in
`state`, and no transaction is over both.  So `state` keeps a row for each
partition of a publication, of one of two kinds:

*begun*: nothing is published.  What lies past the end that is noted, and the
files that are named, is to be removed by whoever comes next: by the next
writer, or by recovery, which without the row would take whole batches that
nobody published for a part of the log.

*done*: it is published, for good.  If the row in `live` is still the one
before it, its process died before it could move the ends; whoever comes next
moves all of them, in one transaction.

A row stays until the next publication replaces it, or a recovery is over: it
says which end it is about, so that it means nothing once that has moved.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from embedlog import index, kv
from embedlog.catalog import JOURNAL, PARTITION_KEY, SegmentInfo
from embedlog.checksum import seal, unseal
from embedlog.partition import tail
from embedlog.partition.context import Context
from embedlog.partition.state import PartitionState
from embedlog.partition.tail import Tail

_HEAD = struct.Struct(">BQQQQIHH")
_FILE = struct.Struct(">QQ")


class BaseTail(NamedTuple):
    """Which end of a partition a publication began at: once it has moved, it is another one."""

    segment_id: int
    next_offset: int
    position: int
    leader_epoch: int


class JournalEntry(NamedTuple):
    """The row of one partition in one publication."""

    number: int
    """Of the publication, among all there ever were."""
    done: bool
    before: BaseTail
    partners: tuple[bytes, ...]
    """The keys of all its partitions."""
    files: tuple[tuple[int, int], ...] = ()
    """Base offset and id of the segments that it makes."""
    after: bytes = b""
    """The tail row it leads to; only once it is done."""
    entries: bytes = b""
    """The index entries of the active segment that come with it."""

    def pack(self) -> bytes:
        """Return the row as stored, but for its checksum."""
        head = _HEAD.pack(self.done, self.number, *self.before, len(self.partners), len(self.files))
        files = b"".join(_FILE.pack(*each) for each in self.files)
        return b"".join((head, *self.partners, files, self.after, self.entries))


def _unpack(row: bytes) -> JournalEntry:
    done, number, *before, partners, files = _HEAD.unpack_from(row)
    first = _HEAD.size + partners * PARTITION_KEY.size
    rest = first + files * _FILE.size
    width = PARTITION_KEY.size
    keys = [row[at : at + width] for at in range(_HEAD.size, first, width)]
    after = rest + tail.ROW_BYTES * done
    return JournalEntry(
        number,
        bool(done),
        BaseTail(*before),
        tuple(keys),
        tuple(_FILE.iter_unpack(row[first:rest])),
        row[rest:after],
        row[after:],
    )


def end_of(now: Tail) -> BaseTail:
    """Return what tells this end of a partition from every other one it ever has."""
    return BaseTail(now.segment_id, now.log_end_offset, now.log_end_position, now.leader_epoch)


def get(txn: kv.Txn, key: bytes) -> JournalEntry | None:
    """Return the row of a partition."""
    row = txn.get(JOURNAL + key)
    return None if row is None else _unpack(unseal(row, "a publication", JOURNAL + key))


def put(txn: kv.Txn, key: bytes, entered: JournalEntry) -> None:
    """Write the row of a partition, over that of the publication before."""
    txn.put(JOURNAL + key, seal(entered.pack(), JOURNAL + key))


def files_of(txn: kv.Txn, key: bytes) -> set[str]:
    """Return the names of the segment files that a publication is about to bring in."""
    entered = get(txn, key)
    if entered is None or entered.done:
        return set()
    return {SegmentInfo(base, number, 0).file_name for base, number in entered.files}


# Whoever comes next; under the partition's lock


def settle(log: PartitionState) -> None:
    """Finish or undo the publication that somebody did not live to finish.

    Looked for only when `state` has changed since the last look.

    Raises:
        StorageError: It could not be undone; nobody appends until it is.
    """
    version = log.snapshot_version
    if log.journal_checked_version == version:
        return
    entered = log.context.state.read(lambda txn: get(txn, log.key))
    if entered is not None:
        row = log.context.live.get(log.tail_key)
        if row is not None:
            _settle(log, tail.unpack(row), entered)
        # Without a row recovery is due, which looks at the journal by itself.
    log.journal_checked_version = version


def _settle(log: PartitionState, now: Tail, entered: JournalEntry) -> None:
    if entered.done and end_of(now) == entered.before:
        finish(log.context, entered)
    elif not entered.done and not now.failed:
        # After a flush that failed nothing is touched until the repair, which recovers (P9).
        undo(log, now, entered)


def seen_done(log: PartitionState, now: Tail) -> Tail:
    """Return the tail that `settle` would lead to, for whoever only looks."""
    entered = log.context.state.read(lambda txn: get(txn, log.key))
    if entered is None or not entered.done or end_of(now) != entered.before:
        return now
    return tail.unpack(entered.after)


def finish_done(context: Context, keys: Iterable[bytes]) -> None:
    """Finish the publications that are done in some partitions, for whoever repeats one of them.

    Without their locks: who holds one has finished it, or published it and is about to.
    """
    for key in keys:
        entered = context.state.read(partial(get, key=key))
        row = context.live.get(tail.ROWS + key)
        if entered is None or row is None or not entered.done:
            continue
        if end_of(tail.unpack(row)) == entered.before:
            finish(context, entered)


def finish(context: Context, entered: JournalEntry) -> None:
    """Move the ends of all partitions of a publication that is done, those that did not move."""

    def step(txn: kv.Txn) -> list[tuple[bytes, JournalEntry]]:
        found = [(key, get(txn, key)) for key in entered.partners]
        # One with another number was finished by whoever replaced it; a topic may be gone.
        return [(key, one) for key, one in found if one and one.number == entered.number]

    rows = context.state.read(step)
    context.live.write(lambda txn: reveal(txn, rows))
    context.wake.advance()


def reveal(txn: kv.Txn, rows: Iterable[tuple[bytes, JournalEntry]]) -> None:
    """The step of `live` that makes a publication part of the log: all its ends at once."""
    for key, entered in rows:
        row = txn.get(tail.ROWS + key)
        if row is None or end_of(now := tail.unpack(row)) != entered.before:
            continue
        after = tail.unpack(entered.after)
        # A flush works without the partition's lock, and so does who reads its start.
        after = after._replace(
            high_watermark=max(after.high_watermark, now.high_watermark),
            high_watermark_position=max(after.high_watermark_position, now.high_watermark_position)
            if after.segment_id == now.segment_id
            else after.high_watermark_position,
            durable_offset=max(after.durable_offset, now.durable_offset),
            start_offset=max(after.start_offset, now.start_offset),
            flushed_ms=max(after.flushed_ms, now.flushed_ms),
            failed=now.failed,
        )
        txn.put(tail.ROWS + key, after.pack())
        if after.segment_id != now.segment_id:
            index.remove(txn, key, now.segment_id)
        for entry in index.unpack(entered.entries):
            index.put(txn, key, after.segment_id, entry)


def undo(log: PartitionState, now: Tail, entered: JournalEntry) -> None:
    """Remove what a publication left that was never done, then its row."""
    file = log.active_file()
    if file.size() > now.log_end_position:
        file.truncate(now.log_end_position)
        # Before the row goes: without it recovery would take this for a part of the log.
        log.sync(file)
    forget(log, entered)


def forget(log: PartitionState, entered: JournalEntry | None = None) -> None:
    """Remove the files that a publication made in vain, and its row."""
    if entered is None:
        entered = log.context.state.read(lambda txn: get(txn, log.key))
    if entered is None:
        return
    if not entered.done:
        for base, number in entered.files:
            log.context.files.unlink(log.path_of(SegmentInfo(base, number, 0)), missing_ok=True)
    log.context.state.write(lambda txn: txn.delete(JOURNAL + log.key))


def ceiling(entered: JournalEntry | None) -> int | None:
    """Where a log ends at most, whatever whole batches follow there; None if nobody knows."""
    return None if entered is None or entered.done else entered.before.next_offset
