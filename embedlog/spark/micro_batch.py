"""A streaming query on the log: from which offsets to which each micro-batch reads.

Spark asks for the initial offset (several times, until the first batch is
planned), for the latest offset, and for the input partitions between two
offsets.  All of it happens in one process that lives as long as the query and
is killed when the query ends, so nothing here relies on a shutdown call.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from embedlog import catalog
from embedlog.consumer.open_group import open_group
from embedlog.errors import CommitFailedError, EmbedlogError, UnknownTopicOrPartitionError
from embedlog.forks import cached_property
from embedlog.groups.offsets import check_group_id
from embedlog.mirrors.mirrored_topic import MIRRORED_TOPICS
from embedlog.partition import PartitionLog
from embedlog.partition.lookup import end_within, extents
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.spark.input_partitions import plan_input_partitions
from embedlog.spark.log_cache import LogCache
from embedlog.spark.options import LATEST, OffsetBound, SourceOptions
from embedlog.spark.plan import LogInputPartition
from embedlog.spark.query_schemas import QuerySchemas
from embedlog.spark.source import LogSource, Offsets, logger
from embedlog.spark.stream_offset import StreamOffset
from embedlog.splits.slices import PartitionOffsets

Json = dict[str, Any]
K = TypeVar("K")

_LEASE_RENEWAL_MS = 5000
"""Renew the lease at most this often: Spark asks for the latest offset ninety times a second."""


def rate_limit(limit: int, backlog: Mapping[K, int]) -> dict[K, int]:
    """Return how much to read of each backlog, about ``limit`` in total, as Kafka's source does.

    In proportion to the backlogs and rounded down, but at least 1, so that a large
    partition does not starve a small one.

    >>> rate_limit(10, {"large": 101, "small": 11, "tiny": 1})
    {'large': 8, 'small': 1, 'tiny': 1}
    """
    total = sum(backlog.values())
    if total <= limit:
        return dict(backlog)
    return {key: min(size, max(limit * size // total, 1)) for key, size in backlog.items() if size}


class TriggerDelay:
    """Delays a micro-batch until there are enough records (minOffsetsPerTrigger, maxTriggerDelay).

    Args:
        min_offsets: The number of records that starts a batch.
        max_delay_ms: The time since the last batch after which any number does.
    """

    def __init__(self, min_offsets: int, max_delay_ms: int) -> None:
        self._min_offsets, self._max_delay_ms = min_offsets, max_delay_ms
        self._last_batch_ms: int | None = None

    def delays(self, backlog: int, now_ms: int) -> bool:
        """Whether to wait for more records; the first batch never waits."""
        last = self._last_batch_ms
        if last is not None and now_ms - last < self._max_delay_ms and backlog < self._min_offsets:
            return True
        self._last_batch_ms = now_ms
        return False


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class StreamState(NamedTuple):
    """What a query keeps in memory, besides what Spark keeps in its checkpoint."""

    lease_name: str
    """A lease is taken over by its name, so that none is left behind."""
    initial_offset: Json | None = None
    available_now: Offsets | None = None
    """Where a query with Trigger.AvailableNow ends; None with other triggers."""


class MicroBatchStream:
    """The driver's side of one streaming query; offsets go in and out as JSON.

    Args:
        options: The options of the reader.
        clock_ms: The clock for maxTriggerDelay and the renewal of the lease.
        state: The state of the same query in a process that was killed, to continue with it.
        cache: Where the log stays open for other queries.
        schemas: Those of typed topics; by default the ones at the start of the query.

    Raises:
        InvalidConfigError: The group id of commitToGroup is invalid.
        NotALogError: There is no log at the path.
        UnknownTopicOrPartitionError: A topic named in the options does not exist.
    """

    def __init__(
        self,
        options: SourceOptions,
        clock_ms: Callable[[], int] = _monotonic_ms,
        state: StreamState | None = None,
        cache: LogCache | None = None,
        schemas: QuerySchemas | None = None,
    ) -> None:
        if options.commit_to_group is not None:
            check_group_id(options.commit_to_group)
        state = state or StreamState(str(uuid.uuid4()))
        self.options, self._clock_ms, self._cache = options, clock_ms, cache
        self._initial_offset, self._available_now = state.initial_offset, state.available_now
        self._trigger_delay = TriggerDelay(
            options.min_offsets_per_trigger or 0, options.max_trigger_delay_ms
        )
        self._lease_name, self._leased_at_ms = state.lease_name, -_LEASE_RENEWAL_MS
        self.schemas = QuerySchemas(options) if schemas is None else schemas

    @cached_property
    def source(self) -> LogSource:
        """The log, opened at first use: Spark makes some of these objects only to pickle them."""
        return LogSource(self.options, durable=True, cache=self._cache)

    @property
    def state(self) -> StreamState:
        """What another process needs to continue with the query."""
        return StreamState(self._lease_name, self._initial_offset, self._available_now)

    def close(self) -> None:
        """Release the lease and close the log."""
        source = self.__dict__.pop("source", None)
        if source is not None:
            source.release()
            source.close()

    def _renew_lease(self, offsets: Offsets) -> None:
        """Lease the records from these offsets on, unless that was done within 5 seconds.

        An older lease begins earlier and covers them too.  If records at the start of a
        batch are deleted already, that is reported when the batch is planned.
        """
        now_ms = self._clock_ms()
        due = now_ms - self._leased_at_ms >= _LEASE_RENEWAL_MS
        if due and self.source.hold(self._lease_name, offsets):
            self._leased_at_ms = now_ms

    def initial_offset(self) -> Json:
        """Return where a new query starts: the same at each call."""
        start = self._start_of_new_query()
        self._renew_lease(dict(start.offsets))
        return start.to_json()

    def _start_of_new_query(self) -> StreamOffset:
        if self._initial_offset is None:
            self.source.check_topics()
            bound = self.options.starting_offsets or OffsetBound("offset", LATEST)
            start = self.source.stream_offset(self.source.resolve(bound, "starting"))
            self._initial_offset = replace(start, is_initial=True).to_json()
        return StreamOffset.from_json(self._initial_offset)

    def latest_offset(self, start: Json | None, limited: bool = True) -> Json:
        """Return where the next batch ends; ``start`` if there is nothing to read.

        Args:
            start: Where the batch starts; None from Spark before 4.2, which does not pass it.
            limited: Whether the limits per trigger apply; not for Trigger.Once.

        Raises:
            DataLossError: Records that the query has to read are gone, and failOnDataLoss
                is true.
        """
        if start is None:
            # Spark asks for the initial offset later, and only if the query is new.
            first = None
            with suppress(EmbedlogError):  # `initial_offset` reports it
                first = self._start_of_new_query()
            latest = self.source.stream_offset(self.source.readable_ends())
            return replace(latest, batch_start=first).to_json()
        previous = StreamOffset.from_json(start)
        logs = self.source.partitions()
        self._check_missing_partitions(previous, logs)
        if not logs:
            # With an empty checkpoint the next run would be a new query.
            return start
        starts = {key: self._resume_offset(key, log, previous) for key, log in logs.items()}
        self._renew_lease(starts)
        if self._available_now is None:
            watermarks = self.source.high_watermarks()
            backlog = sum(max(end - starts[key], 0) for key, end in watermarks.items())
            if limited and self._trigger_delay.delays(backlog, self._clock_ms()):
                return start
            ends = self.source.readable_ends()
        else:
            ends = self._available_now_ends(self._available_now, starts)
        if limited:
            ends = self._limit(starts, ends)
        latest = self.source.stream_offset(
            {key: max(end, starts[key]) for key, end in ends.items()}
        )
        if previous.is_initial:
            latest = replace(latest, batch_start=previous)
        elif replace(previous, batch_start=None) == latest:
            return start
        return latest.to_json()

    def report_latest_offset(self) -> Json:
        """Return the end of the log, for the progress that Spark shows."""
        return self.source.stream_offset(self.source.high_watermarks()).to_json()

    def prepare_for_available_now(self) -> None:
        """Read no further than the log goes now (Trigger.AvailableNow)."""
        self.source.check_topics()
        self._available_now = self.source.readable_ends()

    def _available_now_ends(self, targets: Offsets, starts: Offsets) -> Offsets:
        """Return the ends of Trigger.AvailableNow; partitions created since are not read."""
        ends = self.source.readable_ends()
        for key, target in targets.items():
            if ends.get(key, -1) < target:
                self.source.report_data_loss(
                    key, f"ended at {target} when the query started, and no longer does"
                )
        return {
            key: min(targets.get(key, starts[key]), end)
            for key, end in ends.items()
            if key in targets or key in starts
        }

    def _limit(self, starts: Offsets, ends: Offsets) -> Offsets:
        """Apply maxOffsetsPerTrigger and maxBytesPerTrigger."""
        if self.options.max_offsets_per_trigger is not None:
            backlog = {key: max(end - starts[key], 0) for key, end in ends.items()}
            shares = rate_limit(self.options.max_offsets_per_trigger, backlog)
            ends = {key: starts[key] + shares.get(key, 0) for key in ends}
        limit = self.options.max_bytes_per_trigger
        if limit is not None:
            logs = self.source.partitions()
            sizes = {
                key: sum(extent.size for extent in extents(logs[key], starts[key], end))
                for key, end in ends.items()
            }
            if sum(sizes.values()) > limit:
                # A partition without a share has no bytes to read.
                ends |= {
                    key: end_within(logs[key], starts[key], ends[key], share)
                    for key, share in rate_limit(limit, sizes).items()
                }
        return ends

    def _check_missing_partitions(
        self, previous: StreamOffset, logs: Mapping[TopicPartition, PartitionLog]
    ) -> None:
        for key in sorted(previous.offsets.keys() - logs.keys()):
            self.source.report_data_loss(key, "is gone")

    def _resume_offset(
        self, key: TopicPartition, log: PartitionLog, previous: StreamOffset, *, warn: bool = False
    ) -> int:
        """Return the offset at which to continue a partition; a new one is read from its start.

        Without ``warn`` a loss that does not fail the query is not reported: planning the
        batch reports it, once.

        Raises:
            DataLossError: Records are gone, and failOnDataLoss is true.
        """

        def lost(problem: str) -> None:
            if warn or self.options.fail_on_data_loss:
                self.source.report_data_loss(key, problem)

        start = log.tail().start_offset
        offset = previous.offsets.get(key)
        if offset is None:
            if start > 0:
                lost(f"is new and begins at offset {start} instead of 0")
            return start
        known_id = previous.topic_ids.get(key.topic, log.topic_id)
        copied_to = _copied_to(log, known_id)
        if copied_to is None:
            lost(f"was deleted and created again: offset {offset} is another record now")
            return start
        is_copy = known_id != log.topic_id
        truncated_to = None if is_copy else _truncated_to(log, previous.leader_epoch(key), offset)
        if truncated_to is not None or offset > copied_to:
            end = copied_to if truncated_to is None else truncated_to
            what = "was copied only up to" if is_copy else "was truncated to"
            lost(f"was read up to offset {offset}, but {what} {end}")
            return max(end, start)
        if offset < start:
            lost(f"was read up to offset {offset}, and begins at {start} now")
            return start
        return offset

    def plan_input_partitions(
        self, start: Json, end: Json, cores: int | None = None
    ) -> list[LogInputPartition]:
        """Return the input partitions of the batch between two offsets.

        Args:
            start: Where it starts.
            end: Where it ends.
            cores: How many tasks run at once; by default the cores that this process may use.

        Raises:
            DataLossError: Some of its records are gone, and failOnDataLoss is true.
        """
        batch_start, batch_end = StreamOffset.from_json(start), StreamOffset.from_json(end)
        if batch_start.is_initial:
            # The checkpoint decides where the first batch starts.
            batch_start = batch_end.batch_start or batch_end
        logs = self.source.partitions()
        self._check_missing_partitions(batch_start, logs)
        ranges = []
        for key, until in batch_end.offsets.items():
            log = logs.get(key)
            if log is None:
                self.source.report_data_loss(key, "is gone")
                continue
            known_id = batch_end.topic_ids.get(key.topic, log.topic_id)
            log_end = _copied_to(log, known_id)
            if log_end is None:
                self.source.report_data_loss(
                    key, "was deleted and created again while a batch was planned"
                )
            else:
                first = self._resume_offset(key, log, batch_start, warn=True)
                if until > log_end:
                    problem = f"was to be read up to {until}, and ends at {log_end}"
                    self.source.report_data_loss(key, problem)
                ranges.append(PartitionOffsets(key, first, min(until, log_end)))
        self._renew_lease({key: first for key, first, until in ranges if first <= until})
        self.schemas.update(self.source.log.root)
        by_topic = self.schemas.schemas
        return plan_input_partitions(self.options, logs, ranges, cores, schemas=by_topic)

    def select(self, fields: Sequence[Json]) -> None:
        """Note which columns the query has, as `QuerySchemas.select`, and the current schemas."""
        self.schemas.update(self.source.log.root)
        self.schemas.select(fields)

    def commit(self, end: Json) -> None:
        """Commit processed offsets to a group, so that its lag can be watched (commitToGroup)."""
        group = self.options.commit_to_group
        if group is None or not self.source.writable:
            return
        processed = StreamOffset.from_json(end)
        offsets = {
            key: OffsetAndMetadata(offset, "", processed.leader_epoch(key))
            for key, offset in processed.offsets.items()
            if key in self.source.partitions()
        }
        try:
            open_group(self.source.log.root, group).commit(offsets)
        except (CommitFailedError, UnknownTopicOrPartitionError) as error:
            # Spark's checkpoint is the record of the query's progress; the group only shows it.
            logger.warning("The group does not show the progress of the query: %s", error)


def _copied_to(log: PartitionLog, topic_id: int) -> int | None:
    """Return up to which offset a partition has the records of a topic, of this log or of another.

    That is its end, or, if a mirror copied the topic here, where it ended at the failover; None if
    it is another topic.
    """
    end = log.tail().log_end_offset
    if topic_id == log.topic_id:
        return end
    copy = MIRRORED_TOPICS.get(log.context.state, log.topic_id)
    if copy is None or copy.source_topic_id != str(topic_id):
        return None
    return copy.ends[log.partition] if log.partition < len(copy.ends) else end


def _truncated_to(log: PartitionLog, epoch: int | None, offset: int) -> int | None:
    """Return where the log was truncated below an offset since a leader epoch, if it was."""
    if epoch is None or log.tail().leader_epoch == epoch:
        return None
    epochs = log.context.state.read(lambda txn: catalog.epochs(txn, log.key))
    truncated_to = min((start for number, start in epochs if number > epoch), default=offset)
    return truncated_to if truncated_to < offset else None
