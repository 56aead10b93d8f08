"""Streaming queries, driven batch by batch as Spark does, without Spark."""

import io
import json
import subprocess
import sys

import pytest
from pyspark.serializers import CPickleSerializer, write_int, write_with_length
from pyspark.sql.streaming.python_streaming_source_runner import INITIAL_OFFSET_FUNC_ID
from pyspark.sql.types import StructType
from support.clock import START
from support.roots import encoded
from support.spark_reads import read_all, values_of

import embedlog
from embedlog.errors import (
    DataLossError,
    InvalidConfigError,
    NotALogError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)
from embedlog.record import TopicPartition
from embedlog.spark.datasource import EmbedlogDataSource
from embedlog.spark.micro_batch import MicroBatchStream
from embedlog.spark.options import SourceOptions

RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"


class Query:
    """Calls a stream as Spark does, and remembers what Spark's checkpoint would contain."""

    def __init__(self, options, clock=None):
        self._options, self._clock = options, clock
        self.plans: list[str] = []
        """The end of each planned batch: Spark's offset log."""
        self.committed: str | None = None
        """The end of the last batch that was run."""
        self.rows = []
        self.start()

    def start(self):
        """Start or restart: a new process with the same checkpoint."""
        clock = {} if self._clock is None else {"clock_ms": self._clock}
        self.stream = MicroBatchStream(SourceOptions.parse(self._options), **clock)

    def batch_start(self):
        return (
            self.stream.initial_offset() if self.committed is None else json.loads(self.committed)
        )

    def plan(self, limited=True):
        """Plan the next batch; return False if there is nothing to read."""
        start = self.batch_start()
        end = self.stream.latest_offset(json.loads(json.dumps(start)), limited)
        if self.committed is not None and json.dumps(end) == json.dumps(start):
            return False
        self.plans.append(json.dumps(end))
        return True

    def run(self):
        """Run the last planned batch, again if it ran before; return its values."""
        partitions = self.stream.plan_input_partitions(
            self.batch_start(), json.loads(self.plans[-1])
        )
        rows = read_all(partitions, ("value",), self.stream.options.fail_on_data_loss)
        self.committed = self.plans[-1]
        self.rows += rows
        return values_of(rows)

    def batch(self, limited=True):
        """Plan and run a batch; return None if there is nothing to read."""
        return self.run() if self.plan(limited) else None

    def all(self):
        """Run batches until there is nothing left to read."""
        while self.batch() is not None:
            pass
        return values_of(self.rows)


@pytest.fixture
def query(options):
    queries = []

    def query(clock=None, **overrides):
        queries.append(Query(options(**overrides), clock))
        return queries[-1]

    yield query
    for started in queries:
        started.stream.close()


EARLIEST = {"startingOffsets": "earliest"}
SUBSCRIPTIONS = (
    {"subscribe": "t"},
    {"subscribePattern": "t.*"},
    {"assign": '{"t": [0, 1]}'},
)
each_subscription = pytest.mark.parametrize(
    "subscription", SUBSCRIPTIONS, ids=["subscribe", "pattern", "assign"]
)
each_fail_on_data_loss = pytest.mark.parametrize(
    "fail", ["true", "false"], ids=["fails", "goes on"]
)

# The start of a query


@each_subscription
@each_fail_on_data_loss
@pytest.mark.parametrize(
    ("starting", "first"),
    [
        ({}, []),
        ({"startingOffsets": "latest"}, []),
        ({"startingOffsets": "earliest"}, [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]),
        ({"startingOffsets": '{"t": {"0": 3, "1": -2}}'}, [3, 4, 10, 11, 12, 13, 14]),
        ({"startingOffsets": '{"t": {"0": -1, "1": 5}}'}, []),
        ({"startingTimestamp": START + 4}, [4, 14]),
        (
            {"startingOffsetsByTimestamp": f'{{"t": {{"0": {START + 3}, "1": {START}}}}}'},
            [3, 4, 10, 11, 12, 13, 14],
        ),
    ],
    ids=["default", "latest", "earliest", "offsets", "ends", "time", "times"],
)
def test_a_query_starts_where_the_options_say_and_continues(
    log, query, send, subscription, fail, starting, first
):
    """This applies to all kinds of subscription, also after a restart with new records."""
    send("t", {0: range(5), 1: range(10, 15)})
    running = query(**subscription, **starting, failOnDataLoss=fail)

    assert running.batch() == first
    send("t", {0: [5], 1: [15]})
    assert running.batch() == [5, 15]
    assert running.batch() is None

    send("t", {0: [6], 1: [16]})
    running.start()
    assert running.batch() == [6, 16]
    assert running.batch() is None


def test_records_that_arrive_before_a_crash_in_the_first_batch_are_not_skipped(query, send):
    """After the crash Spark calls `initialOffset` again, which returns a later one."""
    running = query(startingOffsets="latest")
    running.stream.initial_offset()
    send("t", {0: [1, 2]})
    running.plan()
    send("t", {0: [3]})
    running.start()

    assert running.run() == [1, 2]
    assert running.batch() == [3]


def test_an_empty_first_batch_fixes_the_start(query, send):
    """Later records are read from there, also after a crash."""
    running = query(startingOffsets="latest")
    running.plan()
    send("t", {0: [1]})
    running.start()

    assert running.run() == []
    assert running.batch() == [1]


def test_starting_offsets_are_for_new_queries_only(options, query, send):
    """If there is a checkpoint, they are ignored."""
    running = query(**EARLIEST)
    send("t", {0: [1]})
    running.batch()
    running._options = options(startingOffsets="latest")
    send("t", {0: [2]})
    running.start()

    assert running.batch() == [2]


def test_a_starting_time_after_all_records_fails_or_is_the_end(query, send):
    """The option startingOffsetsByTimestampStrategy decides."""
    send("t", {0: [1], 1: [2]})

    with pytest.raises(OffsetOutOfRangeError, match="No record has a timestamp at or after"):
        query(startingTimestamp=START + 5).batch()
    running = query(startingTimestamp=START + 5, startingOffsetsByTimestampStrategy="latest")
    assert running.batch() == []
    send("t", {0: [3]})
    assert running.batch() == [3]


def test_invalid_starts_are_errors_of_the_first_batch(tmp_path, query):
    """They can only be checked with the log."""
    with pytest.raises(UnknownTopicOrPartitionError):
        query(subscribe="u").batch()
    with pytest.raises(InvalidConfigError, match="other partitions"):
        query(startingOffsets='{"t": {"0": 1}}').batch()
    with pytest.raises(NotALogError):
        MicroBatchStream(
            SourceOptions.parse({"path": str(tmp_path / "no"), "subscribe": "t"})
        ).initial_offset()


# Limits


def sizes_of(running):
    """Return how many rows of each partition the last batch had."""
    end = json.loads(running.plans[-1])["t"]
    start = json.loads(running.plans[-2])["t"] if len(running.plans) > 1 else {}
    return [end[number] - start.get(number, 0) for number in sorted(end)]


def test_a_limit_is_shared_in_proportion_to_the_backlogs(log, query, send):
    """Each batch has 10 of 101, 11 and 1 rows, also after a restart."""
    log.create_partitions("t", 3)
    send("t", {0: range(101), 1: range(200, 211), 2: [300]})
    running = query(**EARLIEST, maxOffsetsPerTrigger=10)

    running.batch()
    assert sizes_of(running) == [8, 1, 1]
    running.batch()
    assert sizes_of(running) == [9, 1, 0]
    running.start()
    assert running.all() == [*range(101), *range(200, 211), 300]


def test_trigger_once_ignores_limits(query, send):
    """It reads everything in one batch."""
    send("t", {0: range(100)})

    assert len(query(**EARLIEST, maxOffsetsPerTrigger=10).batch(limited=False)) == 100


def test_the_largest_limit_limits_nothing(query, send):
    """Some users set it to the largest long."""
    send("t", {0: range(10), 1: range(10, 20)})

    assert len(query(**EARLIEST, maxOffsetsPerTrigger=(1 << 63) - 1).batch()) == 20


def test_a_batch_waits_for_enough_rows_but_not_for_ever(query, send):
    """minOffsetsPerTrigger and maxTriggerDelay limit the wait; the first batch runs at once."""
    now_ms = [1_000_000]
    limits = {"minOffsetsPerTrigger": 10, "maxTriggerDelay": "5s"}
    running = query(lambda: now_ms[0], **EARLIEST, **limits)
    send("t", {0: [1]})

    assert running.batch() == [1]
    send("t", {0: range(2, 10)})
    assert running.batch() is None
    send("t", {1: [10, 11]})
    assert running.batch() == list(range(2, 12))
    send("t", {0: [12]})
    assert running.batch() is None
    now_ms[0] += 5000
    assert running.batch() == [12]


def test_minimum_and_maximum_apply_together(query, send):
    """A batch starts with enough rows and is not too large."""
    now_ms = [0]
    limits = {"minOffsetsPerTrigger": 5, "maxOffsetsPerTrigger": 8}
    running = query(lambda: now_ms[0], **EARLIEST, **limits)
    send("t", {0: range(20)})

    assert [len(running.batch() or ()) for _ in range(3)] == [8, 8, 0]
    send("t", {0: [20]})
    assert len(running.batch()) == 5


def test_max_bytes_ends_a_batch_at_an_index_entry(log, query):
    """The limit is approximate; each batch advances by at least one index entry."""
    log.alter_topic("t", {"index.interval.bytes": 5000, "segment.bytes": 60_000})
    for number in range(200):
        log.partition("t", number % 2).append([encoded(b"%04d" % number + b"x" * 996)])
    running = query(**EARLIEST, maxBytesPerTrigger=40_000)

    sizes = []
    while running.plan():
        end = running.plans[-1]
        partitions = running.stream.plan_input_partitions(running.batch_start(), json.loads(end))
        sizes.append(len(read_all(partitions, ("value",))))
        running.committed = end

    assert sum(sizes) == 200
    assert 4 <= len(sizes) <= 10
    assert max(sizes) < 60


def test_available_now_does_not_wait_for_more(query, send):
    """It ignores minOffsetsPerTrigger, which might never be reached."""
    send("t", {0: [1]})
    running = query(lambda: 0, **EARLIEST, minOffsetsPerTrigger=100)
    running.stream.prepare_for_available_now()
    assert running.batch() == [1]
    send("t", {0: [2]})
    running.start()
    running.stream.prepare_for_available_now()

    assert running.batch() == [2]
    assert running.batch() is None


def test_available_now_reads_no_partition_created_later(log, query, send):
    """A partition created later has no end to stop at."""
    send("t", {0: [1]})
    running = query(**EARLIEST)
    running.stream.prepare_for_available_now()
    log.create_partitions("t", 4)
    send("t", {3: [2]})

    assert running.all() == [1]
    running.start()
    running.stream.prepare_for_available_now()
    assert running.all() == [1, 2]


@each_fail_on_data_loss
def test_available_now_and_a_topic_that_is_created_again(log, query, send, fail):
    """The records up to its end are gone."""
    send("t", {0: range(10)})
    running = query(**EARLIEST, maxOffsetsPerTrigger=2, failOnDataLoss=fail)
    running.stream.prepare_for_available_now()
    running.batch()
    log.delete_topic("t")
    log.create_topic("t", 2)
    send("t", {0: [99]})

    if fail == "true":
        with pytest.raises(DataLossError):
            running.all()
    else:
        assert running.all()[:2] == [0, 1]


# Changes while a query runs


@each_fail_on_data_loss
def test_a_deleted_topic_is_a_data_loss(log, query, send, fail):
    """With failOnDataLoss=false the query continues with the other topics."""
    log.create_topic("t-2")
    running = query(subscribePattern="t.*", **EARLIEST, failOnDataLoss=fail)
    send("t", {0: [1]})
    send("t-2", {0: [2]})
    running.batch()
    log.delete_topic("t-2")
    send("t", {0: [3]})

    if fail == "true":
        with pytest.raises(DataLossError, match="t-2-0"):
            running.batch()
    else:
        assert running.batch() == [3]
        assert "t-2" not in json.loads(running.committed)


def test_a_checkpoint_is_never_empty(log, query, send):
    """Otherwise the query would start over when the topics exist again."""
    running = query(subscribePattern="t.*", **EARLIEST, failOnDataLoss="false")
    send("t", {0: [1]})
    running.batch()
    log.delete_topic("t")

    assert running.batch() is None
    log.create_topic("t-3")
    send("t-3", {0: [2]})
    running.start()
    assert running.batch() == [2]


@each_fail_on_data_loss
@pytest.mark.parametrize("count", [1, 5, 9], ids=["shorter", "same", "longer"])
def test_a_topic_that_is_created_again_is_another_one(log, query, send, fail, count):
    """It may have grown past the query's offset, with other records."""
    running = query(**EARLIEST, failOnDataLoss=fail)
    send("t", {0: range(5)})
    running.batch()
    log.delete_topic("t")
    log.create_topic("t", 2)
    send("t", {0: range(100, 100 + count)})

    if fail == "true":
        with pytest.raises(DataLossError, match="was deleted and created again"):
            running.batch()
    else:
        assert running.batch() == list(range(100, 100 + count))


@each_fail_on_data_loss
def test_a_log_that_was_truncated_below_the_query_is_a_data_loss(log, query, send, fail):
    """Other records get these offsets, as after a power cut."""
    running = query(**EARLIEST, failOnDataLoss=fail)
    send("t", {0: range(5)})
    send("t", {0: range(5, 10)})
    running.batch()
    log.partition("t", 0).truncate_to(5)
    send("t", {0: range(100, 120)})

    if fail == "true":
        with pytest.raises(DataLossError, match="was truncated to 5"):
            running.batch()
    else:
        assert running.batch() == list(range(100, 120))


def test_a_log_that_was_truncated_above_the_query_is_no_data_loss(log, query, send):
    """The query had not read the lost records."""
    running = query(**EARLIEST)
    send("t", {0: range(5)})
    running.batch()
    send("t", {0: range(5, 10)})
    log.partition("t", 0).truncate_to(5)
    send("t", {0: range(100, 103)})

    assert running.batch() == [100, 101, 102]
    send("t", {0: [103]})
    assert running.batch() == [103]


# Visibility


def test_a_stream_reads_durable_records_only(log, query, send):
    """The stream flushes the log instead of waiting for a flush."""
    running = query(**EARLIEST)
    send("t", {0: [1]})
    partition_log = log.partition("t", 0)
    assert partition_log.tail().durable_offset == 0

    assert running.batch() == [1]
    assert partition_log.tail().durable_offset == 1


def test_a_stream_with_visibility_append_reads_all_that_is_published(log, query, send):
    """A truncation is then detected by the leader epoch."""
    running = query(**EARLIEST, visibility="append")
    send("t", {0: [1]})

    assert running.batch() == [1]
    assert log.partition("t", 0).tail().durable_offset == 0


def test_an_idle_stream_flushes_nothing(query, send, monkeypatch):
    """Spark calls `latestOffset` ninety times a second."""
    running = query(**EARLIEST)
    send("t", {0: [1]})
    running.all()
    monkeypatch.setattr("embedlog.spark.source.flush.flush", None)

    assert running.batch() is None


def test_a_stream_reads_a_log_that_is_not_writable(log, query, send, monkeypatch):
    """The stream reads the records that other processes flushed."""
    send("t", {0: [1]})
    log.flush()
    monkeypatch.setattr("embedlog.spark.log_cache.os.access", lambda path, how: False)
    running = query(**EARLIEST)

    assert running.batch() == [1]


# Progress


def test_progress_can_be_committed_to_a_group(log, query, send):
    """With commitToGroup, `embedlog groups` shows the lag."""
    running = query(**EARLIEST, commitToGroup="spark")
    send("t", {0: range(5), 1: [5]})
    running.batch()
    running.stream.commit(json.loads(running.committed))
    send("t", {0: [6, 7]})

    assert log.groups["spark"].lag() == {TopicPartition("t", 0): 2, TopicPartition("t", 1): 0}


def test_a_group_with_members_is_not_changed(log, query, send):
    """The query continues without commits."""
    running = query(**EARLIEST, commitToGroup="busy")
    send("t", {0: [1]})
    with log.consumer("t", group_id="busy") as consumer:
        consumer.poll(timeout_ms=1000)
        running.batch()
        running.stream.commit(json.loads(running.committed))

        assert log.groups["busy"].lag()[TopicPartition("t", 0)] in (None, 1, 0)


@pytest.mark.parametrize("asked_first", ["start", "end"])
@pytest.mark.parametrize(("starting", "expected"), [("earliest", [0, 1, 2]), ("latest", [1, 2])])
def test_a_stream_in_spark_before_4_2_reads_to_the_end(
    query, send, asked_first, starting, expected
):
    """It does not pass the start of the batch, and may ask for it after the end."""
    send("t", {0: [0]})
    running = query(startingOffsets=starting)
    if asked_first == "start":
        running.stream.initial_offset()
    else:
        assert running.stream.latest_offset(None)["t"] == {"0": 1, "1": 0}
    send("t", {0: [1, 2]})
    end = running.stream.latest_offset(None)
    send("t", {0: [3]})
    start = running.stream.initial_offset()

    planned = running.stream.plan_input_partitions(start, end)
    assert values_of(read_all(planned, ("value",))) == expected


def test_spark_before_4_2_continues_although_the_first_records_are_gone(query, send, log):
    """A query that continues does not need the start that its options name."""
    send("t", {0: [0, 1, 2]})
    assigned = json.dumps({"t": {"0": 1, "1": 0}})
    running = query(startingOffsets=assigned)
    end = running.stream.latest_offset(None)
    log.delete_records({TopicPartition("t", 0): 2})
    continued = query(startingOffsets=assigned)

    assert continued.stream.latest_offset(None)["t"] == end["t"]


def test_a_wrong_option_is_the_only_error_of_the_source_process(log, options):
    """Spark's process stops the reader in any case, so there must be one."""
    source = EmbedlogDataSource(options(endingOffsets="latest"))
    sent = io.BytesIO()
    write_with_length(b"%d.%d" % sys.version_info[:2], sent)
    write_with_length(b"", sent)  # the directory of Spark's files
    write_int(0, sent)  # no zip files
    CPickleSerializer()._write_with_length(source, sent)
    write_with_length(StructType().add("value", "binary").json().encode(), sent)
    write_int(10_000, sent)  # rows of a batch
    write_int(INITIAL_OFFSET_FUNC_ID, sent)
    code = f"import sys, {RUNNER} as runner; runner.main(sys.stdin.buffer, sys.stdout.buffer)"
    process = subprocess.run(
        [sys.executable, "-c", code], input=sent.getvalue(), capture_output=True, check=False
    )

    assert b"InvalidConfigError: The option 'endingOffsets' is for batch" in process.stdout
    assert b"UnboundLocalError" not in process.stdout


# At a copy


@pytest.fixture
def standby(tmp_path):
    """A log that mirrors copy to, whose topics have other ids than those of the source."""
    with embedlog.open(tmp_path / "standby", maintenance=False) as log:
        log.create_topic("own")
        yield log


def test_a_query_goes_on_at_a_standby(log, query, send, standby):
    """With the checkpoint of the source: offsets are the same there, and ids and epochs are not."""
    send("t", {0: range(5), 1: range(10, 15)})
    running = query(**EARLIEST)
    running.batch()
    send("t", {0: [5]})
    running.plan()
    embedlog.mirror(log, standby, progress=False)
    standby.mirrors.failover(dry_run=False)
    with standby.producer() as producer:
        producer.send("t", b"16", partition=1)

    moved = query(path=standby.path, **EARLIEST)
    moved.committed, moved.plans = running.committed, list(running.plans)
    assert moved.run() == [5]  # the batch that the query had planned
    assert moved.all()[-1] == 16


@each_fail_on_data_loss
def test_what_was_read_at_the_source_and_not_copied_is_a_data_loss(log, query, send, standby, fail):
    """Also if the copy has grown past that offset since the failover, with other records."""
    send("t", {0: range(5)})
    embedlog.mirror(log, standby, progress=False)
    send("t", {0: range(5, 9)})
    running = query(**EARLIEST)
    running.batch()
    standby.mirrors.failover(dry_run=False)
    with standby.producer() as producer:
        for value in range(20, 30):
            producer.send("t", b"%d" % value, partition=0)

    moved = query(path=standby.path, **EARLIEST, failOnDataLoss=fail)
    moved.committed = running.committed
    if fail == "true":
        with pytest.raises(DataLossError, match="offset 9, but was copied only up to 5"):
            moved.batch()
    else:
        assert moved.all() == list(range(20, 30))


def test_a_topic_that_is_no_copy_is_another_one(log, query, send, standby):
    """Topics of two logs may have the same name."""
    send("t", {0: range(5)})
    running = query(**EARLIEST)
    running.batch()
    standby.create_topic("t", partitions=2)

    moved = query(path=standby.path, **EARLIEST)
    moved.committed = running.committed
    with pytest.raises(DataLossError, match="created again"):
        moved.batch()
