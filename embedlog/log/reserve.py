"""Room that is kept back, so that housekeeping can go on where a disk is full (P10).

To delete takes room too: LMDB writes the pages that it changes to other places,
a segment that is compacted is written before the old one goes, and a log of one
segment begins the next one first.  So while there is room a file keeps some,
and whoever keeps house unlinks it when the disk is full.  It is made anew
when there is room again.

Appends that found the disk full wait for that as well: else they would eat what
was given up before it could be used.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from embedlog.errors import DiskFullError, StorageError
from embedlog.files import Files

RESERVE_FILE = "reserve"
RESERVE_BYTES = 4 << 20
"""Its size: thousands of pages of LMDB, or a few small segments."""
_MOST_SHARE = 16
"""It takes at most this part of a disk; on one of less than 4 MiB there is none."""
_LEAST_BYTES = 256 << 10
COMMIT_BYTES = 256 << 10
"""What is left for commits by whoever may fill a disk."""

T = TypeVar("T")


class Reserve:
    """The reserve of one log, as one process sees it; any thread may use it."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.short = False
        """An append found the disk full, and no room was seen since."""

    def size(self) -> int:
        """Return how large it is on this disk; 0 where there is none."""
        share = self._files.total_bytes() // _MOST_SHARE
        return min(RESERVE_BYTES, share) if share >= _LEAST_BYTES else 0

    def held(self) -> int:
        """Return how many bytes it has now; 0 once it was given up."""
        if not self._files.exists(RESERVE_FILE):
            return 0
        fd = self._files.open(RESERVE_FILE)
        try:
            return self._files.size(fd)
        finally:
            self._files.close(fd)

    def keep(self) -> bool:
        """Make it if there is room for it and some more; whether it is there now."""
        size = self.size()
        if not size or (self.held() < size and self._files.free_bytes() < _room_for(size)):
            return False
        try:
            # Also where it is there: what was copied, or lived through a power cut, may be holes.
            fd = self._files.open(RESERVE_FILE, write=True, create=True)
            try:
                self._files.allocate(fd, size)
            finally:
                self._files.close(fd)
        except StorageError:
            # What there is of it would count as the whole.
            with suppress(StorageError):
                self._files.unlink(RESERVE_FILE, missing_ok=True)
            return False
        return True

    def give_up(self) -> bool:
        """Let the disk have it; whether it was there."""
        if not self._files.exists(RESERVE_FILE):
            return False
        self._files.unlink(RESERVE_FILE, missing_ok=True)
        return True

    def room(self, needed: int) -> int:
        """Return how many bytes may be written; gives the reserve up if only then they do."""
        free = self._files.free_bytes() - COMMIT_BYTES
        if free < needed <= free + self.size() and self.give_up():
            free = self._files.free_bytes() - COMMIT_BYTES
        return free

    def check(self) -> None:
        """Raise unless there is room again, after an append found none.

        Raises:
            DiskFullError: There is not, and the little there is, housekeeping needs.
        """
        if self.held() or self._files.free_bytes() >= _room_for(self.size()):
            self.short = False
            return
        raise DiskFullError(
            "the disk is full, and what is left is for housekeeping",
            errno=errno.ENOSPC,
            operation="append",
            path=self._files.root,
            todo="free some space, or let retention do so: appends go on by themselves",
        )

    def used_by(self, step: Callable[[], T]) -> T:
        """Do a step of housekeeping, and once more without the reserve if there is no room."""
        try:
            return step()
        except DiskFullError:
            if not self.give_up():
                raise
            return step()


def _room_for(size: int) -> int:
    return size + size // 4
