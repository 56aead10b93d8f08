"""Copying a partition at its offsets, killed, failing or without power at every operation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support import forks
from support.faulty_roots import COMPANY, Acknowledge, FastUptimeFiles, RootFaults
from support.forks import tell
from support.manual_compaction import keep
from support.mutants import Behaviour, Change
from support.roots import encoded, healthy, no_stray_files
from support.tiers import choose

from embedlog import catalog
from embedlog.config import TopicConfig
from embedlog.errors import EmbedlogError
from embedlog.partition import PartitionLog, unnamed_files
from embedlog.record import TopicPartition
from embedlog.root.root import Root

END = 420


def stored(log: PartitionLog) -> list[Any]:
    """Return the head and the columns of each batch."""
    batches, reader = list[Any](), log.reader(log.start_offset())
    while parts := reader.read():
        for part in parts:
            part.verify()
            head = (
                *(part.base_offset, part.next_offset, part.flags, part.leader_epoch),
                *(part.producer_id, part.producer_epoch, part.base_sequence, part.delete_horizon),
                *(part.min_timestamp, part.max_timestamp),
            )
            batches.append((head, part.columns(part.layout.names).to_pydict()))
    return batches


class CopyFaults(RootFaults):
    """The source has gaps, compacted segments, headers, producers, and three leader epochs."""

    parts: ClassVar = [TopicPartition("source", 0), TopicPartition("target", 0)]
    files = FastUptimeFiles

    def fill(self, root: Root) -> None:
        """Fill the source."""
        for topic in ("source", "target"):
            root.create_topic(topic, 1, TopicConfig.parse({"segment.bytes": 4000}))
        log = root.partition("source", 0)
        for number in range(6):
            log.append([encoded(b"%d" % number, b"x", producer=(7, 0, 2 * number))])
        log.roll()
        keep(log, [0, 3, 4, 8, 10], parts=2)
        log.append_at([(12 + 9 * n, encoded(b"gap", producer=(7, 0, 12 + n))) for n in range(7)])
        log.truncate_to(60)
        log.append([encoded(b"short")])
        log.append_at([(300, encoded(b"headers", headers=[[("h", b"1")]]))])
        log.truncate_to(400)
        log.append_at([(number, encoded(b"end", b"end")) for number in range(400, END, 4)])
        root.flush()

    def work(self, root: Root, durability: str, acknowledge: Acknowledge) -> EmbedlogError | None:
        """Copy a few batches at a time; those of one call are of one segment of the source."""
        source, target = (root.partition(*part) for part in self.parts)
        reader = source.reader(target.end_offset())
        try:
            while placed := reader.read_encoded(1500):
                target.append_at(placed, durability=durability, identical=True)
                acknowledge(str(target.end_offset()))
        except EmbedlogError as error:
            return error
        return None

    def _check_prefix(self, root: Root, least: int) -> None:
        source, target = (stored(root.partition(*part)) for part in self.parts)
        assert target == source[: len(target)]
        end = root.partition("target", 0).end_offset()
        assert end == (target[-1][0][1] if target else 0)
        assert end >= least, f"{least} was acknowledged, and the copy ends at {end}"
        counts = root.partition("target", 0).record_counts
        assert counts.count(0, end) == sum(len(columns["value"]) for _, columns in target)

    def check_between(self, root: Root, acked: set[str]) -> None:
        """The copy is a prefix of the source, with all that was acknowledged."""
        self._check_prefix(root, max(map(int, acked), default=0))

    def check_state(self, root: Root, acked: set[str], durability: str) -> None:
        """After a power cut what was acknowledged is there only with ``fsync``."""
        self.check_between(root, acked if durability == "fsync" else set())
        assert healthy(root)
        self.check_done(root, durability)

    def check_done(self, root: Root, durability: str) -> None:
        """Another call copies the rest; the epochs begin where those of the batches do."""
        assert self.work(root, durability, lambda step: None) is None
        self._check_prefix(root, END - 2)
        target = root.partition("target", 0)
        batches = [head for head, _ in stored(target)]
        begun = {(new[3], new[0]) for old, new in pairwise(batches) if new[3] > old[3]}
        epochs = root.context.state.read(lambda txn: catalog.epochs(txn, target.key))
        # A recovery of the copy begins an epoch of its own, and then the next one may be there.
        assert {*epochs} == {(0, 0), *begun} or {*epochs} - {(0, 0), *begun}
        (producer,) = target.remembered_producers().values()
        of_source = root.partition("source", 0).remembered_producers()[7]
        assert producer.batches[-1] == of_source.batches[-1]
        assert len(target.segments) <= len(root.partition("source", 0).segments) + 8
        assert healthy(root)

    def check_reopened(self, root: Root) -> None:
        """A clean close leaves no file that the manifest does not name."""
        unnamed_files.sweep(root.context, early=True)
        assert no_stray_files(root)
        assert healthy(root)

    def check_appends(self, root: Root) -> None:
        """The next record gets the next offset."""
        end = root.partition("target", 0).end_offset()
        assert root.partition("target", 0).append([encoded(b"next")])[0].base_offset == end


FAULTS = CopyFaults()


@COMPANY
def test_when_it_is_killed_the_copy_is_a_prefix(directory, company):
    """At every operation; the next call goes on exactly there."""
    assert FAULTS.kill_everywhere(directory, 4, company) >= choose(test=2, all=100)


@pytest.mark.tier("all")
def test_when_it_fails_nothing_is_lost(directory):
    """Any operation, once or from then on; with the same handle all is done after."""
    assert FAULTS.fail_everywhere(directory, 6) >= choose(test=1, all=60)


@pytest.mark.tier("all")
@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_after_a_power_cut_the_copy_is_a_prefix(directory, durability):
    """At every cut; with fsync it has all that was acknowledged, gaps or not."""
    limit = choose(test=20, all=1500)
    assert FAULTS.cut_everywhere(directory, limit, durability) >= limit / 6


APPEND = "embedlog.partition.append"
BUGS = {
    "a gap is not named": Change(f"{APPEND}:PendingAppend.add", {"gap=base - expected": "gap=0"}),
    "the manifest does not learn of gaps": Behaviour(f"{APPEND}:_note_gaps", lambda log: None),
    "a copy gets epochs of its own": Change(
        f"{APPEND}:PendingAppend.add", {"epoch if batch.leader_epoch is None else": "epoch or"}
    ),
    "a batch is read with its offsets as rows": Change(
        "embedlog.batch.add_headers:placed", {"if flags & EXPLICIT_OFFSETS else": "if 0 else"}
    ),
}


def hunt(bug: Callable[[], None], directory: Path) -> str | None:
    directory.mkdir()
    bug()
    try:
        FAULTS.cut_everywhere(directory, 60, "fsync")
    except AssertionError as error:
        return str(error).strip().splitlines()[0]
    return None


@pytest.mark.tier("all")
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(directory, bug):
    """The checks of copies find what they are for."""
    message = forks.call(lambda: hunt(BUGS[bug], directory / bug), patience=300)
    tell(f"{bug}: {message}")
    assert message is not None
