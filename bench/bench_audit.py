"""What does `audit=true` cost a producer and a member of a consumer group?

    python bench/bench_audit.py          # the table of docs/audit.md
    python bench/bench_audit.py --quick  # a few rounds: does it still run?

Each workload runs on two topics that differ only in the setting, in turns, so that a slow second
of the machine affects both; which one is first alternates.  Times are CPU times of the process,
and a ratio is that of two neighbouring turns; the table has the median of the ratios and the
middle half of them.  The last column is what the reports cost, which come every ten seconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa

import embedlog
from embedlog.audit import reporter

NOW = int(time.time() * 1000)
VALUE, KEY = b"v" * 100, b"k%09d" % 7
DAY_MS = 86_400_000

Work = Callable[[], object]
PLAIN, AUDITED = "plain", "audited"


class Workload(NamedTuple):
    """Work for one client of a topic."""

    name: str
    start: Callable[[embedlog.Log, str], Work]
    calls: int
    """How often to do the work in each turn."""


# Producers


def send_and_wait(log: embedlog.Log, topic: str) -> Work:
    """One acknowledged record at a time."""
    producer = log.producer()
    return lambda: producer.send(topic, VALUE, KEY).result()


def send(log: embedlog.Log, topic: str) -> Work:
    """Records one at a time, written in batches."""
    producer = log.producer()

    def work() -> None:
        for _ in range(5_000):
            producer.send(topic, VALUE, KEY)
        producer.flush()

    return work


def send_batch(log: embedlog.Log, topic: str) -> Work:
    """Lists of records, which are cut into batches of 16 KB."""
    producer, values = log.producer(), [VALUE] * 20_000
    return lambda: producer.send_batch(topic, values)


def table_of(times: list[int] | None) -> pa.Table:
    """Return 50,000 rows."""
    columns: dict[str, Any] = {"value": pa.array([VALUE] * 50_000, pa.binary())}
    if times is not None:
        columns["timestamp"] = pa.array(times, pa.timestamp("ms", tz="UTC"))
    return pa.table(columns)


def appends(times: list[int] | None) -> Callable[[embedlog.Log, str], Work]:
    """Return a workload of whole tables, in batches of 1 MB."""

    def start(log: embedlog.Log, topic: str) -> Work:
        producer, table = log.producer(), table_of(times)
        return lambda: producer.append_table(topic, table)

    return start


# A day, in order or not: nearly every batch spans minutes.
IN_ORDER = [NOW - DAY_MS + row * DAY_MS // 50_000 for row in range(50_000)]
SHUFFLED = random.Random(1).sample(IN_ORDER, len(IN_ORDER))

# Groups


def polls(commits: bool, **config: Any) -> Callable[[embedlog.Log, str], Work]:
    """Return a workload of polls, each of which may be committed."""

    def start(log: embedlog.Log, topic: str) -> Work:
        consumer = log.consumer(topic, group_id="g", auto_offset_reset="earliest", **config)
        partition = embedlog.TopicPartition(topic, 0)

        def work() -> None:
            taken = 0
            while taken < 20_000:
                records = consumer.poll(1000)
                taken += sum(map(len, records.values()))
                if commits:
                    consumer.commit()
            # From the beginning again, so that no turn is longer than others.
            consumer.seek(partition, 0)

        consumer.poll(1000)
        return work

    return start


def columns(log: embedlog.Log, topic: str) -> Work:
    """Batches as Arrow columns."""
    consumer = log.consumer(topic, group_id="g", auto_offset_reset="earliest")
    partition = embedlog.TopicPartition(topic, 0)
    consumer.poll(1000)

    def work() -> None:
        consumer.seek(partition, 0)
        for _ in consumer.iter_batches(until="end"):
            pass

    return work


def filled(fill: Callable[[embedlog.Log, str], Work], start: Any) -> Any:
    """Return a workload that reads what another one wrote."""

    def make(log: embedlog.Log, topic: str) -> Work:
        fill(log, topic)()
        return start(log, topic)  # type: ignore[no-any-return]

    return make


WORKLOADS = (
    Workload("send().result()", send_and_wait, 1_000),
    Workload("send(), 5,000 records and a flush", send, 4),
    Workload("send_batch(), 20,000 records", send_batch, 4),
    Workload("append_table(), 50,000 rows", appends(None), 8),
    Workload("the same, of a day in order", appends(IN_ORDER), 8),
    Workload("the same, of a day in any order", appends(SHUFFLED), 8),
    Workload("poll() of 500, auto-commit", filled(appends(None), polls(False)), 2),
    Workload("poll() of 500, each committed", filled(appends(None), polls(True)), 2),
    Workload("the same, of a day in order", filled(appends(IN_ORDER), polls(True)), 2),
    Workload("iter_batches() as columns", filled(appends(None), columns), 100),
    Workload("the same, of a day in order", filled(appends(IN_ORDER), columns), 100),
)


def turns(works: dict[str, Work], calls: int, rounds: int) -> Iterator[dict[str, float]]:
    """Yield the CPU times of each two turns."""
    for number in range(rounds):
        seconds = {}
        for topic in sorted(works, reverse=bool(number % 2)):
            work, began = works[topic], time.process_time()
            for _ in range(calls):
                work()
            seconds[topic] = time.process_time() - began
        yield seconds


def measure(workload: Workload, rounds: int) -> tuple[list[dict[str, float]], float]:
    """Return the CPU times of each two turns, and that of a report."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-audit-") as directory,
        embedlog.open(directory, maintenance=False) as log,
    ):
        log.create_topic(PLAIN)
        log.create_topic(AUDITED, config={"audit": True})
        works = {topic: workload.start(log, topic) for topic in (PLAIN, AUDITED)}
        list(turns(works, workload.calls, 2))
        reporter.reporter_of(log.root).report_all()
        times = list(turns(works, workload.calls, rounds))
        began = time.process_time()
        reporter.reporter_of(log.root).report_all()
        return times, time.process_time() - began


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few rounds")
    parser.add_argument("--only", default="", help="only workloads whose name has this text")
    parser.add_argument("--rounds", type=int, default=60, metavar="N", help="pairs of turns")
    args = parser.parse_args()
    # Reports are measured by themselves, not in one of two turns.
    interval, reporter.REPORT_SECONDS = reporter.REPORT_SECONDS, 1e6
    heads = f"{'work':<38}{'median':>8}{'middle half':>18}{'reports':>10}"
    print(heads)
    for workload in WORKLOADS:
        if args.only in workload.name:
            times, report = measure(workload, 4 if args.quick else args.rounds)
            ratios = [pair[AUDITED] / pair[PLAIN] for pair in times]
            low, middle, high = ((r - 1) * 100 for r in statistics.quantiles(ratios, n=4))
            half = f"{low:+.1f} to {high:+.1f} %"
            rest = f"{half:>18}{report / interval * 100:>+8.2f} %"
            print(f"{workload.name:<38}{middle:>+6.1f} %{rest}", flush=True)


if __name__ == "__main__":
    main()
