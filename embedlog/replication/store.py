"""`state` and `live` of a log over several directories: each write changes all of them at once.

A write takes the lock of the database in every directory that is online, in the order of
their ids, runs in the database of the controller, and repeats the rows that it changed in the
others.  No transaction is committed before all of them are ready, and the controller's is the
first.  So a process that is killed in between leaves some databases one write behind that one;
the next writer makes up for that, from the changes that each write leaves in its version row.

Reads go to the database of the controller.  If it breaks, its directory goes offline, and the
next one is read: `Controller.take_offline`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from embedlog import kv
from embedlog.errors import ClosedError, EmbedlogError, NotEnoughReplicasError, StorageError
from embedlog.keyspace import LIVE_EPOCHS, LIVE_VERSION
from embedlog.replication.directory import DATABASE_ERRORS, LogDirectory
from embedlog.replication.history import Epoch, put_epoch
from embedlog.replication.metadata import (
    METADATA_VERSION,
    MetadataImage,
    pack_changes,
    unpack_changes,
)

T = TypeVar("T")

EPOCH_BITS = 40
"""The numbers of transactions have fewer bits than this."""
_NUMBER = (1 << EPOCH_BITS - 1) - 1
_VERSIONS: dict[str, Any] = {"state": METADATA_VERSION, "live": LIVE_VERSION}
"""The table with the version row of a database."""


class _UnevenError(Exception):
    """The databases do not have the same writes."""


class OpenDirectories(Protocol):
    """What is needed of a `Controller`."""

    directories: dict[int, LogDirectory]
    online: tuple[LogDirectory, ...]
    directory: LogDirectory
    unopened: Mapping[int, Exception]
    image: MetadataImage
    epoch: int
    read_from: tuple[LogDirectory, int]

    def current(self) -> Self:
        """As `Controller.current`."""

    def moved(self) -> bool:
        """As `Controller.moved`."""

    def is_stale(self) -> bool:
        """As `Controller.is_stale`."""

    def refresh(self) -> None:
        """As `Controller.refresh`."""

    def take_offline(self, failed: Mapping[int, Exception]) -> None:
        """As `Controller.take_offline`."""


class ReplicatedStore:
    """`state` or `live` in all directories; has the methods of `kv.Store`.

    Its versions grow from one controller to the next: they begin with the epoch.

    Args:
        controller: Says which directories are online, and takes broken ones offline.
        name: ``"state"`` or ``"live"``.
    """

    def __init__(self, controller: OpenDirectories, name: str) -> None:
        self._controller, self._name = controller, name
        self._version_key = _VERSIONS[name].key()
        self._even_epoch = -1
        """The epoch in which all databases were found to have the same writes."""
        self._begun_epoch = -1
        """The newest epoch that was found in `live`."""
        self._written_epoch = 0
        """The newest epoch that a write of this object began."""

    @property
    def path(self) -> str:
        """The directory of the environment that is read."""
        return self._controller.directory.stores[self._name].path

    # Reading

    def get(self, key: bytes) -> bytes | None:
        """As `kv.Store.get`."""
        return self.get_at(key)[0]

    def get_at(self, key: bytes) -> tuple[bytes | None, int]:
        """As `kv.Store.get_at`."""
        row: bytes | None
        (row, number), base = self._read_from_controller(
            lambda store, base: (store.get_at(key), base)
        )
        return row, base | number

    def read(self, step: kv.Step[T]) -> T:
        """As `kv.Store.read`."""
        result: T = self._read_from_controller(
            lambda store, base: store.read(lambda txn: step(_ReadTxn(txn, base)))
        )
        return result

    def _read_from_controller(self, question: Any) -> Any:
        while True:
            directory, base = self._controller.current().read_from
            store = directory.stores[self._name]
            try:
                return question(store, base)
            except ClosedError:
                # Another thread found that it went offline, or came back.
                if self._controller.directories.get(directory.id) is directory:
                    raise
            except DATABASE_ERRORS as error:
                # A step may raise too; then the database is not to blame.
                if getattr(error, "path", None) not in (store.path, f"{store.path}/data.mdb"):
                    raise
                self._controller.take_offline({directory.id: error})

    def version(self) -> int:
        """As `kv.Store.version`."""
        version: int = self._read_from_controller(lambda store, base: base | store.version())
        return version

    def is_current(self, version: int) -> bool:
        """As `kv.Store.is_current`."""
        controller = self._controller
        directory, base = controller.read_from
        if controller.moved() or version & ~_NUMBER != base:
            return False
        return directory.stores[self._name].is_current(version & _NUMBER)

    def catch_up(self) -> None:
        """As `kv.Store.catch_up`."""
        self._read_from_controller(lambda store, _: store.catch_up())

    def check_linked(self) -> None:
        """As `kv.Store.check_linked`."""
        controller = self._controller
        directory = controller.current().directory
        try:
            directory.stores[self._name].check_linked()
        except StorageError as error:
            controller.take_offline({directory.id: error})

    # Writing

    def write(self, step: kv.Step[T], timeout: float | None = None) -> T:
        """Run ``step`` in one write transaction, and repeat its changes in every directory.

        Raises:
            NotEnoughReplicasError: Too few directories are online.
            LockTimeoutError: Another process holds a lock.
            DiskFullError, StorageError: The last directory refused; nothing was changed.
        """
        while True:
            failed: dict[int, Exception] = {}
            directories = self._online()
            result: list[T] = []
            stores = [directory.stores[self._name] for directory in directories]
            held = self._acquire(directories, stores, timeout, failed)
            try:
                if len(held) == len(stores) and self._are_online(directories):
                    result = self._commit(directories, step, failed)
            finally:
                for store in reversed(held):
                    store.release()
            if failed:
                self._controller.take_offline(failed)
                if result:
                    self._check_kept([each for each in directories if each.id not in failed])
            if self._written_epoch > self._controller.epoch:
                self._controller.refresh()
            if result:
                return result[0]

    def _online(self, without: Collection[int] = ()) -> tuple[LogDirectory, ...]:
        """Return the directories that a write must change.

        Raises:
            NotEnoughReplicasError: One of them, besides ``without``, cannot be opened.
        """
        controller = self._controller.current()
        if controller.unopened and not controller.unopened.keys() <= set(without):
            controller.refresh()
        return controller.online

    def _are_online(self, directories: tuple[LogDirectory, ...]) -> bool:
        """Whether these are still the directories that are online; by the holder of the locks."""
        # Not `current`, which may write.
        return not self._controller.is_stale() and directories is self._controller.online

    def _check_kept(self, committed: Sequence[LogDirectory]) -> None:
        """Raise if none of the directories that have a write is online any more.

        Another process may have replaced them, by one that came back, before it knew of the
        write.
        """
        online = self._controller.current().online
        if not any(each in online for each in committed):
            raise NotEnoughReplicasError(
                "The directories failed that had the change, one after the other",
                todo="Try again: it may not be known whether the change was made.",
            )

    @contextmanager
    def held(self, without: Collection[int] = ()) -> Iterator[tuple[LogDirectory, ...]]:
        """Hold the locks of writes; yields the directories, whose databases are equal.

        Args:
            without: Directories that do not work.

        Raises:
            NotEnoughReplicasError: Too few directories are online.
            StorageError, CorruptionError: With ``without``, another one does not work either.
        """
        while True:
            failed: dict[int, Exception] = {}
            online = self._online(without)
            directories = tuple(each for each in online if each.id not in without)
            if not directories:
                raise NotEnoughReplicasError(
                    "None of the directories that are online can be used",
                    todo="Bring one of them back.",
                )
            stores = [directory.stores[self._name] for directory in directories]
            held = self._acquire(directories, stores, None, failed)
            try:
                if len(held) == len(stores) and self._are_online(online):
                    self._make_even(directories, stores, failed)
                    if not failed:
                        yield directories
                        return
            finally:
                for store in reversed(held):
                    store.release()
            if failed and without:
                raise next(iter(failed.values()))
            if failed:
                self._controller.take_offline(failed)

    def write_held(
        self,
        directories: Sequence[LogDirectory],
        step: kv.Step[T],
        failed: dict[int, Exception],
        *,
        replaced: LogDirectory,
    ) -> list[T]:
        """As `write`, in directories whose locks are held; the result in a list, or none.

        One of them gets all rows of the others first, in the same transaction.
        """
        self._even_epoch = self._controller.image.epoch
        return self._commit(directories, step, failed, replaced)

    def _acquire(
        self,
        directories: Sequence[LogDirectory],
        stores: Sequence[kv.Store],
        timeout: float | None,
        failed: dict[int, Exception],
    ) -> list[kv.Store]:
        held: list[kv.Store] = []
        try:
            for directory, store in zip(directories, stores, strict=True):
                try:
                    store.acquire(timeout)
                    held.append(store)
                except ClosedError:
                    if self._controller.directories.get(directory.id) is directory:
                        raise
                    break
                except StorageError as error:
                    failed[directory.id] = error
                    break
        except BaseException:
            for store in reversed(held):
                store.release()
            raise
        return held

    def _commit(
        self,
        directories: Sequence[LogDirectory],
        step: kv.Step[T],
        failed: dict[int, Exception],
        replaced: LogDirectory | None = None,
    ) -> list[T]:
        """Return the result in a list, which is empty if the write must be tried again."""
        image = self._controller.image
        controller, base = self._controller.read_from
        # The controller, which is read, commits first: none may be ahead of what the holder of a
        # partition's lock reads, or else it would write over what it does not see.  (It is
        # missing while another one takes its place.)
        directories = sorted(
            directories, key=lambda each: (each is replaced, each is not controller)
        )
        stores = [directory.stores[self._name] for directory in directories]
        key = self._version_key

        def run(txn: kv.FanOutTxn) -> T:
            if replaced is not None:
                txn.replace_last()
            row, *others = [each.get(key) for each in txn.txns]
            if any(other != row for other in others):
                raise _UnevenError
            result = step(txn)
            if txn.changes:
                self._put_version(txn, row)
                if self._written_epoch > image.epoch:
                    # Before the commit: if this process is killed after it, the others must
                    # still notice that there is a new epoch.
                    for directory in directories:
                        directory.note_epoch(self._written_epoch)
            return result

        try:
            if self._even_epoch != image.epoch:
                self._make_even(directories, stores, failed)
                if failed:
                    return []
                self._even_epoch = image.epoch
            result, errors = kv.transact_all(stores, run, base)
        except _UnevenError:
            self._even_epoch = -1
            return []
        except kv.StoreError as error:
            failed[directories[error.index].id] = error.error
            return []
        failed.update({directories[index].id: error for index, error in errors.items()})
        return [result]

    def _put_version(self, txn: kv.FanOutTxn, row: bytes | None) -> None:
        """Write the version row after a write: its number, and what it changed."""
        if self._name == "live":
            before = 0 if row is None else LIVE_VERSION.load(self._version_key, row).version
            self._put_live_epoch(txn, before + 1)
            LIVE_VERSION.put(txn, value=(before + 1, pack_changes(txn.changes)))
            return
        # The step may have written a new epoch to the row.
        key = self._version_key
        current = txn.changes.pop(key, None) or row
        assert current is not None
        version = METADATA_VERSION.load(key, current)
        changed = version._replace(version=version.version + 1, changes=b"")
        changed = changed._replace(changes=pack_changes(txn.changes))
        METADATA_VERSION.put(txn, value=changed)
        self._written_epoch = changed.epoch

    def _put_live_epoch(self, txn: kv.FanOutTxn, number: int) -> None:
        """Note the present epoch, if this write is the first one in it."""
        image = self._controller.image
        if self._begun_epoch != image.epoch:
            if LIVE_EPOCHS.exists(txn, image.epoch):
                self._begun_epoch = image.epoch
            else:
                put_epoch(LIVE_EPOCHS, txn, Epoch(image.epoch, image.epoch_id, number))

    def _make_even(
        self,
        directories: Sequence[LogDirectory],
        stores: Sequence[kv.Store],
        failed: dict[int, Exception],
    ) -> None:
        """Repeat the last write where a killed process could not make it any more."""
        # In write transactions: a reader may not see the last commit of a killed process yet.
        rows = {}
        for directory, store in zip(directories, stores, strict=True):
            try:
                rows[directory.id] = store.transact_locked(lambda txn: txn.get(self._version_key))
            except DATABASE_ERRORS as error:
                failed[directory.id] = error
        versions = {each: version_of(self._name, row) for each, row in rows.items()}
        newest = max(versions, key=lambda each: versions[each], default=None)
        if newest is None:
            return
        for directory, store in zip(directories, stores, strict=True):
            if directory.id in failed or rows[directory.id] == rows[newest]:
                continue
            if versions[directory.id] != versions[newest] - 1:
                failed[directory.id] = StorageError(
                    "The directory lacks more than the last write",
                    path=store.path,
                    operation="read the version",
                )
                continue
            row = rows[newest]
            assert row is not None
            try:
                store.transact_locked(partial(self._repeat, row))
            except DATABASE_ERRORS as error:
                failed[directory.id] = error

    def _repeat(self, row: bytes, txn: kv.Txn) -> None:
        """Make the changes of a write from its version row."""
        version = _VERSIONS[self._name].load(self._version_key, row)
        for key, value in unpack_changes(version.changes).items():
            if value is None:
                txn.delete(key)
            else:
                txn.put(key, value)
        txn.put(self._version_key, row)

    # The database that is read

    def close(self) -> None:
        """Close it in every directory."""
        for directory in list(self._controller.directories.values()):
            store = directory.stores.get(self._name)
            if store is not None:
                with suppress(EmbedlogError):
                    store.close()

    def is_whole(self) -> bool:
        """As `kv.Store.is_whole`, of the directories that are online."""
        return all(each.stores[self._name].is_whole() for each in self._controller.online)

    def sync(self) -> None:
        """As `kv.Store.sync`."""
        self._read_from_controller(lambda store, _: store.sync())

    def readers(self) -> tuple[int, int]:
        """As `kv.Store.readers`."""
        counts: tuple[int, int] = self._read_from_controller(lambda store, _: store.readers())
        return counts

    def lagging(self) -> set[tuple[int, str, int]]:
        """As `kv.Store.lagging`."""
        readers: set[tuple[int, str, int]] = self._read_from_controller(
            lambda store, _: store.lagging()
        )
        return readers

    def check_readers(self) -> int:
        """As `kv.Store.check_readers`."""
        return sum(each.stores[self._name].check_readers() for each in self._controller.online)

    def copy(self, name: str) -> None:
        """As `kv.Store.copy`."""
        self._read_from_controller(lambda store, _: store.copy(name))


class _ReadTxn:
    """A read transaction whose number is one of `ReplicatedStore.version`."""

    __slots__ = ("_base", "_txn", "cursor", "get", "stat")

    def __init__(self, txn: kv.Txn, base: int) -> None:
        self._txn, self._base = txn, base
        self.get, self.cursor, self.stat = txn.get, txn.cursor, txn.stat

    def id(self) -> int:
        return self._base | int(self._txn.id())


def version_of(name: str, row: bytes | None) -> int:
    """Return how many writes a database has, by its version row."""
    if row is None:
        return 0
    table = _VERSIONS[name]
    version: int = table.load(table.key(), row).version
    return version
