"""Commits of a consumer: automatic, synchronous and asynchronous."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from embedlog.callbacks import check_callback
from embedlog.config import ConsumerConfig
from embedlog.consumer.assignment import Assignment
from embedlog.consumer.cursor import PartitionCursor
from embedlog.display import plural
from embedlog.errors import EmbedlogError
from embedlog.lazy import logging
from embedlog.record import OffsetAndMetadata, TopicPartition

if TYPE_CHECKING:
    from concurrent.futures import Future

Positions = Mapping[TopicPartition, OffsetAndMetadata]
Callback = Callable[[Positions, BaseException | None], object]

_log = logging.getLogger("embedlog.consumer")


class Committer:
    """Commits the positions of an assignment, automatically or on request.

    Every commit is made immediately, in the order of the calls, so an older one never
    overwrites a newer one; only callbacks wait for the consumer's thread.
    """

    def __init__(
        self,
        config: ConsumerConfig,
        assignment: Assignment,
        commit: Callable[[Positions, float | None], None],
    ) -> None:
        self._assignment, self._commit = assignment, commit
        self._auto_commit = config.enable_auto_commit and config.group_id is not None
        self._interval = config.auto_commit_interval_ms / 1000
        self._backoff = config.retry_backoff_ms / 1000
        self._due = monotonic() + self._interval
        self._callbacks: deque[Callable[[], object]] = deque()

    # Auto-commit

    def restart_interval(self) -> None:
        """Begin the auto-commit interval again, after partitions were assigned."""
        self._due = monotonic() + self._interval

    def auto_commit_if_due(self) -> None:
        """Commit what earlier polls returned, if the interval has passed."""
        if self._auto_commit and monotonic() >= self._due:
            self._due = monotonic() + self._interval
            self._auto_commit_consumed(retry=True)

    def seconds_to_auto_commit(self) -> float:
        """Return when there is something to commit; infinity if there is nothing."""
        if not self._auto_commit or not self._uncommitted():
            return inf
        return max(self._due - monotonic(), 0.0)

    def auto_commit_now(self) -> None:
        """Commit before partitions are revoked; a failure does not prevent that."""
        if self._auto_commit:
            self._auto_commit_consumed(retry=False)

    def _auto_commit_consumed(self, retry: bool) -> None:
        """Commit the positions of `PartitionCursor.consumed` that are not committed yet."""
        changed = self._uncommitted()
        if not changed:
            return
        try:
            self._commit(_positions(changed), None)
        except EmbedlogError as error:
            _log.warning("Auto-commit of %s failed: %s", plural(len(changed), "partition"), error)
            if retry and error.retriable:
                self._due = monotonic() + self._backoff
        else:
            for cursor, offset in changed:
                cursor.committed = offset

    def _uncommitted(self) -> list[tuple[PartitionCursor, int]]:
        consumed = [(cursor, cursor.consumed) for cursor in self._assignment]
        return [
            (cursor, offset)
            for cursor, offset in consumed
            if offset is not None and offset != cursor.committed
        ]

    # On request

    def commit_sync(self, positions: Positions | None, timeout_ms: float | None) -> None:
        """Run the callbacks of earlier commits, and then commit."""
        self.run_callbacks()
        self._commit_by_program(self.chosen(positions), timeout_ms)

    def commit_async(
        self, positions: Positions | None, callback: Callback | None
    ) -> Future[Positions]:
        """Commit; errors go to the future and to the callback, which runs later."""
        from concurrent.futures import Future

        if callback is not None:
            check_callback(callback, "The callback of commit_async")
        chosen = dict(self.chosen(positions))
        future: Future[Positions] = Future()
        error: BaseException | None = None
        try:
            self._commit_by_program(chosen, None)
            future.set_result(chosen)
        except EmbedlogError as failure:
            error = failure
            future.set_exception(failure)
            if callback is None:
                _log.error("asynchronous commit failed: %s", failure)
        if callback is not None:
            self._callbacks.append(lambda: callback(chosen, error))
        return future

    def chosen(self, positions: Positions | None) -> Positions:
        """Return the positions, or those of all partitions where they are resolved."""
        if positions is not None:
            return positions
        return _positions((cursor, cursor.known_position) for cursor in self._assignment)

    def _commit_by_program(self, positions: Positions, timeout_ms: float | None) -> None:
        if positions:
            self._commit(positions, timeout_ms)
        for partition, position in positions.items():
            cursor = self._assignment.get(partition)
            # Partitions that are not assigned may be committed as well.
            if cursor is not None:
                cursor.note_commit_by_program(position.offset)

    def run_callbacks(self) -> None:
        """Run the callbacks of earlier asynchronous commits, in order."""
        while self._callbacks:
            self._callbacks.popleft()()


def _positions(offsets: Iterable[tuple[PartitionCursor, int | None]]) -> Positions:
    """Return the positions to commit, without the unknown ones."""
    return {
        cursor.partition: OffsetAndMetadata(offset, "", cursor.leader_epoch)
        for cursor, offset in offsets
        if offset is not None
    }
