"""The only module that uses LMDB: two small databases per log root, shared by all processes.

`state` is synced at each commit and survives a power cut; `live` is not, and belongs
to one boot (docs/format.md; the rows are declared in `keyspace`).  This module holds
the rules for LMDB, found by experiment: one environment per process and root;
transactions that never outlive a call; a timed lock in front of every write, because a
stopped LMDB writer blocks all others without a timeout; a map that grows by itself; and
what a fork must drop.

Lock order: the store's thread queue → its lock file → the LMDB transaction.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from time import monotonic
from typing import Any, Protocol, TypeVar

import lmdb
import lmdb.verify

from embedlog.errors import (
    ClosedError,
    CorruptionError,
    DiskFullError,
    EmbedlogError,
    LockTimeoutError,
    ReadOnlyError,
    StorageError,
    raised_in_body,
)
from embedlog.files import Files
from embedlog.files.files import LINK_CHECK_SECONDS
from embedlog.files.paths import identity_at
from embedlog.hints import Hint

T = TypeVar("T")
Txn = Any  # lmdb.Transaction; py-lmdb ships no types
Step = Callable[[Txn], T]
_Key = tuple[str, int, int]
"""Name, and device and inode of the root, which may be replaced while it is open."""

MAX_READERS = 2048
LOCK_BYTES = 192 + 64 * (MAX_READERS - 1)
"""The size of LMDB's lock file: a header, and a slot per reader."""
_LOCK_PAGE_BYTES = 4096
FIRST_MAP_BYTES = 64 << 20
LARGEST_MAP_BYTES = 1 << 40
VERSION_WORDS = 18, 512 + 18
"""The 8-byte words of the file that hold the transaction numbers of its two meta pages.

Commits write the pages in turn: even numbers are in the first page."""
META_BYTES = 8192
CHECKS = 3
"""How often a database that other processes use is checked before it counts as damaged."""
LAST_PAGE_WORDS = 17, 512 + 17
"""The words that hold the number of the last page, in the same order."""
MAGIC_AND_FORMAT = 0x00000001_BEEFC0DE
LARGEST_CHECKED_BYTES = 16 << 30
"""A check takes 40 s for a GiB of rows, and two bytes of memory per page, even if it is sparse."""
SMALL_PAGES = 1024
"""Up to here a copy includes free pages: to leave them out takes LMDB a thread and 2 MiB, which
costs 0.5 to 2 ms."""
LITTLE_SPACE = 16 << 20
"""LMDB reports EIO for a write that a full disk ended early; with less free space it is ENOSPC."""
FULL = errno.ENOSPC, errno.EDQUOT
DAMAGED = (
    lmdb.BadChecksumError,
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)
"""The errors of LMDB for a damaged file."""

_environments: dict[_Key, _Environment] = {}
_table_lock = threading.RLock()
_stores: weakref.WeakSet[LmdbStore] = weakref.WeakSet()


@contextmanager
def _typed(files: Files, operation: str, path: str) -> Iterator[None]:
    """Convert the errors of LMDB, and of the system below it, to those of embedlog."""
    try:
        yield
    except EmbedlogError:
        raise  # LockTimeoutError is an OSError too
    except (lmdb.Error, OSError) as error:
        raise _failure(files, error, operation, path) from raised_in_body(error)


def _failure(
    files: Files, error: Exception, operation: str, path: str, todo: str = ""
) -> StorageError | CorruptionError:
    """Return the error to raise for one of LMDB, with the errno of the system call that failed."""
    what = f"The database refused to {operation}: {error}"
    if isinstance(error, DAMAGED):
        return _damaged(what, path)
    number = error.errno if isinstance(error, OSError) else getattr(error, "code", None)
    if number is not None and number <= 0:
        number = None  # a code of LMDB: no system call failed
    if number == errno.EIO and operation not in ("open", "read"):
        with suppress(EmbedlogError):
            if files.free_bytes() < LITTLE_SPACE:
                number = errno.ENOSPC
    return (DiskFullError if number in FULL else StorageError)(
        what,
        errno=number,
        path=path,
        operation=operation,
        todo=todo or Hint("Nothing was changed.", "Nothing was changed; see `embedlog doctor`."),
    )


def _damaged(what: str, path: str) -> CorruptionError:
    return CorruptionError(
        what,
        path=path,
        todo="Close the log in every process: the next one to open it checks and restores it.",
    )


class _Environment:
    """One LMDB environment, shared by all stores of this process on one root."""

    def __init__(self, key: _Key, path: str, durable: bool, writable: bool) -> None:
        self.key, self.path, self.durable, self.writable = key, path, durable, writable
        self.users: weakref.WeakSet[LmdbStore] = weakref.WeakSet()
        self.usable = True
        """Whether `handle` is open; False if it was closed and could not be opened again."""
        # Every transaction holds one of these, so that the map is resized, and the
        # process forks, while none is open.
        self.reading = threading.Lock()
        self.writing = threading.Lock()
        self.handle = self._open()

    def _open(self) -> Any:
        options: dict[str, Any] = {
            "map_size": FIRST_MAP_BYTES,
            "sync": self.durable,
            "metasync": self.durable,
            "max_readers": MAX_READERS,
            "mode": 0o600,
            "readonly": not self.writable,
            "create": self.writable,
            "meminit": False,
        }
        try:
            env = lmdb.open(self.path, **options)
        except lmdb.Error:
            if self.writable:
                raise
            # A directory that cannot be written has no reader slots either.
            env = lmdb.open(self.path, lock=False, **options)
        try:
            # LMDB opens a path, where another disk may have been mounted since the root was opened.
            if identity_at(os.path.dirname(self.path)) != self.key[1:]:
                raise FileNotFoundError(errno.ENOENT, "Another directory is at its path")
            if self.writable:
                env.reader_check()
        except (lmdb.Error, OSError):
            env.close()
            raise
        return env

    def resize(self, factor: int) -> None:
        """Grow the map by a factor; 0 adopts the size to which another process grew it.

        No transaction of this process may be open (LMDB's rule).
        """
        with self.writing, self.reading:
            size = self.handle.info()["map_size"] * factor
            if size > LARGEST_MAP_BYTES:
                raise StorageError(f"The map would grow past {LARGEST_MAP_BYTES}", path=self.path)
            try:
                self.handle.set_mapsize(size)
            except lmdb.Error:
                # LMDB unmaps the old map first: a transaction would read unmapped memory.
                self.usable = False
                self.handle.close()
                raise

    def make_writable(self) -> None:
        """Open the environment again for writing: py-lmdb allows one handle per process."""
        with self.writing, self.reading:
            if not self.writable:
                self.writable = True
                try:
                    self._open_again()
                except BaseException:
                    self.writable = False
                    raise

    def reopen(self) -> None:
        """Open the environment again, unless it is usable.

        After a failed write of a meta page LMDB refuses every transaction of the process
        (MDB_PANIC) until the environment is closed.
        """
        with self.writing, self.reading:
            if self.usable:
                try:
                    self.handle.begin().abort()
                    return
                except lmdb.PanicError:
                    pass
                except lmdb.Error:
                    return  # Opening it again does not help; the caller gets this error too.
            self._open_again()

    def _open_again(self) -> None:
        self.usable = False
        self.handle.close()
        handle = self._open()
        if self.durable and self.writable:
            # LMDB restored the meta page that it failed to write.  That must be on disk
            # before the next commit overwrites pages that the failed one refers to.
            try:
                handle.sync(True)
            except lmdb.Error:
                handle.close()
                raise
        self.handle, self.usable = handle, True


def _reserve_lock_file(files: Files, path: str) -> None:
    """Reserve the space of a lock file, for LMDB stores to its pages through a map.

    To touch a page for which a full disk has no room is a SIGBUS.  Call it only while this process
    does not have the environment open: closing a file frees the locks of `fcntl` that the process
    holds on it.

    Raises:
        DiskFullError: There is no space for it.
        StorageError: It cannot be created, or written.
    """
    with files.opened(path, write=True, create=True) as lock:
        # Two processes may do this at the same time, with the same result.
        if files.allocated_bytes(lock) < LOCK_BYTES:
            try:
                files.allocate(lock, LOCK_BYTES)
            except DiskFullError:
                # A log must be opened to delete what fills the disk: this is enough for 61 readers.
                files.allocate(lock, _LOCK_PAGE_BYTES)


class Store(Protocol):
    """What an open log needs of `state` and `live`: `LmdbStore` says what each method does."""

    @property
    def path(self) -> str:
        """The directory of the environment that is read."""

    def get(self, key: bytes) -> bytes | None:
        """As `LmdbStore.get`."""

    def get_at(self, key: bytes) -> tuple[bytes | None, int]:
        """As `LmdbStore.get_at`."""

    def read(self, step: Step[T]) -> T:
        """As `LmdbStore.read`."""

    def version(self) -> int:
        """As `LmdbStore.version`."""

    def is_current(self, version: int) -> bool:
        """As `LmdbStore.is_current`."""

    def catch_up(self) -> None:
        """As `LmdbStore.catch_up`."""

    def check_linked(self) -> None:
        """As `LmdbStore.check_linked`."""

    def write(self, step: Step[T], timeout: float | None = None) -> T:
        """As `LmdbStore.write`."""

    def is_whole(self) -> bool:
        """As `LmdbStore.is_whole`."""

    def close(self) -> None:
        """As `LmdbStore.close`."""


class LmdbStore:
    """One handle on `state` or `live`: cheap, valid in one process, closed with its log.

    Args:
        files: The files of the root; a lock file orders the writers of all processes.
        name: ``"state"`` or ``"live"``, the directory below the root.
        durable: Sync every commit.
        timeout: Seconds to wait for the lock of a write.
    """

    def __init__(self, files: Files, name: str, *, durable: bool, timeout: float) -> None:
        self._files, self._name, self._durable, self._timeout = files, name, durable, timeout
        self.path = files.path(name)
        """The directory of the environment."""
        self._lock_path = f"locks/{name}"
        self._queue = threading.Lock()
        self._lock: int | None = None
        self._shared: _Environment | None = None
        self._joined: _Environment | None = None
        """The environment to leave; `_shared` is None once it must not be used any more."""
        self._pages: memoryview | None = None
        self._data: int | None = None
        self._length, self._last_page = 0, -1
        self._check_linked_at = 0.0
        """When to check next that the file was not deleted, on the monotonic clock."""
        self._damage: str | None = None
        self._confirmed = -1
        self._closed = False
        _stores.add(self)
        self._attach()

    # Reading

    def get(self, key: bytes) -> bytes | None:
        """Return one value, or None; about a microsecond."""
        return self.get_at(key)[0]

    def get_at(self, key: bytes) -> tuple[bytes | None, int]:
        """Return one value, or None, and the version of the database that it was read from."""
        shared = self._shared or self._attach()
        try:
            with shared.reading:
                txn = shared.handle.begin()
                try:
                    result: tuple[bytes | None, int] = txn.get(key), txn.id()
                finally:
                    txn.abort()
        except lmdb.Error:
            result = self.read(lambda txn: (txn.get(key), txn.id()))
        self._confirmed = result[1]
        return result

    def read(self, step: Step[T]) -> T:
        """Run ``step`` in one read transaction, whose view is consistent.

        Raises:
            CorruptionError: The file was damaged since this process opened it.
            StorageError: LMDB cannot read it for now.
        """
        shared = self._shared or self._attach()
        for _ in range(3):
            try:
                with shared.reading:
                    self._check_length()
                    with shared.handle.begin() as txn:
                        return step(txn)
            except lmdb.Error as error:
                self._prepare_retry(shared, error, "read")
        raise StorageError("The map kept changing under a reader", path=self.path)

    def _check_length(self) -> None:
        """Raise if the file became shorter: to touch its map would be a SIGBUS.

        LMDB never truncates its file.  `get` omits this check, which would
        make it half as slow again.
        """
        data = self._data
        if data is not None:
            # In this order: another thread may make the file longer, and note it, in between.
            before, length = self._length, self._files.size(data)
            if length < before:
                # From now on `_attach` raises, so `get` and `version` do not touch the map.
                self._damage = f"The database was truncated from {before} to {length} bytes"
                self._shared, self._pages = None, None
                raise self._damaged()
            if length > self._length:
                self._length = length

    def check_linked(self) -> None:
        """Raise if the file was deleted, perhaps with the log, more than `LINK_CHECK_SECONDS` ago.

        Raises:
            LogDeletedError: Every process that has it open works on what is lost at its end.
        """
        data, now = self._data, monotonic()
        if now >= self._check_linked_at and data is not None:
            self._files.check_linked(data)
            self._check_linked_at = now + LINK_CHECK_SECONDS

    def _note_growth(self, last_page: int) -> None:
        if self._data is not None:
            self._last_page = last_page
            self._length = max(self._length, self._files.size(self._data))

    def _damaged(self) -> CorruptionError:
        return _damaged(f"{self._damage} while it was open", f"{self.path}/data.mdb")

    def version(self) -> int:
        """Return a number that grows with each commit of any process; takes 0.3 µs.

        A later read sees that commit or a newer one, so what it returns may be cached
        while the number stays the same.
        """
        pages = self._pages
        if pages is not None:
            first, second = pages[18], pages[530]  # VERSION_WORDS
            if self._confirmed == (first if first > second else second):
                return self._confirmed
        # A commit writes its page first, and new readers see it a moment later:
        # only what a reader has seen counts.
        self._confirmed = self.read(_number)
        return self._confirmed

    def is_current(self, version: int) -> bool:
        """Return whether ``version`` is still the newest, and no commit is under way: a few loads.

        Then what was read under it may be acted on, as after `catch_up`.
        """
        pages = self._pages
        if pages is None or self._confirmed != version:
            return False
        return bool(pages[18] <= version >= pages[530])  # VERSION_WORDS

    def catch_up(self) -> None:
        """Make every commit visible to readers; two loads if there is nothing to do.

        A commit writes its page first, and readers see it a moment later.  If its process
        dies in between, they see it only after the next write.  So call this before acting
        on what was read, unless a transaction reads it again.

        Raises:
            LockTimeoutError: A commit is under way, and its process does not finish it.
        """
        pages = self._pages
        if pages is None or max(pages[18], pages[530]) > self.version():
            self.write(_number)

    # Writing

    def write(self, step: Step[T], timeout: float | None = None) -> T:
        """Run ``step`` in one write transaction and commit it.

        ``step`` may run more than once (the map grows by itself), so it must change
        nothing but its transaction, and must not block.  Waits ``timeout`` seconds for the
        lock, by default those of the store.

        Raises:
            LockTimeoutError: Another process holds the write lock.
            DiskFullError: No space; nothing was changed.
            StorageError: LMDB refused; nothing was changed, unless the message says otherwise.
            CorruptionError: The file was damaged since this process opened it.
        """
        self.acquire(timeout)
        try:
            return self.transact_locked(step)
        finally:
            self.release()

    def acquire(self, timeout: float | None = None) -> None:
        """Take the lock of writes, which excludes every other thread and process.

        Raises:
            LockTimeoutError: Another process or thread holds it.
            ClosedError: It was closed meanwhile.
        """
        if timeout is None:
            timeout = self._timeout
        if not self._queue.acquire(False) and not self._queue.acquire(timeout=timeout):
            raise LockTimeoutError("Another thread holds the lock", path=self._lock_path)
        try:
            self._files.lock(self._lock if self._lock is not None else self._open_lock(), timeout)
        except BaseException as error:
            self._queue.release()
            if self._closed and isinstance(error, StorageError):  # under the wait for the lock
                raise ClosedError("The log was closed", path=self.path) from error
            raise

    def release(self) -> None:
        """Release the lock of writes."""
        try:
            if self._lock is not None:  # the store may have been closed meanwhile
                self._files.unlock(self._lock)
        finally:
            self._queue.release()

    def transact_locked(self, step: Step[T]) -> T:
        """As `write`, by the holder of the lock."""
        shared = self._shared or self._attach()
        self._check_length()
        while True:
            number = -1
            try:
                with shared.writing:
                    txn = shared.handle.begin(None, None, True)
                    try:
                        result = step(txn)
                        number = txn.id()
                    except BaseException:
                        txn.abort()
                        raise
                    txn.commit()
                    pages = self._pages
                    # The next transaction reuses the number of a step that changed nothing.
                    if pages is not None and number == pages[VERSION_WORDS[number & 1]]:
                        self._confirmed = number
                        if pages[LAST_PAGE_WORDS[number & 1]] != self._last_page:
                            self._note_growth(pages[LAST_PAGE_WORDS[number & 1]])
                    return result
            except lmdb.Error as error:
                if number < 0 or isinstance(error, lmdb.MapFullError):
                    self._prepare_retry(shared, error, "commit")
                elif self._is_committed(number, error):
                    return result

    def _is_committed(self, number: int, error: lmdb.Error) -> bool:
        """Return True if a commit took place although LMDB failed at its end; else raise.

        LMDB restores a meta page that it could not write.  If that fails too, the commit may
        be there after all once the environment was opened again.  No other process can have
        committed under that number: the lock file is still held.
        """
        todo: str = Hint(
            "It is not known whether the change was made.",
            "It is not known whether the change was made; see `embedlog doctor`.",
        )
        with suppress(EmbedlogError):
            if self.read(_number) < number:
                todo = ""  # nothing was changed
            else:
                if self._durable:
                    # Its page may be in memory only: the next commit writes it to the disk.
                    self.transact_locked(_change_nothing)
                return True
        raise self._failure(error, "commit", todo) from error

    def _prepare_retry(self, shared: _Environment, error: lmdb.Error, operation: str) -> None:
        """Prepare to run a transaction again, or raise the error if that cannot help."""
        try:
            if self._closed:
                raise error
            if isinstance(error, lmdb.MapFullError):
                shared.resize(2)
            elif isinstance(error, lmdb.MapResizedError):
                shared.resize(0)
            elif isinstance(error, lmdb.PanicError) or not shared.usable:
                shared.reopen()
            # Slots of killed readers stay in use until they are checked.
            elif not isinstance(error, lmdb.ReadersFullError) or not self.check_readers():
                raise error
        except (lmdb.Error, OSError) as failure:
            raise self._failure(failure, operation) from failure

    def _failure(self, error: Exception, operation: str, todo: str = "") -> EmbedlogError:
        if self._closed:
            # Another thread closed it while this one was using it.
            return ClosedError("The log was closed", path=self.path)
        return _failure(self._files, error, operation, self.path, todo)

    # Life

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The log was closed", path=self.path)

    def _open_lock(self) -> int:
        self._check_open()
        self._lock = self._files.open(self._lock_path, write=True, create=True)
        return self._lock

    def _attach(self) -> _Environment:
        """Join this process's environment of the root, or open it."""
        self._check_open()
        if self._damage is not None:
            raise self._damaged()
        key = (self._name, *self._files.identity())
        if self._data is None:
            # Its length is checked; LMDB makes a new database of an empty file.
            data = self._files.open(f"{self._name}/data.mdb")
            self._length = self._files.size(data)
            if self._length < META_BYTES:
                self._files.close(data)
                what = f"The database has {self._length} bytes"
                raise _damaged(what, f"{self.path}/data.mdb")
            self._data = data
        with _table_lock, _typed(self._files, "open", self.path):
            close_unused()
            shared = _environments.get(key)
            if shared is None:
                if self._files.writable:
                    _reserve_lock_file(self._files, f"{self._name}/lock.mdb")
                shared = _Environment(key, self.path, self._durable, self._files.writable)
                _environments[key] = shared
            elif self._files.writable:
                shared.make_writable()
            shared.users.add(self)
        try:
            self._check_pages(shared)
            self._pages = self._meta_pages(shared, self._data)
        except BaseException:
            self._leave(shared)
            raise
        self._shared = self._joined = shared
        return shared

    def _check_pages(self, shared: _Environment) -> None:
        """Raise if the file was truncated while other processes had it open, so none checked it.

        A file that lacks pages may be whole: LMDB does not write those that a transaction
        allocated and freed.  Then all of its rows are checked.
        """
        with shared.reading:
            pages, page_bytes = shared.handle.info()["last_pgno"] + 1, shared.handle.stat()["psize"]
        if self._length < pages * page_bytes and self._data is not None:
            # Another process may have added pages since it was opened.
            self._length = self._files.size(self._data)
        if self._length < pages * page_bytes:
            # A concurrent write of another process looks like damage.
            for _ in range(CHECKS):
                # What is read here is not overwritten until this transaction ends.
                with shared.reading, shared.handle.begin():
                    problems = findings(self.path)
                if not problems:
                    return
            self._damage = f"The database was truncated to {self._length} bytes ({problems[0]})"
            raise self._damaged()

    def _meta_pages(self, shared: _Environment, data: int) -> memoryview | None:
        """Map the meta pages: two loads return what `info` does, in a tenth of the time.

        A commit writes them through the page cache, so every process sees it immediately.
        None if they are not as expected; then `info` is used.
        """
        try:
            words = memoryview(self._files.map(data, META_BYTES)).cast("Q")
        except StorageError:
            return None
        if not words[2] == words[514] == MAGIC_AND_FORMAT:
            return None
        newest = max(words[word] for word in VERSION_WORDS)
        # Another process may commit in between, so the number may have grown.
        with shared.reading:
            return words if newest <= shared.handle.info()["last_txnid"] else None

    def _leave(self, shared: _Environment) -> None:
        with _table_lock:
            shared.users.discard(self)
            close_unused()

    def close(self) -> None:
        """Leave the environment; the last user of this process closes it.

        Waits for a write of another thread, whose lock must not be closed under it.
        """
        if self._closed:
            return
        waited = self._queue.acquire(timeout=self._timeout)
        try:
            self._closed = True
            _stores.discard(self)
            lock, self._lock = self._lock, None
            if lock is not None:
                self._files.close(lock)
            shared, self._joined, self._shared, self._pages = self._joined, None, None, None
            if shared is not None:
                with shared.reading:  # which guards the check of the length
                    data, self._data = self._data, None
                    if data is not None:
                        self._files.close(data)
                self._leave(shared)
        finally:
            if waited:
                self._queue.release()

    def is_whole(self) -> bool:
        """Return whether the file is at least as long as it ever was, so was not truncated."""
        if self._shared is not None:
            with suppress(CorruptionError), self._shared.reading:
                self._check_length()
        return self._damage is None

    def sync(self) -> None:
        """Write an unsynced environment to the disk."""
        self._ask("sync", lambda handle: handle.sync(True))

    def readers(self) -> tuple[int, int]:
        """Return how many reader slots are in use, and how many exist."""
        info = self._ask("count its readers", lambda handle: handle.info())
        return info["num_readers"], info["max_readers"]

    def lagging(self) -> set[tuple[int, str, int]]:
        """Return process, thread and transaction of each reader of an older version.

        Pages freed since such a reader began cannot be reused until it ends.
        """
        newest, table = self._ask(
            "list its readers", lambda handle: (handle.info()["last_txnid"], handle.readers())
        )
        # A table under a line of titles; "-" is an idle slot.
        rows = [line.split() for line in table.splitlines()[1:]]
        readers = {(int(row[0]), row[1], int(row[2])) for row in rows if row[-1].isdecimal()}
        return {reader for reader in readers if reader[2] < newest}

    def check_readers(self) -> int:
        """Free the reader slots of dead processes; return how many."""
        freed: int = self._ask("check its readers", lambda handle: handle.reader_check())
        return freed

    def _ask(self, operation: str, question: Callable[[Any], Any]) -> Any:
        """Call LMDB outside of a transaction, while the handle is kept open."""
        shared = self._shared or self._attach()
        if not shared.usable:
            self.read(_number)
        try:
            with shared.reading:
                return question(shared.handle)
        except (lmdb.Error, OSError) as error:
            raise self._failure(error, operation) from error

    def copy(self, name: str) -> None:
        """Write a copy, durably, into the existing directory ``name`` below the root.

        Call it only while no other process writes: LMDB would wait for that without a timeout.

        Raises:
            CorruptionError: The file was damaged since this process opened it.
            StorageError: The copy is missing or incomplete.
        """
        self.read(_number)
        # LMDB would create a file that all users can read.
        with self._files.opened(f"{name}/data.mdb", write=True, create=True) as data:
            pages: int = self._ask("copy itself", lambda handle: handle.info()["last_pgno"])
            compact = pages > SMALL_PAGES
            self._ask("copy itself", lambda handle: handle.copyfd(data, compact=compact))
            self._files.sync(data)


# Several stores with the same rows, as each directory of a log with replicas has one


class FanOutTxn:
    """A write transaction in each of several stores: it reads the first one, and writes to all.

    Args:
        txns: The transactions of LMDB.
        base: Added to its number: numbers of one database mean nothing in another.
    """

    def __init__(self, txns: Sequence[Txn], base: int) -> None:
        self.txns, self._base = txns, base
        self.get, self.cursor, self.stat = txns[0].get, txns[0].cursor, txns[0].stat
        self.at = 0
        """The transaction in use: the one to blame for an error of LMDB."""
        self.changed = False
        """Whether a row was written or deleted."""

    def id(self) -> int:
        """Return its number."""
        return self._base + int(self.txns[0].id())

    def put(self, key: bytes, value: bytes) -> bool:
        """Write a row."""
        self.changed = True
        for index, txn in enumerate(self.txns):
            self.at = index
            txn.put(key, value)
        self.at = 0
        return True

    def delete(self, key: bytes) -> bool:
        """Delete a row; return whether there was one."""
        deleted = False
        for index, txn in enumerate(self.txns):
            self.at = index
            deleted |= bool(txn.delete(key))
        self.at = 0
        self.changed |= deleted
        return deleted

    def replace_last(self) -> None:
        """Replace all rows of the last store by those of the first."""
        rows = list(self.cursor())
        self.at = len(self.txns) - 1
        replace_rows(rows, self.txns[-1])
        self.at = 0


def transact_all(
    stores: Sequence[LmdbStore], step: Callable[[FanOutTxn], T], base: int = 0
) -> tuple[T, dict[int, Exception]]:
    """Run ``step`` in one write transaction of each store, and commit them in order.

    By the holder of all their locks.  ``step`` may run more than once, until the first commit.
    No store is ahead of the first one, which is the one to read: if its commit fails, nothing is
    changed.

    ``base`` is that of the `FanOutTxn`.

    Returns the result, and the errors of the other stores that did not commit, by index.

    Raises:
        StorageError, CorruptionError: A store, which the path names, failed before any had
            committed, so nothing was changed.
    """
    while True:
        at = 0
        fan_out: FanOutTxn | None = None
        held: list[threading.Lock] = []
        txns: list[Any] = []
        shared: list[_Environment] = []
        keys: list[tuple[_Key, int]] = []
        try:
            for at, store in enumerate(stores):
                shared.append(store._shared or store._attach())
                keys.append((shared[at].key, at))
            # In the order in which a fork takes these locks.
            for _, at in sorted(keys, reverse=True):
                shared[at].writing.acquire()
                held.append(shared[at].writing)
            for at, store in enumerate(stores):
                store._check_length()
                txns.append(shared[at].handle.begin(None, None, True))
            fan_out = FanOutTxn(txns, base)
            result = step(fan_out)
            return result, _commit_all(stores, fan_out)
        except lmdb.Error as error:
            at, failure = at if fan_out is None else fan_out.at, error
        finally:
            for txn in txns:
                txn.abort()  # does nothing after the commit
            for lock in held:
                lock.release()
        stores[at]._prepare_retry(shared[at], failure, "commit")


def _commit_all(stores: Sequence[LmdbStore], fan_out: FanOutTxn) -> dict[int, Exception]:
    """Commit the transactions; return the errors of those that failed after the first one."""
    failed: dict[int, Exception] = {}
    for index, (store, txn) in enumerate(zip(stores, fan_out.txns, strict=True)):
        number = int(txn.id())
        try:
            txn.commit()
        except lmdb.Error as error:
            if not index and isinstance(error, lmdb.MapFullError):
                raise
            failed[index] = store._failure(error, "commit")
            if not index:
                raise failed[index] from error
            continue
        pages = store._pages
        if pages is not None and number == pages[VERSION_WORDS[number & 1]]:
            store._confirmed = number
            if pages[LAST_PAGE_WORDS[number & 1]] != store._last_page:
                store._note_growth(pages[LAST_PAGE_WORDS[number & 1]])
    return failed


def _number(txn: Txn) -> int:
    return int(txn.id())


def _change_nothing(txn: Txn) -> None:
    """Change pages but no row: LMDB writes nothing for a transaction that changes no page."""
    txn.put(b"\0", b"")
    txn.delete(b"\0")


class EmptyStore:
    """Stands in for a `live` that may not be used or created: it has no rows."""

    def get(self, key: bytes) -> bytes | None:
        """Return None: there are no rows."""
        return None

    def get_at(self, key: bytes) -> tuple[bytes | None, int]:
        """Return None, and a version."""
        return None, 0

    def read(self, step: Step[T]) -> T:
        """Run ``step`` without rows."""
        return step(self)

    path = ""

    def version(self) -> int:
        """Return that of a database without commits."""
        return 0

    def is_current(self, version: int) -> bool:
        """Return True: nothing is committed."""
        return True

    def catch_up(self) -> None:
        """Do nothing."""

    check_linked = catch_up

    def write(self, step: Step[T], timeout: float | None = None) -> T:
        """Raise: only a log that may not write has such a store."""
        raise ReadOnlyError("The log was opened with mode='r'", path=self.path)

    def is_whole(self) -> bool:
        """Return False: it says nothing of the file."""
        return False

    def cursor(self) -> EmptyStore:
        """As a transaction: return a cursor without rows."""
        return self

    def __enter__(self) -> EmptyStore:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def set_range(self, key: bytes) -> bool:
        """As a cursor: return False, since there are no rows."""
        return False

    def last(self) -> bool:
        """As a cursor: return False, since there are no rows."""
        return False

    def close(self) -> None:
        """Do nothing."""


def close_unused() -> None:
    """Close the environments of this process that no store uses any more.

    A store that was not closed cannot do so itself: the garbage collector runs while any
    lock may be held.
    """
    with _table_lock:
        for key, shared in list(_environments.items()):
            if not shared.users:
                del _environments[key]
                with shared.writing, shared.reading:
                    shared.handle.close()


def create(files: Files, name: str, *, durable: bool, rows: dict[bytes, bytes]) -> None:
    """Build an environment and move it into place: LMDB's own creation is not crash safe."""
    aside = f"{name}.new"
    discard(files, aside)
    files.make_directory(aside)
    path = files.path(aside)
    with (
        _typed(files, "create itself", path),
        lmdb.open(path, map_size=FIRST_MAP_BYTES, mode=0o600, sync=durable, lock=False) as env,
        env.begin(write=True) as txn,
    ):
        for key, value in rows.items():
            txn.put(key, value)
    if durable:
        with files.opened(f"{aside}/data.mdb", write=True) as data:
            files.sync(data)
        files.sync_directory(aside)
    files.rename(aside, name)
    if durable:
        files.sync_directory("")


def discard(files: Files, name: str) -> None:
    """Remove an environment that no process uses."""
    if files.exists(name):
        for entry in files.list(name):
            files.unlink(f"{name}/{entry}")
        files.remove_directory(name)


def check_size(files: Files, name: str) -> None:
    """Raise if an environment has a size that no log has.

    Raises:
        StorageError: It is larger than `LARGEST_CHECKED_BYTES`.  That is not damage, but
            perhaps a planted file, which costs nothing to create if it is sparse.
    """
    with files.opened(f"{name}/data.mdb") as data:
        size = files.size(data)
    if size > LARGEST_CHECKED_BYTES:
        raise StorageError(
            f"A database of {size} bytes is too large to be checked",
            todo="No log grows to this size: put the right file in its place.",
            path=files.path(f"{name}/data.mdb"),
            operation="verify",
        )


def findings(path: str) -> list[str]:
    """Check an environment that no process uses, without mapping it; ``[]`` is healthy.

    Raises:
        StorageError: It cannot be read for now, which says nothing about damage.
    """
    try:
        # By the name of the file: for an unreadable directory it would report nothing.
        return _without_spare_pages(
            lmdb.verify.verify(f"{path}/data.mdb", subdir=False)  # type: ignore[no-untyped-call]
        )
    except FileNotFoundError as error:
        return [str(error)]
    except OSError as error:
        what = f"The database cannot be checked: {error.strerror}"
        kind = DiskFullError if error.errno in FULL else StorageError
        raise kind(what, errno=error.errno, operation="verify", path=path) from error
    except (lmdb.verify.VerifyError, struct.error) as error:
        return [str(error) or type(error).__name__]


_LONG_RUN = re.compile(r"overflow page \d+ header mp_pages (\d+) != OVPAGES\(\d+\)=(\d+)$")
_FEWER_PAGES = re.compile(r"walked (\d+) overflow pages, record says (\d+)$")
_UNREACHABLE = re.compile(r"(\d+) page\(s\) are neither reachable nor in the freeDB")


def _without_spare_pages(problems: Sequence[str]) -> list[str]:
    """Leave out what the check of LMDB takes for damage, and is none.

    A large value that a small one replaces in the same transaction leaves it all of its pages;
    the check expects as many as the small one needs, and finds the others to be lost.
    """
    runs = [_LONG_RUN.search(each) for each in problems]
    spare = sum(max(int(run[1]) - int(run[2]), 0) for run in runs if run)
    if not spare:
        return list(problems)

    def is_explained(problem: str) -> bool:
        if run := _LONG_RUN.search(problem):
            return int(run[1]) > int(run[2])
        if fewer := _FEWER_PAGES.search(problem):
            return int(fewer[2]) - int(fewer[1]) == spare
        unreachable = _UNREACHABLE.match(problem)
        return unreachable is not None and int(unreachable[1]) == spare

    return [each for each in problems if not is_explained(each)]


def read_unused(files: Files, name: str, step: Step[T]) -> T:
    """Run ``step`` in one read transaction of a sound environment that no process uses.

    Raises:
        StorageError: It cannot be read for now.
    """
    path = files.path(name)
    with (
        _typed(files, "read", path),
        lmdb.open(path, readonly=True, lock=False) as env,
        env.begin() as txn,
    ):
        return step(txn)


def rows(txn: Txn, prefix: bytes, start: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows whose keys start with ``prefix``, in order, those before ``start`` omitted."""
    with txn.cursor() as cursor:
        if not cursor.set_range(prefix if start is None else start):
            return
        for key, value in cursor:
            if not key.startswith(prefix):
                return
            yield key, value


def rows_between(txn: Txn, start: bytes, end: bytes) -> list[tuple[bytes, bytes]]:
    """Return the rows whose keys are at or above ``start`` and below ``end``, in order."""
    with txn.cursor() as cursor:
        if not cursor.set_range(start):
            return []
        return list(takewhile(lambda row: row[0] < end, cursor))


def remove(txn: Txn, prefix: bytes) -> None:
    """Delete the rows whose keys start with ``prefix``."""
    for key in [key for key, _ in rows(txn, prefix)]:
        txn.delete(key)


def replace_rows(rows: Sequence[tuple[bytes, bytes]], txn: Txn) -> None:
    """Replace all rows of a database."""
    remove(txn, b"")
    for key, value in rows:
        txn.put(key, value)


# Forks: no transaction may be open while the process is copied, and the child must
# close what it inherited before it opens it again.


def _before_fork() -> None:
    _table_lock.acquire()
    # `state` before `live`, as in a checkpoint, which reads `live` in a write of `state`.
    for _, shared in sorted(_environments.items(), reverse=True):
        shared.writing.acquire()
        shared.reading.acquire()


def _after_fork_in_parent() -> None:
    for shared in _environments.values():
        shared.reading.release()
        shared.writing.release()
    _table_lock.release()


def _after_fork_in_child() -> None:
    global _table_lock
    _table_lock = threading.RLock()
    for shared in _environments.values():
        shared.handle.close()
    _environments.clear()
    for store in list(_stores):
        store._shared = store._joined = store._lock = store._data = store._pages = None
        store._queue = threading.Lock()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
