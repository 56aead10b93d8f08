"""What retention deletes and what it keeps: time, size, budgets, groups and leases."""

from __future__ import annotations

import logging
import os
import random
import shutil
from contextlib import closing

import pytest
from support.clock import START, ManualClock, MovedUptime
from support.roots import (
    abandon,
    bases,
    encoded,
    fill,
    make_log,
    offsets,
    open_root,
    segment_files,
)
from support.tiers import choose

from embedlog.catalog import SegmentInfo
from embedlog.config import TopicConfig
from embedlog.errors import (
    DurabilityError,
    FencedError,
    InvalidConfigError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)
from embedlog.files import Files
from embedlog.groups import offsets as committed
from embedlog.maintenance.owner import BoundedClock
from embedlog.partition import log_start, tail
from embedlog.partition.leases import hold, leases
from embedlog.partition.state import CLOCK_READING, MOST_AHEAD_MS
from embedlog.publish import staging, transaction
from embedlog.publish.transaction import Publication
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.retention import delete_records, describe, policy, retain
from embedlog.retention.policy import RetainedSegment
from embedlog.root.repair import repair_root

SIZE = encoded(b"v0").size
DAY = 86_400_000
HOUR = 3_600_000
PARTITION = TopicPartition("t", 0)
EVENT = 1_372_636_800_000
"""Ten years before `START`."""

either_clock = pytest.mark.parametrize("by", ["append", "record"])


def config(**changes):
    """Return settings: two records in a segment, files unlinked at once, unlimited retention."""
    defaults = {"segment.bytes": 2 * SIZE, "file.delete.delay.ms": 0, "retention.ms": -1}
    return defaults | {name.replace("_", "."): value for name, value in changes.items()}


def make(root, count=10, every=HOUR, topic="t", **changes):
    """Create a topic of one partition with a record per hour."""
    log = make_log(root, config(**changes), topic)
    for number in range(count):
        log.append([encoded(b"v%d" % number, at=START + number * every)])
    return log


def commit(root, group, offset, log):
    row = committed.encode(OffsetAndMetadata(offset, "", None), START)
    root.context.live.write(lambda txn: committed.put(txn, group.encode(), {log.key: row}))


# By time


def test_a_segment_is_deleted_once_its_youngest_record_has_expired(root):
    """C2: its age must exceed retention.ms, not only equal it."""
    log = make(root, retention_ms=DAY)

    assert retain(root, START + HOUR + DAY) == []
    assert retain(root, START + HOUR + DAY + 1)[0][2:4] == (2, 1)
    assert offsets(log) == list(range(2, 10))
    assert len(segment_files(root.path)) == 4


def test_minus_one_keeps_everything(root):
    """C2: retention.ms=-1 is unlimited."""
    make(root)

    assert retain(root, START + 10_000 * DAY) == []


def test_an_expired_active_segment_is_rolled_and_deleted(root):
    """C4: offsets continue; the new empty segment is never deleted."""
    log = make(root, count=3, retention_ms=DAY)
    retain(root, START + 10 * DAY)

    assert (log.start_offset(), log.end_offset(), bases(log)) == (3, 3, [3])
    assert retain(root, START + 20 * DAY) == []
    assert log.append([encoded(b"x")])[0].base_offset == 3


def test_an_append_during_the_round_keeps_the_active_segment(root, monkeypatch):
    """C4: a young record was appended to it after the round had begun."""
    log = make(root, count=3, retention_ms=DAY)
    count_due = policy.count_due

    def count_and_append(parts, config, now_ms):
        count = count_due(parts, config, now_ms)
        log.append([encoded(b"v9", at=now_ms)])
        return count

    monkeypatch.setattr(policy, "count_due", count_and_append)
    retain(root, START + 3 * DAY)

    assert offsets(log) == [2, 3]


def test_a_second_round_changes_nothing(root):
    """C5: it does not commit a transaction."""
    make(root, retention_ms=DAY, retention_bytes=3 * SIZE)
    now = START + 5 * HOUR + DAY
    retain(root, now)
    before = root.context.state.version()

    assert retain(root, now) == []
    assert root.context.state.version() == before


@either_clock
def test_a_timestamp_in_the_future_counts_as_the_time_of_the_append(root, clock, by):
    """P17, C2: a wrong clock delays deletion, but not for ever."""
    log = make_log(root, config(retention_ms=DAY, segment_ms=10_000 * DAY, retention_clock=by))
    for at in (0, 1000 * DAY):
        clock.advance(HOUR)
        log.append([encoded(b"x", at=START + at)])
    appended = clock()

    assert retain(root, appended + DAY) == []
    assert retain(root, appended + DAY + 1)[0].start_offset == 2


@either_clock
def test_a_record_without_timestamp_counts_from_its_append(by):
    """B12: if that is unknown it counts from the sealing; if both are unknown, it stays."""
    end = tail.Tail(9, 30, 30, 0, 30, 0, 0, 0, 0)
    common = {"size": 5, "end_position": 5, "max_timestamp": -1}
    segments = [
        SegmentInfo(0, 1, 100, 10, **common, appended_ms=150),
        SegmentInfo(10, 2, 200, 20, **common | {"max_timestamp": None}),
        SegmentInfo(20, 3, 300, 30, **common),
        SegmentInfo(30, 9, 0),
    ]
    retained = policy.retained_segments(segments, end, 1000, by)

    assert [part.timestamp for part in retained] == [150, 300, None]
    assert policy.count_by_time(retained, 0, 10**15) == 2


# retention.clock


def test_old_events_stay_for_retention_ms_after_their_append(root, clock, caplog):
    """C2: by default it counts from the append, if that is later than the record's time."""
    log = make_log(root, config(retention_ms=7 * DAY))
    for number in range(5):
        log.append([encoded(b"x", at=EVENT + number)])
        clock.advance(DAY)
    with caplog.at_level(logging.WARNING):
        assert retain(root, clock()) == []
        # The second segment got its last record on the fourth day.
        assert retain(root, START + 8 * DAY) == []
        assert retain(root, START + 8 * DAY + 1)[0].start_offset == 2
        assert retain(root, START + 11 * DAY)[0].start_offset == 4
        assert retain(root, START + 11 * DAY + 1)[0].start_offset == 5

    assert caplog.text == ""


def test_with_the_record_clock_old_events_are_deleted_at_once(root, clock):
    """C2: this is Kafka's rule; the setting takes effect at the next round (C10)."""
    log = make_log(root, config(retention_ms=7 * DAY))
    for number in range(5):
        log.append([encoded(b"x", at=EVENT + number)])
    assert retain(root, clock()) == []
    root.alter_topic("t", {"retention.clock": "record"})

    assert retain(root, clock())[0].start_offset == 5


class Model:
    """The rule of the documentation, for segments of two records."""

    def __init__(self, by):
        self.by, self.end, self.segments = by, 0, []

    def append(self, at, now_ms):
        if not self.segments or len(self.segments[-1]) == 2:
            self.segments.append([])
        self.segments[-1].append(at if self.by == "record" else max(at, now_ms))
        self.end += 1

    def retain(self, longest_ms, now_ms):
        while self.segments and now_ms - max(self.segments[0]) > longest_ms:
            del self.segments[0]

    @property
    def start(self):
        return self.end - sum(map(len, self.segments))


@either_clock
@pytest.mark.parametrize("seed", range(choose(quick=4, all=10)))
def test_a_round_deletes_the_same_as_a_simple_model(root, clock, by, seed):
    """C2: random timestamps in the past, pauses, and rounds between appends."""
    rng = random.Random(seed)
    settings = config(retention_ms=7 * DAY, retention_clock=by, segment_ms=10_000 * DAY)
    log, model = make_log(root, settings), Model(by)
    for number in range(40):
        clock.advance(rng.randrange(2 * DAY))
        timestamp = clock() - rng.choice((0, DAY, 3650 * DAY)) - rng.randrange(3 * DAY)
        log.append([encoded(b"v%02d" % number, at=timestamp)])
        model.append(timestamp, clock())
        if rng.random() < 0.5:
            retain(root, clock())
            model.retain(7 * DAY, clock())
            assert (log.start_offset(), log.end_offset()) == (model.start, model.end)


# Append times after a restart, a crash or a repair


def appended_at(log, root):
    """Return the append time of each segment that retention uses."""
    log.refresh()
    retained = policy.retained_segments(list(log.segments.values()), log.tail(), root.clock())
    return [part.timestamp for part in retained]


def simulate_reboot(path):
    """Replace the boot id, so that `live` belongs to an earlier boot."""
    (path / "live" / "boot").write_bytes(b"another boot")


def copy_and_touch(path):
    """Copy a root and touch a segment; return the path of the copy."""
    target = path.with_name("copied")
    shutil.copytree(path, target)
    os.utime(next(target.glob("topics/*/*/*.arrows")), (0, 0))
    return target


def damage_state(path):
    """Damage `state`, so that the next open restores its copy."""
    data = bytearray((path / "state" / "data.mdb").read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    (path / "state" / "data.mdb").write_bytes(data)
    return path


def make_old_events(root, clock, count=5):
    """Append events of ten years ago, one per day."""
    log = make_log(root, config(retention_ms=7 * DAY))
    for number in range(count):
        clock.advance(DAY)
        log.append([encoded(b"v%d" % number, at=EVENT + number)])
    return log


def test_every_append_updates_the_append_time(root, clock):
    """C2: on the fast path and the general one, with a producer, and for several batches."""
    log = make_log(root, config(segment_bytes=1 << 20))
    appends = [
        [encoded(b"first of the segment", at=EVENT)],
        [encoded(b"short", at=EVENT)],
        [encoded(b"short", at=EVENT, producer=(7, 0, 0))],
        [encoded(b"short", at=EVENT, producer=(7, 0, 1))],
        [encoded(b"several", at=EVENT), encoded(b"several", at=EVENT)],
        [encoded(b"headers", at=EVENT, headers=[[("h", b"")]])],
    ]
    for batches in appends:
        clock.advance(HOUR)
        log.append(batches)
        assert log.tail().appended_ms == clock()
    assert appended_at(log, root)[-1] == clock()


APPEND_TIMES = [START + 2 * DAY, START + 4 * DAY, START + 5 * DAY]


@pytest.mark.parametrize(
    "event", [lambda path: path, copy_and_touch, damage_state, simulate_reboot]
)
def test_after_a_clean_close_the_append_times_are_exact(tmp_path, clock, event):
    """B12: also after a copy of the root, a restore of `state`, or a reboot."""
    path = tmp_path / "root"
    root = open_root(path, clock=clock)
    make_old_events(root, clock)
    root.close()
    path = event(path) or path
    clock.advance(3 * DAY)
    for _ in range(2):
        root = open_root(path, clock=clock)
        assert appended_at(root.partition("t", 0), root) == APPEND_TIMES
        root.close()


def test_after_a_power_cut_unflushed_segments_count_from_the_recovery(tmp_path, clock):
    """P4: from the first recovery only, or a daily reboot would keep them for ever."""
    root = open_root(tmp_path, clock=clock)
    make_old_events(root, clock)
    abandon(root)
    clock.advance(3 * DAY)
    for _ in range(3):
        simulate_reboot(tmp_path)
        root = open_root(tmp_path, clock=clock)
        assert appended_at(root.partition("t", 0), root) == [*APPEND_TIMES[:2], START + 8 * DAY]
        abandon(root)
        clock.advance(DAY)
    root = open_root(tmp_path, clock=clock)
    assert retain(root, START + 15 * DAY)[0].start_offset == 4
    assert retain(root, START + 15 * DAY + 1)[0].start_offset == 5
    root.close()


def test_segments_unknown_to_a_restored_state_count_from_the_restore(tmp_path, clock):
    """They are not deleted earlier than promised, and do not stay for ever."""
    root = open_root(tmp_path, clock=clock)
    make_old_events(root, clock, 1)
    root.close()
    root = open_root(tmp_path, clock=clock)
    for number in range(1, 6):
        clock.advance(DAY)
        root.partition("t", 0).append([encoded(b"v%d" % number, at=EVENT + number)])
    root.flush()
    abandon(root)
    damage_state(tmp_path)
    clock.advance(DAY)
    root = open_root(tmp_path, clock=clock)

    assert any("restored" in line for line in root.startup_report)
    assert appended_at(root.partition("t", 0), root) == [clock()] * 3
    root.close()


def test_truncation_and_repair_keep_the_append_times(root, clock):
    """A34: the segments that are left keep theirs."""
    log = make_old_events(root, clock, 6)
    clock.advance(DAY)
    log.truncate_to(5)
    assert appended_at(log, root) == [*APPEND_TIMES[:2], START + 6 * DAY]
    log.truncate_to(4)
    assert appended_at(log, root) == APPEND_TIMES[:2]
    log.append([encoded(b"v4", at=EVENT)])
    path = segment_files(root.path)[0]
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    clock.advance(DAY)
    repair_root(root, dry_run=False)

    assert appended_at(log, root) == [*APPEND_TIMES[:2], START + 7 * DAY]


def test_a_publication_stays_for_retention_ms_after_it_was_published(root, clock):
    """Spark's sink publishes events of 2013, which then stay for a week."""
    log = make_log(root, config(retention_ms=7 * DAY))
    info = root.topic("t")
    stage = staging.StagedFileWriter(
        root.context.files, staging.job_directory("owner", START, "job"), "part-0"
    )
    for number in range(5):
        stage.add("t", info.id, 0, encoded(b"v%d" % number, at=EVENT + number))
    staged = stage.finish()
    clock.advance(DAY)
    assert transaction.publish(root, [staged], Publication("app", 0)).records == 5
    staging.remove(root.context.files, [staged])

    assert retain(root, clock()) == []
    assert offsets(log) == [0, 1, 2, 3, 4]
    assert appended_at(log, root) == [START + DAY] * 3
    assert [info.appended_ms for info in log.segments.values()] == [START + DAY] * 2 + [0]
    assert retain(root, START + 8 * DAY) == []
    assert retain(root, START + 8 * DAY + 1)[0].start_offset == 5


def test_a_mirror_counts_from_its_own_append(root, clock):
    """A8: offsets and timestamps are those of the source, append times are not."""
    log = make_log(root, config(retention_ms=7 * DAY))
    log.append_at([(10, encoded(b"x", at=EVENT)), (20, encoded(b"y", at=EVENT))])

    assert retain(root, START + 7 * DAY) == []
    assert retain(root, START + 7 * DAY + 1)[0].start_offset == 21


# Wrong clocks


@pytest.mark.parametrize("roll", [False, True])
def test_an_append_with_a_slow_clock_does_not_expire_early(root, clock, roll):
    """P17: the clock was lost at boot, and corrected a minute later."""
    log = make_old_events(root, clock, 5)
    clock.set(1_000)
    if roll:
        log.roll()
    log.append([encoded(b"v5", at=EVENT)])
    log.append([encoded(b"v6", at=EVENT)])
    clock.set(START + 30 * DAY)
    retain(root, clock())
    assert log.start_offset() == (5 if roll else 4), "what was just appended is gone"
    lines = "\n".join(describe(root, "t", clock()))
    assert "clock was wrong at the last append" in lines
    for number in range(7, 13):
        log.append([encoded(b"v%d" % number, at=EVENT)])
    # The append counts from the start of a later segment.
    assert retain(root, START + 37 * DAY) == []
    assert retain(root, START + 37 * DAY + 1)[0].start_offset == 13


def test_an_append_with_a_fast_clock_is_not_kept_for_ever(root, clock):
    """P17: it counts from the next segment that begins with a right clock; describe reports it."""
    log = make_log(root, config(retention_ms=7 * DAY))
    clock.advance(3650 * DAY)
    log.append([encoded(b"v0", at=EVENT)])
    clock.set(START)
    lines = "\n".join(describe(root, "t", START + 30 * DAY))
    assert "clock was wrong at the last append to offsets [0, 1)" in lines
    assert retain(root, START + 30 * DAY) == []
    for number in range(1, 5):
        log.append([encoded(b"v%d" % number, at=EVENT)])
        clock.advance(DAY)
    # The third segment is the first that begins with a clock that was right for a segment.
    assert appended_at(log, root) == [START + 3 * DAY] * 3
    assert retain(root, START + 10 * DAY) == []
    assert retain(root, START + 10 * DAY + 1)[0].start_offset == 5


def test_a_small_correction_of_the_clock_has_no_effect(root, clock):
    """P17: a small step back makes no segment's time uncertain."""
    log = make_log(root, config(retention_ms=7 * DAY))
    log.append([encoded(b"v0", at=EVENT)])
    clock.advance(-HOUR)
    log.append([encoded(b"v1", at=EVENT)])
    log.append([encoded(b"v2", at=EVENT)])

    assert [row for row in describe(root, "t", START) if "wrong" in row] == []
    assert retain(root, START + 7 * DAY) == []
    assert retain(root, START + 7 * DAY + 1)[0].start_offset == 3


# Warnings


def test_a_warning_is_logged_once_for_records_that_expire_at_once(root, clock, caplog):
    """C2: with retention.clock=record, once per topic, for every kind of append."""
    settings = config(retention_clock="record", retention_ms=DAY)
    first, second = make_log(root, settings, "first"), make_log(root, settings, "second")
    with caplog.at_level(logging.WARNING, "embedlog"):
        first.append([encoded(b"v0")])
        first.append([encoded(b"v1")])
        assert caplog.text == ""
        for _ in range(3):
            first.append([encoded(b"old", at=EVENT)])
            second.append_at([(second.tail().log_end_offset, encoded(b"old", at=EVENT))])
    warnings = [record.getMessage() for record in caplog.records]

    assert [text.split(":")[0] for text in warnings] == ["first-0", "second-0"]
    assert all("retention.clock=append" in text for text in warnings)


@pytest.mark.parametrize(
    "changes",
    [
        {"retention_clock": "append"},
        {"retention_ms": -1},
        {"cleanup_policy": "compact"},
        {"message_timestamp_type": "LogAppendTime"},
    ],
)
def test_no_warning_is_logged_for_records_that_stay(root, caplog, changes):
    """The next round would not delete them."""
    log = make_log(root, config(**{"retention_clock": "record", "retention_ms": DAY} | changes))
    with caplog.at_level(logging.WARNING, "embedlog"):
        for _ in range(2):
            log.append([encoded(b"old", keys=[b"k"], at=EVENT)])

    assert caplog.text == ""


# By size


@pytest.mark.parametrize(
    ("limit", "left"), [(10, 2), (15, 3), (14, 3), (9, 2), (5, 1), (4, 1), (0, 0), (-1, 3)]
)
def test_a_log_never_shrinks_below_its_size(limit, left):
    """C3: of 15 records in 3 equal segments, a limit of 10 leaves 2 segments, one of 15 all."""
    segments = [
        RetainedSegment(0, 5, 5, None),
        RetainedSegment(5, 10, 5, None),
        RetainedSegment(10, 15, 5, None, active=True),
    ]

    assert 3 - policy.count_by_size(segments, limit) == left


def test_size_is_per_partition(root):
    """C3: retention.bytes limits each partition."""
    root.create_topic("t", 2, topic_config(retention_bytes=3 * SIZE))
    for number in (0, 1):
        fill(root.partition("t", number), 4 + 4 * number)
    retain(root, START)

    sizes = [root.partition("t", number).size_bytes() for number in (0, 1)]
    assert all(3 * SIZE <= size < 9 * SIZE for size in sizes)
    assert len({root.partition("t", number).start_offset() for number in (0, 1)}) == 2


def topic_config(**changes):
    return TopicConfig.parse(config(**changes))


def test_size_is_applied_before_time(root):
    """C1: both delete from the oldest segment on."""
    segments = [RetainedSegment(n, n + 1, 10, START + n) for n in range(5)]
    settings = topic_config(retention_bytes=40, retention_ms=DAY)

    assert policy.count_due(segments, settings, START) == 1
    assert policy.count_due(segments, settings, START + DAY + 3) == 3


def test_a_compacted_topic_deletes_only_below_its_log_start_offset(root):
    """C6: the policy compact ignores time and size; compact,delete applies them."""
    log = make_log(root, config(cleanup_policy="compact", retention_ms=1, retention_bytes=0))
    for number in range(6):
        log.append([encoded(b"v", keys=[b"k%d" % number])])
    assert retain(root, START + DAY) == []
    root.alter_topic("t", {"cleanup.policy": "compact,delete"})

    assert retain(root, START + DAY)[0].start_offset == 6


# Budgets


def test_a_topic_budget_takes_the_oldest_of_all_partitions(root):
    """retention.topic.bytes: sealed segments, oldest first, until the rest fits."""
    root.create_topic("t", 2, topic_config(retention_topic_bytes=1))
    first, second = root.partition("t", 0), root.partition("t", 1)
    for number in range(6):
        (first, second)[number % 2].append([encoded(b"x", at=START + number)])
    total = first.size_bytes() + second.size_bytes()
    root.alter_topic("t", {"retention.topic.bytes": total - 1})
    retain(root, START)

    assert (first.start_offset(), second.start_offset()) == (2, 0)
    root.alter_topic("t", {"retention.topic.bytes": 0})
    retain(root, START)
    # A budget deletes no active segment.
    assert (first.start_offset(), second.start_offset()) == (2, 2)
    assert (offsets(first), offsets(second)) == ([2], [2])


def test_a_budget_of_the_root_covers_all_topics(root):
    """Topics that are only compacted count, but are not deleted from."""
    logs = [make(root, topic=name) for name in ("a", "b")]
    compacted = make(root, topic="c")
    root.alter_topic("c", {"cleanup.policy": "compact"})
    total = sum(log.size_bytes() for log in (*logs, compacted))
    root.context.catalog.put_retention_bytes(total)
    assert retain(root, START) == []
    root.context.catalog.put_retention_bytes(total - 1)

    deletions = retain(root, START)
    assert [(deletion.topic, deletion.segments) for deletion in deletions] == [("a", 1)]
    root.context.catalog.put_retention_bytes(0)
    retain(root, START)
    assert [log.start_offset() for log in (*logs, compacted)] == [8, 8, 0]
    root.context.catalog.put_retention_bytes(None)
    assert root.context.catalog.retention_bytes() is None


def test_a_budget_skips_kept_segments_and_deletes_others():
    """Segments of one partition must stay, so those of the other are deleted."""
    segments = {name: [RetainedSegment(n, n + 1, 10, n) for n in range(4)] for name in "ab"}

    assert policy.apply_budget(segments, {"a": 0, "b": 0}, {"a": 1, "b": 99}, 50) == {
        "a": 1,
        "b": 2,
    }
    assert policy.apply_budget(segments, {"a": 0, "b": 0}, {"a": 0, "b": 0}, 0) == {"a": 0, "b": 0}
    assert policy.apply_budget(segments, {"a": 0, "b": 0}, {"a": 9, "b": 9}, -1) == {"a": 0, "b": 0}


# Groups


def test_records_that_a_named_group_has_not_consumed_stay(root):
    """retention.min.consumed: everything from the segment of its committed offset on stays."""
    log = make(root, retention_ms=DAY, retention_min_consumed="slow, fast")
    commit(root, "fast", 9, log)
    now = START + 30 * DAY
    assert retain(root, now) == []
    commit(root, "slow", 5, log)
    commit(root, "other", 0, log)

    assert retain(root, now)[0].start_offset == 4
    commit(root, "slow", 10, log)
    assert retain(root, now)[0].start_offset == 8
    commit(root, "fast", 10, log)
    assert retain(root, now)[0].start_offset == 10


def test_all_means_every_group_with_a_commit(root):
    """retention.min.consumed=all; without any group it keeps nothing."""
    log = make(root, retention_ms=DAY, retention_min_consumed="all")
    commit(root, "a", 6, log)
    commit(root, "b", 3, log)

    assert retain(root, START + 30 * DAY)[0].start_offset == 2


def test_a_group_counts_by_its_checkpoint_after_a_reboot(root):
    """P5: `live` is empty after a reboot, until the group is used."""
    log = make(root, retention_ms=DAY, retention_min_consumed="all")
    commit(root, "a", 4, log)
    committed.checkpoint(root.context.live, root.context.state)
    root.context.live.write(lambda txn: committed.COMMITTED.delete(txn, b"a", log.key))

    assert retain(root, START + 30 * DAY)[0].start_offset == 4


def test_the_hard_limit_overrides_a_dead_group(root):
    """retention.bytes.hard: nothing beyond that is kept for a group."""
    log = make(root, retention_ms=DAY, retention_min_consumed="dead")
    sizes = [info.size for info in log.segments.values()]
    limit = log.size_bytes() - sizes[0]
    root.alter_topic("t", {"retention.bytes.hard": limit})

    assert retain(root, START + 30 * DAY)[0].start_offset == 2
    assert retain(root, START + 30 * DAY) == []


def test_the_hard_limit_alone_deletes_nothing(root):
    """It only removes a protection; the other settings say what is due."""
    make(root, retention_bytes_hard=0)

    assert retain(root, START + 30 * DAY) == []


# Leases


def test_leased_records_stay_until_the_lease_ends(tmp_path):
    """P20: a running query does not lose its records; a lease expires by CLOCK_BOOTTIME."""
    MovedUptime.ms = 0
    clock = ManualClock()
    with closing(open_root(tmp_path / "root", files=MovedUptime, clock=clock)) as root:
        log = make(root, retention_ms=DAY)
        now = START + 30 * DAY
        lease = hold(root, "query 1", {PARTITION: 5}, 60)
        assert retain(root, now)[0].start_offset == 4
        clock.advance(1000 * DAY)  # a wall clock ends no lease
        assert leases(root)[0].name == "query 1"
        MovedUptime.ms = 50_000
        lease.renew()
        MovedUptime.ms = 100_000
        assert retain(root, now) == []
        assert leases(root)[0].offsets == {PARTITION: 5}
        MovedUptime.ms = 111_000
        assert leases(root) == []
        assert retain(root, now)[0].start_offset == 10
        with pytest.raises(OffsetOutOfRangeError):
            lease.renew()
        assert (
            root.context.live.read(lambda txn: [k for k, _ in txn.cursor() if k[:1] == b"H"]) == []
        )
        assert log.start_offset() == 10


def test_a_released_lease_keeps_nothing(root):
    """If two leases have the same name, the later one counts."""
    make(root, retention_ms=DAY)
    with hold(root, "q", {PARTITION: 0}, 60) as lease:
        assert "1 partition," in repr(lease)
        hold(root, "q", {PARTITION: 7}, 60)
        assert [active.offsets for active in leases(root)] == [{PARTITION: 7}]
    assert leases(root) == []
    lease.release()

    assert retain(root, START + 30 * DAY)[0].start_offset == 10


def test_a_lease_made_during_the_round_is_respected(root, monkeypatch):
    """P20: leases are read in the transaction that moves the log start offset."""
    log = make(root, retention_ms=DAY)
    count_due = policy.count_due

    def lease_and_count(*arguments):
        hold(root, "late", {PARTITION: 3}, 60)
        return count_due(*arguments)

    monkeypatch.setattr(policy, "count_due", lease_and_count)
    retain(root, START + 30 * DAY)

    assert log.start_offset() == 2


def test_deleted_records_cannot_be_leased(root):
    """OffsetOutOfRange is raised when the lease is requested, not during the query."""
    make(root)
    delete_records(root.partition("t", 0), 4)

    with pytest.raises(OffsetOutOfRangeError, match=r"\[4, 10\)"):
        hold(root, "q", {PARTITION: 3}, 60)
    with pytest.raises(OffsetOutOfRangeError):
        hold(root, "q", {PARTITION: 11}, 60)
    with pytest.raises(UnknownTopicOrPartitionError):
        hold(root, "q", {TopicPartition("t", 1): 0}, 60)
    for name, seconds in (("", 1), ("x" * 201, 1), ("x", 0)):
        with pytest.raises(ValueError, match="name of 1 to 200"):
            hold(root, name, {PARTITION: 5}, seconds)
    assert leases(root) == []


def test_the_hard_limit_overrides_leases(root):
    """A forgotten query does not fill the disk."""
    log = make(root, retention_ms=DAY, retention_bytes_hard=0)
    hold(root, "q", {PARTITION: 0}, 60)
    retain(root, START + 30 * DAY)

    # All but the active segment.
    assert log.start_offset() == 8


# delete_records


def test_delete_records_is_durable_and_exact(root):
    """As in Kafka: nothing below the offset can be read; -1 is the high watermark."""
    log = make(root)

    assert delete_records(log, 3) == 3
    assert offsets(log) == list(range(3, 10))
    assert delete_records(log, -1) == 10
    assert (log.start_offset(), log.end_offset(), bases(log)) == (10, 10, [10])
    with pytest.raises(OffsetOutOfRangeError):
        delete_records(log, 11)
    assert delete_records(log, 2) == 10


def test_a_round_finishes_an_interrupted_deletion(root, monkeypatch):
    """C1: a round begins with segments below the log start offset, even if nothing is due."""
    log = make(root)
    monkeypatch.setattr(log_start, "_drop", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        delete_records(log, 5)
    monkeypatch.undo()

    assert retain(root, START)[0][2:4] == (5, 2)
    assert len(segment_files(root.path)) == 3


# Rounds


def test_a_bad_partition_does_not_stop_the_others(root):
    """P9: its error is raised at the end of the round."""
    bad, good = (
        make(root, topic="bad", retention_ms=DAY),
        make(root, topic="good", retention_ms=DAY),
    )
    row = root.context.live.get(bad.tail_key)
    failed = tail.unpack(row)._replace(failed=True).pack()
    root.context.live.write(lambda txn: txn.put(bad.tail_key, failed))
    with pytest.raises(DurabilityError):
        retain(root, START + 30 * DAY)
    root.context.live.write(lambda txn: txn.put(bad.tail_key, row))

    assert (bad.start_offset(), good.start_offset()) == (0, 10)


def test_a_fenced_owner_deletes_nothing(root):
    """P14: the fence is checked in the transaction that deletes."""
    log = make(root, retention_ms=DAY)

    def fence(txn):
        raise FencedError("another process does that now")

    with pytest.raises(FencedError):
        retain(root, START + 30 * DAY, fence=fence)
    assert (log.start_offset(), len(segment_files(root.path))) == (0, 5)


def test_on_a_full_disk_files_are_unlinked_at_once(root, monkeypatch):
    """P10: file.delete.delay.ms is ignored."""
    make(root, retention_ms=DAY, file_delete_delay_ms=60_000)
    retain(root, START + 30 * DAY)
    assert len(segment_files(root.path)) == 6
    monkeypatch.setattr(Files, "free_bytes", lambda _: 1_000)
    retain(root, START + 30 * DAY)

    assert len(segment_files(root.path)) == 1


def test_a_stopped_round_leaves_the_other_partitions(root):
    """close() does not wait for ten thousand partitions."""
    make(root, retention_ms=DAY)

    assert retain(root, START + 30 * DAY, stopped=lambda: True) == []


def test_an_unused_partition_is_not_opened(root):
    """Its files are created at the first append."""
    root.create_topic("t", 3, topic_config(retention_ms=1))

    assert retain(root, START + DAY) == []
    assert segment_files(root.path) == []


def test_a_round_by_time_only_does_not_read_the_manifest(root, monkeypatch):
    """The oldest segment suffices to see that nothing is due."""
    log = make(root, retention_ms=DAY)
    monkeypatch.setattr(type(log), "segments", property(lambda _: 1 / 0))

    assert retain(root, START + DAY) == []


# The clock


def test_a_clock_that_jumps_ahead_deletes_by_one_step(root, caplog):
    """P17: of time by the wall clock alone, a round counts at most an hour; it logs a warning."""
    log = make(root, count=40, retention_ms=DAY)
    clock, uptime = ManualClock(START + DAY), ManualClock(1_000)
    bounded_clock = BoundedClock(root.context.live, clock, uptime)
    retain(root, bounded_clock())
    clock.advance(730 * DAY)
    uptime.advance(30_000)
    with caplog.at_level(logging.WARNING):
        retain(root, bounded_clock())

    assert "jumped" in caplog.text
    assert log.start_offset() <= 2
    clock.set(START + DAY + 30_000)
    assert bounded_clock() == clock()
    retain(root, bounded_clock())
    assert log.start_offset() <= 2


def test_time_that_passes_by_both_clocks_counts(root):
    """P17: a week of suspend, an hour of daylight saving, a step back."""
    clock, uptime = ManualClock(), ManualClock(1_000)
    bounded_clock = BoundedClock(root.context.live, clock, uptime)
    assert bounded_clock() == START
    for wall, real in ((7 * DAY, 7 * DAY), (MOST_AHEAD_MS, 0), (-DAY, 5), (10, 10)):
        clock.advance(wall)
        uptime.advance(real)
        assert bounded_clock() == clock()


def test_a_damaged_reading_counts_as_none(root):
    """P13: values in `live` have no checksum; recovery reads this one, and continues without it."""
    root.context.live.write(lambda txn: txn.put(CLOCK_READING.key(), b"short"))
    log = make(root, count=3)
    log.truncate_to(2)

    assert offsets(log) == [0, 1]
    assert root.context.bounded_ms() == root.clock()
    assert BoundedClock(root.context.live, root.clock, ManualClock(1))() == root.clock()


def test_the_bounded_clock_continues_in_another_process(root):
    """P17: a new owner does not accept the jump either."""
    clock, uptime = ManualClock(), ManualClock(1_000)
    BoundedClock(root.context.live, clock, uptime)()
    clock.advance(730 * DAY)

    assert BoundedClock(root.context.live, clock, uptime)() == START + MOST_AHEAD_MS


# describe


def test_describe_says_what_is_deleted_when_and_what_stays_why(root):
    """C9: retention.ms is often misread as the time after which records are gone."""
    log = make(root, retention_ms=DAY, retention_min_consumed="slow", retention_bytes=10_000)
    commit(root, "slow", 2, log)
    lines = describe(root, "t", START + 5 * HOUR + DAY + 1)

    assert lines[0].startswith(
        "t: a segment is deleted 1 day (retention.ms) after the last append to it"
    )
    assert "(retention.clock=append)" in lines[0]
    assert "up to 7 days (segment.ms)" in lines[0]
    assert "9.8 KiB remain (retention.bytes)" in lines[1]
    assert lines[2] == "t: nothing is deleted before these groups have consumed it: slow"
    assert lines[3].startswith("partition 0: offsets [0, 2) (1 segment, ")
    assert lines[3].endswith(" will be deleted in the next round")
    assert lines[4].startswith("partition 0: offsets [2, 6) (2 segments")
    assert lines[4].endswith("stay although due: group 'slow' has not consumed them")
    assert lines[5] == (
        "partition 0: offsets [6, 10) stay: the first segment will be deleted after "
        "2023-11-16 05:13:20 UTC, because its youngest record is from 2023-11-15 05:13:20 UTC; "
        "those after it later"
    )


def test_describe_names_the_clock(root, clock):
    """C9: the clocks differ most for old events, which users often load first."""
    log = make_log(root, config(retention_ms=DAY))
    log.append([encoded(b"old", at=EVENT)])
    assert describe(root, "t", START)[1] == (
        "partition 0: offsets [0, 1) stay: the first segment will be deleted after "
        "2023-11-15 22:13:20 UTC, because the last append to it was at 2023-11-14 22:13:20 UTC; "
        "those after it later"
    )
    root.alter_topic("t", {"retention.clock": "record"})
    lines = describe(root, "t", START)

    assert "(retention.clock=record)" in lines[0]
    assert "one with an old timestamp is deleted soon after it was appended" in lines[0]
    assert lines[1].endswith("will be deleted in the next round")


def test_describe_mentions_leases_future_timestamps_and_unlimited_retention(root, clock):
    """C9: everything that keeps records longer is mentioned."""
    root.create_topic("empty", 1, topic_config(cleanup_policy="compact"))
    log = make(root, count=1, retention_ms=DAY, retention_bytes_hard=1 << 21)
    log.append([encoded(b"x", at=START + 10**15)])
    fill(log, 3)
    root.context.catalog.put_retention_bytes(1 << 31)
    hold(root, "query", {PARTITION: 1}, 60)
    lines = "\n".join(describe(root, "t", START + 3 * DAY))

    assert "lease 'query' holds them for another" in lines
    assert "beyond 2.0 MiB a partition keeps nothing for leases" in lines
    assert "all topics together hold more than 2.0 GiB" in lines
    later = "\n".join(describe(root, "t", START + 1))
    assert "has a timestamp in the future" in later
    empty = describe(root, "empty", START)
    assert "nothing is deleted by time or size" in empty[0]
    assert empty[-1] == "partition 0: is empty"
    root.alter_topic("t", {"retention.ms": -1, "retention.topic.bytes": 5})
    lines = "\n".join(describe(root, "t", START))
    assert "nothing is deleted by time" in lines
    assert "all partitions together hold more than 5 bytes" in lines


@pytest.mark.parametrize("groups", ["a,,b", "all,b", " ", 5])
def test_invalid_group_lists_are_refused(groups):
    """The error says what the setting takes."""
    with pytest.raises(InvalidConfigError, match="names of groups"):
        topic_config(retention_min_consumed=groups)
