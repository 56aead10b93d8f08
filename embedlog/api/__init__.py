"""The public API above producers and consumers: logs, topics and consumer groups."""

from __future__ import annotations

from embedlog.api.log import Log, open  # noqa: A004 - like `shelve.open`

__all__ = ["Log", "open"]
