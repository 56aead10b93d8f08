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

LONGEST_GROUP_ID = 200
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


def _pack(committed: CommittedOffset) -> bytes:
    position, committed_ms = committed
    epoch = _NO_EPOCH if position.leader_epoch is None else position.leader_epoch
    numbers = _NUMBERS.pack(position.offset, epoch, committed_ms)
    return numbers + (position.metadata or "").encode()


def _unpack(data: bytes) -> CommittedOffset:
    offset, epoch, committed_ms = _NUMBERS.unpack_from(data)
    metadata = data[_NUMBERS.size :].decode()
    leader_epoch = None if epoch == _NO_EPOCH else epoch
    return CommittedOffset(OffsetAndMetadata(offset, metadata, leader_epoch), committed_ms)


COMMITTED = keyspace.COMMITTED_OFFSETS.coded(_pack, _unpack)
"""In `live`."""
CHECKPOINTS = keyspace.OFFSET_CHECKPOINTS.coded(_pack, _unpack)
"""In `state`."""


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


def check(position: OffsetAndMetadata) -> None:
    """Raise unless a position can be committed (E21).

    Raises:
        ValueError: Its offset or its epoch is negative, or too large for Kafka.
        OffsetMetadataTooLargeError: Its metadata is longer than 4096 bytes.
    """
    if not 0 <= position.offset < 1 << 63:
        raise ValueError(f"offset {position.offset} is not in 0 to 2**63 - 1")
    # kafka-python passes -1 for an unknown epoch.
    if not _NO_EPOCH <= (position.leader_epoch or 0) < 1 << 31:
        raise ValueError(f"leader epoch {position.leader_epoch} is not in 0 to 2**31 - 1")
    if position.metadata and len(position.metadata.encode()) > MOST_METADATA_BYTES:
        raise OffsetMetadataTooLargeError(
            f"The metadata of a commit may have at most {MOST_METADATA_BYTES} bytes",
            offset=position.offset,
            todo="Store the data elsewhere, and commit its name.",
        )


def put(txn: kv.Txn, group: bytes, commits: Mapping[bytes, CommittedOffset]) -> None:
    """Commit offsets of partitions, in a transaction of `live`."""
    for partition, committed in commits.items():
        # By hand: commits are frequent.
        key = COMMITTED.key(group, partition)
        txn.put(key, _pack(committed))
        txn.put(UNSAVED_OFFSETS.key_like(key), b"")


def remove(txn: kv.Txn, group: bytes, partitions: Iterable[bytes]) -> None:
    """Delete offsets, in a transaction of `live`; the next checkpoint deletes them in `state`."""
    for partition in partitions:
        if COMMITTED.delete(txn, group, partition):
            UNSAVED_OFFSETS.put(txn, group, partition, value=None)


def of_group(txn: kv.Txn, group: bytes) -> dict[bytes, CommittedOffset]:
    """Return what a group committed, by partition, in a transaction of `live`."""
    return {partition: committed for (_, partition), committed in COMMITTED.scan(txn, group)}


def saved(state: kv.Store, group: bytes) -> dict[bytes, CommittedOffset]:
    """Return what a group committed as of the last checkpoint, by partition.

    Raises:
        CorruptionError: A row is damaged.
    """
    return state.read(
        lambda txn: {
            partition: committed for (_, partition), committed in CHECKPOINTS.scan(txn, group)
        }
    )


def adopt(txn: kv.Txn, group: bytes, commits: Mapping[bytes, CommittedOffset], ends: Ends) -> None:
    """Copy a checkpoint to a `live` that does not know the group: after a reboot.

    An offset past the end of its partition moves back to the end, as in `clamp`.
    """
    for partition, committed in commits.items():
        known = ends(txn, partition)
        clamped = committed if known is None else _clamped(committed, known[1])
        COMMITTED.put(txn, group, partition, value=clamped)
        if clamped != committed:
            UNSAVED_OFFSETS.put(txn, group, partition, value=None)


def _clamped(committed: CommittedOffset, end: int) -> CommittedOffset:
    if committed.position.offset <= end:
        return committed
    return committed._replace(position=committed.position._replace(offset=end))


def clamp(state: kv.Store, partition: bytes, end: int) -> None:
    """Move offsets past the recovered end of a partition back to it (P5).

    A power cut took those records.  This must happen before the next append: else a
    group that is used later would skip records that it never saw.  The leader epoch of
    a position stays; by it readers notice.
    """

    def step(txn: kv.Txn) -> dict[tuple[bytes, bytes], CommittedOffset | None]:
        past: dict[tuple[bytes, bytes], CommittedOffset | None] = {}
        for group, committed in in_partition(CHECKPOINTS, txn, partition).items():
            # A damaged one is reported to the next user of the group; the partition is fine.
            if committed is not None and (clamped := _clamped(committed, end)) != committed:
                past[group, partition] = clamped
        return past

    past = state.read(step)
    if past:
        state.write(lambda txn: _save(txn, past))


def in_partition(
    table: keyspace.Table[CommittedOffset], txn: kv.Txn, partition: bytes
) -> dict[bytes, CommittedOffset | None]:
    """Return what every group committed in a partition; None if the row is damaged.

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


def groups(state: kv.Store) -> set[bytes]:
    """Return the groups that have a checkpoint."""
    return {
        keyspace.TEXT.encode(group)
        for group in state.read(lambda txn: list(CHECKPOINTS.first_fields(txn)))
    }


def checkpoint(live: kv.Store, state: kv.Store) -> int:
    """Save every commit, of any group and process, that is not saved; return how many."""
    if not live.read(_unsaved):
        return 0

    def step(txn: kv.Txn) -> dict[tuple[bytes, bytes], CommittedOffset | None]:
        # Read under the lock of `state`: else a slow process saves an older position.
        unsaved = live.read(_unsaved)
        _save(txn, unsaved)
        return unsaved

    unsaved = state.write(step)
    live.write(lambda txn: _note_saved(txn, unsaved))
    return len(unsaved)


def _unsaved(txn: kv.Txn) -> dict[tuple[bytes, bytes], CommittedOffset | None]:
    return {key: COMMITTED.get(txn, *key) for key in list(UNSAVED_OFFSETS.keys(txn))}


def _save(txn: kv.Txn, unsaved: Mapping[tuple[bytes, bytes], CommittedOffset | None]) -> None:
    for key, committed in unsaved.items():
        if committed is None:
            CHECKPOINTS.delete(txn, *key)
        else:
            CHECKPOINTS.put(txn, *key, value=committed)


def _note_saved(txn: kv.Txn, saved: Mapping[tuple[bytes, bytes], CommittedOffset | None]) -> None:
    for key, committed in saved.items():
        # If it was committed again meanwhile, that one is still to be saved.
        if COMMITTED.get(txn, *key) == committed:
            UNSAVED_OFFSETS.delete(txn, *key)
