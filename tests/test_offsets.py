"""Committed positions: commits, checkpoints, and recovery after a reboot (E4, E21, P5, R8)."""

import os

import pytest
from support.children import in_child, meanwhile
from support.faulty_files import REBOOTED, REBOOTED_AGAIN
from support.groups import at, make_group, make_topics
from support.roots import abandon, encoded, fill, healthy, make_log, open_root, segment_files
from support.tiers import choose

from embedlog import kv
from embedlog.errors import CorruptionError, InvalidGroupIdError, OffsetMetadataTooLargeError
from embedlog.groups import offsets
from embedlog.groups.offsets import CommittedOffset
from embedlog.keyspace import PARTITION_KEY
from embedlog.record import OffsetAndMetadata, TopicPartition

T0 = TopicPartition("t", 0)


def position_of(root, group="g", partition=T0):
    committed = make_group(root, group).committed([partition])[partition]
    return None if committed is None else committed.position.offset


def save(root):
    return offsets.checkpoint(root.context.live, root.context.state)


def saved(root, group=b"g"):
    """Return the offsets that are saved in `state`, in the order of keys."""
    rows = root.context.state.read(lambda txn: offsets.of_group(txn, group, offsets.CHECKPOINTS))
    return [row.position.offset for row in rows.values()]


@pytest.fixture
def root(root):
    """A root that has a topic "t" with two partitions."""
    make_topics(root, t=2)
    return root


# Commits


BAD = {
    "a negative offset": (OffsetAndMetadata(-1), ValueError),
    "an offset too large for a log": (OffsetAndMetadata(1 << 63), ValueError),
    "an epoch too small": (OffsetAndMetadata(1, "", -2), ValueError),
    "an epoch too large": (OffsetAndMetadata(1, "", 1 << 31), ValueError),
    "a note too long": (OffsetAndMetadata(1, "x" * 4097), OffsetMetadataTooLargeError),
    "a note too long in bytes": (OffsetAndMetadata(1, "é" * 2049), OffsetMetadataTooLargeError),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_position_is_refused_with_all_others_of_the_commit(root, case):
    """A commit writes all its positions or none (E21)."""
    group = make_group(root)
    position, error = BAD[case]
    with pytest.raises(error):
        group.commit({TopicPartition("t", 1): OffsetAndMetadata(1), T0: position})

    assert set(group.committed([T0, TopicPartition("t", 1)]).values()) == {None}


NAMES = {
    "letters": ("g", True),
    "anything": ("a group / of ../ mine \N{SNOWMAN}", True),
    "the longest": ("x" * 360, True),
    "one byte too long": ("x" * 361, False),
    "too long in bytes": ("é" * 181, False),
    "nothing": ("", False),
    "a NUL": ("a\0b", False),
    "no text": (b"g", False),
    "None": (None, False),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_group_may_have_any_name_that_fits_into_a_key(root, name):
    """1 to 360 bytes without NUL; no name is part of a path (E18)."""
    name, valid = NAMES[name]
    if valid:
        make_group(root, name).commit(at(5))
        assert position_of(root, name) == 5
        return
    with pytest.raises(InvalidGroupIdError):
        make_group(root, name)


# Checkpoints


def test_a_commit_is_saved_by_the_next_checkpoint_and_only_once(root):
    """A checkpoint saves the new commits of all groups."""
    make_group(root).commit(at(5))
    make_group(root, "g2").commit({**at(6), **at(7, 1)})
    assert (saved(root), saved(root, b"g2")) == ([], [])

    assert save(root) == 3
    assert (saved(root), saved(root, b"g2")) == ([5], [6, 7])
    assert save(root) == 0


def test_with_fsync_a_commit_is_saved_when_it_returns(tmp_path):
    """The durability of the log also applies to commits (P4)."""
    root = open_root(tmp_path, durability="fsync")
    make_topics(root, t=1)
    make_group(root).commit(at(5))

    assert saved(root) == [5]
    root.close()


def test_a_slow_checkpoint_does_not_save_an_older_position_over_a_newer_one(root):
    """The positions are read under the lock that orders the checkpoints."""
    group, state = make_group(root), root.context.state

    class OvertakenState:
        def write(self, step, timeout=None):
            group.commit(at(6))
            offsets.checkpoint(root.context.live, state)
            return state.write(step, timeout)

    group.commit(at(5))
    offsets.checkpoint(root.context.live, OvertakenState())
    save(root)
    assert saved(root) == [6]


def test_what_is_committed_while_a_checkpoint_saves_is_saved_by_the_next(root):
    """The mark of an unsaved row is deleted only if the row has not changed since."""
    group, live = make_group(root), root.context.live

    class OvertakenLive:
        read = live.read

        def write(self, step, timeout=None):
            group.commit(at(6))
            return live.write(step, timeout)

    group.commit(at(5))
    offsets.checkpoint(OvertakenLive(), root.context.state)
    assert saved(root) == [5]
    assert save(root) == 1
    assert saved(root) == [6]


def test_a_fork_beside_checkpoints_ends(root):
    """Both lock the databases in the same order, whichever was opened first (P18)."""
    group = make_group(root)
    environments = list(kv._environments.items())
    kv._environments.clear()
    kv._environments.update(reversed(environments))

    with meanwhile(lambda: (group.commit(at(1)), save(root))):
        for _ in range(choose(quick=8, all=20)):
            in_child(lambda: None)


# Reboots


def cut_short(path, remaining):
    """Fill a log with six records, save position 6, and keep the `remaining` records."""
    root = open_root(path)
    log = make_log(root)
    log.append([encoded(b"v0"), encoded(b"v1")])
    size = segment_files(path)[0].stat().st_size if remaining else None
    fill(log, 4, first=2)
    make_group(root).commit({T0: OffsetAndMetadata(6, "note", 0)})
    make_group(root, "below").commit(at(1))
    save(root)
    abandon(root)
    (file,) = segment_files(path)
    if remaining:
        os.truncate(file, size)
    else:
        file.unlink()


@pytest.mark.parametrize("remaining", [2, 0], ids=["two records are left", "no file is left"])
def test_a_position_past_the_end_moves_back_to_it(tmp_path, remaining):
    """The records are lost; metadata and leader epoch are unchanged (P5, R8)."""
    cut_short(tmp_path, remaining)
    root = open_root(tmp_path, files=REBOOTED)

    assert root.partition("t", 0).end_offset() == remaining
    position = make_group(root).committed([T0])[T0].position
    assert position == OffsetAndMetadata(remaining, "note", 0)
    assert position_of(root, "below") == min(1, remaining)
    assert healthy(root)
    root.close()


@pytest.mark.parametrize("use_group", [False, True], ids=["unused group", "used group"])
@pytest.mark.parametrize("reboot_again", [False, True], ids=["in that boot", "in the next boot"])
def test_a_group_reads_the_records_that_replace_lost_ones(tmp_path, use_group, reboot_again):
    """Its position was moved back for good, whether or not the group was used (P5, R8)."""
    cut_short(tmp_path, 2)
    root = open_root(tmp_path, files=REBOOTED)
    if use_group:
        make_group(root).remove_dead_members()
        make_group(root).remove_members(["unknown"])
    fill(root.partition("t", 0), 9)
    root.flush()
    if reboot_again:
        abandon(root)
        root = open_root(tmp_path, files=REBOOTED_AGAIN)

    assert root.partition("t", 0).end_offset() == 11
    assert position_of(root) == 2
    root.close()


def test_a_position_adopted_past_the_end_is_moved_back_and_saved(root):
    """The log may have been truncated without a recovery."""
    key = PARTITION_KEY.pack(1, 0)
    row = CommittedOffset(OffsetAndMetadata(7), 0)

    def step(txn):
        offsets.adopt(txn, b"g", {key: row}, lambda txn, partition: (0, 4))
        return offsets.of_group(txn, b"g")[key].position.offset

    assert root.context.live.write(step) == 4
    assert save(root) == 1
    assert saved(root) == [4]


def test_a_damaged_position_stops_its_group_and_not_the_recovery(tmp_path):
    """The row has a checksum; calls for the group raise CorruptionError (P13)."""
    cut_short(tmp_path, 2)
    root = open_root(tmp_path)

    def step(txn):
        (key,) = offsets.CHECKPOINTS.keys(txn, b"g")
        txn.put(offsets.CHECKPOINTS.key(*key), b"x" * 24)

    root.context.state.write(step)
    abandon(root)
    root = open_root(tmp_path, files=REBOOTED)
    assert root.partition("t", 0).end_offset() == 2
    assert position_of(root, "below") == 1
    with pytest.raises(CorruptionError, match="offset checkpoints"):
        position_of(root)
    root.close()


def test_the_names_of_groups_are_read_from_their_checkpoints(root):
    """Names that begin alike are separate groups."""
    names = ["g", "g2", "gg", "g\x01", "ä"]
    for name in names:
        make_group(root, name).commit({**at(5), **at(6, 1)})
    save(root)

    saved_names = root.context.state.read(lambda txn: list(offsets.CHECKPOINTS.first_fields(txn)))
    assert sorted(saved_names) == sorted(names)
