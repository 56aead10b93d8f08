"""Comparing the copies of the partitions of a log, each read from its own directory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from embedlog.catalog import TopicInfo
from embedlog.errors import (
    ClosedError,
    CorruptionError,
    EmbedlogError,
    ReplicaNotAvailableError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.partition.open_files import OpenFiles, limit_for
from embedlog.partition.partition_log import PartitionLog
from embedlog.partition.state import Context
from embedlog.partition.tail import Tail
from embedlog.replication import reassign
from embedlog.replication.compare import ReplicaDifference, compare_replicas
from embedlog.replication.directory import LogDirectory
from embedlog.replication.isr import PartitionAssignment
from embedlog.replication.recovery import HasDirectories

_ATTEMPTS = 5
"""How often a comparison begins again because the copies changed meanwhile."""


def verify_copies(
    root: HasDirectories, progress: Callable[[int, int], object] | None = None
) -> list[ReplicaDifference]:
    """Return where the in-sync copies of each partition differ first; changes nothing.

    What a follower does not have yet, after an append with ``acks=1``, is no difference.

    Args:
        root: The log.
        progress: Called with the number of partitions that are done, and of all.
    """
    differences: list[ReplicaDifference] = []
    partitions = list(reassign.assignments(root))
    contexts: dict[LogDirectory, Context] = {}
    try:
        for done, (info, number, _) in enumerate(partitions):
            if progress is not None:
                progress(done, len(partitions))
            for _attempt in range(_ATTEMPTS):
                with suppress(ReplicaNotAvailableError, UnknownTopicOrPartitionError):
                    root.partition(info.name, number).tail()  # a new leader has taken over now
                version = root.context.state.version()
                before = root.controller.assignment(info.key(number))
                found = [] if before is None else _compare(root, contexts, info, number, before)
                # What was moved away, rolled or compacted while it was read may only seem to
                # differ; what differs in every attempt does.
                if not found or root.context.state.version() == version:
                    break
            differences += found
    finally:
        for context in contexts.values():
            context.files.close_all()
    return differences


def _compare(
    root: HasDirectories,
    contexts: dict[LogDirectory, Context],
    info: TopicInfo,
    number: int,
    assignment: PartitionAssignment,
) -> list[ReplicaDifference]:
    """Compare the in-sync copies of one partition."""
    directories: list[LogDirectory] = []
    copies: dict[str, PartitionLog] = {}
    for each in (assignment.leader, *assignment.in_sync_followers):
        directory = None if each is None else root.controller.directories.get(each)
        if directory is None:
            continue
        directories.append(directory)
        with suppress(StorageError):
            if directory not in contexts:
                contexts[directory] = _context(root, directory)
            copies[directory.path] = _CopyLog(contexts[directory], info, number)
    try:
        return compare_replicas(copies)
    except ClosedError:
        now = root.controller.directories
        if all(now.get(each.id) is each for each in directories):
            raise
        return []  # a directory went offline
    finally:
        for copy in copies.values():
            copy.close()


def _context(root: HasDirectories, directory: LogDirectory) -> Context:
    """Return the context of a log that is read from one directory only."""
    files = root.files(directory.path, writable=False, unsafe_filesystem=root.unsafe_filesystem)
    stores: Any = directory.stores
    return replace(
        root.context,
        files=files,
        state=stores["state"],
        live=stores.get("live", root.context.live),
        open_files=OpenFiles(limit_for(files.most_descriptors())),
        root=directory.path,
    )


class _CopyLog(PartitionLog):
    """The log of a partition as one directory has it; it ends where the directory's files end."""

    def read_tail(self) -> Tail | None:
        """As `PartitionState.read_tail`; of a follower that lags, the end of what it has."""
        tail = super().read_tail()
        if tail is None:
            return None
        self.refresh()
        if self.active_segment.id != tail.segment_id:
            return tail
        try:
            file = self.active_file()
            size = file.size()
        except EmbedlogError as error:
            if not getattr(error, "missing", False):
                raise
            size = 0
        if size >= tail.log_end_position:
            return tail
        end, position = tail.base_offset, 0
        if size:
            position = file.start
            with suppress(CorruptionError):  # of a batch that is being copied
                for batch in file.heads(file.start, size):
                    if batch.position + batch.size > size:
                        break
                    end, position = batch.next_offset, batch.position + batch.size
        return tail._replace(
            log_end_offset=end,
            high_watermark=min(tail.high_watermark, end),
            durable_offset=min(tail.durable_offset, end),
            log_end_position=position,
            high_watermark_position=min(tail.high_watermark_position, position),
        )
