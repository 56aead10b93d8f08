"""The library kafka-python, whose types, errors and records the clients of this package use."""

from __future__ import annotations

from typing import Any

from embedlog.kafka.library import load

kafka: Any = load("kafka")
"""The package with its modules; untyped, as kafka-python is."""
