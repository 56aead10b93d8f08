"""One assigned partition: its position, and the batches that were fetched but not returned."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from embedlog.batch import CONTROL, Batch
from embedlog.catalog import INTERNAL
from embedlog.config import TopicConfig
from embedlog.consumer.counts import FetchCounts, Progress
from embedlog.consumer.deserialize import (
    ArrowDecoder,
    ColumnQuery,
    Deserializers,
    RecordDecoder,
    RecordRun,
    TypedArrowDecoder,
    batch_offsets,
    locate_error,
)
from embedlog.errors import (
    CorruptBatchError,
    EmbedlogError,
    LogTruncatedError,
    NoOffsetForPartitionError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)
from embedlog.lazy import logging
from embedlog.listeners import Client, Listener
from embedlog.partition.partition_log import PartitionLog
from embedlog.partition.reader import PartitionReader
from embedlog.partition.tail import unpack as unpack_tail
from embedlog.record import OffsetAndMetadata, Record, TopicPartition
from embedlog.root.root import Root

_log = logging.getLogger("embedlog.consumer")

CommittedLookup = Callable[[TopicPartition], OffsetAndMetadata | None]
"""Returns the committed position of a partition; None without a commit or a group."""


class PartitionCursor:
    """The position of a consumer in one partition, and what it has fetched ahead.

    The position is the offset of the next record to return.  It is None until a poll or
    `position` resolves it, to the committed offset, or else according to ``reset``;
    and again after a lazy seek to the beginning or the end.
    """

    def __init__(
        self,
        root: Root,
        decoder: RecordDecoder,
        partition: TopicPartition,
        reset: str,
        committed: CommittedLookup,
        counts: FetchCounts,
        client: Client,
    ) -> None:
        self._root, self._decoder, self.partition = root, decoder, partition
        self._counts = counts
        """Of all partitions of the topic."""
        self._client = client
        self._listeners: tuple[Listener, ...] = ()
        """Those of the topic that have seen the partition assigned."""
        self._config: TopicConfig | None = None
        """The settings that they subscribed to."""
        self._resumed_at: int | None = None
        """The committed position at which it began; None if it began elsewhere."""
        self._fetched = False
        """Whether the cursor has fetched records."""
        self._record_bytes = 0.0
        """Bytes per record of the batch that is being returned."""
        self._reset = reset
        """The setting auto.offset.reset."""
        self._start: str | int = reset
        """Where to begin without a commit: an offset, or a value of auto.offset.reset."""
        self._committed_lookup: CommittedLookup | None = committed
        """Used when the position is resolved; None after that, and after a seek."""
        log = root.partition(*partition)
        self.topic_id, self.tail_key = log.topic_id, log.tail_key
        self._assigned_log = log
        """The log that was reported to listeners."""
        self.paused = False
        self._position: int | None = None
        self._last_set: int | None = None
        """The last position that was set otherwise than by returning records."""
        self._polled = False
        """Whether a poll began with this position, or the program sought it."""
        self._committed_by_program = False
        """Whether the program committed an offset and no record was returned since."""
        self.committed: int | None = None
        """The last committed offset that this consumer saw; it need not be committed again."""
        self._batches: deque[Batch] = deque()
        self._run: RecordRun | None = None
        self._arrow: ArrowDecoder | TypedArrowDecoder | None = None
        self._deserializers: Deserializers | None = None
        """Those for what was fetched last; None if they were not needed yet."""
        self._reader: PartitionReader | None = None
        self._epoch: int | None = None
        """The leader epoch of the position, while there is no reader that knows it."""
        self._generation = root.generation
        self._end_row: bytes | None = None
        """The row of the partition's tail when the reader had reached its end."""
        self._row: bytes | None = None
        """The row of the tail as `is_idle` saw it, until the next fetch uses it."""

    @property
    def log(self) -> PartitionLog:
        """The log of the assigned partition, not of a later topic with the same name."""
        log = self._root.partition(*self.partition)
        if log.topic_id != self.topic_id:
            raise UnknownTopicOrPartitionError(
                "The topic was deleted and created again",
                topic=self.partition.topic,
                partition=self.partition.partition,
                todo="Assign the partition again; its offsets begin at 0.",
            )
        return log

    # The position

    @property
    def known_position(self) -> int | None:
        """The position, or None if it is not resolved yet."""
        run = self._run
        return self._position if run is None else run.position

    def lag(self) -> int | None:
        """Return how many offsets are left to the end; None without a position."""
        position = self.known_position
        return None if position is None else max(self.log.end_offset() - position, 0)

    def progress(self) -> Progress:
        """Return how far it is; may be called from any thread."""
        run, lag, lead = self._run, None, None
        untaken = 0 if run is None else run.left
        # The log may be closed, or the topic deleted.
        with suppress(EmbedlogError):
            lag, position = self.lag(), self.known_position
            if position is not None:
                lead = max(position - self.log.start_offset(), 0)
        return Progress(untaken, untaken * self._record_bytes, lag, lead)

    @property
    def consumed(self) -> int | None:
        """The position that auto-commit commits; None if there is none.

        As in Kafka, this is the position with which a poll began or ended, or that the
        program sought.  Two things differ from Kafka's ``allConsumed``: a position that only
        `position` resolved does not count, since a group that never polled has read nothing;
        and an offset that the program committed stays until further records are returned,
        where Kafka's close commits the position over it.
        """
        position = self.known_position
        if not self._polled or (self._committed_by_program and position == self._last_set):
            return None
        return position

    def note_commit_by_program(self, offset: int) -> None:
        """Note that the program, not auto-commit, committed an offset."""
        self.committed, self._committed_by_program = offset, True
        self._last_set = self.known_position

    def position(self) -> int:
        """Return the position, resolving it if necessary.

        Raises:
            NoOffsetForPartitionError: There is no commit, and auto_offset_reset is "none".
        """
        position = self.known_position
        if position is not None:
            return position
        lookup = self._committed_lookup
        committed = None if lookup is None else lookup(self.partition)
        if committed is not None:
            # The reader compares the epochs: the log may have been truncated below it (A36).
            self.committed, self._epoch = committed.offset, committed.leader_epoch
            self._resumed_at = committed.offset
        position = self._offset_of(self._start) if committed is None else committed.offset
        self._committed_lookup = None
        self._set_position(position)
        why = "without a commit" if committed is None else "where the group committed"
        _log.debug("%s-%d: begins at offset %d, %s", *self.partition, position, why)
        return position

    def resolve_for_poll(self) -> None:
        """Resolve the position at the beginning of a poll."""
        self.position()
        self._polled = True

    def _offset_of(self, start: str | int) -> int:
        if isinstance(start, int):
            return start
        if start == "none":
            raise NoOffsetForPartitionError(
                "The partition has no position, and auto_offset_reset is 'none'",
                topic=self.partition.topic,
                partition=self.partition.partition,
                todo="Seek to an offset, or set auto_offset_reset.",
            )
        return self.log.start_offset() if start == "earliest" else self.log.end_offset()

    def _set_position(self, offset: int | None) -> None:
        """Set the position otherwise than by returning records."""
        if self.known_position != self._last_set:
            self._committed_by_program = False
        self._position = self._last_set = offset

    def seek(self, offset: int) -> None:
        """Set the position, and discard what was fetched ahead."""
        _log.debug("%s-%d: seek to offset %d", *self.partition, offset)
        self.discard_buffer()
        self._set_position(offset)
        self._committed_lookup, self._polled = None, True

    @property
    def leader_epoch(self) -> int | None:
        """The leader epoch in which the position was read; None if unknown."""
        return self._epoch if self._reader is None else self._reader.leader_epoch

    def request_reset(self, strategy: str) -> None:
        """Have the position resolved to "earliest" or "latest" when it is needed next."""
        self.discard_buffer()
        self._set_position(None)
        self._committed_lookup, self._start, self._polled = None, strategy, False

    def start_at(self, start: str | int) -> None:
        """Set where to begin without a commit; "latest" means the current end."""
        self._start = self.log.end_offset() if start == "latest" else start

    def recall_records(self) -> None:
        """Take back the records that an iterator still holds; they are returned again later."""
        if self._run is not None:
            self._position = position = self._run.position
            left = self._run.left
            for listener in self._listeners:
                listener.recalled(self._assigned_log, position)
            self._counts.records -= left
            self._counts.bytes -= left * self._record_bytes
            self._run.recall()
            self._run = None

    def discard_buffer(self) -> None:
        """Discard what was fetched ahead; the position stays."""
        self.recall_records()
        self._batches.clear()
        self._reader = self._end_row = self._epoch = None

    def close(self) -> None:
        """Discard what was fetched ahead; the partition is not assigned any more."""
        self.discard_buffer()
        self._set_listeners(())

    def _update_listeners(self, config: TopicConfig) -> None:
        """Take the listeners that have subscribed to a topic with these settings."""
        self._config = config
        if self._client.name and not self.partition.topic.startswith(INTERNAL):
            self._set_listeners(self._root.listeners.of(config, self._client))

    def _set_listeners(self, listeners: tuple[Listener, ...]) -> None:
        before, self._listeners = self._listeners, listeners
        for listener in before:
            if listener not in listeners:
                listener.ceased(self._assigned_log)
        for listener in listeners:
            if listener not in before:
                self._assigned_log = self.log
                committed = None if self._fetched else self._resumed_at
                listener.assigned(self._assigned_log, committed, late=self._fetched)

    # Fetching

    def is_idle(self, row: bytes | None) -> bool:
        """Return whether there is nothing to return, given the row of the partition's tail."""
        self._row = row
        return row is not None and row == self._end_row and not self._batches

    @property
    def buffered_bytes(self) -> int:
        """Bytes fetched but not returned yet."""
        return sum(batch.size for batch in self._batches)

    def fetch_if_empty(self, max_bytes: int) -> int:
        """Fetch unless fetched records are left; return how many bytes, see `fetch`."""
        return 0 if self._batches and self._head() is not None else self.fetch(max_bytes)

    def fetch(self, max_bytes: int) -> int:
        """Fetch the next batches; return how many bytes.

        Raises:
            OffsetOutOfRangeError, LogTruncatedError: The position does not exist any more,
                and auto_offset_reset is "none".
            CorruptBatchError: The next batch is damaged.
            UnknownTopicOrPartitionError: The topic was deleted.
        """
        while True:
            # The row is read before the data: an append in between must not be missed.
            row, self._row = self._row, None
            if row is None:
                row = self._root.context.live.get(self.tail_key)
            try:
                tail = None if row is None else unpack_tail(row)
                reader = self._open_reader()
                batches = reader.read(max_bytes, tail)
            except LogTruncatedError as error:
                self._handle_truncation(error)
                continue
            except OffsetOutOfRangeError as error:
                self._handle_out_of_range(error)
                continue
            # Skip control batches, and batches that compaction emptied.
            useful = [batch for batch in batches if batch.count and not batch.flags & CONTROL]
            if batches and not useful and not self._batches:
                # Moving past offsets without records does not count as returning records.
                after = batches[-1].next_offset
                if self.known_position == self._last_set:
                    self._last_set = after
                self._position = after
            if useful or not batches:
                at_end = not batches and tail is not None and reader.is_at_end(tail)
                self._end_row = row if at_end else None
                self._batches += useful
                self._deserializers = None
                size = sum([batch.size for batch in useful])
                if useful:
                    self._counts.count_fetch(size)
                    if reader.config is not self._config:
                        self._update_listeners(reader.config)
                    self._fetched = True
                return size

    def _open_reader(self) -> PartitionReader:
        # In a forked child the parent's reader must not be used.
        if self._generation != self._root.generation:
            if self._reader is not None:
                self._epoch = self._reader.leader_epoch
            self._reader, self._generation = None, self._root.generation
        if self._reader is None:
            offset = self._batches[-1].next_offset if self._batches else self.position()
            self._reader = self.log.reader(offset, self._epoch)
        return self._reader

    def _handle_out_of_range(self, error: OffsetOutOfRangeError) -> None:
        """Reset the position according to auto_offset_reset."""
        self._reader = None
        # What was fetched before is still valid: reset the position after it was returned.
        if self._batches or self._reset == "none":
            raise error
        before, after = self._position, self._offset_of(self._reset)
        # They must know of what is left out, also if it is committed before anything is returned.
        self._update_listeners(self.log.config)
        self._set_position(after)
        _log.warning(
            "%s-%d: offset %s is out of range; reset to %d (auto_offset_reset=%s)",
            *(*self.partition, before, after, self._reset),
        )

    def _handle_truncation(self, error: LogTruncatedError) -> None:
        """Go back to where the log was truncated, unless auto_offset_reset is "none".

        As in Kafka (KIP-320), also with "latest": no record written after the truncation is
        skipped, and none before it is returned again.
        """
        assert error.next_offset is not None
        before = self.position()
        if error.next_offset < before:
            if self._reset == "none":
                raise error
            _log.warning(
                "%s-%d: the log was truncated; going back from offset %d to %d",
                *(*self.partition, before, error.next_offset),
            )
        # Fetched records may have been truncated as well; they are fetched again if they exist.
        self.seek(min(before, error.next_offset))

    # Returning

    def _head(self) -> Batch | None:
        """Return the batch that contains the position; drop those before it."""
        batches = self._batches
        position = self.known_position or 0
        while batches:
            head = batches[0]
            if head.next_offset > position:
                return head
            batches.popleft()
            self._run = None
            self._position = position
        return None

    def next_run(self) -> RecordRun | None:
        """Return the records of the batch at the position, or None without one."""
        while self._batches and (head := self._head()) is not None:
            run = self._run
            if run is None or run.position >= run.next_offset:
                self._position = position = self.position()
                self._run = None
                if (deserializers := self._deserializers) is None:
                    deserializers = self._decoder.deserializers(self.partition.topic)
                    self._deserializers = deserializers
                run = self._decoder.decode(head, self.partition, position, deserializers)
                self._run = run
                self._count_records(head, run.left)
                for listener in self._listeners:
                    listener.read(self._assigned_log, head, position, run.next_offset)
            if run.position < head.next_offset:
                return run
        return None

    def next_rows(self, query: ColumnQuery, max_rows: int, stop: int | None) -> Any:
        """Return rows of the batch at the position as columns; None if nothing is fetched."""
        if self._run is not None:
            self.recall_records()
        while (head := self._head()) is not None:
            arrow = self._arrow_decoder(query)
            position, after = self.position(), head.next_offset
            try:
                whole = position <= head.base_offset and (stop is None or stop >= after)
                if whole and head.count <= max_rows:
                    rows = arrow.decode(head, None)
                else:
                    rows, after = _partial_rows(arrow, head, position, stop, max_rows)
            except CorruptBatchError as error:
                raise locate_error(error, head, self.partition, position) from error
            self._position = max(after, position)
            if after > position:
                for listener in self._listeners:
                    listener.read(self._assigned_log, head, position, after)
            if rows is not None and rows.num_rows:
                self._count_records(head, rows.num_rows)
                return rows
            if rows is None and after < head.next_offset:
                return None
        return None

    def _arrow_decoder(self, query: ColumnQuery) -> ArrowDecoder | TypedArrowDecoder:
        """Return the decoder of the fetched batches; a typed topic's has the current schema."""
        if (deserializers := self._deserializers) is None:
            deserializers = self._decoder.deserializers(self.partition.topic)
            self._deserializers = deserializers
        arrow, typed = self._arrow, deserializers.typed
        if arrow is None or arrow.query is not query or arrow.typed is not typed:
            if typed is None:
                arrow = ArrowDecoder(self.partition, query, self._decoder.verify)
            else:
                arrow = TypedArrowDecoder(self.partition, query, typed)
            self._arrow = arrow
        return arrow

    def _count_records(self, batch: Batch, count: int) -> None:
        """Count records of a batch that are about to be returned."""
        counts = self._counts
        self._record_bytes = record_bytes = batch.size / batch.count
        counts.records += count
        counts.bytes += count * record_bytes

    def take_records(self, max_records: int, stop: int | None) -> tuple[list[Record], int] | None:
        """Take some records of one batch, and their number; only those below ``stop``."""
        run = self.next_run()
        if run is None or (stop is not None and run.position >= stop):
            return None
        records = run.records if stop is None else run.records_before(stop)
        taken = list(islice(records, max_records))
        return (taken, len(taken)) if taken else None

    def take_rows(
        self, query: ColumnQuery, max_records: int, stop: int | None
    ) -> tuple[list[Any], int] | None:
        """Take some rows of one batch as columns, and their number; only those below ``stop``."""
        rows = self.next_rows(query, max_records, stop)
        return None if rows is None else ([rows], rows.num_rows)

    def take_iterator(self, max_offsets: int | None, stop: int | None) -> Iterator[Record] | None:
        """Take the records of one batch as an iterator, which makes each record when needed.

        Args:
            max_offsets: At most the records of so many offsets; None is no limit.
            stop: Only records below this offset.
        """
        run = self.next_run()
        if run is None:
            return None
        if max_offsets is not None:
            limit = run.position + max_offsets
            stop = limit if stop is None else min(stop, limit)
        return run.records_before(stop)


def _partial_rows(
    arrow: ArrowDecoder | TypedArrowDecoder,
    batch: Batch,
    position: int,
    stop: int | None,
    max_rows: int,
) -> tuple[Any, int]:
    """Return some rows of a batch, or None if there are none, and the position after them."""
    after = batch.next_offset if stop is None else min(stop, batch.next_offset)
    offsets = batch_offsets(batch)
    first, end = bisect_left(offsets, position), bisect_left(offsets, after)
    if end <= first:
        return None, after
    if end - first > max_rows:
        end = first + max_rows
        after = offsets[end]
    return arrow.decode(batch, slice(first, end)), after
