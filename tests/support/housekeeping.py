"""Writers and readers of all kinds, beside housekeeping that never pauses.

Each writer has its own keys and numbers what it sends.  So the last acknowledged
value of each key is known, and an older value after a newer one is an error.  The
processes that do maintenance are killed and stopped at random, and replaced.
"""

from __future__ import annotations

import random
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import embedlog
from embedlog import batch
from embedlog.errors import FencedError, LockTimeoutError, OffsetOutOfRangeError
from embedlog.maintenance import Maintenance, owner
from embedlog.maintenance.jobs import JOBS
from embedlog.partitioner import partition_for_key
from embedlog.record import TopicPartition
from support import forks
from support.patience import patient

PARTITIONS = 2
KEYS = 40
"""The keys of each writer in each topic."""
_SMALL: dict[str, object] = {
    "segment.bytes": 20_000,
    "index.interval.bytes": 2_000,
    "retention.ms": -1,
    "min.cleanable.dirty.ratio": 0.01,
    "delete.retention.ms": 20,
}
TOPICS: dict[str, dict[str, object]] = {
    "deleted": {"cleanup.policy": "delete", "retention.bytes": 200_000},
    "aged": {
        "cleanup.policy": "delete",
        "retention.clock": "record",
        "retention.ms": 700,
        "segment.ms": 100,
    },
    "old": {"cleanup.policy": "delete", "retention.clock": "append", "retention.ms": 3_600_000},
    "compacted": {"cleanup.policy": "compact"},
    "lagging": {"cleanup.policy": "compact", "min.compaction.lag.ms": 20},
    "both": {"cleanup.policy": "compact,delete", "retention.bytes": 100_000},
}
KEEPS_LAST_VALUES = ("compacted", "lagging", "old")
"""The topics from which only records with a later record of their key are deleted."""
COMPACTED = ("compacted", "lagging", "both")
NOT_COMPACTED = ("deleted", "aged", "old")
OLD_MS = 1_372_636_800_000
"""The timestamp of the events in ``old``: long before they are appended."""
_VALUE = struct.Struct("<IQ")

Counts = Counter[str]


class HousekeepingRun(NamedTuple):
    """How long to run, and how often a process that does maintenance is killed or stopped."""

    seconds: float = 60.0
    pause: float = 0.25
    """Seconds from one kill or stop to the next."""
    stops: tuple[float, ...] = (0.05, 0.3, 1.2)
    """Seconds for which a maintainer is stopped."""
    maintainers: int = 3
    delay_ms: int = 50
    """The topics' file.delete.delay.ms."""
    seed: int = 1


def check_housekeeping(case: HousekeepingRun, directory: Path) -> Counts:
    """Let it run; then the last value of each key is the one that was acknowledged last."""
    root, stop = directory / "root", directory / "stop"
    with embedlog.open(root, maintenance=False) as log:
        for name, config in TOPICS.items():
            usual = _SMALL | {"file.delete.delay.ms": case.delay_ms}
            log.create_topic(name, PARTITIONS, usual | config)
    maintainers = [_Maintainer(root, case, number) for number in range(case.maintainers)]
    works = (*WRITERS, *READERS)
    children = [
        forks.Child(lambda work=work, n=n: work(root, stop, n)) for n, work in enumerate(works)
    ]
    try:
        counts = _kill_and_stop(case, maintainers, children)
    finally:
        stop.touch()
        # Before the others are waited for: a stopped process may hold a lock.
        findings = [maintainer.kill() for maintainer in maintainers]
        ends = [child.end() for child in children]
    assert not any(findings), findings
    results = [end.result(work.__name__) for work, end in zip(works, ends, strict=True)]
    last: dict[str, dict[bytes, int | None]] = {name: {} for name in TOPICS}
    for written, last_of_writer in results[: len(WRITERS)]:
        counts += written
        for name, keys in last_of_writer.items():
            last[name].update(keys)
    for read in results[len(WRITERS) :]:
        counts += read
    return counts + forks.call(lambda: _compare(root, last))


def _kill_and_stop(
    case: HousekeepingRun, maintainers: list[_Maintainer], others: list[forks.Child]
) -> Counts:
    """Kill and stop the maintainers; end early if a writer or reader has died."""
    done, dice, until = Counts(), random.Random(case.seed), time.monotonic() + case.seconds
    while (now := time.monotonic()) < until and not any(other.ends_within(0) for other in others):
        if any(maintainer.is_over() for maintainer in maintainers):
            break
        victim = dice.choice(maintainers)
        if victim.go_on_at(now):
            if dice.random() < 0.5:
                victim.replace()
                done["kills"] += 1
            else:
                victim.stop(now + dice.choice(case.stops))
                done["stops"] += 1
        time.sleep(case.pause)
    return done


class _Maintainer:
    """A process that does maintenance, started again whenever it was killed."""

    def __init__(self, root: Path, case: HousekeepingRun, number: int) -> None:
        self._root, self._number = root, number
        self._until: float | None = None
        self._start()

    def _start(self) -> None:
        work = _maintain_by_jobs if self._number % 3 else _maintain_by_calls
        self._child = forks.Child(lambda: work(self._root))

    def replace(self) -> None:
        finding = self.kill()
        assert finding is None, finding
        self._start()

    def kill(self) -> str | None:
        """Kill it, and return what went wrong before."""
        end = self._child.end() if self.is_over() else self._child.kill()
        return None if end.killed else f"before it was killed: {end.finding()}"

    def is_over(self) -> bool:
        return self._child.ends_within(0)

    def stop(self, until: float) -> None:
        self._child.stop()
        self._until = until

    def go_on_at(self, now: float) -> bool:
        """Whether it is at work, from now on if its time is over."""
        if self._until is not None and now >= self._until:
            self._child.go_on()
            self._until = None
        return self._until is None


def _maintain_by_calls(root: Path) -> None:
    """Run retention and compaction in turn, as a program may call them."""
    log = embedlog.open(root, maintenance=False)
    while True:
        with suppress(FencedError, LockTimeoutError):
            log.housekeeping.run()
        for name in COMPACTED:
            with suppress(FencedError, LockTimeoutError):
                log.housekeeping.compact(
                    name, force=True, settings={"log.cleaner.io.buffer.size": 4096}
                )


def _maintain_by_jobs(root: Path) -> None:
    """Run the background threads without a pause."""
    owner.HEARTBEAT_SECONDS, owner._FIRST_SECONDS = 0.1, 0.02
    log = embedlog.open(root, maintenance=False)
    jobs = [job._replace(every_seconds=0.02) for job in JOBS]
    maintenance = Maintenance(log.root, jobs, session_ms=400)
    maintenance.start()
    while True:
        time.sleep(0.1)
        check_threads(maintenance)
        bad = [
            failure for failure in maintenance.failures.errors.values() if not _is_excused(failure)
        ]
        assert not bad, bad


def check_threads(maintenance: Maintenance) -> None:
    """Fail if a thread of the housekeeping has ended, or was never started."""
    with maintenance._owner_lock:
        missing = [worker.name for worker in maintenance._workers if not worker.is_alive()]
    assert not missing, missing


def _is_excused(error: Exception) -> bool:
    """Whether it may be raised: a stopped process may hold a lock; nothing else may fail."""
    return isinstance(error, FencedError | LockTimeoutError)


# Writers: each returns its counts, and the last value of each of its keys


class _SentRecords:
    """The records of one writer: their order, and the last one of each key."""

    def __init__(self, writer: int) -> None:
        self.writer, self.number, self.dice = writer, 0, random.Random(writer)
        self.last: dict[str, dict[bytes, int | None]] = {name: {} for name in TOPICS}
        self.counts = Counts()

    def next(self, name: str, partition: int | None = None) -> tuple[bytes, bytes | None]:
        """Return the key and the value of a record that will be acknowledged."""
        while True:
            key = b"%d-%d" % (self.writer, self.dice.randrange(KEYS))
            if partition in (None, partition_for_key(key, PARTITIONS)):
                break
        self.number += 1
        gone = self.dice.random() < 0.15
        self.last[name][key] = None if gone else self.number
        value = _VALUE.pack(self.writer, self.number).ljust(self.dice.choice((12, 60, 300)), b".")
        return key, None if gone else value


def _event_time(name: str) -> int | None:
    """The timestamp of a record, if it is not the time of its append."""
    return OLD_MS if name == "old" else None


def write_and_wait(root: Path, stop: Path, writer: int) -> Any:
    """One record at a time, each waited for."""
    sent = _SentRecords(writer)
    with (
        embedlog.open(root, maintenance=False) as log,
        log.producer(linger_ms=0) as producer,
    ):
        while not stop.exists():
            for name in TOPICS:
                key, value = sent.next(name)
                producer.send(name, value, key=key, timestamp_ms=_event_time(name)).result(
                    patient(30)
                )
                sent.counts["sent"] += 1
            time.sleep(0.001)
    return sent.counts, sent.last


def write_gathered(root: Path, stop: Path, writer: int) -> Any:
    """Many records at a time, compressed, some with headers; two producers in turn."""
    sent = _SentRecords(writer)
    with embedlog.open(root, maintenance=False) as log:
        producers = [
            log.producer(linger_ms=5, compression_type="lz4"),
            log.producer(linger_ms=1, batch_size=2000, compression_type="zstd"),
        ]
        while not stop.exists():
            for producer in producers:
                for _ in range(sent.dice.randint(1, 300)):
                    name = sent.dice.choice(list(TOPICS))
                    key, value = sent.next(name)
                    headers = [("h", b"v")] if sent.dice.random() < 0.01 else None
                    at = _event_time(name)
                    producer.send(name, value, key=key, headers=headers, timestamp_ms=at)
                    sent.counts["sent"] += 1
                # The other one may have the same keys: what is sent is in order this way.
                producer.flush(30)
            time.sleep(0.005)
    return sent.counts, sent.last


def write_batches(root: Path, stop: Path, writer: int) -> Any:
    """Batches of columns, some of them flushed before they are acknowledged."""
    sent = _SentRecords(writer)
    with embedlog.open(root, maintenance=False) as log:
        while not stop.exists():
            for name in TOPICS:
                partition = sent.dice.randrange(PARTITIONS)
                rows = [sent.next(name, partition) for _ in range(sent.dice.randint(1, 50))]
                keys, values = zip(*rows, strict=True)
                codec = sent.dice.choice(("none", "zstd"))
                at = _event_time(name) or time.time_ns() // 1_000_000
                encoded_batch = batch.encode_lists(list(values), list(keys), at, None, codec)
                durability = "fsync" if sent.dice.random() < 0.1 else None
                log.partition(name, partition).append([encoded_batch], durability=durability)
                sent.counts["sent"] += len(rows)
            time.sleep(0.005)
    return sent.counts, sent.last


WRITERS: tuple[Callable[[Path, Path, int], Any], ...] = (
    write_and_wait,
    write_gathered,
    write_batches,
    write_gathered,
)


# Readers: each returns its counts


class _Pass:
    """The records of one pass of a reader: each offset once, no older value after a newer one."""

    def __init__(self) -> None:
        self._newest: dict[tuple[str, int, bytes], int] = {}
        self._next: dict[tuple[str, int], int] = {}

    def see(self, name: str, partition: int, offset: int, key: bytes, value: bytes | None) -> None:
        due = self._next.get((name, partition), 0)
        assert offset >= due, f"{name}-{partition}: {offset} after {due - 1}"
        if name in NOT_COMPACTED and due:
            assert offset == due, f"{name}-{partition}: {offset} follows {due - 1}"
        self._next[name, partition] = offset + 1
        if value is not None:
            number = _VALUE.unpack_from(value)[1]
            full_key = name, partition, key
            before = self._newest.get(full_key, 0)
            assert number > before, f"{full_key}: {number} at {offset} after {before}"
            self._newest[full_key] = number

    def see_record(self, record: Any) -> None:
        self.see(record.topic, record.partition, record.offset, record.key, record.value)

    def end(self, name: str, partition: int) -> int:
        """Return the end of what was seen."""
        return self._next.get((name, partition), 0)


def _passes(root: Path, stop: Path, fetch: Callable[[Any, _Pass], int], **config: Any) -> Counts:
    """Read from the start to the end, over and over, each time with a new consumer."""
    partitions = [TopicPartition(name, number) for name in TOPICS for number in range(PARTITIONS)]
    counts = Counts()
    with embedlog.open(root, maintenance=False) as log:
        while not stop.exists():
            with log.consumer(auto_offset_reset="none", **config) as consumer:
                consumer.assign(partitions)
                consumer.seek_to_beginning()
                seen = _Pass()
                quiet = time.monotonic() + 5
                while time.monotonic() < quiet and not stop.exists():
                    try:
                        count = fetch(consumer, seen)
                    except OffsetOutOfRangeError as error:
                        _check_deleted(log, error)
                        counts["overtaken"] += 1
                        break
                    counts["read"] += count
                    if not count and _is_at_end(consumer, partitions):
                        break
                counts["passes"] += 1
    return counts


def _is_at_end(consumer: Any, partitions: list[TopicPartition]) -> bool:
    try:
        return all(not consumer.current_lag(partition) for partition in partitions)
    except OffsetOutOfRangeError:
        return False


def _check_deleted(log: Any, error: OffsetOutOfRangeError) -> None:
    """Check that the offset is below the start, in a topic from which records are deleted."""
    assert error.topic not in KEEPS_LAST_VALUES, error
    start = log.partition(error.topic, error.partition).start_offset()
    assert error.offset is not None and error.offset < start, f"{error}; it starts at {start}"


def read_records(root: Path, stop: Path, reader: int) -> Counts:
    """As records, from the start."""

    def fetch(consumer: Any, seen: _Pass) -> int:
        count = 0
        for records in consumer.poll(50, max_records=5000).values():
            for record in records:
                seen.see_record(record)
                count += 1
        return count

    return _passes(root, stop, fetch)


def read_arrow(root: Path, stop: Path, reader: int) -> Counts:
    """As Arrow batches, from the start."""

    def fetch(consumer: Any, seen: _Pass) -> int:
        count = 0
        for partition, batches in consumer.poll_batches(50).items():
            for record_batch in batches:
                columns = [
                    record_batch.column(name).to_pylist() for name in ("offset", "key", "value")
                ]
                for row in zip(*columns, strict=True):
                    seen.see(*partition, *row)
                    count += 1
        return count

    return _passes(root, stop, fetch)


def read_tables(root: Path, stop: Path, reader: int) -> Counts:
    """As tables: the latest value of a key never gets older."""
    counts, dice = Counts(), random.Random(reader)
    newest: dict[tuple[str, bytes], int] = {}
    with embedlog.open(root, maintenance=False) as log:
        while not stop.exists():
            name = dice.choice(list(TOPICS))
            try:
                pairs = _table(log.topic(name), dice)
            except OffsetOutOfRangeError as error:
                _check_deleted(log, error)
                counts["overtaken"] += 1
                continue
            assert len(dict(pairs)) == len(pairs), f"{name}: a key is there twice"
            for key, value in pairs:
                number = _VALUE.unpack_from(value)[1]
                before = newest.get((name, key), 0)
                # What deletes may delete the newest; an older one, in front of it, went first.
                assert number >= before, f"{name}: {key!r} is {number}, was {before}"
                newest[name, key] = number
                counts["latest"] += 1
    return counts


def _table(topic: Any, dice: random.Random) -> list[tuple[bytes, bytes]]:
    how = dice.randrange(3)
    if how == 0:
        return list(topic.items())
    if how == 1:
        table = topic.to_arrow(["key", "value"], latest=True)
        return list(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))
    keys = [b"%d-%d" % (dice.randrange(len(WRITERS)), dice.randrange(KEYS)) for _ in range(20)]
    pairs = [(key, topic.get(key)) for key in set(keys)]
    return [(key, value) for key, value in pairs if value is not None]


def read_grouped(root: Path, stop: Path, reader: int) -> Counts:
    """In a group that is joined again and again; committed records are never read again."""
    counts, seen = Counts(), _Pass()
    with embedlog.open(root, maintenance=False) as log:
        while not stop.exists():
            # Alone in its group, so that no other one's records are expected.
            with log.consumer(
                *TOPICS, group_id=f"g{reader}", auto_offset_reset="earliest"
            ) as consumer:
                for _ in range(20):
                    for records in consumer.poll(50, max_records=2000).values():
                        for record in records:
                            if record.topic not in NOT_COMPACTED:
                                seen.see_record(record)
                            counts["grouped"] += 1
                    consumer.commit()
    return counts


def read_times(root: Path, stop: Path, reader: int) -> Counts:
    """By timestamps: what is found is not before the time, and is where it was counts to be."""
    counts, dice = Counts(), random.Random(reader)
    begun = time.time_ns() // 1_000_000
    with embedlog.open(root, maintenance=False) as log:
        while not stop.exists():
            name, number = dice.choice(list(TOPICS)), dice.randrange(PARTITIONS)
            part = log.partition(name, number)
            at = dice.randint(begun - 100, time.time_ns() // 1_000_000)
            position = part.offset_for_timestamp(at)
            if position is None:
                continue
            assert position.timestamp >= at
            assert 0 <= position.offset < part.end_offset()
            with suppress(OffsetOutOfRangeError):
                some = part.reader(position.offset).read(1)
                assert some and some[0].next_offset > position.offset
            counts["times"] += 1
    return counts


def verify(root: Path, stop: Path, reader: int) -> Counts:
    """Check every file while it is written, rolled, compacted and deleted."""
    counts = Counts()
    with embedlog.open(root, maintenance=False) as log:
        while not stop.exists():
            # The files of a killed maintainer belong to no partition.
            findings = [str(finding) for finding in log.housekeeping.verify() if finding.topic]
            assert findings == [], findings
            counts["verified"] += 1
    return counts


READERS: tuple[Callable[[Path, Path, int], Counts], ...] = (
    read_records,
    read_arrow,
    read_tables,
    read_grouped,
    read_times,
    verify,
)


# The end


def _compare(root: Path, sent: dict[str, dict[bytes, int | None]]) -> Counts:
    log = embedlog.open(root, maintenance=False)
    assert log.housekeeping.verify() == [], log.housekeeping.verify()
    _check_values(log, sent)
    for _ in range(3):
        # By hand and after some time: the tombstones go too.
        time.sleep(0.05)
        log.housekeeping.run()
        for name in COMPACTED:
            log.housekeeping.compact(name, force=True)
    assert log.housekeeping.verify() == [], log.housekeeping.verify()
    done = _check_values(log, sent)
    log.close()
    log = embedlog.open(root, maintenance=False)
    assert log.root.startup_report == [], log.root.startup_report
    assert log.housekeeping.verify() == [], log.housekeeping.verify()
    _check_values(log, sent)
    log.close()
    return done


def _check_values(log: Any, sent: dict[str, dict[bytes, int | None]]) -> Counts:
    done = Counts()
    for name, numbers in sent.items():
        topic = log.topic(name)
        actual = {key: _VALUE.unpack_from(value)[1] for key, value in topic.items()}
        expected = {key: number for key, number in numbers.items() if number is not None}
        if name in KEEPS_LAST_VALUES:
            assert actual == expected, _difference(name, actual, expected)
        else:
            wrong = {key: number for key, number in actual.items() if expected.get(key) != number}
            assert not wrong, _difference(name, wrong, expected)
        done["keys"] += len(actual)
        seen = _Pass()
        for record in topic:
            seen.see_record(record)
        for number in range(PARTITIONS):
            part = log.partition(name, number)
            if name in NOT_COMPACTED and part.start_offset() < part.end_offset():
                assert seen.end(name, number) == part.end_offset()
    return done


def _difference(name: str, actual: dict[bytes, int], expected: dict[bytes, int]) -> str:
    keys = sorted(key for key in {*actual, *expected} if actual.get(key) != expected.get(key))
    differences = [f"{key!r} is {actual.get(key)}, not {expected.get(key)}" for key in keys[:10]]
    return f"{name}: {len(keys)} keys are wrong: {'; '.join(differences)}"
