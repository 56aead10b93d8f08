"""Views count records, not offsets, whatever became of a topic (D10, D11, A8)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.clock import START
from support.manual_compaction import keep
from support.roots import encoded
from support.tiers import choose

import embedlog
from embedlog import catalog
from embedlog.partition.record_counts import RecordCounts, SegmentCounts
from embedlog.record import TopicPartition
from embedlog.segment import SegmentFile

MOST_BATCHES = 6


class Fate:
    """A topic of two partitions, and what becomes of it."""

    def __init__(self, path, seed):
        self.chance, self.path = random.Random(seed), path / "log"
        self.log = embedlog.open(self.path)
        self.log.create_topic("t", partitions=2, config={"segment.bytes": 3000})
        for number in range(2):
            self.append(number)

    def part(self, number):
        part = self.log.partition("t", number)
        part.refresh()
        return part

    def append(self, number):
        """Records come, now and then to a new segment."""
        part = self.part(number)
        for _ in range(self.chance.randint(1, MOST_BATCHES)):
            count = self.chance.randint(1, 5)
            keys = [b"k%d" % self.chance.randrange(9) for _ in range(count)]
            part.append([encoded(*[b"v"] * count, keys=keys, at=START)])
            if self.chance.random() < 0.3:
                part.roll()

    def clean(self, number):
        """Some offsets of the first sealed segments are left, in several batches, some empty."""
        part = self.part(number)
        sealed = [info for info in part.segments.values() if info.sealed]
        if sealed:
            some = slice(0, self.chance.randint(1, len(sealed)))
            first, stop = sealed[0].base_offset, sealed[some][-1].next_offset
            left = self.chance.sample(range(first, stop), self.chance.randint(0, stop - first))
            if part.start_offset() <= first:
                keep(part, left, some, parts=3)

    def compact(self, number):
        """Each key once, and the log decides what is left of that in which segments."""
        self.log.alter_topic("t", {"cleanup.policy": "compact", "min.compaction.lag.ms": 0})
        self.log.compact("t", force=True)
        self.log.alter_topic("t", {"cleanup.policy": "delete"})

    def damage(self, number):
        """A byte of some segment is wrong, and what it makes unreadable is repaired away."""
        self.log.flush()
        path = self.chance.choice(sorted(Path(self.path).glob("topics/*/*/*.arrows")))
        data = bytearray(path.read_bytes())
        if data:
            data[self.chance.randrange(len(data))] ^= 1
            path.write_bytes(data)
        self.reopen()
        self.log.repair(dry_run=False)

    def reopen(self, number=0):
        """What was counted is counted again."""
        self.log.close()
        self.log = embedlog.open(self.path)

    def mirror(self, number):
        """The next batch comes at an offset further on."""
        part = self.part(number)
        offset = part.end_offset() + self.chance.randint(1, 9)
        keys = [b"k1", b"k2"]
        part.append_at([(offset, encoded(b"a", b"b", keys=keys, at=START))])

    def trim(self, number):
        """The first records are deleted, up to somewhere within a batch."""
        part = self.part(number)
        offset = self.chance.randint(part.start_offset(), part.end_offset())
        self.log.delete_records({TopicPartition("t", number): offset})

    def cut(self, number):
        """The last records are gone, up to an offset that may lie in a gap, or past the last."""
        part = self.part(number)
        part.truncate_to(self.chance.randint(part.start_offset(), part.end_offset()))


FATES = ("append", "clean", "compact", "damage", "reopen", "mirror", "trim", "cut")


def check(topic, chance):
    """Every way to look at a topic says the same as the list of its records."""
    records = list(topic)
    assert len(topic) == len(records) == topic.to_arrow(["offset"]).num_rows
    assert f" {len(records):,} records" in repr(topic)
    parts = [[one for one in records if one.partition == number] for number in range(2)]
    for count in {0, 1, 2, len(parts[0]), chance.randint(0, 30)}:
        assert list(topic.head(count)) == [one for part in parts for one in part[:count]]
        assert list(topic.tail(count)) == [
            one for part in parts for one in part[max(len(part) - count, 0) :]
        ]
    bounds = [None, 0, -1, *(chance.randint(-len(records) - 2, len(records) + 2) for _ in range(2))]
    for start in bounds:
        for stop in bounds:
            view = topic[start:stop]
            assert list(view) == records[start:stop], (start, stop)
            assert len(view) == len(records[start:stop])
            assert f": {len(view):,} records" in repr(view)
            inner = slice(chance.randint(-9, 9), chance.randint(-9, 9))
            assert list(view[inner]) == records[start:stop][inner]
    for row in range(-len(records), len(records)):
        assert topic[row] == records[row]
    with pytest.raises(IndexError):
        topic[len(records)]


@pytest.mark.tier("test")
@pytest.mark.parametrize("seed", range(choose(test=4, all=12)))
def test_a_view_is_a_slice_of_the_list_of_records(tmp_path, seed):
    """Compacted, repaired, mirrored, cut or trimmed, in any order: `len`, slices, head and tail
    and titles count what iteration yields."""
    fate = Fate(tmp_path, seed)
    check(fate.log.topic("t"), fate.chance)
    for what in fate.chance.choices(FATES, k=6):
        getattr(fate, what)(fate.chance.randrange(2))
        check(fate.log.topic("t"), fate.chance)
        assert fate.log.verify() == []
    fate.log.close()


@pytest.fixture
def log(tmp_path):
    """A log that is healthy when the test is done."""
    log = embedlog.open(tmp_path / "log")
    yield log
    assert log.verify() == []
    log.close()


def fleet(log):
    """Five keys in a hundred offsets, compacted."""
    log.create_topic("fleet", config={"cleanup.policy": "compact", "segment.bytes": 3000})
    for number in range(20):
        keys = [b"k%d" % row for row in range(5)]
        log.partition("fleet", 0).append([encoded(*[b"%d" % number] * 5, keys=keys, at=START)])
    log.partition("fleet", 0).roll()
    log.compact("fleet", force=True)
    return log.topic("fleet")


def test_a_compacted_topic_has_as_many_rows_as_keys(log):
    """`head(5)` of five keys is all of them, wherever their offsets are."""
    topic = fleet(log)

    assert [record.offset for record in topic] == [95, 96, 97, 98, 99]
    assert topic.head(5).to_arrow().num_rows == len(topic) == 5
    assert repr(topic).startswith("<Topic fleet: 1 partition, 5 records, ")
    assert topic[-2:].to_arrow(["offset"])["offset"].to_pylist() == [98, 99]
    assert topic._repr_html_().count("<tr>") == 6


def test_segments_without_gaps_are_counted_without_reading(log, monkeypatch):
    """The manifest says so: no file is opened, however many there are."""
    log.create_topic("t", config={"segment.bytes": 3000})
    for _ in range(30):
        log.partition("t", 0).append([encoded(*[b"v" * 20] * 10, at=START)])
    assert len(log.partition("t", 0).segments) > 3
    monkeypatch.setattr(SegmentFile, "mapped", None)
    monkeypatch.setattr(SegmentFile, "read", None)

    topic = log.topic("t")

    assert (len(topic), len(topic[100:-50]), len(topic.tail(7))) == (300, 150, 7)


def test_counts_are_cached(log, monkeypatch):
    """A segment does not change once it is compacted."""
    topic = fleet(log)
    assert len(topic) == 5
    monkeypatch.setattr(SegmentFile, "mapped", None)

    assert len(topic) == 5


def test_head_reads_only_the_first_segments(log, monkeypatch):
    """Of many compacted segments the first ones are enough."""
    log.create_topic("t")
    part = log.partition("t", 0)
    for _ in range(5):
        part.append([encoded(*[b"v"] * 10, at=START)])
        part.roll()
    for number in range(5):
        keep(part, [10 * number + 3, 10 * number + 5], slice(number, number + 1))
    seen = []
    monkeypatch.setattr(
        SegmentCounts, "extend", lambda *of, real=SegmentCounts.extend: seen.append(1) or real(*of)
    )
    topic = log.topic("t")

    assert [record.offset for record in topic.head(3)] == [3, 5, 13]
    assert len(seen) == 2
    assert [record.offset for record in topic.tail(3)] == [35, 43, 45]
    assert len(seen) == 4


def test_a_segment_deleted_during_a_count_is_retried(log, monkeypatch):
    """Compaction replaces files at any time: the count is that of before, or of after."""
    log.create_topic("t", config={"file.delete.delay.ms": 0})
    part = log.partition("t", 0)
    part.append([encoded(*[b"v"] * 10, at=START)])
    part.roll()
    keep(part, [1, 2, 3])
    real, done = RecordCounts._segments_with_gaps, []

    def look(counts):
        found = real(counts)
        if not done:
            done.append(1)
            keep(part, [2])
        return found

    monkeypatch.setattr(RecordCounts, "_segments_with_gaps", look)

    assert len(log.topic("t")) == 1


def test_a_manifest_that_is_wrong_about_gaps_is_found_and_repaired(log):
    """What counts by it must be able to rely on it."""
    log.create_topic("t")
    part = log.partition("t", 0)
    part.append([encoded(*[b"v"] * 10, at=START)])
    part.roll()
    keep(part, [1, 2, 3])
    wrong = part.segment_at(0)._replace(dense=True)
    part.context.state.write(lambda txn: catalog.put_segment(txn, part.key, wrong))

    (finding, *_) = log.verify()
    assert "gaps" in finding.what
    log.repair(dry_run=False)

    assert log.verify() == []
    assert len(log.topic("t")) == 3


def test_a_count_is_not_negative(log):
    """It is refused; a view without rows is `head(0)`."""
    topic = log.create_topic("t")

    for ends in (topic.head, topic.tail):
        with pytest.raises(ValueError, match="count must be at least 0, got -1"):
            ends(-1)
