"""Recovery finds the end of a log with torn tails or lost files and databases (A24–A32, R5–R8)."""

import os
import random
import shutil
from contextlib import closing

import lmdb
import pytest
from support import staged_files
from support.clock import START
from support.faulty_files import REBOOTED, REBOOTED_AGAIN, FaultyFiles
from support.roots import (
    abandon,
    bases,
    encoded,
    fill,
    healthy,
    make_log,
    offsets,
    open_root,
    rows,
    segment_files,
    values,
)

from embedlog import keyspace, kv
from embedlog.errors import CorruptionError, StorageError
from embedlog.record import Appended
from embedlog.root.repair import repair_root
from embedlog.root.verify import rebuild_index, verify_root

SIZE = encoded(b"v0").size


def crashed_log(path, batches=6, *, config=None, flush_at=None, size=2):
    """Fill a log and leave it as a killed process would; return its segment files."""
    root = open_root(path)
    log = make_log(root, config)
    for number in range(batches):
        if number == flush_at:
            log.flush()
        fill(log, 1, first=number, size=size)
    if flush_at == batches:
        log.flush()
    abandon(root)
    return segment_files(path)


def append_bytes(path, data):
    with path.open("ab") as file:
        file.write(data)


def overwrite(path, position):
    """Write garbage into a file; a negative position counts from its end."""
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        file.write(b"garbage")


def reopen(path, files=REBOOTED):
    """Open a root, by default after a reboot; return it and the log of t-0."""
    root = open_root(path, files=files)
    return root, root.partition("t", 0)


# Torn tails

GARBAGE = {
    "nothing": lambda batch: b"",
    "one byte": lambda batch: b"\xff",
    "zeros": lambda batch: bytes(5000),
    "more zeros than are preallocated": lambda batch: bytes((1 << 20) + 8),
    "noise": lambda batch: random.Random(1).randbytes(3000),
    "the end mark": lambda batch: b"\xff\xff\xff\xff\0\0\0\0",
    "a continuation and no more": lambda batch: b"\xff\xff\xff\xff",
    "a length that is too long": lambda batch: b"\xff\xff\xff\xff\xf8\xff\xff\x7f" + bytes(100),
    "a negative length": lambda batch: b"\xff\xff\xff\xff\xf8\xff\xff\xff" + bytes(100),
    "half a batch": lambda batch: batch[: len(batch) // 2],
    "a batch but for its last byte": lambda batch: batch[:-1],
    "a batch with zeros in its body": lambda batch: batch[:-40] + bytes(40),
    "a batch with zeros in its head": lambda batch: bytes(64) + batch[64:],
    "a batch with one bit changed": lambda batch: batch[:200] + b"\x55" + batch[201:],
    "a batch whose offsets were there before": lambda batch: batch_at(3),
    "a batch that leaves a gap": lambda batch: batch_at(99),
    "a bad batch and a good one": lambda batch: bytes(len(batch)) + batch,
}


def batch_at(offset):
    return b"".join(bytes(part) for part in encoded(b"garbage", b"g").stamp(offset, 0))


SILENT = {
    "nothing",
    "zeros",  # preallocated
    "the end mark",  # of a roll that was interrupted
    "a batch whose offsets were there before",  # left by a truncation
    "a batch that leaves a gap",
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_recovery_that_drops_damaged_bytes_logs_one_warning(tmp_path, caplog, garbage):
    """R7: it has partition, file, byte, reason, new end, and how many bytes are dropped."""
    (path,) = crashed_log(tmp_path, flush_at=3)
    end, data = path.stat().st_size, GARBAGE[garbage](batch_at(12))
    append_bytes(path, data)

    root, log = reopen(tmp_path)
    assert log.end_offset() == 12
    messages = [record.getMessage() for record in caplog.records]
    abandon(root)
    root, _ = reopen(tmp_path, REBOOTED_AGAIN)
    root.close()

    assert len(caplog.records) == len(messages) == (garbage not in SILENT), messages
    for record in caplog.records:
        assert (record.name, record.levelname) == ("embedlog.partition", "WARNING")
        message = record.getMessage()
        name = path.relative_to(tmp_path).as_posix()
        assert message.startswith(f"t-0: recovery found damage in {name} at byte {end} (")
        assert f"ends at offset 12, and {len(data)} bytes after it are dropped" in message


def test_the_warning_of_a_recovery_counts_the_segments_behind_the_damage(tmp_path, caplog):
    """A25: they are dropped as well; opening with mode="r" drops nothing and logs no warning."""
    paths = crashed_log(tmp_path, 24, config={"segment.bytes": 2500}, flush_at=2)
    assert len(paths) > 3
    sizes = [path.stat().st_size for path in paths]
    data = bytearray(paths[1].read_bytes())
    data[-200] ^= 1
    paths[1].write_bytes(data)

    with closing(open_root(tmp_path, mode="r", files=REBOOTED)) as root:
        end = root.partition("t", 0).end_offset()
    assert caplog.records == []
    root, log = reopen(tmp_path)

    (record,) = caplog.records
    assert log.end_offset() == end
    size_left = paths[1].stat().st_size
    assert f"ends at offset {end}, and {sum(sizes[1:]) - size_left} bytes" in record.getMessage()
    root.close()


def test_a_damaged_middle_past_the_recovery_point_ends_the_log_there(tmp_path):
    """A25, A26: all later segments are deleted; a second recovery changes nothing."""
    paths = crashed_log(tmp_path, 14, config={"segment.bytes": 2000}, flush_at=2)
    assert len(paths) > 3
    overwrite(paths[1], -100)
    root, log = reopen(tmp_path)
    end, segments = log.end_offset(), bases(log)
    assert offsets(log) == list(range(end))
    assert 8 <= end < 16
    assert healthy(root)
    abandon(root)
    root, log = reopen(tmp_path, REBOOTED_AGAIN)

    assert (log.end_offset(), bases(log)) == (end, segments)
    assert len(segment_files(tmp_path)) == len(segments)
    root.close()


@pytest.mark.parametrize("position", [0, 100, 700, 1300])
def test_damage_below_the_recovery_point_is_an_error_and_cuts_nothing(tmp_path, position):
    """A25, R7: these bytes were flushed: the error has the path, and the file is not changed."""
    (path,) = crashed_log(tmp_path, flush_at=6)
    data = path.read_bytes()
    path.write_bytes(data[:position] + b"garbage!" + data[position + 8 :])
    damaged = path.read_bytes()
    with pytest.raises(CorruptionError, match="below the recovery point") as caught:
        reopen(tmp_path)[1].end_offset()

    assert (caught.value.topic, caught.value.partition) == ("t", 0)
    assert caught.value.path == str(path.relative_to(tmp_path))
    assert path.read_bytes() == damaged


# Files


def test_a_missing_empty_tail_is_created_again(tmp_path):
    """A28: the manifest named it, and the machine stopped before the file existed."""
    root = open_root(tmp_path)
    log = make_log(root)
    fill(log, 2)
    log.roll()
    log.flush()
    abandon(root)
    segment_files(tmp_path)[-1].unlink()
    root, log = reopen(tmp_path)

    assert log.append([encoded(b"next")]) == [Appended(2, 3)]
    assert bases(log) == [0, 2]
    assert healthy(root)
    root.close()


@pytest.mark.parametrize("content", [b"", b"\xff\xff\xff\xff", bytes(100)])
def test_an_empty_tail_without_a_whole_schema_is_created_again(tmp_path, content):
    """The machine stopped while the file was written."""
    root = open_root(tmp_path)
    log = make_log(root)
    fill(log, 2)
    log.roll()
    abandon(root)
    segment_files(tmp_path)[-1].write_bytes(content)
    root, log = reopen(tmp_path)

    assert log.append([encoded(b"next")]) == [Appended(2, 3)]
    assert values(log) == [b"v0", b"v1", b"next"]
    assert healthy(root)
    root.close()


def test_a_missing_sealed_file_is_an_error(tmp_path):
    """R7: a flushed segment must exist; the other files are not touched."""
    paths = crashed_log(tmp_path, 9, config={"segment.bytes": 2000}, flush_at=9)
    paths[1].unlink()
    with pytest.raises(CorruptionError, match="below the recovery point") as caught:
        reopen(tmp_path)[1].end_offset()

    assert caught.value.path == str(paths[1].relative_to(tmp_path))
    assert segment_files(tmp_path) == [paths[0], *paths[2:]]


def test_stray_segments_are_removed_and_foreign_files_left(tmp_path):
    """A28: a segment outside the manifest is deleted; a user's file is not."""
    crashed_log(tmp_path)
    partition = segment_files(tmp_path)[0].parent
    stray = partition / "00000000000000000099-1.arrows"
    stray.write_bytes(b"what a killed process left")
    (partition.parent.parent / "gone-99" / "0").mkdir(parents=True)
    notes = partition / "notes.txt"
    notes.write_text("mine")
    root = open_root(tmp_path)

    assert not stray.exists()
    assert not (partition.parent.parent / "gone-99").exists()
    assert notes.read_text() == "mine"
    assert any(stray.name in line for line in root.startup_report)
    assert healthy(root)
    root.close()


def test_strays_are_removed_after_a_reboot_that_lost_live(tmp_path):
    """A28: a root without `live` is not a new root."""
    (path,) = crashed_log(tmp_path)
    stray = path.parent / "00000000000000000099-1.arrows"
    stray.write_bytes(b"what a killed process left")
    shutil.rmtree(tmp_path / "live")
    root = open_root(tmp_path)

    assert not stray.exists()
    assert offsets(root.partition("t", 0)) == list(range(12))
    assert healthy(root)
    root.close()


def test_a_segment_with_a_number_that_was_never_given_out_is_adopted(tmp_path):
    """R7: `state` is too old: an old copy of it was restored by hand."""
    root = open_root(tmp_path)
    log = make_log(root, {"segment.bytes": 3 * SIZE})
    fill(log, 4)
    root.close()
    shutil.copytree(tmp_path / "state", tmp_path.parent / f"{tmp_path.name}-old")
    root = open_root(tmp_path)
    fill(root.partition("t", 0), 7, first=4)
    abandon(root)
    shutil.rmtree(tmp_path / "state")
    shutil.copytree(tmp_path.parent / f"{tmp_path.name}-old", tmp_path / "state")
    root = open_root(tmp_path)

    assert offsets(root.partition("t", 0)) == list(range(11))
    assert healthy(root)
    root.close()


def test_a_producer_after_an_old_state_is_a_new_one(tmp_path):
    """It does not get the id of one that `state` forgot: its records would pass for repetitions."""
    root = open_root(tmp_path)
    log = make_log(root, {"segment.bytes": 3 * SIZE})
    root.close()
    shutil.copytree(tmp_path / "state", tmp_path.parent / f"{tmp_path.name}-old")
    root = open_root(tmp_path)
    lost, _ = root.context.catalog.producer_identity(None)
    log = root.partition("t", 0)
    for number in range(5):
        log.append([encoded(b"v", producer=(lost, 0, number))])
    abandon(root)
    shutil.rmtree(tmp_path / "state")
    shutil.copytree(tmp_path.parent / f"{tmp_path.name}-old", tmp_path / "state")
    root = open_root(tmp_path)

    number, _ = root.context.catalog.producer_identity(None)
    assert number != lost
    (receipt,) = root.partition("t", 0).append([encoded(b"new", producer=(number, 0, 0))])
    assert not receipt.duplicate
    assert values(root.partition("t", 0)) == [b"v"] * 5 + [b"new"]
    assert healthy(root)
    root.close()


# The database `live`


def delete_live(live):
    shutil.rmtree(live)


def delete_boot_id(live):
    (live / "boot").unlink()


def replace_boot_id(live):
    (live / "boot").write_bytes(b"another boot 1 2\n")


def delete_data(live):
    (live / "data.mdb").unlink()


def overwrite_with_noise(live):
    data = live / "data.mdb"
    data.write_bytes(random.Random(2).randbytes(data.stat().st_size))


def cut_data(live):
    os.truncate(live / "data.mdb", 4096 + 100)


@pytest.mark.parametrize(
    "damage",
    [delete_live, delete_boot_id, replace_boot_id, delete_data, overwrite_with_noise, cut_data],
)
def test_live_is_rebuilt_when_it_cannot_be_trusted(tmp_path, damage):
    """P13: it belongs to one boot, and is not opened before that is certain."""
    crashed_log(tmp_path, 9, config={"segment.bytes": 2000, "index.interval.bytes": 0}, flush_at=3)
    damage(tmp_path / "live")
    root = open_root(tmp_path)
    log = root.partition("t", 0)

    assert any("live" in line for line in root.startup_report)
    assert offsets(log) == list(range(18))
    assert log.append([encoded(b"next")]) == [Appended(18, 19)]
    assert healthy(root)
    root.close()


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("name", ["state", "live"])
def test_a_database_of_an_absurd_size_is_not_scanned(tmp_path, name, clean):
    """P22: a sparse file costs an attacker nothing, and must not cost a user minutes."""
    root = open_root(tmp_path)
    fill(make_log(root), 3)
    root.close() if clean else abandon(root)
    data = tmp_path / name / "data.mdb"
    size = data.stat().st_size
    os.truncate(data, 1 << 40)
    with pytest.raises(StorageError, match="too large to be checked"):
        open_root(tmp_path)

    os.truncate(data, size)
    root = open_root(tmp_path)
    assert values(root.partition("t", 0)) == [b"v0", b"v1", b"v2"]
    root.close()


def test_a_copied_root_has_another_identity(tmp_path):
    """`cp -r` is a backup: the `live` of the original is not used, but rebuilt."""
    root = open_root(tmp_path / "one")
    fill(make_log(root), 3)
    root.close()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    root = open_root(tmp_path / "two")

    assert values(root.partition("t", 0)) == [b"v0", b"v1", b"v2"]
    assert healthy(root)
    root.close()


def test_a_reader_previews_what_a_recovery_will_find(tmp_path):
    """A reader with mode="r" scans after a reboot, and changes nothing."""
    (path,) = crashed_log(tmp_path)
    append_bytes(path, b"torn")
    before = path.read_bytes()
    root = open_root(tmp_path, mode="r", files=REBOOTED)

    assert offsets(root.partition("t", 0)) == list(range(12))
    assert root.partition("t", 0).end_offset() == 12
    root.close()
    assert path.read_bytes() == before


# The database `state`


def root_with_old_copy(path):
    """Return a root whose `state` was copied at a clean close, before the last segments."""
    root = open_root(path)
    log = make_log(root, {"segment.bytes": 3 * SIZE})
    fill(log, 4)
    root.close()
    root = open_root(path)
    fill(root.partition("t", 0), 7, first=4)
    return root


def break_state(path):
    data = path / "state" / "data.mdb"
    data.write_bytes(bytes(data.stat().st_size))


def change_row(path, table, change):
    """Replace the last row of a table by what ``change`` returns for its key and value."""
    with lmdb.open(str(path / "state")) as env, env.begin(write=True) as txn:
        key, row = list(kv.rows(txn, table.prefix()))[-1]
        changed_key, changed_row = change(bytes(key), bytes(row))
        txn.delete(key)
        txn.put(changed_key, changed_row)


def flip_bit(data, position, bit=4):
    changed = bytearray(data)
    changed[position] ^= bit
    return bytes(changed)


def move_last_segment_to_another_partition(path):
    """Flip one bit of its key, which LMDB does not notice."""
    change_row(path, keyspace.SEGMENTS, lambda key, row: (flip_bit(key, 10), row))


def turn_last_segment_into_a_commit(path):
    """Flip one bit of its key, so that it looks like a group's committed offset."""
    change_row(path, keyspace.SEGMENTS, lambda key, row: (flip_bit(key, 0, 16), row))


def change_key_of_topic(path):
    change_row(path, keyspace.TOPICS, lambda key, row: (flip_bit(key, -1), row))


def change_value_of_last_segment(path):
    change_row(path, keyspace.SEGMENTS, lambda key, row: (key, flip_bit(row, 12)))


@pytest.mark.tier("test")
@pytest.mark.parametrize("files", [FaultyFiles, REBOOTED], ids=["same boot", "rebooted"])
@pytest.mark.parametrize(
    "damage",
    [
        break_state,
        lambda path: shutil.rmtree(path / "state"),
        move_last_segment_to_another_partition,
        turn_last_segment_into_a_commit,
        change_key_of_topic,
        change_value_of_last_segment,
    ],
)
def test_a_damaged_state_is_restored_and_newer_segments_adopted(tmp_path, files, damage):
    """R7: damaged metadata deletes no data."""
    root = root_with_old_copy(tmp_path)
    log = root.partition("t", 0)
    log.append([encoded(b"h", headers=[[("a", b"1")]])])
    log.append([encoded(b"i")])
    expected, expected_bases = rows(log), bases(log)
    abandon(root)
    damage(tmp_path)
    root = open_root(tmp_path, files=files)
    log = root.partition("t", 0)

    assert any("restored" in line for line in root.startup_report)
    assert (rows(log), bases(log)) == (expected, expected_bases)
    assert log.append([encoded(b"next")]) == [Appended(13, 14)]
    assert log.offset_for_timestamp(START + 5)[:2] == (5, START + 5)
    assert healthy(root)
    abandon(root)
    root = open_root(tmp_path, files=REBOOTED_AGAIN)
    assert values(root.partition("t", 0))[-3:] == [b"h", b"i", b"next"]
    assert healthy(root)
    root.close()


@pytest.mark.parametrize(
    "table",
    [
        *(keyspace.SEGMENT_INDEXES, keyspace.NAMED_PRODUCERS),
        *(keyspace.APP_VERSIONS, keyspace.PUBLICATION_CLOCK),
    ],
    ids=lambda table: table.name,
)
def test_damage_of_a_reported_row_restores_nothing(tmp_path, table):
    """P13: indexes are rebuilt, other rows raise when used; restoring a copy could lose more."""
    root = open_root(tmp_path)
    log = make_log(root, {"segment.bytes": 3 * SIZE, "index.interval.bytes": 1})
    root.context.catalog.producer_identity("p")  # by name
    fill(log, 7)
    staged_files.publish(root, [staged_files.stage(root, t_0=[b"published"])], 0)
    expected = rows(log)
    abandon(root)
    change_row(tmp_path, table, lambda key, row: (key, flip_bit(row, 12)))
    root = open_root(tmp_path)

    assert not any("restored" in line for line in root.startup_report)
    assert rows(root.partition("t", 0)) == expected
    rebuild_index(root)
    assert healthy(root)
    root.close()


def test_a_topic_created_after_the_copy_is_adopted(tmp_path):
    """R7: its settings are lost, which is reported; its records are not lost."""
    root = root_with_old_copy(tmp_path)
    fill(make_log(root, {"segment.bytes": 3 * SIZE}, topic="new-one"), 5)
    abandon(root)
    break_state(tmp_path)
    (tmp_path / "topics" / "somebody-²" / "³").mkdir(parents=True)
    root = open_root(tmp_path)

    assert any("adopted topic new-one" in line for line in root.startup_report)
    assert offsets(root.partition("new-one", 0)) == list(range(5))
    assert make_log(root, topic="third").topic_id > root.partition("new-one", 0).topic_id
    assert healthy(root)
    root.close()


def test_a_restored_state_with_an_older_epoch_cuts_nothing(tmp_path):
    """A37: the batches have newer epochs than the copy; the next one gets a higher epoch."""
    root = root_with_old_copy(tmp_path)
    log = root.partition("t", 0)
    for _ in range(3):
        log.truncate_to(log.end_offset() - 1)
        fill(log, 2, first=log.end_offset())
    expected = rows(log)
    abandon(root)
    break_state(tmp_path)
    root = open_root(tmp_path)
    log = root.partition("t", 0)
    assert rows(log) == expected
    log.append([encoded(b"next")])
    abandon(root)
    root = open_root(tmp_path, files=REBOOTED)

    assert values(root.partition("t", 0)) == [*[row[3] for row in expected], b"next"]
    assert healthy(root)
    root.close()


def test_a_damaged_state_without_a_copy_is_an_error(tmp_path):
    """No metadata is guessed, and no file is removed."""
    crashed_log(tmp_path)
    shutil.rmtree(tmp_path / "state.copy", ignore_errors=True)
    break_state(tmp_path)
    with pytest.raises(CorruptionError, match="no good copy"):
        open_root(tmp_path)

    assert len(segment_files(tmp_path)) == 1


# Verify and repair


@pytest.mark.parametrize("kind", ["cut", "deleted", "stray", "index"])
def test_verify_reports_each_kind_of_damage(tmp_path, kind):
    """A dry run reports it too, and after the repair no damage is left."""
    config = {"segment.bytes": 2000, "index.interval.bytes": 0}
    paths = crashed_log(tmp_path, 9, config=config, flush_at=9)
    root = open_root(tmp_path)
    log = root.partition("t", 0)
    log.refresh()
    if kind == "cut":
        os.truncate(paths[1], 900)
    elif kind == "deleted":
        paths[1].unlink()
    elif kind == "stray":
        (paths[0].parent / "00000000000000000099-99.arrows").write_bytes(b"x")
    else:
        blob = b"\1" * 24
        segment = log.segments[0]
        root.context.state.write(
            lambda txn: keyspace.SEGMENT_INDEXES.put(txn, log.key, *segment.key, value=blob)
        )

    assert verify_root(root) != []
    assert repair_root(root, dry_run=True) != []
    assert verify_root(root) != []
    repair_root(root, dry_run=False)
    assert healthy(root)
    assert log.append([encoded(b"next")])[0].base_offset == 18
    root.close()


def test_a_row_of_state_with_a_wrong_checksum_is_reported(tmp_path):
    """LMDB has no checksums; the rows of embedlog have them."""
    root = open_root(tmp_path)
    log = make_log(root)
    fill(log, 2)

    def flip_bits(txn):
        for key, row in list(kv.rows(txn, keyspace.SEGMENTS.prefix())):
            txn.put(key, row[:-1] + bytes([row[-1] ^ 1]))

    root.context.state.write(flip_bits)

    assert "damaged" in str(verify_root(root)[0])
    abandon(root)
