"""The module ``confluent_kafka.error``."""

from __future__ import annotations

from typing import Any

from embedlog.kafka.confluent.library import error
from embedlog.kafka.library import public_name


def __getattr__(name: str) -> Any:
    """Return an error of confluent_kafka."""
    return public_name(error, name)
