"""Writers that rely on conditional appends: two threads at every line, and many processes."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.compute  # noqa: F401 - before a fork: each child would import it again

import embedlog
import embedlog.api.latest
import embedlog.partition.key_index
from embedlog.errors import ConflictError, LockTimeoutError
from embedlog.record import TopicPartition
from support import forks
from support.interleaving import Pair, watched_locks
from support.log_programs import Journal, entries
from support.patience import patient

# Two threads: one is stopped at any line of a conditional send, while the other does something


PACKAGES = ("embedlog.partition", "embedlog.producer.partition_writer")
KEY = b"account"
BEFORE = 2
"""The offset of the last record of the key, which is also the last of the partition."""
END_EXPECTED, KEY_EXPECTED = {"expected_offset": BEFORE + 1}, {"expected_key_offset": BEFORE}


def _partition(log: embedlog.Log) -> Any:
    return log.partition("t", 0)


def compact(log: embedlog.Log) -> None:
    """Replace all segments; the last record of the key stays."""
    log.housekeeping.compact("t", force=True)


def delete(log: embedlog.Log) -> None:
    """Delete all records that were written before."""
    _partition(log).flush()
    log.delete_records({TopicPartition("t", 0): BEFORE + 1})


def truncate(log: embedlog.Log) -> None:
    """Truncate the last record of the key, as the recovery after a power cut may."""
    _partition(log).truncate_to(BEFORE)


def replace(log: embedlog.Log) -> None:
    """Truncate it, and write another record, of another key, at its offset."""
    truncate(log)
    send(log, b"replacement", key=b"other")


def roll(log: embedlog.Log) -> None:
    """Seal the segment."""
    _partition(log).roll()


def send(log: embedlog.Log, value: bytes, key: bytes = KEY, **expected: Any) -> Any:
    """Send a record; return its future."""
    with log.producer() as producer:
        return producer.send("t", value, key=key, **expected)


OTHERS: dict[str, Callable[[embedlog.Log], Any] | None] = {
    "a rival": None,
    **{each.__name__: each for each in (compact, delete, truncate, replace, roll)},
}


def check_pair(
    directory: Path, other: str, expected: dict[str, Any], durability: str, line: int
) -> bool:
    """Stop a conditional send at a line while something else is done; whether it had that line.

    If two writers expect the same, exactly one of them writes, and the other one finds its record.
    """
    with (
        watched_locks(),
        embedlog.open(directory, maintenance=False, durability=durability) as log,
        embedlog.open(directory, maintenance=False, durability=durability) as second,
    ):
        config = {"cleanup.policy": "compact,delete", "file.delete.delay.ms": 0}
        log.create_topic("t", 1, config)
        send(log, b"0")
        send(log, b"1", key=b"other")
        log.partition("t", 0).roll()
        log.housekeeping.run()
        send(log, b"2")
        assert second.topic("t").get(KEY) == log.topic("t").get(KEY) == b"2"
        futures = {}

        def write(here: embedlog.Log, name: bytes) -> None:
            futures[name] = send(here, name, **expected)

        rival = OTHERS[other] or (lambda here: write(here, b"rival"))
        pair = Pair(lambda: write(log, b"first"), lambda: rival(second), PACKAGES, line)
        pair.run()
        assert pair.errors == [None, None], f"{pair.stopped_at}: {pair.errors}"
        try:
            _check_outcomes(log, futures, other, expected)
            assert log.housekeeping.verify() == []
        except AssertionError as error:
            raise AssertionError(
                f"while a send was stopped at {pair.stopped_at}: {error}"
            ) from None
        return pair.stopped_at != "after the end"


def _check_outcomes(
    log: embedlog.Log, futures: dict[bytes, Any], other: str, expected: dict[str, Any]
) -> None:
    written = {name for name, future in futures.items() if future.succeeded()}
    errors = {name: future.exception for name, future in futures.items() if name not in written}
    assert all(type(error) is ConflictError for error in errors.values()), errors
    records = list(log.topic("t"))
    if other == "a rival":
        assert len(written) == len(errors) == 1, f"written: {written}"
        (error,) = errors.values()
        assert error.offset == (BEFORE + 1 if expected is KEY_EXPECTED else BEFORE + 2), error
    elif other in ("compact", "roll") or (other == "delete" and expected is END_EXPECTED):
        assert not errors, errors
    for place, record in enumerate(records):
        # The end may be the same again after a truncation; the last record of the key is not.
        same = other in ("compact", "delete") or (other == "replace" and expected is END_EXPECTED)
        assert same or record.value not in futures or records[place - 1].value == b"2", records


# Many processes, each of which counts on from the last record that it has read


class Writers(NamedTuple):
    """The parameters of a run."""

    expects: str = "key"
    """``"key"`` or ``"end"``."""
    durability: str = "os"
    compacts: bool = False
    count: int = 8
    seconds: float = 3.0
    pause: float = 0.15
    """Seconds from one kill or stop to the next."""
    seed: int = 1


ACCOUNTS = [b"ann", b"bob"]


def check_writers(case: Writers, directory: Path) -> Counter[str]:
    """Let them write, and be killed and stopped; then no update may be lost, or made twice."""
    config = {"segment.bytes": 500_000, "retention.ms": -1, "file.delete.delay.ms": 0}
    policy = "compact" if case.compacts else "delete"
    with embedlog.open(directory / "log", maintenance=False) as log:
        log.create_topic("t", 1, {**config, "cleanup.policy": policy})
    done = _run_writers(case, directory)
    journals = [entry for file in directory.glob("*.journal") for entry in entries(file)]
    acked = [tuple(entry[1:]) for entry in journals if entry[0] == "acked"]
    tried = Counter(entry[1] for entry in journals if entry[0] == "tried")
    with embedlog.open(directory / "log", maintenance=False) as log:
        records = [(each.offset, each.key.decode(), each.value) for each in log.topic("t")]
        assert log.housekeeping.verify() == []
    _compare(case, records, acked)
    done["acked"], done["refused"] = len(acked), tried.total() - len(acked)
    return done


def _run_writers(case: Writers, directory: Path) -> Counter[str]:
    dice, done, stop = random.Random(case.seed), Counter[str](), directory / "stop"
    lives = iter(range(1_000_000))
    members = [_start(case, directory, next(lives)) for _ in range(case.count)]
    try:
        until = time.monotonic() + case.seconds
        with embedlog.open(directory / "log", maintenance=False) as log:
            while time.monotonic() < until:
                place = dice.randrange(case.count)
                if dice.random() < 0.5:
                    end = members[place].kill()
                    assert end.killed, end.finding()
                    members[place] = _start(case, directory, next(lives))
                    done["kills"] += 1
                else:
                    members[place].stop()
                    time.sleep(0.01)
                    members[place].go_on()
                    done["stops"] += 1
                if case.compacts:
                    log.housekeeping.compact("t", force=True)
                    done["compactions"] += 1
                time.sleep(case.pause)
        stop.touch()
        for member in members:
            member.end().result()
    finally:
        stop.touch()
    return done


def _start(case: Writers, directory: Path, life: int) -> forks.Child:
    return forks.Child(lambda: _write(case, directory, life))


def _write(case: Writers, directory: Path, life: int) -> None:
    """Count on in the accounts in turn, from what was read last; after a conflict, read again."""
    journal, dice = Journal(directory / f"{life}.journal"), random.Random(life)
    options = {"durability": case.durability, "lock_timeout": patient(30)}
    with embedlog.open(directory / "log", maintenance=False, **options) as log:
        topic, producer, known = log.topic("t"), log.producer(), {}
        while not (directory / "stop").exists():
            key = dice.choice(ACCOUNTS)
            chain = key if case.expects == "key" else b""
            count, before = known[chain] if chain in known else _last(topic, chain)
            expected = {"expected_key_offset": None if before < 0 else before}
            if not chain:
                expected = {"expected_offset": before + 1}
            value = b"%d %d %d" % (count + 1, before, life)
            journal.put("tried", key.decode())
            try:
                place = producer.send("t", value, key=key, **expected).result()
                journal.put("acked", place.offset, key.decode(), value.decode())
                known[chain] = count + 1, place.offset
            except ConflictError:
                known.pop(chain, None)
            except LockTimeoutError:
                pass


def _last(topic: Any, chain: bytes) -> tuple[int, int]:
    """Return the last count of an account, or of all, and its offset."""
    while True:
        if chain:
            records = topic.records_of(chain)
        else:
            (part,) = topic.ranges()
            records = topic.in_ranges([(0, max(part.stop - 1, part.start), part.stop)])
        for record in reversed(list(records)):
            return int(record.value.split()[0]), record.offset
        if not topic.ranges()[0].stop:
            return 0, -1
        if chain and not records:
            return 0, -1


def _compare(
    case: Writers, records: list[tuple[int, str, bytes]], acked: list[tuple[Any, ...]]
) -> None:
    """Each record counts on from the one before it; acknowledged ones are there, and no others."""
    by_offset = {offset: (key, value.decode()) for offset, key, value in records}
    ends: dict[str, tuple[int, int]] = {}
    for offset, key, value in records:
        chain = key if case.expects == "key" else ""
        count, before, _ = map(int, value.split())
        if not case.compacts:
            assert ends.get(chain, (0, -1)) == (count - 1, before), f"{offset}: {value!r}"
        ends[chain] = count, offset
    assert len({offset for offset, _, _ in acked}) == len(acked)
    increments = Counter(key if case.expects == "key" else "" for _, key, _ in acked)
    for chain, (count, _) in ends.items():
        # Of a killed writer nobody knows whether its last record was written.
        assert count >= increments[chain], f"{chain}: {count} after {increments[chain]} increments"
    if not case.compacts:
        for offset, key, value in acked:
            assert by_offset[offset] == (key, value)
