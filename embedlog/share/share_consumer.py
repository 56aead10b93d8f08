"""The share consumer: acquires records, gives them to the program, and acknowledges them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, Unpack

from embedlog.config import ConsumerConfig, ShareConsumerConfig, describe_network_settings
from embedlog.consumer.arguments import SingleThreadGuard, check_max_records, check_topics
from embedlog.consumer.counts import ConsumerCounts
from embedlog.consumer.deserialize import RecordDecoder
from embedlog.consumer.waiter import Waiter
from embedlog.display import public_names
from embedlog.errors import (
    ClosedError,
    IllegalStateError,
    InvalidConfigError,
    RecordDeserializationError,
)
from embedlog.groups.share_state import ACCEPT, REJECT, RELEASE, RENEW
from embedlog.lazy import asyncio, logging
from embedlog.record import K_co, Record, V_co
from embedlog.retry import Retry
from embedlog.root.root import Root, check_root
from embedlog.share.share_session import CommitCallback, CommitResults, ShareSession
from embedlog.share.stored_records import ShareRecord

if TYPE_CHECKING:
    from embedlog.config.options import ShareConsumerOptions
    from embedlog.metrics import Metrics, Sample

_log = logging.getLogger("embedlog.share")
T = TypeVar("T")

_TURN_SECONDS = 0.01
"""A loop over records acquires as many as the program takes about so long for."""
_LONGEST_DELAY_SECONDS = 366 * 86400.0
_CLOSE_SECONDS = 30.0
_REFUSED = {
    *("group_id", "group_instance_id", "partition_assignment_strategy", "auto_offset_reset"),
    *("enable_auto_commit", "auto_commit_interval_ms", "session_timeout_ms"),
    *("heartbeat_interval_ms", "max_poll_interval_ms"),
}
"""Settings of consumers that share consumers do not have."""

VERDICTS = {"accept": ACCEPT, "release": RELEASE, "reject": REJECT, "renew": RENEW}
Verdict = Literal["accept", "release", "reject", "renew"]


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
        self._session = ShareSession(root, group, self.config, self._decoder)
        self._topics: tuple[str, ...] = ()
        self._chunk, self._filled_at, self._turn_ends = 1, 0.0, 0.0
        self.subscribe(topics)

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
            self._topics = tuple(dict.fromkeys(topics))
            self._session.resubscribe()
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
        return self._session.group.config().share_record_lock_duration_ms

    def set_acknowledgement_commit_callback(self, callback: CommitCallback | None) -> None:
        """Have a function called when acknowledgements were committed, or refused.

        It gets the offsets by partition, and None or the error.
        """
        self._session.callback = callback

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
            session, where = self._session, (record.topic, record.partition, record.offset)
            held = session.records.of_program(where)
            if number == RENEW and not session.group.config().share_renew_acknowledge_enable:
                raise IllegalStateError(
                    "Consumers of the group must not renew their locks",
                    group=self.group_id,
                    todo="Set share.renew.acknowledge.enable in the group.",
                )
            if isinstance(delay, Retry):
                delay = delay.pause_seconds(held.delivery_count)
            if not 0 <= delay <= _LONGEST_DELAY_SECONDS:
                raise ValueError(f"delay must be seconds, of a year at most, got {delay!r}")
            session.records.judge(held, number, int(delay * 1000))
            if cause is not None:
                session.letters.causes[where] = cause

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
            session = self._current_session()
            if self._is_implicit:
                session.records.end_call(is_implicit=True)
            if session.member is None:
                return CommitResults()
            results, _ = session.step(0)
            if self._root.context.durability == "fsync":
                session.checkpoint_after(0.0)
            return results

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
            return self._waiter.repeat(partial(self._next, limit), timeout_ms, self._session.due_in)

    def __iter__(self) -> Iterator[ShareRecord]:
        """Iterate over records forever, or until none came for ``consumer_timeout_ms``.

        In implicit mode a record is accepted when the next one is asked for.
        """
        while True:
            with self._guard:
                self._begin_call()
                record = self._next_ahead()
                if record is None:
                    fill = partial(self._fill, self.config.max_poll_records)
                    self._waiter.repeat(fill, self.config.consumer_timeout_ms, self._session.due_in)
                    record = self._next_ahead()
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
            if (record := self._next_ahead()) is not None:
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
            return await self._waiter.repeat_async(look, deadline, self._session.due_in)
        finally:
            # A turn goes on until the loop has run, however often records are taken in it.
            if (now := monotonic()) >= self._turn_ends:
                self._turn_ends = now + _TURN_SECONDS

    def wakeup(self) -> None:
        """Make the waiting call, or the next one that may wait, raise `WakeupError` once.

        May be called from any thread and from a signal handler.
        """
        self._waiter.wakeup()

    def _begin_call(self) -> None:
        """Begin a call for records: the program is done with those that it has."""
        self._counts.count_poll()
        session = self._current_session()
        if not self._topics:
            raise IllegalStateError(
                "The consumer has nothing to read", todo="Subscribe to a topic."
            )
        session.records.end_call(is_implicit=self._is_implicit)
        if session.errors:
            raise session.errors.popleft()

    def _current_session(self) -> ShareSession:
        """Return the session of this process; a forked child begins without records."""
        session = self._session
        if session.generation != self._root.generation:
            self._session = ShareSession(self._root, self.group_id, self.config, self._decoder)
            self._session.callback = session.callback
        return self._session

    def _next_ahead(self) -> ShareRecord | None:
        return self._session.records.next()

    def _fill(self, limit: int) -> bool | None:
        """Acquire records ahead: as many as the program takes a few milliseconds for."""
        if self._session.records.has_ahead:
            return True
        # The time since the last call is what the program took for as many records.
        share = _TURN_SECONDS / max(monotonic() - self._filled_at, _TURN_SECONDS / 2)
        self._chunk = min(max(int(self._chunk * share), 1), limit)
        try:
            return (
                self._session.records.keep_ahead(self._session.acquire(self._topics, self._chunk))
                or None
            )
        finally:
            self._filled_at = monotonic()

    def _next(self, limit: int) -> list[ShareRecord]:
        records: list[ShareRecord] = []
        while len(records) < limit and (record := self._next_ahead()) is not None:
            records.append(record)
        give = self._session.records.give
        return records or [give(each) for each in self._session.acquire(self._topics, limit)]

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
                self._session.unlock()  # Others get its records.
                return
        try:
            self._session.leave()
        finally:
            self._session.letters.close()
            self._waiter.leave_page()
            self._guard.release_closed()

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
