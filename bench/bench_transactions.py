"""How many transactions a second do members commit, each with a record and a position?

Each member reads a partition of its own, and writes to one of its own, so they share only the
databases, and the flushes of these.  Beside it a Kafka broker on the same disk, with librdkafka's
producers, which needs Java, Maven and confluent-kafka; as a broker does, it flushes nothing.
"""

import os
import resource
from contextlib import ExitStack

import pytest
from conftest import start_process
from support import kafka_broker

import embedlog

TRANSACTIONS = int(os.environ.get("EMBEDLOG_BENCH_TRANSACTIONS", "1600"))
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
        run(transform, count, pipe)


def transactions_of_kafka(address, number, count, pipe):
    from confluent_kafka import Consumer, Producer, TopicPartition

    settings = {"bootstrap.servers": address}
    producer = Producer({**settings, "transactional.id": f"member {number}"})
    producer.init_transactions()
    consumer = Consumer({**settings, "group.id": f"g{number}", "enable.auto.commit": False})
    group = consumer.consumer_group_metadata()

    def transform(offset):
        producer.begin_transaction()
        producer.produce("out", b"x" * 100, partition=number)
        producer.send_offsets_to_transaction([TopicPartition("in", number, offset)], group)
        producer.commit_transaction()

    transform(0)
    run(transform, count, pipe)
    consumer.close()


def run(transform, count, pipe):
    """Make transactions when told to, and send the CPU time."""
    pipe.send(None)
    pipe.recv()
    before = resource.getrusage(resource.RUSAGE_SELF)
    for offset in range(1, count + 1):
        transform(offset)
    after = resource.getrusage(resource.RUSAGE_SELF)
    pipe.send(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    pipe.recv()


MEMBERS = pytest.mark.parametrize("members", [1, 4, 16], ids="members={}".format)


@pytest.mark.parametrize("durability", ["os", "fsync"])
@MEMBERS
def bench_transactions(benchmark, note, log, members, durability):
    """Commits per second of all members together, and the CPU time of one."""
    for topic in ("in", "out"):
        log.create_topic(topic, members)
    count = max(TRANSACTIONS // members, 1)
    measure(benchmark, note, members, count, transactions_of, log.path, durability)
    assert len(log.topic("out")) == members * (1 + count)


@pytest.fixture(scope="module")
def broker():
    pytest.importorskip("confluent_kafka")
    with kafka_broker.broker(120) as address:
        yield address


@MEMBERS
def bench_transactions_of_kafka(benchmark, note, broker, members):
    """The same with a broker."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": broker})
    for topic in ("in", "out"):
        if topic not in admin.list_topics().topics:
            admin.create_topics([NewTopic(topic, 16)])[topic].result()
    count = max(TRANSACTIONS // 64, 1)
    measure(benchmark, note, members, count, transactions_of_kafka, broker)


def measure(benchmark, note, members, count, work, *arguments):
    """Let members make so many transactions each at the same time, in a process each."""
    with ExitStack() as running:
        pipes = [
            start_process(running, work, *arguments, number, count) for number in range(members)
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
