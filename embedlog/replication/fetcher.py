"""Copying to in-sync followers what was appended with ``acks=1``, and noting who lags.

As in Kafka, copies that are in sync are not throttled (KIP-73), and one that has not been as
long as the leader's log for `replica.lag.time.max.ms` leaves the ISR.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from embedlog.errors import (
    NotLeaderOrFollowerError,
    ReplicaNotAvailableError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.partition.tail import Tail
from embedlog.replication.catch_up import History, history_of
from embedlog.replication.files import BrokenDirectoryError, copy_range
from embedlog.replication.isr import FollowerProgress, PartitionAssignment
from embedlog.replication.partition import LeaderAndEpoch, ReplicatedPartition
from embedlog.segment import CHUNK_BYTES

if TYPE_CHECKING:
    from embedlog.replication.root import ReplicatedRoot

_logger = logging.getLogger("embedlog.replication")


class ReplicaFetcher:
    """Has in-sync followers catch up with their leaders, again and again.

    Args:
        histories: By directory: gets what each follower that leaves an ISR had.
        now_ms: The clock, in milliseconds.
    """

    def __init__(
        self,
        histories: dict[int, dict[bytes, History]],
        now_ms: Callable[[], int] = lambda: int(monotonic() * 1000),
    ) -> None:
        self._histories, self._now_ms = histories, now_ms
        self._progress: dict[tuple[bytes, int], FollowerProgress] = {}
        """Of followers, by the key of the partition, in positions of its active segment."""
        self._idle_ms = self._now_ms()
        """When nothing had been appended; followers without progress had everything then."""
        self._seen_version = -1

    def fetch(self, root: ReplicatedRoot, stopped: Callable[[], bool]) -> int:
        """Do one round over all partitions; return how many bytes were copied."""
        live, copied = root.context.live, 0
        version = live.version()
        if version == self._seen_version:
            self._idle_ms = self._now_ms()
            self._progress = {
                key: each
                for key, each in self._progress.items()
                if each.log_end_offset < each.seen_leader_end
            }
            return 0
        for log in root.partition_logs(root.topics().values()):
            assert isinstance(log, ReplicatedPartition)
            if stopped():
                return copied
            try:
                if live.get(log.tail_key) is not None:  # used since the boot
                    copied += self._fetch_partition(log, stopped)
            except (
                NotLeaderOrFollowerError,
                ReplicaNotAvailableError,
                UnknownTopicOrPartitionError,
            ):
                continue  # it changed meanwhile
            except StorageError as error:
                _logger.warning("Replication of %s-%d: %s", log.topic, log.partition, error)
        self._seen_version = version
        return copied

    def _fetch_partition(self, log: ReplicatedPartition, stopped: Callable[[], bool]) -> int:
        assignment = log.assignment
        if not assignment.in_sync_followers:
            return 0
        leader, tail = log.leader_and_epoch(), log.tail()
        log.refresh()
        if log.active_segment.id != tail.segment_id:
            return 0  # a roll completes the copies
        followers = assignment.in_sync_followers
        copied = sum(self._fetch_to(log, leader, each, tail, stopped) for each in followers)
        after = log.tail()
        if after.segment_id == tail.segment_id:
            lagging = assignment.out_of_sync(
                {each: self._progress[log.key, each] for each in followers},
                *(after.log_end_position, self._now_ms(), log.config.replica_lag_time_max_ms),
            )
            self._leave_isr(log, leader, lagging)
        return copied

    def _leave_isr(
        self, log: ReplicatedPartition, leader: LeaderAndEpoch, lagging: Collection[int]
    ) -> None:
        for each in lagging:
            info = log.controller.image.directories.get(each)
            path = "a directory that was removed" if info is None else info.path
            _logger.warning("%s-%d: the copy in %s lags", log.topic, log.partition, path)
            self._histories.setdefault(each, {})[log.key] = history_of(log)

        def shrink(before: PartitionAssignment) -> PartitionAssignment:
            return before.shrink(lagging) if before.leader == leader.leader else before

        if lagging:
            log.controller.change_assignment(log.key, shrink)

    def _fetch_to(
        self,
        log: ReplicatedPartition,
        leader: LeaderAndEpoch,
        follower_id: int,
        tail: Tail,
        stopped: Callable[[], bool],
    ) -> int:
        """Copy what a follower lacks of the active segment, below the published position.

        Notes its progress, and returns how many bytes were copied.  Ends early if the follower
        lags too long: it leaves the ISR next, and then has more time.
        """
        controller, path = log.controller, log.path_of(log.active_segment)
        stop, copied, max_lag_ms = tail.log_end_position, 0, log.config.replica_lag_time_max_ms
        key = log.key, follower_id
        before = self._progress.get(key)
        progress = self._progress[key] = FollowerProgress(
            caught_up_ms=self._idle_ms if before is None else before.caught_up_ms
        )
        source = controller.directories.get(leader.leader)
        follower = controller.directories.get(follower_id)
        if source is None or follower is None:
            return 0
        try:
            with follower.files.opened(path, write=True) as target, source.files.opened(path) as fd:
                position = follower.files.size(target)
                progress = progress.seen(position, stop, self._now_ms())
                while (
                    position < stop
                    and progress.is_caught_up(stop, self._now_ms(), max_lag_ms)
                    and not stopped()
                ):
                    end = min(position + CHUNK_BYTES, stop)
                    count = copy_range(
                        *((source, fd), (follower, target), position, end),
                        guard=partial(log.locked_under, leader, follower_id),
                    )
                    copied, position = copied + count, end
                # Appends with acks="all" write there, too.
                after, position = log.tail(), max(position, follower.files.size(target))
                if after.segment_id == tail.segment_id:
                    end, now_ms = after.log_end_position, self._now_ms()
                    self._progress[key] = progress.seen(position, end, now_ms)
        except BrokenDirectoryError as broken:
            controller.take_offline({broken.directory.id: broken.error})
        except StorageError as error:
            directory = controller.find_broken(error)
            if directory is not None:
                controller.take_offline({directory.id: error})
            elif not error.missing:
                raise
            # Rolled, or deleted, meanwhile.
        return copied
