"""What groups committed: rows in `live`, and their checkpoints in `state`.

A commit is one unsynced row, so it survives the death of any process; a
checkpoint copies what changed into `state`, which survives a power cut.  So
after a power cut a group may go back to its last checkpoint, never forward.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from embedlog import kv
from embedlog.catalog import PARTITION_KEY
from embedlog.checksum import seal, unseal
from embedlog.errors import CorruptionError, InvalidGroupIdError, OffsetMetadataTooLargeError
from embedlog.record import OffsetAndMetadata

ROWS = b"C"
UNSAVED = b"U"
LONGEST_GROUP_ID = 200
"""Bytes: with a member's id it must still be a key of LMDB."""
MOST_METADATA_BYTES = 4096
"""Kafka's offset.metadata.max.bytes."""

_ROW = struct.Struct(">qiq")
_NO_EPOCH = -1
_END, _AFTER_END = b"\0", b"\1"

Ends = Callable[[kv.Txn, bytes], tuple[int, int] | None]
"""Tells from a transaction of `live` where the partition of a key starts and ends, if known."""


class CommittedOffset(NamedTuple):
    """A committed position, and when it was committed."""

    position: OffsetAndMetadata
    committed_ms: int


def check_group_id(group: object) -> bytes:
    """Return a group's name as it stands in keys.

    Raises:
        InvalidGroupIdError: It is no text, empty, too long, or has a NUL in it.
    """
    name = group.encode() if isinstance(group, str) else b""
    if not name or len(name) > LONGEST_GROUP_ID or _END in name:
        raise InvalidGroupIdError(
            f"{group!r} cannot name a group",
            todo=f"use 1 to {LONGEST_GROUP_ID} bytes of text without NUL",
        )
    return name


def key(group: bytes, partition: bytes) -> bytes:
    """Return the key of a group's position in a partition."""
    return ROWS + group + _END + partition


def group_of(row_key: bytes) -> bytes:
    """Return the group that a row belongs to."""
    return row_key[1 : -PARTITION_KEY.size - 1]


def partition_of(row_key: bytes) -> bytes:
    """Return the partition key that a row is about."""
    return row_key[-PARTITION_KEY.size :]


def check(position: OffsetAndMetadata) -> None:
    """Raise unless a position can be committed (E21).

    Raises:
        ValueError: Its offset or its epoch is negative, or too large for Kafka.
        OffsetMetadataTooLargeError: Its note is longer than 4096 bytes.
    """
    if not 0 <= position.offset < 1 << 63:
        raise ValueError(f"offset {position.offset} is not in 0 to 2**63 - 1")
    # kafka-python writes -1 for one that is not known.
    if not _NO_EPOCH <= (position.leader_epoch or 0) < 1 << 31:
        raise ValueError(f"leader epoch {position.leader_epoch} is not in 0 to 2**31 - 1")
    if position.metadata and len(position.metadata.encode()) > MOST_METADATA_BYTES:
        raise OffsetMetadataTooLargeError(
            f"the metadata of a commit may have {MOST_METADATA_BYTES} bytes",
            offset=position.offset,
            todo="keep the data elsewhere, and commit its name",
        )


def pack(position: OffsetAndMetadata, now_ms: int) -> bytes:
    """Return a position as stored."""
    epoch = _NO_EPOCH if position.leader_epoch is None else position.leader_epoch
    return _ROW.pack(position.offset, epoch, now_ms) + (position.metadata or "").encode()


def unpack(row: bytes) -> CommittedOffset:
    """Return a stored position."""
    offset, epoch, committed_ms = _ROW.unpack_from(row)
    metadata = row[_ROW.size :].decode()
    known = None if epoch == _NO_EPOCH else epoch
    return CommittedOffset(OffsetAndMetadata(offset, metadata, known), committed_ms)


def put(txn: kv.Txn, rows: Mapping[bytes, bytes]) -> None:
    """Commit positions, in a transaction of `live`."""
    for row_key, row in rows.items():
        txn.put(row_key, row)
        txn.put(UNSAVED + row_key[1:], b"")


def of_group(txn: kv.Txn, group: bytes) -> dict[bytes, bytes]:
    """Return a group's rows by key, in `live` or, sealed, in `state`."""
    return {bytes(found): bytes(row) for found, row in kv.rows(txn, ROWS + group + _END)}


def saved(state: kv.Store, group: bytes) -> dict[bytes, bytes]:
    """Return a group's rows as of the last checkpoint.

    Raises:
        CorruptionError: One of them is damaged.
    """
    rows = state.read(lambda txn: of_group(txn, group))
    return {each: unseal(row, "a committed offset", each) for each, row in rows.items()}


def adopt(txn: kv.Txn, rows: Mapping[bytes, bytes], ends: Ends) -> None:
    """Put what was saved into a `live` that knows nothing of the group: a new boot.

    What is past the end of its partition moves back to that, as in `clamp`.
    """
    for row_key, row in rows.items():
        known = ends(txn, partition_of(row_key))
        kept = row if known is None else _clamped(row, known[1])
        txn.put(row_key, kept)
        if kept != row:
            txn.put(UNSAVED + row_key[1:], b"")


def _clamped(row: bytes, end: int) -> bytes:
    position, committed_ms = unpack(row)
    if position.offset <= end:
        return row
    return pack(position._replace(offset=end), committed_ms)


def clamp(state: kv.Store, partition: bytes, end: int) -> None:
    """Move what groups committed past the recovered end of a partition back to it (P5).

    A power cut took those records.  This comes before anybody appends again:
    else a group that is used later goes on past records it never saw.  The
    leader epoch of a position stays, by which readers notice.
    """

    def step(txn: kv.Txn) -> dict[bytes, bytes | None]:
        past: dict[bytes, bytes | None] = {}
        for group in _groups(txn):
            row_key = key(group, partition)
            row = txn.get(row_key)
            try:
                saved = None if row is None else unseal(row, "a committed offset", row_key)
            except CorruptionError:
                continue  # the group's next user is told; the partition is well
            if saved is not None and (kept := _clamped(saved, end)) != saved:
                past[row_key] = kept
        return past

    past = state.read(step)
    if past:
        state.write(lambda txn: _save(txn, past))


def _groups(txn: kv.Txn) -> Iterator[bytes]:
    """Yield the groups that have rows; by one seek for each."""
    with txn.cursor() as cursor:
        found = cursor.set_range(ROWS)
        while found and cursor.key().startswith(ROWS):
            group = group_of(bytes(cursor.key()))
            yield group
            found = cursor.set_range(ROWS + group + _AFTER_END)


def in_partition(txn: kv.Txn, partition: bytes) -> dict[bytes, bytes]:
    """Return what every group committed in a partition: rows of `live` or, sealed, of `state`."""
    found = ((group, txn.get(key(group, partition))) for group in list(_groups(txn)))
    return {group: bytes(row) for group, row in found if row is not None}


def groups(state: kv.Store) -> set[bytes]:
    """Return the groups of which something was saved."""
    return state.read(lambda txn: set(_groups(txn)))


def checkpoint(live: kv.Store, state: kv.Store) -> int:
    """Save every commit, of any group and process, that is not saved; return how many."""
    if not live.read(_unsaved):
        return 0

    def step(txn: kv.Txn) -> dict[bytes, bytes | None]:
        # Looked up under the lock of `state`: or a slow process saves an older position.
        waiting = live.read(_unsaved)
        _save(txn, waiting)
        return waiting

    waiting = state.write(step)
    live.write(lambda txn: _note_saved(txn, waiting))
    return len(waiting)


def _unsaved(txn: kv.Txn) -> dict[bytes, bytes | None]:
    keys = [ROWS + bytes(found[1:]) for found, _ in kv.rows(txn, UNSAVED)]
    return {each: txn.get(each) for each in keys}


def _save(txn: kv.Txn, waiting: Mapping[bytes, bytes | None]) -> None:
    for row_key, row in waiting.items():
        if row is None:
            txn.delete(row_key)
        else:
            txn.put(row_key, seal(row, row_key))


def _note_saved(txn: kv.Txn, waiting: Mapping[bytes, bytes | None]) -> None:
    for row_key, row in waiting.items():
        # Committed again meanwhile: that one is still to be saved.
        if txn.get(row_key) == row:
            txn.delete(UNSAVED + row_key[1:])


def remove(txn: kv.Txn, keys: Iterable[bytes]) -> None:
    """Forget positions, in a transaction of `live`; the next checkpoint does so in `state`."""
    for row_key in keys:
        if txn.delete(row_key):
            txn.put(UNSAVED + row_key[1:], b"")


def remove_partitions(txn: kv.Txn, partitions: Iterable[bytes]) -> None:
    """Forget what every group committed for partitions that are gone; in `live` or in `state`."""
    gone = list(partitions)
    for group in list(_groups(txn)):
        for partition in gone:
            row_key = key(group, partition)
            txn.delete(row_key)
            txn.delete(UNSAVED + row_key[1:])
