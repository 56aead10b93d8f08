"""Mirrors from a log to a Kafka broker: exactly once, with translated offsets."""

from __future__ import annotations

import os
import random
import signal
from bisect import bisect_left
from collections import Counter
from contextlib import suppress
from itertools import permutations

import pyarrow as pa
import pytest
from support import forks
from support.clock import START
from support.kafka_topics import random_rows, rows_of
from support.manual_compaction import keep
from support.roots import encoded, healthy_log

import embedlog
from embedlog import batch
from embedlog.errors import (
    FencedError,
    MirrorConflictError,
    MirrorDivergedError,
    UnknownTopicOrPartitionError,
)
from embedlog.mirrors.ends import MirrorPosition
from embedlog.mirrors.kafka_target import KafkaTarget
from embedlog.mirrors.root_source import RootSource
from embedlog.record import OffsetAndMetadata, TopicPartition

log = healthy_log


def fill(log, topic, dice, count, compression="none", most=1000):
    """Write random records in random batches."""
    for number in range(2):
        rows = [row for row in random_rows(dice, count) if row[0] == number]
        while rows:
            size = min(dice.choice([1, 3, 50, 1000]), most)
            (_, times, keys, values, headers), rows = zip(*rows[:size], strict=True), rows[size:]
            some = list(headers) if any(headers) else None
            encoded = batch.encode_lists(list(values), list(keys), list(times), some, compression)
            log.partition(topic, number).append([encoded])


def mirror(kafka, log, **options):
    options = {"topics": f"{kafka.prefix}.*", "progress": False} | options
    return embedlog.mirror(log, options.pop("address", kafka.address), **options).status


def without_offsets(rows):
    """Return rows without their offsets, in the order of these."""
    return [(row[0], *row[2:]) for row in rows]


def test_records_are_copied_in_their_order(kafka, log):
    """With keys, headers, nulls and timestamps; and the next run goes on behind them."""
    topic, dice = kafka.name(), random.Random(1)
    log.create_topic(topic, 2, {"retention.ms": 98_765_432_100, "segment.bytes": 200_000})
    for count in (0, 1, 3000, 2, 500):
        before = len(rows_of(log, topic))
        fill(log, topic, dice, count, dice.choice(["none", "lz4"]))
        status, rows = mirror(kafka, log), rows_of(log, topic)
        assert without_offsets(kafka.rows(topic)) == without_offsets(rows)
        copied = len(rows) - before
        assert (status.records, status.lag, status.state) == (copied, 0, "finished")
    log.create_partitions(topic, 3)
    mirror(kafka, log)
    assert len(kafka.admin.list_topics(topic).topics[topic].partitions) == 3


def test_a_compacted_log_is_copied_with_its_gaps_closed(kafka, log):
    """Records of batches with columns of offsets."""
    topic = kafka.name()
    log.create_topic(topic, 2)
    fill(log, topic, random.Random(2), 500)
    part = log.partition(topic, 0)
    part.roll()
    keep(part, [number for number in range(part.end_offset()) if number % 5 in (1, 3)])
    fill(log, topic, random.Random(3), 100)
    mirror(kafka, log)

    assert without_offsets(kafka.rows(topic)) == without_offsets(rows_of(log, topic))


def test_times_of_the_log_are_kept(kafka, log):
    """Its append times become timestamps of the producer, whatever the topic's setting is."""
    topic = kafka.name()
    log.create_topic(topic, 2, {"message.timestamp.type": "LogAppendTime"})
    fill(log, topic, random.Random(4), 50)
    kafka.create("t", 2)
    mirror(kafka, log)

    assert without_offsets(kafka.rows(topic)) == without_offsets(rows_of(log, topic))


def test_each_offset_is_translated_exactly(kafka, log):
    """A group that goes on at the copy reads what it would have read at the source."""
    topic, group, dice = kafka.name(), kafka.prefix, random.Random(5)
    log.create_topic(topic, 2, {"segment.bytes": 200_000})
    target = None
    for count in (300, 5, 1, 700):
        fill(log, topic, dice, count)
        mirror(kafka, log)
    part = log.partition(topic, 0)
    part.roll()
    keep(part, [number for number in range(part.end_offset()) if dice.random() < 0.4])
    fill(log, topic, dice, 100)
    mirror(kafka, log)
    source, copied = RootSource(log.root), kafka.rows(topic)
    target = KafkaTarget(kafka.address, log.root)
    with target.exclusive("test"):
        target.prepare(source.topics()[topic], topic, source)
        for number in range(2):
            rows = [row for row in rows_of(log, topic) if row[0] == number]
            of_copy = [row for row in copied if row[0] == number]
            assert not Counter(map(repr, without_offsets(rows))) - Counter(
                map(repr, without_offsets(of_copy))
            )
            end = log.partition(topic, number).end_offset()
            for offset in range(end + 1):
                translated = target.translate(topic, number, offset)
                left = [row for row in rows if row[1] >= offset]
                read = [row for row in of_copy if row[1] >= translated]
                # In order; what was compacted since then is in the copy all the same.
                rest = iter(without_offsets(read))
                assert all(row in rest for row in without_offsets(left))
                if offset in {row[1] for row in rows}:
                    assert without_offsets(read)[:1] == without_offsets(left)[:1]
    target.close()

    with log.consumer(topic, group_id=group, auto_offset_reset="earliest") as consumer:
        consumer.poll(10_000, max_records=123)
        consumer.commit()
    at_source = RootSource(log.root).committed(group)
    status = mirror(kafka, log, groups=group)
    assert status.commits == len(at_source)
    for key, translated in kafka.committed(group).items():
        (next_row,) = [row for row in copied if (row[0], row[1]) == (key[1], translated)]
        rows = [row for row in rows_of(log, topic) if row[0] == key[1]]
        at = bisect_left([row[1] for row in rows], at_source[TopicPartition(*key)].offset)
        assert without_offsets([next_row]) == without_offsets([rows[at]])


def test_commits_move_forward_only_and_not_under_members(kafka, log):
    """A group that has moved to the copy keeps its own offsets."""
    topic, group = kafka.name(), kafka.prefix
    log.create_topic(topic, 2)
    fill(log, topic, random.Random(6), 100)
    mirror(kafka, log)
    target = KafkaTarget(kafka.address, log.root)
    part = TopicPartition(topic, 0)

    assert target.commit(group, {part: OffsetAndMetadata(10)}) == {part: 10}
    assert target.commit(group, {part: OffsetAndMetadata(5)}) == {}
    assert kafka.committed(group) == {part: 10}
    member = kafka.consumer(group)
    member.subscribe([topic])
    while not member.assignment():
        member.poll(0.1)
    assert target.commit(group, {part: OffsetAndMetadata(20)}) == {}
    member.close()
    target.close()


def test_settings_that_kafka_refuses_are_left_out(kafka, log):
    """Such as segments of less than 1 MiB, and those that only a log has."""
    topic = kafka.name()
    log.create_topic(
        topic, config={"segment.bytes": 5000, "retention.ms": 777_777, "rebatch.min.rows": 5}
    )
    mirror(kafka, log)
    log.alter_topic(topic, {"retention.ms": 888_888})
    mirror(kafka, log)

    resource = KafkaTarget(kafka.address, log.root)._config_of(topic)
    assert (resource["retention.ms"], resource["segment.bytes"]) == ("888888", "1073741824")


def test_small_limits_of_a_topic_make_small_batches(kafka, log):
    """The producer makes no batch that the topic refuses."""
    topic = kafka.name()
    log.create_topic(topic, 2, {"max.message.bytes": 6000})
    fill(log, topic, random.Random(7), 400, most=1)
    mirror(kafka, log)

    assert without_offsets(kafka.rows(topic)) == without_offsets(rows_of(log, topic))


def test_topics_that_cannot_be_copied_are_refused(kafka, log):
    """One with records of its own, a typed one; and one that was created again."""
    foreign = kafka.create("foreign")
    kafka.send(foreign, [(0, START, None, b"own", None)])
    log.create_topic(foreign)
    with pytest.raises(MirrorConflictError, match="records of its own"):
        mirror(kafka, log)
    log.delete_topic(foreign)
    typed = kafka.name("typed")
    log.create_topic(typed, schema=pa.schema([("a", pa.int64())]))
    with pytest.raises(MirrorConflictError, match=r"log\.convert"):
        mirror(kafka, log)
    log.delete_topic(typed)
    topic = kafka.name()
    log.create_topic(topic, 2)
    fill(log, topic, random.Random(8), 10)
    count = mirror(kafka, log).records
    log.delete_topic(topic)
    log.create_topic(topic, 2)
    fill(log, topic, random.Random(8), 20)
    with pytest.raises(MirrorDivergedError, match="created again"):
        mirror(kafka, log)

    assert len(kafka.rows(topic)) == count
    assert len(kafka.rows(foreign)) == 1


# Kills

STEPS = ("_send", "_await", "_send_sync", "_commit_position", "_commit")
"""The steps of an append, in order."""


def die_at(step, when, number):
    """Kill this process before or after the n-th call of a step."""
    real, calls = getattr(KafkaTarget, step), []

    def method(self, producer, *arguments):
        calls.append(1)
        if len(calls) == number and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(self, producer, *arguments)
        if len(calls) == number and when == "after":
            producer.flush(10)
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(KafkaTarget, step, method)


def kill_a_mirror(kafka, path, step, when, number, address):
    """Run a mirror of a log in a process that dies."""

    def run():
        die_at(step, when, number)
        with embedlog.open(path, maintenance=False) as log:
            mirror(kafka, log, address=address)

    return forks.was_killed(run)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_neither_loses_nor_doubles_a_record(kafka, tmp_path, step, when):
    """At each step of a transaction, and again in the transactions after it."""
    topic, dice, path = kafka.name(), random.Random(9), tmp_path / "killed"
    # The first two positions are committed before any record.
    for number in (1, 3):
        with embedlog.open(path, maintenance=False) as log:
            log.create_topic(topic, 2, exist_ok=True)
            fill(log, topic, dice, 200)
        assert kill_a_mirror(kafka, path, step, when, number, kafka.address)
    with embedlog.open(path, maintenance=False) as log:
        mirror(kafka, log)
        assert without_offsets(kafka.rows(topic)) == without_offsets(rows_of(log, topic))


def test_without_transactions_a_kill_doubles_and_loses_nothing(kafka, tmp_path):
    """That is at least once: the same kill shows that the test above can fail."""
    topic, path = kafka.name(), tmp_path / "killed"
    address = f"{kafka.address}?exactly.once=false"
    with embedlog.open(path, maintenance=False) as log:
        log.create_topic(topic, 2)
        fill(log, topic, random.Random(10), 200)
    assert kill_a_mirror(kafka, path, "_commit_position", "before", 3, address)
    with embedlog.open(path, maintenance=False) as log:
        mirror(kafka, log, address=address)
        sent, copied = (
            Counter(map(repr, without_offsets(rows)))
            for rows in (rows_of(log, topic), kafka.rows(topic))
        )
    assert not sent - copied
    assert copied - sent


def test_a_mirror_that_was_taken_over_writes_nothing_more(kafka, tmp_path):
    """Its transactions are fenced by those of the next one, even if its locks were lost."""
    topic, path = kafka.name(), tmp_path / "log"
    with embedlog.open(path, maintenance=False) as log:
        log.create_topic(topic, 2)
        fill(log, topic, random.Random(11), 100)
        source = RootSource(log.root)
        first = KafkaTarget(kafka.address, log.root)
        first._mirror = f"{log.path} {kafka.prefix}.*"
        first.prepare(source.topics()[topic], topic, source)
        position = first.position(topic, 0)
        assert position == MirrorPosition(0)
        fetch = source.fetch(topic, 0, MirrorPosition(0), 1 << 20)
        first._locks.close()
        mirror(kafka, log)
        with pytest.raises(FencedError, match="same mirror"):
            first.append(topic, 0, fetch)
        assert without_offsets(kafka.rows(topic)) == without_offsets(rows_of(log, topic))
        first.close()


# Sites that write to the same topic


def test_sites_that_merge_send_no_record_back(kafka, tmp_path):
    """Active-active: each record is at each site once."""
    topic = kafka.create("t", 2)
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic(topic, 2)
        fill(log, topic, random.Random(12), 50)
        kafka.send(topic, random_rows(random.Random(13), 50))
        for _ in range(3):
            mirror(kafka, log, merge=True)
            embedlog.mirror(kafka.address, log, topics=topic, merge=True, progress=False)
        assert len(kafka.rows(topic)) == len(rows_of(log, topic)) > 50
        values = [
            Counter(row[4] for row in rows) for rows in (kafka.rows(topic), rows_of(log, topic))
        ]
        assert values[0] == values[1]


def test_a_program_in_kafka_that_forwards_headers_keeps_no_record_back(kafka, tmp_path):
    """Its records in another topic or partition are its own, and are copied like those."""
    topic, other = kafka.create("t", 2), kafka.create("u", 2)
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        for name in (topic, other):
            log.create_topic(name, 2)
        log.partition(topic, 0).append([encoded(*(b"%d" % n for n in range(20)))])

        def copy():
            for name in (topic, other):
                mirror(kafka, log, topics=name, merge=True)
                embedlog.mirror(kafka.address, log, topics=name, merge=True, progress=False)

        copy()
        rows = [(row[0], row[2], row[3], b"fwd " + row[4], row[5]) for row in kafka.rows(topic)]
        assert all(row[-1] for row in rows)
        kafka.send(other, rows)
        kafka.send(topic, [(1, *row[1:]) for row in rows])
        log.partition(other, 0).append([encoded(*(b"late %d" % n for n in range(5)))])
        copy()
        copy()
        for name, count in ((topic, 40), (other, 25)):
            at_kafka, here = kafka.rows(name), rows_of(log, name)
            assert Counter(row[4] for row in at_kafka) == Counter(row[4] for row in here)
            assert len(here) == count


def test_no_topic_comes_back_through_kafka(kafka, tmp_path):
    """Two logs and a cluster mirror to each other as sites: no name has a site twice (H6)."""
    ends = {"kafka": kafka.address}
    with (
        embedlog.open(tmp_path / "paris", maintenance=False) as ends["paris"],
        embedlog.open(tmp_path / "rome", maintenance=False) as ends["rome"],
    ):
        topic = kafka.name()
        ends["paris"].create_topic(topic)
        ends["paris"].partition(topic, 0).append([encoded(b"1", b"2")])
        names = f"(.*[.])?{topic}"

        def mirrored(source, target):
            with suppress(UnknownTopicOrPartitionError):
                embedlog.mirror(
                    ends[source], ends[target], topics=names, site=source, progress=False
                )

        for _ in range(2):
            for source, target in permutations(ends, 2):
                mirrored(source, target)
        paths = {"paris": [""], "rome": ["paris.", "kafka.paris."], "kafka": ["paris."]}
        paths["kafka"] += ["rome.paris."]
        for name in ("paris", "rome"):
            assert ends[name].topics() == sorted(f"{path}{topic}" for path in paths[name])
        listed = [name for name in kafka.admin.list_topics().topics if name.endswith(topic)]
        assert sorted(listed) == sorted(f"{path}{topic}" for path in paths["kafka"])
