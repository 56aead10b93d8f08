"""What requests and answers of all connections together may take in memory."""

from __future__ import annotations

import threading
from time import monotonic


class MemoryBudget:
    """A number of bytes that connections take parts of.

    Args:
        total: How many bytes there are.
    """

    def __init__(self, total: int) -> None:
        self.left, self._changed = total, threading.Condition()
        """How many bytes nobody has; below 0 if some took the least that they need."""
        self.waited_seconds = 0.0

    def take(self, wanted: int, least: int) -> int:
        """Take up to ``wanted`` bytes, and in any case ``least`` of these; return how many."""
        with self._changed:
            taken = min(wanted, max(self.left, least))
            self.left -= taken
            return taken

    def wait_for(self, size: int, timeout: float) -> bool:
        """Take so many bytes, once they are there; return whether they were there in time.

        Args:
            size: At most the total.
            timeout: In seconds.
        """
        with self._changed:
            if self.left < size:
                began = monotonic()
                is_there = self._changed.wait_for(lambda: self.left >= size, timeout)
                self.waited_seconds += monotonic() - began
                if not is_there:
                    return False
            self.left -= size
            return True

    def give_back(self, size: int) -> None:
        """Give back bytes that were taken."""
        if size:
            with self._changed:
                self.left += size
                self._changed.notify_all()
