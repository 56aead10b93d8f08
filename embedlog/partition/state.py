"""What the partitions of an open log share, its `Context`, and the settings that appends read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, get_args

from embedlog import catalog, kv
from embedlog.catalog import Catalog, PartitionInfo, SegmentInfo
from embedlog.config import INT_MAX, LONG_MAX, TopicConfig
from embedlog.errors import (
    ReadOnlyError,
    StorageError,
)
from embedlog.files import Files, WakePage
from embedlog.files.reserve import Reserve
from embedlog.partition import producer_state
from embedlog.partition.bounded_clock import last_reading
from embedlog.partition.log_lock import LogLock
from embedlog.partition.open_files import OpenFiles
from embedlog.partition.producer_state import ProducerState
from embedlog.partition.tail import Tail
from embedlog.segment import SegmentFile

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

_logger = logging.getLogger("embedlog.partition")
T = TypeVar("T")

Durability = Literal["os", "fsync"]
Visibility = Literal["append", "durable"]
DURABILITIES, VISIBILITIES = get_args(Durability), get_args(Visibility)


@dataclass(slots=True)
class Context:
    """The files, the databases and the options of one open log; `Root` creates it."""

    files: Files
    state: kv.Store
    live: kv.Store
    catalog: Catalog
    wake: WakePage
    log_lock: LogLock
    reserve: Reserve
    open_files: OpenFiles
    clock: Callable[[], int]
    durability: str
    visibility: str
    lock_timeout: float
    root: str
    closed: bool = False
    """Set before the files and databases are closed: no operation may begin any more."""

    def check_writable(self) -> None:
        """Raise unless the log may be changed."""
        if not self.files.writable:
            raise ReadOnlyError("The log was opened with mode='r'", path=self.root)

    def check_appendable(self) -> None:
        """Raise unless records may be added: the log is writable, and the disk is not full."""
        if not self.files.writable:
            self.check_writable()
        if self.reserve.short:
            self.reserve.check()

    def bounded_ms(self) -> int:
        """Return the time for decisions that forget something (`bounded_clock`).

        It is the clock of the log as it is, if no process does housekeeping: a clock that a
        program passed is trusted.
        """
        wall_ms, reading = self.clock(), last_reading(self.live)
        return wall_ms if reading is None else reading.bound(wall_ms, self.files.uptime_ms())


@dataclass(slots=True)
class AppendRules:
    """The settings that every append reads: those of the topic and of its active segment.

    Not a named tuple, whose fields take three times as long to read.
    """

    max_segment_ms: int
    """How far the timestamps of the active segment may lie apart before it is rolled."""
    fast_max_bytes: int
    """The largest batch that `append_fast` may write; -1 if the topic requires more of a batch."""
    checks_timestamps: bool
    requires_keys: bool
    uses_append_time: bool
    overdue_age_ms: int | None
    """The age from which on a record is reported by `validation.warn_if_overdue`, if any is."""
    mirror_source: str = ""
    """The setting ``mirror.source``: if there is one, only the mirror of that topic may append."""


def append_rules(config: TopicConfig, active: SegmentInfo) -> AppendRules:
    """Return the rules for appends to a segment."""
    uses_append_time = config.message_timestamp_type == "LogAppendTime"
    farthest = min(config.message_timestamp_before_max_ms, config.message_timestamp_after_max_ms)
    checks_timestamps = not uses_append_time and farthest < LONG_MAX
    overdue_age_ms = None
    if config.retention_clock == "record" and config.deletes and not uses_append_time:
        overdue_age_ms = config.retention_ms if config.retention_ms >= 0 else None
    fast_max_bytes = min(config.max_message_bytes, config.segment_bytes)
    if (
        uses_append_time
        or checks_timestamps
        or config.compacts
        or active.column_flags
        or active.schema_version
        or config.segment_max_offset_span < INT_MAX
        or has_flush_interval(config)
        or config.mirror_source
    ):
        fast_max_bytes = -1
    return AppendRules(
        max_segment_ms(config, active),
        fast_max_bytes,
        checks_timestamps,
        config.compacts,
        uses_append_time,
        overdue_age_ms,
        config.mirror_source,
    )


def max_segment_ms(config: TopicConfig, segment: SegmentInfo) -> int:
    """Return how far the timestamps of a segment may lie apart before it is rolled."""
    longest = config.segment_ms
    if config.compacts:
        longest = min(longest, config.max_compaction_lag_ms)
    if config.segment_jitter_ms:
        # Fixed for a segment, spread over segments (A16), and always less than `longest` (D6).
        longest -= segment.id * 2654435761 % (min(config.segment_jitter_ms, longest - 1) + 1)
    return longest


def has_flush_interval(config: TopicConfig) -> bool:
    """Whether flush.messages or flush.ms ever requires a flush; by default neither does."""
    return min(config.flush_messages, config.flush_ms) < LONG_MAX


# Flushing the files of one partition, and noting in `state` how far that has come


def sync_files(log: PartitionLog, tail: Tail, file: SegmentFile) -> None:
    """Flush the older segments that were not flushed yet, the active one, and their names.

    Raises:
        DurabilityError: A flush failed; the partition is read-only from now on.
    """
    sync_data(log, tail, file)
    if log.named_segment_id != tail.segment_id:
        sync_entries(log, tail.segment_id)


def sync_data(log: PartitionLog, tail: Tail, file: SegmentFile) -> None:
    """Flush the segments, as `sync_files` does, but not their names."""
    if tail.durable_offset < tail.base_offset:
        for info in list(log.segments.values()):
            if info.sealed and tail.durable_offset < info.next_offset <= tail.base_offset:
                _sync_sealed(log, info)
    log.sync(file)


def _sync_sealed(log: PartitionLog, info: SegmentInfo) -> None:
    try:
        file = log.open_segment(info, write=True)
    except StorageError as error:
        log.refresh()
        current = log.segments.get(info.base_offset)
        if not error.missing or (current is not None and current.id == info.id):
            raise
        return  # Compacted meanwhile, which flushes first.
    log.sync(file)


def sync_entries(log: PartitionLog, segment_id: int) -> None:
    """Flush the names of new files: without it a power cut loses the whole file.

    Raises:
        DurabilityError: A flush failed; the partition is read-only from now on.
        StorageError: A directory could not be opened, so nothing was tried and nothing is lost.
    """
    for directory in log.directories:
        log.sync_directory(directory)
    log.note_names_synced(segment_id)


def put_recovery_point(
    txn: kv.Txn, key: bytes, flushed: Tail, producers: dict[int, ProducerState]
) -> None:
    """Note in `state` that everything below the end of a tail is on the disk.

    The recovery point only moves forward.
    """
    info, offset = catalog.PARTITIONS.get(txn, key) or PartitionInfo(), flushed.log_end_offset
    if offset > info.recovery_offset:
        changed = info._replace(
            recovery_offset=offset, appended_ms=flushed.appended_ms, appended_offset=offset
        )
        catalog.PARTITIONS.put(txn, key, value=changed)
        producer_state.SNAPSHOTS.put(txn, key, value=producers)


class Partitions(Protocol):
    """Gives the partitions of an open log to the packages below it; `root.root.Root` does."""

    @property
    def context(self) -> Context:
        """What the partitions share; another one in a forked child."""

    def partition(self, topic: str, number: int) -> PartitionLog:
        """Return one partition.

        Raises:
            UnknownTopicOrPartitionError: There is no such partition.
        """
