"""The log on the driver's side of a query: its partitions, and where to start and end in each.

Opened by the process that plans a batch, or that serves a streaming query.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from embedlog import errors
from embedlog.partition import PartitionLog, flush
from embedlog.partition.leases import Lease, extend
from embedlog.record import TopicPartition
from embedlog.snapshots.snapshot import find
from embedlog.spark.log_cache import LogCache, open_existing_log
from embedlog.spark.options import EARLIEST, LATEST, OffsetBound, SourceOptions
from embedlog.spark.query_schemas import selected_topics
from embedlog.spark.stream_offset import StreamOffset

logger = logging.getLogger("embedlog.spark")

Offsets = dict[TopicPartition, int]

_BATCH_LEASE_WINDOWS = 8
"""Into how many windows, each with a lease of its own, the time of a lease is divided."""


def batch_lease_prefix(session: str) -> str:
    """Return how the names of the leases of a session's batch queries begin."""
    return f"spark-batch-{session}-"


class LogSource:
    """A log and the partitions of it that a query reads.

    Args:
        options: The options of the reader.
        durable: Whether to read only what survives a power cut, unless the options say it.
        cache: Where the log stays open for other queries; None opens it for this one alone.
    """

    def __init__(
        self, options: SourceOptions, durable: bool, cache: LogCache | None = None
    ) -> None:
        self.options, self._cache = options, cache
        open_log = open_existing_log if cache is None else cache.acquire
        self.log = open_log(options.path, "Check the option 'path'.")
        self._durable = durable if options.visibility is None else options.visibility == "durable"
        self._partitions: tuple[int, dict[TopicPartition, PartitionLog]] | None = None
        """The version of the catalog, and the partitions to read as of then."""
        self._lease: Lease | None = None
        name = options.snapshot
        self._snapshot = None if name is None else find(self.log.root.context, name).offsets()
        """Where the partitions of the snapshot begin and end."""

    @property
    def writable(self) -> bool:
        """Whether the source may flush, commit for a group, and hold a lease."""
        return bool(self.log.root.mode == "rw")

    def close(self) -> None:
        """Close the log, unless others use it; a lease stays until it is released or expires."""
        if self._cache is None:
            self.log.close()
        else:
            self._cache.release(self.log)

    def hold(self, name: str, offsets: Mapping[TopicPartition, int]) -> bool:
        """Lease the records from these offsets on: retention and compaction leave them alone.

        Spark does not say when the last task is done, so the lease ends by its time
        (readLeaseMs).  If the log is read-only this does nothing.

        Args:
            name: The name of the lease; an older one of that name is replaced.
            offsets: The first offset to keep in each partition.

        Returns:
            False if some of the records are already deleted.
        """
        if not self.writable or not offsets:
            return True
        seconds = self.options.read_lease_ms / 1000
        try:
            self._lease = self.log.housekeeping.hold(f"spark-{name}", offsets, seconds=seconds)
        except (errors.OffsetOutOfRangeError, errors.UnknownTopicOrPartitionError):
            return False
        return True

    def hold_for_batch(self, session: str, offsets: Mapping[TopicPartition, int]) -> bool:
        """Lease the records from these offsets on for a batch query, for readLeaseMs or longer.

        Thousands of short queries would leave as many leases behind, since they end by their
        time.  So the queries of a session share one, which begins again after an eighth of the
        time: that lets go of the offsets of queries that are long over.

        Args:
            session: The name of the session.
            offsets: The first offset to keep in each partition.

        Returns:
            False if some of the records are already deleted.
        """
        if not self.writable or not offsets:
            return True
        lease_ms = self.options.read_lease_ms
        window_ms = max(lease_ms // _BATCH_LEASE_WINDOWS, 1)
        window = self.log.root.context.files.uptime_ms() // window_ms
        name, until_ms = f"{batch_lease_prefix(session)}{window}", (window + 1) * window_ms
        try:
            extend(self.log.root, name, offsets, until_ms + lease_ms)
        except (errors.OffsetOutOfRangeError, errors.UnknownTopicOrPartitionError):
            return False
        return True

    def release(self) -> None:
        """Release the lease."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def partitions(self) -> Mapping[TopicPartition, PartitionLog]:
        """Return the partitions that the subscription matches now; cached until topics change."""
        root = self.log.root
        version = root.version()
        if self._partitions is not None and self._partitions[0] == version:
            return self._partitions[1]
        topics = selected_topics(root, self.options)
        assigned = self.options.subscription.assigned
        matching = {
            TopicPartition(name, partition): root.partition(name, partition)
            for name, topic in topics.items()
            for partition in (range(topic.partitions) if assigned is None else assigned[name])
            if partition < topic.partitions
        }
        self._partitions = version, matching
        return matching

    def check_topics(self) -> None:
        """Check that all topics and partitions named in the options exist.

        Raises:
            UnknownTopicOrPartitionError: One does not exist; with failOnDataLoss=false it is
                read as soon as it does.
        """
        names, _, assigned = self.options.subscription
        if not self.options.fail_on_data_loss:
            return
        existing = selected_topics(self.log.root, self.options)
        for name in names or assigned or ():
            self.log.root.topic(name)
            if name not in existing:
                raise errors.UnknownTopicOrPartitionError(
                    f"The snapshot {self.options.snapshot!r} does not have the topic", topic=name
                )
        for topic, partitions in (assigned or {}).items():
            for partition in partitions:
                if TopicPartition(topic, partition) not in self.partitions():
                    raise errors.UnknownTopicOrPartitionError(
                        "There is no such partition",
                        topic=topic,
                        partition=partition,
                        todo="Correct the option 'assign' or add partitions to the topic.",
                    )

    def high_watermarks(self) -> Offsets:
        """Return where each partition ends for a consumer."""
        return {key: log.tail().high_watermark for key, log in self.partitions().items()}

    def readable_ends(self) -> Offsets:
        """Return how far the query may read each partition, after flushing what is not durable.

        A checkpoint may outlive records that a power cut takes from the log, and other
        records would get their offsets; so a stream does not read ahead of the disk.
        """
        if self._snapshot is not None:
            return {key: self._snapshot[key][1] for key in self.partitions()}
        if not self._durable:
            return self.high_watermarks()
        logs = self.partitions()
        tails = {key: log.tail() for key, log in logs.items()}
        unflushed = [
            logs[key] for key, tail in tails.items() if tail.durable_offset < tail.high_watermark
        ]
        if unflushed and self.writable:
            flush.flush(unflushed)
            tails = {key: log.tail() for key, log in logs.items()}
        return {key: min(tail.durable_offset, tail.high_watermark) for key, tail in tails.items()}

    def stream_offset(self, offsets: Mapping[TopicPartition, int]) -> StreamOffset:
        """Return offsets with the ids of their topics and the leader epochs of their logs."""
        logs = self.partitions()
        existing = {key: offset for key, offset in offsets.items() if key in logs}
        epochs = {key: logs[key].tail().leader_epoch for key in existing}
        return StreamOffset(
            existing,
            {key.topic: logs[key].topic_id for key in existing},
            {key: epoch for key, epoch in epochs.items() if epoch},
        )

    def resolve(self, bound: OffsetBound, side: str) -> Offsets:
        """Return where a new query starts, or a batch query ends, in each partition.

        Args:
            bound: The bound of the query.
            side: "starting" or "ending".

        Raises:
            InvalidConfigError: The bound is for other partitions than are read.
            OffsetOutOfRangeError: The query ends past the end of the log, or no record is at
                or after its starting time.
            DataLossError: It starts at deleted records, and failOnDataLoss is true.
        """
        ends = self.readable_ends()
        self._check_names(bound, side)
        return {key: self._resolve_offset(key, bound, ends[key], side) for key in self.partitions()}

    def _check_names(self, bound: OffsetBound, side: str) -> None:
        """Check that a bound names every partition that is read and no other: Kafka's rule."""
        if bound.for_all is not None:
            return
        logs = self.partitions()
        unnamed = [key for key in logs if bound.get(*key) is None]
        named = {
            TopicPartition(topic, partition)
            for topic, by_partition in bound.by_topic.items()
            for partition in (by_partition if isinstance(by_partition, Mapping) else ())
        }
        topics = {key.topic for key in logs}
        unread = sorted(named - logs.keys()) or [
            TopicPartition(topic, 0) for topic in bound.by_topic if topic not in topics
        ]
        for partitions, problem in ((unnamed, "is not named"), (unread, "is not read")):
            if partitions:
                topic, partition = partitions[0]
                raise errors.InvalidConfigError(
                    f"The {side} offsets are for other partitions than the query reads: "
                    f"partition {partition} of {topic} {problem}",
                    todo="Name all partitions; -2 is the earliest offset, -1 the latest.",
                )

    def _resolve_offset(
        self, topic_partition: TopicPartition, bound: OffsetBound, end: int, side: str
    ) -> int:
        number = bound.get(*topic_partition)
        assert number is not None
        log = self.partitions()[topic_partition]
        if bound.by == "time":
            match = log.offset_for_timestamp(number)
            if match is not None and match.offset < end:
                return match.offset
            if side == "starting" and self.options.no_timestamp == "error":
                raise errors.OffsetOutOfRangeError(
                    f"No record has a timestamp at or after {number} ms",
                    **topic_partition._asdict(),
                    todo="Set startingOffsetsByTimestampStrategy to latest to start at the end "
                    "then.",
                )
            return end
        start = log.tail().start_offset
        if self._snapshot is not None:
            first = self._snapshot[topic_partition][0]
            if first < start:
                self.report_data_loss(
                    topic_partition, f"has the snapshot's records only from offset {start} on"
                )
            start = max(first, start)
        if number in (EARLIEST, LATEST):
            return start if number == EARLIEST else end
        if not start <= number <= end and side == "starting":
            self.report_data_loss(
                topic_partition, f"starts at offset {number}, but has offsets [{start}, {end})"
            )
        if number > end and side == "ending":
            raise errors.OffsetOutOfRangeError(
                f"The query ends at an offset past the end of the log, which is {end}",
                **topic_partition._asdict(),
                offset=number,
                todo="Set endingOffsets to latest or to a lower offset.",
            )
        return min(max(number, start), end)

    def report_data_loss(self, topic_partition: TopicPartition, problem: str) -> None:
        """Raise an error or log a warning, as failOnDataLoss says.

        Raises:
            DataLossError: If failOnDataLoss is true.
        """
        error = errors.DataLossError(
            f"Records may have been missed: the partition {problem}",
            **topic_partition._asdict(),
            todo="Set failOnDataLoss to false to continue with the records that exist.",
        )
        if self.options.fail_on_data_loss:
            raise error
        logger.warning("%s", error)
