"""A log's disk as another host mounts it, over a file system that behaves as NFS does."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_suffix(".c")


def build(directory: Path) -> Path:
    """Compile the file system, and return its program; skip the test where that is not possible."""
    has_tools = all(map(shutil.which, ("gcc", "pkg-config", "unshare", "setpriv")))
    has_libfuse = has_tools and _run("pkg-config", "fuse3").returncode == 0
    may_mount = (
        has_tools and os.path.exists("/dev/fuse") and not _run("unshare", "-m", "true").returncode
    )
    if not (has_libfuse and may_mount):
        pytest.skip("needs root, /dev/fuse, gcc, and libfuse3 with its headers")
    program = directory / "remote_disk"
    flags = _run("pkg-config", "fuse3", "--cflags", "--libs").stdout.split()
    command = ["gcc", "-O1", "-o", str(program), str(_SOURCE), *flags]
    subprocess.run(command, check=True)
    return program


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


@contextmanager
def mounted(program: Path, directory: str, mount: Path) -> Iterator[Path]:
    """Mount a directory at another place of this host, which is like another host for embedlog."""
    mount.mkdir()
    subprocess.run([program, mount, directory], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def on_another_host(program: Path, directory: Path, *command: str) -> list[str]:
    """Return a command that runs another one where the mount hides the directory itself."""
    script = (
        "set -e; mount --make-rprivate /; mkdir -p $2; mount --bind $1 $2; $0 $1 $2; "
        'shift 2; exec "$@"'
    )
    hidden = f"{directory}.server"
    return ["unshare", "-m", "sh", "-c", script, str(program), str(directory), hidden, *command]


def delete_while_read(path: Path) -> None:
    """Have the host of the log delete a file once a reader on another host is half through it."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_ISVTX)


def as_user(user: int, group: int, *command: str) -> list[str]:
    """Return a command that runs another one as a user, who may also run this test's Python."""
    # In a directory of root; the server of the file system does not see capabilities.
    read = [f"--{kind}-caps=+dac_read_search" for kind in ("inh", "ambient")]
    ids = [f"--reuid={user}", f"--regid={user}", f"--groups={group}"]
    return ["setpriv", *ids, *read, *command]
