"""Warnings of subscriptions that match no topic, such as one with a misspelt name."""

from __future__ import annotations

import logging
from collections.abc import Iterable

_log = logging.getLogger("embedlog.consumer")


class MissingTopics:
    """Warns of topics that a consumer waits for, and again only after a change."""

    def __init__(self) -> None:
        self._warned: frozenset[str] = frozenset()

    def report(self, names: Iterable[str], pattern: str | None = None) -> None:
        """Warn of names that do not exist, or of a pattern that matches none.

        Call it whenever the topics were looked up.
        """
        missing = frozenset(names)
        new, self._warned = missing - self._warned, missing
        if not new:
            return
        if pattern is None:
            _log.warning(
                "The consumer waits for topics that do not exist: %s", ", ".join(sorted(new))
            )
        else:
            _log.warning("The consumer waits for a topic that matches the pattern %r", pattern)
