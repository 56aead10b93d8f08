"""What the partitions of an open log share: its clock, its lock, its open files, its settings."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

from embedlog import keyspace, kv
from embedlog.catalog import Catalog, SegmentInfo
from embedlog.config import INT_MAX, LONG_MAX, TopicConfig
from embedlog.errors import (
    ReadOnlyError,
)
from embedlog.files import Files, WakePage
from embedlog.files.reserve import Reserve
from embedlog.groups import offsets

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

# The clock.  If it is set two years ahead, every record seems older than a week and every
# producer idle for long.  So time that passed by the wall clock only counts up to an hour; the
# uptime of the machine comes from a clock that is never set.  A step back counts fully, because
# it deletes nothing.  Housekeeping keeps what both clocks showed in `live`.


MOST_AHEAD_MS = 3_600_000
"""How much of the time that passed by the wall clock only counts at one reading."""


class ClockReading(NamedTuple):
    """What both clocks showed at one instant."""

    believed_ms: int
    """Milliseconds since 1970, as far as they are trusted."""
    uptime_ms: int

    def bound(self, wall_ms: int, uptime_ms: int) -> int:
        """Return how far to trust what the wall clock shows now."""
        elapsed = max(uptime_ms - self.uptime_ms, 0)
        return min(wall_ms, self.believed_ms + elapsed + MOST_AHEAD_MS)


CLOCK_READING = keyspace.CLOCK_READING.typed(ClockReading)


def last_reading(live: kv.Store) -> ClockReading | None:
    """Return the last reading; None if no process did housekeeping since the boot.

    A damaged row counts as none: values in `live` have no checksum, and recovery, which
    calls this, must not depend on them.
    """
    key = CLOCK_READING.key()
    row = live.get(key)
    return None if row is None else CLOCK_READING.load_if_valid(key, row)


# The lock of the whole log, to which a publication escalates from too many locks of partitions.
#
# Each lock of a partition costs a descriptor for as long as it is held.  A publication over more
# partitions than its process can hold takes this lock exclusively instead, and notes that in
# `state`: then it locks each partition once, to wait for the operation in it, and gives the
# descriptor back.  Others look at the note when they have a partition's lock, which costs them
# a few loads, and if there is one they give that lock back and wait here.  An operation on
# several partitions at once takes this lock first, shared, since it must not wait here while it
# holds one of theirs.
#
# If the process dies, the kernel frees the lock, and the next to wait removes the note.


_PATH = "locks/log"


class LogLock:
    """The lock of one log, for all threads of one handle; its note is in ``state``."""

    def __init__(self, files: Files, state: kv.Store) -> None:
        self._files, self._state = files, state
        self.free_version = -1
        """The last version of ``state`` without the note: while it is current, the lock is free."""

    def is_free(self) -> bool:
        """Return whether nobody holds it exclusively; call it with the lock of a partition."""
        row, version = self._state.get_at(keyspace.LOG_LOCKED.key())
        if row is None:
            self.free_version = version
        return row is None

    @contextmanager
    def shared(self, timeout: float) -> Iterator[None]:
        """Keep others from holding it exclusively.

        Raises:
            LockTimeoutError: A process does; ``pid`` says which.
        """
        with self._files.opened(_PATH, write=True, create=True) as fd:
            self._files.lock(fd, timeout, shared=True)
            if not self.is_free():  # Its process died.
                self._state.write(keyspace.LOG_LOCKED.delete)
            yield

    @contextmanager
    def exclusive(self, timeout: float) -> Iterator[None]:
        """Keep others out of all partitions; the caller must lock each of them once.

        Raises:
            LockTimeoutError: A process holds it; ``pid`` says which, if there is only one.
        """
        with self._files.opened(_PATH, write=True, create=True) as fd:
            self._files.lock(fd, timeout)
            try:
                self._state.write(lambda txn: keyspace.LOG_LOCKED.put(txn, value=None))
                yield
            finally:
                self._state.write(keyspace.LOG_LOCKED.delete)


# Which partitions and readers hold descriptors, and how many may at once.  A process that uses
# thousands of partitions must not run out of them: the files opened longest ago are closed first,
# and opened again when they are needed.


LEAST, MOST = 16, 1000
"""How many holders keep their descriptors; by default an eighth of the process's limit."""


class FileHolder(Protocol):
    """Opens files, and can close them between two uses."""

    def release_files(self) -> bool:
        """Close the open files, unless they are in use; return whether they were closed."""


def limit_for(descriptors: int) -> int:
    """Return how many holders may keep files open in a process with this many descriptors."""
    return max(LEAST, min(MOST, descriptors // 8))


class OpenFiles:
    """The holders that have files open, in the order in which they opened them.

    Any thread may call it.  A holder that is garbage closes its files by itself, and
    does not count.

    Args:
        limit: How many holders may have files open before the oldest close theirs.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._holders: dict[int, weakref.ref[FileHolder]] = {}

    def opened(self, holder: FileHolder) -> None:
        """Note that a holder has opened a file; the oldest holders close theirs if need be."""
        with self._lock:
            self._holders.pop(id(holder), None)
            self._holders[id(holder)] = weakref.ref(holder)
            surplus = []
            if len(self._holders) > self.limit:
                # The oldest eighth at once: one pass for many openings.
                alive = [item for item in self._holders.items() if item[1]() is not None]
                keep = self.limit - self.limit // 8
                surplus, self._holders = alive[:-keep], dict(alive[-keep:])
        for number, reference in surplus:
            oldest = reference()
            if oldest is not None and not oldest.release_files():
                with self._lock:
                    self._holders.setdefault(number, reference)


# What they share


Durability = Literal["os", "fsync"]
Visibility = Literal["append", "durable"]
DURABILITIES, VISIBILITIES = get_args(Durability), get_args(Visibility)


class Context:
    """The files, the databases and the options of one open log; `Root` creates it.

    Args:
        parts: All of its attributes but `closed`.
    """

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
    settle: Callable[[Context, bytes, Collection[bytes], bool], None]
    take_checkpoint: Callable[[Context], None]
    partition_of: Callable[[bytes], PartitionLog | None]
    """Returns a partition by its key; None if its topic was deleted."""
    checkpointing: threading.Lock
    """Held by the thread that takes a checkpoint."""
    checkpoint_due: float = 0.0
    """When a transaction that is not flushed takes the next checkpoint, on the monotonic clock."""
    checkpointed: int = 0
    """The version of `live` that was flushed when one looked last."""
    closed = False
    """Set before the files and databases are closed: no operation may begin any more."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

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

    def settle_offsets(
        self, group: bytes, partitions: Collection[bytes], *, abort: bool = True
    ) -> None:
        """Decide the publications that are about to commit offsets; see `journal`."""
        self.settle(self, group, partitions, abort)

    def checkpoint(self, timeout: float | None = None) -> int:
        """Make what groups and transactions have committed survive a power cut.

        Waits ``timeout`` seconds for each lock, by default the ``lock_timeout`` of the log.

        Returns:
            How many offsets were saved, if there were no transactions.
        """
        saved = offsets.checkpoint(self.live, self.state, timeout)
        if saved is None:
            self.take_checkpoint(self)
        return saved or 0

    def bounded_ms(self) -> int:
        """Return the time for decisions that forget something (`ClockReading`).

        It is the clock of the log as it is, if no process does housekeeping: a clock that a
        program passed is trusted.
        """
        wall_ms, reading = self.clock(), last_reading(self.live)
        return wall_ms if reading is None else reading.bound(wall_ms, self.files.uptime_ms())


class AppendRules:
    """The settings that every append reads: those of the topic and of its active segment.

    Not a named tuple, whose fields take three times as long to read.
    """

    def __init__(self, config: TopicConfig, active: SegmentInfo) -> None:
        self.max_segment_ms = max_segment_ms(config, active)
        """How far the timestamps of the active segment may lie apart before it is rolled."""
        self.uses_append_time = config.message_timestamp_type == "LogAppendTime"
        before, after = (
            config.message_timestamp_before_max_ms,
            config.message_timestamp_after_max_ms,
        )
        self.checks_timestamps = not self.uses_append_time and min(before, after) < LONG_MAX
        self.requires_keys = config.compacts
        self.overdue_age_ms: int | None = None
        """The age from which on a record is reported by `validation.warn_if_overdue`, if any is."""
        if config.retention_clock == "record" and config.deletes and not self.uses_append_time:
            self.overdue_age_ms = config.retention_ms if config.retention_ms >= 0 else None
        self.mirror_source = config.mirror_source
        """If there is one, only the mirror of that topic may append."""
        self.fast_max_bytes = min(config.max_message_bytes, config.segment_bytes)
        """The largest batch that `append_fast` may write; -1 if the topic requires more of it."""
        if (
            self.uses_append_time
            or self.checks_timestamps
            or config.compacts
            or active.tombstones
            or active.schema_version
            or config.segment_max_offset_span < INT_MAX
            or has_flush_interval(config)
            or config.mirror_source
        ):
            self.fast_max_bytes = -1
        self.fast_flags = active.column_flags
        """Those of `NOT_FAST` that the active segment has."""


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
