"""Wrong uses: both type checkers refuse each line that ends in "# wrong", and no other one."""

from __future__ import annotations

import embedlog
from embedlog import ConsumerRebalanceListener, Log, Record, Topic, TopicPartition


def size(data: bytes) -> int:
    """Deserialize."""
    return len(data)


def number(value: int) -> bytes:
    """Serialize."""
    return bytes(value)


def text_handler(record: Record[str, str]) -> None:
    """Handle a record."""


def opening() -> None:
    """A log."""
    embedlog.open("x", mode="w")  # wrong
    embedlog.open("x", durability="disk")  # wrong
    embedlog.open("x", visibility=True)  # wrong
    embedlog.open(5)  # wrong
    embedlog.open("x", "r")  # wrong
    embedlog.broker("x")  # wrong
    embedlog.open("x", clock=lambda: "now")  # wrong
    print(embedlog.nonsense)  # wrong


def topics(log: Log, topic: Topic) -> None:
    """Topics and views."""
    log.create_topic(5)  # wrong
    log.create_topic("t", "4")  # wrong
    log.create_topic("t", exists_ok=True)  # wrong
    log.create_topic("t", value="jsn")  # wrong
    log.describe_topic("t")["partition"]  # wrong
    log.describe_topic("t")["partitions"][0]["name"]  # wrong
    topic["key"]  # wrong
    topic[0].vlaue  # wrong
    topic.head("5")  # wrong
    topic.to_arrow(latest="yes")  # wrong
    orders: Topic[str, int] = log.topic("orders")
    orders[0].value.decode()  # wrong
    orders.get(b"key")  # wrong
    log.topic("t", raw=True)[0].value.decode()  # wrong
    topic.since(1.5)  # wrong


def producers(log: Log) -> None:
    """Sending."""
    log.producer(nonsense=1)  # wrong
    log.producer(linger_ms="5")  # wrong
    log.producer(acks=2)  # wrong
    log.producer(compression_type="brotli")  # wrong
    log.producer(key_serializer=5)  # wrong
    log.producer(value_serializer="jsn")  # wrong
    embedlog.AvroSerializer(5)  # wrong
    producer = log.producer()
    producer.send(5, b"x")  # wrong
    producer.send("t", b"x", partition="0")  # wrong
    producer.send("t", b"x", headers={"a": b"b"})  # wrong
    producer.send("t", b"x").result("5")  # wrong
    producer.send("t", b"x").result().offsets  # wrong
    producer.send_batch("t", [b"x"]).result().offset  # wrong
    producer.send_batch("t", 5)  # wrong
    producer.append_table("t", [b"x"])  # wrong
    producer.publish("t")  # wrong
    numbers = log.producer(key_serializer=str.encode, value_serializer=number)
    numbers.send("t", b"x")  # wrong
    numbers.send("t", 5, key=b"k")  # wrong
    numbers.send_batch("t", ["5"])  # wrong


def consumers(log: Log) -> None:
    """Reading."""
    log.consumer("t", group_id=5)  # wrong
    log.consumer("t", nonsense=1)  # wrong
    log.consumer(["t"])  # wrong
    log.consumer("t", auto_offset_reset="begin")  # wrong
    log.consumer("t", value_deserializer=number)  # wrong
    log.consumer("t", max_poll_records=None, fetch_min_bytes="1")  # wrong
    consumer = log.consumer("t", value_deserializer=size)
    consumer.subscribe("t", listener=print)  # wrong
    consumer.assign(TopicPartition("t", 0))  # wrong
    consumer.commit({"t": 5})  # wrong
    consumer.committed(TopicPartition("t", 0)) + 1  # wrong
    for record in consumer:
        record.value.decode()  # wrong
        record.offset = 5  # wrong
    for records in consumer.poll(10).values():
        records.offset  # wrong
    consumer.iter_records(until="begin")  # wrong


class Listener(ConsumerRebalanceListener):
    """A rebalance listener."""

    def on_partitions_lost(self, lost: int) -> None:  # wrong
        """Called with partitions."""


def groups(log: Log) -> None:
    """Consumer groups."""
    log.groups["g"].describe().lags  # wrong
    log.groups["g"].reset_offsets(1.5)  # wrong
    embedlog.run_group(log, "t", "g", text_handler, value_deserializer=size)  # wrong
    embedlog.run_group(log, "t", "g", print, group_instance="g")  # wrong
    embedlog.run_group(log, "t", "g", len, batch="yes")  # wrong
    embedlog.run_group(log, "t", "g", print, until="start")  # wrong
    embedlog.run_group(log, "t", "g", print, on_error="never")  # wrong
    embedlog.run_group(log, "t", "g", len, batch=True, concurrency=2)  # wrong


def upkeep(log: Log) -> None:
    """Housekeeping."""
    log.housekeeping.run()["retentions"]  # wrong
    log.housekeeping.hold("x", {"t": 5})  # wrong
    log.housekeeping.compact("t", force=1.5)  # wrong
    log.housekeeping.retention_bytes = "5"  # wrong
