"""What a log knows of a topic that is a copy: which topic it is a copy of, and of when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from embedlog import keyspace

_LONGEST_PATH = 32
"""Sites: no topology has more, and a loop that is not found otherwise ends there."""


@dataclass
class MirroredTopic:
    """A topic of a root that a mirror writes."""

    source: str
    """As in its setting ``mirror.source``, which a failover sets back to nothing."""
    address: str
    """The address of the source when it was last copied."""
    source_topic_id: str
    path: list[str]
    """The ids of the sites that its records were at before, in order; the last is the source."""
    config: dict[str, Any] = field(default_factory=dict)
    """The settings of the source that were applied: only what changes there is applied again."""
    begun: int = 0
    """In how many partitions it is decided where the copy begins."""
    epochs: list[int] = field(default_factory=list)
    """By partition: the leader epoch of the source in which the records were read; or -1."""

    ends: list[int] = field(default_factory=list)
    """Where the partitions ended at the failover: what the source had beyond was never copied."""

    def epoch(self, partition: int) -> int | None:
        """Return the leader epoch of a partition, None if it is unknown."""
        known = self.epochs[partition] if partition < len(self.epochs) else -1
        return None if known < 0 else known

    def set_epoch(self, partition: int, epoch: int) -> None:
        """Note the leader epoch of a partition."""
        missing = partition + 1 - len(self.epochs)
        self.epochs += [-1] * missing
        self.epochs[partition] = epoch


MIRRORED_TOPICS = keyspace.MIRRORED_TOPICS.typed(
    lambda fields: MirroredTopic(**fields), lambda topic: (asdict(topic),)
)


def source_name(site_id: str, topic: str) -> str:
    """Return how the setting ``mirror.source`` names a topic of a site.

    >>> source_name("5c1d", "flights")
    '5c1d/flights'
    """
    return f"{site_id}/{topic}"


def would_loop(target_site: str, source_site: str, path: list[str] | tuple[str, ...]) -> bool:
    """Return whether records that came over a path to a source were at the target before.

    >>> would_loop("a", "c", ["a", "b"])
    True
    """
    return target_site == source_site or target_site in path or len(path) >= _LONGEST_PATH


def changed_settings(
    before: Mapping[str, object], after: Mapping[str, object]
) -> dict[str, object | None]:
    """Return the settings that changed; None for one that has its default again.

    >>> changed_settings({"retention.ms": 1, "segment.ms": 2}, {"segment.ms": 3})
    {'retention.ms': None, 'segment.ms': 3}
    """
    names = sorted(before.keys() | after.keys())
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}
