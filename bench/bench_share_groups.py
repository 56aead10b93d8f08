"""What does a job cost that is taken, done and acknowledged, beside other queues?

Each has `JOBS` jobs of 100 bytes, which one worker takes and acknowledges: one by one, each with a
commit of its own, or in batches of 100.  All are without fsync, as their defaults or settings say:
embedlog with durability ``os``, SQLite with ``synchronous=off``, Redis without an append-only file.
Queues that are not installed are left out: ``pip install huey persist-queue redis``, and a
``redis-server`` on the path.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow.compute  # noqa: F401  Loading it is no part of a job.
import pytest

import embedlog

JOBS, BATCH = 3000, 100
JOB = b"j" * 100

Drain = Callable[[], int]
"""Takes, does and acknowledges all jobs; returns how many."""


@contextmanager
def open_embedlog(path: Path, batch: int) -> Iterator[Drain]:
    """A share group, in explicit mode."""
    with embedlog.open(path / "log", maintenance=False) as log:
        log.create_topic("jobs")
        log.groups["workers"].alter({"share.auto.offset.reset": "earliest"})
        with log.producer() as producer:
            producer.send_batch("jobs", [JOB] * JOBS)
        options: Any = {"share_acknowledgement_mode": "explicit", "max_poll_records": batch}
        with log.share_consumer("jobs", group="workers", **options) as consumer:

            def drain() -> int:
                done = 0
                while records := consumer.poll():
                    for record in records:
                        consumer.acknowledge(record)
                    consumer.commit()
                    done += len(records)
                return done

            yield drain


@contextmanager
def open_embedlog_loop(path: Path, batch: int) -> Iterator[Drain]:
    """The loop over a share consumer, which commits when it acquires."""
    with open_embedlog(path, batch):
        with embedlog.open(path / "log", maintenance=False) as log:
            options: Any = {"consumer_timeout_ms": 0, "max_poll_records": batch}
            with log.share_consumer("jobs", group="workers", **options) as consumer:
                yield lambda: sum(1 for _ in consumer)


@contextmanager
def open_huey(path: Path, batch: int) -> Iterator[Drain]:
    """Huey's storage in SQLite, which knows no acknowledgement: a job is gone when it is taken."""
    huey = pytest.importorskip("huey")
    queue = huey.SqliteHuey("jobs", filename=str(path / "huey.db"), fsync=False)
    for _ in range(JOBS):
        queue.storage.enqueue(JOB)

    def drain() -> int:
        done = 0
        while queue.storage.dequeue() is not None:
            done += 1
        return done

    yield drain


@contextmanager
def open_persist_queue(path: Path, batch: int) -> Iterator[Drain]:
    """The queue of persist-queue that has acknowledgements, in SQLite."""
    persistqueue = pytest.importorskip("persistqueue")
    queue = persistqueue.SQLiteAckQueue(str(path / "queue"))
    queue._putter.execute("PRAGMA synchronous=OFF")
    for _ in range(JOBS):
        queue.put(JOB)

    def drain() -> int:
        done = 0
        with suppress(persistqueue.exceptions.Empty):
            while True:
                queue.ack(queue.get(block=False))
                done += 1
        return done

    yield drain


@contextmanager
def open_redis(path: Path, batch: int) -> Iterator[Drain]:
    """A stream of Redis with a group, over a Unix socket, in memory only."""
    redis, server = pytest.importorskip("redis"), shutil.which("redis-server")
    if server is None:
        pytest.skip("there is no redis-server")
    socket = path / "redis.sock"
    command = [server, "--port", "0", "--unixsocket", str(socket), "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=path) as process:
        try:
            while not socket.exists():
                time.sleep(0.01)
            client = redis.Redis(unix_socket_path=str(socket))
            with client.pipeline(transaction=False) as pipe:
                for _ in range(JOBS):
                    pipe.xadd("jobs", {"job": JOB})
                pipe.execute()
            client.xgroup_create("jobs", "workers", "0")

            def drain() -> int:
                done = 0
                while found := client.xreadgroup("workers", "one", {"jobs": ">"}, count=batch):
                    numbers = [number for number, _ in found[0][1]]
                    client.xack("jobs", "workers", *numbers)
                    done += len(numbers)
                return done

            yield drain
        finally:
            process.terminate()


QUEUES = {
    "embedlog": open_embedlog,
    "embedlog, in a loop": open_embedlog_loop,
    "huey": open_huey,
    "persist-queue": open_persist_queue,
    "redis": open_redis,
}


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("queue", QUEUES)
def bench_jobs(benchmark: Any, note: Callable[..., None], tmp_path: Path, queue: str, batch: int):
    """Jobs that are taken, and acknowledged one by one, or in batches."""
    if queue in ("huey", "persist-queue") and batch > 1:
        pytest.skip("it takes jobs one by one")
    note(records=JOBS)
    with QUEUES[queue](tmp_path, batch) as drain:
        assert benchmark.pedantic(drain, rounds=1) == JOBS
