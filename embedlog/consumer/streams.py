"""Message streams, the interface of the Kafka paper of 2011: iterators that share topics (E26).

A stream is a consumer of its own and a member of the group, so the rules for members
apply: each partition feeds exactly one stream, and when a stream ends the others get its
partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from embedlog.config import ConsumerConfig


class Closeable(Protocol):
    """What `create_streams` needs of a consumer."""

    def close(self) -> None:
        """Leave the group."""


S = TypeVar("S", bound=Closeable)


def create_streams(
    new_consumer: Callable[..., S],
    update_assignment: Callable[[S], None],
    config: ConsumerConfig,
    counts: Mapping[str, int],
) -> dict[str, list[S]]:
    """Create streams, and let each have its partitions before any of them is read.

    Args:
        new_consumer: Creates a consumer of a topic and settings.
        update_assignment: Has a consumer join its group, or update its assignment.
        config: The settings of all streams.
        counts: The number of streams by topic.

    Raises:
        ValueError: A number is less than 1.
    """
    for topic, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"The number of streams of {topic} must be at least 1, got {count!r}")
    streams: dict[str, list[S]] = {topic: [] for topic in counts}
    created: list[S] = []
    try:
        for topic, count in counts.items():
            for number in range(count):
                created.append(new_consumer(topic, **_settings(config, f"{topic}-{number}")))
                streams[topic].append(created[-1])
        # Three rounds: the first streams release what they acquired while they were alone, and
        # only then the last ones can acquire it.
        for stream in created + created + created:
            update_assignment(stream)
    except BaseException:
        for stream in created:
            stream.close()
        raise
    return streams


def _settings(config: ConsumerConfig, name: str) -> dict[str, object]:
    """Return the settings of one stream; each needs a `group_instance_id` of its own."""
    if config.group_instance_id is None:
        return config.overrides()
    return config.changed({"group_instance_id": f"{config.group_instance_id}-{name}"}).overrides()
