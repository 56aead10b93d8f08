"""The settings of groups: for records that they cannot handle (KIP-1191), and of share groups."""

from __future__ import annotations

from typing import Literal

from embedlog.config.settings import Settings
from embedlog.config.values import INT_MAX, checked, choice, number, optional_text, switch
from embedlog.times import parse_duration

BY_DURATION = "by_duration:"
"""What the setting begins with where the start of a share group is a time."""


def _reset(value: object) -> str:
    text = str(value)
    if text not in ("latest", "earliest"):
        duration = text.removeprefix(BY_DURATION)
        if duration == text or parse_duration(duration) is None:
            raise ValueError("latest, earliest, or by_duration: with a duration such as PT1H")
    return text


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


class ShareGroupConfig(GroupConfig):
    """The settings of a share group; `embedlog.api.consumer_group.ConsumerGroup.alter` sets them.

    >>> ShareGroupConfig().share_delivery_count_limit
    5
    """

    share_auto_offset_reset: str = checked("latest", _reset)
    """Where the group begins in a partition: ``latest``, ``earliest``, or ``by_duration:PT1H``, at
    the first record of the last hour."""
    share_record_lock_duration_ms: int = number(30_000, 1, INT_MAX)
    """How long a consumer may take for the records of a poll before others get them."""
    share_delivery_count_limit: int = number(5, 1, 1000)
    """How often a record is delivered before it is given up."""
    share_partition_max_record_locks: int = number(2000, 1, 100_000)
    """How many records of a partition may be delivered and not done."""
    share_renew_acknowledge_enable: bool = switch(True)
    """Whether consumers may renew their locks."""
    share_isolation_level: Literal["read_uncommitted", "read_committed"] = choice(
        "read_uncommitted", "read_committed"
    )
    """Both are kept: unpublished records are never visible."""
