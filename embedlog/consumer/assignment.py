"""The partitions that are assigned to a consumer, in the order in which they are served."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from embedlog.consumer.counts import ConsumerCounts
from embedlog.consumer.cursor import CommittedLookup, PartitionCursor
from embedlog.consumer.deserialize import RecordDecoder
from embedlog.errors import EmbedlogError, IllegalStateError
from embedlog.listeners import Client
from embedlog.record import TopicPartition
from embedlog.root.root import Root


class Assignment:
    """A cursor for each assigned partition, the one served longest ago first.

    The partitions are chosen by the program, by `StaticAssignment`, or by the group.
    """

    def __init__(
        self,
        root: Root,
        decoder: RecordDecoder,
        committed: CommittedLookup,
        counts: ConsumerCounts,
        client: Client,
    ) -> None:
        self._root, self._decoder, self._committed = root, decoder, committed
        self.client = client
        """What listeners know of the consumer; its name is that of the group."""
        self._counts = counts
        self._cursors: dict[TopicPartition, PartitionCursor] = {}
        """In the order in which they are served."""
        self.snapshot: tuple[PartitionCursor, ...] = ()
        """All cursors, in any order; for other threads, since a move removes one for a moment."""
        self._unresolved: set[PartitionCursor] = set()
        """Those whose position the next poll resolves."""

    def __iter__(self) -> Iterator[PartitionCursor]:
        """Iterate over the partitions, the one served longest ago first."""
        return iter(list(self._cursors.values()))

    def __len__(self) -> int:
        return len(self._cursors)

    def partitions(self) -> set[TopicPartition]:
        """Return the assigned partitions; may be called from any thread."""
        return {cursor.partition for cursor in self.snapshot}

    def get(self, partition: TopicPartition) -> PartitionCursor | None:
        """Return the cursor of a partition; None if it is not assigned."""
        return self._cursors.get(partition)

    def cursor(self, partition: TopicPartition) -> PartitionCursor:
        """Return the cursor of a partition.

        Raises:
            IllegalStateError: The partition is not assigned.
        """
        cursor = self._cursors.get(partition)
        if cursor is None:
            raise IllegalStateError(
                "The partition is not assigned to this consumer",
                topic=partition[0],
                partition=partition[1],
                todo="Assign it first.",
            )
        return cursor

    # Positions and order

    def fetchable(self) -> list[PartitionCursor]:
        """Return the cursors that may have records, the one served longest ago first.

        Reads all tails in one transaction: hundreds of quiet partitions cost little, however
        often other partitions are appended to.
        """
        if len(self._cursors) == 1:
            # By far the most frequent case: takes half the time, which counts after a sleep.
            (cursor,) = self._cursors.values()
            row = self._root.context.live.get(cursor.tail_key)
            return [] if cursor.is_idle(row) or cursor.paused else [cursor]
        cursors = [cursor for cursor in self._cursors.values() if not cursor.paused]
        keys = [cursor.tail_key for cursor in cursors]
        rows = self._root.context.live.read(lambda txn: list(map(txn.get, keys)))
        return [
            cursor for cursor, row in zip(cursors, rows, strict=True) if not cursor.is_idle(row)
        ]

    def resolve_positions(self) -> None:
        """Resolve the unknown positions, of paused partitions too, as Kafka does.

        An error here occurs again when the partition is read, and is raised then.
        """
        for cursor in list(self._unresolved) if self._unresolved else ():
            with suppress(EmbedlogError):
                cursor.resolve_for_poll()
                self._unresolved.discard(cursor)

    def request_reset(self, cursor: PartitionCursor, strategy: str) -> None:
        """Have the next poll move a partition to its beginning or its end."""
        cursor.request_reset(strategy)
        self._unresolved.add(cursor)

    def move_to_end(self, cursor: PartitionCursor) -> None:
        """Serve a partition last: it was just served."""
        self._cursors[cursor.partition] = self._cursors.pop(cursor.partition)

    def move_to_front(self, cursor: PartitionCursor) -> None:
        """Serve a partition first: the next poll has to raise its error."""
        self._cursors = {cursor.partition: cursor} | self._cursors

    # Changing it

    def replace(self, partitions: Iterable[TopicPartition], reset: str) -> list[PartitionCursor]:
        """Assign exactly these partitions; kept ones keep position and pause.

        A partition of a topic that was deleted and created again counts as a new one.

        Returns:
            The cursors of the new ones.

        Raises:
            UnknownTopicOrPartitionError: A partition does not exist; nothing was changed.
        """
        chosen = dict.fromkeys(partitions)
        added = {}
        for partition in chosen:
            cursor = self._cursors.get(partition)
            if cursor is None or cursor.topic_id != self._root.partition(*partition).topic_id:
                added[partition] = self._new_cursor(partition, reset)
        self.remove(tp for tp in self.partitions() if tp not in chosen or tp in added)
        self._cursors |= added
        self.snapshot = tuple(self._cursors.values())
        self._unresolved.update(added.values())
        return list(added.values())

    def _new_cursor(self, partition: TopicPartition, reset: str) -> PartitionCursor:
        counts = self._counts.topic(partition.topic)
        return PartitionCursor(
            *(self._root, self._decoder, partition, reset, self._committed, counts, self.client)
        )

    def add(self, partition: TopicPartition, reset: str) -> PartitionCursor:
        """Assign one more partition.

        Raises:
            UnknownTopicOrPartitionError: The partition does not exist.
        """
        cursor = self._cursors[partition] = self._new_cursor(partition, reset)
        self.snapshot = tuple(self._cursors.values())
        self._unresolved.add(cursor)
        return cursor

    def remove(self, partitions: Iterable[TopicPartition]) -> None:
        """Remove partitions, if they are assigned, and discard what was fetched ahead."""
        for partition in partitions:
            cursor = self._cursors.pop(partition, None)
            if cursor is not None:
                cursor.close()
                self._unresolved.discard(cursor)
        self.snapshot = tuple(self._cursors.values())

    def clear(self) -> None:
        """Remove all partitions."""
        self.remove(self.partitions())
