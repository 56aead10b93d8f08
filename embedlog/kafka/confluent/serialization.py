"""The module ``confluent_kafka.serialization``."""

from __future__ import annotations

from typing import Any

from embedlog.kafka.confluent.library import serialization
from embedlog.kafka.library import public_name


def __getattr__(name: str) -> Any:
    """Return a name of confluent_kafka's module."""
    return public_name(serialization, name)
