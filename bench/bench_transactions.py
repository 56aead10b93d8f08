"""How many transactions a second do members commit, each with a record and a position?

Each member reads a partition of its own, and writes to one of its own, so they share only the
databases, and the flushes of these.
"""

import os
import resource
from contextlib import ExitStack

import pytest
from conftest import start_process

import embedlog

TRANSACTIONS = int(os.environ.get("EMBEDLOG_BENCH_TRANSACTIONS", "400"))
"""Of all members together."""


def transactions_of(path, durability, number, count, pipe):
    with embedlog.open(path, durability=durability) as log:
        consumer = log.consumer(group_id=f"g{number}", enable_auto_commit=False)
        partition = embedlog.TopicPartition("in", number)
        consumer.assign([partition])

        def transform(offset):
            with log.transaction(f"member {number}") as transaction:
                transaction.send("out", b"x" * 100, partition=number)
                transaction.commit_offsets(consumer, {partition: offset})

        transform(0)
        pipe.send(None)
        pipe.recv()
        before = resource.getrusage(resource.RUSAGE_SELF)
        for offset in range(1, count + 1):
            transform(offset)
        after = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        pipe.recv()


@pytest.mark.parametrize("durability", ["os", "fsync"])
@pytest.mark.parametrize("members", [1, 4, 16], ids="members={}".format)
def bench_transactions(benchmark, note, log, members, durability):
    """Commits per second of all members together, and the CPU time of one."""
    for topic in ("in", "out"):
        log.create_topic(topic, members)
    count = max(TRANSACTIONS // members, 1)
    with ExitStack() as running:
        pipes = [
            start_process(running, transactions_of, log.path, durability, number, count)
            for number in range(members)
        ]
        for pipe in pipes:
            pipe.recv()
        seconds = []

        def commit_all():
            for pipe in pipes:
                pipe.send(None)
            seconds.extend(pipe.recv() for pipe in pipes)

        benchmark.pedantic(commit_all, rounds=1)
        for pipe in pipes:
            pipe.send(None)
    total = members * count
    note(
        records=total,
        commits_per_second=round(total / benchmark.stats["mean"]),
        cpu_us_of_one=round(sum(seconds) / total * 1e6),
    )
    assert len(log.topic("out")) == total + members
