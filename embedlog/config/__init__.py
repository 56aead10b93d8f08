"""The settings of topics, producers, consumers and the maintenance jobs.

Names, units and defaults are Kafka's unless a field says otherwise.  Every setting has one
name in two spellings: ``retention.ms`` in the configuration of a topic and ``retention_ms``
in Python; both are accepted everywhere.  A config is checked when it is made, and never
changes.
"""

from __future__ import annotations

from embedlog.config.consumer import ConsumerConfig, ShareConsumerConfig
from embedlog.config.group import BY_DURATION, GroupConfig, ShareGroupConfig
from embedlog.config.maintenance import MaintenanceConfig
from embedlog.config.network import describe_network_settings
from embedlog.config.producer import ProducerConfig
from embedlog.config.topic import TopicConfig
from embedlog.config.values import INT_MAX, LONG_MAX

__all__ = [
    "BY_DURATION",
    "INT_MAX",
    "LONG_MAX",
    "ConsumerConfig",
    "GroupConfig",
    "MaintenanceConfig",
    "ProducerConfig",
    "ShareConsumerConfig",
    "ShareGroupConfig",
    "TopicConfig",
    "describe_network_settings",
]
