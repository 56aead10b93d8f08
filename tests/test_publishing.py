"""Publishing staged batches: in all partitions at once, once, and as any append would."""

import logging
import threading

import pytest
from support.children import Held
from support.clock import START
from support.cruel import CruelFiles
from support.roots import abandon, bases, encoded, fill, healthy, make_log, open_root, rows, values
from support.staged import directory, publish, stage

from embedlog import catalog
from embedlog.config import TopicConfig
from embedlog.errors import (
    CorruptBatchError,
    DurabilityError,
    InvalidRecordError,
    LockTimeoutError,
    RecordTooLargeError,
    RestartedApplicationError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.log import markers, publishing, staging
from embedlog.log.staging import Stage

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

    assert told == publishing.Published(4)
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

    info = topics.context.state.read(lambda txn: catalog.partition(txn, log.key))
    assert (log.tail().durable_offset, info.recovery_offset) == (4, 4)


def test_headers_begin_a_segment_that_has_them(topics):
    """A segment has one schema; what comes without headers is given an empty column."""
    log = topics.partition("a", 0)
    fill(log, 1)
    writer = Stage(topics.context.files, directory(), "headers")
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

    assert publish(topics, []) == publishing.Published(0)
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
    staging.discard(topics.context.files, gone)
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

    with Held(hold) as holder:
        with pytest.raises(LockTimeoutError) as told:
            publish(topics, staged, timeout=0.05)
        topics.partition("a", 0).append([encoded(b"x")])
        assert told.value.pid == holder.pid

    assert content(topics)["b_0"] == []


def test_a_failed_flush_publishes_nothing_and_closes_that_partition_only(tmp_path):
    """P9: the others are as they were, and take appends."""
    root = open_root(tmp_path / "cruel", files=CruelFiles)
    root.create_topic("a", 2, TopicConfig())
    for number in range(2):
        fill(root.partition("a", number), 1, durability="fsync")
    root.context.files.fail_at(0, 5, only=("sync",))

    with pytest.raises(DurabilityError):
        publish(root, [stage(root, a_0=[b"1"], a_1=[b"2"])], 1, durability="fsync")

    assert [root.partition("a", number).tail().failed for number in range(2)] == [True, False]
    fill(root.partition("a", 1), 1, first=1)
    assert content(root) == {"a_0": [b"v0"], "a_1": [b"v0", b"v1"]}
    assert publishing.marker_of(root, "app") is None
    abandon(root)


# Once


def test_a_version_is_published_once(topics, caplog):
    """The repetition is skipped, whatever it brings, and is told by whom it was published."""
    publish(topics, [stage(topics, a_0=[b"1"])], 3, run="first run")

    told = publish(topics, [stage(topics, a_1=[b"other"])], 3, run="second run")
    with caplog.at_level(logging.WARNING, "embedlog"):
        publishing.log_repetition(publishing.Publication("app", 3, "q", "second run"), told)

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

    assert publishing.marker_of(topics, "app").version == 0
    assert publish(topics, [stage(topics, a_0=[b"1"])], 0).repeated is not None


def test_a_count_that_begins_anew_is_refused(topics):
    """A deleted checkpoint: the message says what was published, and what to do."""
    for version in (0, 1):
        publish(topics, [stage(topics, a_0=[b"%d" % version])], version, source="first query")

    with pytest.raises(RestartedApplicationError, match=r"first query.*checkpoint") as told:
        publish(topics, [stage(topics, a_0=[b"0"])], 0, source="second query")

    assert (told.value.version, told.value.published) == (0, 1)
    assert content(topics)["a_0"] == [b"0", b"1"]


def test_a_count_may_be_let_begin_anew(topics):
    """Told so, it is published, and the next ones follow it."""
    publish(topics, [stage(topics, a_0=[b"0"])], 5, source="first query")

    for version in (0, 1):
        staged = [stage(topics, a_0=[b"new %d" % version])]
        assert publish(topics, staged, version, source="second", restart=True).repeated is None

    assert content(topics)["a_0"] == [b"0", b"new 0", b"new 1"]


def test_a_checkpoint_is_known_by_its_place(topics):
    """Its query has another id after it was deleted, and so another name."""
    first = publishing.Publication("query 1", 0, "query 1", "r", "/checkpoints/a")
    publishing.publish(topics, [stage(topics, a_0=[b"0"])], first)

    again = publishing.Publication("query 2", 0, "query 2", "r", "/checkpoints/a")
    with pytest.raises(RestartedApplicationError, match="/checkpoints/a"):
        publishing.publish(topics, [stage(topics, a_0=[b"0"])], again)
    elsewhere = again._replace(place="/checkpoints/b")
    publishing.publish(topics, [stage(topics, a_0=[b"1"])], elsewhere)

    assert content(topics)["a_0"] == [b"0", b"1"]


def test_a_checkpoint_that_was_moved_is_still_the_same_query(topics):
    """Its id is in it."""
    first = publishing.Publication("query", 0, "query", "r", "/here")
    publishing.publish(topics, [stage(topics, a_0=[b"0"])], first)

    told = publishing.publish(topics, [stage(topics, a_0=[b"0"])], first._replace(place="/there"))

    assert told.repeated is not None


def test_two_runs_of_one_query_publish_a_batch_once_between_them(topics):
    """Whatever the two send, and although they lock other partitions."""
    go, told = threading.Barrier(4), []

    def run(number):
        staged = [stage(topics, **{f"a_{number % 2}": [b"%d" % number]})]
        go.wait()
        told.append(publish(topics, staged, 0, run=f"run {number}"))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sum(one.records for one in told) == 1
    assert sum(map(len, content(topics).values())) == 1


def test_who_published_nothing_for_long_is_forgotten(topics, clock):
    """Late: a repetition after a month is a new publication."""
    publish(topics, [], 1)
    clock.advance(29 * DAY)
    publishing.publish(topics, [], publishing.Publication("other", 0))
    assert publishing.marker_of(topics, "app") is not None

    clock.advance(2 * DAY)
    publishing.publish(topics, [], publishing.Publication("other", 1))

    assert topics.context.state.read(markers.every).keys() == {"other"}


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
    publishing.publish(topics, [], publishing.Publication(name, 4))

    assert publishing.marker_of(topics, name).version == 4


# Others beside it


def test_appends_and_publications_take_turns(topics):
    """Threads that append to the same partitions lose nothing, and see no gap."""
    done, wrong = threading.Event(), []

    def append():
        number = 0
        try:
            while not done.is_set() or number < 20:
                topics.partition("a", number % 2).append([encoded(b"n%d" % number)])
                number += 1
        except Exception as error:  # noqa: BLE001 - told below
            wrong.append(error)

    thread = threading.Thread(target=append)
    thread.start()
    for version in range(20):
        publish(topics, [stage(topics, a_0=[b"p"], a_1=[b"p"])], version)
    done.set()
    thread.join()

    assert wrong == []
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
    thread = threading.Thread(target=look)
    thread.start()
    for version in range(60):
        publish(topics, [stage(topics, a_0=[b"p", b"q"], a_1=[b"p"])], version)
    done.set()
    thread.join()

    assert all(first == 2 * second for first, second in seen), seen
    assert len(seen) > 2
