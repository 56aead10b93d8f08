"""Which partitions and readers of an open log hold descriptors, and how many may at once.

A process that uses thousands of partitions must not run out of descriptors.  The files
opened longest ago are closed first, and opened again when they are needed.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

LEAST, MOST = 16, 1000
"""How many holders keep their descriptors; by default an eighth of the process's limit."""


class FileHolder(Protocol):
    """Opens files, and can close them between two uses."""

    def release_files(self) -> bool:
        """Close the open files, unless they are in use; return whether they were closed."""


def limit_for(descriptors: int) -> int:
    """Return how many holders may keep files open in a process with this many descriptors."""
    return max(LEAST, min(MOST, descriptors // 8))


class OpenFiles:
    """The holders that have files open, in the order in which they opened them.

    Any thread may call it.  A holder that is garbage closes its files by itself, and
    does not count.

    Args:
        limit: How many holders may have files open before the oldest close theirs.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._holders: dict[int, weakref.ref[FileHolder]] = {}

    def opened(self, holder: FileHolder) -> None:
        """Note that a holder has opened a file; the oldest holders close theirs if need be."""
        with self._lock:
            self._holders.pop(id(holder), None)
            self._holders[id(holder)] = weakref.ref(holder)
            surplus = []
            if len(self._holders) > self.limit:
                # The oldest eighth at once: one pass for many openings.
                alive = [item for item in self._holders.items() if item[1]() is not None]
                keep = self.limit - self.limit // 8
                surplus, self._holders = alive[:-keep], dict(alive[-keep:])
        for number, reference in surplus:
            oldest = reference()
            if oldest is not None and not oldest.release_files():
                with self._lock:
                    self._holders.setdefault(number, reference)
