"""Opens the logs that queries read, and keeps them open in a process that plans many queries."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import embedlog
from embedlog import errors
from embedlog.api import Log
from embedlog.files.paths import FORMAT_FILE, is_there
from embedlog.forks import new_lock

_logger = logging.getLogger("embedlog.spark")

MAX_IDLE = 16
"""Logs that stay open although no query uses them."""


class LogCache:
    """Open logs by path; queries of the same path share one.  Any thread may use it.

    A log whose directory was deleted or replaced is opened again; the queries that use the old
    one keep it until they release it.
    """

    def __init__(self, max_idle: int = MAX_IDLE) -> None:
        self._max_idle = max_idle
        self._lock = new_lock()
        self._logs: dict[str, Log] = {}
        """The log to use for each path, the one used last at the end."""
        self._users: dict[Log, int] = {}
        """How many queries use each log, also of those that were replaced."""

    def acquire(self, path: str, todo: str | None = None) -> Log:
        """Return the log at a path, which stays open until it is released.

        Raises:
            NotALogError: There is none; ``todo`` says what to do.
        """
        log = self._use(path)
        if log is None:
            self._close_unused()
            # Outside the lock: a log that takes long to open must not delay the others.
            opened = open_existing_log(path, todo)
            log = self._use(path) or self._add(path, opened)
            if log is not opened:
                opened.close()
        return log

    def release(self, log: Log) -> None:
        """Note that a query no longer uses a log; it stays open for the next one."""
        with self._lock:
            if log in self._users:
                self._users[log] -= 1
        self._close_unused()

    @contextmanager
    def using(self, path: str) -> Iterator[Log]:
        """Yield the log at a path; see `acquire`."""
        log = self.acquire(path)
        try:
            yield log
        finally:
            self.release(log)

    def open_logs(self) -> list[Log]:
        """Return the logs that are open."""
        with self._lock:
            return list(self._users)

    def close(self) -> None:
        """Close all logs."""
        with self._lock:
            logs = list(self._users)
            self._logs.clear()
            self._users.clear()
        _close_all(logs)

    def _use(self, path: str) -> Log | None:
        """Count another user of the log at a path; None if it has to be opened."""
        with self._lock:
            log = self._logs.pop(path, None)
            if log is None or log.root.closed or not log.root.context.files.is_in_place():
                return None
            self._logs[path] = log
            self._users[log] += 1
            return log

    def _add(self, path: str, log: Log) -> Log:
        with self._lock:
            self._logs[path] = log
            self._users[log] = 1
            return log

    def _close_unused(self) -> None:
        """Close logs without users: those that were replaced, and the longest unused ones."""
        with self._lock:
            idle = [log for log, users in self._users.items() if not users]
            current = [log for log in self._logs.values() if log in idle]
            surplus = current[: max(len(current) - self._max_idle, 0)]
            unused = [log for log in idle if log not in current or log in surplus]
            for log in unused:
                del self._users[log]
            self._logs = {path: log for path, log in self._logs.items() if log not in unused}
        _close_all(unused)


def _close_all(logs: Iterable[Log]) -> None:
    for log in logs:
        try:
            log.close()
        except errors.LogDeletedError:
            # Then there is no log to leave in order.
            _logger.debug("Closed %s, which was deleted", log.path)
        except errors.EmbedlogError as error:
            # No query failed: all of its queries have released it.
            _logger.warning("Cannot close %s: %s", log.path, error)


def is_a_log(path: str) -> bool:
    """Whether there is a log at a path.

    Raises:
        StorageError: This user may not look.
    """
    return is_there(os.path.join(path, FORMAT_FILE))


def open_existing_log(path: str, todo: str | None = None) -> Log:
    """Open a log that exists, for writing where the directory allows it.

    Raises:
        NotALogError: There is none; ``todo`` says what to do.
        StorageError: This user may not open it.
    """
    if not is_a_log(path):
        raise errors.NotALogError("There is no log here", path=path, todo=todo)
    mode: Literal["rw", "r"] = "rw" if os.access(path, os.W_OK) else "r"
    # Maintenance is left to the processes that write: Spark kills this one without notice.
    return embedlog.open(path, mode=mode, maintenance=False)
