"""Comparing the copies of all partitions of a log, and repairing those that are damaged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress

from embedlog.errors import (
    NotLeaderOrFollowerError,
    ReplicaNotAvailableError,
    UnknownTopicOrPartitionError,
)
from embedlog.failures import Failures
from embedlog.record import TopicPartition
from embedlog.replication import reassign
from embedlog.replication.catch_up import replicate
from embedlog.replication.mend import Comparison, ReplicaDifference, examine
from embedlog.replication.partition import ReplicatedPartition
from embedlog.replication.recovery import BaseReplicatedRoot

_logger = logging.getLogger("embedlog.replication")
Progress = Callable[[int, int], object]
"""Called with the number of partitions that are done, and of all."""


def verify_copies(
    root: BaseReplicatedRoot, progress: Progress | None = None
) -> list[ReplicaDifference]:
    """Return where the in-sync copies of each partition are damaged or differ; changes nothing."""
    return [each for _, found in _examine_all(root, progress) for each in found.differences]


def repair_copies(
    root: BaseReplicatedRoot, *, dry_run: bool = False
) -> tuple[list[str], set[TopicPartition]]:
    """Write again what copies have damaged or lack, from the copies that have it.

    Killed in between, it can be repeated.

    Returns messages about what is done, or would be, and the partitions of which no record is
    damaged in all copies.  The others must be repaired next, as those of a log in one directory.
    """
    messages, mended = [], set()
    for partition, found in _examine_all(root, mend=not dry_run):
        messages += [
            f"{each}: the copy is made again from a good one" for each in found.differences
        ]
        if not found.is_lost:
            mended.add(partition)
    if not dry_run:
        # Copies that lacked whole files, and left the ISR; what fails is noted.
        replicate(root, failures=Failures(_logger))
    return messages, mended


def _examine_all(
    root: BaseReplicatedRoot, progress: Progress | None = None, *, mend: bool = False
) -> Iterator[tuple[TopicPartition, Comparison]]:
    """Yield what is found in the copies of each partition in which something is wrong."""
    partitions = list(reassign.assignments(root))
    for done, (info, number, _) in enumerate(partitions):
        if progress is not None:
            progress(done, len(partitions))
        # It may be deleted, moved or offline by now.
        with suppress(
            NotLeaderOrFollowerError, ReplicaNotAvailableError, UnknownTopicOrPartitionError
        ):
            log = root.partition(info.name, number)
            assert isinstance(log, ReplicatedPartition)
            found = examine(log, log.controller, mend=mend)
            if found.differences:
                yield TopicPartition(info.name, number), found
