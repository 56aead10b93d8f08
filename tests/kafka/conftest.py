"""A Kafka broker for the tests of this folder: `make test-kafka`, or `pytest --kafka`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.kafka_broker import KafkaBroker
from support.kafka_topics import KafkaTopics
from support.patience import patient


@pytest.fixture(scope="session")
def broker() -> Iterator[KafkaBroker]:
    """A broker, which a test may kill and start again."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        running = KafkaBroker(Path(directory), patient(60))
        try:
            yield running
        finally:
            running.kill()


@pytest.fixture
def kafka(broker: KafkaBroker, request: pytest.FixtureRequest) -> Iterator[KafkaTopics]:
    """Topics of one test: their names begin with that of the test."""
    topics = KafkaTopics(broker.address, request.node.originalname.removeprefix("test_")[:60])
    yield topics
    topics.delete()
