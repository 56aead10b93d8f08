"""The check of P10: a disk with so many bytes left, in truth (a small tmpfs) or as a model."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import embedlog
from embedlog.errors import DiskFullError, StorageError
from support import forks, journal_check
from support.faulty_files import FaultyFiles
from support.log_programs import Journal, World, entries
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
    """Mount a small tmpfs; None where that is not allowed."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", os.fspath(directory)]
    try:
        done = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        done = False
    try:
        yield Disk(directory) if done else None
    finally:
        if done:
            subprocess.run(["umount", "--lazy", os.fspath(directory)], check=True)


@contextmanager
def ext4_disk(directory: Path, *, reserved_percent: int) -> Iterator[Disk | None]:
    """Mount a small ext4 that keeps blocks for root; None where that is not allowed."""
    directory.mkdir()
    image = directory.with_suffix(".image")
    image.touch()
    os.truncate(image, DISK)
    commands = (
        ["mkfs.ext4", "-q", "-F", "-m", str(reserved_percent), os.fspath(image)],
        ["mount", "-o", "loop", os.fspath(image), os.fspath(directory)],
    )
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
        image.unlink()


class Budget(FaultyFiles):
    """A disk as the kernel shows one that fills up: a short write, then ENOSPC."""

    left: int | None = None

    def _pwritev(self, fd: int, buffers: Any, position: int) -> int:  # type: ignore[override]
        if self.left is not None:
            whole = b"".join(map(bytes, buffers))
            allowed = min(len(whole), self.left)
            if not allowed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.left -= allowed
            buffers = [whole[:allowed]]
        return super()._pwritev(fd, buffers, position)


class Left(NamedTuple):
    """So many pages, or with a model bytes, are free."""

    size: int
    durability: str


def check_full_disk(case: Left, *, place: Path, disk: Disk | None) -> int:
    """Append to a disk that fills up; returns how many appends there was room for."""
    root = (disk.path if disk else place) / f"root-{os.getpid()}"
    shutil.rmtree(root, ignore_errors=True)
    # The journal is not on the disk that fills up.
    journal_path = place / f"root-{os.getpid()}.journal"
    journal_path.unlink(missing_ok=True)
    end = forks.run(lambda: _fill(root, journal_path, case, disk))
    if disk:
        disk.free()
    assert end.finding() is None, end.finding()
    judge(root, journal=journal_path)
    return int(end.value)


def _fill(root: Path, journal: Path, case: Left, disk: Disk | None) -> int:
    made: list[Budget] = []

    def seam(path: Any, **options: Any) -> Budget:
        made.append(Budget(path, **options))
        return made[-1]

    world = World(root, Journal(journal), seam, forgiving=True)
    for step in (("open", "os"), ("create", "d", 2, 20_000)):
        world.do(step)
    for key in PARTITIONS:
        world.do(("send", *key, 1))
    assert world.errors == []
    if disk:
        disk.leave(case.size)
    else:
        made[-1].left = case.size
    room = _until_full(world, case.durability)
    _check_while_full(world, disk)
    if disk:
        disk.free()
    else:
        made[-1].left = None
    _check_after(world)
    journal_check.check(world.log, entries(journal), goes_on=False)
    return room


def _until_full(world: World, durability: str) -> int:
    room = 0
    while not world.errors:
        assert room < 10_000, "the disk never gets full"
        world.do(("send", *PARTITIONS[room % 2], 1, durability, 3000))
        room += 1
    assert isinstance(world.errors[0], DiskFullError), repr(world.errors[0])
    return room - 1


def _check_while_full(world: World, disk: Disk | None) -> None:
    """Nothing can be appended for certain, everything can be read, by everybody."""
    ends = {key: world.log.partition(*key).end_offset() for key in PARTITIONS}
    for key in PARTITIONS * 2:
        known = len(world.errors)
        world.do(("send", *key, 5, "os", 3000))
        assert [type(one) for one in world.errors[known:]] == [DiskFullError], world.errors
        assert world.log.partition(*key).end_offset() == ends[key]
    for key in PARTITIONS:
        assert len(journal_check.rows(world.log, *key)) == ends[key]

    def read() -> None:
        log = embedlog.open(world.path, mode="r")
        for key, end in ends.items():
            assert len(journal_check.rows(log, *key)) == end
        assert log.partition("d", 0).reader(ends["d", 0]).read() == []

    def join() -> None:
        try:
            log = embedlog.open(world.path)
        except StorageError as error:
            _check_full(error)
        else:
            for key, end in ends.items():
                assert len(journal_check.rows(log, *key)) == end

    def begin() -> None:
        try:
            embedlog.open(disk.path / "another") if disk else None
        except StorageError as error:
            _check_full(error)

    for work in (read, join, begin):
        end = forks.run(work)
        assert end.finding() is None, f"{work.__name__}: {end.finding()}"
    if disk:
        shutil.rmtree(disk.path / "another", ignore_errors=True)


def _check_full(error: StorageError) -> None:
    assert isinstance(error, DiskFullError), repr(error)


def _check_after(world: World) -> None:
    world.forgiving = False
    for key in PARTITIONS:
        log = world.log.partition(*key)
        end = log.tail().log_end_offset
        world.do(("send", *key, 2, "os"))
        world.do(("send", *key, 1, "fsync"))
        assert log.end_offset() == end + 3
