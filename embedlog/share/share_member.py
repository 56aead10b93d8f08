"""One member of a share group: its steps, whoever reads and acknowledges the records."""

from __future__ import annotations

from collections.abc import Collection, Set
from math import inf
from time import monotonic

from embedlog.consumer.group_member import GroupMember
from embedlog.consumer.heartbeat import CHECKPOINT_SECONDS
from embedlog.root.root import Root
from embedlog.share.letter_writer import LetterWriter
from embedlog.share.share_group import Acknowledgements, ShareGroup, StepOutcome
from embedlog.share.stored_records import StoredRecords

REAP_SECONDS = 0.05
"""How often a member looks whether others that have records are alive, if it has time for it."""
_SLOW_REAP_SECONDS = 1.0
"""The same if all of them are members of this process, which may only have been removed."""
_REAP_SHARE = 100
"""Of the time, looking takes at most one part in so many."""
_NEVER_SECONDS = 86400.0


class ShareMember:
    """One member of a share group, in one process.

    Args:
        root: The log.
        group: The id of the group.
        own: The numbers of members of this process; others may be added.

    Raises:
        InvalidGroupIdError: The id is not valid.
    """

    def __init__(self, root: Root, group: str, own: Set[int] = frozenset()) -> None:
        self._root, self._own = root, own
        self.group = ShareGroup(root, group)
        self.letters = LetterWriter(self.group, root)
        self.member: GroupMember | None = None
        self.partitions: dict[bytes, StoredRecords] = {}
        """In the order in which they are served."""
        self._holders: set[int] = set()
        self._reaped_at = self._reap_pause = 0.0
        self._due_at = inf
        self._look_first = False
        self._unsaved_since: float | None = None

    def take(
        self,
        acknowledgements: Acknowledgements,
        limit: int,
        dead: Collection[int] = (),
        *,
        whole: bool = False,
    ) -> StepOutcome:
        """Take one step of the group: acknowledge, and acquire.

        Args:
            acknowledgements: What the member does with records that it has.
            limit: Acquire at most so many offsets.
            dead: Members that are known to be dead, besides those that are found.
            whole: Whether the acknowledgements of a partition are refused together.

        Raises:
            UnknownMemberIdError: It was removed, and so has no records.
        """
        assert self.member is not None
        outcome = self.group.take_step(
            self.member,
            list(self.partitions),
            acknowledgements,
            limit,
            self._find_dead(self.member).union(dead),
            look_first=self._look_first and not acknowledgements,
            whole=whole,
        )
        if outcome.rows:
            self._unsaved_since = self._unsaved_since or monotonic()
        self._look_first = limit > 0 and not outcome.acquired
        self._holders = outcome.holders
        wait_ms = inf if outcome.due_ms is None else outcome.due_ms - self.group.uptime()
        self._due_at = monotonic() + max(wait_ms, 0) / 1000
        for key, _ in outcome.acquired:
            # Served last the next time.
            self.partitions[key] = self.partitions.pop(key)
        return outcome

    def write_letters(self, outcome: StepOutcome) -> None:
        """Write the dead letters that a step has found to be due."""
        if outcome.archiving:
            self.letters.write(outcome.archiving, self.partitions)
        self.letters.causes.clear()

    def _find_dead(self, member: GroupMember) -> set[int]:
        """Return members that died with records, as far as it is time to look."""
        if not self.must_reap:
            return set()
        began = monotonic()
        dead = self.group.find_dead(self._holders)
        if dead:
            self.group.remove_dead_members(exclude=member.id)
        self._reaped_at = monotonic()
        self._reap_pause = _REAP_SHARE * (self._reaped_at - began)
        return dead

    @property
    def must_reap(self) -> bool:
        """Whether it is time to look for members that died with records."""
        return monotonic() >= self._reap_at

    @property
    def _reap_at(self) -> float:
        if not self._holders:
            return inf
        pause = _SLOW_REAP_SECONDS if self._holders <= self._own else REAP_SECONDS
        return self._reaped_at + max(pause, self._reap_pause)

    def due_in(self) -> float:
        """Return after how many seconds to look again, if nothing happens before."""
        due = min(self._due_at, self.letters.due_at, self._reap_at)
        if self._unsaved_since is not None:
            due = min(due, self._unsaved_since + CHECKPOINT_SECONDS)
        return max(min(due - monotonic(), _NEVER_SECONDS), 0.0)

    def checkpoint_after(self, seconds: float) -> None:
        """Save what steps of the last seconds did, if the first of them is so long ago."""
        since = self._unsaved_since
        if since is not None and monotonic() - since >= seconds:
            self._unsaved_since = None
            self.group.checkpoint(always=True)

    def unlock(self) -> None:
        """Let others have the records of this member, without a step."""
        if self.member is not None:
            self.member.unlock()
