"""Views count records, not offsets, whatever happened to the topic (D10, D11, A8)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.clock import START
from support.manual_compaction import keep
from support.roots import encoded, healthy_log
from support.tiers import choose

import embedlog
from embedlog import catalog
from embedlog.display import plural
from embedlog.partition.lookup import RecordCounts, SegmentCounts
from embedlog.record import TopicPartition
from embedlog.segment import SegmentFile

MOST_BATCHES = 6


class RandomTopic:
    """A topic of two partitions with methods that change it at random."""

    def __init__(self, path, seed):
        self.rng, self.path = random.Random(seed), path / "log"
        self.log = embedlog.open(self.path)
        self.log.create_topic("t", partitions=2, config={"segment.bytes": 3000})
        for number in range(2):
            self.append(number)

    def part(self, number):
        part = self.log.partition("t", number)
        part.refresh()
        return part

    def append(self, number):
        """Append batches, and sometimes roll the segment."""
        part = self.part(number)
        for _ in range(self.rng.randint(1, MOST_BATCHES)):
            count = self.rng.randint(1, 5)
            keys = [b"k%d" % self.rng.randrange(9) for _ in range(count)]
            part.append([encoded(*[b"v"] * count, keys=keys, at=START)])
            if self.rng.random() < 0.3:
                part.roll()

    def keep_some_offsets(self, number):
        """Rewrite the first sealed segments with some of their offsets, in several batches."""
        part = self.part(number)
        sealed = [info for info in part.segments.values() if info.sealed]
        if sealed:
            rewritten = slice(0, self.rng.randint(1, len(sealed)))
            first, stop = sealed[0].base_offset, sealed[rewritten][-1].next_offset
            kept_offsets = self.rng.sample(range(first, stop), self.rng.randint(0, stop - first))
            if part.start_offset() <= first:
                keep(part, kept_offsets, rewritten, parts=3)

    def compact(self, number):
        """Compact the topic as the log does."""
        self.log.alter_topic("t", {"cleanup.policy": "compact", "min.compaction.lag.ms": 0})
        self.log.housekeeping.compact("t", force=True)
        self.log.alter_topic("t", {"cleanup.policy": "delete"})

    def damage(self, number):
        """Damage a byte of some segment, and repair the log."""
        self.log.flush()
        path = self.rng.choice(sorted(Path(self.path).glob("topics/*/*/*.arrows")))
        data = bytearray(path.read_bytes())
        if data:
            data[self.rng.randrange(len(data))] ^= 1
            path.write_bytes(data)
        self.reopen()
        self.log.housekeeping.repair(dry_run=False)

    def reopen(self, number=0):
        """Close and open the log, which drops the cached counts."""
        self.log.close()
        self.log = embedlog.open(self.path)

    def mirror(self, number):
        """Append a batch at an offset past the end."""
        part = self.part(number)
        offset = part.end_offset() + self.rng.randint(1, 9)
        keys = [b"k1", b"k2"]
        part.append_at([(offset, encoded(b"a", b"b", keys=keys, at=START))])

    def delete_records(self, number):
        """Delete the first records, up to an offset that may be within a batch."""
        part = self.part(number)
        offset = self.rng.randint(part.start_offset(), part.end_offset())
        self.log.delete_records({TopicPartition("t", number): offset})

    def truncate(self, number):
        """Truncate to an offset that may be in a gap or past the last record."""
        part = self.part(number)
        part.truncate_to(self.rng.randint(part.start_offset(), part.end_offset()))


CHANGES = (
    *("append", "keep_some_offsets", "compact", "damage"),
    *("reopen", "mirror", "delete_records", "truncate"),
)


def check(topic, rng):
    """Assert that every view of a topic equals the same slice of the list of its records."""
    records = list(topic)
    assert len(topic) == len(records) == topic.to_arrow(["offset"]).num_rows
    assert f" {plural(len(records), 'record')}" in repr(topic)
    parts = [[record for record in records if record.partition == number] for number in range(2)]
    for count in {0, 1, 2, len(parts[0]), rng.randint(0, 30)}:
        assert list(topic.head(count)) == [record for part in parts for record in part[:count]]
        assert list(topic.tail(count)) == [
            record for part in parts for record in part[max(len(part) - count, 0) :]
        ]
    bounds = [None, 0, -1, *(rng.randint(-len(records) - 2, len(records) + 2) for _ in range(2))]
    for start in bounds:
        for stop in bounds:
            view = topic[start:stop]
            assert list(view) == records[start:stop], (start, stop)
            assert len(view) == len(records[start:stop])
            assert f": {plural(len(view), 'record')}" in repr(view)
            inner = slice(rng.randint(-9, 9), rng.randint(-9, 9))
            assert list(view[inner]) == records[start:stop][inner]
    for row in range(-len(records), len(records)):
        assert topic[row] == records[row]
    with pytest.raises(IndexError):
        topic[len(records)]


@pytest.mark.tier("test")
@pytest.mark.parametrize("seed", range(choose(test=2, all=12)))
def test_a_view_is_a_slice_of_the_list_of_records(tmp_path, seed):
    """Also after compaction, repair, mirroring, truncation and deletion, in any order."""
    topic = RandomTopic(tmp_path, seed)
    check(topic.log.topic("t"), topic.rng)
    for change in topic.rng.choices(CHANGES, k=6):
        getattr(topic, change)(topic.rng.randrange(2))
        check(topic.log.topic("t"), topic.rng)
        assert topic.log.housekeeping.verify() == []
    topic.log.close()


log = healthy_log


def compacted_topic(log):
    """Compact a topic of five keys and a hundred offsets."""
    log.create_topic("fleet", config={"cleanup.policy": "compact", "segment.bytes": 3000})
    for number in range(20):
        keys = [b"k%d" % row for row in range(5)]
        log.partition("fleet", 0).append([encoded(*[b"%d" % number] * 5, keys=keys, at=START)])
    log.partition("fleet", 0).roll()
    log.housekeeping.compact("fleet", force=True)
    return log.topic("fleet")


def test_a_compacted_topic_has_as_many_rows_as_keys(log):
    """`head(5)` of five keys has all of them, at any offsets."""
    topic = compacted_topic(log)

    assert [record.offset for record in topic] == [95, 96, 97, 98, 99]
    assert topic.head(5).to_arrow().num_rows == len(topic) == 5
    assert repr(topic).startswith("<Topic fleet: 1 partition, 5 records, ")
    assert topic[-2:].to_arrow(["offset"])["offset"].to_pylist() == [98, 99]
    assert topic._repr_html_().count("<tr>") == 6


def test_segments_without_gaps_are_counted_without_reading(log, monkeypatch):
    """Their counts are in the manifest; no file is opened."""
    log.create_topic("t", config={"segment.bytes": 3000})
    for _ in range(30):
        log.partition("t", 0).append([encoded(*[b"v" * 20] * 10, at=START)])
    assert len(log.partition("t", 0).segments) > 3
    monkeypatch.setattr(SegmentFile, "mapped", None)
    monkeypatch.setattr(SegmentFile, "read", None)

    topic = log.topic("t")

    assert (len(topic), len(topic[100:-50]), len(topic.tail(7))) == (300, 150, 7)


def test_counts_are_cached(log, monkeypatch):
    """A segment does not change after it was compacted."""
    topic = compacted_topic(log)
    assert len(topic) == 5
    monkeypatch.setattr(SegmentFile, "mapped", None)

    assert len(topic) == 5


def test_head_reads_only_the_first_segments(log, monkeypatch):
    """Of many compacted segments, it reads as many as it needs."""
    log.create_topic("t")
    part = log.partition("t", 0)
    for _ in range(5):
        part.append([encoded(*[b"v"] * 10, at=START)])
        part.roll()
    for number in range(5):
        keep(part, [10 * number + 3, 10 * number + 5], slice(number, number + 1))
    extend, calls = SegmentCounts.extend, []
    monkeypatch.setattr(SegmentCounts, "extend", lambda *args: calls.append(1) or extend(*args))
    topic = log.topic("t")

    assert [record.offset for record in topic.head(3)] == [3, 5, 13]
    assert len(calls) == 2
    assert [record.offset for record in topic.tail(3)] == [35, 43, 45]
    assert len(calls) == 4


def test_a_segment_deleted_during_a_count_is_retried(log, monkeypatch):
    """Compaction may replace files at any time: the count is the one before or after it."""
    log.create_topic("t", config={"file.delete.delay.ms": 0})
    part = log.partition("t", 0)
    part.append([encoded(*[b"v"] * 10, at=START)])
    part.roll()
    keep(part, [1, 2, 3])
    segments_with_gaps, done = RecordCounts._segments_with_gaps, []

    def find_and_replace(counts):
        with_gaps = segments_with_gaps(counts)
        if not done:
            done.append(1)
            keep(part, [2])
        return with_gaps

    monkeypatch.setattr(RecordCounts, "_segments_with_gaps", find_and_replace)

    assert len(log.topic("t")) == 1


def test_a_manifest_that_is_wrong_about_gaps_is_found_and_repaired(log):
    """Counts rely on the manifest."""
    log.create_topic("t")
    part = log.partition("t", 0)
    part.append([encoded(*[b"v"] * 10, at=START)])
    part.roll()
    keep(part, [1, 2, 3])
    wrong = part.segment_at(0)._replace(dense=True)
    part.context.state.write(lambda txn: catalog.put_segment(txn, part.key, wrong))

    (finding, *_) = log.housekeeping.verify()
    assert "gaps" in finding.what
    log.housekeeping.repair(dry_run=False)

    assert log.housekeeping.verify() == []
    assert len(log.topic("t")) == 3


def test_a_count_is_not_negative(log):
    """A negative count is refused; `head(0)` is a view without rows."""
    topic = log.create_topic("t")

    for head_or_tail in (topic.head, topic.tail):
        with pytest.raises(ValueError, match="count must be at least 0, got -1"):
            head_or_tail(-1)
