"""Files that nothing names any more: unlinked after a while, by whoever sweeps next.

Whoever looked a file up before its name went opens it still.  Rows in `live` say
which files are *doomed* and when they may go; after a power cut these are gone
too, and what the manifest does not name is garbage, as always.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from embedlog import catalog, kv
from embedlog.catalog import PARTITION_KEY, SegmentInfo
from embedlog.partition import leases
from embedlog.partition.context import Context
from embedlog.partition.state import PartitionState

PENDING_DELETES = b"Z"
"""First letter of the keys in `live` of files that are to be unlinked."""

LITTLE_SPACE = 64 << 20
"""Bytes that are free on a disk that counts as full: nobody waits for a delay there (P10)."""

_SEGMENT = struct.Struct(">QQ")
_DUE = struct.Struct(">QQ")


class PendingDelete(NamedTuple):
    key: bytes
    due: int
    end: int
    path: str

    @property
    def partition(self) -> bytes:
        return self.key[1 : 1 + PARTITION_KEY.size]


def due(log: PartitionState) -> int:
    """Return when a file of this partition may go that is doomed now, in ms since boot."""
    return log.context.files.uptime_ms() + log.config.file_delete_delay_ms


def put(txn: kv.Txn, log: PartitionState, info: SegmentInfo, at: int) -> None:
    """Doom a segment's file, in a transaction of `live`."""
    key = PENDING_DELETES + log.key + _SEGMENT.pack(info.base_offset, info.id)
    txn.put(key, _DUE.pack(at, info.next_offset or 0) + log.path_of(info).encode())


def doomed(live: kv.Store | kv.EmptyStore) -> set[str]:
    """Return the paths of the files that are to be unlinked: no strays, though nothing names them.

    Some may still be named, where a process died in the middle.
    """
    return {row.path for row in live.read(lambda txn: list(_rows(txn, b"")))}


def _rows(txn: kv.Txn, partition: bytes) -> Iterator[PendingDelete]:
    for key, row in kv.rows(txn, PENDING_DELETES + partition):
        at, end = _DUE.unpack_from(row)
        yield PendingDelete(bytes(key), at, end, bytes(row[_DUE.size :]).decode())


def sweep(context: Context, partition: bytes = b"", *, early: bool = False) -> int:
    """Unlink the files whose delay is over and that no lease covers, and return how many.

    Args:
        context: The open log.
        partition: Its key; all of them by default.
        early: Also those whose delay is not over, as on a full disk.

    Raises:
        StorageError: One of them cannot be unlinked; the next sweep tries again.
    """
    now = context.files.uptime_ms()

    def ripe(txn: kv.Txn) -> list[PendingDelete]:
        rows = [row for row in _rows(txn, partition) if early or row.due <= now]
        return [row for row in rows if not _is_held(txn, row, now)]

    found = context.live.read(ripe)
    # Still named: its trim died before it dropped the name, and the next one will.
    named = context.state.read(lambda txn: {row for row in found if _is_named(txn, row)})
    gone = [row for row in found if row not in named]
    if not gone:
        return 0
    for row in gone:
        context.files.unlink(row.path, missing_ok=True)
    for directory in sorted({row.path.rpartition("/")[0] for row in gone}):
        if context.files.exists(directory):
            context.files.sync_directory(directory)
    context.live.write(lambda txn: _forget(txn, gone))
    return len(gone)


def sweep_due(context: Context) -> None:
    """Sweep what is due in all partitions; on a full disk all of it is, and the reserve may go.

    Raises:
        StorageError: As `sweep`.
    """
    full = _is_full(context)
    context.reserve.used_by(lambda: sweep(context, early=full))


def sweep_soon(log: PartitionState) -> None:
    """Unlink what a partition just let go, if nobody is to wait: there is no delay, or no room.

    Raises:
        StorageError: As `sweep`.
    """
    full = _is_full(log.context)
    if full or not log.config.file_delete_delay_ms:
        log.context.reserve.used_by(lambda: sweep(log.context, log.key, early=full))


def _is_full(context: Context) -> bool:
    return context.reserve.short or context.files.free_bytes() < LITTLE_SPACE


def _is_held(txn: kv.Txn, row: PendingDelete, now: int) -> bool:
    """Whether a lease covers it: who has it may have looked the file up before it was replaced."""
    return any(one.offset < row.end for one in leases.held_in(txn, row.partition, now))


def _is_named(txn: kv.Txn, row: PendingDelete) -> bool:
    return txn.get(catalog.SEGMENT + row.key[1:]) is not None


def _forget(txn: kv.Txn, rows: list[PendingDelete]) -> None:
    for row in rows:
        txn.delete(row.key)
