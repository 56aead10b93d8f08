"""Electing a copy that is not in sync: an operator's command, since records may be lost.

The copies of a partition that can be read are counted first: how many records of the log each
has, up to where its files end or have another history.  The longest of those whose directory is
online leads.  If another one that can be read has more, nothing is changed: its directory must
come back first, or be given up.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import ExitStack, suppress

from embedlog.display import plural
from embedlog.errors import (
    EligibleLeadersNotAvailableError,
    NotALogError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.hints import GIVE_UP
from embedlog.partition import PartitionLog
from embedlog.partition.tail import peek_tail
from embedlog.record import TopicPartition
from embedlog.replication.isr import PartitionAssignment
from embedlog.replication.member_file import is_member
from embedlog.replication.metadata import MetadataImage
from embedlog.replication.recovery import BaseReplicatedRoot
from embedlog.replication.segment_copies import end_of_copy

_logger = logging.getLogger("embedlog.replication")


def elect_unclean(
    root: BaseReplicatedRoot, partitions: Collection[TopicPartition]
) -> list[TopicPartition]:
    """Elect leaders for those of some partitions that have none; return which got one.

    A partition without a copy in a directory that is online gets none, nor does one that
    another process changes meanwhile.  Records that only other copies have are lost.

    Raises:
        EligibleLeadersNotAvailableError: A copy in a directory that is offline has more records
            than each that could lead.  No leader was elected.
    """
    controller, chosen = root.controller, {}
    for partition in partitions:
        with suppress(UnknownTopicOrPartitionError):  # it was deleted
            log = root.partition(*partition)
            assignment = controller.assignment(log.key)
            if assignment is not None and assignment.leader is None:
                chosen[log.key] = partition, assignment, _longest(root, log, assignment)

    def elect(key: bytes, before: PartitionAssignment, image: MetadataImage) -> PartitionAssignment:
        _, counted, leader = chosen[key]
        if before != counted or leader is None or leader not in image.online:
            return before
        return before.elect_unclean(leader)

    elected = []
    for key in controller.change_assignments(chosen, elect):
        partition, _, leader = chosen[key]
        elected.append(partition)
        _logger.warning(
            "%s-%d: directory %d was elected, and was not in sync: what it lacks is lost",
            *(*partition, leader),
        )
    return elected


def _longest(
    root: BaseReplicatedRoot, log: PartitionLog, assignment: PartitionAssignment
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


def _count_records(root: BaseReplicatedRoot, log: PartitionLog, directory: int) -> int | None:
    """Return how many records of a partition a directory has; None if it cannot be read."""
    info = root.controller.image.directories.get(directory)
    with suppress(StorageError, NotALogError), ExitStack() as closing_files:
        if info is not None:
            files = root.files(info.path, writable=False, unsafe_filesystem=root.unsafe_filesystem)
            closing_files.callback(files.close_all)
            if is_member(files, root.cluster_id, directory):
                return end_of_copy(log, peek_tail(log.context.live, log.key), files).records
    return None
