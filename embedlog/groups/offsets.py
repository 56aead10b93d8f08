"""The offsets that groups committed: rows in `live`, and their checkpoints in `state`.

A commit is one unsynced row, so it survives the death of any process; a checkpoint
copies what changed to `state`, which survives a power cut.  So after a power cut a
group may go back to its last checkpoint, never forward.

A publication may commit offsets together with its records.  Its *note*, a row of `PENDING`,
is then in `live` from when its member was checked until the offsets are: whoever needs them, or
changes them, first has the publication finished, if the `JOURNAL` has it committed, or dropped.

Groups are passed as `check_group_id` returns them, partitions by their `PARTITION_KEY`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from embedlog import keyspace, kv
from embedlog.errors import (
    CommitFailedError,
    InvalidGroupIdError,
    OffsetMetadataTooLargeError,
    UnknownTopicOrPartitionError,
)
from embedlog.groups import share_state
from embedlog.groups.share_state import ShareState
from embedlog.keyspace import PARTITION_KEY, ROLLBACK_POINTS, UNSAVED_OFFSETS
from embedlog.record import OffsetAndMetadata

LONGEST_GROUP_ID = 360
"""Bytes: together with a member's id it must fit into a key of LMDB."""
MOST_METADATA_BYTES = 4096
"""Kafka's offset.metadata.max.bytes."""

_NO_EPOCH = -1
_JOURNAL_HEAD = keyspace.OFFSET_JOURNAL.value_layout.head
_NUMBERS = keyspace.COMMITTED_OFFSETS.value_layout.head

Ends = Callable[[kv.Txn, bytes], tuple[int, int] | None]
"""Returns, from a transaction of `live`, where a partition starts and ends; None if unknown."""


class CommittedOffset(NamedTuple):
    """A committed position, and when it was committed."""

    position: OffsetAndMetadata
    committed_ms: int


def encode(position: OffsetAndMetadata, committed_ms: int) -> bytes:
    """Return the row of a position that a program commits.

    Raises:
        ValueError: The offset or the epoch is negative, or too large for Kafka.
        OffsetMetadataTooLargeError: The metadata is longer than 4096 bytes.
    """
    offset, metadata, epoch = position
    if not 0 <= offset < 1 << 63:
        raise ValueError(f"offset {offset} is not in 0 to 2**63 - 1")
    # kafka-python passes -1 for an unknown epoch.
    if epoch is not None and not _NO_EPOCH <= epoch < 1 << 31:
        raise ValueError(f"leader epoch {epoch} is not in 0 to 2**31 - 1")
    if share_state.is_share(metadata):
        raise ValueError(f"metadata must not begin with {share_state.PREFIX!r}, got {metadata!r}")
    if metadata and len(metadata.encode()) > MOST_METADATA_BYTES:
        raise OffsetMetadataTooLargeError(
            f"The metadata of a commit may have at most {MOST_METADATA_BYTES} bytes",
            offset=offset,
            todo="Store the data elsewhere, and commit its name.",
        )
    return pack(position, committed_ms)


def pack(position: OffsetAndMetadata, committed_ms: int) -> bytes:
    """Return the row of a position, which is valid."""
    offset, metadata, epoch = position
    numbers = _NUMBERS.pack(offset, _NO_EPOCH if epoch is None else epoch, committed_ms)
    return numbers + metadata.encode() if metadata else numbers


def _unpack(row: bytes) -> CommittedOffset:
    offset, epoch, committed_ms = _NUMBERS.unpack_from(row)
    metadata = row[_NUMBERS.size :].decode()
    leader_epoch = None if epoch == _NO_EPOCH else epoch
    return CommittedOffset(OffsetAndMetadata(offset, metadata, leader_epoch), committed_ms)


COMMITTED = keyspace.COMMITTED_OFFSETS.coded(lambda committed: pack(*committed), _unpack)
"""In `live`."""
CHECKPOINTS = keyspace.OFFSET_CHECKPOINTS.coded(lambda committed: pack(*committed), _unpack)
"""In `state`."""


class OffsetEntry(NamedTuple):
    """The row of one partition whose offset a group commits with a publication."""

    committed: bool
    number: int
    """Of the publication."""
    partners: tuple[bytes, ...]
    """The keys of all partitions that it writes to."""
    row: bytes
    """The row of the offset."""

    def is_committed_by(self, note: Note | None) -> bool:
        """Whether it is committed, and this note of it still stands, so that it is not visible."""
        return self.committed and note is not None and note.number == self.number

    def pack(self) -> bytes:
        """Return the value of its row."""
        head = _JOURNAL_HEAD.pack(self.committed, self.number, len(self.partners))
        return b"".join((head, *self.partners, self.row))


def _unpack_entry(data: bytes) -> OffsetEntry:
    committed, number, count = _JOURNAL_HEAD.unpack_from(data)
    start, width = _JOURNAL_HEAD.size, PARTITION_KEY.size
    row_at = start + count * width
    partners = tuple(data[at : at + width] for at in range(start, row_at, width))
    return OffsetEntry(bool(committed), number, partners, data[row_at:])


JOURNAL = keyspace.OFFSET_JOURNAL.coded(OffsetEntry.pack, _unpack_entry)
"""In `state`."""


class Note(NamedTuple):
    """What is about to become the committed offset of a group."""

    number: int = 0
    """Of the publication, whose `OffsetEntry` decides; 0 for a transaction that is decided, and
    becomes visible with the next checkpoint."""
    row: bytes = b""
    """In the latter case, the row of the offset."""


PENDING = keyspace.PENDING_OFFSETS.typed(Note)
"""In `live`."""
Unsaved = dict[tuple[bytes, bytes], CommittedOffset | None]
"""Commits to save, by group and partition; None where the commit was deleted."""


def check_group_id(group: object) -> bytes:
    """Return a group's name as it stands in keys.

    Raises:
        InvalidGroupIdError: It is not text, empty, too long, or contains a NUL.
    """
    name = group.encode() if isinstance(group, str) else b""
    if not name or len(name) > LONGEST_GROUP_ID or b"\0" in name:
        raise InvalidGroupIdError(
            f"{group!r} is not a valid group id",
            todo=f"Use 1 to {LONGEST_GROUP_ID} bytes of text without NUL.",
        )
    return name


class PendingOffsetsError(Exception):
    """A transaction found notes of publications, at these partitions, and changed nothing."""

    def __init__(self, partitions: list[bytes]) -> None:
        super().__init__()
        self.partitions = partitions


def check_settled(txn: kv.Txn, group: bytes, partitions: Iterable[bytes]) -> None:
    """Raise if a publication is about to commit offsets of these partitions.

    Raises:
        PendingOffsetsError: It is, or its process died.
    """
    prefix = PENDING.prefix(group)
    if noted := [each for each in partitions if txn.get(prefix + each) is not None]:
        raise PendingOffsetsError(noted)


def put(txn: kv.Txn, group: bytes, rows: Mapping[bytes, bytes]) -> None:
    """Write the rows of partitions, made by `encode`, in a transaction of `live`.

    Raises:
        PendingOffsetsError: As `check_settled`.
    """
    check_settled(txn, group, rows)
    _put(txn, group, rows)


def _put(txn: kv.Txn, group: bytes, rows: Mapping[bytes, bytes]) -> None:
    # The prefixes are built once: commits are frequent.
    committed, unsaved = COMMITTED.prefix(group), UNSAVED_OFFSETS.prefix(group)
    for partition, row in rows.items():
        txn.put(committed + partition, row)
        # To read it costs less than to write it again, in a page of its own.
        if txn.get(unsaved + partition) is None:
            txn.put(unsaved + partition, b"")


def remove(txn: kv.Txn, group: bytes, partitions: Collection[bytes]) -> None:
    """Delete offsets, in a transaction of `live`; the next checkpoint deletes them in `state`.

    Raises:
        PendingOffsetsError: As `check_settled`.
    """
    check_settled(txn, group, partitions)
    for partition in partitions:
        if COMMITTED.delete(txn, group, partition):
            UNSAVED_OFFSETS.put(txn, group, partition, value=None)


def of_group(
    txn: kv.Txn, group: bytes, table: keyspace.Table[CommittedOffset] = COMMITTED
) -> dict[bytes, CommittedOffset]:
    """Return the committed offsets of a group by partition.

    Args:
        txn: A transaction of the table's database.
        group: The group.
        table: `COMMITTED`, or `CHECKPOINTS`: then as of the last checkpoint.

    Raises:
        CorruptionError: A row is damaged.
    """
    return {partition: committed for (_, partition), committed in table.scan(txn, group)}


def adopt(txn: kv.Txn, group: bytes, commits: Mapping[bytes, CommittedOffset], ends: Ends) -> None:
    """Copy a checkpoint to a `live` without the group: after a reboot.

    An offset past the end of its partition moves back to the end, as in `clamp`.
    """
    for partition, committed in commits.items():
        bounds = ends(txn, partition)
        clamped = committed if bounds is None else _clamped(committed, bounds[1])
        clamped = _changed_share(clamped, ShareState.forget_boot)
        COMMITTED.put(txn, group, partition, value=clamped)
        if clamped != committed:
            UNSAVED_OFFSETS.put(txn, group, partition, value=None)


def _clamped(committed: CommittedOffset, end: int) -> CommittedOffset:
    if share_state.is_share(committed.position.metadata):
        return _changed_share(committed, lambda state: state.clip(end))
    position = committed.position
    return committed._replace(position=position._replace(offset=min(position.offset, end)))


def _changed_share(
    committed: CommittedOffset, change: Callable[[ShareState], None]
) -> CommittedOffset:
    """Return the state of a partition in a share group after a change; others as they are."""
    position = committed.position
    if not share_state.is_share(position.metadata):
        return committed
    state = ShareState(position.offset, position.metadata)
    change(state)
    changed = position._replace(offset=state.start, metadata=state.metadata)
    return committed._replace(position=changed)


def clamp(state: kv.Store, partition: bytes, end: int) -> None:
    """Move offsets past the recovered end of a partition back to it.

    A power cut took those records.  This must happen before the next append; otherwise a
    group that is used later would skip records that it never saw.  The leader epoch of a
    position stays, so that readers notice.
    """

    def step(txn: kv.Txn) -> Unsaved:
        return {
            (group, partition): after
            for group, committed in in_partition(CHECKPOINTS, txn, partition).items()
            # A damaged row is reported to the next user of the group; the partition is fine.
            if committed is not None and (after := _clamped(committed, end)) != committed
        }

    clamped = state.read(step)
    if clamped:
        state.write(lambda txn: save(txn, clamped))


def in_partition(
    table: keyspace.Table[CommittedOffset], txn: kv.Txn, partition: bytes
) -> dict[bytes, CommittedOffset | None]:
    """Return each group's commit in a partition; None if the row is damaged.

    Args:
        table: `COMMITTED` or `CHECKPOINTS`.
        txn: A transaction of its database.
        partition: The partition's key.
    """
    commits = {}
    for group in list(table.first_fields(txn)):
        key = table.key(group, partition)
        row = txn.get(key)
        if row is not None:
            commits[keyspace.TEXT.encode(group)] = table.load_if_valid(key, row)
    return commits


def checkpoint(live: kv.Store, state: kv.Store, timeout: float | None = None) -> int | None:
    """Save every unsaved commit of any group and process; return how many.

    None if transactions wait for a checkpoint, which must save them with the records.
    Waits ``timeout`` seconds for each lock, by default the ``lock_timeout`` of the log.
    """
    if not live.read(unsaved) and not state.read(ROLLBACK_POINTS.any):
        return 0

    def step(txn: kv.Txn) -> Unsaved | None:
        if ROLLBACK_POINTS.any(txn):
            return None
        # Read under the lock of `state`; otherwise a slow process saves an older position.
        commits, notes = live.read(lambda txn: (unsaved(txn), dict(PENDING.scan(txn))))
        for key in commits.keys() & notes.keys():
            # A publication that is committed has saved its own, which `live` does not have yet.
            entry = JOURNAL.get(txn, *key)
            if entry is not None and entry.is_committed_by(notes[key]):
                del commits[key]
        save(txn, commits)
        return commits

    saved = state.write(step, timeout)
    if saved is None:
        return None
    live.write(lambda txn: note_saved(txn, saved), timeout)
    return len(saved)


def unsaved(txn: kv.Txn) -> Unsaved:
    """Return the commits that are not in `state` yet, from `live`."""
    return {key: COMMITTED.get(txn, *key) for key in list(UNSAVED_OFFSETS.keys(txn))}


def save(txn: kv.Txn, commits: Unsaved, notes: Mapping[tuple[bytes, bytes], Note] = {}) -> None:
    """Write commits to `state`, and those that transactions are about to make visible."""
    for key, committed in commits.items():
        if committed is None:
            CHECKPOINTS.delete(txn, *key)
            JOURNAL.delete(txn, *key)
        else:
            CHECKPOINTS.put(txn, *key, value=committed)
    for key, note in notes.items():
        if not note.number:
            CHECKPOINTS.put(txn, *key, value=_unpack(note.row))


def note_saved(
    txn: kv.Txn, commits: Unsaved, notes: Mapping[tuple[bytes, bytes], Note] = {}
) -> None:
    """Note, in `live`, what is in `state`; what transactions committed becomes visible."""
    for (group, partition), note in notes.items():
        if not note.number and PENDING.get(txn, group, partition) == note:
            COMMITTED.put(txn, group, partition, value=_unpack(note.row))
            UNSAVED_OFFSETS.delete(txn, group, partition)
            PENDING.delete(txn, group, partition)
    for key, committed in commits.items():
        # An offset that was committed again meanwhile is still unsaved.
        if COMMITTED.get(txn, *key) == committed:
            UNSAVED_OFFSETS.delete(txn, *key)


# Offsets that a publication commits together with its records, in this order: `prepare` with its
# first transaction on `state`, `note` in `live`, `commit` with the second one, and `publish` with
# the one that moves the ends.


def prepare(
    txn: kv.Txn,
    live: kv.Store,
    group: bytes,
    rows: Mapping[bytes, bytes],
    number: int,
    partners: tuple[bytes, ...],
) -> None:
    """Journal that a publication is about to commit these rows; whatever it replaces is void.

    Raises:
        UnknownTopicOrPartitionError: The topic of a partition was deleted.
        CommitFailedError: Another one has just committed one of them, and is not visible yet.
    """
    check_exist(txn, group, rows)
    for partition, row in rows.items():
        before = JOURNAL.get(txn, group, partition)
        if before is not None and before.is_committed_by(PENDING.get(live, group, partition)):
            raise CommitFailedError(
                "Another transaction has just committed an offset of the same partition",
                group=group.decode(),
                todo="Begin again at the committed offsets.",
            )
        JOURNAL.put(txn, group, partition, value=OffsetEntry(False, number, partners, row))


def check_exist(state: kv.Txn | kv.Store, group: bytes, partitions: Iterable[bytes]) -> None:
    """Raise if the topic of an offset does not exist any more.

    Raises:
        UnknownTopicOrPartitionError: It does not.
    """
    for partition in partitions:
        if not keyspace.PARTITIONS.exists(state, partition):
            raise UnknownTopicOrPartitionError(
                "The topic of an offset was deleted, or deleted and created again",
                group=group.decode(),
                partition=PARTITION_KEY.unpack(partition)[1],
                todo="Nothing was committed; begin again with the topics that exist now.",
            )


def note(txn: kv.Txn, group: bytes, partitions: Iterable[bytes], number: int) -> None:
    """Note, in `live`, that a publication is about to commit offsets of partitions.

    From now on nobody takes one of them over before it is decided.
    """
    for partition in partitions:
        PENDING.put(txn, group, partition, value=Note(number))


def commit(txn: kv.Txn, group: bytes, rows: Mapping[bytes, bytes], number: int) -> None:
    """Commit the offsets of a publication that was flushed, in `state`, with their checkpoints.

    Args:
        txn: A transaction of `state`.
        group: The group.
        rows: The rows of the offsets, by partition.
        number: Of the publication.

    Raises:
        CommitFailedError: It was dropped since: a member took over, or somebody else committed.
    """
    for partition, row in rows.items():
        entry = JOURNAL.get(txn, group, partition)
        if entry is None or entry.number != number:
            raise CommitFailedError(
                "Another member took over a partition during the transaction, or its offset was "
                "committed outside of it",
                group=group.decode(),
                todo="Begin again at the committed offsets.",
            )
        JOURNAL.put(txn, group, partition, value=entry._replace(committed=True, row=row))
        CHECKPOINTS.put(txn, group, partition, value=_unpack(row))


def journaled(txn: kv.Txn, group: bytes, number: int) -> dict[bytes, bytes]:
    """Return the rows that a publication committed, by partition, from `state`."""
    return {
        partition: entry.row
        for (_, partition), entry in JOURNAL.scan(txn, group)
        if (entry.committed, entry.number) == (True, number)
    }


def publish(txn: kv.Txn, group: bytes, rows: Mapping[bytes, bytes], number: int) -> None:
    """Make the offsets of a publication visible, unless they are, and drop its notes."""
    noted = {p: row for p, row in rows.items() if PENDING.get(txn, group, p) == Note(number)}
    _put(txn, group, noted)
    drop_notes(txn, group, noted, number)


def drop_notes(txn: kv.Txn, group: bytes, partitions: Iterable[bytes], number: int) -> None:
    """Delete the notes of a publication."""
    for partition in partitions:
        if PENDING.get(txn, group, partition) == Note(number):
            PENDING.delete(txn, group, partition)


# Offsets that a transaction commits in one step with its records, in `live`


def write(txn: kv.Txn, group: bytes, rows: Mapping[bytes, bytes], *, visible: bool) -> None:
    """Commit offsets, in a transaction of `live`; visible now, or with the next checkpoint.

    Raises:
        PendingOffsetsError: As `check_settled`.
    """
    if visible:
        put(txn, group, rows)
        return
    check_settled(txn, group, rows)
    for partition, row in rows.items():
        PENDING.put(txn, group, partition, value=Note(row=row))


def check_written(txn: kv.Txn, group: bytes, partitions: Iterable[bytes]) -> None:
    """Raise if a transaction has committed offsets of these partitions that wait for a checkpoint.

    Raises:
        PendingOffsetsError: It has.
    """
    notes = {partition: PENDING.get(txn, group, partition) for partition in partitions}
    if written := [each for each, note in notes.items() if note and not note.number]:
        raise PendingOffsetsError(written)


def drop_written(txn: kv.Txn) -> None:
    """Drop the offsets of all transactions that wait for a checkpoint, since it failed."""
    for key, note in list(PENDING.scan(txn)):
        if not note.number:
            PENDING.delete(txn, *key)
