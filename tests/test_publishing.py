"""A publication appends staged batches to all its partitions at once, and only once."""

import itertools
import logging
import os
import signal
import threading
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
from support.children import PausedChild, assert_killed, in_threads
from support.clock import START
from support.faulty_files import FaultyFiles
from support.roots import abandon, bases, encoded, fill, healthy, make_log, open_root, rows, values
from support.staged_files import directory, escalation, publish, stage
from support.tiers import sample

from embedlog import keyspace, kv
from embedlog.config import TopicConfig
from embedlog.errors import (
    CorruptBatchError,
    CorruptionError,
    DurabilityError,
    InvalidRecordError,
    LockTimeoutError,
    RecordTooLargeError,
    RestartedApplicationError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.files import Files
from embedlog.partition import journal
from embedlog.publish import app_versions, transaction
from embedlog.publish.staging import StagedFileWriter

DAY = 86_400_000


@pytest.fixture
def topics(root):
    """Topics "a" of two partitions and "b" of one."""
    root.create_topic("a", 2, TopicConfig())
    root.create_topic("b", 1, TopicConfig())
    return root


def values_by_partition(root):
    return {
        f"{name}_{number}": values(root.partition(name, number))
        for name, info in root.topics().items()
        for number in range(info.partitions)
    }


# What is published


def test_what_was_staged_is_at_the_ends_of_its_partitions(topics):
    """Offsets continue without a gap, in the order of staging."""
    topics.partition("a", 0).append([encoded(b"before")])
    first = stage(topics, a_0=[b"1", b"2"], b_0=[b"x"])
    second = stage(topics, a_0=[b"3"])

    result = publish(topics, [first, second])

    assert result == transaction.PublishResult(4)
    assert values_by_partition(topics) == {
        "a_0": [b"before", b"1", b"2", b"3"],
        "a_1": [],
        "b_0": [b"x"],
    }
    assert [row[0] for row in rows(topics.partition("a", 0))] == [0, 1, 2, 3]


def test_no_reader_sees_what_is_only_staged(topics):
    """It becomes visible when it is published, and `verify` does not report it before."""
    stage(topics, a_0=[b"1"])

    assert topics.partition("a", 0).end_offset() == 0
    assert healthy(topics)


def test_staged_batches_are_not_encoded_again(topics):
    """They keep their checksums, and are read like appended batches."""
    publish(topics, [stage(topics, a_0=[b"x" * 10_000])])

    (batch,) = topics.partition("a", 0).reader(0).read()
    batch.verify()
    assert (batch.base_offset, batch.next_offset, batch.leader_epoch) == (0, 1, 0)


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_publication_may_take_many_segments(root, durability):
    """No segment exceeds segment.bytes, however much is published at once."""
    log = make_log(root, {"segment.bytes": 2000, "index.interval.bytes": 300})
    fill(log, 2)

    publish(root, [stage(root, t_0=[b"%d" % row for row in range(20)])], durability=durability)
    fill(log, 1, first=2)

    assert values(log) == [b"v0", b"v1", *(b"%d" % row for row in range(20)), b"v2"]
    assert len(bases(log)) > 5
    assert all(info.size <= 2600 for info in log.segments.values())
    assert log.offset_for_timestamp(START).offset == 0
    assert [row[3] for row in rows(log, 17)] == [b"15", b"16", b"17", b"18", b"19", b"v2"]


def test_headers_begin_a_segment_that_has_them(topics):
    """A segment has one schema; batches without headers get an empty column."""
    log = topics.partition("a", 0)
    fill(log, 1)
    writer = StagedFileWriter(topics.context.files, directory(), "headers")
    info = topics.topic("a")
    writer.add("a", info.id, 0, encoded(b"plain"))
    writer.add("a", info.id, 0, encoded(b"with", headers=[[("h", b"1")]]))

    publish(topics, [writer.finish()])

    assert bases(log) == [0, 1]
    assert [(row[3], row[4]) for row in rows(log)] == [
        (b"v0", []),
        (b"plain", []),
        (b"with", [("h", b"1")]),
    ]


def test_a_topic_that_stamps_records_stamps_these(root, clock):
    """A7: LogAppendTime is the time of the publication."""
    log = make_log(root, {"message.timestamp.type": "LogAppendTime"})
    staged = stage(root, t_0=[b"1"])
    clock.advance(5)

    publish(root, [staged])

    assert [row[1] for row in rows(log)] == [START + 5]


def test_an_idempotent_producer_goes_on_across_a_publication(topics):
    """G16: a publication has no sequence numbers, and leaves those of producers as they are."""
    log = topics.partition("a", 0)
    log.append([encoded(b"1", producer=(7, 0, 0))])
    publish(topics, [stage(topics, a_0=[b"x"])], durability="fsync")
    (resent,) = log.append([encoded(b"1", producer=(7, 0, 0))])
    (next_append,) = log.append([encoded(b"2", producer=(7, 0, 1))])

    assert (resent.duplicate, resent.base_offset, next_append.base_offset) == (True, 0, 2)


def test_waiting_readers_are_woken(topics):
    """A publication wakes them as an append does."""
    before = topics.context.wake.published()

    publish(topics, [stage(topics, a_0=[b"1"])])

    assert topics.context.wake.published() > before


def test_an_anonymous_publication_of_nothing_does_nothing(topics):
    """It does not commit a transaction."""
    version = topics.version()

    assert publish(topics, []) == transaction.PublishResult(0)
    assert topics.version() == version


# Refusals


def test_a_topic_that_refuses_a_batch_refuses_the_publication(root):
    """A4, A6: nothing of it is published."""
    root.create_topic("a", 1, TopicConfig())
    root.create_topic("k", 1, TopicConfig.parse({"cleanup.policy": "compact"}))
    root.create_topic("s", 1, TopicConfig.parse({"max.message.bytes": 500}))

    with pytest.raises(InvalidRecordError):
        publish(root, [stage(root, a_0=[b"1"], k_0=[b"no key"])])
    with pytest.raises(RecordTooLargeError):
        publish(root, [stage(root, a_0=[b"1"], s_0=[b"x" * 600])])

    assert not any(values_by_partition(root).values())


def test_a_topic_that_was_created_again_is_another_topic(topics):
    """Batches staged for the old topic are not published to the new one."""
    staged = stage(topics, b_0=[b"1"])
    recreate_topics(topics, "b")

    with pytest.raises(UnknownTopicOrPartitionError, match="created again"):
        publish(topics, [staged])


def test_a_staged_file_that_is_gone_or_damaged_is_an_error(topics):
    """Nothing is published from it."""
    gone, damaged = stage(topics, a_0=[b"1"]), stage(topics, a_0=[b"2"])
    topics.context.files.unlink(gone.path)
    with open(f"{topics.path}/{damaged.path}", "r+b") as file:
        file.seek(300)
        file.write(b"\xff\xff\xff")

    with pytest.raises(StorageError):
        publish(topics, [gone])
    with pytest.raises(CorruptBatchError):
        publish(topics, [damaged])
    assert not any(values_by_partition(topics).values())


@pytest.fixture(params=[False, True], ids=["locks of partitions", "lock of the log"])
def escalated(request):
    """Whether publications escalate to the lock of the log."""
    with escalation() if request.param else nullcontext():
        yield request.param


def test_a_partition_that_another_process_holds_is_an_error_after_the_timeout(topics, escalated):
    """P16: the error names the process; the locks of the other partitions are released."""
    staged = [stage(topics, a_0=[b"1"], b_0=[b"2"])]

    def hold(held):
        log = open_root(topics.path).partition("b", 0)
        log.acquire()
        held()

    with PausedChild(hold) as holder:
        with pytest.raises(LockTimeoutError) as caught:
            publish(topics, staged, timeout=0.05)
        topics.partition("a", 0).append([encoded(b"x")])
        assert caught.value.pid == holder.pid

    assert values_by_partition(topics)["b_0"] == []


def test_a_failed_flush_publishes_nothing_and_closes_that_partition_only(tmp_path):
    """P9: the other partitions are unchanged and accept appends."""
    root = open_root(tmp_path / "faulty", files=FaultyFiles)
    root.create_topic("a", 2, TopicConfig())
    for number in range(2):
        fill(root.partition("a", number), 1, durability="fsync")
    root.context.files.fail_at(0, 5, only=("sync",))

    with pytest.raises(DurabilityError):
        publish(root, [stage(root, a_0=[b"1"], a_1=[b"2"])], 1, durability="fsync")

    assert [root.partition("a", number).tail().failed for number in range(2)] == [True, False]
    fill(root.partition("a", 1), 1, first=1)
    assert values_by_partition(root) == {"a_0": [b"v0"], "a_1": [b"v0", b"v1"]}
    assert app_versions.get(root.context.state, "q") is None
    abandon(root)


# Once


def test_a_query_that_starts_over_is_refused(topics):
    """Its checkpoint was deleted: the message says what was published, and what to do."""
    for version in (0, 1):
        publish(topics, [stage(topics, a_0=[b"%d" % version])], version, source="first query")

    with pytest.raises(RestartedApplicationError, match=r"first query.*checkpoint") as caught:
        publish(topics, [stage(topics, a_0=[b"0"])], 0, source="second query")

    assert '.option("allowRestart", "true")' in str(caught.value)
    assert (caught.value.topic, caught.value.version, caught.value.published) == ("a", 0, 1)
    assert values_by_partition(topics)["a_0"] == [b"0", b"1"]


def test_a_checkpoint_is_identified_by_its_path(topics):
    """After the checkpoint was deleted the query has another id, and thus another name."""
    first = transaction.Publication("query 1", 0, "query 1", "r", "/checkpoints/a")
    transaction.publish(topics, [stage(topics, a_0=[b"0"])], first)

    restarted = transaction.Publication("query 2", 0, "query 2", "r", "/checkpoints/a")
    with pytest.raises(RestartedApplicationError, match="/checkpoints/a"):
        transaction.publish(topics, [stage(topics, a_0=[b"0"])], restarted)
    elsewhere = restarted._replace(checkpoint="/checkpoints/b")
    transaction.publish(topics, [stage(topics, a_0=[b"1"])], elsewhere)

    assert values_by_partition(topics)["a_0"] == [b"0", b"1"]


def test_a_checkpoint_that_was_moved_is_still_the_same_query(topics):
    """The checkpoint contains the id of the query."""
    first = transaction.Publication("query", 0, "query", "r", "/here")
    transaction.publish(topics, [stage(topics, a_0=[b"0"])], first)

    result = transaction.publish(
        topics, [stage(topics, a_0=[b"0"])], first._replace(checkpoint="/there")
    )

    assert result.repeated is not None


def test_two_runs_of_one_query_publish_a_batch_once_between_them(topics):
    """The runs send different records, and lock different partitions."""
    barrier, results = threading.Barrier(4), []

    def run(number):
        staged = [stage(topics, **{f"a_{number % 2}": [b"%d" % number]})]
        barrier.wait()
        results.append(publish(topics, staged, 0, run=f"run {number}"))

    with in_threads(*(partial(run, number) for number in range(4))):
        pass

    assert sum(result.records for result in results) == 1
    assert sum(map(len, values_by_partition(topics).values())) == 1


def test_a_truncation_below_a_publication_lets_it_be_repeated(topics):
    """Truncated versions are published again; a version below the cut would be duplicated."""
    log = topics.partition("a", 0)
    for version in (0, 1):
        publish(topics, [stage(topics, a_0=[b"%d" % version])], version)
    log.truncate_to(1)

    assert publish(topics, [stage(topics, a_0=[b"0"])], 0).repeated is not None
    assert publish(topics, [stage(topics, a_0=[b"1"])], 1).repeated is None
    assert values_by_partition(topics)["a_0"] == [b"0", b"1"]


def test_a_name_may_be_long(topics):
    """A path may be longer than a key of LMDB."""
    name = "/deep" * 300
    first = transaction.Publication(name, 4, "q", "r", name)
    transaction.publish(topics, [stage(topics, a_0=[b"1"])], first)

    with pytest.raises(RestartedApplicationError):
        transaction.publish(topics, [stage(topics, a_0=[b"1"])], first._replace(source="r"))
    assert transaction.publish(topics, [stage(topics, a_0=[b"1"])], first).repeated.version == 4


# Topics that are deleted, created again, or changed between publications


def recreate_topics(root, *names):
    for name in names:
        partitions = root.topic(name).partitions
        root.delete_topic(name)
        root.create_topic(name, partitions, TopicConfig())


def publish_batch(root, version, *parts, query="q", restart=False):
    """Publish a micro-batch with its version as the value, one record for each partition."""
    staged = [stage(root, **{part: [b"%d" % version] for part in parts})]
    publication = transaction.Publication(query, version, query, "r", "/checkpoint")
    return transaction.publish(root, staged, publication, restart=restart)


def write(root, version, *parts, application="app", topics=()):
    """Publish as a batch write with a ``txnAppId`` does."""
    staged = [stage(root, **{part: [b"%d" % version] for part in parts})]
    publication = transaction.Publication(application, version, topics=topics)
    return transaction.publish(root, staged, publication)


def test_a_query_may_start_over_with_another_topic_but_not_go_back(topics):
    """The checkpoint was deleted and the target changed; the first topic has its records."""
    publish_batch(topics, 0, "a_0", query="first")

    assert publish_batch(topics, 0, "b_0", query="second").records == 1
    with pytest.raises(RestartedApplicationError):
        publish_batch(topics, 1, "a_1", query="second")
    with pytest.raises(RestartedApplicationError):
        publish_batch(topics, 0, "a_0", query="third")
    with pytest.raises(RestartedApplicationError):
        publish_batch(topics, 0, "b_0", query="third")

    assert values_by_partition(topics) == {"a_0": [b"0"], "a_1": [], "b_0": [b"0"]}


def test_an_empty_batch_write_counts_for_the_topic_that_it_names(topics):
    """It has no staged file, but uses its version."""
    write(topics, 1, topics=(topics.topic("a").id,))

    assert write(topics, 1, "a_0").repeated
    assert write(topics, 1, "b_0").records == 1


def test_a_stream_cannot_use_the_name_of_batch_writes(topics):
    """Stream and batch writes count their versions independently."""
    write(topics, 3, "a_0")

    for version in (0, 9):
        with pytest.raises(RestartedApplicationError, match="batch writes"):
            publish(topics, [stage(topics, a_0=[b"x"])], version, source="query")
    publish(topics, [stage(topics, b_0=[b"x"])], 0, source="query")
    with pytest.raises(RestartedApplicationError, match="query"):
        write(topics, 9, "b_0")


# How long versions of applications are kept


class Machine(Files):
    """Files of a machine whose clocks and boot id a test sets."""

    up = 0
    boot = "first boot"

    def uptime_ms(self):
        return Machine.up

    def boot_id(self):
        return Machine.boot


@pytest.fixture
def machine(tmp_path, clock, monkeypatch):
    """A root with a topic; more than two versions are too many, and every publication checks."""
    monkeypatch.setattr(app_versions, "MAX_ROWS", 2)
    monkeypatch.setattr(app_versions, "CHECK_INTERVAL", 1)
    monkeypatch.setattr(Machine, "up", 1_000)
    monkeypatch.setattr(Machine, "boot", "first boot")
    root = open_root(tmp_path / "machine", files=Machine, clock=clock)
    root.create_topic("a", 1, TopicConfig())
    yield root
    abandon(root)


_versions = itertools.count(1_000)


def publish_others(root, count=3):
    """Publish under other names, until there are too many versions."""
    for number in range(count):
        assert write(root, next(_versions), "a_0", application=f"other {number}").records


def remembered_names(root):
    return {name for name, _ in all_versions(root)}


def all_versions(root):
    return root.context.state.read(lambda txn: dict(app_versions.APP_VERSIONS.scan_valid(txn)))


def test_app_versions_are_dropped_when_they_are_many_and_idle(machine, clock):
    """The oldest ones are dropped, after 30 days by the clocks of the machine."""
    write(machine, 1, "a_0", application="first")
    write(machine, 1, "a_0", application="second")
    Machine.up += 31 * DAY
    clock.advance(31 * DAY)
    assert write(machine, 1, "a_0", application="first").repeated
    write(machine, 1, "a_0", application="third")
    assert remembered_names(machine) == {"second", "third"}

    publish_others(machine)
    assert remembered_names(machine) == {"third", "other 0", "other 1", "other 2"}
    Machine.up += 30 * DAY
    publish_others(machine)
    assert "third" in remembered_names(machine)
    Machine.up += 1
    publish_others(machine)
    assert remembered_names(machine) == {"other 0", "other 1", "other 2"}


def test_app_versions_of_deleted_topics_are_dropped(machine):
    """Ids of topics are not used again."""
    machine.create_topic("b", 1, TopicConfig())
    write(machine, 1, "a_0")
    write(machine, 1, "b_0")
    deleted_id = machine.topic("b").id
    recreate_topics(machine, "b")
    publish_others(machine, count=1)

    versions = all_versions(machine)
    assert ("app", machine.topic("a").id) in versions
    assert ("app", deleted_id) not in versions


def damage_rows(root, prefix):
    def flip_last_bits(txn):
        for key, row in list(kv.rows(txn, prefix)):
            txn.put(key, row[:-1] + bytes([row[-1] ^ 1]))

    root.context.state.write(flip_last_bits)


def test_a_damaged_app_version_stops_its_application_and_no_other(machine):
    """Other applications publish, and drop their idle versions."""
    write(machine, 1, "a_0")
    damage_rows(machine, keyspace.APP_VERSIONS.prefix("app"))

    with pytest.raises(CorruptionError, match="app"):
        write(machine, 1, "a_0")
    assert write(machine, 1, "a_0", application="other").records == 1


def test_a_damaged_clock_of_publications_continues_from_the_last_app_version(
    machine, clock, caplog
):
    """No version is dropped too early, and no publication fails."""
    Machine.up += 100 * DAY
    write(machine, 1, "a_0")
    damage_rows(machine, keyspace.PUBLICATION_CLOCK.key())
    with caplog.at_level(logging.WARNING, "embedlog"):
        publish_others(machine)

    assert "The clock of publications is damaged" in caplog.text
    Machine.up += 29 * DAY
    publish_others(machine)
    assert write(machine, 1, "a_0").repeated
    Machine.up += 2 * DAY
    publish_others(machine)
    assert "app" not in remembered_names(machine)


# Concurrent appends and reads


def test_appends_and_publications_take_turns(topics, escalated):
    """No append of a thread to the same partitions is lost, and no offset is skipped."""
    done = threading.Event()

    def append():
        number = 0
        while not done.is_set() or number < 20:
            topics.partition("a", number % 2).append([encoded(b"n%d" % number)])
            number += 1

    with in_threads(append, done=done):
        for version in range(20):
            publish(topics, [stage(topics, a_0=[b"p"], a_1=[b"p"])], version)

    written = values_by_partition(topics)
    assert [written[part].count(b"p") for part in ("a_0", "a_1")] == [20, 20]
    assert sum(value != b"p" for part in written.values() for value in part) >= 20


def test_an_append_finishes_what_was_committed_even_if_a_read_came_before_it(topics):
    """A read takes the new snapshot of `state`, and leaves the publication to writers."""
    log = topics.partition("a", 0)
    log.append([encoded(b"before")])

    def publish_and_die():
        other = open_root(topics.path)
        journal.make_visible = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        publish(other, [stage(other, a_0=[b"published"], b_0=[b"too"])])

    assert_killed(publish_and_die)
    log.end_offset()
    log.append([encoded(b"after")])

    assert values(log) == [b"before", b"published", b"after"]
    assert values(topics.partition("b", 0)) == [b"too"]


def publish_until(place, reached):
    """Publish to two partitions under the lock of the log; call ``reached`` in the middle."""
    write = transaction._write

    def pausing(plan):
        files = write(plan)
        if plan.log.topic == "b":
            reached()
        return files

    other = open_root(place)
    with escalation(), patch.object(transaction, "_write", pausing):
        publish(other, [stage(other, a_0=[b"published"], b_0=[b"too"])], 1)


OPERATIONS = {
    "append": lambda root: root.partition("a", 0).append([encoded(b"x")]),
    "elsewhere": lambda root: root.partition("a", 1).append([encoded(b"x")]),
    "publish": lambda root: publish(root, [stage(root, a_0=[b"x"])], 7),
    "escalate": lambda root: publish_escalated(root),
    "delete": lambda root: root.delete_topic("b"),
    "truncate": lambda root: root.partition("a", 0).truncate_to(0),
}


def publish_escalated(root):
    with escalation():
        publish(root, [stage(root, a_0=[b"x"])], 8)


@pytest.mark.parametrize("operation", sample([*OPERATIONS], 3))
def test_while_a_publication_holds_the_lock_of_the_log_all_others_wait(tmp_path, operation):
    """A stopped process is named by the error of the timeout; a killed one is no obstacle."""
    root = open_root(tmp_path, lock_timeout=0.05)
    root.create_topic("a", 2, TopicConfig())
    root.create_topic("b", 1, TopicConfig())

    with PausedChild(partial(publish_until, root.path)) as holder:
        with pytest.raises(LockTimeoutError) as caught:
            OPERATIONS[operation](root)
        assert caught.value.pid == holder.pid
        holder.kill()
        OPERATIONS[operation](root)

    assert values(root.partition("a", 0)) in ([], [b"x"])
    assert root.context.log_lock.is_free()
    assert healthy(root)
    root.close()
