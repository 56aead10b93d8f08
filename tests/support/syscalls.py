"""System calls that fail below Python: also those that LMDB and Arrow make themselves.

`FaultyFiles` fails what embedlog asks `Files` to do.  Here the kernel refuses:
a tracer (ptrace) lets a chosen call of a child on a file of the root fail.  A filter (seccomp)
stops the child at the calls below only.  Neither needs a compiler, or root.

>>> def work(calls):                                               # doctest: +SKIP
...     calls.fail(3, errno.EIO, kinds={"write", "sync"})          # the fourth one, once
...     ...                                                        # in the child
...     return calls.heal()                                        # how many there were
>>> end = run(work, root)                                          # doctest: +SKIP
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import platform
import signal
import struct
import tempfile
from collections.abc import Callable, Collection
from typing import Any

from support import forks

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
