"""One member of a group that handles records one by one, several at once, and some again.

The thread that polls admits records and commits; a runner calls the handler.  What a finished
record sends, its outputs or its dead letter, waits until the position of its partition passes it,
and is then published with the position, in one transaction: after a kill, records above the
committed position are handled again, and nothing of them was sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, Any

from embedlog.callbacks import check_ran
from embedlog.config import ConsumerConfig
from embedlog.consumer.consumer import Consumer
from embedlog.consumer.deserialize import RecordDecoder
from embedlog.consumer.rebalance_notifier import ConsumerRebalanceListener
from embedlog.dead_letter_queue import Failure, letter
from embedlog.errors import (
    CommitFailedError,
    EmbedlogError,
    RecordDeserializationError,
    WakeupError,
)
from embedlog.lazy import logging
from embedlog.record import OffsetAndMetadata, Record, TopicPartition
from embedlog.retry import Retry
from embedlog.root.root import Root
from embedlog.workers.handling import Handling, checked_output
from embedlog.workers.in_flight import InFlight, InFlightPartition, InFlightRecord

if TYPE_CHECKING:
    from embedlog.producer import Producer
    from embedlog.workers.task_runner import TaskRunner
    from embedlog.workers.thread_runner import ThreadRunner

COMMIT_SECONDS = 0.1
"""How often finished records are committed while others are not."""
STOP_SECONDS = 30.0
"""How long handlers may go on after a failure before it is reported."""
IDLE_SECONDS = 1.0
"""How often the group is looked after while all records in flight wait for their time."""

_log = logging.getLogger("embedlog.workers")


class RecordWorker(ConsumerRebalanceListener):
    """Polls, has records handled, and commits in order; one thread calls it.

    Args:
        root: The log.
        topics: The topics of the group.
        config: The settings of its consumers.
        handling: How records are handled.
        consumer: A member of the group without a subscription, which neither deserializes nor
            commits by itself.
        producer: Publishes what finished records send; None if they send nothing.
        letter_partitions: Of the topic of dead letters.
    """

    def __init__(
        self,
        root: Root,
        topics: tuple[str, ...],
        config: ConsumerConfig,
        handling: Handling,
        consumer: Consumer,
        producer: Producer | None,
        letter_partitions: int,
    ) -> None:
        self._root, self._config, self._handling = root, config, handling
        self._topics, self._consumer, self._producer = topics, consumer, producer
        self._letter_partitions = letter_partitions
        self._decoder = RecordDecoder(config, root)
        self._window = max(config.max_poll_records, 2 * handling.concurrency)
        """A partition with so many records in flight is paused."""
        self._in_flight = InFlight(consumer.wakeup, self._window // 2)
        self._runner = self._new_runner()
        self._committed: dict[TopicPartition, int] = {}
        self._commit_at = 0.0
        self._pause = threading.Event()
        """Never set."""

    def _new_runner(self) -> TaskRunner | ThreadRunner:
        count, in_flight = self._handling.concurrency, self._in_flight
        callbacks = in_flight.finish, self._note_failure
        if self._handling.is_async:
            from embedlog.workers.task_runner import TaskRunner

            return TaskRunner(in_flight, self._await, count, *callbacks)
        from embedlog.workers.thread_runner import ThreadRunner

        return ThreadRunner(in_flight, self._call, count, *callbacks)

    def running(self) -> list[tuple[Record, Any]]:
        """Return the records that are being handled, with their thread or task; any thread may."""
        with self._in_flight.lock:
            return [(each.stored, each.runner) for each in self._in_flight.running if each.runner]

    def run(self, is_stopping: Callable[[], bool]) -> None:
        """Handle records until the program stops, or until one fails for good.

        Raises:
            BaseException: What ended it; what was finished is committed.
        """
        in_flight, patience = self._in_flight, self._config.max_poll_interval_ms / 1000
        self._runner.start(self._handling.initializer)
        try:
            self._consumer.subscribe(self._topics, listener=self)
            while not is_stopping() and in_flight.error is None:
                if in_flight.are_all_running_since(
                    self._handling.concurrency, monotonic() - patience
                ):
                    # Without polls it loses its partitions to members that do not hang.
                    self._pause.wait(IDLE_SECONDS)
                    continue
                try:
                    polled = self._consumer.poll(self._timeout_ms())
                except WakeupError:
                    polled = {}
                for key, records in polled.items():
                    in_flight.add([*self._admitted(in_flight.partition(key), records)])
                self._drop_deleted()
                self._commit_if_due()
                self._control_flow()
        except BaseException as error:  # noqa: BLE001 - raised below
            in_flight.fail(error)
        in_flight.close()
        self._runner.join(STOP_SECONDS)
        try:
            self._commit()
        except EmbedlogError as error:
            in_flight.fail(error)
        in_flight.drop([partition.key for partition in in_flight.partitions()])
        if in_flight.error is not None:
            raise in_flight.error

    def _drop_deleted(self) -> None:
        """Forget partitions of topics that were deleted, which no listener is told of."""
        keys = {partition.key for partition in self._in_flight.partitions()}
        if deleted := keys - self._consumer.assignment():
            self.on_partitions_lost(deleted)

    def _timeout_ms(self) -> float | None:
        if self._in_flight.is_due():
            return 0
        seconds = self._in_flight.timeout(COMMIT_SECONDS, IDLE_SECONDS)
        return None if seconds is None else seconds * 1000

    def _control_flow(self) -> None:
        """Pause partitions with as many records in flight as are allowed, and resume others."""
        for partition in self._in_flight.partitions():
            full = len(partition.records) >= self._window
            if full and not partition.paused:
                partition.paused = True
                self._consumer.pause(partition.key)
            elif partition.paused and len(partition.records) <= self._window // 2:
                partition.paused = False
                self._consumer.resume(partition.key)

    # Admitting

    def _admitted(
        self, partition: InFlightPartition, polled: list[Record]
    ) -> Iterator[InFlightRecord]:
        """Yield polled records, deserialized, and with the time before which they must wait."""
        handling, now_ms = self._handling, self._root.clock()
        waits = handling.delay > 0 or handling.not_before is not None
        error: Exception | None
        for stored, record, error in self._decoder.deserialize(partition.key, polled):
            due = 0.0
            if waits and error is None:
                try:
                    due_ms = self._due_ms(record)
                except Exception as raised:  # noqa: BLE001 - the policy says what becomes of it
                    error = raised
                else:
                    due = monotonic() + (due_ms - now_ms) / 1000 if due_ms > now_ms else 0.0
            yield InFlightRecord(partition, stored, record, error, due)

    def _due_ms(self, record: Record) -> float:
        handling = self._handling
        due_ms = record.timestamp + handling.delay * 1000 if handling.delay else 0.0
        if handling.not_before is not None:
            time = handling.not_before(record)
            if isinstance(time, datetime):
                time = time.timestamp() * 1000
            due_ms = max(due_ms, 0.0 if time is None else float(time))
        return due_ms

    # Handling, in the threads or tasks of the runner

    def _call(self, record: Record) -> list[tuple[Any, ...]] | tuple[()]:
        return self._outputs(self._handling.handler(record))

    async def _await(self, record: Record) -> list[tuple[Any, ...]] | tuple[()]:
        return self._outputs(await self._handling.handler(record))

    def _outputs(self, result: Any) -> list[tuple[Any, ...]] | tuple[()]:
        if self._handling.outputs:
            return [checked_output(output) for output in result or ()]
        if result is not None:
            check_ran(result, "handler")
        return ()

    def _note_failure(self, record: InFlightRecord, error: Exception) -> None:
        """Have a record handled again, skip it, write a dead letter, or end the run."""
        policy, now_ms, stored = self._handling.on_error, self._root.clock(), record.stored
        record.attempts += 1
        if record.first_failed_ms < 0:
            record.first_failed_ms = now_ms
        where = stored.topic, stored.partition, stored.offset
        if policy == "skip":
            _log.warning("%s-%d, offset %d: skipped: %s", *where, error, exc_info=error)
            self._in_flight.finish(record, ())
            return
        attempts = policy.attempts if isinstance(policy, Retry) else 1
        # The bytes will be the same in every attempt.
        if record.attempts < attempts and not isinstance(error, RecordDeserializationError):
            assert isinstance(policy, Retry)
            pause = policy.pause_seconds(record.attempts)
            _log.info(
                "%s-%d, offset %d: attempt %d of %d failed, the next one is in %.3g s: %r",
                *(*where, record.attempts, attempts, pause, error),
            )
            self._in_flight.postpone(record, monotonic() + pause)
            return
        if self._handling.dead_letter is None:
            self._in_flight.fail(error, record)
            return
        failure = Failure.of(
            stored,
            self._config.group_id or "",
            error,
            delivery_count=record.attempts,
            first_failed_ms=record.first_failed_ms,
            last_failed_ms=now_ms,
        )
        _log.warning(
            "%s-%d, offset %d: a dead letter in %s after attempt %d: %s",
            *(*where, self._handling.dead_letter, record.attempts, error),
            exc_info=error,
        )
        config = self._handling.config
        self._in_flight.finish(record, [letter(stored, failure, self._letter_partitions, config)])

    # Committing

    def _commit_if_due(self) -> None:
        now = monotonic()
        if now >= self._commit_at or not self._in_flight.unfinished or self._in_flight.is_due():
            self._commit_at = now + COMMIT_SECONDS
            self._commit(self._passed_positions())

    def _passed_positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return positions that moved over offsets without records, with nothing in flight."""
        busy = {each.key for each in self._in_flight.partitions() if each.records}
        positions, _, _ = self._consumer._offsets_for_transaction()
        return {
            key: position
            for key, position in positions.items()
            if key not in busy and position.offset != self._committed.get(key)
        }

    def _commit(self, passed: Mapping[TopicPartition, OffsetAndMetadata] | None = None) -> None:
        """Commit what is finished, and publish what it sends, in one step.

        Raises:
            EmbedlogError: What is sent cannot be published.
        """
        committable = self._in_flight.committable()
        positions = {**(passed or {}), **{key: at.position for key, at in committable.items()}}
        if not positions:
            return
        outputs = list(chain.from_iterable(at.outputs for at in committable.values()))
        try:
            if outputs:
                self._publish(positions, outputs)
            else:
                self._consumer.commit(positions)
        except CommitFailedError as error:
            # The next poll finds out which partitions are lost, and drops their records.
            _log.warning("%s", error)
            return
        except EmbedlogError as error:
            is_deleted = error.topic in self._topics and error.topic not in self._root.topics()
            if outputs and not error.retriable and not is_deleted:
                raise
            _log.warning("A commit failed; the next one includes its offsets: %s", error)
            if not outputs or not self._was_published(positions):
                return
        self._committed |= {key: position.offset for key, position in positions.items()}
        self._in_flight.committed(committable)

    def _publish(
        self, positions: Mapping[TopicPartition, OffsetAndMetadata], outputs: list[tuple[Any, ...]]
    ) -> None:
        producer = self._producer
        assert producer is not None
        producer.begin_transaction()
        try:
            for output in outputs:
                producer.send(*output)
            producer.commit_offsets(self._consumer, positions)
            producer.commit_transaction()
        except BaseException:
            producer.abort_transaction()
            raise

    def _was_published(self, positions: Mapping[TopicPartition, OffsetAndMetadata]) -> bool:
        """Whether a transaction that failed was committed after all, with its positions."""
        with suppress(EmbedlogError):
            return all(self._consumer.committed(key) == at.offset for key, at in positions.items())
        return False

    # Rebalances, in polls

    def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        """Finish what runs, and commit."""
        self._in_flight.revoke(revoked, self._config.max_poll_interval_ms / 1000)
        self._drop_deleted()
        try:
            self._commit()
        finally:
            self.on_partitions_lost(revoked)

    def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        """Begin without records in flight."""
        self._consumer.resume(*(assigned & self._consumer.paused()))

    def on_partitions_lost(self, lost: set[TopicPartition]) -> None:
        """Drop what is in flight: another member may handle it already."""
        self._in_flight.drop(lost)
        for key in lost:
            self._committed.pop(key, None)
