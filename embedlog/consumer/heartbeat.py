"""The thread behind a member of a group: it shows that the member lives, and notices who died.

It runs no code of the user, and does nothing that a member must do by itself:
taking and releasing partitions is for the thread that polls.
"""

from __future__ import annotations

import logging
import threading
import weakref
from math import inf
from time import monotonic
from typing import Protocol

from embedlog.config import ConsumerConfig
from embedlog.errors import (
    ClosedError,
    EmbedlogError,
    FencedInstanceIdError,
    TimeoutError,  # noqa: A004 - Kafka's name
    UnknownMemberIdError,
)
from embedlog.files import ProcessWatch
from embedlog.groups import offsets
from embedlog.groups.member import GroupMember

CHECKPOINT_SECONDS = 1.0
"""How often commits that are not on the disk are put there."""
MOST_WATCHED = 8
"""Processes that one member watches: those after it in the group, so that all are watched."""
_AGAIN_SECONDS = 0.01
"""A process that ends is told a moment before its locks are free."""
_RETRY_SECONDS = 0.1
"""What could not be done, on a full disk perhaps, is tried again after this."""

_log = logging.getLogger(__name__)


class PollTimer(Protocol):
    """Who tells when the program polled."""

    def idle(self) -> float:
        """Return for how many seconds it has not polled; 0 while it does."""


class HeartbeatThread:
    """One member's thread; it ends with the member, and with the consumer object.

    Args:
        member: Whose life it shows.
        config: How often.
        owner: The consumer's part in the group; once that is garbage, the member leaves.
    """

    def __init__(self, member: GroupMember, config: ConsumerConfig, owner: PollTimer) -> None:
        self.member = member
        self.failed: EmbedlogError | None = None
        """Why the member is none any more."""
        self._beat_seconds = config.heartbeat_interval_ms / 1000
        self._idle_seconds = config.max_poll_interval_ms / 1000
        watch = self._watch = ProcessWatch()
        # Weak: a consumer that the program forgot must be collected, thread or no thread.
        self._owner = weakref.ref(owner, lambda _: watch.ring())
        self._stopped = threading.Event()
        self._beat_at = monotonic() + self._beat_seconds
        self._unsaved_since: float | None = None
        """When the first commit was made that is perhaps not on the disk."""
        self._turned = member.group.uptime()
        self._late_ms = config.session_timeout_ms
        self._judges_at = 0.0
        self._ended: set[int] = set()
        """Processes that ended, and whose members are not removed yet."""
        self._seen = -1
        self._thread = threading.Thread(
            target=self._run, name=f"embedlog-heart-{member.id}", daemon=True
        )
        self._thread.start()

    def ring(self) -> None:
        """Have it look at the group now."""
        self._watch.ring()

    def note_commit(self) -> None:
        """Have what was committed saved within a second; idle members wake for nothing."""
        if self._unsaved_since is None:
            self._unsaved_since = monotonic()
            self._watch.ring()

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._stopped.set()
        self._watch.ring()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set() and self.failed is None:
                owner = self._owner()
                if owner is None:
                    self._abandon()
                    return
                idle, owner = owner.idle(), None
                self._turn(idle)
        except ClosedError:
            pass  # the log was closed under it, which closes the member as well
        finally:
            self._watch.close()

    def _abandon(self) -> None:
        """The program forgot its consumer: the others need not wait for the end of its session."""
        _log.warning("%s: its consumer was never closed; leaving", self.member.id)
        try:
            self.member.leave()
        except ClosedError:
            raise
        except EmbedlogError as error:
            # The lock is free all the same, and by that the others see it.
            _log.warning("%s: %s", self.member.id, error)

    def _turn(self, idle: float) -> None:
        try:
            self._look()
            self._beat()
            self._check_polled(idle)
            self._checkpoint()
        except (UnknownMemberIdError, FencedInstanceIdError) as error:
            self._lose(error)
            return
        except ClosedError:
            raise
        except TimeoutError:
            nap = _RETRY_SECONDS  # somebody holds a lock, stopped perhaps
        except EmbedlogError as error:
            _log.warning("%s: %s", self.member.id, error)
            nap = _RETRY_SECONDS
        else:
            nap = self._nap(idle)
        self._ended |= self._watch.wait(nap)

    def _look(self) -> None:
        """Watch the processes that come after this one, and remove the members that are dead."""
        group = self.member.group
        seen = group.version()
        if seen != self._seen:
            self._seen = seen
            self._watch.watch(_after(self.member, MOST_WATCHED))
        # After a machine slept all are silent: those who lived get the time to show it.
        late = group.uptime() - self._turned > self._late_ms
        self._turned = group.uptime()
        if late:
            self._judges_at = monotonic() + self._beat_seconds
        if monotonic() >= self._judges_at and self._may_be_dead():
            removed = group.sweep(but=self.member.id)
            if removed:
                _log.info("%s: removed %s, dead or silent", self.member.id, ", ".join(removed))
            self._unsaved_since = monotonic()  # of what they committed last
        if self._ended:
            dynamic = [each for each in group.read().members.values() if not each.instance_id]
            self._ended &= {each.pid for each in dynamic}

    def _may_be_dead(self) -> bool:
        """Whether to look at every member, which opens a file for each.

        That is, if a process ended, or may end without being told; and now and then, for
        the silent.  With each change, 50 members that join would look 5,000 times at 50.
        """
        return bool(self._ended) or self._watch.blind or monotonic() >= self._beat_at

    def _beat(self) -> None:
        if monotonic() >= self._beat_at:
            self._beat_at = monotonic() + self._beat_seconds
            self.member.beat()

    def _check_polled(self, idle: float) -> None:
        if idle > self._idle_seconds:
            # M9: it leaves by itself, and hears of it when it polls.
            self.member.group.remove_members([self.member.id])
            raise UnknownMemberIdError(
                "the consumer did not poll for longer than max_poll_interval_ms",
                group=self.member.group.name,
                member=self.member.id,
                todo="poll more often, take fewer records at a time (max_poll_records), or "
                "raise max_poll_interval_ms",
            )

    def _checkpoint(self) -> None:
        since = self._unsaved_since
        if since is not None and monotonic() >= since + CHECKPOINT_SECONDS:
            # Before the look: a commit from now on is noted anew.
            self._unsaved_since = None
            shared = self.member.group.shared
            try:
                offsets.checkpoint(shared.live, shared.state)
            except EmbedlogError:
                self._unsaved_since = since
                raise

    def _lose(self, error: EmbedlogError) -> None:
        self.failed = error
        self.member.group.shared.wake.advance()

    def _nap(self, idle: float) -> float:
        if self._ended:
            return _AGAIN_SECONDS
        since = self._unsaved_since
        saved_at = inf if since is None else since + CHECKPOINT_SECONDS
        due = min(self._beat_at, saved_at) - monotonic()
        # A poll that ends meanwhile only makes the program be idle from later on.
        return max(min(due, self._idle_seconds - idle), 0.0)


def _after(member: GroupMember, most: int) -> set[int]:
    """Return the processes of the members that come after one, in a ring."""
    members = member.group.read().members
    own = members.get(member.id)
    ids = sorted(members)
    place = ids.index(member.id) if own is not None else 0
    ring = [members[each].pid for each in ids[place:] + ids[:place]]
    others = [pid for pid in dict.fromkeys(ring) if own is None or pid != own.pid]
    return set(others[:most])
