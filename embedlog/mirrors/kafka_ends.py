"""Kafka clusters as the ends of mirrors; needs the extra ``kafka``."""

from __future__ import annotations

from embedlog.mirrors.kafka_source import KafkaSource
from embedlog.mirrors.kafka_target import KafkaTarget
from embedlog.root.root import Root


def open_source(address: str) -> KafkaSource:
    """Return a cluster to copy from.

    Raises:
        InvalidConfigError: The address is not valid.
        KafkaClusterError: The cluster does not answer.
    """
    return KafkaSource(address)


def open_target(address: str, root: Root, *, merge: bool, relay: bool) -> KafkaTarget:
    """Return a cluster to copy to.

    Args:
        address: The address.
        root: The source.
        merge: As `KafkaTarget`.
        relay: As `KafkaTarget`.

    Raises:
        InvalidConfigError: The address is not valid.
        KafkaClusterError: The cluster does not answer.
    """
    return KafkaTarget(address, root, merge=merge, relay=relay)
