"""The offsets that groups committed: rows in `live`, and their checkpoints in `state`.

A commit is one unsynced row, so it survives the death of any process; a checkpoint
copies what changed to `state`, which survives a power cut.  So after a power cut a
group may go back to its last checkpoint, never forward.

Groups are passed as `check_group_id` returns them, partitions by their `PARTITION_KEY`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from embedlog import keyspace, kv
from embedlog.errors import InvalidGroupIdError, OffsetMetadataTooLargeError
from embedlog.keyspace import UNSAVED_OFFSETS
from embedlog.record import OffsetAndMetadata

LONGEST_GROUP_ID = 360
"""Bytes: together with a member's id it must fit into a key of LMDB."""
MOST_METADATA_BYTES = 4096
"""Kafka's offset.metadata.max.bytes."""

_NO_EPOCH = -1
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
    if metadata and len(metadata.encode()) > MOST_METADATA_BYTES:
        raise OffsetMetadataTooLargeError(
            f"The metadata of a commit may have at most {MOST_METADATA_BYTES} bytes",
            offset=offset,
            todo="Store the data elsewhere, and commit its name.",
        )
    return _pack(position, committed_ms)


def _pack(position: OffsetAndMetadata, committed_ms: int) -> bytes:
    offset, metadata, epoch = position
    numbers = _NUMBERS.pack(offset, _NO_EPOCH if epoch is None else epoch, committed_ms)
    return numbers + metadata.encode() if metadata else numbers


def _unpack(row: bytes) -> CommittedOffset:
    offset, epoch, committed_ms = _NUMBERS.unpack_from(row)
    metadata = row[_NUMBERS.size :].decode()
    leader_epoch = None if epoch == _NO_EPOCH else epoch
    return CommittedOffset(OffsetAndMetadata(offset, metadata, leader_epoch), committed_ms)


COMMITTED = keyspace.COMMITTED_OFFSETS.coded(lambda committed: _pack(*committed), _unpack)
"""In `live`."""
CHECKPOINTS = keyspace.OFFSET_CHECKPOINTS.coded(lambda committed: _pack(*committed), _unpack)
"""In `state`."""

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


def put(txn: kv.Txn, group: bytes, rows: Mapping[bytes, bytes]) -> None:
    """Write the rows of partitions, made by `encode`, in a transaction of `live`."""
    # The prefixes are built once: commits are frequent.
    committed, unsaved = COMMITTED.prefix(group), UNSAVED_OFFSETS.prefix(group)
    for partition, row in rows.items():
        txn.put(committed + partition, row)
        txn.put(unsaved + partition, b"")


def remove(txn: kv.Txn, group: bytes, partitions: Iterable[bytes]) -> None:
    """Delete offsets, in a transaction of `live`; the next checkpoint deletes them in `state`."""
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
        COMMITTED.put(txn, group, partition, value=clamped)
        if clamped != committed:
            UNSAVED_OFFSETS.put(txn, group, partition, value=None)


def _clamped(committed: CommittedOffset, end: int) -> CommittedOffset:
    position = committed.position
    return committed._replace(position=position._replace(offset=min(position.offset, end)))


def clamp(state: kv.Store, partition: bytes, end: int) -> None:
    """Move offsets past the recovered end of a partition back to it.

    A power cut took those records.  This must happen before the next append; otherwise a
    group that is used later would skip records that it never saw.  The leader epoch of a
    position stays, so that readers notice.
    """

    def step(txn: kv.Txn) -> Unsaved:
        return {
            (group, partition): _clamped(committed, end)
            for group, committed in in_partition(CHECKPOINTS, txn, partition).items()
            # A damaged row is reported to the next user of the group; the partition is fine.
            if committed is not None and committed.position.offset > end
        }

    clamped = state.read(step)
    if clamped:
        state.write(lambda txn: _save(txn, clamped))


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


def checkpoint(live: kv.Store, state: kv.Store, timeout: float | None = None) -> int:
    """Save every unsaved commit of any group and process; return how many.

    Waits ``timeout`` seconds for each lock, by default the ``lock_timeout`` of the log.
    """
    if not live.read(_unsaved):
        return 0

    def step(txn: kv.Txn) -> Unsaved:
        # Read under the lock of `state`; otherwise a slow process saves an older position.
        unsaved = live.read(_unsaved)
        _save(txn, unsaved)
        return unsaved

    def note_saved(txn: kv.Txn) -> None:
        for key, committed in saved.items():
            # An offset that was committed again meanwhile is still unsaved.
            if COMMITTED.get(txn, *key) == committed:
                UNSAVED_OFFSETS.delete(txn, *key)

    saved = state.write(step, timeout)
    live.write(note_saved, timeout)
    return len(saved)


def _unsaved(txn: kv.Txn) -> Unsaved:
    return {key: COMMITTED.get(txn, *key) for key in list(UNSAVED_OFFSETS.keys(txn))}


def _save(txn: kv.Txn, unsaved: Unsaved) -> None:
    for key, committed in unsaved.items():
        if committed is None:
            CHECKPOINTS.delete(txn, *key)
        else:
            CHECKPOINTS.put(txn, *key, value=committed)
