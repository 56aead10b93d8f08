"""The producer writes each record once and in order, and its future has the offset."""

import errno
import gc
import linecache
import pickle
import random
import re
import subprocess
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import forks
from support.full_disk import SmallDiskFiles
from support.patience import patient
from support.producer_calls import buffered_bytes, totals
from support.roots import healthy, open_root, rows, values
from support.tiers import choose, sample

import embedlog
from embedlog.config import TopicConfig
from embedlog.errors import (
    BufferExhaustedError,
    ClosedError,
    DiskFullError,
    EmbedlogError,
    IllegalStateError,
    InvalidConfigError,
    InvalidPartitionError,
    InvalidProducerEpochError,
    InvalidRecordError,
    LockTimeoutError,
    OutOfOrderSequenceError,
    RecordTooLargeError,
    SerializationError,
    TimeoutError,  # noqa: A004 - it is one
    UnknownTopicOrPartitionError,
)
from embedlog.files import Files
from embedlog.partition import PartitionLog
from embedlog.partitioner import partition_for_key
from embedlog.producer import Producer, batcher, row_batches
from embedlog.producer.batcher import WRITE_BYTES, Batcher
from embedlog.producer.topic_settings import COLUMN_BYTES, HEAD_BYTES
from embedlog.record import RecordMetadata
from embedlog.root.root import Root

FAST = {"retry_backoff_ms": 5, "request_timeout_ms": 20}
EXPIRING = {"delivery_timeout_ms": 60, "request_timeout_ms": 10, "retry_backoff_ms": 5}
LINGERING = {"linger_ms": 10_000, "delivery_timeout_ms": 60_000}


@pytest.fixture
def root(tmp_path):
    """A root with topics of one and of four partitions; checked after every test."""
    root = open_root(tmp_path / "log")
    root.create_topic("one", 1, TopicConfig())
    root.create_topic("four", 4, TopicConfig())
    yield root
    if not root.closed:
        assert healthy(root)
        root.close()


@pytest.fixture
def producer(root):
    with Producer(root) as producer:
        yield producer


def make(root, name, partitions=1, **config):
    root.create_topic(name, partitions, TopicConfig.parse(config))


def values_by_partition(root, topic):
    """Return the values of each partition."""
    return [values(root.partition(topic, n)) for n in range(root.partitions(topic))]


def run_producer(directory, config, *lines):
    """Run lines of Python with a ``producer`` in another process; return its exit code."""
    preamble = (
        f"import os, sys; sys.path[:0] = {sys.path!r}",
        "from support.roots import open_root",
        "from embedlog.producer import Producer",
        f"producer = Producer(open_root({str(directory / 'log')!r}), {config})",
    )
    program = "\n".join([*preamble, *lines])
    return subprocess.run([sys.executable, "-c", program], check=False).returncode


class LockedPartition:
    """Holds the lock of a partition, as another process would."""

    def __init__(self, root, topic, partition=0):
        self.log = root.partition(topic, partition)

    def __enter__(self):
        self.log.tail()
        self.log.acquire()

    def __exit__(self, *_):
        self.log.release()


# Sending one by one


def test_a_record_is_written_where_its_future_says(root, producer):
    """A1: offsets are consecutive from 0, and the metadata names topic, partition and time."""
    first = producer.send("one", b"a").result()
    second = producer.send("one", b"b", timestamp_ms=77).get(5)

    assert first == RecordMetadata("one", 0, 0, root.clock())
    assert second == RecordMetadata("one", 0, 1, 77)
    assert values(root.partition("one", 0)) == [b"a", b"b"]


def test_a_record_comes_back_as_it_was_sent(root, producer):
    """A3: null and empty differ, and headers keep order, duplicates and nulls."""
    headers = [("a", b"1"), ("a", None), ("b", b"")]
    for key, value in ((None, b"v"), (b"", b""), (b"k", None)):
        producer.send("one", value, key)
    producer.send("one", b"v", b"k", headers=headers)
    producer.send("one", bytearray(b"x"), memoryview(b"y"))
    producer.flush()

    records = [(key, value, heads) for _, _, key, value, heads in rows(root.partition("one", 0))]
    assert records == [
        (None, b"v", []),
        (b"", b"", []),
        (b"k", None, []),
        (b"k", b"v", headers),
        (b"y", b"x", []),
    ]


def test_a_key_decides_the_partition_and_the_order_there_is_kept(root, producer):
    """G1, G2, G9: murmur2 of the key over all partitions; each future has its own offset."""
    keys = [b"key-%d" % (n % 37) for n in range(1000)]
    futures = [producer.send("four", b"%d" % n, key) for n, key in enumerate(keys)]
    producer.flush()

    written = [values(root.partition("four", n)) for n in range(4)]
    for n, (key, future) in enumerate(zip(keys, futures, strict=True)):
        metadata = future.result(0)
        assert metadata.partition == partition_for_key(key, 4)
        assert written[metadata.partition][metadata.offset] == b"%d" % n
    for partition in written:
        assert [int(value) for value in partition] == sorted(int(value) for value in partition)


def test_an_explicit_partition_is_used(root, producer):
    """G1: an explicit partition takes precedence over the key, and is checked."""
    futures = [producer.send("four", b"v", b"k", partition=n % 3) for n in range(9)]

    assert [future.result().partition for future in futures] == [n % 3 for n in range(9)]
    for invalid in (-1, 4):
        with pytest.raises(UnknownTopicOrPartitionError):
            producer.send("four", b"v", partition=invalid)


def test_records_without_a_key_stay_with_a_partition_for_a_while(root):
    """G3: sticky, so that batches are large; every partition gets records."""
    with Producer(root, batch_size=2000) as producer:
        for n in range(2000):
            producer.send("four", b"%04d" % n + bytes(96))
    written = values_by_partition(root, "four")

    assert all(written)
    numbers = [int(value[:4]) for value in written[0]]
    assert sum(b == a + 1 for a, b in pairwise(numbers)) > len(numbers) * 0.7


@pytest.mark.parametrize("how", ["one by one", "by linger"])
def test_a_slow_stream_without_keys_reaches_every_partition(root, how):
    """G3: the partition changes after 16 KiB as in Kafka, however large a batch may become."""
    make(root, "eight", 8)
    with Producer(root, partitioner_sticky_ms=3_600_000) as producer:
        for _ in range(2000 if how == "one by one" else 100):
            if how == "one by one":
                producer.send("eight", bytes(100)).result()
                continue
            futures = [producer.send("eight", bytes(100)) for _ in range(20)]
            forks.until(lambda futures=futures: all(future.done() for future in futures))
        counts = [len(partition) for partition in values_by_partition(root, "eight")]
        assert sum(counts) == 2000 == totals(producer)["record-send-total"]
        assert min(counts) > 100
        if how == "by linger":
            assert totals(producer)["batch-total"] < 1000


def test_the_sticky_partition_changes_after_a_time_too(root):
    """G3: otherwise a slow stream would stay with one partition for hours."""
    make(root, "eight", 8)
    with Producer(root, partitioner_sticky_ms=0) as producer:
        used = [producer.send("eight", b"v").result().partition for _ in range(8)]
    assert sorted(used) == list(range(8))


def test_a_fast_stream_without_keys_still_makes_large_batches(root):
    """A batch is as large as batch_size allows, whenever the partition changes."""
    with Producer(root, linger_ms=10_000) as producer:
        futures = [producer.send("four", bytes(1000)) for _ in range(4000)]
        producer.flush()
        assert all(future.succeeded() for future in futures)
        assert totals(producer)["batch-total"] < 4000 * 1016 / (128 << 10)
    assert all(values_by_partition(root, "four"))


def test_round_robin_leaves_no_partition_out(root):
    """G4: each partition in turn, across drains too (KAFKA-9965)."""
    with Producer(root, partitioner="round_robin") as producer:
        futures = [producer.send("four", b"%d" % n) for n in range(8)]
        producer.flush()
        futures += [producer.send("four", b"%d" % n) for n in range(8)]

        assert [future.result().partition for future in futures] == [0, 1, 2, 3] * 4
        assert {
            appended.partition for appended in producer.send_batch("four", [b"x"] * 8).result()
        } == {*range(4)}


def test_a_partitioner_of_the_user_sees_key_and_partitions(root):
    """kafka-python's signature: (key_bytes, all_partitions, available)."""
    calls = []

    def last(key, all_partitions, available):
        calls.append((key, all_partitions, available))
        return all_partitions[-1]

    with Producer(root, partitioner=last) as producer:
        assert producer.send("four", b"v", b"k").result().partition == 3
        producer.send_batch("four", [b"v"], [b"k"]).result()
    assert calls == [(b"k", [0, 1, 2, 3], [0, 1, 2, 3])] * 2


def test_new_partitions_are_used_from_the_next_drain_on(root, producer):
    """G5: the number of partitions is read again at each drain."""
    producer.send("one", b"v", b"a").result()
    root.grow_topic("one", 8)

    for key in (b"a", b"b", b"c", b"d", b"e"):
        assert producer.send("one", b"v", key).result().partition == partition_for_key(key, 8)


def test_an_unknown_topic_is_created_unless_that_is_disabled(tmp_path):
    """auto.create.topics.enable: the first send creates it."""
    with Producer(open_root(tmp_path / "a")) as producer:
        assert producer.send("new", b"v").result().offset == 0
        producer.root.close()
    with Producer(open_root(tmp_path / "b", auto_create=False)) as producer:
        with pytest.raises(UnknownTopicOrPartitionError):
            producer.send("new", b"v")
        producer.root.close()


def test_keys_and_values_that_are_not_bytes_are_refused(root, producer):
    """Keys and values are bytes; the message says how to encode text."""
    for invalid in ("text", 7, ["a"]):
        with pytest.raises(SerializationError):
            producer.send("one", invalid)
        with pytest.raises(SerializationError):
            producer.send("one", b"v", invalid)
        with pytest.raises(SerializationError):
            producer.send_batch("one", [b"v", invalid])
    with pytest.raises(SerializationError, match="Encode it"):
        producer.send("one", "text")
    # A data frame has NaN where a key is missing.
    with pytest.raises(SerializationError, match=r"got float.*append_table"):
        producer.send_batch("one", [b"v", b"w"], keys=[b"k", float("nan")])
    for headers in ([("a",)], [(None, b"v")], [("a", "text")]):
        with pytest.raises(SerializationError):
            producer.send("one", b"v", headers=headers)
    with pytest.raises(SerializationError):
        producer.send("one", b"v", timestamp_ms=1.5)
    producer.flush()

    assert values(root.partition("one", 0)) == []


def test_serializers_are_callables_or_objects(root):
    """A callable, or kafka-python's Serializer with ``serialize(topic, value)``."""

    class Shout:
        def serialize(self, topic, value):
            return f"{topic}:{value}".upper().encode()

    with Producer(root, key_serializer=str.encode, value_serializer=Shout()) as producer:
        producer.send("one", "v", "k").result()
        producer.send_batch("one", ["w"], ["l"])
    written = [(row[2], row[3]) for row in rows(root.partition("one", 0))]
    assert written == [(b"k", b"ONE:V"), (b"l", b"ONE:W")]


COMPARED_TOPICS = {
    "one": (1, {}),
    "four": (4, {}),
    "small": (2, {"max.message.bytes": 400}),
    "stamped": (1, {"message.timestamp.type": "LogAppendTime"}),
    "now": (1, {"message.timestamp.after.max.ms": 1000}),
    "compacted": (2, {"cleanup.policy": "compact"}),
    "compressed": (1, {"compression.type": "lz4"}),
}


class OneAndMany:
    """Two producers of one root: one sends single records, one calls `send_batch` for each."""

    def __init__(self, root, **config):
        self.root = root
        # Neither producer may act on the time.
        config |= {"linger_ms": 3_600_000, "partitioner_sticky_ms": 3_600_000}
        self.producers = {way: Producer(root, **config) for way in ("one", "many")}
        for prefix, producer in self.producers.items():
            for name, (partitions, config) in COMPARED_TOPICS.items():
                make(root, f"{prefix}-{name}", partitions, **config)
                queue = producer._open(f"{prefix}-{name}")
                queue.row_partitioner._sticky._rng = random.Random(7)

    def send(self, way, topic, value, key, headers, partition, timestamp):
        """Send a record; return where it is or its error, and the metrics."""
        producer, name = self.producers[way], f"{way}-{topic}"
        try:
            if way == "one":
                place = producer.send(name, value, key, headers, partition, timestamp).result()[1:3]
            else:
                keys, all_headers = key if key is None else [key], headers and [headers]
                future = producer.send_batch(name, [value], keys, all_headers, timestamp, partition)
                ((_, *place, _, _, _),) = future.result()
            outcome = tuple(place)
        except EmbedlogError as error:
            outcome = type(error), str(error).replace(way, "topic")
        counts = totals(producer)
        return outcome, {name: counts[name] for name in ("record-send-total", "byte-total")}

    def batches(self, way, topic):
        """Return all fields of the batches of a topic, except the producer's."""
        return [
            (partition, batch.size, batch.base_offset, batch.base_sequence, batch.lists())
            for partition in range(COMPARED_TOPICS[topic][0])
            for batch in batches_of(self.root.partition(f"{way}-{topic}", partition))
        ]


def batches_of(log):
    reader = log.reader(0)
    while batches := reader.read():
        yield from batches


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_record_that_is_sent_alone_equals_a_batch_of_one(tmp_path, idempotent):
    """`send` and `send_batch` write, return and refuse the same."""
    root = open_root(tmp_path / "log")
    producers, outcomes = OneAndMany(root, enable_idempotence=idempotent), []
    keys = st.none() | st.sampled_from([b"", b"k", b"key-000001"])
    values = st.none() | st.binary(max_size=20) | st.sampled_from([250, 330, 500]).map(bytes)
    headers = st.sampled_from([None, None, None, [("h", b"1")]])
    partitions = st.sampled_from([None, None, None, 0])
    timestamps = st.sampled_from([None, None, 77, root.clock() + 5000])
    records = st.tuples(values, keys, headers, partitions, timestamps)

    @settings(max_examples=choose(quick=60, all=150), database=None, derandomize=True)
    @given(st.sampled_from(list(COMPARED_TOPICS)), records)
    def check(topic, record):
        one, many = (producers.send(way, topic, *record) for way in producers.producers)
        assert one == many
        outcomes.append(one[0][0])

    check()
    for topic in COMPARED_TOPICS:
        assert producers.batches("one", topic) == producers.batches("many", topic)
    assert {RecordTooLargeError, InvalidRecordError, 0} <= set(outcomes)
    for producer in producers.producers.values():
        producer.close()
    assert healthy(root)
    root.close()


# Refusals


def test_a_record_that_is_too_large_fails_alone(root):
    """A4, G7, G13: its future fails, other records are written, and its memory is free again."""
    make(root, "small", **{"max.message.bytes": 5000})
    with Producer(root, max_request_size=20000) as producer:
        before = producer.send("small", b"a")
        large = producer.send("small", bytes(6000))
        huge = producer.send("small", bytes(30000))
        after = producer.send("small", b"b")
        producer.flush()

        assert before.succeeded() and after.succeeded()
        for future in (large, huge):
            assert future.failed() and isinstance(future.exception, RecordTooLargeError)
            with pytest.raises(RecordTooLargeError):
                future.result()
        assert buffered_bytes(producer) == 0
        assert totals(producer)["record-error-total"] == 2
    assert values(root.partition("small", 0)) == [b"a", b"b"]


def test_batches_are_never_larger_than_the_topic_takes(root):
    """G13: records are split into batches that fit, for any batch_size."""
    make(root, "small", **{"max.message.bytes": 5000})
    with Producer(root, batch_size=1 << 20) as producer:
        futures = [producer.send("small", b"%03d" % n + bytes(97)) for n in range(300)]
        producer.flush()
        assert [future.result().offset for future in futures] == list(range(300))
        ranges = producer.send_batch("small", [bytes(100)] * 300).result()
    assert len(ranges) > 5 and sum(appended.count for appended in ranges) == 300


def test_a_compacted_topic_refuses_records_without_a_key(root, producer):
    """A6: `send` fails the future; `send_batch` raises with the indices, and writes nothing."""
    make(root, "table", **{"cleanup.policy": "compact"})
    unkeyed = producer.send("table", b"v")
    keyed = producer.send("table", b"v", b"k")

    assert isinstance(unkeyed.exception, InvalidRecordError)
    with pytest.raises(InvalidRecordError) as caught:
        producer.send_batch("table", [b"a", b"b", b"c"], [b"k", None, None])
    assert caught.value.indices == [1, 2]
    with pytest.raises(InvalidRecordError):
        producer.append_table("table", pa.table({"value": [b"a"]}))
    assert keyed.result().offset == 0
    assert values(root.partition("table", 0)) == [b"v"]


def test_a_time_outside_the_window_fails_its_record(root, producer):
    """A7: the topic limits timestamps; the partition accepts later records."""
    make(root, "now", **{"message.timestamp.after.max.ms": 1000})
    late = producer.send("now", b"a", timestamp_ms=root.clock() + 5000)
    with pytest.raises(InvalidRecordError):
        late.result()
    assert producer.send("now", b"b").result().offset == 0


def test_the_log_can_stamp_records_with_its_own_time(root, producer):
    """A7: LogAppendTime replaces the timestamp, also in the metadata."""
    make(root, "stamped", **{"message.timestamp.type": "LogAppendTime"})
    assert producer.send("stamped", b"v", timestamp_ms=5).result().timestamp == root.clock()


# Waiting, order, callbacks


def test_a_record_that_no_caller_waits_for_is_written_too(root, producer):
    """G6: the background thread writes it after about a millisecond with linger_ms=0."""
    future = producer.send("one", b"v")
    forks.until(future.done)

    assert future.is_done and future.value.offset == 0


def test_records_linger_unless_a_caller_waits(root):
    """G6: linger_ms delays a batch; result() and flush() do not wait for it."""
    with Producer(root, linger_ms=60_000, delivery_timeout_ms=120_000) as producer:
        futures = [producer.send("one", b"%d" % n) for n in range(3)]
        threading.Event().wait(0.05)
        assert not any(future.done() for future in futures)
        assert futures[1].result().offset == 1
        assert all(future.done() for future in futures)
    assert totals(producer)["batch-total"] == 1


def test_a_full_batch_does_not_linger(root):
    """G6: batch_size closes a batch before linger_ms does."""
    with Producer(root, linger_ms=60_000, batch_size=1000) as producer:
        futures = [producer.send("one", bytes(100)) for _ in range(100)]
        assert futures[0].done()


def test_flush_waits_for_what_was_sent_before(root, producer):
    """G10: on return all are written or failed, in all topics."""
    futures = [producer.send(topic, b"v") for topic in ("one", "four", "new") for _ in range(50)]
    producer.flush()

    assert all(future.succeeded() for future in futures)


def test_callbacks_run_in_order_with_the_result_or_the_error(root, producer):
    """G9: a callback gets its own arguments and the result or the error; its errors are logged."""
    make(root, "table", **{"cleanup.policy": "compact"})
    seen = []
    for n in range(5):
        future = producer.send("one", b"%d" % n)
        future.add_callback(lambda tag, metadata: seen.append((tag, metadata.offset)), n)
        future.add_errback(seen.append)
    future.add_callback(lambda metadata: 1 / 0)
    producer.flush()
    future.add_callback(lambda metadata: seen.append("at once"))
    producer.send("table", b"v").add_errback(lambda error: seen.append(type(error)))

    assert seen == [*((n, n) for n in range(5)), "at once", InvalidRecordError]


def test_a_callback_may_send_flush_wait_and_close(root):
    """G9, G10: no lock is held while it runs."""
    producer = Producer(root)
    offsets = []

    def send_again(metadata):
        offsets.append(producer.send("one", b"second").result(patient(5)).offset)
        producer.flush(patient(5))
        producer.close()

    producer.send("one", b"first").add_callback(send_again)
    producer.flush(patient(5))

    assert offsets == [1]
    with pytest.raises(ClosedError):
        producer.send("one", b"third")


def test_many_threads_lose_nothing_and_keep_their_own_order(root, producer):
    """A10, G12: the records of each thread keep their order, and every future has its offset."""

    def send(name):
        return [producer.send("one", b"%d-%d" % (name, n)) for n in range(2000)]

    with ThreadPoolExecutor(4) as pool:
        futures_by_thread = list(pool.map(send, range(4)))
    producer.flush()
    written = values(root.partition("one", 0))

    assert len(written) == 8000
    for name, sent in enumerate(futures_by_thread):
        offsets = [future.result(0).offset for future in sent]
        assert offsets == sorted(offsets)
        assert [written[offset] for offset in offsets] == [
            b"%d-%d" % (name, n) for n in range(2000)
        ]


def test_acks_0_does_not_wait_to_know(root):
    """G9: the future is done at once, with offset -1."""
    with Producer(root, acks=0) as producer:
        future = producer.send("one", b"v")
        assert future.done() and future.result().offset == -1
    assert values(root.partition("one", 0)) == [b"v"]


def test_idempotence_goes_with_acks_all_only(root):
    """G20: it is an error if both are set explicitly; otherwise idempotence is silently off."""
    with pytest.raises(InvalidConfigError):
        Producer(root, acks=1, enable_idempotence=True)
    with Producer(root, acks=1) as producer:
        assert producer.send("one", b"v").result().offset == 0
        with pytest.raises(IllegalStateError):
            producer.send_batch("one", [b"v"], sequence=0)


# Memory, retries, expiry


def test_send_blocks_while_memory_is_full_and_gives_up(root):
    """G8: BufferExhaustedError after max_block_ms; the memory is free again after a write."""
    config = {"buffer_memory": 4000, "max_block_ms": 120, **FAST}
    with Producer(root, **config) as producer:
        with LockedPartition(root, "one"):
            start = time.monotonic()
            with pytest.raises(BufferExhaustedError):
                for _ in range(100):
                    producer.send("one", bytes(100))
            assert 0.1 < time.monotonic() - start < patient(3)
        producer.flush(patient(5))
        producer.send("one", b"v").result(patient(5))
        assert buffered_bytes(producer) == 0


def test_a_write_is_tried_again_and_order_is_kept(root):
    """G12: later records wait behind those that are retried; nothing is written twice."""
    with Producer(root, **FAST) as producer:
        with LockedPartition(root, "one"):
            first = producer.send("one", b"1")
            with pytest.raises(TimeoutError):
                first.result(0.05)
            second = producer.send("one", b"2")
            with pytest.raises(TimeoutError):
                producer.flush(0.05)
        assert second.result(patient(5)).offset == 1
        assert first.result(patient(5)).offset == 0
        assert totals(producer)["record-retry-total"] > 0


def test_records_that_cannot_be_encoded_now_hold_up_later_ones(root, monkeypatch):
    """G12: records that cannot be encoded for the moment are not overtaken by later ones."""
    with Producer(root, linger_ms=10_000, retry_backoff_ms=1) as producer:
        first = producer.send("one", b"1")
        make(root, "other")  # so that the next drain looks at the catalogue
        ensure_topic, failed = root.ensure_topic, []

        def fails_once(topic):
            root.ensure_topic = ensure_topic
            failed.append(topic)
            raise LockTimeoutError("held")

        root.ensure_topic = fails_once
        with producer._lock:
            producer._queues["one"].close_open()
        second = producer.send("one", b"2")
        producer.flush()
        assert failed and (first.value.offset, second.value.offset) == (0, 1)
    assert values(root.partition("one", 0)) == [b"1", b"2"]


UNINTERRUPTED = r"with |try:|if drains:|self\._callback_thread = None|.*\.release\(\)"


def interrupted_at(line, function):
    """Call a function with a KeyboardInterrupt at a line of the producer; whether there was one."""
    lines = 0

    def trace(frame, event, argument):
        inside = frame.f_globals["__name__"].startswith("embedlog.producer")
        return trace_line if inside else None

    def trace_line(frame, event, argument):
        nonlocal lines
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        # Python checks for signals after calls: not as it leaves a `with`, or enters a `finally`.
        if event == "line" and not re.match(UNINTERRUPTED, text):
            lines += 1
            if lines == line:
                raise KeyboardInterrupt
        return trace_line

    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return lines >= line


@pytest.mark.parametrize(
    ("topic", "count"), sample([("four", 1), ("four", 3), ("one", 1), ("one", 3)], 1)
)
def test_a_drain_that_is_interrupted_loses_nothing(root, topic, count):
    """Ctrl-C may come between any two lines: the next drain writes what this one has not."""
    with Producer(root, **LINGERING) as producer:
        producer.send_batch(topic, [b"v"] * 20, [b"%d" % n for n in range(20)])
        line = 1
        while True:
            futures = [producer.send(topic, b"%d" % line, b"%d" % n) for n in range(count)]
            was_interrupted = interrupted_at(line, producer.flush)
            producer.flush(patient(10))
            for n, future in enumerate(futures):
                place = future.result(0)
                (row, *_) = rows(root.partition(topic, place.partition), place.offset)
                assert row[:4] == (place.offset, place.timestamp, b"%d" % n, b"%d" % line)
            if not was_interrupted:
                break
            line += 1
        assert line > 30 and totals(producer)["batch-duplicate-total"] < line / 5
    written = [
        value for part in values_by_partition(root, topic) for value in part if value != b"v"
    ]
    assert sorted(map(int, written)) == sorted(count * [*range(1, line + 1)])


@pytest.mark.parametrize("written", [True, False])
def test_an_interrupted_wait_loses_nothing_and_writes_nothing_twice(root, monkeypatch, written):
    """After Ctrl-C in `result` a caller may wait again, whether the append was done or not."""
    with Producer(root, linger_ms=10_000) as producer:
        producer.send("one", b"1").result()
        append = PartitionLog.append

        def interrupted(*args, **options):
            monkeypatch.undo()
            if written:
                append(*args, **options)
            raise KeyboardInterrupt

        future = producer.send("one", b"2")
        monkeypatch.setattr(PartitionLog, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            future.result()

        assert future.result().offset == 1
        assert producer.send("one", b"3").result().offset == 2
        assert buffered_bytes(producer) == 0
    assert values(root.partition("one", 0)) == [b"1", b"2", b"3"]


def test_an_expired_record_never_appears_and_leaves_no_gap(root):
    """G11: the last error after delivery_timeout_ms; the next record has the next number (G16)."""
    with Producer(root, **EXPIRING) as producer:
        producer.send("one", b"1").result()
        with LockedPartition(root, "one"):
            lost = producer.send("one", b"lost")
            with pytest.raises(TimeoutError, match="delivery_timeout_ms"):
                while True:
                    try:
                        lost.result(0.05)
                    except TimeoutError:
                        if lost.done():
                            raise
        assert producer.send("one", b"2").result(patient(5)).offset == 1
    assert values(root.partition("one", 0)) == [b"1", b"2"]


def exception_of(future):
    """Wait until a future is done; return its exception."""
    while not future.done():
        with suppress(EmbedlogError):
            future.result(0.2)
    return future.exception


def test_without_retries_a_record_fails_with_what_the_append_raised(root):
    """As with Kafka the last error is raised; the message has the number of attempts."""
    for retries, attempts in ((0, "1 attempt"), (2, "3 attempts")):
        config = {"retries": retries, "request_timeout_ms": 20, "retry_backoff_ms": 1}
        with Producer(root, **config) as producer:
            producer.send("one", b"1").result()
            with LockedPartition(root, "one"):
                error = exception_of(producer.send("one", b"lost"))
            assert type(error) is LockTimeoutError
            assert type(error.__cause__) is LockTimeoutError
            assert f"{attempts} in " in str(error) and f"(retries {retries})" in str(error)
            assert producer.send("one", b"2").result().offset > 0
    assert values(root.partition("one", 0)) == [b"1", b"2"] * 2


def test_a_short_wait_does_not_use_up_the_retries(root):
    """An attempt with a shorter timeout than request_timeout_ms does not count against retries."""
    with Producer(root, retries=0, retry_backoff_ms=1) as producer:
        producer.send("one", b"1").result()
        with LockedPartition(root, "one"):
            future = producer.send("one", b"2")
            for _ in range(3):
                with pytest.raises(TimeoutError, match="wait again"):
                    future.result(0.01)
        assert future.result(patient(5)).offset == 1


def test_the_batches_of_a_numbered_call_fail_together(root):
    """G11: the second of two batches that expire fails with the first, and only once."""
    with Producer(root, batch_size=100, **EXPIRING) as producer:
        producer.send_batch("one", [b"1"], sequence=0).result()
        with LockedPartition(root, "one"):
            lost = producer.send_batch("one", [bytes(80)] * 2, sequence=1)
            assert len(lost._delivery.batches) == 2
            assert type(exception_of(lost)) is LockTimeoutError
        assert producer.send_batch("one", [b"2"], sequence=1).result()[0].base_offset == 1
        assert (totals(producer)["record-error-total"], buffered_bytes(producer)) == (2, 0)
    assert values(root.partition("one", 0)) == [b"1", b"2"]


@pytest.mark.parametrize(
    "config",
    [
        {"retries": 0},
        {"retries": 2, "retry_backoff_ms": 1},
        {"delivery_timeout_ms": 50, "request_timeout_ms": 10, "retry_backoff_ms": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("call", ["send", "send_batch"])
def test_a_full_disk_is_reported_as_one(tmp_path, config, call):
    """P10: DiskFullError, whether the attempts or the time are used up."""
    root = open_root(tmp_path / "log", files=SmallDiskFiles)
    root.create_topic("one", 1, TopicConfig())
    with Producer(root, **config) as producer:
        producer.send("one", b"1").result()
        root.context.files.room = 0
        in_batch = call == "send_batch"
        value = bytes(20_000)
        future = producer.send_batch("one", [value]) if in_batch else producer.send("one", value)
        error = exception_of(future)
        assert type(error) is DiskFullError and error.errno == errno.ENOSPC
        assert "not written after" in str(error)
        root.context.files.room = None
        assert producer.send("one", b"2").result().offset == 1
    assert healthy(root)
    root.close()


@pytest.mark.parametrize("made_again", [False, True])
@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_topic_that_another_process_deletes_stops_no_flush_and_no_close(
    tmp_path, durability, made_again
):
    """Acknowledged records stay so; other records of that topic fail, other topics are written."""

    def delete():
        with embedlog.open(tmp_path / "log", maintenance=False) as other:
            other.delete_topic("gone")
            if made_again:
                other.create_topic("gone", 1)

    log = embedlog.open(
        tmp_path / "log", maintenance=False, durability=durability, auto_create_topics=False
    )
    log.create_topic("gone", 1)
    log.create_topic("stays", 2)
    with log.producer(linger_ms=10_000) as producer:
        written = producer.send("gone", b"1")
        written.result()
        for partition in range(2):
            producer.send("stays", b"1", partition=partition).result()
        lost = producer.send("gone", b"2")
        others = [producer.send("stays", b"2", partition=n) for n in range(2)]
        assert forks.run(delete).finding() is None
        log.flush()
        assert written.succeeded() and all(future.succeeded() for future in others)
        if made_again:
            assert lost.value.offset == 0
        else:
            assert type(lost.exception) is UnknownTopicOrPartitionError
        assert not log.root.partition("stays", 0).dirty
    log.close()
    with embedlog.open(tmp_path / "log", maintenance=False) as again:
        assert [record.value for record in again.topic("stays")] == [b"1", b"2"] * 2


def test_a_partition_must_be_a_number_and_a_sequence_too(root, producer):
    """Typed errors, and nothing is written; True is not accepted as 1."""
    producer.send("four", b"v", partition=1).result()
    for invalid in (True, "1", 1.0):
        for call in (producer.send, producer.send_batch):
            with pytest.raises(InvalidPartitionError, match="must be an int"):
                call("four", [b"v"] if call == producer.send_batch else b"v", partition=invalid)
        with pytest.raises(InvalidPartitionError):
            producer.last_sequence("four", invalid)
        with pytest.raises(InvalidPartitionError):
            root.partition("four", invalid)
    for invalid in (-1, True, "0", 1.5):
        with pytest.raises(InvalidRecordError, match="sequence must be"):
            producer.send_batch("one", [b"v"], sequence=invalid)
    assert values(root.partition("one", 0)) == [] and len(values(root.partition("four", 1))) == 1


@pytest.mark.parametrize("general", [False, True], ids=["plain", "headers"])
def test_a_send_that_is_interrupted_shifts_no_column(root, producer, general):
    """Ctrl-C may come between any two lines: the next record still has its own key."""
    stop = lines = 0
    options = {"headers": [("h", b"1")], "partition": 3} if general else {}

    def trace(frame, event, argument):
        return trace_line if frame.f_code.co_name == "send" else None

    def trace_line(frame, event, argument):
        nonlocal lines
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and ("append(" in text or "[row] = " in text or "future = " in text):
            lines += 1
            if lines == stop:
                raise KeyboardInterrupt
        return trace_line

    for stop in range(1, 8):  # noqa: B007 - the tracer reads it
        lines = 0
        sys.settrace(trace)
        try:
            producer.send("four", b"interrupted", b"other", **options)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        metadata = producer.send("four", b"mine", b"own").result()
        row = rows(root.partition("four", metadata.partition), metadata.offset)[0]
        assert row[2:] == (b"own", b"mine", [])
        assert metadata.partition == partition_for_key(b"own", 4)
    producer.flush()
    for n in range(4):
        for _, _, key, value, headers in rows(root.partition("four", n)):
            assert (key, value) in {(b"own", b"mine"), (b"other", b"interrupted")}
            assert (headers == [("h", b"1")] and n == 3) or not general or value == b"mine"


def test_a_truncated_log_does_not_stop_the_producer_for_good(root, producer):
    """G16, A34: the sequence numbers are truncated too: one batch fails, the next is written."""
    for n in range(3):
        producer.send("one", b"%d" % n).result()
    root.partition("one", 0).truncate_to(1)
    with pytest.raises(OutOfOrderSequenceError):
        producer.send("one", b"x").result()

    assert producer.send("one", b"y").result().offset == 1


# Identity


def test_a_named_producer_fences_the_older_one(root):
    """G17, G21: the first append of the newer one fences the older one for good."""
    old, new = Producer(root, producer_name="p"), Producer(root, producer_name="p")
    assert old.send("one", b"1").result().offset == 0
    assert new.send("one", b"2").result().offset == 1
    with pytest.raises(InvalidProducerEpochError):
        old.send("one", b"3").result()
    with pytest.raises(InvalidProducerEpochError):
        old.send_batch("one", [b"3"])
    assert new.send("one", b"4").result().offset == 2
    old.close()
    new.close()
    assert values(root.partition("one", 0)) == [b"1", b"2", b"4"]


def test_a_named_producer_that_comes_back_never_takes_new_records_for_old(root):
    """G15-G17: it continues the sequence numbers of the last producer of its name."""
    for n in range(4):
        with Producer(root, producer_name="p") as producer:
            assert producer.send("one", b"%d" % n).result().offset == n


def test_a_batch_that_is_sent_again_is_answered_with_its_first_offsets(tmp_path):
    """G16: also after a restart with the same producer_name; nothing is appended."""
    batch = [b"%d" % n for n in range(10)]
    root = open_root(tmp_path / "log")
    old = Producer(root, producer_name="loader")
    (written,) = old.send_batch("one", batch, sequence=1000).result()
    (resent,) = old.send_batch("one", batch, sequence=1000).result()
    root.close()

    root = open_root(tmp_path / "log")
    fenced = Producer(root, producer_name="loader")
    new = Producer(root, producer_name="loader")
    fenced._batcher.identity()
    (repeated,) = new.send_batch("one", batch, sequence=1000).result()

    assert (written.base_offset, written.count, written.duplicate) == (0, 10, False)
    assert resent[:4] == repeated[:4] == written[:4]
    assert resent.duplicate and repeated.duplicate
    assert new.last_sequence("one") == 1009
    for gap in (1011, 990, 1005):
        with pytest.raises(OutOfOrderSequenceError):
            new.send_batch("one", batch, sequence=gap).result()
    with pytest.raises(InvalidProducerEpochError):
        fenced.send_batch("one", batch, sequence=1010).result()
    assert new.send_batch("one", batch, sequence=1010).result()[0].base_offset == 10
    assert values(root.partition("one", 0)) == batch + batch
    new.close()
    fenced.close()
    root.close()


@pytest.mark.parametrize("whole", [True, False], ids=["all of it", "a part of it"])
def test_a_large_load_whose_answer_was_lost_is_taken_up(root, whole):
    """G16: batches older than those that the log remembers are reported without offsets."""
    batch = [b"%05d" % n for n in range(3000)]
    with Producer(root, producer_name="p", batch_size=2100) as producer:
        first_ranges = producer.send_batch(
            "one", batch if whole else batch[:2000], sequence=0
        ).result()
    with Producer(root, producer_name="p", batch_size=2100) as producer:
        ranges = producer.send_batch("one", batch, sequence=0).result()

    assert len(first_ranges) > 5
    assert sum(appended.count for appended in ranges) == 3000
    assert ranges[0].duplicate and ranges[0].base_offset is None
    assert values(root.partition("one", 0)) == batch


def test_numbered_records_go_to_one_partition(root, producer):
    """Sequence numbers have no gaps within a partition."""
    with pytest.raises(IllegalStateError):
        producer.send_batch("four", [b"v"], [b"k"], sequence=0)
    assert producer.send_batch("four", [b"v"], [b"k"], partition=2, sequence=7).result()
    assert producer.last_sequence("four", 2) == 7
    assert producer.last_sequence("four", 1) is None


def test_a_killed_producer_leaves_numbers_that_the_next_goes_on_with(tmp_path):
    """P1, G18: the sequence numbers are stored in the log."""
    send = "producer.send_batch('t', [b'a', b'b'], sequence=5).result()"
    assert run_producer(tmp_path, "producer_name='p'", send, "os.kill(os.getpid(), 9)") == -9
    root = open_root(tmp_path / "log")
    with Producer(root, producer_name="p") as producer:
        assert producer.last_sequence("t") == 6
        (resent,) = producer.send_batch("t", [b"a", b"b"], sequence=5).result()
        assert resent.duplicate and resent.base_offset == 0
    assert values(root.partition("t", 0)) == [b"a", b"b"]
    root.flush()  # also what only the killed process wrote: it was just acknowledged
    assert root.partition("t", 0).tail().durable_offset == 2
    root.close()


# Batches and tables


@pytest.mark.parametrize("count", [5000, row_batches.MAX_LIST_ROWS + 1])
@pytest.mark.parametrize("equal_lengths", [True, False])
def test_a_batch_is_split_by_key_and_by_size(root, count, equal_lengths):
    """G1: each partition has the records of its keys, in the order of the call."""
    keys = [b"key-%d" % ((n % 101) + 100 * equal_lengths) for n in range(count)]
    batch = [b"%06d" % n if equal_lengths else b"%d" % n for n in range(count)]
    with Producer(root, batch_size=4096) as producer:
        future = producer.send_batch("four", batch, keys)
        ranges = future.result()
    assert future.written() == ranges
    expected = [[] for _ in range(4)]
    for key, value in zip(keys, batch, strict=True):
        expected[partition_for_key(key, 4)].append(value)
    assert values_by_partition(root, "four") == expected
    assert sum(appended.count for appended in ranges) == count
    assert all(appended.next_offset == appended.base_offset + appended.count for appended in ranges)


@pytest.mark.parametrize(
    ("count", "config", "limit"),
    [
        (row_batches.MAX_LIST_ROWS, {}, 256 << 10),
        (row_batches.MAX_LIST_ROWS + 1, {}, COLUMN_BYTES),
        (row_batches.MAX_LIST_ROWS + 1, {"batch_size": 64 << 10}, 64 << 10),
    ],
)
def test_batches_of_keyed_rows_are_as_large_as_asked_for(root, count, config, limit):
    """G6: batch_size is used if it is set, or for few rows; otherwise batches are larger."""
    keys = [b"key-%d" % (n % 101) for n in range(count)]
    with Producer(root, **config) as producer:
        producer.send_batch("four", [bytes(600)] * count, keys)
    log = root.partition("four", 0)
    reader, sizes = log.reader(0), []
    while batches := reader.read():
        sizes += [batch.size for batch in batches]

    assert len(sizes) > 1
    assert limit * 0.9 < max(sizes) <= limit + HEAD_BYTES


@pytest.mark.parametrize("count", [1, 2, 300])
def test_rows_go_by_key_with_all_they_have(root, producer, count):
    """G1, G3: records keep timestamps and headers; those without a key share one partition."""
    keys = [None if n % 3 == 1 else b"key-%d" % n for n in range(count)]
    headers = [[("n", b"%d" % n)] if n % 2 else None for n in range(count)]
    batch = [None if n % 7 == 5 else b"%d" % n for n in range(count)]

    producer.send_batch("four", batch, keys, headers, list(range(count))).result()

    records = {
        timestamp: (partition, key, value, row_headers)
        for partition in range(4)
        for _, timestamp, key, value, row_headers in rows(root.partition("four", partition))
    }
    assert sorted(records) == list(range(count))
    for n, (partition, key, value, row_headers) in records.items():
        assert (key, value, row_headers or None) == (keys[n], batch[n], headers[n])
        assert key is None or partition == partition_for_key(key, 4)
    assert len({partition for partition, key, *_ in records.values() if key is None}) <= 1


@pytest.mark.parametrize("topic", ["one", "four"])
@pytest.mark.parametrize("count", [50, 500])
@pytest.mark.parametrize("partitioner", [None, "round_robin"])
def test_nothing_of_a_batch_with_a_strange_value_is_written(root, topic, count, partitioner):
    """Other partitions get none of its records either."""
    keys = [b"key-%d" % n for n in range(count)]
    for invalid in ("text", 7):
        for row in range(0, count, count // 5):
            with Producer(root, batch_size=4000, partitioner=partitioner) as producer:
                batch = [b"v"] * count
                batch[row] = invalid
                with pytest.raises(SerializationError):
                    producer.send_batch(topic, batch, keys)
                producer.flush()

    assert not any(values_by_partition(root, topic))


def test_an_empty_batch_is_nothing(root, producer):
    """A2: it uses no offset and raises no error."""
    assert producer.send_batch("one", []).result() == []
    assert producer.append_table("one", pa.table({"value": pa.array([], pa.binary())})).done()


def test_a_batch_keeps_everything_of_its_records(root, producer):
    """A3: keys, headers and timestamps are one list each."""
    producer.send_batch(
        "one", [b"a", None], [None, b"k"], headers=[None, [("h", b"1")]], timestamps=[5, 6]
    )
    assert rows(root.partition("one", 0)) == [
        (0, 5, None, b"a", []),
        (1, 6, b"k", None, [("h", b"1")]),
    ]
    with pytest.raises(ValueError, match="keys"):
        producer.send_batch("one", [b"a"], [b"k", b"l"])


def test_a_batch_comes_after_what_was_sent_before(root):
    """G12: send and send_batch share one order."""
    with Producer(root, **LINGERING) as producer:
        producer.send("one", b"1")
        producer.send_batch("one", [b"2"])
        producer.send("one", b"3")
    assert values(root.partition("one", 0)) == [b"1", b"2", b"3"]


def tables():
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    columns = {"value": ["a", "bb", None], "key": ["k", "l", "m"]}
    table = pa.table(columns)
    return [
        table,
        table.to_batches()[0],
        table.to_reader(),
        pa.table({"value": pa.array(columns["value"], pa.large_binary()), "key": table["key"]}),
        pa.table({"value": table["value"].dictionary_encode(), "key": table["key"]}),
        pandas.DataFrame(columns),
        polars.DataFrame(columns),
    ]


@pytest.mark.parametrize("kind", range(7))
@pytest.mark.parametrize("topic", ["one", "four"])
def test_tables_of_other_libraries_can_be_appended(root, producer, kind, topic):
    """Tables of pyarrow, pandas and Polars: text becomes UTF-8 bytes, null stays null."""
    producer.append_table(topic, tables()[kind], timestamp=None).result()

    written = [row for n in range(root.partitions(topic)) for row in rows(root.partition(topic, n))]
    assert sorted((key, value) for _, _, key, value, _ in written) == [
        (b"k", b"a"),
        (b"l", b"bb"),
        (b"m", None),
    ]


def test_the_columns_of_a_table_are_named(root, producer):
    """Key, value and timestamp columns may have any name; timestamps of any unit become ms."""
    table = pa.table(
        {
            "what": ["x", "y"],
            "when": pa.array([5_000_000, 6_000_001], pa.timestamp("us")),
            "who": [b"a", b"b"],
        }
    )
    producer.append_table("one", table, key="who", value="what", timestamp="when")

    written = [row[1:4] for row in rows(root.partition("one", 0))]
    assert written == [(5000, b"a", b"x"), (6000, b"b", b"y")]
    for invalid in ({}, {"value": "nothing"}, {"value": "when"}, {"value": "what", "key": "none"}):
        with pytest.raises(SerializationError):
            producer.append_table("one", table, **invalid)
    with pytest.raises(SerializationError):
        producer.append_table("one", object())


def test_a_large_table_is_cut_into_batches_by_size(root):
    """No batch is over batch_size, and each row is written once, in order."""
    batch = [b"%07d" % n for n in range(20_000)]
    table = pa.concat_tables([pa.table({"value": batch[:777]}), pa.table({"value": batch[777:]})])
    with Producer(root, batch_size=30_000) as producer:
        ranges = producer.append_table("one", table).result()
    assert values(root.partition("one", 0)) == batch
    assert max(appended.count for appended in ranges) * 16 < 30_000
    assert len(ranges) < 20_000 * 24 / 30_000 + 3


def test_a_batch_without_keys_is_not_too_large_because_of_its_null_bitmap(root, monkeypatch):
    """A4: the size counts the null bitmap, so that no batch is encoded and then split."""
    encoded = []
    encode = row_batches.encode

    def recorded_encode(*args, **options):
        encoded.append(encode(*args, **options))
        return encoded[-1]

    monkeypatch.setattr(row_batches, "encode", recorded_encode)
    with Producer(root) as producer:
        ranges = producer.append_table("one", pa.table({"value": [b"v" * 9] * 200_000})).result()
    assert len(encoded) == len(ranges)
    assert max(batch.size for batch in encoded) > COLUMN_BYTES * 0.9


def test_a_table_is_written_in_appends_of_limited_size(root, monkeypatch):
    """No append writes more than WRITE_BYTES; nothing is lost between two appends."""
    sizes = []
    write = Files.write

    def recorded_write(self, fd, buffers, position):
        sizes.append(sum(map(len, buffers)))
        return write(self, fd, buffers, position)

    monkeypatch.setattr(Files, "write", recorded_write)
    batch = [b"%0999d" % n for n in range(6000)]
    with Producer(root) as producer:
        ranges = producer.append_table("one", pa.table({"value": batch})).result()

    assert [appended.base_offset for appended in ranges] == sorted(
        appended.base_offset for appended in ranges
    )
    assert values(root.partition("one", 0)) == batch
    assert WRITE_BYTES // 2 < max(sizes) <= WRITE_BYTES


# The end


def test_close_writes_the_rest_and_can_be_repeated(root):
    """G10: close drains and is idempotent; a later send raises ClosedError."""
    producer = Producer(root, **LINGERING)
    future = producer.send("one", b"v")
    producer.close()
    producer.close()

    assert future.result().offset == 0
    for call in (producer.send, producer.append_table):
        with pytest.raises(ClosedError):
            call("one", b"v")
    with pytest.raises(ClosedError):
        producer.send_batch("new", [b"v"])


def test_close_with_timeout_0_fails_the_rest(root):
    """G10: close(0) fails every future, and writes nothing more."""
    producer = Producer(root, **LINGERING)
    future, errors = producer.send("one", b"v"), []
    future.add_errback(errors.append)
    producer.close(0)

    with pytest.raises(ClosedError, match="before the record was written"):
        future.result()
    assert errors == [future.exception]
    assert values(root.partition("one", 0)) == []


def test_close_gives_up_on_a_partition_that_is_held(root):
    """G10: close returns after its timeout, and records that are not written fail."""
    producer = Producer(root, **FAST)
    with LockedPartition(root, "one"):
        future = producer.send("one", b"v")
        start = time.monotonic()
        producer.close(0.1)
        assert time.monotonic() - start < patient(2)
        with pytest.raises(EmbedlogError):
            future.result(1)


def test_a_producer_that_was_not_closed_is_flushed_with_a_warning(root):
    """A ResourceWarning states the number of unsent records when the producer is collected."""
    producer = Producer(root, **LINGERING)
    producer.send("one", b"v")
    with pytest.warns(ResourceWarning, match="1 record unsent") as caught:  # noqa: PT031
        del producer
        gc.collect()
        # The producer's thread may hold a reference until it has finished its round.
        forks.until(lambda: len(caught))
    assert values(root.partition("one", 0)) == [b"v"]


def test_a_producer_without_unsent_records_goes_quietly(root):
    """No warning is issued, and its thread ends."""
    producer = Producer(root)
    producer.send("one", b"v").result()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del producer
        gc.collect()
    forks.until(
        lambda: "embedlog-producer" not in {thread.name for thread in threading.enumerate()}
    )


def test_a_thread_that_is_stopped_as_it_falls_asleep_ends(root, monkeypatch):
    """The event that would wake it was set just before the thread cleared it."""
    monkeypatch.setattr(batcher, "QUIET_ROUNDS", 1)
    stopped = Batcher(None, root, {})
    clear = stopped._event.clear

    def stop_first():
        stopped.stop_thread(0)
        clear()

    monkeypatch.setattr(stopped._event, "clear", stop_first)
    # `start_thread` would also set the event after the thread has begun.
    arguments = weakref.ref(stopped), stopped._event
    thread = threading.Thread(target=batcher._run, args=arguments, daemon=True)
    thread.start()
    thread.join(patient(10))
    assert not thread.is_alive()


def test_what_is_unsent_at_the_exit_is_flushed(tmp_path):
    """A script that does not close its producer loses nothing."""
    send = "for n in range(100): producer.send('t', b'%d' % n)"
    assert run_producer(tmp_path, "linger_ms=60000, delivery_timeout_ms=120000", send) == 0
    root = open_root(tmp_path / "log")
    assert len(values(root.partition("t", 0))) == 100
    root.close()


def test_a_forked_child_begins_without_records_or_identity(root):
    """P18: the parent writes what was sent before; the child has an identity of its own."""
    with Producer(root, **LINGERING) as producer:
        future = producer.send("one", b"parent")
        identity = producer._batcher.identity()

        def check_child():
            assert producer._batcher.identity() != identity and future.failed()
            assert producer.send("one", b"child").result(patient(5)).offset == 0

        forks.call(check_child)
        assert future.result(patient(5)).offset == 1
    assert values(root.partition("one", 0)) == [b"child", b"parent"]


def test_a_record_that_is_being_written_at_a_fork_is_the_parents(root, monkeypatch):
    """P18: its future fails in the child, also on the fast path."""
    append, failed_in_child = PartitionLog.append, []

    def fork_and_append(*args, **options):
        monkeypatch.undo()
        failed_in_child.append(forks.call(lambda: future.failed()))
        return append(*args, **options)

    with Producer(root, linger_ms=10_000) as producer:
        producer.send("one", b"1").result()
        future = producer.send("one", b"2")
        monkeypatch.setattr(PartitionLog, "append", fork_and_append)
        assert future.result().offset == 1
    assert failed_in_child == [True]


def test_a_producer_is_pickled_as_its_root_and_settings():
    """A worker opens the root again and has its own producer."""

    class PickledRoot(OpenedRoot):
        def __reduce__(self):
            return OpenedRoot, ()

    unpickled = pickle.loads(pickle.dumps(Producer(PickledRoot(), linger_ms=7)))
    assert isinstance(unpickled.root, OpenedRoot) and unpickled.config.linger_ms == 7


class OpenedRoot(Root):
    durability, closed, path = "os", False, "x"

    def __init__(self):
        pass

    @staticmethod
    def clock():
        return 0


def test_with_fsync_a_result_means_durable(tmp_path):
    """P4: with acks=all a result is as durable as the durability of the log."""
    root = open_root(tmp_path / "log", durability="fsync")
    with Producer(root) as producer:
        producer.send("t", b"v").result()
        log = root.partition("t", 0)
        assert log.tail().durable_offset == 1
        futures = [producer.send("t", b"%d" % n) for n in range(50)]
        producer.flush()
        assert futures[-1].result().offset == 50
    with Producer(root, acks=1) as producer:
        producer.send("t", b"v").result()
        assert log.tail().durable_offset == 51
    root.close()


def test_a_record_that_is_written_but_not_flushed_in_time_fails_as_that(tmp_path, monkeypatch):
    """G11: the message says that it is in the log, so that a program does not send it again."""
    root = open_root(tmp_path / "log", durability="fsync")
    root.create_topic("t", 1, TopicConfig())

    def busy(*_):
        raise LockTimeoutError("another process holds the lock", path="locks/live")

    with Producer(root, request_timeout_ms=100, delivery_timeout_ms=300) as producer:
        with monkeypatch.context() as patched:
            patched.setattr("embedlog.partition.flush.flush_to", busy)
            with pytest.raises(TimeoutError, match=r"not flushed after .* is in the log"):
                producer.send("t", b"1").result()
        root.flush()
        producer.send("t", b"2").result()

    assert values(root.partition("t", 0)) == [b"1", b"2"]
    root.close()
