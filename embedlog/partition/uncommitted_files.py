"""Segment files that the manifest does not name, but a row of `state` does.

A file on its way into the manifest or out of it.  While its row is there no process
takes it for garbage, and after a crash the next process knows what to remove.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from embedlog import catalog, kv
from embedlog.catalog import SegmentInfo
from embedlog.keyspace import UNCOMMITTED_FILES

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog


def new_file(log: PartitionLog, segment: SegmentInfo) -> SegmentInfo:
    """Return a segment with a new id, whose file may be created now: it is uncommitted."""

    def step(txn: kv.Txn) -> SegmentInfo:
        new = segment._replace(id=catalog.next_number(txn, "segment"))
        UNCOMMITTED_FILES.put(txn, log.key, *new.key, value=None)
        return new

    return log.context.state.write(step)


def uncommitted_files(log: PartitionLog) -> list[SegmentInfo]:
    """Return the uncommitted files of a partition, as the disk has them too."""

    def step(txn: kv.Txn) -> list[SegmentInfo]:
        segments = catalog.uncommitted_files(txn, log.key)
        for segment in segments:
            UNCOMMITTED_FILES.put(txn, log.key, *segment.key, value=None)
        return segments

    # A commit, though it changes nothing: after a commit that failed it is unknown what is
    # on the disk, and a file must not be unlinked if a power cut may bring its name back.
    return log.context.state.write(step)


def drop_names(txn: kv.Txn, key: bytes, segments: Sequence[SegmentInfo]) -> None:
    """Take segments off the manifest, in a transaction of `state`; `discard` removes the files."""
    for segment in segments:
        catalog.drop_segment(txn, key, segment)
        UNCOMMITTED_FILES.put(txn, key, *segment.key, value=None)


def discard(log: PartitionLog, segments: Sequence[SegmentInfo]) -> None:
    """Unlink files that were never in the manifest, or that no reader can be looking for."""
    for segment in segments:
        log.context.files.unlink(log.path_of(segment), missing_ok=True)
    if segments:
        forget(log, segments)


def forget(log: PartitionLog, segments: Sequence[SegmentInfo]) -> None:
    """Delete the rows of files that are unlinked, or that a row of `live` says to unlink."""

    def step(txn: kv.Txn) -> None:
        for segment in segments:
            UNCOMMITTED_FILES.delete(txn, log.key, *segment.key)

    # After that, not before: a row that is deleted first would leave garbage behind.
    log.context.state.write(step)
