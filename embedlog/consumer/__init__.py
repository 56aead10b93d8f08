"""Reading: positions, polling, iteration; as records or as Arrow columns.

A consumer belongs to one thread at a time.  While nothing arrives it sleeps in
the kernel, on the log's wake page, which every append of every process
advances: it uses no CPU and sees a record within microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import Any, Literal, Self, TypeVar

from embedlog.catalog import INTERNAL
from embedlog.config import ConsumerConfig
from embedlog.consumer import streams, taking
from embedlog.consumer.arguments import (
    SingleThreadGuard,
    asked,
    check_alone,
    check_topics,
    limit_of,
    partition_of,
)
from embedlog.consumer.assignment import Assignment, PartitionCursor
from embedlog.consumer.committer import Callback
from embedlog.consumer.deserialize import COLUMNS, RecordDecoder, check_columns
from embedlog.consumer.fetcher import Ends, Fetcher
from embedlog.consumer.group_client import ConsumerGroupMetadata, GroupClient
from embedlog.consumer.rebalance_notifier import ConsumerRebalanceListener
from embedlog.consumer.static_assignment import StaticAssignment
from embedlog.consumer.subscription import GroupSubscription
from embedlog.consumer.waiter import Waiter
from embedlog.errors import (
    ClosedError,
    EmbedlogError,
    IllegalStateError,
    UnknownTopicOrPartitionError,
)
from embedlog.record import OffsetAndMetadata, OffsetAndTimestamp, Record, TopicPartition
from embedlog.root.root import Root

__all__ = ["COLUMNS", "Consumer", "ConsumerGroupMetadata", "ConsumerRebalanceListener"]

T = TypeVar("T")
Until = Literal["end"] | Mapping[TopicPartition, int] | None

_CLOSE_SECONDS = 30.0
"""How long `close` waits for another thread (E24)."""


class Consumer:
    """Reads partitions of a log root from positions that it keeps.

    Given topics, it reads all their partitions, also those that come later
    (from their beginning); a topic that does not exist is waited for.  Without
    topics, `assign` says what to read.  A position is resolved by the first poll
    or `position` that needs it: to what the group committed, else by
    ``auto_offset_reset``, whose default is ``"latest"``: the end as of the
    assignment (E1).

    One thread at a time (E13); only `wakeup` may be called from any.

    Args:
        root: The log to read.
        topics: What to read.
        config: See `ConsumerConfig`, in either spelling.

    Raises:
        InvalidConfigError: A setting is unknown or wrong.
        IllegalStateError: A group was asked for.
    """

    def __init__(self, root: Root, *topics: str, **config: object) -> None:
        self.config = ConsumerConfig.parse(config)
        check_alone(self.config, config)
        check_topics(topics)
        self._root, self._given, self._named = root, config, topics
        self._assignment = Assignment(root, RecordDecoder(self.config), self._committed_position)
        self._fetcher = Fetcher(self.config, self._assignment, self._ready, self._failed)
        create = asked(config, "allow_auto_create_topics")
        self._group = GroupClient(root, self.config, self._assignment, create)
        self._following: StaticAssignment | GroupSubscription | None = None
        """What keeps the assignment up to date; None where the program assigns."""
        self._guard = SingleThreadGuard()
        self._waiter = Waiter(root, self.config, self._guard)
        self._iterator: Iterator[Record] | None = None
        self._streams: list[Consumer] = []
        if topics and self.config.group_id is None:
            reset = self.config.auto_offset_reset
            self._following = StaticAssignment(root, self._assignment, topics, reset, create)
        elif topics:
            self.subscribe(topics)

    def __repr__(self) -> str:
        what = ", ".join(sorted(self.subscription())) or f"{len(self._assignment)} partitions"
        group = f" in group {self.config.group_id!r}" if self.config.group_id else ""
        return f"<Consumer of {what}{group}{', closed' if self._guard.closed else ''}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as what it was made with, not where it is."""
        return partial(Consumer, self._root, *self._named, **self._given), ()

    # What to read

    def subscribe(
        self,
        topics: Collection[str] = (),
        pattern: str | None = None,
        listener: ConsumerRebalanceListener | None = None,
    ) -> None:
        """Share the partitions of topics with the other members of the group.

        Replaces what was subscribed to before; the next poll joins the group, or
        tells it.  Topics that do not exist are waited for.

        Args:
            topics: Their names; none is the same as `unsubscribe`.
            pattern: Instead of names: a regular expression that fits whole names (E17).
            listener: Is told when partitions come and go.

        Raises:
            IllegalStateError: Partitions were assigned before (E16).
            InvalidGroupIdError: The consumer has no group (E18).
        """
        with self._guard:
            self._group.check_subscribe(topics, pattern)
            if self._following is None and len(self._assignment):
                raise IllegalStateError(
                    "partitions were assigned to the consumer by hand",
                    todo="unsubscribe first, or use another consumer",
                )
            if not topics and pattern is None:
                self._unsubscribe()
            else:
                self._following = self._group.subscribe(topics, pattern, listener)

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these partitions and no others; those it had keep their positions.

        With a ``group_id``, new ones begin where that group committed, and commits
        are its, as long as the group has no members (M14).

        Raises:
            IllegalStateError: The consumer was made for topics, or subscribed (E16).
            UnknownTopicOrPartitionError: There is no such partition.
        """
        with self._guard:
            if self._following is not None:
                raise IllegalStateError(
                    "the consumer reads the topics it was made for, or subscribed to",
                    todo="unsubscribe first, or make one without topics",
                )
            self._group.before_assigning()
            wanted = [partition_of(one) for one in partitions]
            for feed in self._assignment.replace(wanted, self.config.auto_offset_reset):
                feed.begin(self.config.auto_offset_reset)

    def assignment(self) -> set[TopicPartition]:
        """Return the partitions it reads; in a group, those the last poll left it with."""
        with self._guard:
            if isinstance(self._following, StaticAssignment):
                self._following.follow()
            return self._assignment.partitions()

    def subscription(self) -> set[str]:
        """Return the topics it was made for, or subscribed to."""
        return set(self._following.topics) if self._following is not None else set()

    def unsubscribe(self) -> None:
        """Read nothing any more; leave the group."""
        with self._guard:
            self._unsubscribe()

    def _unsubscribe(self) -> None:
        self._group.check_outside("unsubscribe")
        try:
            self._group.leave()
        finally:
            self._following = None

    def _follow(self) -> None:
        if self._following is not None:
            self._following.follow()

    # Committing

    def commit(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata] | None = None,
        timeout_ms: float | None = None,
    ) -> None:
        """Commit positions: the group goes on from there, whoever reads then.

        Auto-commit leaves what was committed as it is until further records are returned.
        All of them are committed, or none.  Survives the death of any process at once,
        and a power cut with ``durability="fsync"``; else within a second, which with
        `assign` takes a later poll, commit or close.

        Args:
            offsets: The next offset to read, by partition; None is every position that is known.
            timeout_ms: As kafka-python has it; a commit waits for the log's ``lock_timeout``.

        Raises:
            InvalidGroupIdError: The consumer has no group (E18).
            CommitFailedError: A partition has another owner by now (E23).
            ValueError, TypeError, OffsetMetadataTooLargeError: The offsets cannot be committed.
        """
        with self._guard:
            self._group.committer.now(self._group.positions(offsets))

    def commit_async(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata] | None = None,
        callback: Callback | None = None,
    ) -> Future[Mapping[TopicPartition, OffsetAndMetadata]]:
        """As `commit`; failures go to the callback, which runs in a later call on this thread.

        Args:
            offsets: As in `commit`.
            callback: Called with the offsets and the exception, or None, in the order of the
                commits, by `poll`, `commit` or `close` (E22).
        """
        with self._guard:
            return self._group.committer.later(self._group.positions(offsets), callback)

    def committed(
        self, partition: TopicPartition, metadata: bool = False, timeout_ms: float | None = None
    ) -> int | OffsetAndMetadata | None:
        """Return the offset the group committed last; None if it never did (E4).

        Args:
            partition: It need not be assigned.
            metadata: Return the `OffsetAndMetadata`.
            timeout_ms: Accepted as kafka-python has it.

        Raises:
            InvalidGroupIdError: The consumer has no group.
            UnknownTopicOrPartitionError: There is no such partition.
        """
        with self._guard:
            found = self._group.committed(partition_of(partition))
        return found if metadata or found is None else found.offset

    def _committed_position(self, partition: TopicPartition) -> OffsetAndMetadata | None:
        return None if self.config.group_id is None else self._group.committed(partition)

    def group_metadata(self) -> ConsumerGroupMetadata:
        """Return who this consumer is in its group."""
        return self._group.metadata()

    # Positions

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Go on from an offset; one out of range is settled when it is read (E5).

        Raises:
            ValueError: The offset is negative.
            IllegalStateError: The partition is not assigned.
        """
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise TypeError(f"an offset is an int, not {offset!r}")
        if offset < 0:
            raise ValueError(f"offset {offset} is negative")
        with self._guard:
            self._feed(partition).seek(offset)

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Go on from the first offsets as of the next poll; of all if no partitions are named."""
        self._seek_lazily(partitions, "earliest")

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Go on from the ends as of the next poll; of all if no partitions are named."""
        self._seek_lazily(partitions, "latest")

    def _seek_lazily(self, partitions: tuple[TopicPartition, ...], wanted: str) -> None:
        with self._guard:
            # A member that has partitions follows its group, and commits, in polls only (E20).
            if isinstance(self._following, StaticAssignment) or not len(self._assignment):
                self._follow()
            for feed in list(map(self._feed, partitions)) if partitions else self._assignment:
                self._assignment.seek_lazily(feed, wanted)

    def position(self, partition: TopicPartition) -> int:
        """Return the offset of the next record that will be returned (E3).

        Raises:
            IllegalStateError: The partition is not assigned.
            NoOffsetForPartitionError: There is none, and auto_offset_reset is "none".
        """
        with self._guard:
            return self._feed(partition).position()

    def current_lag(self, partition: TopicPartition) -> int | None:
        """Return how many offsets are left to the end; None before the first poll (E25)."""
        with self._guard:
            feed = self._feed(partition)
            place = feed.place
            return None if place is None else max(feed.log.end_offset() - place, 0)

    def pause(self, *partitions: TopicPartition) -> None:
        """Return no records of these until `resume`; positions stay (E11)."""
        with self._guard:
            for feed in list(map(self._feed, partitions)):
                feed.withdraw()
                feed.paused = True

    def resume(self, *partitions: TopicPartition) -> None:
        """Return records of these again."""
        with self._guard:
            for feed in list(map(self._feed, partitions)):
                feed.paused = False

    def paused(self) -> set[TopicPartition]:
        """Return the partitions that are paused."""
        with self._guard:
            return {feed.where for feed in self._assignment if feed.paused}

    def _feed(self, partition: TopicPartition) -> PartitionCursor:
        return self._assignment.feed(partition_of(partition))

    # What there is

    def topics(self) -> set[str]:
        """Return the names of all topics but internal ones, as kafka-python does."""
        return {name for name in self._root.topics() if not name.startswith(INTERNAL)}

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        """Return the partitions of a topic; None if there is no such topic."""
        try:
            return set(range(self._root.partitions(topic)))
        except UnknownTopicOrPartitionError:
            return None

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> Ends:
        """Return the first offset of each; they need not be assigned (E7).

        Raises:
            UnknownTopicOrPartitionError: There is no such partition.
        """
        return {
            one: self._root.partition(*one).start_offset() for one in map(partition_of, partitions)
        }

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> Ends:
        """Return the offset the next record of each will have (E7).

        Raises:
            UnknownTopicOrPartitionError: There is no such partition.
        """
        return {
            one: self._root.partition(*one).end_offset() for one in map(partition_of, partitions)
        }

    def offsets_for_times(
        self, timestamps: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return the first record at or after a time in each; None where there is none (B10, E7).

        Args:
            timestamps: Milliseconds since 1970 by partition.

        Raises:
            ValueError: A time is negative.
            UnknownTopicOrPartitionError: There is no such partition.
        """
        for partition, timestamp in timestamps.items():
            if timestamp < 0:
                raise ValueError(f"timestamp {timestamp} of {partition} is negative")
        return {
            one: self._root.partition(*partition_of(one)).offset_for_timestamp(timestamp)
            for one, timestamp in timestamps.items()
        }

    # Reading records

    def poll(
        self, timeout_ms: float | None = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Record]]:
        """Return the next records, by partition; as soon as there are any (E8, E9).

        Args:
            timeout_ms: How long to wait for the first; 0 does not wait, None waits for ever.
            max_records: The most to return in all; None is ``max_poll_records``.

        Raises:
            IllegalStateError: There is nothing to read, or another thread is reading.
            WakeupError: `wakeup` was called; no record is lost.
            OffsetOutOfRangeError, NoOffsetForPartitionError: auto_offset_reset is "none" (E1).
            LogTruncatedError: Likewise, and records already returned were cut off the log;
                ``next_offset`` is where to seek to (A36).
            CorruptBatchError, RecordDeserializationError: The record at the position
                cannot be returned.  Those before it were; seek past it to go on (E10).
        """
        most = limit_of(max_records) or self.config.max_poll_records
        with self._guard:
            return self._await(partial(self._fetcher.records, most), timeout_ms)

    def poll_batches(
        self,
        timeout_ms: float | None = 0,
        max_records: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> dict[TopicPartition, list[Any]]:
        """As `poll`, but return `pyarrow.RecordBatch` objects, one for each stored batch.

        Args:
            timeout_ms: How long to wait for the first.
            max_records: The most rows in all; None is as much as one fetch brings
                (``max_partition_fetch_bytes``, ``fetch_max_bytes``).
            columns: See `iter_batches`.

        Raises:
            ValueError: There is no such column.
        """
        most = limit_of(max_records) or 1 << 62
        names = check_columns(columns)
        with self._guard:
            take = partial(taking.rows, names)
            return self._await(lambda: self._fetcher.gather(take, most), timeout_ms)

    def __iter__(self) -> Iterator[Record]:
        """Go through the records as they come, for ever, or up to ``consumer_timeout_ms``."""
        return self.iter_records()

    def __next__(self) -> Record:
        if self._iterator is None:
            self._iterator = self.iter_records()
        try:
            return next(self._iterator)
        except BaseException:
            self._iterator = None
            raise

    def iter_records(self, until: Until = None) -> Iterator[Record]:
        """Iterate over the records from the positions on.

        `position` and `current_lag` are right at every step; whatever else
        the loop body does to the consumer (seek, pause, poll) takes effect with
        the next record.

        Args:
            until: ``"end"`` stops at the ends as they are now and never waits, as does
                a dict of partition to end offset; paused partitions are left out.
                None goes on, and waits for more.

        Raises:
            Exception: As `poll`; iterate again to go on.
        """
        self._check_usable()
        ends = self._ends(until)
        # The records of a batch go to the caller without any Python in between; in a group,
        # some of them: between them is the time to commit, and to see what the group wants.
        few = self.config.max_poll_records if self.config.group_id is not None else None
        take = partial(taking.run, few)
        return chain.from_iterable(iter(lambda: self._next(take, ends), None))

    def iter_batches(
        self, columns: Sequence[str] | None = None, until: Until = None
    ) -> Iterator[Any]:
        """Iterate over the stored batches from the positions on, as `pyarrow.RecordBatch`.

        Without compression nothing is copied, and only the columns asked for are
        checked and decompressed.  The schema's metadata has the topic, as ``embedlog.topic``.

        Args:
            columns: Of offset, partition, timestamp, key, value and headers, in the
                order wanted; None is all but headers.
            until: As in `iter_records`.

        Raises:
            Exception: As `poll`; ValueError, if there is no such column.
        """
        self._check_usable()
        return self._iterate(check_columns(columns), self._ends(until))

    def _iterate(self, names: tuple[str, ...], ends: Ends | None) -> Iterator[Any]:
        while (feed := self._next(taking.filled, ends)) is not None:
            stop = None if ends is None else ends.get(feed.where, 0)
            # One fetch a turn; what the loop body does to the consumer ends it.
            while not (feed.paused or self._waiter.woken or self._guard.closed):
                try:
                    with self._guard:
                        found = feed.arrow(names, 1 << 62, stop)
                except ClosedError:
                    break
                if found is None:
                    break
                yield found

    def _ends(self, until: Until) -> Ends | None:
        if until is None:
            return None
        if until == "end":
            return self.end_offsets(self.assignment())
        if isinstance(until, str):
            raise ValueError(f"until is 'end', a dict of end offsets, or None; not {until!r}")
        return {partition_of(one): end for one, end in until.items()}

    def _check_usable(self) -> None:
        with self._guard:
            pass

    def _next(
        self, take: Callable[[PartitionCursor, int | None], T | None], ends: Ends | None
    ) -> T | None:
        """Return what one partition gives in its turn; None ends the iteration."""
        timeout_ms = self.config.consumer_timeout_ms if ends is None else 0
        try:
            with self._guard:
                return self._await(lambda: self._fetcher.first(take, ends), timeout_ms)
        except ClosedError:
            # To close the consumer is a way to leave its loop.
            if self._guard.closed:
                return None
            raise

    def _ready(self) -> list[PartitionCursor]:
        """Return the partitions that may give records, the one served longest ago first."""
        self._follow()
        if self._following is None and not len(self._assignment):
            raise IllegalStateError(
                "there is nothing to read",
                todo="subscribe to a topic, or assign partitions",
            )
        self._assignment.settle()
        return self._assignment.awake()

    def _failed(self, feed: PartitionCursor, error: EmbedlogError) -> None:
        """Raise, unless a topic it was made for is gone: that just leaves."""
        if self._following is not None and isinstance(error, UnknownTopicOrPartitionError):
            self._assignment.remove(feed.where)
            self._following.gone()
            return
        # The others have their turn before it fails again.
        self._assignment.served(feed)
        raise error

    def _await(self, step: Callable[[], T], timeout_ms: float | None) -> T:
        return self._group.polling(partial(self._waiter.repeat, step, timeout_ms))

    def wakeup(self) -> None:
        """Make the call that waits now, or the next that may wait, raise `WakeupError` once (E12).

        From any thread, and from a signal handler.
        """
        self._waiter.wakeup()

    def create_message_streams(self, counts: Mapping[str, int]) -> dict[str, list[Consumer]]:
        """Return so many streams by topic, each to be iterated in a thread of its own (E26).

        Each is a member of its group: a partition feeds exactly one.  They close with it.

        Raises:
            IllegalStateError, InvalidGroupIdError: It reads something itself, or has no group.
        """
        with self._guard:
            self._group.check_streams(counts, self._following)
            made = partial(Consumer, self._root)
            found = streams.begin(made, Consumer._follow, self.config, counts)
            self._streams += chain.from_iterable(found.values())
            return found

    # Leaving

    def close(self, autocommit: bool = True, timeout_ms: float | None = None) -> None:
        """Stop reading, commit what polls returned, and leave the group; an iteration ends.

        From any thread; a call that waits in another one is woken, and ends with
        `ClosedError`, as does every later one.  Closes the streams made of it as well.

        Args:
            autocommit: Commit first, if the consumer does so by itself (E24).
            timeout_ms: How long to wait for another thread to be out; 30 s.  One that is not
                finds itself out of the group, with its partitions lost.

        Raises:
            IllegalStateError: The rebalance listener said so.
            Exception: Whatever the rebalance listener raised, once all is done.
        """
        if self._guard.closed:
            return
        self._group.check_outside("close")
        seconds = _CLOSE_SECONDS if timeout_ms is None else timeout_ms / 1000
        # All at once: no stream is to get what another one lets go.
        for each in (everyone := [*self._streams, self]):
            each._guard.closed = True
        for each in everyone:
            each._close(autocommit, seconds)

    def _close(self, autocommit: bool, seconds: float) -> None:
        if not self._guard.seize(0):
            self._waiter.ring()
            if not self._guard.seize(seconds):
                self._group.leave_soon()
                return
        try:
            self._group.leave(autocommit=autocommit)
        finally:
            self._waiter.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The record in hand when it failed may not be processed: no commit for it.
        self.close(autocommit=kind is None)
