"""Rolls: when a segment is full or old, and the sealed segment (A11–A16)."""

from contextlib import closing
from itertools import pairwise

import pytest
from support.clock import START
from support.faulty_files import FaultInjector
from support.forks import was_killed
from support.roots import (
    bases,
    encoded,
    fill,
    healthy,
    make_log,
    no_stray_files,
    offsets,
    open_root,
    rows,
    segment_files,
    values,
)
from support.tiers import sample

from embedlog import catalog
from embedlog.errors import InvalidConfigError
from embedlog.partition import lookup, roll
from embedlog.segment import END_MARK

SIZE = encoded(b"v0").size


@pytest.mark.parametrize("fit", [1, 2, 3, 7])
@pytest.mark.parametrize("spare", [0, SIZE - 1])
def test_a_segment_takes_as_many_batches_as_fit(root, fit, spare):
    """Each segment has floor(segment.bytes / size) batches (A11, A13)."""
    log = make_log(root, {"segment.bytes": fit * SIZE + spare})
    fill(log, 10)

    assert bases(log) == list(range(0, 10, fit))
    assert values(log) == [b"v%d" % number for number in range(10)]


@pytest.mark.parametrize("size", [1, 2])
def test_a_segment_spans_no_more_offsets_than_it_may(root, size):
    """segment.max.offset.span (A11) also limits single records, which `append_fast` appends."""
    log = make_log(root, {"segment.max.offset.span": 4})
    for _ in range(10):
        log.append([encoded(*[b"v"] * size)])
    assert bases(log) == list(range(0, 10 * size, 4))


def test_an_old_segment_is_rolled_by_the_records_own_time(root, clock):
    """The age is the time since the first batch by timestamps, not by the clock (A12)."""
    log = make_log(root, {"segment.ms": 100})
    clock.advance(1_000_000)
    for time in (0, 100, 50, 101, 150, 202):
        log.append([encoded(b"x", at=START + time)])

    assert bases(log) == [0, 3, 5]


def test_old_timestamps_do_not_roll_and_a_far_future_one_does(root):
    """An older timestamp rolls nothing; one far in the future rolls (A12)."""
    log = make_log(root, {"segment.ms": 100})
    for time in (START, START - 10_000, 0, START + 10_000):
        log.append([encoded(b"x", at=time)])

    assert bases(log) == [0, 3]


def test_log_append_time_ages_by_the_logs_clock(root, clock):
    """The producer's timestamps do not count if the log sets them (A12)."""
    log = make_log(root, {"segment.ms": 100, "message.timestamp.type": "LogAppendTime"})
    for _ in range(4):
        log.append([encoded(b"x", at=START + 10**9)])
        clock.advance(60)

    assert bases(log) == [0, 2]


def test_jitter_shortens_the_age_by_a_fixed_part_for_each_segment(root):
    """Then the segments of many partitions do not roll at once (A16)."""
    log = make_log(root, {"segment.ms": 1000, "segment.jitter.ms": 900})
    for time in range(0, 20_000, 10):
        log.append([encoded(b"x", at=START + time)])

    lengths = [(after - before) * 10 for before, after in pairwise(bases(log))]
    assert all(100 <= length <= 1010 for length in lengths)
    assert len(set(lengths)) > 3
    with pytest.raises(InvalidConfigError, match="jitter"):
        root.alter_topic("t", {"segment.jitter.ms": 1001})


def test_the_first_record_with_headers_rolls(log):
    """A segment has one schema; later batches with and without headers share it."""
    fill(log, 2)
    for header_lists in ([[("a", b"1")]], None, [[("b", None)]]):
        log.append([encoded(b"x", headers=header_lists)])

    assert bases(log) == [0, 2]
    assert [row[4] for row in rows(log, 2)] == [[("a", b"1")], [], [("b", None)]]


def test_a_kill_while_an_empty_segment_is_replaced_is_no_damage(tmp_path):
    """At any operation: `verify` has no finding, and the next append goes on (A14)."""
    headers = encoded(b"x", headers=[[("a", b"1")]])
    survived = 0
    for n in sample(range(100), 12):
        path = tmp_path / str(n)
        with closing(open_root(path)) as root:
            make_log(root)

        def append(path=path, n=n):
            root = open_root(path, files=FaultInjector(lambda files: files.kill_at(n)))
            root.partition("t", 0).append([headers])

        if not was_killed(append):
            survived += 1
            break
        with closing(open_root(path)) as root:
            assert healthy(root)
            log = root.partition("t", 0)
            log.append([headers])
            assert healthy(root)
            assert set(values(log)) == {b"x"}
            assert no_stray_files(root)
    assert survived
    assert n > 10


def test_a_sealed_segment_is_described_by_the_manifest(root):
    """The row has its end, size and largest timestamp; the file ends with the end mark (A15)."""
    log = make_log(root, {"segment.bytes": 3 * SIZE, "index.interval.bytes": 0})
    for time in (5, 9, 7, 1):
        log.append([encoded(b"v%d" % time, at=START + time)])
    sealed, active = log.segments.values()

    data = segment_files(root.path)[0].read_bytes()
    assert (sealed.base_offset, sealed.next_offset, active.base_offset) == (0, 3, 3)
    assert (sealed.max_timestamp, sealed.size) == (START + 9, len(data))
    assert data[sealed.end_position :] == END_MARK
    assert not active.sealed
    assert [path.name for path in segment_files(root.path)] == [
        "00000000000000000000-1.arrows",
        "00000000000000000003-2.arrows",
    ]


def test_the_index_of_a_sealed_segment_is_that_of_the_active_one(root):
    """The roll writes it to `state` and deletes the rows in `live` (A15, B1)."""
    log = make_log(root, {"index.interval.bytes": SIZE})
    fill(log, 9)
    (active,) = log.segments.values()
    active_entries = lookup.entries(log, active)
    log.roll()
    sealed = log.segments[0]

    assert [entry.offset for entry in active_entries] == [2, 4, 6, 8]
    assert lookup.entries(log, sealed) == active_entries
    assert lookup.entries(log, active) == []


@pytest.mark.parametrize("file_exists", [False, True])
def test_a_segment_that_is_named_but_not_made_is_not_opened(
    root, file_exists, monkeypatch, tmp_path
):
    """The tail of a reader may be older than a truncation, and a roll may be under way.

    The new segment then has no file yet, or an empty one (A19).
    """
    log = make_log(root)
    fill(log, 4)
    other = open_root(tmp_path / "root")
    reader, tail_before_cut = other.partition("t", 0).reader(0), log.tail()
    log.truncate_to(2)
    monkeypatch.setattr(roll, "start_segment", lambda log, *_: log.tail())
    log.roll()
    path = tmp_path / "root" / log.path_of(log.active_segment)
    assert log.active_segment.base_offset == 2 and not path.exists()
    if file_exists:
        path.touch()

    base_offsets = [
        batch.base_offset for _ in range(3) for batch in reader.read(tail=tail_before_cut)
    ]
    assert base_offsets == [0, 1]
    other.close()
    monkeypatch.undo()
    fill(log, 1, first=2)
    assert values(log) == [b"v0", b"v1", b"v2"]


# Partial reads of the manifest


def test_a_lookup_and_a_scan_read_no_more_of_the_manifest_than_they_need(root, monkeypatch):
    """A new handle finds any offset by a seek, for any number of segments."""
    fill(make_log(root, {"segment.bytes": 2 * SIZE}), 40)
    root._partitions.clear()
    log = root.partition("t", 0)
    monkeypatch.setattr(catalog, "segments", None)

    assert [offsets(log, first)[0] for first in (0, 7, 38, 39)] == [0, 7, 38, 39]
    assert offsets(log) == list(range(40))
    fill(log, 5, first=40)
    assert offsets(log, 30) == list(range(30, 45))


def test_the_manifest_and_its_last_line_are_of_one_instant(root, tmp_path):
    """A handle that reads the whole manifest reads the active segment again, too."""
    log = make_log(root, {"segment.bytes": 2 * SIZE})
    fill(log, 3)
    log.refresh()
    with closing(open_root(root.path)) as other:
        fill(other.partition("t", 0), 4, first=3)
    active_before = log.active_segment

    assert list(log.segments) == [0, 2, 4, 6]
    assert (active_before.base_offset, log.active_segment) == (2, log.segments[6])
    assert log.segment_at(5) == log.segments[4] == log.segment_after(log.segments[2])
    assert log.segment_after(log.active_segment) is None
