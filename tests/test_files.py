"""The room that touches the file system: whole writes, safe names, locks, the wake page."""

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
from support import forks
from support.children import in_child, in_threads
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
    """The files of an empty root; no descriptor of them is left open."""
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


def test_what_is_written_is_read(files, fd):
    """All kinds of buffers arrive, in order, at the position asked for."""
    written = files.write(fd, [b"one", bytearray(b"two"), memoryview(b"three")], 5)

    assert written == 11
    assert files.read(fd, 100, 5) == b"onetwothree"
    assert files.size(fd) == 16


@pytest.mark.parametrize("count", [0, 1, 1024, 1025, 5000])
def test_a_write_takes_any_number_of_buffers(files, fd, count):
    """The kernel takes 1,024 buffers at a time; the caller need not know."""
    assert files.write(fd, [b"ab"] * count, 0) == 2 * count
    assert files.read(fd, 2 * count + 1, 0) == b"ab" * count


def test_a_read_ends_where_the_file_does(files, fd):
    """A read past the end is short or empty, and a vast one allocates nothing."""
    files.write(fd, [b"abc"], 0)

    assert files.read(fd, 2, 0) == b"ab"
    assert files.read(fd, 10, 1) == b"bc"
    assert files.read(fd, 1 << 50, 0) == b"abc"
    assert files.read(fd, 1 << 50, 7) == b""


def test_memory_that_is_given_is_filled_as_far_as_the_file_goes(files, fd, monkeypatch):
    """Also where the kernel gives a little at a time; what lies beyond stays as it was (P11)."""
    files.write(fd, [b"abcdef"], 0)
    whole, rest, none = bytearray(4), bytearray(b"......"), bytearray(2)

    assert files.read_into(fd, whole, 1) == 4
    few = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: few(fd, [to[0][:1]], at))
    assert files.read_into(fd, rest, 3) == 3
    assert files.read_into(fd, none, 100) == 0
    assert (whole, rest, none) == (b"bcde", b"def...", b"\0\0")


def test_a_map_outlives_its_descriptor_and_its_name(files, fd):
    """Readers keep the bytes of a file that was deleted (P20)."""
    files.write(fd, [b"abc"], 0)
    mapped = files.map(fd, 3)
    files.close(fd)
    files.unlink("file")

    assert mapped[:] == b"abc"
    mapped.close()


def test_a_map_longer_than_the_file_is_refused(files, fd):
    """Touching it would be SIGBUS (P12)."""
    files.write(fd, [b"abc"], 0)

    with pytest.raises(StorageError) as caught:
        files.map(fd, 4096)
    assert caught.value.errno == errno.EINVAL


def test_truncate_sync_and_drop_cache_keep_the_rest(files, fd):
    """What is left after a cut survives the cache being dropped."""
    files.write(fd, [b"abcdef"], 0)
    files.truncate(fd, 4)
    files.sync(fd)
    files.drop_cache(fd)

    assert files.read_file("file") == b"abcd"


def test_a_file_is_replaced_as_a_whole(files, tmp_path):
    """A new content takes the place of the old one and leaves nothing else behind."""
    files.make_directory("inner")
    files.write_file("inner/file", b"old")
    (tmp_path / "inner/file.0.tmp").write_bytes(b"left behind by a killed process")
    files.write_file("inner/file", b"new")

    assert files.read_file("inner/file") == b"new"
    assert files.list("inner") == ["file", "file.0.tmp"]


def test_a_full_file_raises_with_its_errno(files, fd):
    """A limit first shortens the write, then refuses it; the errno says which (P8, P11)."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
    try:
        with pytest.raises(StorageError) as caught:
            files.write(fd, [b"x" * 600] * 2, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)

    assert caught.value.errno == errno.EFBIG
    assert caught.value.operation == "write"
    assert caught.value.path == f"{files.root}/file"
    assert files.size(fd) == 1000


def test_a_full_disk_has_its_own_error(files):
    """ENOSPC is DiskFullError, and a failed sync is never one that may be tried again (P9, P10)."""
    full = files._failed(OSError(errno.ENOSPC, "full"), "write", "file")
    sync = files._failed(OSError(errno.ENOSPC, "full"), "sync", "file", DurabilityError)

    assert type(full) is DiskFullError
    assert full.retriable
    assert type(sync) is DurabilityError
    assert not sync.retriable


def test_a_storage_error_travels(files):
    """A worker process sends it home with all its facts."""
    with pytest.raises(StorageError) as caught:
        files.open("absent")

    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.errno, copy.path, copy.operation) == (errno.ENOENT, f"{files.root}/absent", "open")


# Names


def test_files_and_directories_are_for_their_user_only(files, fd):
    """Modes are 0600 and 0700, whatever the umask would allow (F4)."""
    files.make_directory("inner")

    assert stat.S_IMODE(os.stat(files.path("file")).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(files.path("inner")).st_mode) == 0o700


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "", ".", "..", "a//b", "a/"])
def test_no_path_leads_out_of_the_root(files, path):
    """A path with "..", an absolute or an empty one is refused (P22)."""
    with pytest.raises(StorageError):
        files.open(path)
    with pytest.raises(StorageError):
        files.make_directory(path)


def test_links_and_pipes_are_refused(files, tmp_path):
    """A planted link, directory link, pipe or second name is not opened, and nothing hangs."""
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


def test_names_come_and_go(files, fd):
    """Listing, renaming over a file, unlinking, and asking whether something exists."""
    files.make_directory("inner")
    files.make_directory("inner")
    files.write_file("other", b"other")
    files.rename("file", "inner/moved")
    files.rename("other", "inner/moved")

    assert files.list("") == ["inner"]
    assert files.list("inner") == ["moved"]
    assert files.read_file("inner/moved") == b"other"
    assert files.exists("inner/moved")
    assert not files.exists("inner/moved/deeper")
    files.unlink("inner/moved")
    files.unlink("inner/moved", missing_ok=True)
    files.sync_directory("inner")
    files.remove_directory("inner")
    assert not files.exists("inner")


@pytest.mark.parametrize(
    "call",
    [
        lambda files: files.unlink("absent"),
        lambda files: files.rename("absent", "other"),
        lambda files: files.list("absent"),
        lambda files: files.sync_directory("absent"),
        lambda files: files.remove_directory("absent"),
        lambda files: files.read_file("absent/file"),
        lambda files: files.make_directory("absent/inner"),
    ],
)
def test_what_is_absent_is_a_storage_error(files, call):
    """Every error of the system is ours, with its errno and the path."""
    with pytest.raises(StorageError) as caught:
        call(files)
    assert caught.value.errno == errno.ENOENT
    assert "absent" in caught.value.path


def test_a_directory_made_again_may_be_refused(files, fd):
    """A file in its place is always refused."""
    files.make_directory("inner")
    for path, exist_ok in (("inner", False), ("file", True)):
        with pytest.raises(StorageError) as caught:
            files.make_directory(path, exist_ok=exist_ok)
        assert caught.value.errno == errno.EEXIST


# The root


def test_a_root_is_made_for_its_user(tmp_path):
    """`create_root` makes parents too, and keeps what is there."""
    root = tmp_path / "a/b"
    Files.create_root(root)
    Files.create_root(root)

    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert Files(root).list("") == []


def test_a_root_that_is_a_file_is_no_log(tmp_path):
    """A path that is a file is refused, however it is given."""
    (tmp_path / "file").touch()
    with pytest.raises(NotALogError):
        Files.create_root(tmp_path / "file")
    with pytest.raises(NotALogError):
        Files(tmp_path / "file")
    with pytest.raises(StorageError):
        Files(tmp_path / "absent")


def test_a_remote_file_system_is_refused(tmp_path, monkeypatch):
    """NFS, SMB, 9p and FUSE only with unsafe_filesystem=True, or to read (P23)."""
    for magic in (0x6969, 0x517B, 0xFF534D42, 0x01021997, 0x65735546):
        monkeypatch.setattr(Files, "_magic", lambda files, magic=magic: magic)
        with pytest.raises(UnsupportedFilesystemError):
            Files(tmp_path)
        Files(tmp_path, unsafe_filesystem=True).close_all()
        Files(tmp_path, writable=False).close_all()


def test_a_root_anyone_may_write_to_is_refused(tmp_path):
    """Others could replace its files; with the sticky bit they could not (F4)."""
    tmp_path.chmod(0o777)
    with pytest.raises(UnsupportedFilesystemError):
        Files(tmp_path)
    tmp_path.chmod(0o1777)
    Files(tmp_path).close_all()


def test_a_root_to_read_is_not_changed(tmp_path):
    """Every change raises ReadOnlyError before the system is asked (P19)."""
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


def test_the_place_is_known(files, tmp_path):
    """Identity, boot, free space and file system: what recovery and errors need."""
    status = tmp_path.stat()

    assert files.identity() == (status.st_dev, status.st_ino)
    assert len(files.boot_id()) == 36
    assert files.free_bytes() > 0
    assert files.filesystem()
    assert files.path("a/b") == f"{files.root}/a/b"


def test_closed_files_say_so(files, fd):
    """Closing twice is fine; using what was closed is not."""
    files.close(fd)
    files.close(fd)
    other = files.open("file")
    files.close_all()
    files.close_all()

    for use in (lambda: files.open("file"), lambda: files.size(other), files.identity):
        with pytest.raises(ClosedError):
            use()


# Locks


def test_a_lock_excludes_other_openings_even_here(files, fd):
    """A second opening is somebody else, in this process too (facts 2.1)."""
    other = files.open("file", write=True)
    files.lock(fd, 1)

    assert not files.try_lock(other)
    assert not files.try_lock(other, shared=True)
    files.unlock(fd)
    assert files.try_lock(other, shared=True)
    assert files.try_lock(fd, shared=True)


def test_a_timeout_names_the_holder(files, holder):
    """LockTimeoutError says which process holds the lock and what it does (P16)."""
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
    """Death is seen in milliseconds (P15)."""
    fd = files.open("lock", write=True)
    assert not files.try_lock(fd)
    threading.Timer(0.05, holder.kill).start()

    started = time.monotonic()
    files.lock(fd, patient(10))
    assert time.monotonic() - started < patient(2)


def test_a_forked_child_leaves_the_lock_to_its_parent(files, fd):
    """The child closes what it inherited, and its own opening is somebody else (P18)."""
    files.lock(fd, 1)

    def lock_again():
        files.after_fork()
        return files.try_lock(files.open("file", write=True))

    assert not in_child(lock_again)
    other = files.open("file", write=True)
    assert not files.try_lock(other)


# The wake page


@pytest.fixture
def page(files):
    """The page of a process that does not wait."""
    page = WakePage(files)
    yield page
    page.close()


def test_a_waiter_wakes_when_the_counter_moves(files, page):
    """Also in another mapping that may only read (facts 2.5)."""
    reader = WakePage(Files(files.root, writable=False))
    reader.join()  # it cannot be counted, and polls
    page.join()
    for each in (reader, page):
        seen = each.value()
        threading.Timer(0.05, page.advance).start()

        started = time.monotonic()
        each.wait(seen, patient(10))

        assert time.monotonic() - started < patient(5)
        assert each.value() != seen


def test_nobody_waits_for_what_has_happened(page):
    """A publication between the look and the wait is not slept through."""
    page.join()
    seen = page.value()
    page.advance()

    started = time.monotonic()
    page.wait(seen, patient(10))
    assert time.monotonic() - started < patient(1)


def test_a_wait_ends_with_its_timeout(page):
    started = time.monotonic()
    page.wait(page.value(), 0.05)
    page.wait(page.value(), 0)
    page.wait(page.value(), -1)
    assert 0.04 < time.monotonic() - started < patient(1)


def test_no_count_is_lost_when_many_advance(files, page):
    """The kernel adds: threads and processes count together, and the counter never goes back."""

    def advance():
        for _ in range(2000):
            page.advance()

    page.join()
    seen = page.value()
    child = forks.Child(advance)
    with in_threads(advance, advance):
        pass
    child.end().result()

    assert page.value() == seen + 6000


def test_the_counter_wraps_around(page):
    page.join()
    page._counter[0] = 0xFFFFFFFF
    page.advance()
    assert page.value() == 0


def test_without_a_futex_a_waiter_polls(files, monkeypatch):
    """On another processor it is slower, not wrong."""
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(machine="abacus"))
    page = WakePage(files)
    page.join()
    seen = page.value()
    threading.Timer(0.02, page.advance).start()
    started = time.monotonic()
    page.wait(seen, patient(5))

    assert page.value() != seen
    assert time.monotonic() - started < patient(4)
    page.leave()
    page.close()


def test_a_closed_page_says_so(files):
    page = WakePage(files)
    page.close()
    page.close()
    for use in (page.value, page.advance, lambda: page.wait(0, 1)):
        with pytest.raises(ClosedError):
            use()
    page.join()
    page.leave()


def test_nobody_calls_the_kernel_for_readers_that_are_not_there(files, page, monkeypatch):
    """On x86, where a lock keeps the look at the number behind the commit; else always."""
    calls = []
    monkeypatch.setattr("embedlog.files.wake_page._add_and_wake", lambda *told: calls.append(told))
    page._may_skip = True
    page.advance()
    assert not calls

    page._may_skip = False
    page.advance()
    assert len(calls) == 1


def test_who_joins_is_counted_until_it_leaves(files, page):
    """Each once, whatever it forgets; the child of a fork takes nobody off."""
    other = WakePage(files)
    waiters = page._waiters
    page.join()
    page.join()
    other.join()
    other.join()
    assert waiters[0] == 4
    page.leave()
    assert waiters[0] == 3

    in_child(lambda: (page.leave(), other.close()))
    assert waiters[0] == 3

    for _ in range(3):
        page.leave()
    assert waiters[0] == 2
    other.close()
    assert waiters[0] == 0
