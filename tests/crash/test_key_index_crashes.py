"""The key index, killed, failing or without power at every operation that writes or drops it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from support.clock import START
from support.faulty_roots import COMPANY, Acknowledge, FastUptimeFiles, RootFaults
from support.roots import encoded, healthy, no_stray_files
from support.tiers import choose

from embedlog.compaction.cleaner import clean
from embedlog.compaction.last_records import last_record
from embedlog.config import TopicConfig
from embedlog.errors import EmbedlogError, FencedError
from embedlog.partition import flush, replace, unnamed_files
from embedlog.partition.replace import no_fence
from embedlog.record import TopicPartition
from embedlog.root.root import Root

KEYS = 5


class KeyIndexFaults(RootFaults):
    """Three sealed segments that have each key once; the last values are the highest."""

    parts: ClassVar = [TopicPartition("t", 0)]
    files = FastUptimeFiles

    def fill(self, root: Root) -> None:
        """Create the topic."""
        config = {"cleanup.policy": "compact", "file.delete.delay.ms": 0}
        root.create_topic("t", 1, TopicConfig.parse(config))
        log = root.partition("t", 0)
        for number in range(3):
            for key in range(KEYS):
                log.append([encoded(b"%d" % number, keys=[b"%d" % key])])
            log.roll()
        root.flush()

    def work(self, root: Root, durability: str, acknowledge: Acknowledge) -> EmbedlogError | None:
        """Write the index of each segment; compact them into one, which drops these files."""
        log, first = root.partition("t", 0), None
        try:
            with replace.rewrite_lock(log):
                log.key_index.build_missing(no_fence)
            self.check_between(root, set())
            acknowledge("indexed")
        except EmbedlogError as error:
            first = error
        try:
            clean(log, START)
            acknowledge("compacted")
        except FencedError:
            raise
        except EmbedlogError as error:
            first = first or error
        return first

    def check_between(self, root: Root, acked: set[str]) -> None:
        """Each key has its last value, whatever files there are, and no other key has any."""
        log = root.partition("t", 0)
        for key in range(KEYS):
            found = last_record(log, b"%d" % key, log.start_offset(), log.end_offset())
            assert found is not None
            assert found.value == b"2"
        assert last_record(log, b"none", log.start_offset(), log.end_offset()) is None

    def check_done(self, root: Root, durability: str) -> None:
        """Another call leaves one file, that of the segment, and nothing half-written."""
        flush.flush([root.partition("t", 0)])
        assert self.work(root, durability, lambda step: None) is None
        unnamed_files.sweep(root.context, early=True)
        self.check_between(root, set())
        log = root.partition("t", 0)
        names = sorted(path.name for path in Path(root.path, log.directory, "0").iterdir())
        sealed = [info.file_name for info in log.segments.values() if info.sealed]
        assert len(sealed) == 1
        expected = [sealed[0], sealed[0].replace(".arrows", ".keys")]
        assert sorted({*names} - {log.active_segment.file_name}) == sorted(expected)
        assert no_stray_files(root)
        assert healthy(root)

    def check_reopened_after_fault(self, root: Root) -> None:
        """Another call changes nothing."""
        self.check_done(root, "os")

    def check_appends(self, root: Root) -> None:
        """The next record gets the next offset, and is found."""
        log = root.partition("t", 0)
        (receipt,) = log.append([encoded(b"3", keys=[b"0"])])
        assert receipt.base_offset == 3 * KEYS
        found = last_record(log, b"0", log.start_offset(), log.end_offset())
        assert found is not None
        assert found.value == b"3"


FAULTS = KeyIndexFaults()


@COMPANY
def test_when_it_is_killed_each_key_has_its_last_value(directory, company):
    """D28: at every operation; the next round writes what is missing, and no file is left over."""
    assert FAULTS.kill_everywhere(directory, 4, company) >= choose(test=2, all=60)


@pytest.mark.tier("all")
def test_when_it_fails_each_key_has_its_last_value(directory):
    """D28: any operation, once or from then on."""
    assert FAULTS.fail_everywhere(directory, 6) >= choose(test=1, all=20)


@pytest.mark.tier("all")
def test_after_a_power_cut_each_key_has_its_last_value(directory):
    """D28: at every cut."""
    limit = choose(test=20, all=400)
    assert FAULTS.cut_everywhere(directory, limit) >= limit / 4
