"""The module ``kafka.serializer``."""

from __future__ import annotations

from typing import Any

from embedlog.kafka.kafka_python import kafka
from embedlog.kafka.library import public_name


def __getattr__(name: str) -> Any:
    """Return a serializer of kafka-python."""
    return public_name(kafka.serializer, name)
