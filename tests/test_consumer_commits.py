"""Which offset is committed in which situation, for every kind of automatic commit.

The table gives what Apache Kafka 4.1 commits on close, measured with a broker and its Java client,
and what embedlog commits where it differs on purpose.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress

import pytest
from support.clock import START
from support.group_consumers import RecordingListener
from support.roots import abandon, encoded, fill, healthy, make_log, open_root
from support.tiers import sample

import embedlog
from embedlog.api import group_worker
from embedlog.config import ConsumerConfig
from embedlog.consumer.consumer import Consumer
from embedlog.consumer.open_group import open_group
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.workers.handling import Handling

T0 = TopicPartition("t", 0)
RECORDS = 12
MAX_POLL_RECORDS = 3

COMMIT_STAYS = "a committed offset stays until further records are returned"
NO_POLL = "a consumer that never polled has read nothing"

EARLIEST = [
    # Steps, Kafka's committed offset, embedlog's (missing: the same), and the reason.
    ("", None),
    ("commit=2", 2),
    ("seek=5", 5),
    ("end", None),
    ("begin", None),
    ("pause", None),
    ("pause commit=2", 2),
    ("end commit=2", 2),
    ("seek=5 commit=2", 5, 2, COMMIT_STAYS),
    ("commit=2 seek=5", 5, 2, COMMIT_STAYS),
    ("commit", None),
    ("position", 0, None, NO_POLL),
    ("position commit", 0),
    ("poll", 3),
    ("poll commit=2", 3, 2, COMMIT_STAYS),
    ("poll commit=2 poll", 6),
    ("commit=2 poll", 5),
    ("commit=2 pause poll", 2),
    ("commit=2 position", 2),
    ("pause poll", 0),
    ("pause poll commit=2", 0, 2, COMMIT_STAYS),
    ("poll pause poll", 3),
    ("poll pause commit=2 poll", 3, 2, COMMIT_STAYS),
    ("end pause poll", 12),
    ("begin pause poll", 0),
    ("end poll", 12),
    ("end poll commit=2", 12, 2, COMMIT_STAYS),
    ("end position", 12, None, NO_POLL),
    ("seek=5 pause poll", 5),
    ("poll seek=1", 1),
    ("poll commit seek=1", 1, 3, COMMIT_STAYS),
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
    ("position", 12, None, NO_POLL),
    ("position commit", 12),
    ("poll", 12),
    ("poll commit=2", 12, 2, COMMIT_STAYS),
    ("poll commit=2 poll", 12, 2, COMMIT_STAYS),
    ("commit=2 poll", 5),
    ("pause poll", 12),
    ("pause poll commit=2", 12, 2, COMMIT_STAYS),
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
    options = {"group_id": "g", "auto_offset_reset": reset, "max_poll_records": MAX_POLL_RECORDS}
    return Consumer(root, **{**options, "auto_commit_interval_ms": 3_600_000, **config})


def make_for(leave, root, reset):
    """Make a consumer that commits at each poll if it leaves "by interval", else at its end."""
    return make(root, reset, auto_commit_interval_ms=0 if leave == "by interval" else 3_600_000)


def committed(root):
    commit = open_group(root, "g").committed([T0])[T0]
    return None if commit is None else commit.position.offset


def perform(consumer, steps):
    """Perform the steps of a case."""
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
    """Poll once more, which commits the position of earlier polls, and returns nothing."""
    consumer.pause(T0)
    consumer.poll(0)


LEAVE = {
    "close": lambda consumer: consumer.close(),
    "assign others": lambda consumer: consumer.assign([]),
    "unsubscribe": lambda consumer: consumer.unsubscribe(),
    "by interval": by_interval,
}


def cases_of(rows, leaves):
    """Return each row with each way to leave."""
    return [
        pytest.param(*row.values, leave, id=f"{row.id}, {leave}")
        for leave in leaves
        for row in rows
    ]


CASE = ("reset", "steps", "expected", "leave")


@pytest.mark.parametrize(CASE, sample(cases_of(TABLE, LEAVE), 60))
def test_the_commits_of_a_consumer_with_assigned_partitions(root, reset, steps, expected, leave):
    """E20, E24, M14: positions are resolved on first use, and explicit commits stay."""
    consumer = make_for(leave, root, reset)
    consumer.assign([T0])

    perform(consumer, steps)
    LEAVE[leave](consumer)

    assert committed(root) == expected
    consumer.close()


def revoked(consumer):
    """Another member joins: an eager assignor revokes all partitions."""
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


@pytest.mark.parametrize(CASE, sample(cases_of(AFTER_A_POLL, MEMBERS_LEAVE), 40))
def test_the_commits_of_a_member(root, reset, steps, expected, leave):
    """E20, E24, M19: the same, with partitions assigned by the group."""
    consumer = make_for(leave, root, reset)
    consumer.subscribe(["t"])

    perform(consumer, steps)
    MEMBERS_LEAVE[leave](consumer)

    assert committed(root) == expected
    consumer.close(autocommit=False)


IN_LISTENERS = [
    row
    for row in TABLE
    if "poll" in row.values[1] and not row.values[1].startswith("poll")
    if row.values[1].count("poll") == 1 and row.values[1].endswith("poll")
]


@pytest.mark.parametrize("leave", MEMBERS_LEAVE)
@pytest.mark.parametrize(("reset", "steps", "expected"), IN_LISTENERS)
def test_calls_of_a_listener_before_the_first_fetch_count(root, reset, steps, expected, leave):
    """E6, E20: the poll starts at the committed offset; positions are resolved afterwards."""
    consumer = make_for(leave, root, reset)
    first = steps.removesuffix("poll")
    performed = []

    def perform_first(assigned):
        if assigned and not performed:
            perform(consumer, first)
            performed.append(first)

    consumer.subscribe(["t"], listener=RecordingListener(assigned=perform_first))
    consumer.poll(0)
    MEMBERS_LEAVE[leave](consumer)

    assert performed == [first]
    assert committed(root) == expected
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
            # A commit from elsewhere is accepted while the group has no members.
            open_group(root, "g2").commit({T0: OffsetAndMetadata(9)})
            assert other.position(T0) == 9


def test_a_poll_resolves_the_positions_of_paused_partitions(root):
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
    """E20, E26: an assignment alone reads nothing."""
    consumer = make(root, "latest")
    consumer.create_message_streams({"t": 1})

    consumer.close()

    assert committed(root) is None


def test_auto_commit_keeps_the_metadata_of_an_earlier_commit(root):
    """E4, E20: no record was returned since, so there is nothing to commit."""
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
    """E3, E20: the position moves past offsets without records, and the commit stays."""
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


def slow_handler(record):
    """Take longer than the worker waits between two commits."""
    if record.offset == 0:
        time.sleep(group_worker.COMMIT_SECONDS + 0.1)
    if record.value == b"last":
        raise KeyboardInterrupt


@pytest.mark.tier("test")
def test_a_run_commits_the_rest_of_a_batch_that_it_committed_in_part(tmp_path, monkeypatch):
    """A slow handler commits its first records early, and the rest when they are handled."""
    monkeypatch.setattr(group_worker, "COMMIT_SECONDS", 0.2)
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t")
        log.partition("t", 0).append([encoded(*[b"v"] * 4, at=START)])
        job = group_worker.GroupJob(
            *(lambda: log, ("t",), ConsumerConfig.parse({}), Handling(slow_handler), False, 0)
        )
        worker = group_worker.GroupWorker(job)
        with log.consumer("t", group_id="g", auto_offset_reset="earliest") as consumer:
            worker._handle(consumer, consumer.poll(0))
            assert consumer.committed(T0) == 4


# Programs that end amid a record

ENDS = ["raise RuntimeError('amid a record')", "raise KeyboardInterrupt", "raise SystemExit"]


@pytest.mark.parametrize("end", [*ENDS, "pass"])
def test_the_end_of_a_program_commits_nothing(tmp_path, end):
    """E24: the record at hand may not be processed, so without a `close` it is read again."""
    program = """
import sys, embedlog
log = embedlog.open(sys.argv[1])
consumer = log.consumer("t", group_id="g", auto_offset_reset="earliest")
for record in consumer.iter_records(until="end"):
    if record.offset == 2:
        exec(sys.argv[2])
        break
"""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t")
        with log.producer() as producer:
            producer.send_batch("t", [b"v"] * 5)
        subprocess.run(
            [sys.executable, "-c", program, tmp_path / "log", end], capture_output=True, check=False
        )

        assert list(log.groups) == ["g"]
        assert log.groups["g"].lag() == {}


@pytest.mark.parametrize(
    ("error", "lag"), [(RuntimeError, {}), (KeyboardInterrupt, {}), (None, {T0: 2})]
)
def test_an_error_out_of_the_block_of_a_log_commits_nothing(tmp_path, error, lag):
    """E24: as with the block of the consumer itself; without an error `close` commits."""
    with suppress(RuntimeError, KeyboardInterrupt), embedlog.open(tmp_path / "log") as log:
        log.create_topic("t")
        with log.producer() as producer:
            producer.send_batch("t", [b"v"] * 5)
        consumer = log.consumer("t", group_id="g", auto_offset_reset="earliest")
        for record in consumer:
            if record.offset == 2:
                if error is not None:
                    raise error
                break

    with embedlog.open(tmp_path / "log", mode="r") as log:
        assert log.groups["g"].lag() == lag
