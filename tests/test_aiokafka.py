"""aiokafka's clients on a log: the same programs, records and errors."""

from __future__ import annotations

import asyncio

import pytest
from support.children import run_python
from support.patience import patient

import embedlog
import embedlog.kafka

aiokafka = pytest.importorskip("aiokafka")

from aiokafka import errors, structs  # noqa: E402
from aiokafka.admin import NewPartitions, NewTopic, RecordsToDelete  # noqa: E402
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType  # noqa: E402

from embedlog.kafka.aiokafka import (  # noqa: E402
    AIOKafkaAdminClient,
    AIOKafkaConsumer,
    AIOKafkaProducer,
)

TP = structs.TopicPartition


@pytest.fixture
def address(tmp_path):
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t", 2)
    return {"bootstrap_servers": f"embedlog://{tmp_path}/log?maintenance=false"}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, patient(30)))


def test_records_are_those_of_aiokafka(address):
    """Its README: a producer waits for each record, and a consumer of a group iterates."""

    async def program():
        async with AIOKafkaProducer(value_serializer=str.encode, **address) as producer:
            sent = await producer.send_and_wait(
                "t", "one", key=b"k", partition=1, timestamp_ms=7, headers=[("h", b"v")]
            )
            future = await producer.send("t", "two", partition=1)
            assert isinstance(future, asyncio.Future)
            assert (await future).offset == 1
            with pytest.raises(AssertionError, match="key or value"):
                await producer.send("t")
            with pytest.raises(AssertionError, match="Unrecognized partition"):
                await producer.send("t", "x", partition=5)
        with pytest.raises(errors.ProducerClosed):
            await producer.send("t", "late")
        assert sent == structs.RecordMetadata("t", 1, TP("t", 1), 0, 7, 0, None)
        consumer = AIOKafkaConsumer(
            "t",
            group_id="g",
            auto_offset_reset="earliest",
            value_deserializer=bytes.decode,
            **address,
        )
        await consumer.start()
        try:
            assert consumer.assignment() == {TP("t", 0), TP("t", 1)}
            async for each in consumer:
                record = each
                break
            await consumer.commit()
            assert await consumer.committed(TP("t", 1)) == 1
            assert await consumer.position(TP("t", 1)) == 1
            ((partition, rest),) = (await consumer.getmany(timeout_ms=60_000)).items()
            assert (partition, [each.value for each in rest]) == (TP("t", 1), ["two"])
        finally:
            await consumer.stop()
        with pytest.raises(errors.ConsumerStoppedError):
            await consumer.getone()
        assert record == structs.ConsumerRecord(
            "t", 1, 0, 7, 0, b"k", "one", None, 1, 3, (("h", b"v"),)
        )

    run(program())


def test_a_consumer_without_a_group_is_assigned_and_seeks(address):
    async def program():
        async with AIOKafkaProducer(**address) as producer:
            for number in range(3):
                await producer.send_and_wait("t", b"%d" % number, partition=0)
        async with AIOKafkaConsumer(**address) as consumer:
            consumer.assign([TP("t", 0)])
            await consumer.seek_to_beginning()
            assert (await consumer.getone()).value == b"0"
            consumer.seek(TP("t", 0), 2)
            assert (await consumer.getone(TP("t", 0))).value == b"2"
            await consumer.seek_to_end(TP("t", 0))
            assert await consumer.getmany() == {}
            consumer.pause(TP("t", 0))
            assert consumer.paused() == {TP("t", 0)}
            consumer.resume(TP("t", 0))
            assert await consumer.end_offsets([TP("t", 0)]) == {TP("t", 0): 3}
            assert await consumer.beginning_offsets([TP("t", 0)]) == {TP("t", 0): 0}
            assert (await consumer.offsets_for_times({TP("t", 0): 0}))[TP("t", 0)].offset == 0
            assert consumer.highwater(TP("t", 0)) == 3
            assert consumer.partitions_for_topic("t") == {0, 1}
            assert await consumer.topics() == {"t"}
            for call in (consumer.commit(), consumer.committed(TP("t", 0))):
                with pytest.raises(errors.IllegalOperation):
                    await call
            with pytest.raises(errors.IllegalStateError):
                await consumer.position(TP("t", 1))

    run(program())


class Listener(aiokafka.ConsumerRebalanceListener):
    def __init__(self):
        self.calls = []

    async def on_partitions_revoked(self, revoked):
        await asyncio.sleep(0)
        self.calls.append(("revoked", revoked))

    def on_partitions_assigned(self, assigned):
        self.calls.append(("assigned", assigned))


def test_a_listener_is_awaited_before_start_returns(address):
    async def program():
        consumer, listener = AIOKafkaConsumer(group_id="g", **address), Listener()
        consumer.subscribe(["t"], listener=listener)
        await consumer.start()
        assert listener.calls == [("revoked", set()), ("assigned", {TP("t", 0), TP("t", 1)})]
        task = asyncio.create_task(consumer.getone())
        await asyncio.sleep(0.01)
        await consumer.stop()
        with pytest.raises(errors.ConsumerStoppedError):
            await task

    run(program())


def test_a_consumer_that_subscribes_later_joins_while_nobody_reads(address):
    """And while nothing happens in the log."""

    async def program():
        async with AIOKafkaConsumer(group_id="g", **address) as consumer:
            await asyncio.sleep(0.05)
            consumer.subscribe(["t"])
            while not consumer.assignment():
                await asyncio.sleep(0.01)

    run(program())


def test_a_transaction_commits_the_offsets_of_a_consumer_of_the_program(address):
    """G22: with aiokafka's call, which names the group only."""

    async def program():
        async with AIOKafkaProducer(**address) as producer:
            await producer.send_and_wait("t", b"in", partition=0)
            with pytest.raises(errors.IllegalOperation):
                await producer.begin_transaction()
        settings = {"group_id": "g", "auto_offset_reset": "earliest", "enable_auto_commit": False}
        async with (
            AIOKafkaConsumer("t", **settings, **address) as consumer,
            AIOKafkaProducer(transactional_id="x", **address) as producer,
        ):
            record = await consumer.getone()
            with pytest.raises(errors.IllegalOperation):
                await producer.send("t", b"outside")
            with pytest.raises(KeyError):
                async with producer.transaction():
                    await producer.send("t", b"never", partition=1)
                    raise KeyError
            async with producer.transaction():
                await producer.send("t", b"out", partition=1)
                await producer.send_offsets_to_transaction({TP("t", 0): record.offset + 1}, "g")
            assert await consumer.committed(TP("t", 0)) == 1
            assert (await consumer.getone()).value == b"out"

    run(program())


def test_batches_that_a_program_builds_are_written_as_one(address):
    async def program():
        async with AIOKafkaProducer(**address) as producer:
            batch = producer.create_batch()
            for number in range(3):
                assert batch.append(key=None, value=b"%d" % number, timestamp=None) is not None
            assert batch.record_count() == 3
            future = await producer.send_batch(batch, "t", partition=1)
            assert (await future).offset == 0
            assert batch.append(key=None, value=b"", timestamp=None) is None
            await asyncio.gather(*[await producer.send("t", b"x") for _ in range(100)])
            await producer.flush()
            with pytest.raises(errors.MessageSizeTooLargeError):
                await producer.send("t", b"x" * (2 << 20))

    run(program())


def test_the_admin_client_gets_its_answers_from_the_log(address):
    async def program():
        async with AIOKafkaAdminClient(**address) as admin:
            created = await admin.create_topics([NewTopic("new", 2, 1), NewTopic("t", 1, 1)])
            assert [each[:2] for each in created.topic_errors] == [("new", 0), ("t", 36)]
            assert {*await admin.list_topics()} >= {"new", "t"}
            (topic,) = await admin.describe_topics(["new"])
            assert len(topic["partitions"]) == 2
            assert (await admin.describe_cluster())["brokers"][0]["node_id"] == 0
            await admin.create_partitions({"new": NewPartitions(3)})
            resource = ConfigResource(ConfigResourceType.TOPIC, "new", {"retention.ms": "1000"})
            await admin.alter_configs([resource])
            resource = ConfigResource(ConfigResourceType.TOPIC, "new")
            (described,) = await admin.describe_configs([resource])
            entries = {each[0]: each[1] for each in described.resources[0][4]}
            assert entries["retention.ms"] == "1000"
            async with AIOKafkaProducer(**address) as producer:
                await producer.send_and_wait("new", b"1", partition=0)
            deleted = await admin.delete_records({TP("new", 0): RecordsToDelete(1)})
            assert deleted == {TP("new", 0): 1}
            async with AIOKafkaConsumer("new", group_id="g", **address) as consumer:
                await consumer.commit({TP("new", 0): 1})
                assert await admin.list_consumer_groups() == [("g", "consumer")]
                (groups,) = await admin.describe_consumer_groups(["g"])
                assert groups.groups[0][1:3] == ("g", "Stable")
                offsets = await admin.list_consumer_group_offsets("g")
                assert offsets == {TP("new", 0): structs.OffsetAndMetadata(1, "")}
            assert (await admin.delete_topics(["new"])).topic_error_codes == [("new", 0)]
            assert await admin.find_coordinator("g") == 0

    run(program())


def test_patch_has_programs_use_the_log_whatever_they_imported_before(address, tmp_path):
    class Own(aiokafka.AIOKafkaProducer):
        async def send_twice(self, topic, value):
            await self.send_and_wait(topic, value)
            return await super().send_and_wait(topic, value)

    async def program():
        async with Own(bootstrap_servers="broker:9092") as producer:
            assert (await producer.send_twice("patched", b"1")).offset == 1
            assert isinstance(producer, AIOKafkaProducer)
        settings = {"bootstrap_servers": "broker:9092", "auto_offset_reset": "earliest"}
        async with aiokafka.AIOKafkaConsumer("patched", **settings) as consumer:
            return (await consumer.getone()).value

    with embedlog.kafka.patch(tmp_path / "log"):
        assert run(program()) == b"1"
    assert aiokafka.AIOKafkaProducer is not AIOKafkaProducer

    async def for_brokers():
        producer = AIOKafkaProducer(bootstrap_servers="localhost:9")
        assert type(producer) is AIOKafkaProducer._original
        await producer.stop()

    run(for_brokers())
    with embedlog.kafka.patch():
        run(for_brokers())


def test_the_clients_need_no_other_library(address):
    program = (
        "import sys; sys.modules['kafka'] = sys.modules['confluent_kafka'] = None\n"
        "import embedlog.kafka.aiokafka"
    )
    run_python("-c", program)


SIGNATURES = {
    "AIOKafkaConsumer": aiokafka.AIOKafkaConsumer,
    "AIOKafkaProducer": aiokafka.AIOKafkaProducer,
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_public_methods_are_all_there(name):
    ours = {"AIOKafkaConsumer": AIOKafkaConsumer, "AIOKafkaProducer": AIOKafkaProducer}[name]
    theirs = {each for each in vars(SIGNATURES[name]) if not each.startswith("_")}
    assert theirs - set(dir(ours)) == set()
