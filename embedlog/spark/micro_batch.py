"""A streaming query on the log: from which position to which each micro-batch goes.

Spark asks in this order: where it begins (again and again, until the first
batch is planned), up to where there is something, what the tasks are.  All of
it happens in one process that lives as long as the query, and is killed when
the query ends: nothing here waits for a farewell.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from embedlog import catalog
from embedlog.consumer.group_client import group_of
from embedlog.errors import CommitFailedError, UnknownTopicOrPartitionError
from embedlog.groups.offsets import check_group_id
from embedlog.partition import PartitionLog
from embedlog.partition.extents import end_within, extents
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.spark import stream_offset
from embedlog.spark.input_partitions import PartitionOffsets, plan
from embedlog.spark.partition_reader import LogInputPartition
from embedlog.spark.rate_limit import TriggerDelay, share
from embedlog.spark.source import LogSource, Offsets, logger
from embedlog.spark.source_options import LATEST, OffsetBound, SourceOptions, check_stream
from embedlog.spark.stream_offset import StreamOffset

Json = Mapping[str, Any]

_HOLD_MS = 5000
"""Renew the lease so often, at most: Spark asks for new offsets ninety times a second."""


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class MicroBatchStream:
    """The driver's side of one streaming query.

    Args:
        options: What the reader was told.
        clock_ms: For maxTriggerDelay.

    Raises:
        InvalidConfigError: The options are not for a stream.
        NotALogError: There is no log.
        UnknownTopicOrPartitionError: A topic that is named is not there.
    """

    def __init__(self, options: SourceOptions, clock_ms: Callable[[], int] = _monotonic_ms) -> None:
        check_stream(options)
        if options.commit_to_group is not None:
            check_group_id(options.commit_to_group)
        self.options, self._clock_ms = options, clock_ms
        self._source: LogSource | None = None
        self._initial: dict[str, Any] | None = None
        self._target: Offsets | None = None
        self._patience: TriggerDelay | None = None
        self._name, self._held_ms = str(uuid.uuid4()), -_HOLD_MS
        if options.min_offsets is not None:
            self._patience = TriggerDelay(options.min_offsets, options.max_delay_ms)

    @property
    def source(self) -> LogSource:
        """The log, opened when first asked for: this object is also made to be pickled only."""
        if self._source is None:
            self._source = LogSource(self.options, durable=True)
        return self._source

    def close(self) -> None:
        """Let the log go, and what was held of it."""
        source, self._source = self._source, None
        if source is not None:
            source.release()
            source.close()

    def _hold(self, offsets: Offsets) -> None:
        """Keep what is from here on, if that was not done just now.

        An older lease reaches further back; that a batch's beginning is gone is told
        when it is planned.
        """
        now = self._clock_ms()
        if now - self._held_ms >= _HOLD_MS and self.source.hold(self._name, offsets):
            self._held_ms = now

    # Where it begins, and how far it goes

    def initial(self) -> dict[str, Any]:
        """Return where the query begins: the same at each call."""
        if self._initial is None:
            self.source.check_topics()
            bound = self.options.starting or OffsetBound("offset", LATEST)
            begin = self.source.positions(self.source.starts(bound))
            self._hold(dict(begin.offsets))
            self._initial = replace(begin, initial=True).to_json()
        return self._initial

    def latest(self, start: Json | None, limited: bool = True) -> Json:
        """Return where the next batch ends; ``start`` itself when there is nothing to do.

        Args:
            start: Where it begins; None from a Spark that does not say so (before 4.2).
            limited: Whether the limits of a trigger count; not for a query that runs once.

        Raises:
            DataLossError: What was being read is gone, unless that is not to fail.
        """
        if start is None:
            return self._latest_of_all()
        begin = stream_offset.from_json(start)
        there = self.source.partitions()
        self._check_all_there(begin, there)
        if not there:
            # A checkpoint without partitions would make the next run begin anew.
            return start
        known = self._known(begin, there)
        self._hold(known)
        backlog = {one: end - known[one] for one, end in self._published(known).items()}
        if limited and self._target is None and self._waits(sum(backlog.values())):
            return start
        ends = self._target_now(known) if self._target is not None else self.source.ends()
        if limited:
            ends = self._limited(known, ends)
        made = self.source.positions({one: max(end, known[one]) for one, end in ends.items()})
        if begin.initial:
            made = replace(made, base=begin)
        elif self._same(begin, made):
            return start
        return made.to_json()

    def _latest_of_all(self) -> Json:
        made = self.source.positions(self.source.ends())
        if self._initial is not None:
            made = replace(made, base=stream_offset.from_json(self._initial))
        return made.to_json()

    def _same(self, begin: StreamOffset, made: StreamOffset) -> bool:
        return begin.at(begin.offsets) == made

    def reported(self) -> dict[str, Any]:
        """Return how far the log goes, for the progress that Spark shows."""
        return self.source.positions(self.source.published()).to_json()

    def freeze(self) -> None:
        """Read no further than what is there now (Trigger.AvailableNow)."""
        self.source.check_topics()
        self._target = self.source.ends()

    def _published(self, known: Offsets) -> Offsets:
        return {one: max(end, known[one]) for one, end in self.source.published().items()}

    def _waits(self, backlog: int) -> bool:
        return self._patience is not None and self._patience.waits(backlog, self._clock_ms())

    def _target_now(self, known: Offsets) -> Offsets:
        """Return the ends that were frozen; partitions that came later are not read at all."""
        assert self._target is not None
        now = self.source.ends()
        for one, end in self._target.items():
            if now.get(one, -1) < end:
                self.source.lose(one, f"ended at {end} when the query began, and does not now")
        return {
            one: min(self._target.get(one, known[one]), end)
            for one, end in now.items()
            if one in self._target or one in known
        }

    # Limits

    def _limited(self, known: Offsets, ends: Offsets) -> Offsets:
        backlog = {one: max(end - known[one], 0) for one, end in ends.items()}
        if self.options.max_offsets is not None:
            shares = share(self.options.max_offsets, backlog)
            ends = {one: known[one] + shares.get(one, 0) for one in ends}
        if self.options.max_bytes is not None:
            ends = self._limited_bytes(known, ends, self.options.max_bytes)
        return ends

    def _limited_bytes(self, known: Offsets, ends: Offsets, limit: int) -> Offsets:
        logs = self.source.partitions()
        sizes = {
            one: sum(each.size for each in extents(logs[one], known[one], end))
            for one, end in ends.items()
        }
        if sum(sizes.values()) <= limit:
            return ends
        shares = share(limit, sizes)
        return {
            one: end_within(logs[one], known[one], end, shares[one]) if one in shares else end
            for one, end in ends.items()
        }

    # What happened to the log meanwhile

    def _check_all_there(
        self, begin: StreamOffset, there: Mapping[TopicPartition, PartitionLog]
    ) -> None:
        for one in sorted(begin.offsets.keys() - there.keys()):
            self.source.lose(one, "is gone")

    def _known(self, begin: StreamOffset, there: Mapping[TopicPartition, PartitionLog]) -> Offsets:
        """Return where each partition goes on: those that are new begin at their start."""
        return {one: self._goes_on(one, log, begin, warn=False) for one, log in there.items()}

    def _goes_on(
        self, one: TopicPartition, log: PartitionLog, begin: StreamOffset, warn: bool
    ) -> int:
        """Return the offset at which a partition is read on, whatever became of it.

        Raises:
            DataLossError: Records are gone, unless that is not to fail.
        """
        now = log.tail()
        offset = begin.offsets.get(one)
        lose = self.source.lose if warn or self.options.fail_on_data_loss else _nothing
        if offset is None:
            if now.start_offset > 0:
                lose(one, f"is new and begins at offset {now.start_offset} instead of 0")
            return now.start_offset
        if begin.topics.get(one.topic, log.topic_id) != log.topic_id:
            lose(one, f"was deleted and created again: offset {offset} is another one now")
            return now.start_offset
        cut = _cut_below(log, begin.epoch(one), offset)
        if cut is not None or offset > now.log_end_offset:
            end = now.log_end_offset if cut is None else cut
            lose(one, f"had offset {offset}, but was cut at {end}")
            return max(end, now.start_offset)
        if offset < now.start_offset:
            lose(one, f"was read up to {offset}, and begins at {now.start_offset} now")
            return now.start_offset
        return offset

    # A batch

    def plan(self, start: Json, end: Json) -> list[LogInputPartition]:
        """Return the tasks that read from one position to another.

        Raises:
            DataLossError: Some of it is gone, unless that is not to fail.
        """
        begin, until = stream_offset.from_json(start), stream_offset.from_json(end)
        if begin.initial:
            begin = until.begin
        logs = self.source.partitions()
        self._check_all_there(begin, logs)
        ranges = []
        for one, stop in until.offsets.items():
            log = logs.get(one)
            if log is None:
                self.source.lose(one, "is gone")
            elif until.topics.get(one.topic, log.topic_id) != log.topic_id:
                self.source.lose(one, "was deleted and created again while a batch was planned")
            else:
                ranges.append(self._range(one, log, begin, stop))
        self._hold({one.where: one.first for one in ranges if one.first <= one.stop})
        return plan(self.source.log.path, ranges, logs.__getitem__, self.options)

    def _range(
        self, one: TopicPartition, log: PartitionLog, begin: StreamOffset, stop: int
    ) -> PartitionOffsets:
        first = self._goes_on(one, log, begin, warn=True)
        end = log.tail().log_end_offset
        if stop > end:
            self.source.lose(one, f"was to be read up to {stop}, and ends at {end}")
        return PartitionOffsets(one, first, min(stop, end))

    def commit(self, end: Json) -> None:
        """Note that everything up to there was processed: for those who watch a group's lag."""
        group = self.options.commit_to_group
        if group is None or not self.source.writable:
            return
        done = stream_offset.from_json(end)
        there = {
            one: OffsetAndMetadata(offset, "", done.epoch(one))
            for one, offset in done.offsets.items()
            if one in self.source.partitions()
        }
        try:
            group_of(self.source.log.root, group).commit(there)
        except (CommitFailedError, UnknownTopicOrPartitionError) as error:
            # The query has its own record of how far it is: this one is for show.
            logger.warning("the progress of the query is not shown: %s", error)


def _nothing(*_: object) -> None:
    """Say nothing: it was, or will be, told when the batch is planned."""


def _cut_below(log: PartitionLog, epoch: int | None, offset: int) -> int | None:
    """Return where the log was cut below an offset that was right in an epoch, if it was (A36)."""
    if epoch is None or log.tail().leader_epoch == epoch:
        return None
    known = log.context.state.read(lambda txn: catalog.epochs(txn, log.key))
    cut = min((start for each, start in known if each > epoch), default=offset)
    return cut if cut < offset else None
