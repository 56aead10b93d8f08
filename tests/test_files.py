"""The only module that touches the file system: whole writes, safe names, locks, the wake page."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from support.children import in_child
from support.patience import patient

from embedlog.errors import (
    ClosedError,
    DiskFullError,
    DurabilityError,
    LockTimeoutError,
    NotALogError,
    ReadOnlyError,
    StorageError,
    UnsupportedFilesystemError,
)
from embedlog.files import Files, WakePage

pytestmark = pytest.mark.disk  # what it promises depends on the file system

HOLDER = """
import sys, time
from embedlog.files import Files
files = Files(sys.argv[1])
fd = files.open("lock", write=True, create=True)
files.lock(fd, 5)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def files(tmp_path):
    """The files of an empty root; every descriptor is closed at the end."""
    files = Files(tmp_path)
    yield files
    files.close_all()


@pytest.fixture
def fd(files):
    return files.open("file", write=True, create=True)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of the file "lock"."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


# Bytes


@pytest.mark.parametrize("count", [0, 1, 1024, 1025, 5000])
def test_a_write_takes_any_number_of_buffers(files, fd, count):
    """The kernel takes 1,024 buffers per call, which the caller need not know."""
    assert files.write(fd, [b"ab"] * count, 0) == 2 * count
    assert files.read(fd, 2 * count + 1, 0) == b"ab" * count


def test_a_read_ends_at_the_end_of_the_file(files, fd):
    """A read past the end is short or empty, and a huge one allocates nothing."""
    files.write(fd, [b"abc"], 0)

    assert files.read(fd, 2, 0) == b"ab"
    assert files.read(fd, 10, 1) == b"bc"
    assert files.read(fd, 1 << 50, 0) == b"abc"
    assert files.read(fd, 1 << 50, 7) == b""


def test_read_into_fills_a_buffer_up_to_the_end_of_the_file(files, fd, monkeypatch):
    """Also if the kernel reads a little at a time; the rest of the buffer stays as it was (P11)."""
    files.write(fd, [b"abcdef"], 0)
    full, partial, unfilled = bytearray(4), bytearray(b"......"), bytearray(2)

    assert files.read_into(fd, full, 1) == 4
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: preadv(fd, [to[0][:1]], at))
    assert files.read_into(fd, partial, 3) == 3
    assert files.read_into(fd, unfilled, 100) == 0
    assert (full, partial, unfilled) == (b"bcde", b"def...", b"\0\0")


def test_a_map_outlives_its_descriptor_and_its_name(files, fd):
    """Readers can still read the bytes of a deleted file (P20)."""
    files.write(fd, [b"abc"], 0)
    mapped = files.map(fd, 3)
    files.close(fd)
    files.unlink("file")

    assert mapped[:] == b"abc"
    mapped.close()


def test_a_map_longer_than_the_file_is_refused(files, fd):
    """Touching the memory after the end would raise SIGBUS (P12)."""
    files.write(fd, [b"abc"], 0)

    with pytest.raises(StorageError) as caught:
        files.map(fd, 4096)
    assert caught.value.errno == errno.EINVAL


def test_a_file_is_replaced_as_a_whole(files, tmp_path):
    """The new content replaces the old one, and no temporary file of its own is left."""
    files.make_directory("inner")
    files.write_file("inner/file", b"old")
    (tmp_path / "inner/file.0.tmp").write_bytes(b"left behind by a killed process")
    files.write_file("inner/file", b"new")

    assert files.read_file("inner/file") == b"new"
    assert files.list("inner") == ["file", "file.0.tmp"]


def test_a_full_file_raises_with_its_errno(files, fd):
    """A limit first shortens the write, then refuses it with an errno (P8, P11)."""
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old_limit[1]))
    try:
        with pytest.raises(StorageError) as caught:
            files.write(fd, [b"x" * 600] * 2, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_handler)

    assert caught.value.errno == errno.EFBIG
    assert caught.value.operation == "write"
    assert caught.value.path == f"{files.root}/file"
    assert files.size(fd) == 1000


def test_a_full_disk_has_its_own_error(files):
    """ENOSPC is a DiskFullError, and a failed sync is never retriable (P9, P10)."""
    full = files._failed(OSError(errno.ENOSPC, "full"), "write", "file")
    sync = files._failed(OSError(errno.ENOSPC, "full"), "sync", "file", DurabilityError)

    assert type(full) is DiskFullError
    assert full.retriable
    assert type(sync) is DurabilityError
    assert not sync.retriable


def test_a_storage_error_survives_pickling(files):
    """A worker process sends it to its parent with all facts."""
    with pytest.raises(StorageError) as caught:
        files.open("absent")

    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.errno, copy.path, copy.operation) == (errno.ENOENT, f"{files.root}/absent", "open")


# Names


def test_files_and_directories_are_private_to_their_user(files, fd):
    """Modes are 0600 and 0700, even if the umask allows more (F4)."""
    files.make_directory("inner")

    assert stat.S_IMODE(os.stat(files.path("file")).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(files.path("inner")).st_mode) == 0o700


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "", ".", "..", "a//b", "a/"])
def test_no_path_leads_out_of_the_root(files, path):
    """Paths with "..", absolute paths and empty paths are refused (P22)."""
    with pytest.raises(StorageError):
        files.open(path)
    with pytest.raises(StorageError):
        files.make_directory(path)


def test_links_and_pipes_are_refused(files, tmp_path):
    """A link, a directory link, a pipe or a hard link is not opened, and nothing hangs."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").write_bytes(b"secret")
    (tmp_path / "link").symlink_to(tmp_path / "real/file")
    (tmp_path / "directory").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    os.link(tmp_path / "real/file", tmp_path / "second")

    for path in ("link", "directory/file", "pipe", "real"):
        with pytest.raises(StorageError) as caught:
            files.open(path)
        assert caught.value.errno in (errno.ELOOP, errno.ENOTDIR, errno.EINVAL)
    with pytest.raises(StorageError):
        files.open("second", write=True)
    with pytest.raises(StorageError):
        files.list("directory")


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (lambda files: files.unlink("absent"), "absent"),
        (lambda files: files.rename("absent", "other"), "other"),
        (lambda files: files.list("absent"), "absent"),
        (lambda files: files.sync_directory("absent"), "absent"),
        (lambda files: files.remove_directory("absent"), "absent"),
        (lambda files: files.read_file("absent/file"), "absent"),
        (lambda files: files.make_directory("absent/inner"), "absent"),
    ],
)
def test_a_missing_file_is_a_storage_error(files, call, path):
    """Every error of the system is a StorageError, with its errno and the path."""
    with pytest.raises(StorageError) as caught:
        call(files)
    assert caught.value.errno == errno.ENOENT
    assert caught.value.path == f"{files.root}/{path}"


def test_creating_a_directory_again_may_be_refused(files, fd):
    """A file of that name is always refused."""
    files.make_directory("inner")
    for path, exist_ok in (("inner", False), ("file", True)):
        with pytest.raises(StorageError) as caught:
            files.make_directory(path, exist_ok=exist_ok)
        assert caught.value.errno == errno.EEXIST


# The root


def test_a_root_is_created_private_to_its_user(tmp_path):
    """`create_root` also creates parents, and keeps an existing directory."""
    root = tmp_path / "a/b"
    Files.create_root(root)
    Files.create_root(root)

    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert Files(root).list("") == []


def test_a_root_that_is_a_file_is_no_log(tmp_path):
    """A path that is a file is refused by `create_root` and by `Files`."""
    (tmp_path / "file").touch()
    with pytest.raises(NotALogError):
        Files.create_root(tmp_path / "file")
    with pytest.raises(NotALogError):
        Files(tmp_path / "file")
    with pytest.raises(StorageError):
        Files(tmp_path / "absent")


def test_a_remote_file_system_is_refused(tmp_path, monkeypatch):
    """Remote file systems need unsafe_filesystem=True; segments are not mapped there (P23)."""
    assert Files(tmp_path).maps_segments
    for magic in (0x6969, 0x517B, 0xFF534D42, 0x01021997, 0x65735546):
        monkeypatch.setattr(Files, "_magic", lambda files, magic=magic: magic)
        for writable in (True, False):
            with pytest.raises(UnsupportedFilesystemError):
                Files(tmp_path, writable=writable)
            assert not Files(tmp_path, writable=writable, unsafe_filesystem=True).maps_segments


def test_a_root_that_other_users_may_write_to_is_refused(tmp_path):
    """They could replace its files, unless the sticky bit is set (F4)."""
    tmp_path.chmod(0o777)
    with pytest.raises(UnsupportedFilesystemError):
        Files(tmp_path)
    tmp_path.chmod(0o1777)
    Files(tmp_path).close_all()


def test_a_root_that_is_only_read_is_not_changed(tmp_path):
    """Every change raises ReadOnlyError before it calls the system (P19)."""
    (tmp_path / "file").write_bytes(b"abc")
    files = Files(tmp_path, writable=False)

    for change in (
        lambda: files.open("file", write=True),
        lambda: files.write_file("file", b""),
        lambda: files.make_directory("inner"),
        lambda: files.remove_directory("inner"),
        lambda: files.rename("file", "other"),
        lambda: files.unlink("file"),
    ):
        with pytest.raises(ReadOnlyError):
            change()
    assert files.read_file("file") == b"abc"


def test_closed_files_raise_closed_error(files, fd):
    """A second close is allowed, but no other call."""
    files.close(fd)
    files.close(fd)
    other = files.open("file")
    files.close_all()
    files.close_all()

    for call in (lambda: files.open("file"), lambda: files.size(other), files.identity):
        with pytest.raises(ClosedError):
            call()


# Locks


def test_a_lock_excludes_other_descriptors_of_the_same_process(files, fd):
    """Each descriptor has its own lock, as if it were of another process."""
    other = files.open("file", write=True)
    files.lock(fd, 1)

    assert not files.try_lock(other)
    assert not files.try_lock(other, shared=True)
    files.unlock(fd)
    assert files.try_lock(other, shared=True)
    assert files.try_lock(fd, shared=True)


def test_a_timeout_names_the_holder(files, holder):
    """LockTimeoutError has the process that holds the lock, and its state (P16)."""
    fd = files.open("lock", write=True)
    holder.send_signal(signal.SIGSTOP)
    started = time.monotonic()

    with pytest.raises(LockTimeoutError) as caught:
        files.lock(fd, 0.2)

    assert 0.2 <= time.monotonic() - started < patient(1)
    assert caught.value.path == f"{files.root}/lock"
    assert (caught.value.pid, caught.value.state) == (holder.pid, "T")
    assert str(holder.pid) in str(caught.value)


def test_a_killed_holder_frees_the_lock(files, holder):
    """The kernel releases the lock within milliseconds (P15)."""
    fd = files.open("lock", write=True)
    assert not files.try_lock(fd)
    threading.Timer(0.05, holder.kill).start()

    started = time.monotonic()
    files.lock(fd, patient(10))
    assert time.monotonic() - started < patient(2)


def test_a_forked_child_does_not_have_the_lock_of_its_parent(files, fd):
    """The child closes what it inherited, and its own descriptor does not get the lock (P18)."""
    files.lock(fd, 1)

    def try_lock():
        files.after_fork()
        return files.try_lock(files.open("file", write=True))

    assert not in_child(try_lock)
    other = files.open("file", write=True)
    assert not files.try_lock(other)


# The wake page


@pytest.fixture
def page(files):
    """A page that does not wait."""
    page = WakePage(files)
    yield page
    page.close()


def test_without_a_futex_a_waiter_polls(files, monkeypatch):
    """On other processors it is slower, but correct."""
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(machine="abacus"))
    page = WakePage(files)
    page.join()
    value = page.value()
    threading.Timer(0.02, page.advance).start()
    started = time.monotonic()
    page.wait(value, patient(5))

    assert page.value() != value
    assert time.monotonic() - started < patient(4)
    page.leave()
    page.close()


def test_a_closed_page_raises_closed_error(files):
    page = WakePage(files)
    page.close()
    page.close()
    for call in (page.value, page.advance, lambda: page.wait(0, 1)):
        with pytest.raises(ClosedError):
            call()
    page.join()
    page.leave()


def test_the_kernel_is_not_called_without_waiters(files, page, monkeypatch):
    """On x86, where a lock orders the read of their number after the commit; else always."""
    calls = []
    monkeypatch.setattr(
        "embedlog.files.wake_page._add_and_wake", lambda *arguments: calls.append(arguments)
    )
    page._may_skip = True
    page.advance()
    assert not calls

    page._may_skip = False
    page.advance()
    assert len(calls) == 1


def test_a_call_closes_no_file_of_another_one_after_a_close(tmp_path, monkeypatch):
    """Another thread closes the root in the middle, and its number is another file's then."""
    files, unlink, others = Files(tmp_path), os.unlink, []
    (tmp_path / "name").touch()

    def close_first(name, *, dir_fd):
        unlink(name, dir_fd=dir_fd)
        files.close_all()
        others.extend(os.open(tmp_path, os.O_RDONLY) for _ in range(3))
        assert dir_fd in others

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", close_first)
        files.unlink("name")
    for other in others:
        os.close(other)
