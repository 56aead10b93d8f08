"""`RemoteFiles`: files at a URL, by fsspec: read with plain reads, and written as a whole."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from embedlog.errors import EmbedlogError, StorageError, raised_in_body
from embedlog.files.files import Files
from embedlog.files.filesystem import parts

_list = list  # `Files.list` hides it in the class


def plain_files(root: str, *, writable: bool = False) -> Files:
    """Return the files of a directory, or at a URL, for programs without locks and databases."""
    if "://" in root:
        return RemoteFiles(root, writable=writable)
    return Files(root, writable=writable, unsafe_filesystem=True)


class RemoteFiles(Files):
    """The files at a URL, such as ``s3://bucket/log``; those operations that need no lock.

    A written file appears when it is complete, as far as the store promises that.

    Args:
        root: The URL.
        writable: As of `Files`.

    Raises:
        StorageError: fsspec, or the package of its protocol, is not installed.
    """

    maps_segments = False

    def __init__(self, root: str, *, writable: bool = False) -> None:
        self._root_fd, self._paths, self._in_use = -1, {}, set()
        self.root, self.writable = root.rstrip("/"), writable
        self._numbers = itertools.count(1 << 32)  # descriptors of the system are smaller
        self._open: dict[int, tuple[str, Any]] = {}
        try:
            import fsspec
        except ImportError as error:
            raise StorageError(
                "URLs are read with fsspec, which is not installed",
                path=root,
                todo='Run pip install "embedlog[fsspec]", and install what its protocol needs.',
            ) from error
        with self._remote("open", ""):
            self._fs, self._base = fsspec.core.url_to_fs(self.root)

    @contextmanager
    def _remote(self, operation: str, path: str) -> Iterator[None]:
        """Convert the errors of fsspec, and of the libraries below it."""
        try:
            yield
        except EmbedlogError:
            raise
        except Exception as error:  # noqa: BLE001 - those of any protocol's library
            number = getattr(error, "errno", None)
            if isinstance(error, FileNotFoundError):
                number = errno.ENOENT
            raise StorageError(
                f"Cannot {operation}: {type(error).__name__}: {error}",
                errno=number,
                operation=operation,
                path=self.path(path),
            ) from raised_in_body(error)

    def path(self, relative: str) -> str:
        """Return the URL of a file."""
        return f"{self.root}/{relative}" if relative else self.root

    def _at(self, relative: str) -> str:
        return "/".join([self._base.rstrip("/"), *parts(relative)])

    def open(self, path: str, **options: Any) -> int:
        """Open a file for reading; see `Files.open`."""
        with self._remote("open", path):
            number, file = next(self._numbers), self._fs.open(self._at(path), "rb")
        self._open[number] = path, file
        return number

    def keep(self, fd: int) -> None:
        """Do nothing: its user holds the file by itself."""

    def read(self, fd: int, length: int, position: int) -> bytes:
        """Return the bytes at a position, or fewer where the file ends."""
        path, file = self._open[fd]
        with self._remote("read", path):
            file.seek(position)
            data: bytes = file.read(length)
            return data

    def read_into(self, fd: int, memory: Any, position: int) -> int:
        """Fill a buffer from a position; return how many bytes."""
        view = memoryview(memory).cast("B")
        data = self.read(fd, len(view), position)
        view[: len(data)] = data
        return len(data)

    def size(self, fd: int) -> int:
        """Return how many bytes the file has."""
        path, file = self._open[fd]
        with self._remote("size", path):
            size = file.size
            if size is None:
                raise OSError(errno.EOPNOTSUPP, "the store does not say how long the file is")
            return int(size)

    def close(self, fd: int) -> None:
        """Close a file."""
        _, file = self._open.pop(fd, ("", None))
        if file is not None:
            file.close()

    def close_all(self) -> None:
        """Close all files."""
        for fd in _list(getattr(self, "_open", ())):
            self.close(fd)

    def after_fork(self) -> None:
        """Drop what was inherited."""
        self._open.clear()

    def write_file(self, path: str, data: bytes | Iterable[Any]) -> None:
        """Write a file, in parts."""
        with self._remote("write", path), self._fs.open(self._at(path), "wb") as file:
            for part in (data,) if isinstance(data, bytes) else data:
                file.write(part)

    def make_directory(self, path: str, exist_ok: bool = True) -> None:
        """Make a directory, where the store has them."""
        with self._remote("make directory", path):
            self._fs.makedirs(self._at(path), exist_ok=exist_ok)

    def sync_directory(self, path: str) -> None:
        """Do nothing: a store keeps the names itself."""

    def list(self, path: str) -> _list[str]:
        """Return the names in a directory, sorted."""
        with self._remote("list", path):
            found: Sequence[str] = self._fs.ls(self._at(path), detail=False, refresh=True)
            return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def exists(self, path: str) -> bool:
        """Return whether there is such a file."""
        with self._remote("look up", path):
            return bool(self._fs.exists(self._at(path)))
