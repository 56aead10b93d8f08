"""The public API above producers and consumers: logs, topics and consumer groups."""

from __future__ import annotations

from embedlog.api.log import Log, open  # noqa: A004 - like `shelve.open`
from embedlog.api.topic import Topic, TopicView

__all__ = ["Log", "Topic", "TopicView", "open"]
