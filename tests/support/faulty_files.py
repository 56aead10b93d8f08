"""`Files` with faults: operations that fail, write short, kill or stop the process, or are lost.

>>> files = FaultyFiles(root, record=True)                            # doctest: +SKIP
>>> files.fail_at(3, errno.ENOSPC, only={"write"}, forever=True)     # doctest: +SKIP
>>> ...work, and files.note(("acked", topic, partition, offset))...  # doctest: +SKIP
>>> for image in files.power_cut_states(limit=20_000, seed=1):       # doctest: +SKIP
...     materialise(image, directory, previous)
...     check(FaultyFiles(directory, boot="another"), image.notes)

The record is that of one process; its threads may write at once.
"""

from __future__ import annotations

import itertools
import os
import signal
import struct
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from embedlog.errors import DurabilityError, StorageError
from embedlog.files import Files
from support.power_cut import (
    PAGE,
    ROOT,
    Commit,
    DiskModel,
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

__all__ = ["OPERATIONS", "FaultyFiles", "Image", "materialise", "scratch_directory"]

Result = TypeVar("Result")

TXNID = 144
"""Where an LMDB meta page has the number of its transaction; pages 0 and 1 are the meta pages."""

CHANGES = frozenset(
    {
        *("create", "write", "truncate", "allocate", "sync", "sync_directory"),
        *("rename", "unlink", "mkdir", "rmdir"),
    }
)
FALLIBLE = CHANGES | {"open", "read", "map", "list"}
OPERATIONS = FALLIBLE | {"lock", "unlock", "drop_cache"}
"""The names of the operations, as `only` takes them and `counts` has them."""

VOLATILE = frozenset({"live", "locks", "reserve", "staging", "wake"})
"""First names of paths that hold nothing after a power cut: no state after one has them whole."""


@dataclass(slots=True)
class Fault:
    """What happens once `left` operations of these kinds have passed."""

    left: int
    kinds: Collection[str]
    what: str
    number: int = 0
    forever: bool = False
    part: float = 0.5
    """How much of a write is done before a kill in the middle of it."""


@dataclass(slots=True)
class Environment:
    """An LMDB file as it was after its last commit; the descriptor follows it through renames."""

    fd: int
    inode: int
    content: bytes
    transaction: int

    def last_transaction(self) -> int:
        """The number of the last transaction that is in the file, -1 before the first."""
        numbers = [os.pread(self.fd, 8, page * PAGE + TXNID) for page in (0, 1)]
        return max(
            (struct.unpack("<Q", number)[0] for number in numbers if len(number) == 8), default=-1
        )

    def commit(self, transaction: int) -> Commit:
        """What changed since the last commit that was seen."""
        old, new = self.content, os.pread(self.fd, os.fstat(self.fd).st_size, 0)
        pages = {
            start // PAGE: new[start : start + PAGE]
            for start in range(0, len(new), PAGE)
            if new[start : start + PAGE] != old[start : start + PAGE]
        }
        # LMDB keeps the pages of a transaction from the next two only.
        skipped = transaction - self.transaction > 2 and self.transaction >= 0
        self.content, self.transaction = new, transaction
        return Commit(self.inode, pages, len(new), skipped)


class Record:
    """The names as they are now, and all that happened to them and to the bytes of the files."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.events: list[Any] = []
        self.volatile: set[str] = set()
        self.inodes: dict[int, int] = {}
        self.tree: Tree = {ROOT: {}}
        self.first_contents: dict[int, bytes] = {}
        self._numbers = itertools.count(ROOT + 1)
        self._environments: dict[int, Environment] = {}
        self._load(ROOT, "")
        self.first_tree: Tree = {inode: dict(names) for inode, names in self.tree.items()}
        self.poll()

    def _load(self, directory: int, prefix: str) -> None:
        for entry in sorted(os.scandir(f"{self.root}/{prefix}"), key=lambda entry: entry.name):
            path = prefix + entry.name
            if is_volatile(path):
                self._load_volatile(path)
                continue
            inode = self.tree[directory][entry.name] = next(self._numbers)
            if entry.is_dir(follow_symlinks=False):
                self.tree[inode] = {}
                self._load(inode, f"{path}/")
            elif entry.name != "lock.mdb":
                self.first_contents[inode] = Path(entry.path).read_bytes()
            else:
                del self.tree[directory][entry.name]

    def _load_volatile(self, path: str) -> None:
        if path == "locks":
            self.volatile.update(f"locks/{name}" for name in os.listdir(f"{self.root}/locks"))
        elif path == "wake":
            self.volatile.add(path)

    # Names

    def find(self, path: str) -> int | None:
        """Return the inode of a path, None if the record does not know it."""
        inode: int | None = ROOT
        for part in path.split("/") if path else ():
            inode = self.tree.get(inode, {}).get(part) if inode is not None else None
        return inode

    def _adopt(self, path: str) -> int:
        """Return the inode of a path; what others made is entered now, and not synced."""
        inode = self.find(path)
        if inode is not None:
            return inode
        parent, _, name = path.rpartition("/")
        directory = self._adopt(parent)
        inode = self.tree[directory][name] = next(self._numbers)
        real = f"{self.root}/{path}"
        self.events.append(Enter(directory, name, inode, os.path.isdir(real)))
        if os.path.isdir(real):
            self.tree[inode] = {}
        elif data := Path(real).read_bytes():
            self.events.append(Write(inode, 0, data))
        return inode

    def opened(self, fd: int, path: str) -> None:
        if path.endswith("/lock.mdb"):
            return  # the first process to open the log deletes it, whatever it is
        if not is_volatile(path):
            self.inodes[fd] = self._adopt(path)
        elif not path.startswith(("live", "staging")):
            self.volatile.add(path)

    def made_directory(self, path: str) -> None:
        if not is_volatile(path):
            self._adopt(path)

    def removed(self, path: str) -> None:
        inode = self.find(path)
        if inode is not None:
            parent, _, name = path.rpartition("/")
            directory = self._adopt(parent)
            del self.tree[directory][name]
            self.events.append(Remove(directory, name, inode))

    def renamed(self, old: str, new: str) -> None:
        if is_volatile(new):
            self.removed(old)
            return
        inode = self.find(old)
        if inode is None:
            self._adopt(new)
            return
        parent, _, name = old.rpartition("/")
        new_parent, _, new_name = new.rpartition("/")
        directory, new_directory = self._adopt(parent), self._adopt(new_parent)
        del self.tree[directory][name]
        self.tree[new_directory][new_name] = inode
        self.events.append(Rename(directory, name, new_directory, new_name, inode))

    # Bytes

    def changed(self, fd: int, kind: Callable[..., Any], *what: Any) -> None:
        inode = self.inodes.get(fd)
        if inode is not None:
            self.events.append(kind(inode, *what))

    def forget(self, fd: int) -> None:
        """Lose what a failed sync left in doubt: the file itself reads as zeros there."""
        inode = self.inodes.get(fd)
        if inode is None or not any(
            isinstance(event, FailedSync) and event.inode == inode for event in self.events
        ):
            return
        self.events.append(Forgotten(inode))
        disk = DiskModel({}, dict(self.first_contents))
        for index, event in enumerate(self.events):
            if getattr(event, "inode", None) == inode and not isinstance(event, Enter | Rename):
                disk.play(index, event)
        content = disk.content(inode)
        real = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        os.pwrite(real, content, 0)
        os.close(real)

    # LMDB

    def end(self) -> int:
        """How many events there are, with the commits that LMDB has made."""
        self.poll()
        return len(self.events)

    def poll(self) -> None:
        """Record the commits that LMDB has made since the last look."""
        for name, directory in list(self.tree[ROOT].items()):
            if name.startswith("state") and directory in self.tree:
                environment = self._environment(directory, f"{self.root}/{name}/data.mdb")
                if environment:
                    transaction = environment.last_transaction()
                    if transaction != environment.transaction:
                        self.events.append(environment.commit(transaction))

    def _environment(self, directory: int, path: str) -> Environment | None:
        existing = self._environments.get(directory)
        inode = self.tree[directory].get("data.mdb")
        if existing and existing.inode == inode:
            return existing
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if inode is None:
            inode = self.tree[directory]["data.mdb"] = next(self._numbers)
            self.events.append(Enter(directory, "data.mdb", inode))
            environment = Environment(fd, inode, b"", -1)
        else:
            environment = Environment(fd, inode, os.pread(fd, os.fstat(fd).st_size, 0), -1)
            environment.transaction = environment.last_transaction()
        self._environments[directory] = environment
        return environment

    def close(self) -> None:
        """Close the LMDB files; not before LMDB did, which would lose its locks."""
        while self._environments:
            os.close(self._environments.popitem()[1].fd)


def is_volatile(path: str) -> bool:
    first = path.partition("/")[0]
    return first.replace("-", ".").partition(".")[0] in VOLATILE


def _with_faults(
    name: str, kind: str | None = None, record: Callable[..., None] | None = None
) -> Callable[..., Any]:
    """Return a method of `Files` with its faults, counts, and entry in the record.

    ``kind`` is what `only` and `counts` call it; ``record`` takes the record and the arguments.
    """

    def operation(self: FaultyFiles, where: int | str, *arguments: Any, **options: Any) -> Any:
        return self._do(
            kind or name,
            where,
            lambda: getattr(Files, name)(self, where, *arguments, **options),
            record and (lambda entries, _: record(entries, where, *arguments)),
        )

    return operation


class FaultyFiles(Files):
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

    def kill_at(
        self, n: int, when: str = "before", only: Collection[str] = OPERATIONS, part: float = 0.5
    ) -> None:
        """Kill this process before, after or in the middle of an operation (part of a write)."""
        assert when in ("before", "middle", "after")
        self._faults.append(Fault(n, only, when, part=part))

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
        assert self._record is not None, "FaultyFiles(root, record=True) records"
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

    def open(self, path: str, *, create: bool = False, **how: bool) -> int:
        base = super()
        new = create and not self.exists(path)
        return self._do(
            "create" if new else "open",
            path,
            lambda: base.open(path, create=create, **how),
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
            torn = min(int(len(whole) * fault.part), len(whole) - 1)
            buffers = [whole[: fault.number if fault.what == "short" else torn]]
        with self._mutex:
            written = os.pwritev(fd, buffers, position)
            if self._record and fd in self._record.inodes:
                data = b"".join(map(bytes, buffers))[:written]
                self._record.changed(fd, Write, position, data)
        if fault and fault.what in ("middle", "after"):
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    def sync(self, fd: int) -> None:
        base = super()
        record = self._record
        # What other threads write while the sync runs is not covered by it.
        with self._mutex:
            upto = record.end() if record else 0
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
            upto = record.end() if record else 0
            inode = record.find(path) if record else None
        self._do(
            "sync_directory",
            path,
            lambda: base.list(path) and None if record else base.sync_directory(path),
        )
        if record and inode is not None:
            record.events.append(SyncDirectory(inode, upto))

    read = _with_faults("read")
    read_into = _with_faults("read_into", "read")
    map = _with_faults("map")
    list = _with_faults("list")
    allocate = _with_faults("allocate")
    truncate = _with_faults(
        "truncate", record=lambda record, fd, size: record.changed(fd, Truncate, size)
    )
    drop_cache = _with_faults("drop_cache", record=lambda record, fd: record.forget(fd))
    make_directory = _with_faults(
        "make_directory", "mkdir", lambda record, path, *_: record.made_directory(path)
    )
    remove_directory = _with_faults(
        "remove_directory", "rmdir", lambda record, path: record.removed(path)
    )
    rename = _with_faults("rename", record=lambda record, old, new: record.renamed(old, new))
    unlink = _with_faults("unlink", record=lambda record, path, *_: record.removed(path))

    def lock(self, fd: int, timeout: float, shared: bool = False) -> bool:
        fault = self._fault("lock")
        waited = super().lock(fd, timeout, shared)
        if fault and fault.what == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return waited

    def unlock(self, fd: int) -> None:
        # Not under the record's mutex: a thread that waits for the lock may hold it.
        fault = self._fault("unlock")
        super().unlock(fd)
        if fault and fault.what == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    def close_all(self) -> None:
        super().close_all()
        # The constructor of the parent class may call this one before it is done.
        record = getattr(self, "_record", None)
        if record:
            with self._mutex:  # Another thread may be looking at them.
                record.close()

    def after_fork(self) -> None:
        self._record = None
        self._mutex = threading.RLock()
        super().after_fork()


def after_reboot(boot: str | None = "another boot") -> Callable[..., FaultyFiles]:
    """Return the files of a machine in another boot, as a root takes them."""
    return partial(FaultyFiles, boot=boot)


REBOOTED, REBOOTED_AGAIN = after_reboot(), after_reboot("a third boot")
"""The next boot of the same machine, and the one after that."""


class FaultInjector:
    """Makes the files of all openings in one process; orders and counts carry over to the next.

    Args:
        order: Orders faults from the first files.
        kind: The class of the files.
    """

    def __init__(
        self,
        order: Callable[[Any], None] = lambda files: None,
        kind: Callable[..., FaultyFiles] = FaultyFiles,
    ) -> None:
        self._order, self._kind = order, kind
        self.files: Any = None
        """Those that were made last."""

    def __call__(self, path: Any, **options: Any) -> FaultyFiles:
        before, self.files = self.files, self._kind(path, **options)
        if before is None:
            self._order(self.files)
        else:
            self.files._faults, self.files.counts = before._faults, before.counts
        made: FaultyFiles = self.files
        return made

    def heal(self) -> None:
        """Forget all faults that were ordered."""
        if self.files is not None:
            self.files.heal()
