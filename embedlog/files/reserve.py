"""Disk space that is kept back, so that housekeeping can go on where a disk is full (P10).

To delete takes room too: LMDB writes the pages that it changes to other places,
a segment that is compacted is written before the old one goes, and a log of one
segment begins the next one first.  So while there is room a file keeps some,
and housekeeping unlinks it when the disk is full.  It is made again when there
is room again.

Appends that found the disk full wait for that as well: else they would eat what
was given up before it could be used.

Whether there is room, an allocation decides.  What the file system reports as
free is only a hint: it may leave out blocks that this process may use, such as
those that ext4 reserves for root, and count blocks that it may not, as where
there are quotas.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from embedlog.errors import DiskFullError, StorageError
from embedlog.files import Files

RESERVE_FILE = "reserve"
_TRIAL_FILE = "reserve.trial"
"""Allocated to see whether there is room; it loses its name before it gets its bytes."""
RESERVE_BYTES = 4 << 20
"""Its size: thousands of pages of LMDB, or a few small segments."""
_MOST_SHARE = 16
"""It takes at most this part of a disk; on one of less than 4 MiB there is none."""
_LEAST_BYTES = 256 << 10
COMMIT_BYTES = 256 << 10
"""What compaction leaves for commits."""
_RETRY_MS = 1_000
"""While too little is reported as free, an append tries this often to make the reserve."""

T = TypeVar("T")


class Reserve:
    """The reserve of one log, as one process sees it; any thread may use it."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.short = False
        """This process found the disk full or gave the reserve up, and has not seen it since."""
        self._tried_ms = -_RETRY_MS
        """When an append tried to make the reserve last, in ms since boot."""

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
        """Make it if there is room for it and a quarter more; return whether it is there now."""
        size = self.size()
        if not size or (self.held() < size and not self._fits(_room_for(size))):
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
        self.short = False
        return True

    def give_up(self) -> bool:
        """Unlink it, and return whether it was there."""
        if not self._files.exists(RESERVE_FILE):
            return False
        # This process appends again once the reserve was made again, here or elsewhere.
        self.short = True
        self._files.unlink(RESERVE_FILE, missing_ok=True)
        return True

    def room(self, needed: int, *, trusting: bool = True) -> int:
        """Return how many bytes may be written; give the reserve up if `needed` fit only then.

        Args:
            needed: How many are wanted at least.
            trusting: Whether to believe the file system where it reports enough free space.
        """
        free = self._files.free_bytes() - COMMIT_BYTES if trusting else 0
        if free >= needed or self._fits(needed + COMMIT_BYTES):
            return max(free, needed)
        held = self.held()
        if held and self._fits(needed + COMMIT_BYTES - held) and self.give_up():
            return max(self._files.free_bytes() - COMMIT_BYTES if trusting else 0, needed)
        return free

    def check(self) -> None:
        """Raise unless there is room again, after the disk was found full.

        Raises:
            DiskFullError: There is not, and the little there is, housekeeping needs.
        """
        if not self.size() or self.held() or self._try_to_keep():
            self.short = False
            return
        raise DiskFullError(
            "the disk is full, and what is left is for housekeeping",
            errno=errno.ENOSPC,
            operation="append",
            path=self._files.root,
            todo="free some space, or let retention do so: appends go on by themselves",
        )

    def _try_to_keep(self) -> bool:
        """Make the reserve; not if too little is reported as free and that failed a moment ago.

        Each trial takes for a moment what housekeeping may be about to use.
        """
        enough = self._files.free_bytes() >= _room_for(self.size())
        now = self._files.uptime_ms()
        if not enough and now - self._tried_ms < _RETRY_MS:
            return False
        self._tried_ms = now
        return self.keep()

    def _fits(self, size: int) -> bool:
        """Return whether this process can have so many more bytes: allocate them, and let go."""
        if size <= 0:
            return True
        try:
            fd = self._files.open(_TRIAL_FILE, write=True, create=True)
            try:
                # First the name, so that the bytes go even if the process is killed.
                self._files.unlink(_TRIAL_FILE, missing_ok=True)
                self._files.allocate(fd, size)
            finally:
                self._files.close(fd)
        except StorageError:
            return False
        return True

    def used_by(self, step: Callable[[], T]) -> T:
        """Do a step of housekeeping; if the disk is full, give the reserve up and do it again."""
        try:
            return step()
        except DiskFullError:
            if not self.give_up():
                raise
            return step()


def _room_for(size: int) -> int:
    return size + size // 4
