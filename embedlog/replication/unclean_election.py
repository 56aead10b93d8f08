"""Electing a copy that is not in sync: an operator's command, since records may be lost.

The copies of a partition that can be read are counted first: how many records of the log each
has, up to where its files end or have another history.  The longest of those whose directory is
online leads.  If another one that can be read has more, nothing is changed: its directory must
come back first, or be given up.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Collection
from contextlib import ExitStack, closing, suppress
from operator import itemgetter

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
from embedlog.hints import GIVE_UP
from embedlog.partition.tail import TAILS
from embedlog.record import TopicPartition
from embedlog.replication.isr import PartitionAssignment
from embedlog.replication.member_file import is_member
from embedlog.replication.metadata import MetadataImage
from embedlog.replication.partition import ReplicatedPartition
from embedlog.replication.recovery import HasDirectories

_logger = logging.getLogger("embedlog.replication")


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
    names, chosen = {}, {}
    for partition in partitions:
        with suppress(UnknownTopicOrPartitionError):  # it was deleted
            log = root.partition(*partition)
            assert isinstance(log, ReplicatedPartition)
            assignment = root.controller.assignment(log.key)
            if assignment is not None and assignment.leader is None:
                names[log.key] = partition
                chosen[log.key] = assignment, _longest(root, log, assignment)

    def elect(key: bytes, before: PartitionAssignment, image: MetadataImage) -> PartitionAssignment:
        counted, leader = chosen[key]
        if before != counted or leader is None or leader not in image.online:
            return before
        return before.elect_unclean(leader)

    elected = root.controller.change_assignments(chosen, elect)
    for key in elected:
        _logger.warning(
            "%s-%d: directory %d was elected, and was not in sync: what it lacks is lost",
            *(*names[key], chosen[key][1]),
        )
    return [names[key] for key in elected]


def _longest(
    root: HasDirectories, log: ReplicatedPartition, assignment: PartitionAssignment
) -> int | None:
    """Return the directory that is online and has the most records; None without one."""
    image = root.controller.image
    found = {each: _count_records(root, log, each) for each in assignment.replicas}
    counts = {each: count for each, count in found.items() if count is not None}
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
            todo="Bring that directory back." + GIVE_UP,
        )
    return leader


def _count_records(root: HasDirectories, log: ReplicatedPartition, directory: int) -> int | None:
    """Return how many records of a partition a directory has; None if it cannot be read."""
    info = root.controller.image.directories.get(directory)
    with suppress(StorageError, NotALogError), ExitStack() as closing_files:
        if info is not None:
            files = root.files(info.path, writable=False, unsafe_filesystem=root.unsafe_filesystem)
            closing_files.callback(files.close_all)
            if is_member(files, root.cluster_id, directory):
                return _count_in(log, files)
    return None


def _count_in(log: ReplicatedPartition, files: Files) -> int:
    """Return how many records of a partition are in some files, from the first one on."""
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
