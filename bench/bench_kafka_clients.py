"""What does a record cost through the clients of `embedlog.kafka`, next to embedlog's own?"""

from collections import deque
from itertools import islice

import pytest

from embedlog.kafka import KafkaConsumer, KafkaProducer, confluent

VALUE, KEY = bytes(100), b"k000000001"
SENT, READ = 50_000, 400_000
INTERFACES = ["embedlog", "kafka-python", "confluent-kafka"]


@pytest.fixture
def full(log):
    """The log with a topic of one partition."""
    log.create_topic("t")
    with log.producer() as producer:
        producer.send_batch("t", [VALUE] * READ, [KEY] * READ).result()
    return log


def send_own(log, count):
    with log.producer(linger_ms=5) as producer:
        for _ in range(count):
            producer.send("s", VALUE, KEY)


def send_kafka_python(log, count):
    with KafkaProducer(bootstrap_servers=log.path, linger_ms=5) as producer:
        for _ in range(count):
            producer.send("s", VALUE, KEY)


def send_confluent(log, count):
    with confluent.Producer({"bootstrap.servers": log.path, "linger.ms": 5}) as producer:
        for _ in range(count):
            producer.produce("s", VALUE, KEY)


@pytest.mark.parametrize("send", [send_own, send_kafka_python, send_confluent], ids=INTERFACES)
def bench_send(benchmark, log, send):
    """Records one at a time, without looking at their futures, until all are written."""
    log.create_topic("s")
    benchmark.extra_info.update(records=SENT)
    benchmark.pedantic(send, args=(log, SENT), rounds=7, warmup_rounds=1)
    assert len(log.topic("s")) == 8 * SENT


def iterate_own(log):
    with log.consumer("t", auto_offset_reset="earliest") as consumer:
        return deque(enumerate(consumer.iter_records(until="end"), 1), maxlen=1)[0][0]


def iterate_kafka_python(log):
    settings = {"bootstrap_servers": log.path, "auto_offset_reset": "earliest"}
    with KafkaConsumer("t", **settings, consumer_timeout_ms=1) as consumer:
        return deque(enumerate(islice(consumer, READ), 1), maxlen=1)[0][0]


def poll_own(log):
    with log.consumer("t", auto_offset_reset="earliest") as consumer:
        return count_polled(consumer, max_records=500)


def poll_kafka_python(log):
    settings = {"bootstrap_servers": log.path, "auto_offset_reset": "earliest"}
    with KafkaConsumer("t", **settings) as consumer:
        return count_polled(consumer, max_records=500)


def count_polled(consumer, **options):
    count = 0
    while polled := consumer.poll(**options):
        count += sum(map(len, polled.values()))
    return count


def confluent_consumer(log):
    settings = {"group.id": "g", "auto.offset.reset": "earliest", "enable.auto.commit": False}
    consumer = confluent.Consumer({"bootstrap.servers": log.path, **settings})
    consumer.assign([confluent.TopicPartition("t", 0)])
    return consumer


def poll_confluent(log):
    """One message at a time, as its programs do."""
    with confluent_consumer(log) as consumer:
        count = 0
        while consumer.poll(0) is not None:
            count += 1
        return count


def consume_confluent(log):
    with confluent_consumer(log) as consumer:
        count = 0
        while messages := consumer.consume(500, 0):
            count += len(messages)
        return count


@pytest.mark.parametrize(
    "read",
    [
        *(iterate_own, iterate_kafka_python),
        *(poll_own, poll_kafka_python, poll_confluent, consume_confluent),
    ],
    ids=lambda read: read.__name__.replace("_", " "),
)
def bench_read(benchmark, full, read):
    """All records of a partition, as objects."""
    benchmark.extra_info.update(records=READ)
    assert benchmark.pedantic(read, args=(full,), rounds=5, warmup_rounds=1) == READ
