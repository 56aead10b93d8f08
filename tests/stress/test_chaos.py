"""Many processes at once, at random: killed, stopped, overtaken."""

from __future__ import annotations

import mmap
import os
import random
import struct
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import forks
from support.faulty_files import scratch_directory
from support.forks import tell
from support.patience import until_enough
from support.tiers import choose

import embedlog
from embedlog import batch
from embedlog.errors import OffsetOutOfRangeError, UnknownTopicOrPartitionError
from embedlog.files import Files

PARTITIONS = 3
PRODUCER = 9_000_000
SLOTS = 1 << 21
"""Offsets that the readers can remember, of each partition."""
RECENT = 2_000
"""Records that a reader reads in a short time."""
_ENTRY = struct.Struct("<cBHIQQ")
_VALUE = struct.Struct("<IIQ")


class Chaos(NamedTuple):
    """The parameters of a run."""

    seconds: float = 30.0
    pause: float = 0.022
    """Seconds from one kill or stop to the next."""
    least: int = 1_000
    """Kills and stops; on a busy machine they take longer than `seconds`."""
    writers: int = 4
    readers: int = 4
    seed: int = 1


class ReadRecords:
    """The first record that a reader saw at each offset, in memory that forks share."""

    def __init__(self) -> None:
        self._memory = [mmap.mmap(-1, SLOTS * 8) for _ in range(PARTITIONS)]
        self.slots = [memoryview(memory).cast("Q") for memory in self._memory]

    def note(self, partition: int, offset: int, record: int) -> None:
        slots = self.slots[partition]
        before = slots[offset]
        assert before in (0, record), f"{partition}: offset {offset} was {before}, is {record}"
        slots[offset] = record


def check_chaos(case: Chaos, directory: Path) -> Counter[str]:
    """Let it run, then compare the log with all journals and with what the readers saw."""
    root, seen = directory / "root", ReadRecords()
    config = {"segment.bytes": 60_000, "index.interval.bytes": 4096, "retention.ms": -1}
    with embedlog.open(root) as log:
        log.create_topic("t", PARTITIONS, config)
    stop = directory / "stop"
    processes = [
        _Member(directory, seen, stop, n < case.writers, n)
        for n in range(case.writers + case.readers)
    ]
    for member in processes:
        member.start()
    try:
        done = _kill_and_stop(case, processes)
        stop.touch()
        for member in processes:
            member.end()
    finally:
        for member in processes:
            member.remove()
    done += _compare(root, directory, seen)
    return done


def _kill_and_stop(case: Chaos, processes: list[_Member]) -> Counter[str]:
    """Kill and stop them, one by one."""
    done = Counter[str]()
    dice, until = random.Random(case.seed), time.monotonic() + case.seconds
    stopped: list[tuple[float, _Member]] = []
    while (now := time.monotonic()) < until or done.total() < case.least:
        stopped = [(when, member) for when, member in stopped if not member.go_on_after(when, now)]
        idle = [member for member in processes if all(member is not other for _, other in stopped)]
        if idle:
            victim = dice.choice(idle)
            if dice.random() < 0.4:
                victim.kill()
                victim.start()
                done["kills"] += 1
            else:
                victim.stop()
                stopped.append((now + dice.choice([0.005, 0.05, 0.15]), victim))
                done["stops"] += 1
        time.sleep(max(0.0, case.pause - (time.monotonic() - now)))
    for when, member in stopped:
        member.go_on_after(when, float("inf"))
    return done


class _Member:
    """A writer or reader: a sequence of processes, each of which replaces a killed one."""

    def __init__(
        self, directory: Path, seen: ReadRecords, stop: Path, writes: bool, number: int
    ) -> None:
        self._directory, self._seen, self._stop = directory, seen, stop
        self._writes, self._number, self._life, self._ended = writes, number, 0, True
        self._child: forks.Child

    def start(self) -> None:
        self._life, self._ended = self._life + 1, False
        life = self._number * 10_000 + self._life
        work = self._write if self._writes else self._read
        self._child = forks.Child(lambda: work(life))

    def kill(self) -> None:
        self._ended = True
        end = self._child.kill()
        assert end.killed, f"before it was killed: {end.finding()}"

    def stop(self) -> None:
        self._child.stop()

    def go_on_after(self, when: float, now: float) -> bool:
        if now >= when:
            self._child.go_on()
        return now >= when

    def remove(self) -> None:
        """Kill it if something went wrong before its end."""
        if self._ended:
            return
        self._ended = True
        self._child.kill()

    def end(self) -> None:
        end = self._child.end(patience=60)
        self._ended = True
        end.result()

    def _write(self, life: int) -> None:
        fd = os.open(self._directory / f"writer-{life}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        log = embedlog.open(self._directory / "root")
        dice, send = random.Random(life), 0
        numbers = Counter[int]()
        pending = _last_of(self._directory, life - 1)
        if pending is not None:
            # A send of the process before that was not acknowledged is repeated, with its numbers.
            partition, count, of, first, number = pending
            _send(log, fd, partition, count, of, first, number, None)
        while not self._stop.exists():
            partition, count = dice.randrange(PARTITIONS), dice.randint(1, 5)
            durability = "fsync" if dice.random() < 0.2 else None
            _send(log, fd, partition, count, life, send, numbers[partition], durability)
            send += count
            numbers[partition] += count
            if dice.random() < 0.05:
                # In bursts: flat out, 8 processes on few cores wait for each other, and for
                # a thousand kills three times as long.
                time.sleep(dice.random() * 0.03)
        log.close()

    def _read(self, life: int) -> None:
        log = embedlog.open(self._directory / "root")
        dice = random.Random(life)
        readers = [
            log.partition("t", n).reader(self._place(log, n, dice)) for n in range(PARTITIONS)
        ]
        log.root.wake.join()
        while not self._stop.exists():
            value = log.root.wake.value()
            advanced = [self._look(n, reader) for n, reader in enumerate(readers)]
            if not any(advanced):
                log.root.wake.wait(value, 0.05)
        log.close()

    def _place(self, log: Any, partition: int, dice: random.Random) -> int:
        """Return where to begin: anywhere, but mostly near the end, to reach it in time."""
        end: int = log.partition("t", partition).end_offset()
        return dice.randint(max(0, end - RECENT) if dice.random() < 0.8 else 0, end)

    def _look(self, partition: int, reader: Any) -> bool:
        due = reader.offset
        batches = reader.read(1 << 16)
        for decoded in batches:
            decoded.verify()
            assert decoded.base_offset <= due < decoded.next_offset, (
                f"{due} is not in {decoded.base_offset}"
            )
            due = decoded.next_offset
            records = _records(decoded)
            for offset, record in records:
                self._seen.note(partition, offset, record)
        return bool(batches)


def _send(
    log: Any,
    fd: int,
    partition: int,
    count: int,
    life: int,
    first: int,
    number: int,
    durability: str | None,
) -> None:
    """Note a send in the journal, send it, and note its offset."""
    values = [_VALUE.pack(life, first + row, 0).ljust(40, b".") for row in range(count)]
    encoded_batch = batch.encode_lists(values, None, 1_700_000_000_000, None)
    encoded_batch.set_producer(PRODUCER + life, 0, number)
    os.write(fd, _ENTRY.pack(b"s", partition, count, life, first, number))
    receipt = log.partition("t", partition).append([encoded_batch], durability=durability)[0]
    os.write(fd, _ENTRY.pack(b"a", partition, count, life, first, receipt.base_offset))


def _last_of(directory: Path, life: int) -> tuple[int, int, int, int, int] | None:
    """Return the last send of the process before, if it was not acknowledged."""
    path = directory / f"writer-{life}"
    last = list(_ENTRY.iter_unpack(path.read_bytes()))[-1:] if path.exists() else []
    for kind, partition, count, of, first, number in last:
        if kind == b"s":
            return partition, count, of, first, number
    return None


def _records(decoded: Any) -> list[tuple[int, int]]:
    """(offset, number) of the records of a batch, a number for each that was ever sent."""
    rows = zip(decoded.offsets().to_pylist(), decoded.lists()[2], strict=True)
    return [(offset, _number(*_VALUE.unpack_from(value)[:2])) for offset, value in rows]


def _number(life: int, record: int) -> int:
    return life << 32 | record + 1


def _compare(root: Path, directory: Path, seen: ReadRecords) -> Counter[str]:
    """Check that the log holds all that was acknowledged, once, and what the readers saw."""
    done = Counter[str]()
    acked, sent = _journals(directory)
    for partition, records in enumerate(forks.call(lambda: _read_all(root))):
        assert len(set(records)) == len(records), "a record is there twice"
        assert set(records) <= sent[partition], "a record is there that was never sent"
        for offset, number in acked[partition].items():
            assert records[offset] == number, f"{partition}: {offset} was acked and is lost"
        done["acked"] += len(acked[partition])
        done["records"] += len(records)
        slots = seen.slots[partition]
        for offset in range(min(SLOTS, len(records) + 1000)):
            if slots[offset]:
                assert records[offset] == slots[offset], f"{partition}: {offset} has changed"
                done["seen"] += 1
    return done


def _read_all(root: Path) -> list[list[int]]:
    log = embedlog.open(root)
    assert log.housekeeping.verify() == [], log.housekeeping.verify()
    partitions = []
    for partition in range(PARTITIONS):
        records: list[int] = []
        reader = log.partition("t", partition).reader(0)
        while batches := reader.read():
            for decoded in batches:
                assert decoded.base_offset == len(records), "a hole"
                records += [number for _, number in _records(decoded)]
        partitions.append(records)
    log.close()
    return partitions


def _journals(directory: Path) -> tuple[list[dict[int, int]], list[set[int]]]:
    acked: list[dict[int, int]] = [{} for _ in range(PARTITIONS)]
    sent: list[set[int]] = [set() for _ in range(PARTITIONS)]
    for path in directory.glob("writer-*"):
        for kind, partition, count, life, first, base_offset in _ENTRY.iter_unpack(
            path.read_bytes()
        ):
            numbers = [_number(life, first + row) for row in range(count)]
            sent[partition].update(numbers)
            if kind == b"a":
                for row, number in enumerate(numbers):
                    # A repeat may be acked of twice, with the same offset both times.
                    assert acked[partition].setdefault(base_offset + row, number) == number
    return acked, sent


HELD = 64


class CountingFiles(Files):
    """Counts how often segments are opened or mapped."""

    opens = 0

    def open(self, path: str, **how: Any) -> int:  # type: ignore[override]
        self.opens += path.startswith("topics/")
        return super().open(path, **how)

    def map(self, fd: int, length: int, *, write: bool = False) -> Any:
        self.opens += not write
        return super().map(fd, length, write=write)


def check_concurrent_deletes(directory: Path, opens: int, seed: int) -> Counter[str]:
    """Read until so many segments were opened; return what happened, and how often."""
    root, stop = directory / "root", directory / "stop"
    embedlog.open(root).close()
    churn = forks.Child(lambda: _churn(root, stop, seed))
    readers = [forks.Child(lambda n=n: _read(root, opens // 2, seed + n)) for n in range(2)]
    ends = [reader.end(patience=3600) for reader in readers]
    stop.touch()
    ends.append(churn.end())
    counts = [end.result() for end in ends]
    log = embedlog.open(root)
    assert log.housekeeping.verify() == []
    log.close()
    return sum(counts, Counter())


def _churn(root: Path, stop: Path, seed: int) -> Counter[str]:
    """Fill, truncate and delete a topic over and over."""
    dice, done = random.Random(seed), Counter[str]()
    log = embedlog.open(root)
    while not stop.exists():
        log.create_topic("t", 1, {"segment.bytes": 2000, "index.interval.bytes": 500})
        here = log.partition("t", 0)
        for _ in range(dice.randint(2, 12)):
            for _ in range(dice.randint(5, 40)):
                base = here.tail().log_end_offset
                values = [b"%d" % (base + row) for row in range(dice.randint(1, 4))]
                here.append([batch.encode_lists(values, None, base, None)])
                done["appends"] += 1
            if dice.random() < 0.7:
                # Batches that straddle the place go whole, so the next offset is the place itself.
                done["cuts"] += here.truncate_to(dice.randrange(here.tail().log_end_offset))
            # Else the readers wait for the lock of a new topic for half of their time.
            time.sleep(dice.random() * 0.004)
        log.delete_topic("t")
        done["deletions"] += 1
    return done


def _read(root: Path, opens: int, seed: int) -> Counter[str]:
    dice, done = random.Random(seed), Counter[str]()
    log = embedlog.open(root, files=CountingFiles)
    files: Any = log.root.context.files
    held: deque[Any] = deque(maxlen=HELD)
    while files.opens < opens:
        try:
            part = log.partition("t", 0)
            reader = part.reader(dice.randint(0, part.end_offset()))
            for _ in range(dice.randint(1, 4)):
                held += (_checked(decoded) for decoded in reader.read(dice.choice([1, 4000])))
                done["reads"] += 1
            if dice.random() < 0.25:
                done["out of range"] += _is_out_of_range(part)
        except OffsetOutOfRangeError:
            done["overtaken"] += 1
        except UnknownTopicOrPartitionError:
            done["deleted"] += 1
        if held and done["reads"] % 16 == 0:
            # Truncated, unlinked or rolled long ago: batches that were read do not change.
            _checked(dice.choice(held))
            done["held"] += 1
    done["opens"] = files.opens
    return done


def _checked(decoded: Any) -> Any:
    decoded.verify()
    offsets, values = decoded.offsets().to_pylist(), decoded.lists()[2]
    assert values == [b"%d" % offset for offset in offsets], f"{offsets} hold {values}"
    return decoded


def _is_out_of_range(here: Any) -> bool:
    try:
        here.reader(here.end_offset() + 1_000_000)
    except OffsetOutOfRangeError:
        return True
    raise AssertionError("an offset past the end can be read")


pytestmark = pytest.mark.stress


def chaos(case: Chaos) -> dict[str, int]:
    with scratch_directory() as directory:
        done = check_chaos(case, directory)
    tell(f"seed {case.seed}: {dict(done)}")
    return done


def test_random_kills_and_stops_lose_and_repeat_nothing() -> None:
    """P3: acked records are there, once; offsets never change under a reader, batches are whole."""
    case = choose(test=Chaos(seconds=1.0, least=20), all=Chaos())
    least = {"acked": 10 * case.least, "seen": 10 * case.least}
    done = until_enough(lambda seed: chaos(case._replace(seed=seed)), least)
    assert done["kills"] + done["stops"] >= case.least


def test_nothing_is_torn_from_readers_of_what_is_cut_and_deleted() -> None:
    """P20: they finish what they hold, or get OffsetOutOfRangeError; none dies of SIGBUS."""
    opens = choose(test=1_000, all=100_000)

    def run(seed: int) -> dict[str, int]:
        with scratch_directory() as directory:
            done = check_concurrent_deletes(directory, opens, seed)
        tell(f"seed {seed}: {dict(done)}")
        return done

    # On a busy machine fewer of them meet.
    least = dict.fromkeys(("cuts", "deletions", "overtaken", "held"), 10)
    assert until_enough(run, least)["opens"] >= opens


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("seed", range(2, 12))
def test_random_kills_and_stops_for_hours(seed: int) -> None:
    """P3 in full: 10 × 10,000 kills and stops, with 3 to 8 writers."""
    writers = 3 + seed % 6
    done = chaos(Chaos(seconds=300, least=10_000, writers=writers, readers=3, seed=seed))
    assert done["kills"] + done["stops"] >= 10_000


@pytest.mark.tier("nightly")
def test_ten_million_opens_of_what_is_cut_and_deleted() -> None:
    """P20 in full."""
    for seed in range(2, 102):
        with scratch_directory() as directory:
            assert check_concurrent_deletes(directory, 100_000, seed)["opens"] >= 100_000
