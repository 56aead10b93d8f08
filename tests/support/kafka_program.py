"""A program for kafka-python: what it prints must not depend on where it runs.

The address is in ``KAFKA_BOOTSTRAP_SERVERS``: brokers, or a log.
"""

import os

from kafka.coordinator.assignors.range import RangePartitionAssignor

from embedlog.kafka import (
    ConsumerRebalanceListener,
    KafkaAdminClient,
    KafkaConsumer,
    KafkaProducer,
    OffsetAndMetadata,
    TopicPartition,
    errors,
)
from embedlog.kafka.admin import NewTopic
from embedlog.kafka.errors import TopicAlreadyExistsError
from embedlog.kafka.serializer import JsonSerializer

SERVERS = os.environ["KAFKA_BOOTSTRAP_SERVERS"]
TOPIC, GROUP = "orders", "billing"


def create():
    """Create the topic, and once more."""
    with KafkaAdminClient(bootstrap_servers=SERVERS) as admin:
        topics = [NewTopic(TOPIC, 3, 1, topic_configs={"retention.ms": "3600000"})]
        print(admin.create_topics(topics, wait_for_metadata=True)["topics"][0]["error_code"])
        try:
            admin.create_topics(topics)
        except TopicAlreadyExistsError as error:
            print(type(error).__name__, error.errno)
        (topic,) = admin.describe_topics([TOPIC])
        print(topic["name"], sorted(p["partition_index"] for p in topic["partitions"]))


def produce():
    """Send records with keys, headers and a tombstone."""
    with KafkaProducer(
        bootstrap_servers=SERVERS,
        key_serializer=str.encode,
        value_serializer=JsonSerializer(),
        linger_ms=5,
    ) as producer:
        futures = [
            producer.send(
                TOPIC,
                {"order": number, "price": number * 1.5},
                key=f"customer-{number % 7}",
                headers=[("source", b"shop")],
                timestamp_ms=1_700_000_000_000 + number,
            )
            for number in range(50)
        ]
        futures.append(producer.send(TOPIC, None, key="customer-3", timestamp_ms=1_700_000_000_060))
        producer.flush()
        for future in futures[::10]:
            print(future.get(timeout=30))
        print(sorted(producer.partitions_for(TOPIC)))
        try:
            producer.send(TOPIC)
        except ValueError as error:
            print(error)


def consume(limit):
    """Read as a member of a group, commit, and print each record."""
    with KafkaConsumer(
        TOPIC,
        bootstrap_servers=SERVERS,
        group_id=GROUP,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        consumer_timeout_ms=15_000,
        value_deserializer=JsonSerializer(),
        key_deserializer=bytes.decode,
    ) as consumer:
        records = []
        for record in consumer:
            records.append(record)
            if len(records) == limit:
                break
        # Partitions are read in any order.
        for record in sorted(records, key=lambda record: (record.partition, record.offset)):
            print(record._replace(leader_epoch=None))
        consumer.commit()
        ends = consumer.end_offsets([TopicPartition(TOPIC, number) for number in range(3)])
        print(sorted((*partition, end) for partition, end in ends.items()))


def look_back():
    """Read again by time, without a group."""
    with KafkaConsumer(bootstrap_servers=SERVERS, consumer_timeout_ms=15_000) as consumer:
        partitions = [TopicPartition(TOPIC, number) for number in range(3)]
        consumer.assign(partitions)
        offsets = consumer.offsets_for_times(dict.fromkeys(partitions, 1_700_000_000_040))
        for partition, found in sorted(offsets.items()):
            print(*partition, found and (found.offset, found.timestamp))
            if found is not None:
                consumer.seek(partition, found.offset)
        consumer.pause(partitions[0])
        batches = consumer.poll(timeout_ms=15_000)
        print(all(partition != partitions[0] for partition in batches), bool(batches))
        for time in (-1, -2):
            print(outcome(consumer.offsets_for_times, {partitions[0]: time}))


def outcome(call, *arguments, **named):
    """Return the result of a call, or the name of its error."""
    try:
        return call(*arguments, **named)
    except Exception as error:  # noqa: BLE001 - its name is printed
        return type(error).__name__


def commit():
    """Commit without waiting, for one partition that exists and for another one."""
    settings = {"group_id": "other" * 50, "enable_auto_commit": False}
    with KafkaConsumer(bootstrap_servers=SERVERS, **settings) as consumer:
        print(consumer.poll(100))
        for name in ("a b", "", None):
            print(outcome(consumer.subscribe, [name]))
            print(outcome(KafkaConsumer, name, bootstrap_servers=SERVERS))
        consumer.unsubscribe()
        for number in (0, 9):
            partition = TopicPartition(TOPIC, number)
            future = consumer.commit_async({partition: OffsetAndMetadata(1, "note", 0)})
            outcomes = []
            future.add_callback(outcomes.append)
            future.add_errback(lambda error, to=outcomes: to.append(type(error).__name__))
            consumer.assign([TopicPartition(TOPIC, 0)])
            while not future.is_done:
                consumer.poll(100)
            print(future.succeeded(), future.failed(), future.value, outcomes)


class Listener(ConsumerRebalanceListener):
    """Does nothing."""

    def on_partitions_revoked(self, revoked):
        """Do nothing."""

    def on_partitions_assigned(self, assigned):
        """Do nothing."""


def share():
    """Pause, and have another member take a part of the partitions."""
    settings = {
        "bootstrap_servers": SERVERS,
        "group_id": "shared",
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "partition_assignment_strategy": [RangePartitionAssignor],
        "session_timeout_ms": 6000,
        "heartbeat_interval_ms": 300,
    }
    with KafkaConsumer(**settings) as first, KafkaConsumer(**settings) as second:
        first.subscribe([TOPIC], listener=Listener())
        while len(first.assignment()) < 3:
            first.poll(100, max_records=1)
        first.pause(*first.assignment())
        second.subscribe([TOPIC])
        batches = []
        while not second.assignment() or len(first.assignment()) == 3:
            batches.append(first.poll(100))
            second.poll(100)
        batches.append(first.poll(500))
        print(first.paused() == first.assignment(), any(batches))


def transact():
    """Be refused, fenced and closed."""
    for settings in (
        *({"acks": 1}, {"acks": "all"}, {"retries": 0}, {"enable_idempotence": False}),
        {"max_in_flight_requests_per_connection": 6},
    ):
        for name in ({}, {"transactional_id": "name"}):
            made = outcome(KafkaProducer, bootstrap_servers=SERVERS, **name, **settings)
            if not isinstance(made, str):
                made.close()
                made = made.config["enable_idempotence"]
            print(settings, name, made)
    for first in ("commit_transaction", "abort_transaction"):
        older, newer = (
            KafkaProducer(bootstrap_servers=SERVERS, transactional_id=first) for _ in range(2)
        )
        older.init_transactions()
        older.begin_transaction()
        older.send(TOPIC, b"late", partition=0)
        older.flush()
        newer.init_transactions()
        print(outcome(getattr(older, first)))
        for name in ("abort_transaction", "begin_transaction", "commit_transaction"):
            # kafka-python raises the base of the error from now on.
            print(issubclass(getattr(errors, outcome(getattr(older, name))), errors.KafkaError))
        newer.close()
        print(outcome(newer.send, TOPIC, b"never"))
        older.close(timeout=1)
    with KafkaProducer(bootstrap_servers=SERVERS) as producer:
        for name in ("a b", "", None):
            print(outcome(producer.send, name, b"v"), outcome(producer.partitions_for, name))


def administer():
    """Look at the group, change settings, and delete records and the topic."""
    with KafkaAdminClient(bootstrap_servers=SERVERS) as admin:
        (committed,) = admin.list_group_offsets("other" * 50).values()
        print(committed)
        topic = NewTopic("recent", 1, 1, topic_configs={"message.timestamp.before.max.ms": "1000"})
        admin.create_topics([topic], wait_for_metadata=True)
        with KafkaProducer(bootstrap_servers=SERVERS) as producer:
            print(outcome(producer.send("recent", b"v", timestamp_ms=5).get, 30))
        offsets = {TopicPartition(TOPIC, number): OffsetAndMetadata(1, "", -1) for number in (0, 9)}
        results = admin.alter_group_offsets("other" * 50, offsets)
        print(sorted((*partition, error.__name__) for partition, error in results.items()))
        committed = admin.list_group_offsets(GROUP)[GROUP]
        print(sorted((*partition, position.offset) for partition, position in committed.items()))
        print(admin.delete_records({TopicPartition(TOPIC, 0): 2}))
        print(sorted(admin.delete_groups([GROUP, "nobody"]).items()))
        for deleted in admin.delete_topics([TOPIC, "recent"])["topics"]:
            print(deleted["error_code"])


if __name__ == "__main__":
    create()
    produce()
    consume(51)
    look_back()
    commit()
    share()
    transact()
    administer()
