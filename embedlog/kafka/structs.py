"""The module ``kafka.structs``, and the tuples that other modules of kafka-python have."""

from __future__ import annotations

from typing import Any

from embedlog.kafka.kafka_python import kafka
from embedlog.kafka.library import public_name

ConsumerRecord: Any = kafka.consumer.fetcher.ConsumerRecord
RecordMetadata: Any = kafka.producer.future.RecordMetadata


def __getattr__(name: str) -> Any:
    """Return a tuple of kafka-python."""
    return public_name(kafka.structs, name)
