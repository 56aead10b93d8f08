"""What do commits, failover, joining, idling and sharing cost in a consumer group?

Goals: another member reads the partitions of a killed one within 250 ms (median)
and 1 s (worst); an idle member takes at most 0.2 % of a core.
"""

import multiprocessing
import os
import resource
import signal
import time
from contextlib import ExitStack
from multiprocessing import connection

import pytest
from conftest import start_process

import embedlog

KILLS = int(os.environ.get("EMBEDLOG_BENCH_KILLS", "50"))
IDLE_SECONDS = float(os.environ.get("EMBEDLOG_BENCH_IDLE", "20"))
COMMITS = 3000
SHARED = 4_000_000
FORK = multiprocessing.get_context("fork")
SETTINGS = {"group_id": "g", "auto_offset_reset": "earliest"}


# Commits


def member(log, **settings):
    """Return a consumer that has its partitions, and has read to the end."""
    consumer = log.consumer("t", **SETTINGS | settings)
    while consumer.poll(100):
        pass
    return consumer


@pytest.mark.parametrize("partitions", [1, 4, 100], ids="partitions={}".format)
def bench_commit(benchmark, note, log, single, partitions):
    """`commit()` of one process; its floor is one transaction."""
    log.create_topic("t", partitions=partitions)
    for number in range(partitions):
        log.partition("t", number).append([single])
    consumer = member(log, enable_auto_commit=False)

    note(records=1, floor="bench_lmdb_commit", floors=1)
    benchmark(consumer.commit)
    offsets = [consumer.committed(("t", number)) for number in range(partitions)]
    assert offsets == [1] * partitions


def commits_of(path, number, pipe):
    with embedlog.open(path) as log:
        consumer = log.consumer(**SETTINGS | {"group_id": f"g{number}"}, enable_auto_commit=False)
        consumer.subscribe(["t"])
        while consumer.poll(100):
            pass
        pipe.send(None)
        pipe.recv()
        for _ in range(COMMITS):
            consumer.commit()
        pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
        pipe.recv()


@pytest.mark.parametrize("processes", [1, 2, 8], ids="processes={}".format)
def bench_commits_at_once(benchmark, note, log, single, processes):
    """Commits per second of several processes together, each in its own group."""
    log.create_topic("t")
    log.partition("t", 0).append([single])
    with ExitStack() as running:
        pipes = [
            start_process(running, commits_of, log.path, number) for number in range(processes)
        ]
        receive_all(pipes)

        def commit_all():
            send_all(pipes)
            receive_all(pipes)

        benchmark.pedantic(commit_all, rounds=1)
        send_all(pipes)
    seconds = benchmark.stats["mean"]
    note(commits_per_second=round(processes * COMMITS / seconds), records=processes * COMMITS)


def send_all(pipes):
    for pipe in pipes:
        pipe.send(None)


def receive_all(pipes):
    return [pipe.recv() for pipe in pipes]


# Failover


def first_records(path, pipe):
    """Send the time of each poll that returned records, and their partitions."""
    with embedlog.open(path) as log, log.consumer("t", **SETTINGS) as consumer:
        while True:
            for records in consumer.poll(None).values():
                pipe.send((time.perf_counter(), [record.partition for record in records]))


def bench_failover(benchmark, note, log, single):
    """From SIGKILL of one of two members to the next record of its partition in the other."""
    log.create_topic("t", partitions=2)
    seconds, running = [], {}

    def add_member():
        ours, theirs = FORK.Pipe()
        process = FORK.Process(target=first_records, args=(log.path, theirs))
        process.start()
        theirs.close()
        running[process] = ours

    def wait_for_owners():
        """Append to both partitions until each process reads one of them; return which."""
        while True:
            for number in (0, 1):
                log.partition("t", number).append([single])
            time.sleep(0.05)
            partitions = {process: set(drain(pipe)) for process, pipe in running.items()}
            if sorted(map(len, partitions.values())) == [1, 1]:
                return {process: parts.pop() for process, parts in partitions.items()}

    def drain(pipe):
        while pipe.poll():
            yield from pipe.recv()[1]

    def fail_over():
        partitions = wait_for_owners()
        victim, survivor = running
        # The victim may or may not read this record.
        log.partition("t", partitions[victim]).append([single])
        os.kill(victim.pid, signal.SIGKILL)
        begun = time.perf_counter()
        log.partition("t", partitions[victim]).append([single])
        while partitions[victim] not in (received := running[survivor].recv())[1]:
            pass
        seconds.append(received[0] - begun)
        victim.join()
        running.pop(victim).close()
        add_member()

    add_member()
    add_member()
    benchmark.pedantic(fail_over, rounds=KILLS)
    for process in running:
        process.kill()
        process.join()
    middle, worst = sorted(seconds)[len(seconds) // 2], max(seconds)
    note(kills=KILLS, p50_ms=round(middle * 1000, 1), worst_ms=round(worst * 1000, 1))
    assert middle < 0.25
    assert worst < 1.0


# Joining


def bench_join(benchmark, note, log):
    """The 50th member joins a group with 100 partitions, until each member has two."""
    log.create_topic("t", partitions=100)
    consumers = [log.consumer("t", **SETTINGS) for _ in range(49)]
    poll_until_balanced(consumers)
    begun = time.process_time()

    def join():
        consumer = log.consumer("t", **SETTINGS)
        consumer.poll()
        first = time.perf_counter()
        poll_until_balanced([*consumers, consumer])
        rebalance_seconds.append(time.perf_counter() - first)
        consumer.close()
        return consumer

    rebalance_seconds = []
    benchmark.pedantic(join, rounds=5)
    poll_until_balanced(consumers)
    cpu = (time.process_time() - begun) / 5
    note(members=50, partitions=100, rebalance_ms=round(min(rebalance_seconds) * 1000, 1))
    note(cpu_ms_of_a_join_and_a_leave=round(cpu * 1000, 1))
    for consumer in consumers:
        consumer.close()


def bench_all_join(benchmark, note, log):
    """50 members join a group with 100 partitions one after the other, until it is balanced."""
    log.create_topic("t", partitions=100)
    consumers = [log.consumer("t", **SETTINGS) for _ in range(50)]
    note(members=50, partitions=100)
    benchmark.pedantic(lambda: poll_until_balanced(consumers), rounds=1)
    for consumer in consumers:
        consumer.close()


def poll_until_balanced(consumers):
    """Poll each consumer until all partitions are assigned evenly."""
    while True:
        for consumer in consumers:
            consumer.poll()
        counts = [len(consumer.assignment()) for consumer in consumers]
        if sum(counts) == 100 and max(counts) - min(counts) <= 1:
            return


# Idle members


def idle(path, pipe):
    with embedlog.open(path) as log, log.consumer("t", **SETTINGS) as consumer:
        consumer.poll(1000)
        pipe.send(None)
        pipe.recv()
        consumer.poll(1000)  # finish the rebalances of the other members
        before = resource.getrusage(resource.RUSAGE_SELF)
        begun = time.perf_counter()
        consumer.poll(IDLE_SECONDS * 1000)
        seconds = time.perf_counter() - begun
        after = resource.getrusage(resource.RUSAGE_SELF)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        pipe.send((used, seconds, after.ru_nvcsw - before.ru_nvcsw))
        pipe.recv()


@pytest.mark.parametrize("members", [1, 4], ids="members={}".format)
def bench_idle_member(benchmark, note, log, members):
    """CPU time of a process that waits in `poll` of an idle group."""
    log.create_topic("t", partitions=4)
    with ExitStack() as running:
        pipes = [start_process(running, idle, log.path) for _ in range(members)]
        receive_all(pipes)
        send_all(pipes)
        usage = benchmark.pedantic(lambda: receive_all(pipes), rounds=1)
        send_all(pipes)  # leaving wakes the others
    percent = [used / seconds * 100 for used, seconds, _ in usage]
    wakes = [count / seconds for _, seconds, count in usage]
    note(cpu_percent=round(max(percent), 3), wakes_per_second=round(max(wakes), 1))
    assert max(percent) <= 0.2


# Sharing


def delivered(path, members, pipe):
    """Join, wait for the other members, and read record objects."""
    with embedlog.open(path) as log, log.consumer("t", **SETTINGS) as consumer:
        consumer.poll(100)
        pipe.send(None)
        # The first members release the partitions of the last ones.
        while not pipe.poll():
            consumer.poll(10)
        pipe.recv()
        assert len(consumer.assignment()) == 4 // members
        pipe.send(None)
        pipe.recv()
        begun = time.process_time()
        while not pipe.poll():
            polled = consumer.poll(10, max_records=20_000)
            if polled:
                pipe.send((sum(map(len, polled.values())), time.process_time() - begun))


@pytest.mark.parametrize("processes", [1, 2, 4], ids="processes={}".format)
def bench_delivery(benchmark, note, log, thousand, processes):
    """Records per second of several processes that share four partitions.

    `per_core` is their total with a core each, computed from CPU time.
    """
    log.create_topic("t", partitions=4)
    with ExitStack() as running:
        pipes = [start_process(running, delivered, log.path, processes) for _ in range(processes)]
        receive_all(pipes)
        time.sleep(1)
        send_all(pipes)
        receive_all(pipes)  # all members wait
        for number in range(4):
            for _ in range(SHARED // 4 // 16_000):
                log.partition("t", number).append([thousand] * 16)
        total = sum(log.partition("t", number).end_offset() for number in range(4))
        used = {}

        def deliver_all():
            send_all(pipes)
            left = total
            while left > 0:
                for pipe in connection.wait(pipes):
                    count, used[pipe] = pipe.recv()
                    left -= count

        benchmark.pedantic(deliver_all, rounds=1)
        send_all(pipes)
    seconds = benchmark.stats["mean"]
    note(records=total, records_per_second=round(total / seconds))
    note(per_core=round(total / max(used.values())), cpu_seconds=round(sum(used.values()), 2))
