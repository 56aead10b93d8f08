"""The consumer: assignment, positions, polling, iteration and commits."""

from __future__ import annotations

import gc
import re
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack
from functools import partial
from itertools import chain
from time import monotonic
from types import EllipsisType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar, Unpack, overload

from embedlog.catalog import INTERNAL
from embedlog.config import ConsumerConfig, describe_network_settings
from embedlog.consumer.arguments import (
    SingleThreadGuard,
    check_column_names,
    check_max_records,
    check_topics,
    explicitly_enabled,
    parse_offsets,
    to_topic_partition,
)
from embedlog.consumer.assignment import Assignment
from embedlog.consumer.committer import Callback
from embedlog.consumer.counts import ConsumerCounts
from embedlog.consumer.cursor import PartitionCursor
from embedlog.consumer.deserialize import ColumnQuery, RecordDecoder, check_columns
from embedlog.consumer.group_client import GroupClient
from embedlog.consumer.rebalance_notifier import ConsumerRebalanceListener
from embedlog.consumer.static_assignment import StaticAssignment
from embedlog.consumer.waiter import Waiter
from embedlog.display import plural, public_names
from embedlog.errors import (
    ClosedError,
    EmbedlogError,
    IllegalStateError,
    InvalidConfigError,
    InvalidTopicError,
    UnknownTopicOrPartitionError,
    hint_at_missing,
)
from embedlog.lazy import asyncio, logging
from embedlog.listeners import GROUP, Client
from embedlog.record import (
    ConsumerGroupMetadata,
    K_co,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    Record,
    TopicPartition,
    V_co,
)
from embedlog.root.root import Root, check_root
from embedlog.tasks import DONE

if TYPE_CHECKING:
    from concurrent.futures import Future

    import pyarrow as pa

    from embedlog.config.options import ConsumerOptions
    from embedlog.metrics import Metrics, Sample
    from embedlog.schemas.row_filter import Where

_log = logging.getLogger("embedlog.consumer")
_HINTS = {
    "consume": "call poll(timeout_ms, max_records)",
    "get_watermark_offsets": "call beginning_offsets([partition]) and end_offsets([partition])",
    "list_topics": "call topics()",
    "store_offsets": "call commit(offsets)",
}
"""What to call instead of methods of Kafka's other consumers."""
T = TypeVar("T")
Ends = dict[TopicPartition, int]
Until = Literal["end"] | Mapping[TopicPartition, int] | None

_CLOSE_SECONDS = 30.0
"""How long `close` waits for another thread."""
_UNLIMITED = 1 << 62
_TURN_SECONDS = 0.01
"""How long a task reads at most before it looks at the group, and lets other tasks run."""
_GC_THRESHOLD = 700
"""Fewer new records do not start the garbage collector (CPython's first threshold)."""


class Consumer(Generic[K_co, V_co]):
    """Reads partitions of a log root, keeping a position in each.

    Given topics, it reads all their partitions, including those added later (from their
    beginning), and waits for topics that do not exist yet.  Without topics, use `assign`
    or `subscribe`.  The first poll or `position` that needs a position resolves it: to the
    offset that the group committed, or else according to ``auto_offset_reset``, whose default
    ``"latest"`` is the end at the time of the assignment.

    While there are no new records it sleeps in the kernel, on the wake page that every
    append of every process advances: it uses no CPU and sees a record within microseconds.

    A consumer must be used by one thread at a time; only `wakeup`, `assignment`, `paused`,
    `metrics` and `close` may be called from others.

    The tasks of an event loop use it with ``async for``, `getone` and `getmany`, ``await`` of
    `commit`, and ``async with`` or `aclose`; its other methods wait for nothing.

    Args:
        root: The log to read.
        topics: The topics to read.
        config: See `embedlog.config.ConsumerConfig`, in either spelling.

    Raises:
        InvalidConfigError: A setting is unknown or invalid.
        InvalidTopicError: A topic is blank or not a str.
    """

    _decoder_type: ClassVar[type[RecordDecoder]] = RecordDecoder

    def __init__(
        self,
        root: Root | None = None,
        *topics: str,
        **config: Unpack[ConsumerOptions[K_co, V_co]],
    ) -> None:
        root = check_root(root, "embedlog.open(path).consumer(topic, ...)")
        self.config = ConsumerConfig.parse(config)
        if ignored := describe_network_settings(config):
            _log.info("The consumer has no network, and ignores %s", ignored)
        if self.config.group_id is None and explicitly_enabled(config, "enable_auto_commit"):
            raise InvalidConfigError(
                "enable_auto_commit needs a group to commit for",
                todo="Set group_id, or leave enable_auto_commit out.",
                settings=("enable_auto_commit", "group_id"),
            )
        check_topics(topics)
        self._root, self._init_topics, self._init_config = root, topics, config
        self._counts = counts = ConsumerCounts()
        decoder = self._decoder_type(self.config, root)
        group_id, client_id = self.config.group_id, self.config.client_id
        client = Client(GROUP, group_id or "", client_id or "")
        self._assignment = Assignment(root, decoder, self._committed_position, counts, client)
        self._create = create = explicitly_enabled(config, "allow_auto_create_topics")
        self._group = GroupClient(root, self.config, self._assignment, counts, create)
        self._subscription: StaticAssignment | GroupClient | None = None
        """Keeps the assignment up to date; None where the program assigns partitions."""
        self._guard = SingleThreadGuard()
        self._waiter = Waiter(root, self.config, self._guard)
        self._wait_began = monotonic()
        """When fetch_max_wait_ms began (with fetch_min_bytes)."""
        self._iterator: Iterator[Record[K_co, V_co]] | None = None
        self._stop: Ends | None = None
        self._streams: list[Consumer[K_co, V_co]] = []
        self._taken: Iterator[Record[K_co, V_co]] = iter(())
        """What `getone` returns next."""
        self._turn_ends = 0.0
        """When a task that reads looks at the group again, and lets other tasks run."""
        if topics:
            self.subscribe(topics)

    def __dir__(self) -> list[str]:
        """Return the names that completion offers."""
        return public_names(self)

    def __repr__(self) -> str:
        what = ", ".join(sorted(self.subscription())) or plural(len(self._assignment), "partition")
        group = f" in group {self.config.group_id!r}" if self.config.group_id else ""
        return f"<Consumer of {what}{group}{', closed' if self._guard.closed else ''}>"

    def _repr_html_(self) -> str:
        """For notebooks: the assigned partitions with position and lag."""
        from embedlog.display import html_table

        heads = ("topic", "partition", "position", "log end", "lag", "state")
        try:
            with self._guard:
                cursors = sorted(self._assignment, key=lambda cursor: cursor.partition)
                cells = list(map(_cells, cursors))
        except EmbedlogError:
            # Closed, or another thread is polling, or a topic was deleted.
            return html_table(repr(self)[1:-1], (), ())
        title = repr(self)[1:-1] if cells else f"{repr(self)[1:-1]}, no partitions assigned yet"
        return html_table(title, heads, cells)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments of the constructor, not the positions."""
        return partial(Consumer, self._root, *self._init_topics, **self._init_config), ()

    # Assignment

    def subscribe(
        self,
        topics: Collection[str] = (),
        pattern: str | None = None,
        listener: ConsumerRebalanceListener | None = None,
    ) -> None:
        """Subscribe to topics: the group assigns their partitions to its members.

        Replaces the previous subscription; takes effect at the next poll.  Topics that do not
        exist yet are waited for.  A consumer without a group reads all partitions of the topics.

        Args:
            topics: Names of topics; an empty list is the same as `unsubscribe`.
            pattern: Instead of names: a regular expression that matches whole names.
            listener: Notified when partitions are assigned and revoked; never without a group.

        Raises:
            IllegalStateError: The program assigned partitions before.
        """
        with self._guard:
            self._group.check_subscribe(topics, pattern)
            if self._subscription is None and len(self._assignment):
                raise IllegalStateError(
                    "The consumer has partitions from assign()",
                    todo="Call unsubscribe first, or use another consumer.",
                )
            if not topics and pattern is None:
                self.unsubscribe()
            elif self.config.group_id is None:
                self._subscription = self._static_assignment(topics, pattern)
            else:
                self._group.check_writable()
                self._group.subscribe(topics, pattern, listener)
                self._subscription = self._group
            self._waiter.wake_tasks()

    def _static_assignment(self, topics: Collection[str], pattern: str | None) -> StaticAssignment:
        names: Collection[str] | Callable[[], set[str]] = topics
        if pattern is not None:
            names = partial(self._group.matching_topics, re.compile(pattern))
        reset = self.config.auto_offset_reset
        return StaticAssignment(self._root, self._assignment, names, reset, self._create)

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions; those already assigned keep their positions.

        With a ``group_id``, new ones begin at the group's committed offsets, and commits are
        made for the group, as long as the group has no members.

        Raises:
            IllegalStateError: The consumer was created with topics, or subscribed.
            UnknownTopicOrPartitionError: A partition does not exist.
        """
        with self._guard:
            if self._subscription is not None:
                raise IllegalStateError(
                    "The consumer was created with topics, or subscribed to topics",
                    todo="Call unsubscribe first, or create one without topics.",
                )
            self._group.committer.auto_commit_now()  # of partitions that are replaced (E20)
            reset = self.config.auto_offset_reset
            for cursor in self._assignment.replace(map(to_topic_partition, partitions), reset):
                cursor.start_at(reset)
            self._waiter.wake_tasks()

    def assignment(self) -> set[TopicPartition]:
        """Return the assigned partitions; in a group, those as of the last poll.

        May be called from any thread.
        """
        # Otherwise another thread polls, which keeps the assignment up to date.
        if self._guard.try_enter():
            try:
                if isinstance(self._subscription, StaticAssignment):
                    self._subscription.update()
            finally:
                self._guard.__exit__()
        return self._assignment.partitions()

    def subscription(self) -> set[str]:
        """Return the topics that it was created with or subscribed to."""
        return set(self._subscription.topics) if self._subscription is not None else set()

    def unsubscribe(self) -> None:
        """Leave the group, and remove all partitions from the assignment."""
        with self._guard:
            self._group.notifier.check_not_in_callback("unsubscribe")
            try:
                self._group.leave()
            finally:
                self._subscription = None

    def _update_assignment(self) -> None:
        if self._subscription is not None:
            self._subscription.update()

    # Commits

    def commit(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None,
        timeout_ms: float | None = None,
    ) -> Awaitable[None]:
        """Commit positions, from which the next owners of the partitions continue.

        All of them are committed, or none.  Auto-commit does not change what was committed
        until further records are returned.  A commit survives the death of any process at
        once, and a power cut with ``durability="fsync"``; otherwise within a second, which
        with `assign` takes a later poll, commit or close.

        Args:
            offsets: The next offset to read, by partition; None is all resolved positions.
            timeout_ms: How long to wait for the lock of commits; by default
                ``default_api_timeout_ms``, or the log's ``lock_timeout`` if that is less.

        Returns:
            What a task may await, although the commit has been made: it takes microseconds,
            and with ``durability="fsync"`` as long as a flush.

        Raises:
            InvalidGroupIdError: The consumer has no group.
            CommitFailedError: Another member owns one of the partitions.
            LockTimeoutError: Another process holds the lock for longer; nothing was committed.
            ValueError, TypeError, OffsetMetadataTooLargeError: The offsets are invalid.
        """
        with self._guard:
            self._group.check_writable()
            self._group.committer.commit_sync(parse_offsets(offsets), timeout_ms)
        return DONE

    def commit_async(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None,
        callback: Callback | None = None,
    ) -> Future[Mapping[TopicPartition, OffsetAndMetadata]]:
        """Commit as `commit` does, but report failures to the future and the callback.

        Args:
            offsets: As in `commit`.
            callback: Called with the offsets and the exception or None, in the order of the
                commits, on this thread by a later `poll`, `commit` or `close`.
        """
        with self._guard:
            self._group.check_writable()
            return self._group.committer.commit_async(parse_offsets(offsets), callback)

    @overload
    def committed(
        self,
        partition: TopicPartition,
        metadata: Literal[False] = False,
        timeout_ms: float | None = None,
    ) -> int | None: ...
    @overload
    def committed(
        self, partition: TopicPartition, metadata: Literal[True], timeout_ms: float | None = None
    ) -> OffsetAndMetadata | None: ...
    @overload
    def committed(
        self, partition: TopicPartition, metadata: bool, timeout_ms: float | None = None
    ) -> int | OffsetAndMetadata | None: ...
    def committed(
        self, partition: TopicPartition, metadata: bool = False, timeout_ms: float | None = None
    ) -> int | OffsetAndMetadata | None:
        """Return the offset that the group committed last, None without a commit.

        Args:
            partition: Any partition; it need not be assigned.
            metadata: Whether to return an `OffsetAndMetadata`.
            timeout_ms: Accepted for kafka-python; reading a commit waits for nothing.

        Raises:
            InvalidGroupIdError: The consumer has no group.
            UnknownTopicOrPartitionError: The partition does not exist.
        """
        with self._guard:
            committed = self._group.committed(to_topic_partition(partition))
        return committed if metadata or committed is None else committed.offset

    def _committed_position(self, partition: TopicPartition) -> OffsetAndMetadata | None:
        return None if self.config.group_id is None else self._group.committed(partition)

    def group_metadata(self) -> ConsumerGroupMetadata:
        """Return the identity of this consumer in its group."""
        return self._group.metadata()

    def _offsets_for_transaction(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None
    ) -> tuple[Mapping[TopicPartition, OffsetAndMetadata], ConsumerGroupMetadata, Client]:
        """Return what `Producer.commit_offsets` commits, and who does.

        Args:
            offsets: As in `commit`.

        Raises:
            IllegalStateError: The consumer commits by itself.
            InvalidGroupIdError: The consumer has no group.
        """
        with self._guard:
            self._group.check_writable()
            if self.config.enable_auto_commit:
                raise IllegalStateError(
                    "The consumer commits by itself, also what no transaction has committed",
                    todo="Set enable_auto_commit=False.",
                )
            positions = self._group.committer.chosen(parse_offsets(offsets))
            return positions, self._group.metadata(), self._assignment.client

    # Positions

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Set the position; an offset out of range is handled when it is read.

        Raises:
            ValueError: The offset is negative.
            IllegalStateError: The partition is not assigned.
        """
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise TypeError(f"offset must be an int, got {offset!r}")
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")
        with self._guard:
            self._cursor(partition).seek(offset)
            self._waiter.wake_tasks()

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Have the next poll continue at the first offsets of these partitions, or of all."""
        self._request_reset(partitions, "earliest")

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Have the next poll continue at the ends of these partitions, or of all."""
        self._request_reset(partitions, "latest")

    def _request_reset(self, partitions: tuple[TopicPartition, ...], strategy: str) -> None:
        with self._guard:
            # A member with partitions rebalances, and auto-commits, in polls only (E20).
            if isinstance(self._subscription, StaticAssignment) or not len(self._assignment):
                self._update_assignment()
            for cursor in list(map(self._cursor, partitions)) if partitions else self._assignment:
                self._assignment.request_reset(cursor, strategy)
            self._waiter.wake_tasks()

    def position(self, partition: TopicPartition, timeout_ms: float | None = None) -> int:
        """Return the offset of the next record to be returned.

        Args:
            partition: An assigned partition.
            timeout_ms: Accepted for kafka-python.

        Raises:
            IllegalStateError: The partition is not assigned.
            NoOffsetForPartitionError: It has no position, and auto_offset_reset is "none".
        """
        with self._guard:
            return self._cursor(partition).position()

    def current_lag(self, partition: TopicPartition) -> int | None:
        """Return how many offsets are left to the end; None before the first poll."""
        with self._guard:
            return self._cursor(partition).lag()

    def highwater(self, partition: TopicPartition) -> int:
        """Return the offset of the record that is written next; kafka-python's name.

        Raises:
            IllegalStateError: The partition is not assigned.
        """
        with self._guard:
            return self._cursor(partition).log.end_offset()

    def pause(self, *partitions: TopicPartition) -> None:
        """Return no records of these partitions until `resume`; positions stay."""
        with self._guard:
            for cursor in list(map(self._cursor, partitions)):
                cursor.recall_records()
                cursor.paused = True

    def resume(self, *partitions: TopicPartition) -> None:
        """Return records of these partitions again."""
        with self._guard:
            for cursor in list(map(self._cursor, partitions)):
                cursor.paused = False
            self._waiter.wake_tasks()

    def paused(self) -> set[TopicPartition]:
        """Return the partitions that are paused; may be called from any thread."""
        return {cursor.partition for cursor in self._assignment.snapshot if cursor.paused}

    def _cursor(self, partition: TopicPartition) -> PartitionCursor:
        return self._assignment.cursor(to_topic_partition(partition))

    # Topics and offsets of the log

    def topics(self) -> set[str]:
        """Return the names of all topics except internal ones, as kafka-python does."""
        return {name for name in self._root.topics() if not name.startswith(INTERNAL)}

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        """Return the partition numbers of a topic, None if it does not exist."""
        try:
            return set(range(self._root.partitions(topic)))
        except (UnknownTopicOrPartitionError, InvalidTopicError):
            return None

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> Ends:
        """Return the log start offset of each partition; they need not be assigned.

        Raises:
            UnknownTopicOrPartitionError: A partition does not exist.
        """
        chosen = map(to_topic_partition, partitions)
        return {tp: self._root.partition(*tp).start_offset() for tp in chosen}

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> Ends:
        """Return the high watermark of each partition: the offset of its next record.

        Raises:
            UnknownTopicOrPartitionError: A partition does not exist.
        """
        chosen = map(to_topic_partition, partitions)
        return {tp: self._root.partition(*tp).end_offset() for tp in chosen}

    def offsets_for_times(
        self, timestamps: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return the first record at or after a time in each partition, or None.

        Args:
            timestamps: Milliseconds since 1970 by partition.

        Raises:
            ValueError: A timestamp is negative.
            UnknownTopicOrPartitionError: A partition does not exist.
        """
        for partition, timestamp in timestamps.items():
            if timestamp < 0:
                raise ValueError(f"timestamp of {partition} must not be negative, got {timestamp}")
        return {
            tp: self._root.partition(*to_topic_partition(tp)).offset_for_timestamp(timestamp)
            for tp, timestamp in timestamps.items()
        }

    # Reading

    def poll(
        self, timeout_ms: float | None = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Record[K_co, V_co]]]:
        """Return the next records by partition, as soon as there are any.

        Args:
            timeout_ms: How long to wait for a record; 0 does not wait, None waits forever.
            max_records: The maximum over all partitions; None is ``max_poll_records``.

        Raises:
            IllegalStateError: There is no subscription or assignment, or another thread is
                using the consumer.
            WakeupError: `wakeup` was called; no record is lost.
            OffsetOutOfRangeError, NoOffsetForPartitionError: auto_offset_reset is "none".
            LogTruncatedError: Likewise, and records already returned were truncated;
                ``next_offset`` is where to seek to.
            CorruptBatchError, RecordDeserializationError: The record at the position cannot
                be returned.  Those before it were; seek past it to continue.
        """
        limit = check_max_records(max_records) or self.config.max_poll_records
        with self._guard:
            return self._wait_for(partial(self._fetch_records, limit), timeout_ms)

    def poll_batches(
        self,
        timeout_ms: float | None = 0,
        max_records: int | None = None,
        columns: Sequence[str] | None = None,
        where: Where | None = None,
    ) -> dict[TopicPartition, list[pa.RecordBatch]]:
        """Poll, but return `pyarrow.RecordBatch` objects, one for each stored batch.

        Args:
            timeout_ms: As in `poll`.
            max_records: The maximum of rows over all partitions; None is as many as one fetch
                brings (``max_partition_fetch_bytes``, ``fetch_max_bytes``).
            columns: As in `iter_batches`.
            where: As in `iter_batches`.

        Raises:
            Exception: As `poll`; ValueError, if a column does not exist.
        """
        limit = check_max_records(max_records) or _UNLIMITED
        query = self._query(columns, where)
        with self._guard:
            take = partial(PartitionCursor.take_rows, query=query)
            return self._wait_for(lambda: self._fetch_all(take, limit), timeout_ms)

    def __iter__(self) -> Iterator[Record[K_co, V_co]]:
        """Iterate over records forever, or until none came for ``consumer_timeout_ms``."""
        return self.iter_records()

    def __next__(self) -> Record[K_co, V_co]:
        if self._iterator is None:
            self._iterator = self.iter_records()
        try:
            return next(self._iterator)
        except BaseException:
            self._iterator = None
            raise

    def iter_records(self, until: Until = None) -> Iterator[Record[K_co, V_co]]:
        """Iterate over the records from the positions on.

        `position` and `current_lag` are right at every step; other calls in the loop body
        (seek, pause, poll) take effect with the next record.

        Args:
            until: ``"end"`` stops at the current ends, and a dict stops at an end offset for
                each partition; both never wait, and leave out paused partitions.  None waits
                for more records.

        Raises:
            Exception: As `poll`; iterate again to continue.
        """
        with self._guard:
            ends = self._ends(until)
        # The caller gets the records of a batch without any Python code in between.  A group
        # member gets fewer at a time: in between it auto-commits and follows the group.
        limit = self.config.max_poll_records if self.config.group_id is not None else None

        def take(cursor: PartitionCursor, stop: int | None) -> Iterator[Record] | None:
            return cursor.take_iterator(limit, stop)

        return chain.from_iterable(iter(lambda: self._next(take, ends), None))

    def iter_batches(
        self,
        columns: Sequence[str] | None = None,
        until: Until = None,
        where: Where | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Iterate over the stored batches from the positions on, as `pyarrow.RecordBatch`.

        Without compression nothing is copied, and only the requested columns are checked and
        decompressed.  The topic is in the metadata of the schema, as ``embedlog.topic``.  The
        tombstones of a typed topic are left out, unless ``columns`` or ``where`` names the column
        ``_tombstone``, which is true in their rows.

        Args:
            columns: The columns in order, of offset, partition, timestamp, key, value and
                headers, or, for a typed topic, its own in place of key and value; None is all
                but headers.
            until: As in `iter_records`.
            where: Only rows for which this is true: an expression of pyarrow or of Polars, or SQL
                such as ``"dep_delay > 60"``.  Positions move past the others.

        Raises:
            Exception: As `poll`; ValueError, if a column does not exist.
        """
        with self._guard:
            return self._iter_batches(self._query(columns, where), self._ends(until))

    def _query(self, columns: Sequence[str] | None, where: Where | None) -> ColumnQuery:
        from embedlog.schemas.row_filter import check_where

        check_column_names(columns)
        names = None if columns is None else tuple(columns)
        catalog = self._root.context.catalog
        if names is not None and not any(info.schema_version for info in catalog.topics().values()):
            check_columns(names)  # At the first batch otherwise, which may be of a typed topic.
        check_where(where)
        return ColumnQuery(names, where)

    def _iter_batches(self, query: ColumnQuery, ends: Ends | None) -> Iterator[pa.RecordBatch]:
        def take(cursor: PartitionCursor, stop: int | None) -> PartitionCursor | None:
            return cursor if cursor.buffered_bytes else None

        while (cursor := self._next(take, ends)) is not None:
            stop = None if ends is None else ends.get(cursor.partition, 0)
            # One fetch per turn of a partition; calls in the loop body may end the turn.
            while not (cursor.paused or self._waiter.wakeup_pending or self._guard.closed):
                try:
                    with self._guard:
                        rows = cursor.next_rows(query, _UNLIMITED, stop)
                except ClosedError:
                    break
                if rows is None:
                    break
                yield rows

    def stop_at(self, ends: Mapping[TopicPartition, int]) -> None:
        """Return no record at or above an offset of each partition; loops end there.

        Args:
            ends: The offsets; nothing is returned of other partitions.
        """
        with self._guard:
            self._stop = {to_topic_partition(tp): end for tp, end in ends.items()}

    def _ends(self, until: Until) -> Ends | None:
        if until is None:
            return self._stop
        if until == "end":
            ends = self.end_offsets(self.assignment())
        elif isinstance(until, str):
            raise ValueError(f"until must be 'end', a dict of end offsets or None, got {until!r}")
        else:
            ends = {to_topic_partition(tp): end for tp, end in until.items()}
        stop = self._stop
        return ends if stop is None else {tp: min(end, stop.get(tp, 0)) for tp, end in ends.items()}

    def _next(
        self, take: Callable[[PartitionCursor, int | None], T | None], ends: Ends | None
    ) -> T | None:
        """Take from the next partition; None ends the iteration."""
        timeout_ms = self.config.consumer_timeout_ms if ends is None else 0
        try:
            with self._guard:
                return self._wait_for(lambda: self._fetch_one(take, ends), timeout_ms)
        except ClosedError:
            # Closing the consumer is a way to end its loop.
            if self._guard.closed:
                return None
            raise

    def _fetch_one(
        self,
        take: Callable[[PartitionCursor, int | None], T | None],
        ends: Ends | None,
        chosen: Collection[TopicPartition] = (),
    ) -> T | None:
        """Return the result of ``take`` for the first partition with a record below its end."""
        max_bytes = self.config.max_partition_fetch_bytes
        for cursor in self._fetchable(chosen):
            try:
                stop = None if ends is None else ends.get(cursor.partition, 0)
                if stop is not None and cursor.position() >= stop:
                    continue
                cursor.fetch_if_empty(max_bytes)
                taken = take(cursor, stop)
            except EmbedlogError as error:
                self._handle_error(cursor, error)
                continue
            if taken is not None:
                self._assignment.move_to_end(cursor)
                return taken
        return None

    def _fetch_all(
        self,
        take: Callable[..., tuple[list[Any], int] | None],
        max_records: int,
        chosen: Collection[TopicPartition] = (),
    ) -> dict[TopicPartition, list[Any]]:
        """Return the results of ``take`` by partition, up to ``max_records`` in all."""
        taken: dict[TopicPartition, list[Any]] = {}
        budget = self.config.fetch_max_bytes
        partition_budget = self.config.max_partition_fetch_bytes
        cursors = self._fetchable(chosen)
        if self.config.fetch_min_bytes > 1 and not self._has_min_bytes(cursors):
            return taken
        for cursor in cursors:
            try:
                stop = None if self._stop is None else self._stop.get(cursor.partition, 0)
                if stop is not None and cursor.position() >= stop:
                    continue
                budget -= cursor.fetch_if_empty(min(budget, partition_budget))
                while (
                    max_records > 0
                    and (items := take(cursor, max_records=max_records, stop=stop)) is not None
                ):
                    taken.setdefault(cursor.partition, []).extend(items[0])
                    max_records -= items[1]
            except EmbedlogError as error:
                if taken:
                    # Good records first; the next call meets the error again (E10).
                    self._assignment.move_to_front(cursor)
                    break
                self._handle_error(cursor, error)
                continue
            if cursor.partition in taken:
                self._assignment.move_to_end(cursor)
            if max_records <= 0 or budget <= 0:
                break
        return taken

    def _fetch_records(
        self, max_records: int, chosen: Collection[TopicPartition] = ()
    ) -> dict[TopicPartition, list[Record]]:
        """Return up to ``max_records`` records, of some partitions or of all."""
        # None of thousands of new records can be garbage yet, and the collector would traverse
        # them again and again: half of the time of a long list.
        pause = max_records > _GC_THRESHOLD and gc.isenabled()
        if pause:
            gc.disable()
        try:
            return self._fetch_all(PartitionCursor.take_records, max_records, chosen)
        finally:
            if pause:
                gc.enable()

    def _has_min_bytes(self, cursors: list[PartitionCursor]) -> bool:
        """Return whether fetch_min_bytes are fetched, or fetch_max_wait_ms have passed."""
        size, max_bytes = 0, self.config.max_partition_fetch_bytes
        for cursor in cursors:
            try:
                cursor.fetch(max_bytes)
            except EmbedlogError:
                return True  # it occurs again once the records before it were returned
            size += cursor.buffered_bytes
        waited_ms = (monotonic() - self._wait_began) * 1000
        enough = size >= self.config.fetch_min_bytes or waited_ms >= self.config.fetch_max_wait_ms
        if enough:
            self._wait_began = monotonic()
        return enough

    def _fetchable(self, chosen: Collection[TopicPartition] = ()) -> list[PartitionCursor]:
        """Return the cursors that may have records, the one served longest ago first.

        Args:
            chosen: Only these partitions; all by default.
        """
        self._update_assignment()
        if self._subscription is None and not len(self._assignment):
            raise IllegalStateError(
                "The consumer has nothing to read",
                todo="Subscribe to a topic, or assign partitions.",
            )
        self._assignment.resolve_positions()
        cursors = self._assignment.fetchable()
        return [cursor for cursor in cursors if cursor.partition in chosen] if chosen else cursors

    def _handle_error(self, cursor: PartitionCursor, error: EmbedlogError) -> None:
        """Raise the error, except if a subscribed topic was deleted: that is just removed."""
        if self._subscription is not None and isinstance(error, UnknownTopicOrPartitionError):
            self._assignment.remove([cursor.partition])
            self._subscription.require_update()
            return
        # The other partitions are served before it fails again.
        self._assignment.move_to_end(cursor)
        raise error

    def _wait_for(self, step: Callable[[], T], timeout_ms: float | None) -> T:
        self._counts.count_poll()
        if self.config.group_id is None:
            return self._waiter.repeat(step, timeout_ms)
        if self._group.notifier.is_async:
            raise IllegalStateError(
                "The rebalance listener is asynchronous, and so is this consumer",
                group=self.config.group_id,
                todo="Read with `async for`, getone or getmany.",
            )
        return self._group.poll(partial(self._waiter.repeat, step, timeout_ms))

    # Reading in tasks

    async def getone(self, *partitions: TopicPartition) -> Record[K_co, V_co]:
        """Return the next record, and wait for it; for tasks, of which several may wait.

        A task that is cancelled while it waits has taken no record.

        Args:
            partitions: Only of these; all by default.

        Raises:
            ClosedError: The consumer was closed.
            Exception: As `poll`.
        """
        while True:
            # Until the turn ends no other code runs in between: this takes 1 µs a record.
            if not partitions and monotonic() < self._turn_ends:
                for record in self._taken:
                    return record
            taken = await self._take_async(None, partitions)
            if not partitions:
                self._taken = taken
            for record in taken:
                return record  # type: ignore[no-any-return]

    async def getmany(
        self,
        *partitions: TopicPartition,
        timeout_ms: float | None = 0,
        max_records: int | None = None,
    ) -> dict[TopicPartition, list[Record[K_co, V_co]]]:
        """Return the next records by partition, as `poll` does; for tasks.

        A task that is cancelled while it waits has taken no record.

        Args:
            partitions: Only of these; all by default.
            timeout_ms: How long to wait for a record; 0 does not wait, None waits forever.
            max_records: The maximum over all partitions; None is ``max_poll_records``.

        Raises:
            Exception: As `poll`.
        """
        limit = check_max_records(max_records) or self.config.max_poll_records
        step = partial(self._fetch_records, limit, self._chosen(partitions))
        return await self._wait_async(step, timeout_ms)

    async def __aiter__(self) -> AsyncIterator[Record[K_co, V_co]]:
        """Iterate over records forever, or until none came for ``consumer_timeout_ms``.

        The position is right at every step, and calls in the loop body take effect with the next
        record.  A loop ends when the consumer is closed.
        """
        try:
            while taken := await self._take_async(self.config.consumer_timeout_ms):
                for record in taken:
                    yield record
                    if monotonic() > self._turn_ends:
                        break  # The rest is taken in the next turn.
        except ClosedError:
            if not self._guard.closed:
                raise

    async def _take_async(
        self, timeout_ms: float | None, partitions: Sequence[TopicPartition] = ()
    ) -> Any:
        """Return an iterator of some next records of one partition; None after the timeout."""
        limit = self.config.max_poll_records if self.config.group_id is not None else None

        def take(cursor: PartitionCursor, stop: int | None) -> Iterator[Record] | None:
            return cursor.take_iterator(limit, stop)

        chosen = self._chosen(partitions)
        return await self._wait_async(lambda: self._fetch_one(take, self._stop, chosen), timeout_ms)

    def _chosen(self, partitions: Sequence[TopicPartition]) -> set[TopicPartition]:
        return {self._cursor(partition).partition for partition in partitions}

    async def _wait_async(self, step: Callable[[], T], timeout_ms: float | None) -> T:
        group, waiter = self._group, self._waiter
        self._counts.count_poll()

        def look() -> T | EllipsisType:
            if group.must_await_listener():
                return ...
            with self._guard:
                call = partial(waiter.repeat, step, 0)
                return call() if self.config.group_id is None else group.poll(call)

        deadline = None if timeout_ms is None else monotonic() + timeout_ms / 1000
        with group.polling():
            if monotonic() >= self._turn_ends:
                await asyncio.sleep(0)
            due_in = group.committer.seconds_to_auto_commit
            try:
                while True:
                    await group.update_async()
                    taken = await waiter.repeat_async(look, deadline, due_in)
                    if not isinstance(taken, EllipsisType):
                        return taken
            finally:
                # A turn goes on until the loop has run, however often records are taken in it.
                if (now := monotonic()) >= self._turn_ends:
                    self._turn_ends = now + _TURN_SECONDS

    def wakeup(self) -> None:
        """Make the waiting call, or the next one that may wait, raise `WakeupError` once.

        May be called from any thread and from a signal handler.
        """
        self._waiter.wakeup()

    def create_message_streams(
        self, counts: Mapping[str, int]
    ) -> dict[str, list[Consumer[K_co, V_co]]]:
        """Return that many streams by topic, each to be iterated in its own thread.

        Each is a member of the group: a partition feeds exactly one stream.  They are closed
        with this consumer.

        Raises:
            IllegalStateError, InvalidGroupIdError: It reads topics itself, or has no group.
        """
        with self._guard:
            self._group.check_writable()
            self._group.check_subscribe(counts, None)
            if self._subscription is not None or len(self._assignment):
                raise IllegalStateError(
                    "The consumer reads topics itself",
                    todo="Create streams from a consumer that has a group_id and no topics.",
                )
            for topic, count in counts.items():
                if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                    raise ValueError(
                        f"The number of streams of {topic} must be at least 1, got {count!r}"
                    )
            streams: dict[str, list[Consumer[K_co, V_co]]] = {topic: [] for topic in counts}
            created: list[Consumer[K_co, V_co]] = []
            instance_id = self.config.group_instance_id
            try:
                for topic, count in counts.items():
                    for number in range(count):
                        # Each member needs a different `group_instance_id`.
                        name = None if instance_id is None else f"{instance_id}-{topic}-{number}"
                        config = self.config.changed({"group_instance_id": name}).overrides()
                        if self._create:  # which is the default, but not said
                            config["allow.auto.create.topics"] = True
                        created.append(Consumer(self._root, topic, **config))
                        streams[topic].append(created[-1])
                # Three rounds: the first streams release what they acquired while they were
                # alone, and only then the last ones can acquire it.
                for stream in created + created + created:
                    stream._update_assignment()
            except BaseException:
                for stream in created:
                    stream.close()
                raise
            self._streams += created
            return streams

    # Metrics

    def metrics(self) -> Metrics:
        """Return counts, lags and times by name, in Kafka's groups, as kafka-python does.

        ``metrics()["consumer-fetch-manager-metrics"]["records-lag-max"]`` is the largest lag now.
        Keys that end with ``.orders`` or ``.orders-0`` are of a topic or a partition.  The page
        on monitoring lists all names.  Averages and maxima are over the life of the consumer; an
        average of nothing is NaN.  May be called from any thread.
        """
        from embedlog.metrics import nested

        return nested(self._samples())

    def _samples(self) -> Iterator[Sample]:
        counts = self._counts
        yield from counts.poll_samples()
        if self.config.group_id is not None:
            yield from counts.coordinator_samples(len(self._assignment))
        cursors = self._assignment.snapshot
        yield from counts.fetch_samples({cur.partition: cur.progress() for cur in cursors})

    # Closing

    def close(self, autocommit: bool = True, timeout_ms: float | None = None) -> None:
        """Commit what polls returned, leave the group, and end an iteration.

        The end of the program leaves the group, too, but commits nothing, as after an error
        in a ``with`` block: the last records may not be processed.

        May be called from any thread; a call that waits in another thread is woken and
        raises `ClosedError`, as does every later one.  Streams made from it are closed too.

        Args:
            autocommit: Whether to commit first, if auto-commit is enabled.
            timeout_ms: How long to wait for a call in another thread; 30 s by default.  If that
                call takes longer, the consumer leaves the group under it, and its partitions
                are lost.

        Raises:
            IllegalStateError: The rebalance listener called it.
            Exception: An error of the rebalance listener, once everything is closed.
        """
        if self._guard.closed:
            return
        self._group.notifier.check_not_in_callback("close")
        seconds = _CLOSE_SECONDS if timeout_ms is None else timeout_ms / 1000
        # All at once: no stream may acquire partitions that another one releases.
        with ExitStack() as closing:
            # All callbacks run, the last one first, even if some raise.
            for consumer in (self, *reversed(self._streams)):
                consumer._guard.refuse()
                closing.callback(consumer._close, autocommit, seconds)

    async def aclose(self, autocommit: bool = True) -> None:
        """Do as `close`; for tasks, also if the rebalance listener is asynchronous."""
        if not self._guard.closed:
            self._group.notifier.check_not_in_callback("close")
            await self._group.announce_leaving(autocommit=autocommit)
            self.close(autocommit)

    def _close(self, autocommit: bool, seconds: float) -> None:
        self._waiter.wake_tasks()
        if not self._guard.acquire_to_close(0):
            self._waiter.wake_all()
            if not self._guard.acquire_to_close(seconds):
                self._group.leave_during_call()
                return
        try:
            self._group.leave(autocommit=autocommit)
        finally:
            self._waiter.leave_page()
            self._guard.release_closed()

    @property
    def _closed(self) -> bool:
        return self._guard.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        # After an error the last record may not be processed: do not commit it.
        self.close(autocommit=exc_type is None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        await self.aclose(autocommit=exc_type is None)


hint_at_missing(Consumer, _HINTS)


def _cells(cursor: PartitionCursor) -> tuple[object, ...]:
    """Return the row of a partition in the table for notebooks."""
    position, end = cursor.known_position, cursor.log.end_offset()
    return *cursor.partition, position, end, cursor.lag(), "paused" if cursor.paused else None
