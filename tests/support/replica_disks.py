"""A log over three disks that fail, while many processes use it and are killed and stopped.

Every process notes what was acknowledged in a journal that is on none of the disks.  A writer
repeats what was refused with one of the errors that say so (`REFUSALS`), with the same sequence
numbers; any other error, a call that takes too long, and any death that the test did not cause
is a finding.

A power cut kills all processes, and takes from each disk what it had not written.  Before any
program runs again, the log is compared with the journals: what was acknowledged with
``durability="fsync"``, or flushed, is there; what was acknowledged with ``"os"`` may be lost, from
the end of a partition only; and the in-sync copies are equal.
"""

from __future__ import annotations

import errno
import gc
import json
import mmap
import os
import random
import shutil
import signal
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import embedlog
from embedlog import batch, catalog
from embedlog.config import MaintenanceConfig
from embedlog.errors import (
    CommitFailedError,
    CorruptionError,
    FencedError,
    IllegalStateError,
    InvalidReplicationFactorError,
    LockTimeoutError,
    NotALogError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    ReplicaNotAvailableError,
    StorageError,
    UnknownMemberIdError,
    UnknownTopicOrPartitionError,
)
from embedlog.maintenance import Maintenance, owner
from embedlog.maintenance.jobs import jobs_of
from embedlog.record import TopicPartition
from embedlog.replication import jobs as replication_jobs
from support import forks
from support.failing_disks import FailingDisks
from support.forks import tell
from support.housekeeping import check_threads
from support.loop_disks import FAULTS, LoopDisk, loop_disks
from support.patience import patient
from support.staged_files import publish, stage

REFUSALS = (NotEnoughReplicasError, ReplicaNotAvailableError, LockTimeoutError)
"""What a writer may get while disks are broken or processes are stopped."""
EXCUSES = (*REFUSALS, FencedError, NotLeaderOrFollowerError)
"""What the housekeeping may get besides: another process, or another directory, took over."""
TOPICS: dict[str, tuple[int, dict[str, object]]] = {
    "all": (3, {"min.insync.replicas": 2}),
    "one": (2, {}),
    "keys": (1, {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.01}),
    "short": (1, {"retention.bytes": 200_000, "min.insync.replicas": 2}),
    "published": (2, {"min.insync.replicas": 2}),
}
"""The topics: partitions and settings.  To `one`, some write with ``acks=1``, and not all of that
is flushed before it is acknowledged."""
_POWER_CUT_KINDS = ("fails", "dies", "read-only", "unmounted", "replaced", "restored")
"""The faults during which the power may fail, too: the others are of people, who are at work."""
LONGEST_SECONDS = 45.0
"""What a call may take, besides the time for which its thread wanted a processor and had none."""
ONCE = "fails once"
"""A disk that refuses one change of a file, with EIO, and works again."""
_SMALL = {
    "segment.bytes": 60_000,
    "index.interval.bytes": 4096,
    "retention.ms": -1,
    "file.delete.delay.ms": 100,
}
_KEYS = 30
_PRODUCER = 9_000_000
_LIVES = 10_000
_ENTRY = struct.Struct("<cBBBIQQQ")
"""Kind, topic, partition, records, life, first record, offset or sequence number, time."""
_VALUE = struct.Struct("<IQ")
_STATUS = struct.Struct("<QQ")
_BOOT = struct.Struct("<Q")
_LONGEST = struct.Struct("<QQ")
"""The longest call of a program: without and with the time without a processor, in ns."""

Counts = Counter[str]


class DiskRun(NamedTuple):
    """The parameters of a run."""

    faults: int = 8
    """Disks that fail, one after another, or two of them at once."""
    kinds: tuple[str, ...] = (*FAULTS, ONCE)
    directories: int = 3
    """Of the log; with 2 of them, no two are swapped, and with 4, two of them break unnoticed."""
    copies: int = 3
    """Of each partition; with 2 of them, two disks must not fail at once."""
    kill_pause: float = 0.4
    """Seconds from one kill or stop to the next."""
    both: float = 0.2
    """How often a second disk fails before the first is repaired."""
    patience: float = 40.0
    """Seconds until all copies must be in sync again after a repair."""
    power_cuts: float = 0.4
    """How often the power fails before a disk, and before its repair."""
    seed: int = 1


def nightly_case(seed: int, faults: int = 10) -> DiskRun:
    """Return a run that differs with the seed: two to four directories, two or three copies."""
    directories, copies = ((3, 3), (2, 2), (3, 2), (4, 3))[seed % 4]
    return DiskRun(
        faults,
        directories=directories,
        copies=copies,
        both=0.3 if copies > 2 else 0.0,
        kill_pause=0.2 + seed // 4 % 4 * 0.2,
        seed=seed,
    )


class Entry(NamedTuple):
    """A line of a journal."""

    kind: bytes
    """``s`` what is sent, ``a`` what was acknowledged and survives a power cut, ``o`` what may not
    survive one, ``f`` a flush of all below an offset, ``g`` what was read, ``c`` a commit, ``r`` a
    refusal."""
    topic: int
    partition: int
    count: int
    life: int
    first: int
    number: int
    """The offset of what was acknowledged, the sequence number of what is sent."""
    time_ns: int


class Journal:
    """What one process has done, kept when it is killed."""

    def __init__(self, setting: Setting, life: int) -> None:
        path = setting.directory / f"journal-{life}"
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._life, self.timed = life, partial(setting.timed, life // _LIVES)

    def note(
        self,
        kind: bytes,
        topic: str,
        partition: int,
        count: int = 0,
        first: int = 0,
        number: int = 0,
        life: int | None = None,
    ) -> None:
        """Add a line."""
        which = self._life if life is None else life
        fields = (kind, list(TOPICS).index(topic), partition, count, which, first, number)
        os.write(self._fd, _ENTRY.pack(*fields, time.monotonic_ns()))


def journal_of(directory: Path, life: int) -> list[Entry]:
    """Return what a process has noted; the last line may be cut."""
    path = directory / f"journal-{life}"
    data = path.read_bytes() if path.exists() else b""
    whole = data[: len(data) // _ENTRY.size * _ENTRY.size]
    return [Entry(*fields) for fields in _ENTRY.iter_unpack(whole)]


class Setting(NamedTuple):
    """What all processes know."""

    directory: Path
    paths: list[str]
    spare: str
    """The directory that is added and removed."""
    copies: int
    status: mmap.mmap
    """From the observer: how often it looked, and when all copies were last in sync; after that
    the number of the boot, the longest call of each program, and a byte for each directory that
    is to refuse a change."""

    @property
    def stopped(self) -> bool:
        return (self.directory / "stop").exists()

    @property
    def all_ended(self) -> bool:
        """Whether only those that keep house still run: others may wait for copies in sync."""
        return (self.directory / "ended").exists()

    @property
    def boot(self) -> int:
        """How often the power has failed."""
        return int(_BOOT.unpack_from(self.status, _STATUS.size)[0])

    def begin_boot(self) -> None:
        """Let the processes that are started from now on be after a reboot."""
        _BOOT.pack_into(self.status, _STATUS.size, self.boot + 1)

    def refuse_once(self, path: str, *, refuses: bool = True) -> None:
        """Let the next change of a file in a directory fail, in whatever process."""
        self.status[self._refusal_at(path)] = refuses

    def takes_refusal(self, path: str) -> bool:
        """Whether a change of a file must fail; the next one need not."""
        if path not in self.paths or not self.status[at := self._refusal_at(path)]:
            return False
        self.status[at] = False
        return True

    def _refusal_at(self, path: str) -> int:
        return _REFUSALS_AT + self.paths.index(path)

    def timed(self, program: int, work: Callable[[], Any]) -> Any:
        """Do something, and fail if it takes too long, also to fail; note the longest call."""
        begun, starved = time.monotonic_ns(), _starved_ns()
        try:
            return work()
        finally:
            whole = time.monotonic_ns() - begun
            taken, at = whole - (_starved_ns() - starved), _LONGEST_AT + program * _LONGEST.size
            if taken > _LONGEST.unpack_from(self.status, at)[0]:
                _LONGEST.pack_into(self.status, at, taken, whole)
            assert taken < LONGEST_SECONDS * 1e9, (
                f"it took {taken / 1e9:.1f} of {whole / 1e9:.1f} s"
            )

    def longest(self) -> Counts:
        """Return the longest call of each program in ms, without the time without a processor."""
        found = Counts()
        for number, work in enumerate(PROCESSES):
            taken, _ = _LONGEST.unpack_from(self.status, _LONGEST_AT + number * _LONGEST.size)
            name = f"longest ms of {work.__name__}"
            found[name] = max(found[name], taken // 1_000_000)
        return found

    def open(self) -> Any:
        """Open the log; wait if too few disks work for that."""
        disks, begun, refusal = _Disks(self), time.monotonic(), ""
        while True:
            assert time.monotonic() - begun < LONGEST_SECONDS, f"it cannot be opened: {refusal}"
            try:
                log = embedlog.open(self.paths, durability="fsync", maintenance=False, files=disks)
                log.topics()
                return log
            except REFUSALS as error:
                refusal = repr(error)
                gc.collect()  # which is switched off in children
                time.sleep(0.02)


_LONGEST_AT = _STATUS.size + _BOOT.size


class _Disks(FailingDisks):
    """Refuses a change of a file in a directory that the attack has named."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._setting, self.boot = setting, f"boot {setting.boot}"

    def begin(self, root: str, operation: str, changes: bool, path: str = "") -> None:
        """As `FailingDisks.begin`."""
        if changes and self._setting.takes_refusal(root):
            raise OSError(errno.EIO, "once")


def _starved_ns() -> int:
    """Return for how long this thread wanted a processor and had none."""
    with open("/proc/thread-self/schedstat", encoding="ascii") as file:
        return int(file.read().split()[1])


# The processes


def _until_done(journal: Journal, topic: str, partition: int, work: Callable[[], Any]) -> Any:
    """Repeat what is refused."""
    while True:
        try:
            return journal.timed(work)
        except REFUSALS:
            journal.note(b"r", topic, partition)
            time.sleep(0.02)


def _values(life: int, first: int, count: int, dice: random.Random) -> list[bytes]:
    size = dice.choice((12, 40, 200))
    return [_VALUE.pack(life, first + row).ljust(size, b".") for row in range(count)]


def _encode(
    life: int, first: int, count: int, sequence: int, keys: list[bytes | None] | None = None
) -> Any:
    values = _values(life, first, count, random.Random(first))
    encoded = batch.encode_lists(values, keys, 1_700_000_000_000, None)
    encoded.set_producer(_PRODUCER + life, 0, sequence)
    return encoded


def write_all(setting: Setting, life: int, topics: tuple[str, ...] = ("all", "short")) -> None:
    """Append with ``acks=all``; what the process before left unacknowledged, again."""
    journal, log, dice = Journal(setting, life), setting.open(), random.Random(life)

    def send(topic: str, partition: int, count: int, of: int, first: int, sequence: int) -> None:
        journal.note(b"s", topic, partition, count, first, sequence, of)
        encoded = _encode(of, first, count, sequence)
        part = log.partition(topic, partition)
        appended = _until_done(journal, topic, partition, lambda: part.append([encoded]))
        journal.note(b"a", topic, partition, count, first, appended[0].base_offset, of)

    before = [each for each in journal_of(setting.directory, life - 1) if each.kind in b"sa"][-1:]
    for entry in before:
        if entry.kind == b"s":
            name = list(TOPICS)[entry.topic]
            send(name, entry.partition, entry.count, entry.life, entry.first, entry.number)
    sequences, first = Counter[tuple[str, int]](), 0
    while not setting.stopped:
        topic = dice.choice(topics)
        partition, count = dice.randrange(TOPICS[topic][0]), dice.randint(1, 5)
        send(topic, partition, count, life, first, sequences[topic, partition])
        first += count
        sequences[topic, partition] += count
        time.sleep(0.002)
    log.close()


def write_steadily(setting: Setting, life: int) -> None:
    """As `write_all`; this one is not killed, and shows how long appends pause."""
    write_all(setting, life, ("all",))


def produce_all(setting: Setting, life: int) -> None:
    """Send with a producer, and ``acks=all``."""
    _produce(setting, life, "all", "all")


def produce_one(setting: Setting, life: int) -> None:
    """Send with a producer, and ``acks=1``."""
    _produce(setting, life, 1, "one")


def _produce(setting: Setting, life: int, acks: Any, topic: str) -> None:
    journal, log, dice = Journal(setting, life), setting.open(), random.Random(life)
    producer = log.producer(acks=acks, linger_ms=1)
    first, kind = 0, b"a" if acks == "all" else b"o"
    while not setting.stopped:
        partition, count = dice.randrange(TOPICS[topic][0]), dice.randint(1, 20)
        journal.note(b"s", topic, partition, count, first)
        futures = [
            producer.send(topic, value, partition=partition)
            for value in _values(life, first, count, dice)
        ]
        for row, future in enumerate(futures):
            metadata = journal.timed(partial(future.result, patient(60)))
            journal.note(kind, topic, partition, 1, first + row, metadata.offset)
        first += count
        time.sleep(0.004)
    producer.close()
    log.close()


def write_one(setting: Setting, life: int) -> None:
    """Append with ``acks=1`` and sequence numbers; some of it is flushed, at once or later."""
    journal, log, dice = Journal(setting, life), setting.open(), random.Random(life)
    sequences, first = Counter[int](), 0
    while not setting.stopped:
        partition, count = dice.randrange(TOPICS["one"][0]), dice.randint(1, 5)
        part = log.partition("one", partition)
        journal.note(b"s", "one", partition, count, first)
        encoded = _encode(life, first, count, sequences[partition])
        encoded.set_producer(_PRODUCER * 2 + life, 0, sequences[partition])
        kind, durability = (b"a", "fsync") if dice.random() < 0.02 else (b"o", "os")
        append = partial(part.append, [encoded], acks=1, durability=durability)
        offset = _until_done(journal, "one", partition, append)[0].base_offset
        journal.note(kind, "one", partition, count, first, offset)
        if dice.random() < 0.02:
            _until_done(journal, "one", partition, part.flush)
            journal.note(b"f", "one", partition, number=offset + count)
        sequences[partition] += count
        first += count
        time.sleep(0.003)
    log.close()


def write_keys(setting: Setting, life: int) -> None:
    """Write the same keys again and again; only the last record of each must stay."""
    journal, log, number = Journal(setting, life), setting.open(), 0
    part = log.partition("keys", 0)
    while not setting.stopped:
        keys: list[bytes | None] = [b"%d" % (number % _KEYS)]
        encoded = _encode(life, number, 1, number, keys)
        journal.note(b"s", "keys", 0, 1, number)
        offset = _until_done(journal, "keys", 0, lambda: part.append([encoded]))[0].base_offset  # noqa: B023
        journal.note(b"a", "keys", 0, 1, number, offset)
        number += 1
        time.sleep(0.003)
    log.close()


def publish_both(setting: Setting, life: int) -> None:
    """Publish records in both partitions at once, in versions that the processes share."""
    journal, log = Journal(setting, life), setting.open()
    before = [each for each in journal_of(setting.directory, life - 1) if each.kind in b"sa"][-1:]
    version = life % _LIVES * 1_000_000
    for entry in before:
        # The version that was not acknowledged is published again.
        version = entry.first - (entry.kind == b"s")
    while not setting.stopped:
        version += 1
        journal.note(b"s", "published", 0, 1, version)
        number = version

        def once() -> None:
            value = _VALUE.pack(0, number)  # noqa: B023
            staged = stage(log.root, published_0=[value], published_1=[value])
            publish(log.root, [staged], number)  # noqa: B023

        while True:
            try:
                _until_done(journal, "published", 0, once)
                break
            except NotLeaderOrFollowerError:
                journal.note(b"r", "published", 0)
            except (StorageError, CorruptionError) as error:
                # Staged files are on one disk only, and not flushed before they are published.
                if "staging/" not in (error.path or ""):
                    raise
                journal.note(b"r", "published", 0)
        journal.note(b"a", "published", 0, 1, version)
        time.sleep(0.02)
    log.close()


def consume(setting: Setting, life: int) -> None:
    """Read as a member of a group, and commit."""
    journal, log = Journal(setting, life), setting.open()
    consumer = log.consumer(
        "all",
        group_id="g",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        session_timeout_ms=2000,
        heartbeat_interval_ms=300,
        value_deserializer="bytes",
    )
    while not setting.stopped:
        try:
            polled = journal.timed(lambda: consumer.poll(100, max_records=500))
            for partition, records in polled.items():
                for record in records:
                    of, first = _VALUE.unpack_from(record.value)
                    fields = (partition.partition, 1, first, record.offset, of)
                    journal.note(b"g", "all", *fields)
            if not polled:
                continue
            positions = {each: records[-1].offset + 1 for each, records in polled.items()}
            journal.timed(lambda: consumer.commit(positions))  # noqa: B023
        except (*REFUSALS, CommitFailedError, FencedError, UnknownMemberIdError):
            journal.note(b"r", "all", 0)
            time.sleep(0.02)
            continue
        for partition, offset in positions.items():
            journal.note(b"c", "all", partition.partition, number=offset)
    consumer.close()
    log.close()


def administer(setting: Setting, life: int) -> None:
    """Use all of an administrator's commands, at random; none of them loses a record."""
    log, dice = setting.open(), random.Random(life)
    names = [name for name in TOPICS if name != "short"]

    def partition() -> TopicPartition:
        name = dice.choice(names)
        return TopicPartition(name, dice.randrange(TOPICS[name][0]))

    def move() -> None:
        ids = [each.id for each in log.replicas]
        log.replicas.reassign({partition(): dice.sample(ids, setting.copies)})

    def add_or_remove() -> None:
        if any(each.path == setting.spare for each in log.replicas):
            log.replicas.remove(setting.spare)
            return
        # A removal that was killed leaves files; one that is killed here leaves no directory.
        with suppress(FileNotFoundError):
            shutil.rmtree(setting.spare)
        # A process that was just bringing it back, before it was removed, may write some more.
        with suppress(NotALogError):
            log.replicas.add(setting.spare)

    def complete() -> None:
        with suppress(InvalidReplicationFactorError):  # too few directories are online
            log.replicas.reassign(replication_factor=dict.fromkeys(TOPICS, setting.copies))

    def cancel() -> None:
        with suppress(IllegalStateError):  # only replicas that it added are in sync
            log.replicas.cancel_reassignment()

    def verify() -> None:
        findings = [
            *map(str, log.housekeeping.verify(replicas=True)),
            *log.housekeeping.repair(dry_run=False),
        ]
        # A repair also removes what killed processes staged, and finishes deleting their topics.
        done = ("it will not be published", "the topic was deleted")
        for each in findings:
            # The only copy of a topic that is about to be deleted may be on a disk that was lost.
            assert each.endswith(done) or "/short-lived-" in each, findings

    def create_and_delete() -> None:
        name = f"short-lived-{life}-{dice.randrange(1 << 30)}"
        log.create_topic(name, replication_factor=dice.randint(1, setting.copies))
        log.producer(acks=1).send(name, b"x")
        log.create_partitions(name, 2)
        delete()

    def delete() -> None:
        """Delete also what killed processes left: a disk that is lost may have its only copy."""
        for name in log.topics():
            if name.startswith("short-lived"):
                log.delete_topic(name)

    calls: tuple[Callable[[], object], ...] = (
        *(move, add_or_remove, create_and_delete, verify),
        *(log.replicas.elect_leaders, cancel),
        complete,
        lambda: log.alter_topic("all", {"retention.bytes": dice.randint(1 << 40, 1 << 41)}),
    )
    while not setting.stopped:
        try:
            setting.timed(life // _LIVES, dice.choice(calls))
        except EXCUSES:
            pass
        except UnknownTopicOrPartitionError as error:
            if not (error.topic or "").startswith("short-lived"):
                raise
        time.sleep(0.05)
    delete()
    log.close()


def keep_house(setting: Setting, life: int) -> None:
    """Run all jobs of the housekeeping at short intervals."""
    owner.HEARTBEAT_SECONDS, owner._FIRST_SECONDS = 0.1, 0.02
    replication_jobs.PROBE_SECONDS, replication_jobs.RETRY_SECONDS = 0.5, 0.1
    log = setting.open()
    config = MaintenanceConfig.parse({})
    jobs = [
        job._replace(every_seconds=min(job.every_seconds, 0.2))
        for job in jobs_of(config, replicated=True)
    ]
    maintenance = Maintenance(log.root, jobs, session_ms=1500)
    maintenance.start()
    while not setting.all_ended:
        time.sleep(0.05)
        check_threads(maintenance)
        failures = list(maintenance.failures.errors.values())
        for failure in failures:
            # A file of the controller's directory may be missing in that of the next controller.
            if not isinstance(failure, EXCUSES) and not getattr(failure, "missing", False):
                raise failure
    maintenance.close()
    log.close()


def observe(setting: Setting, life: int) -> None:
    """Show whether all directories are online, and all copies in sync, and enough of them.

    A removal of a directory may leave a partition fewer, which two broken disks would stop.
    """
    log, looks = setting.open(), 0
    controller = log.root.controller
    keys = {
        log.root.topic(name).key(number)
        for name, (partitions, _) in TOPICS.items()
        for number in range(partitions)
    }
    while not setting.stopped:
        in_sync = False
        with suppress(*REFUSALS):
            image = controller.current().image
            in_sync = (
                len(image.online) == len(image.directories)
                # Nobody may have noticed yet that an old copy took the place of one.
                and all(directory.is_in_place() for directory in controller.online)
                and all(
                    set(each.isr) == set(each.replicas)
                    and (key not in keys or len(each.isr) >= setting.copies)
                    for key, each in image.assignments.items()
                )
            )
        looks += 1
        when = time.monotonic_ns() if in_sync else _STATUS.unpack_from(setting.status)[1]
        _STATUS.pack_into(setting.status, 0, looks, when)
        time.sleep(0.01)
    log.close()


PROCESSES: tuple[Callable[[Setting, int], None], ...] = (
    *(write_steadily, observe),
    *(write_all, write_one, produce_all, produce_one, write_keys, publish_both),
    *(consume, consume, keep_house, keep_house, administer),
)
_REFUSALS_AT = _LONGEST_AT + len(PROCESSES) * _LONGEST.size
UNHARMED = 2
"""The first ones are not killed or stopped."""
WRITERS = (write_steadily, write_all, produce_all)


class _Process:
    """A sequence of processes, each of which replaces a killed one."""

    def __init__(self, setting: Setting, number: int) -> None:
        self._setting, self.number, self.life = setting, number, 0
        self.work = PROCESSES[number]
        self._running = self._stopped = False
        self._child: forks.Child
        self.start()

    def start(self) -> None:
        self.life += 1
        life = self.number * _LIVES + self.life
        self._child = forks.Child(lambda: self.work(self._setting, life))
        self._running = True

    def check(self) -> None:
        """Fail if it has ended by itself."""
        if self._child.ends_within(0):
            self._running = False
            end = self._child.end()
            raise AssertionError(f"{self.work.__name__} ended: {end.finding()}")

    def kill(self) -> None:
        self.begin_kill()
        self.end_kill()

    def begin_kill(self) -> None:
        """Kill it without waiting for its end."""
        self.check()
        os.kill(self._child.pid, signal.SIGKILL)

    def end_kill(self) -> None:
        self._running = self._stopped = False
        end = self._child.end()
        assert end.killed, f"{self.work.__name__}, before it was killed: {end.finding()}"

    def stop(self) -> None:
        self._child.stop()
        self._stopped = True

    def go_on(self) -> None:
        self._child.go_on()
        self._stopped = False

    def end(self) -> None:
        self._running = False
        self._child.end(patience=60).result(self.work.__name__)

    def remove(self) -> None:
        """Kill it if something went wrong before its end."""
        if self._running:
            self._running = False
            self._child.kill()


# The run


def check_replica_disks(case: DiskRun, directory: Path) -> Counts:
    """Let disks fail; then compare the log with all journals, and its copies with each other.

    Raises:
        OSError: Disks cannot be mounted here.
    """
    with loop_disks(directory, case.directories + 1) as disks:
        *paths, spare = [os.fspath(disk.log) for disk in disks]
        forks.call(lambda: _create(paths, case.copies))
        status = mmap.mmap(-1, _REFUSALS_AT + case.directories)
        setting = Setting(directory, paths, spare, case.copies, status)
        processes: list[_Process] = []
        try:
            for number in range(len(PROCESSES)):
                processes.append(_Process(setting, number))
            done = _Faults(case, setting, disks, processes).run()
            for name, keeps_house in (("stop", False), ("ended", True)):
                (directory / name).touch()
                for process in processes:
                    if (process.work is keep_house) == keeps_house:
                        process.end()
        finally:
            for process in processes:
                process.remove()
        done += forks.call(lambda: _compare_at_end(setting), patience=600)
        return done + setting.longest()


def _create(paths: list[str], copies: int) -> None:
    with embedlog.open(paths, maintenance=False) as log:
        for name, (partitions, config) in TOPICS.items():
            log.create_topic(name, partitions, _SMALL | config, replication_factor=copies)


class _Faults:
    """Breaks disks in random order, and processes at random instants meanwhile."""

    def __init__(
        self, case: DiskRun, setting: Setting, disks: list[LoopDisk], processes: list[_Process]
    ) -> None:
        self._case, self._setting, self._disks = case, setting, disks
        self._processes, self._breakable = processes, disks[:-1]
        self._dice, self._kills = random.Random(case.seed), random.Random(case.seed)
        """The first one chooses what happens to disks, so that a run can be repeated."""
        self._done = Counts()
        self._due = 0.0
        self._paused: list[tuple[float, _Process]] = []

    def run(self) -> Counts:
        self._wait(self._in_sync_since(time.monotonic_ns()), "the start")
        for _ in range(self._case.faults):
            if self._dice.random() < self._case.both:
                self._break_two()
            else:
                self._break_one()
        self._go_on(float("inf"))
        return self._done

    def _break_one(self) -> None:
        kinds = [
            each for each in self._case.kinds if each != "swapped" or self._case.directories > 2
        ]
        kind, disk = self._dice.choice(kinds), self._dice.choice(self._breakable)
        cuts = self._done["power cuts"]
        with self._perhaps_without_power(kind):
            self._break(kind, disk)
        self._pass(self._dice.uniform(0.2, 1.5))
        self._recover(kind, disk, cuts)
        cuts = self._done["power cuts"]
        with self._perhaps_without_power(kind) if kind in _POWER_CUT_KINDS else nullcontext():
            if is_repaired := self._dice.random() < 0.5:
                self._repair(kind, disk)
        if not is_repaired:
            self._pass(self._dice.uniform(0.0, 0.5))
            self._recover(kind, disk, cuts)
            self._repair(kind, disk)
        self._wait(self._in_sync_since(time.monotonic_ns()), f"{disk.path.name} {kind}")
        self._pass(self._dice.uniform(0.0, 0.5))

    def _recover(self, kind: str, disk: LoopDisk, cuts: int) -> None:
        """Let all copies recover from a power cut before a disk loses what it has not written.

        What another one had not flushed may be on this disk only, and it alone in sync: an old
        copy takes its place, or, if it works since the boot, it is repaired all the same.
        """
        loses = kind in ("restored", "dies", "read-only")
        if loses and self._done["power cuts"] > cuts and disk.works():
            since = self._in_sync_since(time.monotonic_ns())
            self._wait(since, f"a power cut, before {disk.path.name} is {kind}")

    @contextmanager
    def _perhaps_without_power(self, kind: str) -> Iterator[None]:
        """Do something, perhaps between a power cut and the next boot; a disk is broken then."""
        if self._dice.random() >= self._case.power_cuts:
            yield
            return
        self._cut_power()
        yield
        while kind in _POWER_CUT_KINDS and self._dice.random() < 0.3:
            # The power fails again, while some processes recover the log.
            openers = [
                forks.Child(lambda: (self._setting.open(), signal.pause())) for _ in range(2)
            ]
            time.sleep(self._dice.uniform(0.0, 0.3))
            self._cut_power(openers)
        others = [forks.Child(lambda: self._setting.open().close()) for _ in range(2)]
        self._done += forks.call(lambda: _compare_at_boot(self._setting), patience=120)
        for child in others:
            child.end().result("another process that opened the log")
        for process in self._processes:
            process.start()

    def _cut_power(self, openers: Sequence[forks.Child] = ()) -> None:
        """Kill all processes and cut off all disks at one instant; mount what they have."""
        for disk in self._disks:
            with suppress(OSError):  # it does not work
                disk.write_some_back(random.Random(self._dice.random()))
        time.sleep(self._dice.uniform(0.0, 0.1))
        running = [] if openers else self._processes
        for process in running:
            process.begin_kill()
        for child in openers:
            os.kill(child.pid, signal.SIGKILL)
        for disk in self._disks:
            disk.cut_power()
        # None of them has run since the signal, so none has seen that the disks stopped.
        for process in running:
            process.end_kill()
        for child in openers:
            assert (end := child.end()).killed, end.finding()
        self._paused = []
        for disk in self._disks:
            disk.boot()
        self._setting.begin_boot()
        self._done["power cuts"] += 1
        _note("power cut")

    def _break_two(self) -> None:
        """Break two: of three, nothing can be written then, until one of them is back."""
        first, second = self._dice.sample(self._breakable, 2)
        able = [each for each in self._case.kinds if each not in ("swapped", ONCE)]
        kinds = self._dice.choice(able), self._dice.choice(able)
        self._break(kinds[0], first)
        self._pass(0.3)
        self._break(kinds[1], second)
        # The others are seen in the path alone, and open files take what is written until a
        # housekeeper looks there: he may be dead, and cannot start on one directory of three.
        stopping = ("dies", "read-only", "full", "deleted")
        is_stopped = kinds[0] in ("fails", *stopping) and kinds[1] in stopping
        if is_stopped and self._case.directories == 3:
            self._wait(self._refused_since(time.monotonic_ns()), f"refusals, {kinds}")
        self._pass(self._dice.uniform(0.0, 0.5))
        self._done["both"] += 1
        back = [(kinds[0], first), (kinds[1], second)]
        self._dice.shuffle(back)
        self._repair(*back[0])
        names = [(disk.path.name, kind) for kind, disk in back]
        self._wait(self._acknowledged_since(time.monotonic_ns()), f"one is back of {names}")
        self._repair(*back[1])
        self._wait(self._in_sync_since(time.monotonic_ns()), f"both are back of {names}")

    def _break(self, kind: str, disk: LoopDisk) -> None:
        if kind == ONCE:
            self._setting.refuse_once(os.fspath(disk.log))
        else:
            disk.break_by(kind, self._other(disk))
        self._done[kind] += 1
        _note(f"{disk.path.name} {kind}")

    def _other(self, disk: LoopDisk) -> LoopDisk:
        return self._breakable[self._breakable.index(disk) - 1]

    def _repair(self, kind: str, disk: LoopDisk) -> None:
        if kind == ONCE:
            self._setting.refuse_once(os.fspath(disk.log), refuses=False)
        else:
            disk.repair_after(kind, self._other(disk))
        _note(f"{disk.path.name} is repaired after {kind}")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + patient(self._case.patience)
        while not condition():
            assert time.monotonic() < deadline, f"it did not happen in time: {what}"
            self._pass(0.05)

    def _in_sync_since(self, when: int) -> Callable[[], bool]:
        # What was in sync a moment ago may be broken without anyone having noticed.
        later = when + 700_000_000
        return lambda: _STATUS.unpack_from(self._setting.status)[1] > later

    def _noted_since(self, when: int, kind: bytes) -> Callable[[], bool]:
        def noted() -> bool:
            entries = journal_of(self._setting.directory, self._processes[0].life)[-5:]
            return any(each.kind == kind and each.time_ns > when for each in entries)

        return noted

    def _refused_since(self, when: int) -> Callable[[], bool]:
        return self._noted_since(when, b"r")

    def _acknowledged_since(self, when: int) -> Callable[[], bool]:
        return self._noted_since(when, b"a")

    def _pass(self, seconds: float) -> None:
        """Let time pass, and kill and stop processes meanwhile."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            self._go_on(now)
            for process in self._processes:
                if process not in [each for _, each in self._paused]:
                    process.check()
            if now >= self._due:
                self._due = now + self._case.kill_pause * self._kills.uniform(0.5, 1.5)
                self._hit(now)
            time.sleep(0.01)

    def _hit(self, now: float) -> None:
        idle = [
            process
            for process in self._processes[UNHARMED:]
            if process not in [each for _, each in self._paused]
        ]
        victim = self._kills.choice(idle)
        if self._kills.random() < 0.6:
            victim.kill()
            victim.start()
            self._done["kills"] += 1
        else:
            victim.stop()
            seconds = self._kills.choice((0.01, 0.1, 0.3))
            self._paused.append((now + seconds, victim))
            self._done["stops"] += 1

    def _go_on(self, now: float) -> None:
        for when, process in self._paused:
            if now >= when:
                process.go_on()
        self._paused = [(when, process) for when, process in self._paused if now < when]


def _note(text: str) -> None:
    if os.environ.get("REPLICA_DISKS_VERBOSE"):
        tell(f"{time.monotonic():.2f} {text}")


# What must be true after a power cut, and at the end


class Boot(NamedTuple):
    """When the log was recovered after a power cut, and where each partition ended then."""

    time_ns: int
    ends: dict[str, int]


def _lives(directory: Path) -> Iterator[tuple[Callable[..., None], int, list[Entry]]]:
    """Yield what each process did, by its work and its life."""
    for path in sorted(directory.glob("journal-*")):
        life = int(path.name.partition("-")[2])
        yield PROCESSES[life // _LIVES], life, journal_of(directory, life)


def _compare_at_boot(setting: Setting) -> Counts:
    """Compare the log before any program writes; note where its partitions end."""
    with setting.open() as log:
        ends = {
            f"{name}-{number}": log.partition(name, number).end_offset()
            for name, (partitions, _) in TOPICS.items()
            for number in range(partitions)
        }
        with open(setting.directory / "boots", "a", encoding="ascii") as file:
            file.write(json.dumps([time.monotonic_ns(), ends]) + "\n")
        done = _compare(setting, log)
        return Counts({"lost in power cuts": done["lost in power cuts"]})


def _compare_at_end(setting: Setting) -> Counts:
    with setting.open() as log:
        replication_jobs.RETRY_SECONDS = 0.1
        forks.until(lambda: _settle(log), 20)
        controller = log.root.controller
        assert len(controller.online) == len(controller.image.directories)
        for each in controller.image.assignments.values():
            assert set(each.isr) == set(each.replicas), each
        done = _compare(setting, log)
    with setting.open() as again:
        assert again.root.startup_report == [], again.root.startup_report
        assert again.housekeeping.verify() == []
    return done


def _compare(setting: Setting, log: Any) -> Counts:
    # The only copy of a topic that is about to be deleted may be on a disk that was lost.
    findings = [
        each for each in log.housekeeping.verify() if not each.topic.startswith("short-lived")
    ]
    findings += log.housekeeping.verify(replicas=True)
    assert not findings, findings
    journals = list(_lives(setting.directory))
    records = {name: _read_topic(log, name) for name in TOPICS}
    done = _compare_records(log, journals, records, _boots(setting.directory))
    done += _compare_keys(journals, records["keys"][0])
    done += _compare_publications(journals, records["published"])
    done += _compare_commits(log, journals)
    return done + _compare_copies(log)


def _boots(directory: Path) -> list[Boot]:
    path = directory / "boots"
    lines = path.read_text("ascii").splitlines() if path.exists() else []
    return [Boot(*json.loads(line)) for line in lines]


def _settle(log: Any) -> bool:
    """Have all copies catch up; whether nothing was left."""
    job = replication_jobs.ReplicationJob(MaintenanceConfig.parse({}))
    time.sleep(0.1)
    result = job.run(log.root, lambda: False)
    controller = log.root.controller
    return not result and len(controller.online) == len(controller.image.directories)


def _read_topic(log: Any, name: str) -> list[dict[int, tuple[int, int]]]:
    """Return the records of each partition by their offsets."""
    partitions = []
    for number in range(TOPICS[name][0]):
        part = log.partition(name, number)
        reader, records = part.reader(part.start_offset()), dict[int, tuple[int, int]]()
        while batches := reader.read():
            for decoded in batches:
                decoded.verify()
                rows = zip(decoded.offsets().to_pylist(), decoded.lists()[2], strict=True)
                for offset, value in rows:
                    assert offset not in records
                    records[offset] = _VALUE.unpack_from(value)
        if name != "keys":
            expected = list(range(part.start_offset(), part.end_offset()))
            assert list(records) == expected, f"{name}-{number} has a hole"
        partitions.append(records)
    return partitions


def _compare_records(
    log: Any,
    journals: list[Any],
    records: dict[str, list[dict[int, tuple[int, int]]]],
    boots: list[Boot],
) -> Counts:
    """Compare the records that writers sent and readers read with those in the log."""
    done = Counts()
    sent: dict[int, int] = defaultdict(int)
    for _, _, entries in journals:
        for entry in entries:
            if entry.kind == b"s":
                sent[entry.life] = max(sent[entry.life], entry.first + entry.count)
    for name in ("all", "one", "short"):
        for number, partition in enumerate(records[name]):
            values = list(partition.values())
            # Without idempotence a producer may repeat what was written.
            doubled = [
                value
                for value, count in Counter(values).items()
                if count > 1 and PROCESSES[value[0] // _LIVES] is not produce_one
            ]
            assert not doubled, (
                f"{name}-{number}: {len(doubled)} records are doubled: {doubled[:9]}"
            )
            never = [value for value in values if value[1] >= sent[value[0]]]
            assert not never, f"{name}-{number}: never sent: {never[:9]}"
            done["records"] += len(values)
    starts = {
        (name, number): log.partition(name, number).start_offset()
        for name in ("all", "one", "short")
        for number in range(TOPICS[name][0])
    }
    lost: list[str] = []
    for work, _, entries in journals:
        for entry in entries:
            name = list(TOPICS)[entry.topic]
            if entry.kind not in b"aogf" or name not in ("all", "one", "short"):
                continue
            later = [
                boot.ends[f"{name}-{entry.partition}"]
                for boot in boots
                if boot.time_ns > entry.time_ns
            ]
            end = min(later, default=1 << 62)
            if entry.kind == b"f" and entry.number > end:
                lost.append(f"{work.__name__}: {entry}: the log ended at {end} after a power cut")
            for row in range(entry.count):
                offset = entry.number + row
                if offset < starts[name, entry.partition]:
                    done["records deleted"] += 1
                    continue
                found = records[name][entry.partition].get(offset)
                if entry.kind == b"o" and offset >= end:
                    done["lost in power cuts"] += 1
                elif found == (entry.life, entry.first + row):
                    done["consumed" if entry.kind == b"g" else "acknowledged"] += 1
                else:
                    what = f"{work.__name__}: {entry}, row {row}: offset {offset} has {found}"
                    lost.append(what)
    assert not lost, f"{len(lost)} acknowledged records are lost:\n" + "\n".join(lost[:9])
    return done


def _compare_keys(journals: list[Any], records: dict[int, tuple[int, int]]) -> Counts:
    """The last record of each key is the last that was acknowledged, or one sent since."""
    last: dict[int, tuple[int, int]] = {}
    for value in records.values():
        key = value[1] % _KEYS
        assert last.get(key, (-1, -1)) < value, f"{key}: {value} after {last[key]}"
        last[key] = value
    for work, life, entries in journals:
        if work is write_keys:
            for entry in entries:
                if entry.kind == b"a":
                    key = entry.first % _KEYS
                    assert last[key] >= (life, entry.first), f"{key}: {last[key]}, not {entry}"
    return Counts(keys=len(last), compacted=len(records))


def _compare_publications(journals: list[Any], records: list[dict[int, tuple[int, int]]]) -> Counts:
    """Each version is in both partitions, once, or in none."""
    first, second = ([number for _, number in each.values()] for each in records)
    assert sorted(first) == sorted(second), set(first) ^ set(second)
    assert len(set(first)) == len(first), Counter(first).most_common(3)
    published = {
        entry.first
        for work, _, entries in journals
        for entry in entries
        if work is publish_both and entry.kind == b"a"
    }
    assert published <= set(first), sorted(published - set(first))[:9]
    return Counts(publications=len(published))


def _compare_commits(log: Any, journals: list[Any]) -> Counts:
    """A group is at, or past, everything that it was told was committed."""
    with log.consumer(group_id="g") as consumer:
        committed = {
            number: consumer.committed(TopicPartition("all", number)) or 0
            for number in range(TOPICS["all"][0])
        }
    done = Counts()
    for _, _, entries in journals:
        for entry in entries:
            if entry.kind == b"c":
                done["commits"] += 1
                assert committed[entry.partition] >= entry.number, (committed, entry)
    return done


def _compare_copies(log: Any) -> Counts:
    """The files of all copies are equal byte for byte, and so are the rows of the databases."""
    done, controller = Counts(), log.root.controller
    for name, (partitions, _) in TOPICS.items():
        for number in range(partitions):
            part = log.partition(name, number)
            tail = part.tail()
            assignment = controller.assignment(part.key)
            infos = log.root.context.state.read(
                lambda txn, key=part.key: catalog.segments(txn, key)
            )
            for info in infos:
                size = info.size if info.sealed else tail.log_end_position
                copies = {
                    each: controller.directories[each].files.read_file(part.path_of(info))[:size]
                    for each in assignment.isr
                }
                assert {len(copy) for copy in copies.values()} == {size}, (part.path_of(info), size)
                assert len(set(copies.values())) == 1, f"{part.path_of(info)} differs"
                done["compared files"] += len(copies)
    for store in ("state", "live"):
        rows = [
            each.stores[store].read(lambda txn: list(txn.cursor())) for each in controller.online
        ]
        assert all(each == rows[0] for each in rows), f"rows of {store} differ"
        done["compared rows"] += len(rows[0])
    return done


def as_text(done: Counts) -> str:
    """Return counts for the output of a test."""
    return json.dumps(dict(sorted(done.items())))
