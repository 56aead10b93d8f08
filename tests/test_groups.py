"""Watching a consumer group from outside, and moving it while nobody is in it."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pytest
from support.clock import START, ManualClock
from support.patience import patient
from support.roots import encoded, segment_files

import embedlog
from embedlog import keyspace
from embedlog.api.consumer_group import PartitionDescription
from embedlog.api.reset_offsets import milliseconds
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
    for one, count in ((T0, 10), (T1, 3), (U0, 1)):
        for number in range(count):
            log.partition(*one).append([encoded(b"v%d" % number, at=START + number * SECOND)])
    yield log
    if not log.root.closed:
        assert log.verify() == []
    log.close()


@pytest.fixture
def group(log):
    """The group ``g``, which stands at 4 of 10, at 3 of 3, and has nobody in it."""
    commit(log, {T0: OffsetAndMetadata(4, "a note"), T1: OffsetAndMetadata(3)})
    return log.group("g")


def commit(log, positions, group="g"):
    """Commit for a group without being in it (M14)."""
    with log.consumer(group_id=group, enable_auto_commit=False) as consumer:
        consumer.commit(positions)


def member(log, *topics, group="g", **config):
    """A consumer that owns what it subscribes to."""
    config = {"auto_offset_reset": "earliest", "enable_auto_commit": False, **config}
    consumer = log.consumer(*topics, group_id=group, **config)
    consumer.poll(timeout_ms=0)
    assert consumer.assignment()
    return consumer


def begins(log, group="g"):
    """The first offset that a new consumer of the group gets of each partition."""
    with log.consumer("t", group_id=group, auto_offset_reset="earliest") as consumer:
        return {
            one: rows[0].offset
            for one, rows in consumer.poll(timeout_ms=int(patient(1000))).items()
        }


def offsets(group):
    """What a group committed."""
    return {(p.topic, p.partition): p.current_offset for p in group.describe().partitions}


# Looking


def test_groups_are_listed_by_name(log):
    """Those with members or commits, sorted; a look at one does not make it."""
    commit(log, {T0: OffsetAndMetadata(1)}, group="b")
    commit(log, {T0: OffsetAndMetadata(1)}, group="a b")
    log.group("c").state  # noqa: B018
    with member(log, "t", group="a"):
        assert log.groups() == ["a", "a b", "b"]


def test_a_group_that_is_not_there_is_dead(log):
    """M1; what is asked about it beyond that is an error."""
    group = log.group("nobody")

    assert group.state == "Dead"
    assert repr(group) == "<ConsumerGroup nobody: Dead, the group does not exist yet>"
    assert "nobody" in group._repr_html_()
    for ask in (group.lag, group.members, group.describe, group.delete, group.delete_offsets):
        with pytest.raises(GroupIdNotFoundError, match="nobody"):
            ask()
    assert log.groups() == []


@pytest.mark.parametrize("name", ["", "x" * 201, "a\0b", None, 7])
def test_a_name_that_cannot_be_is_refused_at_once(log, name):
    """Not by the first question."""
    with pytest.raises(InvalidGroupIdError):
        log.group(name)


def test_lag_counts_offsets_from_the_commit_to_the_end(log, group):
    """By partition; a commit past the end, which Kafka allows (E21), is no negative lag."""
    assert group.lag() == {T0: 6, T1: 0}

    log.partition("t", 1).append([encoded(b"x", b"y")])
    commit(log, {T0: OffsetAndMetadata(99)})

    assert group.lag() == {T0: 0, T1: 2}


def test_a_partition_without_a_commit_has_no_lag(log):
    """None, as Kafka's tools print a dash: where its owner begins is its own affair."""
    with member(log, "t", "u") as consumer:
        consumer.commit({T1: OffsetAndMetadata(1)})

        assert log.group("g").lag() == {T0: None, T1: 2, U0: None}
        assert log.group("g").describe().lag == 2


def test_describe_tells_all_of_a_partition(log, group, clock):
    """Offsets, lag in records and in time, the note, and when that was committed."""
    committed = clock.now
    clock.advance(500)

    zero, one = group.describe().partitions

    assert zero == PartitionDescription(
        topic="t",
        partition=0,
        current_offset=4,
        log_start_offset=0,
        log_end_offset=10,
        lag=6,
        lag_ms=5 * SECOND + 500,
        metadata="a note",
        committed_ms=committed,
        member_id=None,
    )
    assert (one.current_offset, one.lag, one.lag_ms, one.metadata) == (3, 0, 0, "")


def test_lag_in_time_is_the_age_of_the_first_record_that_is_not_read(log, clock):
    """Inside a batch too; a record of the future is not older than nothing."""
    log.partition(*U0).append([encoded(b"a", b"b", b"c", at=[START, START + 7, START + 99_999])])

    for offset, age in ((0, 9000), (1, 9000), (2, 8993), (3, 0), (4, 0)):
        commit(log, {U0: OffsetAndMetadata(offset)})
        assert log.group("g").describe().partitions[0].lag_ms == age


def test_lag_in_time_of_a_damaged_batch_is_unknown(tmp_path, log, group):
    """The rest of the description is as good as ever."""
    (file,) = (file for file in segment_files(tmp_path / "log") if "/t-1/0/" in str(file))
    whole = file.read_bytes()
    at = whole.rindex((START + 4 * SECOND).to_bytes(8, "little"))  # in the column, not the head
    file.write_bytes(whole[:at] + b"damage" + whole[at + 6 :])

    zero, one = group.describe().partitions

    assert (zero.lag, zero.lag_ms) == (6, None)
    assert (one.lag, one.lag_ms) == (0, 0)
    file.write_bytes(whole)


def test_members_are_told_with_what_they_own(log):
    """Id, client, instance, process, topics; and each partition knows its owner."""
    with member(log, "t", "u", client_id="me", group_instance_id="i-1") as consumer:
        found, who = log.group("g").describe(), consumer.group_metadata()

    (one,) = found.members
    assert one.member_id == who.member_id
    assert (one.group_instance_id, one.client_id, one.pid) == ("i-1", "me", os.getpid())
    assert one.topics == ("t", "u")
    assert one.partitions == (T0, T1, U0)
    assert one.session_timeout_ms == 45_000
    assert one.joined_ms == START + 9 * SECOND
    assert {each.member_id for each in found.partitions} == {one.member_id}
    assert (found.state, found.assignor) == ("Stable", "range")
    assert found.generation == who.generation_id
    assert log.group("g").members() == [one]


def test_a_view_is_as_of_each_call(log):
    """One object follows the group from before it is there until it is gone."""
    group, states = log.group("g"), []
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
    """M17, also where one name begins with the other."""
    commit(log, {T0: OffsetAndMetadata(9)}, group="g2")

    assert group.lag() == {T0: 6, T1: 0}
    assert log.group("g2").lag() == {T0: 1}


# Pictures


def test_a_group_pictures_itself_for_people(log, group):
    """A line in a list, a table where it is asked for, HTML in notebooks."""
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


def test_a_partition_without_a_commit_is_told_apart_from_one_without_lag(log):
    """A new group has everything before it, and no lag."""
    with log.consumer("t", group_id="new", auto_offset_reset="earliest") as consumer:
        consumer.poll(timeout_ms=100, max_records=1)
        told = log.group("new").describe()

    assert told.title.endswith(" 1 member, lag 0 in 2 partitions (2 without a commit)")
    assert "None" not in told._repr_html_()


def test_a_note_cannot_put_html_into_a_notebook(log):
    """Everything that somebody else wrote is escaped."""
    commit(log, {T0: OffsetAndMetadata(0, "<script>")}, group="<b>")

    assert "<script>" not in log.group("<b>")._repr_html_()
    assert "<b><b>" not in log.group("<b>")._repr_html_()


def test_a_group_of_a_closed_log_can_still_be_printed(log, group):
    """As the log itself."""
    log.close()

    assert repr(group) == "<ConsumerGroup g of a closed log>"


def test_a_description_becomes_a_frame_and_json(group):
    """Numbers stay numbers where some are missing."""
    frame = group.describe().to_pandas()

    assert list(frame.columns) == list(PartitionDescription._fields)
    assert list(frame["lag"]) == [6, 0]
    assert str(frame["lag"].dtype) == "Int64"
    told = group.describe().to_dict()
    assert told["partitions"][0]["metadata"] == "a note"
    assert (told["lag"], told["members"], told["state"]) == (6, [], "Empty")


def test_a_view_can_be_sent_to_another_process(group):
    """It pickles as the log and the name."""
    again = pickle.loads(pickle.dumps(group))

    assert again.lag() == {T0: 6, T1: 0}
    again._root.close()


# From outside


def test_a_log_that_is_only_read_tells_all_and_changes_nothing(tmp_path, log, group):
    """mode="r": every question and a dry run; what changes something is refused."""
    with member(log, "u", group="h"), embedlog.open(tmp_path / "log", mode="r") as reader:
        assert reader.groups() == ["g", "h"]
        assert reader.group("g").lag() == {T0: 6, T1: 0}
        assert reader.group("g").describe().partitions[0].metadata == "a note"
        assert reader.group("h").state == "Stable"
        assert len(reader.group("h").members()) == 1
        seen = reader.group("g")
        assert seen.reset_offsets("earliest") == {T0: (4, 0), T1: (3, 0)}
        for change in (
            lambda: seen.reset_offsets("earliest", dry_run=False),
            seen.delete,
            lambda: seen.delete_offsets([T0]),
            lambda: seen.remove_members("m"),
        ):
            with pytest.raises(ReadOnlyError):
                change()
    assert group.lag() == {T0: 6, T1: 0}


def test_after_a_reboot_a_reader_sees_what_was_saved(tmp_path, log, group):
    """Nobody attached yet, so there is no `live`: positions and ends are found without."""
    group.reset_offsets("current", dry_run=False)
    log.close()
    shutil.copytree(tmp_path / "log", tmp_path / "copy")  # counts as another boot

    with embedlog.open(tmp_path / "copy", mode="r") as reader:
        assert reader.groups() == ["g"]
        assert reader.group("g").lag() == {T0: 6, T1: 0}
        assert reader.group("g").state == "Empty"
        assert reader.group("g").reset_offsets(shift=1) == {T0: (4, 5), T1: (3, 3)}
    with embedlog.open(tmp_path / "copy") as copy:
        assert copy.group("g").lag() == {T0: 6, T1: 0}


def test_what_is_visible_bounds_the_lag(tmp_path, log, group):
    """A handle that sees only durable records counts only those."""
    with embedlog.open(tmp_path / "log", visibility="durable", mode="r") as durable:
        assert durable.group("g").lag() == {T0: 0, T1: 0}
        log.flush()
        assert durable.group("g").lag() == {T0: 6, T1: 0}


KILLED = """
    import os, sys, embedlog
    log = embedlog.open(sys.argv[1])
    consumer = log.consumer("t", group_id="g", auto_offset_reset="earliest")
    while not consumer.poll(timeout_ms=100): pass
    consumer.commit()
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def killed(tmp_path, log):
    """A group whose only member was killed; nobody has looked since."""
    code = textwrap.dedent(KILLED)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "log")], check=False)
    assert done.returncode == -9
    return log.group("g")


def test_members_that_were_killed_are_not_told(tmp_path, killed):
    """M10: a reader from outside knows as well, though it may not remove them."""
    with embedlog.open(tmp_path / "log", mode="r") as reader:
        group = reader.group("g")

        assert (group.state, group.members()) == ("Empty", [])
        assert [each.member_id for each in group.describe().partitions] == [None, None]
        assert group.reset_offsets("latest") == {T0: (10, 10), T1: (3, 3)}


@pytest.mark.parametrize("change", ["reset", "delete", "delete offsets"])
def test_members_that_were_killed_are_not_in_the_way(log, killed, change):
    """Nobody has to wait for the end of their session."""
    if change == "reset":
        killed.reset_offsets("earliest", dry_run=False)
        assert killed.lag() == {T0: 10, T1: 3}
    elif change == "delete":
        killed.delete()
        assert log.groups() == []
    else:
        killed.delete_offsets([T0])
        assert killed.lag() == {T1: 0}


# Moving


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
    "a time elsewhere": (
        datetime.fromtimestamp((START + 2000) / 1000, timezone(timedelta(hours=-7))),
        2,
    ),
    "a time before the first": (datetime(1960, 1, 1, tzinfo=UTC), 0),
    "the first of times": (datetime.min.replace(tzinfo=UTC), 0),
    "a time past the last": (datetime.max.replace(tzinfo=UTC), 10),
    "so long ago": (AGO, 6),
    "now": (timedelta(0), 9),
    "before there were clocks": (timedelta.max, 0),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_group_is_moved_to(log, group, name):
    """A place that kafka-consumer-groups knows; a dry run tells the same and does nothing."""
    to, after = TARGETS[name]

    told = group.reset_offsets(to, partitions=[T0])

    assert told == {T0: (4, after)}
    assert offsets(group) == {T0: 4, T1: 3}
    assert group.reset_offsets(to, partitions=[T0], dry_run=False) == told
    assert offsets(group) == {T0: after, T1: 3}


@pytest.mark.parametrize(
    ("shift", "after"), [(0, 4), (3, 7), (-3, 1), (100, 10), (-100, 0), (-(1 << 70), 0)]
)
def test_a_group_is_shifted_within_the_log(group, shift, after):
    """From where it is, and no further than the log goes."""
    assert group.reset_offsets(shift=shift, partitions=[T0]) == {T0: (4, after)}


def test_a_reset_stays_within_what_is_left_of_the_log(log, group):
    """Nothing is below the start: not the earliest offset, not a number, not a time."""
    log.partition("t", 0).truncate_to(0)
    commit(log, {T0: OffsetAndMetadata(4)})

    for to in ("earliest", "latest", "current", 4, timedelta(days=9)):
        assert group.reset_offsets(to)[T0] == (4, 0)


def test_a_consumer_goes_on_where_the_group_was_moved_to(log, group):
    """A reset is a commit like any other."""
    group.reset_offsets(2, topics=["t"], dry_run=False)

    assert begins(log) == {T0: 2, T1: 2}


def test_a_reset_moves_what_is_named(log, group):
    """All it committed for; or all partitions of topics, also new ones; or some partitions."""
    assert group.reset_offsets("latest").keys() == {T0, T1}
    assert group.reset_offsets("latest", topics="u") == {U0: (None, 1)}
    assert group.reset_offsets("latest", topics=["t", "u"]).keys() == {T0, T1, U0}
    assert group.reset_offsets("latest", partitions=[("t", 1)]).keys() == {T1}
    assert group.reset_offsets("latest", topics="u", partitions=[T1]).keys() == {T1, U0}
    assert group.reset_offsets("latest", topics=[]) == {}


def test_a_group_can_be_put_somewhere_before_it_is_there(log):
    """So that its first consumer begins there."""
    told = log.group("new").reset_offsets(shift=None, to=2, topics="t")
    assert told == {T0: (None, 2), T1: (None, 2)}
    assert log.groups() == []

    log.group("new").reset_offsets(2, topics="t", dry_run=False)

    assert log.group("new").lag() == {T0: 8, T1: 1}
    with pytest.raises(GroupIdNotFoundError):
        log.group("other").reset_offsets("latest")


def test_a_note_stays_with_its_partition(log, group):
    """As in Kafka: only the offset is another."""
    group.reset_offsets("earliest", dry_run=False)

    assert [each.metadata for each in group.describe().partitions] == ["a note", ""]


def test_a_reset_is_of_the_log_as_it_is_now(log, group):
    """What is cut off below it later is told to who goes on there (A36)."""
    group.reset_offsets("latest", dry_run=False)
    log.partition("t", 0).truncate_to(5)
    for _ in range(10):
        log.partition("t", 0).append([encoded(b"another")])

    with log.consumer("t", group_id="g", auto_offset_reset="none") as consumer:
        with pytest.raises(LogTruncatedError) as caught:
            consumer.poll(timeout_ms=1000)
    assert caught.value.next_offset == 5


def test_the_result_of_a_reset_says_whether_it_was_done(group):
    """In words and as a table; a dry run that is taken for a reset costs a night."""
    told, done = group.reset_offsets(0), group.reset_offsets(0, dry_run=False)

    assert repr(told).splitlines() == [
        "Reset of g: dry run, nothing was changed",
        "topic  partition  before  after",
        "t      0          4       0",
        "t      1          3       0",
    ]
    assert told.dry_run
    assert repr(done).startswith("Reset of g: done\n")
    assert "<td>4</td><td>0</td>" in told._repr_html_()
    assert told[T0].before == 4


@pytest.mark.parametrize(
    ("words", "error"),
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
def test_a_reset_to_nowhere_is_refused_and_moves_nothing(group, words, error):
    """Not even the partitions that could be moved."""
    with pytest.raises(error):
        group.reset_offsets(**words, dry_run=False)

    assert offsets(group) == {T0: 4, T1: 3}


def test_an_active_group_is_not_changed_from_outside(log, group):
    """Its members would not notice; the error names them. A dry run is refused as well."""
    with member(log, "t"):
        (one,) = group.members()
        for change in (
            group.delete,
            lambda: group.reset_offsets("latest"),
            lambda: group.reset_offsets("latest", dry_run=False),
        ):
            with pytest.raises(NonEmptyGroupError, match=one.member_id):
                change()
    assert offsets(group) == {T0: 4, T1: 3}


def test_offsets_of_a_topic_that_is_read_are_kept(log, group):
    """M15; those of others may go while the group is active."""
    commit(log, {U0: OffsetAndMetadata(1)})
    with member(log, "t"):
        with pytest.raises(GroupSubscribedToTopicError, match="t"):
            group.delete_offsets([U0, T0])
        assert len(group.lag()) == 3

        group.delete_offsets(topics="u")

        assert group.lag() == {T0: 6, T1: 0}
    group.delete_offsets([("t", 1)])
    assert group.lag() == {T0: 6}


def test_a_deleted_group_begins_anew(tmp_path, log, group):
    """Also after a reboot: nothing of it comes back from what was saved."""
    group.reset_offsets("current", dry_run=False)

    group.delete()

    assert (log.groups(), group.state) == ([], "Dead")
    assert begins(log) == {T0: 0, T1: 0}
    group.delete()
    log.close()
    shutil.copytree(tmp_path / "log", tmp_path / "copy")
    with embedlog.open(tmp_path / "copy") as copy:
        assert copy.groups() == []


def test_a_member_can_be_sent_away(log, group):
    """A static one that will not come back keeps its partitions only until then (M13)."""
    member(log, "t", group_instance_id="i").close()
    assert [each.group_instance_id for each in group.members()] == ["i"]
    with pytest.raises(NonEmptyGroupError, match="static ones stay"):
        group.delete()
    with pytest.raises(UnknownMemberIdError, match="other"):
        group.remove_members("i", "other")

    (gone,) = group.remove_members("i")

    assert gone.startswith("i-")
    assert group.state == "Empty"
    group.delete()


def test_the_offsets_of_a_deleted_topic_are_forgotten(log, group):
    """By every group; a new topic of that name is another one (A38)."""
    commit(log, {T0: OffsetAndMetadata(5), U0: OffsetAndMetadata(1)}, group="h")

    log.delete_topic("t")
    log.create_topic("t", partitions=2)

    assert group.lag() == {}
    assert log.group("h").lag() == {U0: 0}
    assert log.groups() == ["g", "h"]
    live = log.root.context.live
    rows = live.read(lambda txn: list(keyspace.COMMITTED_OFFSETS.keys(txn)))
    assert len(rows) == 1


def test_a_topic_can_be_deleted_while_a_group_reads_it(log):
    """The members find out by themselves; what they committed is gone."""
    with member(log, "t", "u") as consumer:
        consumer.commit({T0: OffsetAndMetadata(1), U0: OffsetAndMetadata(1)})

        log.delete_topic("t")

        assert log.group("g").lag() == {U0: 0}
        consumer.poll(timeout_ms=0)
        assert consumer.assignment() == {U0}


def test_times_are_rounded_up_to_milliseconds():
    """So that no record before the time counts as after it."""
    moment = datetime(2024, 1, 1, tzinfo=UTC)
    whole = 1_704_067_200_000

    assert milliseconds(moment) == whole
    assert milliseconds(moment + timedelta(microseconds=1)) == whole + 1
    assert milliseconds(moment - timedelta(microseconds=1)) == whole
    assert milliseconds(moment.replace(tzinfo=None)) == whole
