"""The lock of a whole log, to which a publication escalates from too many locks of partitions.

Each lock of a partition costs a descriptor for as long as it is held.  A publication over more
partitions than its process can hold takes this lock exclusively instead, and notes that in
`state`: then it locks each partition once, to wait for the operation in it, and gives the
descriptor back.  Others look at the note when they have a partition's lock, which costs them
a few loads, and if there is one they give that lock back and wait here.  An operation on
several partitions at once takes this lock first, shared, since it must not wait here while it
holds one of theirs.

If the process dies, the kernel frees the lock, and the next to wait removes the note.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from embedlog import keyspace, kv
from embedlog.files import Files

_PATH = "locks/log"


class LogLock:
    """The lock of one log, for all threads of one handle; its note is in ``state``."""

    def __init__(self, files: Files, state: kv.Store) -> None:
        self._files, self._state = files, state
        self.free_version = -1
        """The last version of ``state`` without the note: while it is current, the lock is free."""

    def is_free(self) -> bool:
        """Return whether nobody holds it exclusively; call it with the lock of a partition."""
        row, version = self._state.get_at(keyspace.LOG_LOCKED.key())
        if row is None:
            self.free_version = version
        return row is None

    @contextmanager
    def shared(self, timeout: float) -> Iterator[None]:
        """Keep others from holding it exclusively.

        Raises:
            LockTimeoutError: A process does; ``pid`` says which.
        """
        with self._files.opened(_PATH, write=True, create=True) as fd:
            self._files.lock(fd, timeout, shared=True)
            if not self.is_free():  # Its process died.
                self._state.write(keyspace.LOG_LOCKED.delete)
            yield

    @contextmanager
    def exclusive(self, timeout: float) -> Iterator[None]:
        """Keep others out of all partitions; the caller must lock each of them once.

        Raises:
            LockTimeoutError: A process holds it; ``pid`` says which, if there is only one.
        """
        with self._files.opened(_PATH, write=True, create=True) as fd:
            self._files.lock(fd, timeout)
            try:
                self._state.write(lambda txn: keyspace.LOG_LOCKED.put(txn, value=None))
                yield
            finally:
                self._state.write(keyspace.LOG_LOCKED.delete)
