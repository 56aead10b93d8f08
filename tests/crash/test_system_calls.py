"""Calls to the kernel that fail below Python, those of LMDB among them, in `open` and in use."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import platform
import shutil
import signal
import struct
import tempfile
import threading
from collections.abc import Callable, Collection
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import forks
from support.children import in_child
from support.forks import tell
from support.patience import patient
from support.program_faults import Templates
from support.roots import make_store
from support.tiers import choose, sample

import embedlog
from embedlog import kv
from embedlog.errors import DiskFullError, DurabilityError, EmbedlogError, StorageError
from embedlog.files import Files

# x86_64: number, kind, and where the file is named: an open file, or a directory and a path.
_FD, _AT, _PATH = "fd", "at", "path"
_CALLS: dict[int, tuple[str, str, int]] = {
    0: ("read", _FD, 0),
    17: ("read", _FD, 0),  # pread64
    295: ("read", _FD, 0),  # preadv
    327: ("read", _FD, 0),  # preadv2
    1: ("write", _FD, 0),
    18: ("write", _FD, 0),  # pwrite64
    20: ("write", _FD, 0),  # writev
    296: ("write", _FD, 0),  # pwritev
    328: ("write", _FD, 0),  # pwritev2
    74: ("sync", _FD, 0),  # fsync
    75: ("sync", _FD, 0),  # fdatasync
    77: ("truncate", _FD, 0),
    285: ("allocate", _FD, 0),
    217: ("list", _FD, 0),
    9: ("map", _FD, 4),
    73: ("lock", _FD, 0),  # flock
    2: ("open", _PATH, 0),
    257: ("open", _AT, 0),
    82: ("rename", _PATH, 0),
    264: ("rename", _AT, 0),
    316: ("rename", _AT, 0),
    87: ("unlink", _PATH, 0),
    84: ("unlink", _PATH, 0),
    263: ("unlink", _AT, 0),
    83: ("mkdir", _PATH, 0),
    258: ("mkdir", _AT, 0),
    262: ("stat", _AT, 0),  # newfstatat, which is fstat with an empty path
    5: ("stat", _FD, 0),
    138: ("stat", _FD, 0),  # fstatfs
}
_PWRITE64, _MMAP = 18, 9
_META_WRITE = 120
"""How many bytes LMDB writes to end a commit: its meta page from the size of the map on."""
_BITS = {
    name: 1 << bit for bit, name in enumerate(sorted({kind for kind, _, _ in _CALLS.values()}))
} | {"meta": 1 << 30}
KINDS = frozenset(_BITS) - {"meta"}
"""The kinds of calls.  ``"meta"`` is a write that ends a commit of LMDB, and a "write" too."""

_FAIL, _FAIL_ON, _LATE, _HALF_UNDONE = 1, 2, 3, 4
_AT_FDCWD = -100

_TRACEME, _CONT, _GETREGS, _SETREGS, _SYSCALL, _SETOPTIONS = 0, 7, 12, 13, 24, 0x4200
_OPTIONS = 1 | 2 | 4 | 8 | 0x80 | 0x100000
"""TRACESYSGOOD; TRACEFORK, TRACEVFORK and TRACECLONE; TRACESECCOMP; EXITKILL."""
_STOPPED_BY_FILTER = signal.SIGTRAP | 7 << 8
_STOPPED_AT_EXIT = signal.SIGTRAP | 0x80
_WAIT_FOR_THREADS = 0x40000000
_RAX, _RSI, _RDI, _ORIG_RAX = 10, 13, 14, 15
_ARGUMENTS = 14, 13, 12, 7, 9, 8  # rdi, rsi, rdx, r10, r8, r9
_REGISTERS = 27

_AUDIT_X86_64 = 0xC000003E
_ALLOW, _TRACE = 0x7FFF0000, 0x7FF00000
_NO_NEW_PRIVS, _SET_SECCOMP, _BY_FILTER = 38, 22, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


class SystemCalls:
    """Which calls fail: set by the child, read by its tracer, in memory that both share."""

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")

    def fail(
        self, n: int, errno: int, *, kinds: Collection[str] = KINDS, forever: bool = False
    ) -> None:
        """Let a call fail after `n` others of these kinds; with `forever` all after it too."""
        self._arm(n, errno, kinds, _FAIL_ON if forever else _FAIL)

    def fail_late(self, n: int, errno: int, *, kinds: Collection[str], undone: bool = True) -> None:
        """Let a call do its work and report an error; if not `undone`, the next one fails too.

        LMDB undoes a failed write of a meta page by another one, which may fail as well.
        """
        self._arm(n, errno, kinds, _LATE if undone else _HALF_UNDONE)

    def _arm(self, n: int, errno: int, kinds: Collection[str], how: int) -> None:
        bits = functools.reduce(int.__or__, (_BITS[kind] for kind in kinds))
        for index, word in enumerate((n, errno, bits, how), 1):
            self._words[index] = word
        self._words[5] = 0
        self._words[0] = 1

    def heal(self) -> int:
        """Let no more calls fail; returns how many of those kinds there were."""
        self._words[0] = 0
        return self._words[5]

    @property
    def armed(self) -> bool:
        """Whether calls are counted."""
        return bool(self._words[0])

    def decide(self, bits: int) -> tuple[int, bool] | None:
        """Count a call; return the errno it fails with, and whether it is done before."""
        first, number, failing_bits, how = self._words[1:5]
        if not bits & failing_bits:
            return None
        later = self._words[5] - first
        self._words[5] += 1
        if later == 0:
            return number, how in (_LATE, _HALF_UNDONE)
        if (later > 0 and how == _FAIL_ON) or (later == 1 and how == _HALF_UNDONE):
            return number, False
        return None


def run(work: Callable[[SystemCalls], Any], root: str | os.PathLike[str]) -> forks.End:
    """Run `work` in a traced child and return how it ended; calls on files of `root` may fail."""

    def trace() -> forks.End:
        calls = SystemCalls()
        answer = tempfile.TemporaryFile(dir=forks.in_memory())  # noqa: SIM115 - ends with us
        pid = os.fork()
        if pid == 0:
            _be_traced()
            forks.answer(lambda: work(calls), answer)
        return forks.read_end(_Tracer(pid, calls, os.path.realpath(root)).wait(), answer)

    # Waiting for each thread of a child is waiting for any child: so the tracer has only one.
    end = forks.run(trace, patience=10 * forks.PATIENCE)
    return end if end.finding() is not None else end.value


@functools.cache
def unavailable() -> str | None:
    """Say why calls cannot be made to fail here; None if they can."""
    if platform.machine() != "x86_64":
        return f"the numbers of the system calls are those of x86_64, not {platform.machine()}"
    with tempfile.TemporaryDirectory() as directory:

        def work(calls: SystemCalls) -> str | None:
            calls.fail(0, 5, kinds={"mkdir"})
            try:
                os.mkdir(f"{directory}/new")
            except OSError as error:
                return None if error.errno == 5 else f"another error: {error}"
            return "a traced call did not fail"

        end = run(work, directory)
    reason = end.finding() or end.value
    return (
        None if reason is None else f"this system does not let a process trace its child: {reason}"
    )


def _be_traced() -> None:
    _ptrace(_TRACEME, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    if _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        _raise()
    rules = [
        *(_rule(0x20, 4), _rule(0x15, _AUDIT_X86_64, 1, 0), _rule(0x06, _ALLOW)),
        _rule(0x20, 0),
    ]
    for number in _CALLS:
        rules += [_rule(0x15, number, 0, 1), _rule(0x06, _TRACE)]
    rules.append(_rule(0x06, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(rules))
    program = struct.pack("=H6xQ", len(rules), ctypes.addressof(code))
    if _libc.prctl(_SET_SECCOMP, _BY_FILTER, program, 0, 0):
        _raise()


def _rule(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction of the filter: load a word (0x20), jump if equal (0x15), return (0x06)."""
    return struct.pack("=HBBI", code, then, otherwise, value)


class _Tracer:
    """Follows a child, its threads and its children from stop to stop, until it is gone."""

    def __init__(self, pid: int, calls: SystemCalls, root: str) -> None:
        self._pid, self._calls, self._root = pid, calls, root
        self._late: dict[int, int] = {}

    def wait(self) -> int:
        """Let the child run to its end, and return the status it ended with."""
        _, status = os.waitpid(self._pid, 0)
        if os.WIFSTOPPED(status):
            _ptrace(_SETOPTIONS, self._pid, _OPTIONS)
            _ptrace(_CONT, self._pid)
        while True:
            tid, status = os.waitpid(-1, _WAIT_FOR_THREADS)
            if not os.WIFSTOPPED(status):
                if tid == self._pid:
                    return status
                continue
            try:
                self._pass_on(tid, status >> 8)
            except ProcessLookupError:
                pass  # killed meanwhile

    def _pass_on(self, tid: int, stop: int) -> None:
        if stop == _STOPPED_BY_FILTER:
            _ptrace(self._at_entry(tid) if self._calls.armed else _CONT, tid)
        elif stop == _STOPPED_AT_EXIT:
            registers = _registers(tid)
            registers[_RAX] = -self._late.pop(tid)
            _ptrace(_SETREGS, tid, registers)
            _ptrace(_CONT, tid)
        else:
            # A thread that begins has this signal of ours, and an event has none.
            ours = stop >> 8 or stop in (signal.SIGSTOP, signal.SIGTRAP)
            _ptrace(_CONT, tid, 0 if ours else stop)

    def _at_entry(self, tid: int) -> int:
        """Decide on a call that is about to begin; return how the child goes on."""
        registers = _registers(tid)
        kind, named, index = _CALLS[registers[_ORIG_RAX]]
        arguments = [registers[register] for register in _ARGUMENTS]
        path = self._path(tid, named, index, arguments)
        if path != self._root and not path.startswith(f"{self._root}/"):
            return _CONT
        bits = _BITS[kind]
        if kind == "lock" and arguments[1] == fcntl.LOCK_UN:
            return _CONT  # the kernel has no reason to refuse that
        if registers[_ORIG_RAX] == _PWRITE64 and arguments[2] == _META_WRITE:
            bits |= _BITS["meta"]
        decided = self._calls.decide(bits)
        if decided is None:
            return _CONT
        number, late = decided
        if late:
            self._late[tid] = number
            return _SYSCALL
        registers[_ORIG_RAX], registers[_RAX] = -1, -number
        _ptrace(_SETREGS, tid, registers)
        return _CONT

    def _path(self, tid: int, named: str, index: int, arguments: list[int]) -> str:
        number = ctypes.c_int(arguments[index]).value
        if named == _FD:
            return "" if number < 0 else _link(f"/proc/{tid}/fd/{number}")
        path = _string(tid, arguments[0 if named == _PATH else 1])
        if path.startswith("/"):
            return os.path.normpath(path)
        directory = "cwd" if named == _PATH or number == _AT_FDCWD else f"fd/{number}"
        return os.path.normpath(f"{_link(f'/proc/{tid}/{directory}')}/{path}")


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _string(tid: int, address: int) -> str:
    with open(f"/proc/{tid}/mem", "rb", buffering=0) as memory:
        read = b""
        while b"\0" not in read:
            # Not beyond the page: the next one may not be there.
            here = address + len(read)
            read += os.pread(memory.fileno(), mmap.PAGESIZE - here % mmap.PAGESIZE, here)
    return os.fsdecode(read.partition(b"\0")[0])


def _registers(tid: int) -> Any:
    registers = (ctypes.c_longlong * _REGISTERS)()
    _ptrace(_GETREGS, tid, registers)
    return registers


def _ptrace(request: int, tid: int, data: Any = 0) -> None:
    pointer = data if isinstance(data, int) else ctypes.addressof(data)
    if _libc.ptrace(request, tid, None, pointer) < 0:
        _raise()


def _raise() -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))


ERRORS = errno.EIO, errno.ENOSPC, errno.EDQUOT
FULL = errno.ENOSPC, errno.EDQUOT
CHANGES = {"allocate", "meta", "mkdir", "open", "rename", "sync", "truncate", "unlink", "write"}

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")


def traced(root: Path, work: Callable[[SystemCalls], Any]) -> Any:
    """Run `work` in a traced child, and return what it returned."""
    end = run(work, root)
    assert end.finding() is None, end.finding()
    return end.value


def check_error(error: BaseException, number: int) -> None:
    """An error is typed, and has the errno of the call that failed."""
    assert isinstance(error, StorageError), repr(error)
    assert error.errno == number, f"{error!r} has errno {error.errno}, not {number}"
    if not isinstance(error, DurabilityError):  # which names the partition
        assert error.path and error.operation, repr(error)
        assert isinstance(error, DiskFullError) == (number in FULL), repr(error)


# Opening a log


class Opening(NamedTuple):
    """Let every so many-th call of an opening fail, with each of `ERRORS` in turn."""

    before: str
    first: int
    step: int
    error: int


def check_opening(case: Opening, *, templates: Templates) -> tuple[int, int]:
    """Let calls of `open` fail; returns how many calls there were, and how many openings raised."""
    root = templates.directory / f"opened-{os.getpid()}"

    def work(calls: SystemCalls) -> tuple[int, int]:
        raised = 0
        n = case.first
        while True:
            templates.fresh(case.before, root.name)
            number = ERRORS[(n // case.step + case.error) % len(ERRORS)]
            calls.fail(n, number)
            log = error = None
            try:
                log = embedlog.open(root, maintenance=False)
            except BaseException as caught:  # noqa: BLE001 - its type is what is tested
                error = caught
            total = calls.heal()
            if log is not None:
                log.close()
            if total <= n:
                return n, raised
            if error is not None:
                check_error(error, number)
                raised += 1
            with embedlog.open(root, maintenance=False) as log:
                assert log.housekeeping.verify() == []
                assert sum(len(log.topic(name)) for name in log.topics()) > 0
            n += case.step

    return traced(root, work)


def openings(templates: Templates, cases: list[Opening]) -> tuple[int, int]:
    """Let calls of openings fail; returns how many calls the longest one has, and how many raised.

    The roots were left by a kill, by a clean close, and by a reboot.
    """
    counts = forks.spread(cases, lambda case: check_opening(case, templates=templates))
    calls, raised = max(n for n, _ in counts), sum(raised for _, raised in counts)
    tell(f"up to {calls} calls in an opening; {raised} openings failed")
    return calls, raised


BEFORE = "killed", "closed", "rebooted"


def test_opening_a_log_fails_with_the_errno_of_the_call_that_failed(
    templates: Templates,
) -> None:
    """P8: whichever call it is, of Python or of LMDB, and the next opening is fine."""
    # An odd number of steps apart, so that each call meets all errors in turn.
    firsts, step = choose(test=((5,), 99), all=((0, 5), 8))
    calls, raised = openings(
        templates, [Opening(before, first, step, 0) for before in BEFORE for first in firsts]
    )
    assert calls > 150 and raised > choose(test=1, all=100)


@pytest.mark.tier("nightly")
def test_every_call_of_an_opening_fails_with_every_error(templates: Templates) -> None:
    """P8 in full."""
    cases = [
        Opening(before, first, 8, error)
        for before in BEFORE
        for first in range(8)
        for error in range(len(ERRORS))
    ]
    assert openings(templates, cases)[1] > 2_000


# Appending

APPEND_STEP = choose(test=5, all=1)
"""One in so many changes fails."""


def check_appends(case: tuple[str, int], *, directory: Path) -> tuple[int, int, int]:
    """Let every change on the way of two appends fail; returns how many did, and raised."""
    durability, number = case
    root = directory / f"appended-{os.getpid()}"

    def work(calls: SystemCalls) -> tuple[int, int, int]:
        n = raised = meta = 0
        while True:
            shutil.rmtree(root, ignore_errors=True)
            log = embedlog.open(root, maintenance=False, durability=durability)
            log.create_topic("a", 1, {"segment.bytes": 2000})
            producer = log.producer(retries=1, retry_backoff_ms=1)
            producer.send("a", b"0").result()
            values, error = [b"0"], None
            calls.fail(n, number, kinds=CHANGES)
            try:
                for value in (b"1" * 600, b"2" * 1500):
                    producer.send("a", value).result()
                    values.append(value)
            except BaseException as caught:  # noqa: BLE001 - its type is what is tested
                error = caught
            if calls.heal() <= n:
                log.close()
                return n, raised, meta
            raised += error is not None
            if error is not None:
                check_error(error, number)
                meta += "commit" in str(error)
            _go_on(root, log, producer, values)
            n += APPEND_STEP

    return traced(root, work)


def _go_on(root: Path, log: Any, producer: Any, values: list[bytes]) -> None:
    """The same process goes on, unless a flush failed, and nothing acknowledged is lost."""
    try:
        producer.send("a", b"3").result()
        log.producer().send("a", b"4").result()
        values += [b"3", b"4"]
    except DurabilityError:
        assert log.partition("a", 0).tail().failed
        log.housekeeping.repair(dry_run=False)
    log.close()
    with embedlog.open(root, maintenance=False) as log:
        assert log.housekeeping.verify() == []
        read = [record.value for record in log.topic("a")]
        assert [value for value in read if value in values] == values, "lost or twice"


def test_appending_goes_on_after_any_call_that_failed(directory: Path) -> None:
    """P8: the error has its errno, and the next append of the process works."""
    cases = [(durability, code) for durability in ("os", "fsync") for code in (ERRORS[:2])]
    cases = choose(test=[cases[0], cases[3]], all=cases)
    counts = forks.spread(cases, lambda case: check_appends(case, directory=directory))
    faults, raised, meta = (sum(column) for column in zip(*counts, strict=True))
    tell(f"{faults} calls failed, of which {raised} were told, {meta} by a commit")
    share = len(cases) / 4 / APPEND_STEP
    assert faults >= 80 * share and raised >= 40 * share and meta >= 20 * share


# A commit of LMDB


def put(store: kv.LmdbStore, key: bytes) -> None:
    store.write(lambda txn: txn.put(key, b"value"))


def fail_once(calls: SystemCalls, number: int) -> None:
    calls.fail(0, number, kinds={"meta"})


def fail_and_not_undo(calls: SystemCalls, number: int) -> None:
    calls.fail(0, number, kinds={"meta"}, forever=True)


def write_and_report_a_failure(calls: SystemCalls, number: int) -> None:
    calls.fail_late(0, number, kinds={"meta"})


def write_and_not_undo(calls: SystemCalls, number: int) -> None:
    calls.fail_late(0, number, kinds={"meta"}, undone=False)


WAYS = [fail_once, fail_and_not_undo, write_and_report_a_failure, write_and_not_undo]


@pytest.mark.parametrize(
    ("alone", "way", "name"), sample([*product([True, False], WAYS, ["state", "live"])], 5)
)
def test_a_failed_meta_page_is_a_commit_or_an_error_and_never_half(directory, name, way, alone):
    """P8: what the error says is what every reader sees, and the same handle writes on."""
    root = directory / f"{name}-{way.__name__}-{alone}"
    other = None if alone else make_store(root, name)

    def work(calls: SystemCalls) -> None:
        store = make_store(root, name)
        for number in (errno.EIO, errno.ENOSPC):
            key, error = b"key %d" % number, None
            put(store, b"before")
            way(calls, number)
            try:
                put(store, key)
            except EmbedlogError as caught:
                error = caught
            finally:
                calls.heal()
            if error is not None:
                check_error(error, number)
            seen = [
                read(lambda key=key: store.get(key)) is None
                for read in (lambda get: get(), in_a_thread, in_child)
            ]
            assert seen == [error is not None] * 3
            assert store.version() == store.read(lambda txn: txn.id())
            put(store, b"after %d" % number)
            assert store.get(b"after %d" % number) == b"value"
            assert (store.get(key) is None) == (error is not None)
        store.close()

    traced(root, work)
    again = other or make_store(root, name)
    assert again.get(b"after 5") == again.get(b"after 28") == b"value"
    again.close()
    assert kv.findings(str(root / name)) == []


def in_a_thread(work: Callable[[], Any]) -> Any:
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(work()))
    thread.start()
    thread.join()
    return done[0]


def test_a_commit_that_could_not_be_undone_counts(directory):
    """A commit that every reader will see is no error; it lasts beyond a new opening too."""
    root = directory / "counts"

    def work(calls: SystemCalls) -> bool:
        store = make_store(root, "state")
        write_and_not_undo(calls, errno.EIO)
        put(store, b"key")
        # The page that failed, and the commit that takes it to the disk.
        return calls.heal() == 3 and store.get(b"key") == b"value"

    assert traced(root, work)
    store = make_store(root, "state")
    assert store.get(b"key") == b"value"
    store.close()


def test_a_database_that_cannot_be_opened_again_is_tried_at_each_call(directory):
    """While the fault lasts each call has its errno; after it the same handle works."""
    root = directory / "again"

    def work(calls: SystemCalls) -> None:
        store, second = make_store(root), make_store(root)
        put(store, b"first")
        calls.fail(0, errno.EIO, kinds={"meta", "open", "map"}, forever=True)
        uses = (
            *(lambda: put(store, b"key"), lambda: store.get(b"key")),
            *(lambda: put(second, b"key"), lambda: second.get(b"key")),
            *(store.check_readers, store.readers),
        )
        for use in uses:
            with pytest.raises(StorageError) as caught:
                use()
            check_error(caught.value, errno.EIO)
        calls.heal()
        assert second.get(b"key") is None
        put(store, b"key")
        assert second.get(b"key") == b"value"
        store.close()
        second.close()

    traced(root, work)


def test_all_handles_threads_and_children_go_on_after_a_failed_commit(directory):
    """P8, P18: they share the environment that had to be opened again."""
    root = directory / "handles"

    def work(calls: SystemCalls) -> None:
        logs = [embedlog.open(root, maintenance=False) for _ in range(3)]
        logs[0].create_topic("t")
        stop, errors = threading.Event(), []

        def follow() -> None:
            consumer = logs[2].consumer("t", auto_offset_reset="earliest")
            try:
                while not stop.is_set():
                    consumer.poll(timeout_ms=1)
            except BaseException as error:  # noqa: BLE001 - no other handle may see the fault
                errors.append(error)

        thread = threading.Thread(target=follow)
        thread.start()
        for number in range(20):
            with logs[0].producer(retries=0) as producer:
                producer.send("t", b"kept").result()
                fail_once(calls, errno.EIO)
                with pytest.raises(StorageError) as caught:
                    producer.send("t", b"lost").result()
                check_error(caught.value, errno.EIO)
                calls.heal()
            logs[number % 3].producer().send("t", b"kept").result()
        stop.set()
        thread.join()
        assert errors == []
        assert in_child(lambda: len(logs[1].topic("t"))) == len(logs[2].topic("t")) == 40
        for log in logs:
            log.close()

    traced(root, work)


def test_a_map_that_cannot_grow_is_an_error_and_the_old_one_is_used_again(directory, monkeypatch):
    """LMDB unmaps the old map first: without it the next transaction would be a SIGSEGV."""
    monkeypatch.setattr(kv, "FIRST_MAP_BYTES", 1 << 20)
    root = directory / "map"

    def work(calls: SystemCalls) -> None:
        store = make_store(root)
        calls.fail(0, errno.ENOMEM, kinds={"map"})
        with pytest.raises(StorageError) as caught:
            store.write(lambda txn: txn.put(b"large", bytes(2 << 20)))
        check_error(caught.value, errno.ENOMEM)
        calls.heal()
        assert store.get(b"first") == b"row"
        store.write(lambda txn: txn.put(b"large", bytes(2 << 20)))
        assert len(store.get(b"large")) == 2 << 20
        store.close()

    traced(root, work)


def test_a_handle_that_writes_may_try_again_to_join_one_that_reads(directory):
    """What only reads goes on when the environment could not be opened to write."""
    root = directory / "joins"
    make_store(root).close()

    def work(calls: SystemCalls) -> None:
        reading = kv.LmdbStore(
            Files(root, writable=False), "live", durable=False, timeout=patient(5)
        )
        calls.fail(1, errno.EIO, kinds={"open"})
        with pytest.raises(StorageError) as caught:
            make_store(root)
        check_error(caught.value, errno.EIO)
        calls.heal()
        assert reading.get(b"first") == b"row"
        writing = make_store(root)
        put(writing, b"key")
        assert reading.get(b"key") == b"value"

    traced(root, work)
