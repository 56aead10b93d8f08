"""One directory of a log over several, as one process has it open."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple

from embedlog import catalog, kv
from embedlog.catalog import TopicInfo
from embedlog.errors import (
    ClosedError,
    CorruptionError,
    DurabilityError,
    EmbedlogError,
    LogDeletedError,
    ReplicasDivergedError,
    StorageError,
)
from embedlog.files import Files, WakePage
from embedlog.files.paths import FORMAT_FILE
from embedlog.files.shared_page import PAGE_BYTES, SharedPage
from embedlog.files.wake_page import WAKE_FILE
from embedlog.hints import Hint
from embedlog.keyspace import LIVE_EPOCHS, LIVE_VERSION, METADATA_EPOCHS, METADATA_VERSION
from embedlog.partition.tail import peek_tail
from embedlog.replication.metadata import DirectoryHistory, Epoch
from embedlog.root import startup
from embedlog.segment import SegmentFile, path_of

EPOCH_FILE = "epoch"
_ENTRIES = (FORMAT_FILE, "locks", "topics")
PROBE_FILE = ".probe"
"""Hidden: one that is written after the directory was emptied does not make it anything else."""
_BROKEN = frozenset(
    {
        *(errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.EUCLEAN),
        *(errno.ESHUTDOWN, errno.EREMOTEIO, errno.ENOTCONN, errno.EBADF),
        *(errno.ENOSPC, errno.EDQUOT),
    }
)
"""What the kernel says of a disk that is broken, gone, read-only or full."""
_ELSEWHERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM})
"""What it says of a file in a directory that is not mounted any more."""


class LogDirectory:
    """The files and the databases of one directory.

    Args:
        directory_id: Its number in the log.
        path: Where it is.
        files: Its files.
    """

    def __init__(self, directory_id: int, path: str, files: Files) -> None:
        self.id, self.path, self.files = directory_id, path, files
        self.opened_epoch = 0
        """The epoch in which it was opened: one that went offline and came back since must be
        opened again."""
        self.stores: dict[str, kv.LmdbStore] = {}
        """`state` and `live`, once they are open."""
        self.attachment = startup.Attachment(files)
        self._epoch_fd: int | None = None
        self._page: SharedPage | None = None
        self.epoch_page: memoryview | None = None
        """One number: the highest epoch that any process has noted here."""

    def __repr__(self) -> str:
        return f"<LogDirectory {self.id} {self.path}>"

    @property
    def state(self) -> kv.LmdbStore:
        """Its `state`."""
        return self.stores["state"]

    @property
    def live(self) -> kv.LmdbStore:
        """Its `live`."""
        return self.stores["live"]

    def open_stores(self, timeout: float, *, live: bool = True) -> None:
        """Open the databases and the epoch page.

        Raises:
            StorageError, CorruptionError: The directory cannot be used.
        """
        self.stores["state"] = kv.LmdbStore(self.files, "state", durable=True, timeout=timeout)
        if live:
            self.stores["live"] = kv.LmdbStore(self.files, "live", durable=False, timeout=timeout)
        writable = self.files.writable
        if writable and not self.files.exists(WAKE_FILE):
            # One that was never the controller's may be the only one that is left to read.
            WakePage(self.files).close()
        if writable or self.files.exists(EPOCH_FILE):
            self._epoch_fd = self.files.open(EPOCH_FILE, write=writable, create=writable)
            if writable and self.files.size(self._epoch_fd) < PAGE_BYTES:
                self.files.allocate(self._epoch_fd, PAGE_BYTES)
            self._page = SharedPage(self.files, self._epoch_fd)
            self.epoch_page = self._page.words[:8].cast("Q")

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Hold the lock of writes of a database."""
        store = self.stores[name]
        store.acquire()
        try:
            yield
        finally:
            store.release()

    def detach(self) -> None:
        """Close the databases and free the lock; files that are being read stay open."""
        for store in self.stores.values():
            store.close()
        if self._page is not None:
            self._page.release()
        self.attachment.close()

    # The epoch page

    def note_epoch(self, epoch: int) -> None:
        """Show all processes that there is a new epoch; a broken disk may refuse that.

        Written, not stored through the map: a store to a page of a broken disk is a SIGBUS.
        """
        fd = self._epoch_fd
        if fd is not None and self.epoch_page is not None and self.epoch_page[0] < epoch:
            with suppress(EmbedlogError):
                self.files.write(fd, [epoch.to_bytes(8, "little")], 0)

    # Whether it works

    def probe(self) -> None:
        """Write and flush a small file.

        Raises:
            StorageError: The directory cannot be written.
        """
        self.check_in_place()
        with self.files.opened(PROBE_FILE, write=True, create=True) as fd:
            self.files.write(fd, [b"embedlog"], 0)
            self.files.sync(fd)

    def works(self, *, probe: bool = True) -> bool:
        """Whether the directory is in place and complete, and with ``probe`` can be written."""
        try:
            if probe:
                self.probe()
            else:
                self.check_in_place()
        except StorageError:
            return False
        return True

    def is_in_place(self) -> bool:
        """Whether the path leads to this directory, as far as a broken disk lets that be seen."""
        try:
            return self.files.is_in_place()
        except StorageError:
            return True

    def lacks(self, epoch: int) -> bool:
        """Whether its `state` lacks an epoch, as far as a broken disk lets that be seen."""
        with suppress(*DATABASE_ERRORS, ClosedError):
            version = METADATA_VERSION.get(self.state)
            return version is None or version.epoch < epoch
        return False

    def check_in_place(self) -> None:
        """Raise if the path does not lead to this directory any more, or it was emptied.

        Raises:
            StorageError: It was unmounted, moved, deleted or emptied.
        """
        gone = ""
        if not self.files.is_in_place():
            gone = "The directory is not mounted any more, or was moved"
        elif not all(map(self.files.exists, _ENTRIES)):
            gone = "The files of the directory were deleted"
        if gone:
            raise StorageError(gone, errno=errno.ENOENT, operation="look up", path=self.path)

    def is_broken_by(self, error: Exception) -> bool:
        """Whether an error of a file operation says that the whole directory cannot be used."""
        if isinstance(error, (DurabilityError, LogDeletedError)):
            return True
        if not isinstance(error, StorageError):
            return False
        if error.errno == errno.ENOMEM:
            return not self.works()
        return error.errno in _BROKEN or (error.errno in _ELSEWHERE and not self.works(probe=False))

    def close(self) -> None:
        """Close the databases and all files."""
        self.epoch_page = self._epoch_fd = None
        self.detach()
        self.files.close_all()


DATABASE_ERRORS = (StorageError, CorruptionError)
"""What a database raises that its directory is given up for."""


def describe(error: Exception) -> str:
    """Return why a directory is offline, in one line."""
    number = getattr(error, "errno", None)
    name = errno.errorcode.get(number, "") if number else ""
    text = getattr(error, "what", None) or str(error)
    return f"{name}: {text}" if name else text


# What two directories have


def histories(directory: LogDirectory) -> tuple[DirectoryHistory, ...]:
    """Return the histories of `state`, and of `live` since the boot, if that is open."""
    state = directory.state.read(lambda txn: _load(METADATA_EPOCHS, METADATA_VERSION, txn))
    if "live" not in directory.stores:
        return (state,)
    return state, directory.live.read(lambda txn: _load(LIVE_EPOCHS, LIVE_VERSION, txn))


def _load(epochs: Any, versions: Any, txn: kv.Txn) -> DirectoryHistory:
    version = versions.get(txn)
    return DirectoryHistory(
        tuple(Epoch(number, *row) for (number,), row in epochs.scan(txn)),
        0 if version is None else getattr(version, "version", version),
    )


def extra_writes(directory: LogDirectory, other: LogDirectory) -> int:
    """Return how many acknowledged writes a directory has that another one lacks.

    Without locks: the other one is read later, so it has what was written to both meanwhile.
    """
    mine = histories(directory)
    return sum(ours.extra(theirs) for ours, theirs in zip(mine, histories(other), strict=False))


def diverged(first: LogDirectory, second: LogDirectory) -> ReplicasDivergedError:
    """Return the error of two directories of which each has what the other lacks.

    Its notes have their epochs, and where these begin.
    """
    mine, theirs = _partitions(first), _partitions(second)
    own = {
        name: _own_records(mine.get(name, _NO_RECORDS), theirs.get(name, _NO_RECORDS))
        # The log's own topics last.
        for name in sorted(mine.keys() | theirs.keys(), key=lambda name: name.replace("_", "~"))
    }
    each = [f"{name} {count} and {other}" for name, (count, other) in own.items() if count or other]
    if each:
        totals = map(sum, zip(*own.values(), strict=True))
        has = "{} and {} records that the other lacks".format(*totals)
        has += f" ({'; '.join(each[:5])}{'; ...' if len(each) > 5 else ''})"
    else:
        has = (
            f"{extra_writes(first, second)} and {extra_writes(second, first)} changes of their own "
            "besides equal records"
        )
    error = ReplicasDivergedError(
        f"{first.path} and {second.path} were each written to without the other: they have {has}",
        todo="Decide which one counts, and remove the other."
        + Hint(
            f"Open {first.path} and call log.replicas.remove({second.path!r}, force=True), or the "
            "other way round.",
            f"Run `embedlog --root {first.path} replicas remove --force {second.path}`, or the "
            "other way round.",
        )
        + "Then move its files away, and add it again.",
    )
    pairs = zip(("state", "live"), histories(first), histories(second), strict=False)
    for name, one, two in pairs:
        error.add_note(f"{name}: {one.beyond(two)}; and {two.beyond(one)}")
    return error


class _Records(NamedTuple):
    """What a directory has of a partition."""

    epochs: list[tuple[int, int]]
    """The leader epochs, and their first offsets."""
    end: int


_NO_RECORDS = _Records([], 0)


def _own_records(mine: _Records, theirs: _Records) -> tuple[int, int]:
    """Return how many offsets each of two has above that at which they part."""
    shared = 0
    while mine.epochs[shared : shared + 1] == theirs.epochs[shared : shared + 1] != []:
        shared += 1
    after = [start for each in (mine, theirs) for _, start in each.epochs[shared : shared + 1]]
    parted = min(mine.end, theirs.end, *after)
    return mine.end - parted, theirs.end - parted


def _partitions(directory: LogDirectory) -> dict[str, _Records]:
    """Return what a directory has of each partition."""
    return {
        f"{topic.name}-{number}": _records(directory, topic, number)
        for topic in directory.state.read(lambda txn: list(catalog.topics(txn)))
        for number in range(topic.partitions)
    }


def _records(directory: LogDirectory, topic: TopicInfo, number: int) -> _Records:
    key = topic.key(number)
    epochs, segments = directory.state.read(
        lambda txn: (catalog.epochs(txn, key), catalog.segments(txn, key))
    )
    tail = peek_tail(directory.live, key) if "live" in directory.stores else None
    end = 0 if tail is None else tail.log_end_offset
    if tail is None and segments:
        # It is not recovered since the boot.
        last = segments[-1]
        end, path = last.base_offset, path_of(topic.directory, number, last.file_name)
        with (
            suppress(CorruptionError, StorageError),
            closing(SegmentFile(directory.files, path)) as file,
        ):
            for batch in file.heads(file.start, file.size()):
                end = batch.next_offset
    return _Records(epochs, end)
