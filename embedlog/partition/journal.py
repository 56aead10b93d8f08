"""The journal of publications: what one over several partitions is about to do, or has done.

A publication writes past the ends of its partitions, and then moves all ends in one transaction.
But the ends are in `live`, what must survive a power cut is in `state`, and no
transaction covers both.  So `state` has a row for each partition of a publication:

The offsets that a group commits with a publication have rows of their own (`groups.offsets`).

*prepared*: nothing is published.  What lies past the end that is noted, and the files
that are named, must be removed by the next writer, or by recovery, which without the
row would take whole unpublished batches for a part of the log.

*committed*: it is published, for good.  If `live` still has the tail that it began
at, its process died before it could move the ends; the next process moves all of them,
in one transaction.

A row stays until the next publication replaces it, or a recovery is over.  It notes the
end that it began at, so it means nothing once that has moved.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from embedlog import catalog, index, keyspace, kv
from embedlog.catalog import SegmentInfo
from embedlog.groups import offsets
from embedlog.keyspace import PARTITION_KEY
from embedlog.partition.state import Context
from embedlog.partition.tail import TAILS, Tail, peek_tail, unpack

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

PREPARED, COMMITTED = 0, 1

_HEAD = keyspace.JOURNAL.value_layout.head
_FILE = struct.Struct(">QQ")
_TAIL_BYTES = TAILS.value_layout.head.size


class BaseTail(NamedTuple):
    """The end of a partition that a publication began at, as far as it identifies it."""

    segment_id: int
    next_offset: int
    position: int
    leader_epoch: int


class JournalEntry(NamedTuple):
    """The row of one partition in one publication."""

    number: int
    """Of the publication; no other one has it."""
    state: int
    """`PREPARED` or `COMMITTED`."""
    before: BaseTail
    partners: tuple[bytes, ...]
    """The keys of all its partitions."""
    files: tuple[tuple[int, int], ...] = ()
    """Base offset and id of the segments that it creates; only while it is prepared."""
    after: bytes = b""
    """The tail row that it leads to; only once it is committed."""
    entries: bytes = b""
    """The index entries of the active segment that come with it."""
    group: bytes = b""
    """The group that commits offsets with it; empty without one."""

    def pack(self) -> bytes:
        """Return the value of its row."""
        counts = len(self.partners), len(self.files), len(self.group)
        head = _HEAD.pack(self.state, self.number, *self.before, *counts)
        files = [_FILE.pack(*file) for file in self.files]
        return b"".join((head, *self.partners, *files, self.group, self.after, self.entries))


def _unpack(data: bytes) -> JournalEntry:
    state, number, *before, partner_count, file_count, group_size = _HEAD.unpack_from(data)
    width = PARTITION_KEY.size
    files_at = _HEAD.size + partner_count * width
    group_at = files_at + file_count * _FILE.size
    after_at = group_at + group_size
    entries_at = after_at + _TAIL_BYTES * (state == COMMITTED)
    return JournalEntry(
        number,
        state,
        BaseTail(*before),
        tuple(data[at : at + width] for at in range(_HEAD.size, files_at, width)),
        tuple(_FILE.iter_unpack(data[files_at:group_at])),
        data[after_at:entries_at],
        data[entries_at:],
        data[group_at:after_at],
    )


JOURNAL = keyspace.JOURNAL.coded(JournalEntry.pack, _unpack)


def end_of(tail: Tail) -> BaseTail:
    """Return an identity of this end, different from every other end of the partition."""
    return BaseTail(tail.segment_id, tail.log_end_offset, tail.log_end_position, tail.leader_epoch)


def _read(context: Context, key: bytes) -> JournalEntry | None:
    return context.state.read(lambda txn: JOURNAL.get(txn, key))


def file_names(txn: kv.Txn, key: bytes) -> set[str]:
    """Return the names of the segment files that a partition has, or is about to have.

    That is those of the manifest, uncommitted ones, and those that a prepared publication creates.
    """
    infos = [*catalog.segments(txn, key), *catalog.uncommitted_files(txn, key)]
    if (entry := JOURNAL.get(txn, key)) is not None:
        infos += [SegmentInfo(base, number, 0) for base, number in entry.files]
    return {info.file_name for info in infos}


# The next process; under the partition's lock


def finish_or_undo(log: PartitionLog) -> None:
    """Finish or undo a publication whose process died in the middle.

    Raises:
        StorageError: It could not be undone; no append is possible until it is.
    """
    entry = _read(log.context, log.key)
    # Without a tail recovery is due, which reads the journal itself.
    if entry is not None and (tail := peek_tail(log.context.live, log.key)) is not None:
        if entry.state == COMMITTED:
            if end_of(tail) == entry.before:
                finish_publication(log.context, entry.number, entry.partners, entry.group)
        elif not tail.failed:
            # After a failed flush nothing is touched until the repair, which recovers (P9).
            _undo(log, tail)


def visible_tail(log: PartitionLog, tail: Tail) -> Tail:
    """Return the tail that `finish_or_undo` would lead to, without changing anything."""
    entry = _read(log.context, log.key)
    if entry is None or entry.state == PREPARED or end_of(tail) != entry.before:
        return tail
    return unpack(entry.after)


def finish_committed(context: Context, keys: Iterable[bytes]) -> None:
    """Finish the committed publications of some partitions, before one of them is repeated.

    Without the partitions' locks: a process that holds one has finished it, or is the one
    that published it and is about to.
    """
    for key in keys:
        entry = _read(context, key)
        if entry is not None and entry.state == COMMITTED:
            tail = peek_tail(context.live, key)
            if tail is not None and end_of(tail) == entry.before:
                finish_publication(context, entry.number, entry.partners, entry.group)


def settle_offsets(
    context: Context, group: bytes, partitions: Collection[bytes], abort: bool
) -> None:
    """Finish the committed publications that have notes at some partitions of a group.

    Args:
        context: The log.
        group: The group.
        partitions: The partitions.
        abort: Whether to drop those that are not committed: from then on they cannot be.
    """
    if not context.files.writable:
        return  # It shows the log as it was before, and continues nothing.
    get = offsets.PENDING.get
    notes = context.live.read(lambda txn: {key: get(txn, group, key) for key in partitions})
    if all(note is None for note in notes.values()):
        return
    # A commit of a killed process may become visible only with the next one.
    context.state.catch_up()
    if any(note is not None and not note.number for note in notes.values()):
        context.take_checkpoint(context)
    for partition, note in notes.items():
        if note is not None and note.number:
            _settle(context, group, partition, note.number, abort)


def _settle(context: Context, group: bytes, partition: bytes, number: int, abort: bool) -> None:
    def step(txn: kv.Txn) -> offsets.OffsetEntry | None:
        entry = offsets.JOURNAL.get(txn, group, partition)
        if entry is None or entry.number != number:
            return None
        if not entry.committed:
            offsets.JOURNAL.delete(txn, group, partition)
        return entry if entry.committed else None

    entry = context.state.read(lambda txn: offsets.JOURNAL.get(txn, group, partition))
    if entry is None or (entry.committed, entry.number) != (True, number):
        if not abort:
            return
        entry = context.state.write(step)
    if entry is not None:
        finish_publication(context, number, entry.partners, group)
    else:
        context.live.write(lambda txn: offsets.drop_notes(txn, group, [partition], number))


def finish_publication(
    context: Context, number: int, partners: Iterable[bytes], group: bytes
) -> None:
    """Make a committed publication visible, where it is not yet: its records, and its offsets.

    Args:
        context: The log.
        number: Of the publication.
        partners: The keys of all its partitions.
        group: The group whose offsets it commits; empty without one.
    """

    def step(txn: kv.Txn) -> tuple[list[tuple[bytes, JournalEntry]], dict[bytes, bytes]]:
        entries = [(key, JOURNAL.get(txn, key)) for key in partners]
        # One with another number was finished before it was replaced; a topic may be deleted.
        rows = [(key, other) for key, other in entries if other and other.number == number]
        return rows, offsets.journaled(txn, group, number) if group else {}

    rows, committed = context.state.read(step)
    context.live.write(lambda txn: make_visible(txn, rows, number, group, committed))
    context.wake.advance()


def make_visible(
    txn: kv.Txn,
    rows: Iterable[tuple[bytes, JournalEntry]],
    number: int,
    group: bytes,
    committed: Mapping[bytes, bytes],
) -> None:
    """Make a publication visible, in a transaction of `live`: its ends and its offsets at once."""
    if group:
        offsets.publish(txn, group, committed, number)
    for key, entry in rows:
        tail = peek_tail(txn, key)
        if tail is None or end_of(tail) != entry.before:
            continue
        after = unpack(entry.after).with_flush(tail)
        TAILS.put(txn, key, value=after)
        if after.segment_id != tail.segment_id:
            index.remove(txn, key, tail.segment_id)
        for index_entry in index.unpack(entry.entries):
            index.put(txn, key, after.segment_id, index_entry)


def _undo(log: PartitionLog, tail: Tail) -> None:
    """Remove what a publication that was never committed wrote, then its row."""
    file = log.active_file()
    if file.size() >= tail.log_end_position:
        # Before the row is deleted: without it recovery would take this for a part of the log.
        # Also where this copy ends there: its writer may have written to other copies only.
        log.cut(file, tail.log_end_position)
    forget(log)


def forget(log: PartitionLog) -> None:
    """Remove the files of a publication that was never committed, and delete its row."""
    entry = _read(log.context, log.key)
    if entry is None:
        return
    for base, number in entry.files:
        log.context.files.unlink(log.path_of(SegmentInfo(base, number, 0)), missing_ok=True)
    log.context.state.write(lambda txn: JOURNAL.delete(txn, log.key))
