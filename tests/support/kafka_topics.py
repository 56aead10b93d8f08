"""Topics of a Kafka broker, written and read with confluent_kafka, to compare copies with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import confluent_kafka
from confluent_kafka.admin import AdminClient, ConfigEntry, ConfigResource, NewTopic

from embedlog.api import Log
from support.clock import START
from support.patience import patient

Row = tuple[int, int, int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]
"""Partition, offset, timestamp, key, value and headers of a record."""
_numbers = itertools.count()


class KafkaTopics:
    """Creates topics, whose names begin with a prefix, and reads and writes them."""

    def __init__(self, servers: str, prefix: str) -> None:
        self.servers, self.address = servers, f"kafka://{servers}"
        self.prefix = f"{prefix}-{next(_numbers)}"
        self.admin = AdminClient({"bootstrap.servers": servers})
        self._seconds = patient(60)

    def create(self, name: str = "t", partitions: int = 1, **config: object) -> str:
        """Create a topic, and return its name."""
        topic = f"{self.prefix}-{name}"
        settings = {key.replace("_", "."): str(value) for key, value in config.items()}
        self._done(self.admin.create_topics([NewTopic(topic, partitions, 1, config=settings)]))
        return topic

    def name(self, name: str = "t") -> str:
        """Return the name of a topic that a mirror creates."""
        return f"{self.prefix}-{name}"

    def alter(self, topic: str, **config: object) -> None:
        """Change settings of a topic."""
        operation = confluent_kafka.admin.AlterConfigOpType.SET
        entries = [
            ConfigEntry(key.replace("_", "."), str(value), incremental_operation=operation)
            for key, value in config.items()
        ]
        resource = ConfigResource(
            confluent_kafka.admin.ResourceType.TOPIC, topic, incremental_configs=entries
        )
        self._done(self.admin.incremental_alter_configs([resource]))

    def _done(self, futures: dict[Any, Any]) -> list[Any]:
        return [future.result(self._seconds) for future in futures.values()]

    def delete(self) -> None:
        """Delete the topics of this prefix."""
        names = [name for name in self.admin.list_topics().topics if name.startswith(self.prefix)]
        if names:
            self._done(self.admin.delete_topics(names))

    def producer(self, **settings: object) -> Any:
        """Return a producer."""
        options = {key.replace("_", "."): value for key, value in settings.items()}
        return confluent_kafka.Producer({"bootstrap.servers": self.servers, **options})

    def send(self, topic: str, rows: Iterable[Sequence[Any]], producer: Any = None) -> None:
        """Write (partition, timestamp, key, value, headers) of records."""
        writer = producer or self.producer(linger_ms=5)
        for partition, time, key, value, headers in rows:
            options = {"headers": headers} if headers else {}
            while True:
                try:
                    writer.produce(topic, value, key, partition, timestamp=time, **options)
                    break
                except BufferError:
                    writer.poll(1)
        if producer is None:
            assert writer.flush(self._seconds) == 0

    def rows(self, topic: str) -> list[Row]:
        """Read the committed records of a topic, partition by partition."""
        consumer = self.consumer(enable_partition_eof=True)
        partitions = self.admin.list_topics(topic).topics[topic].partitions
        beginning = confluent_kafka.OFFSET_BEGINNING
        consumer.assign(
            [confluent_kafka.TopicPartition(topic, number, beginning) for number in partitions]
        )
        rows: list[Row] = []
        ended: set[int] = set()
        while len(ended) < len(partitions):
            for message in consumer.consume(10_000, 0.5):
                if message.error() is not None:
                    assert message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF
                    ended.add(message.partition())
                    continue
                rows.append(
                    (
                        *(message.partition(), message.offset(), message.timestamp()[1]),
                        *(message.key(), message.value(), message.headers() or []),
                    )
                )
        consumer.close()
        return sorted(rows, key=lambda row: row[:2])

    def consumer(self, group: str = "reader", **settings: object) -> Any:
        """Return a consumer of committed records."""
        options = {key.replace("_", "."): value for key, value in settings.items()}
        return confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": group,
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                **options,
            }
        )

    def commit(self, group: str, offsets: dict[tuple[str, int], int]) -> None:
        """Commit offsets of a group without members."""
        consumer = self.consumer(group)
        commits = [confluent_kafka.TopicPartition(*key, at) for key, at in offsets.items()]
        consumer.commit(offsets=commits, asynchronous=False)
        consumer.close()

    def committed(self, group: str) -> dict[tuple[str, int], int]:
        """Return the committed offsets of a group."""
        request = [confluent_kafka.ConsumerGroupTopicPartitions(group)]
        (result,) = self._done(self.admin.list_consumer_group_offsets(request))
        return {(part.topic, part.partition): part.offset for part in result.topic_partitions}


def rows_of(log: Log, topic: str) -> list[Row]:
    """Return what a log has, as `KafkaTopics.rows` does."""
    rows = [
        (
            *(record.partition, record.offset, record.timestamp),
            *(record.key, record.value, list(record.headers or [])),
        )
        for record in log.topic(topic)
    ]
    return sorted(rows, key=lambda row: row[:2])


def random_rows(dice: random.Random, count: int, partitions: int = 2) -> Iterator[Sequence[Any]]:
    """Yield random records, as `KafkaTopics.send` takes them."""
    for number in range(count):
        headers = [("h", b"%d" % number), ("h", None)] if dice.random() < 0.1 else None
        yield (
            dice.randrange(partitions),
            dice.choice([START + number, START - number, -1]),
            dice.choice([None, b"", b"k%d" % dice.randrange(9)]),
            dice.choice([None, b"", b"v%d" % number, b"x" * dice.randrange(3000)]),
            headers,
        )
