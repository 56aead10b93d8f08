"""Sealed segments that were swapped for ones with gaps: all is read on as before (D10, D25)."""

import pytest
from support.faulty_files import REBOOTED, FaultyFiles
from support.manual_compaction import keep
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
)

from embedlog import catalog, keyspace
from embedlog.api.topic import Topic
from embedlog.consumer import Consumer
from embedlog.errors import FencedError, StorageError
from embedlog.partition import flush, replace
from embedlog.record import TopicPartition
from embedlog.root.repair import repair_root
from embedlog.segment import SegmentFile

CONFIG = {"segment.bytes": 3000, "index.interval.bytes": 0, "file.delete.delay.ms": 0}
KEPT = {1, 2, 7, 19, 20}
LEFT = [1, 2, 7, 19, 20, 33, 34, 35]


@pytest.fixture
def log(root):
    """Twelve batches of three records: [0, 18) and [18, 33) sealed, [33, 36) active."""
    log = make_log(root, CONFIG)
    fill(log, 12, size=3)
    assert bases(log) == [0, 18, 33]
    return log


def read(reader, max_bytes=1):
    """Offsets of the next batches, without what lies below the position."""
    first = reader.offset
    found = [offset for one in reader.read(max_bytes) for offset in one.offsets().to_pylist()]
    return [offset for offset in found if offset >= first]


def passing(log):
    return log.context.state.read(lambda txn: catalog.uncommitted_files(txn, log.key))


def test_what_is_kept_keeps_its_offset_and_is_found_from_everywhere(log):
    """D10: removed offsets remain legal positions, where the next higher one is read."""
    before = {row[0]: row for row in rows(log)}

    keep(log, KEPT, parts=2)

    assert bases(log) == [0, 33]
    assert rows(log) == [before[offset] for offset in LEFT]
    for offset in range(37):
        assert offsets(log, offset) == [one for one in LEFT if one >= offset]
    assert (log.start_offset(), log.end_offset()) == (0, 36)


def test_times_are_found_in_it(log):
    """B10: the first record in offset order at or after a time, among those that are left."""
    before = {row[0]: row[1] for row in rows(log)}
    keep(log, KEPT, parts=3)
    for time in range(min(before.values()) - 1, max(before.values()) + 2):
        expected = next((offset for offset in LEFT if before[offset] >= time), None)
        found = log.offset_for_timestamp(time)
        assert (found and found.offset) == expected


@pytest.mark.parametrize("kept", [set(), {0}, {32}, {17}, {18}], ids=str)
def test_a_reader_comes_to_the_end_whatever_is_left(root, log, kept):
    """D11: an empty batch says where the segment ends, so a consumer has no lag at the end."""
    log.roll()
    keep(log, kept)

    assert offsets(log) == sorted(kept)
    with Consumer(root, "t", auto_offset_reset="earliest") as consumer:
        found = [one.offset for some in consumer.poll().values() for one in some]
        assert found == sorted(kept)
        assert consumer.poll() == {}
        assert consumer.position(TopicPartition("t", 0)) == 36
    for offset in range(37):
        with Consumer(root) as consumer:
            where = TopicPartition("t", 0)
            consumer.assign([where])
            consumer.seek(where, offset)
            some = [one.num_rows for one in consumer.iter_batches(until="end")]
            assert sum(some) == sum(one >= offset for one in kept)


def test_a_reader_in_the_middle_goes_on_where_it_was(log):
    """P20: on the file it holds, then on the new ones; nothing twice, nothing left out."""
    for stop in range(12):
        reader, seen = log.reader(0), []
        while len(seen) <= stop and reader.offset < 36:
            seen += read(reader)
        if stop == 4:
            keep(log, KEPT, slice(1))
        if stop == 6:
            keep(log, KEPT, slice(None))
        while reader.offset < 36:
            seen += read(reader)
        assert seen == sorted(set(seen))
        assert set(LEFT) <= set(seen)


def test_a_reader_that_is_overtaken_skips_nothing(log):
    """What follows a segment is found by offset: the next one may hold more than came after."""
    reader = log.reader(0)
    seen = read(reader, 1 << 20)
    assert reader.offset == 18
    keep(log, set(range(36)))

    while reader.offset < 36:
        seen += read(reader)

    assert seen == list(range(36))


def test_it_is_merged_again_and_appended_to(log):
    """Compacted segments are sealed segments like any other."""
    keep(log, KEPT, slice(1))
    fill(log, 12, first=12, size=3)
    keep(log, {*KEPT, 40, 41})

    assert offsets(log)[:7] == [1, 2, 7, 19, 20, 40, 41]
    assert len(bases(log)) == 2


def test_a_recovery_does_not_take_gaps_for_lost_records(root, log, tmp_path):
    """A26: after a reboot the log is as it was."""
    keep(log, KEPT, parts=2)
    before = rows(log)
    abandon(root)

    again = open_root(root.path, files=REBOOTED)

    assert rows(again.partition("t", 0)) == before
    assert healthy(again)
    again.close()


@pytest.mark.parametrize("offset", [0, 2, 8, 19, 32, 33, 34])
def test_it_is_cut_like_any_other(log, offset):
    """A34, D26: a batch that straddles the cut goes entirely, and nothing past it is clean."""
    keep(log, KEPT, parts=3, cleaned=33)

    log.truncate_to(offset)

    assert log.end_offset() <= offset
    assert all(one < offset for one in offsets(log))
    cleaned = log.context.state.read(lambda txn: keyspace.CLEANED_OFFSETS.get(txn, log.key))
    assert cleaned <= offset
    fill(log, 4, first=90)
    assert offsets(log)[-4:] == [offset, offset + 1, offset + 2, offset + 3]


@pytest.mark.parametrize("offset", [17, 18, 19, 21, 24, 30, 32, 33])
def test_what_is_left_of_one_may_be_nothing_or_all(root, log, offset):
    """A34: what is appended after the cut has no column of offsets, whatever it follows."""
    keep(log, set(range(18)), slice(1))
    keep(log, set(range(18, 33)), slice(1, 2), parts=5)
    assert bases(log) == [0, 18, 33]

    log.truncate_to(offset)
    fill(log, 4, first=90)

    assert offsets(log)[-4:] == [offset, offset + 1, offset + 2, offset + 3]
    assert healthy(root)
    abandon(root)
    again = open_root(root.path)
    assert offsets(again.partition("t", 0))[-4:] == [offset + place for place in range(4)]
    again.close()


def test_a_damaged_one_is_repaired(root, log):
    """P12: good batches keep their offsets, also where the schema is damaged."""
    keep(log, KEPT, parts=3)
    (path, *_) = segment_files(root.path)
    data = bytearray(path.read_bytes())
    place = SegmentFile(root.context.files, str(path.relative_to(root.path))).start
    data[30] ^= 0xFF
    data[place + 200] ^= 0xFF
    path.write_bytes(data)

    told = repair_root(root, dry_run=False)

    assert any("dropped" in one for one in told)
    assert offsets(log) == [7, 19, 20, 33, 34, 35]


def test_producers_are_known_after_their_batches_are_gone(root):
    """G16: a repeated batch is answered with the offsets it got, also after a reboot."""
    log = make_log(root, {**CONFIG, "segment.bytes": 800})
    for number in range(4):
        log.append([encoded(b"a", b"b", producer=(7, 0, 2 * number))])
    log.roll()
    keep(log, {0})
    abandon(root)
    again = open_root(root.path, files=REBOOTED)

    (receipt,) = again.partition("t", 0).append([encoded(b"a", b"b", producer=(7, 0, 6))])

    assert receipt.duplicate
    assert receipt.base_offset == 6
    again.close()


@pytest.mark.parametrize("more", [0, 8])
def test_a_state_that_is_older_than_a_compaction_adopts_it(tmp_path, more):
    """P13: the copy names files that are gone; what took their place is not swept away."""
    root = open_root(tmp_path / "root")
    log = make_log(root, CONFIG)
    fill(log, 12, size=3)
    root.close()
    root = open_root(tmp_path / "root")
    log = root.partition("t", 0)
    fill(log, more, first=12, size=3)
    log.roll()
    keep(log, KEPT)
    keep(log, KEPT)
    fill(log, more, first=50, size=3)
    expected = rows(log)
    log.flush()
    abandon(root)
    (tmp_path / "root/state/data.mdb").write_bytes(b"damaged" * 5000)

    again = open_root(tmp_path / "root")

    assert any("in the place of" in one for one in again.startup_report)
    assert rows(again.partition("t", 0)) == expected
    fill(again.partition("t", 0), 1, first=99)
    assert healthy(again)
    again.close()


# What is refused


def test_segments_that_changed_meanwhile_are_not_replaced(root, log):
    """D22: a cut wins over the compaction, whose files are removed."""
    flush.flush_up_to(log, 33)
    old = [one for one in log.segments.values() if one.sealed]
    swap = replace.Replacement(log, 0, headers=False)
    log.truncate_to(20)

    with pytest.raises(FencedError, match="changed"):
        swap.swap(old)
    swap.abandon()

    assert passing(log) == []
    assert offsets(log) == list(range(18))


def test_what_is_not_on_the_disk_is_not_replaced(root, log):
    """Past the recovery point recovery takes gaps for lost records."""
    old = [one for one in log.segments.values() if one.sealed]
    swap = replace.Replacement(log, 0, headers=False)
    with pytest.raises(FencedError, match="not on the disk"):
        swap.swap(old)
    swap.abandon()


def test_the_fence_is_asked_under_the_lock(root, log):
    """R3: a destructive step re-reads its right right before the commit."""

    def fence():
        assert log.thread_lock.locked()
        raise FencedError("another process maintains the log")

    with pytest.raises(FencedError, match="maintains"):
        keep(log, set(), fence=fence)

    assert offsets(log) == list(range(36))
    assert len(segment_files(root.path)) == 3


def test_one_process_at_a_time_rewrites_a_partition(root, log):
    """And what one left that was killed is removed by the next."""
    with replace.rewrite_lock(log) as free:
        replace.Replacement(log, 0, headers=False)
        with replace.rewrite_lock(log) as second:
            assert (free, second) == (True, False)
    assert len(passing(log)) == 1
    assert healthy(root), "a file on its way is no garbage"

    with replace.rewrite_lock(log):
        assert passing(log) == []
    assert len(segment_files(root.path)) == 3


def test_what_a_killed_process_left_is_removed_when_the_root_is_opened(root, log):
    """D24: no stray files."""
    replace.Replacement(log, 0, headers=False)
    abandon(root)

    again = open_root(root.path)

    assert len(segment_files(root.path)) == 3
    assert passing(again.partition("t", 0)) == []
    again.close()


def test_a_failed_flush_of_a_new_file_harms_nobody(tmp_path):
    """P9: the log is on the old files, and may be written to."""
    root = open_root(tmp_path / "root", files=FaultyFiles)
    log = make_log(root, CONFIG)
    fill(log, 12, size=3)
    flush.flush_up_to(log, 33)
    root.context.files.fail_at(0, 5, only={"sync"})

    with pytest.raises(StorageError) as told:
        keep(log, KEPT)

    assert told.type is StorageError
    assert offsets(log) == list(range(36))
    fill(log, 1, durability="fsync")
    assert len(segment_files(root.path)) == 3
    root.close()


def test_a_view_counts_the_records_that_are_left(root, log):
    """D10: a removed offset is no row, as a removed item is none of a list."""
    keep(log, KEPT)
    view = Topic(root, "t")

    assert [one.offset for one in view] == LEFT
    assert [view[row].offset for row in range(len(view))] == LEFT
    with pytest.raises(IndexError, match=f"Row {len(LEFT)} is out of range"):
        view[len(LEFT)]
    assert [one.offset for one in view[1:3]] == LEFT[1:3]
    assert view.to_arrow(["offset"])["offset"].to_pylist() == LEFT
