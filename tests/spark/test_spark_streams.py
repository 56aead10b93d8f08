"""A streaming query as Spark drives it, batch by batch, without Spark: offsets, limits, losses."""

import json

import pytest
from support.clock import START
from support.roots import encoded
from support.sparks import read_all, values_of

import embedlog
from embedlog.errors import (
    DataLossError,
    InvalidConfigError,
    NotALogError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)
from embedlog.record import TopicPartition
from embedlog.spark.micro_batch import MicroBatchStream
from embedlog.spark.source_options import parse


class Query:
    """What Spark does with a stream, and what its checkpoint keeps of it."""

    def __init__(self, options, clock=None):
        self._options, self._clock = options, clock
        self.plans: list[tuple[str, str]] = []
        """Start and end of each batch: the write-ahead log."""
        self.committed: str | None = None
        self.rows = []
        self.start()

    def start(self):
        """As after a restart: a new process, the same checkpoint."""
        clock = {} if self._clock is None else {"clock_ms": self._clock}
        self.stream = MicroBatchStream(parse(self._options), **clock)

    def position(self):
        return (
            self.stream.initial_offset() if self.committed is None else json.loads(self.committed)
        )

    def plan(self, limited=True):
        """Plan the next batch; False if there is nothing to do."""
        start = self.position()
        end = self.stream.latest_offset(json.loads(json.dumps(start)), limited)
        first = self.committed is None
        if not first and json.dumps(end) == json.dumps(start):
            return False
        self.plans.append(json.dumps(end))
        return True

    def run(self):
        """Run the last planned batch, as after a crash if it ran before; return its values."""
        works = self.stream.plan_input_partitions(self.position(), json.loads(self.plans[-1]))
        found = read_all(works, ("value",), self.stream.options.fail_on_data_loss)
        self.committed = self.plans[-1]
        self.rows += found
        return values_of(found)

    def batch(self, limited=True):
        """Plan and run a batch; None if there is nothing to do."""
        return self.run() if self.plan(limited) else None

    def all(self):
        """Run until there is nothing left."""
        while self.batch() is not None:
            pass
        return values_of(self.rows)


@pytest.fixture
def query(options):
    made = []

    def query(clock=None, **given):
        made.append(Query(options(**given), clock))
        return made[-1]

    yield query
    for each in made:
        each.stream.close()


EARLY = {"startingOffsets": "earliest"}
KINDS = (
    {"subscribe": "t"},
    {"subscribePattern": "t.*"},
    {"assign": '{"t": [0, 1]}'},
)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=["subscribe", "pattern", "assign"])
each_loss = pytest.mark.parametrize("fails", ["true", "false"], ids=["fails", "goes on"])

# Where it begins


@each_kind
@each_loss
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
def test_a_query_begins_where_it_is_told_and_goes_on(
    log, query, send, kind, fails, starting, first
):
    """Whatever is subscribed to; stopped, started again, with data that came meanwhile."""
    send("t", {0: range(5), 1: range(10, 15)})
    running = query(**kind, **starting, failOnDataLoss=fails)

    assert running.batch() == first
    send("t", {0: [5], 1: [15]})
    assert running.batch() == [5, 15]
    assert running.batch() is None

    send("t", {0: [6], 1: [16]})
    running.start()
    assert running.batch() == [6, 16]
    assert running.batch() is None


def test_what_comes_while_a_query_starts_is_not_skipped(query, send):
    """Spark asks twice where it begins, and the second answer is not the first batch's."""
    running = query(startingOffsets="latest")
    running.stream.initial_offset()
    send("t", {0: [1, 2]})

    assert running.batch() == [1, 2]


def test_what_comes_before_a_crash_in_the_first_batch_is_not_skipped(query, send):
    """After it Spark asks anew where to begin, and gets a later answer."""
    running = query(startingOffsets="latest")
    running.stream.initial_offset()
    send("t", {0: [1, 2]})
    running.plan()
    send("t", {0: [3]})
    running.start()

    assert running.run() == [1, 2]
    assert running.batch() == [3]


def test_an_idle_first_batch_pins_the_beginning(query, send):
    """It is empty, and what comes later is read from there, also after a crash."""
    running = query(startingOffsets="latest")
    running.plan()
    send("t", {0: [1]})
    running.start()

    assert running.run() == []
    assert running.batch() == [1]


def test_a_repeated_batch_has_the_same_rows(query, send):
    """Whatever was appended since it was planned."""
    running = query(**EARLY)
    send("t", {0: range(5), 1: range(5, 10)})
    running.plan()
    send("t", {0: range(10, 15)})

    assert running.run() == list(range(10))
    running.committed = None
    running.start()
    assert running.run() == list(range(10))


def test_starting_offsets_are_for_new_queries_only(options, query, send):
    """A checkpoint knows better."""
    running = query(**EARLY)
    send("t", {0: [1]})
    running.batch()
    running._options = options(startingOffsets="latest")
    send("t", {0: [2]})
    running.start()

    assert running.batch() == [2]


def test_a_time_that_no_record_has_reached_fails_or_is_the_end(query, send):
    """startingOffsetsByTimestampStrategy."""
    send("t", {0: [1], 1: [2]})

    with pytest.raises(OffsetOutOfRangeError, match="No record has a timestamp at or after"):
        query(startingTimestamp=START + 5).batch()
    running = query(startingTimestamp=START + 5, startingOffsetsByTimestampStrategy="latest")
    assert running.batch() == []
    send("t", {0: [3]})
    assert running.batch() == [3]


def test_wrong_beginnings_are_told(tmp_path, query):
    """At the first batch, since they need a look at the log."""
    with pytest.raises(UnknownTopicOrPartitionError):
        query(subscribe="u").batch()
    with pytest.raises(InvalidConfigError, match="other partitions"):
        query(startingOffsets='{"t": {"0": 1}}').batch()
    with pytest.raises(NotALogError):
        MicroBatchStream(parse({"path": str(tmp_path / "no"), "subscribe": "t"})).initial_offset()


# Limits


def sizes_of(running):
    """How many rows of each partition the last batch had."""
    end = json.loads(running.plans[-1])["t"]
    start = json.loads(running.plans[-2])["t"] if len(running.plans) > 1 else {}
    return [end[number] - start.get(number, 0) for number in sorted(end)]


def test_a_limit_is_shared_by_backlog(log, query, send):
    """101, 11 and 1 rows, 10 at once, over a restart."""
    log.create_partitions("t", 3)
    send("t", {0: range(101), 1: range(200, 211), 2: [300]})
    running = query(**EARLY, maxOffsetsPerTrigger=10)

    running.batch()
    assert sizes_of(running) == [8, 1, 1]
    running.batch()
    assert sizes_of(running) == [9, 1, 0]
    running.start()
    assert running.all() == [*range(101), *range(200, 211), 300]


def test_a_query_that_runs_once_knows_no_limit(query, send):
    """Trigger.Once reads all there is."""
    send("t", {0: range(100)})

    assert len(query(**EARLY, maxOffsetsPerTrigger=10).batch(limited=False)) == 100


def test_a_limit_beyond_all_numbers_limits_nothing(query, send):
    """The largest long, as people write."""
    send("t", {0: range(10), 1: range(10, 20)})

    assert len(query(**EARLY, maxOffsetsPerTrigger=(1 << 63) - 1).batch()) == 20


def test_a_batch_waits_for_enough_rows_but_not_for_ever(query, send):
    """minOffsetsPerTrigger and maxTriggerDelay; the first batch runs at once."""
    now = [1_000_000]
    given = {"minOffsetsPerTrigger": 10, "maxTriggerDelay": "5s"}
    running = query(lambda: now[0], **EARLY, **given)
    send("t", {0: [1]})

    assert running.batch() == [1]
    send("t", {0: range(2, 10)})
    assert running.batch() is None
    send("t", {1: [10, 11]})
    assert running.batch() == list(range(2, 12))
    send("t", {0: [12]})
    assert running.batch() is None
    now[0] += 5000
    assert running.batch() == [12]


def test_both_limits_hold_together(query, send):
    """Enough to begin, and not too much at once."""
    now = [0]
    given = {"minOffsetsPerTrigger": 5, "maxOffsetsPerTrigger": 8}
    running = query(lambda: now[0], **EARLY, **given)
    send("t", {0: range(20)})

    assert [len(running.batch() or ()) for _ in range(3)] == [8, 8, 0]
    send("t", {0: [20]})
    assert len(running.batch()) == 5


def test_bytes_limit_a_batch_at_the_entries_of_the_index(log, query):
    """About; at least one entry further each time, so that it ends."""
    log.alter_topic("t", {"index.interval.bytes": 5000, "segment.bytes": 60_000})
    for number in range(200):
        log.partition("t", number % 2).append([encoded(b"%04d" % number + b"x" * 996)])
    running = query(**EARLY, maxBytesPerTrigger=40_000)

    sizes = []
    while (found := running.batch_of_any()) is not None:
        sizes.append(found)

    assert sum(sizes) == 200
    assert 4 <= len(sizes) <= 10
    assert max(sizes) < 60


Query.batch_of_any = lambda self: len(_run_raw(self)) if self.plan() else None


def _run_raw(running):
    works = running.stream.plan_input_partitions(running.position(), json.loads(running.plans[-1]))
    running.committed = running.plans[-1]
    return read_all(works, ("value",))


def test_available_now_ends_at_what_was_there(query, send):
    """With a limit in several batches; what comes meanwhile is for the next run."""
    send("t", {0: range(10), 1: range(10, 20)})
    running = query(**EARLY, maxOffsetsPerTrigger=6)
    running.stream.prepare_for_available_now()
    running.batch()
    send("t", {0: range(100, 110)})

    assert running.all() == list(range(20))
    running.start()
    running.stream.prepare_for_available_now()
    assert running.all() == [*range(20), *range(100, 110)]


def test_available_now_does_not_wait_for_more(query, send):
    """A minimum would never be reached."""
    send("t", {0: [1]})
    running = query(lambda: 0, **EARLY, minOffsetsPerTrigger=100)
    running.stream.prepare_for_available_now()
    assert running.batch() == [1]
    send("t", {0: [2]})
    running.start()
    running.stream.prepare_for_available_now()

    assert running.batch() == [2]
    assert running.batch() is None


def test_available_now_reads_no_partition_that_came_later(log, query, send):
    """It would have no end to stop at."""
    send("t", {0: [1]})
    running = query(**EARLY)
    running.stream.prepare_for_available_now()
    log.create_partitions("t", 4)
    send("t", {3: [2]})

    assert running.all() == [1]
    running.start()
    running.stream.prepare_for_available_now()
    assert running.all() == [1, 2]


@each_loss
def test_available_now_and_a_topic_that_shrinks(log, query, send, fails):
    """What was promised to be read is gone."""
    send("t", {0: range(10)})
    running = query(**EARLY, maxOffsetsPerTrigger=2, failOnDataLoss=fails)
    running.stream.prepare_for_available_now()
    running.batch()
    log.delete_topic("t")
    log.create_topic("t", 2)
    send("t", {0: [99]})

    if fails == "true":
        with pytest.raises(DataLossError):
            running.all()
    else:
        assert running.all()[:2] == [0, 1]


# What changes while it runs


@pytest.mark.parametrize("kind", KINDS[:2], ids=["subscribe", "pattern"])
def test_new_partitions_are_read_from_their_start(log, query, send, kind):
    """Also those that are made and filled while the query is stopped."""
    send("t", {0: [1], 1: [2]})
    running = query(**kind)
    running.batch()
    log.create_partitions("t", 3)
    send("t", {2: [3, 4]})

    assert running.batch() == [3, 4]
    log.create_partitions("t", 4)
    send("t", {3: [5]})
    running.start()
    assert running.batch() == [5]


def test_new_topics_that_match_are_read_from_their_start(log, query, send):
    """A pattern is of what there will be, too."""
    running = query(subscribePattern="t|t-.*")
    assert running.batch() == []
    log.create_topic("t-new")
    log.create_topic("other")
    send("t-new", {0: [1]})
    send("other", {0: [9]})

    assert running.batch() == [1]


@each_loss
def test_a_topic_that_is_deleted_is_a_loss(log, query, send, fails):
    """Unless losses are not to fail: then the others are read on."""
    log.create_topic("t-2")
    running = query(subscribePattern="t.*", **EARLY, failOnDataLoss=fails)
    send("t", {0: [1]})
    send("t-2", {0: [2]})
    running.batch()
    log.delete_topic("t-2")
    send("t", {0: [3]})

    if fails == "true":
        with pytest.raises(DataLossError, match="t-2-0"):
            running.batch()
    else:
        assert running.batch() == [3]
        assert "t-2" not in json.loads(running.committed)


def test_a_checkpoint_is_never_empty(log, query, send):
    """Else the query would begin anew when topics come back."""
    running = query(subscribePattern="t.*", **EARLY, failOnDataLoss="false")
    send("t", {0: [1]})
    running.batch()
    log.delete_topic("t")

    assert running.batch() is None
    log.create_topic("t-3")
    send("t-3", {0: [2]})
    running.start()
    assert running.batch() == [2]


@each_loss
@pytest.mark.parametrize("again", [1, 5, 9], ids=["shorter", "same", "longer"])
def test_a_topic_that_is_made_anew_is_another_one(log, query, send, fails, again):
    """Also when it has grown past where the query was: its records are others."""
    running = query(**EARLY, failOnDataLoss=fails)
    send("t", {0: range(5)})
    running.batch()
    log.delete_topic("t")
    log.create_topic("t", 2)
    send("t", {0: range(100, 100 + again)})

    if fails == "true":
        with pytest.raises(DataLossError, match="was deleted and created again"):
            running.batch()
    else:
        assert running.batch() == list(range(100, 100 + again))


@each_loss
def test_a_topic_that_is_made_anew_between_plan_and_run(log, query, send, fails):
    """The batch was of the old one."""
    running = query(**EARLY, failOnDataLoss=fails)
    send("t", {0: range(5)})
    running.plan()
    log.delete_topic("t")
    log.create_topic("t", 2)
    send("t", {0: range(100, 110)})

    if fails == "true":
        with pytest.raises(DataLossError):
            running.run()
    else:
        assert running.run() == []
        assert running.batch() == list(range(100, 110))


@each_loss
def test_a_log_that_was_cut_is_a_loss_where_the_query_was_further(log, query, send, fails):
    """As after a power cut: other records get these offsets."""
    running = query(**EARLY, failOnDataLoss=fails)
    send("t", {0: range(5)})
    send("t", {0: range(5, 10)})
    running.batch()
    log.partition("t", 0).truncate_to(5)
    send("t", {0: range(100, 120)})

    if fails == "true":
        with pytest.raises(DataLossError, match="was truncated to 5"):
            running.batch()
    else:
        assert running.batch() == list(range(100, 120))


def test_a_log_that_was_cut_above_the_query_is_no_loss(log, query, send):
    """It had not read what is gone."""
    running = query(**EARLY)
    send("t", {0: range(5)})
    running.batch()
    send("t", {0: range(5, 10)})
    log.partition("t", 0).truncate_to(5)
    send("t", {0: range(100, 103)})

    assert running.batch() == [100, 101, 102]
    send("t", {0: [103]})
    assert running.batch() == [103]


def test_gaps_are_no_losses(log, query):
    """Offsets need not be dense."""
    part = log.partition("t", 0)
    part.append_at([(3, encoded(b"3"))])
    running = query(**EARLY)

    assert running.batch() == [3]
    part.append_at([(10, encoded(b"10")), (20, encoded(b"20"))])
    assert running.batch() == [10, 20]


# How far it reads


def test_a_stream_reads_what_a_power_cut_cannot_take_back(log, query, send):
    """It asks for the flush itself, so nobody waits for one."""
    running = query(**EARLY)
    send("t", {0: [1]})
    part = log.partition("t", 0)
    assert part.tail().durable_offset == 0

    assert running.batch() == [1]
    assert part.tail().durable_offset == 1


def test_a_stream_may_be_told_to_read_what_is_published(log, query, send):
    """Then a cut is found out by the epoch."""
    running = query(**EARLY, visibility="append")
    send("t", {0: [1]})

    assert running.batch() == [1]
    assert log.partition("t", 0).tail().durable_offset == 0


def test_an_idle_stream_flushes_nothing(query, send, monkeypatch):
    """Spark asks ninety times a second."""
    running = query(**EARLY)
    send("t", {0: [1]})
    running.all()
    monkeypatch.setattr("embedlog.spark.source.flush.flush", None)

    assert running.batch() is None


def test_a_stream_reads_a_log_that_it_may_not_write(log, query, send, monkeypatch):
    """What others flushed."""
    send("t", {0: [1]})
    log.flush()
    monkeypatch.setattr("embedlog.spark.source.os.access", lambda path, how: False)
    running = query(**EARLY)

    assert running.batch() == [1]


# What it tells


def test_the_end_of_the_log_is_reported(query, send):
    """For the progress that Spark shows."""
    running = query(**EARLY, maxOffsetsPerTrigger=1)
    send("t", {0: range(5), 1: [5]})
    running.batch()

    assert running.stream.report_latest_offset()["t"] == {"0": 5, "1": 1}


def test_progress_can_be_seen_as_a_groups(log, query, send):
    """commitToGroup: lag in `embedlog groups`."""
    running = query(**EARLY, commitToGroup="spark")
    send("t", {0: range(5), 1: [5]})
    running.batch()
    running.stream.commit(json.loads(running.committed))
    send("t", {0: [6, 7]})

    assert log.group("spark").lag() == {TopicPartition("t", 0): 2, TopicPartition("t", 1): 0}


def test_a_group_with_members_is_left_alone(log, query, send):
    """Somebody else's progress; the query goes on."""
    running = query(**EARLY, commitToGroup="busy")
    send("t", {0: [1]})
    with log.consumer("t", group_id="busy") as consumer:
        consumer.poll(timeout_ms=1000)
        running.batch()
        running.stream.commit(json.loads(running.committed))

        assert log.group("busy").lag()[TopicPartition("t", 0)] in (None, 1, 0)


def test_a_stream_for_older_sparks_reads_to_the_end(query, send):
    """Before 4.2 they do not say where they are."""
    running = query(startingOffsets="latest")
    start = running.stream.initial_offset()
    send("t", {0: [1, 2]})
    end = running.stream.latest_offset(None)

    assert values_of(read_all(running.stream.plan_input_partitions(start, end), ("value",))) == [
        1,
        2,
    ]
    assert embedlog.__version__
