"""How long does it take to look up a key among a million, beside embedded key-value stores?

All have the same million keys of 16 bytes with values of about 100.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import lmdb
import pyarrow as pa
import pytest

import embedlog

KEYS = 1_000_000
LOOK_UPS = 1000
_AT_ONCE = 10_000
Get = Callable[[bytes], bytes | None]


def key(number: int) -> bytes:
    """Return one of the keys, which are not in the order of their numbers."""
    return b"%016x" % (number * 0x9E3779B97F4A7C15 % (1 << 64))


def pairs(start: int) -> list[tuple[bytes, bytes]]:
    """Return some of the keys with their values."""
    return [(key(number), b"%0100d" % number) for number in range(start, start + _AT_ONCE)]


@contextmanager
def open_embedlog(path: Path, partitions: int = 1, codec: str = "none") -> Iterator[Get]:
    """Open a compacted topic, indexed."""
    with embedlog.open(path) as log:
        config = {"cleanup.policy": "compact", "segment.bytes": 64 << 20}
        topic = log.create_topic("t", partitions, {**config, "compression.type": codec})
        with log.producer() as producer:
            for start in range(0, KEYS, _AT_ONCE):
                keys, values = zip(*pairs(start), strict=True)
                producer.send_batch("t", list(values), keys=list(keys))
        log.housekeeping.compact("t", force=True)
        yield topic.get


@contextmanager
def open_typed(path: Path) -> Iterator[Get]:
    """Open a compacted typed topic of four columns, indexed."""
    with embedlog.open(path) as log:
        schema = pa.schema(
            {"id": pa.binary(), "a": pa.int64(), "b": pa.float64(), "c": pa.binary()}
        )
        config = {"cleanup.policy": "compact", "segment.bytes": 64 << 20}
        topic = log.create_topic("t", 1, config, schema=schema, key="id")
        with log.producer() as producer:
            for start in range(0, KEYS, _AT_ONCE):
                keys, values = zip(*pairs(start), strict=True)
                numbers = range(start, start + _AT_ONCE)
                columns = keys, numbers, map(float, numbers), [value[-80:] for value in values]
                lists = dict(zip(schema.names, map(list, columns), strict=True))
                producer.append_table("t", pa.table(lists, schema))
        log.housekeeping.compact("t", force=True)
        yield topic.get


@contextmanager
def open_lmdb(path: Path) -> Iterator[Get]:
    """Open LMDB; each look-up is a transaction of its own."""
    with lmdb.open(str(path), map_size=1 << 30, sync=False, metasync=False) as store:
        with store.begin(write=True) as txn:
            for start in range(0, KEYS, _AT_ONCE):
                txn.cursor().putmulti(pairs(start))

        def get(key: bytes) -> bytes | None:
            with store.begin() as txn:
                return txn.get(key)

        yield get


@contextmanager
def open_sqlite(path: Path) -> Iterator[Get]:
    """Open SQLite in WAL mode, with the keys as the primary key of a table without rowids."""
    store = sqlite3.connect(path / "db")
    store.execute("pragma journal_mode=wal")
    store.execute("create table t (key blob primary key, value blob) without rowid")
    for start in range(0, KEYS, _AT_ONCE):
        store.executemany("insert into t values (?, ?)", pairs(start))
    store.commit()

    def get(key: bytes) -> bytes | None:
        row = store.execute("select value from t where key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    yield get
    store.close()


@contextmanager
def open_rocksdb(path: Path) -> Iterator[Get]:
    """Open RocksDB, if rocksdict is installed."""
    rocksdict = pytest.importorskip("rocksdict")
    store = rocksdict.Rdict(str(path), rocksdict.Options(raw_mode=True))
    for start in range(0, KEYS, _AT_ONCE):
        for each, value in pairs(start):
            store[each] = value
    store.flush()
    yield store.get
    store.close()


STORES = {
    "embedlog": open_embedlog,
    "embedlog-lz4": partial(open_embedlog, codec="lz4"),
    "embedlog-typed": open_typed,
    "lmdb": open_lmdb,
    "sqlite": open_sqlite,
    "rocksdb": open_rocksdb,
}


@pytest.fixture(scope="module", params=STORES)
def get(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Get]:
    """Return what looks a key up in a store."""
    with STORES[request.param](tmp_path_factory.mktemp(request.param)) as get:
        yield get


@pytest.mark.parametrize("asked", ["hit", "miss"])
def bench_get(benchmark, note, get, asked):
    """Keys at random, each by a call of its own; the time is that of a thousand."""
    rng = random.Random(7)
    shift = 0 if asked == "hit" else KEYS

    def look_up():
        return [get(each) for each in keys]

    keys = [key(rng.randrange(KEYS) + shift) for _ in range(LOOK_UPS)]
    assert sum(value is not None for value in look_up()) == (0 if shift else LOOK_UPS)
    note(records=LOOK_UPS)

    def new_keys():
        keys[:] = [key(rng.randrange(KEYS) + shift) for _ in range(LOOK_UPS)]

    benchmark.pedantic(look_up, setup=new_keys, rounds=30, warmup_rounds=2)


@pytest.mark.parametrize("partitions", [1, 12])
def bench_get_many(benchmark, note, tmp_path, partitions):
    """The same by one call."""
    rng = random.Random(7)
    with open_embedlog(tmp_path, partitions) as get:
        topic = get.__self__
        note(records=LOOK_UPS)
        benchmark.pedantic(
            topic.get_many,
            setup=lambda: (([key(rng.randrange(KEYS)) for _ in range(LOOK_UPS)],), {}),
            rounds=30,
            warmup_rounds=2,
        )


def bench_records_of(benchmark, note, log):
    """The hundred records of a key among a million of ten thousand keys."""
    topic = log.create_topic("t", 1, {"key.index.enable": True, "segment.bytes": 64 << 20})
    with log.producer() as producer:
        keys, values = zip(*pairs(0), strict=True)
        for _ in range(KEYS // _AT_ONCE):
            producer.send_batch("t", list(values), keys=list(keys))
    log.partition("t", 0).roll()
    log.housekeeping.run()
    rng = random.Random(7)
    note(records=KEYS // _AT_ONCE)

    def look_up():
        assert len(topic.records_of(key(rng.randrange(_AT_ONCE)))) == KEYS // _AT_ONCE

    benchmark.pedantic(look_up, rounds=30, warmup_rounds=2)
