"""The settings of a group for records that it cannot handle: those of KIP-1191."""

from __future__ import annotations

from embedlog.config.settings import Settings
from embedlog.config.values import optional_text, switch


class GroupConfig(Settings):
    """The settings of a group for its dead letters.

    >>> GroupConfig.parse({"errors.deadletterqueue.topic.name": "orders.dlq"}).overrides()
    {'errors.deadletterqueue.topic.name': 'orders.dlq'}
    """

    errors_deadletterqueue_topic_name: str | None = optional_text()
    """The topic of the records that the group gave up; the same as ``dead_letter`` of
    `embedlog.Retry`."""
    errors_deadletterqueue_copy_record_enable: bool = switch(True)
    """Whether a dead letter has the key, the value and the headers of its record, or only says
    where that is; Kafka's default is false."""
    errors_deadletterqueue_auto_create_topics_enable: bool = switch(True)
    """Whether the topic is created if it does not exist; in Kafka a broker setting, and false."""
