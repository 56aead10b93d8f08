"""A disk that fills up: a small tmpfs or ext4, or a model of one (P10)."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import embedlog
from embedlog.errors import DiskFullError
from embedlog.segment import END_MARK
from support import forks, journal_check
from support.faulty_files import FaultyFiles
from support.log_programs import ProgramProcess
from support.program_faults import judge

DISK = 16 << 20
PAGE = 4096
PARTITIONS = (("d", 0), ("d", 1))


class Disk:
    """A directory on a disk of its own, whose free bytes can be chosen."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def leave(self, pages: int) -> None:
        """Fill the disk up to so many free pages."""
        with open(self.path / "ballast", "wb") as file:
            free = os.fstatvfs(file.fileno()).f_bavail * PAGE
            os.posix_fallocate(file.fileno(), 0, max(free - pages * PAGE, 1))

    def free(self) -> None:
        """Free the disk again."""
        (self.path / "ballast").unlink(missing_ok=True)


@contextmanager
def small_disk(directory: Path) -> Iterator[Disk | None]:
    """Mount a small tmpfs; None if that is not allowed."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", os.fspath(directory)]
    with _mounted(directory, mount) as disk:
        yield disk


@contextmanager
def ext4_disk(directory: Path, *, reserved_percent: int) -> Iterator[Disk | None]:
    """Mount a small ext4 that reserves blocks for root; None if that is not allowed."""
    image = directory.with_suffix(".image")
    image.touch()
    os.truncate(image, DISK)
    make = ["mkfs.ext4", "-q", "-F", "-m", str(reserved_percent), os.fspath(image)]
    mount = ["mount", "-o", "loop", os.fspath(image), os.fspath(directory)]
    with _mounted(directory, make, mount) as disk:
        yield disk
    image.unlink()


@contextmanager
def _mounted(directory: Path, *commands: list[str]) -> Iterator[Disk | None]:
    directory.mkdir()
    try:
        done = all(
            subprocess.run(command, capture_output=True, check=False).returncode == 0
            for command in commands
        )
    except FileNotFoundError:
        done = False
    try:
        yield Disk(directory) if done else None
    finally:
        if done:
            subprocess.run(["umount", "--lazy", os.fspath(directory)], check=True)


class SmallDiskFiles(FaultyFiles):
    """A model of a small disk: writes and allocations take space, and unlinks free it.

    LMDB does not write through `Files`: a commit takes two pages, as if it reused none.
    """

    room: int | None = None
    """Free bytes; None means those of the real disk."""
    disk = 16 << 20
    reported: int | None = None
    """The free bytes that the file system reports, if not the real number."""

    def free_bytes(self) -> int:
        if self.reported is not None:
            return self.reported
        return super().free_bytes() if self.room is None else self.room

    def total_bytes(self) -> int:
        return self.disk

    def take(self, size: int) -> None:
        if self.room is not None:
            if size > self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room -= size

    def _pwritev(self, fd: int, buffers: Any, position: int) -> int:  # type: ignore[override]
        if self.room is not None:
            whole = b"".join(map(bytes, buffers))
            fits = min(len(whole), self.room + max(self.size(fd) - position, 0))
            self.take(max(position + fits - self.size(fd), 0) or (0 if fits else 1))
            buffers = [whole[:fits]]
        return super()._pwritev(fd, buffers, position)

    def truncate(self, fd: int, size: int) -> None:
        if self.room is not None:
            self.room += max(self.size(fd) - size, 0)
        super().truncate(fd, size)

    def allocate(self, fd: int, size: int) -> None:
        grown = max(size - self.size(fd), 0)
        try:
            self.take(grown)
        except OSError as error:
            raise self._failed(error, "allocate", fd) from error
        super().allocate(fd, size)
        if self.room is not None and not os.fstat(fd).st_nlink:
            # It was unlinked before, and is closed next.
            self.room += grown

    def unlink(self, path: str, missing_ok: bool = False) -> None:
        size = 0
        with suppress(OSError):
            size = os.stat(f"{self.root}/{path}").st_size
        super().unlink(path, missing_ok)
        if self.room is not None:
            self.room += size


class FreeSpace(NamedTuple):
    """How much is free: pages, or with a model bytes."""

    size: int
    durability: str


def check_full_disk(case: FreeSpace, *, directory: Path, disk: Disk | None) -> int:
    """Append to a disk that fills up; return how many appends it had room for."""
    root = (disk.path if disk else directory) / f"root-{os.getpid()}"
    shutil.rmtree(root, ignore_errors=True)
    # The journal is not on the disk that fills up.
    journal_path = directory / f"root-{os.getpid()}.journal"
    journal_path.unlink(missing_ok=True)
    end = forks.run(lambda: _fill(root, journal_path, case, disk))
    if disk:
        disk.free()
    room = end.result()
    judge(root, journal=journal_path)
    return int(room)


def _fill(root: Path, journal: Path, case: FreeSpace, disk: Disk | None) -> int:
    process = ProgramProcess(root, journal=journal, files=SmallDiskFiles, forgiving=True)
    for step in (("open", "os"), ("create", "d", 2, 20_000)):
        process.do(step)
    for key in PARTITIONS:
        # Some of the disk is preallocated, and given back before an append fails.
        process.do(("send", *key, 1, "fsync"))
    assert process.errors == []
    if disk:
        disk.leave(case.size)
    else:
        process.log.root.context.files.room = case.size
    room = _until_full(process, case.durability)
    _check_while_full(process, disk)
    if disk:
        disk.free()
    else:
        process.log.root.context.files.room = None
    _check_after(process)
    journal_check.check(process.log, journal, goes_on=False)
    return room


def _until_full(process: ProgramProcess, durability: str) -> int:
    room = 0
    while not process.errors:
        assert room < 10_000, "the disk never gets full"
        process.do(("send", *PARTITIONS[room % 2], 1, durability, 3000))
        room += 1
    assert isinstance(process.errors[0], DiskFullError), repr(process.errors[0])
    for key in PARTITIONS:
        log = process.log.partition(*key)
        # A roll that failed may have left its end mark.
        assert log.active_file().size() <= log.tail().log_end_position + len(END_MARK)
    return room - 1


def _check_while_full(process: ProgramProcess, disk: Disk | None) -> None:
    """Check that no process can append, and every process can read everything."""
    ends = {key: process.log.partition(*key).end_offset() for key in PARTITIONS}
    for key in PARTITIONS * 2:
        errors_before = len(process.errors)
        process.do(("send", *key, 5, "os", 3000))
        assert [type(error) for error in process.errors[errors_before:]] == [DiskFullError], (
            process.errors
        )
        assert process.log.partition(*key).end_offset() == ends[key]
    for key in PARTITIONS:
        assert len(journal_check.rows(process.log, *key)) == ends[key]

    def read() -> None:
        log = embedlog.open(process.path, mode="r")
        for key, end in ends.items():
            assert len(journal_check.rows(log, *key)) == end
        assert log.partition("d", 0).reader(ends["d", 0]).read() == []

    def join() -> None:
        with suppress(DiskFullError):
            log = embedlog.open(process.path)
            for key, end in ends.items():
                assert len(journal_check.rows(log, *key)) == end

    def begin() -> None:
        with suppress(DiskFullError):
            embedlog.open(disk.path / "another") if disk else None

    for work in (read, join, begin):
        forks.run(work).result(work.__name__)
    if disk:
        shutil.rmtree(disk.path / "another", ignore_errors=True)


def _check_after(process: ProgramProcess) -> None:
    process.forgiving = False
    for key in PARTITIONS:
        log = process.log.partition(*key)
        end = log.tail().log_end_offset
        process.do(("send", *key, 2, "os"))
        process.do(("send", *key, 1, "fsync"))
        assert log.end_offset() == end + 3
