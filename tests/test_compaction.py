"""Compaction: which partitions, which records, which tombstones, what never changes (D1-D27)."""

from __future__ import annotations

import errno
from math import inf

import pyarrow as pa
import pytest
from support.clock import START
from support.faulty_files import REBOOTED, FaultyFiles
from support.roots import (
    abandon,
    bases,
    encoded,
    healthy,
    make_log,
    offsets,
    open_root,
    rows,
    segment_files,
)

from embedlog import batch, keyspace, kv
from embedlog.compaction import (
    CleanOptions,
    Throttle,
    clean,
    clean_round,
    cleaner,
    explain,
    inspect,
    select_due,
    try_clean,
)
from embedlog.compaction.key_hash import KeyHasher
from embedlog.compaction.offset_map import OffsetMap
from embedlog.compaction.rewriter import TARGET_BYTES, Rewriter
from embedlog.compaction.scanner import SegmentScanner
from embedlog.config import LONG_MAX, MaintenanceConfig, TopicConfig
from embedlog.errors import FencedError, InvalidConfigError, InvalidRecordError, StorageError
from embedlog.partition import flush, replace
from embedlog.partition.log_start import trim
from embedlog.partition.producers import expire_producers
from embedlog.partition.state import max_segment_ms
from embedlog.retention import delete_records

COMPACT = {"cleanup.policy": "compact", "delete.retention.ms": 1000, "file.delete.delay.ms": 0}
DAY = 86_400_000


def put(log, *pairs, at=None, **options):
    """Append (key, value) pairs as one batch."""
    keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    time = log.context.clock() if at is None else at
    return log.append([encoded(*values, keys=keys, at=time, **options)])


def segment(log, *pairs, **options):
    """Append pairs, each a batch of its own, and roll."""
    for pair in pairs:
        put(log, pair, **options)
    log.roll()


def run(log, **options):
    return clean(log, log.context.clock(), CleanOptions(**options))


def kept(log):
    return [(row[2], row[3]) for row in rows(log)]


def keys_at(log):
    return [(int(row[2]), row[0]) for row in rows(log)]


def cleaned(log, offset):
    """Move the checkpoint by hand."""
    log.context.state.write(lambda txn: keyspace.CLEANED_OFFSETS.put(txn, log.key, value=offset))


def batches_of(log):
    found, reader = [], log.reader(log.start_offset())
    while reader.offset < log.end_offset():
        found += reader.read()
    return found


def epochs_of(log):
    found = [(one.leader_epoch, one.offsets().to_pylist()) for one in batches_of(log)]
    return {offset: epoch for epoch, offsets in found for offset in offsets}


@pytest.fixture
def log(root):
    """A compacted partition; healthy when the test is done."""
    return make_log(root, COMPACT)


# Which part, and which partition


def test_the_active_segment_is_never_cleaned(log):
    """D2: and what is in it is dirty, not lost; an older value of its keys stays as well."""
    segment(log, (b"a", b"1"), (b"a", b"2"))
    put(log, (b"a", b"3"))
    put(log, (b"a", b"4"))

    run(log)

    assert kept(log) == [(b"a", b"2"), (b"a", b"3"), (b"a", b"4")]


def test_a_checkpoint_says_where_the_dirty_part_begins(log):
    """D1, D14: after a success that is where the active segment begins."""
    segment(log, (b"a", b"1"), (b"a", b"2"))
    assert inspect(log, START).first_dirty == 0

    run(log)

    cleanable = inspect(log, START)
    assert (cleanable.first_dirty, cleanable.first_uncleanable, cleanable.cleanable_bytes) == (
        2,
        2,
        0,
    )
    assert cleanable.clean_bytes > 0


def test_segments_deleted_during_a_compaction_are_skipped(root):
    """D22: retention may drop what a pass has still to read; it looks again, and goes on."""
    log = make_log(root, {**COMPACT, "cleanup.policy": "compact,delete"})
    for number in range(6):
        segment(log, (b"a", b"%d" % number), (b"b%d" % number, b""))
    seen = []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == 3:
            delete_records(log, 8)

    run(log, progress=progress)

    assert kept(log) == [(b"b4", b""), (b"a", b"5"), (b"b5", b"")]


@pytest.mark.parametrize("checkpoint", [7, 1 << 40])
def test_a_checkpoint_outside_of_the_log_starts_over(log, checkpoint):
    """D1: beyond the end it cannot be right."""
    segment(log, (b"a", b"1"))
    cleaned(log, checkpoint)
    assert inspect(log, START).first_dirty == 0


def test_a_checkpoint_below_the_start_moves_up_to_it(log):
    """D1: after records were deleted."""
    segment(log, (b"a", b"1"), (b"b", b"2"), (b"a", b"3"))
    cleaned(log, 1)
    trim(log, 2)
    assert (inspect(log, START).start, inspect(log, START).first_dirty) == (2, 2)


def test_the_active_segment_is_not_in_the_dirty_part(log):
    """D1: a checkpoint in the active segment leaves nothing to do."""
    segment(log, (b"a", b"1"), (b"a", b"2"))
    put(log, (b"a", b"3"), (b"a", b"4"))
    cleaned(log, 3)
    cleanable = inspect(log, START)
    assert (cleanable.first_dirty, cleanable.cleanable_bytes) == (2, 0)


def test_records_younger_than_the_lag_are_not_compacted(root, clock):
    """D2: from the first segment on whose youngest record is too young."""
    log = make_log(root, {**COMPACT, "min.compaction.lag.ms": 100})
    segment(log, (b"a", b"1"), (b"a", b"2"), at=START)
    segment(log, (b"a", b"3"), (b"a", b"4"), at=START + 50)
    segment(log, (b"a", b"5"), (b"a", b"6"), at=START)

    clock.set(START + 99)
    assert inspect(log, clock()).first_uncleanable == 0
    clock.set(START + 149)
    assert inspect(log, clock()).first_uncleanable == 2
    assert inspect(log, clock()).too_young_bytes > 0
    run(log)
    assert kept(log) == [(b"a", b"%d" % number) for number in (2, 3, 4, 5, 6)]
    clock.set(START + 150)
    run(log)
    assert kept(log) == [(b"a", b"6")]


def test_a_partition_is_due_when_enough_of_it_is_dirty(root):
    """D3: strictly more than the ratio, of the bytes that can be cleaned."""
    log = make_log(root, {**COMPACT, "min.cleanable.dirty.ratio": 0.5})
    segment(log, (b"a", b"1"), (b"b", b"2"))
    assert inspect(log, START).cleanable_ratio == 1.0
    assert inspect(log, START).due
    run(log)
    assert not inspect(log, START).due
    segment(log, (b"a", b"2"))
    cleanable = inspect(log, START)
    assert cleanable.due == (cleanable.cleanable_bytes > cleanable.clean_bytes)


def test_an_overdue_partition_is_due_whatever_its_ratio(root, clock):
    """D3, D4, D5: overdue ones go first, and only if there is something to clean."""
    lax = {**COMPACT, "min.cleanable.dirty.ratio": 1.0, "max.compaction.lag.ms": 100}
    log, other = make_log(root, lax, "late"), make_log(root, COMPACT, "dirty")
    for each in (log, other):
        segment(each, (b"a", b"1"), (b"a", b"2"))
    assert [one.log for one in select_due([log, other], clock(), {})] == [other]

    clock.advance(101)

    assert [one.log for one in select_due([other, log], clock(), {})] == [log, other]
    run(log)
    clock.advance(DAY)
    assert not inspect(log, clock()).due


def test_a_lag_rolls_segments_in_time_to_be_cleaned(root):
    """D6, A16: at most every max.compaction.lag.ms, and no jitter makes that every append."""
    lags = {"max.compaction.lag.ms": 100, "segment.jitter.ms": 5000}
    log = make_log(root, {**COMPACT, **lags})
    log.refresh()
    assert 0 < max_segment_ms(log.config, log.active_segment) <= 100
    for number in range(4):
        put(log, (b"a", b"%d" % number), at=START)
    assert bases(log) == [0]
    put(log, (b"a", b"4"), at=START + 101)
    assert bases(log) == [0, 4]


def test_the_dirtiest_is_next(root):
    """D4: by the share of its bytes, not by their number."""
    half, full = make_log(root, COMPACT, "half"), make_log(root, COMPACT, "full")
    segment(half, *[(b"%d" % number, b"x" * 100) for number in range(8)])
    run(half)
    segment(half, *[(b"%d" % number, b"x" * 100) for number in range(30)])
    segment(full, (b"a", b"1"))
    found = select_due([half, full], START, {})
    assert [one.log for one in found] == [full, half]
    assert found[0].cleanable_ratio == 1.0 > found[1].cleanable_ratio


def test_topics_that_are_not_compacted_are_skipped(root):
    """C6: and `clean` refuses them, whoever asks."""
    log = make_log(root)
    segment(log, (b"a", b"1"), (b"a", b"2"))
    assert select_due([log], START, {}) == []
    with pytest.raises(FencedError, match="no longer compacted"):
        run(log)


@pytest.mark.parametrize(
    ("config", "pairs", "words"),
    [
        ({"cleanup.policy": "delete"}, [(b"a", b"1")], "cleanup.policy is 'delete'"),
        ({}, [], "nothing to do"),
        ({}, [(b"a", b"1")], "will be compacted: 100%"),
        ({"min.cleanable.dirty.ratio": 1.0}, [(b"a", b"1")], "not more than"),
        ({"min.compaction.lag.ms": DAY}, [(b"a", b"1")], "min.compaction.lag.ms"),
        (
            {"max.compaction.lag.ms": 5, "min.cleanable.dirty.ratio": 1.0},
            [(b"a", b"1")],
            "older than max.compaction.lag.ms",
        ),
    ],
)
def test_explain_says_why_a_partition_is_compacted_or_not(root, config, pairs, words):
    """Every reason there is for a partition to be cleaned, or not to be."""
    log = make_log(root, {**COMPACT, **config})
    if pairs:
        segment(log, *pairs, at=START)
    assert words in explain(log, START + 6)


def test_explain_mentions_the_active_segment(log):
    """The reason that surprises most: nothing was rolled yet."""
    put(log, (b"a", b"1"))
    assert "active segment" in explain(log, START)


# What is kept


def test_the_last_record_of_each_key_is_kept_unchanged(root):
    """D8, D10: offsets, order, times, headers and kind of time stay."""
    log = make_log(root, COMPACT)
    put(log, (b"a", b"1"), (b"b", b"2"), (b"a", b"3"), at=[START + 5, START + 3, START + 9])
    put(log, (b"c", b"4"), at=START + 1, headers=[[("h", b"x"), ("h", None)]])
    put(log, (b"b", b"5"), at=START + 2, compression="zstd")
    before = {row[0]: row for row in rows(log)}
    log.roll()

    done = run(log)

    assert rows(log) == [before[offset] for offset in (2, 3, 4)]
    assert (done.records_read, done.records_kept) == (5, 3)
    assert (log.start_offset(), log.end_offset()) == (0, 5)


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_batches_keep_their_codec(log, compression):
    """What a producer compressed is stored compressed."""
    values = [b"x" * 500] * 9
    put(log, *[(b"%d" % number, value) for number, value in enumerate(values)])
    put(log, *[(b"%d" % number, value) for number, value in enumerate(values)])
    log.roll()
    run(log)
    put(log, (b"0", b"y" * 999), compression=compression)
    log.roll()
    run(log)
    assert {one.codec for one in batches_of(log)} == {"none", compression}


def test_times_of_the_log_stay_times_of_the_log(root, clock):
    """A7: each record keeps the moment it was appended, though batches with others are merged."""
    log = make_log(root, {**COMPACT, "message.timestamp.type": "LogAppendTime"})
    for number in range(4):
        clock.advance(10)
        put(log, (b"%d" % number, b"v"), at=5)
    log.roll()

    run(log)

    assert [row[1] for row in rows(log)] == [START + 10 * number for number in (1, 2, 3, 4)]
    (one,) = [one for one in batches_of(log) if one.count]
    assert one.is_log_append_time


@pytest.mark.parametrize(
    ("slots", "first", "expected", "then"),
    [
        (1, 2, [(1, 1), (0, 2), (1, 3), (0, 4)], 3),
        (1, 3, [(0, 0), (0, 2), (1, 3), (0, 4)], 4),
        (3, 2, [(1, 3), (0, 4)], 5),
    ],
)
def test_a_full_offset_map_ends_the_pass(log, slots, first, expected, then, monkeypatch):
    """D7: the keys 0, 1, 0, 1, 0; a pass goes as far as its keys have room, and moves on there."""
    segment(log, *[(b"%d" % (number % 2), b"v%d" % number) for number in range(5)])
    cleaned(log, first)
    only_one_pass(monkeypatch)
    room = MaintenanceConfig(
        log_cleaner_dedupe_buffer_size=24 * slots + 9, log_cleaner_io_buffer_load_factor=1.0
    )

    with pytest.raises(StopIteration):
        run(log, settings=room)

    assert keys_at(log) == expected
    assert inspect(log, START).first_dirty == then


def test_an_offset_map_of_one_slot_needs_several_passes(log, monkeypatch):
    """D7: [1,0,1,0], then [0,1,0], then [1,0]; progress is guaranteed if one key fits."""
    segment(log, *[(b"%d" % (number % 2), b"v%d" % number) for number in range(5)])
    cleaned(log, 2)
    seen = []
    note = replace.Replacement.swap

    def swap(self, *given, **options):
        note(self, *given, **options)
        seen.append(keys_at(log))

    monkeypatch.setattr(replace.Replacement, "swap", swap)
    run(log, settings=MaintenanceConfig(log_cleaner_dedupe_buffer_size=1))

    assert seen == [
        [(1, 1), (0, 2), (1, 3), (0, 4)],
        [(0, 2), (1, 3), (0, 4)],
        [(1, 3), (0, 4)],
    ]


def only_one_pass(monkeypatch):
    looks = iter([1])
    from embedlog.compaction import cleaner

    def once(*given):
        next(looks)
        return inspect(*given)

    monkeypatch.setattr(cleaner, "inspect", once)


def test_records_without_a_key_are_removed_when_a_topic_becomes_compacted(root):
    """D9, D27: they are refused from then on (A6), and those that are there are removed."""
    log = make_log(root)
    put(log, (None, b"1"), (b"a", b"2"), (None, None))
    root.alter_topic("t", {"cleanup.policy": "compact"})
    with pytest.raises(InvalidRecordError):
        put(log, (None, b"3"))
    log.roll()

    done = run(log)

    assert kept(log) == [(b"a", b"2")]
    assert done.keyless == 2


@pytest.mark.parametrize("gap", [1, 5, 1000])
def test_gaps_in_the_offsets_are_compacted_over(log, gap):
    """D14: after a mirror's gap the dirty part begins where the active segment does."""
    segment(log, (b"a", b"1"), (b"a", b"2"))
    one = encoded(b"3", keys=[b"b"])
    log.append_at([(2 + gap, one)])
    log.roll()

    run(log)

    assert offsets(log) == [1, 2 + gap]
    assert inspect(log, START).first_dirty == log.active_segment.base_offset == 3 + gap


def test_small_segments_become_one(root):
    """D12: as long as they fit; the first base names it, and nothing is rewritten without need."""
    log = make_log(root, {**COMPACT, "segment.bytes": 10_000})
    for number in range(40):
        segment(log, (b"%d" % number, b"x" * 100))
    assert len(bases(log)) == 41

    run(log)

    assert 2 <= len(bases(log)) <= 6
    assert bases(log)[0] == 0
    sizes = [info.size for info in log.segments.values() if info.sealed]
    assert all(size <= 10_000 for size in sizes)
    assert [row[0] for row in rows(log)] == list(range(40))


def test_many_batches_of_one_record_become_few(log):
    """A producer that trickles leaves batches that are nearly all head."""
    for number in range(300):
        put(log, (b"%d" % number, b"v"))
    log.roll()
    before = log.size_bytes()

    run(log)

    assert len(batches_of(log)) == 1
    assert log.size_bytes() < before / 10


def test_a_merged_batch_is_not_too_large(root):
    """A lookup reads a whole batch, and a batch is no larger than the topic allows."""
    log = make_log(root, {**COMPACT, "max.message.bytes": 4000})
    for number in range(50):
        put(log, (b"%d" % number, b"x" * 400))
    log.roll()
    run(log)
    assert max(one.size for one in batches_of(log)) < 6000
    assert TARGET_BYTES <= 1 << 20


def test_a_merged_segment_is_as_old_as_what_was_merged(root, clock):
    """D12, C2: else retention would count what has no times from the compaction on."""
    log = make_log(root, COMPACT)
    segment(log, (b"a", b"1"))
    clock.advance(DAY)
    segment(log, (b"b", b"2"))
    clock.advance(DAY)

    run(log)

    (one, _) = log.segments.values()
    assert (one.created_ms, one.max_timestamp) == (START, START + DAY)
    assert one.appended_ms == START + DAY


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_batch_may_be_larger_than_the_buffer(root, log, compression):
    """D13: than the one it is read into, and than what the topic allows by now."""
    large = [(b"%d" % (number % 3), bytes(50_000)) for number in range(9)]
    put(log, *large, compression=compression)
    put(log, *large, compression=compression)
    root.alter_topic("t", {"max.message.bytes": 60_000})
    log.roll()

    run(log, settings=MaintenanceConfig(log_cleaner_io_buffer_size=1))

    assert keys_at(log) == [(0, 15), (1, 16), (2, 17)]


def test_empty_batches_have_the_leader_epoch_around_them(log, clock):
    """A37: a recovery takes a lower epoch than the one before for a stale batch, and cuts there."""
    for _ in range(3):
        put(log, (b"a", b"1"), (b"b", b"1"))
        log.truncate_to(log.end_offset() - 1)
    log.roll()
    segment(log, (b"c", b"1"), (b"c", None))
    segment(log, (b"c", b"1"), (b"c", None))
    flush.flush_up_to(log, log.end_offset())
    with replace.rewrite_lock(log):
        run_of(log, 1)

    found = [one.leader_epoch for one in batches_of(log)]
    assert found == sorted(found)
    assert found[-1] == log.tail().leader_epoch > 0


def run_of(log, place):
    """Leave nothing of one segment, as a pass does in which all of its keys come again later."""
    info = list(log.segments.values())[place]
    new = replace.Replacement(log, info.base_offset, headers=False)
    rewriter = Rewriter(new, info.base_offset, False, 1 << 20)
    for chunk in SegmentScanner(log, 1 << 20, lambda size: None).chunks(info):
        rewriter.come_to(chunk.batches[0].leader_epoch)
    rewriter.finish(info.next_offset)
    new.swap([info])


def test_leader_epochs_stay_with_their_records(log):
    """A37: a reader is told where the log was cut, so batches of two epochs are not merged."""
    for number in range(3):
        put(log, (b"%d" % number, b"v"), (b"gone%d" % number, b"v"))
        log.truncate_to(log.end_offset() - 1)
        put(log, (b"again%d" % number, b"v"))
    expected = {
        row: one.leader_epoch for one in batches_of(log) for row in one.offsets().to_pylist()
    }
    log.roll()

    run(log)

    found = epochs_of(log)
    assert found == {row: expected[row] for row in found}
    assert len(set(found.values())) > 1


def test_a_clean_partition_is_not_rewritten_again(root):
    """What is clean, and large enough, is not written again; the passes before merge it so far."""
    log = make_log(root, {**COMPACT, "segment.bytes": 4000})
    for number in range(60):
        put(log, (b"%d" % (number % 20), b"x" * 100))
    log.roll()
    run(log)
    run(log)
    names = [path.name for path in segment_files(root.path)]

    assert len(names) <= 3
    assert run(log).segments_before == 0
    assert [path.name for path in segment_files(root.path)] == names


# Producers


def test_the_last_batch_of_a_producer_keeps_its_numbers(root, log):
    """D11: kept, even empty, while the producer is known: a cut goes back to what it says."""
    for number in range(3):
        put(log, (b"a", b"1"), (b"b", b"2"), producer=(7, 0, 2 * number))
    put(log, (b"a", b"3"), (b"b", b"4"))
    log.roll()

    run(log)

    ours = [one for one in batches_of(log) if one.producer_id == 7]
    assert [(one.base_offset, one.next_offset, one.count) for one in ours] == [(4, 6, 0)]
    put(log, (b"c", b"5"), producer=(7, 0, 6))
    log.truncate_to(8)
    (receipt,) = put(log, (b"a", b"1"), (b"b", b"2"), producer=(7, 0, 4))
    assert receipt.duplicate
    assert receipt.base_offset == 4


def test_batches_of_forgotten_producers_are_merged(root, clock, log):
    """D11, G19: an empty batch is not kept for ever."""
    put(log, (b"a", b"1"), producer=(7, 0, 0))
    put(log, (b"a", b"2"))
    log.roll()
    clock.advance(2 * DAY)
    expire_producers(log, clock())

    run(log)

    assert [one.producer_id for one in batches_of(log)] == [None]


def test_a_repeated_batch_is_known_after_compaction_and_a_reboot(root, log):
    """G16: dedupe state outlives the batches that it is about."""
    put(log, (b"a", b"1"), producer=(7, 0, 0))
    put(log, (b"a", b"2"), producer=(7, 0, 1))
    put(log, (b"a", b"3"))
    log.roll()
    run(log)
    abandon(root)
    again = reopened(root.path)

    for first, offset in ((0, 0), (1, 1)):
        (receipt,) = put(again.partition("t", 0), (b"a", b"?"), producer=(7, 0, first))
        assert (receipt.base_offset, receipt.duplicate) == (offset, True)
    again.close()


def reopened(path):
    return open_root(path, files=REBOOTED)


# Tombstones


def test_a_tombstone_is_removed_in_two_passes(log, clock):
    """D16-D18: it deletes at once, and stays for delete.retention.ms after the first clean."""
    segment(log, (b"a", b"1"), (b"b", b"2"), (b"a", None))
    run(log)
    assert kept(log) == [(b"b", b"2"), (b"a", None)]

    clock.advance(999)
    run(log)
    assert kept(log) == [(b"b", b"2"), (b"a", None)]
    clock.advance(1)
    done = run(log)

    assert kept(log) == [(b"b", b"2")]
    assert done.tombstones == 1
    assert log.end_offset() == 3


def test_the_record_s_own_time_is_irrelevant(log, clock):
    """D17: an old-dated tombstone survives its first clean, Kafka's testCleanTombstone."""
    segment(log, (b"a", b"1"), (b"a", None), at=0)
    clock.advance(DAY)
    run(log)
    assert kept(log) == [(b"a", None)]


def test_without_delete_retention_a_tombstone_is_removed_in_the_second_pass(root):
    """D18: never at the first."""
    log = make_log(root, {**COMPACT, "delete.retention.ms": 0})
    segment(log, (b"a", b"1"), (b"a", None))
    run(log)
    assert kept(log) == [(b"a", None)]
    run(log)
    assert kept(log) == []


def test_a_delete_horizon_is_set_once(log, clock):
    """D17: later passes do not put it off, though the batch is written again."""
    segment(log, (b"a", None))
    run(log)
    clock.advance(600)
    segment(log, (b"b", b"1"), (b"c", None))
    run(log)
    assert {one.delete_horizon for one in batches_of(log)} == {START + 1000, START + 1600}
    clock.advance(400)
    segment(log, (b"d", b"1"))
    run(log)
    assert kept(log) == [(b"b", b"1"), (b"c", None), (b"d", b"1")]


def test_a_tombstone_may_stay_for_ever(root, clock):
    """D17: the largest delete.retention.ms does not overflow."""
    log = make_log(root, {**COMPACT, "delete.retention.ms": LONG_MAX})
    segment(log, (b"a", b"1"), (b"a", None))
    run(log)
    clock.advance(1000 * DAY)
    run(log)
    assert kept(log) == [(b"a", None)]


def test_a_new_value_brings_the_key_back(log, clock):
    """D20: by offset only."""
    segment(log, (b"a", b"1"), (b"a", None), (b"a", b"2"))
    run(log)
    clock.advance(DAY)
    run(log)
    assert kept(log) == [(b"a", b"2")]


def test_tombstones_past_the_end_of_a_pass_get_no_delete_horizon(log, clock, monkeypatch):
    """D17, D18: what the pass did not clean over is not told that it did."""
    put(log, (b"a", b"1"), (b"a", None), (b"b", b"1"), (b"b", None))
    log.roll()
    only_one_pass(monkeypatch)
    room = MaintenanceConfig(log_cleaner_dedupe_buffer_size=1)

    with pytest.raises(StopIteration):
        run(log, settings=room)

    assert keys_of(log) == [(b"a", 1, START + 1000), (b"b", 2, None), (b"b", 3, None)]


def keys_of(log):
    return [
        (key, offset, one.delete_horizon)
        for one in batches_of(log)
        for key, offset in zip(one.lists()[1], one.offsets().to_pylist(), strict=True)
    ]


# Who else is there


def test_markers_of_transactions_are_kept(log):
    """D21: whatever their key, and they do not count as records of it."""
    put(log, (b"a", b"1"))
    marker = encoded(None, keys=[b"a"])
    marker.flags |= batch.CONTROL
    log.append([marker])
    log.roll()

    run(log)

    assert [row[0] for row in rows(log)] == [0, 1]
    assert [bool(one.flags & batch.CONTROL) for one in batches_of(log)] == [False, True]


def test_a_truncation_ends_a_compaction(log, monkeypatch):
    """D22, D26: the cut stands, and what follows it is dirty."""
    segment(log, (b"a", b"1"), (b"b", b"2"), (b"a", b"3"))
    swap = replace.Replacement.swap

    def cut(self, *given, **options):
        log.truncate_to(2)
        swap(self, *given, **options)

    monkeypatch.setattr(replace.Replacement, "swap", cut)
    with pytest.raises(FencedError, match="meanwhile"):
        run(log)

    assert kept(log) == [(b"a", b"1"), (b"b", b"2")]
    assert inspect(log, START).first_dirty == 0


def test_a_record_stays_if_the_one_that_replaced_it_is_truncated(root, monkeypatch):
    """D22: its segment is the same, but what it was to be left out for is gone."""
    log = make_log(root, {**COMPACT, "segment.bytes": 3500})
    large = b"x" * 1500
    segment(log, (b"a", b"1"), (b"b", large))
    run(log)
    segment(log, (b"a", large))
    cuts = iter([2])
    swap = replace.Replacement.swap

    def cut(self, old, **options):
        for offset in cuts:
            log.truncate_to(offset)
        swap(self, old, **options)

    monkeypatch.setattr(replace.Replacement, "swap", cut)
    with pytest.raises(FencedError, match="cut meanwhile"):
        run(log)
    assert kept(log) == [(b"a", b"1"), (b"b", large)]


def test_the_checkpoint_does_not_move_past_a_truncation(log, monkeypatch):
    """D22, D26: also where nothing had to be rewritten, the checkpoint is not moved past a cut."""
    segment(log, (b"a", b"1"), (b"b", b"1"), (b"c", b"1"))
    run(log)
    note = replace.note_cleaned

    def cut(*given, **options):
        log.truncate_to(1)
        put(log, (b"a", b"2"))
        put(log, (b"a", b"3"))
        note(*given, **options)

    monkeypatch.setattr(replace, "note_cleaned", cut)
    monkeypatch.setattr(cleaner.CleanPass, "_is_clean", lambda *_: True)
    with pytest.raises(FencedError, match="meanwhile"):
        run(log)
    monkeypatch.undo()
    log.roll()
    assert inspect(log, START).first_dirty == 1
    run(log)
    assert kept(log) == [(b"a", b"3")]


@pytest.mark.parametrize("goal", [1, 2, 3])
def test_records_that_are_deleted_meanwhile_stay_deleted(log, monkeypatch, goal):
    """D22: whole segments win over the compaction; a part of one is not in its way."""
    segment(log, (b"a", b"1"), (b"b", b"2"))
    segment(log, (b"a", b"3"), (b"c", b"4"))
    swap = replace.Replacement.swap

    def deleted(self, *given, **options):
        trim(log, goal)
        swap(self, *given, **options)

    monkeypatch.setattr(replace.Replacement, "swap", deleted)
    done = try_clean(log, START)
    monkeypatch.undo()

    assert (done.error is None) == (goal < 2)
    run(log)
    assert [row[0] for row in rows(log)] == [one for one in (1, 2, 3) if one >= goal]
    assert log.start_offset() == goal


def test_a_recreated_topic_is_dirty(root, log):
    """D26: the checkpoint goes with the topic."""
    segment(log, (b"a", b"1"), (b"a", b"2"))
    run(log)
    root.delete_topic("t")
    again = make_log(root, COMPACT)
    segment(again, (b"a", b"1"), (b"a", b"2"))
    assert inspect(again, START).first_dirty == 0
    run(again)
    assert kept(again) == [(b"a", b"2")]


@pytest.mark.parametrize("error", [KeyboardInterrupt, StorageError])
def test_a_swap_stands_if_the_call_is_interrupted_after_the_commit(root, log, monkeypatch, error):
    """P1: Ctrl-C right after the commit must not take the new file for one that was given up."""
    segment(log, (b"a", b"1"), (b"a", b"2"))
    flush.flush_up_to(log, 2)
    write = kv.Store.write

    def interrupted(store, step):
        result = write(store, step)
        if store is log.context.state and log.thread_lock.locked():
            raise error("lost")
        return result

    monkeypatch.setattr(kv.Store, "write", interrupted)
    with pytest.raises(error):
        run(log)
    monkeypatch.undo()

    assert kept(log) == [(b"a", b"2")]
    assert len(segment_files(root.path)) == 2
    assert inspect(log, START).first_dirty == 2


def test_turning_compaction_off_ends_it(root, log):
    """D27: at the next chunk."""
    segment(log, (b"a", b"1"), (b"a", b"2"))

    def progress(done, total):
        root.alter_topic("t", {"cleanup.policy": "delete"})

    with pytest.raises(FencedError, match="no longer compacted"):
        run(log, progress=progress)
    assert kept(log) == [(b"a", b"1"), (b"a", b"2")]


def test_the_fence_is_called_for_each_chunk_and_commit(log):
    """R3: who lost the right to maintain the log stops at the next chunk or commit."""
    segment(log, (b"a", b"1"), (b"a", b"2"))
    calls = []

    def fence():
        calls.append(log.thread_lock.locked())
        if log.thread_lock.locked():
            raise FencedError("another owner")

    with pytest.raises(FencedError, match="another owner"):
        run(log, fence=fence)
    assert True in calls
    assert calls.count(False) >= 2
    assert offsets(log) == [0, 1]


def test_only_one_process_compacts_a_partition(log):
    """D4: others skip it, and say so."""
    segment(log, (b"a", b"1"), (b"a", b"2"))
    with replace.rewrite_lock(log):
        done = try_clean(log, START)
    assert "Another process is compacting" in done.why
    assert isinstance(done.error, FencedError)


def test_a_bad_partition_does_not_stop_the_others(root):
    """D4, D13: it is left out from then on; those after it in the order are cleaned."""
    logs = [make_log(root, COMPACT, name) for name in ("bad", "good")]
    for log in logs:
        segment(log, (b"a", b"1"), (b"a", b"2"))
    path = next(one for one in segment_files(root.path) if "bad" in str(one))
    data = bytearray(path.read_bytes())
    good = bytes(data)
    data[-40] ^= 0xFF
    data[700] ^= 0xFF
    path.write_bytes(data)
    failed = {}

    done = clean_round(logs, START, failed)

    assert list(failed) == [logs[0]]
    assert [one.topic for one in done if one.error is None] == ["good"]
    assert kept(logs[1]) == [(b"a", b"2")]
    assert clean_round(logs, START, failed) == []
    path.write_bytes(good)


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path):
    """P10: and when there is room again it goes on."""
    root = open_root(tmp_path / "root", files=FaultyFiles)
    log = make_log(root, COMPACT)
    segment(log, (b"a", b"1"), (b"a", b"2"))
    flush.flush_up_to(log, 2)
    files = root.context.files
    files.fail_at(0, errno.ENOSPC, only={"write"}, forever=True)
    with pytest.raises(StorageError):
        run(log)
    files.heal()

    assert kept(log) == [(b"a", b"1"), (b"a", b"2")]
    assert healthy(root)
    run(log)
    assert kept(log) == [(b"a", b"2")]
    root.close()


def test_the_throttle_limits_bytes_per_second():
    """io.max.bytes.per.second: what was read is paid for by waiting."""
    now, waits = [0.0], []

    def wait(seconds):
        waits.append(seconds)
        now[0] += seconds

    throttle = Throttle(1000, wait, lambda: now[0])
    for _ in range(4):
        throttle.spend(500)
    assert sum(waits) == pytest.approx(2.0)
    Throttle(inf, wait).spend(1 << 40)
    assert sum(waits) == pytest.approx(2.0)


@pytest.mark.parametrize("bad", [{"dedupe.buffer.size": 0}, {"load": 1}, {"io.buffer.size": "x"}])
def test_invalid_cleaner_settings_are_refused(bad):
    """With the names that there are."""
    with pytest.raises(InvalidConfigError):
        MaintenanceConfig.parse({f"log.cleaner.{name}": value for name, value in bad.items()})


# Keys


def test_different_keys_have_different_hashes():
    """Of all lengths around a block's, and those that differ in zeros at the end only."""
    lengths = [0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 4096, 4097, 70_000]
    keys = [bytes(length) for length in lengths]
    keys += [bytes(length - 1) + b"\1" for length in lengths if length]
    keys += [b"\1" + bytes(length - 1) for length in lengths if length > 1]
    high, low = KeyHasher().keys(pa.array(keys))
    assert len(set(zip(high.tolist(), low.tolist(), strict=True))) == len(set(keys))


def test_the_hash_of_a_key_does_not_depend_on_its_chunk():
    """Alone, among others of its length, among longer ones, and in a slice."""
    hasher = KeyHasher()
    keys = [b"k%d" % (number * number) for number in range(200)] + [b"x" * 300, None, b""]
    high, low = hasher.keys(pa.array(keys))
    for place in (0, 7, 150, 200, 202):
        for found in (pa.array([keys[place]]), pa.array(keys).slice(place, 1)):
            assert [hasher.keys(found)[0][0], hasher.keys(found)[1][0]] == [high[place], low[place]]
    even = hasher.keys(pa.array(keys[4:10]))
    assert even[0].tolist() == high[4:10].tolist()


def test_the_offset_map_takes_the_rows_before_the_first_key_that_does_not_fit():
    """D7: of a chunk the first rows, up to the first new key that is one too many."""
    hasher = KeyHasher()
    keys = [b"a", b"b", b"a", b"c", b"a", b"d"]
    high, low = hasher.keys(pa.array(keys))
    for room in (1, 2, 3, 4):
        known = OffsetMap(24 * 8 * room, 1.0, 10, 16)
        known.capacity = room
        fitting = known.add(high, low, offsets_from(10, 6))
        assert fitting == {1: 1, 2: 3, 3: 5, 4: 6}[room]
        ends = known.ends(high, low).tolist()
        last = {key: 11 + place for place, key in enumerate(keys[:fitting])}
        assert ends == [last.get(key, 0) for key in keys]


def offsets_from(first, count):
    import numpy as np

    return np.arange(first, first + count)


def test_the_defaults_of_compaction_are_kafkas():
    """The defaults are Kafka's."""
    config = TopicConfig()
    assert (config.min_cleanable_dirty_ratio, config.delete_retention_ms) == (0.5, DAY)
    assert MaintenanceConfig().log_cleaner_dedupe_buffer_size == 134_217_728
