"""The cruel twin of `Files`: it fails, writes short, kills, stops, and loses what was not synced.

>>> files = CruelFiles(root, record=True)                            # doctest: +SKIP
>>> files.fail_at(3, errno.ENOSPC, only={"write"}, forever=True)     # doctest: +SKIP
>>> ...work, and files.note(("acked", topic, partition, offset))...  # doctest: +SKIP
>>> for image in files.power_cut_states(limit=20_000, seed=1):       # doctest: +SKIP
...     materialise(image, directory, previous)
...     check(CruelFiles(directory, boot="another"), image.notes)

The record is that of one process; its threads may write at once.
"""

from __future__ import annotations

import os
import signal
import struct
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from embedlog.errors import DurabilityError, StorageError
from embedlog.files import Files
from support.power import (
    PAGE,
    ROOT,
    Commit,
    Enter,
    FailedSync,
    Forgotten,
    Image,
    Note,
    Recording,
    Remove,
    Rename,
    Sync,
    SyncDirectory,
    Tree,
    Truncate,
    Write,
    materialise,
    scratch_directory,
)

__all__ = ["OPERATIONS", "CruelFiles", "Image", "materialise", "scratch_directory"]

Result = TypeVar("Result")

CHANGES = frozenset(
    {"create", "write", "truncate", "sync", "sync_directory", "rename", "unlink", "mkdir", "rmdir"}
)
FALLIBLE = CHANGES | {"open", "read", "map", "list"}
OPERATIONS = FALLIBLE | {"lock", "unlock", "drop_cache"}
"""The names of the operations, as `only` takes them and `counts` has them."""

VOLATILE = frozenset({"live", "locks", "wake"})
"""First names of paths that belong to one boot: no state after a power cut has them whole."""


@dataclass(slots=True)
class Fault:
    """What happens once `left` operations of these kinds have passed."""

    left: int
    kinds: Collection[str]
    what: str
    number: int = 0
    forever: bool = False


class CruelFiles(Files):
    """`Files` with faults to order and, if asked for, a record of everything that changes.

    Args:
        boot: What `boot_id` returns instead of the kernel's, to be after a reboot.
        record: Whether to record for `power_cut_states`; what is in the root counts as synced.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        writable: bool = True,
        unsafe_filesystem: bool = False,
        boot: str | None = None,
        record: bool = False,
    ) -> None:
        super().__init__(root, writable=writable, unsafe_filesystem=unsafe_filesystem)
        self.counts: Counter[str] = Counter()
        self._boot = boot
        self._faults: list[Fault] = []
        self._mutex = threading.RLock()
        self._record = Record(self.root) if record else None

    def boot_id(self) -> str:
        return self._boot or super().boot_id()

    # Faults. `n` operations of the kinds in `only` pass from now on; the next one gets it.

    def fail_at(
        self,
        n: int,
        errno: int,
        forever: bool = False,
        only: Collection[str] = FALLIBLE,
    ) -> None:
        """Let an operation fail without doing anything, and with `forever` all after it."""
        self._faults.append(Fault(n, only, "error", errno, forever))

    def short_at(self, n: int, bytes: int) -> None:  # noqa: A002 - what is counted
        """Let a write do only its first so many bytes, and say so."""
        self._faults.append(Fault(n, ("write",), "short", bytes))

    def kill_at(self, n: int, when: str = "before", only: Collection[str] = OPERATIONS) -> None:
        """Kill this process before, after or in the middle of an operation (half a write)."""
        assert when in ("before", "middle", "after")
        self._faults.append(Fault(n, only, when))

    def stop_at(self, n: int, only: Collection[str] = OPERATIONS) -> None:
        """Stop this process (SIGSTOP) before an operation; SIGCONT lets it go on."""
        self._faults.append(Fault(n, only, "stop"))

    def heal(self) -> None:
        """Forget all faults that were ordered."""
        self._faults.clear()

    def count(self, only: Collection[str] = OPERATIONS) -> int:
        """Return how many operations of these kinds there were so far."""
        return sum(self.counts[kind] for kind in only)

    # The record

    def note(self, what: Any) -> None:
        """Put an event of the program, such as "acked", in the sequence of the record."""
        with self._mutex:
            record = self._recorded()
            record.poll()
            record.events.append(Note(what))

    def recording(self) -> Recording:
        """Return the record up to now; images can be made from it after the files are closed."""
        with self._mutex:
            record = self._recorded()
            record.poll()
            return Recording(
                record.first_tree,
                record.first_contents,
                list(record.events),
                sorted(record.volatile),
            )

    def power_cut_states(
        self, *, limit: int | None = None, seed: int = 0, per_cut: int = 24
    ) -> Iterator[Image]:
        """Yield distinct states of the disk after a power cut at any point of the record.

        For each prefix of the events: every combination of what may have become of the
        events that were not synced if there are few, else the corners and random ones.
        Without a limit at most `per_cut` for each prefix; with one, as many as that as
        long as there are new ones, shared evenly.  The same images for the same seed.
        Two images differ in the disk, or in the number of notes that preceded them.
        """
        return self.recording().states(limit, seed, per_cut)

    def _recorded(self) -> Record:
        assert self._record is not None, "CruelFiles(root, record=True) records"
        return self._record

    # Each operation: its fault, itself, its record

    def _fault(self, kind: str) -> Fault | None:
        """Count an operation and return the fault that hits it; kills "before" at once."""
        with self._mutex:
            self.counts[kind] += 1
            if self._record:
                self._record.poll()
            hit = None
            for fault in list(self._faults):
                if kind in fault.kinds:
                    fault.left -= 1
                    if fault.left < 0:
                        hit = hit or fault
                        if not fault.forever:
                            self._faults.remove(fault)
        if hit and (hit.what == "before" or (hit.what == "middle" and kind != "write")):
            os.kill(os.getpid(), signal.SIGKILL)
        if hit and hit.what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        return hit

    def _do(
        self,
        kind: str,
        where: int | str,
        call: Callable[[], Result],
        after: Callable[[Record, Result], None] | None = None,
    ) -> Result:
        fault = self._fault(kind)
        if fault and fault.what == "error":
            error = OSError(fault.number, os.strerror(fault.number))
            failed_sync = kind in ("sync", "sync_directory")
            raise self._failed(error, kind, where, DurabilityError if failed_sync else None)
        record = self._record
        if record is None or after is None:
            result = call()
        else:
            with self._mutex:
                result = call()
                after(record, result)
                record.poll()
        if fault and fault.what == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def open(
        self, path: str, *, write: bool = False, create: bool = False, exclusive: bool = False
    ) -> int:
        base = super()
        new = create and not self.exists(path)
        return self._do(
            "create" if new else "open",
            path,
            lambda: base.open(path, write=write, create=create, exclusive=exclusive),
            lambda record, fd: record.opened(fd, path),
        )

    def close(self, fd: int) -> None:
        if self._record:
            with self._mutex:
                self._record.inodes.pop(fd, None)
        super().close(fd)

    def _pwritev(  # type: ignore[override]
        self, fd: int, buffers: Sequence[Any], position: int
    ) -> int:
        fault = self._fault("write")
        if fault and fault.what == "error":
            raise OSError(fault.number, os.strerror(fault.number))
        if fault and fault.what in ("short", "middle"):
            whole = b"".join(map(bytes, buffers))
            buffers = [whole[: fault.number if fault.what == "short" else len(whole) // 2]]
        with self._mutex:
            written = os.pwritev(fd, buffers, position)
            if self._record and fd in self._record.inodes:
                data = b"".join(map(bytes, buffers))[:written]
                self._record.changed(fd, Write, position, data)
        if fault and fault.what in ("middle", "after"):
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    def read(self, fd: int, length: int, position: int) -> bytes:
        base = super()
        return self._do("read", fd, lambda: base.read(fd, length, position))

    def map(self, fd: int, length: int, *, write: bool = False) -> Any:
        base = super()
        return self._do("map", fd, lambda: base.map(fd, length, write=write))

    def truncate(self, fd: int, size: int) -> None:
        base = super()
        self._do(
            "truncate",
            fd,
            lambda: base.truncate(fd, size),
            lambda record, _: record.changed(fd, Truncate, size),
        )

    def sync(self, fd: int) -> None:
        base = super()
        record = self._record
        # What other threads write while the sync runs is not covered by it.
        with self._mutex:
            upto = len(record.events) if record else 0
            inode = record.inodes.get(fd) if record else None
        try:
            self._do("sync", fd, lambda: self._sync_if_real(base.sync, fd))
        except StorageError:
            if record and inode is not None:
                record.events.append(FailedSync(inode, upto))
            raise
        if record and inode is not None:
            record.events.append(Sync(inode, upto))

    def _sync_if_real(self, sync: Callable[[int], None], fd: int) -> None:
        """Skip the real sync while recording: the disk is a model then, and patience is short."""
        if self._record is None:
            sync(fd)

    def sync_directory(self, path: str) -> None:
        base = super()
        record = self._record
        with self._mutex:
            upto = len(record.events) if record else 0
            inode = record.find(path) if record else None
        self._do("sync_directory", path, lambda: base.list(path) if record else base_sync(path))
        if record and inode is not None:
            record.events.append(SyncDirectory(inode, upto))

    def drop_cache(self, fd: int) -> None:
        base = super()
        self._do(
            "drop_cache",
            fd,
            lambda: base.drop_cache(fd),
            lambda record, _: record.forget(fd),
        )

    def make_directory(self, path: str, exist_ok: bool = True) -> None:
        base = super()
        self._do(
            "mkdir",
            path,
            lambda: base.make_directory(path, exist_ok),
            lambda record, _: record.made_directory(path),
        )

    def remove_directory(self, path: str) -> None:
        base = super()
        self._do(
            "rmdir",
            path,
            lambda: base.remove_directory(path),
            lambda record, _: record.removed(path),
        )

    def list(self, path: str) -> list[str]:
        base = super()
        return self._do("list", path, lambda: base.list(path))

    def rename(self, old: str, new: str) -> None:
        base = super()
        self._do(
            "rename",
            old,
            lambda: base.rename(old, new),
            lambda record, _: record.renamed(old, new),
        )

    def unlink(self, path: str, missing_ok: bool = False) -> None:
        base = super()
        self._do(
            "unlink",
            path,
            lambda: base.unlink(path, missing_ok),
            lambda record, _: record.removed(path),
        )

    def lock(self, fd: int, timeout: float, shared: bool = False) -> None:
        self._fault("lock")
        super().lock(fd, timeout, shared)

    def unlock(self, fd: int) -> None:
        # Not under the record's mutex: whoever waits for the lock may hold it.
        fault = self._fault("unlock")
        super().unlock(fd)
        if fault and fault.what == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    def after_fork(self) -> None:
        self._record = None
        self._mutex = threading.RLock()
        super().after_fork()
