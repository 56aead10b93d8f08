"""The connection of a consumer to its group, as a member or only to commit.

Everything happens on the polling thread, partition by partition: the consumer keeps
reading kept partitions, releases revoked ones after the program was notified, and begins
to read added ones at the committed offsets.  The group as a whole never stops (KIP-429,
and KIP-848's idea of reconciling each partition by itself).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from embedlog.assignor import configured
from embedlog.catalog import INTERNAL
from embedlog.config import ConsumerConfig
from embedlog.consumer import group_member as members
from embedlog.consumer.arguments import check_topics
from embedlog.consumer.assignment import Assignment
from embedlog.consumer.committer import Committer, Positions
from embedlog.consumer.counts import ConsumerCounts
from embedlog.consumer.group_member import GroupMember, MemberAssignment, StartPosition
from embedlog.consumer.heartbeat import CHECKPOINT_SECONDS, Heartbeat
from embedlog.consumer.open_group import open_group
from embedlog.consumer.rebalance_notifier import ConsumerRebalanceListener, RebalanceNotifier
from embedlog.consumer.static_assignment import MissingTopics
from embedlog.display import plural
from embedlog.errors import (
    ClosedError,
    CommitFailedError,
    CorruptionError,
    EmbedlogError,
    FencedInstanceIdError,
    IllegalStateError,
    InvalidGroupIdError,
    UnknownMemberIdError,
    UnknownTopicOrPartitionError,
)
from embedlog.group import Group
from embedlog.groups.offsets import check_group_id
from embedlog.lazy import asyncio, logging
from embedlog.record import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition
from embedlog.root.root import Root
from embedlog.tasks import run_to_end

if TYPE_CHECKING:
    from asyncio import Task

T = TypeVar("T")

_MAX_LISTED = 10
"""Partitions that a line of the log names."""

_log = logging.getLogger("embedlog.consumer")


class GroupClient:
    """A consumer's connection to its group; without a ``group_id`` it refuses everything.

    While the consumer is subscribed, the first `update` joins the group, and later updates
    carry out its changes.

    Args:
        root: The log.
        config: The settings of the consumer.
        assignment: The assignment to keep up to date.
        counts: Counts commits, rebalances and heartbeats.
        create: Whether to create topics that do not exist.
    """

    def __init__(
        self,
        root: Root,
        config: ConsumerConfig,
        assignment: Assignment,
        counts: ConsumerCounts,
        create: bool,
    ) -> None:
        self._root, self._config, self._assignment = root, config, assignment
        self._counts = counts
        limit_ms = min(config.default_api_timeout_ms, config.request_timeout_ms)
        self._commit_timeout = min(limit_ms / 1000, root.lock_timeout)
        self._create = create
        self._assignors = configured(config.partition_assignment_strategy)
        self._eager = not all(assignor.cooperative for assignor in self._assignors.values())
        """Whether the listener is notified of all partitions, or of changes only."""
        if config.group_id is not None:
            check_group_id(config.group_id)
        self.committer = Committer(config, assignment, self._commit)
        self.notifier = RebalanceNotifier()
        self.subscribed = False
        """Whether this consumer is a member, or about to join; otherwise it only commits."""
        self.topics: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        self._missing = MissingTopics()
        self._member: GroupMember | None = None
        self._heartbeat: Heartbeat | None = None
        self._catalog_version = -1
        """The version of the catalog in which the topics were looked up."""
        self._root_generation = root.generation
        self._notified_generation = -1
        """The last generation of the group that the listener was notified of."""
        self.is_complete = False
        """Whether the member owned all that it was assigned, when it looked last."""
        self._left = False
        self._fenced: FencedInstanceIdError | None = None
        self._removal: EmbedlogError | None = None
        """Why the group removed the member last; see `take_removal`."""
        self._last_poll = monotonic()
        self._polling = 0
        """How many polls are under way; tasks may share a consumer."""
        self._following: Task[None] | None = None
        """Carries out a rebalance whose listener may wait."""
        self._uncheckpointed_since: float | None = None
        """When the first commit without a membership was made that is not checkpointed."""

    def _group(self) -> Group:
        """Return the group with the databases open now: a forked child has opened its own."""
        return open_group(self._root, self._group_id())

    def _group_id(self) -> str:
        if self._config.group_id is None:
            raise InvalidGroupIdError("The consumer has no group", todo="Set group_id.")
        return self._config.group_id

    def check_writable(self) -> None:
        """Check that the consumer may commit and subscribe.

        Raises:
            InvalidGroupIdError: The consumer has no group.
            ReadOnlyError: The log was opened for reading only.
        """
        self._group_id()
        self._root.context.check_writable()

    # Subscription

    def check_subscribe(self, topics: Collection[str], pattern: str | None) -> None:
        """Check the arguments of a subscription, and that it is possible."""
        self.notifier.check_not_in_callback("subscribe")
        check_topics(topics)
        if topics and pattern is not None:
            raise IllegalStateError("Subscribe to topics or to a pattern, not to both")

    def subscribe(
        self,
        topics: Collection[str],
        pattern: str | None,
        listener: ConsumerRebalanceListener | None,
    ) -> None:
        """Replace the subscription; the next poll joins the group, or updates the member."""
        compiled = None if pattern is None else re.compile(pattern)
        self.notifier = RebalanceNotifier(listener)
        self.topics, self._pattern, self._catalog_version = set(topics), compiled, -1
        self._missing = MissingTopics()
        if not self.subscribed:
            self.subscribed, self._left, self._fenced = True, False, None
            self._last_poll, self._root_generation = monotonic(), self._root.generation

    def _subscribed_topics(self) -> set[str]:
        if self._pattern is not None:
            self.topics = self.matching_topics(self._pattern)
            return self.topics
        if self._create:
            for topic in self.topics:
                with suppress(UnknownTopicOrPartitionError):
                    self._root.ensure_topic(topic)
        self._missing.report(self.topics - self._root.topics().keys())
        return self.topics

    def matching_topics(self, pattern: re.Pattern[str]) -> set[str]:
        """Return the names of the topics that match a pattern as a whole; warn of none."""
        exclude_internal = self._config.exclude_internal_topics
        names = {
            name
            for name in self._root.topics()
            if pattern.fullmatch(name) and not (exclude_internal and name.startswith(INTERNAL))
        }
        self._missing.report(() if names else (pattern.pattern,), pattern.pattern)
        return names

    def require_update(self) -> None:
        """Have the next `update` read the catalog again: a topic was deleted while it was read."""
        self._catalog_version = -1

    # Following the group

    def update(self) -> None:
        """Join the group, or carry out its changes; called before each fetch.

        Raises:
            FencedInstanceIdError: Another member took over the group_instance_id.
            InconsistentGroupProtocolError, AssignorError: The group has no target.
            Exception: An error of the listener.
        """
        if self.notifier.in_callback:
            return
        if self._fenced is not None:
            raise self._fenced
        if self._root_generation != self._root.generation:
            self._reset_after_fork()
        self.committer.run_callbacks()
        if self._is_current():
            self.committer.auto_commit_if_due()
        elif not self.notifier.is_async:
            run_to_end(self._follow())
        self.notifier.raise_error()

    async def update_async(self) -> None:
        """Do as `update` if the listener may wait for something; for tasks.

        A rebalance that has begun is completed, whatever task is cancelled meanwhile.
        """
        while self.must_await_listener():
            if not self._is_following():
                self._following = asyncio.ensure_future(self._follow())
                # It is raised where it is awaited, or the next look meets it again.
                self._following.add_done_callback(lambda task: task.cancelled() or task.exception())
            assert self._following is not None
            await asyncio.shield(self._following)

    def must_await_listener(self) -> bool:
        """Return whether there is a rebalance whose listener may wait: see `update_async`."""
        if not (self.notifier.is_async and self.subscribed) or self.notifier.in_callback:
            return False
        return self._is_following() or (self._fenced is None and not self._is_current())

    def _is_following(self) -> bool:
        # Not whether it is None: a callback that sets it runs after those that await it.
        return self._following is not None and not self._following.done()

    def _is_current(self) -> bool:
        """Return whether the member has carried out all changes of the group and of the topics."""
        member, heartbeat = self._member, self._heartbeat
        return not (
            member is None
            or (heartbeat is not None and heartbeat.failure is not None)
            or self._root.context.catalog.version() != self._catalog_version
            or member.changed()
        )

    async def _follow(self) -> None:
        while True:
            try:
                await self._update()
                break
            except UnknownMemberIdError as error:
                await self._lose_membership(error)
            except FencedInstanceIdError as error:
                self._fenced = error
                await self._lose_membership(error)
                raise

    async def _update(self) -> None:
        member, heartbeat = self._member, self._heartbeat
        if heartbeat is not None and heartbeat.failure is not None:
            raise heartbeat.failure
        version = self._root.context.catalog.version()
        if member is None:
            member = self._join()
        elif version != self._catalog_version:
            # The catalog has changed, and perhaps the topics that match (E17, M16).
            topics = self._subscribed_topics()
            if topics != set(member.info.topics):
                member.resubscribe(topics)
            member.group.check_topics()
        self._catalog_version = version
        self.committer.auto_commit_if_due()
        while member.changed():
            await self._rebalance(member)
            if self._heartbeat is not None:
                self._heartbeat.wake()

    def _join(self) -> GroupMember:
        if self._left:
            raise ClosedError("The consumer was closed")
        config, group = self._config, self._group()
        # Partitions of members that have just died are free immediately.
        group.remove_dead_members()
        member = self._member = members.join(
            group,
            self._subscribed_topics(),
            list(self._assignors),
            session_ms=config.session_timeout_ms,
            instance_id=config.group_instance_id,
            client_id=config.client_id,
        )
        try:
            self._heartbeat = Heartbeat(member, config, self.idle_seconds, self._counts)
        except BaseException:
            self._stop()  # Without heartbeats it would be removed later, in the middle of its work.
            raise
        self._notified_generation = -1
        topics = ", ".join(member.info.topics) or "no topic"
        _log.info("Group %s: member %s joined, subscribed to %s", group.name, member.id, topics)
        return member

    async def _rebalance(self, member: GroupMember) -> None:
        assignment = member.check_assignment(self._assignors)
        try:
            await self._apply(member, assignment)
        except BaseException:
            # It may be half applied: the next check says what is left to do.
            member.require_check()
            raise

    async def _apply(self, member: GroupMember, assignment: MemberAssignment) -> None:
        step, new_generation = assignment.step, assignment.generation != self._notified_generation
        lost = self._assignment.partitions() - member.owned
        await self.notifier.lost(lost)
        self._assignment.remove(lost)
        notify_all = self._eager and (new_generation or bool(step.added or step.revoked))
        if notify_all or step.revoked:
            self.committer.auto_commit_now()
            await self.notifier.revoked(
                self._assignment.partitions() if notify_all else step.revoked
            )
        # Kept partitions that it does not read were lost in the middle of a rebalance.  And a
        # program that was notified that a partition is revoked may have dropped records that
        # it did not commit, so it gets them again, as in Kafka.
        reacquired = set(step.kept)
        if not (notify_all and self.notifier.has_listener):
            reacquired -= self._assignment.partitions()
        released = reacquired.union(step.revoked)
        paused = {tp for tp in reacquired if (cur := self._assignment.get(tp)) and cur.paused}
        self._assignment.remove(released)
        # Last: from now on another member reads from the committed offset (M23).
        member.release(released)
        to_acquire = reacquired.union(step.added)
        acquired = self._acquire(member, to_acquire) if to_acquire else {}
        for partition in paused & self._assignment.partitions():
            self._assignment.cursor(partition).paused = True
        if new_generation or notify_all or acquired:
            self.committer.restart_interval()
            await self.notifier.assigned(self._assignment.partitions() if notify_all else acquired)
        self._notified_generation = assignment.generation
        self.is_complete = not step.awaited
        if new_generation:
            self._counts.count_rebalance()
            self._report_assignment(member, assignment)

    def _report_assignment(self, member: GroupMember, assignment: MemberAssignment) -> None:
        """Log what a generation assigns to this member; warn if that is nothing."""
        group, step = member.group, assignment.step
        assigned = sorted({*step.kept, *step.added, *step.awaited})
        if _log.isEnabledFor(logging.INFO):
            _log.info(
                "Group %s, generation %d: member %s is assigned %s",
                *(group.name, assignment.generation, member.id, _listed(assigned)),
            )
        if not assigned:
            current = group.read()
            partitions = sum(count for _, count in current.topics.values())
            if 0 < partitions < len(current.members):
                _log.warning(
                    "Group %s has %d members for %s, so member %s gets no records; run "
                    "fewer members, or add partitions",
                    *(group.name, len(current.members), plural(partitions, "partition"), member.id),
                )

    def _acquire(
        self, member: GroupMember, added: Iterable[TopicPartition]
    ) -> dict[TopicPartition, StartPosition]:
        for partition in added:
            # An error here is raised when it is read; the other partitions are fine.
            with suppress(UnknownTopicOrPartitionError, CorruptionError):
                # The transaction that acquires it needs a row with its end.
                self._root.partition(*partition).tail()
        acquired = member.acquire(from_end=self._config.auto_offset_reset == "latest")
        for partition, start in acquired.items():
            try:
                cursor = self._assignment.add(partition, self._config.auto_offset_reset)
            except UnknownTopicOrPartitionError:
                # Deleted just now: the next check releases it.
                member.group.check_topics()
                continue
            if start.end is not None:
                # A committed offset takes precedence; it is looked up at the poll, since the
                # listener may commit before.
                cursor.start_at(start.end)
        return acquired

    async def _lose_membership(self, error: EmbedlogError) -> None:
        """Drop all partitions: other members may own them already."""
        self._removal = error
        lost = self._assignment.partitions()
        _log.warning("%s; %s lost", error, plural(len(lost), "partition"))
        await self.notifier.lost(lost)
        self._assignment.clear()
        self._stop()

    def take_removal(self) -> EmbedlogError | None:
        """Return why the group removed this member, once; None if it did not."""
        removal, self._removal = self._removal, None
        return removal

    def _reset_after_fork(self) -> None:
        """In a forked child: forget the membership, which is the parent's."""
        self._member = self._heartbeat = None
        self._root_generation = self._root.generation
        self._assignment.clear()

    def _current_member(self) -> GroupMember | None:
        """Return the member; None before it joins, also in a forked child."""
        return self._member if self._root_generation == self._root.generation else None

    def metadata(self) -> ConsumerGroupMetadata:
        """Return the consumer's identity in the group."""
        config, member = self._config, self._current_member()
        identity = (-1, "") if member is None else (member.generation, member.id)
        return ConsumerGroupMetadata(config.group_id, *identity, config.group_instance_id)

    # Polling

    def poll(self, call: Callable[[], T]) -> T:
        """Run a call as a poll, which max_poll_interval_ms asks for."""
        if not self.subscribed:
            self.committer.run_callbacks()
            self.committer.auto_commit_if_due()
            self._checkpoint_after(CHECKPOINT_SECONDS)
            return call()
        self.notifier.check_not_in_callback("poll")
        self._polling += 1
        try:
            return call()
        finally:
            self._polling -= 1
            self._last_poll = monotonic()
            if self._left:
                self._stop()

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Count a block as a poll, in which a task waits between two looks."""
        self._polling += 1
        try:
            yield
        finally:
            self._polling -= 1
            self._last_poll = monotonic()

    def idle_seconds(self) -> float:
        """Return for how many seconds the program has not polled."""
        return 0.0 if self._polling else monotonic() - self._last_poll

    # Offsets

    def _commit(self, positions: Positions, timeout_ms: float | None) -> None:
        began, listeners = monotonic(), self._assignment.client.listeners
        for listener in listeners:
            listener.committing(positions)
        self._write_commit(positions, timeout_ms)
        for listener in listeners:
            listener.committed(positions)
        self._counts.count_commit(monotonic() - began)

    def _write_commit(self, positions: Positions, timeout_ms: float | None) -> None:
        timeout = self._commit_seconds(timeout_ms)
        if not self.subscribed:
            group = self._group()
            group.commit(positions, timeout)
            _log_commit(group, positions)
            self._uncheckpointed_since = self._uncheckpointed_since or monotonic()
            self._checkpoint_after(CHECKPOINT_SECONDS)
            return
        if self._fenced is not None:
            raise self._fenced
        member = self._current_member()
        if member is None:
            raise CommitFailedError(
                "This consumer is not a member of its group",
                group=self._config.group_id,
                todo="Call poll, which joins the group, before committing.",
            )
        member.commit(positions, timeout)
        _log_commit(member.group, positions)
        if self._heartbeat is not None:
            self._heartbeat.note_commit()

    def _commit_seconds(self, timeout_ms: float | None) -> float:
        """Return for how many seconds a commit may wait for its locks."""
        if timeout_ms is not None:
            return timeout_ms / 1000
        return self._commit_timeout

    def _checkpoint_after(self, seconds: float) -> None:
        """Checkpoint commits after that time; for members, the heartbeat thread does that."""
        since = self._uncheckpointed_since
        if since is not None and monotonic() - since >= seconds:
            self._uncheckpointed_since = None
            self._group().checkpoint(always=True)

    def committed(self, partition: TopicPartition) -> OffsetAndMetadata | None:
        """Return the last commit of the group for a partition."""
        committed = self._group().committed([partition])[partition]
        return None if committed is None else committed.position

    # Leaving

    def leave(self, *, autocommit: bool = True) -> None:
        """Leave the group and clear the assignment; raise the listener's error at the end."""
        # First: records that an iterator in another thread cannot return any more must not be
        # committed.
        for cursor in self._assignment:
            cursor.recall_records()
        try:
            if self.subscribed:
                self._leave(autocommit)
            else:
                if autocommit:
                    self.committer.auto_commit_now()
                self._checkpoint_after(0.0)
                self.committer.run_callbacks()
        finally:
            # Not earlier: the listener commits as the member that this still is.
            self.subscribed = False
            self._assignment.clear()
            self._assignment.client.close()

    def _leave(self, autocommit: bool) -> None:
        self._left = True
        if self._root_generation != self._root.generation:
            self._reset_after_fork()
        if self._member is not None and autocommit:
            self.committer.auto_commit_now()
        partitions = self._assignment.partitions()
        if partitions:
            notify = self.notifier.revoked if self._is_member() else self.notifier.lost
            if not self.notifier.is_async:  # `announce_leaving` has called it.
                run_to_end(notify(partitions))
        self._assignment.clear()
        try:
            self.committer.run_callbacks()
        finally:
            self._stop()
        self.notifier.raise_error()

    async def announce_leaving(self, *, autocommit: bool) -> None:
        """Do first what a listener that may wait has to see done when the consumer is closed."""
        if self.notifier.is_async and self.subscribed and not self._left:
            if self._following is not None and self._is_following():
                with suppress(EmbedlogError):
                    await asyncio.shield(self._following)
            if self._member is not None and autocommit:
                self.committer.auto_commit_now()
            if partitions := self._assignment.partitions():
                await self.notifier.revoked(partitions)

    def _is_member(self) -> bool:
        try:
            if self._member is not None:
                self._member.heartbeat()
        except (UnknownMemberIdError, FencedInstanceIdError):
            return False
        except EmbedlogError as error:
            _log.warning("leaving the group in spite of an error: %s", error)
        return True

    def leave_during_call(self) -> None:
        """Leave the group while another thread is in a poll, which cleans up when it ends."""
        self._left = True
        member, heartbeat = self._member, self._heartbeat
        if heartbeat is not None:
            heartbeat.stop()
        if member is not None and member.info.instance_id is None:
            member.group.remove_members([member.id])

    def _stop(self) -> None:
        member, heartbeat, self._member, self._heartbeat = self._member, self._heartbeat, None, None
        if heartbeat is not None:
            heartbeat.stop()
        if member is not None:
            member.leave()
            _log.info("Group %s: member %s left", member.group.name, member.id)
            member.group.checkpoint(always=True)


def _listed(partitions: Collection[TopicPartition]) -> str:
    """Return partitions as text, the first ones if there are many."""
    names = [f"{topic}-{number}" for topic, number in islice(partitions, _MAX_LISTED)]
    rest = len(partitions) - len(names)
    more = f" and {rest} more" if rest else ""
    return f"{', '.join(names) or 'no partition'}{more}"


def _log_commit(group: Group, positions: Positions) -> None:
    if _log.isEnabledFor(logging.DEBUG):
        offsets = ", ".join(f"{tp[0]}-{tp[1]}: {at.offset}" for tp, at in positions.items())
        _log.debug("Group %s: committed %s", group.name, offsets)
