"""What does a record cost in the tasks of a loop, beside the synchronous face and aiokafka?

`KAFKA=host:port` adds aiokafka's own clients on a broker.  Rates are records per second of one
process; `delay` is the median from the call of `send` in another process to the record in the
program, and `idle` the part of a processor that a thousand waiting tasks take.
"""

import asyncio
import os
import statistics
import time
from collections import deque
from contextlib import ExitStack

import pytest
from conftest import start_process

import embedlog

aiokafka = pytest.importorskip("aiokafka")

VALUE, READ, SENT = bytes(100), 200_000, 20_000
EARLIEST = {"auto_offset_reset": "earliest"}
BROKER = os.environ.get("KAFKA")


@pytest.fixture
def full(log):
    log.create_topic("t")
    with log.producer() as producer:
        producer.send_batch("t", [VALUE] * READ).result()
    return log


def read_sync(log):
    with log.consumer("t", **EARLIEST) as consumer:
        deque(consumer.iter_records(until="end"), maxlen=0)


async def read_async_for(log):
    async with log.consumer("t", **EARLIEST) as consumer:
        left = READ
        async for _ in consumer:
            left -= 1
            if not left:
                break


async def read_getone(log):
    async with log.consumer("t", **EARLIEST) as consumer:
        for _ in range(READ):
            await consumer.getone()


async def read_getmany(log):
    async with log.consumer("t", **EARLIEST) as consumer:
        left = READ
        while left:
            left -= sum(map(len, (await consumer.getmany(timeout_ms=1000)).values()))


def aiokafka_consumer(address):
    from embedlog.kafka.aiokafka import AIOKafkaConsumer

    return AIOKafkaConsumer("t", bootstrap_servers=address, **EARLIEST)


async def read_aiokafka(address):
    async with aiokafka_consumer(address) as consumer:
        for _ in range(READ):
            await consumer.getone()


async def read_aiokafka_getmany(address):
    async with aiokafka_consumer(address) as consumer:
        left = READ
        while left:
            left -= sum(map(len, (await consumer.getmany(timeout_ms=1000)).values()))


READS = [read_sync, read_async_for, read_getone, read_getmany, read_aiokafka, read_aiokafka_getmany]


@pytest.mark.parametrize("read", READS)
def bench_read(benchmark, full, read):
    def run():
        target = full.path if "aiokafka" in read.__name__ else full
        return read(target) if read is read_sync else asyncio.run(read(target))

    benchmark.extra_info.update(records=READ)
    benchmark.pedantic(run, rounds=5, warmup_rounds=1)


async def fill_broker():
    async with aiokafka.AIOKafkaProducer(bootstrap_servers=BROKER, linger_ms=5) as producer:
        for _ in range(READ):
            await producer.send("t", VALUE)


@pytest.mark.skipif(not BROKER, reason="KAFKA names no broker")
@pytest.mark.parametrize("read", [read_aiokafka, read_aiokafka_getmany])
def bench_read_from_broker(benchmark, read):
    asyncio.run(fill_broker())
    benchmark.extra_info.update(records=READ)
    benchmark.pedantic(lambda: asyncio.run(read(BROKER)), rounds=5, warmup_rounds=1)


async def send_in_turn(producer, topic):
    for _ in range(SENT):
        await producer.send(topic, VALUE)


async def send_in_tasks(producer, topic):
    async def task():
        for _ in range(SENT // 1000):
            await producer.send(topic, VALUE)

    await asyncio.gather(*[task() for _ in range(1000)])


@pytest.mark.parametrize("send", [None, send_in_turn, send_in_tasks])
def bench_send(benchmark, log, send):
    """Each record is awaited; without a loop, by `result`."""
    log.create_topic("t")
    with log.producer() as producer:

        def run():
            if send is not None:
                asyncio.run(send(producer, "t"))
            else:
                for _ in range(SENT):
                    producer.send("t", VALUE).result()

        benchmark.extra_info.update(records=SENT)
        benchmark.pedantic(run, rounds=5, warmup_rounds=1)


async def wait_in_turn(producer):
    for _ in range(SENT // 10):
        await producer.send_and_wait("s", VALUE)


@pytest.mark.parametrize(
    "where",
    [
        "log",
        pytest.param(
            "broker", marks=pytest.mark.skipif(not BROKER, reason="KAFKA names no broker")
        ),
    ],
)
def bench_send_and_wait_of_aiokafka(benchmark, log, where):
    from embedlog.kafka.aiokafka import AIOKafkaProducer

    if where == "broker" and not BROKER:
        pytest.skip("KAFKA names no broker")

    async def run():
        address = log.path if where == "log" else BROKER
        async with AIOKafkaProducer(bootstrap_servers=address) as producer:
            await wait_in_turn(producer)

    benchmark.extra_info.update(records=SENT // 10)
    benchmark.pedantic(lambda: asyncio.run(run()), rounds=5, warmup_rounds=1)


def append_slowly(path, count, pipe):
    with embedlog.open(path, maintenance=False) as log, log.producer() as producer:
        pipe.recv()
        for _ in range(count):
            time.sleep(0.002)
            producer.send("t", b"%d" % time.monotonic_ns()).result()


@pytest.mark.parametrize("face", ["sync", "async"])
def bench_delay(benchmark, log, face):
    log.create_topic("t")
    delays = []

    def note(record):
        delays.append(time.monotonic_ns() - int(record.value))
        return len(delays) == 1000

    async def read():
        async for record in log.consumer("t", **EARLIEST):
            if note(record):
                break

    def run():
        pipe.send(None)
        if face == "async":
            asyncio.run(read())
        else:
            for record in log.consumer("t", **EARLIEST):
                if note(record):
                    break

    with ExitStack() as processes:
        pipe = start_process(processes, append_slowly, log.path, 1000)
        benchmark.pedantic(run, rounds=1)
    delays.sort()
    benchmark.extra_info.update(
        delay_p50_us=statistics.median(delays) / 1000, delay_p99_us=delays[990] / 1000
    )


def bench_idle_tasks(benchmark, log):
    log.create_topic("t")

    async def run():
        tasks = [asyncio.create_task(log.consumer("t").getone()) for _ in range(1000)]
        await asyncio.sleep(1)
        began = time.process_time()
        await asyncio.sleep(5)
        benchmark.extra_info.update(idle_percent=(time.process_time() - began) / 5 * 100)
        for task in tasks:
            task.cancel()

    benchmark.pedantic(lambda: asyncio.run(run()), rounds=1)
