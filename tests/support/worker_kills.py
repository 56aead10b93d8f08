"""A group that handles good and poison records while its processes are killed, and what must be so.

The processes are killed by the test, at random, and kill themselves: in handlers, and before and
after each commit, where a wrong order of two steps shows.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import embedlog
from embedlog.consumer.consumer import Consumer
from embedlog.producer import Producer
from support.patience import patient

KEYS = 17
POISONED = 100
"""One record of so many is poison."""
ATTEMPTS = 3


class Workload(NamedTuple):
    """How many records are handled, and how."""

    records: int
    is_async: bool
    concurrency: int
    kills: float
    """How often a process kills itself at a commit."""
    seed: int = 1
    poisoned: int = POISONED


def is_poison(number: int, every: int) -> bool:
    """Whether the handler of a record always raises."""
    return number % every == every // 2


class Handlers:
    """The handlers, which note in a file what they have handled."""

    def __init__(self, path: Path, work: Workload) -> None:
        self.path, self.work = path, work
        self.failed: set[int] = set()

    def handle(self, record: Any) -> None:
        """Raise for poison, and once for some others; note the rest."""
        number = int(record.value)
        if is_poison(number, self.work.poisoned):
            raise ValueError(f"poison {number}")
        if number % 29 == 0 and number not in self.failed:
            self.failed.add(number)
            raise OSError(f"not yet {number}")
        time.sleep(0)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{number}\n".encode())
        os.close(descriptor)

    async def await_it(self, record: Any) -> None:
        """Do as `handle`, after other tasks."""
        await asyncio.sleep(0)
        self.handle(record)


def die_at_commits(kills: float) -> Callable[[], None]:
    """Return an initializer that lets a process kill itself before or after some commits."""

    def initialize() -> None:
        dice = random.Random(os.getpid())
        for owner, name in ((Producer, "commit_transaction"), (Consumer, "commit")):
            setattr(owner, name, _deadly(getattr(owner, name), dice, kills))

    return initialize


def _deadly(real: Callable[..., Any], dice: random.Random, kills: float) -> Callable[..., Any]:
    def commit(*arguments: Any) -> Any:
        at = dice.random()
        if at < kills / 2:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments)
        if at < kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return commit


def check(work: Workload, directory: Path) -> dict[str, int]:
    """Run a group to the end of its records, and check what was handled; return what happened.

    Raises:
        AssertionError: A record was lost, a dead letter is missing or there twice, or the records
            of a key were not handled in their order.
    """
    handlers = Handlers(directory / "handled", work)
    handlers.path.touch()
    poison = {number for number in range(work.records) if is_poison(number, work.poisoned)}
    with embedlog.open(directory / "log", maintenance=False) as log:
        log.create_topic("t", partitions=3)
        with log.producer() as producer:
            for number in range(work.records):
                key = b"%d" % (number % KEYS)
                producer.send("t", b"%d" % number, key, partition=number % KEYS % 3)
        run = embedlog.run_group(
            *(log, "t", "g", handlers.await_it if work.is_async else handlers.handle),
            processes=2,
            concurrency=work.concurrency,
            on_error=embedlog.Retry(ATTEMPTS, backoff=0.002, dead_letter="t.dlq"),
            initializer=die_at_commits(work.kills),
            until="end",
            restarts=1 << 20,
            start_method="fork",
            auto_offset_reset="earliest",
            max_poll_records=20,
        )
        kills = _kill_at_random(run, random.Random(work.seed), work.records // 50)
        assert run.wait(patient(120)), "the group does not come to its end"
        letters = list(log.dead_letters("t.dlq"))
        ends = {("t", number): log.partition("t", number).end_offset() for number in range(3)}
        with log.consumer(group_id="g") as consumer:
            committed = {key: consumer.committed(key) for key in ends}  # type: ignore[arg-type]
        assert committed == ends
        assert log.housekeeping.verify() == []
    handled = [int(line) for line in handlers.path.read_text().split()]
    lost = set(range(work.records)) - poison - set(handled)
    assert not lost, f"{len(lost)} records are lost, such as {min(lost)}"
    found = Counter(int(letter.record.value or b"") for letter in letters)
    missing, extra = Counter(poison) - found, found - Counter(poison)
    assert not missing, f"dead letters are missing: {missing}"
    assert not extra, f"dead letters are there again: {extra}"
    assert {letter.failure.delivery_count for letter in letters} <= {ATTEMPTS}
    _check_order(handled)
    return {"kills": kills.pop(), "again": len(handled) - len(set(handled))}


def _kill_at_random(run: embedlog.GroupRun, dice: random.Random, most: int) -> list[int]:
    """Kill so many processes of a run at most, which must come to its end; return a list with
    their number, then."""
    kills = [0]

    def kill() -> None:
        while kills[0] < most and not run.wait(dice.uniform(0.02, 0.3)):
            with suppress(IndexError, ProcessLookupError):  # it has just ended
                os.kill(dice.choice(run.pids), signal.SIGKILL)
                kills[0] += 1

    threading.Thread(target=kill, daemon=True).start()
    return kills


def _check_order(handled: list[int]) -> None:
    """Check that no record was first handled after one of its key that follows it."""
    seen: dict[int, set[int]] = {}
    for number in handled:
        of_key = seen.setdefault(number % KEYS, set())
        if number not in of_key:
            assert not of_key or number > max(of_key), f"{number} was handled after {max(of_key)}"
            of_key.add(number)
