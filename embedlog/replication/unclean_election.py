"""Electing a copy that is not in sync: an operator's command, since records may be lost.

The copies of a partition that can be read are counted first: how many records of the log each
has, up to where its files end or have another history.  The longest of those whose directory is
online leads.  If another one that can be read has more, nothing is changed: its directory must
come back first, or be given up.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, suppress
from operator import itemgetter
from typing import NamedTuple

from embedlog import catalog
from embedlog.display import plural
from embedlog.errors import (
    CorruptionError,
    EligibleLeadersNotAvailableError,
    NotALogError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.files import Files
from embedlog.files.paths import is_directory
from embedlog.partition.tail import TAILS
from embedlog.record import TopicPartition
from embedlog.replication.isr import PartitionAssignment
from embedlog.replication.member_file import is_member
from embedlog.replication.metadata import MetadataImage
from embedlog.replication.partition import ReplicatedPartition
from embedlog.replication.recovery import HasDirectories

_logger = logging.getLogger("embedlog.replication")


class _Choice(NamedTuple):
    """The copy of a partition that is to lead, and what that was decided on."""

    partition: TopicPartition
    assignment: PartitionAssignment
    leader: int
    records: int


def elect_unclean(
    root: HasDirectories, partitions: Collection[TopicPartition]
) -> list[TopicPartition]:
    """Elect leaders for those of some partitions that have none; return which got one.

    A partition without a copy in a directory that is online gets none, nor does one that
    another process changes meanwhile.  Records that only other copies have are lost.

    Raises:
        EligibleLeadersNotAvailableError: A copy in a directory that is offline has more records
            than each that could lead.  No leader was elected.
    """
    choices = {}
    for partition in partitions:
        with suppress(UnknownTopicOrPartitionError):  # it was deleted
            log = root.partition(*partition)
            assert isinstance(log, ReplicatedPartition)
            choice = _choose(root, log)
            if choice is not None:
                choices[log.key] = choice

    def elect(key: bytes, before: PartitionAssignment, image: MetadataImage) -> PartitionAssignment:
        _, assignment, leader, _ = choices[key]
        is_as_counted = before == assignment and leader in image.online
        return before.elect_unclean(leader) if is_as_counted else before

    elected = []
    for key in root.controller.change_assignments(choices, elect):
        partition, _, leader, records = choices[key]
        _logger.warning(
            "%s-%d: directory %d was elected, and was not in sync: the log has its %d records",
            *(*partition, leader, records),
        )
        elected.append(partition)
    return elected


def _choose(root: HasDirectories, log: ReplicatedPartition) -> _Choice | None:
    """Return the copy that is to lead; None if there is a leader, or if no copy can lead."""
    assignment = root.controller.assignment(log.key)
    if assignment is None or assignment.leader is not None:
        return None
    image = root.controller.image
    counts = {}
    for each in assignment.replicas:
        with _opened(root, each) as files:
            if files is not None:
                counts[each] = _count_records(log, files)
    able = [each for each in counts if each in image.online and each in root.controller.directories]
    if not able:
        return None
    leader, longest = (max(each, key=counts.__getitem__) for each in (able, counts))
    if counts[longest] > counts[leader]:
        paths = [image.directories[each].path for each in (leader, longest)]
        raise EligibleLeadersNotAvailableError(
            f"The copy in {paths[0]} has {plural(counts[leader], 'record')}, and that in "
            f"{paths[1]}, which is offline, has {counts[longest]:,}",
            **log.where,
            todo="Bring that directory back; or give it up with remove_replica(path, force=True).",
        )
    partition = TopicPartition(log.topic, log.partition)
    return _Choice(partition, assignment, leader, counts[leader])


@contextmanager
def _opened(root: HasDirectories, directory: int) -> Iterator[Files | None]:
    """Open a directory to read, also one that is offline; None if it cannot be read."""
    controller = root.controller
    online = controller.directories.get(directory)
    if online is not None and directory in controller.image.online:
        yield online.files
        return
    info, files = controller.image.directories.get(directory), None
    with suppress(StorageError, NotALogError):
        if info is not None and is_directory(info.path):
            files = root.files(info.path, writable=False, unsafe_filesystem=root.unsafe_filesystem)
            if not is_member(files, root.cluster_id, directory):
                files.close_all()
                files = None
    try:
        yield files
    finally:
        if files is not None:
            files.close_all()


def _count_records(log: ReplicatedPartition, files: Files) -> int:
    """Return how many records of the log a directory has, from the first one without a gap."""
    segments, epochs = log.context.state.read(
        lambda txn: (catalog.segments(txn, log.key), catalog.epochs(txn, log.key))
    )
    tail, count = TAILS.get(log.context.live, log.key), 0
    for info in segments:
        stop = info.end_position if info.sealed else None
        if tail is not None and info.id == tail.segment_id:
            stop = tail.log_end_position
        try:
            with closing(log.open_segment(info, files=files)) as file:
                position, size = file.start, file.size()
                for batch in file.heads(position, size if stop is None else min(size, stop)):
                    at = bisect_right(epochs, batch.base_offset, key=itemgetter(1))
                    if batch.position + batch.size > size or (
                        at and epochs[at - 1][0] != batch.leader_epoch
                    ):
                        return count
                    count += batch.count
                    position = batch.position + batch.size
        except (StorageError, CorruptionError):
            return count
        if position != stop:
            return count
    return count
