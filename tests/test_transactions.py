"""Transactions: records in any topics, and the offsets of a group, in one step or not at all."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pytest
from support.children import assert_killed, in_child
from support.faulty_files import FaultyFiles
from support.roots import abandon, open_root, values

import embedlog
from embedlog.consumer.open_group import open_group
from embedlog.errors import (
    ClosedError,
    CommitFailedError,
    ConflictError,
    IllegalStateError,
    InvalidGroupIdError,
    InvalidProducerEpochError,
    InvalidRecordError,
    SerializationError,
    UnknownTopicOrPartitionError,
)
from embedlog.group import Group
from embedlog.groups import offsets as group_offsets
from embedlog.partition import journal
from embedlog.publish import live_commit
from embedlog.record import TopicPartition

IN = TopicPartition("in", 0)
SETTINGS = {"auto_offset_reset": "earliest", "enable_auto_commit": False}


@pytest.fixture(params=["in live", "in live, flushed", "published"])
def log(tmp_path, request, monkeypatch):
    """Ten records in each of the two partitions of ``in``, and two topics for outputs."""
    if request.param == "published":
        publish_all(monkeypatch)
    durability = "fsync" if "flushed" in request.param else "os"
    with embedlog.open(tmp_path / "log", durability=durability) as log:
        for topic in ("in", "out", "audit"):
            log.create_topic(topic, 2)
        with log.producer() as producer:
            for number in range(20):
                producer.send("in", b"%d" % number, partition=number % 2)
        yield log
        assert log.housekeeping.verify() == []


def publish_all(monkeypatch):
    """Let transactions be published as those that are too large for a commit in `live`."""
    monkeypatch.setattr(live_commit, "commit", lambda *_, **__: None)


PUBLISHED = pytest.mark.parametrize("log", ["published"], indirect=True)


@pytest.fixture
def consumer(log):
    """A member of the group that has read all records."""
    with log.consumer("in", group_id="g", **SETTINGS) as consumer:
        read(consumer)
        yield consumer


def read(consumer, count=20):
    """Return the next records."""
    records = []
    while len(records) < count:
        polled = consumer.poll(5000)
        assert polled, f"only {len(records)} records came"
        records += [record for each in polled.values() for record in each]
    return records


def contents(log, *topics):
    return [sorted(record.value for record in log.topic(topic)) for topic in topics]


def committed(log, partition=0):
    row = open_group(log.root, "g").committed([TopicPartition("in", partition)])
    return (
        None if (found := row[TopicPartition("in", partition)]) is None else found.position.offset
    )


def test_what_a_block_sends_and_commits_becomes_visible_in_one_step(log, consumer):
    """No reader sees a part of it, whatever it reads."""
    with log.transaction("name") as t:
        future = t.send("out", b"a", key=b"k", headers=[("h", b"1")])
        t.send("audit", b"b", partition=1)
        t.commit_offsets(consumer)
        assert future.result().offset == -1
        assert contents(log, "out", "audit") == [[], []]
        assert committed(log) is None

    assert contents(log, "out", "audit") == [[b"a"], [b"b"]]
    assert (committed(log), committed(log, 1)) == (10, 10)
    assert next(iter(log.topic("out"))).headers == [("h", b"1")]


def test_an_exception_in_the_block_leaves_nothing(log, consumer):
    """It is the one that the program gets, and the next transaction works."""
    with pytest.raises(ZeroDivisionError), log.transaction("name") as t:
        t.send("out", b"no")
        t.commit_offsets(consumer)
        raise ZeroDivisionError
    with log.transaction("name") as t:
        t.send("out", b"yes")

    assert contents(log, "out") == [[b"yes"]]
    assert committed(log) is None


@pytest.mark.parametrize("kind", ["end", "key"])
def test_a_transaction_with_a_condition_is_committed_only_if_nobody_was_faster(log, consumer, kind):
    """At its commit, and as a whole: no record of it is written, and no offset committed."""
    expected = {"end": {"expected_offset": 0}, "key": {"expected_key_offset": None}}[kind]
    later = {"end": {"expected_offset": 1}, "key": {"expected_key_offset": 0}}[kind]
    (found,) = later.values()
    producer = log.producer(transactional_id="name")
    producer.init_transactions()
    producer.begin_transaction()
    producer.send("audit", b"no")
    producer.send("out", b"no", key=b"k", partition=0, **expected)
    producer.send("out", b"no", key=b"k", partition=0)
    producer.commit_offsets(consumer)
    log.producer().send("out", b"faster", key=b"k", partition=0).result()
    for _ in range(2):
        with pytest.raises(ConflictError) as caught:
            producer.commit_transaction()
        assert (caught.value.topic, caught.value.offset) == ("out", found)
    producer.abort_transaction()
    assert contents(log, "out", "audit") == [[b"faster"], []]
    assert committed(log) is None

    producer.begin_transaction()
    producer.send("out", b"yes", key=b"k", partition=0, **later)
    producer.send("out", b"and", key=b"k", partition=0)
    producer.commit_offsets(consumer)
    producer.commit_transaction()
    assert contents(log, "out") == [[b"and", b"faster", b"yes"]]
    assert committed(log) == 10


def test_offsets_alone_and_records_alone_and_nothing(log, consumer):
    """Each is a transaction."""
    with log.transaction("name") as t:
        t.commit_offsets(consumer, {IN: 3})
    assert committed(log) == 3
    with log.transaction() as t:
        t.commit_offsets(consumer, {IN: 4})
    assert committed(log) == 4
    with log.transaction() as t:
        t.send("out", b"x")
    with log.transaction():
        pass
    assert contents(log, "out") == [[b"x"]]


def test_tables_batches_serializers_and_typed_topics_are_sent_in_transactions(log):
    """By the same methods as without one; nothing is visible before the end."""
    log.create_topic("typed", 1, schema=pa.schema({"n": "int64", "text": "string"}))
    log.create_topic("json", 1, {"value.serializer": "json"})
    with log.transaction("name", key_serializer="str") as t:
        t.send("typed", {"n": 1, "text": "a"})
        t.append_table("typed", pa.table({"n": [2, 3], "text": ["b", "c"]}))
        t.send("json", {"a": 1}, key="k")
        t.send_batch("out", [b"1", b"2"], keys=["x", "y"])
        assert t.append_table("out", pa.table({"value": [b"3"]})).result()[0].base_offset is None
        assert [len(log.topic(name)) for name in ("typed", "json", "out")] == [0, 0, 0]

    assert log.topic("typed").to_arrow(columns=["n", "text"]).to_pydict() == {
        "n": [1, 2, 3],
        "text": ["a", "b", "c"],
    }
    assert [record.value for record in log.topic("json")] == [{"a": 1}]
    assert contents(log, "out") == [[b"1", b"2", b"3"]]


def test_a_transaction_that_exceeds_the_memory_of_its_producer_goes_to_a_file(log):
    """Its order is kept, and the file is removed, whether it is committed or not."""
    staged = Path(log.path) / "staging"
    for commits in (True, False):
        with log.producer(transactional_id="x", buffer_memory=200_000) as producer:
            producer.init_transactions()
            producer.begin_transaction()
            for number in range(100):
                producer.send("out", b"%03d" % number + bytes(10_000), partition=0)
            assert list(staged.rglob("transaction"))
            if commits:
                producer.commit_transaction()
            else:
                producer.abort_transaction()
        assert not list(staged.rglob("transaction"))

    rows = [record.value[:3] for record in log.topic("out")]
    assert rows == [b"%03d" % number for number in range(100)]


def test_a_record_that_fails_keeps_the_transaction_from_being_committed(log, consumer):
    """A part of a transaction is never published."""
    log.create_topic("compacted", 1, {"cleanup.policy": "compact"})
    with pytest.raises(InvalidRecordError), log.transaction("name") as t:
        t.send("out", b"x")
        t.send("compacted", b"without a key")
        t.commit_offsets(consumer)
    assert contents(log, "out", "compacted") == [[], []]
    assert committed(log) is None
    # What `send` itself refuses is known to the program.
    with log.transaction("name") as t:
        with pytest.raises(SerializationError):
            t.send("out", 1)
        t.send("out", b"y")
    assert contents(log, "out") == [[b"y"]]


def test_a_later_program_with_the_same_name_fences_an_earlier_one(log, consumer):
    """Whatever that has sent; every call of the earlier one says so, and the later one works."""
    with embedlog.open(log.path) as other:
        with pytest.raises(InvalidProducerEpochError), log.transaction("name") as t:
            t.send("out", b"early")
            t.commit_offsets(consumer)
            with other.transaction("name") as late:
                late.send("out", b"late")
        for call in (
            lambda: log.transaction("name").__enter__(),
            lambda: t.send("audit", b"x"),
            lambda: t.send_batch("out", [b"x"]),
            t.commit_transaction,
        ):
            with pytest.raises(InvalidProducerEpochError):
                call()
        with other.transaction("name") as late:
            late.send("out", b"again")

    assert contents(log, "out", "audit") == [[b"again", b"late"], []]
    assert committed(log) is None


# The member


def take_over(log, consumer):
    """Remove the member, and let another one take its partitions; return that one."""
    log.groups["g"].remove_members(consumer.group_metadata().member_id)
    return log.consumer("in", group_id="g", **SETTINGS)


def test_a_member_that_was_replaced_commits_nothing(log, consumer):
    """KIP-447: neither its offsets nor its records become visible."""
    with pytest.raises(CommitFailedError, match="removed"), log.transaction() as t:
        t.send("out", b"x")
        t.commit_offsets(consumer)
        with take_over(log, consumer) as other:
            first_offset(other)
    assert contents(log, "out") == [[]]
    assert committed(log) is None


def test_a_partition_that_was_lost_and_came_back_is_not_committed(log, consumer):
    """Its owner in between has moved the position: what was read before does not count."""
    member = consumer.group_metadata()
    with log.consumer("in", group_id="g", **SETTINGS) as other:
        for each in (consumer, other, consumer, other):
            each.poll(0)
        mine, others = consumer.assignment(), other.assignment()
        assert len(mine) == len(others) == 1
        with log.transaction() as t:  # A partition that was kept is not lost.
            t.send_offsets_to_transaction(dict.fromkeys(mine, 5), member)
    consumer.poll(0)
    assert consumer.assignment() == mine | others

    with pytest.raises(CommitFailedError, match="since generation"), log.transaction() as t:
        t.send("out", b"x")
        t.send_offsets_to_transaction(dict.fromkeys(others, 5), member)
    assert contents(log, "out") == [[]]
    with log.transaction() as t:
        t.commit_offsets(consumer, dict.fromkeys(others, 5))
    assert committed(log) == committed(log, 1) == 5


def test_a_consumer_with_assigned_partitions_commits_while_the_group_has_no_members(log):
    """As outside of a transaction; a name of a group counts as one."""
    with log.consumer(group_id="g", **SETTINGS) as assigned:
        assigned.assign([IN])
        read(assigned, 10)
        with log.transaction() as t:
            t.commit_offsets(assigned)
        assert committed(log) == 10
        with log.transaction() as t:
            t.send_offsets_to_transaction({IN: 11}, "g")
        assert committed(log) == 11
        with log.consumer("in", group_id="g", **SETTINGS) as member:
            member.poll(5000)
            for who in (assigned.group_metadata(), "g"):
                with pytest.raises(CommitFailedError, match="has members"), log.transaction() as t:
                    t.send_offsets_to_transaction({IN: 12}, who)


def test_calls_that_cannot_work_are_refused(log, consumer):
    """Each with the error that says why; nothing is visible."""
    with log.producer() as plain:
        for call in (plain.init_transactions, plain.begin_transaction, plain.commit_transaction):
            with pytest.raises(IllegalStateError, match="Set transactional_id"):
                call()
    with log.producer(transactional_id="x") as producer:
        for call in (producer.begin_transaction, producer.commit_transaction):
            with pytest.raises(IllegalStateError, match="init_transactions"):
                call()
        producer.init_transactions()
        for call in (
            producer.abort_transaction,
            lambda: producer.send("out", b"x"),
            lambda: producer.send_batch("out", [b"x"]),
            lambda: producer.commit_offsets(consumer),
        ):
            with pytest.raises(IllegalStateError, match="begin_transaction"):
                call()
        producer.begin_transaction()
        with pytest.raises(IllegalStateError):
            producer.begin_transaction()
        with pytest.raises(IllegalStateError, match="transactional_id"):
            producer.send_batch("out", [b"x"], partition=0, sequence=0)
        with log.consumer("in", group_id="h", auto_offset_reset="earliest") as automatic:
            with pytest.raises(IllegalStateError, match="auto_commit"):
                producer.commit_offsets(automatic)
        with log.consumer("in") as single:
            with pytest.raises(InvalidGroupIdError):
                producer.commit_offsets(single)
        with pytest.raises(UnknownTopicOrPartitionError):
            producer.commit_offsets(consumer, {("in", 7): 1})
        with pytest.raises(ValueError, match="offset"):
            producer.commit_offsets(consumer, {IN: -1})
        producer.commit_offsets(consumer)
        with pytest.raises(IllegalStateError, match="already"):
            producer.send_offsets_to_transaction({IN: 1}, "h")
        producer.send("out", b"x")
    assert contents(log, "out") == [[]]
    assert committed(log) is None
    with pytest.raises(ClosedError):
        producer.begin_transaction()


@pytest.mark.parametrize("topic", ["in", "out"])
@pytest.mark.parametrize("again", [False, True])
def test_a_topic_that_is_deleted_during_a_transaction_ends_it(log, consumer, topic, again):
    """Whether it is read or written, and whether or not it is created again."""
    expected = (UnknownTopicOrPartitionError, CommitFailedError)
    with pytest.raises(expected), log.transaction("name") as t:
        t.send("audit", b"x")
        t.send("out", b"x").result()
        t.commit_offsets(consumer)
        log.delete_topic(topic)
        if again:
            log.create_topic(topic, 2)
    assert contents(log, "audit") == [[]]


def test_a_forked_child_begins_transactions_of_its_own(log):
    """That of its parent is not the child's, and is not changed by it."""
    with log.producer(transactional_id="parent") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send("out", b"parent").result()

        def child():
            with pytest.raises(IllegalStateError):
                producer.commit_transaction()
            with pytest.raises(IllegalStateError):
                producer.send("out", b"x")
            with log.transaction("child") as t:
                t.send("out", b"child")

        in_child(child)
        producer.commit_transaction()
    assert contents(log, "out") == [[b"child", b"parent"]]


# Kills and power cuts between two steps


def transform_and_die(log, at, count=20):
    """Have a member, which reads all records, commit in a process that is killed at a step."""

    def run():
        with embedlog.open(log.path) as own, own.consumer("in", group_id="g", **SETTINGS) as member:
            read(member, count)

            def die(*_, **__):
                os.kill(os.getpid(), signal.SIGKILL)

            with own.transaction("name") as t:
                t.send("out", b"x")
                t.send("audit", b"y")
                t.commit_offsets(member)
                patch.object(*at, die).start()

    assert_killed(run)


COMMITTED, NOTED = (journal, "make_visible"), (group_offsets, "commit")
READERS = {
    "a member": lambda log: take_partitions(log),
    "an assigned consumer": lambda log: committed(log),
    "the next writer": lambda log: write_outputs(log),
    "the next of its name": lambda log: commit_nothing(log),
}


def take_partitions(log):
    """Return where a member begins to read."""
    with log.consumer("in", group_id="g", **SETTINGS) as member:
        return first_offset(member)


def first_offset(member):
    """Return the offset of the first record that a member gets; 10 if there is none."""
    while True:
        polled = member.poll(200)
        if polled or member.assignment():
            return polled[IN][0].offset if IN in polled else 10


def commit_nothing(log):
    with log.transaction("name"):
        pass


def write_outputs(log):
    log.root.partition("out", 0).roll()
    log.root.partition("out", 1).roll()


@PUBLISHED
@pytest.mark.parametrize("reader", READERS)
def test_a_transaction_that_was_committed_before_its_process_died_is_finished(log, reader):
    """By whoever comes first: a member that takes a partition over repeats nothing."""
    transform_and_die(log, COMMITTED)
    result = READERS[reader](log)

    assert contents(log, "out", "audit") == [[b"x"], [b"y"]]
    assert result in (None, 10)
    assert (committed(log), committed(log, 1)) == (10, 10)


@PUBLISHED
def test_a_log_that_is_read_only_shows_what_was_before_an_unfinished_transaction(log):
    """It may not finish it; records and positions agree all the same."""
    transform_and_die(log, COMMITTED)
    with embedlog.open(log.path, mode="r") as reader, reader.consumer(group_id="g") as consumer:
        assert consumer.committed(IN) is None
        assert contents(reader, "out", "audit") == [[], []]
    assert committed(log) == 10


@PUBLISHED
@pytest.mark.parametrize("reader", READERS)
def test_a_transaction_that_was_not_committed_before_its_process_died_is_dropped(log, reader):
    """Its note keeps nobody from taking the partitions over, or from committing."""
    transform_and_die(log, NOTED)
    result = READERS[reader](log)

    assert result in (None, 0)
    assert contents(log, "out", "audit") == [[], []]
    assert committed(log) is None
    open_group(log.root, "g").remove_dead_members()
    with log.consumer(group_id="g", **SETTINGS) as assigned:
        assigned.assign([IN])
        assigned.commit({IN: 4})
    assert committed(log) == 4
    log.groups["g"].delete()


@PUBLISHED
def test_a_member_that_takes_over_before_the_commit_makes_it_fail(log, consumer):
    """It reads the old position, so nothing of the transaction may become visible later."""
    announce = Group.announce
    taken = []

    def announce_and_lose(group, member, *rest):
        rows = announce(group, member, *rest)
        with take_over(log, consumer) as other:
            taken.append(first_offset(other))
        return rows

    with patch.object(Group, "announce", announce_and_lose):
        with pytest.raises(CommitFailedError, match="took over"), log.transaction() as t:
            t.send("out", b"x")
            t.commit_offsets(consumer)

    assert taken == [0]
    assert contents(log, "out") == [[]]
    assert committed(log) is None


def test_a_checkpoint_never_saves_an_older_offset_than_a_committed_transaction(
    tmp_path, monkeypatch
):
    """Between the commit and the step that makes it visible, `live` has the older one."""
    publish_all(monkeypatch)
    with embedlog.open(tmp_path / "log") as log:
        for topic in ("in", "out", "audit"):
            log.create_topic(topic, 2)
        for partition in (0, 1):
            log.producer().send_batch("in", [b"x"] * 10, partition=partition)
        log.flush()
        open_group(log.root, "g").commit({IN: embedlog.OffsetAndMetadata(1)})
        transform_and_die(log, COMMITTED, 19)
        open_group(log.root, "g").checkpoint(always=True)
        abandon(log.root)

    reopened = open_root(tmp_path / "log", files=boot(1))
    rows = open_group(reopened, "g").committed([IN])
    assert rows[IN].position.offset == 10
    assert [
        values(reopened.partition(name, 0)) + values(reopened.partition(name, 1))
        for name in ("out", "audit")
    ] == [[b"x"], [b"y"]]
    abandon(reopened)


def boot(number):
    """Return the files of a machine that was booted again."""

    class Booted(FaultyFiles):
        def boot_id(self):
            return f"boot {number}"

    return Booted


# In several processes


def double(record):
    """Send each number to one topic, and note it in another one."""
    yield "out", record.value, record.key
    yield "audit", b"of %s" % record.value


@pytest.mark.tier("test")
def test_the_outputs_of_a_group_are_sent_exactly_once(log):
    """Although its processes are killed at any instant."""
    with log.producer() as producer:
        for number in range(20, 2000):
            producer.send("in", b"%d" % number, partition=number % 2)
    run = embedlog.run_group(
        *(log, "in", "g", double),
        outputs=True,
        until="end",
        restarts=100,
        start_method="fork",
        auto_offset_reset="earliest",
        max_poll_records=20,
    )
    for _ in range(5):
        if run.wait(0.3):
            break
        with suppress(ProcessLookupError):  # It may have ended.
            os.kill(run.pids[0], signal.SIGKILL)
    assert run.wait(60)

    numbers = sorted(b"%d" % number for number in range(2000))
    assert contents(log, "out", "audit") == [numbers, sorted(b"of %s" % each for each in numbers)]
    assert (committed(log), committed(log, 1)) == (1000, 1000)


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("handler", "error"),
    [(lambda record: ["out"], TypeError), (lambda record: 1 / 0, ZeroDivisionError)],
)
def test_a_handler_that_fails_sends_nothing(log, handler, error):
    """The run ends with its error; nothing is committed."""
    run = embedlog.run_group(
        *(log, "in", "g", handler), outputs=True, auto_offset_reset="earliest", start_method="fork"
    )
    with pytest.raises(error):
        run.wait(60)
    assert contents(log, "out") == [[]]
    assert committed(log) is None


def test_the_clients_of_kafka_commit_offsets_in_transactions(log, tmp_path):
    """As their documentation shows it."""
    kafka = pytest.importorskip("kafka")
    from embedlog.kafka import KafkaConsumer, KafkaProducer

    address = f"embedlog://{log.path}"
    consumer = KafkaConsumer(
        "in",
        bootstrap_servers=address,
        group_id="g",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    producer = KafkaProducer(bootstrap_servers=address, transactional_id="name")
    producer.init_transactions()
    polled = consumer.poll(5000)
    producer.begin_transaction()
    offsets = {
        partition: kafka.structs.OffsetAndMetadata(records[-1].offset + 1, "", -1)
        for partition, records in polled.items()
    }
    producer.send("out", b"x")
    producer.send_offsets_to_transaction(offsets, consumer.group_metadata())
    producer.commit_transaction()
    assert contents(log, "out") == [[b"x"]]
    assert sum(committed(log, number) or 0 for number in (0, 1)) == sum(map(len, polled.values()))
    producer.begin_transaction()
    producer.send("out", b"y")
    producer.send_offsets_to_transaction(offsets, consumer.group_metadata())
    log.groups["g"].remove_members(consumer.group_metadata().member_id)
    with pytest.raises(kafka.errors.CommitFailedError):
        producer.commit_transaction()
    producer.abort_transaction()
    producer.close()
    consumer.close()
    assert contents(log, "out") == [[b"x"]]


def test_confluents_clients_commit_offsets_in_transactions(log):
    """As their documentation shows it; what lost its partition must be aborted."""
    confluent = pytest.importorskip("confluent_kafka")
    from embedlog.kafka.confluent import Consumer, Producer

    address = {"bootstrap.servers": f"embedlog://{log.path}"}
    settings = {"group.id": "g", "auto.offset.reset": "earliest", "enable.auto.commit": False}
    consumer = Consumer({**address, **settings})
    consumer.subscribe(["in"])
    producer = Producer({**address, "transactional.id": "name"})
    producer.init_transactions()
    messages = consumer.consume(20, 5.0)
    producer.begin_transaction()
    producer.produce("out", "x")
    assigned = consumer.position(consumer.assignment())
    producer.send_offsets_to_transaction(assigned, consumer.consumer_group_metadata())
    producer.commit_transaction()
    assert contents(log, "out") == [[b"x"]]
    assert sum(committed(log, number) or 0 for number in (0, 1)) == len(messages)
    producer.begin_transaction()
    producer.produce("out", "y")
    producer.send_offsets_to_transaction(assigned, consumer.consumer_group_metadata())
    log.groups["g"].remove_members(consumer.memberid())
    with pytest.raises(confluent.KafkaException) as caught:
        producer.commit_transaction()
    assert caught.value.args[0].txn_requires_abort()
    producer.abort_transaction()
    producer.close()
    consumer.close()
    assert contents(log, "out") == [[b"x"]]
