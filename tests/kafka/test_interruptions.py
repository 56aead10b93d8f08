"""Mirrors that are killed at any moment, a broker that is killed, and a million records."""

from __future__ import annotations

import random
import zlib
from threading import Event
from time import sleep

import pytest
from support.clock import START
from support.forks import Child, tell
from support.kafka_topics import random_rows, rows_of

import embedlog
from embedlog import batch
from embedlog.mirrors import kafka_cluster, kafka_target
from embedlog.mirrors.kafka_target import KafkaTarget

MILLION = 1_000_000
KILLS = 6


def write_transactions(kafka, topic, dice, count):
    """Write records in transactions, a third of which are aborted."""
    producer = kafka.producer(transactional_id=f"{kafka.prefix}-writer")
    producer.init_transactions()
    for number in range(count):
        producer.begin_transaction()
        kafka.send(topic, random_rows(dice, dice.choice([1, 30, 300])), producer)
        producer.flush()
        producer.abort_transaction() if number % 3 == 1 else producer.commit_transaction()


def write_batches(log, topic, dice, count):
    """Append records in batches."""
    for _ in range(count):
        for _, time, key, value, headers in random_rows(dice, dice.choice([1, 5])):
            some = [headers] if headers else None
            encoded = batch.encode_lists([value], [key], time, some)
            log.partition(topic, dice.randrange(2)).append([encoded])


def without_offsets(rows):
    return [(row[0], *row[2:]) for row in rows]


def killed_again_and_again(mirror, write, dice):
    """Run a mirror in processes that are killed while records are written."""
    for _ in range(KILLS):
        child = Child(mirror)
        write()
        sleep(dice.random() * 1.5)
        assert child.kill().killed


def test_a_mirror_from_kafka_that_is_killed_at_any_moment_goes_on(kafka, tmp_path):
    """Nothing is lost, nothing is doubled, and offsets are those of Kafka."""
    topic, dice, path = kafka.create(partitions=2), random.Random(1), tmp_path / "log"

    def mirror():
        embedlog.mirror(kafka.address, path, topics=topic, follow=True).wait()

    killed_again_and_again(mirror, lambda: write_transactions(kafka, topic, dice, 12), dice)
    embedlog.mirror(kafka.address, path, topics=topic, progress=False)

    with embedlog.open(path, maintenance=False) as log:
        assert rows_of(log, topic) == kafka.rows(topic)
        assert log.housekeeping.verify() == []


def test_a_mirror_to_kafka_that_is_killed_at_any_moment_goes_on(kafka, tmp_path):
    """Nothing is lost, nothing is doubled, and the order is that of the log."""
    topic, dice, path = kafka.name(), random.Random(2), tmp_path / "log"

    def write():
        with embedlog.open(path, maintenance=False) as log:
            log.create_topic(topic, 2, exist_ok=True)
            write_batches(log, topic, dice, 200)

    def mirror():
        embedlog.mirror(path, kafka.address, topics=topic, follow=True).wait()

    write()
    killed_again_and_again(mirror, write, dice)
    with embedlog.open(path, maintenance=False) as log:
        embedlog.mirror(log, kafka.address, topics=topic, progress=False)
        assert without_offsets(kafka.rows(topic)) == without_offsets(rows_of(log, topic))


@pytest.mark.parametrize("direction", ["from Kafka", "to Kafka"])
def test_mirrors_go_on_when_the_broker_was_killed(broker, kafka, tmp_path, direction):
    """By themselves, as soon as it is back."""
    dice, back = random.Random(3), direction == "from Kafka"
    topic = kafka.create("t", 2) if back else kafka.name()
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        if not back:
            log.create_topic(topic, 2)

        def write(count):
            if back:
                kafka.send(topic, random_rows(dice, count))
            else:
                write_batches(log, topic, dice, count // 3)

        write(2000)
        ends = (kafka.address, log) if back else (log, kafka.address)
        with embedlog.mirror(*ends, topics=topic, follow=True) as run:
            sleep(1)
            broker.kill()
            if not back:
                write(500)
            sleep(1)
            broker.start()
            write(500)
            while run.status.lag or not _are_equal(kafka, log, topic, back):
                assert not run.wait(0.5)
        assert _are_equal(kafka, log, topic, back)


def test_a_mirror_goes_on_although_the_client_never_answers(broker, kafka, tmp_path, monkeypatch):
    """librdkafka ignores a timeout if the broker breaks at this moment: its issue 5456."""
    topic, dice, broken = kafka.name(), random.Random(4), Event()
    find_member = KafkaTarget._member

    def break_then_go_on(target):
        member = find_member(target)
        if not broken.is_set():
            broker.kill()
            broken.set()
        return member

    monkeypatch.setattr(kafka_target, "REQUEST_SECONDS", 3)
    monkeypatch.setattr(kafka_cluster, "REQUEST_SECONDS", 3)
    monkeypatch.setattr(KafkaTarget, "_member", break_then_go_on)
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic(topic, 2)
        write_batches(log, topic, dice, 100)
        with embedlog.mirror(log, kafka.address, topics=topic, follow=True) as run:
            assert broken.wait(60)
            sleep(1)
            broker.start()
            while run.status.lag or not _are_equal(kafka, log, topic, with_offsets=False):
                assert not run.wait(0.5)


def _are_equal(kafka, log, topic, with_offsets):
    if topic not in log.topics():
        return False
    of_log, of_kafka = rows_of(log, topic), kafka.rows(topic)
    if with_offsets:
        return of_log == of_kafka
    return without_offsets(of_log) == without_offsets(of_kafka)


def checksum(log, topic, number):
    """Return a checksum of the records of a partition, with their times, and their number."""
    crc, count, reader = 0, 0, log.partition(topic, number).reader(0)
    while batches := reader.read(8 << 20):
        for part in batches:
            times, keys, values, _ = part.lists()
            for row in zip(times, keys, values, strict=True):
                crc = zlib.crc32(repr(row).encode(), crc)
            count += part.count
    return crc, count


def test_a_million_records_come_back_as_they_were(kafka, tmp_path):
    """From a log to Kafka, and from there to another log."""
    topic = kafka.name()
    source = embedlog.open(tmp_path / "source", maintenance=False)
    source.create_topic(topic, 4, {"retention.ms": -1})
    for number in range(MILLION // 1000):
        values = [b"%d/%d " % (number, row) + b"v" * 40 for row in range(1000)]
        keys = [b"k%d" % (row * number % 977) for row in range(1000)]
        encoded = batch.encode_lists(values, keys, [START + row for row in range(1000)])
        source.partition(topic, number % 4).append([encoded])
    with source, embedlog.open(tmp_path / "target", maintenance=False) as target:
        there = embedlog.mirror(source, kafka.address, topics=topic, progress=False).status
        back = embedlog.mirror(kafka.address, target, topics=topic, progress=False).status
        tell(f"{there.records_per_second:,.0f} and {back.records_per_second:,.0f} records/s")

        assert there.records == back.records == MILLION
        for number in range(4):
            assert checksum(target, topic, number) == checksum(source, topic, number)
