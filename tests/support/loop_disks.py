"""Disks that fail: each an ext4 on a loop device of its own, which a test breaks and repairs.

At a power cut each of them stops at once and keeps what ext4 had written by then: what was flushed,
and of the rest what `write_some_back` chose.  The next boot mounts a copy of that image.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DISK_BYTES = 64 << 20
LOG = "log"
"""The directory of the log on each disk: an empty mount point must not be taken for it."""

# linux/loop.h and ext4.h
_LOOP_SET_STATUS64, _LOOP_GET_STATUS64 = 0x4C04, 0x4C05
_LOOP_INFO_BYTES, _SIZE_LIMIT_AT = 232, 32
_EXT4_IOC_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2
_MOUNT_OPTIONS = ("defaults", "nodelalloc", "data=writeback")
"""Of the disks in turns: what is not flushed gets to the disk in another order with each."""

FAULTS = (
    *("fails", "dies", "read-only", "unmounted", "full", "renamed", "deleted", "replaced"),
    *("restored", "copied", "swapped"),
)
"""What a disk may do: `fails` to read and write, as far as the cache does not hide it; `dies`
at once, for every operation; the kernel makes it `read-only`; and what people do to it.  A disk
that was `replaced` is empty, and one that was `restored` has what it had some time before; in the
place of one there is for a while one that was `copied` from another, and two of them may be
`swapped`.  One of the other kinds comes back with what it had."""


class LoopDisk:
    """A directory on a disk of its own.

    Args:
        directory: Where to make the image and the mount point.
        number: Its number.
    """

    def __init__(self, directory: Path, number: int) -> None:
        self.path = directory / f"disk{number}"
        self.log = self.path / LOG
        self._directory, self._number, self._images = directory, number, 0
        self._device, self._image, self._saved = "", Path(), Path()
        self._works_again = threading.Timer(20, self._limit, (0,))
        self._held: int | None = None
        """A descriptor of the device, which the kernel detaches once nothing uses it."""
        self.path.mkdir()
        self._mount(self._new_image())
        self.log.mkdir()

    # Faults

    def break_by(self, fault: str, other: LoopDisk) -> None:
        """Let the disk fail; ``other`` is the one that is copied, or swapped with it."""
        match fault:
            case "fails":
                self._limit(4096)
                # A truncation whose blocks are past the end of the device is tried again and again
                # by ext4, for as long as they are, and holds up everything on the disk.
                self._works_again = threading.Timer(20, self._limit, (0,))
                self._works_again.daemon = True
                self._works_again.start()
            case "dies":
                self._shut_down()
            case "read-only":
                # What the kernel does after an error; it refuses an ordinary remount.
                _run("mount", "-o", "remount,abort", self.path)
            case "unmounted" | "replaced":
                _run("umount", "--lazy", self.path)
            case "full":
                self._fill()
            case "renamed":
                self.log.rename(self.path / "elsewhere")
            case "restored":
                self._saved = self._snapshot()
            case "copied":
                copied = other._snapshot()
                # Of one instant, too: what is written meanwhile would be in a part of it only.
                self._saved = self._snapshot()
                self._exchange(copied)
            case "swapped":
                self._swap(other)
            case "deleted":
                # Of one of two threads that delete and create, one may come late.
                while self.log.exists():
                    shutil.rmtree(self.log, ignore_errors=True)

    def repair_after(self, fault: str, other: LoopDisk) -> None:
        """Make the disk usable again, with what it had, or empty if that was lost."""
        match fault:
            case "swapped":
                self._swap(other)
            case "fails":
                self._works_again.cancel()
                self._limit(0)
                if not self.works():
                    self._exchange(self._copied_image())
            case "dies" | "read-only":
                self._exchange(self._copied_image())
            case "unmounted":
                _run("mount", self._device, self.path)
            case "replaced":
                self._exchange(self._new_image())
            case "restored" | "copied":
                self._exchange(self._saved)
            case "full":
                (self.path / "ballast").unlink()
            case "renamed":
                (self.path / "elsewhere").rename(self.log)
            case "deleted":
                self.log.mkdir()

    def _swap(self, other: LoopDisk) -> None:
        """Mount each of two disks at the other's path."""
        for disk in (self, other):
            _run("umount", "--lazy", disk.path)
        mine = self._device, self._image, self._held
        self._device, self._image, self._held = other._device, other._image, other._held
        other._device, other._image, other._held = mine
        for disk in (self, other):
            _run("mount", disk._device, disk.path)

    def _snapshot(self) -> Path:
        """Copy the image as of one instant, as a backup does; of a broken disk, as it is."""
        frozen = not subprocess.run(
            ["fsfreeze", "--freeze", self.path], capture_output=True, check=False
        ).returncode
        try:
            return self._copy(self._image)
        finally:
            if frozen:
                _run("fsfreeze", "--unfreeze", self.path)

    # Power cuts

    def write_some_back(self, dice: random.Random) -> None:
        """Have the kernel write some of what is not flushed, as it may at any time."""
        if dice.random() < 0.2:
            subprocess.run(["sync", "--file-system", self.path], check=False, capture_output=True)
            return
        share = dice.choice((0.0, 0.3, 0.9))
        for path in self.log.rglob("*.arrows"):
            with suppress(OSError):  # it was deleted meanwhile
                fd = os.open(path, os.O_RDONLY)
                try:
                    start = dice.randrange(os.fstat(fd).st_size + 1)
                    if dice.random() < share:
                        os.posix_fadvise(fd, start, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)

    def cut_power(self) -> None:
        """Let nothing reach the disk from now on; `boot` makes it work again."""
        with suppress(OSError):  # it is unmounted, or was dead before
            self._shut_down()

    def boot(self) -> None:
        """Mount what was on the disk at the power cut, unless it was unmounted before."""
        if os.path.ismount(self.path):
            self._exchange(self._copy(self._image))

    def _limit(self, size: int) -> None:
        """Have all that is past the first bytes of the device fail with EIO; 0 is no limit."""
        fd = os.open(self._device, os.O_RDWR)
        try:
            info = bytearray(_LOOP_INFO_BYTES)
            fcntl.ioctl(fd, _LOOP_GET_STATUS64, info)
            struct.pack_into("Q", info, _SIZE_LIMIT_AT, size)
            fcntl.ioctl(fd, _LOOP_SET_STATUS64, bytes(info))
        finally:
            os.close(fd)

    def _shut_down(self) -> None:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def works(self) -> bool:
        """Whether it takes a write."""
        try:
            fd = os.open(self.path / "probe", os.O_RDWR | os.O_CREAT)
            try:
                os.pwrite(fd, b"probe", 0)
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError:
            return False
        return True

    def _fill(self) -> None:
        with open(self.path / "ballast", "wb") as file:
            size = 1 << 20
            while size:
                with suppress(OSError):
                    while True:
                        end = os.lseek(file.fileno(), 0, os.SEEK_END)
                        os.posix_fallocate(file.fileno(), end, size)
                size >>= 4

    # Images and mounts

    def _new_image(self) -> Path:
        image = self._next_image()
        image.touch()
        os.truncate(image, DISK_BYTES)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", image)
        return image

    def _copied_image(self) -> Path:
        """Copy what reached the disk, as on a disk that was dead for some time."""
        with suppress(OSError):
            self._shut_down()  # what still has it open must not write to it meanwhile
        return self._copy(self._image)

    def _copy(self, source: Path) -> Path:
        """Copy an image as it is, as at a power cut."""
        image = self._next_image()
        _run("cp", "--sparse=always", source, image)
        subprocess.run(["e2fsck", "-fy", image], capture_output=True, check=False)
        return image

    def _next_image(self) -> Path:
        self._images += 1
        return self._directory / f"disk{self._number}-{self._images}.image"

    def _exchange(self, image: Path) -> None:
        """Put a disk in the place of the present one, which some processes may have open."""
        before = self._image
        self._unmount()
        self._let_go()
        before.unlink()
        self._mount(image)
        # A disk that died young has not even that.
        self.log.mkdir(exist_ok=True)

    def _mount(self, image: Path) -> None:
        self._device = _run("losetup", "--find", "--show", image)
        self._held = os.open(self._device, os.O_RDWR)
        # Takes effect when nothing uses it any more, also if this process is killed.
        _run("losetup", "--detach", self._device)
        options = _MOUNT_OPTIONS[self._number % len(_MOUNT_OPTIONS)]
        _run("mount", "-o", options, self._device, self.path)
        self._image = image

    def _let_go(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _unmount(self) -> None:
        while os.path.ismount(self.path):
            _run("umount", "--lazy", self.path)

    def remove(self) -> None:
        """Unmount it, and delete its image."""
        self._works_again.cancel()
        self._unmount()
        self._let_go()
        for image in self._directory.glob(f"disk{self._number}-*.image"):
            image.unlink()
        shutil.rmtree(self.path)


def _run(*command: object) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def loop_disks(directory: Path, count: int) -> Iterator[list[LoopDisk]]:
    """Mount disks for the body of a ``with``.

    Raises:
        OSError: That is not allowed here.
    """
    disks: list[LoopDisk] = []
    try:
        for number in range(count):
            disks.append(LoopDisk(directory, number))
        yield disks
    finally:
        for disk in disks:
            disk.remove()
