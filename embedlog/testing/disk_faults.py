"""Appends that fail on purpose, as on a full or broken disk."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from embedlog.files import Files

_SEGMENTS = "topics/"
"""Segment files are below this directory of the root, in one directory per topic."""


class DiskFaults:
    """Makes appends of this process fail, below the log, where a disk would.

    The log sees what the kernel would say, so retries, error types and what is left in the
    files are the real ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: deque[tuple[str | None, int]] = deque()
        self._full = 0
        self.failed_appends = 0
        """How many writes to segment files failed so far."""

    def fail_next_append(
        self, topic: str | None = None, *, times: int = 1, error: int = errno.EIO
    ) -> None:
        """Let the next append fail, as if the disk returned an error.

        The caller gets a `StorageError`, or a `DiskFullError` for ``errno.ENOSPC``, which
        producers retry.  Nothing is written, and later appends work.

        Args:
            topic: Fail only appends to this topic.
            times: How many appends to fail.
            error: The ``errno`` of the failure.
        """
        if times < 1:
            raise ValueError(f"times must be at least 1, got {times}")
        with self._lock:
            self._failures.extend([(topic, error)] * times)

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Let every append in the ``with`` block fail, as on a full disk.

        Producers retry until their ``delivery_timeout_ms``, so a `send` of the block succeeds
        if the block ends before that.
        """
        with self._lock:
            self._full += 1
        try:
            yield
        finally:
            with self._lock:
                self._full -= 1

    def clear(self) -> None:
        """Forget the failures that have not happened yet."""
        with self._lock:
            self._failures.clear()

    def check(self, path: str) -> None:
        """Raise the failure that is due for a write to a file, if any."""
        if not (self._full or self._failures) or not path.startswith(_SEGMENTS):
            return
        # A topic's directory is its name and its id.
        topic = path.removeprefix(_SEGMENTS).split("/")[0].rpartition("-")[0]
        with self._lock:
            number = errno.ENOSPC if self._full else self._take_failure(topic)
            if number is None:
                return
            self.failed_appends += 1
        raise OSError(number, os.strerror(number))

    def _take_failure(self, topic: str) -> int | None:
        for failure in self._failures:
            failing_topic, number = failure
            if failing_topic in (None, topic):
                self._failures.remove(failure)
                return number
        return None


class FaultInjectingFiles(Files):
    """The files of a log root, on a disk that fails as `DiskFaults` says."""

    def __init__(self, faults: DiskFaults, *arguments: Any, **options: Any) -> None:
        self._faults = faults
        super().__init__(*arguments, **options)

    def write(self, fd: int, buffers: Sequence[Any], position: int) -> int:
        """Write all bytes, unless a failure is due."""
        try:
            self._faults.check(self._paths.get(fd, ""))
        except OSError as error:
            raise self._failed(error, "write", fd) from error
        return super().write(fd, buffers, position)
