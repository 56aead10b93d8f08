"""A consumer group from outside: its description, its reset and its deletion while it is empty."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from datetime import UTC, date, datetime, timedelta, timezone

import numpy as np
import pytest
from support.clock import START, ManualClock
from support.patience import patient
from support.roots import encoded, segment_files

import embedlog
from embedlog import keyspace
from embedlog.api.consumer_group import PartitionDescription
from embedlog.errors import (
    GroupIdNotFoundError,
    GroupSubscribedToTopicError,
    InvalidGroupIdError,
    LogTruncatedError,
    NonEmptyGroupError,
    NoOffsetForPartitionError,
    ReadOnlyError,
    UnknownMemberIdError,
    UnknownTopicOrPartitionError,
)
from embedlog.record import OffsetAndMetadata, TopicPartition

T0, T1, U0 = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("u", 0)
SECOND = 1000


@pytest.fixture
def clock():
    """A clock that stands at the time of the last record."""
    return ManualClock(START + 9 * SECOND)


@pytest.fixture
def log(tmp_path, clock):
    """Ten records a second apart in t-0, three in t-1, one in u-0, each its own batch."""
    log = embedlog.open(tmp_path / "log", clock=clock)
    log.create_topic("t", partitions=2)
    log.create_topic("u")
    for tp, count in ((T0, 10), (T1, 3), (U0, 1)):
        for number in range(count):
            log.partition(*tp).append([encoded(b"v%d" % number, at=START + number * SECOND)])
    yield log
    if not log.root.closed:
        assert log.housekeeping.verify() == []
    log.close()


@pytest.fixture
def group(log):
    """The group ``g``: committed offsets 4 of 10 and 3 of 3, no members."""
    commit(log, {T0: OffsetAndMetadata(4, "a note"), T1: OffsetAndMetadata(3)})
    return log.groups["g"]


def commit(log, positions, group="g"):
    """Commit for a group without joining it (M14)."""
    with log.consumer(group_id=group, enable_auto_commit=False) as consumer:
        consumer.commit(positions)


def member(log, *topics, group="g", **config):
    """Return a consumer that owns the partitions of its topics."""
    config = {"auto_offset_reset": "earliest", "enable_auto_commit": False, **config}
    consumer = log.consumer(*topics, group_id=group, **config)
    consumer.poll(timeout_ms=0)
    assert consumer.assignment()
    return consumer


def first_offsets(log, group="g"):
    """Return the first offset of each partition that a new consumer of the group reads."""
    with log.consumer("t", group_id=group, auto_offset_reset="earliest") as consumer:
        return {
            tp: rows[0].offset for tp, rows in consumer.poll(timeout_ms=int(patient(1000))).items()
        }


def offsets(group):
    """Return the committed offsets of a group."""
    description = group.describe()
    return {(row.topic, row.partition): row.current_offset for row in description.partitions}


# Descriptions


def test_groups_are_listed_by_name(log):
    """Groups with members or commits, sorted; a query of a group does not create it."""
    commit(log, {T0: OffsetAndMetadata(1)}, group="b")
    commit(log, {T0: OffsetAndMetadata(1)}, group="a b")
    log.groups["c"].state  # noqa: B018
    with member(log, "t", group="a"):
        assert list(log.groups) == ["a", "a b", "b"]


def test_an_unknown_group_is_dead(log):
    """M1; every query but its state is an error."""
    group = log.groups["nobody"]

    assert group.state == "Dead"
    assert repr(group) == "<ConsumerGroup nobody: Dead, the group does not exist yet>"
    assert "nobody" in group._repr_html_()
    for call in (group.lag, group.members, group.describe, group.delete, group.delete_offsets):
        with pytest.raises(GroupIdNotFoundError, match="nobody"):
            call()
    assert list(log.groups) == []


@pytest.mark.parametrize("name", ["", "x" * 361, "a\0b", None, 7])
def test_an_invalid_name_is_refused_at_once(log, name):
    """By `group`, not by the first query."""
    with pytest.raises(InvalidGroupIdError):
        log.groups[name]


def test_lag_counts_offsets_from_the_commit_to_the_end(log, group):
    """By partition; a commit past the end, which Kafka allows (E21), has lag 0."""
    assert group.lag() == {T0: 6, T1: 0}

    log.partition("t", 1).append([encoded(b"x", b"y")])
    commit(log, {T0: OffsetAndMetadata(99)})

    assert group.lag() == {T0: 0, T1: 2}


def test_a_partition_without_a_commit_has_no_lag(log):
    """None, as Kafka's tools print a dash: its start depends on the settings of its owner."""
    with member(log, "t", "u") as consumer:
        consumer.commit({T1: OffsetAndMetadata(1)})

        assert log.groups["g"].lag() == {T0: None, T1: 2, U0: None}
        assert log.groups["g"].describe().lag == 2


def test_describe_returns_all_facts_of_a_partition(log, group, clock):
    """Offsets, lag in records and in time, the metadata, and the time of the commit."""
    committed_ms = clock.now
    clock.advance(500)

    first, second = group.describe().partitions

    assert first == PartitionDescription(
        topic="t",
        partition=0,
        current_offset=4,
        log_start_offset=0,
        log_end_offset=10,
        lag=6,
        lag_ms=5 * SECOND + 500,
        metadata="a note",
        committed_ms=committed_ms,
        member_id=None,
    )
    assert (second.current_offset, second.lag, second.lag_ms, second.metadata) == (3, 0, 0, "")


def test_lag_in_time_is_the_age_of_the_first_record_that_is_not_read(log, clock):
    """Also within a batch; the lag of a record from the future is 0."""
    log.partition(*U0).append([encoded(b"a", b"b", b"c", at=[START, START + 7, START + 99_999])])

    for offset, age in ((0, 9000), (1, 9000), (2, 8993), (3, 0), (4, 0)):
        commit(log, {U0: OffsetAndMetadata(offset)})
        assert log.groups["g"].describe().partitions[0].lag_ms == age


def test_lag_in_time_of_a_damaged_batch_is_unknown(tmp_path, log, group):
    """The rest of the description is not affected."""
    (file,) = (file for file in segment_files(tmp_path / "log") if "/t-1/0/" in str(file))
    original = file.read_bytes()
    # The timestamp in its column, not the one in the header.
    position = original.rindex((START + 4 * SECOND).to_bytes(8, "little"))
    file.write_bytes(original[:position] + b"damage" + original[position + 6 :])

    first, second = group.describe().partitions

    assert (first.lag, first.lag_ms) == (6, None)
    assert (second.lag, second.lag_ms) == (0, 0)
    file.write_bytes(original)


def test_members_are_described_with_their_partitions(log):
    """Id, client, instance, process, topics; and the owner of each partition."""
    with member(log, "t", "u", client_id="me", group_instance_id="i-1") as consumer:
        description, metadata = log.groups["g"].describe(), consumer.group_metadata()

    (info,) = description.members
    assert info.member_id == metadata.member_id
    assert (info.group_instance_id, info.client_id, info.pid) == ("i-1", "me", os.getpid())
    assert info.topics == ("t", "u")
    assert info.partitions == (T0, T1, U0)
    assert info.session_timeout_ms == 45_000
    assert info.joined_ms == START + 9 * SECOND
    assert {row.member_id for row in description.partitions} == {info.member_id}
    assert (description.state, description.assignor) == ("Stable", "range")
    assert description.generation == metadata.generation_id
    assert log.groups["g"].members() == [info]


def test_members_are_described_in_the_order_they_joined(log):
    """The first one is the leader until it leaves (M3)."""
    first = member(log, "t", client_id="b")
    with member(log, "u", client_id="a"):
        assert [info.client_id for info in log.groups["g"].members()] == ["b", "a"]
        first.close()
        with member(log, "t", client_id="0"):
            assert [info.client_id for info in log.groups["g"].members()] == ["a", "0"]


def test_a_group_object_is_current_at_each_call(log):
    """One object follows the group from before its creation until after its deletion."""
    group, states = log.groups["g"], []
    states.append(group.state)
    consumer = member(log, "t")
    states.append(group.state)
    other = log.consumer("t", group_id="g", auto_offset_reset="earliest")
    other.poll(timeout_ms=0)
    states.append(group.state)
    other.close()
    consumer.close()
    states.append(group.state)
    group.delete()
    states.append(group.state)

    assert states == ["Dead", "Stable", "CompletingRebalance", "Empty", "Dead"]


def test_groups_do_not_see_each_other(log, group):
    """M17, also if one name is a prefix of the other."""
    commit(log, {T0: OffsetAndMetadata(9)}, group="g2")

    assert group.lag() == {T0: 6, T1: 0}
    assert log.groups["g2"].lag() == {T0: 1}


# Display


def test_a_group_displays_itself(log, group):
    """One line in a list, a table for a description, HTML in notebooks."""
    assert repr(group) == (
        "<ConsumerGroup g: Empty, generation 0, 0 members, lag 6 in 2 partitions>"
    )
    lines = repr(group.describe()).splitlines()
    assert lines[0] == "g: Empty, generation 0, 0 members, lag 6 in 2 partitions"
    assert lines[1].split()[:6] == [
        *("topic", "partition", "current_offset", "log_start_offset", "log_end_offset", "lag"),
    ]
    assert lines[3].split()[:8] == ["t", "1", "3", "0", "3", "0", "0", "-"]
    assert "<td>a note</td>" in group._repr_html_()
    assert "2023-11-14 22:13:29.000" in group._repr_html_()


def test_a_partition_without_a_commit_differs_from_one_without_lag(log):
    """A new group has no lag yet, although it has all records to read."""
    with log.consumer("t", group_id="new", auto_offset_reset="earliest") as consumer:
        consumer.poll(timeout_ms=100, max_records=1)
        description = log.groups["new"].describe()

    assert description.title.endswith(" 1 member, lag 0 in 2 partitions (2 without a commit)")
    assert "None" not in description._repr_html_()


def test_metadata_cannot_put_html_into_a_notebook(log):
    """All text of other programs is escaped."""
    commit(log, {T0: OffsetAndMetadata(0, "<script>")}, group="<b>")

    assert "<script>" not in log.groups["<b>"]._repr_html_()
    assert "<b><b>" not in log.groups["<b>"]._repr_html_()


def test_a_group_of_a_closed_log_can_still_be_printed(log, group):
    """So can the log."""
    log.close()

    assert repr(group) == "<ConsumerGroup g of a closed log>"


def test_a_description_converts_to_a_frame_and_to_json(group):
    """Columns with missing numbers stay integers."""
    frame = group.describe().to_pandas()

    assert list(frame.columns) == list(PartitionDescription._fields)
    assert list(frame["lag"]) == [6, 0]
    assert str(frame["lag"].dtype) == "Int64"
    as_dict = group.describe().to_dict()
    assert as_dict["partitions"][0]["metadata"] == "a note"
    assert (as_dict["lag"], as_dict["members"], as_dict["state"]) == (6, [], "Empty")


def test_a_group_object_can_be_pickled(group):
    """As the log and the name of the group."""
    unpickled = pickle.loads(pickle.dumps(group))

    assert unpickled.lag() == {T0: 6, T1: 0}
    unpickled._root.close()


# Groups of other processes and of read-only logs


def test_a_read_only_log_allows_every_query_and_no_change(tmp_path, log, group):
    """With mode="r" queries and dry runs work; changes are refused."""
    with member(log, "u", group="h"), embedlog.open(tmp_path / "log", mode="r") as reader:
        assert list(reader.groups) == ["g", "h"]
        assert reader.groups["g"].lag() == {T0: 6, T1: 0}
        assert reader.groups["g"].describe().partitions[0].metadata == "a note"
        assert reader.groups["h"].state == "Stable"
        assert len(reader.groups["h"].members()) == 1
        read_only = reader.groups["g"]
        assert read_only.reset_offsets("earliest") == {T0: (4, 0), T1: (3, 0)}
        for change in (
            lambda: read_only.reset_offsets("earliest", dry_run=False),
            read_only.delete,
            lambda: read_only.delete_offsets([T0]),
            lambda: read_only.remove_members("m"),
        ):
            with pytest.raises(ReadOnlyError):
                change()
    assert group.lag() == {T0: 6, T1: 0}


def test_after_a_reboot_a_reader_sees_the_checkpoint(tmp_path, log, group):
    """Without a writer there is no `live`: offsets and ends are read without it."""
    group.reset_offsets("current", dry_run=False)
    log.close()
    # A copy counts as another boot.
    shutil.copytree(tmp_path / "log", tmp_path / "copy")

    with embedlog.open(tmp_path / "copy", mode="r") as reader:
        assert list(reader.groups) == ["g"]
        assert reader.groups["g"].lag() == {T0: 6, T1: 0}
        assert reader.groups["g"].state == "Empty"
        assert reader.groups["g"].reset_offsets(shift=1) == {T0: (4, 5), T1: (3, 3)}
    with embedlog.open(tmp_path / "copy") as copy:
        assert copy.groups["g"].lag() == {T0: 6, T1: 0}


def test_the_lag_counts_visible_records(tmp_path, log, group):
    """A handle that sees only durable records counts only durable records."""
    with embedlog.open(tmp_path / "log", visibility="durable", mode="r") as durable:
        assert durable.groups["g"].lag() == {T0: 0, T1: 0}
        log.flush()
        assert durable.groups["g"].lag() == {T0: 6, T1: 0}


KILLED_MEMBER = """
    import os, sys, embedlog
    log = embedlog.open(sys.argv[1])
    consumer = log.consumer("t", group_id="g", auto_offset_reset="earliest")
    while not consumer.poll(timeout_ms=100): pass
    consumer.commit()
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def group_of_killed(tmp_path, log):
    """A group whose only member was killed, and not removed yet."""
    code = textwrap.dedent(KILLED_MEMBER)
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path / "log")], check=False)
    assert process.returncode == -9
    return log.groups["g"]


def test_killed_members_are_not_described(tmp_path, group_of_killed):
    """M10: a read-only log detects them too, although it may not remove them."""
    with embedlog.open(tmp_path / "log", mode="r") as reader:
        group = reader.groups["g"]

        assert (group.state, group.members()) == ("Empty", [])
        assert [row.member_id for row in group.describe().partitions] == [None, None]
        assert group.reset_offsets("latest") == {T0: (10, 10), T1: (3, 3)}


@pytest.mark.parametrize("change", ["reset", "delete", "delete offsets"])
def test_killed_members_do_not_prevent_changes(log, group_of_killed, change):
    """Callers need not wait for the end of their session."""
    if change == "reset":
        group_of_killed.reset_offsets("earliest", dry_run=False)
        assert group_of_killed.lag() == {T0: 10, T1: 3}
    elif change == "delete":
        group_of_killed.delete()
        assert list(log.groups) == []
    else:
        group_of_killed.delete_offsets([T0])
        assert group_of_killed.lag() == {T1: 0}


# Reset


AGO = timedelta(milliseconds=3500)
TARGETS = {
    "earliest": ("earliest", 0),
    "latest": ("latest", 10),
    "current": ("current", 4),
    "an offset": (7, 7),
    "numpy's": (np.int64(7), 7),
    "an offset past the end": (1 << 70, 10),
    "a time between records": (datetime.fromtimestamp((START + 2500) / 1000, UTC), 3),
    "a time of a record": (datetime.fromtimestamp((START + 2000) / 1000, UTC), 2),
    "just after a record": (
        datetime.fromtimestamp((START + 2000) / 1000, UTC) + timedelta(microseconds=1),
        3,
    ),
    "a time without a zone": (
        datetime.fromtimestamp((START + 2000) / 1000, UTC).replace(tzinfo=None),
        2,
    ),
    "a time in another zone": (
        datetime.fromtimestamp((START + 2000) / 1000, timezone(timedelta(hours=-7))),
        2,
    ),
    "a time before the first": (datetime(1960, 1, 1, tzinfo=UTC), 0),
    "the earliest datetime": (datetime.min.replace(tzinfo=UTC), 0),
    "a time past the last": (datetime.max.replace(tzinfo=UTC), 10),
    "a duration": (AGO, 6),
    "a duration as text": ("3.5s", 6),
    "a time as text": (datetime.fromtimestamp((START + 2000) / 1000, UTC).isoformat(), 2),
    "a date": (date(2000, 1, 1), 0),
    "now": (timedelta(0), 9),
    "a duration before 1970": (timedelta.max, 0),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_group_is_reset_to(log, group, name):
    """Every target of kafka-consumer-groups; a dry run returns the same and changes nothing."""
    to, after = TARGETS[name]

    result = group.reset_offsets(to, partitions=[T0])

    assert result == {T0: (4, after)}
    assert offsets(group) == {T0: 4, T1: 3}
    assert group.reset_offsets(to, partitions=[T0], dry_run=False) == result
    assert offsets(group) == {T0: after, T1: 3}


@pytest.mark.parametrize(
    ("shift", "after"), [(0, 4), (3, 7), (-3, 1), (100, 10), (-100, 0), (-(1 << 70), 0)]
)
def test_a_group_is_shifted_within_the_log(group, shift, after):
    """Relative to its committed offset, and never out of the log."""
    assert group.reset_offsets(shift=shift, partitions=[T0]) == {T0: (4, after)}


def test_a_reset_stays_within_the_rest_of_a_truncated_log(log, group):
    """No target is below the start: not the earliest offset, not a number, not a time."""
    log.partition("t", 0).truncate_to(0)
    commit(log, {T0: OffsetAndMetadata(4)})

    for to in ("earliest", "latest", "current", 4, timedelta(days=9)):
        assert group.reset_offsets(to)[T0] == (4, 0)


def test_a_consumer_continues_at_the_reset_offset(log, group):
    """A reset is a commit like any other."""
    group.reset_offsets(2, topics=["t"], dry_run=False)

    assert first_offsets(log) == {T0: 2, T1: 2}


def test_a_reset_moves_the_selected_partitions(log, group):
    """All with commits; or all of some topics, also new ones; or some partitions."""
    assert group.reset_offsets("latest").keys() == {T0, T1}
    assert group.reset_offsets("latest", topics="u") == {U0: (None, 1)}
    assert group.reset_offsets("latest", topics=["t", "u"]).keys() == {T0, T1, U0}
    assert group.reset_offsets("latest", partitions=[("t", 1)]).keys() == {T1}
    assert group.reset_offsets("latest", topics="u", partitions=[T1]).keys() == {T1, U0}
    assert group.reset_offsets("latest", topics=[]) == {}


def test_a_group_can_be_reset_before_it_exists(log):
    """Its first consumer starts there."""
    result = log.groups["new"].reset_offsets(shift=None, to=2, topics="t")
    assert result == {T0: (None, 2), T1: (None, 2)}
    assert list(log.groups) == []

    log.groups["new"].reset_offsets(2, topics="t", dry_run=False)

    assert log.groups["new"].lag() == {T0: 8, T1: 1}
    with pytest.raises(GroupIdNotFoundError):
        log.groups["other"].reset_offsets("latest")


def test_metadata_stays_with_its_partition(log, group):
    """As in Kafka, a reset changes only the offset."""
    group.reset_offsets("earliest", dry_run=False)

    assert [row.metadata for row in group.describe().partitions] == ["a note", ""]


def test_a_reset_applies_to_the_current_log(log, group):
    """A later truncation below its offset raises an error in the next consumer (A36)."""
    group.reset_offsets("latest", dry_run=False)
    log.partition("t", 0).truncate_to(5)
    for _ in range(10):
        log.partition("t", 0).append([encoded(b"another")])

    with log.consumer("t", group_id="g", auto_offset_reset="none") as consumer:
        with pytest.raises(LogTruncatedError) as caught:
            consumer.poll(timeout_ms=1000)
    assert caught.value.next_offset == 5


def test_the_result_of_a_reset_says_whether_it_was_done(group):
    """In text and as a table, so that a dry run is not mistaken for a reset."""
    dry_run, result = group.reset_offsets(0), group.reset_offsets(0, dry_run=False)

    assert repr(dry_run).splitlines() == [
        "Reset of g: dry run, nothing was changed",
        "topic  partition  before  after",
        "t      0          4       0",
        "t      1          3       0",
    ]
    assert dry_run.dry_run
    assert repr(result).startswith("Reset of g: done\n")
    assert "<td>4</td><td>0</td>" in dry_run._repr_html_()
    assert dry_run[T0].before == 4


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, ValueError),
        ({"to": "earliest", "shift": 1}, ValueError),
        ({"to": "begin"}, ValueError),
        ({"to": -1}, ValueError),
        ({"to": timedelta(seconds=-1)}, ValueError),
        ({"to": 1.5}, TypeError),
        ({"to": True}, TypeError),
        ({"to": START, "topics": "nothing"}, UnknownTopicOrPartitionError),
        ({"to": 0, "partitions": [("t", 2)]}, UnknownTopicOrPartitionError),
        ({"to": 0, "partitions": ["t"]}, TypeError),
        ({"shift": "1"}, TypeError),
        ({"shift": 1, "topics": "u"}, NoOffsetForPartitionError),
        ({"shift": 1, "topics": ["t", "u"]}, NoOffsetForPartitionError),
    ],
)
def test_an_invalid_reset_is_refused_and_moves_nothing(group, arguments, error):
    """Not even its valid partitions."""
    with pytest.raises(error):
        group.reset_offsets(**arguments, dry_run=False)

    assert offsets(group) == {T0: 4, T1: 3}


def test_an_active_group_is_not_changed_from_outside(log, group):
    """Its members would not notice; the error names them. A dry run is refused as well."""
    with member(log, "t"):
        (info,) = group.members()
        for change in (
            group.delete,
            lambda: group.reset_offsets("latest"),
            lambda: group.reset_offsets("latest", dry_run=False),
        ):
            with pytest.raises(NonEmptyGroupError, match=info.member_id):
                change()
    assert offsets(group) == {T0: 4, T1: 3}


def test_offsets_of_a_subscribed_topic_cannot_be_deleted(log, group):
    """M15; offsets of other topics can, while the group is active."""
    commit(log, {U0: OffsetAndMetadata(1)})
    with member(log, "t"):
        with pytest.raises(GroupSubscribedToTopicError, match="t"):
            group.delete_offsets([U0, T0])
        assert len(group.lag()) == 3

        group.delete_offsets(topics="u")

        assert group.lag() == {T0: 6, T1: 0}
    group.delete_offsets([("t", 1)])
    assert group.lag() == {T0: 6}


def test_a_deleted_group_starts_again(tmp_path, log, group):
    """Also after a reboot: the checkpoint has nothing of it."""
    group.reset_offsets("current", dry_run=False)

    group.delete()

    assert (list(log.groups), group.state) == ([], "Dead")
    assert first_offsets(log) == {T0: 0, T1: 0}
    group.delete()
    log.close()
    shutil.copytree(tmp_path / "log", tmp_path / "copy")
    with embedlog.open(tmp_path / "copy") as copy:
        assert list(copy.groups) == []


def test_a_member_can_be_removed(log, group):
    """A static member that will not return keeps its partitions only until then (M13)."""
    member(log, "t", group_instance_id="i").close()
    assert [info.group_instance_id for info in group.members()] == ["i"]
    with pytest.raises(NonEmptyGroupError, match="static ones stay"):
        group.delete()
    with pytest.raises(UnknownMemberIdError, match="other"):
        group.remove_members("i", "other")

    (removed,) = group.remove_members("i")

    assert removed.startswith("i-")
    assert group.state == "Empty"
    group.delete()


def test_the_offsets_of_a_deleted_topic_are_deleted(log, group):
    """In every group; a new topic of that name is another one (A38)."""
    commit(log, {T0: OffsetAndMetadata(5), U0: OffsetAndMetadata(1)}, group="h")

    log.delete_topic("t")
    log.create_topic("t", partitions=2)

    assert group.lag() == {}
    assert log.groups["h"].lag() == {U0: 0}
    assert list(log.groups) == ["g", "h"]
    live = log.root.context.live
    rows = live.read(lambda txn: list(keyspace.COMMITTED_OFFSETS.keys(txn)))
    assert len(rows) == 1


def test_a_topic_can_be_deleted_while_a_group_reads_it(log):
    """The members notice it in their next poll; their commits are deleted."""
    with member(log, "t", "u") as consumer:
        consumer.commit({T0: OffsetAndMetadata(1), U0: OffsetAndMetadata(1)})

        log.delete_topic("t")

        assert log.groups["g"].lag() == {U0: 0}
        consumer.poll(timeout_ms=0)
        assert consumer.assignment() == {U0}
