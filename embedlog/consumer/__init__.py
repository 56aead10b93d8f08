"""Reading: positions, polling, iteration; as records or as Arrow columns.

A consumer belongs to one thread at a time.  While nothing arrives it sleeps in
the kernel, on the log's wake page, which every append of every process
advances: it uses no CPU and sees a record within microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import inf
from time import monotonic
from typing import Any, Literal, Self, TypeVar

from embedlog.config import ConsumerConfig
from embedlog.consumer import taking
from embedlog.consumer.assignment import Assignment, Feed
from embedlog.consumer.calls import Guard, asked, check_alone, limit_of, partition_of
from embedlog.consumer.decode import COLUMNS, Decoder, check_columns
from embedlog.errors import (
    ClosedError,
    EmbedlogError,
    IllegalStateError,
    UnknownTopicOrPartitionError,
    WakeupError,
)
from embedlog.log.root import Root
from embedlog.record import OffsetAndTimestamp, Record, TopicPartition

__all__ = ["COLUMNS", "Consumer"]

T = TypeVar("T")
Ends = dict[TopicPartition, int]
Until = Literal["end"] | Mapping[TopicPartition, int] | None

_NAP_SECONDS = 1.0
"""The longest sleep: a Ctrl-C that came just before it must not wait for a record."""
_SHORT_NAP_SECONDS = 0.05
"""The same where `wakeup` cannot ring, since the log was opened to read only."""


class Consumer:
    """Reads partitions of a log root from positions that it keeps.

    Given topics, it reads all their partitions, also those that come later
    (from their beginning); a topic that does not exist is waited for.  Without
    topics, `assign` says what to read.  A position that is not there or not
    known is settled by ``auto_offset_reset``, whose default is ``"latest"``:
    the end as of the assignment (E1).

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
        for topic in topics:
            if not isinstance(topic, str):
                raise TypeError(f"a topic is a str, not {topic!r}")
        self._root, self._given = root, config
        self._assignment = Assignment(root, Decoder(self.config))
        self._topics = dict.fromkeys(topics)
        self._create = bool(topics) and asked(config, "allow_auto_create_topics")
        self._known = -1
        """The version of the catalogue that the assignment was made from."""
        self._guard = Guard()
        self._woken = False
        self._window = monotonic()
        """When fetch_max_wait_ms began (with fetch_min_bytes)."""
        self._iterator: Iterator[Record] | None = None
        self._refresh(self.config.auto_offset_reset)

    def __repr__(self) -> str:
        what = ", ".join(self._topics) or f"{len(self._assignment)} partitions"
        return f"<Consumer of {what}{', closed' if self._guard.closed else ''}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as what it was made with, not where it is."""
        return partial(Consumer, self._root, *self._topics, **self._given), ()

    # What to read

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these partitions and no others; those it had keep their positions.

        Raises:
            IllegalStateError: The consumer was made for topics (E16).
            UnknownTopicOrPartitionError: There is no such partition.
        """
        with self._guard:
            if self._topics:
                raise IllegalStateError(
                    "the consumer reads the topics it was made for",
                    todo="make one without topics to assign partitions",
                )
            self._assign(map(partition_of, partitions), self.config.auto_offset_reset)

    def _assign(self, wanted: Iterable[TopicPartition], first: str) -> None:
        for feed in self._assignment.replace(wanted, self.config.auto_offset_reset):
            if first == "latest":
                feed.position()  # the end now, not at the first poll
            elif first == "earliest":
                feed.seek_lazily(first)

    def assignment(self) -> set[TopicPartition]:
        """Return the partitions it reads."""
        with self._guard:
            self._refresh()
            return self._assignment.partitions()

    def subscription(self) -> set[str]:
        """Return the topics it was made for."""
        return set(self._topics)

    def unsubscribe(self) -> None:
        """Read nothing any more, until partitions are assigned."""
        with self._guard:
            self._topics = {}
            self._assignment.replace([], "none")

    def _refresh(self, first: str | None = None) -> None:
        """Follow what happens to the topics: created, grown, deleted, created again (E19).

        What appears later is read from its beginning: all of it came after
        the program asked for the topic.
        """
        if not self._topics:
            return
        version = self._root.context.catalog.version()
        if version == self._known:
            return
        if first is None:
            first = "none" if self.config.auto_offset_reset == "none" else "earliest"
        wanted = [
            TopicPartition(topic, number)
            for topic in self._topics
            for number in range(self._count(topic))
        ]
        try:
            self._assign(wanted, first)
        except UnknownTopicOrPartitionError:
            return  # deleted just now; the next look settles it
        self._known = version

    def _count(self, topic: str) -> int:
        try:
            ask = self._root.ensure_topic if self._create else self._root.topic
            return ask(topic).partitions
        except UnknownTopicOrPartitionError:
            return 0

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
        """Go on from the first offsets there are when it is read; of all, if none are named."""
        self._seek_lazily(partitions, "earliest")

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Go on from the ends as they are when it is read; of all, if none are named."""
        self._seek_lazily(partitions, "latest")

    def _seek_lazily(self, partitions: tuple[TopicPartition, ...], wanted: str) -> None:
        with self._guard:
            self._refresh()
            for feed in list(map(self._feed, partitions)) if partitions else self._assignment:
                feed.seek_lazily(wanted)

    def position(self, partition: TopicPartition) -> int:
        """Return the offset of the next record that will be returned (E3).

        Raises:
            IllegalStateError: The partition is not assigned.
            NoOffsetForPartitionError: There is none, and auto_offset_reset is "none".
        """
        with self._guard:
            return self._feed(partition).position()

    def current_lag(self, partition: TopicPartition) -> int | None:
        """Return how many offsets are left to the end; None without a position (E25)."""
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

    def _feed(self, partition: TopicPartition) -> Feed:
        return self._assignment.feed(partition_of(partition))

    # What there is

    def topics(self) -> set[str]:
        """Return the names of all topics."""
        return set(self._root.topics())

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
            return self._await(partial(self._gather_records, most), timeout_ms)

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
            return self._await(lambda: self._gather(partial(taking.rows, names), most), timeout_ms)

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
        # The records of a batch go to the caller without any Python in between.
        return chain.from_iterable(iter(lambda: self._next(taking.run, ends), None))

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
            while not (feed.paused or self._woken or self._guard.closed):
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

    def _next(self, take: Callable[[Feed, int | None], T | None], ends: Ends | None) -> T | None:
        """Return what one partition gives in its turn; None ends the iteration."""
        timeout_ms = self.config.consumer_timeout_ms if ends is None else 0
        try:
            with self._guard:
                return self._await(lambda: self._first(take, ends), timeout_ms)
        except ClosedError:
            # To close the consumer is a way to leave its loop.
            if self._guard.closed:
                return None
            raise

    def _first(self, take: Callable[[Feed, int | None], T | None], ends: Ends | None) -> T | None:
        most = self.config.max_partition_fetch_bytes
        for feed in self._ready():
            try:
                stop = None if ends is None else ends.get(feed.where, 0)
                if stop is not None and feed.position() >= stop:
                    continue
                feed.fill(most)
                found = take(feed, stop)
            except EmbedlogError as error:
                self._failed(feed, error)
                continue
            if found is not None:
                self._assignment.served(feed)
                return found
        return None

    def _gather(
        self, take: Callable[[Feed, int], tuple[list[Any], int] | None], most: int
    ) -> dict[TopicPartition, list[Any]]:
        """Let the partitions give in turn, up to ``most`` records in all (E9)."""
        found: dict[TopicPartition, list[Any]] = {}
        budget, each = self.config.fetch_max_bytes, self.config.max_partition_fetch_bytes
        feeds = self._ready()
        if self.config.fetch_min_bytes > 1 and not self._enough(feeds):
            return found
        for feed in feeds:
            try:
                budget -= feed.fill(min(budget, each))
                while most > 0 and (taken := take(feed, most)) is not None:
                    found.setdefault(feed.where, []).extend(taken[0])
                    most -= taken[1]
            except EmbedlogError as error:
                if found:
                    # Good records first; the next call meets the error again (E10).
                    self._assignment.first(feed)
                    break
                self._failed(feed, error)
                continue
            if feed.where in found:
                self._assignment.served(feed)
            if most <= 0 or budget <= 0:
                break
        return found

    def _gather_records(self, most: int) -> dict[TopicPartition, list[Record]]:
        if most <= taking.FEW:
            return self._gather(taking.records, most)
        with taking.collector_held():
            return self._gather(taking.records, most)

    def _ready(self) -> list[Feed]:
        """Return the partitions that may give records, the one served longest ago first."""
        self._refresh()
        if not self._topics and not len(self._assignment):
            raise IllegalStateError(
                "there is nothing to read",
                todo="make the consumer for a topic, or assign partitions",
            )
        return self._assignment.awake()

    def _failed(self, feed: Feed, error: EmbedlogError) -> None:
        """Raise, unless a topic it was made for is gone: that just leaves."""
        if self._topics and isinstance(error, UnknownTopicOrPartitionError):
            self._assignment.remove(feed.where)
            self._known = -1
            return
        # The others have their turn before it fails again.
        self._assignment.served(feed)
        raise error

    def _enough(self, feeds: list[Feed]) -> bool:
        """Whether fetch_min_bytes came, or fetch_max_wait_ms passed."""
        size, most = 0, self.config.max_partition_fetch_bytes
        for feed in feeds:
            try:
                feed.fetch(most)
            except EmbedlogError:
                return True  # whoever takes the records before it meets it again
            size += feed.buffered
        waited = (monotonic() - self._window) * 1000
        enough = size >= self.config.fetch_min_bytes or waited >= self.config.fetch_max_wait_ms
        if enough:
            self._window = monotonic()
        return enough

    # Waiting

    def _await(self, step: Callable[[], T], timeout_ms: float | None) -> T:
        """Repeat a step until it gives something or the time is over.

        A waiter reads the wake page before it looks, so what is published
        between the look and the sleep ends the sleep.
        """
        deadline = inf if timeout_ms is None else monotonic() + timeout_ms / 1000
        while True:
            if self._guard.closed:
                raise ClosedError("the consumer was closed")
            if self._woken:
                self._woken = False
                raise WakeupError("wakeup() was called", todo="poll again to go on")
            wake = self._root.wake
            seen = wake.value()
            found = step()
            if found:
                return found
            left = deadline - monotonic()
            if left <= 0:
                return found
            wake.wait(seen, min(left, self._nap()))

    def _nap(self) -> float:
        """How long to sleep at most, in seconds."""
        config = self.config
        nap = _NAP_SECONDS if self._root.context.files.writable else _SHORT_NAP_SECONDS
        if config.fetch_min_bytes > 1:
            nap = min(nap, config.fetch_max_wait_ms / 1000)
        return min(nap, max(config.metadata_max_age_ms, 1) / 1000)

    def wakeup(self) -> None:
        """Make the call that waits now, or the next that may wait, raise `WakeupError` once (E12).

        From any thread, and from a signal handler.
        """
        self._woken = True
        self._ring()

    def _ring(self) -> None:
        if self._root.context.files.writable:
            self._root.wake.advance()

    # Leaving

    def close(self) -> None:
        """Stop reading: an iteration under way ends, any other call raises ClosedError.

        From any thread; a call that waits in another one is woken.
        """
        if self._guard.closed:
            return
        self._guard.closed = True
        if self._guard.taken():
            self._ring()
        else:
            self._assignment.replace([], "none")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
