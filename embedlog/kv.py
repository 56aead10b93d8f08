"""The door of LMDB: two small databases per log root, shared by every process.

`state` is synced at each commit and survives a power cut; `live` is not, and
belongs to one boot (docs/format.md).  Here live the rules learnt
about LMDB by experiment: one environment per process and root; transactions
that never outlive a call; a timed lock in front of every write, because an
LMDB writer that was stopped blocks everybody without a timeout; a map that
grows by itself; and what a fork must drop.

Lock order: the store's thread queue → its lock file → the LMDB transaction.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import lmdb
import lmdb.verify

from embedlog.errors import (
    ClosedError,
    CorruptionError,
    DiskFullError,
    EmbedlogError,
    LockTimeoutError,
    StorageError,
)
from embedlog.files import Files

T = TypeVar("T")
Txn = Any  # lmdb.Transaction; py-lmdb ships no types
Step = Callable[[Txn], T]
_Key = tuple[str, int, int]
"""Name, and device and inode of the root: one may be deleted and made anew while it is open."""

MAX_READERS = 2048
FIRST_MAP_BYTES = 64 << 20
LARGEST_MAP_BYTES = 1 << 40
VERSION_PLACES = 18, 512 + 18
"""Which 8-byte words of the file are its two meta pages' transaction numbers (format 0.9).

Commits write them in turn: even numbers are in the first."""
META_BYTES = 8192
CHECKS = 3
"""How often a database that other processes use is looked at before it counts as damaged."""
LAST_PAGE_PLACES = 17, 512 + 17
"""Which words are the numbers of the last page, in the same order."""
MAGIC_AND_FORMAT = 0x00000001_BEEFC0DE
LARGEST_CHECKED_BYTES = 16 << 30
"""A check takes 40 s for a GiB of rows, and two bytes of memory for a page, there or not."""
SMALL_PAGES = 1024
"""Leaving out the free pages of a copy takes LMDB a thread and 2 MiB, which costs 0.5 to 2 ms:
more than to write them all, up to here."""
LITTLE_SPACE = 16 << 20
"""LMDB calls a write that a full disk cut short EIO: below this much free space it is ENOSPC."""
FULL = errno.ENOSPC, errno.EDQUOT
DAMAGED = (
    lmdb.BadChecksumError,
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)
"""What LMDB raises for a file that it did not leave like that."""

_environments: dict[_Key, _Environment] = {}
_table_lock = threading.Lock()
_stores: weakref.WeakSet[Store] = weakref.WeakSet()


@contextmanager
def _typed(files: Files, operation: str, path: str) -> Iterator[None]:
    """Turn the errors of LMDB, and of the system below it, into those of embedlog."""
    try:
        yield
    except EmbedlogError:
        raise  # a LockTimeoutError is an OSError too
    except (lmdb.Error, OSError) as error:
        raise _failure(files, error, operation, path) from error


def _failure(
    files: Files, error: Exception, operation: str, path: str, todo: str = ""
) -> StorageError | CorruptionError:
    """Return the error to raise for one of LMDB, with the errno of the system call that failed."""
    what = f"the database refused to {operation}: {error}"
    if isinstance(error, DAMAGED):
        return _damaged(what, path)
    number = error.errno if isinstance(error, OSError) else getattr(error, "code", None)
    if number is not None and number <= 0:
        number = None  # a code of LMDB's own: no system call failed
    if number == errno.EIO and operation not in ("open", "read") and _is_full(files):
        number = errno.ENOSPC
    return (DiskFullError if number in FULL else StorageError)(
        what,
        errno=number,
        path=path,
        operation=operation,
        todo=todo or "Nothing was changed; see `embedlog doctor`",
    )


def _damaged(what: str, path: str) -> CorruptionError:
    return CorruptionError(
        what,
        path=path,
        todo="Close the log in every process: the next one to open it checks and restores it",
    )


def _is_full(files: Files) -> bool:
    try:
        return files.free_bytes() < LITTLE_SPACE
    except EmbedlogError:
        return False


class _Environment:
    """One LMDB environment, shared by all stores of this process on one root."""

    def __init__(self, key: _Key, path: str, durable: bool, writable: bool) -> None:
        self.key, self.path, self.durable, self.writable = key, path, durable, writable
        self.users: weakref.WeakSet[Store] = weakref.WeakSet()
        self.usable = True
        """Whether `handle` is open: not if it had to be closed and could not be opened again."""
        # Every transaction holds one of these for its short life, so that the
        # map can be resized, and a fork can happen, while none is open.
        self.reading = threading.Lock()
        self.writing = threading.Lock()
        self.handle = self._open()

    def _open(self) -> Any:
        try:
            env = self._lmdb(lock=True)
        except lmdb.Error:
            if self.writable:
                raise
            # Where nothing may be written, there is no slot for a reader either.
            env = self._lmdb(lock=False)
        if self.writable:
            try:
                env.reader_check()
            except lmdb.Error:
                env.close()
                raise
        return env

    def _lmdb(self, lock: bool) -> Any:
        return lmdb.open(
            self.path,
            map_size=FIRST_MAP_BYTES,
            sync=self.durable,
            metasync=self.durable,
            max_readers=MAX_READERS,
            mode=0o600,
            readonly=not self.writable,
            lock=lock,
            create=self.writable,
            meminit=False,
        )

    def grow(self) -> None:
        """Double the map; no transaction of this process may be open (LMDB's rule)."""
        with self.writing, self.reading:
            size = self.handle.info()["map_size"] * 2
            if size > LARGEST_MAP_BYTES:
                raise StorageError(f"the map would grow past {LARGEST_MAP_BYTES}", path=self.path)
            self._resize(size)

    def adopt_growth(self) -> None:
        """Take the size that another process gave the map."""
        with self.writing, self.reading:
            self._resize(0)

    def _resize(self, size: int) -> None:
        try:
            self.handle.set_mapsize(size)
        except lmdb.Error:
            # LMDB unmaps the old map first: a transaction would read where nothing is.
            self.usable = False
            self.handle.close()
            raise

    def make_writable(self) -> None:
        """A handle that reads opened it first, one that writes joins: py-lmdb allows one only."""
        with self.writing, self.reading:
            if not self.writable:
                self.writable = True
                try:
                    self._open_again()
                except BaseException:
                    self.writable = False
                    raise

    def reopen(self) -> None:
        """Open the environment again, if it is not usable as it is.

        After a failed write of a meta page LMDB refuses every transaction of the process
        (MDB_PANIC) until the environment is closed.
        """
        with self.writing, self.reading:
            if not self._accepts_transactions():
                self._open_again()

    def _accepts_transactions(self) -> bool:
        if not self.usable:
            return False
        try:
            self.handle.begin().abort()
        except lmdb.PanicError:
            return False
        except lmdb.Error:
            pass  # Opening it again does not help; the caller meets this one too.
        return True

    def _open_again(self) -> None:
        self.usable = False
        self.handle.close()
        handle = self._open()
        if self.durable and self.writable:
            # LMDB put back the meta page that it failed to write.  That must be on the disk
            # before the next commit overwrites pages that the failed one refers to.
            try:
                handle.sync(True)
            except lmdb.Error:
                handle.close()
                raise
        self.handle, self.usable = handle, True


class Store:
    """One handle's view of `state` or `live`; cheap, pid-aware, closed with its log.

    Args:
        files: The seam; its lock file orders writers of all processes.
        name: ``"state"`` or ``"live"``, the directory below the root.
        durable: Sync every commit.
        timeout: Seconds to wait for the lock of a write.
    """

    def __init__(self, files: Files, name: str, *, durable: bool, timeout: float) -> None:
        self._files, self._name, self._durable, self._timeout = files, name, durable, timeout
        self._queue = threading.Lock()
        self._lock: int | None = None
        self._shared: _Environment | None = None
        self._joined: _Environment | None = None
        """The environment to leave; `_shared` is not the same if that may not be used any more."""
        self._pages: memoryview | None = None
        self._data: int | None = None
        self._length, self._last_page = 0, -1
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
        """Return one value, or None, and the version that it is of."""
        shared = self._shared or self._attach()
        try:
            with shared.reading:
                txn = shared.handle.begin()
                try:
                    found: tuple[bytes | None, int] = txn.get(key), txn.id()
                finally:
                    txn.abort()
        except lmdb.Error:
            found = self.read(lambda txn: (txn.get(key), txn.id()))
        self._confirmed = found[1]
        return found

    def read(self, step: Step[T]) -> T:
        """Run ``step`` in one read transaction: a consistent view, never kept.

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
        raise StorageError("the map kept changing under a reader", path=self.path)

    def _check_length(self) -> None:
        """Refuse to touch the map of a file that became shorter: that would be a SIGBUS.

        LMDB never cuts its file.  `get` does without: it would take half as long again.
        """
        data = self._data
        if data is not None:
            length = self._files.size(data)
            if length < self._length:
                # From now on `_attach` raises, so that `get` and `version` leave the map alone.
                self._damage = f"the database was cut from {self._length} to {length} bytes"
                self._shared, self._pages = None, None
                raise self._damaged()
            self._length = length

    def _note_growth(self, last_page: int) -> None:
        if self._data is not None:
            self._last_page = last_page
            self._length = max(self._length, self._files.size(self._data))

    def _damaged(self) -> CorruptionError:
        return _damaged(f"{self._damage} while it was open", f"{self.path}/data.mdb")

    def version(self) -> int:
        """A number that grows with each commit by any process; 0.3 µs.

        Whoever reads after it sees that commit, or a later one: what was read
        may be kept for as long as the number stays.
        """
        pages = self._pages
        if pages is not None:
            first, second = pages[18], pages[530]  # VERSION_PLACES
            if self._confirmed == (first if first > second else second):
                return self._confirmed
        # A commit writes its page first and is seen by new readers a moment
        # later: only what a reader has seen counts.
        version: int = self.read(_number)
        self._confirmed = version
        return version

    def is_current(self, version: int) -> bool:
        """Whether ``version`` is still the newest, with no commit on its way: a few loads.

        Then what was read under it may be acted on, as after `catch_up`.
        """
        pages = self._pages
        if pages is None or self._confirmed != version:
            return False
        return bool(pages[18] <= version >= pages[530])  # VERSION_PLACES

    def catch_up(self) -> None:
        """Have everything seen that was committed; two loads when there is nothing to do.

        A commit is in its page first, and seen by readers a moment later.  One
        whose process died in between is seen only once somebody writes.  So who
        acts on what was read, in another way than by a transaction that reads it
        again, asks for this first.

        Raises:
            LockTimeoutError: A commit is going on, and its process does not end it.
        """
        pages = self._pages
        if pages is None or max(pages[18], pages[530]) > self.version():
            self.write(_number)

    # Writing

    def write(self, step: Step[T]) -> T:
        """Run ``step`` in one write transaction and commit it.

        ``step`` may run more than once (the map grows by itself), so it must
        touch nothing but its transaction, and must not block.

        Raises:
            LockTimeoutError: Another process holds the write lock.
            DiskFullError: No space; nothing was changed.
            StorageError: LMDB refused; nothing was changed, unless its text says otherwise.
            CorruptionError: The file was damaged since this process opened it.
        """
        if not self._queue.acquire(False) and not self._queue.acquire(timeout=self._timeout):
            raise LockTimeoutError("another thread holds the lock", path=self._lock_path)
        try:
            lock = self._lock if self._lock is not None else self._open_lock()
            self._files.lock(lock, self._timeout)
            try:
                return self._transact(step)
            finally:
                self._files.unlock(lock)
        finally:
            self._queue.release()

    def _transact(self, step: Step[T]) -> T:
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
                    # A step that changed nothing leaves its number to the next one.
                    if pages is not None and number == pages[VERSION_PLACES[number & 1]]:
                        self._confirmed = number
                        if pages[LAST_PAGE_PLACES[number & 1]] != self._last_page:
                            self._note_growth(pages[LAST_PAGE_PLACES[number & 1]])
                    return result
            except lmdb.Error as error:
                if number < 0 or isinstance(error, lmdb.MapFullError):
                    self._prepare_retry(shared, error, "commit")
                elif self._is_committed(number, error):
                    return result

    def _is_committed(self, number: int, error: lmdb.Error) -> bool:
        """Return whether a commit took place although LMDB failed at its end; else raise.

        It undoes a meta page that it could not write.  If that fails too, the commit may
        be there once the environment was opened again.  No other process can have made one
        of that number: the lock file is still held.
        """
        todo = "It is not known whether the change was made; see `embedlog doctor`"
        with suppress(EmbedlogError):
            if self.read(_number) < number:
                todo = ""  # nothing was changed
            else:
                if self._durable:
                    # Its page may be in memory only: one that follows it takes it to the disk.
                    self._transact(_change_nothing)
                return True
        raise self._failure(error, "commit", todo) from error

    def _prepare_retry(self, shared: _Environment, error: lmdb.Error, operation: str) -> None:
        """Do what has to be done before a transaction is tried again; else raise the error."""
        try:
            if self._closed:
                raise error
            if isinstance(error, lmdb.MapFullError):
                shared.grow()
            elif isinstance(error, lmdb.MapResizedError):
                shared.adopt_growth()
            elif isinstance(error, lmdb.PanicError) or not shared.usable:
                shared.reopen()
            # Slots of killed readers stay taken until they are looked for.
            elif not isinstance(error, lmdb.ReadersFullError) or not self.check_readers():
                raise error
        except (lmdb.Error, OSError) as failure:
            raise self._failure(failure, operation) from failure

    def _failure(self, error: Exception, operation: str, todo: str = "") -> EmbedlogError:
        if self._closed:
            # By another thread, while this one was about to use it.
            return ClosedError("the log was closed", path=self.path)
        return _failure(self._files, error, operation, self.path, todo)

    # Life

    @property
    def path(self) -> str:
        """The directory of the environment."""
        return self._files.path(self._name)

    @property
    def _lock_path(self) -> str:
        return f"locks/{self._name}"

    def _open_lock(self) -> int:
        if self._closed:
            raise ClosedError("the log was closed", path=self.path)
        self._lock = self._files.open(self._lock_path, write=True, create=True)
        return self._lock

    def _attach(self) -> _Environment:
        """Join this process's environment of that root, or open it."""
        if self._closed:
            raise ClosedError("the log was closed", path=self.path)
        if self._damage is not None:
            raise self._damaged()
        key = (self._name, *self._files.identity())
        if self._data is None:
            self._data = self._open_data()
        with _table_lock, _typed(self._files, "open", self.path):
            _close_unused_locked()
            shared = _environments.get(key)
            if shared is None:
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

    def _open_data(self) -> int:
        """Open the file to look at its length; LMDB would make a new database of an empty one."""
        data = self._files.open(f"{self._name}/data.mdb")
        self._length = self._files.size(data)
        if self._length < META_BYTES:
            self._files.close(data)
            what = f"the database has {self._length} bytes"
            raise _damaged(what, f"{self.path}/data.mdb")
        return data

    def _check_pages(self, shared: _Environment) -> None:
        """Refuse a file that was cut while other processes had it open, so that none checked it.

        One that lacks pages may be whole: LMDB does not write those that a transaction
        took and gave back.  Then all of its rows are looked at.
        """
        with shared.reading:
            pages, bytes_each = shared.handle.info()["last_pgno"] + 1, shared.handle.stat()["psize"]
        if self._length < pages * bytes_each:
            # Another process may write meanwhile, which looks like damage.
            for _ in range(CHECKS):
                problems = findings(self.path)
                if not problems:
                    return
            self._damage = f"the database was cut to {self._length} bytes ({problems[0]})"
            raise self._damaged()

    def _meta_pages(self, shared: _Environment, data: int) -> memoryview | None:
        """Map the pages a commit ends in: two loads there are what `info` returns, for a tenth.

        A commit writes them through the page cache, so every process sees it at
        once.  None, and `info` is asked, where they are not as expected.
        """
        try:
            words = memoryview(self._files.map(data, META_BYTES)).cast("Q")
        except StorageError:
            return None
        known = words[2] == words[514] == MAGIC_AND_FORMAT
        newest = max(words[place] for place in VERSION_PLACES)
        # Another process may commit in between, so it may have grown by the second look.
        with shared.reading:
            return words if known and newest <= shared.handle.info()["last_txnid"] else None

    def _leave(self, shared: _Environment) -> None:
        with _table_lock:
            shared.users.discard(self)
            _close_unused_locked()

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
                with shared.reading:  # the length is looked at under it
                    data, self._data = self._data, None
                    if data is not None:
                        self._files.close(data)
                self._leave(shared)
        finally:
            if waited:
                self._queue.release()

    def is_whole(self) -> bool:
        """Return whether the file is at least as long as it ever was; one that was cut is not."""
        if self._shared is not None:
            with suppress(CorruptionError), self._shared.reading:
                self._check_length()
        return self._damage is None

    def sync(self) -> None:
        """Write an unsynced environment to the disk."""
        self._ask("sync", lambda handle: handle.sync(True))

    def readers(self) -> tuple[int, int]:
        """Return how many reader slots are taken, and how many there are."""
        info = self._ask("count its readers", lambda handle: handle.info())
        return info["num_readers"], info["max_readers"]

    def lagging(self) -> set[tuple[int, str, int]]:
        """Return process, thread and transaction of each reader of what is not the newest.

        What was freed since one of them began cannot be used again until it ends.
        """
        newest, table = self._ask(
            "list its readers", lambda handle: (handle.info()["last_txnid"], handle.readers())
        )
        # A table under one line of titles; "-" is a slot that nobody reads with.
        rows = [line.split() for line in table.splitlines()[1:]]
        found = {(int(row[0]), row[1], int(row[2])) for row in rows if row[-1].isdigit()}
        return {each for each in found if each[2] < newest}

    def check_readers(self) -> int:
        """Free the reader slots of dead processes; return how many there were."""
        freed: int = self._ask("check its readers", lambda handle: handle.reader_check())
        return freed

    def _ask(self, operation: str, question: Callable[[Any], Any]) -> Any:
        """Return what LMDB answers outside of a transaction; the handle stays open meanwhile."""
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

        Only while no other process writes: LMDB may wait for one that does, without a timeout.

        Raises:
            CorruptionError: The file was damaged since this process opened it.
            StorageError: It is not there, or not whole.
        """
        self.read(_number)
        # LMDB would create the file for everybody to read.
        data = self._files.open(f"{name}/data.mdb", write=True, create=True)
        try:
            pages: int = self._ask("copy itself", lambda handle: handle.info()["last_pgno"])
            compact = pages > SMALL_PAGES
            self._ask("copy itself", lambda handle: handle.copyfd(data, compact=compact))
            self._files.sync(data)
        finally:
            self._files.close(data)


def _number(txn: Txn) -> int:
    number: int = txn.id()
    return number


def _change_nothing(txn: Txn) -> None:
    """Change no row, but pages: LMDB writes nothing for a transaction that changed none."""
    txn.put(b"\0", b"")
    txn.delete(b"\0")


class EmptyStore:
    """Stands for a `live` that may not be used or made: every partition counts as unknown."""

    def get(self, key: bytes) -> bytes | None:
        """There is nothing."""
        return None

    def get_at(self, key: bytes) -> tuple[bytes | None, int]:
        """There is nothing."""
        return None, 0

    def read(self, step: Step[T]) -> T:
        """Run ``step`` on nothing."""
        return step(self)

    def cursor(self) -> EmptyStore:
        """As a transaction: a cursor over nothing."""
        return self

    def __enter__(self) -> EmptyStore:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def set_range(self, key: bytes) -> bool:
        """As a cursor: there is no such row."""
        return False

    def last(self) -> bool:
        """As a cursor: there is no last row."""
        return False

    def close(self) -> None:
        """Nothing to let go."""


def close_unused() -> None:
    """Close the environments that this process opened and no store uses any more.

    A store that its program forgot, without closing it, cannot do so itself: the garbage
    collector runs while any lock may be held.
    """
    with _table_lock:
        _close_unused_locked()


def _close_unused_locked() -> None:
    for key, shared in list(_environments.items()):
        if not shared.users:
            del _environments[key]
            with shared.writing, shared.reading:
                shared.handle.close()


def create(files: Files, name: str, *, durable: bool, rows: dict[bytes, bytes]) -> None:
    """Build an environment aside and move it into place: LMDB's own creation is not crash safe."""
    aside = f"{name}.new"
    discard(files, aside)
    files.make_directory(aside)
    path = files.path(aside)
    with (
        _typed(files, "create itself", path),
        lmdb.open(path, map_size=FIRST_MAP_BYTES, mode=0o600, sync=durable) as env,
        env.begin(write=True) as txn,
    ):
        for key, value in rows.items():
            txn.put(key, value)
    if durable:
        data = files.open(f"{aside}/data.mdb", write=True)
        try:
            files.sync(data)
        finally:
            files.close(data)
        files.sync_directory(aside)
    files.rename(aside, name)
    if durable:
        files.sync_directory("")


def discard(files: Files, name: str) -> None:
    """Remove an environment that nobody uses."""
    if files.exists(name):
        for entry in files.list(name):
            files.unlink(f"{name}/{entry}")
        files.remove_directory(name)


def check_size(files: Files, name: str) -> None:
    """Refuse to look through an environment of a size that no log has.

    Raises:
        StorageError: It is larger than `LARGEST_CHECKED_BYTES`, which is no damage, but
            perhaps a file that somebody planted: sparse, it costs nothing to make.
    """
    data = files.open(f"{name}/data.mdb")
    try:
        size = files.size(data)
    finally:
        files.close(data)
    if size > LARGEST_CHECKED_BYTES:
        raise StorageError(
            f"a database of {size} bytes is not looked through",
            todo="it is not one that a log has grown to: put the right one in its place",
            path=files.path(f"{name}/data.mdb"),
            operation="verify",
        )


def findings(path: str) -> list[str]:
    """Check an environment that nobody uses without mapping it; ``[]`` is healthy.

    Raises:
        StorageError: It cannot be read for now, which says nothing about damage.
    """
    try:
        # By the name of the file: of a directory that cannot be looked at it would not say so.
        found: list[str] = lmdb.verify.verify(  # type: ignore[no-untyped-call]
            f"{path}/data.mdb", subdir=False
        )
    except FileNotFoundError as error:
        return [str(error)]
    except OSError as error:
        what = f"the database cannot be checked: {error.strerror}"
        kind = DiskFullError if error.errno in FULL else StorageError
        raise kind(what, errno=error.errno, operation="verify", path=path) from error
    except (lmdb.verify.VerifyError, struct.error) as error:
        return [str(error) or type(error).__name__]
    return found


def read_unused(files: Files, name: str, step: Step[T]) -> T:
    """Run ``step`` in one read transaction of an environment that is sound and nobody uses.

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


def rows(txn: Txn, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows of a transaction whose keys start with ``prefix``, in order."""
    with txn.cursor() as cursor:
        if not cursor.set_range(prefix):
            return
        for key, value in cursor:
            if not key.startswith(prefix):
                return
            yield key, value


def remove(txn: Txn, prefix: bytes) -> None:
    """Delete the rows whose keys start with ``prefix``."""
    for key in [key for key, _ in rows(txn, prefix)]:
        txn.delete(key)


# Forks: no transaction may be open while the process is copied, and the child
# may neither use nor reopen what it inherited before it has closed it.


def _before_fork() -> None:
    _table_lock.acquire()
    # `state` before `live`, as a checkpoint does, which reads the one in a write of the other.
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
    _table_lock = threading.Lock()
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
