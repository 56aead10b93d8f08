"""Snapshots that are killed, fail or lose power at every operation."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from support.clock import START
from support.faulty_roots import COMPANY, Acknowledge, RootFaults
from support.roots import encoded, healthy, rows
from support.tiers import choose

from embedlog.config import TopicConfig
from embedlog.errors import EmbedlogError, UnknownSnapshotError
from embedlog.keyspace import LEASES, SNAPSHOTS
from embedlog.record import TopicPartition
from embedlog.retention import retain
from embedlog.root.root import Root
from embedlog.snapshots import snapshot

DAY = 86_400_000
SIZE = encoded(b"v0").size


class SnapshotFaults(RootFaults):
    """One snapshot is deleted, and another one taken, of records that no flush covered."""

    parts: ClassVar = [TopicPartition("t", 0), TopicPartition("t", 1)]

    def fill(self, root: Root) -> None:
        """Create a topic with eight records in four segments of each partition."""
        config: dict[str, object] = {"segment.bytes": 2 * SIZE, "retention.ms": DAY}
        root.create_topic("t", 2, TopicConfig.parse(config | {"file.delete.delay.ms": 0}))
        for number in range(8):
            for part in self.parts:
                root.partition(*part).append([encoded(b"%02d" % number, at=START)])
        snapshot.take(root, "old", [root.topic("t")], None)

    def work(self, root: Root, durability: str, acknowledge: Acknowledge) -> EmbedlogError | None:
        """Append, take the new one, and delete the old one."""
        try:
            for part in self.parts:
                while root.partition(*part).end_offset() < 9:
                    root.partition(*part).append([encoded(b"08", at=START)])
            acknowledge("appended")
            if not any(each.name == "new" for each in snapshot.snapshots(root.context)):
                snapshot.take(root, "new", [root.topic("t")], None)
            acknowledge("taken")
            try:
                snapshot.delete(root.context, "old")
            except UnknownSnapshotError:
                pass  # when the work is repeated
            acknowledge("deleted")
        except EmbedlogError as error:
            return error
        return None

    def check_between(self, root: Root, acked: set[str]) -> None:
        """There is one of the two, at least, and each has its records, whatever is due."""
        retain(root, START + 30 * DAY)
        known = {each.name: each for each in snapshot.snapshots(root.context)}
        assert "new" in known or "taken" not in acked
        assert "old" in known or "new" in known
        assert "old" not in known or "deleted" not in acked
        # Also while another one holds the same records.
        assert {f"snapshot:{name}" for name in known} <= _leases(root)
        for name, each in known.items():
            for part, (start, end) in each.offsets().items():
                assert (start, end) in [(0, 8 if name == "old" else 9)]
                found = [row[3] for row in rows(root.partition(*part)) if row[0] < end]
                assert found == [b"%02d" % number for number in range(end)]

    def check_done(self, root: Root, durability: str) -> None:
        """Nothing is left of the old one, and then of the other one."""
        assert self.work(root, durability, lambda step: None) is None
        self.check_between(root, {"taken", "deleted"})
        names = root.context.files.list("snapshots")
        assert [name for name in names if not name.endswith(".tmp")] == ["new.json"]
        assert _leases(root) == {"snapshot:new"}
        assert root.context.state.read(lambda txn: list(SNAPSHOTS.keys(txn))) == [("new",)]
        assert healthy(root)


def _leases(root: Root) -> set[str]:
    return {name for _, name in root.context.live.read(lambda txn: list(LEASES.keys(txn)))}


FAULTS = SnapshotFaults()


@COMPANY
def test_a_snapshot_that_is_killed_is_there_or_not(directory, company):
    """P1: a complete one has its hold, and what is left of others is removed."""
    assert FAULTS.kill_everywhere(directory, 4, company) >= choose(test=2, all=60)


@pytest.mark.tier("all")
def test_a_snapshot_that_fails_changes_nothing(directory):
    """P8: any operation, once or from then on."""
    assert FAULTS.fail_everywhere(directory, 6) >= choose(test=1, all=30)


@pytest.mark.tier("all")
def test_a_snapshot_survives_a_power_cut(directory):
    """P4: once it is taken, its records are on the disk, and held in the next boot."""
    limit = choose(test=20, all=600)
    assert FAULTS.cut_everywhere(directory, limit) >= limit / 3


def no_flush(monkeypatch: Any) -> None:
    """The records are not flushed."""
    monkeypatch.setattr(snapshot, "_flush", lambda root, tails: None)


def lease_last(monkeypatch: Any) -> None:
    """The row is complete before the leases are there."""
    monkeypatch.setattr(snapshot.leases, "hold_snapshot", lambda txn, name, offsets: None)


def row_last(monkeypatch: Any) -> None:
    """A deletion removes the leases while the row is complete."""
    put = snapshot._put

    def only_complete(context: Any, each: Any, *, complete: bool) -> None:
        if complete:
            put(context, each, complete=True)

    monkeypatch.setattr(snapshot, "_put", only_complete)


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "plant",
    [
        lease_last,
        no_flush,
        row_last,
    ],
)
def test_a_planted_bug_is_found(directory, monkeypatch, plant):
    """What the checks above are worth."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, EmbedlogError)):
        FAULTS.kill_everywhere(directory, 1000)
        FAULTS.cut_everywhere(directory, 60)
