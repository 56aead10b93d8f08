"""Disk space that is reserved, so that housekeeping can continue on a full disk.

Deleting needs space too: LMDB writes changed pages to other places, compaction writes a
segment before it deletes the old one, and a log of one segment begins the next one
first.  So a file reserves some space while there is enough, and housekeeping unlinks it
when the disk is full.  It is created again when there is enough space.

Appends that found the disk full wait for that as well: otherwise they would use the
released space before housekeeping can.

Only an allocation decides whether there is space.  What the file system reports as free
is a hint: it may leave out blocks that this process may use, such as those that ext4
reserves for root, and count blocks that it may not use, as with quotas.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from embedlog.errors import DiskFullError, StorageError
from embedlog.files.files import Files

RESERVE_FILE = "reserve"
_TRIAL_FILE = "reserve.trial"
"""Allocated to test whether there is space; it is unlinked before it is allocated."""
RESERVE_BYTES = 4 << 20
"""Its size: thousands of pages of LMDB, or a few small segments."""
_MAX_SHARE = 16
"""It takes at most a sixteenth of a disk; a disk of less than 4 MiB has no reserve."""
_MIN_BYTES = 256 << 10
COMMIT_BYTES = 256 << 10
"""Space that compaction leaves for commits."""
_RETRY_MS = 1_000
"""While too little is reported as free, an append tries this often to create the reserve."""

T = TypeVar("T")


class Reserve:
    """The reserve of one log, as one process sees it; any thread may use it."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.short = False
        """This process found the disk full, or released the reserve, which is still missing."""
        self._tried_ms = -_RETRY_MS
        """When an append last tried to create the reserve, in ms since boot."""

    def size(self) -> int:
        """Return its size on this disk; 0 if the disk is too small for one."""
        share = self._files.total_bytes() // _MAX_SHARE
        return min(RESERVE_BYTES, share) if share >= _MIN_BYTES else 0

    def held(self) -> int:
        """Return how many bytes it has now; 0 after it was released."""
        if not self._files.exists(RESERVE_FILE):
            return 0
        with self._files.opened(RESERVE_FILE) as fd:
            return self._files.size(fd)

    def keep(self) -> bool:
        """Create it if there is space for it and a quarter more; return whether it exists now."""
        size = self.size()
        if not size or (self.held() < size and not self._fits(_with_margin(size))):
            return False
        try:
            # Even if it exists: after a copy or a power cut it may be sparse.
            with self._files.opened(RESERVE_FILE, write=True, create=True) as fd:
                self._files.allocate(fd, size)
        except StorageError:
            # A part of it would count as the whole.
            with suppress(StorageError):
                self._files.unlink(RESERVE_FILE, missing_ok=True)
            return False
        self.short = False
        return True

    def give_up(self) -> bool:
        """Unlink it; return whether it existed."""
        if not self._files.exists(RESERVE_FILE):
            return False
        # This process appends again once a process has created the reserve again.
        self.short = True
        self._files.unlink(RESERVE_FILE, missing_ok=True)
        return True

    def room(self, needed: int, *, trusting: bool = True) -> int:
        """Return how many bytes may be written; releases the reserve if `needed` fit only then.

        Args:
            needed: How many bytes are needed at least.
            trusting: Whether to rely on the file system if it reports enough free space.
        """
        free = self._files.free_bytes() - COMMIT_BYTES if trusting else 0
        if free >= needed or self._fits(needed + COMMIT_BYTES):
            return max(free, needed)
        held = self.held()
        if held and self._fits(needed + COMMIT_BYTES - held) and self.give_up():
            return max(self._files.free_bytes() - COMMIT_BYTES if trusting else 0, needed)
        return free

    def mark_full(self) -> None:
        """Note that a write found the disk full: appends then wait for the reserve."""
        self.short = True

    def check(self) -> None:
        """Raise unless there is space again, after the disk was found full.

        Raises:
            DiskFullError: The disk is still full, and housekeeping needs what is left.
        """
        if not self.size() or self.held():
            self.short = False
            return
        # Each attempt takes space for a moment that housekeeping may be about to use.
        enough = self._files.free_bytes() >= _with_margin(self.size())
        uptime_ms = self._files.uptime_ms()
        if enough or uptime_ms - self._tried_ms >= _RETRY_MS:
            self._tried_ms = uptime_ms
            if self.keep():
                return
        raise DiskFullError(
            "The disk is full, and what is left is reserved for housekeeping",
            errno=errno.ENOSPC,
            operation="append",
            path=self._files.root,
            todo="Free some space, or wait for retention to do so: appends then work again.",
        )

    def _fits(self, size: int) -> bool:
        """Return whether this process can store ``size`` more bytes: allocate and free them."""
        if size <= 0:
            return True
        try:
            with self._files.opened(_TRIAL_FILE, write=True, create=True) as fd:
                # Unlinked first, so that the space is freed even if the process is killed.
                self._files.unlink(_TRIAL_FILE, missing_ok=True)
                self._files.allocate(fd, size)
        except StorageError:
            return False
        return True

    def used_by(self, step: Callable[[], T]) -> T:
        """Run a step of housekeeping; if the disk is full, release the reserve and run it again."""
        try:
            return step()
        except DiskFullError:
            if not self.give_up():
                raise
            return step()


def is_reserve(files: Files) -> bool:
    """Return whether the file with the reserve's name is one: a file of zeros."""
    try:
        with files.opened(RESERVE_FILE) as fd:
            size = files.size(fd)
            return size <= RESERVE_BYTES and not files.read(fd, size, 0).strip(b"\0")
    except StorageError:
        return False


def _with_margin(size: int) -> int:
    return size + size // 4
