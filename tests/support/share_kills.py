"""A share group that handles good and poison records while its processes are killed.

The processes are killed by the test, at random, and kill themselves: in handlers, and before and
after the transactions of their steps and of dead letters, where a wrong order of two shows.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import embedlog
from embedlog.producer import Producer
from embedlog.share.share_group import ShareGroup
from support.forks import Child
from support.patience import patient
from support.worker_kills import is_poison

ATTEMPTS = 3
"""Poison is rejected after so many."""
TASKS = 5
SETTINGS = {
    "share.auto.offset.reset": "earliest",
    "errors.deadletterqueue.topic.name": "t.dlq",
    # More often than a good record can be killed.
    "share.delivery.count.limit": 100,
}


class ShareWorkload(NamedTuple):
    """How many records are handled, and how."""

    records: int
    is_async: bool
    kills: float
    """How often a process kills itself at a transaction."""
    seed: int = 1
    poisoned: int = 100
    """One record of so many is poison."""
    durability: str = "os"


def _note(path: Path, number: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{number}\n".encode())
    os.close(descriptor)


def _handle(consumer: Any, record: Any, work: ShareWorkload, path: Path) -> None:
    """Note a good record, sometimes at the second attempt only; give up poison at the third."""
    number = int(record.value)
    if is_poison(number, work.poisoned):
        verdict = "reject" if record.delivery_count >= ATTEMPTS else "release"
    elif number % 29 == 0 and record.delivery_count == 1:
        verdict = "release"
    else:
        _note(path, number)
        verdict = "accept"
    consumer.acknowledge(record, verdict)


def worker(directory: Path, work: ShareWorkload, dice: random.Random) -> None:
    """Handle records until nobody has any."""
    for owner, name in ((Producer, "commit_transaction"), (ShareGroup, "take_step")):
        setattr(owner, name, _deadly(getattr(owner, name), dice, work.kills))
    options: Any = {"durability": work.durability, "maintenance": False}
    path, config = directory / "handled", {"share_acknowledgement_mode": "explicit"}
    with embedlog.open(directory / "log", **options) as log:
        consumer: Any = log.share_consumer("t", group="g", **config)
        if work.is_async:
            asyncio.run(_handle_in_tasks(consumer, log, work, path))
            return
        while not _is_done(log, work):
            for record in consumer.poll(50, dice.choice([1, 5, 20])):
                _handle(consumer, record, work, path)
            if dice.random() < 0.3:
                consumer.commit()


async def _handle_in_tasks(consumer: Any, log: Any, work: ShareWorkload, path: Path) -> None:
    async def one() -> None:
        while True:
            record = await consumer.getone()
            await asyncio.sleep(0)
            _handle(consumer, record, work, path)

    tasks = [asyncio.create_task(one()) for _ in range(TASKS)]
    while not _is_done(log, work):
        await asyncio.wait(tasks, timeout=0.05)
        for task in tasks:
            if task.done():
                task.result()
        await consumer.commit()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await consumer.aclose()


def _is_done(log: Any, work: ShareWorkload) -> bool:
    if "g" not in log.groups:
        return False
    partitions = log.groups["g"].describe().partitions
    return bool(partitions) and all(
        part.current_offset == part.log_end_offset for part in partitions
    )


def _deadly(real: Callable[..., Any], dice: random.Random, kills: float) -> Callable[..., Any]:
    def step(*arguments: Any, **options: Any) -> Any:
        at = dice.random()
        if at < kills / 2:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **options)
        if at < kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return step


def check(work: ShareWorkload, directory: Path, processes: int = 3) -> dict[str, int]:
    """Handle all records, and check what was handled; return what happened.

    Raises:
        AssertionError: A record was lost, or a dead letter is missing or there twice.
    """
    (directory / "handled").touch()
    poison = {number for number in range(work.records) if is_poison(number, work.poisoned)}
    with embedlog.open(directory / "log", maintenance=False) as log:
        log.create_topic("t", partitions=2)
        log.groups["g"].alter(SETTINGS)
        with log.producer() as producer:
            for number in range(work.records):
                producer.send("t", b"%d" % number, partition=number % 2)
    kills = _run(work, directory, processes)
    with embedlog.open(directory / "log", maintenance=False) as log:
        letters = list(log.dead_letters("t.dlq"))
        described = log.groups["g"].describe()
        assert (described.lag, described.members) == (0, ())
        assert log.housekeeping.verify() == []
    handled = [int(line) for line in (directory / "handled").read_text().split()]
    lost = set(range(work.records)) - poison - set(handled)
    assert not lost, f"{len(lost)} records are lost, such as {min(lost)}"
    found = Counter(int(letter.record.value or b"") for letter in letters)
    missing, extra = Counter(poison) - found, found - Counter(poison)
    assert not missing, f"dead letters are missing: {missing}"
    assert not extra, f"dead letters are there again, or of good records: {extra}"
    assert all(letter.failure.delivery_count >= ATTEMPTS for letter in letters)
    return {"kills": kills, "again": len(handled) - len(set(handled))}


def _run(work: ShareWorkload, directory: Path, processes: int) -> int:
    """Run workers to the end, and others in place of those that were killed; return how many."""
    dice, kills = random.Random(work.seed), 0

    def start() -> Child:
        seed = dice.random()
        return Child(lambda: worker(directory, work, random.Random(seed)))

    children = [start() for _ in range(processes)]
    give_up = time.monotonic() + patient(120)
    try:
        while children:
            assert time.monotonic() < give_up, "the group does not come to its end"
            child = dice.choice(children)
            if not child.ends_within(dice.uniform(0.02, 0.3)):
                if kills > work.records // 20 or dice.random() < 0.5:
                    continue
                os.kill(child.pid, signal.SIGKILL)
            children.remove(child)
            if child.end().was_killed():
                kills += 1
                children.append(start())
    finally:
        for child in children:
            child.kill()
    return kills
