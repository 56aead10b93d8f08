"""Replacing copies that are damaged, or that differ from the leader's, by good ones."""

from __future__ import annotations

from collections.abc import Callable, Collection

from embedlog.record import TopicPartition
from embedlog.replication.compare import ReplicaDifference
from embedlog.replication.isr import PartitionAssignment
from embedlog.replication.partition import ReplicatedPartition
from embedlog.replication.recovery import HasDirectories, replicate
from embedlog.replication.verify_copies import verify_copies


def repair_copies(
    root: HasDirectories,
    dry_run: bool,
    progress: Callable[[int, int], object] | None = None,
) -> dict[TopicPartition, list[str]]:
    """Copy again what is damaged or differs; return in words what is done, or would be.

    Such a copy leaves the ISR; if it leads, a good one takes over first.  Then it is compared with
    the leader's bytes, cut where they differ, and the rest is copied.  Killed in between, the
    housekeeping goes on.  A partition of which no good copy is in sync is left as it is.
    """
    ids = {info.path: each for each, info in root.controller.current().image.directories.items()}
    bad: dict[TopicPartition, set[int]] = {}
    messages: dict[TopicPartition, list[str]] = {}
    for difference in verify_copies(root, progress):
        partition = TopicPartition(difference.topic, difference.partition)
        if difference.copy in ids:
            bad.setdefault(partition, set()).add(ids[difference.copy])
            messages.setdefault(partition, []).append(_message(difference))
    for partition, directories in bad.items():
        log = root.partition(*partition)
        assert isinstance(log, ReplicatedPartition)
        if set(log.assignment.isr) <= directories:
            del messages[partition]
        elif not dry_run:
            _leave_isr(log, directories)
    if messages and not dry_run:
        # A leader that no other copy can replace is repaired next, as a log with one copy is.
        replicate(root, damaged={})
    return messages


def _message(difference: ReplicaDifference) -> str:
    return f"{difference}: the copy is made again from a good one"


def _leave_isr(log: ReplicatedPartition, bad: Collection[int]) -> None:
    """Take copies out of the ISR, and have another one lead if one of them does."""

    def change(before: PartitionAssignment) -> PartitionAssignment:
        good = [each for each in before.isr if each not in bad]
        # What has become of the good ones meanwhile is not known; then nothing is changed.
        return before.elect(good) if good else before

    with log.locked():
        log.controller.change_assignment(log.key, change)
