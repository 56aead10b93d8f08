"""Writes the dead letters of a share group: each with the state of its record, in one transaction.

A record that is given up is first `ARCHIVING`, so that whatever process dies, the next one finds it
and writes its letter.  Of several that do, the transaction of one commits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from embedlog.catalog import TopicInfo
from embedlog.dead_letter_queue import Failure, ensure_topic, letter
from embedlog.errors import CommitFailedError, CorruptBatchError, EmbedlogError
from embedlog.groups.share_state import RecordRange
from embedlog.lazy import logging
from embedlog.publish.transaction import GroupOffsets
from embedlog.record import ConsumerGroupMetadata, Record
from embedlog.root.root import Root
from embedlog.share.share_group import ShareGroup, to_archive
from embedlog.share.stored_records import StoredRecords

if TYPE_CHECKING:
    from embedlog.producer import Producer

_log = logging.getLogger("embedlog.share")
_RETRY_SECONDS = 1.0
_MOST_RANGES = 100
"""How many ranges of records are written in one transaction."""


class LetterWriter:
    """Writes the dead letters of one group.

    Args:
        group: The group.
        root: The log.
    """

    def __init__(self, group: ShareGroup, root: Root) -> None:
        self._group, self._root = group, root
        self._producer: Producer[Any, Any] | None = None
        self.causes: dict[tuple[Any, ...], BaseException] = {}
        """Why records failed, by topic, partition and offset, as far as this member knows."""
        self.due_at = inf
        """When to try again, after a failure."""

    def prepare(self, topics: Sequence[TopicInfo]) -> None:
        """Check or create the topic of the letters of some topics, if the group has one.

        Raises:
            InvalidConfigError: It cannot have them.
        """
        config = self._group.config()
        if topics and config.errors_deadletterqueue_topic_name is not None:
            ensure_topic(self._root, config, [info.name for info in topics])

    def write(
        self,
        ranges: Sequence[tuple[bytes, RecordRange]],
        partitions: Mapping[bytes, StoredRecords],
    ) -> None:
        """Write the letters of records that are given up; a failure is logged, and tried again.

        Args:
            ranges: The records, by the keys of their partitions.
            partitions: What reads them; those of other topics are left to other members.
        """
        mine = [(key, each) for key, each in ranges if key in partitions][:_MOST_RANGES]
        if not mine or (self.due_at != inf and monotonic() < self.due_at):
            return
        self.due_at, began = inf, monotonic()
        try:
            self._publish(mine, partitions)
        except CommitFailedError:
            pass  # Another member was faster.
        except EmbedlogError as error:
            # If a stopped process holds a lock, records must not wait for it again and again.
            took = monotonic() - began
            self.due_at = monotonic() + max(_RETRY_SECONDS, 10 * took)
            _log.error("Dead letters of group %s are not written yet: %s", self._group.name, error)

    def _publish(
        self, ranges: Sequence[tuple[bytes, RecordRange]], partitions: Mapping[bytes, StoredRecords]
    ) -> None:
        producer, config = self._producer_of_letters(), self._group.config()
        topics = {partitions[key].partition.topic for key, _ in ranges}
        count = ensure_topic(self._root, config, sorted(topics))
        producer.begin_transaction()
        try:
            for key, each in ranges:
                stored = partitions[key]
                try:
                    epoch = stored.log.tail().leader_epoch
                    records, _ = stored.read(each.first, each.stop, epoch)
                except CorruptBatchError as error:
                    _log.error("Damaged records become no dead letters: %s", error)
                    continue
                for record in records:
                    failure = self._failure(record, each)
                    producer.send(*letter(record, failure, count, config))
            member = ConsumerGroupMetadata(self._group.name)
            producer._commit_for_group(GroupOffsets(self._group, member, to_archive(ranges)))
            producer.commit_transaction()
        except BaseException:
            producer.abort_transaction()
            raise
        for key, each in ranges:
            where = *partitions[key].partition, each.first, each.stop, each.delivery_count
            _log.warning("%s-%d, offsets [%d, %d): dead letters after delivery %d", *where)

    def _failure(self, record: Record, given_up: RecordRange) -> Failure:
        now_ms, group, count = self._root.clock(), self._group.name, given_up.delivery_count
        cause = self.causes.pop(record[:3], None)
        if cause is not None:
            return Failure.of(
                *(record, group, cause),
                delivery_count=count,
                first_failed_ms=-1,
                last_failed_ms=now_ms,
            )
        why = "The record was rejected" if given_up.until else "The record was delivered too often"
        return Failure(*record[:3], group, count, why, last_failed_ms=now_ms)

    def _producer_of_letters(self) -> Producer[Any, Any]:
        if self._producer is None:
            from embedlog.producer import Producer

            self._producer = Producer(
                self._root, transactional_id="", key_serializer="bytes", value_serializer="bytes"
            )
            self._producer.init_transactions()
        return self._producer

    def close(self) -> None:
        """Close the producer."""
        if self._producer is not None:
            self._producer.close()
