"""A process may use many more partitions than it may have open files."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import FrameType

import pytest
from support import forks
from support.children import in_threads
from support.patience import patient
from support.roots import fill, make_log, open_root, values
from support.staged_files import publish, stage
from support.tiers import choose

import embedlog
from embedlog.config import TopicConfig
from embedlog.errors import EmbedlogError, LockTimeoutError
from embedlog.kafka import KafkaProducer
from embedlog.partition.state import OpenFiles
from embedlog.record import TopicPartition
from embedlog.root.root import Root

pytestmark = pytest.mark.tier("test")  # it opens thousands of files

PARTITIONS = 150
LIMIT = 128
"""The number of further descriptors that the process may open: fewer than partitions."""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def use_all_partitions(path: Path) -> int:
    """Use more partitions than descriptors, and return the largest number of descriptors."""
    max_descriptors, before = 0, descriptors()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + LIMIT, hard))
    with embedlog.open(path, maintenance=False) as log:
        log.create_topic("t", PARTITIONS)
        for number in range(PARTITIONS):
            log.create_topic(f"single-{number}")
            log.producer().send_batch(f"single-{number}", [b"x"])
        log.flush()
        with log.producer() as producer:
            for round_number in range(2):
                for number in range(PARTITIONS):
                    producer.send("t", b"%d" % round_number, partition=number)
                producer.flush()
                max_descriptors = max(max_descriptors, descriptors() - before)
        with log.consumer(auto_offset_reset="earliest") as consumer:
            consumer.assign([TopicPartition("t", number) for number in range(PARTITIONS)])
            polled: dict[TopicPartition, list[bytes]] = {}
            for round_number in range(3):
                for partition, records in consumer.poll(1000, max_records=10_000).items():
                    polled.setdefault(partition, []).extend(record.value for record in records)
                max_descriptors = max(max_descriptors, descriptors() - before)
                if round_number == 0:
                    log.partition("t", 7).roll()
                    log.producer().send("t", b"2", partition=7).result()
        expected = {number: [b"0", b"1"] for number in range(PARTITIONS)}
        expected[7].append(b"2")
        assert {partition.partition: sent for partition, sent in polled.items()} == expected
        assert len(log.topic("t")) == 2 * PARTITIONS + 1
        assert log.housekeeping.verify() == []
        max_descriptors = max(max_descriptors, descriptors() - before)
        run_transaction(path)
        with closing(open_root(path)) as root:
            parts = {f"t_{number}": [b"x"] for number in range(PARTITIONS)}
            publish(root, [stage(root, **parts)], durability="fsync")
            max_descriptors = max(max_descriptors, descriptors() - before)
        assert len(log.topic("t")) == 4 * PARTITIONS + 1
        log.flush()
        log.delete_topic("t")
    assert len(list(Path(path, "topics").iterdir())) == PARTITIONS
    return max_descriptors


def run_transaction(path: Path) -> None:
    """Append to all partitions in one transaction."""
    with KafkaProducer(bootstrap_servers=str(path), transactional_id="x") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        for number in range(PARTITIONS):
            producer.send("t", b"x", partition=number)
        producer.commit_transaction()


def test_a_process_with_few_descriptors_uses_many_partitions(tmp_path: Path) -> None:
    """It writes, reads, flushes, verifies and deletes with three quarters of them."""
    end = forks.run(lambda: use_all_partitions(tmp_path / "root"))

    assert end.finding() is None
    assert end.value <= LIMIT * 3 // 4


def test_appends_go_on_while_their_files_are_closed_again_and_again(tmp_path: Path) -> None:
    """Threads use more partitions than may have open files, and no record is lost."""
    root = open_root(tmp_path)
    root.context.open_files = OpenFiles(8)
    root.create_topic("t", 24, TopicConfig())
    rounds = choose(quick=6, all=20)

    def work(first: int) -> None:
        for round_number in range(rounds):
            for number in range(24):
                log = root.partition("t", (number + first) % 24)
                fill(log, 1, first=round_number)
                reader = log.reader(0)
                while reader.read():
                    pass

    with in_threads(*(partial(work, first) for first in (0, 8, 16))):
        pass

    for number in range(24):
        appended = values(root.partition("t", number))
        assert sorted(appended) == sorted(
            [b"v%d" % round_number for round_number in range(rounds)] * 3
        )
    root.close()


def test_a_topic_is_not_deleted_while_a_partition_is_held(tmp_path: Path) -> None:
    """The call raises and changes nothing; it works after the release of the partition."""
    root = open_root(tmp_path, lock_timeout=0.05)
    log = make_log(root)
    fill(log, 3)
    other: Root = open_root(tmp_path)
    other.partition("t", 0).acquire()
    with pytest.raises(LockTimeoutError):
        root.delete_topic("t")
    other.partition("t", 0).release()
    assert len(values(log)) == 3

    root.delete_topic("t")
    assert list(other.topics()) == []
    other.close()
    root.close()


def test_logs_that_a_program_forgets_to_close_leave_no_files_open(tmp_path: Path) -> None:
    """A notebook does this when its cell is run repeatedly."""
    counts = []
    for _ in range(6):
        log = embedlog.open(tmp_path / "root")
        log.producer().send("t", b"v").result()
        log.consumer("t", auto_offset_reset="earliest").poll(0)
        del log
        # The thread of the background jobs ends soon, and the log with it.
        for thread in threading.enumerate():
            if thread.name == "embedlog-maintenance":
                thread.join(patient(10))
        gc.collect()
        counts.append(descriptors())

    assert counts[-1] <= counts[0]
    with embedlog.open(tmp_path / "root") as log:
        assert len(log.topic("t")) == 6
        assert log.housekeeping.verify() == []


def open_and_close(path: Path) -> None:
    embedlog.open(path, maintenance=False).close()


def refuse_to_open(path: Path) -> None:
    with suppress(EmbedlogError):
        embedlog.open(path / "missing", mode="r")


def write_and_read(*paths: Path) -> None:
    with embedlog.open(paths, maintenance=False) as log:
        log.producer().send("t", b"v").result()
        with log.consumer("t", group_id="g", auto_offset_reset="earliest") as consumer:
            consumer.poll(0)
        log.delete_topic("t")


def write_and_read_copies(path: Path) -> None:
    write_and_read(path / "a", path / "b")


CALLS = [open_and_close, refuse_to_open, write_and_read, write_and_read_copies]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_leaves_no_frames_to_the_garbage_collector(
    tmp_path: Path, call: Callable[[Path], None]
) -> None:
    """A frame keeps its callers', and with them all variables of the program that called."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        call(tmp_path / "root")
        gc.collect()
        garbage, gc.garbage[:] = gc.garbage[:], []
    finally:
        gc.set_debug(0)
        gc.enable()
    assert [each.f_code for each in garbage if isinstance(each, FrameType)] == []


@pytest.mark.parametrize("directories", [1, 2])
def test_a_closed_log_keeps_nothing_of_its_disk(tmp_path: Path, directories: int) -> None:
    """Neither a descriptor nor a map, so that the disk can be unmounted, whoever refers to it."""
    log = embedlog.open([tmp_path / f"log{number}" for number in range(directories)])
    topic, producer = log.create_topic("t"), log.producer()
    producer.send_batch("t", [b"v"] * 100)
    log.partition("t", 0).roll()
    consumer = log.consumer("t", group_id="g", auto_offset_reset="earliest")
    assert len(consumer.poll(1000)) == len(topic[:1]) == 1
    log.close()

    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = [line.split()[-1] for line in maps] + [
        os.readlink(f"/proc/self/fd/{fd.name}")
        for fd in Path("/proc/self/fd").iterdir()
        if fd.is_symlink()
    ]
    assert [path for path in paths if path.startswith(str(tmp_path))] == []
    assert "closed" in f"{producer!r} {consumer!r}"


def test_the_databases_of_a_forgotten_log_are_closed_with_the_next_one(tmp_path: Path) -> None:
    """A process may open an LMDB database only once, so closing it waits for the next open."""
    before = descriptors()
    for number in range(6):
        log = embedlog.open(tmp_path / f"root{number}", maintenance=False)
        log.producer().send("t", b"v").result()
        del log
        gc.collect()
    with embedlog.open(tmp_path / "last", maintenance=False):
        pass

    assert descriptors() <= before
