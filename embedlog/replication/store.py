"""`state` and `live` of a log over several directories: each write changes all of them at once.

A write takes the lock of the database in every directory that is online, in the order of
their ids, and has one transaction in each, with the same changes.  No transaction is committed
before all of them are ready, and the controller's is the first.  So a process that is killed in
between leaves some databases one write behind that one, by the number of the last write in each;
the next writer gives them all rows of the newest.

Reads go to the database of the controller.  If it breaks, its directory goes offline, and the
next one is read: `Controller.take_offline`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from embedlog import kv
from embedlog.errors import ClosedError, EmbedlogError, NotEnoughReplicasError, StorageError
from embedlog.keyspace import LIVE_EPOCHS, LIVE_VERSION, METADATA_EPOCHS
from embedlog.replication.directory import DATABASE_ERRORS, LogDirectory
from embedlog.replication.metadata import (
    DIRECTORIES,
    METADATA_VERSION,
    Epoch,
    note_epoch,
    put_epoch,
)

if TYPE_CHECKING:
    from embedlog.replication.controller import Controller

T = TypeVar("T")

EPOCH_BITS = 40
"""The numbers of transactions have fewer bits than this."""
_NUMBER = (1 << EPOCH_BITS) - 1
_VERSIONS: dict[str, Any] = {"state": METADATA_VERSION, "live": LIVE_VERSION}
"""The table with the version row of a database."""
_NONE: Mapping[int, Exception] = MappingProxyType({})
_PENDING: Any = object()
"""In place of the result of a write that must be tried again."""


class _UnevenError(Exception):
    """The databases do not have the same writes."""


class ReplicatedStore:
    """`state` or `live` in all directories; has the methods of `kv.Store`.

    Its versions grow from one controller to the next: they begin with the epoch.

    Args:
        controller: Says which directories are online, and takes broken ones offline.
        name: ``"state"`` or ``"live"``.
    """

    def __init__(self, controller: Controller, name: str) -> None:
        self._controller, self._name = controller, name
        self._version_key = _VERSIONS[name].key()
        self._state: ReplicatedStore | None = controller.state if name == "live" else None
        """That whose epoch must be confirmed before a write."""
        self.even_epoch = -1
        """The epoch in which all databases were found to have the same writes."""
        self._begun_epoch = -1
        """The newest epoch that was found in `live`, or is known to be confirmed in `state`."""
        self._written_epoch = 0
        """The newest epoch that a write of this object began."""

    @property
    def path(self) -> str:
        """The directory of the environment that is read."""
        return self._controller.directory.stores[self._name].path

    # Reading

    def get(self, key: bytes) -> bytes | None:
        """As `kv.LmdbStore.get`."""
        return self.get_at(key)[0]

    def get_at(self, key: bytes) -> tuple[bytes | None, int]:
        """As `kv.LmdbStore.get_at`."""
        row: bytes | None
        (row, number), base = self._read(lambda store, base: (store.get_at(key), base))
        return row, base | number

    def read(self, step: kv.Step[T]) -> T:
        """As `kv.LmdbStore.read`."""
        result: T = self._read(
            lambda store, base: store.read(lambda txn: step(_ReadTxn(txn, base)))
        )
        return result

    def version(self) -> int:
        """As `kv.LmdbStore.version`."""
        version: int = self._read(lambda store, base: base | store.version())
        return version

    def catch_up(self) -> None:
        """As `kv.LmdbStore.catch_up`."""
        self._read(lambda store, _: store.catch_up())

    def check_linked(self) -> None:
        """As `kv.LmdbStore.check_linked`."""
        self._read(lambda store, _: store.check_linked())

    def _read(self, question: Any) -> Any:
        while True:
            directory, base = self._controller.current().read_from
            try:
                return question(directory.stores[self._name], base)
            except (ClosedError, *DATABASE_ERRORS) as error:
                self._blame([directory], error)

    def is_current(self, version: int) -> bool:
        """As `kv.LmdbStore.is_current`."""
        controller = self._controller
        directory, base = controller.read_from
        if controller.moved() or version & ~_NUMBER != base:
            return False
        return directory.stores[self._name].is_current(version & _NUMBER)

    # Writing

    def write(
        self,
        step: kv.Step[T],
        timeout: float | None = None,
        *,
        without: Mapping[int, Exception] = _NONE,
    ) -> T:
        """Run ``step`` in one write transaction in every directory, and commit all of them.

        With ``without`` some directories are left out, which do not work, and which the step
        takes offline.

        Raises:
            NotEnoughReplicasError: Too few directories are online.
            LockTimeoutError: Another process holds a lock.
            DiskFullError, StorageError: The last directory refused; nothing was changed.
        """
        controller, state = self._controller, self._state
        while True:
            if state is not None and state._begun_epoch != controller.epoch:
                state.confirm_epoch()
            directories, held = self._online(without), list[kv.LmdbStore]()
            epoch, result, failed = controller.epoch, _PENDING, dict[int, Exception]()
            problem: EmbedlogError | None = None
            try:
                for directory in directories:
                    store = directory.stores[self._name]
                    store.acquire(timeout)
                    held.append(store)
                if self._are_online(directories, without) and (
                    state is None or state._begun_epoch == controller.epoch
                ):
                    result, failed = self._commit(directories, step)
            except (ClosedError, *DATABASE_ERRORS) as error:
                problem = error
            finally:
                for store in reversed(held):
                    store.release()
            if problem is not None:
                self._blame(directories, problem, without)
            if failed:
                controller.take_offline({**without, **failed})
                self._check_kept([each for each in directories if each.id not in failed])
            if self._written_epoch > epoch:
                controller.refresh()
                if not without:  # What it was asked to do must count, if the histories part.
                    self.confirm_epoch()
            if result is not _PENDING:
                return result  # type: ignore[no-any-return]

    @contextmanager
    def held(
        self, without: Mapping[int, Exception] = _NONE, returning: LogDirectory | None = None
    ) -> Iterator[tuple[LogDirectory, ...]]:
        """Hold the locks of writes; yields the directories, whose databases are equal.

        Args:
            without: Directories that do not work.
            returning: One that is not online, whose lock is held too, unless it has come online.
                It has its place in the order: for programs with older metadata it is online.

        Raises:
            NotEnoughReplicasError: Too few directories are online.
            StorageError, CorruptionError: Another one does not work either.
        """
        while True:
            directories = self._online(without)
            with ExitStack() as held:
                locks = {each.id: each for each in (returning, *directories) if each is not None}
                for _, directory in sorted(locks.items()):
                    held.enter_context(directory.held(self._name))
                if self._are_online(directories, without):
                    self._make_even(directories)
                    yield directories
                    return

    def write_held(
        self, directories: Sequence[LogDirectory], step: kv.Step[T], replaced: LogDirectory
    ) -> T:
        """As `write`, in directories whose locks are held; in all of them, or raise.

        ``replaced`` gets all rows of the others first, in the same transaction.
        """
        self.even_epoch = self._controller.image.epoch
        result, failed = self._commit(directories, step, replaced)
        for error in failed.values():
            raise error
        return result

    def make_even(self) -> None:
        """Give all directories the same writes, in both databases, with which each epoch begins.

        A write may have failed in the directory that is read since then, and be in another one.

        Raises:
            NotEnoughReplicasError: Too few directories can be written.
        """
        self.write(lambda _: None)

    def confirm_epoch(self) -> None:
        """Have `state` show that its epoch has begun in all directories: with one more write.

        A process that is killed, or a disk that fails, while an epoch begins may leave it in one
        directory only.  If the others go on without that one, it must not count as a history of
        its own; so nothing is done in an epoch before this.

        Raises:
            NotEnoughReplicasError: Too few directories can be written.
        """
        while (epoch := self._controller.epoch) != self._begun_epoch:
            self.write(self._confirm)
            self._begun_epoch = max(epoch, self._begun_epoch)

    def _confirm(self, txn: kv.Txn) -> None:
        """Count a write, unless there was one after that which began the epoch.

        If directories came online in it, this is the write by which they are known to have; it
        begins another epoch, so that all processes know.
        """
        version = METADATA_VERSION.get(txn)
        assert version is not None
        returned = [
            (key, info) for key, info in DIRECTORIES.scan(txn) if info.online and info.reason
        ]
        for key, info in returned:
            DIRECTORIES.put(txn, *key, value=info._replace(reason="", offline_since=0))
        if returned:
            epoch = self._controller.next_epoch(version.epoch)
            put_epoch(txn, epoch, version.controller_id)
            return
        row = METADATA_EPOCHS.get(txn, version.epoch)
        if row is not None and row.start == version.version:
            METADATA_VERSION.put(txn, value=version)

    def _online(self, without: Mapping[int, Exception]) -> tuple[LogDirectory, ...]:
        """Return the directories that a write must change.

        Raises:
            NotEnoughReplicasError: One of them, besides ``without``, cannot be opened.
        """
        controller = self._controller
        if controller.moved():
            controller.refresh(without)
        if not controller.unopened.keys() <= without.keys():
            controller.refresh(without)
        online = controller.online
        if without:
            online = tuple(each for each in online if each.id not in without)
        if not online:
            raise NotEnoughReplicasError(
                "None of the directories that are online can be used",
                todo="Bring one of them back.",
            )
        return online

    def _are_online(
        self, directories: tuple[LogDirectory, ...], without: Mapping[int, Exception]
    ) -> bool:
        """Whether a write must still change these directories; by the holder of the locks."""
        controller = self._controller
        # Not `current`, which may write.
        if controller.moved() and controller.is_stale():
            return False
        online = controller.online
        return directories is online or directories == tuple(
            each for each in online if each.id not in without
        )

    def _blame(
        self,
        directories: Sequence[LogDirectory],
        error: EmbedlogError,
        without: Mapping[int, Exception] = _NONE,
    ) -> None:
        """Take the directory offline whose database an error is of; raise it if it is another.

        A step may raise, too; then no database is to blame.
        """
        opened, name = self._controller.directories, self._name
        if isinstance(error, ClosedError):
            if all(opened.get(each.id) is each for each in directories):
                raise error
            return  # another thread found that it went offline, or came back
        path = f"{getattr(error, 'path', None)}/"
        for each in directories:
            root = each.files.root
            # The folder of the locks may be missing, too.
            if path == f"{root}/locks/" or path.startswith(
                (f"{root}/{name}/", f"{root}/locks/{name}/")
            ):
                self._controller.take_offline({**without, each.id: error})
                return
        raise error

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

    def _commit(
        self,
        directories: Sequence[LogDirectory],
        step: kv.Step[T],
        replaced: LogDirectory | None = None,
    ) -> tuple[T, dict[int, Exception]]:
        """Return the result, and the errors of directories that did not commit, by their ids."""
        image = self._controller.image
        controller, base = self._controller.read_from
        if replaced is not None or directories[0] is not controller:
            # The controller, which is read, commits first: none may be ahead of what the holder
            # of a partition's lock reads, or else it would write over what it does not see.
            # (It is missing while another one takes its place.)
            directories = sorted(
                directories, key=lambda each: (each is replaced, each is not controller)
            )
        key, name = self._version_key, self._name

        def run(txn: kv.FanOutTxn) -> T:
            if replaced is not None:
                txn.replace_last()
            row = txn.get(key)
            for other in txn.txns:
                if other.get(key) != row:
                    raise _UnevenError
            result = step(txn)
            if txn.changed:
                self._count_write(txn, row)
                if self._written_epoch > image.epoch:
                    # Before the commit: if this process is killed after it, the others must
                    # still notice that there is a new epoch.
                    for directory in directories:
                        directory.note_epoch(self._written_epoch)
            return result

        while True:
            if self.even_epoch != image.epoch:
                self._make_even(directories)
                self.even_epoch = image.epoch
            try:
                stores = [directory.stores[name] for directory in directories]
                result, errors = kv.transact_all(stores, run, base)
            except _UnevenError:
                self.even_epoch = -1
                continue
            if not errors:
                return result, {}
            return result, {directories[index].id: error for index, error in errors.items()}

    def _count_write(self, txn: kv.FanOutTxn, row: bytes | None) -> None:
        """Count a write in the version row, which was ``row`` before."""
        if self._name == "state":
            # The step may have begun an epoch in the row.
            version = METADATA_VERSION.get(txn)
            assert version is not None
            METADATA_VERSION.put(txn, value=version._replace(version=version.version + 1))
            self._written_epoch = version.epoch
            return
        number = 1 if row is None else LIVE_VERSION.load(self._version_key, row) + 1
        image = self._controller.image
        if self._begun_epoch != image.epoch:
            # The first write in an epoch.
            if LIVE_EPOCHS.exists(txn, image.epoch):
                self._begun_epoch = image.epoch
            else:
                note_epoch(LIVE_EPOCHS, txn, Epoch(image.epoch, image.epoch_id, number))
        LIVE_VERSION.put(txn, value=number)

    def _make_even(self, directories: Sequence[LogDirectory]) -> None:
        """Repeat the last write where a killed process could not make it any more.

        Raises:
            StorageError, CorruptionError: One cannot be used, or lacks more than the last write.
        """
        stores = [directory.stores[self._name] for directory in directories]
        # In write transactions: a reader may not see the last commit of a killed process yet.
        versions = [store.transact_locked(_VERSIONS[self._name].get) for store in stores]
        numbers = [0 if each is None else getattr(each, "version", each) for each in versions]
        newest = numbers.index(max(numbers))
        for store, version, number in zip(stores, versions, numbers, strict=True):
            if version == versions[newest]:
                continue
            if number != numbers[newest] - 1:
                raise StorageError(
                    "The directory lacks more than the last write",
                    path=store.path,
                    operation="read the version",
                )
            rows = stores[newest].transact_locked(lambda txn: list(txn.cursor()))
            store.transact_locked(partial(kv.replace_rows, rows))

    # Closing

    def close(self) -> None:
        """Close it in every directory."""
        for directory in list(self._controller.directories.values()):
            store = directory.stores.get(self._name)
            if store is not None:
                with suppress(EmbedlogError):
                    store.close()

    def is_whole(self) -> bool:
        """As `kv.LmdbStore.is_whole`, of the directories that are online."""
        return all(each.stores[self._name].is_whole() for each in self._controller.online)


class _ReadTxn:
    """A read transaction whose number is one of `ReplicatedStore.version`."""

    __slots__ = ("_base", "_txn", "cursor", "get", "stat")

    def __init__(self, txn: kv.Txn, base: int) -> None:
        self._txn, self._base = txn, base
        self.get, self.cursor, self.stat = txn.get, txn.cursor, txn.stat

    def id(self) -> int:
        return self._base | int(self._txn.id())
