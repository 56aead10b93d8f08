"""Conditions of appends: records are written only if nobody else was faster.

A condition is checked under the partition's lock, which the append holds until it has published:
so of many writers that expect the same offset, in any number of processes, one is first, and all
others find its record.  The check counts all records that were written, also those that no reader
sees yet because they wait for a flush.

A key is looked up before the lock is taken, by the key index; under the lock only what was
appended since is looked at.  Records before that can only be removed meanwhile.  A truncation
begins a leader epoch, and the key is looked up again; a deletion, and the compaction of a
tombstone, count as if they came after the append.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from embedlog.errors import ConflictError, EmbedlogError
from embedlog.partition import flush
from embedlog.partition.tail import Tail
from embedlog.serializers import shortened

if TYPE_CHECKING:
    from embedlog.partition.key_index import FoundRecord
    from embedlog.partition.partition_log import PartitionLog

_READ_AGAIN = "Read what was appended meanwhile, and decide anew."


class AppendCondition:
    """Where a partition, or a key in it, must end for records to be appended.

    For one append, and its retries.

    Args:
        end: The log end offset; None for any.
        key: The stored key whose last record counts; None for none.
        key_offset: The offset of that record; None if the key must be new: it has no record, or
            its last one is a tombstone, which compaction removes.
    """

    def __init__(
        self, end: int | None = None, key: bytes | None = None, key_offset: int | None = None
    ) -> None:
        self.end, self.key, self.key_offset = end, key, key_offset
        self._seen: Tail | None = None
        """The tail up to whose high watermark the key was looked up."""
        self._found: FoundRecord | None = None

    def look_up(self, log: PartitionLog) -> None:
        """Look the key up, without the partition's lock, so that `check` has little left to do."""
        self._seen = None
        # What fails here, as when records are deleted meanwhile, is done by `check`.
        if self.key is not None:
            with suppress(EmbedlogError):
                tail, index = log.tail(), log.key_index
                ends = tail.start_offset, tail.high_watermark
                self._found = next(
                    iter(index.find(self.key, *ends, index.typed_reader(), limit=1)), None
                )
                self._seen = tail

    def check(self, log: PartitionLog, tail: Tail) -> None:
        """Raise unless the condition holds; under the partition's lock.

        A caller that raises the error releases the lock, and calls `publish_found`.

        Args:
            log: The partition.
            tail: Its tail, after which the records would go.

        Raises:
            ConflictError: It does not hold.
            CorruptionError, StorageError: The key cannot be looked up.
        """
        end = tail.log_end_offset
        if self.end is not None and self.end != end:
            raise ConflictError(
                f"The partition ends at offset {end}, and not at {self.end} as expected",
                **log.where,
                offset=end,
                todo=_READ_AGAIN,
            )
        if self.key is None:
            return
        found = self._last_record(log, tail)
        offset = None if found is None else found.offset
        if offset == self.key_offset:
            return
        if found is not None and self.key_offset is None and found.is_tombstone:
            return
        last = "no record" if offset is None else f"its last record at offset {offset}"
        expected = "none" if self.key_offset is None else f"offset {self.key_offset}"
        raise ConflictError(
            f"The key {shortened(self.key)} has {last}, and {expected} was expected",
            **log.where,
            offset=offset,
            key=self.key,
            todo=_READ_AGAIN,
        )

    def _last_record(self, log: PartitionLog, tail: Tail) -> FoundRecord | None:
        assert self.key is not None
        start, found, seen = tail.start_offset, None, self._seen
        if seen is not None and seen.leader_epoch == tail.leader_epoch:
            start, found = max(start, seen.high_watermark), self._found
        return log.key_index.find_last(self.key, start, tail) or found


def publish_found(log: PartitionLog, tail: Tail | None) -> None:
    """Make visible what a condition was refused for; without the partition's lock.

    Its writer may have died before the flush that publishes it: then nobody could read what was
    found, and each writer that waits for it would be refused for ever.

    Raises:
        DurabilityError: The flush failed.
    """
    if tail is not None and log.visible_end(tail) < tail.log_end_offset:
        flush.flush_to(log, tail)
        log.context.wake.advance()
