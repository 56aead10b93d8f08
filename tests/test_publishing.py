"""Publishing staged batches: in all partitions at once, once, and as any append would."""

import itertools
import logging
import threading
from functools import partial

import pytest
from support.children import PausedChild, in_threads
from support.clock import START
from support.faulty_files import FaultyFiles
from support.roots import abandon, bases, encoded, fill, healthy, make_log, open_root, rows, values
from support.staged_files import directory, publish, stage

from embedlog import catalog, keyspace, kv
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
from embedlog.publish import app_versions, transaction
from embedlog.publish.staging import StagedFileWriter

DAY = 86_400_000


@pytest.fixture
def topics(root):
    """Topics "a" of two partitions and "b" of one."""
    root.create_topic("a", 2, TopicConfig())
    root.create_topic("b", 1, TopicConfig())
    return root


def content(root):
    return {
        f"{name}_{number}": values(root.partition(name, number))
        for name, info in root.topics().items()
        for number in range(info.partitions)
    }


# What is published


def test_what_was_staged_is_at_the_ends_of_its_partitions(topics):
    """Dense offsets after what was there, in the order in which it was staged."""
    topics.partition("a", 0).append([encoded(b"before")])
    first = stage(topics, a_0=[b"1", b"2"], b_0=[b"x"])
    second = stage(topics, a_0=[b"3"])

    told = publish(topics, [first, second])

    assert told == transaction.PublishResult(4)
    assert content(topics) == {"a_0": [b"before", b"1", b"2", b"3"], "a_1": [], "b_0": [b"x"]}
    assert [row[0] for row in rows(topics.partition("a", 0))] == [0, 1, 2, 3]


def test_what_is_staged_can_be_seen_by_nobody(topics):
    """Until it is published no reader sees it, and `verify` has nothing against it."""
    stage(topics, a_0=[b"1"])

    assert topics.partition("a", 0).end_offset() == 0
    assert healthy(topics)


def test_staged_batches_are_not_looked_at_again(topics):
    """They keep their checksums, and are read as those of any append."""
    publish(topics, [stage(topics, a_0=[b"x" * 10_000])])

    (one,) = topics.partition("a", 0).reader(0).read()
    one.verify()
    assert (one.base_offset, one.next_offset, one.leader_epoch) == (0, 1, 0)


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_publication_may_take_many_segments(root, durability):
    """A segment is not larger than its topic wants it, whatever is published at once."""
    log = make_log(root, {"segment.bytes": 2000, "index.interval.bytes": 300})
    fill(log, 2)

    publish(root, [stage(root, t_0=[b"%d" % row for row in range(20)])], durability=durability)
    fill(log, 1, first=2)

    assert values(log) == [b"v0", b"v1", *(b"%d" % row for row in range(20)), b"v2"]
    assert len(bases(log)) > 5
    assert all(info.size <= 2600 for info in log.segments.values())
    assert log.offset_for_timestamp(START).offset == 0
    assert [row[3] for row in rows(log, 17)] == [b"15", b"16", b"17", b"18", b"19", b"v2"]


def test_with_fsync_a_publication_is_durable_and_so_is_what_came_before(topics):
    """The recovery point is past it: recovery need not look at it."""
    log = topics.partition("a", 0)
    fill(log, 3)

    publish(topics, [stage(topics, a_0=[b"1"])], durability="fsync")

    info = topics.context.state.read(lambda txn: catalog.PARTITIONS.get(txn, log.key))
    assert (log.tail().durable_offset, info.recovery_offset) == (4, 4)


def test_headers_begin_a_segment_that_has_them(topics):
    """A segment has one schema; what comes without headers is given an empty column."""
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
    """LogAppendTime is the time of the publication (A7)."""
    log = make_log(root, {"message.timestamp.type": "LogAppendTime"})
    staged = stage(root, t_0=[b"1"])
    clock.advance(5)

    publish(root, [staged])

    assert [row[1] for row in rows(log)] == [START + 5]


def test_an_idempotent_producer_goes_on_across_a_publication(topics):
    """A publication has no sequence, and forgets those of nobody (G16)."""
    log = topics.partition("a", 0)
    log.append([encoded(b"1", producer=(7, 0, 0))])
    publish(topics, [stage(topics, a_0=[b"x"])], durability="fsync")
    (again,) = log.append([encoded(b"1", producer=(7, 0, 0))])
    (then,) = log.append([encoded(b"2", producer=(7, 0, 1))])

    assert (again.duplicate, again.base_offset, then.base_offset) == (True, 0, 2)


def test_readers_who_wait_are_woken(topics):
    """As by any append."""
    before = topics.context.wake.published()

    publish(topics, [stage(topics, a_0=[b"1"])])

    assert topics.context.wake.published() > before


def test_nothing_staged_and_nobody_who_publishes_is_nothing(topics):
    """No transaction."""
    version = topics.version()

    assert publish(topics, []) == transaction.PublishResult(0)
    assert topics.version() == version


# What is refused


def test_a_topic_that_refuses_a_batch_refuses_the_publication(root):
    """None of it is published (A4, A6)."""
    root.create_topic("a", 1, TopicConfig())
    root.create_topic("k", 1, TopicConfig.parse({"cleanup.policy": "compact"}))
    root.create_topic("s", 1, TopicConfig.parse({"max.message.bytes": 500}))

    with pytest.raises(InvalidRecordError):
        publish(root, [stage(root, a_0=[b"1"], k_0=[b"no key"])])
    with pytest.raises(RecordTooLargeError):
        publish(root, [stage(root, a_0=[b"1"], s_0=[b"x" * 600])])

    assert not any(content(root).values())


def test_a_topic_that_was_made_anew_is_another_topic(topics):
    """What was staged for the old one is not for the new one."""
    staged = stage(topics, b_0=[b"1"])
    topics.delete_topic("b")
    topics.create_topic("b", 1, TopicConfig())

    with pytest.raises(UnknownTopicOrPartitionError, match="created again"):
        publish(topics, [staged])


def test_a_staged_file_that_is_gone_or_damaged_is_told(topics):
    """Nothing is published of it."""
    gone, damaged = stage(topics, a_0=[b"1"]), stage(topics, a_0=[b"2"])
    topics.context.files.unlink(gone.path)
    with open(f"{topics.path}/{damaged.path}", "r+b") as file:
        file.seek(300)
        file.write(b"\xff\xff\xff")

    with pytest.raises(StorageError):
        publish(topics, [gone])
    with pytest.raises(CorruptBatchError):
        publish(topics, [damaged])
    assert not any(content(topics).values())


def test_a_partition_that_another_process_holds_is_told_after_a_while(topics):
    """P16: the error names the process; the partitions that were free are free again."""
    staged = [stage(topics, a_0=[b"1"], b_0=[b"2"])]

    def hold(held):
        log = open_root(topics.path).partition("b", 0)
        log.acquire()
        held()

    with PausedChild(hold) as holder:
        with pytest.raises(LockTimeoutError) as told:
            publish(topics, staged, timeout=0.05)
        topics.partition("a", 0).append([encoded(b"x")])
        assert told.value.pid == holder.pid

    assert content(topics)["b_0"] == []


def test_a_failed_flush_publishes_nothing_and_closes_that_partition_only(tmp_path):
    """P9: the others are as they were, and take appends."""
    root = open_root(tmp_path / "cruel", files=FaultyFiles)
    root.create_topic("a", 2, TopicConfig())
    for number in range(2):
        fill(root.partition("a", number), 1, durability="fsync")
    root.context.files.fail_at(0, 5, only=("sync",))

    with pytest.raises(DurabilityError):
        publish(root, [stage(root, a_0=[b"1"], a_1=[b"2"])], 1, durability="fsync")

    assert [root.partition("a", number).tail().failed for number in range(2)] == [True, False]
    fill(root.partition("a", 1), 1, first=1)
    assert content(root) == {"a_0": [b"v0"], "a_1": [b"v0", b"v1"]}
    assert app_versions.get(root.context.state, "q") is None
    abandon(root)


# Once


def test_a_version_is_published_once(topics, caplog):
    """The repetition is skipped, whatever it brings, and is told by whom it was published."""
    publish(topics, [stage(topics, a_0=[b"1"])], 3, run="first run")

    told = publish(topics, [stage(topics, a_1=[b"other"])], 3, run="second run")
    with caplog.at_level(logging.WARNING, "embedlog"):
        transaction.log_repetition(transaction.Publication("app", 3, "q", "second run"), told)

    assert (told.records, told.repeated.version, told.repeated.records) == (0, 3, 1)
    assert content(topics)["a_1"] == []
    assert "first run" in caplog.text
    assert "second run" in caplog.text


def test_an_older_version_is_skipped_too(topics):
    """A driver that was stopped for long finds that another one went on."""
    for version in (1, 2):
        publish(topics, [stage(topics, a_0=[b"%d" % version])], version)

    assert publish(topics, [stage(topics, a_0=[b"1"])], 1).repeated.version == 2
    assert content(topics)["a_0"] == [b"1", b"2"]


def test_an_empty_publication_is_noted_as_well(topics):
    """A micro-batch without rows is one of the sequence."""
    publish(topics, [], 0)

    assert app_versions.get(topics.context.state, "q").version == 0
    assert publish(topics, [stage(topics, a_0=[b"1"])], 0).repeated is not None


def test_a_query_that_starts_over_is_refused(topics):
    """A deleted checkpoint: the message says what was published, and what to do."""
    for version in (0, 1):
        publish(topics, [stage(topics, a_0=[b"%d" % version])], version, source="first query")

    with pytest.raises(RestartedApplicationError, match=r"first query.*checkpoint") as told:
        publish(topics, [stage(topics, a_0=[b"0"])], 0, source="second query")

    assert '.option("allowRestart", "true")' in str(told.value)
    assert (told.value.topic, told.value.version, told.value.published) == ("a", 0, 1)
    assert content(topics)["a_0"] == [b"0", b"1"]


def test_a_query_may_be_allowed_to_start_over(topics):
    """With ``restart`` it is published, and the next versions follow it without."""
    publish(topics, [stage(topics, a_0=[b"0"])], 5, source="first query")

    for version, restart in ((0, True), (1, False)):
        staged = [stage(topics, a_0=[b"new %d" % version])]
        assert publish(topics, staged, version, source="second", restart=restart).records == 1

    assert content(topics)["a_0"] == [b"0", b"new 0", b"new 1"]
    # The first query is the one that would start over now, except for what it repeats.
    assert publish(topics, [stage(topics, a_0=[b"0"])], 5, source="first query").repeated
    with pytest.raises(RestartedApplicationError):
        publish(topics, [stage(topics, a_0=[b"6"])], 6, source="first query")


def test_a_checkpoint_is_known_by_its_place(topics):
    """Its query has another id after it was deleted, and so another name."""
    first = transaction.Publication("query 1", 0, "query 1", "r", "/checkpoints/a")
    transaction.publish(topics, [stage(topics, a_0=[b"0"])], first)

    again = transaction.Publication("query 2", 0, "query 2", "r", "/checkpoints/a")
    with pytest.raises(RestartedApplicationError, match="/checkpoints/a"):
        transaction.publish(topics, [stage(topics, a_0=[b"0"])], again)
    elsewhere = again._replace(checkpoint="/checkpoints/b")
    transaction.publish(topics, [stage(topics, a_0=[b"1"])], elsewhere)

    assert content(topics)["a_0"] == [b"0", b"1"]


def test_a_checkpoint_that_was_moved_is_still_the_same_query(topics):
    """Its id is in it."""
    first = transaction.Publication("query", 0, "query", "r", "/here")
    transaction.publish(topics, [stage(topics, a_0=[b"0"])], first)

    told = transaction.publish(
        topics, [stage(topics, a_0=[b"0"])], first._replace(checkpoint="/there")
    )

    assert told.repeated is not None


def test_two_runs_of_one_query_publish_a_batch_once_between_them(topics):
    """Whatever the two send, and although they lock other partitions."""
    go, told = threading.Barrier(4), []

    def run(number):
        staged = [stage(topics, **{f"a_{number % 2}": [b"%d" % number]})]
        go.wait()
        told.append(publish(topics, staged, 0, run=f"run {number}"))

    with in_threads(*(partial(run, number) for number in range(4))):
        pass

    assert sum(one.records for one in told) == 1
    assert sum(map(len, content(topics).values())) == 1


def test_a_cut_below_a_publication_lets_it_be_repeated(topics):
    """What was lost may come again; what is below it would be there twice."""
    log = topics.partition("a", 0)
    for version in (0, 1):
        publish(topics, [stage(topics, a_0=[b"%d" % version])], version)
    log.truncate_to(1)

    assert publish(topics, [stage(topics, a_0=[b"0"])], 0).repeated is not None
    assert publish(topics, [stage(topics, a_0=[b"1"])], 1).repeated is None
    assert content(topics)["a_0"] == [b"0", b"1"]


def test_a_name_may_be_long(topics):
    """A path may be longer than a key of the database."""
    name = "/deep" * 300
    first = transaction.Publication(name, 4, "q", "r", name)
    transaction.publish(topics, [stage(topics, a_0=[b"1"])], first)

    with pytest.raises(RestartedApplicationError):
        transaction.publish(topics, [stage(topics, a_0=[b"1"])], first._replace(source="r"))
    assert transaction.publish(topics, [stage(topics, a_0=[b"1"])], first).repeated.version == 4


# Topics that are deleted, created again, or changed between publications


def make_again(root, *names):
    for name in names:
        partitions = root.topic(name).partitions
        root.delete_topic(name)
        root.create_topic(name, partitions, TopicConfig())


def batch(root, version, *parts, query="q", place="/checkpoint", restart=False):
    """Publish a micro-batch: its version as a value in each of some partitions."""
    staged = [stage(root, **{part: [b"%d" % version] for part in parts})]
    who = transaction.Publication(query, version, query, "r", place)
    return transaction.publish(root, staged, who, restart=restart)


def write(root, version, *parts, application="app", topics=()):
    """Publish as a batch write does that has a ``txnAppId``."""
    staged = [stage(root, **{part: [b"%d" % version] for part in parts})]
    who = transaction.Publication(application, version, topics=topics)
    return transaction.publish(root, staged, who)


def test_a_query_may_start_over_with_a_topic_that_was_created_again(topics):
    """Checkpoint and topic were deleted: nothing of the first query is in the new topic."""
    for version in range(3):
        batch(topics, version, "a_0", query="first")
    make_again(topics, "a")

    for version in range(2):
        assert batch(topics, version, "a_0", query="second").records == 1

    assert content(topics)["a_0"] == [b"0", b"1"]
    assert batch(topics, 1, "a_0", query="second").repeated
    with pytest.raises(RestartedApplicationError):
        batch(topics, 0, "a_0", query="third")


def test_a_query_may_start_over_with_another_topic_but_not_go_back(topics):
    """The checkpoint was deleted, and the target changed; the first one has its records."""
    batch(topics, 0, "a_0", query="first")

    assert batch(topics, 0, "b_0", query="second").records == 1
    with pytest.raises(RestartedApplicationError):
        batch(topics, 1, "a_1", query="second")
    with pytest.raises(RestartedApplicationError):
        batch(topics, 0, "a_0", query="third")
    with pytest.raises(RestartedApplicationError):
        batch(topics, 0, "b_0", query="third")

    assert content(topics) == {"a_0": [b"0"], "a_1": [], "b_0": [b"0"]}


def test_one_topic_that_has_its_records_is_enough_to_refuse_a_query(topics):
    """None is published twice; with ``restart`` all are published."""
    batch(topics, 0, "a_0", "b_0", query="first")
    make_again(topics, "b")

    with pytest.raises(RestartedApplicationError) as told:
        batch(topics, 0, "b_0", "a_0", query="second")
    assert told.value.topic == "a"
    assert content(topics) == {"a_0": [b"0"], "a_1": [], "b_0": []}

    assert batch(topics, 0, "b_0", "a_0", query="second", restart=True).records == 2


def test_an_empty_micro_batch_opens_no_way_for_a_query_that_starts_over(topics):
    """It writes to no topic, so it is published; what comes after it is refused."""
    batch(topics, 0, "a_0", query="first")

    assert batch(topics, 0, query="second").repeated is None
    assert batch(topics, 0, "a_1", query="second").repeated
    with pytest.raises(RestartedApplicationError):
        batch(topics, 1, "a_0", query="second")
    assert content(topics) == {"a_0": [b"0"], "a_1": [], "b_0": []}


def test_a_repetition_is_known_when_one_of_its_topics_was_created_again(topics):
    """What is still there must not be doubled, so the new topic stays without it."""
    batch(topics, 0, "a_0", "b_0")
    write(topics, 0, "a_0", "b_0")
    make_again(topics, "b")

    assert batch(topics, 0, "a_0", "b_0").repeated
    assert write(topics, 0, "a_0", "b_0").repeated
    assert content(topics) == {"a_0": [b"0", b"0"], "a_1": [], "b_0": []}


def test_a_repetition_is_published_when_all_its_topics_were_deleted(topics):
    """Nothing of it is left; but what came before the last one is not published again."""
    batch(topics, 0, "a_0")
    batch(topics, 1, "a_0")
    make_again(topics, "a")

    assert batch(topics, 0, "a_0").repeated
    assert batch(topics, 1, "a_0").records == 1
    assert batch(topics, 1, "a_0").repeated
    assert content(topics)["a_0"] == [b"1"]


def test_a_query_has_one_count_for_all_its_topics(topics):
    """Each batch goes to a topic of its own; a repetition may even choose another one."""
    batch(topics, 1, "a_0")
    batch(topics, 2, "b_0")

    for version, part in ((1, "a_0"), (2, "b_0"), (1, "b_0"), (2, "a_0")):
        assert batch(topics, version, part).repeated.version == 2
    assert content(topics) == {"a_0": [b"1"], "a_1": [], "b_0": [b"2"]}


def test_the_first_run_of_a_query_is_known_after_another_one_took_its_name(topics):
    """A driver that was stopped for long, while a query started over with another topic."""
    for version in range(3):
        publish(topics, [stage(topics, a_0=[b"%d" % version])], version, source="first")
    publish(topics, [stage(topics, b_0=[b"0"])], 0, source="second")

    assert publish(topics, [stage(topics, b_0=[b"2"])], 2, source="first").repeated
    assert publish(topics, [stage(topics, a_0=[b"3"])], 3, source="first").records == 1
    with pytest.raises(RestartedApplicationError):
        publish(topics, [stage(topics, b_0=[b"4"])], 4, source="first")
    assert content(topics) == {"a_0": [b"0", b"1", b"2", b"3"], "a_1": [], "b_0": [b"0"]}


def test_batch_writes_under_one_name_have_a_count_in_each_topic(topics):
    """As in each table of Delta: two writes in foreachBatch may have the same name and number."""
    for _ in range(2):
        for version in (5, 6):
            write(topics, version, "a_0")
            write(topics, version, "b_0")

    assert content(topics) == {"a_0": [b"5", b"6"], "a_1": [], "b_0": [b"5", b"6"]}
    # In one of its topics it is there.
    assert write(topics, 6, "a_0", "b_0").repeated
    write(topics, 7, "a_0")
    assert write(topics, 7, "a_0", "b_0").repeated
    assert content(topics)["b_0"] == [b"5", b"6"]


def test_batch_writes_begin_again_with_a_topic_that_was_created_again(topics):
    """A job that loads everything once more; in the other topic nothing is doubled."""
    for name in ("a_0", "b_0"):
        write(topics, 3, name)
    make_again(topics, "a")

    assert write(topics, 0, "a_0").records == 1
    assert write(topics, 0, "b_0").repeated
    assert write(topics, 0, "a_0").repeated


def test_an_empty_batch_write_counts_for_the_topic_that_it_names(topics):
    """Nothing was staged, but its number is used."""
    write(topics, 1, topics=(topics.topic("a").id,))

    assert write(topics, 1, "a_0").repeated
    assert write(topics, 1, "b_0").records == 1


def test_a_name_of_batch_writes_is_not_for_a_stream(topics):
    """Their versions are not from one count, whichever is higher."""
    write(topics, 3, "a_0")

    for version in (0, 9):
        with pytest.raises(RestartedApplicationError, match="batch writes"):
            publish(topics, [stage(topics, a_0=[b"x"])], version, source="query")
    publish(topics, [stage(topics, b_0=[b"x"])], 0, source="query")
    with pytest.raises(RestartedApplicationError, match="query"):
        write(topics, 9, "b_0")


# Markers: how long they stay


class Machine(Files):
    """A machine whose clocks and boot a test sets."""

    up = 0
    boot = "first boot"

    def uptime_ms(self):
        return Machine.up

    def boot_id(self):
        return Machine.boot


@pytest.fixture
def machine(tmp_path, clock, monkeypatch):
    """A root with a topic, where two markers are many, and every publication looks at them."""
    monkeypatch.setattr(app_versions, "MAX_ROWS", 2)
    monkeypatch.setattr(app_versions, "CHECK_INTERVAL", 1)
    monkeypatch.setattr(Machine, "up", 1_000)
    monkeypatch.setattr(Machine, "boot", "first boot")
    root = open_root(tmp_path / "machine", files=Machine, clock=clock)
    root.create_topic("a", 1, TopicConfig())
    yield root
    abandon(root)


_versions = itertools.count(1_000)


def others(root, count=3):
    """Publish under other names, so that markers are too many."""
    for number in range(count):
        assert write(root, next(_versions), "a_0", application=f"other {number}").records


def names(root):
    return {name for name, _ in all_versions(root)}


def all_versions(root):
    return root.context.state.read(lambda txn: dict(app_versions.APP_VERSIONS.scan_valid(txn)))


def test_markers_are_dropped_when_they_are_many_and_idle(machine, clock):
    """The oldest ones, and after 30 days of the machine's time."""
    write(machine, 1, "a_0", application="first")
    write(machine, 1, "a_0", application="second")
    Machine.up += 31 * DAY
    clock.advance(31 * DAY)
    assert write(machine, 1, "a_0", application="first").repeated
    write(machine, 1, "a_0", application="third")
    assert names(machine) == {"second", "third"}

    others(machine)
    assert names(machine) == {"third", "other 0", "other 1", "other 2"}
    Machine.up += 30 * DAY
    others(machine)
    assert "third" in names(machine)
    Machine.up += 1
    others(machine)
    assert names(machine) == {"other 0", "other 1", "other 2"}


@pytest.mark.parametrize("jumps", [(31 * DAY,), (730 * DAY, -730 * DAY), (-730 * DAY, 800 * DAY)])
def test_a_jump_of_the_clock_drops_no_marker(machine, clock, jumps):
    """P17: a repetition is known, however many publish while the clock is wrong."""
    write(machine, 7, "a_0")
    before = content(machine)["a_0"]
    for jump in jumps:
        clock.advance(jump)
        for _ in range(5):
            Machine.up += 1_000
            others(machine)

    assert write(machine, 7, "a_0").repeated.version == 7
    assert content(machine)["a_0"][: len(before)] == before
    assert content(machine)["a_0"].count(b"7") == 1


def test_a_jump_of_the_clock_at_a_reboot_counts_as_a_day(machine, clock):
    """P17: how long the machine was off only the wall clock says."""
    write(machine, 7, "a_0")
    for number in range(30):
        Machine.boot, Machine.up = f"boot {number}", 0
        clock.advance(730 * DAY)
        others(machine)
    assert write(machine, 7, "a_0").repeated
    Machine.boot = "boot 30"
    clock.advance(2 * DAY)
    others(machine)

    assert "app" not in names(machine)


def test_a_step_back_of_the_clock_at_a_reboot_counts_as_nothing(machine, clock):
    """What was counted before stays."""
    write(machine, 7, "a_0")
    Machine.up += 20 * DAY
    others(machine)
    Machine.boot, Machine.up = "second boot", 500
    clock.advance(-300 * DAY)
    others(machine)
    assert "app" in names(machine)
    Machine.up += 11 * DAY
    others(machine)

    assert "app" not in names(machine)


def test_markers_of_deleted_topics_are_dropped(machine):
    """Their ids do not come again."""
    machine.create_topic("b", 1, TopicConfig())
    write(machine, 1, "a_0")
    write(machine, 1, "b_0")
    old = machine.topic("b").id
    make_again(machine, "b")
    others(machine, count=1)

    found = all_versions(machine)
    assert ("app", machine.topic("a").id) in found
    assert ("app", old) not in found


def damage_rows(root, prefix):
    def step(txn):
        for key, row in list(kv.rows(txn, prefix)):
            txn.put(key, row[:-1] + bytes([row[-1] ^ 1]))

    root.context.state.write(step)


def test_a_damaged_marker_stops_its_application_and_no_other(machine):
    """The others publish, and drop what is due."""
    write(machine, 1, "a_0")
    damage_rows(machine, keyspace.APP_VERSIONS.prefix("app"))

    with pytest.raises(CorruptionError, match="app"):
        write(machine, 1, "a_0")
    assert write(machine, 1, "a_0", application="other").records == 1


def test_a_damaged_clock_of_publications_goes_on_from_the_last_marker(machine, clock, caplog):
    """Nothing is dropped too early, and no publication fails."""
    Machine.up += 100 * DAY
    write(machine, 1, "a_0")
    damage_rows(machine, keyspace.PUBLICATION_CLOCK.key())
    with caplog.at_level(logging.WARNING, "embedlog"):
        others(machine)

    assert "The clock of publications is damaged" in caplog.text
    Machine.up += 29 * DAY
    others(machine)
    assert write(machine, 1, "a_0").repeated
    Machine.up += 2 * DAY
    others(machine)
    assert "app" not in names(machine)


# Others beside it


def test_appends_and_publications_take_turns(topics):
    """Threads that append to the same partitions lose nothing, and see no gap."""
    done = threading.Event()

    def append():
        number = 0
        while not done.is_set() or number < 20:
            topics.partition("a", number % 2).append([encoded(b"n%d" % number)])
            number += 1

    with in_threads(append, done=done):
        for version in range(20):
            publish(topics, [stage(topics, a_0=[b"p"], a_1=[b"p"])], version)

    there = content(topics)
    assert [there[part].count(b"p") for part in ("a_0", "a_1")] == [20, 20]
    assert sum(value != b"p" for part in there.values() for value in part) >= 20


def test_readers_see_all_of_a_publication_or_nothing(topics):
    """Whoever reads all ends at one instant finds as many in each partition."""
    done, seen = threading.Event(), set()

    def look():
        other = open_root(topics.path)
        for number in range(2):
            other.partition("a", number).tail()
        keys = [other.partition("a", number).tail_key for number in range(2)]
        while not done.is_set():
            ends = other.context.live.read(lambda txn: tuple(map(txn.get, keys)))
            seen.add(tuple(int.from_bytes(row[32:40], "big") for row in ends))
        other.close()

    for number in range(2):
        topics.partition("a", number).tail()
    with in_threads(look, done=done):
        for version in range(60):
            publish(topics, [stage(topics, a_0=[b"p", b"q"], a_1=[b"p"])], version)

    assert all(first == 2 * second for first, second in seen), seen
    assert len(seen) > 2
