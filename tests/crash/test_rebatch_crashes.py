"""Gathering small batches, killed, failing or without power at every operation."""

from __future__ import annotations

from typing import ClassVar

import pyarrow as pa
import pytest
from support.faulty_roots import COMPANY, Acknowledge, FastUptimeFiles, RootFaults
from support.roots import encoded, healthy, no_stray_files
from support.tiers import choose

from embedlog.compaction.rebatch import rebatch
from embedlog.config import LONG_MAX, TopicConfig
from embedlog.errors import EmbedlogError, FencedError
from embedlog.partition import PartitionLog, flush, unnamed_files
from embedlog.producer import Producer
from embedlog.record import TopicPartition
from embedlog.root.root import Root
from embedlog.schemas.topic_schema import first_version

RECORDS = 8
SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])


def values(log: PartitionLog) -> list[object]:
    """Return the values of all records, in order; offsets have no gaps."""
    found: list[object] = []
    reader = log.reader(log.start_offset())
    while batches := reader.read():
        for batch in batches:
            batch.verify()
            assert batch.base_offset == len(found)
            name = "n" if batch.is_typed else "value"
            found += batch.columns([name]).column(0).to_pylist()
    return found


class RebatchFaults(RootFaults):
    """Both topics have eight single records in one sealed segment, and one in the active one."""

    parts: ClassVar = [TopicPartition("bytes", 0), TopicPartition("typed", 0)]
    files = FastUptimeFiles

    def fill(self, root: Root) -> None:
        """Create the topics."""
        config = TopicConfig.parse({"file.delete.delay.ms": 0})
        root.create_topic("bytes", 1, config)
        root.create_topic("typed", 1, config, first_version(SCHEMA, "k", None))
        producer = Producer(root)
        for number in range(RECORDS + 1):
            if number == RECORDS:
                for topic, partition in self.parts:
                    root.partition(topic, partition).roll()
            root.partition("bytes", 0).append([encoded(b"%d" % number)])
            producer.send("typed", {"k": "a", "n": number}).result()
        producer.close()
        root.flush()

    def work(self, root: Root, durability: str, acknowledge: Acknowledge) -> EmbedlogError | None:
        """Gather the batches of one topic after the other."""
        first = None
        for topic, partition in self.parts:
            try:
                rebatch(root.partition(topic, partition), LONG_MAX)
                acknowledge(topic)
            except FencedError:
                raise
            except EmbedlogError as error:
                first = first or error
        return first

    def check_between(self, root: Root, acked: set[str]) -> None:
        """All records are there, in batches of one or of many."""
        for topic, partition in self.parts:
            log = root.partition(topic, partition)
            expected = [b"%d" % n if topic == "bytes" else n for n in range(RECORDS + 1)]
            assert values(log) == expected, topic
            sealed = next(iter(log.segments.values()))
            file = log.open_segment(sealed)
            batches = len(list(file.scan(file.start, sealed.end_position)))
            assert batches in (1, RECORDS), f"{topic} has {batches} batches"
            assert batches == 1 or topic not in acked, f"{topic} went back"

    def check_done(self, root: Root, durability: str) -> None:
        """Another call finishes the work, and leaves no file that the manifest does not name."""
        flush.flush([root.partition(*part) for part in self.parts])
        assert self.work(root, durability, lambda step: None) is None
        unnamed_files.sweep(root.context, early=True)
        self.check_between(root, {topic for topic, _ in self.parts})
        assert no_stray_files(root)
        assert healthy(root)

    def check_reopened_after_fault(self, root: Root) -> None:
        """Another call changes nothing."""
        self.check_done(root, "os")

    def check_appends(self, root: Root) -> None:
        """The next record gets the next offset."""
        receipt = root.partition("bytes", 0).append([encoded(b"9")])[0]
        assert receipt.base_offset == RECORDS + 1


FAULTS = RebatchFaults()


@COMPANY
def test_when_it_is_killed_the_segment_is_the_old_one_or_the_new_one(directory, company):
    """At every operation; the next call finishes it, and no file is left over."""
    assert FAULTS.kill_everywhere(directory, 4, company) >= choose(test=2, all=40)


@pytest.mark.tier("all")
def test_when_it_fails_nothing_is_lost(directory):
    """Any operation, once or from then on; with the same handle all is done after."""
    assert FAULTS.fail_everywhere(directory, 4) >= choose(test=1, all=20)


@pytest.mark.tier("all")
def test_after_a_power_cut_the_segment_is_the_old_one_or_the_new_one(directory):
    """At every cut; what was done before is durable."""
    limit = choose(test=20, all=400)
    assert FAULTS.cut_everywhere(directory, limit) >= limit / 4
