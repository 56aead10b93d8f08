"""A program for kafka-python: what it prints must not depend on where it runs.

The address is in ``KAFKA_BOOTSTRAP_SERVERS``: brokers, or a log.
"""

import os

from embedlog.kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
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


def administer():
    """Look at the group, change settings, and delete records and the topic."""
    with KafkaAdminClient(bootstrap_servers=SERVERS) as admin:
        committed = admin.list_group_offsets(GROUP)[GROUP]
        print(sorted((*partition, position.offset) for partition, position in committed.items()))
        print(admin.delete_records({TopicPartition(TOPIC, 0): 2}))
        print(sorted(admin.delete_groups([GROUP, "nobody"]).items()))
        print(admin.delete_topics([TOPIC])["topics"][0]["error_code"])


if __name__ == "__main__":
    create()
    produce()
    consume(51)
    look_back()
    administer()
