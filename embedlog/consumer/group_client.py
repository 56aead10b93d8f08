"""What a consumer has of its group, whether it is a member or only commits for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from time import monotonic
from typing import NamedTuple, TypeVar

from embedlog.assignor import configured
from embedlog.config import ConsumerConfig
from embedlog.consumer.arguments import check_topics, positions_of
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
    """Who a consumer is in its group; as kafka-python has it."""

    group_id: str | None
    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None


def group_of(root: Root, name: str) -> Group:
    """Return a group of an open log, which sees of the log what its readers see."""
    durable = root.visibility == "durable"
    return Group(root.context, name, partial(tail.ends, durable=durable))


class GroupClient:
    """A consumer's dealings with its group; without a ``group_id`` it refuses them all."""

    def __init__(
        self, root: Root, config: ConsumerConfig, assignment: Assignment, create: bool
    ) -> None:
        self._root, self._config, self._assignment = root, config, assignment
        self._create = create
        self._assignors = configured(config.partition_assignment_strategy)
        if config.group_id is not None:
            check_group_id(config.group_id)
        self._subscription: GroupSubscription | None = None
        self._alone = Committer(config, assignment, self._commit_alone)
        """For partitions that the program assigned (M14)."""
        self._unsaved_since: float | None = None

    def _group(self) -> Group:
        """Return the group, with what is open now: a forked child has opened it anew."""
        if self._config.group_id is None:
            raise InvalidGroupIdError("the consumer has no group", todo="make it with a group_id")
        return group_of(self._root, self._config.group_id)

    # Subscribing

    def check_subscribe(self, topics: Collection[str], pattern: str | None) -> None:
        """Raise unless a subscription makes sense."""
        self._group()
        self._root.context.check_writable()
        self.check_outside("subscribe")
        check_topics(topics)
        if topics and pattern is not None:
            raise IllegalStateError("topics and a pattern exclude each other")

    def check_streams(self, topics: Mapping[str, int], following: object) -> None:
        """Raise unless streams can be made: a consumer with partitions would keep them."""
        self.check_subscribe(topics, None)
        if following is not None or len(self._assignment):
            raise IllegalStateError(
                "the consumer reads topics itself",
                todo="make streams of one that has a group_id, and no topics",
            )

    def subscribe(
        self,
        topics: Collection[str],
        pattern: str | None,
        listener: ConsumerRebalanceListener | None,
    ) -> GroupSubscription:
        """Want these topics; the next poll joins, or tells the group."""
        found = self._subscription
        compiled = None if pattern is None else re.compile(pattern)
        if found is None:
            found = GroupSubscription(
                *(self._root, self._config, self._group, self._assignment, self._assignors),
                create=self._create,
            )
        found.subscribe(topics, compiled, RebalanceNotifier(listener))
        self._subscription = found
        return found

    def check_outside(self, what: str) -> None:
        """Raise if the rebalance listener says this, which may not."""
        if self._subscription is not None:
            self._subscription.listening.check_outside(what)

    def leave(self, *, autocommit: bool = True) -> None:
        """Be no member any more, and read nothing."""
        # First: what an iteration in another thread takes no more is not committed either.
        for feed in self._assignment:
            feed.withdraw()
        try:
            self._leave(autocommit)
        finally:
            self._assignment.clear()

    def _leave(self, autocommit: bool) -> None:
        found = self._subscription
        if found is None:
            if autocommit and self._config.group_id is not None:
                self._alone.before_leaving()
            self._checkpoint(0.0)
            self._alone.run_callbacks()
            return
        try:
            found.leave(autocommit=autocommit)
        finally:
            # Not before: the listener commits as the member that it still is.
            self._subscription = None

    def leave_soon(self) -> None:
        """Be no member any more, although another thread is still in a call."""
        found, self._subscription = self._subscription, None
        if found is not None:
            found.abandon()

    def polling(self, call: Callable[[], T]) -> T:
        """Call, and tell the group that the program polls (M9)."""
        found = self._subscription
        if found is None:
            if self._config.group_id is not None:
                self._alone.run_callbacks()
                self._alone.if_due()
                self._checkpoint(CHECKPOINT_SECONDS)
            return call()
        found.listening.check_outside("poll")
        found.begin_poll()
        try:
            return call()
        finally:
            found.end_poll()

    # Positions

    @property
    def committer(self) -> Committer:
        """What commits: as a member, or for a group that has none."""
        return self._alone if self._subscription is None else self._subscription.committer

    def _commit_alone(self, positions: Positions) -> None:
        self._group().commit(positions)
        self._unsaved_since = self._unsaved_since or monotonic()
        self._checkpoint(CHECKPOINT_SECONDS)

    def _checkpoint(self, seconds: float) -> None:
        """Let what was committed so long ago survive a power cut; a member's thread does that."""
        since = self._unsaved_since
        if since is not None and monotonic() - since >= seconds:
            self._unsaved_since = None
            self._group().save(always=True)

    def positions(
        self, offsets: Positions | None
    ) -> dict[TopicPartition, OffsetAndMetadata] | None:
        """Return what a commit was given.

        Raises:
            InvalidGroupIdError: There is no group to commit for.
        """
        self._group()
        self._root.context.check_writable()
        return positions_of(offsets)

    def committed(self, partition: TopicPartition) -> OffsetAndMetadata | None:
        """Return what the group committed last for a partition."""
        found = self._group().committed([partition])[partition]
        return None if found is None else found.position

    def before_assigning(self) -> None:
        """Commit where the partitions are, before others may come in their place (E20)."""
        if self._config.group_id is not None:
            self._alone.before_leaving()

    def metadata(self) -> ConsumerGroupMetadata:
        """Return who this is in the group."""
        found = self._subscription
        member = None if found is None else found.identity()
        return ConsumerGroupMetadata(
            self._config.group_id,
            -1 if member is None else member.generation,
            "" if member is None else member.id,
            self._config.group_instance_id,
        )
