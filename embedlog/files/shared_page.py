"""One page of a file in the memory of this process, which can be given back at any time."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any, Final

from embedlog.errors import StorageError
from embedlog.files.files import Files

PAGE_BYTES: Final = 4096
_MREMAP_MAYMOVE: Final = 1
_MAP_FIXED: Final = 0x10
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None)
_mremap = ctypes.CFUNCTYPE(
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int),
    use_errno=True,
)(("mremap", _libc))
_mmap = ctypes.CFUNCTYPE(
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_long),
)(("mmap", _libc))
_munmap = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)(("munmap", _libc))


class _Bytes(ctypes.c_char * PAGE_BYTES):  # type: ignore[misc]
    """The memory of a page, which is unmapped with the last view of it."""

    def __del__(self, unmap: Any = _munmap, address_of: Any = ctypes.addressof) -> None:
        # As defaults, since the names may be gone at the end of Python.
        unmap(address_of(self), PAGE_BYTES)


class SharedPage:
    """A map of the first page of a file, without a descriptor.

    Python's `mmap` keeps a descriptor, and cannot be closed while another thread may use its
    address: the kernel would then write to whatever is mapped there next.

    Args:
        files: Opened the file, which must have this page and never shrink.
        fd: The file.
        write: Whether the page may be changed.

    Raises:
        StorageError: It cannot be mapped.
    """

    def __init__(self, files: Files, fd: int, *, write: bool = False) -> None:
        with files.map(fd, PAGE_BYTES, write=write) as mapped:
            # An old size of 0 makes a second map of a shared page (mremap(2)).
            address = _mremap(_address(mapped), 0, PAGE_BYTES, _MREMAP_MAYMOVE)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise StorageError(
                f"map failed: {os.strerror(number)}", errno=number, operation="map", path=files.root
            )
        self.address: int = address
        self.words = memoryview(_Bytes.from_address(address)).cast("B")
        """The bytes of the page, which only one that may be changed may be assigned to."""

    def release(self) -> None:
        """Give the file back: its place is taken by memory of this process alone, with zeros."""
        _mmap(
            *(self.address, PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE),
            *(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, 0),
        )


def _address(memory: mmap.mmap) -> int:
    """Return the address of a map, which ctypes itself returns only for a writable map."""
    view = (ctypes.c_void_p * 16)()  # a Py_buffer, of which the first field is the address
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), view, 0)
    try:
        return int(view[0] or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(view)
