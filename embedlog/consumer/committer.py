"""When and what a consumer commits (E20-E23)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from time import monotonic
from typing import Any

from embedlog.config import ConsumerConfig
from embedlog.consumer.assignment import Assignment, PartitionCursor
from embedlog.errors import EmbedlogError
from embedlog.record import OffsetAndMetadata, TopicPartition

Positions = Mapping[TopicPartition, OffsetAndMetadata]
Callback = Callable[[Positions, BaseException | None], Any]

_log = logging.getLogger(__name__)


class Committer:
    """Commits positions of an assignment, by itself and when it is told.

    Every commit is done at once, in the order of the calls, so that an older one
    never lands after a newer one (E22); only callbacks wait for their thread.
    """

    def __init__(
        self,
        config: ConsumerConfig,
        assignment: Assignment,
        commit: Callable[[Positions], None],
    ) -> None:
        self._assignment, self._commit = assignment, commit
        self._automatic = config.enable_auto_commit
        self._interval = config.auto_commit_interval_ms / 1000
        self._backoff = config.retry_backoff_ms / 1000
        self._due = monotonic() + self._interval
        self._waiting: deque[Callable[[], Any]] = deque()

    def positions(self) -> Positions:
        """Return where each partition is, but for those whose position is not known yet."""
        return self._of({feed: feed.place for feed in self._assignment})

    def _consumed(self) -> Positions:
        """Return what auto-commit has to commit: see `PartitionCursor.consumed`."""
        offsets = {feed: feed.consumed for feed in self._assignment}
        return self._of({feed: at for feed, at in offsets.items() if at != feed.committed})

    @staticmethod
    def _of(offsets: Mapping[PartitionCursor, int | None]) -> Positions:
        return {
            feed.where: OffsetAndMetadata(offset, "", feed.leader_epoch)
            for feed, offset in offsets.items()
            if offset is not None
        }

    # By itself

    def restart(self) -> None:
        """Begin the interval anew: partitions were just given (M20b)."""
        self._due = monotonic() + self._interval

    def if_due(self) -> None:
        """Commit if the interval is over: what earlier polls returned (E20)."""
        if self._automatic and monotonic() >= self._due:
            self._due = monotonic() + self._interval
            self._try(retry=True)

    def before_leaving(self) -> None:
        """Commit before partitions go: whatever happens, they do go."""
        if self._automatic:
            self._try(retry=False)

    def _try(self, retry: bool) -> None:
        changed = self._consumed()
        if not changed:
            return
        try:
            self._commit(changed)
        except EmbedlogError as error:
            _log.warning("auto-commit of %d partitions failed: %s", len(changed), error)
            if retry and error.retriable:
                self._due = monotonic() + self._backoff
        else:
            for feed, position in self._feeds(changed):
                feed.committed = position.offset

    # When told

    def now(self, positions: Positions | None) -> None:
        """Commit, and run the callbacks of earlier commits first (E21)."""
        self.run_callbacks()
        wanted = self.positions() if positions is None else positions
        if wanted:
            self._commit_now(wanted)

    def later(self, positions: Positions | None, callback: Callback | None) -> Future[Positions]:
        """Commit, and have the callback run on the consumer's thread; errors go to it."""
        wanted = dict(self.positions() if positions is None else positions)
        done: Future[Positions] = Future()
        error: BaseException | None = None
        try:
            if wanted:
                self._commit_now(wanted)
            done.set_result(wanted)
        except EmbedlogError as failure:
            error = failure
            done.set_exception(failure)
            if callback is None:
                _log.error("a commit failed: %s", failure)
        if callback is not None:
            self._waiting.append(lambda: callback(wanted, error))
        return done

    def _commit_now(self, positions: Positions) -> None:
        self._commit(positions)
        for feed, position in self._feeds(positions):
            feed.overrule(position.offset)

    def _feeds(self, positions: Positions) -> Iterator[tuple[PartitionCursor, OffsetAndMetadata]]:
        """Yield those of the partitions that are assigned; others may be committed as well."""
        for one, position in positions.items():
            feed = self._assignment.find(one)
            if feed is not None:
                yield feed, position

    def run_callbacks(self) -> None:
        """Call back for commits that are done, in their order."""
        while self._waiting:
            self._waiting.popleft()()
