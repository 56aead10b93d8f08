"""Waiting until another process ends, with a pidfd (Linux 5.3)."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final

BLIND_SECONDS: Final = 0.05
"""How long to sleep if the end of a process is not reported, as from another pid namespace."""


class _Poll:
    """What `select.poll` is, on `select.select`: eventlet leaves only that."""

    def __init__(self) -> None:
        self._fds: set[int] = set()

    def register(self, fd: int, _: int) -> None:
        self._fds.add(fd)

    def unregister(self, fd: int) -> None:
        self._fds.remove(fd)

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        ready, _, _ = select.select(self._fds, (), (), timeout_ms / 1000)
        return [(fd, select.POLLIN) for fd in ready]


class ProcessWatch:
    """Waits for the end of processes, for a call of `ring`, or for a timeout.

    A pid is only a hint: the caller must check by other means which process is gone.
    Only `ring` may be called by other threads.
    """

    def __init__(self) -> None:
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Without the lock `ring` could write to another file that got the number after `close`.
        self._bell_lock = threading.Lock()
        self._poll: Any = getattr(select, "poll", _Poll)()
        self._poll.register(self._bell, select.POLLIN)
        self._watched: dict[int, int] = {}
        self.blind = False
        """Whether a process cannot be watched: it is gone, or in another pid namespace."""

    def watch(self, pids: Collection[int]) -> None:
        """Watch these processes and no others."""
        for pid in self._watched.keys() - set(pids):
            self._drop(pid)
        self.blind = False
        for pid in set(pids) - self._watched.keys():
            try:
                fd = os.pidfd_open(pid)
            except OSError:
                self.blind = True
                continue
            self._watched[pid] = fd
            self._poll.register(fd, select.POLLIN)

    def _drop(self, pid: int) -> None:
        fd = self._watched.pop(pid)
        self._poll.unregister(fd)
        os.close(fd)

    def wait(self, timeout: float) -> set[int]:
        """Wait for the end of a process, or `ring`, or a timeout; return the ended processes."""
        if self.blind:
            timeout = min(timeout, BLIND_SECONDS)
        ready = {fd for fd, _ in self._poll.poll(timeout * 1000)}
        if self._bell in ready:
            with suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        ended = {pid for pid, fd in self._watched.items() if fd in ready}
        for pid in ended:
            self._drop(pid)
        return ended

    def ring(self) -> None:
        """End the current wait, or the next one."""
        with self._bell_lock, suppress(BlockingIOError):
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Close all descriptors."""
        with self._bell_lock:
            self._close_all()

    def _close_all(self) -> None:
        self.watch(())
        bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)

    def __del__(self) -> None:
        # A forked child closes what it inherited of its parent's watch; without the lock,
        # since a thread that does not exist in the child may hold it.
        self._close_all()
