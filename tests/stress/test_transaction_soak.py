"""Members that transform records in transactions, and are killed and stopped at random."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from support import forks
from support.faulty_files import scratch_directory
from support.forks import tell
from support.patience import patient
from support.tiers import choose

import embedlog
from embedlog.consumer.open_group import open_group
from embedlog.errors import CommitFailedError, IllegalStateError, LockTimeoutError
from embedlog.record import TopicPartition

MEMBERS = 4
PARTITIONS = [TopicPartition("in", number) for number in range(6)]
STOPS = (0.01, 0.1, 0.4, 1.5)
"""Seconds for which a member is stopped; one that exceeds its session loses its partitions."""
START = multiprocessing.get_context("fork")


def transform(path: Path) -> None:
    """Copy records to another topic, in transactions with the positions, for ever."""
    with embedlog.open(path) as log:
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
            except (CommitFailedError, LockTimeoutError):
                for partition in polled:
                    with suppress(IllegalStateError):
                        consumer.seek(partition, consumer.committed(partition) or 0)


def test_each_record_is_transformed_exactly_once() -> None:
    """P1, P14, P15, G22: whoever is killed or stopped, at any instant."""
    seconds, dice = choose(test=2.5, all=60, nightly=600), random.Random(1)
    with scratch_directory() as directory, embedlog.open(directory / "root") as log:
        log.create_topic("in", len(PARTITIONS))
        log.create_topic("out", 3)
        members = [START.Process(target=transform, args=(log.path,)) for _ in range(MEMBERS)]
        for member in members:
            member.start()
        sent, killed, stopped, end = 0, 0, 0, time.monotonic() + seconds
        try:
            with log.producer() as producer:
                while time.monotonic() < end:
                    for _ in range(50):
                        sent += 1
                        producer.send("in", b"%d" % sent, key=b"%d" % sent)
                    producer.flush()
                    number = dice.randrange(len(members))
                    victim = members[number]
                    if dice.random() < 0.5:
                        os.kill(victim.pid, signal.SIGKILL)
                        victim.join()
                        members[number] = START.Process(target=transform, args=(log.path,))
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
