"""The door of LMDB: two small databases per log root, shared by every process.

`state` is synced at each commit and survives a power cut; `live` is not, and
belongs to one boot (design, section 2, idea 6).  Here live the rules learnt
about LMDB by experiment: one environment per process and root; transactions
that never outlive a call; a timed lock in front of every write, because an
LMDB writer that was stopped blocks everybody without a timeout; a map that
grows by itself; and what a fork must drop.

Lock order: the store's thread queue → its lock file → the LMDB transaction.
"""

from __future__ import annotations

import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import lmdb
import lmdb.verify

from embedlog.checksum import is_sealed
from embedlog.errors import (
    ClosedError,
    DiskFullError,
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
MAGIC_AND_FORMAT = 0x00000001_BEEFC0DE
LARGEST_CHECKED_BYTES = 16 << 30
"""A check takes 40 s for a GiB of rows, and two bytes of memory for a page, there or not."""
SMALL_PAGES = 1024
"""Leaving out the free pages of a copy takes LMDB a thread and 2 MiB, which costs 0.5 to 2 ms:
more than to write them all, up to here."""
LITTLE_SPACE = 16 << 20
"""LMDB reports a full disk as an I/O error: below this much free space we call it full."""

_environments: dict[_Key, _Environment] = {}
_table_lock = threading.Lock()
_stores: weakref.WeakSet[Store] = weakref.WeakSet()


class _Environment:
    """One LMDB environment, shared by all stores of this process on one root."""

    def __init__(self, key: _Key, path: str, durable: bool, writable: bool) -> None:
        self.key, self.path, self.durable, self.writable = key, path, durable, writable
        self.users = 0
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
            env.reader_check()
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
            self.handle.set_mapsize(size)

    def make_writable(self) -> None:
        """A handle that reads opened it first, one that writes joins: py-lmdb allows one only."""
        with self.writing, self.reading:
            if not self.writable:
                self.handle.close()
                self.writable = True
                self.handle = self._open()

    def adopt_growth(self) -> None:
        """Take the size that another process gave the map."""
        with self.writing, self.reading:
            self.handle.set_mapsize(0)


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
        self._pages: memoryview | None = None
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
        """Run ``step`` in one read transaction: a consistent view, never kept."""
        shared = self._shared or self._attach()
        for attempt in range(3):
            try:
                with shared.reading, shared.handle.begin() as txn:
                    return step(txn)
            except lmdb.MapResizedError:
                shared.adopt_growth()
            except lmdb.ReadersFullError as error:
                # Slots of killed readers stay taken until somebody looks.
                if attempt or not shared.handle.reader_check():
                    raise self._storage(error, "read") from error
            except lmdb.Error as error:
                raise self._storage(error, "read") from error
        raise StorageError("the map kept changing under a reader", path=self.path)

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

    def stands(self, version: int) -> bool:
        """Whether ``version`` is still the newest, with no commit on its way: a few loads.

        Then what was read under it may be acted on, as after `settle`.
        """
        pages = self._pages
        if pages is None or self._confirmed != version:
            return False
        return bool(pages[18] <= version >= pages[530])  # VERSION_PLACES

    def settle(self) -> None:
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
            StorageError: LMDB refused; nothing was changed.
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
        while True:
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
                    return result
            except lmdb.MapFullError:
                shared.grow()
            except lmdb.MapResizedError:
                shared.adopt_growth()
            except lmdb.Error as error:
                raise self._storage(error, "commit") from error

    def _storage(self, error: Exception, operation: str) -> StorageError | ClosedError:
        if self._closed:
            # By another thread, while this one was about to use it.
            return ClosedError("the log was closed", path=self.path)
        kind = DiskFullError if self._files.free_bytes() < LITTLE_SPACE else StorageError
        return kind(
            f"the database refused to {operation}: {error}",
            path=self.path,
            operation=operation,
            todo="nothing was changed; see `embedlog doctor`",
        )

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
        key = (self._name, *self._files.identity())
        with _table_lock:
            shared = _environments.get(key)
            if shared is None:
                try:
                    shared = _Environment(key, self.path, self._durable, self._files.writable)
                except (lmdb.Error, OSError) as error:
                    raise self._storage(error, "open") from error
                _environments[key] = shared
            elif self._files.writable:
                shared.make_writable()
            shared.users += 1
        self._shared = shared
        self._pages = self._meta_pages(shared)
        return shared

    def _meta_pages(self, shared: _Environment) -> memoryview | None:
        """Map the pages a commit ends in: two loads there are what `info` returns, for a tenth.

        A commit writes them through the page cache, so every process sees it at
        once.  None, and `info` is asked, where they are not as expected.
        """
        try:
            data = self._files.open(f"{self._name}/data.mdb")
            try:
                words = memoryview(self._files.map(data, META_BYTES)).cast("Q")
            finally:
                self._files.close(data)
        except StorageError:
            return None
        known = words[2] == words[514] == MAGIC_AND_FORMAT
        newest = max(words[place] for place in VERSION_PLACES)
        # Somebody may commit in between, so it may have grown by the second look.
        return words if known and newest <= shared.handle.info()["last_txnid"] else None

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
            shared, self._shared, self._pages = self._shared, None, None
            if shared is not None:
                _leave(shared)
        finally:
            if waited:
                self._queue.release()

    def sync(self) -> None:
        """Write an unsynced environment to the disk."""
        (self._shared or self._attach()).handle.sync(True)

    def readers(self) -> tuple[int, int]:
        """Return how many reader slots are taken, and how many there are."""
        info = (self._shared or self._attach()).handle.info()
        return info["num_readers"], info["max_readers"]

    def lagging(self) -> set[tuple[int, str, int]]:
        """Return process, thread and transaction of each reader of what is not the newest.

        What was freed since one of them began cannot be used again until it ends.
        """
        handle = (self._shared or self._attach()).handle
        newest = handle.info()["last_txnid"]
        # A table under one line of titles; "-" is a slot that nobody reads with.
        rows = [line.split() for line in handle.readers().splitlines()[1:]]
        found = {(int(row[0]), row[1], int(row[2])) for row in rows if row[-1].isdigit()}
        return {each for each in found if each[2] < newest}

    def check_readers(self) -> int:
        """Free the reader slots of dead processes; return how many there were."""
        freed: int = (self._shared or self._attach()).handle.reader_check()
        return freed

    def copy(self, name: str) -> None:
        """Write a copy, durably, into the existing directory ``name`` below the root.

        Only while nobody else writes: LMDB may wait for who does, without a timeout.

        Raises:
            StorageError: It is not there, or not whole.
        """
        shared = self._shared or self._attach()
        # LMDB would create the file for everybody to read.
        data = self._files.open(f"{name}/data.mdb", write=True, create=True)
        try:
            pages: int = shared.handle.info()["last_pgno"]
            shared.handle.copyfd(data, compact=pages > SMALL_PAGES)
            self._files.sync(data)
        except lmdb.Error as error:
            raise self._storage(error, "copy itself") from error
        finally:
            self._files.close(data)


def _number(txn: Txn) -> int:
    number: int = txn.id()
    return number


class Nothing:
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

    def cursor(self) -> Nothing:
        """As a transaction: a cursor over nothing."""
        return self

    def __enter__(self) -> Nothing:
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


def _leave(shared: _Environment) -> None:
    with _table_lock:
        shared.users -= 1
        if shared.users == 0 and _environments.get(shared.key) is shared:
            del _environments[shared.key]
            with shared.writing, shared.reading:
                shared.handle.close()


def create(files: Files, name: str, *, durable: bool, rows: dict[bytes, bytes]) -> None:
    """Build an environment aside and move it into place: LMDB's own creation is not crash safe."""
    aside = f"{name}.new"
    discard(files, aside)
    files.make_directory(aside)
    env = lmdb.open(files.path(aside), map_size=FIRST_MAP_BYTES, mode=0o600, sync=durable)
    try:
        with env.begin(write=True) as txn:
            for key, value in rows.items():
                txn.put(key, value)
    finally:
        env.close()
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
        found: list[str] = lmdb.verify.verify(path)  # type: ignore[no-untyped-call]
    except FileNotFoundError as error:
        return [str(error)]
    except OSError as error:
        what = f"the database cannot be checked: {error.strerror}"
        raise StorageError(what, errno=error.errno, operation="verify", path=path) from error
    except (lmdb.verify.VerifyError, struct.error) as error:
        return [str(error) or type(error).__name__]
    return found


def broken_seals(path: str) -> list[bytes]:
    """Return the keys of rows with a wrong seal, in an environment that is sound and nobody uses.

    All rows are looked at: one that got another key by damage is asked for by nobody.

    Raises:
        StorageError: It cannot be read for now.
    """
    try:
        with lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
            return [key for key, row in rows(txn, b"") if not is_sealed(row, key)]
    except lmdb.Error as error:
        what = f"the database cannot be read: {error}"
        raise StorageError(what, operation="verify", path=path) from error


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
        store._shared, store._lock, store._queue = None, None, threading.Lock()
        store._pages = None


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
