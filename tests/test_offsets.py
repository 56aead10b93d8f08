"""Committed positions: stored, saved, and brought back by the next boot (E4, E21, P5, R8)."""

import os

import pytest
from support.children import in_child, meanwhile
from support.faulty_files import REBOOTED, REBOOTED_AGAIN
from support.groups import at, make_group, make_topics
from support.roots import abandon, encoded, fill, healthy, make_log, open_root, segment_files

from embedlog import kv
from embedlog.errors import CorruptionError, InvalidGroupIdError, OffsetMetadataTooLargeError
from embedlog.groups import offsets
from embedlog.groups.offsets import CommittedOffset
from embedlog.keyspace import PARTITION_KEY
from embedlog.record import OffsetAndMetadata, TopicPartition

T0 = TopicPartition("t", 0)


def position_of(root, group="g", one=T0):
    found = make_group(root, group).committed([one])[one]
    return None if found is None else found.position.offset


def save(root):
    return offsets.checkpoint(root.context.live, root.context.state)


def saved(root, group=b"g"):
    """The offsets in `state`, by key."""
    rows = root.context.state.read(lambda txn: offsets.of_group(txn, group, offsets.CHECKPOINTS))
    return [row.position.offset for row in rows.values()]


@pytest.fixture
def here(root):
    """A root with the topic t."""
    make_topics(root, t=2)
    return root


# As stored

POSITIONS = {
    "an offset": OffsetAndMetadata(3),
    "the first one": OffsetAndMetadata(0),
    "the largest": OffsetAndMetadata((1 << 63) - 1, "", (1 << 31) - 1),
    "with a note": OffsetAndMetadata(3, "née \0 \N{SNOWMAN}"),
    "with the longest note": OffsetAndMetadata(3, "x" * 4096),
    "with epoch 0": OffsetAndMetadata(3, "", 0),
}


@pytest.mark.parametrize("position", POSITIONS)
def test_a_position_comes_back_as_it_was(here, position):
    """The offset is the next to read; note and leader epoch make the round trip (E4)."""
    group = make_group(here)
    group.commit({T0: POSITIONS[position]})

    found = group.committed([T0, TopicPartition("t", 1)])
    assert found[T0].position == POSITIONS[position]
    assert found[T0].committed_ms == here.clock()
    assert found[TopicPartition("t", 1)] is None


def test_kafkas_ways_to_say_that_there_is_no_note_and_no_epoch_are_understood(here):
    """kafka-python has -1, Java has null."""
    group = make_group(here)
    group.commit({T0: OffsetAndMetadata(3, None, -1)})

    assert group.committed([T0])[T0].position == OffsetAndMetadata(3)


BAD = {
    "a negative offset": (OffsetAndMetadata(-1), ValueError),
    "an offset too large for a log": (OffsetAndMetadata(1 << 63), ValueError),
    "an epoch too small": (OffsetAndMetadata(1, "", -2), ValueError),
    "an epoch too large": (OffsetAndMetadata(1, "", 1 << 31), ValueError),
    "a note too long": (OffsetAndMetadata(1, "x" * 4097), OffsetMetadataTooLargeError),
    "a note too long in bytes": (OffsetAndMetadata(1, "é" * 2049), OffsetMetadataTooLargeError),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_position_is_refused_with_all_that_came_with_it(here, bad):
    """All of a commit, or nothing (E21)."""
    group = make_group(here)
    position, error = BAD[bad]
    with pytest.raises(error):
        group.commit({TopicPartition("t", 1): OffsetAndMetadata(1), T0: position})

    assert set(group.committed([T0, TopicPartition("t", 1)]).values()) == {None}


def test_nothing_may_be_committed_and_an_offset_past_the_end_too(here):
    """An empty map is ok, and so is an offset that is not there yet (E21)."""
    group = make_group(here)
    group.commit({})
    group.commit(at(1000))

    assert position_of(here) == 1000


NAMES = {
    "letters": ("g", True),
    "anything": ("a group / of ../ mine \N{SNOWMAN}", True),
    "the longest": ("x" * 200, True),
    "one byte too long": ("x" * 201, False),
    "too long in bytes": ("é" * 101, False),
    "nothing": ("", False),
    "a NUL": ("a\0b", False),
    "no text": (b"g", False),
    "None": (None, False),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_group_may_have_any_name_that_fits_into_a_key(here, name):
    """1 to 200 bytes without NUL; no name is part of a path (E18)."""
    name, fine = NAMES[name]
    if fine:
        make_group(here, name).commit(at(5))
        assert position_of(here, name) == 5
        return
    with pytest.raises(InvalidGroupIdError):
        make_group(here, name)


# Saved


def test_a_commit_is_saved_by_the_next_checkpoint_and_only_once(here):
    """Of every group; when nothing was committed since, it does nothing."""
    make_group(here).commit(at(5))
    make_group(here, "g2").commit({**at(6), **at(7, 1)})
    assert (saved(here), saved(here, b"g2")) == ([], [])

    assert save(here) == 3
    assert (saved(here), saved(here, b"g2")) == ([5], [6, 7])
    assert save(here) == 0


def test_with_fsync_a_commit_is_saved_when_it_returns(tmp_path):
    """That is what the durability of the log says (P4)."""
    root = open_root(tmp_path, durability="fsync")
    make_topics(root, t=1)
    make_group(root).commit(at(5))

    assert saved(root) == [5]
    root.close()


def test_a_slow_checkpoint_does_not_save_an_older_position_over_a_newer_one(here):
    """What to save is looked up under the lock that orders the saving."""
    group, real = make_group(here), here.context.state

    class OvertakenState:
        def write(self, step):
            group.commit(at(6))
            offsets.checkpoint(here.context.live, real)
            return real.write(step)

    group.commit(at(5))
    offsets.checkpoint(here.context.live, OvertakenState())
    save(here)
    assert saved(here) == [6]


def test_what_is_committed_while_a_checkpoint_saves_is_saved_by_the_next(here):
    """The mark of what is unsaved goes only if the row is the one that was saved."""
    group, real = make_group(here), here.context.live

    class OvertakenLive:
        read = real.read

        def write(self, step):
            group.commit(at(6))
            return real.write(step)

    group.commit(at(5))
    offsets.checkpoint(OvertakenLive(), here.context.state)
    assert saved(here) == [5]
    assert save(here) == 1
    assert saved(here) == [6]


def test_checkpoints_of_many_threads_never_go_back(here):
    """And in the end the last commit is saved."""
    group, seen = make_group(here), []
    with meanwhile(lambda: save(here), count=3):
        for offset in range(150):
            group.commit(at(offset))
            seen += saved(here)
    save(here)
    assert seen == sorted(seen)
    assert saved(here) == [149]


def test_a_fork_beside_checkpoints_ends(here):
    """Both take the databases in one order, whichever was opened first (P18)."""
    group = make_group(here)
    opened = list(kv._environments.items())
    kv._environments.clear()
    kv._environments.update(reversed(opened))

    with meanwhile(lambda: (group.commit(at(1)), save(here))):
        for _ in range(20):
            in_child(lambda: None)


def test_what_is_deleted_is_deleted_by_the_checkpoint_too(here):
    """Else the next boot would bring it back."""
    group = make_group(here)
    group.commit(at(5))
    save(here)
    group.delete_offsets([T0])

    assert saved(here) == []


# The next boot


def test_after_a_power_cut_positions_are_as_of_the_last_checkpoint(tmp_path):
    """Back, never forward."""
    root = open_root(tmp_path)
    make_topics(root, t=1)
    fill(root.partition("t", 0), 9)
    root.flush()
    make_group(root).commit(at(5))
    save(root)
    make_group(root).commit(at(6))
    abandon(root)

    root = open_root(tmp_path, files=REBOOTED)
    assert position_of(root) == 5
    assert make_group(root).snapshot().committed[T0].position.offset == 5
    make_group(root).commit(at(8))
    assert position_of(root) == 8
    assert saved(root) == [5]
    root.close()


def test_after_a_kill_every_commit_is_there(tmp_path):
    """An unsynced row survives the death of any process (P1)."""
    root = open_root(tmp_path)
    make_topics(root, t=1)
    make_group(root).commit(at(6))
    abandon(root)

    root = open_root(tmp_path)
    assert position_of(root) == 6
    root.close()


def test_a_closed_log_has_saved_everything(tmp_path):
    """A reboot after a clean close loses no position."""
    root = open_root(tmp_path)
    fill(make_log(root), 9)
    make_group(root).commit(at(6))
    root.close()

    root = open_root(tmp_path, files=REBOOTED)
    assert position_of(root) == 6
    root.close()


def cut_short(path, keep):
    """Fill a log with six records, save position 6, and lose what a power cut takes."""
    root = open_root(path)
    log = make_log(root)
    log.append([encoded(b"v0"), encoded(b"v1")])
    size = segment_files(path)[0].stat().st_size if keep else None
    fill(log, 4, first=2)
    make_group(root).commit({T0: OffsetAndMetadata(6, "note", 0)})
    make_group(root, "below").commit(at(1))
    save(root)
    abandon(root)
    (file,) = segment_files(path)
    if keep:
        os.truncate(file, size)
    else:
        file.unlink()


@pytest.mark.parametrize("keep", [2, 0], ids=["two records are left", "no file is left"])
def test_a_position_past_the_end_moves_back_to_it(tmp_path, keep):
    """The records are gone; its note and its leader epoch stay (P5, R8)."""
    cut_short(tmp_path, keep)
    root = open_root(tmp_path, files=REBOOTED)

    assert root.partition("t", 0).end_offset() == keep
    found = make_group(root).committed([T0])[T0].position
    assert found == OffsetAndMetadata(keep, "note", 0)
    assert position_of(root, "below") == min(1, keep)
    assert healthy(root)
    root.close()


@pytest.mark.parametrize("used", [False, True], ids=["nobody looks", "somebody looks"])
@pytest.mark.parametrize("again", [False, True], ids=["in that boot", "in the next boot"])
def test_a_group_does_not_miss_what_comes_in_the_place_of_lost_records(tmp_path, used, again):
    """Whenever it is used next: the position was moved back for good (P5, R8)."""
    cut_short(tmp_path, 2)
    root = open_root(tmp_path, files=REBOOTED)
    if used:
        make_group(root).remove_dead_members()
        make_group(root).remove_members(["nobody"])
    fill(root.partition("t", 0), 9)
    root.flush()
    if again:
        abandon(root)
        root = open_root(tmp_path, files=REBOOTED_AGAIN)

    assert root.partition("t", 0).end_offset() == 11
    assert position_of(root) == 2
    root.close()


def test_what_is_adopted_past_the_end_is_moved_back_and_saved_so(here):
    """Also where the log was cut without a recovery."""
    key = PARTITION_KEY.pack(1, 0)
    row = CommittedOffset(OffsetAndMetadata(7), 0)

    def step(txn):
        offsets.adopt(txn, b"g", {key: row}, lambda txn, partition: (0, 4))
        return offsets.of_group(txn, b"g")[key].position.offset

    assert here.context.live.write(step) == 4
    assert save(here) == 1
    assert saved(here) == [4]


def test_a_damaged_position_stops_its_group_and_not_the_recovery(tmp_path):
    """It carries a checksum; who uses the group is told (P13)."""
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


def test_groups_are_found_by_what_they_saved(here):
    """One seek for each, whatever its name."""
    names = ["g", "g2", "gg", "g\x01", "ä"]
    for each in names:
        make_group(here, each).commit({**at(5), **at(6, 1)})
    save(here)

    found = here.context.state.read(lambda txn: list(offsets.CHECKPOINTS.first_fields(txn)))
    assert sorted(found) == sorted(names)
