"""A task is cancelled at every await of every asynchronous method, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from support import forks
from support.cancellation import (
    VALUES,
    Cancelling,
    Cases,
    World,
    at_every_await,
    check_rest,
    public_async_methods,
)
from support.mutants import Change
from support.tiers import sample

import embedlog
from embedlog.api.transaction_block import Transaction
from embedlog.errors import EmbedlogError
from embedlog.producer.future import RecordFuture

CASES = Cases()


@CASES.of("Consumer.getone")
async def getone(world, plan: Cancelling):
    """E28: its position moves for what it returned only, also while it waits at first."""
    with world.consumer() as consumer:
        world.append_soon(VALUES)
        ended = await plan.run(consumer.getone())
        await check_rest(consumer, [plan.outcome.value] if ended else [], VALUES)


@CASES.of("Consumer.getmany")
async def getmany(world, plan: Cancelling):
    with world.consumer(group_id="g", auto_offset_reset="latest") as consumer:
        world.append_soon(VALUES)
        taken = []
        if await plan.run(consumer.getmany(timeout_ms=60_000, max_records=2)):
            taken = [each.value for records in plan.outcome.values() for each in records]
        await check_rest(consumer, taken, VALUES)
        await consumer.commit()


@CASES.of("Consumer.__aiter__")
async def iteration(world, plan: Cancelling):
    with world.consumer() as consumer:
        world.append_soon(VALUES[:3])
        taken = []

        async def loop():
            async for record in consumer:
                taken.append(record.value)
                if len(taken) == 3:
                    world.append_soon(VALUES[3:])
                if len(taken) == len(VALUES):
                    break

        await plan.run(loop())
        if len(taken) < 3:
            world.append_soon(VALUES[3:])
        await check_rest(consumer, taken, VALUES)


async def share_rest(consumer, taken):
    """Check that a share consumer returns what was not taken yet, each record once."""
    while len(taken) < len(VALUES):
        taken += [record.value for record in await consumer.getmany(timeout_ms=60_000)]
    assert sorted(taken) == VALUES


def share_consumer(world, plan, **config):
    world.log.groups[f"of {plan}"].alter({"share.auto.offset.reset": "latest"})
    consumer = world.log.share_consumer("t", group=f"of {plan}", **config)
    consumer.poll(0)
    return consumer


@CASES.of("ShareConsumer.getone", "ShareConsumer.getmany")
async def getone_of_a_share_group(world, plan: Cancelling):
    """S16: what is acquired for a cancelled task is given to the next one."""
    with share_consumer(world, plan) as consumer:
        world.append_soon(VALUES)
        ended = await plan.run(consumer.getone())
        await share_rest(consumer, [plan.outcome.value] if ended else [])


@CASES.of("ShareConsumer.__aiter__")
async def iteration_of_a_share_group(world, plan: Cancelling):
    with share_consumer(world, plan) as consumer:
        world.append_soon(VALUES[:3])
        taken = []

        async def loop():
            async for record in consumer:
                taken.append(record.value)
                if len(taken) == 3:
                    world.append_soon(VALUES[3:])
                if len(taken) == len(VALUES):
                    break

        await plan.run(loop())
        if len(taken) < 3:
            world.append_soon(VALUES[3:])
        await share_rest(consumer, taken)


@CASES.of("ShareConsumer.aclose", "ShareConsumer.__aenter__", "ShareConsumer.__aexit__")
async def closing_a_share_consumer(world, plan: Cancelling):
    """S3: what it has is free when its block has ended, however that was."""
    consumer = share_consumer(world, plan)
    world.append(VALUES)

    async def block():
        async with consumer:
            await consumer.getone()

    await plan.run(block())
    await consumer.aclose()
    with world.log.share_consumer("t", group=f"of {plan}") as other:
        await share_rest(other, [])


@CASES.of("RecordFuture.__await__")
async def sending(world, plan: Cancelling):
    """G28: a record that was sent is written, whether or not anybody waits for it."""
    with world.log.producer() as producer:

        async def send():
            for value in VALUES:
                sent.append(value)
                await producer.send("t", value)

        sent = []
        await plan.run(send())
        last = await producer.send("t", b"last")
        assert last.offset == world.base + len(sent)
        assert world.values() == [*sent, b"last"]


@CASES.of("Producer.aflush", "Producer.aclose", "Producer.__aenter__", "Producer.__aexit__")
async def flushing(world, plan: Cancelling):
    producer = world.log.producer(linger_ms=60_000)

    async def block():
        async with producer:
            for value in VALUES:
                producer.send("t", value)
            await producer.aflush()

    await plan.run(block())
    await producer.aclose()
    assert world.values() in (VALUES, [])


@CASES.of("Transaction.__aenter__", "Transaction.__aexit__")
async def transaction(world, plan: Cancelling):
    """G22, G29: all of it or nothing, and the next transaction begins at once."""

    async def block():
        async with world.log.transaction("name") as producer:
            for value in VALUES:
                await producer.send("t", value)

    ended = await plan.run(block())
    published = world.values()
    assert published == VALUES if ended else published in (VALUES, [])
    async with world.log.transaction("name") as producer:
        producer.send("t", b"last")
    assert world.values() == [*published, b"last"]


@CASES.of("Transaction.__await__")
async def awaited_transaction(world, plan: Cancelling):
    if await plan.run(_begun(world)):
        plan.outcome.send("t", b"first")
        plan.outcome.commit_transaction()
    before = world.values()
    async with world.log.transaction("name") as producer:
        producer.send("t", b"last")
    assert world.values() == [*before, b"last"]


async def _begun(world):
    return await world.log.transaction("name")


class Listener:
    def __init__(self):
        self.calls = Counter()

    async def on_partitions_assigned(self, partitions):
        self.calls["begun"] += 1
        await asyncio.sleep(0)
        self.calls["ended"] += 1
        self.calls["assigned"] += len(partitions)

    on_partitions_revoked = on_partitions_lost = lambda self, partitions: asyncio.sleep(0)


@CASES.of("Consumer.aclose", "Consumer.__aenter__", "Consumer.__aexit__")
async def closing_with_listener(world, plan: Cancelling):
    """M18: a rebalance whose listener waits is completed once, whichever task is cancelled."""
    world.append(VALUES)
    listener = Listener()
    consumer = world.log.consumer(group_id=f"of {plan}", auto_offset_reset="earliest")
    consumer.subscribe(["t"], listener=listener)

    async def block():
        async with consumer:
            await consumer.getone()

    await plan.run(block())
    await consumer.aclose()
    assert listener.calls["assigned"] <= 1
    assert listener.calls["begun"] == listener.calls["ended"]
    with world.log.consumer("t", group_id=f"of {plan}", auto_offset_reset="earliest") as other:
        other.poll(60_000)
        assert other.assignment(), "the group waits for nobody"


@CASES.of("Log.aclose", "Log.__aenter__", "Log.__aexit__")
async def log_block(world, plan: Cancelling):
    log = embedlog.open(world.path, maintenance=False)

    async def block():
        async with log:
            producer = log.producer(linger_ms=60_000)
            producer.send("t", b"last")
            await log.consumer("t", auto_offset_reset="earliest").getone()

    await plan.run(block())
    await log.aclose()
    assert world.values() in ([b"last"], [])


@pytest.mark.parametrize("method", sample(CASES.once(), 6))
def test_a_task_may_be_cancelled_at_every_await(method, tmp_path):
    """E28, G28, G29: consumer and producer stay usable, and nothing is lost or doubled."""
    assert CASES.run(method, tmp_path)


def test_the_cases_are_all_asynchronous_methods():
    kinds = embedlog.Log, embedlog.Producer, embedlog.Consumer, Transaction, RecordFuture
    assert public_async_methods(*kinds, embedlog.ShareConsumer) == set(CASES)


BUGS = {
    "a task waits after it has taken records": (
        Change(
            "embedlog.consumer.consumer:Consumer._wait_async",
            {"return taken": "await asyncio.sleep(0); return taken"},
        ),
        "Consumer.getmany",
    ),
    "a call in a thread is left": (
        Change(
            "embedlog.tasks:in_thread",
            {"            cancelled = error": "            raise"},
        ),
        "Transaction.__aenter__",
    ),
    "the listener runs in the task that polls": (
        Change(
            "embedlog.consumer.group_client:GroupClient.update_async",
            {"await asyncio.shield(self._following)": "await self._following"},
        ),
        "Consumer.aclose",
    ),
}


@pytest.mark.tier("all")
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, tmp_path):
    change, name = BUGS[bug]

    async def run(plan):
        async with World(tmp_path) as world:
            await asyncio.wait_for(CASES[name](world, plan), 1)

    def work():
        change()
        try:
            at_every_await(run)
        except (AssertionError, EmbedlogError, TimeoutError, asyncio.CancelledError) as error:
            return repr(error)
        return None

    assert forks.call(work, patience=120) is not None
