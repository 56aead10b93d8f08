"""Message streams, the interface of the 2011 paper: iterators that share topics (E26).

A stream is a consumer of its own, and a member of the group, so whatever holds
for members holds for streams: each partition feeds exactly one, and when one
ends the others get its partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from embedlog.config import ConsumerConfig


class Closeable(Protocol):
    """What a stream is here: something to be closed."""

    def close(self) -> None:
        """Be no member any more."""


S = TypeVar("S", bound=Closeable)


def begin(
    consumer: Callable[..., S],
    follow: Callable[[S], None],
    config: ConsumerConfig,
    counts: Mapping[str, int],
) -> dict[str, list[S]]:
    """Make streams and let each have its share before anybody reads.

    Args:
        consumer: Makes one, of a topic and settings.
        follow: Has one look at the group, which lets it in.
        config: The settings of all.
        counts: How many by topic.

    Raises:
        ValueError: A topic has none, or less.
    """
    for topic, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{count!r} streams of {topic}: there is at least one")
    found: dict[str, list[S]] = {topic: [] for topic in counts}
    made: list[S] = []
    try:
        for topic, count in counts.items():
            for number in range(count):
                made.append(consumer(topic, **_settings(config, f"{topic}-{number}")))
                found[topic].append(made[-1])
        # Again from the first: what it took while it was alone it releases, and the
        # last ones can take that only then.
        for stream in made + made + made:
            follow(stream)
    except BaseException:
        for stream in made:
            stream.close()
        raise
    return found


def _settings(config: ConsumerConfig, name: str) -> dict[str, object]:
    """Return the settings of one stream; a static member's name is for one member only."""
    if config.group_instance_id is None:
        return config.overrides()
    return config.changed({"group_instance_id": f"{config.group_instance_id}-{name}"}).overrides()
