"""Comparing the copies of the partitions of a log, each read from its own directory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from embedlog.errors import CorruptionError, EmbedlogError, ReplicaNotAvailableError, StorageError
from embedlog.partition.open_files import OpenFiles, limit_for
from embedlog.partition.partition_log import PartitionLog
from embedlog.partition.state import Context
from embedlog.partition.tail import Tail
from embedlog.replication import reassign
from embedlog.replication.compare import ReplicaDifference, compare_replicas
from embedlog.replication.directory import LogDirectory
from embedlog.replication.recovery import HasDirectories


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
    with ExitStack() as closing:
        contexts: dict[int, Context] = {}
        for directory in root.controller.current().online:
            with suppress(StorageError):
                context = _context(root, directory)
                closing.callback(context.files.close_all)
                contexts[directory.id] = context
        for done, (info, number, assignment) in enumerate(partitions):
            if progress is not None:
                progress(done, len(partitions))
            with suppress(ReplicaNotAvailableError):
                root.partition(info.name, number).tail()  # a new leader has taken over now
            order = (assignment.leader, *assignment.in_sync_followers)
            copies = {
                contexts[each].root: _CopyLog(contexts[each], info, number)
                for each in order
                if each in contexts
            }
            try:
                differences += compare_replicas(copies)
            finally:
                for copy in copies.values():
                    copy.close()
    return differences


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
