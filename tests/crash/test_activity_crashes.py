"""Events reported by a process that is killed, or whose disk fails, at every operation."""

from __future__ import annotations

import errno
import json
import logging
from typing import ClassVar

from support.faulty_roots import COMPANY, Acknowledge, RootFaults
from support.roots import encoded, fill, healthy, make_log, open_root
from support.tiers import choose

from embedlog.catalog import ACTIVITY
from embedlog.errors import DiskFullError, EmbedlogError
from embedlog.failures import Failures
from embedlog.maintenance import activity
from embedlog.record import TopicPartition
from embedlog.root.root import Root

SMALL = {"segment.bytes": 2 * encoded(b"v0").size}
FAILURES = Failures(logging.getLogger("embedlog.test"))
ALL = [("altered", "b"), ("created", "a"), ("created", "b"), ("rolled", "a-0"), ("rolled", "a-0")]


def not_fenced(_: object) -> None:
    """No process is fenced."""


def look(root: Root) -> None:
    activity.report(root, activity.detect_changes(root, not_fenced, FAILURES), 1)


def read_events(root: Root) -> list[tuple[str, str]]:
    if ACTIVITY not in root.topics():
        return []
    reader, events = root.partition(ACTIVITY, 0).reader(0), []
    while batches := reader.read(1 << 20):
        for batch in batches:
            _, keys, values, _ = batch.lists()
            pairs = zip(keys, values, strict=True)
            events += [(json.loads(value)["kind"], key.decode()) for key, value in pairs]
    return sorted(event for event in events if event[0] not in ("owner", "recovered"))


class ActivityFaults(RootFaults):
    """Two looks at changes of topics: an event may be missing, and none is wrong or twice."""

    parts: ClassVar = [TopicPartition("a", 0)]

    def fill(self, root: Root) -> None:
        """Create the topics, one with records, before the first look."""
        fill(make_log(root, SMALL, "a"), 3)
        make_log(root, topic="b")

    def work(self, root: Root, durability: str, acknowledge: Acknowledge) -> EmbedlogError | None:
        """Report the changes, change more, and report that."""
        try:
            look(root)
            fill(root.partition("a", 0), 3, first=3)
            root.alter_topic("b", {"retention.ms": 5})
            look(root)
        except EmbedlogError as error:
            return error
        return None

    def check_between(self, root: Root, acked: set[str]) -> None:
        """Nothing is reported that did not happen, and nothing more than once."""
        left, events = list(ALL), read_events(root)
        for event in events:
            assert event in left, f"{event} is not so, or told twice: {events}"
            left.remove(event)

    def check_failure(
        self, root: Root, error: EmbedlogError | None, number: int, failed: bool, acked: set[str]
    ) -> None:
        """Once a report found the disk full, an append is refused before it meets the fault."""
        refused = isinstance(error, DiskFullError) and number != errno.EIO
        super().check_failure(root, None if refused else error, number, failed, acked)

    def check_done(self, root: Root, durability: str) -> None:
        """Nor by later looks."""
        look(root)
        look(root)
        self.check_between(root, set())
        assert healthy(root)


FAULTS = ActivityFaults()


def test_without_a_fault_each_event_is_reported_once(tmp_path):
    """Later looks report nothing more."""
    root = open_root(tmp_path / "root")
    FAULTS.fill(root)
    assert FAULTS.work(root, "os", lambda step: None) is None
    FAULTS.check_done(root, "os")
    assert read_events(root) == ALL
    root.close()


@COMPANY
def test_a_process_that_is_killed_tells_nothing_wrong_and_nothing_twice(directory, company):
    """At every operation: an event may be missing, and the log is whole."""
    assert FAULTS.kill_everywhere(directory, 4, company) >= choose(test=2, all=40)


def test_a_disk_that_fails_is_no_failure_of_who_tells(directory):
    """P8, P10: any operation, once or from then on; what is reported after it is as before."""
    FAULTS.fail_everywhere(directory, 4)
