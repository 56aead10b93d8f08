"""`Log.housekeeping`: what keeps the files of a log small, sound and accessible."""

from __future__ import annotations

import grp
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, cast, overload

from embedlog.api.opening import check_choice
from embedlog.catalog import INTERNAL
from embedlog.config import MaintenanceConfig
from embedlog.display import public_names
from embedlog.errors import EmbedlogError, FencedError, InvalidConfigError
from embedlog.forks import new_lock
from embedlog.hints import Hint, alter_topic
from embedlog.partition import PartitionLog
from embedlog.partition.leases import Lease, LeaseInfo, hold, leases
from embedlog.record import TopicPartition
from embedlog.root.root import Root

if TYPE_CHECKING:
    from embedlog.compaction import CleanResult
    from embedlog.compaction.rebatch import RebatchResult
    from embedlog.config.options import MaintenanceOptions
    from embedlog.maintenance import Maintenance
    from embedlog.maintenance.activity import Event
    from embedlog.replication.mend import ReplicaDifference
    from embedlog.retention.retain import RetentionResult
    from embedlog.root.verify import Finding

Progress = Callable[[int, int], None]
"""Called with how much is done, and how much there is: bytes, or records of a conversion."""

_FIRST_SECONDS = 1.0
"""When a log that is open and was not used yet starts its background jobs."""


def now_ms() -> int:
    """Return the time of the system's clock, in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class MaintenanceResults(TypedDict):
    """The results of the jobs; see `Housekeeping.run`."""

    retention: list[RetentionResult]
    """What was deleted."""
    flush: list[PartitionLog]
    """The partitions that were flushed, since ``flush.ms`` had passed."""
    checkpoint: int
    """The number of committed offsets that were saved for after a power cut."""
    offsets: int
    """The number of committed offsets of unused groups that were deleted."""
    producers: int
    """The number of idle producers that were forgotten."""
    compaction: NotRequired[list[CleanResult]]
    """What was compacted; without ``log_cleaner_enable`` there is no such result."""
    rebatch: NotRequired[list[RebatchResult]]
    """Where small batches were gathered; without ``log_cleaner_enable`` there is no such result."""
    keys: int
    """The number of key indexes that were written."""
    activity: list[Event]
    """The changes that were found."""


class Housekeeping:
    """The background jobs of an open log, and what else its files need; see `Log.housekeeping`.

    >>> import tempfile, embedlog
    >>> with tempfile.TemporaryDirectory() as directory, embedlog.open(directory) as log:
    ...     log.housekeeping.retention_bytes = 100 << 30
    ...     log.housekeeping.verify()
    []
    """

    # A mistyped setting, such as `retention_byte`, is refused.
    __slots__ = (
        "__weakref__",
        "_background",
        "_close_lock",
        "_config",
        "_lock",
        "_opening",
        "_root",
    )

    def __init__(self, root: Root, config: MaintenanceConfig | None = None) -> None:
        self._root, self._config = root, config
        """The config is None if this process must not run the jobs in the background."""
        self._background: Maintenance | None = None
        self._lock = new_lock()
        self._close_lock = threading.Lock()
        """Held until the log is closed, if there is a thread that waits for that."""
        self._opening: threading.Thread | None = None

    # Background jobs

    @property
    def background(self) -> Maintenance:
        """The background jobs of this process; created at the first use."""
        from embedlog.maintenance import Maintenance, jobs_of

        with self._lock:
            if self._background is None:
                self._background = Maintenance(
                    self._root,
                    jobs_of(self._config or MaintenanceConfig(), replicated=self._root.replicated),
                    bound_clock=self._root.clock is now_ms,
                    background=self._config is not None,
                )
                # If the program drops the log without closing it, the threads must end too.
                weakref.finalize(self, self._background.request_stop).atexit = False
            return self._background

    def _start(self) -> None:
        """Start the background jobs, unless the thread of `_start_soon` is about to do so."""
        if self._opening is None or not self._opening.is_alive():
            self._start_now()

    def _start_now(self) -> None:
        """Start the background jobs, unless the log was opened without them, or to read."""
        if self._config is not None and self._root.mode == "rw" and not self._root.closed:
            (self._background or self.background).start()

    def _start_soon(self) -> None:
        """Start the background jobs, also if the program only has the log open, and waits.

        In a thread, since their import takes as long as the rest of `open`, which a program
        that ends within a second need not wait for.
        """
        if self._config is not None and self._root.mode == "rw":
            self._close_lock.acquire()
            arguments = weakref.ref(self), self._close_lock
            thread = threading.Thread(
                name="embedlog-open", target=_start_later, args=arguments, daemon=True
            )
            with suppress(RuntimeError):  # if no thread can be started, the first use starts them
                thread.start()
                self._opening = thread

    def _stop_opening(self) -> None:
        """Wait for the thread of `_start_soon`: after it there are background jobs, or none."""
        opening, self._opening = self._opening, None
        if opening is not None:
            self._close_lock.release()
            opening.join()

    def _stop(self) -> None:
        """End the background jobs; the next use starts others."""
        with self._lock:
            background, self._background = self._background, None
        if background is not None:
            background.close()

    def run(self) -> MaintenanceResults:
        """Run every maintenance job once, now, by the log's clock; return the results by job.

        Works with ``maintenance=False`` as well.  If another process runs the jobs in the
        background, it pauses during this call.

        Raises:
            EmbedlogError: A job failed; all others were run.
        """
        return cast("MaintenanceResults", self.background.maintain())

    # Compaction

    def compact(
        self,
        topic: str,
        *,
        force: bool = False,
        progress: Progress | bool = True,
        settings: MaintenanceOptions | Mapping[str, object] | None = None,
    ) -> list[CleanResult]:
        """Compact a topic now, in this thread: keep the last record of each key, at its offset.

        Reading and writing continue meanwhile.  Returns a result for each partition that was
        due, in numbers and, as ``why``, in words.

        Args:
            topic: A topic whose ``cleanup.policy`` has ``compact``.
            force: Compact partitions that are not due too, and the records in the active
                segment, which is rolled first; also remove tombstones that have expired
                where nothing is dirty.
            progress: Called with the bytes done, and all bytes.  By default a progress bar
                in terminals and notebooks; False shows none.
            settings: Kafka's ``log.cleaner.dedupe.buffer.size``, ``.io.buffer.size``,
                ``.io.buffer.load.factor`` and ``.io.max.bytes.per.second``.

        Raises:
            InvalidConfigError: The topic is not compacted, or a setting is unknown.
            CorruptionError, StorageError: A partition could not be compacted; the others were.
        """
        from embedlog.compaction import CleanOptions, select_due, try_clean
        from embedlog.progress import ProgressBar

        root = self._root
        root.context.check_writable()
        info = root.topic(topic)
        if not info.config.compacts:
            call = alter_topic(topic, {"cleanup.policy": "compact"})
            raise InvalidConfigError(
                f"The topic is not compacted: cleanup.policy is {info.config.cleanup_policy!r}",
                topic=topic,
                todo=Hint(f"Call {call}.", f"Run `{call.shell}`."),
            )
        config = MaintenanceConfig.parse(settings or {})
        logs = [root.partition(topic, number) for number in range(info.partitions)]
        failed: dict[PartitionLog, EmbedlogError] = {}
        if not force:
            logs = [cleanable.log for cleanable in select_due(logs, root.clock(), failed)]
        results: list[CleanResult] = []

        def report(done: int, total: int) -> None:
            # As if all partitions had the same size.
            shown(len(results) * total + done, len(logs) * total)

        with ProgressBar(f"compact {topic}") as bar:
            shown = bar if isinstance(progress, bool) else progress
            options = CleanOptions(settings=config, progress=report if progress else None)
            for log in logs:
                # With force, roll first: the active segment is never cleaned.
                results.append(try_clean(log, root.clock(), options, roll=force))
        # All partitions were tried before the first error is raised.
        for error in (*failed.values(), *(result.error for result in results)):
            if error is not None and not isinstance(error, FencedError):
                raise error
        return results

    # Health

    @overload
    def verify(
        self, *, replicas: Literal[False] = False, progress: Progress | None = None
    ) -> list[Finding]: ...
    @overload
    def verify(
        self, *, replicas: Literal[True], progress: Progress | None = None
    ) -> list[ReplicaDifference]: ...
    def verify(
        self, *, replicas: bool = False, progress: Progress | None = None
    ) -> list[Finding] | list[ReplicaDifference]:
        """Read everything and check all checksums; ``[]`` means healthy.  Changes nothing.

        Of a partition with several copies, only that of the leader is read.

        Args:
            replicas: Instead, read all copies that are in sync, and return the first offset at
                which one is damaged, lacks something, or differs.
            progress: Called with the bytes done, and all bytes; with ``replicas``, with the
                number of partitions.
        """
        from embedlog.root.verify import verify_root

        if replicas:
            if not self._root.replicated:
                return []
            from embedlog.api.replicas import several
            from embedlog.replication.mend import verify_copies

            return verify_copies(several(self._root), progress)
        return verify_root(self._root, progress)

    def repair(self, *, dry_run: bool = True, progress: Progress | None = None) -> list[str]:
        """Repair what `verify` finds; return in words what is dropped, or would be.

        Damaged records are dropped; the records around them keep their offsets.  The damaged
        files are moved to ``quarantine/``.  In a log over several directories, what a copy has
        damaged or lacks is first written again from another copy that is in sync; only records
        that are damaged in all of them are dropped.  If it is killed, repeat it.

        Args:
            dry_run: Change nothing.
            progress: Called with the bytes done, and all bytes.
        """
        from embedlog.root.repair import repair_root

        messages: list[str] = []
        mended: set[TopicPartition] = set()
        if self._root.replicated:
            from embedlog.api.replicas import several
            from embedlog.replication.catch_up import repair_copies

            messages, mended = repair_copies(several(self._root), dry_run=dry_run)
        return messages + repair_root(self._root, dry_run, progress, without=mended)

    def rebuild_index(self, topic: str | None = None) -> int:
        """Rebuild the sparse index from the segments; return the number of its entries."""
        from embedlog.root.verify import rebuild_index

        return rebuild_index(self._root, topic)

    def hold(
        self,
        name: str,
        offsets: Mapping[TopicPartition, int] | None = None,
        *,
        seconds: float = 60.0,
    ) -> Lease:
        """Keep records from being deleted for some time, such as for a long query.

        Returns a `Lease`: `renew` it in time, `release` it, or use it in a ``with`` block.
        It ends with a reboot; a snapshot (`Log.snapshot`) does not.  ``retention.bytes.hard``
        limits what leases keep, and `delete_records` ignores them.

        Args:
            name: The name of the lease; an existing one of that name is replaced.
            offsets: The first offset to keep in each partition; by default all log start
                offsets.
            seconds: How long the lease lasts unless it is renewed.

        Raises:
            OffsetOutOfRangeError: Some of the records are deleted already; no lease was made.
        """
        from embedlog.consumer.arguments import to_topic_partition

        if offsets is None:
            partitions = [
                TopicPartition(topic, number)
                for topic in self._root.topics()
                if not topic.startswith(INTERNAL)
                for number in range(self._root.partitions(topic))
            ]
            offsets = {part: self._root.partition(*part).start_offset() for part in partitions}
        first = {to_topic_partition(each): offset for each, offset in offsets.items()}
        return hold(self._root, name, first, seconds)

    def leases(self) -> list[LeaseInfo]:
        """Return the current leases, by name; see `hold`."""
        return list(leases(self._root))

    @property
    def retention_bytes(self) -> int | None:
        """How many bytes all topics together may hold; None means no limit.

        Above the limit the oldest sealed segments of all topics with ``cleanup.policy=delete``
        are deleted.  Setting it applies to all processes, durably, from the next round on.
        """
        return self._root.context.catalog.retention_bytes()

    @retention_bytes.setter
    def retention_bytes(self, limit: int | None) -> None:
        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise InvalidConfigError(
                f"retention_bytes must be a number of bytes or None, got {limit!r}"
            )
        self._root.context.check_writable()
        self._root.context.catalog.put_retention_bytes(limit)

    def share(self, group: str | int, mode: Literal["rw", "r", "none"] = "rw") -> None:
        """Let Spark's executors of other users read the log's records, and stage others.

        The setting is kept in the permissions of the log's directories, so it holds for all
        processes and for files that are made later.  A log is opened by the user who owns it, who
        must be in the group.

        Args:
            group: The name or number of the group of these users.
            mode: ``"r"`` to let them only read; ``"none"`` to end the sharing.

        Raises:
            InvalidConfigError: There is no such group, or mode.
            StorageError: The log belongs to another user, or its user is not in the group.
        """
        check_choice("mode", mode, ("rw", "r", "none"))
        self._root.context.check_writable()
        try:
            number = group if isinstance(group, int) else grp.getgrnam(group).gr_gid
        except KeyError as error:
            raise InvalidConfigError(
                f"There is no group {group!r} on this host", todo="Create it, or pass its number."
            ) from error
        self._root.context.files.share(number, mode)

    def __reduce__(self) -> tuple[Any, ...]:
        return Housekeeping, (self._root, self._config)

    def __dir__(self) -> list[str]:
        """Return the names that completion offers."""
        return public_names(self)

    def __repr__(self) -> str:
        state = "another process, or none, runs the jobs"
        if self._root.closed:
            state = "closed"
        elif self._background is not None and self._background.epoch is not None:
            state = "runs the background jobs"
        return f"<Housekeeping of {self._root.path}: {state}>"


def _start_later(housekeeping: weakref.ref[Housekeeping], close_lock: threading.Lock) -> None:
    """Start the background jobs in a moment, unless the log is closed, or garbage, before."""
    if not close_lock.acquire(timeout=_FIRST_SECONDS) and (opened := housekeeping()) is not None:
        opened._start_now()
