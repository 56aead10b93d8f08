"""The log as the driver's side of a query sees it: which partitions, from where, to where.

Opened by the process that plans a batch, or that serves a streaming query.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Mapping
from typing import Any

import embedlog
from embedlog.catalog import INTERNAL
from embedlog.errors import (
    DataLossError,
    InvalidConfigError,
    NotALogError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)
from embedlog.partition import PartitionLog, flush
from embedlog.record import TopicPartition
from embedlog.spark.source_options import EARLIEST, LATEST, OffsetBound, SourceOptions
from embedlog.spark.stream_offset import StreamOffset

logger = logging.getLogger("embedlog")

Offsets = dict[TopicPartition, int]


class LogSource:
    """A log and what is to be read of it.

    Args:
        options: What the reader was told.
        durable: Whether to read only what a power cut cannot take back, unless told.
    """

    def __init__(self, options: SourceOptions, durable: bool) -> None:
        self.options = options
        self.log = opened(options.path, "check the option 'path'")
        self._durable = durable if options.visibility is None else options.visibility == "durable"
        self._known: tuple[int, dict[TopicPartition, PartitionLog]] | None = None
        self._lease: Any = None

    @property
    def writable(self) -> bool:
        """Whether it may flush, commit for a group, and hold a lease."""
        return bool(self.log.root.mode == "rw")

    def close(self) -> None:
        """Let the log go; a lease lasts on."""
        self.log.close()

    # What is to stay

    def hold(self, name: str, offsets: Mapping[TopicPartition, int]) -> bool:
        """Keep retention and compaction from what is at these offsets and after, for a while.

        Nobody may tell when the last task is done, so it ends by its time; see readLeaseMs.
        In a log that may not be written it does nothing.

        Returns:
            False if some of it is gone already.
        """
        if not self.writable or not offsets:
            return True
        try:
            seconds = self.options.lease_ms / 1000
            self._lease = self.log.hold(f"spark-{name}", offsets, seconds=seconds)
        except (OffsetOutOfRangeError, UnknownTopicOrPartitionError):
            return False
        return True

    def release(self) -> None:
        """Let go what was held."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    # Which partitions

    def partitions(self) -> Mapping[TopicPartition, PartitionLog]:
        """Return what is subscribed to, as it is now; cheap while no topic changes."""
        version = self.log.root.version()
        if self._known is None or self._known[0] != version:
            self._known = version, self._matching()
        return self._known[1]

    def _matching(self) -> dict[TopicPartition, PartitionLog]:
        names, pattern, assigned = self.options.subscription
        root = self.log.root
        known = root.topics()
        if pattern is not None:
            # As Kafka's consumers: internal topics are read by their names only.
            public = (name for name in known if not name.startswith(INTERNAL))
            names = tuple(name for name in public if re.fullmatch(pattern, name))
        if assigned is not None:
            wanted = [TopicPartition(*one) for one in _flat(assigned)]
        else:
            wanted = [
                TopicPartition(name, number)
                for name in names
                if name in known
                for number in range(known[name].partitions)
            ]
        there = [
            one
            for one in wanted
            if one.topic in known and one.partition < known[one.topic].partitions
        ]
        return {one: root.partition(*one) for one in sorted(there)}

    def check_topics(self) -> None:
        """Raise unless all topics and partitions that are named are there.

        Raises:
            UnknownTopicOrPartitionError: One is not; with failOnDataLoss=false it
                is read once it is there.
        """
        names, _, assigned = self.options.subscription
        if not self.options.fail_on_data_loss:
            return
        for name in names or assigned or ():
            self.log.root.topic(name)
        missing = [one for one in _flat(assigned or {}) if one not in self.partitions()]
        if missing:
            topic, number = missing[0]
            raise UnknownTopicOrPartitionError(
                "there is no such partition", topic=topic, partition=number
            )

    # Where they end and begin

    def earliest(self) -> Offsets:
        """Return the first offset of each partition that can be read."""
        return {one: log.tail().start_offset for one, log in self.partitions().items()}

    def published(self) -> Offsets:
        """Return where each partition ends for a consumer."""
        return {one: log.tail().high_watermark for one, log in self.partitions().items()}

    def ends(self) -> Offsets:
        """Return how far each partition may be read; what is not durable is flushed first.

        Who keeps positions for longer than the log keeps its records must not be
        ahead of it after a power cut: other records would get these offsets.
        """
        logs = self.partitions()
        tails = {one: log.tail() for one, log in logs.items()}
        if not self._durable:
            return {one: now.high_watermark for one, now in tails.items()}
        behind = [
            logs[one] for one, now in tails.items() if now.durable_offset < now.high_watermark
        ]
        if behind and self.writable:
            flush.flush(behind)
            tails = {one: log.tail() for one, log in logs.items()}
        return {one: min(now.durable_offset, now.high_watermark) for one, now in tails.items()}

    def positions(self, offsets: Mapping[TopicPartition, int]) -> StreamOffset:
        """Return offsets with what tells these logs from others that may have the same names."""
        logs = self.partitions()
        there = {one: offset for one, offset in offsets.items() if one in logs}
        epochs = {one: logs[one].tail().leader_epoch for one in there}
        return StreamOffset(
            there,
            {one.topic: logs[one].topic_id for one in there},
            {one: epoch for one, epoch in epochs.items() if epoch},
        )

    # Where to begin and to end

    def starts(self, bound: OffsetBound) -> Offsets:
        """Return where a query begins that has not begun yet."""
        return self._resolved(bound, self.ends(), "starting")

    def stops(self, bound: OffsetBound) -> Offsets:
        """Return where a batch query ends."""
        return self._resolved(bound, self.ends(), "ending")

    def _resolved(self, bound: OffsetBound, ends: Offsets, side: str) -> Offsets:
        self._check_named(bound, side)
        return {
            one: self._place(one, log, bound, ends[one], side)
            for one, log in self.partitions().items()
        }

    def _check_named(self, bound: OffsetBound, side: str) -> None:
        """Kafka wants every partition named, and no other."""
        if bound.everywhere is not None:
            return
        logs = self.partitions()
        absent = [one for one in logs if bound.of(*one) is None]
        named = {
            TopicPartition(topic, number)
            for topic, each in bound.each.items()
            for number in (each if isinstance(each, Mapping) else ())
        }
        topics = {one.topic for one in logs}
        strange = sorted(named - logs.keys()) or [
            TopicPartition(topic, 0) for topic in bound.each if topic not in topics
        ]
        for some, what in ((absent, "is not named"), (strange, "is not read")):
            if some:
                topic, number = some[0]
                raise InvalidConfigError(
                    f"the {side} offsets are of other partitions than what is read: "
                    f"partition {number} of {topic} {what}",
                    todo="name all partitions; -2 is the earliest offset, -1 the latest",
                )

    def _place(
        self, one: TopicPartition, log: PartitionLog, bound: OffsetBound, end: int, side: str
    ) -> int:
        number = bound.of(*one)
        assert number is not None
        start = log.tail().start_offset
        if bound.by == "time":
            return self._at_time(one, log, number, end, side)
        if number in (EARLIEST, LATEST):
            return start if number == EARLIEST else end
        if not start <= number <= end and side == "starting":
            self.lose(one, f"starts at offset {number}, but has offsets {start} to {end}")
        if number > end and side == "ending":
            raise OffsetOutOfRangeError(
                f"the query is to end there, but the log ends at {end}",
                topic=one.topic,
                partition=one.partition,
                offset=number,
            )
        return min(max(number, start), end)

    def _at_time(
        self, one: TopicPartition, log: PartitionLog, time: int, end: int, side: str
    ) -> int:
        found = log.offset_for_timestamp(time)
        if found is not None and found.offset < end:
            return found.offset
        if side == "starting" and not self.options.latest_if_none:
            raise OffsetOutOfRangeError(
                f"no record is as young as {time} ms",
                topic=one.topic,
                partition=one.partition,
                todo="set startingOffsetsByTimestampStrategy to latest to begin at the end then",
            )
        return end

    # What is lost

    def lose(self, one: TopicPartition, what: str) -> None:
        """Fail, or go on with a warning, as failOnDataLoss says.

        Raises:
            DataLossError: If it is true.
        """
        error = DataLossError(
            f"records may have been missed: the partition {what}",
            topic=one.topic,
            partition=one.partition,
            todo="set failOnDataLoss to false to go on with what is there",
        )
        if self.options.fail_on_data_loss:
            raise error
        logger.warning("%s", error)


def opened(path: str, todo: str | None = None) -> Any:
    """Open a log that is there, to write it as well where that is allowed.

    Raises:
        NotALogError: There is none; ``todo`` says what to do.
    """
    if not os.path.exists(os.path.join(path, "embedlog.toml")):
        raise NotALogError("there is no log here", path=path, todo=todo)
    mode = "rw" if os.access(path, os.W_OK) else "r"
    # Whoever writes the log does the housekeeping: these processes are killed without a word.
    return embedlog.open(path, mode=mode, maintenance=False)


def _flat(assigned: Mapping[str, Collection[int]]) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for topic in assigned for number in assigned[topic]]
