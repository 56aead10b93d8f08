"""``buffer_memory``: how many bytes unwritten records hold, and waiting for them to be written."""

from __future__ import annotations

import threading


class BufferPool:
    """Counts bytes under ``lock``, which also guards the open batches of all topics."""

    def __init__(self, memory: int) -> None:
        self.lock = threading.Lock()
        self.memory = memory
        self.buffered = 0
        """Bytes of unwritten records."""
        self.waiters = 0
        """Threads in `wait_locked`; without any there is no need to notify."""
        self.progress = threading.Condition(self.lock)
        """Notified when records were written, or failed."""

    def release(self, size: int) -> None:
        """Stop counting bytes: they are written, or failed."""
        with self.lock:
            self.buffered -= size

    def wait(self, seconds: float) -> None:
        """Wait until records were written or failed, for at most ``seconds`` (and 0.1 s)."""
        if seconds > 0:
            with self.lock:
                self.wait_locked(min(seconds, 0.1))

    def wait_locked(self, seconds: float) -> None:
        """Wait for progress; the caller holds the lock, which is released meanwhile."""
        self.waiters += 1
        try:
            self.progress.wait(seconds)
        finally:
            self.waiters -= 1
