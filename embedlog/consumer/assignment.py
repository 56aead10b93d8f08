"""What a consumer was given to read, and how far it has got in each partition."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from embedlog.batch import CONTROL, Batch
from embedlog.consumer.deserialize import (
    ArrowDecoder,
    RecordDecoder,
    RecordRun,
    located,
    rows_between,
)
from embedlog.errors import (
    CorruptBatchError,
    EmbedlogError,
    IllegalStateError,
    LogTruncatedError,
    NoOffsetForPartitionError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)
from embedlog.partition import tail
from embedlog.partition.partition_log import PartitionLog
from embedlog.partition.reader import PartitionReader
from embedlog.partition.tail import Tail
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.root.root import Root

_log = logging.getLogger(__name__)


CommittedPosition = Callable[[TopicPartition], OffsetAndMetadata | None]
"""Returns what the group committed for a partition; None without a commit, or a group."""


class PartitionCursor:
    """One partition of an assignment: its position, and what was read and not returned yet.

    The position is the offset of the next record to return.  It is None until a
    poll or `position` resolves it: to what the group committed, else to where
    ``reset`` says (E1, E2); after a lazy seek to the start or the end (E5).
    """

    def __init__(
        self,
        root: Root,
        decoder: RecordDecoder,
        where: TopicPartition,
        reset: str,
        committed: CommittedPosition,
    ) -> None:
        self._root, self._decoder, self.where = root, decoder, where
        self._reset = reset
        """What to do about a position that is not there (auto.offset.reset)."""
        self._start: str | int = reset
        """Where to begin: an offset, or one of the words of auto.offset.reset."""
        self._look_up: CommittedPosition | None = committed
        """Asked first when the position is resolved; None after that, and after a seek."""
        log = root.partition(*where)
        self.topic_id, self.tail_key = log.topic_id, log.tail_key
        self.paused = False
        self._position: int | None = None
        self._moved_to: int | None = None
        """The last position that was set otherwise than by returning records."""
        self._polled = False
        """Whether a poll began with this position known, or the program set it."""
        self._overruled = False
        """Whether the program committed an offset, and no record was returned since."""
        self.committed: int | None = None
        """What the group committed last, if this consumer knows it: need not be committed again."""
        self._batches: deque[Batch] = deque()
        self._run: RecordRun | None = None
        self._table: ArrowDecoder | None = None
        self._reader: PartitionReader | None = None
        self._epoch: int | None = None
        """The leader epoch in which the position was read, where the reader does not know it."""
        self._generation = root.generation
        self._seen: bytes | None = None
        """The row of the partition's end when the reader found nothing after it."""
        self._row: bytes | None = None
        """The same row as of the look that found it changed, until somebody reads by it."""

    @property
    def log(self) -> PartitionLog:
        """The log of the partition that was assigned, not of a later one of the same name."""
        log = self._root.partition(*self.where)
        if log.topic_id != self.topic_id:
            raise UnknownTopicOrPartitionError(
                "the topic was deleted and created again",
                topic=self.where.topic,
                partition=self.where.partition,
                todo="assign it anew; its offsets begin at 0",
            )
        return log

    # The position

    @property
    def place(self) -> int | None:
        """The position, if it is known."""
        return self._position if self._run is None else self._run.position

    @property
    def consumed(self) -> int | None:
        """The position, if auto-commit is to commit it; None if not (E20).

        As in Kafka, that is what polls began or ended with, and what the program sought.
        Two things differ from Kafka's ``allConsumed``.  A position that only `position`
        resolved does not count: a group that never polled has read nothing.  And an
        offset that the program committed stays until further records are returned:
        Kafka's close commits the position over it.
        """
        place = self.place
        if not self._polled or (self._overruled and place == self._moved_to):
            return None
        return place

    def overrule(self, offset: int) -> None:
        """Note that the program committed an offset."""
        self.committed, self._overruled, self._moved_to = offset, True, self.place

    def position(self) -> int:
        """Return the position; resolves it first, if need be (E3)."""
        place = self.place
        return self._resolve() if place is None else place

    def _resolve(self) -> int:
        found = None if self._look_up is None else self._look_up(self.where)
        if found is not None:
            # The reader compares the epochs: the log may have been cut below it since (A36).
            self.committed, self._epoch = found.offset, found.leader_epoch
        place = self._find(self._start) if found is None else found.offset
        self._look_up = None
        self._move(place)
        return place

    def settle(self) -> None:
        """Resolve the position, as a poll begins."""
        self.position()
        self._polled = True

    def _find(self, start: str | int) -> int:
        if isinstance(start, int):
            return start
        if start == "none":
            raise NoOffsetForPartitionError(
                "there is no position, and auto_offset_reset is 'none'",
                topic=self.where.topic,
                partition=self.where.partition,
                todo="seek, or set auto_offset_reset",
            )
        return self.log.start_offset() if start == "earliest" else self.log.end_offset()

    def _move(self, offset: int | None) -> None:
        """Set the position, otherwise than by returning records."""
        if self.place != self._moved_to:
            self._overruled = False
        self._position = self._moved_to = offset

    def seek(self, offset: int) -> None:
        """Go on from there; what was read ahead is thrown away (E5)."""
        self.forget()
        self._move(offset)
        self._look_up, self._polled = None, True

    @property
    def leader_epoch(self) -> int | None:
        """The epoch of the log in which the position was read, if that is known."""
        return self._epoch if self._reader is None else self._reader.leader_epoch

    def seek_lazily(self, wanted: str) -> None:
        """Go on from the start or the end as they are when the position is next needed."""
        self.forget()
        self._move(None)
        self._look_up, self._start, self._polled = None, wanted, False

    def begin(self, start: str | int) -> None:
        """Set where to begin if the group committed nothing; "latest" is the end as of now."""
        self._start = self.log.end_offset() if start == "latest" else start

    def withdraw(self) -> None:
        """Take back the records that an iteration still holds; they are returned again later."""
        if self._run is not None:
            self._position = self._run.position
            self._run.withdraw()
            self._run = None

    def forget(self) -> None:
        """Throw away what was read ahead; the position stays."""
        self.withdraw()
        self._batches.clear()
        self._reader = self._seen = self._epoch = None

    # Reading

    def asleep(self, row: bytes | None) -> bool:
        """Whether there is nothing to return, given the row of the partition's end."""
        self._row = row
        return row is not None and row == self._seen and not self._batches

    @property
    def buffered(self) -> int:
        """Bytes read and not returned yet."""
        return sum(one.size for one in self._batches)

    def fill(self, max_bytes: int) -> int:
        """Read on if everything that was read is returned; see `fetch`."""
        return 0 if self._batches and self._head() is not None else self.fetch(max_bytes)

    def fetch(self, max_bytes: int) -> int:
        """Read on from what was read before; return how many bytes came.

        Raises:
            OffsetOutOfRangeError, LogTruncatedError: The position is gone and
                auto_offset_reset is "none".
            CorruptBatchError: The next batch is damaged.
            UnknownTopicOrPartitionError: The topic was deleted.
        """
        while True:
            # The row before the look: what comes in between must not be slept through.
            row, self._row = self._row, None
            if row is None:
                row = self._root.context.live.get(self.tail_key)
            try:
                known = None if row is None else tail.unpack(row)
                found = self._reading().read(max_bytes, known)
            except LogTruncatedError as error:
                self._go_back(error)
                continue
            except OffsetOutOfRangeError as error:
                self._recover(error)
                continue
            # Markers and what compaction emptied count for nothing, so go on behind them.
            useful = [one for one in found if one.count and not one.flags & CONTROL]
            if found and not useful and not self._batches:
                self._skip_to(found[-1].next_offset)
            if useful or not found:
                self._seen = None if found or not self._is_end(known) else row
                self._batches += useful
                return sum([one.size for one in useful])

    def _skip_to(self, offset: int) -> None:
        """Move past offsets that have no records: nothing is returned by that."""
        if self.place == self._moved_to:
            self._moved_to = offset
        self._position = offset

    def _is_end(self, known: Tail | None) -> bool:
        """Whether the reader has come as far as this end of the partition allows."""
        return known is not None and self._reader is not None and self._reader.is_at_end(known)

    def _reading(self) -> PartitionReader:
        # What was taken from the root before a fork is void in the child.
        if self._generation != self._root.generation:
            if self._reader is not None:
                self._epoch = self._reader.leader_epoch
            self._reader, self._generation = None, self._root.generation
        if self._reader is None:
            offset = self._batches[-1].next_offset if self._batches else self.position()
            self._reader = self.log.reader(offset, self._epoch)
        return self._reader

    def _recover(self, error: OffsetOutOfRangeError) -> None:
        """The position is not in the log any more: find another, if that is wanted (E1)."""
        self._reader = None
        # What was read before is still good: the position is settled when it was returned.
        if self._batches or self._reset == "none":
            raise error
        before, after = self._position, self._find(self._reset)
        self._move(after)
        _log.warning(
            "%s-%d: offset %s is out of range, going on at %d (auto_offset_reset=%s)",
            *(*self.where, before, after, self._reset),
        )

    def _go_back(self, error: LogTruncatedError) -> None:
        """Records that were read are gone: go on where the log was cut, if that is wanted (A36).

        As Kafka does (KIP-320), whichever way ``auto_offset_reset`` says: nothing that
        came after the cut is skipped, and nothing before it returned again.
        """
        assert error.next_offset is not None
        before = self.position()
        if error.next_offset < before:
            if self._reset == "none":
                raise error
            _log.warning(
                "%s-%d: the log was cut, going back from offset %d to %d",
                *(*self.where, before, error.next_offset),
            )
        # What was read ahead may be gone as well: it is read again, if it is there.
        self.seek(min(before, error.next_offset))

    def _head(self) -> Batch | None:
        """The batch that the position is in; lets those go that are behind it."""
        batches = self._batches
        place = self.place or 0
        while batches:
            head = batches[0]
            if head.next_offset > place:
                return head
            batches.popleft()
            self._run = None
            self._position = place
        return None

    def run(self) -> RecordRun | None:
        """Return the records of the batch at the position; None if nothing was read (E10, E14)."""
        while self._batches and (head := self._head()) is not None:
            run = self._run
            if run is None or run.position >= run.next_offset:
                self._position = position = self.position()
                self._run = None
                run = self._run = self._decoder.run(head, self.where, position)
            if run.position < head.next_offset:
                return run
        return None

    def arrow(self, names: tuple[str, ...], most: int, stop: int | None) -> Any:
        """Return up to ``most`` rows of the batch at the position; None if nothing was read."""
        if self._run is not None:
            self.withdraw()
        table = self._table
        if table is None or table.names is not names:
            table = self._table = self._decoder.table(self.where, names)
        while (head := self._head()) is not None:
            place, after = self.position(), head.next_offset
            try:
                whole = place <= head.base_offset and (stop is None or stop >= after)
                if whole and head.count <= most:
                    found = table.rows(head, None)
                else:
                    found, after = _part(table, head, place, stop, most)
            except CorruptBatchError as error:
                raise located(error, head, self.where, place) from error
            self._position = max(after, place)
            if found is not None or after < head.next_offset:
                return found
        return None


def _part(
    table: ArrowDecoder, head: Batch, place: int, stop: int | None, most: int
) -> tuple[Any, int]:
    """Return some rows of a batch, None if there are none there, and the position after them."""
    after = head.next_offset if stop is None else min(stop, head.next_offset)
    rows = rows_between(head, place, after)
    if rows.stop <= rows.start:
        return None, after
    if rows.stop - rows.start > most:
        rows = slice(rows.start, rows.start + most)
        after = _offset_of(head, rows.stop)
    return table.rows(head, rows), after


def _offset_of(batch: Batch, row: int) -> int:
    """Return the offset of one row."""
    if batch.has_offsets:
        return int(batch.offsets()[row].as_py())
    return batch.base_offset + row


class Assignment:
    """The partitions of one consumer, in the order of whose turn it is (E9).

    Who decides what is in it is somebody else: the program, the topics it
    named, or its group.
    """

    def __init__(self, root: Root, decoder: RecordDecoder, committed: CommittedPosition) -> None:
        self._root, self._decoder, self._committed = root, decoder, committed
        self._feeds: dict[TopicPartition, PartitionCursor] = {}
        self._turn: deque[PartitionCursor] = deque()
        self._unsettled: set[PartitionCursor] = set()
        """Those whose position the next poll resolves."""

    def __iter__(self) -> Iterator[PartitionCursor]:
        """Go through the partitions, the one served longest ago first."""
        return iter(list(self._turn))

    def awake(self) -> list[PartitionCursor]:
        """Return those that may have something to return, the one served longest ago first.

        One look at all ends together: hundreds of partitions that are quiet
        cost little, however often something happens elsewhere.
        """
        if len(self._turn) == 1:
            # By far the most often: half of the time, which counts after a sleep.
            feed = self._turn[0]
            row = self._root.context.live.get(feed.tail_key)
            return [] if feed.asleep(row) or feed.paused else [feed]
        feeds = [feed for feed in self._turn if not feed.paused]
        keys = [feed.tail_key for feed in feeds]
        rows = self._root.context.live.read(lambda txn: list(map(txn.get, keys)))
        return [feed for feed, row in zip(feeds, rows, strict=True) if not feed.asleep(row)]

    def __len__(self) -> int:
        return len(self._feeds)

    def partitions(self) -> set[TopicPartition]:
        """Return what is assigned."""
        return set(self._feeds)

    def find(self, where: TopicPartition) -> PartitionCursor | None:
        """Return one partition of it; None if it is not assigned."""
        return self._feeds.get(where)

    def feed(self, where: TopicPartition) -> PartitionCursor:
        """Return one partition of it.

        Raises:
            IllegalStateError: It is not assigned.
        """
        found = self.find(where)
        if found is None:
            raise IllegalStateError(
                "the partition is not assigned to this consumer",
                topic=where[0],
                partition=where[1],
                todo="assign it first",
            )
        return found

    def settle(self) -> None:
        """Resolve the positions that are not known yet, also of paused partitions, as Kafka does.

        What fails here fails again when the partition is read, and is raised then.
        """
        for feed in list(self._unsettled) if self._unsettled else ():
            with suppress(EmbedlogError):
                feed.settle()
                self._unsettled.discard(feed)

    def seek_lazily(self, feed: PartitionCursor, wanted: str) -> None:
        """Have the next poll begin a partition at its start or its end."""
        feed.seek_lazily(wanted)
        self._unsettled.add(feed)

    def replace(self, wanted: Iterable[TopicPartition], reset: str) -> list[PartitionCursor]:
        """Make these the partitions; those kept keep position and pause.  Returns the new ones.

        A partition of a topic that was deleted and created again is a new one.

        Raises:
            UnknownTopicOrPartitionError: There is no such partition; nothing was changed.
        """
        feeds: dict[TopicPartition, PartitionCursor] = {}
        for where in wanted:
            kept = self._feeds.get(where)
            if kept is None or kept.topic_id != self._root.partition(*where).topic_id:
                kept = self._new(where, reset)
            feeds[where] = kept
        old = set(map(id, self._feeds.values()))
        for where in [where for where in self._feeds if self._feeds[where] is not feeds.get(where)]:
            self.remove(where)
        added = [feed for feed in feeds.values() if id(feed) not in old]
        self._feeds = feeds
        self._turn.extend(added)
        self._unsettled.update(added)
        return added

    def _new(self, where: TopicPartition, reset: str) -> PartitionCursor:
        return PartitionCursor(self._root, self._decoder, where, reset, self._committed)

    def add(self, where: TopicPartition, reset: str) -> PartitionCursor:
        """Give one partition more.

        Raises:
            UnknownTopicOrPartitionError: There is no such partition.
        """
        feed = self._feeds[where] = self._new(where, reset)
        self._turn.append(feed)
        self._unsettled.add(feed)
        return feed

    def remove(self, where: TopicPartition) -> None:
        """Take one partition away, if it is there; what was read ahead of it is thrown away."""
        feed = self._feeds.pop(where, None)
        if feed is not None:
            feed.forget()
            self._turn.remove(feed)
            self._unsettled.discard(feed)

    def clear(self) -> None:
        """Take all away."""
        for where in list(self._feeds):
            self.remove(where)

    def served(self, feed: PartitionCursor) -> None:
        """Put a partition last: it had its turn."""
        if self._turn[-1] is not feed:
            self._turn.remove(feed)
            self._turn.append(feed)

    def first(self, feed: PartitionCursor) -> None:
        """Put a partition first: it has an error to tell (E10)."""
        self._turn.remove(feed)
        self._turn.appendleft(feed)
