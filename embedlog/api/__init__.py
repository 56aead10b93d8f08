"""What `embedlog.open` returns: a log, and views of its topics."""

from __future__ import annotations

from embedlog.api.log import Log, open  # noqa: A004 - like `shelve.open`
from embedlog.api.topic import Topic, TopicView

__all__ = ["Log", "Topic", "TopicView", "open"]
