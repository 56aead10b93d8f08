"""A consumer's part in its group: it follows what the group wants, between two polls.

Everything happens on the thread that polls, one partition at a time: what the
consumer keeps, it goes on reading; what it must give up it releases after the
program was told; what it gets it takes with the positions that were committed.
There is no stop of the whole group (KIP-429, and KIP-848's idea of doing it
per partition).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from time import monotonic

from embedlog.assignor import Assignor, RebalanceStep
from embedlog.catalog import INTERNAL
from embedlog.config import ConsumerConfig
from embedlog.consumer.assignment import Assignment
from embedlog.consumer.committer import Committer, Positions
from embedlog.consumer.heartbeat import HeartbeatThread
from embedlog.consumer.rebalance_notifier import RebalanceNotifier
from embedlog.errors import (
    ClosedError,
    CommitFailedError,
    CorruptionError,
    EmbedlogError,
    FencedInstanceIdError,
    UnknownMemberIdError,
    UnknownTopicOrPartitionError,
)
from embedlog.group import Group
from embedlog.groups import member as members
from embedlog.groups.member import GroupMember, MemberAssignment, StartPosition
from embedlog.record import TopicPartition
from embedlog.root.root import Root

_log = logging.getLogger(__name__)


class GroupSubscription:
    """The membership of one consumer: joins when it is first followed.

    Args:
        root: The log.
        config: The consumer's.
        group: What it joins.
        assignment: What it keeps up to date.
        assignors: By name, those it can use.
        create: Whether to make a topic that is not there (E19).
    """

    def __init__(
        self,
        root: Root,
        config: ConsumerConfig,
        group: Callable[[], Group],
        assignment: Assignment,
        assignors: dict[str, Assignor],
        create: bool,
    ) -> None:
        self._root, self._config, self._group = root, config, group
        self._create = create
        self._assignment, self._assignors = assignment, assignors
        self._eager = not all(each.cooperative for each in assignors.values())
        """Whether the listener is told everything anew (M19), or only what changes (M20)."""
        self.committer = Committer(config, assignment, self._commit)
        self.listening = RebalanceNotifier()
        self.topics: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        self.member: GroupMember | None = None
        self._heart: HeartbeatThread | None = None
        self._known = -1
        """The version of the catalogue that the topics were looked up in."""
        self._generation = root.generation
        self._told = -1
        """The generation of the group that the listener knows of."""
        self._left = False
        self._fenced: FencedInstanceIdError | None = None
        self._polled = monotonic()
        self._polling = False

    # What it wants

    def subscribe(
        self, topics: Collection[str], pattern: re.Pattern[str] | None, listening: RebalanceNotifier
    ) -> None:
        """Want these from the next poll on, in the place of what was wanted before (E16)."""
        self.topics, self._pattern, self.listening = set(topics), pattern, listening
        self._known = -1

    def _wanted(self) -> set[str]:
        if self._pattern is not None:
            hidden = self._config.exclude_internal_topics
            self.topics = {
                name
                for name in self._root.topics()
                if self._pattern.fullmatch(name) and not (hidden and name.startswith(INTERNAL))
            }
        elif self._create:
            for topic in self.topics:
                with suppress(UnknownTopicOrPartitionError):
                    self._root.ensure_topic(topic)
        return self.topics

    # Following

    def follow(self) -> None:
        """Do what the group asks for; to be called before each look for records.

        Raises:
            FencedInstanceIdError: Another one took over its group_instance_id (M13).
            InconsistentGroupProtocolError, AssignorError: The group has no target for it.
            Exception: Whatever the listener raised.
        """
        if self.listening.inside:
            return
        if self._fenced is not None:
            raise self._fenced
        if self._generation != self._root.generation:
            self._forget()
        self.committer.run_callbacks()
        while True:
            try:
                self._follow()
                break
            except UnknownMemberIdError as error:
                self._lose(error)
            except FencedInstanceIdError as error:
                self._fenced = error
                self._lose(error)
                raise
        self.listening.raise_failure()

    def _follow(self) -> None:
        member, heart = self.member, self._heart
        if heart is not None and heart.failed is not None:
            raise heart.failed
        version = self._root.context.catalog.version()
        if member is None:
            member = self._join()
        elif version != self._known:
            self._look_at_topics(member)
        self._known = version
        self.committer.if_due()
        while member.changed():
            self._rebalance(member)
            if self._heart is not None:
                self._heart.ring()

    def _look_at_topics(self, member: GroupMember) -> None:
        """The catalogue changed, in this or in something else (E17, M16)."""
        wanted = self._wanted()
        if wanted != set(member.info.topics):
            member.resubscribe(wanted)
        member.group.notice_topics()

    def _join(self) -> GroupMember:
        if self._left:
            raise ClosedError("the consumer was closed")
        config, group = self._config, self._group()
        # A member of this very group that died a moment ago need not be waited for.
        group.sweep()
        member = self.member = members.join(
            group,
            self._wanted(),
            list(self._assignors),
            session_ms=config.session_timeout_ms,
            instance_id=config.group_instance_id,
            client_id=config.client_id,
        )
        self._heart, self._told = HeartbeatThread(member, config, self), -1
        return member

    def _rebalance(self, member: GroupMember) -> None:
        share = member.look(self._assignors)
        try:
            self._apply(member, share)
        except BaseException:
            # Half of it may be done: the next look says what is left.
            member.look_again()
            raise

    def _apply(self, member: GroupMember, share: MemberAssignment) -> None:
        step, new = share.step, share.generation != self._told
        self._drop(self._assignment.partitions() - member.owned)
        anew = self._eager and (new or bool(step.added or step.revoked))
        if anew or step.revoked:
            self.committer.before_leaving()
            self.listening.revoked(self._assignment.partitions() if anew else step.revoked)
        again = self._again(step, anew)
        self._release(member, again.union(step.revoked))
        added = again.union(step.added)
        taken = self._take(member, added) if added else {}
        if new or anew or taken:
            self.committer.restart()
            self.listening.assigned(self._assignment.partitions() if anew else taken)
        self._told = share.generation

    def _again(self, step: RebalanceStep, anew: bool) -> set[TopicPartition]:
        """Return what it keeps, but is to take once more, to begin where that says.

        What it owns and does not read was lost in the middle of a rebalance.  And a program
        that was told that a partition is revoked may have dropped what it did not commit, so
        it gets that again, as in Kafka.
        """
        kept = set(step.kept)
        return kept if anew and self.listening else kept - self._assignment.partitions()

    def _drop(self, lost: set[TopicPartition]) -> None:
        if lost:
            self.listening.lost(lost)
            for one in lost:
                self._assignment.remove(one)

    def _release(self, member: GroupMember, partitions: Iterable[TopicPartition]) -> None:
        gone = list(partitions)
        for one in gone:
            self._assignment.remove(one)
        # Last: from now on somebody else reads on from what was committed (M23).
        member.release(gone)

    def _take(
        self, member: GroupMember, added: Iterable[TopicPartition]
    ) -> dict[TopicPartition, StartPosition]:
        for one in added:
            try:
                # The transaction that takes it needs to find where it ends.
                self._root.partition(*one).tail()
            except (UnknownTopicOrPartitionError, CorruptionError):
                pass  # whoever reads it is told; the others are fine
        taken = member.take(from_end=self._config.auto_offset_reset == "latest")
        for one, start in taken.items():
            try:
                feed = self._assignment.add(one, self._config.auto_offset_reset)
            except UnknownTopicOrPartitionError:
                # Deleted just now: the next look releases it.
                member.group.notice_topics()
                continue
            if start.end is not None:
                # What was committed goes first, and is looked up when the program polls: its
                # listener may commit before.
                feed.begin(start.end)
        return taken

    def _lose(self, error: EmbedlogError) -> None:
        """It is no member any more: whatever it had may have another owner by now (M21)."""
        lost = self._assignment.partitions()
        _log.warning("%s; %d partitions are lost", error, len(lost))
        self.listening.lost(lost)
        self._assignment.clear()
        self._stop()

    def _forget(self) -> None:
        """In a forked child: all of it is the parent's, so this is somebody new."""
        self.member = self._heart = None
        self._generation = self._root.generation
        self._assignment.clear()

    def identity(self) -> GroupMember | None:
        """Return the member that this is; none in a forked child, before it polls."""
        return self.member if self._generation == self._root.generation else None

    def gone(self) -> None:
        """A topic vanished while it was read: look again at what there is."""
        self._known = -1

    # Polling

    def begin_poll(self) -> None:
        """A poll begins: that is what max_poll_interval_ms asks for."""
        self._polling = True

    def end_poll(self) -> None:
        """A poll ends: the time until the next one counts."""
        self._polled, self._polling = monotonic(), False
        if self._left:
            self._stop()

    def idle(self) -> float:
        """Return for how many seconds the program has not polled (M9)."""
        return 0.0 if self._polling else monotonic() - self._polled

    # Committing

    def _commit(self, positions: Positions) -> None:
        member = self.identity()
        if self._fenced is not None:
            raise self._fenced
        if member is None:
            raise CommitFailedError(
                "this consumer is not part of an active group",
                group=self._config.group_id,
                todo="poll, which joins the group, and then commit",
            )
        member.commit(positions)
        if self._heart is not None:
            self._heart.note_commit()

    # Leaving

    def leave(self, *, autocommit: bool = True) -> None:
        """Give everything back; what the listener raised is raised when all is done (E24)."""
        self._left = True
        if self._generation != self._root.generation:
            self._forget()
        if self.member is not None and autocommit:
            self.committer.before_leaving()
        owned = self._assignment.partitions()
        if owned:
            tell = self.listening.revoked if self._lives() else self.listening.lost
            tell(owned)
        self._assignment.clear()
        try:
            self.committer.run_callbacks()
        finally:
            self._stop()
        self.listening.raise_failure()

    def _lives(self) -> bool:
        try:
            if self.member is not None:
                self.member.beat()
        except (UnknownMemberIdError, FencedInstanceIdError):
            return False
        except EmbedlogError as error:
            _log.warning("leaving, although %s", error)
        return True

    def abandon(self) -> None:
        """Be out of the group while another thread is in a poll, which lets go when it ends."""
        self._left = True
        member, heart = self.member, self._heart
        if heart is not None:
            heart.stop()
        if member is not None and member.info.instance_id is None:
            member.group.remove_members([member.id])

    def _stop(self) -> None:
        member, heart, self.member, self._heart = self.member, self._heart, None, None
        if heart is not None:
            heart.stop()
        if member is not None:
            member.leave()
            member.group.save(always=True)
