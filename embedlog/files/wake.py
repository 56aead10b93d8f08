"""The wake page: one counter in shared memory, on which waiting readers sleep."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
from typing import TYPE_CHECKING, Final

from embedlog.errors import ClosedError

if TYPE_CHECKING:
    from embedlog.files import Files

WAKE_FILE: Final = "wake"
PAGE_BYTES: Final = 4096
POLL_SECONDS: Final = 1e-3
"""How long a waiter sleeps between two looks where the kernel has no futex for us."""

_FUTEX_NUMBERS: Final = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT: Final = 0
_FUTEX_WAKE_OP: Final = 5
_EVERYONE: Final = 0x7FFFFFFF
# linux/futex.h: *address += 1 (operation 1, argument 1), then wake whoever waits.
_ADD_ONE: Final = 1 << 28 | 1 << 12

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
    """The `wake` file of a log: a counter that whoever publishes advances.

    A reader takes the `value`, looks for records, and if there are none waits until
    the value is another one.  So no publication between the look and the wait is
    slept through.  The page tells that something happened, never what: a reader that
    returns from `wait`, for whatever reason, looks again.

    The mapping is shared by all processes and stays valid in a forked child.
    With `Files` that are not writable it can be waited on and not advanced.
    """

    def __init__(self, files: Files) -> None:
        fd = files.open(WAKE_FILE, write=files.writable, create=files.writable)
        try:
            if files.writable and files.size(fd) < PAGE_BYTES:
                # Two processes may both do so: growing twice is growing once.
                files.truncate(fd, PAGE_BYTES)
            self._map = files.map(fd, PAGE_BYTES, write=files.writable)
        finally:
            files.close(fd)
        self._counter = memoryview(self._map).cast("I")
        number = _FUTEX_NUMBERS.get(os.uname().machine)
        # Converted once: ctypes takes three times as long to convert them at every call.
        self._page = number and (ctypes.c_long(number), ctypes.c_void_p(_address(self._map)))
        self._to_all = self._page and (
            *self._page,
            *(ctypes.c_int(_FUTEX_WAKE_OP), ctypes.c_int(_EVERYONE), ctypes.c_void_p(None)),
            *(self._page[1], ctypes.c_uint32(_ADD_ONE)),
        )

    def value(self) -> int:
        """Return the counter, an unsigned number of 32 bits that wraps around."""
        try:
            return self._counter[0]
        except ValueError as error:
            raise ClosedError("the wake page was closed before") from error

    def advance(self) -> None:
        """Count one more and wake everyone who waits, in all processes.

        The kernel adds and wakes in one call, so no count is lost and the counter never
        returns to a value that a waiter has seen.
        """
        to_all = self._to_all  # another thread may close the page
        if not to_all or _add_and_wake(*to_all) < 0:
            value = (self.value() + 1) & 0xFFFFFFFF
            try:
                self._counter[0] = value
            except ValueError as error:
                raise ClosedError("the wake page was closed before") from error

    def wait(self, seen: int, timeout: float) -> None:
        """Return once the value is not `seen`, after `timeout` seconds, or after a signal."""
        if self.value() != seen or timeout <= 0:
            return
        page = self._page
        if not page:
            self._poll(seen, timeout)
            return
        span = ctypes.byref(_Timespec(int(timeout), int(timeout % 1 * 1e9)))
        # The kernel compares once more, under its lock, before it lets us sleep.
        _syscall(*page, _FUTEX_WAIT, ctypes.c_uint32(seen), span, None, 0)

    def _poll(self, seen: int, timeout: float) -> None:
        while timeout > 0 and self.value() == seen:
            select.select((), (), (), min(timeout, POLL_SECONDS))
            timeout -= POLL_SECONDS

    def close(self) -> None:
        """Refuse later calls; who waits in another thread returns by its timeout.

        The page is unmapped with the last reference to this object, since the kernel
        would add to whatever else is mapped there by then.
        """
        self._page = self._to_all = None
        self._counter.release()


def _address(memory: mmap.mmap) -> int:
    """Return where the map is; ctypes would only tell for one that may be written."""
    view = (ctypes.c_void_p * 16)()  # a Py_buffer, of which the first field is the address
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), view, 0)
    try:
        return int(view[0] or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(view)
