"""What the housekeeping does for a log over several directories."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import nullcontext
from math import inf
from time import monotonic
from typing import TypeVar

from embedlog.config import MaintenanceConfig
from embedlog.failures import Failures
from embedlog.files.throttle import Throttle
from embedlog.record import TopicPartition
from embedlog.replication import reassign
from embedlog.replication.catch_up import replicate
from embedlog.replication.isr import PartitionAssignment
from embedlog.replication.root import ReplicatedRoot, take_over, try_bring_back
from embedlog.root.root import Root

P = TypeVar("P", bound=Hashable)
_logger = logging.getLogger("embedlog.replication")

PROBE_SECONDS = 5.0
"""How often a directory is written to, to find out that it is broken although nothing uses it."""
_ROUNDS_TO_WAIT = 3
RETRY_SECONDS = 1.0
"""How often a directory that is offline is tried again."""
_LONGEST_RETRIES = 32
"""How many times as long it waits at most, if those that come back go offline again."""


class ReplicationJob:
    """Finds broken directories, brings back those that work, and has followers catch up.

    Args:
        config: The settings of the housekeeping.
    """

    def __init__(self, config: MaintenanceConfig) -> None:
        self._config = config
        self.throttle = Throttle(config.follower_replication_throttled_rate)
        self._began = monotonic()
        self._last: dict[str, float] = {}
        """When a part of the job was last done, by its name."""
        self._retry_seconds = 0.0
        """How often directories are tried that are offline, if those that return do not stay."""
        self._returned_at = -inf
        self._failures = Failures(_logger)
        self._led_epoch = -1
        self._waited = 0
        """For how many rounds an epoch was noted, and not committed."""

    def run(self, root: Root, stopped: Callable[[], bool]) -> int:
        """Do one round; return how many copies joined the ISR."""
        assert isinstance(root, ReplicatedRoot)
        controller = root.controller
        # An epoch that a killed process has noted and not committed is written here: until then,
        # all processes look at the metadata in every operation.
        self._waited = self._waited + 1 if controller.current().moved() else 0
        if self._waited >= _ROUNDS_TO_WAIT:
            controller.change(lambda _txn, _image: True)
        controller.check_directories(probe=self._is_due("probe", PROBE_SECONDS))
        self._bring_back(root)
        if any(each.leader is None for each in controller.image.assignments.values()):
            controller.elect()
        epoch = controller.current().epoch
        if epoch != self._led_epoch:
            # The leaders that were elected since the last round.
            take_over(root, self._failures, only_used=True)
            self._led_epoch = epoch
        self._balance(root)
        return self._replicate(root, stopped)

    def _is_due(self, what: str, seconds: float) -> bool:
        """Whether a part of the job was not done for so long; if so, notes that it is done now."""
        now = monotonic()
        is_due = now - self._last.get(what, self._began) >= seconds
        if is_due:
            self._last[what] = now
        return is_due

    def _bring_back(self, root: ReplicatedRoot) -> None:
        """Bring back directories that work; after pauses that grow, if they do not stay online."""
        image = root.controller.current().image
        seconds = max(self._retry_seconds, RETRY_SECONDS)
        if len(image.online) < len(image.directories) and self._is_due("retry", seconds):
            returned = try_bring_back(root, self._failures)
            if returned:
                longest, now = _LONGEST_RETRIES * RETRY_SECONDS, monotonic()
                has_stayed = now - self._returned_at >= 2 * longest
                self._retry_seconds = 0 if has_stayed else min(2 * seconds, longest)
                self._returned_at = now

    def _replicate(self, root: ReplicatedRoot, stopped: Callable[[], bool]) -> int:
        """Have copies that are out of sync catch up, and finish reassignments."""
        image = root.controller.current().image
        assignments = image.assignments.values()
        is_reassigning = any(each.is_reassigning for each in assignments)
        if not is_reassigning and all(
            {*each.replicas}.isdisjoint({*image.online} - {*each.isr}) for each in assignments
        ):
            return 0
        with reassign.lock(root) if is_reassigning else nullcontext(False) as with_new:
            joined = replicate(
                root,
                with_new=with_new,
                failures=self._failures,
                throttle=self.throttle,
                stopped=stopped,
            )
            if with_new:
                reassign.finish(root)
        return joined

    def _balance(self, root: ReplicatedRoot) -> None:
        """Elect preferred leaders again, if too many partitions are led by others."""
        config, image = self._config, root.controller.current().image
        seconds = config.leader_imbalance_check_interval_seconds
        if config.auto_leader_rebalance_enable and self._is_due("balance", seconds):
            keys = imbalanced_leaders(
                image.assignments, image.online, config.leader_imbalance_per_broker_percentage
            )
            if keys:
                reassign.elect_preferred(
                    root,
                    {
                        TopicPartition(info.name, partition)
                        for info, partition, _ in root.assignments()
                        if info.key(partition) in keys
                    },
                )


def imbalanced_leaders(
    partitions: Mapping[P, PartitionAssignment], alive: Collection[int], percentage: int
) -> set[P]:
    """Return the partitions that must get their preferred leaders, for the balance of leaders.

    They are those that prefer a directory of which more than ``percentage`` of the partitions
    that prefer it are led by others, as Kafka does with `auto.leader.rebalance.enable` and
    `leader.imbalance.per.broker.percentage`.
    """
    preferred = Counter(state.replicas[0] for state in partitions.values())
    elsewhere = Counter(
        state.replicas[0] for state in partitions.values() if state.leader != state.replicas[0]
    )
    return {
        partition
        for partition, state in partitions.items()
        if elsewhere[state.replicas[0]] * 100 > preferred[state.replicas[0]] * percentage
        and state.elect_preferred(alive) is not state
    }
