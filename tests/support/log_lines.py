"""Counts what embedlog logs: a state is logged once, and not again at each attempt."""

from __future__ import annotations

import logging
import re
from collections import Counter
from types import TracebackType


class LogLines(logging.Handler):
    """Counts the warnings of embedlog by their text, in which numbers are alike.

    >>> with LogLines() as lines:                                         # doctest: +SKIP
    ...     work()
    >>> lines.repeated(3)                                                 # doctest: +SKIP
    {}
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.counts[re.sub(r"\d+", "N", record.getMessage())] += 1

    def repeated(self, most: int) -> dict[str, int]:
        """Return the texts that were logged more often, with their numbers."""
        return {text: count for text, count in self.counts.items() if count > most}

    def __enter__(self) -> LogLines:
        logging.getLogger("embedlog").addHandler(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        logging.getLogger("embedlog").removeHandler(self)
