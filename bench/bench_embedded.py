"""How fast is one record at a time, beside embedded stores?

All append the same values of 100 bytes, numbered in order, and acknowledge each.  With the
durability ``os`` an append is in the page cache, with ``fsync`` on the disk; a plain file is the
floor of that.  RocksDB is left out if rocksdict is not installed; `bench_keys.py` has look-ups.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

import lmdb
import pytest

import embedlog

RECORDS = 200_000
VALUE = b"v" * 100
DURABILITIES = ("os", "fsync")


class Store(NamedTuple):
    """An open store."""

    append: Callable[[], object]
    """Appends one value, and returns once it is acknowledged."""
    append_many: Callable[[int], object]
    """Appends so many values in batches of 1,000."""
    records: Callable[[], Iterator[object]]
    """Yields each record as an object."""


@contextmanager
def open_embedlog(path: Path, durability: str) -> Iterator[Store]:
    """Open a topic of one partition."""
    with embedlog.open(path / "log", durability=durability) as log, log.producer() as producer:
        log.create_topic("t")

        def append_many(records: int) -> None:
            for _ in range(records // 1000):
                producer.send_batch("t", [VALUE] * 1000)

        def records() -> Iterator[object]:
            options = {"auto_offset_reset": "earliest", "consumer_timeout_ms": 0}
            with log.consumer("t", **options) as consumer:
                yield from consumer

        yield Store(lambda: producer.send("t", VALUE).result(), append_many, records)


@contextmanager
def open_lmdb(path: Path, durability: str) -> Iterator[Store]:
    """Open LMDB; an append is a transaction of its own."""
    sync, numbers = durability == "fsync", count()
    with lmdb.open(str(path), map_size=1 << 30, sync=sync, metasync=sync) as store:

        def append(values: int = 1) -> None:
            with store.begin(write=True) as txn:
                for _ in range(values):
                    txn.put(next(numbers).to_bytes(8, "big"), VALUE, append=True)

        def append_many(records: int) -> None:
            for _ in range(records // 1000):
                append(1000)

        def records() -> Iterator[object]:
            with store.begin() as txn:
                yield from txn.cursor()

        yield Store(append, append_many, records)


@contextmanager
def open_sqlite(path: Path, durability: str) -> Iterator[Store]:
    """Open SQLite in WAL mode; an append is a transaction of its own."""
    store = sqlite3.connect(path / "db", isolation_level=None)
    store.execute("pragma journal_mode=wal")
    store.execute(f"pragma synchronous={'full' if durability == 'fsync' else 'normal'}")
    store.execute("create table t (number integer primary key, value blob)")

    def append_many(records: int) -> None:
        for _ in range(records // 1000):
            store.execute("begin")
            store.executemany("insert into t (value) values (?)", [(VALUE,)] * 1000)
            store.execute("commit")

    yield Store(
        lambda: store.execute("insert into t (value) values (?)", (VALUE,)),
        append_many,
        lambda: store.execute("select number, value from t"),
    )
    store.close()


@contextmanager
def open_rocksdb(path: Path, durability: str) -> Iterator[Store]:
    """Open RocksDB, if rocksdict is installed."""
    rocksdict = pytest.importorskip("rocksdict")
    store, numbers = rocksdict.Rdict(str(path), rocksdict.Options(raw_mode=True)), count()
    options = rocksdict.WriteOptions()
    options.sync = durability == "fsync"

    def append_many(records: int) -> None:
        for _ in range(records // 1000):
            batch = rocksdict.WriteBatch(raw_mode=True)
            for _ in range(1000):
                batch.put(next(numbers).to_bytes(8, "big"), VALUE)
            store.write(batch)

    yield Store(
        lambda: store.put(next(numbers).to_bytes(8, "big"), VALUE, options),
        append_many,
        store.items,
    )
    store.close()


@contextmanager
def open_file(path: Path, durability: str) -> Iterator[Store]:
    """Open a plain file; it has no records."""
    fd, numbers = os.open(path / "file", os.O_RDWR | os.O_CREAT), count()

    def append() -> None:
        os.pwrite(fd, VALUE, next(numbers) * len(VALUE))
        if durability == "fsync":
            os.fdatasync(fd)

    yield Store(append, lambda records: None, lambda: iter(()))
    os.close(fd)


STORES = {
    "embedlog": open_embedlog,
    "LMDB": open_lmdb,
    "SQLite": open_sqlite,
    "RocksDB": open_rocksdb,
    "file": open_file,
}


@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("name", STORES)
def bench_acknowledged_append(benchmark, tmp_path, name, durability):
    """One value, until it is acknowledged; the median is the p50."""
    with STORES[name](tmp_path, durability) as store:
        rounds = 20_000 if durability == "os" else 2_000
        benchmark.pedantic(store.append, rounds=rounds, warmup_rounds=100)
        if name != "file":
            assert sum(1 for _ in store.records()) == rounds + 100


@pytest.mark.parametrize("name", [name for name in STORES if name != "file"])
def bench_records(benchmark, note, tmp_path, name):
    """All records of batches of 1,000, one object for each."""
    with STORES[name](tmp_path, "os") as store:
        store.append_many(RECORDS)
        note(records=RECORDS)
        assert benchmark(lambda: sum(1 for _ in store.records())) == RECORDS


STARTS = {
    "python": "pass",
    "embedlog": """
import embedlog, sys
with embedlog.open(sys.argv[1]) as log:
    log.create_topic("t")
    log.producer().send("t", b"1").result()
    assert next(iter(log.consumer("t", auto_offset_reset="earliest"))).value == b"1"
""",
    "LMDB": """
import lmdb, sys
store = lmdb.open(sys.argv[1])
with store.begin(write=True) as txn:
    txn.put(b"1", b"1")
with store.begin() as txn:
    assert txn.get(b"1") == b"1"
""",
    "SQLite": """
import os, sqlite3, sys
os.mkdir(sys.argv[1])
store = sqlite3.connect(sys.argv[1] + "/db")
store.execute("create table t (number integer primary key, value blob)")
with store:
    store.execute("insert into t (value) values (?)", (b"1",))
assert store.execute("select value from t").fetchone() == (b"1",)
""",
}
"""Programs that make a store in a directory, write a record and read it."""


@pytest.mark.parametrize("name", STARTS)
def bench_start_to_first_record(benchmark, tmp_path, name):
    """A whole process, from its start to its end."""
    directories = (str(tmp_path / str(number)) for number in count())
    command = [sys.executable, "-c", STARTS[name]]
    benchmark.pedantic(
        lambda: subprocess.run([*command, next(directories)], check=True),
        rounds=20,
        warmup_rounds=2,
    )
    assert name == "python" or (tmp_path / "0").exists()
