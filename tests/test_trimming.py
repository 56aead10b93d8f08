"""Moving a partition's start forward: what is dropped, when, and who is told."""

from __future__ import annotations

from contextlib import closing

import pytest
from support.clock import MovedUptime
from support.roots import (
    abandon,
    bases,
    encoded,
    fill,
    healthy,
    make_log,
    offsets,
    open_root,
    segment_files,
    values,
)

from embedlog import catalog
from embedlog.errors import DurabilityError, OffsetOutOfRangeError, ReadOnlyError
from embedlog.partition import log_start, pending_deletes, producer_state, state, tail
from embedlog.partition.log_start import trim
from embedlog.root import startup

SIZE = encoded(b"v0").size
AT_ONCE = {"segment.bytes": 2 * SIZE, "file.delete.delay.ms": 0}


@pytest.fixture
def log(root):
    """Ten records in five segments, whose files are unlinked at once."""
    log = make_log(root, AT_ONCE)
    fill(log, 10)
    return log


def test_segments_below_the_start_are_dropped_with_their_files(root, log):
    """C8: the start is the first remaining base, and names, files and index go with it."""
    done = trim(log, 4)

    assert done[:2] == (4, 2)
    assert (log.start_offset(), bases(log), offsets(log)) == (4, [4, 6, 8], list(range(4, 10)))
    assert len(segment_files(root.path)) == 3
    rows = root.context.state.read(
        lambda txn: [bytes(key) for key, _ in txn.cursor() if key[:1] in (b"S", b"X")]
    )
    assert len(rows) == 3 + 2  # lines of the manifest, and the indexes of the sealed ones


def test_a_start_inside_a_segment_hides_what_is_below_it(log):
    """A30: the records below are invisible though their bytes remain."""
    trim(log, 5)

    assert (log.start_offset(), bases(log), offsets(log)) == (5, [4, 6, 8], [5, 6, 7, 8, 9])


def test_whole_segments_only_where_that_is_asked_for(log):
    """C1: retention deletes whole segments; the start stays at the beginning of one."""
    assert trim(log, 5, whole=True).start_offset == 4
    assert log.start_offset() == 4


def test_the_start_never_moves_back(log):
    """A30: it never decreases, and asking for less is no error."""
    trim(log, 6)

    assert trim(log, 3) == (6, 0, 0)
    assert trim(log, 0, whole=True) == (6, 0, 0)


def test_the_start_cannot_pass_the_end(log):
    """A30: an increase beyond the high watermark is refused, and nothing is deleted."""
    with pytest.raises(OffsetOutOfRangeError, match="ends at offset 10"):
        trim(log, 11)
    with pytest.raises(OffsetOutOfRangeError):
        trim(log, -1)

    assert log.start_offset() == 0


def test_all_of_it_can_go_and_numbering_goes_on(root, log):
    """C4: the active segment is rolled first; one empty segment stays, and the end offset."""
    trim(log, 10)

    assert (log.start_offset(), log.end_offset(), bases(log)) == (10, 10, [10])
    fill(log, 1, first=10)
    assert offsets(log) == [10]
    assert trim(log, 10) == (10, 0, 0)


def test_an_empty_active_segment_is_never_dropped(root):
    """C4: at least one segment always exists."""
    log = make_log(root, AT_ONCE)

    assert trim(log, 0, whole=True) == (0, 0, 0)
    assert len(bases(log)) == 1


def test_doing_it_again_changes_nothing(root, log):
    """C5: not even a commit is made."""
    trim(log, 4)
    before = root.context.state.version()

    assert trim(log, 4) == (4, 0, 0)
    assert root.context.state.version() == before


def test_a_reader_that_is_overtaken_is_told_and_never_skips(log):
    """A21, P20: what it holds it may finish; then its offset is out of range."""
    reader = log.reader(0)
    held = reader.read(1)
    trim(log, 6)

    assert [one.lists()[2] for one in held] == [[b"v0"]]
    with pytest.raises(OffsetOutOfRangeError, match="offsets 6 to 10"):
        reader.read()
    with pytest.raises(OffsetOutOfRangeError):
        log.reader(5)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_reader_that_looked_at_the_tail_before_the_trim_skips_nothing(root, log, at):
    """A21: the manifest it looks at next begins, or goes on, past its offset."""
    with closing(open_root(root.path)) as other:
        reader = other.partition("t", 0).reader(at)
        if at:
            reader.read(1)
        known = reader._log.tail()
        trim(log, 6)
        with pytest.raises(OffsetOutOfRangeError):
            while True:
                assert reader.read(1, known)[0].base_offset <= 2


def test_a_lookup_by_time_that_is_overtaken_looks_again(root, log, monkeypatch):
    """B10: it searches from the start as it is by then."""
    whole = catalog.segments
    overtaken = []

    def slow(txn, key):
        found = whole(txn, key)
        overtaken.append(found)
        return found

    with closing(open_root(root.path)) as other:
        theirs = other.partition("t", 0)
        assert theirs.segments
        version = other.context.catalog.version
        trim(log, 6)
        # It does not notice at first that the manifest has moved on.
        looks = iter([theirs.snapshot_version] * 2)
        monkeypatch.setattr(
            other.context.catalog, "version", lambda: next(looks, None) or version()
        )
        monkeypatch.setattr(catalog, "segments", slow)
        found = theirs.offset_for_timestamp(0)

    assert found.offset == 6


def test_a_limit_is_asked_in_the_transaction_that_moves_the_start(log):
    """P14: who may not delete is stopped there, and nothing was changed."""
    asked = []

    def limit(txn):
        asked.append(txn.id())
        return 5

    assert trim(log, 8, whole=True, limit=limit).start_offset == 4
    assert len(asked) == 2

    def refuse(txn):
        raise KeyError("fenced")

    with pytest.raises(KeyError):
        trim(log, 8, limit=refuse)
    assert log.start_offset() == 4


def test_a_choice_that_was_made_in_another_epoch_is_void(log):
    """A36: the segments that were looked at may be gone, and others there."""
    epoch = log.tail().leader_epoch
    log.truncate_to(6)

    assert trim(log, 4, epoch=epoch) == (0, 0, 0)
    assert trim(log, 4, epoch=epoch + 1).start_offset == 4


def test_files_stay_for_their_delay(tmp_path):
    """A39: file.delete.delay.ms; meanwhile they are no strays, and any process may sweep."""
    MovedUptime.ms = 0
    with closing(open_root(tmp_path / "root", files=MovedUptime)) as root:
        log = make_log(root, {"segment.bytes": 2 * SIZE, "file.delete.delay.ms": 1_000})
        fill(log, 10)
        trim(log, 6)
        assert len(segment_files(root.path)) == 5
        assert healthy(root)
        assert root.context.state and pending_deletes.sweep(root.context) == 0
        MovedUptime.ms = 1_001
        with closing(open_root(root.path, files=MovedUptime)) as other:
            assert pending_deletes.sweep(other.context) == 3
        assert len(segment_files(root.path)) == 2
        assert pending_deletes.paths(root.context.live) == set()


def test_on_a_full_disk_the_delay_can_be_cut_short(root):
    """P10: what may go later may go now."""
    log = make_log(root, {"segment.bytes": 2 * SIZE})
    fill(log, 10)
    trim(log, 6)

    assert (
        pending_deletes.sweep(root.context),
        pending_deletes.sweep(root.context, early=True),
    ) == (0, 3)


def test_after_a_clean_close_the_next_one_sweeps(tmp_path):
    """A39: leftovers are removed, and are no strays until then."""
    with closing(open_root(tmp_path / "root")) as root:
        log = make_log(root, {"segment.bytes": 2 * SIZE})
        fill(log, 10)
        trim(log, 6)
    with closing(open_root(tmp_path / "root")) as root:
        assert root.startup_report == []
        assert healthy(root)
        assert pending_deletes.sweep(root.context, early=True) == 3


def test_a_trim_is_finished_by_the_next_one(root, log, monkeypatch):
    """Killed after the start moved: readers see the new log, the names go with the next trim."""

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(log_start, "_drop", die)
    with pytest.raises(KeyboardInterrupt):
        trim(log, 6)
    assert (log.start_offset(), offsets(log), len(bases(log))) == (6, [6, 7, 8, 9], 5)
    # Their names stand: nobody unlinks them.
    assert pending_deletes.sweep(root.context, early=True) == 0
    monkeypatch.undo()

    assert trim(log, 0, whole=True).segments == 3
    assert len(segment_files(root.path)) == 2


def test_a_cut_after_an_unfinished_trim_keeps_the_start(log, monkeypatch):
    """A30: it never moves back within a boot."""
    monkeypatch.setattr(log_start, "_drop", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trim(log, 6)
    log.truncate_to(8)

    assert (log.start_offset(), log.end_offset()) == (6, 8)


def test_after_a_power_cut_the_start_is_durable(tmp_path):
    """C8: and what was not flushed past it is gone without an error (A29)."""
    with closing(open_root(tmp_path / "root")) as root:
        log = make_log(root, AT_ONCE)
        fill(log, 10)
        log.flush()
        trim(log, 5)
        abandon(root)
    (tmp_path / "root" / startup.BOOT_FILE).unlink()
    with closing(open_root(tmp_path / "root")) as root:
        log = root.partition("t", 0)
        assert (log.start_offset(), offsets(log)) == (5, [5, 6, 7, 8, 9])
        assert healthy(root)


def test_what_a_power_cut_brings_back_is_swept(tmp_path):
    """R5: an unlink that did not reach the disk leaves a file that nothing names."""
    with closing(open_root(tmp_path / "root")) as root:
        log = make_log(root, AT_ONCE)
        fill(log, 10)
        log.flush()
        first = segment_files(root.path)[0]
        kept = first.read_bytes()
        trim(log, 4)
        abandon(root)
    first.write_bytes(kept)
    (tmp_path / "root" / startup.BOOT_FILE).unlink()
    with closing(open_root(tmp_path / "root")) as root:
        assert not first.exists()
        assert any("removed" in told for told in root.startup_report)
        assert healthy(root)


def test_a_restored_state_knows_what_was_deleted_since_its_copy(tmp_path):
    """P13: names of files that retention unlinked are forgotten, and their start is found."""
    with closing(open_root(tmp_path / "root")) as root:
        log = make_log(root, AT_ONCE)
        fill(log, 10)
    with closing(open_root(tmp_path / "root")) as root:
        log = root.partition("t", 0)
        fill(log, 4, first=10)
        trim(log, 6)
        abandon(root)
    data = tmp_path / "root" / "state" / "data.mdb"
    data.write_bytes(b"\xff" * data.stat().st_size)
    with closing(open_root(tmp_path / "root")) as root:
        log = root.partition("t", 0)
        assert "offsets below 6 were deleted after the copy was made" in root.startup_report
        assert (log.start_offset(), offsets(log)) == (6, list(range(6, 14)))
        assert healthy(root)


def test_a_file_that_is_missing_in_the_middle_is_still_an_error(tmp_path):
    """R7: only the first ones can have been deleted by retention."""
    with closing(open_root(tmp_path / "root")) as root:
        log = make_log(root, AT_ONCE)
        fill(log, 10)
    segment_files(tmp_path / "root")[1].unlink()
    data = tmp_path / "root" / "state" / "data.mdb"
    data.write_bytes(b"\xff" * data.stat().st_size)
    with closing(open_root(tmp_path / "root")) as root:
        assert any("missing" in str(told) or "opened" in str(told) for told in root.startup_report)


def test_what_is_deleted_counts_as_flushed(tmp_path):
    """A reader of what is durable is not left below the start; and a flush goes on."""
    with closing(open_root(tmp_path / "root", visibility="durable")) as root:
        log = make_log(root, AT_ONCE)
        fill(log, 10)
        assert log.end_offset() == 0
        trim(log, 6)
        assert (log.start_offset(), log.end_offset()) == (6, 6)
        log.flush()
        assert offsets(log) == [6, 7, 8, 9]
        assert healthy(root)


def test_a_flush_that_is_overtaken_flushes_what_is_left(root, log, monkeypatch):
    """A22: a segment that retention drops meanwhile needs no flush."""
    sync_data, overtaken = state.sync_data, []

    def slow(*found):
        if not overtaken:
            overtaken.append(trim(log, 6))
            raise OffsetOutOfRangeError("as if it had opened a file that is gone")
        sync_data(*found)

    log.append([encoded(b"v10")])
    monkeypatch.setattr(state, "sync_data", slow)
    append = log.append([encoded(b"v11")], durability="fsync")

    assert append[0].base_offset == 11
    assert overtaken
    assert log.tail().durable_offset == 12


def test_the_first_epoch_is_clipped_to_the_start(root, log):
    """A37: entries below the start are one entry, and a reader of before is still told."""
    reader = log.reader(9)
    log.truncate_to(4)
    fill(log, 6, first=4)
    log.truncate_to(8)
    fill(log, 2, first=8)
    trim(log, 6)

    epochs = root.context.state.read(lambda txn: catalog.epochs(txn, log.key))
    assert epochs == [(1, 6), (2, 8)]
    with pytest.raises(OffsetOutOfRangeError):
        reader.read()


def test_a_producer_is_remembered_though_its_records_are_gone(root, log):
    """G16, G19: forgotten by time only: a repetition is answered with the offset it got."""
    log.append([encoded(b"a", producer=(7, 0, 0))])
    trim(log, 11)

    again = log.append([encoded(b"a", producer=(7, 0, 0))])
    assert again[0][:2] == (10, 11)
    assert again[0].duplicate
    assert root.context.live.get(producer_state.key(log.key, 7)) is not None


def test_a_partition_whose_flush_failed_is_left_as_it_is(log):
    """P9: nothing changes before `repair`."""

    def fail(txn):
        row = txn.get(log.tail_key)
        txn.put(log.tail_key, tail.unpack(row)._replace(failed=True).pack())

    context = log.context
    row = context.live.get(log.tail_key)
    context.live.write(fail)
    with pytest.raises(DurabilityError):
        trim(log, 4)
    context.live.write(lambda txn: txn.put(log.tail_key, row))

    assert trim(log, 4).start_offset == 4


def test_a_deleted_topic_takes_its_doomed_files_along(root):
    """A38: nothing is left to be unlinked later."""
    log = make_log(root, {"segment.bytes": 2 * SIZE})
    fill(log, 10)
    trim(log, 6)
    assert len(pending_deletes.paths(root.context.live)) == 3
    root.delete_topic("t")

    assert pending_deletes.paths(root.context.live) == set()


def test_a_reading_handle_changes_nothing(root, log):
    """P19."""
    with (
        closing(open_root(root.path, mode="r")) as other,
        pytest.raises(ReadOnlyError),
    ):
        trim(other.partition("t", 0), 4)
    assert values(log)[0] == b"v0"
