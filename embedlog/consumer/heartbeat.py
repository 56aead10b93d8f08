"""The background thread of group members: heartbeats, dead members, checkpoints of commits.

It runs no code of the program, and neither acquires nor releases partitions: that is done
by the polling thread.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from heapq import heappop, heappush
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
from embedlog.files import ProcessWatch, WakePage
from embedlog.forks import new_lock
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
_lock = new_lock()
_threads: dict[WakePage, HeartbeatThread] = {}
"""Of open logs with members, by their wake pages; guarded by `_lock`."""
os.register_at_fork(after_in_child=_threads.clear)


class HeartbeatThread:
    """Beats for the members of an open log: one thread for any number of them.

    It starts with the first of them, and ends with the last.
    """

    def __init__(self, page: WakePage) -> None:
        self._page = page
        self._heartbeats: set[Heartbeat] = set()
        self._calls: list[tuple[float, int, Heartbeat]] = []
        """A heap of the times at which they are due, and of some at which they were."""
        self.watch = ProcessWatch()
        self._ended: set[int] = set()
        """Processes whose end the last wait reported."""
        self._waits_until = inf
        """Until when it sleeps if nobody rings; infinite while it does not sleep."""
        self._thread = threading.Thread(target=self._run, name="embedlog-heartbeat", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, page: WakePage) -> HeartbeatThread:
        """Return the thread of a log, by its wake page; the caller holds `_lock`, and adds to it.

        Raises:
            RuntimeError: No thread can be started.
        """
        thread = _threads.get(page)
        if thread is None:
            thread = _threads[page] = cls(page)
        return thread

    def add(self, heartbeat: Heartbeat) -> None:
        """Call a heartbeat from now on."""
        self._heartbeats.add(heartbeat)
        self.call_at(0.0, heartbeat)

    def remove(self, heartbeat: Heartbeat) -> None:
        """Call a heartbeat no more; after the last one, wait for the end of the thread."""
        with _lock:
            self._heartbeats.discard(heartbeat)
            is_last = not self._heartbeats
            if is_last and _threads.get(self._page) is self:
                del _threads[self._page]
        self.watch.ring()
        if is_last and self._thread is not threading.current_thread():
            self._thread.join()

    def call_at(self, due: float, heartbeat: Heartbeat) -> None:
        """Have a heartbeat called at that time, too."""
        heappush(self._calls, (due, id(heartbeat), heartbeat))
        if due < self._waits_until:
            self.watch.ring()

    def _run(self) -> None:
        watched: dict[Heartbeat, set[int]] = {}
        while heartbeats := self._current():
            due = heartbeats.intersection(self._take_due())
            if self._ended or self.watch.blind:
                due = heartbeats
            for heartbeat in due:
                heartbeat.call(self._ended)
                self.call_at(heartbeat.due, heartbeat)
            if any(watched.get(heartbeat) != heartbeat.pids for heartbeat in due):
                watched = {heartbeat: heartbeat.pids for heartbeat in heartbeats}
                self.watch.watch(set().union(*watched.values()))
            # Infinite until it is known: who wants to be called meanwhile rings.
            self._waits_until = self._calls[0][0]
            self._ended = self.watch.wait(max(self._waits_until - monotonic(), 0.0))
            self._waits_until = inf
        self.watch.close()

    def _take_due(self) -> Iterator[Heartbeat]:
        now = monotonic()
        while self._calls and self._calls[0][0] <= now:
            heartbeat = heappop(self._calls)[2]
            if heartbeat.due <= now:  # or it was called since
                yield heartbeat

    def _current(self) -> set[Heartbeat]:
        with _lock:
            return set(self._heartbeats)


class Heartbeat:
    """That of one member; it ends with the member or with the consumer object.

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
        self.pids: set[int] = set()
        """Processes whose end this member notices."""
        self._heartbeat_seconds = config.heartbeat_interval_ms / 1000
        self._max_idle_seconds = config.max_poll_interval_ms / 1000
        # Weak: a consumer that the program dropped must be collected in spite of the thread.
        self._idle_seconds = weakref.WeakMethod(idle_seconds, lambda _: self.wake())
        self._calling = threading.RLock()
        """Held during a call, and by `stop`, which may be part of one."""
        self._stopped = False
        self._woken = True
        self._next_heartbeat = self._next_call = monotonic() + self._heartbeat_seconds
        self._checkpoint_due = inf
        """When the first commit must be checkpointed that may not be yet."""
        self._pause_until = 0.0
        """Not to be called before, after an error."""
        self._last_check_ms = member.group.uptime()
        self._session_ms = config.session_timeout_ms
        self._remove_from = 0.0
        """The time from which dead members may be removed."""
        self._ended_pids: set[int] = set()
        """Processes that ended, while their members are not removed yet."""
        self._seen_version = -1
        with _lock:
            self._thread = HeartbeatThread.of(member.group.context.wake)
            self._thread.add(self)

    @property
    def due(self) -> float:
        """When it must be called again."""
        soonest = 0.0 if self._woken else min(self._next_call, self._checkpoint_due)
        return max(soonest, self._pause_until)

    def wake(self) -> None:
        """Have the thread check the group now."""
        self._woken = True
        self._thread.call_at(0.0, self)

    def note_commit(self) -> None:
        """Have a commit checkpointed within a second; without commits the thread wakes less."""
        if self._checkpoint_due == inf:
            self._checkpoint_due = monotonic() + CHECKPOINT_SECONDS
            self._thread.call_at(self._checkpoint_due, self)

    def stop(self) -> None:
        """End the heartbeat, and wait for the end of a call."""
        self._stopped = True
        self._thread.remove(self)
        with self._calling:
            pass

    def call(self, ended: Collection[int]) -> None:
        """Do what is due; called by the thread, with the processes that have just ended."""
        self._ended_pids |= self.pids.intersection(ended)
        with self._calling:
            if not self._stopped:
                self._call()

    def _call(self) -> None:
        name, is_over = self.member.id, True
        try:
            idle_seconds = self._idle_seconds()
            if idle_seconds is None:
                # So that the others need not wait until the session ends.
                _log.warning("%s: the consumer was not closed before it was collected", name)
                self.member.leave()
            else:
                seconds, idle_seconds = idle_seconds(), None
                self._woken = False
                self._call_once(seconds)
                is_over = self.failure is not None
        except ClosedError:
            pass  # the log was closed, which closes the member as well
        except EmbedlogError as error:
            # The lock of a member that failed to leave is free, which the others see.
            _log.warning("%s: %s", name, error)
        except Exception:  # noqa: BLE001 - the thread goes on for the other members
            _log.exception("%s: its heartbeat ended", name)
        finally:
            if is_over:
                self._thread.remove(self)

    def _call_once(self, idle_seconds: float) -> None:
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
        except ClosedError:
            raise
        except EmbedlogError as error:
            # With a timeout another process holds a lock, and may be stopped.
            if not isinstance(error, TimeoutError):
                _log.warning("%s: %s", self.member.id, error)
            self._pause_until = monotonic() + _RETRY_SECONDS
        else:
            self._next_call = monotonic() + self._wait_seconds(idle_seconds)

    def _check_members(self) -> None:
        """Watch the next processes of the group, and remove dead members."""
        group = self.member.group
        version = group.version()
        if version != self._seen_version:
            self._seen_version = version
            self.pids = _next_processes(self.member, MAX_WATCHED)
        # After the machine slept all sessions are over: live members get time for a heartbeat.
        overslept = group.uptime() - self._last_check_ms > self._session_ms
        self._last_check_ms = group.uptime()
        if overslept:
            self._remove_from = monotonic() + self._heartbeat_seconds
        # Checking every member opens a file for each.  So check if a process ended or may have
        # ended unnoticed, and with each heartbeat, for members that are silent.  If each change
        # caused it, 50 members that join would make 5,000 checks of up to 50 members.
        check = self._ended_pids or self._thread.watch.blind or monotonic() >= self._next_heartbeat
        if check and monotonic() >= self._remove_from:
            group.remove_dead_members(exclude=self.member.id)
            # Their last commits may need a checkpoint.
            self._checkpoint_due = monotonic() + CHECKPOINT_SECONDS
        if self._ended_pids:
            members = group.read().members.values()
            dynamic = (info for info in members if info.instance_id is None)
            self._ended_pids &= {info.pid for info in dynamic if info.remote is None}

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
        seconds = self._next_heartbeat - monotonic()
        # If a poll ends during the wait, the program is idle from then on only.
        return max(min(seconds, self._max_idle_seconds - idle_seconds), 0.0)


def _next_processes(member: GroupMember, count: int) -> set[int]:
    """Return the ids of the processes whose members follow this one in a ring."""
    members = member.group.read().members
    following = sorted(members, key=lambda id_: (id_ < member.id, id_))
    infos = (members[id_] for id_ in following)
    pids = dict.fromkeys(info.pid for info in infos if info.remote is None)
    pids.pop(member.info.pid, None)
    return set(list(pids)[:count])
