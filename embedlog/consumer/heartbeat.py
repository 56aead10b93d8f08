"""The background thread of a group member: heartbeats, dead members, checkpoints of commits.

It runs no code of the program, and neither acquires nor releases partitions: that is done
by the polling thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from math import inf
from time import monotonic

from embedlog.config import ConsumerConfig
from embedlog.consumer.counts import ConsumerCounts
from embedlog.consumer.group_member import GroupMember
from embedlog.errors import (
    ClosedError,
    EmbedlogError,
    FencedInstanceIdError,
    MaxPollExceededError,
    TimeoutError,  # noqa: A004 - Kafka's name
    UnknownMemberIdError,
)
from embedlog.files import ProcessWatch
from embedlog.lazy import logging

CHECKPOINT_SECONDS = 1.0
"""How long a commit may wait for its checkpoint."""
MAX_WATCHED = 8
"""Processes that one member watches: the next ones in the group, so that all are watched."""
_RECHECK_SECONDS = 0.01
"""The end of a process is reported a moment before its locks are free."""
_RETRY_SECONDS = 0.1
"""When to try again after an error, such as a full disk."""

_log = logging.getLogger("embedlog.consumer")


class HeartbeatThread:
    """The thread of one member; it ends with the member or with the consumer object.

    Args:
        member: The member.
        config: The settings of the consumer.
        idle_seconds: A method of the consumer that returns for how many seconds the program
            has not polled, 0 during a poll; once its object is garbage, the member leaves.
        counts: Counts the heartbeats.
    """

    def __init__(
        self,
        member: GroupMember,
        config: ConsumerConfig,
        idle_seconds: Callable[[], float],
        counts: ConsumerCounts,
    ) -> None:
        self.member, self._counts = member, counts
        self.failure: EmbedlogError | None = None
        """Why the member was removed, or None."""
        self._heartbeat_seconds = config.heartbeat_interval_ms / 1000
        self._max_idle_seconds = config.max_poll_interval_ms / 1000
        watch = self._watch = ProcessWatch()
        # Weak: a consumer that the program dropped must be collected in spite of this thread.
        self._idle_seconds = weakref.WeakMethod(idle_seconds, lambda _: watch.ring())
        self._stopped = threading.Event()
        self._next_heartbeat = monotonic() + self._heartbeat_seconds
        self._checkpoint_due = inf
        """When the first commit must be checkpointed that may not be yet."""
        self._last_check_ms = member.group.uptime()
        self._session_ms = config.session_timeout_ms
        self._remove_from = 0.0
        """The time from which dead members may be removed."""
        self._ended_pids: set[int] = set()
        """Processes that ended, while their members are not removed yet."""
        self._seen_version = -1
        self._thread = threading.Thread(
            target=self._run, name=f"embedlog-heartbeat-{member.id}", daemon=True
        )
        self._thread.start()

    def wake(self) -> None:
        """Have the thread check the group now."""
        self._watch.ring()

    def note_commit(self) -> None:
        """Have a commit checkpointed within a second; without commits the thread wakes less."""
        if self._checkpoint_due == inf:
            self._checkpoint_due = monotonic() + CHECKPOINT_SECONDS
            self._watch.ring()

    def stop(self) -> None:
        """End the thread, and wait for its end."""
        self._stopped.set()
        self._watch.ring()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        name = self.member.id
        try:
            while not self._stopped.is_set() and self.failure is None:
                idle_seconds = self._idle_seconds()
                if idle_seconds is None:
                    # So that the others need not wait until the session ends.
                    _log.warning("%s: the consumer was not closed before it was collected", name)
                    self.member.leave()
                    return
                seconds, idle_seconds = idle_seconds(), None
                self._run_once(seconds)
        except ClosedError:
            pass  # the log was closed, which closes the member as well
        except EmbedlogError as error:
            # The lock of a member that failed to leave is free, which the others see.
            _log.warning("%s: %s", name, error)
        finally:
            self._watch.close()

    def _run_once(self, idle_seconds: float) -> None:
        try:
            self._check_members()
            if monotonic() >= self._next_heartbeat:
                self._next_heartbeat = monotonic() + self._heartbeat_seconds
                self.member.heartbeat()
                self._counts.count_heartbeat()
            self._check_poll_interval(idle_seconds)
            self._checkpoint()
        except (UnknownMemberIdError, FencedInstanceIdError) as error:
            self.failure = error
            self.member.group.context.wake.advance()
            return
        except ClosedError:
            raise
        except TimeoutError:
            seconds = _RETRY_SECONDS  # another process holds a lock, and may be stopped
        except EmbedlogError as error:
            _log.warning("%s: %s", self.member.id, error)
            seconds = _RETRY_SECONDS
        else:
            seconds = self._wait_seconds(idle_seconds)
        self._ended_pids |= self._watch.wait(seconds)

    def _check_members(self) -> None:
        """Watch the next processes of the group, and remove dead members."""
        group = self.member.group
        version = group.version()
        if version != self._seen_version:
            self._seen_version = version
            self._watch.watch(_next_processes(self.member, MAX_WATCHED))
        # After the machine slept all sessions are over: live members get time for a heartbeat.
        overslept = group.uptime() - self._last_check_ms > self._session_ms
        self._last_check_ms = group.uptime()
        if overslept:
            self._remove_from = monotonic() + self._heartbeat_seconds
        # Checking every member opens a file for each.  So check if a process ended or may have
        # ended unnoticed, and with each heartbeat, for members that are silent.  If each change
        # caused it, 50 members that join would make 5,000 checks of up to 50 members.
        check = self._ended_pids or self._watch.blind or monotonic() >= self._next_heartbeat
        if check and monotonic() >= self._remove_from:
            group.remove_dead_members(exclude=self.member.id)
            # Their last commits may need a checkpoint.
            self._checkpoint_due = monotonic() + CHECKPOINT_SECONDS
        if self._ended_pids:
            members = group.read().members.values()
            self._ended_pids &= {info.pid for info in members if not info.instance_id}

    def _check_poll_interval(self, idle_seconds: float) -> None:
        """Leave if the program polls too rarely; its next poll reports that."""
        if idle_seconds > self._max_idle_seconds:
            self.member.group.remove_members([self.member.id])
            raise MaxPollExceededError(
                "The consumer did not poll for longer than max_poll_interval_ms",
                group=self.member.group.name,
                member=self.member.id,
                todo="Poll more often, return fewer records per poll (max_poll_records), or "
                "raise max_poll_interval_ms.",
            )

    def _checkpoint(self) -> None:
        due = self._checkpoint_due
        if monotonic() >= due:
            # Reset before the checkpoint: commits from now on count again.
            self._checkpoint_due = inf
            try:
                self.member.group.checkpoint(always=True)
            except EmbedlogError:
                self._checkpoint_due = due
                raise

    def _wait_seconds(self, idle_seconds: float) -> float:
        if self._ended_pids:
            return _RECHECK_SECONDS
        seconds = min(self._next_heartbeat, self._checkpoint_due) - monotonic()
        # If a poll ends during the wait, the program is idle from then on only.
        return max(min(seconds, self._max_idle_seconds - idle_seconds), 0.0)


def _next_processes(member: GroupMember, count: int) -> set[int]:
    """Return the ids of the processes whose members follow this one in a ring."""
    members = member.group.read().members
    following = sorted(members, key=lambda id_: (id_ < member.id, id_))
    pids = dict.fromkeys(members[id_].pid for id_ in following)
    if member.id in members:
        del pids[member.info.pid]
    return set(list(pids)[:count])
