"""A task is cancelled at every await of every method of aiokafka's clients on a log."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
from support.cancellation import VALUES, Cancelling, Cases, check_rest, public_async_methods
from support.tiers import sample

from embedlog.kafka import bootstrap

aiokafka = pytest.importorskip("aiokafka")

from aiokafka.admin import NewPartitions, NewTopic, RecordsToDelete  # noqa: E402
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType  # noqa: E402
from aiokafka.structs import TopicPartition  # noqa: E402

from embedlog.kafka.aiokafka import (  # noqa: E402
    AIOKafkaAdminClient,
    AIOKafkaConsumer,
    AIOKafkaProducer,
)
from embedlog.kafka.aiokafka.producer import _Transaction  # noqa: E402

CASES = Cases()
T0 = TopicPartition("t", 0)


def client(kind, world, *topics, **config):
    address = f"embedlog://{world.path}?maintenance=false"
    return kind(*topics, bootstrap_servers=address, **config)


@asynccontextmanager
async def started(kind, world, *topics, **config):
    """Yield a client; at the end nobody has the log open."""
    one = client(kind, world, *topics, **config)
    await one.start()
    try:
        yield one
    finally:
        await stop(one)


async def stop(one):
    await (one.close() if isinstance(one, AIOKafkaAdminClient) else one.stop())
    assert one._address.path not in bootstrap._shared, "the log was not given back"


def reader(world, group=None):
    return started(AIOKafkaConsumer, world, "t", group_id=group, auto_offset_reset="earliest")


@CASES.of("AIOKafkaConsumer.start", "AIOKafkaConsumer.__aenter__")
async def starting_a_consumer(world, plan: Cancelling):
    """One that did not start can be started."""
    consumer = client(AIOKafkaConsumer, world, "t", group_id=f"of {plan}", enable_auto_commit=False)
    if not await plan.run(consumer.start()):
        assert str(world.path) not in bootstrap._shared
        await consumer.start()
    world.append_soon(VALUES)
    await check_rest(consumer, [], VALUES)
    await stop(consumer)


@CASES.of("AIOKafkaConsumer.stop", "AIOKafkaConsumer.__aexit__")
async def stopping_a_consumer(world, plan: Cancelling):
    """It has left its group, and committed, whatever was cancelled."""
    world.append(VALUES)
    group = f"of {plan}"
    consumer = client(AIOKafkaConsumer, world, "t", group_id=group, auto_offset_reset="earliest")
    await consumer.start()
    await check_rest(consumer, [], world.all_values())
    await plan.run(consumer.stop())
    await stop(consumer)
    assert not world.log.groups[group].members()
    async with reader(world, group) as other:
        assert await other.committed(T0) == world.base + len(VALUES)


@CASES.of("AIOKafkaConsumer.getone", "AIOKafkaConsumer.__anext__")
async def getone(world, plan: Cancelling):
    async with started(AIOKafkaConsumer, world, "t") as consumer:
        world.append_soon(VALUES)
        ended = await plan.run(consumer.__anext__())
        await check_rest(consumer, [plan.outcome.value] if ended else [], VALUES)


@CASES.of("AIOKafkaConsumer.getmany")
async def getmany(world, plan: Cancelling):
    async with started(AIOKafkaConsumer, world, "t") as consumer:
        world.append_soon(VALUES)
        taken = []
        if await plan.run(consumer.getmany(timeout_ms=60_000, max_records=2)):
            taken = [each.value for records in plan.outcome.values() for each in records]
        await check_rest(consumer, taken, VALUES)


@CASES.of(
    *(
        f"AIOKafkaConsumer.{name}"
        for name in (
            *("beginning_offsets", "commit", "committed", "end_offsets", "offsets_for_times"),
            *("position", "seek_to_beginning", "seek_to_committed", "seek_to_end", "topics"),
        )
    )
)
async def asking(world, plan: Cancelling):
    """Nothing of it takes a record, and a commit is made or not."""
    world.append(VALUES)

    async def ask():
        await consumer.beginning_offsets([T0])
        await consumer.end_offsets([T0])
        await consumer.offsets_for_times({T0: 0})
        await consumer.topics()
        await consumer.seek_to_end()
        await consumer.seek_to_beginning()
        assert await consumer.position(T0) == 0
        await consumer.commit({T0: world.base + 1})
        assert await consumer.committed(T0) == world.base + 1
        await consumer.seek_to_committed()

    async with reader(world, f"of {plan}") as consumer:
        ended = await plan.run(ask())
        assert await consumer.committed(T0) in (
            {world.base + 1} if ended else {None, world.base + 1}
        )
        await consumer.seek_to_beginning()
        await check_rest(consumer, [], world.all_values())


@CASES.of("AIOKafkaProducer.start", "AIOKafkaProducer.__aenter__")
async def starting_a_producer(world, plan: Cancelling):
    producer = client(AIOKafkaProducer, world, transactional_id="name")
    if not await plan.run(producer.start()):
        assert str(world.path) not in bootstrap._shared
        await producer.start()
    async with producer.transaction():
        await producer.send("t", b"last")
    await stop(producer)
    assert world.values() == [b"last"]


@CASES.of(
    "AIOKafkaProducer.send",
    "AIOKafkaProducer.send_and_wait",
    "AIOKafkaProducer.send_batch",
    "AIOKafkaProducer.flush",
    "AIOKafkaProducer.partitions_for",
)
async def sending(world, plan: Cancelling):
    """What was sent is written once, whether or not anybody waits for it."""

    async def send():
        await producer.partitions_for("t")
        sent.append(VALUES[:1])
        await producer.send("t", VALUES[0])
        await producer.flush()
        sent.append(VALUES[1:2])
        await producer.send_and_wait("t", VALUES[1])
        batch = producer.create_batch()
        for value in VALUES[2:]:
            batch.append(key=None, value=value, timestamp=None)
        sent.append(VALUES[2:])
        await (await producer.send_batch(batch, "t", partition=0))

    sent = []
    async with started(AIOKafkaProducer, world) as producer:
        await plan.run(send())
        last = await producer.send_and_wait("t", b"last")
        assert world.values() == [*(value for values in sent for value in values), b"last"]
        assert last.offset == world.base + len(world.values()) - 1


@CASES.of("AIOKafkaProducer.stop", "AIOKafkaProducer.__aexit__")
async def stopping_a_producer(world, plan: Cancelling):
    producer = client(AIOKafkaProducer, world, linger_ms=60_000)
    await producer.start()
    sent = [await producer.send("t", value) for value in VALUES]
    await plan.run(producer.stop())
    await stop(producer)
    assert world.values() == VALUES
    assert [(await each).offset - world.base for each in sent] == list(range(len(VALUES)))


@CASES.of(
    "AIOKafkaProducer.begin_transaction",
    "AIOKafkaProducer.commit_transaction",
    "AIOKafkaProducer.abort_transaction",
    "AIOKafkaProducer.send_offsets_to_transaction",
    "_Transaction.__aenter__",
    "_Transaction.__aexit__",
)
async def transactions(world, plan: Cancelling):
    """G22, G29: all of it or nothing, and the next transaction can begin."""
    group = f"of {plan}"

    async def block():
        async with producer.transaction():
            await producer.send("t", b"dropped")
            await producer.send_offsets_to_transaction({T0: 7}, group)
            raise ZeroDivisionError

    async def two_blocks():
        with pytest.raises(ZeroDivisionError):
            await block()
        async with producer.transaction():
            for value in VALUES:
                await producer.send("t", value)
            await producer.send_offsets_to_transaction({T0: 3}, group)

    async with started(AIOKafkaProducer, world, transactional_id="name") as producer:
        ended = await plan.run(two_blocks())
        published = world.values()
        assert published == VALUES if ended else published in (VALUES, [])
        committed = world.log.consumer(group_id=group).committed(T0)
        assert committed == (3 if published else None) or (committed and committed.offset == 3)
        async with producer.transaction():
            await producer.send("t", b"last")
        assert world.values() == [*published, b"last"]


@CASES.of("AIOKafkaAdminClient.start", "AIOKafkaAdminClient.__aenter__")
async def starting_an_admin_client(world, plan: Cancelling):
    admin = client(AIOKafkaAdminClient, world)
    if not await plan.run(admin.start()):
        assert str(world.path) not in bootstrap._shared
        await admin.start()
    assert "t" in await admin.list_topics()
    await stop(admin)


@CASES.of("AIOKafkaAdminClient.close", "AIOKafkaAdminClient.__aexit__")
async def closing_an_admin_client(world, plan: Cancelling):
    admin = client(AIOKafkaAdminClient, world)
    await admin.start()
    await plan.run(admin.close())
    await stop(admin)


@CASES.of(
    *(
        f"AIOKafkaAdminClient.{name}"
        for name in (
            *("alter_configs", "create_partitions", "create_topics", "delete_records"),
            *("delete_topics", "describe_cluster", "describe_configs"),
            *("describe_consumer_groups", "describe_topics", "find_coordinator"),
            *("list_consumer_group_offsets", "list_consumer_groups", "list_topics"),
        )
    )
)
async def administering(world, plan: Cancelling):
    """Each change is made or not, and the client goes on."""
    resource = ConfigResource(ConfigResourceType.TOPIC, "new", {"retention.ms": "1000"})

    async def administer(admin):
        await admin.create_topics([NewTopic("new", 1, 1)])
        await admin.create_partitions({"new": NewPartitions(2)})
        await admin.alter_configs([resource])
        await admin.describe_configs([resource])
        await admin.describe_topics(["new"])
        await admin.describe_cluster()
        await admin.list_topics()
        await admin.delete_records({TopicPartition("new", 0): RecordsToDelete(before_offset=0)})
        await admin.list_consumer_groups()
        await admin.find_coordinator("g")
        await admin.list_consumer_group_offsets("g")
        await admin.describe_consumer_groups(["g"])
        await admin.delete_topics(["new"])

    async with started(AIOKafkaAdminClient, world) as admin:
        world.log.consumer(group_id="g").commit({T0: 0})
        await plan.run(administer(admin))
        if "new" in world.log.topics():
            await admin.delete_topics(["new"])
        assert await admin.list_topics() == ["t"]


@pytest.mark.parametrize("method", sample(CASES.once(), 6))
def test_a_task_may_be_cancelled_at_every_await(method, tmp_path):
    """E28, G28, G29: the client stays usable, and nothing is lost or doubled."""
    assert CASES.run(method, tmp_path) >= 0


def test_the_cases_are_all_asynchronous_methods():
    kinds = AIOKafkaAdminClient, AIOKafkaConsumer, AIOKafkaProducer, _Transaction
    assert public_async_methods(*kinds) == set(CASES)
