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
from time import monotonic

from embedlog import member as members
from embedlog.assignor import Assignor
from embedlog.config import ConsumerConfig
from embedlog.consumer.assignment import Assignment
from embedlog.consumer.committing import Committer, Positions
from embedlog.consumer.heart import Heart
from embedlog.consumer.listening import Listening
from embedlog.errors import (
    CommitFailedError,
    EmbedlogError,
    FencedInstanceIdError,
    UnknownMemberIdError,
    UnknownTopicOrPartitionError,
)
from embedlog.group import Group
from embedlog.log.root import Root
from embedlog.member import Member, Start
from embedlog.record import TopicPartition

INTERNAL = "__"
"""Topics of embedlog's own begin so."""

_log = logging.getLogger(__name__)


class Subscription:
    """The membership of one consumer: joins when it is first followed.

    Args:
        root: The log.
        config: The consumer's.
        group: What it joins.
        assignment: What it keeps up to date.
        assignors: By name, those it can use.
    """

    def __init__(
        self,
        root: Root,
        config: ConsumerConfig,
        group: Callable[[], Group],
        assignment: Assignment,
        assignors: dict[str, Assignor],
    ) -> None:
        self._root, self._config, self._group = root, config, group
        self._assignment, self._assignors = assignment, assignors
        self._cooperative = all(each.cooperative for each in assignors.values())
        """Whether the listener is told only what changes (M20), or everything anew (M19)."""
        self.committer = Committer(config, assignment, self._commit)
        self.listening = Listening()
        self.topics: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        self.member: Member | None = None
        self._heart: Heart | None = None
        self._known = -1
        """The version of the catalogue that the topics were looked up in."""
        self._generation = root.generation
        self._fenced: FencedInstanceIdError | None = None
        self._polled = monotonic()
        self._polling = False

    # What it wants

    def subscribe(
        self, topics: Collection[str], pattern: re.Pattern[str] | None, listening: Listening
    ) -> None:
        """Want these from the next poll on, in the place of what was wanted before (E16)."""
        self.topics, self._pattern, self.listening = set(topics), pattern, listening
        self._known = -1

    @property
    def wants(self) -> bool:
        """Whether it is subscribed to anything."""
        return bool(self.topics) or self._pattern is not None

    def _wanted(self) -> set[str]:
        if self._pattern is None:
            return self.topics
        hidden = self._config.exclude_internal_topics
        return {
            name
            for name in self._root.topics()
            if self._pattern.fullmatch(name) and not (hidden and name.startswith(INTERNAL))
        }

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
        try:
            self._follow()
        except UnknownMemberIdError as error:
            self._lose(error)
            self._follow()
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

    def _look_at_topics(self, member: Member) -> None:
        """The catalogue changed, in this or in something else (E17, M16)."""
        wanted = self._wanted()
        if wanted != set(member.info.topics):
            member.resubscribe(wanted)
        member.group.notice_topics()

    def _join(self) -> Member:
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
        self._heart = Heart(member, config, self)
        return member

    def _rebalance(self, member: Member) -> None:
        before = member.generation
        share = member.look(self._assignors)
        new = share.generation != before
        eager = new and not self._cooperative
        if eager or share.step.revoked:
            self.committer.before_leaving()
            self.listening.revoked(self._assignment.partitions() if eager else share.step.revoked)
        self._release(member, share.step.revoked)
        taken = self._take(member, share.step.added) if share.step.added else {}
        if taken or new:
            self.committer.restart()
            self.listening.assigned([*taken, *share.step.kept] if eager else taken)

    def _release(self, member: Member, partitions: Iterable[TopicPartition]) -> None:
        gone = list(partitions)
        for one in gone:
            self._assignment.remove(one)
        # Last: from now on somebody else reads on from what was committed (M23).
        member.release(gone)

    def _take(self, member: Member, added: Iterable[TopicPartition]) -> dict[TopicPartition, Start]:
        for one in added:
            try:
                # The transaction that takes it needs to find where it ends.
                self._root.partition(*one).tail()
            except UnknownTopicOrPartitionError:
                pass
        taken = member.take(from_end=self._config.auto_offset_reset == "latest")
        for one, start in taken.items():
            try:
                feed = self._assignment.add(one, self._config.auto_offset_reset)
            except UnknownTopicOrPartitionError:
                continue  # deleted just now: the next look releases it
            if start.committed is not None:
                feed.go_on(start.committed)
            elif start.end is not None:
                feed.seek(start.end)
        return taken

    def _lose(self, error: EmbedlogError) -> None:
        """It is no member any more: whatever it had may have another owner by now (M21)."""
        lost = self._assignment.partitions()
        _log.warning("%s; %d partitions are lost", error, len(lost))
        self._assignment.clear()
        self._stop()
        self.listening.lost(lost)

    def _forget(self) -> None:
        """In a forked child: all of it is the parent's, so this is somebody new."""
        self.member = self._heart = None
        self._generation = self._root.generation
        self._assignment.clear()

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

    def idle(self) -> float:
        """Return for how many seconds the program has not polled (M9)."""
        return 0.0 if self._polling else monotonic() - self._polled

    # Committing

    def _commit(self, positions: Positions) -> None:
        member = self.member
        if self._fenced is not None:
            raise self._fenced
        if member is None or self._generation != self._root.generation:
            raise CommitFailedError(
                "this consumer is not part of an active group",
                group=self._config.group_id,
                todo="poll, which joins the group, and then commit",
            )
        member.commit(positions)

    # Leaving

    def leave(self, *, autocommit: bool = True) -> None:
        """Give everything back; what the listener raised is raised when all is done (E24)."""
        if self._generation != self._root.generation:
            self._forget()
        if self.member is not None and autocommit:
            self.committer.before_leaving()
        owned = self._assignment.partitions()
        if owned and self._heart is not None:
            tell = self.listening.lost if self._heart.failed else self.listening.revoked
            tell(owned)
        self._assignment.clear()
        try:
            self.committer.run_callbacks()
        finally:
            self._stop()
        self.listening.raise_failure()

    def abandon(self) -> None:
        """Leave while another thread is in a poll, which ends by itself: nobody is told."""
        self._stop()

    def _stop(self) -> None:
        member, heart, self.member, self._heart = self.member, self._heart, None, None
        if heart is not None:
            heart.stop()
        if member is not None:
            member.leave()
            member.group.save(always=True)
