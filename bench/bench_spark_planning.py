"""What does it cost to plan a Spark query over a log of 10,000 segments, without Spark?

100 partitions of very different sizes; from the options to the JSON of the plan.  The log
is open elsewhere in the process, as in a planner that serves several queries; opening it
is measured separately.
"""

import json
import shutil
import statistics
import time
from contextlib import closing

import pytest
from conftest import NOW

import embedlog
from embedlog import batch
from embedlog.spark.input_partitions import plan_batch
from embedlog.spark.options import SourceOptions
from embedlog.spark.plan import plan_to_json
from embedlog.spark.source import LogSource

SEGMENTS, PARTITIONS = 10_000, 100
RECORDS = 40
"""In a batch; a segment holds three of them."""
ROUNDS = 10


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A log with a topic "t": the partition k has 1 / (k + 1) as many segments as the first."""
    path = tmp_path_factory.mktemp("planning") / "log"
    total = sum(1 / (number + 1) for number in range(PARTITIONS))
    with embedlog.open(path, maintenance=False) as log:
        log.create_topic("t", PARTITIONS, {"segment.bytes": 20_000, "index.interval.bytes": 4096})
        at = NOW
        for number in range(PARTITIONS):
            segments = max(round(SEGMENTS / total / (number + 1)), 1)
            keys = [b"k%09d" % row for row in range(RECORDS)]
            for _ in range(segments):
                encoded = batch.encode_lists([b"v" * 100] * RECORDS, keys, at)
                log.partition("t", number).append([encoded] * 3)
                at += 1
    yield str(path)
    shutil.rmtree(path)


def segments_of(path):
    with embedlog.open(path, mode="r") as log:
        return sum(len(log.partition("t", number).segments) for number in range(PARTITIONS))


QUERIES = {
    "all": ({}, {}),
    "split": ({"maxBytesPerPartition": 12 << 20}, {}),
    "many-tasks": ({"maxBytesPerPartition": 1 << 20}, {}),
    "limit": ({}, {"limit": 20}),
    "partition": ({}, {"filters": [("partition", "=", 0)]}),
    "timestamp": ({}, {"filters": [("timestamp", ">=", (NOW + SEGMENTS // 2) * 1000)]}),
}


@pytest.mark.parametrize("query", QUERIES)
def bench_plan_batch(benchmark, note, path, query):
    """From the options to the JSON text, in an open log; CPU and time by segment are facts."""
    settings, pushed = QUERIES[query]
    options = {"path": path, "subscribe": "t", **settings}
    cpu, tasks = [], []

    with closing(LogSource(SourceOptions.parse(options), durable=False)):

        def plan():
            began = time.process_time()
            tasks[:] = plan_batch(SourceOptions.parse(options), **pushed, cores=2)
            text = json.dumps(plan_to_json(path, tasks), separators=(",", ":"))
            cpu.append(time.process_time() - began)
            return text

        text = benchmark.pedantic(plan, rounds=ROUNDS, warmup_rounds=1)
    segments, chunks = (
        segments_of(path),
        sum(len(part.chunks) for task in tasks for part in task.slices),
    )
    note(
        segments=segments,
        tasks=len(tasks),
        chunks=chunks,
        json_kib=len(text) >> 10,
        cpu_us_by_segment=round(statistics.median(cpu[1:]) / segments * 1e6, 1),
        us_by_segment=round(benchmark.stats.stats.median / segments * 1e6, 1),
    )
    assert chunks >= segments or pushed


@pytest.mark.parametrize("opened", [False, True], ids=["cold", "open-elsewhere"])
def bench_open_to_plan(benchmark, note, path, opened):
    """Open the log and close it, without a plan: what a planner that keeps it open saves."""
    source_options = SourceOptions.parse({"path": path, "subscribe": "t"})
    others = [LogSource(source_options, durable=False)] if opened else []
    benchmark.pedantic(
        lambda: LogSource(source_options, durable=False).close(), rounds=ROUNDS, warmup_rounds=1
    )
    for other in others:
        other.close()
    note(partitions=PARTITIONS)
    assert plan_batch(source_options, limit=1)
