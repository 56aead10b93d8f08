"""Right uses: both type checkers accept them, and see the types that `assert_type` names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, assert_type

import embedlog
from embedlog import (
    AvroDeserializer,
    AvroSerializer,
    Consumer,
    ConsumerGroup,
    ConsumerRebalanceListener,
    GroupRun,
    Log,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    Producer,
    Record,
    RecordMetadata,
    RegisteredSchema,
    SchemaRegistry,
    Topic,
    TopicConfig,
    TopicPartition,
)
from embedlog.api.topic import TopicView
from embedlog.config.options import ConsumerOptions, ProducerOptions, TopicOptions
from embedlog.errors import EmbedlogError
from embedlog.producer import BatchFuture, BatchRange, RecordFuture


@dataclass
class Order:
    """A value of its own."""

    total: int


def order_from(data: bytes) -> Order:
    """Deserialize."""
    return Order(**json.loads(data))


def order_with_context(data: bytes, context: Any) -> Order:
    """Deserialize, as in confluent-kafka."""
    return order_from(data)


def order_to(order: Order) -> bytes:
    """Serialize."""
    return json.dumps(vars(order)).encode()


class Orders:
    """Serializes and deserializes, as in kafka-python 2."""

    def serialize(self, topic: str, value: Order) -> bytes:
        """Serialize."""
        return order_to(value)

    def deserialize(self, topic: str, bytes_: bytes) -> Order:
        """Deserialize."""
        return order_from(bytes_)


class OrdersAndHeaders:
    """Serializes and deserializes, as in kafka-python 3."""

    def serialize(self, topic: str, headers: list[Any], data: Order) -> bytes:
        """Serialize."""
        return order_to(data)

    def deserialize(self, topic: str, headers: list[Any], data: bytes) -> Order:
        """Deserialize."""
        return order_from(data)


def opening(path: Path) -> None:
    """A log."""
    log = embedlog.open(path)
    assert_type(log, Log)
    with embedlog.open("data", mode="r", durability="fsync", visibility="durable") as log:
        assert_type(log, Log)
    embedlog.open("data", maintenance=False)
    embedlog.open("data", maintenance={"log.cleaner.threads": 2, "log_cleaner_enable": True})
    settings = {"log.cleaner.threads": 2}
    embedlog.open("data", maintenance=settings)
    embedlog.open("data", clock=lambda: 5, lock_timeout=1, auto_create_topics=False)


def topics(log: Log, settings: Mapping[str, object]) -> None:
    """Topics and their settings."""
    assert_type(log.create_topic("flights"), Topic)
    log.create_topic("flights", 4, {"retention.ms": 5, "cleanup_policy": "compact"}, exist_ok=True)
    log.create_topic("flights", config=settings)
    compacted: TopicOptions = {"cleanup.policy": "compact,delete", "retention.bytes": None}
    log.alter_topic("flights", compacted)
    description = log.describe_topic("flights")
    assert_type(description["partitions"][0]["end_offset"], int)
    assert_type(description["id"], int)
    assert description["config"]["retention.ms"] > 5
    assert_type(log.topics(), list[str])
    config = TopicConfig.parse({"retention.ms": "60000"})
    assert_type(config.retention_ms, int)
    assert config.compression_type == "lz4"
    assert_type("flights" in log, bool)
    log.delete_topic("flights")


def schemas(log: Log) -> None:
    """The schema registry."""
    assert_type(log.schema_registry, SchemaRegistry)
    assert_type(log.schema_registry.register("orders-value", {"type": "record", "fields": []}), int)
    assert_type(log.schema_registry.register("orders-value", ["null", "int"]), int)
    assert_type(log.schema_registry.latest("orders-value"), RegisteredSchema)
    assert_type(log.schema_registry.get(1), str)
    assert_type(log.schema_registry.check("orders-value", '"int"'), list[str])
    assert_type(log.schema_registry.delete("orders-value", 1), list[int])
    log.schema_registry.set_compatibility("FULL", "orders-value")


def views(log: Log) -> None:
    """Rows, slices and tables."""
    topic = log["flights"]
    assert_type(topic, Topic)
    assert_type(topic[0], Record)
    assert_type(topic[2:5], TopicView)
    assert_type(topic.head(3), TopicView)
    assert_type(topic.partition(0)[-1].timestamp, int)
    assert_type(len(topic), int)
    assert_type(topic.describe_retention(), list[str])
    for record in topic:
        assert_type(record, Record)
    log.producer().append_table("copy", topic)
    raw = log.topic("orders", raw=True)
    assert_type(raw[0].value, bytes | None)
    assert_type(raw.get(b"key"), bytes | None)
    log.create_topic("orders", key="str", value="json")
    orders: Topic[str, Order] = log.topic("orders")
    assert_type(orders.get("key"), Order | None)
    assert_type(dict(orders.items()), dict[str, Order])
    assert_type(orders.since("15m").at(timedelta(hours=1)), Record[str, Order] | None)
    assert_type(orders[0].value, Order)
    assert_type(orders[:5][0].key, str)


def producers(log: Log, options: ProducerOptions, dotted: dict[str, Any]) -> None:
    """Sending."""
    with log.producer(linger_ms=5, acks="all", compression_type="zstd") as producer:
        future = producer.send("flights", b"value", key=b"key", headers=[("h", b"x"), ("n", None)])
        assert_type(future, RecordFuture)
        assert_type(future.result(timeout=5), RecordMetadata)
        assert_type(future.get(), RecordMetadata)
        assert_type(future.value, RecordMetadata | None)
        assert_type(future.exception, BaseException | None)
        assert_type(future.is_done, bool)
        assert_type(future.add_callback(print, "sent", end="").add_errback(print), RecordFuture)
        producer.send("flights", key=b"key", expected_offset=1, expected_key_offset=None)
        batch = producer.send_batch("flights", [b"a", None], keys=[b"k", None], timestamps=5)
        assert_type(batch, BatchFuture)
        assert_type(batch.result(), list[BatchRange])
        assert_type(batch.written()[0].next_offset, int | None)
        assert_type(producer.last_sequence("flights"), int | None)
        producer.flush(timeout=5)
    log.producer(**options)
    log.producer(**dotted)
    log.producer(partitioner=lambda key, partitions, available: partitions[0], acks=-1)
    log.producer(partitioner="round_robin", acks=0, compression_type="gzip", producer_name="orders")
    typed = log.producer(key_serializer=str.encode, value_serializer=order_to)
    assert_type(typed, Producer[str, Order])
    typed.send("orders", Order(5), key="gate")
    typed.send("orders", key="gate")
    assert_type(log.producer(value_serializer=Orders()), Producer[Any, Order])
    assert_type(log.producer(value_serializer=OrdersAndHeaders()), Producer[Any, Order])
    assert_type(log.producer(key_serializer="str", value_serializer="json"), Producer[Any, Any])
    log.producer(key_serializer="avro", value_serializer=AvroSerializer({"type": "int"}))
    log.producer(value_serializer=AvroSerializer(subject="orders", register=False))
    named: Producer[str, Order] = log.producer(key_serializer="str", value_serializer="json")
    named.send_batch("orders", [Order(1), None], keys=["a", "b"])


def consumers(log: Log, options: ConsumerOptions) -> None:
    """Reading."""
    partition = TopicPartition("flights", 0)
    with log.consumer("flights", "gates", group_id="g", auto_offset_reset="earliest") as consumer:
        assert_type(consumer, Consumer)
        for record in consumer:
            assert_type(record, Record)
            assert_type(record.headers, list[tuple[str, bytes | None]])
            print(record.value.decode())
        assert_type(next(consumer), Record)
        assert_type(consumer.poll(100, max_records=5), dict[TopicPartition, list[Record]])
        assert_type(consumer.committed(partition), int | None)
        assert_type(consumer.committed(partition, metadata=True), OffsetAndMetadata | None)
        assert_type(consumer.position(partition), int)
        assert_type(consumer.assignment(), set[TopicPartition])
        assert_type(consumer.end_offsets([partition]), dict[TopicPartition, int])
        assert_type(
            consumer.offsets_for_times({partition: 5}),
            dict[TopicPartition, OffsetAndTimestamp | None],
        )
        consumer.commit({partition: OffsetAndMetadata(5)})
        consumer.commit({partition: 5})
        done = consumer.commit_async(callback=lambda offsets, error: print(offsets, error))
        assert_type(done.result(), Mapping[TopicPartition, OffsetAndMetadata])
        consumer.iter_records(until="end")
        consumer.iter_records(until=consumer.end_offsets(consumer.assignment()))
    log.consumer("t", **options)
    log.consumer(consumer_timeout_ms=float("inf"), partition_assignment_strategy="sticky")
    log.consumer(partition_assignment_strategy=["range", "roundrobin"], group_id=None)
    typed = log.consumer("orders", key_deserializer=bytes.decode, value_deserializer=order_from)
    assert_type(typed, Consumer[str, Order])
    for order in typed.iter_records():
        assert_type(order, Record[str, Order])
        assert_type(order.value.total, int)
    wider: Consumer[str | None, Order | None] = typed
    assert wider.poll()
    assert_type(log.consumer("t", value_deserializer=order_with_context), Consumer[Any, Order])
    assert_type(log.consumer("t", value_deserializer=Orders()), Consumer[Any, Order])
    assert_type(log.consumer("t", value_deserializer=OrdersAndHeaders()), Consumer[Any, Order])
    assert_type(log.consumer("t", value_deserializer="json"), Consumer[Any, Any])
    log.consumer("t", key_deserializer="avro", value_deserializer=AvroDeserializer('"int"'))
    stated: Consumer[str | None, Order | None] = log.consumer("orders")
    assert_type(next(stated).value, Order | None)
    assert_type(typed.create_message_streams({"t": 2}), dict[str, list[Consumer[str, Order]]])


class Listener(ConsumerRebalanceListener):
    """A rebalance listener."""

    def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        """Called before partitions go to other members."""
        for topic, partition in revoked:
            print(topic, partition)


def handle(record: Record) -> None:
    """Handle any record."""
    print(record.topic_partition, record.value)


def handle_order(record: Record[str, Order]) -> None:
    """Handle a record of one kind."""
    print(record.value.total)


async def await_it(record: Record) -> None:
    """Handle a record in a task."""
    print(record.value)


def handle_many(records: Sequence[Record]) -> None:
    """Handle records."""
    print(len(records))


def groups(log: Log, names: Iterable[str]) -> None:
    """Consumer groups."""
    consumer = log.consumer(group_id="g")
    consumer.subscribe(["flights"], listener=Listener())
    group = log.groups["g"]
    assert_type(group, ConsumerGroup)
    assert_type(group.lag(), dict[TopicPartition, int | None])
    assert_type(group.describe().partitions[0].lag, int | None)
    assert_type(group.describe().lag, int)
    group.reset_offsets("earliest", topics=names, dry_run=False)
    change = group.reset_offsets(timedelta(hours=1))[TopicPartition("flights", 0)]
    assert_type(change.after, int)
    run = embedlog.run_group(log, "flights", "g", handle, processes=2, until="end")
    assert_type(run, GroupRun)
    assert_type(run.wait(5), bool)
    embedlog.run_group(log, names, "g", handle_many, batch=True, start_method="spawn")
    policy = embedlog.Retry(attempts=3, backoff=lambda failed: failed / 2, dead_letter="d")
    embedlog.run_group(log, names, "g", handle, on_error=policy, concurrency=4, delay=1.5)
    embedlog.run_group(
        *(log, names, "g", await_it),
        on_error="skip",
        not_before=lambda record: record.timestamp + 1000,
        errors_deadletterqueue_copy_record_enable=False,
    )
    print([letter.failure.message for letter in log.dead_letters("d")])
    embedlog.run_group(log, "orders", "g", lambda record: print(record.value), max_poll_records=5)
    embedlog.run_group(
        log, "orders", "g", handle_order, key_deserializer="str", value_deserializer=order_from
    )


def upkeep(log: Log) -> None:
    """Housekeeping."""
    results = log.housekeeping.run()
    assert_type(results["retention"][0].bytes, int)
    assert_type(results["offsets"], int)
    with log.housekeeping.hold("snapshot", {TopicPartition("flights", 0): 5}, seconds=10) as lease:
        lease.renew()
    assert_type(log.housekeeping.leases()[0].ms_left, int)
    assert_type(log.metrics()["kafka.log.flights-0"]["Size"], float)
    assert_type(
        log.housekeeping.compact("flights", settings={"log.cleaner.io.buffer.size": 5})[0].why, str
    )
    assert_type(
        log.housekeeping.verify(progress=lambda done, total: print(done / total))[0].path, str
    )
    log.housekeeping.retention_bytes = 5
    log.housekeeping.retention_bytes = None


def errors() -> None:
    """Errors."""
    try:
        embedlog.open("data")
    except embedlog.errors.NotALogError as error:
        assert_type(error.path, str | None)
    except EmbedlogError as error:
        assert_type(error.retriable, bool)
        assert_type(error.todo, str | None)
