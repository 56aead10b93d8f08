"""The asynchronous face of a log: futures, consumers and transactions in the tasks of a loop."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time

import pytest
from support.children import PausedChild
from support.patience import patient
from support.tiers import choose

import embedlog
from embedlog.errors import ClosedError, ConflictError, LogDeletedError, WakeupError

EARLIEST = {"auto_offset_reset": "earliest"}


@pytest.fixture
def log(tmp_path):
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t", 2)
        yield log


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, patient(30)))


async def waiting(coroutine):
    """Return a task that waits."""
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(0.02)
    assert not task.done()
    return task


def test_records_go_through_a_log_without_a_thread_that_the_program_starts(tmp_path):
    """E28, G28: blocks, sends, commits, and all ways to read."""

    async def program():
        async with embedlog.open(tmp_path / "log", maintenance=False) as log:
            log.create_topic("t")
            async with log.producer() as producer, log.consumer("t", group_id="g", **EARLIEST) as c:
                first = await producer.send("t", b"0", key=b"k")
                assert (first.offset, first.partition) == (0, 0)
                producer.send("t", b"1")
                await producer.aflush()
                assert (await c.getone()).value == b"0"
                await c.commit()
                assert c.committed(("t", 0)) == 1
                batch = producer.send_batch("t", [b"2", b"3"])
                assert (await batch)[0].count == 2
                ((_, records),) = (await c.getmany(timeout_ms=60_000)).items()
                taken = [record.value for record in records]
                async for record in c:
                    taken.append(record.value)
                    if len(taken) == 4:
                        break
                    producer.send("t", b"4")
                assert taken == [b"1", b"2", b"3"][: len(records)] + taken[len(records) :]
                assert c.position(("t", 0)) == 5 if len(taken) == 4 else 4
        assert log.root.closed

    run(program())


def test_what_many_tasks_send_in_one_step_is_one_batch(log):
    """G28: without a thread for each append."""

    async def program():
        producer = log.producer()
        sent = await asyncio.gather(
            *(producer.send("t", b"%d" % number, partition=0) for number in range(1000))
        )
        assert [each.offset for each in sent] == list(range(1000))
        return producer.metrics()["producer-metrics"]["batch-total"]

    assert run(program()) <= 3


def test_a_record_that_fails_raises_in_the_task(log):
    async def program():
        producer = log.producer()
        await producer.send("t", b"1", key=b"k", expected_key_offset=None)
        with pytest.raises(ConflictError):
            await producer.send("t", b"2", key=b"k", expected_key_offset=None)

    run(program())


def test_a_partition_that_another_process_holds_does_not_stop_the_loop(log):
    """G28: another thread waits for the lock."""

    async def program():
        producer = log.producer()
        await producer.send("t", b"0", partition=0)
        with PausedChild(lambda pause: hold(log, pause)):
            task = await waiting(_result(producer.send("t", b"1", partition=0)))
            began = time.monotonic()
            await asyncio.sleep(0)
            assert time.monotonic() - began < patient(0.5)
        assert (await task).offset == 1

    run(program())


def hold(log, pause):
    with log.root.partition("t", 0).locked():
        pause()


async def _result(awaitable):
    return await awaitable


def test_a_thousand_consumers_wait_in_one_thread(log):
    """E29: and a record wakes all of them; the small tiers have some hundreds."""

    async def program():
        before = set(threading.enumerate())
        consumers = [log.consumer("t") for _ in range(choose(quick=300, all=1000))]
        tasks = [asyncio.create_task(consumer.getone()) for consumer in consumers]
        await asyncio.sleep(0.1)
        # Those of other tests may end meanwhile.
        assert len(set(threading.enumerate()) - before) == 1
        with log.producer() as producer:
            producer.send("t", b"1")
        assert {record.value for record in await asyncio.gather(*tasks)} == {b"1"}
        for consumer in consumers:
            await consumer.aclose()

    log.producer().close()
    run(program())


def test_consumers_of_several_loops_wait_in_the_same_thread(log):
    """E29: each is woken in its own loop."""

    def in_thread(results):
        results.append(asyncio.run(log.consumer("t", **EARLIEST).getone()))

    results, before = [], threading.active_count()
    threads = [threading.Thread(target=in_thread, args=[results]) for _ in range(3)]
    for thread in threads:
        thread.start()
    while threading.active_count() < before + 4:
        time.sleep(0.01)
    with log.producer() as producer:
        producer.send("t", b"1")
    for thread in threads:
        thread.join(patient(30))
    assert [record.value for record in results] == [b"1"] * 3


def test_tasks_may_share_a_consumer(log):
    """E28: each record goes to one of them."""

    async def program():
        consumer = log.consumer("t")
        consumer.poll(0)
        tasks = [await waiting(consumer.getone()) for _ in range(3)]
        with log.producer() as producer:
            producer.send_batch("t", [b"0", b"1", b"2"])
        assert sorted([(await task).value for task in tasks]) == [b"0", b"1", b"2"]

    run(program())


def test_what_another_task_does_wakes_the_one_that_waits(log):
    """E28: a seek, a resume, an assignment and a subscription."""

    async def program():
        with log.producer() as producer:
            producer.send("t", b"0", partition=0)
        one, consumer = embedlog.TopicPartition("t", 0), log.consumer()
        consumer.assign([one])
        consumer.pause(one)
        for call in (
            lambda: (consumer.seek(one, 0), consumer.resume(one)),
            lambda: consumer.seek(one, 0),
            lambda: consumer.seek_to_beginning(one),
            lambda: (consumer.unsubscribe(), consumer.assign([one]), consumer.seek(one, 0)),
        ):
            task = await waiting(consumer.getone())
            call()
            assert (await task).value == b"0"

    run(program())


def test_getone_and_getmany_read_the_partitions_that_are_named(log):
    async def program():
        consumer = log.consumer("t", **EARLIEST)
        with log.producer() as producer:
            for partition in (0, 1, 0, 1):
                producer.send("t", b"%d" % partition, partition=partition)
        one = embedlog.TopicPartition("t", 1)
        assert (await consumer.getone(one)).partition == 1
        assert (await consumer.getone()).value
        assert {*await consumer.getmany(one)} <= {one}
        rest = await consumer.getmany(max_records=1)
        assert sum(map(len, rest.values())) == 1
        with pytest.raises(embedlog.errors.IllegalStateError):
            await consumer.getone(embedlog.TopicPartition("other", 0))

    run(program())


def test_a_wait_ends_with_its_timeout_a_wakeup_or_the_consumer(log):
    """E12, E24, E28."""

    async def program():
        consumer = log.consumer("t")
        assert await consumer.getmany(timeout_ms=10) == {}
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(consumer.getone(), 0.01)
        task = await waiting(consumer.getone())
        await asyncio.to_thread(consumer.wakeup)
        with pytest.raises(WakeupError):
            await task
        one, loop = await waiting(consumer.getone()), await waiting(_all(consumer))
        consumer.close()
        with pytest.raises(ClosedError):
            await one
        assert await loop == []
        short = log.consumer("t", consumer_timeout_ms=10)
        assert await _all(short) == []

    run(program())


async def _all(consumer):
    return [record async for record in consumer]


def test_a_task_that_waits_learns_that_the_log_was_closed_or_deleted(log, tmp_path):
    async def program():
        other = embedlog.open(tmp_path / "other", maintenance=False)
        other.create_topic("t")
        task = await waiting(other.consumer("t").getone())
        await other.aclose()
        with pytest.raises(ClosedError):
            await task
        task = await waiting(log.consumer("t").getone())
        shutil.rmtree(log.path)
        with pytest.raises(LogDeletedError):
            await task

    with pytest.raises(LogDeletedError):
        run(program())
        log.close()


def test_a_consumer_waits_for_a_topic_without_a_timer(log):
    """E19: in one process or another, a new topic and new partitions change the wake page."""

    async def program():
        task = await waiting(log.consumer("later", **EARLIEST).getone())
        log.create_topic("later")
        with log.producer() as producer:
            producer.send("later", b"1")
        assert (await task).value == b"1"

    run(program())


def test_a_task_that_waits_commits_when_it_is_due(log):
    """E20: what was returned before is committed while nothing comes."""

    async def program():
        async with log.consumer("t", group_id="g", auto_commit_interval_ms=50, **EARLIEST) as c:
            with log.producer() as producer:
                producer.send("t", b"1", partition=0)
            await c.getone()
            await waiting(c.getone())
            while c.committed(embedlog.TopicPartition("t", 0)) != 1:
                await asyncio.sleep(0.01)

    run(program())


def test_a_loop_that_is_blocked_loses_no_partition(log):
    """E29: no heartbeat runs on the loop, and the kernel knows that the member lives."""

    async def program():
        settings = {"session_timeout_ms": 300, "heartbeat_interval_ms": 50, **EARLIEST}
        async with log.consumer("t", group_id="g", **settings) as consumer:
            with log.producer() as producer:
                producer.send("t", b"1", partition=0)
            await consumer.getone()
            with log.consumer("t", group_id="g", **settings) as other:
                # As the loop is blocked, so is what would let go of partitions.
                end = time.monotonic() + 1
                while time.monotonic() < end:
                    other.poll(50)
                assert not other.assignment()
                await consumer.commit()
        assert len(consumer.assignment() if not consumer._closed else ()) == 0

    run(program())


class Listener:
    """One whose methods wait."""

    def __init__(self, consumer):
        self.consumer, self.calls, self.proceed = consumer, [], asyncio.Event()

    async def on_partitions_revoked(self, revoked):
        self.calls.append(("revoked", len(revoked)))
        await self.consumer.commit()

    async def on_partitions_assigned(self, assigned):
        self.calls.append(("assigned", len(assigned)))
        await self.proceed.wait()
        for partition in assigned:
            self.consumer.seek(partition, 1)


def test_a_listener_may_wait_and_a_cancelled_task_does_not_end_it(log):
    """M18: other tasks wait for the rebalance too, and then begin where the listener sought."""

    async def program():
        with log.producer() as producer:
            producer.send_batch("t", [b"0", b"1"], partition=0)
        consumer = log.consumer(group_id="g", partition_assignment_strategy="range", **EARLIEST)
        listener = Listener(consumer)
        consumer.subscribe(["t"], listener=listener)
        tasks = [await waiting(consumer.getone()) for _ in range(2)]
        tasks[0].cancel()
        await asyncio.sleep(0.01)
        assert not tasks[1].done()
        listener.proceed.set()
        assert (await tasks[1]).value == b"1"
        with pytest.raises(embedlog.errors.IllegalStateError, match="asynchronous"):
            consumer.poll(0)
        await consumer.aclose()
        assert listener.calls == [("revoked", 0), ("assigned", 2), ("revoked", 2)]

    run(program())


def test_a_task_that_waits_awaits_the_listener_of_a_rebalance_that_comes_meanwhile(log):
    """M18: another member joins while it waits, and gets its part."""

    async def program():
        consumer = log.consumer(group_id="g", **EARLIEST)
        listener = Listener(consumer)
        listener.proceed.set()
        consumer.subscribe(["t"], listener=listener)
        task = await waiting(consumer.getone())
        async with log.consumer("t", group_id="g", **EARLIEST) as other:
            while len(other.assignment()) != 1:
                await other.getmany(timeout_ms=10)
            assert ("revoked", 1) in listener.calls or ("revoked", 2) in listener.calls
        task.cancel()
        await asyncio.wait([task])
        await consumer.aclose()

    run(program())


def test_transactions_of_tasks_are_all_or_nothing_and_apart(log):
    """G22, G29."""

    async def transfer(number):
        async with log.transaction() as producer:
            await producer.send("t", b"%d" % number)
            await asyncio.sleep(0.01)
            if number % 2:
                raise KeyError(number)

    async def program():
        results = await asyncio.gather(*map(transfer, range(6)), return_exceptions=True)
        assert [type(each) for each in results] == [type(None), KeyError] * 3
        begun = await log.transaction("name")
        begun.send("t", b"6")
        begun.commit_transaction()

    run(program())
    assert sorted(record.value for record in log.topic("t")) == [b"0", b"2", b"4", b"6"]


def test_a_long_backlog_lets_other_tasks_run(log):
    """E28: a loop over records that are there is interrupted every ten milliseconds.

    Also if each batch takes less, so that the loop asks for the next one within its turn.
    """

    async def program():
        with log.producer() as producer:
            for _ in range(20):
                producer.send_batch("t", [b"x"] * 10_000)
        steps = 0

        async def count():
            nonlocal steps
            while True:
                steps += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(count())
        left = 200_000
        async for _ in log.consumer("t", **EARLIEST):
            left -= 1
            if not left:
                break
        task.cancel()
        assert steps > 2

    run(program())
