"""The connection of a consumer to its group, as a member or as one that only commits."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from time import monotonic
from typing import NamedTuple, TypeVar

from embedlog.assignor import configured
from embedlog.config import ConsumerConfig
from embedlog.consumer.arguments import check_topics, parse_offsets
from embedlog.consumer.assignment import Assignment
from embedlog.consumer.committer import Committer, Positions
from embedlog.consumer.heartbeat import CHECKPOINT_SECONDS
from embedlog.consumer.rebalance_notifier import ConsumerRebalanceListener, RebalanceNotifier
from embedlog.consumer.subscription import GroupSubscription
from embedlog.errors import IllegalStateError, InvalidGroupIdError
from embedlog.group import Group
from embedlog.groups.offsets import check_group_id
from embedlog.partition import tail
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.root.root import Root

T = TypeVar("T")


class ConsumerGroupMetadata(NamedTuple):
    """The identity of a consumer in its group, with the fields of kafka-python."""

    group_id: str | None
    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None


def open_group(root: Root, group_id: str) -> Group:
    """Return a group of an open log, with partition ends as the log's readers see them."""
    durable = root.visibility == "durable"
    return Group(root.context, group_id, partial(tail.ends, durable=durable))


class GroupClient:
    """All that a consumer does with its group; without a ``group_id`` it refuses everything."""

    def __init__(
        self, root: Root, config: ConsumerConfig, assignment: Assignment, create: bool
    ) -> None:
        self._root, self._config, self._assignment = root, config, assignment
        self._create = create
        self._assignors = configured(config.partition_assignment_strategy)
        if config.group_id is not None:
            check_group_id(config.group_id)
        self._subscription: GroupSubscription | None = None
        self._committer = Committer(config, assignment, self._commit_without_membership)
        """Commits partitions that the program assigned itself (M14)."""
        self._uncheckpointed_since: float | None = None

    def _group(self) -> Group:
        """Return the group with the databases open now: a forked child has opened its own."""
        if self._config.group_id is None:
            raise InvalidGroupIdError("The consumer has no group", todo="Set group_id.")
        return open_group(self._root, self._config.group_id)

    # Membership

    def check_subscribe(self, topics: Collection[str], pattern: str | None) -> None:
        """Check the arguments of a subscription, and that it is possible."""
        self._group()
        self._root.context.check_writable()
        self.check_not_in_callback("subscribe")
        check_topics(topics)
        if topics and pattern is not None:
            raise IllegalStateError("Subscribe to topics or to a pattern, not to both")

    def check_streams(self, topics: Mapping[str, int], subscription: object) -> None:
        """Check that streams can be created: a consumer with partitions would keep them."""
        self.check_subscribe(topics, None)
        if subscription is not None or len(self._assignment):
            raise IllegalStateError(
                "The consumer reads topics itself",
                todo="Create streams from a consumer that has a group_id and no topics.",
            )

    def subscribe(
        self,
        topics: Collection[str],
        pattern: str | None,
        listener: ConsumerRebalanceListener | None,
    ) -> GroupSubscription:
        """Subscribe; the next poll joins the group, or updates the member's subscription."""
        subscription = self._subscription
        compiled = None if pattern is None else re.compile(pattern)
        if subscription is None:
            subscription = GroupSubscription(
                *(self._root, self._config, self._group, self._assignment, self._assignors),
                create=self._create,
            )
        subscription.subscribe(topics, compiled, RebalanceNotifier(listener))
        self._subscription = subscription
        return subscription

    def check_not_in_callback(self, operation: str) -> None:
        """Refuse an operation that the rebalance listener may not call."""
        if self._subscription is not None:
            self._subscription.notifier.check_not_in_callback(operation)

    def leave(self, *, autocommit: bool = True) -> None:
        """Leave the group, and clear the assignment."""
        # First: records that an iterator in another thread cannot return any more must not be
        # committed.
        for cursor in self._assignment:
            cursor.recall_records()
        try:
            self._leave(autocommit)
        finally:
            self._assignment.clear()

    def _leave(self, autocommit: bool) -> None:
        subscription = self._subscription
        if subscription is None:
            if autocommit and self._config.group_id is not None:
                self._committer.auto_commit_now()
            self._checkpoint_after(0.0)
            self._committer.run_callbacks()
            return
        try:
            subscription.leave(autocommit=autocommit)
        finally:
            # Not earlier: the listener commits as the member that this still is.
            self._subscription = None

    def leave_during_call(self) -> None:
        """Leave the group although another thread is still in a call."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.leave_during_call()

    def poll(self, call: Callable[[], T]) -> T:
        """Run a call as a poll, which max_poll_interval_ms asks for (M9)."""
        subscription = self._subscription
        if subscription is None:
            if self._config.group_id is not None:
                self._committer.run_callbacks()
                self._committer.auto_commit_if_due()
                self._checkpoint_after(CHECKPOINT_SECONDS)
            return call()
        subscription.notifier.check_not_in_callback("poll")
        subscription.begin_poll()
        try:
            return call()
        finally:
            subscription.end_poll()

    def metadata(self) -> ConsumerGroupMetadata:
        """Return the consumer's identity in the group."""
        subscription = self._subscription
        member = None if subscription is None else subscription.current_member()
        return ConsumerGroupMetadata(
            self._config.group_id,
            -1 if member is None else member.generation,
            "" if member is None else member.id,
            self._config.group_instance_id,
        )

    # Offsets

    @property
    def committer(self) -> Committer:
        """Commits as a member, or for a group without members."""
        return self._committer if self._subscription is None else self._subscription.committer

    def _commit_without_membership(self, positions: Positions) -> None:
        self._group().commit(positions)
        self._uncheckpointed_since = self._uncheckpointed_since or monotonic()
        self._checkpoint_after(CHECKPOINT_SECONDS)

    def _checkpoint_after(self, seconds: float) -> None:
        """Checkpoint commits that are so old; for members, the heartbeat thread does that."""
        since = self._uncheckpointed_since
        if since is not None and monotonic() - since >= seconds:
            self._uncheckpointed_since = None
            self._group().checkpoint(always=True)

    def parse_offsets(
        self, offsets: Positions | None
    ) -> dict[TopicPartition, OffsetAndMetadata] | None:
        """Return the offsets passed to a commit.

        Raises:
            InvalidGroupIdError: The consumer has no group.
        """
        self._group()
        self._root.context.check_writable()
        return parse_offsets(offsets)

    def committed(self, partition: TopicPartition) -> OffsetAndMetadata | None:
        """Return the last commit of the group for a partition."""
        committed = self._group().committed([partition])[partition]
        return None if committed is None else committed.position

    def auto_commit_before_assign(self) -> None:
        """Auto-commit the positions of partitions that `assign` is about to replace (E20)."""
        if self._config.group_id is not None:
            self._committer.auto_commit_now()
