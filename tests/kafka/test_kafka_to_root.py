"""Mirrors from a Kafka broker to a log: at its offsets, read committed."""

from __future__ import annotations

import random
from time import monotonic, sleep

import confluent_kafka
import pytest
from support.clock import START
from support.kafka_topics import random_rows, rows_of
from support.patience import patient
from support.roots import healthy_log

import embedlog
from embedlog.errors import InvalidConfigError, KafkaClusterError, MirrorDivergedError
from embedlog.mirrors.root_source import RootSource
from embedlog.record import TopicPartition

log = healthy_log


def mirror(kafka, log, topic=None, **options):
    return embedlog.mirror(
        kafka.address, log, topics=topic or f"{kafka.prefix}.*", progress=False, **options
    )


def test_records_are_copied_at_their_offsets(kafka, log):
    """With keys, headers, nulls and timestamps; and the next run goes on behind them."""
    topic, dice = kafka.create(partitions=2), random.Random(1)
    for count in (0, 1, 3000, 1, 500):
        kafka.send(topic, random_rows(dice, count))
        status = mirror(kafka, log).status
        assert rows_of(log, topic) == kafka.rows(topic)
        assert (status.records, status.lag, status.state) == (count, 0, "finished")
    assert all(len(log.partition(topic, number).segments) <= 4 for number in range(2))


def test_records_of_aborted_transactions_are_left_out(kafka, log):
    """They, and the markers, leave gaps; an open transaction is not copied before it ends."""
    topic, dice = kafka.create(partitions=2), random.Random(2)
    producer = kafka.producer(transactional_id=kafka.prefix)
    producer.init_transactions()
    for number in range(60):
        producer.begin_transaction()
        kafka.send(topic, random_rows(dice, dice.choice([1, 20, 400])), producer)
        # An abort before anything was sent is fatal with some versions of brokers.
        producer.flush()
        if number == 40:
            mirror(kafka, log)
            assert rows_of(log, topic) == kafka.rows(topic)
        producer.abort_transaction() if number % 3 == 0 else producer.commit_transaction()
    status = mirror(kafka, log).status

    assert rows_of(log, topic) == kafka.rows(topic)
    assert status.lag == 0
    assert all(len(log.partition(topic, number).segments) <= 4 for number in range(2))


def test_a_compacted_topic_does_not_become_a_segment_for_each_gap(kafka, log):
    """Its batches have a column of offsets."""
    topic = kafka.create(
        cleanup_policy="compact",
        min_cleanable_dirty_ratio=0.001,
        segment_ms=100,
        delete_retention_ms=0,
    )
    for round_ in range(4):
        time = START + 1000 * round_  # By which Kafka rolls.
        rows = ((0, time, b"%d" % (n * n % 701), b"%d" % round_, None) for n in range(2000))
        kafka.send(topic, rows)
    deadline = monotonic() + patient(20)
    while len(kafka.rows(topic)) > 4000 and monotonic() < deadline:
        time += 1000
        kafka.send(topic, [(0, time, b"0", b"roll", None)])
        sleep(0.5)
    assert len(kafka.rows(topic)) <= 4000, "Kafka has not compacted it"
    mirror(kafka, log)

    assert rows_of(log, topic) == kafka.rows(topic)
    assert len(log.partition(topic, 0).segments) <= 3
    assert log.root.topic(topic).config.cleanup_policy == "compact"


def test_partitions_and_settings_are_those_of_the_source(kafka, log):
    """Those that a log knows, now and when they change."""
    topic = kafka.create(partitions=3, retention_ms=123_456_789, compression_type="zstd")
    mirror(kafka, log)
    info = log.root.topic(topic)
    assert (info.partitions, info.config.retention_ms) == (3, 123_456_789)
    assert info.config.compression_type == "zstd"

    kafka.alter(topic, retention_ms=99_000_000, max_message_bytes=2_000_000)
    kafka.admin.create_partitions([confluent_kafka.admin.NewPartitions(topic, 5)])[topic].result()
    mirror(kafka, log)

    info = log.root.topic(topic)
    assert (info.partitions, info.config.retention_ms) == (5, 99_000_000)
    assert info.config.max_message_bytes == 2_000_000


def test_deleted_records_are_skipped(kafka, log):
    """The copy goes on where Kafka begins, and the status has how many offsets are missing."""
    topic = kafka.create()
    kafka.send(topic, [(0, START, None, b"%d" % number, None) for number in range(100)])
    mirror(kafka, log)
    kafka.send(topic, [(0, START, None, b"%d" % number, None) for number in range(100)])
    kafka.admin.delete_records([confluent_kafka.TopicPartition(topic, 0, 150)])
    status = mirror(kafka, log).status

    assert status.skipped == 50
    assert [record.offset for record in log.topic(topic)][-50:] == list(range(150, 200))


def test_groups_get_the_same_offsets(kafka, log):
    """Forward only; groups of other mirrors are left out."""
    topic, group = kafka.create(partitions=2), kafka.prefix
    kafka.send(topic, random_rows(random.Random(3), 500))
    kafka.commit(group, {(topic, 0): 17, (topic, 1): 33})
    mirror(kafka, log, groups=group)
    partitions = [TopicPartition(topic, number) for number in range(2)]

    committed = RootSource(log.root).committed(group)
    assert [committed[part].offset for part in partitions] == [17, 33]
    kafka.commit(group, {(topic, 0): 20, (topic, 1): 3})
    mirror(kafka, log, groups=group)
    committed = RootSource(log.root).committed(group)
    assert [committed[part].offset for part in partitions] == [20, 33]


def test_a_mirror_that_follows_sees_new_records_and_topics(kafka, log):
    """Within the seconds that its rounds take."""
    topic = kafka.create()
    with mirror(kafka, log, follow=True) as run:
        kafka.send(topic, [(0, START, None, b"a", None)])
        while topic not in log.topics():
            assert not run.wait(0.1)
        with log.consumer(topic, auto_offset_reset="earliest") as reader:
            for value in (b"a", b"b", b"c"):
                if value != b"a":
                    kafka.send(topic, [(0, START, None, value, None)])
                (records,) = reader.poll(patient(60_000)).values()
                assert [record.value for record in records] == [value]
        assert run.running
    assert rows_of(log, topic) == kafka.rows(topic)


def test_a_topic_that_was_created_again_is_not_mixed_with_the_old_one(kafka, log):
    """The copy of the old one stays as it is."""
    topic = kafka.create()
    kafka.send(topic, [(0, START, None, b"old", None)])
    mirror(kafka, log)
    kafka.delete()
    kafka.create()
    kafka.send(topic, [(0, START, None, b"new", None)] * 3)

    with pytest.raises(MirrorDivergedError, match="created again"):
        mirror(kafka, log)
    assert [record.value for record in log.topic(topic)] == [b"old"]


def test_errors_of_the_cluster_are_typed(kafka, log, tmp_path):
    """No broker, a wrong setting, a wrong address."""
    with pytest.raises(InvalidConfigError, match="No such configuration property"):
        embedlog.mirror(f"{kafka.address}?no.such.setting=1", log)
    with pytest.raises(InvalidConfigError, match="no variable 'NO_SUCH'"):
        embedlog.mirror(f"{kafka.address}?sasl.password=${{NO_SUCH}}", log)
    for address in ("kafka://", "kafka:///t", "kafka://h:1/t"):
        with pytest.raises(InvalidConfigError, match="must be kafka://HOST:PORT"):
            embedlog.mirror(address, log)
    with pytest.raises(InvalidConfigError, match="log at one of its ends"):
        embedlog.mirror(kafka.address, kafka.address)
    with pytest.raises(KafkaClusterError, match="does not answer") as caught:
        embedlog.mirror("kafka://127.0.0.1:9?socket.timeout.ms=1000", log)
    assert caught.value.retriable
