"""Compaction: which partitions, which records, which tombstones, what never changes (D1-D27)."""

from __future__ import annotations

from math import inf

import pyarrow as pa
import pytest
from support.clock import START
from support.roots import (
    bases,
    encoded,
    make_log,
    offsets,
    rows,
    segment_files,
)

from embedlog import batch, keyspace
from embedlog.compaction import (
    CleanOptions,
    clean,
    clean_round,
    cleaner,
    explain,
    inspect,
    select_due,
    try_clean,
)
from embedlog.compaction.key_hash import KeyHasher
from embedlog.compaction.rewriter import TARGET_BYTES, Rewriter
from embedlog.compaction.scanner import SegmentScanner
from embedlog.config import LONG_MAX, MaintenanceConfig, TopicConfig
from embedlog.errors import FencedError, InvalidConfigError, InvalidRecordError
from embedlog.files.throttle import Throttle
from embedlog.partition import flush, replace
from embedlog.partition.log_start import move_log_start
from embedlog.partition.producer_state import expire_producers
from embedlog.partition.state import max_segment_ms

COMPACT = {"cleanup.policy": "compact", "delete.retention.ms": 1000, "file.delete.delay.ms": 0}
DAY = 86_400_000


def put(log, *pairs, at=None, **options):
    """Append (key, value) pairs as one batch."""
    keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    time = log.context.clock() if at is None else at
    return log.append([encoded(*values, keys=keys, at=time, **options)])


def segment(log, *pairs, **options):
    """Append each pair as a batch of its own, and roll."""
    for pair in pairs:
        put(log, pair, **options)
    log.roll()


def compact(log, **options):
    return clean(log, log.context.clock(), CleanOptions(**options))


def pairs_of(log):
    """Return the (key, value) pairs of the log."""
    return [(row[2], row[3]) for row in rows(log)]


def keys_and_offsets(log):
    return [(int(row[2]), row[0]) for row in rows(log)]


def set_cleaned_offset(log, offset):
    """Move the checkpoint by hand."""
    log.context.state.write(lambda txn: keyspace.CLEANED_OFFSETS.put(txn, log.key, value=offset))


def batches_of(log):
    batches, reader = [], log.reader(log.start_offset())
    while reader.offset < log.end_offset():
        batches += reader.read()
    return batches


def epochs_of(log):
    """Return the leader epoch of each offset."""
    return {
        offset: decoded.leader_epoch
        for decoded in batches_of(log)
        for offset in decoded.offsets().to_pylist()
    }


@pytest.fixture
def log(root):
    """A compacted partition; healthy when the test is done."""
    return make_log(root, COMPACT)


# The cleanable range, and the order of the partitions


def test_the_active_segment_is_never_cleaned(log):
    """D2: its records stay dirty, and an older value of its keys stays as well."""
    segment(log, (b"a", b"1"), (b"a", b"2"))
    put(log, (b"a", b"3"))
    put(log, (b"a", b"4"))

    compact(log)

    assert pairs_of(log) == [(b"a", b"2"), (b"a", b"3"), (b"a", b"4")]


@pytest.mark.parametrize("checkpoint", [7, 1 << 40])
def test_a_checkpoint_outside_of_the_log_starts_over(log, checkpoint):
    """D1: a checkpoint beyond the end is invalid."""
    segment(log, (b"a", b"1"))
    set_cleaned_offset(log, checkpoint)
    assert inspect(log, START).first_dirty == 0


def test_a_checkpoint_below_the_start_moves_up_to_it(log):
    """D1: after records were deleted."""
    segment(log, (b"a", b"1"), (b"b", b"2"), (b"a", b"3"))
    set_cleaned_offset(log, 1)
    move_log_start(log, 2)
    assert (inspect(log, START).start, inspect(log, START).first_dirty) == (2, 2)


def test_records_younger_than_the_lag_are_not_compacted(root, clock):
    """D2: the range ends before the first segment whose youngest record is too young."""
    log = make_log(root, {**COMPACT, "min.compaction.lag.ms": 100})
    segment(log, (b"a", b"1"), (b"a", b"2"), at=START)
    segment(log, (b"a", b"3"), (b"a", b"4"), at=START + 50)
    segment(log, (b"a", b"5"), (b"a", b"6"), at=START)

    clock.set(START + 99)
    assert inspect(log, clock()).first_uncleanable == 0
    clock.set(START + 149)
    assert inspect(log, clock()).first_uncleanable == 2
    assert inspect(log, clock()).too_young_bytes > 0
    compact(log)
    assert pairs_of(log) == [(b"a", b"%d" % number) for number in (2, 3, 4, 5, 6)]
    clock.set(START + 150)
    compact(log)
    assert pairs_of(log) == [(b"a", b"6")]


def test_a_partition_is_due_when_enough_of_it_is_dirty(root):
    """D3: if the ratio of cleanable bytes is strictly larger than the setting."""
    log = make_log(root, {**COMPACT, "min.cleanable.dirty.ratio": 0.5})
    segment(log, (b"a", b"1"), (b"b", b"2"))
    assert inspect(log, START).cleanable_ratio == 1.0
    assert inspect(log, START).due
    compact(log)
    assert not inspect(log, START).due
    segment(log, (b"a", b"2"))
    cleanable = inspect(log, START)
    assert cleanable.due == (cleanable.cleanable_bytes > cleanable.clean_bytes)


def test_an_overdue_partition_is_due_whatever_its_ratio(root, clock):
    """D3, D4, D5: overdue partitions go first, but only if there is something to clean."""
    rarely = {**COMPACT, "min.cleanable.dirty.ratio": 1.0, "max.compaction.lag.ms": 100}
    log, other = make_log(root, rarely, "late"), make_log(root, COMPACT, "dirty")
    for partition in (log, other):
        segment(partition, (b"a", b"1"), (b"a", b"2"))
    assert [cleanable.log for cleanable in select_due([log, other], clock(), {})] == [other]

    clock.advance(101)

    assert [cleanable.log for cleanable in select_due([other, log], clock(), {})] == [log, other]
    compact(log)
    clock.advance(DAY)
    assert not inspect(log, clock()).due


def test_the_lag_rolls_a_segment_before_it_is_overdue(root):
    """D6, A16: once per max.compaction.lag.ms; a large jitter does not roll at every append."""
    settings = {"max.compaction.lag.ms": 100, "segment.jitter.ms": 5000}
    log = make_log(root, {**COMPACT, **settings})
    log.refresh()
    assert 0 < max_segment_ms(log.config, log.active_segment) <= 100
    for number in range(4):
        put(log, (b"a", b"%d" % number), at=START)
    assert bases(log) == [0]
    put(log, (b"a", b"4"), at=START + 101)
    assert bases(log) == [0, 4]


def test_the_dirtiest_is_next(root):
    """D4: the one with the largest share of dirty bytes, not with the most dirty bytes."""
    mostly_clean, dirty = make_log(root, COMPACT, "mostly-clean"), make_log(root, COMPACT, "dirty")
    segment(mostly_clean, *[(b"%d" % number, b"x" * 100) for number in range(8)])
    compact(mostly_clean)
    segment(mostly_clean, *[(b"%d" % number, b"x" * 100) for number in range(30)])
    segment(dirty, (b"a", b"1"))
    due = select_due([mostly_clean, dirty], START, {})
    assert [cleanable.log for cleanable in due] == [dirty, mostly_clean]
    assert due[0].cleanable_ratio == 1.0 > due[1].cleanable_ratio


def test_topics_that_are_not_compacted_are_skipped(root):
    """C6: `clean` refuses them too."""
    log = make_log(root)
    segment(log, (b"a", b"1"), (b"a", b"2"))
    assert select_due([log], START, {}) == []
    with pytest.raises(FencedError, match="no longer compacted"):
        compact(log)


@pytest.mark.parametrize(
    ("config", "pairs", "reason"),
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
def test_explain_says_why_a_partition_is_compacted_or_not(root, config, pairs, reason):
    """For every reason to clean a partition, and not to."""
    log = make_log(root, {**COMPACT, **config})
    if pairs:
        segment(log, *pairs, at=START)
    assert reason in explain(log, START + 6)


def test_explain_mentions_the_active_segment(log):
    """The most common surprise: nothing was rolled yet."""
    put(log, (b"a", b"1"))
    assert "active segment" in explain(log, START)


# Which records are kept


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_batches_keep_their_codec(log, compression):
    """Compressed batches stay compressed."""
    values = [b"x" * 500] * 9
    put(log, *[(b"%d" % number, value) for number, value in enumerate(values)])
    put(log, *[(b"%d" % number, value) for number, value in enumerate(values)])
    log.roll()
    compact(log)
    put(log, (b"0", b"y" * 999), compression=compression)
    log.roll()
    compact(log)
    assert {decoded.codec for decoded in batches_of(log)} == {"none", compression}


def test_log_append_times_are_kept(root, clock):
    """A7: each record keeps its append time, also if batches are merged."""
    log = make_log(root, {**COMPACT, "message.timestamp.type": "LogAppendTime"})
    for number in range(4):
        clock.advance(10)
        put(log, (b"%d" % number, b"v"), at=5)
    log.roll()

    compact(log)

    assert [row[1] for row in rows(log)] == [START + 10 * number for number in (1, 2, 3, 4)]
    (merged,) = [decoded for decoded in batches_of(log) if decoded.count]
    assert merged.is_log_append_time


@pytest.mark.parametrize(
    ("slots", "first", "expected", "first_dirty"),
    [
        (1, 2, [(1, 1), (0, 2), (1, 3), (0, 4)], 3),
        (1, 3, [(0, 0), (0, 2), (1, 3), (0, 4)], 4),
        (3, 2, [(1, 3), (0, 4)], 5),
    ],
)
def test_a_full_offset_map_ends_the_pass(log, slots, first, expected, first_dirty, monkeypatch):
    """D7: the keys 0, 1, 0, 1, 0; a pass ends where the map is full; the next one begins there."""
    segment(log, *[(b"%d" % (number % 2), b"v%d" % number) for number in range(5)])
    set_cleaned_offset(log, first)
    only_one_pass(monkeypatch)
    settings = MaintenanceConfig(
        log_cleaner_dedupe_buffer_size=24 * slots + 9, log_cleaner_io_buffer_load_factor=1.0
    )

    with pytest.raises(StopIteration):
        compact(log, settings=settings)

    assert keys_and_offsets(log) == expected
    assert inspect(log, START).first_dirty == first_dirty


def only_one_pass(monkeypatch):
    """Raise `StopIteration` before the second pass."""
    passes = iter([1])

    def inspect_once(*arguments):
        next(passes)
        return inspect(*arguments)

    monkeypatch.setattr(cleaner, "inspect", inspect_once)


def test_records_without_a_key_are_removed_when_a_topic_becomes_compacted(root):
    """D9, D27: new ones are refused (A6), and the stored ones are removed."""
    log = make_log(root)
    put(log, (None, b"1"), (b"a", b"2"), (None, None))
    root.alter_topic("t", {"cleanup.policy": "compact"})
    with pytest.raises(InvalidRecordError):
        put(log, (None, b"3"))
    log.roll()

    result = compact(log)

    assert pairs_of(log) == [(b"a", b"2")]
    assert result.keyless == 2


def test_small_segments_become_one(root):
    """D12: up to the segment size; the first base offset names the segment."""
    log = make_log(root, {**COMPACT, "segment.bytes": 10_000})
    for number in range(40):
        segment(log, (b"%d" % number, b"x" * 100))
    assert len(bases(log)) == 41

    compact(log)

    assert 2 <= len(bases(log)) <= 6
    assert bases(log)[0] == 0
    sizes = [info.size for info in log.segments.values() if info.sealed]
    assert all(size <= 10_000 for size in sizes)
    assert [row[0] for row in rows(log)] == list(range(40))


def test_many_batches_of_one_record_become_few(log):
    """A producer of single records leaves batches that are mostly header."""
    for number in range(300):
        put(log, (b"%d" % number, b"v"))
    log.roll()
    before = log.size_bytes()

    compact(log)

    assert len(batches_of(log)) == 1
    assert log.size_bytes() < before / 10


def test_a_merged_batch_is_not_too_large(root):
    """A lookup reads a whole batch, so a batch is no larger than the topic allows."""
    log = make_log(root, {**COMPACT, "max.message.bytes": 4000})
    for number in range(50):
        put(log, (b"%d" % number, b"x" * 400))
    log.roll()
    compact(log)
    assert max(decoded.size for decoded in batches_of(log)) < 6000
    assert TARGET_BYTES <= 1 << 20


def test_a_merged_segment_is_as_old_as_its_sources(root, clock):
    """D12, C2: otherwise retention would count its age from the compaction."""
    log = make_log(root, COMPACT)
    segment(log, (b"a", b"1"))
    clock.advance(DAY)
    segment(log, (b"b", b"2"))
    clock.advance(DAY)

    compact(log)

    (merged, _) = log.segments.values()
    assert (merged.created_ms, merged.max_timestamp) == (START, START + DAY)
    assert merged.appended_ms == START + DAY


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_batch_may_be_larger_than_the_buffer(root, log, compression):
    """D13: larger than the read buffer, and larger than the topic now allows."""
    large = [(b"%d" % (number % 3), bytes(50_000)) for number in range(9)]
    put(log, *large, compression=compression)
    put(log, *large, compression=compression)
    root.alter_topic("t", {"max.message.bytes": 60_000})
    log.roll()

    compact(log, settings=MaintenanceConfig(log_cleaner_io_buffer_size=1))

    assert keys_and_offsets(log) == [(0, 15), (1, 16), (2, 17)]


def test_empty_batches_have_the_leader_epoch_around_them(log, clock):
    """A37: recovery truncates at a batch whose epoch is lower than that of the one before."""
    for _ in range(3):
        put(log, (b"a", b"1"), (b"b", b"1"))
        log.truncate_to(log.end_offset() - 1)
    log.roll()
    segment(log, (b"c", b"1"), (b"c", None))
    segment(log, (b"c", b"1"), (b"c", None))
    flush.flush_up_to(log, log.end_offset())
    with replace.rewrite_lock(log):
        remove_all_records(log, 1)

    epochs = [decoded.leader_epoch for decoded in batches_of(log)]
    assert epochs == sorted(epochs)
    assert epochs[-1] == log.tail().leader_epoch > 0


def remove_all_records(log, number):
    """Rewrite one segment without records, as a pass does if all its keys have newer records."""
    info = list(log.segments.values())[number]
    replacement = replace.Replacement(log, info.base_offset, log.active_segment)
    rewriter = Rewriter(replacement, info.base_offset, batch.schema(offsets=True), 1 << 20)
    for chunk in SegmentScanner(log, 1 << 20, lambda size: None).chunks(info):
        rewriter.come_to(chunk.batches[0].leader_epoch)
    rewriter.finish(info.next_offset)
    replacement.swap([info])


def test_leader_epochs_stay_with_their_records(log):
    """A37: readers see where the log was truncated, so batches of two epochs are not merged."""
    for number in range(3):
        put(log, (b"%d" % number, b"v"), (b"gone%d" % number, b"v"))
        log.truncate_to(log.end_offset() - 1)
        put(log, (b"again%d" % number, b"v"))
    expected = epochs_of(log)
    log.roll()

    compact(log)

    epochs = epochs_of(log)
    assert epochs == {offset: expected[offset] for offset in epochs}
    assert len(set(epochs.values())) > 1


def test_a_clean_partition_is_not_rewritten_again(root):
    """A clean and large enough segment is not rewritten; earlier passes merge up to that size."""
    log = make_log(root, {**COMPACT, "segment.bytes": 4000})
    for number in range(60):
        put(log, (b"%d" % (number % 20), b"x" * 100))
    log.roll()
    compact(log)
    compact(log)
    names = [path.name for path in segment_files(root.path)]

    assert len(names) <= 3
    assert compact(log).segments_before == 0
    assert [path.name for path in segment_files(root.path)] == names


# Producers


def test_the_last_batch_of_a_producer_keeps_its_numbers(root, log):
    """D11: it stays, even empty, while the producer is remembered: a truncation needs it."""
    for number in range(3):
        put(log, (b"a", b"1"), (b"b", b"2"), producer=(7, 0, 2 * number))
    put(log, (b"a", b"3"), (b"b", b"4"))
    log.roll()

    compact(log)

    numbered = [decoded for decoded in batches_of(log) if decoded.producer_id == 7]
    assert [(decoded.base_offset, decoded.next_offset, decoded.count) for decoded in numbered] == [
        (4, 6, 0)
    ]
    put(log, (b"c", b"5"), producer=(7, 0, 6))
    log.truncate_to(8)
    (receipt,) = put(log, (b"a", b"1"), (b"b", b"2"), producer=(7, 0, 4))
    assert receipt.duplicate
    assert receipt.base_offset == 4


def test_batches_of_expired_producers_are_merged(root, clock, log):
    """D11, G19: an empty batch is not kept forever."""
    put(log, (b"a", b"1"), producer=(7, 0, 0))
    put(log, (b"a", b"2"))
    log.roll()
    clock.advance(2 * DAY)
    expire_producers(log, clock())

    compact(log)

    assert [decoded.producer_id for decoded in batches_of(log)] == [None]


# Tombstones


def test_a_tombstone_is_removed_in_two_passes(log, clock):
    """D16-D18: it deletes at once, and stays for delete.retention.ms after the first pass."""
    segment(log, (b"a", b"1"), (b"b", b"2"), (b"a", None))
    compact(log)
    assert pairs_of(log) == [(b"b", b"2"), (b"a", None)]

    clock.advance(999)
    compact(log)
    assert pairs_of(log) == [(b"b", b"2"), (b"a", None)]
    clock.advance(1)
    result = compact(log)

    assert pairs_of(log) == [(b"b", b"2")]
    assert result.tombstones == 1
    assert log.end_offset() == 3


def test_a_tombstone_may_stay_forever(root, clock):
    """D17: the largest delete.retention.ms does not overflow."""
    log = make_log(root, {**COMPACT, "delete.retention.ms": LONG_MAX})
    segment(log, (b"a", b"1"), (b"a", None))
    compact(log)
    clock.advance(1000 * DAY)
    compact(log)
    assert pairs_of(log) == [(b"a", None)]


def test_tombstones_past_the_end_of_a_pass_get_no_delete_horizon(log, clock, monkeypatch):
    """D17, D18: the pass did not clean them."""
    put(log, (b"a", b"1"), (b"a", None), (b"b", b"1"), (b"b", None))
    log.roll()
    only_one_pass(monkeypatch)
    settings = MaintenanceConfig(log_cleaner_dedupe_buffer_size=1)

    with pytest.raises(StopIteration):
        compact(log, settings=settings)

    assert delete_horizons(log) == [(b"a", 1, START + 1000), (b"b", 2, None), (b"b", 3, None)]


def delete_horizons(log):
    """Return (key, offset, delete horizon) of each record."""
    return [
        (key, offset, decoded.delete_horizon)
        for decoded in batches_of(log)
        for key, offset in zip(decoded.lists()[1], decoded.offsets().to_pylist(), strict=True)
    ]


# Concurrent changes, and failures


def test_markers_of_transactions_are_kept(log):
    """D21: with any key; they do not count as records of that key."""
    put(log, (b"a", b"1"))
    marker = encoded(None, keys=[b"a"])
    marker.flags |= batch.CONTROL
    log.append([marker])
    log.roll()

    compact(log)

    assert [row[0] for row in rows(log)] == [0, 1]
    assert [bool(decoded.flags & batch.CONTROL) for decoded in batches_of(log)] == [False, True]


def test_a_recreated_topic_is_dirty(root, log):
    """D26: the checkpoint is deleted with the topic."""
    segment(log, (b"a", b"1"), (b"a", b"2"))
    compact(log)
    root.delete_topic("t")
    recreated = make_log(root, COMPACT)
    segment(recreated, (b"a", b"1"), (b"a", b"2"))
    assert inspect(recreated, START).first_dirty == 0
    compact(recreated)
    assert pairs_of(recreated) == [(b"a", b"2")]


def test_the_fence_is_called_for_each_chunk_and_commit(log):
    """R3: an owner that was fenced stops at the next chunk or commit."""
    segment(log, (b"a", b"1"), (b"a", b"2"))
    calls = []

    def fence():
        calls.append(log.thread_lock.locked())
        if log.thread_lock.locked():
            raise FencedError("another owner")

    with pytest.raises(FencedError, match="another owner"):
        compact(log, fence=fence)
    assert True in calls
    assert calls.count(False) >= 2
    assert offsets(log) == [0, 1]


def test_only_one_process_compacts_a_partition(log):
    """D4: the others skip it, with the reason."""
    segment(log, (b"a", b"1"), (b"a", b"2"))
    with replace.rewrite_lock(log):
        result = try_clean(log, START)
    assert "Another process is compacting" in result.why
    assert isinstance(result.error, FencedError)


def test_a_bad_partition_does_not_stop_the_others(root):
    """D4, D13: later rounds skip it; the partitions after it are cleaned."""
    logs = [make_log(root, COMPACT, name) for name in ("bad", "good")]
    for log in logs:
        segment(log, (b"a", b"1"), (b"a", b"2"))
    path = next(path for path in segment_files(root.path) if "bad" in str(path))
    data = bytearray(path.read_bytes())
    original = bytes(data)
    data[-40] ^= 0xFF
    data[700] ^= 0xFF
    path.write_bytes(data)
    failed = {}

    results = clean_round(logs, START, failed)

    assert list(failed) == [logs[0]]
    assert [result.topic for result in results if result.error is None] == ["good"]
    assert pairs_of(logs[1]) == [(b"a", b"2")]
    assert clean_round(logs, START, failed) == []
    path.write_bytes(original)


def test_the_throttle_limits_bytes_per_second():
    """io.max.bytes.per.second: each read is followed by a wait."""
    time, waits = [0.0], []

    def wait(seconds):
        waits.append(seconds)
        time[0] += seconds

    throttle = Throttle(1000, wait, lambda: time[0])
    for _ in range(4):
        throttle.spend(500)
    assert sum(waits) == pytest.approx(2.0)
    Throttle(inf, wait).spend(1 << 40)
    assert sum(waits) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "settings", [{"dedupe.buffer.size": 0}, {"load": 1}, {"io.buffer.size": "x"}]
)
def test_invalid_cleaner_settings_are_refused(settings):
    """Invalid values and unknown names."""
    with pytest.raises(InvalidConfigError):
        MaintenanceConfig.parse({f"log.cleaner.{name}": value for name, value in settings.items()})


# Keys


def test_different_keys_have_different_hashes():
    """Keys of all lengths around those of a block, and keys that differ only in trailing zeros."""
    lengths = [0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 4096, 4097, 70_000]
    keys = [bytes(length) for length in lengths]
    keys += [bytes(length - 1) + b"\1" for length in lengths if length]
    keys += [b"\1" + bytes(length - 1) for length in lengths if length > 1]
    high, low = KeyHasher().keys(pa.array(keys))
    assert len(set(zip(high.tolist(), low.tolist(), strict=True))) == len(set(keys))


def test_the_defaults_of_compaction_are_kafkas():
    """The defaults are Kafka's."""
    config = TopicConfig()
    assert (config.min_cleanable_dirty_ratio, config.delete_retention_ms) == (0.5, DAY)
    assert MaintenanceConfig().log_cleaner_dedupe_buffer_size == 134_217_728
