"""The wake page: shared memory on which waiting readers sleep.

Three words: a counter, on which they sleep; how many may be asleep; and when
something was last published, for those who cannot be counted.

Nobody calls the kernel for readers that are not there (2 of the 45 µs of an
append that somebody waits for).  No wake is lost by that: a reader is counted
before it looks, and whoever publishes looks at the number after its commit, so
one of the two sees the other.  Between their two steps stands an atomic
instruction of the kernel's or of a lock, which on x86 lets no load go before an
earlier store.  Elsewhere that is not promised, and the kernel is always called.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from embedlog.errors import ClosedError, StorageError
from embedlog.files.filesystem import REMOTE_FILESYSTEMS

if TYPE_CHECKING:
    from embedlog.files import Files

WAKE_FILE: Final = "wake"
PAGE_BYTES: Final = 4096
POLL_SECONDS: Final = 1e-3
"""How long a waiter sleeps between two looks at the page where nobody wakes it."""

_FUTEX_NUMBERS: Final = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT: Final = 0
_FUTEX_WAKE_OP: Final = 5
_EVERYONE: Final = 0x7FFFFFFF
# linux/futex.h: *address += argument (operation 1, 12 bits with a sign), then wake whoever waits.
_ADD_ONE: Final = 1 << 28 | 1 << 12
_ADD_MINUS_ONE: Final = 1 << 28 | 0xFFF << 12
_COUNTER_AT: Final = 0
_WAITERS_AT: Final = 4
_STAMP_AT: Final = 8

_syscall = ctypes.CDLL(None).syscall
# The call of every append.  With its types told, and the interpreter's lock kept, since it never
# waits, it takes 1.3 µs instead of 1.8.
_add_and_wake = ctypes.PYFUNCTYPE(
    *(ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
)(("syscall", ctypes.PyDLL(None)))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class WakePage:
    """The `wake` file of a log, which whoever publishes advances.

    A reader joins, takes the `value`, looks for records, and if there are none waits
    until the value is another one.  So no publication between the look and the wait
    is slept through.  The page tells that something happened, never what: a reader
    that returns from `wait`, for whatever reason, looks again.

    The mapping is shared by all processes and stays valid in a forked child.
    Who may not write it, such as another user, can wait on it and not advance it; such
    a reader cannot be counted, and looks at the page once in a millisecond.
    """

    def __init__(self, files: Files) -> None:
        fd, self.rings = _open(files)
        """`rings` tells whether this object can `advance` the page, and is woken by others."""
        try:
            if files.writable and files.size(fd) < PAGE_BYTES:
                # Two processes may both do so: growing twice is growing once.  With its bytes,
                # for to touch a page that a full disk has no room for is a SIGBUS.
                files.allocate(fd, PAGE_BYTES)
            self._map = files.map(fd, PAGE_BYTES, write=self.rings)
        finally:
            files.close(fd)
        words = memoryview(self._map)
        self._counter = words[_COUNTER_AT:_WAITERS_AT].cast("I")
        self._waiters = words[_WAITERS_AT:_STAMP_AT].cast("I")
        self._stamp = words[_STAMP_AT : _STAMP_AT + 8].cast("Q")
        self._pid = os.getpid()
        self._joined: list[None] = []
        """One for each waiter of this object that is counted; to take one is to be the one
        who takes it off the count, which therefore never falls too low."""
        machine = os.uname().machine
        number = _FUTEX_NUMBERS.get(machine)
        self._may_skip = machine == "x86_64"
        self._calls = number and _Calls(number, _address(self._map))
        self._polls = not (self._calls and self.rings)

    def join(self) -> None:
        """Be counted among those who may wait, until `leave` or `close`; before the look.

        Whoever is killed stays counted, which costs others a call of the kernel, until
        `forget_waiters`.
        """
        calls = self._calls  # another thread may close the page
        if not self._polls and calls:
            _add_and_wake(*calls.join)
            self._joined.append(None)

    def leave(self) -> None:
        """Be counted no more; nothing in a forked child, of whose the count is not."""
        calls = self._calls
        if calls and self._pid == os.getpid():
            with suppress(IndexError):
                self._joined.pop()
                _add_and_wake(*calls.leave)

    def value(self) -> int:
        """Return a number that is another one after each publication, for who has joined."""
        try:
            return self._stamp[0] if self._polls else self._counter[0]
        except ValueError as error:
            raise ClosedError("the wake page was closed before") from error

    def published(self) -> int:
        """Return when something was last published, also to who has not joined."""
        try:
            return self._stamp[0]
        except ValueError as error:
            raise ClosedError("the wake page was closed before") from error

    def advance(self) -> None:
        """Wake everyone who waits, in all processes; what they look for is there to be seen.

        The kernel adds and wakes in one call, so no count is lost and the counter never
        returns to a value that a waiter has seen.
        """
        try:
            # A time is not seen twice either, however late this store is among others.
            self._stamp[0] = time.monotonic_ns()
            if self._may_skip and not self._waiters[0]:
                return
        except ValueError as error:
            raise ClosedError("the wake page was closed before") from error
        calls = self._calls
        if calls:
            _add_and_wake(*calls.wake)

    def wait(self, seen: int, timeout: float) -> None:
        """Return once the value is not `seen`, after `timeout` seconds, or after a signal."""
        if self.value() != seen or timeout <= 0:
            return
        calls = self._calls
        if self._polls or not calls:
            self._poll(seen, timeout)
            return
        span = ctypes.byref(_Timespec(int(timeout), int(timeout % 1 * 1e9)))
        # The kernel compares once more, under its lock, before it lets us sleep.
        _syscall(*calls.page, _FUTEX_WAIT, ctypes.c_uint32(seen), span, None, 0)

    def _poll(self, seen: int, timeout: float) -> None:
        while timeout > 0 and self.value() == seen:
            select.select((), (), (), min(timeout, POLL_SECONDS))
            timeout -= POLL_SECONDS

    def close(self) -> None:
        """Refuse later calls; who waits in another thread returns by its timeout.

        The page is unmapped with the last reference to this object, since the kernel
        would add to whatever else is mapped there by then.
        """
        for _ in range(len(self._joined)):
            self.leave()
        self._calls = None
        for word in (self._counter, self._waiters, self._stamp):
            word.release()


def _open(files: Files) -> tuple[int, bool]:
    """Open the page, to write if that is allowed, and tell whether it is.

    With `mode="r"` too, but not where the memory of several machines would be written
    over each other's.
    """
    if files.writable:
        return files.open(WAKE_FILE, write=True, create=True), True
    with suppress(StorageError):
        if files.filesystem() not in REMOTE_FILESYSTEMS.values():
            return files.open(WAKE_FILE, write=True, counted=True), True
    return files.open(WAKE_FILE), False


class _Calls:
    """The arguments of each call, converted once: at every call it would take three times as long.

    Args:
        number: What the kernel calls a futex on this processor.
        address: Where the page is.
    """

    def __init__(self, number: int, address: int) -> None:
        self.page = ctypes.c_long(number), ctypes.c_void_p(address)
        self.wake = self._add(address + _COUNTER_AT, _ADD_ONE)
        # Nobody sleeps on that word: these only add, in a way that no other process undoes.
        self.join = self._add(address + _WAITERS_AT, _ADD_ONE)
        self.leave = self._add(address + _WAITERS_AT, _ADD_MINUS_ONE)

    def _add(self, address: int, operation: int) -> tuple[Any, ...]:
        number, word = self.page[0], ctypes.c_void_p(address)
        return (
            *(number, word, ctypes.c_int(_FUTEX_WAKE_OP), ctypes.c_int(_EVERYONE)),
            *(ctypes.c_void_p(None), word, ctypes.c_uint32(operation)),
        )


def forget_waiters(files: Files) -> None:
    """Count anew: nobody is attached, so who is still counted was killed."""
    if files.exists(WAKE_FILE):
        fd = files.open(WAKE_FILE, write=True)
        try:
            files.write(fd, [bytes(4)], _WAITERS_AT)
        finally:
            files.close(fd)


def _address(memory: mmap.mmap) -> int:
    """Return where the map is; ctypes would only tell for one that may be written."""
    view = (ctypes.c_void_p * 16)()  # a Py_buffer, of which the first field is the address
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), view, 0)
    try:
        return int(view[0] or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(view)
