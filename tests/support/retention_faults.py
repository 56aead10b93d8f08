"""A round of retention that is killed, fails, or loses power at any of its operations."""

from __future__ import annotations

import errno
from typing import ClassVar

from embedlog.config import TopicConfig
from embedlog.errors import EmbedlogError
from embedlog.partition import pending_deletes
from embedlog.record import TopicPartition
from embedlog.retention import delete_records, retain
from embedlog.root.root import Root
from support.clock import START
from support.faulty_files import FaultyFiles
from support.faulty_roots import Acknowledge, RootFaults
from support.roots import encoded, healthy, no_stray_files, rows

DAY = 86_400_000
NOW = START + 30 * DAY
SIZE = encoded(b"v0").size
GOALS = {"aged": (7, 8), "large": (4, 8), "asked": (5, 8), "whole": (8, 8)}
"""The first offset of each topic after the work, and its end."""
CONFIG: dict[str, dict[str, object]] = {
    # Its last segment holds a young record.
    "aged": {"retention.ms": DAY, "file.delete.delay.ms": 0},
    "large": {"retention.bytes": 2500, "file.delete.delay.ms": 1},
    "asked": {"file.delete.delay.ms": 0},
    "whole": {"retention.ms": DAY, "file.delete.delay.ms": 0},
}


class FastUptimeFiles(FaultyFiles):
    """The files of a machine whose uptime passes every delay at once."""

    def uptime_ms(self) -> int:
        self.ups = getattr(self, "ups", 0) + 10
        return super().uptime_ms() + self.ups


class RetentionFaults(RootFaults):
    """One round of retention, and a deletion of records by request."""

    parts: ClassVar = [TopicPartition(name, 0) for name in GOALS]
    files = FastUptimeFiles

    def fill(self, root: Root) -> None:
        """Create the topics, with eight records in four segments each."""
        for name, more in CONFIG.items():
            usual: dict[str, object] = {"segment.bytes": 2 * SIZE, "retention.ms": -1}
            root.create_topic(name, 1, TopicConfig.parse(usual | more))
            log = root.partition(name, 0)
            for number in range(8):
                young = name == "aged" and number == 7
                at = NOW if young else START + number
                log.append([encoded(b"%02d" % number, at=at)])
        root.flush()

    def work(self, root: Root, durability: str, acknowledge: Acknowledge) -> EmbedlogError | None:
        """Run the round, and then delete the records."""
        errors = []
        for step in (
            lambda: retain(root, NOW),
            lambda: delete_records(root.partition("asked", 0), 5),
        ):
            try:
                step()
            except EmbedlogError as error:
                errors.append(error)
        if errors:
            return errors[0]
        acknowledge("done")
        return None

    def check_between(self, root: Root, acked: set[str], *, full: bool = False) -> None:
        """Every topic has its old or its new start; no record between is missing or double.

        On a full disk a round may delete fewer segments than are due.
        """
        for name, (goal, end) in GOALS.items():
            log = root.partition(name, 0)
            start = log.start_offset()
            allowed = range(0, goal, 2) if full else (0,)
            assert start in (*allowed, goal), f"{name} begins at {start}, neither 0 nor {goal}"
            assert start == goal or "done" not in acked, f"{name} went back"
            assert log.end_offset() == end, f"{name} ends at {log.end_offset()}"
            records = [(row[0], row[3]) for row in rows(log)]
            assert records == [(n, b"%02d" % n) for n in range(start, end)], f"{name}: {records}"

    def check_failure(
        self, root: Root, error: EmbedlogError | None, number: int, failed: bool, acked: set[str]
    ) -> None:
        """The first error has the errno of the fault."""
        assert error is None or error.errno == number, error  # type: ignore[attr-defined]
        if not failed:
            self.check_between(root, set(), full=number != errno.EIO)

    def check_done(self, root: Root, durability: str) -> None:
        """Another round finishes the work, and leaves no file that the manifest does not name."""
        assert self.work(root, durability, lambda step: None) is None
        pending_deletes.sweep(root.context, early=True)
        for name, (goal, end) in GOALS.items():
            log = root.partition(name, 0)
            assert (log.start_offset(), log.end_offset()) == (goal, end)
        assert no_stray_files(root)
        assert pending_deletes.paths(root.context.live) == set()
        assert healthy(root)

    def check_reopened_after_fault(self, root: Root) -> None:
        """Another round changes nothing."""
        self.check_done(root, "os")

    def check_appends(self, root: Root) -> None:
        """The next record of each topic gets the next offset."""
        for name in GOALS:
            assert root.partition(name, 0).append([encoded(b"08")])[0].base_offset == 8


FAULTS = RetentionFaults()
