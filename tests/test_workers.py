"""`run_group` with `on_error`, `concurrency`, `delay`, async handlers and dead letters."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from functools import partial
from itertools import product

import pytest
from support import forks
from support.children import run_python
from support.patience import patient
from support.tiers import runs, sample

import embedlog
from embedlog.api import group_worker
from embedlog.config import GroupConfig
from embedlog.dead_letter_queue import Failure
from embedlog.errors import (
    IllegalStateError,
    InvalidConfigError,
    ProcessDiedError,
    RecordDeserializationError,
    UnknownTopicOrPartitionError,
)
from embedlog.workers import record_worker

pytestmark = pytest.mark.tier("test")  # each test starts processes

OPTIONS = {"auto_offset_reset": "earliest", "start_method": "fork", "processes": 1}
END = {**OPTIONS, "until": "end"}
FAST = embedlog.Retry(attempts=3, backoff=0.01, dead_letter="t.dlq")
POISON = b"13"


@pytest.fixture
def log(tmp_path):
    """A log with 40 numbers in two partitions of a topic, of five keys each."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t", partitions=2)
        fill(log, range(40))
        yield log
        assert log.housekeeping.verify() == []


def fill(log, numbers):
    with log.producer() as producer:
        for number in numbers:
            key, headers = b"key %d" % (number % 10), [("h", b"%d" % number)]
            producer.send("t", b"%d" % number, key, headers, number % 2, 1000 + number)


class Notes:
    """Lines of JSON that handlers write, in the order in which they did, from any process."""

    def __init__(self, path):
        self.path = path
        path.touch()

    def add(self, *fields):
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(fd, json.dumps([*fields, time.monotonic()]).encode() + b"\n")
        os.close(fd)

    def read(self):
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    @property
    def numbers(self):
        return [fields[0] for fields in self.read()]


@pytest.fixture
def notes(tmp_path):
    return Notes(tmp_path / "notes")


def run_to_end(log, handler, **options):
    run = embedlog.run_group(log, "t", "g", handler, **{**END, **options})
    assert run.wait(patient(60))


def committed(log):
    with log.consumer(group_id="g") as consumer:
        return [consumer.committed(("t", number)) for number in (0, 1)]


def note_or_fail(notes, record):
    notes.add(int(record.value))
    if record.value == POISON:
        raise ValueError("thirteen")


async def await_note_or_fail(notes, record):
    await asyncio.sleep(0.001)
    note_or_fail(notes, record)


def few(*cases):
    """Return all cases, or in the small tiers the last one."""
    return cases if runs("all") else cases[-1:]


HANDLERS = pytest.mark.parametrize("handler", few(note_or_fail, await_note_or_fail))
CONCURRENCY = pytest.mark.parametrize("concurrency", few(1, 4))
BOTH = pytest.mark.parametrize(
    ("handler", "concurrency"), sample([*product([note_or_fail, await_note_or_fail], [1, 4])], 2)
)


@BOTH
def test_a_record_that_fails_is_skipped(log, notes, caplog, handler, concurrency):
    """E30: with "skip" the others are handled, and each skipped one is logged."""
    run_to_end(log, partial(handler, notes), on_error="skip", concurrency=concurrency)

    assert Counter(notes.numbers) == Counter(range(40))
    assert committed(log) == [20, 20]


@BOTH
def test_a_record_that_fails_again_and_again_is_a_dead_letter(log, notes, handler, concurrency):
    """E30, E33: it is handled as often as the policy says, and the others once."""
    run_to_end(log, partial(handler, notes), on_error=FAST, concurrency=concurrency)

    assert Counter(notes.numbers) == Counter([*range(40), 13, 13])
    assert committed(log) == [20, 20]
    (letter,) = log.dead_letters("t.dlq")
    assert letter.record[5:7] == (b"key 3", POISON)
    assert (letter.record.partition, letter.record.timestamp) == (1, 1013)
    assert letter.headers == [("h", b"13")]
    failure = letter.failure
    assert failure[:5] == ("t", 1, 6, "g", 3)
    assert (failure.message, failure.exception) == ("thirteen", "ValueError")
    assert "in note_or_fail" in failure.stacktrace
    assert 0 < failure.first_failed_ms <= failure.last_failed_ms - 25


@HANDLERS
def test_a_failure_delays_only_its_key(log, notes, handler):
    """E31: the records of the other keys are handled before the last attempt, those of its key
    after it, and in order."""
    policy = embedlog.Retry(attempts=2, backoff=0.5, dead_letter="t.dlq")
    run_to_end(log, partial(handler, notes), on_error=policy)

    numbers = notes.numbers
    last = len(numbers) - 1 - numbers[::-1].index(13)
    after = set(numbers[last + 1 :])
    assert after == {23, 33}
    assert numbers.index(23) < numbers.index(33)


@pytest.mark.parametrize("policy", ["stop", embedlog.Retry(attempts=2, backoff=0.0)])
def test_without_a_topic_for_it_the_last_failure_ends_the_run(log, notes, policy):
    """E30: with the error of the handler; nothing from the record on is committed."""
    with pytest.raises(ValueError, match="thirteen"):
        run_to_end(log, partial(note_or_fail, notes), on_error=policy, concurrency=2)

    assert committed(log)[1] <= 6
    assert 13 in notes.numbers
    with pytest.raises(ValueError, match="thirteen"):  # it is the first one of the next run
        run_to_end(log, partial(note_or_fail, notes), on_error=policy, concurrency=2)


def test_a_value_that_cannot_be_deserialized_is_a_dead_letter_at_once(log, notes):
    """E34: it does not end the run, and its bytes are kept."""
    with log.producer() as producer:
        producer.send("t", b"no number", b"key 3", partition=1)

    def handle(record):
        notes.add(record.value)

    run_to_end(log, handle, on_error=FAST, value_deserializer=int)
    assert sorted(notes.numbers) == list(range(40))
    (letter,) = log.dead_letters("t.dlq")
    assert letter.record.value == b"no number"
    assert letter.failure.delivery_count == 1
    assert letter.failure.exception == "embedlog.errors.RecordDeserializationError"


@pytest.mark.parametrize(("on_error", "ends"), [("skip", False), ("stop", True)])
def test_a_value_that_cannot_be_deserialized_is_an_error_like_any_other(log, notes, on_error, ends):
    """E34: also with the other policies."""
    with log.producer() as producer:
        producer.send("t", b"no number", b"key 3", partition=1)
        producer.send("t", b"40", b"key 3", partition=1)
    options = {"on_error": on_error, "value_deserializer": int, "concurrency": 2}

    def handle(record):
        notes.add(record.value)

    if ends:
        with pytest.raises(RecordDeserializationError, match="cannot be deserialized"):
            run_to_end(log, handle, **options)
        assert committed(log)[1] <= 20
    else:
        run_to_end(log, handle, **options)
        assert sorted(notes.numbers) == list(range(41))


class Crowd:
    """How many handlers run at once, in all and of one key."""

    def __init__(self):
        self.lock, self.now, self.keys = threading.Lock(), 0, Counter()
        self.most = self.most_of_a_key = 0

    def enter(self, record):
        with self.lock:
            self.now += 1
            self.keys[record.key] += 1
            self.most = max(self.most, self.now)
            self.most_of_a_key = max(self.most_of_a_key, *self.keys.values())

    def leave(self, record):
        with self.lock:
            self.now -= 1
            self.keys[record.key] -= 1


@pytest.mark.parametrize("is_async", [False, True])
def test_several_records_of_a_partition_are_handled_at_once_but_one_of_a_key(log, notes, is_async):
    """E31: with concurrency=n, at most n, and those of a key in their order."""
    crowd = Crowd()

    def handle(record):
        crowd.enter(record)
        time.sleep(0.01)
        crowd.leave(record)
        notes.add(int(record.value), crowd.most, crowd.most_of_a_key)

    async def await_it(record):
        crowd.enter(record)
        await asyncio.sleep(0.01)
        crowd.leave(record)
        notes.add(int(record.value), crowd.most, crowd.most_of_a_key)

    run_to_end(log, await_it if is_async else handle, concurrency=4)
    *_, (_, most, most_of_a_key, _) = notes.read()
    assert most == 4
    assert most_of_a_key == 1
    of_keys = defaultdict(list)
    for number in notes.numbers:
        of_keys[number % 10].append(number)
    assert all(numbers == sorted(numbers) for numbers in of_keys.values())


def test_no_position_passes_a_record_that_is_not_finished(log, notes):
    """E32: what is finished above it is committed once it is, and handled again after a kill."""

    def handle(record):
        if record.value == b"2" and not notes.numbers.count(-1):
            forks.until(lambda: len(notes.numbers) == 36)  # but those of its key
            notes.add(-1)
            os.kill(os.getpid(), signal.SIGKILL)
        notes.add(int(record.value))

    run = embedlog.run_group(log, "t", "g", handle, concurrency=2, restarts=1, **END)
    assert run.wait(patient(60))
    handled = Counter(notes.numbers)
    assert set(handled) == {-1, *range(40)}
    assert handled[2] == 1
    assert all(handled[number] == 1 for number in range(12, 40, 10))
    assert all(handled[number] == 2 for number in range(4, 40, 2) if number % 10 != 2)


def test_an_initializer_is_called_in_each_process_before_its_first_record(log, notes):
    """For an async handler on its loop."""
    made = []

    def initialize():
        made.append(os.getpid())

    async def make():
        made.append(asyncio.get_running_loop())

    def handle(record):
        notes.add(int(record.value), made == [os.getpid()])

    async def await_it(record):
        notes.add(int(record.value), made == [asyncio.get_running_loop()])

    for handler, initializer, options in (
        (handle, initialize, {}),
        (handle, initialize, {"concurrency": 2}),
        (await_it, make, {}),
        (await_it, lambda: made.append(asyncio.get_running_loop()), {}),
    ):
        embedlog.run_group(
            *(log, "t", f"g{len(notes.numbers)}", handler),
            **{**END, **options},
            initializer=initializer,
        ).wait(patient(60))
        made.clear()
    assert len(notes.numbers) == 160
    assert {fields[1] for fields in notes.read()} == {True}


@pytest.mark.parametrize("handler", [note_or_fail, await_note_or_fail])
def test_an_initializer_that_fails_ends_the_run(log, notes, handler):
    """With its error; no record is handled."""

    def initialize():
        raise ValueError("no connection")

    with pytest.raises(ValueError, match="no connection"):
        run_to_end(log, partial(handler, notes), initializer=initialize)
    assert notes.numbers == []


@pytest.mark.parametrize("handler", few(note_or_fail, await_note_or_fail))
def test_a_record_waits_until_its_time(log, notes, handler):
    """E35: `delay` counts from its timestamp; `not_before` is a time; neither holds other keys."""
    now = time.time()
    # The processes of the group take so long to start.
    lead = patient(0.5)
    late_ms = int((now + lead) * 1000)
    with log.producer() as producer:
        producer.send("t", b"100", b"late", partition=0, timestamp_ms=late_ms)
        producer.send("t", b"101", b"late", partition=0, timestamp_ms=late_ms)
        producer.send("t", b"102", b"soon", partition=0, timestamp_ms=int(now * 1000) - 10_000)

    def not_before(record):
        return None if record.value != b"101" else (now + lead + 0.7) * 1000

    policy = {"on_error": "skip", "delay": 0.1, "not_before": not_before}
    begun = time.monotonic() - (time.time() - now)
    run_to_end(log, partial(handler, notes), **policy)
    times = {fields[0]: fields[1] - begun for fields in notes.read()}
    assert times[100] >= lead + 0.099  # timestamps are in milliseconds
    assert times[101] >= lead + 0.699
    assert times[102] < times[100]
    assert len(times) == 43


def test_a_time_that_cannot_be_told_is_an_error_of_its_record(log, notes):
    """E35, E30."""

    def not_before(record):
        if record.value == POISON:
            raise KeyError("not-before")

    run_to_end(
        log, partial(note_or_fail, notes), on_error=FAST, not_before=not_before, concurrency=2
    )
    assert sorted(notes.numbers) == [number for number in range(40) if number != 13]
    assert [letter.failure.exception for letter in log.dead_letters("t.dlq")] == ["KeyError"]


@pytest.mark.parametrize("concurrency", few(1, 4))
def test_outputs_and_dead_letters_are_published_with_the_position(log, notes, concurrency):
    """E33, G22: each output once and in the order of its key, although processes are killed."""
    log.create_topic("out", partitions=2)
    fill(log, range(40, 400))

    def handle(record):
        if int(record.value) % 100 == 13:
            raise ValueError("thirteen")
        time.sleep(0.001)
        return [("out", record.value, record.key, None, record.partition)]

    run = embedlog.run_group(
        *(log, "t", "g", handle),
        **{**END, "processes": 2, "max_poll_records": 20},
        on_error=FAST,
        concurrency=concurrency,
        outputs=True,
        restarts=100,
    )
    for _ in range(3):
        if run.wait(0.15):
            break
        with suppress(ProcessLookupError):  # It may have ended.
            os.kill(run.pids[0], signal.SIGKILL)
    assert run.wait(patient(60))

    numbers = [int(record.value) for record in log.topic("out")]
    assert sorted(numbers) == [number for number in range(400) if number % 100 != 13]
    assert sorted(int(each.record.value) for each in log.dead_letters("t.dlq")) == [
        *(13, 113, 213, 313)
    ]
    for key in range(10):
        of_key = [number for number in numbers if number % 10 == key]
        assert of_key == sorted(of_key)


def test_a_partition_with_too_much_in_flight_is_not_read_further(log, notes):
    """E32: at most twice max_poll_records, also while its first record waits."""
    fill(log, range(40, 200))

    def handle(record):
        if record.value == b"0":
            time.sleep(0.5)
        notes.add(int(record.value))

    run_to_end(log, handle, concurrency=2, max_poll_records=10)
    numbers = notes.numbers
    before = [number for number in numbers[: numbers.index(0)] if number % 2 == 0]
    assert len(before) <= 20
    assert sorted(numbers) == list(range(200))


def test_members_that_come_and_go_finish_what_they_have_begun(log, notes):
    """E36: partitions move, and no record is lost, or handled twice without a kill."""
    with log.producer() as producer:
        for number in range(40, 300):
            producer.send("t", b"%d" % number, partition=number % 2)
    log.delete_records({("t", 0): 20, ("t", 1): 20})

    def handle(record):
        time.sleep(0.003)
        notes.add(int(record.value))

    options = {**OPTIONS, "concurrency": 2, "max_poll_records": 20}
    with embedlog.run_group(log, "t", "g", handle, **options) as first:
        forks.until(lambda: len(notes.numbers) > 30)
        with embedlog.run_group(log, "t", "g", handle, **options):
            forks.until(lambda: len(notes.numbers) > 120)
        forks.until(lambda: len(set(notes.numbers)) == 260, 60)
        assert first.running
    assert Counter(notes.numbers) == Counter(range(40, 300))


def test_a_topic_that_is_deleted_is_forgotten(log, notes):
    """With its records in flight and its dead letters; those of the others are handled."""
    log.create_topic("other")
    log.producer().send_batch("other", [b"13"] * 5).result()

    def handle(record):
        notes.add(record.topic, int(record.value))
        if record.topic == "other":
            raise ValueError("thirteen")
        time.sleep(0.005)

    policy = embedlog.Retry(attempts=2, backoff=0.2, dead_letter="d")
    topics = ["t", "other"]
    with embedlog.run_group(
        log, topics, "g", handle, on_error=policy, concurrency=3, max_poll_records=4, **OPTIONS
    ) as run:
        forks.until(lambda: any(fields[0] == "other" for fields in notes.read()))
        log.delete_topic("other")
        forks.until(lambda: committed(log) == [20, 20])
        fill(log, range(40, 60))
        forks.until(lambda: committed(log) == [30, 30])
        assert run.running
    handled = {fields[1] for fields in notes.read() if fields[0] == "t"}
    assert handled == set(range(60))


@pytest.mark.parametrize("is_async", few(False, True))
def test_a_stop_finishes_what_was_begun(log, notes, is_async):
    """And commits it; the rest is handled by the next run."""

    def handle(record):
        time.sleep(0.05)
        notes.add(int(record.value))

    async def await_it(record):
        await asyncio.sleep(0.05)
        notes.add(int(record.value))

    handler = await_it if is_async else handle
    with embedlog.run_group(log, "t", "g", handler, **OPTIONS, concurrency=3) as run:
        forks.until(lambda: len(notes.numbers) > 3)
    assert not run.running
    assert len(notes.numbers) < 40
    run_to_end(log, handler, concurrency=3)
    assert Counter(notes.numbers) == Counter(range(40))


# What is refused


REFUSED = [
    ({"on_error": "dlq"}, InvalidConfigError, "on_error"),
    ({"concurrency": 0}, ValueError, "concurrency"),
    ({"on_error": "skip", "batch": True}, InvalidConfigError, "batch"),
    ({"delay": "1s"}, TypeError, "delay"),
    ({"initializer": 3}, TypeError, "initializer"),
    ({"not_before": 3}, TypeError, "not_before"),
    ({"errors.deadletterqueue.topic.name": "d"}, InvalidConfigError, "no dead letters"),
    ({"on_error": FAST, "errors_deadletterqueue_topic_name": "d"}, InvalidConfigError, "'d'"),
    (
        {"on_error": FAST, "errors.deadletterqueue.auto.create.topics.enable": False},
        UnknownTopicOrPartitionError,
        "t.dlq",
    ),
    (
        {"on_error": embedlog.Retry(dead_letter="t")},
        InvalidConfigError,
        "the topic of its own dead letters",
    ),
    (
        {"on_error": embedlog.Retry(dead_letter="plain")},
        InvalidConfigError,
        "errors.deadletterqueue.group.enable",
    ),
    ({"on_error": embedlog.Retry(dead_letter="texts")}, InvalidConfigError, "no serializers"),
    ({"on_error": embedlog.Retry(dead_letter="compacted")}, InvalidConfigError, "no compaction"),
]


@pytest.mark.parametrize(("options", "error", "text"), REFUSED, ids=lambda each: str(each)[:40])
def test_what_contradicts_itself_is_refused(log, options, error, text):
    """Before a process is started, or a topic created."""
    enabled = {"errors.deadletterqueue.group.enable": True}
    log.create_topic("plain")
    log.create_topic("texts", value="str", config=enabled)
    log.create_topic("compacted", config={**enabled, "cleanup.policy": "compact"})
    with pytest.raises(error, match=text):
        embedlog.run_group(log, "t", "g", print, **{**OPTIONS, **options})
    assert "t.dlq" not in log
    assert "g" not in log.groups


def test_a_dead_letter_of_a_typed_topic_says_where_its_record_is(log):
    """Its values are no bytes, so it has no copy; a replay sends the rows that are there."""
    log.create_topic("typed", schema=_schema(), key="n")
    with log.producer() as producer:
        producer.send("typed", {"n": 1}, headers=[("a", b"b")])
        producer.send("typed", {"n": 2})
        producer.send("typed", None, 3)

    def handle(record):
        if record.key != 2:
            raise ValueError("odd")

    policy = embedlog.Retry(attempts=1, dead_letter="t.dlq")
    embedlog.run_group(log, "typed", "g", handle, on_error=policy, **END).wait(patient(60))
    letters = list(log.dead_letters("t.dlq"))
    assert {each.record[5:7] for each in letters} == {(None, None)}
    assert [each.failure.offset for each in letters] == [0, 2]
    assert log.dead_letters("t.dlq").replay() == 2
    replayed = [(each.key, each.value, each.headers) for each in log.topic("typed")][3:]
    assert replayed == [(1, {"n": 1}, [("a", b"b")]), (3, None, [])]


def _schema():
    import pyarrow as pa

    return pa.schema([("n", pa.int64())])


@pytest.mark.parametrize("on_error", ["skip", embedlog.Retry(attempts=2, backoff=0.0)])
def test_the_rows_of_typed_topics_are_handled_as_others(log, notes, on_error):
    """E30, E31: with the key column as the key."""
    log.create_topic("typed", schema=_schema(), key="n")
    with log.producer() as producer:
        for number in (1, 2, 1, 3):
            producer.send("typed", {"n": number})

    failed = set()

    def handle(record):
        if record.value["n"] == 2 and on_error != "skip" and record.offset not in failed:
            failed.add(record.offset)
            raise ValueError("once")
        notes.add(record.value["n"], record.key)

    embedlog.run_group(log, "typed", "g", handle, on_error=on_error, **END).wait(patient(60))
    assert sorted(fields[:2] for fields in notes.read()) == [[1, 1], [1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize(
    "arguments",
    [
        {"attempts": 0},
        {"attempts": True},
        {"attempts": 1.5},
        {"backoff": -1},
        {"backoff": []},
        {"backoff": [1, "2"]},
        {"max_backoff": None},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(arguments):
    """When it is made."""
    with pytest.raises(InvalidConfigError):
        embedlog.Retry(**arguments)


@pytest.mark.parametrize(
    ("backoff", "pauses"),
    [
        (0.5, [0.5, 1.0, 2.0, 3.0, 3.0]),
        ([0.1, 2], [0.1, 2.0, 2.0, 2.0, 2.0]),
        (lambda failed: failed / 2, [0.5, 1.0, 1.5, 2.0, 2.5]),
        (lambda failed: -1, [0.0] * 5),
        (1e300, [3.0] * 5),
    ],
)
def test_the_pauses_of_a_policy(backoff, pauses):
    """They double, follow a list, or a function; none is longer than max_backoff."""
    policy = embedlog.Retry(backoff=backoff, max_backoff=3.0)
    assert [policy.pause_seconds(failed) for failed in range(1, 6)] == pauses


# Dead letters


def test_the_settings_of_the_group_name_the_topic_and_what_it_copies(log, notes):
    """By the names of KIP-1191, in either spelling."""
    log.create_topic("d", config={"errors.deadletterqueue.group.enable": True})
    settings = {
        "errors.deadletterqueue.topic.name": "d",
        "errors_deadletterqueue_copy_record_enable": False,
    }
    policy = embedlog.Retry(attempts=1)
    run_to_end(log, partial(note_or_fail, notes), on_error=policy, **settings)
    ((record, failure, _),) = log.dead_letters("d")
    assert (record.key, record.value, record.partition) == (None, None, 0)
    assert (failure.topic, failure.partition, failure.offset) == ("t", 1, 6)
    assert [name for name, _ in record.headers][:6] == [
        "__dlq.errors.topic",
        "__dlq.errors.partition",
        "__dlq.errors.offset",
        "__dlq.errors.group",
        "__dlq.errors.delivery.count",
        "__dlq.errors.message",
    ]
    # What was not copied is read where it is.
    assert log.dead_letters("d").replay() == 1
    assert log.topic("t").tail(1).in_ranges([(1, 20, 21)])[0][5:8] == (
        *(b"key 3", POISON),
        [("h", b"13")],
    )


def test_dead_letters_are_replayed_once(log, notes):
    """In one transaction with how far it is; single ones as often as one asks."""
    fill(log, range(113, 114))

    def handle(record):
        if int(record.value) % 100 == 13:
            raise ValueError("thirteen")

    run_to_end(log, handle, on_error=FAST)
    letters = log.dead_letters("t.dlq")
    assert [letter.replayed for letter in letters] == [False, False]
    assert letters.replay() == 2
    assert [letter.replayed for letter in letters] == [True, True]
    assert letters.replay() == 0
    assert letters.replay(letters.get(1, 0)) == 1
    again = [record for record in log.topic("t") if int(record.value) % 100 == 13]
    assert [(each.partition, each.value, each.key, each.timestamp) for each in again] == [
        (1, b"13", b"key 3", 1013),
        (1, b"113", b"key 3", 1113),
        (1, b"13", b"key 3", 1013),
        (1, b"113", b"key 3", 1113),
        (1, b"13", b"key 3", 1013),
    ]
    assert all(each.headers == [("h", each.value)] for each in again)


def test_what_kafka_wrote_is_read_and_what_is_no_dead_letter_is_left_out(log):
    """A broker of Kafka 4.4 writes six headers, and no exception."""
    log.create_topic("d", config={"errors.deadletterqueue.group.enable": True})
    by_kafka = [
        ("__dlq.errors.topic", b"t"),
        ("__dlq.errors.partition", b"1"),
        ("__dlq.errors.offset", b"6"),
        ("__dlq.errors.group", b"share"),
        ("__dlq.errors.delivery.count", b"5"),
        ("__dlq.errors.message", b"Offset rejected by client."),
    ]
    with log.producer() as producer:
        producer.send("d", b"1", headers=by_kafka)
        producer.send("d", b"2", headers=[("__dlq.errors.topic", b"t")])
        producer.send("d", b"3", headers=[*by_kafka[:2], ("__dlq.errors.offset", b"x")])
        producer.send("d", b"4")
    (letter,) = log.dead_letters("d")
    assert letter.failure == Failure("t", 1, 6, "share", 5, "Offset rejected by client.")


def test_the_headers_of_a_failure_have_a_limit_and_any_text():
    """A message or a stack may be longer than a batch, or no UTF-8."""
    record = embedlog.Record("t", 0, 7, 0, 0, None, b"v", [])
    error = ValueError("\udc80" + "x" * 5_000_000)
    times = {"first_failed_ms": 1, "last_failed_ms": 2}
    failure = Failure.of(record, "g", error, delivery_count=3, **times)
    headers = failure.headers()
    assert sum(len(value) for _, value in headers) < 12_000
    parsed = Failure.parse(headers)
    assert parsed[:5] == failure[:5]
    assert parsed.message.startswith("?xxx")
    assert parsed[-2:] == (1, 2)


# Processes


@pytest.mark.parametrize("kind", few("thread", "main thread", "task"))
def test_a_handler_that_does_not_return_is_named_with_its_stack(log, monkeypatch, tmp_path, kind):
    """Once, in threads, in tasks, and in the main thread."""
    monkeypatch.setattr(group_worker, "STALLED_SECONDS", 0.3)
    lines = tmp_path / "lines"

    def capture():
        import logging

        logging.basicConfig(filename=lines, level="WARNING", format="%(message)s", force=True)

    def wait_for_it():
        time.sleep(1.0)

    async def wait_for_it_too():
        await asyncio.sleep(1.0)

    def handle(record):
        if record.value == POISON:
            wait_for_it()

    async def await_it(record):
        if record.value == POISON:
            await wait_for_it_too()

    handler = await_it if kind == "task" else handle
    inner = "in wait_for_it_too\n" if kind == "task" else "in wait_for_it\n"
    run_to_end(log, handler, initializer=capture, concurrency=1 + (kind == "thread"))
    text = lines.read_text()
    assert text.count("the handler of t-1, offset 6, has not returned for") == 1
    assert inner in text


@pytest.mark.parametrize("is_async", few(False, True))
def test_a_failure_is_reported_although_another_handler_hangs(log, monkeypatch, is_async):
    """After a while, in which it may still finish its record."""
    monkeypatch.setattr(record_worker, "STOP_SECONDS", 0.2)

    def handle(record):
        if record.value == POISON:
            raise ValueError("thirteen")
        if record.value == b"2":
            time.sleep(60)

    async def await_it(record):
        if record.value == b"2":
            await asyncio.sleep(60)
        handle(record)

    options = {**OPTIONS, "concurrency": 2}
    run = embedlog.run_group(log, "t", "g", await_it if is_async else handle, **options)
    with pytest.raises(ValueError, match="thirteen"):
        run.wait(patient(15))
    assert committed(log) == [1, 6]


@pytest.mark.tier("all")
@pytest.mark.parametrize("is_async", [False, True])
def test_a_process_that_hangs_loses_its_partitions(log, notes, is_async):
    """E36: after max_poll_interval_ms without a handler that returns, and as long again."""

    def handle(record):
        if not notes.read():
            notes.add(-1)
            time.sleep(3.0)
        notes.add(int(record.value), os.getpid())

    async def await_it(record):
        if not notes.read():
            notes.add(-1)
            await asyncio.sleep(3.0)
        notes.add(int(record.value), os.getpid())

    options = {**OPTIONS, "processes": 2, "max_poll_interval_ms": 300, "on_error": "skip"}
    with embedlog.run_group(log, "t", "g", await_it if is_async else handle, **options):
        forks.until(lambda: set(notes.numbers) == {-1, *range(40)})
        assert len({pid for _, pid, _ in notes.read()[1:]}) == 1
        forks.until(lambda: len(notes.numbers) > 41)  # it goes on; its result does not count
    assert committed(log) == [20, 20]


@pytest.mark.tier("all")
def test_restarts_are_counted_within_a_window(log, notes):
    """After a quiet time a process may die again."""

    def deadly(record):
        notes.add(int(record.value))
        if len(notes.numbers) < 4:
            time.sleep(0.25)
            os.kill(os.getpid(), signal.SIGKILL)

    options = {**END, "restarts": 1}
    run = embedlog.run_group(log, "t", "g", deadly, restart_window=0.2, **options)
    assert run.wait(patient(60))
    notes.path.write_text("")
    fill(log, range(40, 41))
    with pytest.raises(ProcessDiedError, match="no restarts are left within 300 s"):
        embedlog.run_group(log, "t", "g", deadly, **options).wait(patient(60))


def test_a_topic_that_does_not_exist_is_an_error(log):
    """E37: also for a run without end; unless it may be created."""
    with pytest.raises(UnknownTopicOrPartitionError, match="tt"):
        embedlog.run_group(log, ["t", "tt"], "g", print, **OPTIONS)
    embedlog.run_group(log, "tt", "g", print, allow_auto_create_topics=True, **OPTIONS).stop()
    assert "tt" in log


PROGRAM = """
import os, sys, embedlog

def handle(record):
    with open(sys.argv[2] if len(sys.argv) > 2 else {notes!r}, "a") as file:
        file.write(f"{{os.getppid()}}\\n")

def main():
    log = embedlog.open({root!r})
    within = 3

    def closure(record):
        assert within == 3
        handle(record)

    handler = {handler}
    run = embedlog.run_group(log, "t", "g", handler, until="end", auto_offset_reset="earliest")
    print(os.getpid())
    run.wait()

{start}
"""
GUARD = "if __name__ == '__main__':\n    main()"


@pytest.mark.parametrize(
    ("start", "handler", "has_cloudpickle", "is_forked"),
    sample(
        [
            (GUARD, "handle", True, False),
            (GUARD, "closure", True, False),
            (GUARD, "closure", False, True),
            (
                GUARD,
                "lambda record, lock=__import__('threading').Lock(): handle(record)",
                True,
                True,
            ),
            ("main()", "handle", True, True),
        ],
        1,
    ),
)
def test_processes_are_forked_only_where_nothing_else_works(
    log, tmp_path, start, handler, has_cloudpickle, is_forked
):
    """A program that is not guarded, or a function that cannot be pickled; a forked process is a
    child of the program, and one of the fork server is not."""
    notes, program = tmp_path / "notes", tmp_path / "program.py"
    text = PROGRAM.format(notes=str(notes), root=log.path, start=start, handler=handler)
    hidden = "import sys; sys.modules['cloudpickle'] = None\n" if not has_cloudpickle else ""
    program.write_text(hidden + text)
    pid = run_python(program).split()[0]
    parents = set(notes.read_text().split())
    assert (parents == {pid}) == is_forked
    assert log.groups["g"].lag() == {("t", 0): 0, ("t", 1): 0}


@pytest.mark.tier("all")
def test_a_program_that_is_imported_again_must_not_start_a_run(log, tmp_path):
    """The error says what to do."""
    program = tmp_path / "program.py"
    text = PROGRAM.format(
        notes=str(tmp_path / "n"), root=log.path, start="main()", handler="handle"
    )
    program.write_text(
        text.replace('"t", "g", handler,', '"t", "g", handler, start_method="spawn",')
    )
    with pytest.raises(AssertionError) as caught:
        run_python(program)
    assert IllegalStateError.__name__ in str(caught.value)
    assert "if __name__ == '__main__'" in str(caught.value)


def test_the_settings_of_a_group_are_those_of_kafka():
    """In either spelling; the defaults that differ are in the reference."""
    parsed = GroupConfig.parse({"errors.deadletterqueue.copy.record.enable": "false"})
    assert not parsed.errors_deadletterqueue_copy_record_enable
    with pytest.raises(InvalidConfigError):
        GroupConfig.parse({"errors.deadletterqueue.topic.names": "d"})
