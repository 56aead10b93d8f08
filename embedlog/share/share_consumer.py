"""The share consumer: acquires records, gives them to the program, and acknowledges them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterator, Mapping
from functools import partial
from itertools import groupby
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, Unpack

from embedlog.config import ConsumerConfig, ShareConsumerConfig, describe_network_settings
from embedlog.consumer.arguments import SingleThreadGuard, check_max_records, check_topics
from embedlog.consumer.counts import ConsumerCounts
from embedlog.consumer.deserialize import RecordDecoder
from embedlog.consumer.group_member import GroupMember
from embedlog.consumer.heartbeat import CHECKPOINT_SECONDS
from embedlog.consumer.static_assignment import MissingTopics
from embedlog.consumer.waiter import Waiter
from embedlog.display import plural, public_names
from embedlog.errors import (
    ClosedError,
    CorruptBatchError,
    EmbedlogError,
    IllegalStateError,
    InvalidConfigError,
    InvalidRecordStateError,
    RecordDeserializationError,
    UnknownMemberIdError,
    UnknownTopicOrPartitionError,
)
from embedlog.groups.share_state import ACCEPT, GAP, REJECT, RELEASE, RENEW, RETURN, RecordRange
from embedlog.lazy import asyncio, logging
from embedlog.record import K_co, Record, TopicPartition, V_co
from embedlog.retry import Retry
from embedlog.root.root import Root, check_root
from embedlog.share.letter_writer import LetterWriter
from embedlog.share.share_group import Acknowledgement, ShareGroup, StepOutcome
from embedlog.share.stored_records import ShareRecord, StoredRecords, share_record
from embedlog.tasks import current_caller

if TYPE_CHECKING:
    from embedlog.config.options import ShareConsumerOptions
    from embedlog.metrics import Metrics, Sample

_log = logging.getLogger("embedlog.share")
T = TypeVar("T")

REAP_SECONDS = 0.05
"""How often a consumer looks whether members that have records are alive, if it has time for it."""
_REAP_SHARE = 100
"""Of the time, looking takes at most one part in so many."""
_TURN_SECONDS = 0.01
"""A loop over records acquires as many as the program takes about so long for."""
_NEVER_SECONDS = 86400.0
_CLOSE_SECONDS = 30.0
_REFUSED = {
    *("group_id", "group_instance_id", "partition_assignment_strategy", "auto_offset_reset"),
    *("enable_auto_commit", "auto_commit_interval_ms", "session_timeout_ms"),
    *("heartbeat_interval_ms", "max_poll_interval_ms"),
}
"""Settings of consumers that share consumers do not have."""

VERDICTS = {"accept": ACCEPT, "release": RELEASE, "reject": REJECT, "renew": RENEW}
Verdict = Literal["accept", "release", "reject", "renew"]
CommitCallback = Callable[[dict[TopicPartition, set[int]], EmbedlogError | None], object]


class CommitResults(dict[TopicPartition, EmbedlogError | None]):
    """What became of acknowledgements, by partition; a task may await it."""

    def __await__(self) -> Generator[Any, None, Self]:
        return self
        yield


class ShareConsumer(Generic[K_co, V_co]):
    """Takes records of a share group (KIP-932), one by one, whatever the number of partitions.

    Each record is given to one consumer of the group, which holds its lock for
    ``share.record.lock.duration.ms``, and says what becomes of it: it is *accepted*, and done;
    *released*, and given to a consumer again; *rejected*, and done, as a dead letter if the group
    has a topic for these; or its lock is *renewed*.  A record whose lock ends is released, and so
    are those of a process that died, which the kernel tells.  A record that was delivered
    ``share.delivery.count.limit`` times is given up as if it was rejected.

    With ``share_acknowledgement_mode="implicit"``, the default, records are accepted when the
    program asks for more, or commits, unless it acknowledged them otherwise; with ``"explicit"``
    it must acknowledge each before.  Acknowledgements are committed with the next call that asks
    for records, and by `commit`.

    Use it in one thread at a time; only `wakeup` and `close` may be called from others.  Any number
    of tasks of an event loop may use it, with ``async for``, `getone` and `getmany`; each task
    has its own records.

    Args:
        root: The log.
        topics: The topics.
        group: The id of the share group.
        config: Settings of consumers, see `embedlog.config.ConsumerConfig` and
            `embedlog.config.ShareConsumerConfig`, in either spelling.

    Raises:
        InvalidConfigError: A setting is unknown or invalid.
        InvalidTopicError, InvalidGroupIdError: A name is not valid.
    """

    def __init__(
        self,
        root: Root | None = None,
        *topics: str,
        group: str,
        **config: Unpack[ShareConsumerOptions[K_co, V_co]],
    ) -> None:
        self._root = root = check_root(root, "embedlog.open(path).share_consumer(topic, group=...)")
        self.config, share_config = _parsed(config)
        if ignored := describe_network_settings(config):
            _log.info("The share consumer has no network, and ignores %s", ignored)
        self.group_id = group
        self._is_implicit = share_config.share_acknowledgement_mode == "implicit"
        self._arguments = topics, config
        self._guard = SingleThreadGuard()
        self._waiter = Waiter(root, self.config, self._guard)
        self._counts = ConsumerCounts()
        self._decoder = RecordDecoder(self.config, root)
        self._callback: CommitCallback | None = None
        self._topics: tuple[str, ...] = ()
        self._start()
        self.subscribe(topics)

    def _start(self) -> None:
        """Begin without a membership and records, at first and in a forked child."""
        self._generation = self._root.generation
        self._group = ShareGroup(self._root, self.group_id)
        self._letters = LetterWriter(self._group, self._root)
        self._member: GroupMember | None = None
        self._unlock: weakref.finalize[Any, Any] | None = None
        self._catalog_version = -1
        self._missing = MissingTopics()
        self._partitions: dict[bytes, StoredRecords] = {}
        """In the order in which they are served."""
        self._held: dict[tuple[Any, ...], ShareRecord] = {}
        """Records that are acquired and not done, by topic, partition and offset."""
        self._acknowledged: dict[tuple[Any, ...], ShareRecord] = {}
        """Those of them whose verdicts are not committed."""
        self._returned: dict[object, list[ShareRecord]] = {}
        """Those that each caller got from its last call."""
        self._taken: deque[ShareRecord] = deque()
        """Those that were not returned yet."""
        self._gaps: list[tuple[bytes, Acknowledgement]] = []
        """Acquired offsets without a record."""
        self._errors: deque[EmbedlogError] = deque()
        """What the next calls raise."""
        self._holders: set[int] = set()
        self._reap_at = 0.0
        self._due_at = inf
        self._look_first = False
        self._chunk, self._filled_at, self._turn_ends = 1, 0.0, 0.0
        self._unsaved_since: float | None = None

    def __dir__(self) -> list[str]:
        """Return the names that completion offers."""
        return public_names(self)

    def __repr__(self) -> str:
        topics, closed = ", ".join(self._topics), ", closed" if self._guard.closed else ""
        return f"<ShareConsumer of {topics or 'no topic'} in group {self.group_id!r}{closed}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments of the constructor."""
        topics, config = self._arguments
        return partial(ShareConsumer, self._root, *topics, group=self.group_id, **config), ()

    # Subscription

    def subscribe(self, topics: Collection[str]) -> None:
        """Replace the subscription; topics that do not exist yet are waited for."""
        check_topics(topics)
        with self._guard:
            self._topics, self._catalog_version = tuple(dict.fromkeys(topics)), -1
            self._waiter.wake_tasks()

    def unsubscribe(self) -> None:
        """Take no further records."""
        self.subscribe(())

    def subscription(self) -> set[str]:
        """Return the topics."""
        return set(self._topics)

    @property
    def acquisition_lock_timeout_ms(self) -> int:
        """How long the locks of records last, in milliseconds."""
        return self._group.config().share_record_lock_duration_ms

    def set_acknowledgement_commit_callback(self, callback: CommitCallback | None) -> None:
        """Have a function called when acknowledgements were committed, or refused.

        It gets the offsets by partition, and None or the error.
        """
        self._callback = callback

    # Acknowledging

    def acknowledge(
        self,
        record: Record | RecordDeserializationError,
        verdict: Verdict | int = "accept",
        *,
        delay: float | Retry = 0.0,
        cause: BaseException | None = None,
    ) -> None:
        """Say what becomes of a record; the next `commit`, or call for records, does it.

        Args:
            record: The record, or the error that says that it cannot be deserialized.
            verdict: ``"accept"``, ``"release"``, ``"reject"`` or ``"renew"``, or Kafka's number.
            delay: How many seconds what is released must not be delivered again; or a `Retry`,
                whose ``backoff`` says so by the number of deliveries.
            cause: Why it is rejected, for its dead letter.

        Raises:
            IllegalStateError: This consumer does not hold the record, or the group does not renew.
            ValueError: There is no such verdict.
        """
        number = VERDICTS.get(verdict) if isinstance(verdict, str) else int(verdict)
        if number is None or number not in VERDICTS.values():
            raise ValueError(f"verdict must be one of {', '.join(VERDICTS)}, got {verdict!r}")
        with self._guard:
            where = record.topic, record.partition, record.offset
            held = self._held.get(where)
            if held is None or held._caller is None:
                raise IllegalStateError(
                    "This consumer does not hold the record: it was acknowledged, or never taken",
                    topic=where[0],
                    partition=where[1],
                    offset=where[2],
                )
            if number == RENEW and not self._group.config().share_renew_acknowledge_enable:
                raise IllegalStateError(
                    "Consumers of the group must not renew their locks",
                    group=self.group_id,
                    todo="Set share.renew.acknowledge.enable in the group.",
                )
            if isinstance(delay, Retry):
                delay = delay.pause_seconds(held.delivery_count)
            if not 0 <= delay <= _NEVER_SECONDS * 366:
                raise ValueError(f"delay must be seconds, of a year at most, got {delay!r}")
            self._judge(held, number, int(delay * 1000))
            if cause is not None:
                self._letters.causes[where] = cause

    def _judge(self, record: ShareRecord, verdict: int, delay_ms: int = 0) -> None:
        record._verdict = verdict, delay_ms
        self._acknowledged[record[:3]] = record

    def commit(self) -> CommitResults:
        """Commit the acknowledgements since the last commit; a task may await the result.

        In implicit mode all records that the program has are accepted.  They are done, for all
        processes; they survive a power cut with ``durability="fsync"``, and otherwise within a
        second.

        Returns:
            By partition, None, or the error: `InvalidRecordStateError` for records whose lock had
            ended; the others are done.
        """
        with self._guard:
            self._check_fork()
            if self._is_implicit:
                self._accept()
            if self._member is None:
                return CommitResults()
            results, _ = self._step(0)
            if self._root.context.durability == "fsync":
                self._checkpoint_after(0.0)
            return results

    def _accept(self) -> None:
        """Accept what this caller has, in implicit mode; in explicit mode check that it did.

        Raises:
            IllegalStateError: It has not acknowledged a record, in explicit mode.
        """
        caller = current_caller()
        for record in self._returned.get(caller, ()):
            if record._verdict is None and self._held.get(record[:3]) is record:
                if self._is_implicit:
                    self._judge(record, ACCEPT)
                elif record._until > self._group.uptime():
                    raise IllegalStateError(
                        "The record is not acknowledged, and the mode is explicit",
                        topic=record.topic,
                        partition=record.partition,
                        offset=record.offset,
                        todo="Acknowledge each record before you ask for more.",
                    )
        self._returned.pop(caller, None)

    # Taking records

    def poll(
        self, timeout_ms: float | None = 0, max_records: int | None = None
    ) -> list[ShareRecord]:
        """Commit acknowledgements, and return the next records, as soon as there are any.

        Records whose locks were renewed are returned again, before any others.

        Args:
            timeout_ms: How long to wait for a record; 0 does not wait, None waits forever.
            max_records: At most so many; None is ``max_poll_records``.

        Raises:
            IllegalStateError: It is subscribed to nothing, or, in explicit mode, has not
                acknowledged a record; or another thread uses it.
            InconsistentGroupProtocolError: The group is a consumer group.
            WakeupError: `wakeup` was called.
            RecordDeserializationError: A record cannot be deserialized.  It is released, unless
                the program acknowledges the error otherwise.
            CorruptBatchError: Records cannot be read; they are released.
        """
        limit = check_max_records(max_records) or self.config.max_poll_records
        with self._guard:
            self._begin_call()
            return self._waiter.repeat(partial(self._next, limit), timeout_ms, self._due_in)

    def __iter__(self) -> Iterator[ShareRecord]:
        """Iterate over records forever, or until none came for ``consumer_timeout_ms``.

        In implicit mode a record is accepted when the next one is asked for.
        """
        while True:
            with self._guard:
                self._begin_call()
                record = self._pop()
                if record is None:
                    fill = partial(self._fill, self.config.max_poll_records)
                    self._waiter.repeat(fill, self.config.consumer_timeout_ms, self._due_in)
                    record = self._pop()
            if record is None:
                return
            yield record

    async def __aiter__(self) -> AsyncIterator[ShareRecord]:
        """Do as `__iter__`; for tasks.  The loop ends when the consumer is closed."""
        try:
            while (record := await self._getone(self.config.consumer_timeout_ms)) is not None:
                yield record
        except ClosedError:
            if not self._guard.closed:
                raise

    async def getone(self) -> ShareRecord:
        """Return the next record, and wait for it; for tasks, of which several may wait.

        In implicit mode the last record of the task is accepted.  A task that is cancelled while
        it waits has taken no record.

        Raises:
            ClosedError: The consumer was closed.
            Exception: As `poll`.
        """
        record = await self._getone(None)
        assert record is not None
        return record

    async def _getone(self, timeout_ms: float | None) -> ShareRecord | None:
        fill = partial(self._fill, self.config.max_poll_records)
        while True:
            if await self._wait_async(fill, timeout_ms) is None:
                return None
            if (record := self._pop()) is not None:
                return record

    async def getmany(
        self, *, timeout_ms: float | None = 0, max_records: int | None = None
    ) -> list[ShareRecord]:
        """Return the next records, as `poll` does; for tasks.

        A task that is cancelled while it waits has taken no record.

        Raises:
            Exception: As `poll`.
        """
        limit = check_max_records(max_records) or self.config.max_poll_records
        return await self._wait_async(partial(self._next, limit), timeout_ms) or []

    async def _wait_async(self, step: Callable[[], T], timeout_ms: float | None) -> T | None:
        def look() -> T:
            with self._guard:
                return self._waiter.repeat(step, 0)

        with self._guard:
            self._begin_call()
        deadline = None if timeout_ms is None else monotonic() + timeout_ms / 1000
        if monotonic() >= self._turn_ends:
            await asyncio.sleep(0)
        try:
            return await self._waiter.repeat_async(look, deadline, self._due_in)
        finally:
            self._turn_ends = monotonic() + _TURN_SECONDS

    def wakeup(self) -> None:
        """Make the waiting call, or the next one that may wait, raise `WakeupError` once.

        May be called from any thread and from a signal handler.
        """
        self._waiter.wakeup()

    def _begin_call(self) -> None:
        """Begin a call for records: the program is done with those that it has."""
        self._counts.count_poll()
        self._check_fork()
        if not self._topics:
            raise IllegalStateError(
                "The consumer has nothing to read", todo="Subscribe to a topic."
            )
        self._accept()
        if self._errors:
            raise self._errors.popleft()

    def _check_fork(self) -> None:
        if self._generation != self._root.generation:
            self._start()

    def _pop(self) -> ShareRecord | None:
        """Return a record that was acquired ahead, whose lock has not ended."""
        while self._taken:
            record = self._taken.popleft()
            if record._until > self._group.uptime():
                return self._given(record)
            del self._held[record[:3]]
        return None

    def _given(self, record: ShareRecord) -> ShareRecord:
        """Note that this caller gets a record."""
        record._caller = caller = current_caller()
        self._returned.setdefault(caller, []).append(record)
        return record

    def _fill(self, limit: int) -> bool | None:
        """Acquire records ahead: as many as the program takes a few milliseconds for."""
        if not self._taken:
            # The time since the last call is what the program took for as many records.
            share = _TURN_SECONDS / max(monotonic() - self._filled_at, _TURN_SECONDS / 2)
            self._chunk = min(max(int(self._chunk * share), 1), limit)
            try:
                self._taken.extend(self._acquired(self._chunk))
            finally:
                self._filled_at = monotonic()
        return bool(self._taken) or None

    def _next(self, limit: int) -> list[ShareRecord]:
        records: list[ShareRecord] = []
        while len(records) < limit and (record := self._pop()) is not None:
            records.append(record)
        return records or [self._given(record) for record in self._acquired(limit)]

    def _acquired(self, limit: int) -> list[ShareRecord]:
        """Commit acknowledgements, and return records: those that were renewed, or else others."""
        self._follow()
        caller = current_caller()
        renewed = [
            each
            for each in self._acknowledged.values()
            if each._caller == caller and each._verdict and each._verdict[0] == RENEW
        ]
        if renewed:
            self._step(0)
            if renewed := [each for each in renewed if self._held.get(each[:3]) is each]:
                return renewed
        while True:
            _, outcome = self._step(limit)
            records = self._read(outcome) if outcome is not None else []
            if self._errors and not records:
                raise self._errors.popleft()
            is_useless = any(gap.verdict == GAP for _, gap in self._gaps)
            must_reap = bool(self._holders) and monotonic() >= self._reap_at
            if records or not (is_useless or must_reap):
                return records

    # Steps

    def _follow(self) -> None:
        """Join the group, and begin in new partitions of the topics."""
        self._checkpoint_after(CHECKPOINT_SECONDS)
        version = self._root.context.catalog.version()
        if self._member is None:
            self._root.context.check_writable()
            self._group.remove_dead_members()
            self._member = member = self._group.join(self._topics, self.config.client_id)
            self._unlock = weakref.finalize(self, member.unlock)
            self._catalog_version = -1
        if version == self._catalog_version:
            return
        if set(self._topics) != set(self._member.info.topics):
            self._member.resubscribe(self._topics)
        topics = [info for name, info in self._root.topics().items() if name in self._topics]
        self._missing.report(set(self._topics) - {info.name for info in topics})
        keys = {info.key(each): info for info in topics for each in range(info.partitions)}
        if keys.keys() != self._partitions.keys():
            self._group.begin(topics)
            self._letters.prepare(topics)
            size, before = self.config.max_partition_fetch_bytes, self._partitions
            self._partitions = {
                key: before.get(key)
                or StoredRecords(self._root.partition(info.name, number), self._decoder, size)
                for info in topics
                for number in range(info.partitions)
                for key in [info.key(number)]
            }
        self._catalog_version = version

    def _step(self, limit: int) -> tuple[CommitResults, StepOutcome | None]:
        """Take one step of the group: acknowledge, and acquire."""
        member = self._member
        assert member is not None
        acknowledgements, sent = self._acknowledgements()
        try:
            outcome = self._group.take_step(
                member,
                list(self._partitions),
                acknowledgements,
                limit,
                self._find_dead(member),
                look_first=self._look_first and not acknowledgements,
            )
        except UnknownMemberIdError as error:
            _log.warning("%s; the consumer joins the group again", error)
            return self._lose_membership(sent), None
        except BaseException:
            # The next step commits them.
            self._acknowledged = {record[:3]: record for record in sent}
            raise
        if outcome.rows:
            self._unsaved_since = self._unsaved_since or monotonic()
        self._look_first = limit > 0 and not outcome.acquired
        self._holders, self._gaps = outcome.holders, []
        wait_ms = inf if outcome.due_ms is None else outcome.due_ms - self._group.uptime()
        self._due_at = monotonic() + max(wait_ms, 0) / 1000
        for key in outcome.missing:
            self._partitions.pop(key, None)
            self._catalog_version = -1
        results = self._finish(sent, outcome)
        if outcome.archiving:
            self._letters.write(outcome.archiving, self._partitions)
        self._letters.causes.clear()
        return results, outcome

    def _acknowledgements(self) -> tuple[dict[bytes, list[Acknowledgement]], list[ShareRecord]]:
        """Return what was acknowledged since the last step, in ranges, and its records."""
        sent, self._acknowledged = sorted(self._acknowledged.values()), {}
        found: dict[bytes, list[Acknowledgement]] = {}
        for key, gap in self._gaps:
            found.setdefault(key, []).append(gap)
        for (key, verdict), group in groupby(sent, lambda each: (each._key, each._verdict)):
            assert verdict is not None
            for record in group:
                ranges = found.setdefault(key, [])
                if ranges and (ranges[-1].stop, *ranges[-1][2:]) == (record.offset, *verdict):
                    ranges[-1] = ranges[-1]._replace(stop=record._stop)
                else:
                    ranges.append(Acknowledgement(record.offset, record._stop, *verdict))
        return found, sent

    def _finish(self, sent: list[ShareRecord], outcome: StepOutcome) -> CommitResults:
        """Forget what is done, and report what was refused."""
        refused: dict[bytes, list[tuple[int, int]]] = {}
        for key, first, stop in outcome.refused:
            refused.setdefault(key, []).append((first, stop))
        done: dict[TopicPartition, set[int]] = {}
        late: dict[TopicPartition, list[int]] = {}
        results = CommitResults()
        deleted = {record.topic_partition for record in sent if record._key in outcome.missing}
        for record in sent:
            partition = record.topic_partition
            offset, ranges = record.offset, refused.get(record._key, ())
            results.setdefault(partition)
            if any(first <= offset < stop for first, stop in ranges):
                late.setdefault(partition, []).append(offset)
            else:
                done.setdefault(partition, set()).add(offset)
                if record._verdict is not None and record._verdict[0] == RENEW:
                    record._verdict, record._until = None, outcome.renewed_until
                    continue
            if self._held.get(record[:3]) is record:
                del self._held[record[:3]]
        for partition, offsets in late.items():
            error: EmbedlogError = InvalidRecordStateError(
                f"The locks of {plural(len(offsets), 'record')} had ended when they were "
                "acknowledged",
                topic=partition.topic,
                partition=partition.partition,
                group=self.group_id,
                offset=offsets[0],
                offsets=tuple(offsets),
                todo="Another consumer gets them, or has got them. Take fewer records at a time, "
                "renew their locks, or raise share.record.lock.duration.ms of the group.",
            )
            if partition in deleted:
                error = UnknownTopicOrPartitionError(
                    "The topic of acknowledged records was deleted", **partition._asdict()
                )
            results[partition] = error
            _log.warning("%s", error)
            if self._callback is not None:
                self._callback({partition: set(offsets)}, error)
        if done and self._callback is not None:
            self._callback(done, None)
        return results

    def _lose_membership(self, sent: list[ShareRecord]) -> CommitResults:
        """Forget all records: others have them."""
        outcome = StepOutcome()
        outcome.refused = [(record._key, record.offset, record._stop) for record in sent]
        results = self._finish(sent, outcome)
        member, self._member = self._member, None
        if member is not None:
            member.unlock()
        self._held.clear()
        self._acknowledged.clear()
        self._taken.clear()
        self._gaps, self._due_at = [], 0.0
        return results

    def _find_dead(self, member: GroupMember) -> set[int]:
        """Return members that died with records, as far as it is time to look."""
        began = monotonic()
        if began < self._reap_at or not self._holders:
            return set()
        dead = self._group.find_dead(self._holders)
        if dead:
            self._group.remove_dead_members(exclude=member.id)
        self._forget_ended()
        self._reap_at = monotonic() + max(REAP_SECONDS, _REAP_SHARE * (monotonic() - began))
        return dead

    def _forget_ended(self) -> None:
        """Forget records whose locks have ended, and that no task can acknowledge any more."""
        now = self._group.uptime()
        ended = [caller for caller in self._returned if getattr(caller, "done", bool)()]
        for caller in ended:
            for record in self._returned[caller]:
                if record._until <= now and self._held.get(record[:3]) is record:
                    del self._held[record[:3]]
            if not any(self._held.get(each[:3]) is each for each in self._returned[caller]):
                del self._returned[caller]

    def _due_in(self) -> float:
        """Return after how many seconds to look again, if nothing happens before."""
        due = min(self._due_at, self._letters.due_at)
        if self._holders:
            due = min(due, self._reap_at)
        if self._unsaved_since is not None:
            due = min(due, self._unsaved_since + CHECKPOINT_SECONDS)
        return max(min(due - monotonic(), _NEVER_SECONDS), 0.0)

    def _checkpoint_after(self, seconds: float) -> None:
        since = self._unsaved_since
        if since is not None and monotonic() - since >= seconds:
            self._unsaved_since = None
            self._group.checkpoint(always=True)

    # Reading

    def _read(self, outcome: StepOutcome) -> list[ShareRecord]:
        """Read what was acquired; note the offsets without records."""
        records: list[ShareRecord] = []
        for key, acquired in outcome.acquired:
            stored = self._partitions[key]
            # Served last the next time.
            self._partitions[key] = self._partitions.pop(key)
            try:
                found, following = stored.read(acquired.first, acquired.stop)
            except CorruptBatchError as error:
                self._errors.append(error)
                self._gaps.append((key, Acknowledgement(*acquired[:2], RELEASE)))
                continue
            except UnknownTopicOrPartitionError:
                continue  # It was deleted just now.
            first = found[0].offset if found else following
            if first > acquired.first:
                self._gaps.append((key, Acknowledgement(acquired.first, first, GAP)))
            if following < acquired.stop:
                # The rest is damaged, or the log was truncated: the next call finds out.
                unread = Acknowledgement(following, acquired.stop, RETURN)
                self._gaps.append((key, unread))
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
            self._held[record[:3]] = shared
            if error is None:
                yield shared
            else:
                # Unless the program says otherwise.
                shared._caller = error
                self._judge(shared, RELEASE)
                self._letters.causes[record[:3]] = error
                self._errors.append(error)

    # Metrics

    def metrics(self) -> Metrics:
        """Return counts and times by name, in Kafka's groups; may be called from any thread."""
        from embedlog.metrics import nested

        return nested(self._samples())

    def _samples(self) -> Iterator[Sample]:
        return self._counts.poll_samples()

    # Closing

    def close(self, autocommit: bool = True, timeout_ms: float | None = None) -> None:
        """Commit what was acknowledged, release all other records, and leave the group.

        In implicit mode too, the records that the program has are released, as in Kafka: `commit`
        accepts them.  May be called from any thread; a call that waits in another thread raises
        `ClosedError`.

        Args:
            autocommit: Accepted as by other consumers.
            timeout_ms: How long to wait for a call in another thread; 30 s by default.
        """
        if self._guard.closed:
            return
        self._guard.refuse()
        self._waiter.wake_tasks()
        seconds = _CLOSE_SECONDS if timeout_ms is None else timeout_ms / 1000
        if not self._guard.acquire_to_close(0):
            self._waiter.wake_all()
            if not self._guard.acquire_to_close(seconds):
                if self._member is not None:
                    self._member.unlock()  # Others get its records.
                return
        try:
            self._leave()
        finally:
            self._letters.close()
            self._waiter.leave_page()
            self._guard.release_closed()

    def _leave(self) -> None:
        member = self._member
        if member is None or self._generation != self._root.generation:
            return
        for record in self._held.values():
            if record._verdict is None or record._verdict[0] == RENEW:
                self._judge(record, RETURN if record._caller is None else RELEASE)
        try:
            self._step(0)
        finally:
            self._member = None
            member.leave()
            self._checkpoint_after(0.0)

    async def aclose(self, autocommit: bool = True) -> None:
        """Do as `close`; for tasks."""
        self.close(autocommit)

    @property
    def _closed(self) -> bool:
        return self._guard.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def _parsed(config: Mapping[str, Any]) -> tuple[ConsumerConfig, ShareConsumerConfig]:
    """Return the settings of consumers, and those of share consumers.

    Raises:
        InvalidConfigError: A setting is unknown, invalid, or not one of share consumers.
    """
    names = {name: str(name).replace(".", "_") for name in config}
    for name, underscored in names.items():
        if underscored in _REFUSED:
            raise InvalidConfigError(
                f"A share consumer has no setting {name}",
                todo="Where the group begins is its setting share.auto.offset.reset: see "
                "log.groups[...].alter."
                if underscored == "auto_offset_reset"
                else None,
                setting=underscored,
            )
    own = {name for name, underscored in names.items() if underscored.startswith("share_")}
    return (
        ConsumerConfig.parse({name: config[name] for name in config.keys() - own}),
        ShareConsumerConfig.parse({name: config[name] for name in own}),
    )
