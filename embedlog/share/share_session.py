"""What one member of a share group does: it joins, takes steps, reads what it acquired, leaves."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from typing import Any, Self

from embedlog.config import ConsumerConfig
from embedlog.consumer.deserialize import RecordDecoder
from embedlog.consumer.heartbeat import CHECKPOINT_SECONDS
from embedlog.consumer.static_assignment import MissingTopics
from embedlog.display import plural
from embedlog.errors import (
    CorruptBatchError,
    EmbedlogError,
    InvalidRecordStateError,
    UnknownMemberIdError,
    UnknownTopicOrPartitionError,
)
from embedlog.groups.share_state import GAP, RELEASE, RENEW, RETURN, RecordRange
from embedlog.lazy import logging
from embedlog.record import Record, TopicPartition
from embedlog.root.root import Root
from embedlog.share.held_records import HeldRecords
from embedlog.share.share_group import StepOutcome
from embedlog.share.share_member import ShareMember
from embedlog.share.stored_records import ShareRecord, StoredRecords, share_record

_log = logging.getLogger("embedlog.share")

CommitCallback = Callable[[dict[TopicPartition, set[int]], EmbedlogError | None], object]


class CommitResults(dict[TopicPartition, EmbedlogError | None]):
    """What became of acknowledgements, by partition; a task may await it."""

    def __await__(self) -> Generator[Any, None, Self]:
        return self
        yield


class ShareSession(ShareMember):
    """The member of a share consumer; it joins with its first step.

    Args:
        root: The log.
        group: The id of the group.
        config: The settings of its consumer.
        decoder: Decodes records.

    Raises:
        InvalidGroupIdError: The id is not valid.
    """

    def __init__(
        self, root: Root, group: str, config: ConsumerConfig, decoder: RecordDecoder
    ) -> None:
        super().__init__(root, group)
        self._config, self._decoder = config, decoder
        self.generation = root.generation
        """Of the process."""
        self.records = HeldRecords(self.group.uptime)
        self.errors: deque[EmbedlogError] = deque()
        """What the next calls raise."""
        self.callback: CommitCallback | None = None
        """Is told what became of acknowledgements."""
        self._unlock: weakref.finalize[Any, Any] | None = None
        self._catalog_version = -1
        self._missing = MissingTopics()

    def resubscribe(self) -> None:
        """Look at the topics with the next call."""
        self._catalog_version = -1

    def acquire(self, topics: Collection[str], limit: int) -> list[ShareRecord]:
        """Commit acknowledgements, and return records: those that were renewed, or else others.

        Raises:
            EmbedlogError: Of `errors`, if there are no records.
        """
        self._follow(topics)
        if renewed := self.records.renewed():
            self.step(0)
            if renewed := [each for each in renewed if self.records.has(each)]:
                return renewed
        while True:
            _, outcome = self.step(limit)
            records = self._read(outcome) if outcome is not None else []
            if self.errors and not records:
                raise self.errors.popleft()
            if records or not (self.records.has_gaps or self.must_reap):
                return records

    def _follow(self, topics: Collection[str]) -> None:
        """Join the group, and begin in new partitions of the topics."""
        self.checkpoint_after(CHECKPOINT_SECONDS)
        version = self._root.context.catalog.version()
        if self.member is None:
            self._root.context.check_writable()
            self.group.remove_dead_members()
            self.member = member = self.group.join(topics, self._config.client_id)
            self._unlock = weakref.finalize(self, member.unlock)
            self._catalog_version = -1
        if version == self._catalog_version:
            return
        if set(topics) != set(self.member.info.topics):
            self.member.resubscribe(topics)
        infos = [info for name, info in self._root.topics().items() if name in topics]
        self._missing.report(set(topics) - {info.name for info in infos})
        keys = {info.key(each): info for info in infos for each in range(info.partitions)}
        if keys.keys() != self.partitions.keys():
            self.group.begin(infos)
            self.letters.prepare(infos)
            size, before = self._config.max_partition_fetch_bytes, self.partitions
            self.partitions = {
                key: before.get(key)
                or StoredRecords(self._root.partition(info.name, number), self._decoder, size)
                for info in infos
                for number in range(info.partitions)
                for key in [info.key(number)]
            }
        self._catalog_version = version

    def step(self, limit: int) -> tuple[CommitResults, StepOutcome | None]:
        """Take one step of the group: acknowledge, and acquire."""
        records = self.records
        acknowledgements, sent = records.take_verdicts()
        try:
            outcome = self.take(acknowledgements, limit)
        except UnknownMemberIdError as error:
            _log.warning("%s; the consumer joins the group again", error)
            return self._lose_membership(sent), None
        except BaseException:
            records.put_back(sent)
            raise
        records.forget_gaps()
        records.forget_ended()
        for key in outcome.missing:
            self.partitions.pop(key, None)
            self._catalog_version = -1
        results = self._finish(sent, outcome)
        self.write_letters(outcome)
        return results, outcome

    def _finish(self, sent: list[ShareRecord], outcome: StepOutcome) -> CommitResults:
        """Forget what is done, and report what was refused."""
        refused: dict[bytes, list[tuple[int, int]]] = {}
        for key, first, stop in outcome.refused:
            refused.setdefault(key, []).append((first, stop))
        done: dict[TopicPartition, set[int]] = {}
        late: dict[TopicPartition, list[ShareRecord]] = {}
        for record in sent:
            partition, ranges = record.topic_partition, refused.get(record._key, ())
            if any(first <= record.offset < stop for first, stop in ranges):
                late.setdefault(partition, []).append(record)
            else:
                done.setdefault(partition, set()).add(record.offset)
                if record._verdict is not None and record._verdict[0] == RENEW:
                    self.records.note_renewal(record, outcome.renewed_until)
                    continue
            self.records.remove(record)
        results = CommitResults(dict.fromkeys(done))
        for partition, records in late.items():
            offsets = [record.offset for record in records]
            is_deleted = records[0]._key in outcome.missing
            results[partition] = error = self._refusal(partition, offsets, is_deleted)
            _log.warning("%s", error)
            if self.callback is not None:
                self.callback({partition: set(offsets)}, error)
        if done and self.callback is not None:
            self.callback(done, None)
        return results

    def _refusal(
        self, partition: TopicPartition, offsets: list[int], is_deleted: bool
    ) -> EmbedlogError:
        if is_deleted:
            return UnknownTopicOrPartitionError(
                "The topic of acknowledged records was deleted", **partition._asdict()
            )
        return InvalidRecordStateError(
            f"The locks of {plural(len(offsets), 'record')} had ended when they were acknowledged",
            topic=partition.topic,
            partition=partition.partition,
            group=self.group.name,
            offset=offsets[0],
            offsets=tuple(offsets),
            todo="Another consumer gets them, or has got them. Take fewer records at a time, "
            "renew their locks, or raise share.record.lock.duration.ms of the group.",
        )

    def _lose_membership(self, sent: list[ShareRecord]) -> CommitResults:
        """Forget all records: others have them."""
        outcome = StepOutcome()
        outcome.refused = [(record._key, record.offset, record._stop) for record in sent]
        results = self._finish(sent, outcome)
        member, self.member = self.member, None
        if member is not None:
            member.unlock()
        self.records.clear()
        self._due_at = 0.0
        return results

    # Reading

    def _read(self, outcome: StepOutcome) -> list[ShareRecord]:
        """Read what was acquired; note the offsets without records."""
        records: list[ShareRecord] = []
        for key, acquired in outcome.acquired:
            stored = self.partitions[key]
            try:
                found, following = stored.read(*acquired[:2], outcome.epochs[key])
            except CorruptBatchError as error:
                self.errors.append(error)
                self.records.add_gap(key, *acquired[:2], RELEASE)
                continue
            except UnknownTopicOrPartitionError:
                continue  # It was deleted just now.
            first = found[0].offset if found else following
            if first > acquired.first:
                self.records.add_gap(key, acquired.first, first, GAP)
            if following < acquired.stop:
                # The rest is damaged, or the log was truncated: the next call finds out.
                self.records.add_gap(key, following, acquired.stop, RETURN)
                acquired = acquired._replace(stop=following)
            records += self._deserialized(stored, found, key, acquired)
        return records

    def _deserialized(
        self, stored: StoredRecords, found: list[Record], key: bytes, acquired: RecordRange
    ) -> Iterator[ShareRecord]:
        stops = [record.offset for record in found[1:]] + [acquired.stop] * bool(found)
        each = self._decoder.deserialize(stored.partition, found)
        for (_, record, error), stop in zip(each, stops, strict=True):
            shared = share_record(record, acquired.delivery_count)
            shared._until, shared._key, shared._stop = acquired.until, key, stop
            self.records.add(shared)
            if error is None:
                yield shared
            else:
                # Unless the program says otherwise.
                shared._caller = error
                self.records.judge(shared, RELEASE)
                self.letters.causes[record[:3]] = error
                self.errors.append(error)

    # Leaving

    def leave(self) -> None:
        """Commit what was acknowledged, release all other records, and leave the group."""
        member = self.member
        if member is None or self.generation != self._root.generation:
            return
        try:
            if self.records.has_verdicts:
                self.step(0)
            self.records.give_back()
            self.step(0)
        finally:
            self.member = None
            member.leave()
            self.checkpoint_after(0.0)
