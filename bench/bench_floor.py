"""How fast are the disk, the memory, the processor and the libraries without embedlog?"""

import fcntl
import os
import sqlite3
from contextlib import closing

import lmdb
import numpy as np
import pyarrow as pa
import pytest

from embedlog.checksum import BACKEND, crc32c
from embedlog.files import Files, WakePage

BATCH = 126_488
"""Size in bytes of the 1,000-record batch of the budget."""
FILE = 64 << 20


@pytest.fixture
def fd(tmp_path):
    fd = os.open(tmp_path / "floor", os.O_CREAT | os.O_RDWR)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("size", [808, BATCH], ids="bytes={}".format)
def bench_pwrite(benchmark, note, fd, size):
    """Append bytes to a file, into the page cache."""
    data, end = bytes(size), [0]

    def write():
        os.pwrite(fd, data, end[0])
        end[0] += size
        if end[0] > 1 << 30:
            os.ftruncate(fd, 0)
            end[0] = 0

    note(bytes=size)
    benchmark(write)
    assert os.fstat(fd).st_size == end[0]


@pytest.mark.parametrize("size", [808, BATCH], ids="bytes={}".format)
def bench_fdatasync(benchmark, note, fd, size):
    """Append bytes to a file and flush them."""
    data, end = bytes(size), [0]

    def write():
        os.pwrite(fd, data, end[0])
        os.fdatasync(fd)
        end[0] += size

    note(bytes=size)
    benchmark.pedantic(write, rounds=300, warmup_rounds=5)
    assert os.fstat(fd).st_size == end[0]


@pytest.mark.parametrize("how", ["zeros", "fallocate"])
def bench_fdatasync_in_place(benchmark, note, fd, how):
    """Overwrite space that was written with zeros before, or only allocated, and flush it.

    The first write to each block that is only allocated is recorded in the file system's journal.
    """
    data, end = bytes(808), [0]
    if how == "zeros":
        os.pwrite(fd, bytes(1 << 20), 0)
    else:
        os.posix_fallocate(fd, 0, 1 << 20)
    os.fdatasync(fd)

    def write():
        os.pwrite(fd, data, end[0])
        os.fdatasync(fd)
        end[0] += len(data)

    note(bytes=len(data))
    benchmark.pedantic(write, rounds=1000, warmup_rounds=20)
    assert end[0] < os.fstat(fd).st_size == 1 << 20


def bench_sqlite_commit(benchmark, tmp_path):
    """One row, in a transaction that survives a power cut."""
    with closing(sqlite3.connect(tmp_path / "db", isolation_level=None)) as db:
        db.execute("pragma journal_mode = wal")
        db.execute("pragma synchronous = full")
        db.execute("create table t (offset integer primary key, key blob, value blob)")
        row = b"k%09d" % 7, b"v" * 100
        insert = "insert into t (key, value) values (?, ?)"
        benchmark.pedantic(db.execute, (insert, row), rounds=1000, warmup_rounds=20)
        assert db.execute("select count(*) from t").fetchone() == (1020,)


def bench_pread(benchmark, note, fd):
    """Read 64 MiB from the page cache, 1 MiB at a time."""
    os.pwrite(fd, os.urandom(FILE), 0)
    note(bytes=FILE)
    assert benchmark(lambda: sum(len(os.pread(fd, 1 << 20, at)) for at in range(0, FILE, 1 << 20)))


def bench_memcpy(benchmark, note):
    """Copy 64 MiB in memory."""
    source, target = np.ones(FILE, np.uint8), np.zeros(FILE, np.uint8)
    note(bytes=FILE)
    benchmark(np.copyto, target, source)
    assert target[-1] == 1


@pytest.mark.parametrize("size", [BATCH, FILE], ids=["in cache", "from memory"])
def bench_crc(benchmark, note, size):
    """CRC-32C of a batch in the CPU cache, and of 64 MiB that do not fit."""
    data = pa.py_buffer(os.urandom(size))
    note(bytes=size, backend=BACKEND)
    assert benchmark(crc32c, data)


def bench_pread_crc(benchmark, note, fd):
    """Read and checksum 64 MiB, 1 MiB at a time: the floor of every verified scan."""
    os.pwrite(fd, os.urandom(FILE), 0)

    def scan():
        return [crc32c(os.pread(fd, 1 << 20, at)) for at in range(0, FILE, 1 << 20)]

    note(bytes=FILE)
    assert len(benchmark(scan)) == FILE >> 20


@pytest.fixture
def env(tmp_path):
    env = lmdb.open(str(tmp_path), sync=False, metasync=False, map_size=FILE, meminit=False)
    with env.begin(write=True) as txn:
        txn.put(b"E" + bytes(12), bytes(115))
    yield env
    env.close()


def bench_lmdb_commit(benchmark, env):
    """One key, not flushed, as for a publication."""

    def commit():
        txn = env.begin(None, None, True)
        txn.put(b"E" + bytes(12), bytes(115))
        txn.commit()

    benchmark(commit)
    assert env.info()["last_txnid"] > 1


def bench_lmdb_get(benchmark, env):
    """One key in its own transaction."""

    def get():
        txn = env.begin()
        value = txn.get(b"E" + bytes(12))
        txn.abort()
        return value

    assert len(benchmark(get)) == 115


def bench_flock(benchmark, fd):
    """Lock and unlock a free file."""

    def lock_and_unlock():
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)

    benchmark(lock_and_unlock)


def bench_futex_wake(benchmark, tmp_path):
    """Advance the counter and wake a counted reader that is not asleep."""
    files = Files(tmp_path)
    page = WakePage(files)
    page.join()
    benchmark(page.advance)
    assert page.value() > 0
    page.close()
    files.close_all()


def bench_append_by_hand(benchmark, note, fd, env):
    """The system calls of one acknowledged append of 808 bytes, and nothing else.

    Two locks, the size, the write, and one commit that reads the row; no reader waits.
    """
    data, end = bytes(808), [0]

    def append():
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.lseek(fd, 0, os.SEEK_END)
        os.pwritev(fd, [data], end[0])
        end[0] += len(data)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        txn = env.begin(None, None, True)
        txn.get(b"E" + bytes(12))
        txn.put(b"E" + bytes(12), bytes(115))
        txn.commit()
        fcntl.flock(fd, fcntl.LOCK_UN)
        fcntl.flock(fd, fcntl.LOCK_UN)

    note(bytes=808)
    benchmark(append)
    assert end[0] > 0
