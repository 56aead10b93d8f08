"""Settings that another process alters apply to the next call of open handles (C10)."""

from __future__ import annotations

import os

import pyarrow as pa
import pytest
from support.children import in_child
from support.clock import START
from support.patience import patient
from support.roots import encoded, fill, values
from support.tiers import sample

import embedlog
from embedlog import index
from embedlog.batch.limits import kafka_size
from embedlog.config import GroupConfig, TopicConfig
from embedlog.dead_letter_queue import ensure_topic
from embedlog.errors import (
    InvalidConfigError,
    InvalidRecordError,
    MirroredTopicError,
    RecordBatchTooLargeError,
    RecordTooLargeError,
)
from embedlog.partition.state import max_segment_ms
from embedlog.record import TopicPartition
from embedlog.schemas.statistics import of_batch

SIZE = encoded(b"v0").size
DAY = 86_400_000
ZERO = TopicPartition("t", 0)

ONLY_DEFAULT = {"segment.index.bytes", "preallocate"}
"""Only the default is accepted, so there is nothing to alter."""
OF_REPLICAS = {
    "min.insync.replicas",
    "replica.lag.time.max.ms",
    "unclean.leader.election.enable",
}
"""They mean something in a log over several directories only: see `test_replicas`."""


@pytest.fixture
def log(tmp_path, clock):
    """An open log with a topic whose one partition was appended to, so every cache is filled."""
    with embedlog.open(tmp_path / "log", clock=clock, maintenance=False) as log:
        log.create_topic("t", config={"file.delete.delay.ms": 0})
        fill(log.partition("t", 0), 3)
        yield log
        assert log.housekeeping.verify() == []


def alter(log, **settings):
    """Change settings of the topic as another process does: through a handle of its own."""
    settings = {name.replace("_", "."): value for name, value in settings.items()}
    path, pid = log.path, os.getpid()

    def work():
        assert os.getpid() != pid
        with embedlog.open(path, maintenance=False) as other:
            other.alter_topic("t", settings)

    in_child(work)


def add(log, count=1, **options):
    """Append records one by one, each through the fast path of an append with acknowledgement."""
    partition = log.partition("t", 0)
    first = partition.tail().log_end_offset
    fill(partition, count, first=first, **options)
    return partition


def segments(partition):
    partition.refresh()
    return len(partition.segments)


# What an append takes from the settings, in a handle that is open


def check_segment_bytes(log, clock):
    alter(log, segment_bytes=2 * SIZE)
    partition = add(log)
    assert segments(partition) == 2
    add(log, 2)
    assert segments(partition) == 3
    alter(log, segment_bytes=None)
    add(log, 5)
    assert segments(partition) == 3


def check_segment_max_offset_span(log, clock):
    before = segments(add(log))
    alter(log, segment_max_offset_span=1)
    assert segments(add(log)) == before + 1


def check_segment_ms(log, clock):
    alter(log, segment_ms=2)
    partition = add(log)
    assert segments(partition) == 2


def check_segment_jitter_ms(log, clock):
    partition = log.partition("t", 0)
    alter(log, segment_ms=1 << 40, segment_jitter_ms=1 << 40)
    longest = max_segment_ms(log.root.topic("t").config, partition.active_segment)
    assert longest < 1 << 40
    partition.append([encoded(b"x", at=START + longest)])
    assert segments(partition) == 1
    partition.append([encoded(b"x", at=START + longest + 1)])
    assert segments(partition) == 2


def check_index_interval_bytes(log, clock):
    partition = log.partition("t", 0)
    alter(log, index_interval_bytes=0)
    add(log, 3)
    live = log.root.context.live
    entries = live.read(
        lambda txn: list(index.entries(txn, partition.key, partition.active_segment.id))
    )
    assert [entry.offset for entry in entries] == [3, 4, 5]


def check_flush_messages(log, clock):
    alter(log, flush_messages=1)
    partition = add(log)
    assert partition.tail().durable_offset == 4


def check_flush_ms(log, clock):
    alter(log, flush_ms=0)
    partition = add(log)
    assert partition.tail().durable_offset == 4


def check_max_message_bytes(log, clock):
    size = kafka_size(encoded(b"v0"))
    alter(log, max_message_bytes=size - 1)
    with pytest.raises(RecordTooLargeError):
        add(log)
    alter(log, max_message_bytes=size)
    add(log)


def check_message_timestamp_type(log, clock):
    alter(log, message_timestamp_type="LogAppendTime")
    clock.advance(77)
    (receipt,) = log.partition("t", 0).append([encoded(b"x", at=5)])
    assert receipt.timestamp == START + 77
    alter(log, message_timestamp_type="CreateTime")
    (receipt,) = log.partition("t", 0).append([encoded(b"x", at=5)])
    assert receipt.timestamp is None


def check_message_timestamp_before_max_ms(log, clock):
    alter(log, message_timestamp_before_max_ms=10)
    with pytest.raises(InvalidRecordError):
        log.partition("t", 0).append([encoded(b"x", at=START - 11)])


def check_message_timestamp_after_max_ms(log, clock):
    alter(log, message_timestamp_after_max_ms=10)
    with pytest.raises(InvalidRecordError):
        log.partition("t", 0).append([encoded(b"x", at=START + 11)])


def check_cleanup_policy(log, clock):
    alter(log, cleanup_policy="compact")
    with pytest.raises(InvalidRecordError):
        add(log)
    alter(log, cleanup_policy="delete")
    add(log)


def check_producer_id_expiration_ms(log, clock):
    partition = log.partition("t", 0)
    partition.append([encoded(b"x", producer=(7, 0, 0))])
    alter(log, producer_id_expiration_ms=10)
    clock.advance(11)
    partition.roll()
    partition.append([encoded(b"x", producer=(7, 0, 5))])  # accepted: the producer is new (G17)


# What retention and compaction take from the settings


def due_by_age(log, clock):
    log.partition("t", 0).roll()
    clock.advance(DAY)


def check_retention_ms(log, clock):
    due_by_age(log, clock)
    assert log.housekeeping.run()["retention"] == []
    alter(log, retention_ms=DAY - 10)
    assert [result.start_offset for result in log.housekeeping.run()["retention"]] == [3]


def check_key_serializer(log, clock):
    with log.producer() as producer:
        producer.send("t", b"v", key=b"k").result()
        alter(log, key_serializer="str")
        producer.send("t", b"v", key="l").result()
    assert [record.key for record in log.topic("t")[-2:]] == ["k", "l"]


def check_value_serializer(log, clock):
    with log.producer() as producer:
        producer.send("t", b"1").result()
        alter(log, value_serializer="json")
        producer.send("t", [2]).result()
    assert [record.value for record in log.topic("t")[-2:]] == [1, [2]]


def check_retention_clock(log, clock):
    log.delete_records({TopicPartition("t", 0): -1})
    alter(log, retention_ms=7 * DAY)
    log.partition("t", 0).append([encoded(b"old", at=START - 30 * DAY)])
    assert log.housekeeping.run()["retention"] == []
    alter(log, retention_clock="record")
    assert [result.segments for result in log.housekeeping.run()["retention"]] == [1]


def check_retention_bytes(log, clock):
    alter(log, segment_bytes=SIZE)
    add(log, 3)
    assert log.housekeeping.run()["retention"] == []
    alter(log, retention_bytes=2 * SIZE)
    assert log.housekeeping.run()["retention"] != []


def check_retention_topic_bytes(log, clock):
    alter(log, segment_bytes=SIZE)
    add(log, 3)
    assert log.housekeeping.run()["retention"] == []
    alter(log, retention_topic_bytes=2 * SIZE)
    assert log.housekeeping.run()["retention"] != []


def check_retention_min_consumed(log, clock):
    due_by_age(log, clock)
    log.groups["g"].reset_offsets("earliest", topics="t", dry_run=False)
    alter(log, retention_ms=10, retention_min_consumed="g")
    assert log.housekeeping.run()["retention"] == []
    alter(log, retention_min_consumed=None)
    assert log.housekeeping.run()["retention"] != []


def check_retention_bytes_hard(log, clock):
    due_by_age(log, clock)
    alter(log, retention_ms=10)
    with log.housekeeping.hold("all", {ZERO: 0}):
        assert log.housekeeping.run()["retention"] == []
        alter(log, retention_bytes_hard=0)
        assert log.housekeeping.run()["retention"] != []


def check_file_delete_delay_ms(log, clock):
    partition = log.partition("t", 0)
    alter(log, file_delete_delay_ms=3_600_000)
    path = log.root.context.files.path(partition.path_of(partition.active_segment))
    log.delete_records({ZERO: -1})
    assert os.path.exists(path)
    add(log)
    alter(log, file_delete_delay_ms=0)
    path = log.root.context.files.path(partition.path_of(partition.active_segment))
    log.delete_records({ZERO: -1})
    assert not os.path.exists(path)


def dirty(log, **settings):
    """Set the topic to compaction, and write one key twice, into sealed segments."""
    alter(log, cleanup_policy="compact", **settings)
    partition = log.partition("t", 0)
    log.delete_records({ZERO: -1})
    for number in range(2):
        partition.append([encoded(b"%d" % number, keys=[b"k"])])
        partition.roll()
    return partition


def compacted(log):
    return [result.records_kept for result in log.housekeeping.run()["compaction"] if result.passes]


def check_min_cleanable_dirty_ratio(log, clock):
    dirty(log, min_cleanable_dirty_ratio=1.0)
    assert compacted(log) == []
    alter(log, min_cleanable_dirty_ratio=0.1)
    assert compacted(log) == [1]


def check_min_compaction_lag_ms(log, clock):
    dirty(log, min_compaction_lag_ms=1_000)
    assert compacted(log) == []
    alter(log, min_compaction_lag_ms=0)
    assert compacted(log) == [1]


def check_max_compaction_lag_ms(log, clock):
    dirty(log, min_cleanable_dirty_ratio=1.0)
    clock.advance(1_000)
    assert compacted(log) == []
    alter(log, max_compaction_lag_ms=10)
    assert compacted(log) == [1]


def check_delete_retention_ms(log, clock):
    partition = dirty(log, min_cleanable_dirty_ratio=0.1)
    partition.append([encoded(None, keys=[b"k"])])
    partition.roll()
    alter(log, delete_retention_ms=1_000)
    log.housekeeping.run()
    assert values(partition) == [None]
    clock.advance(1_001)
    partition.append([encoded(b"x", keys=[b"other"])])
    partition.roll()
    log.housekeeping.run()
    assert values(partition) == [b"x"]


# What an open producer takes from the settings


def check_compression_type(log, clock):
    partition = log.partition("t", 0)
    with log.producer() as producer:
        for codec, compressed in (
            ("lz4", True),
            ("producer", False),
            ("zstd", True),
            ("none", False),
        ):
            alter(log, compression_type=codec)
            offset = producer.send("t", b"x" * 1000).result().offset
            assert [batch.is_compressed for batch in partition.reader(offset).read(1 << 20)] == [
                compressed
            ]


def check_rebatch_min_rows(log, clock):
    partition = log.partition("t", 0)
    for _ in range(2):
        add(log, 2)
        partition.roll()
        alter(log, rebatch_min_rows=5)
    assert len(log.housekeeping.run()["rebatch"]) == 1
    alter(log, rebatch_min_rows=0)
    add(log, 2)
    partition.roll()
    assert log.housekeeping.run()["rebatch"] == []


def check_statistics_columns(log, clock):
    schema = pa.schema([("s", pa.string()), ("n", pa.int64())])
    log.create_topic("typed", schema=schema)
    partition, producer = log.root.partition("typed", 0), log.producer()
    for columns in ("", "s", "none"):
        log.alter_topic("typed", {"statistics.columns": columns})
        producer.send_batch("typed", [{"s": "a", "n": 1}]).result()
    known = [len(of_batch(batch).ranges) for batch in partition.reader(0).read()]
    assert known == [2, 3, 0]  # That of the timestamp, too.


def check_key_index_enable(log, clock):
    partition = log.partition("t", 0)
    for enabled, built in ((None, 0), (True, 1), (False, 0), (True, 1)):
        alter(log, key_index_enable=enabled)
        partition.append([encoded(b"x", keys=[b"k"])])
        partition.roll()
        assert bool(log.housekeeping.run()["keys"]) is bool(built)
        assert log.topic("t").get(b"k") == b"x"


def check_audit(log, clock):
    with log.producer(client_id="open") as producer:
        producer.send("t", b"before").result()
        alter(log, audit=True)
        producer.send("t", b"after").result()
    rows = log.audit("t", "1h", tiers=["producer"]).rows
    counts = [row.counts for row in rows if row.who.client == "open"]
    assert sum(count.records - count.unreported for count in counts) == 1


def check_errors_deadletterqueue_group_enable(log, clock):
    log.create_topic("origin")
    config = GroupConfig.parse({"errors.deadletterqueue.topic.name": "t"})
    with pytest.raises(InvalidConfigError, match="not one for dead letters"):
        ensure_topic(log.root, config, ["origin"])
    alter(log, errors_deadletterqueue_group_enable=True)
    assert ensure_topic(log.root, config, ["origin"]) == log.topic("t").partitions


def check_mirror_source(log, clock):
    with log.producer() as producer:
        producer.send("t", b"x").result()
        alter(log, mirror_source="north/t")
        with pytest.raises(MirroredTopicError):
            producer.send("t", b"refused").result()
        alter(log, mirror_source=None)
        producer.send("t", b"y").result()


CHECKS = {
    name.removeprefix("check_").replace("_", "."): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


@pytest.mark.parametrize("setting", sample([*CHECKS], 12))
def test_an_altered_setting_holds_from_the_next_call_on(log, clock, setting):
    """Without a reopen: the new value is applied at once."""
    CHECKS[setting](log, clock)


def test_every_setting_of_a_topic_is_covered():
    """A new setting needs a check here."""
    names = {name.replace("_", ".") for name in TopicConfig.__settings__}
    assert CHECKS.keys() | ONLY_DEFAULT | OF_REPLICAS == names


SENDS = {
    "singly": lambda producer, value, key: producer.send("t", value, key=key).result(patient(10)),
    "many": lambda producer, value, key: [
        future.result(patient(10))
        for future in [producer.send("t", value, key=key) for _ in range(3)]
    ],
    "lists": lambda producer, value, key: producer.send_batch("t", [value], [key]).result(
        patient(10)
    ),
}


@pytest.mark.parametrize("send", SENDS.values(), ids=SENDS)
class TestAProducerThatIsOpen:
    """In each way of sending, from the first record after the alteration."""

    def test_obeys_the_limit_of_a_message(self, log, send):
        """A4, G7."""
        with log.producer() as producer:
            send(producer, b"x" * 5_000, b"k")
            alter(log, max_message_bytes=2_000)
            with pytest.raises(RecordTooLargeError):
                send(producer, b"x" * 5_000, b"k")
            send(producer, b"x" * 500, b"k")
            alter(log, max_message_bytes=10_000)
            send(producer, b"x" * 5_000, b"k")

    def test_obeys_the_size_of_segments(self, log, send):
        """A4, A11."""
        with log.producer() as producer:
            send(producer, b"x" * 5_000, b"k")
            alter(log, segment_bytes=2_000)
            with pytest.raises((RecordTooLargeError, RecordBatchTooLargeError)):
                send(producer, b"x" * 5_000, b"k")
            send(producer, b"x" * 500, b"k")
        assert segments(log.partition("t", 0)) > 1

    def test_needs_keys_while_the_topic_is_compacted(self, log, send):
        """A6: also if every record is refused, so that none reaches the log."""
        with log.producer() as producer:
            send(producer, b"x", None)
            alter(log, cleanup_policy="compact")
            for _ in range(2):
                with pytest.raises(InvalidRecordError):
                    send(producer, b"x", None)
            send(producer, b"x", b"k")
            with pytest.raises(InvalidRecordError):
                send(producer, b"x", None)
            alter(log, cleanup_policy="delete")
            send(producer, b"x", None)

    def test_gets_log_append_times(self, log, clock, send):
        """A7."""
        with log.producer() as producer:
            send(producer, b"x", b"k")
            alter(log, message_timestamp_type="LogAppendTime")
            clock.advance(500)
            send(producer, b"y", b"k")
        assert log.topic("t")[-1].timestamp_type == 1

    def test_uses_the_codec_of_the_topic(self, log, send):
        """With any codec; `producer` keeps the codec of the producer."""
        with log.producer(compression_type="zstd") as producer:
            send(producer, b"x" * 1_000, b"k")
            alter(log, compression_type="none")
            send(producer, b"x" * 1_000, b"k")
        batches = log.partition("t", 0).reader(3).read(1 << 20)
        assert (batches[0].is_compressed, batches[-1].is_compressed) == (True, False)
