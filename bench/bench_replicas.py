"""What do copies cost, how long does a failover take, and how fast does a directory catch up?

All directories are on one disk here, so that the figures show the work, not more disks.
"""

import errno
import os
import threading
import time
from statistics import median

import pytest

import embedlog
from embedlog.errors import StorageError
from embedlog.files import Files
from embedlog.replication import catch_up, root

FAILOVERS = int(os.environ.get("EMBEDLOG_BENCH_FAILOVERS", "20"))
CATCH_UP_BATCHES = 1000


@pytest.fixture
def disks(tmp_path):
    """Three directories."""
    return [tmp_path / f"disk{number}" for number in range(3)]


def open_log(disks, copies, **options):
    """Open a log with a topic of so many copies."""
    paths = disks[:copies] if copies > 1 else disks[0]
    log = embedlog.open(paths, maintenance=False, **options)
    config = {"segment.bytes": 1 << 30}
    log.create_topic("t", config=config, replication_factor=copies)
    return log


@pytest.mark.parametrize("copies", [1, 2, 3], ids="copies={}".format)
@pytest.mark.parametrize("records", [1, 1000], ids="records={}".format)
def bench_append_copies(benchmark, note, disks, single, thousand, records, copies):
    """One batch per append; one copy is a log in one directory."""
    encoded = [single if records == 1 else thousand]
    with open_log(disks, copies) as log:
        part = log.partition("t", 0)
        part.append(encoded)
        note(records=records, bytes=encoded[0].size, copies=copies)
        note(floor=f"bench_write_copies[bytes={encoded[0].size}-copies={copies}]")
        benchmark(part.append, encoded)
        assert part.end_offset() > records


@pytest.mark.parametrize("copies", [1, 2, 3], ids="copies={}".format)
@pytest.mark.parametrize("size", [568, 126_440], ids="bytes={}".format)
def bench_write_copies(benchmark, note, tmp_path, copies, size):
    """The floor: the same bytes at the end of so many files."""
    files = [os.open(tmp_path / f"{n}", os.O_CREAT | os.O_RDWR) for n in range(copies)]
    data, position = b"x" * size, [0]

    def write():
        for file in files:
            os.pwritev(file, [data], position[0])
        position[0] = (position[0] + size) % (1 << 30)

    note(bytes=size, copies=copies)
    benchmark(write)
    assert all(os.fstat(file).st_size >= size for file in files)
    for file in files:
        os.close(file)


@pytest.mark.parametrize("copies", [1, 2, 3], ids="copies={}".format)
def bench_commit_copies(benchmark, note, disks, single, copies):
    """A commit of a group, in all directories."""
    with open_log(disks, copies) as log:
        log.partition("t", 0).append([single])
        settings = {"group_id": "g", "auto_offset_reset": "earliest"}
        with log.consumer("t", **settings, enable_auto_commit=False) as consumer:
            while consumer.poll(100):
                pass
            note(records=1, copies=copies)
            benchmark(consumer.commit)


class Breaking(Files):
    """The files of a directory whose disk can break."""

    broken: str | None = None

    def _check(self):
        if Breaking.broken == self.root:
            raise StorageError("The disk is broken", errno=errno.EIO, path=self.root)

    def write(self, fd, buffers, position):
        self._check()
        return super().write(fd, buffers, position)


def bench_failover(benchmark, note, disks, single):
    """From the first failing write to the leader until the append is acknowledged elsewhere."""
    seconds = []

    def failover():
        log.close()
        return setup()

    def setup():
        nonlocal log, part
        Breaking.broken = None
        log = embedlog.open(disks, maintenance=False, files=Breaking)
        root.try_bring_back(log.root)
        catch_up.replicate(log.root)
        part = log.partition("t", 0)
        part.append([single])
        leader = log.root.controller.assignment(part.key).leader
        Breaking.broken = os.fspath(disks[leader - 1])
        return (), {}

    def append():
        began = time.perf_counter()
        part.append([single])
        seconds.append(time.perf_counter() - began)

    log = open_log(disks, 3)
    part = log.partition("t", 0)
    benchmark.pedantic(append, setup=failover, rounds=FAILOVERS)
    Breaking.broken = None
    note(records=1, p50_ms=round(median(seconds) * 1000, 2), worst_ms=round(max(seconds) * 1000, 2))
    assert part.end_offset() >= FAILOVERS
    log.close()


def bench_failover_of_a_program(benchmark, note, disks, single):
    """The longest pause of appends in a loop while the leader's directory is taken away."""
    pauses = []
    log = embedlog.open(disks)
    log.create_topic("t")
    part = log.partition("t", 0)
    part.append([single])

    def round_trip():
        leader = log.root.controller.assignment(part.key).leader
        path, aside = disks[leader - 1], disks[leader - 1].with_name("aside")
        stop, longest = threading.Event(), [0.0]

        def append():
            while not stop.is_set():
                began = time.perf_counter()
                part.append([single])
                longest[0] = max(longest[0], time.perf_counter() - began)

        thread = threading.Thread(target=append)
        thread.start()
        time.sleep(0.2)
        path.rename(aside)
        while log.root.controller.assignment(part.key).leader == leader:
            time.sleep(0.001)
        time.sleep(0.2)
        stop.set()
        thread.join()
        pauses.append(longest[0])
        aside.rename(path)
        while len(log.root.controller.assignment(part.key).isr) < 3:
            time.sleep(0.01)

    benchmark.pedantic(round_trip, rounds=max(3, FAILOVERS // 4))
    note(p50_ms=round(median(pauses) * 1000, 1), worst_ms=round(max(pauses) * 1000, 1))
    log.close()


def bench_catch_up(benchmark, note, disks, thousand):
    """A directory that comes back empty gets a copy of 126 MB."""
    log = open_log(disks, 3)
    part = log.partition("t", 0)
    for _ in range(CATCH_UP_BATCHES):
        part.append([thousand])
    follower = log.root.controller.assignment(part.key).isr[1]

    def lose():
        directory = log.root.controller.directories[follower]
        error = StorageError("The disk is broken", errno=errno.EIO, path=directory.path)
        log.root.controller.take_offline({follower: error})
        for path in disks[follower - 1].glob("topics/*/*/*.arrows"):
            path.unlink()

    def copy():
        root.try_bring_back(log.root)
        catch_up.replicate(log.root)

    note(records=1000 * CATCH_UP_BATCHES, bytes=CATCH_UP_BATCHES * thousand.size)
    benchmark.pedantic(copy, setup=lose, rounds=5)
    assert len(log.root.controller.assignment(part.key).isr) == 3
    assert log.housekeeping.verify() == []
    log.close()
