"""Which offset is committed after what: every situation, with every way to commit by itself.

The table gives what Apache Kafka 4.1 commits on close, as a broker and its Java client
did it, and what embedlog commits where that is on purpose something else.
"""

from __future__ import annotations

import time

import pytest
from support.clock import START
from support.group_consumers import RecordingListener
from support.roots import abandon, encoded, fill, healthy, make_log, open_root

import embedlog
from embedlog.api import group_worker
from embedlog.config import ConsumerConfig
from embedlog.consumer import Consumer
from embedlog.consumer.group_client import open_group
from embedlog.record import OffsetAndMetadata, TopicPartition

T0 = TopicPartition("t", 0)
RECORDS = 12
EACH = 3
"""Records of one poll."""

KEPT = "a committed offset stays until further records are returned"
UNREAD = "what never polled has read nothing"

EARLIEST = [
    # steps, what Kafka leaves committed, what embedlog does (None: the same), and why.
    ("", None),
    ("commit=2", 2),
    ("seek=5", 5),
    ("end", None),
    ("begin", None),
    ("pause", None),
    ("pause commit=2", 2),
    ("end commit=2", 2),
    ("seek=5 commit=2", 5, 2, KEPT),
    ("commit=2 seek=5", 5, 2, KEPT),
    ("commit", None),
    ("position", 0, None, UNREAD),
    ("position commit", 0),
    ("poll", 3),
    ("poll commit=2", 3, 2, KEPT),
    ("poll commit=2 poll", 6),
    ("commit=2 poll", 5),
    ("commit=2 pause poll", 2),
    ("commit=2 position", 2),
    ("pause poll", 0),
    ("pause poll commit=2", 0, 2, KEPT),
    ("poll pause poll", 3),
    ("poll pause commit=2 poll", 3, 2, KEPT),
    ("end pause poll", 12),
    ("begin pause poll", 0),
    ("end poll", 12),
    ("end poll commit=2", 12, 2, KEPT),
    ("end position", 12, None, UNREAD),
    ("seek=5 pause poll", 5),
    ("poll seek=1", 1),
    ("poll commit seek=1", 1, 3, KEPT),
    ("poll commit seek=1 poll", 4),
    ("poll end", None),
    ("poll end poll", 12),
    ("poll commit", 3),
]
LATEST = [
    ("", None),
    ("commit=2", 2),
    ("pause", None),
    ("pause commit=2", 2),
    ("commit", None),
    ("position", 12, None, UNREAD),
    ("position commit", 12),
    ("poll", 12),
    ("poll commit=2", 12, 2, KEPT),
    ("poll commit=2 poll", 12, 2, KEPT),
    ("commit=2 poll", 5),
    ("pause poll", 12),
    ("pause poll commit=2", 12, 2, KEPT),
    ("poll seek=1", 1),
    ("poll commit", 12),
]
TABLE = [
    pytest.param(reset, row[0], row[2] if len(row) > 2 else row[1], id=f"{reset}: {row[0]}")
    for reset, rows in (("earliest", EARLIEST), ("latest", LATEST))
    for row in rows
]


@pytest.fixture
def root(tmp_path):
    """A topic of one partition and 12 records; the root is healthy afterwards."""
    root = open_root(tmp_path / "root")
    fill(make_log(root), RECORDS)
    yield root
    assert healthy(root)
    abandon(root)


def make(root, reset, **config):
    options = {"group_id": "g", "auto_offset_reset": reset, "max_poll_records": EACH}
    return Consumer(root, **{**options, "auto_commit_interval_ms": 3_600_000, **config})


def committed(root):
    commit = open_group(root, "g").committed([T0])[T0]
    return None if commit is None else commit.position.offset


def do(consumer, steps):
    """Carry out the steps of a case."""
    for word in steps.split():
        name, _, number = word.partition("=")
        if name == "commit":
            consumer.commit({T0: OffsetAndMetadata(int(number))} if number else None)
        elif name == "seek":
            consumer.seek(T0, int(number))
        elif name in ("begin", "end"):
            (consumer.seek_to_beginning if name == "begin" else consumer.seek_to_end)(T0)
        elif name in ("pause", "position"):
            getattr(consumer, name)(T0)
        else:
            consumer.poll(0)


def by_interval(consumer):
    """A later poll, which commits what earlier ones returned, and returns nothing itself."""
    consumer.pause(T0)
    consumer.poll(0)


LEAVE = {
    "close": lambda consumer: consumer.close(),
    "assign others": lambda consumer: consumer.assign([]),
    "unsubscribe": lambda consumer: consumer.unsubscribe(),
    "by interval": by_interval,
}


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize(("reset", "steps", "wanted"), TABLE)
def test_the_commits_of_a_consumer_with_assigned_partitions(root, reset, steps, wanted, leave):
    """E20, E24, M14: positions are resolved on first use, and what the program commits stays."""
    consumer = make(root, reset, auto_commit_interval_ms=0 if leave == "by interval" else 3_600_000)
    consumer.assign([T0])

    do(consumer, steps)
    LEAVE[leave](consumer)

    assert committed(root) == wanted
    consumer.close()


def revoked(consumer):
    """Another member joins: an eager one has everything revoked."""
    with make(consumer._root, "earliest", enable_auto_commit=False) as other:
        other.subscribe(["t"])
        other.poll(0)
        consumer.pause(*consumer.assignment())
        consumer.poll(0)


MEMBERS_LEAVE = {
    **{name: LEAVE[name] for name in ("close", "unsubscribe", "by interval")},
    "revocation": revoked,
}
AFTER_A_POLL = [row for row in TABLE if row.values[1].startswith("poll")]


@pytest.mark.parametrize("leave", MEMBERS_LEAVE)
@pytest.mark.parametrize(("reset", "steps", "wanted"), AFTER_A_POLL)
def test_the_commits_of_a_member(root, reset, steps, wanted, leave):
    """E20, E24, M19: the same with partitions assigned by the group."""
    consumer = make(root, reset, auto_commit_interval_ms=0 if leave == "by interval" else 3_600_000)
    consumer.subscribe(["t"])

    do(consumer, steps)
    MEMBERS_LEAVE[leave](consumer)

    assert committed(root) == wanted
    consumer.close(autocommit=False)


IN_LISTENERS = [
    row
    for row in TABLE
    if "poll" in row.values[1] and not row.values[1].startswith("poll")
    if row.values[1].count("poll") == 1 and row.values[1].endswith("poll")
]


@pytest.mark.parametrize("leave", MEMBERS_LEAVE)
@pytest.mark.parametrize(("reset", "steps", "wanted"), IN_LISTENERS)
def test_calls_of_a_listener_before_the_first_fetch_count(root, reset, steps, wanted, leave):
    """E6, E20: the poll begins at what it commits; positions are resolved after it."""
    consumer = make(root, reset, auto_commit_interval_ms=0 if leave == "by interval" else 3_600_000)
    first = steps.removesuffix("poll")
    done = []

    def begin(assigned):
        if assigned and not done:
            do(consumer, first)
            done.append(first)

    consumer.subscribe(["t"], listener=RecordingListener(assigned=begin))
    consumer.poll(0)
    MEMBERS_LEAVE[leave](consumer)

    assert done == [first]
    assert committed(root) == wanted
    consumer.close(autocommit=False)


def test_a_commit_before_the_first_poll_is_where_it_begins(root):
    """E2: positions are resolved when they are first used, not when they are assigned."""
    for reset in ("earliest", "latest", "none"):
        with make(root, reset) as consumer:
            consumer.assign([T0])
            consumer.commit({T0: OffsetAndMetadata(5)})
            assert [record.offset for record in consumer.poll(0)[T0]] == [5, 6, 7]
        with make(root, reset, group_id="g2") as other:
            other.assign([T0])
            # From elsewhere, as long as nobody is a member.
            open_group(root, "g2").commit({T0: OffsetAndMetadata(9)})
            assert other.position(T0) == 9


def test_a_poll_resolves_what_is_paused(root):
    """As in Kafka: a lazy seek takes effect with the next poll, not with the first record."""
    log = root.partition("t", 0)
    with make(root, "earliest") as consumer:
        consumer.assign([T0])
        consumer.seek_to_end(T0)
        consumer.pause(T0)
        consumer.poll(0)
        fill(log, 1, first=RECORDS)
        consumer.resume(T0)

        assert [record.offset for record in consumer.poll(0)[T0]] == [RECORDS]


def test_streams_that_were_not_read_commit_nothing(root):
    """E20, E26: to be assigned partitions is not to read them."""
    consumer = make(root, "latest")
    consumer.create_message_streams({"t": 1})

    consumer.close()

    assert committed(root) is None


def test_auto_commit_keeps_the_metadata_of_an_earlier_commit(root):
    """E4, E20: nothing was returned since, so there is nothing to commit."""
    with make(root, "earliest") as consumer:
        consumer.assign([T0])
        consumer.commit({T0: OffsetAndMetadata(RECORDS, "all of it")})
    with make(root, "earliest") as consumer:
        consumer.subscribe(["t"])
        consumer.poll(0)
        assert consumer.position(T0) == RECORDS

    position = open_group(root, "g").committed([T0])[T0].position
    assert (position.offset, position.metadata) == (RECORDS, "all of it")


def test_gaps_do_not_count_as_returned(root):
    """E3, E20: the position moves past offsets without records, what was committed stays."""
    from support.manual_compaction import keep

    log = root.partition("t", 0)
    log.roll()
    keep(log, [0])
    with make(root, "earliest") as consumer:
        consumer.assign([T0])
        assert [record.offset for record in consumer.poll(0)[T0]] == [0]
        consumer.commit({T0: OffsetAndMetadata(0)})
        consumer.poll(0)
        consumer.poll(0)

    assert committed(root) == 0


def slow(record):
    """Take longer than the worker waits between two commits."""
    if record.offset == 0:
        time.sleep(group_worker.COMMIT_SECONDS + 0.1)
    if record.value == b"last":
        raise KeyboardInterrupt


@pytest.mark.tier("test")
def test_a_run_commits_the_rest_of_a_batch_that_it_committed_in_part(tmp_path):
    """A slow handler has its first records committed, and the others when they are handled."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t")
        log.partition("t", 0).append([encoded(*[b"v"] * 4, at=START)])
        job = group_worker.GroupJob(
            *(lambda: log, ("t",), ConsumerConfig.parse({}), slow, False, 0)
        )
        worker = group_worker.GroupWorker(job)
        with log.consumer("t", group_id="g", auto_offset_reset="earliest") as consumer:
            worker._handle(consumer, consumer.poll(0))
            assert consumer.committed(T0) == 4
