"""Members that transform records in transactions, and are killed and stopped at random."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack, suppress
from math import inf
from pathlib import Path
from typing import Any

import pytest
from support import forks
from support.faulty_files import scratch_directory
from support.forks import tell
from support.patience import patient
from support.tiers import choose

import embedlog
from embedlog.consumer.open_group import open_group
from embedlog.errors import (
    CommitFailedError,
    IllegalStateError,
    LockTimeoutError,
    StorageError,
)
from embedlog.record import TopicPartition

MEMBERS = 4
PARTITIONS = [TopicPartition("in", number) for number in range(6)]
STOPS = (0.01, 0.1, 0.4, 1.5)
"""Seconds for which a member is stopped; one that exceeds its session loses its partitions."""
START = multiprocessing.get_context("fork")


def transform(paths: str | list[str]) -> None:
    """Copy records to another topic, in transactions with the positions, for ever."""
    with embedlog.open(paths) as log:
        consumer = log.consumer(
            "in",
            group_id="g",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=1000,
            heartbeat_interval_ms=200,
            max_poll_records=20,
        )
        while True:
            polled = consumer.poll(100)
            try:
                with log.transaction() as transaction:
                    for records in polled.values():
                        for record in records:
                            transaction.send("out", record.value, record.key)
                    transaction.commit_offsets(consumer)
            except (CommitFailedError, LockTimeoutError, StorageError):
                for partition in polled:
                    with suppress(IllegalStateError):
                        consumer.seek(partition, consumer.committed(partition) or 0)


@pytest.mark.parametrize(
    "directories", [1, pytest.param(3, marks=pytest.mark.tier("all"))], ids="{} directories".format
)
def test_each_record_is_transformed_exactly_once(directories: int) -> None:
    """P1, P14, P15, G22: whoever is killed or stopped, and if one of several directories is lost.

    At any instant.
    """
    seconds, dice = choose(test=1.0, all=60, nightly=600), random.Random(1)
    with ExitStack() as stack:
        directory = stack.enter_context(scratch_directory())
        paths: Any = [str(directory / f"root{number}") for number in range(directories)]
        if directories == 1:
            (paths,) = paths
        log = stack.enter_context(embedlog.open(paths))
        copies = {"replication_factor": 2} if directories > 1 else {}
        log.create_topic("in", len(PARTITIONS), **copies)
        log.create_topic("out", 3, **copies)
        members = [START.Process(target=transform, args=(paths,)) for _ in range(MEMBERS)]
        for member in members:
            member.start()
        sent, killed, stopped, end = 0, 0, 0, time.monotonic() + seconds
        lost_at = time.monotonic() + seconds / 2 if directories > 1 else inf
        try:
            with log.producer() as producer:
                while time.monotonic() < end:
                    for _ in range(50):
                        sent += 1
                        producer.send("in", b"%d" % sent, key=b"%d" % sent)
                    producer.flush()
                    if time.monotonic() > lost_at:
                        Path(paths[1]).rename(directory / "lost")
                        lost_at = inf
                    number = dice.randrange(len(members))
                    victim = members[number]
                    if dice.random() < 0.5:
                        os.kill(victim.pid, signal.SIGKILL)
                        victim.join()
                        members[number] = START.Process(target=transform, args=(paths,))
                        members[number].start()
                        killed += 1
                    else:
                        os.kill(victim.pid, signal.SIGSTOP)
                        time.sleep(dice.choice(STOPS))
                        os.kill(victim.pid, signal.SIGCONT)
                        stopped += 1
            ends = {tp: log.root.partition(*tp).end_offset() for tp in PARTITIONS}

            def is_done() -> bool:
                committed = open_group(log.root, "g").committed(PARTITIONS)
                return {tp: row and row.position.offset for tp, row in committed.items()} == ends

            forks.until(is_done, patient(60))
        finally:
            for member in members:
                member.kill()
                member.join()
        values = Counter(record.value for record in log.topic("out"))
        tell(f"{sent} records; {killed} kills, {stopped} stops")
        assert set(values) == {b"%d" % number for number in range(1, sent + 1)}
        assert set(values.values()) == {1}, values.most_common(3)
        assert log.housekeeping.verify() == []
        assert killed + stopped >= choose(test=1, all=10)
