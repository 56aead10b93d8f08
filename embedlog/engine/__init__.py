"""What `embedlog.open` returns: a log, and views of its topics."""

from __future__ import annotations

from embedlog.engine.log import Log, open  # noqa: A004 - like `shelve.open`
from embedlog.engine.topic import Topic, View

__all__ = ["Log", "Topic", "View", "open"]
