"""What does each fast path gain over its general twin?  docs/fast-paths.md lists the pairs.

    python bench/bench_fast_paths.py          # the table of the page
    python bench/bench_fast_paths.py --quick  # a few rounds: does it still run?

The two paths of a pair take turns, so that a slow second of the machine affects both.
Times are CPU times of the calling thread.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa

import embedlog
from embedlog import batch, checksum
from embedlog.batch.tables import rows_in_range, table
from embedlog.batch.wire import bytes_layout
from embedlog.partitioner import partition_for_key, partitions_for_keys

NOW = int(time.time() * 1000)
VALUE, KEY = b"v" * 100, b"k%09d" % 7
KEYS = [b"k%09d" % number for number in range(1000)]

Work = Callable[[], object]


class On:
    """Work that runs unchanged."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __enter__(self) -> Work:
        return self.work

    def __exit__(self, *_: object) -> None:
        pass


class Pair(NamedTuple):
    """A general path and its fast twin, with the work that shows the difference."""

    general: str
    fast: str
    work: str
    both: Callable[[embedlog.Log], tuple[Any, Work]]
    calls: int = 50
    """How often to do the work in each round."""


FAST = {
    "append": "embedlog.partition.append:append_fast",
}
"""The functions of the fast paths, by module and name."""


def owner_of(path: str) -> tuple[Any, str]:
    """Return the module or class of a fast path, and the name of its function."""
    module, _, names = FAST[path].partition(":")
    *outer, name = names.split(".")
    owner: Any = importlib.import_module(module)
    for part in outer:
        owner = getattr(owner, part)
    return owner, name


class Off:
    """Work that runs with a fast path replaced by a function that declines."""

    def __init__(self, path: str, answer: object, work: Work) -> None:
        self.owner, self.name = owner_of(path)
        self.answer, self.work, self.calls = answer, work, 0
        self.function = getattr(self.owner, self.name)

    def __enter__(self) -> Work:
        def decline(*_: object, **__: object) -> object:
            self.calls += 1
            return self.answer

        setattr(self.owner, self.name, decline)
        return self.work

    def __exit__(self, *_: object) -> None:
        setattr(self.owner, self.name, self.function)
        if not self.calls:
            raise LookupError(f"the work does not call {self.name} of {self.owner.__name__}")


def append(log: embedlog.Log) -> tuple[Any, Work]:
    """Append one encoded record."""
    log.create_topic("append")
    part, batches = log.partition("append", 0), [batch.encode_lists([VALUE], [KEY], NOW)]
    part.append(batches)

    def fast() -> object:
        return part.append(batches)

    return Off("append", None, fast), fast


def encode_one(log: embedlog.Log) -> tuple[Any, Work]:
    """Encode one record."""
    return (
        lambda: batch.encode_lists([VALUE], [KEY], NOW),
        lambda: batch.encode_one(VALUE, KEY, NOW),
    )


def encode_lists(log: embedlog.Log) -> tuple[Any, Work]:
    """Encode 1,000 records of lists."""
    values = [VALUE] * 1000
    return (
        lambda: batch.encode(batch.from_lists(values, KEYS, NOW)),
        lambda: batch.encode_lists(values, KEYS, NOW),
    )


def decode_run(log: embedlog.Log) -> tuple[Any, Work]:
    """Read 1,000 batches of one record as a table, as for Spark."""
    encoded = batch.encode_one(VALUE, KEY, NOW)
    data = pa.py_buffer(b"".join(part for n in range(1000) for part in encoded.stamp(n, 0)))
    source = batch.BatchSource(data, "", 0, bytes_layout())
    columns = pa.schema([*batch.schema(), pa.field("offset", pa.int64())])

    def read(decode: Callable[..., Any]) -> object:
        rows = rows_in_range(decode(source, 0, data.size, data.size), 0, 1000)
        return table(rows, 0, columns).combine_chunks()

    return lambda: read(batch.BatchSource.batches), lambda: read(batch.batches_fast)


def hash_keys(log: embedlog.Log) -> tuple[Any, Work]:
    """Choose the partitions of 1,000 keys."""
    column = pa.array(KEYS, pa.binary())
    return (
        lambda: [partition_for_key(key, 12) for key in KEYS],
        lambda: partitions_for_keys(column, 12),
    )


def crc(log: embedlog.Log) -> tuple[Any, Work]:
    """Checksum 64 KiB."""
    backends, data = dict(checksum.backends()), bytes(64 << 10)
    return lambda: backends["crcmod"](0, data), lambda: backends[checksum.BACKEND](0, data)


PAIRS = (
    Pair("partition/append", "partition/append_fast", "append one encoded record", append),
    Pair("batch/encode", "batch/encode_one", "encode one record", encode_one),
    Pair("batch/encode", "batch/encode", "encode lists of 1,000 records", encode_lists),
    Pair("batch/decode", "batch/decode_run", "read 1,000 batches of one record", decode_run, 2),
    Pair("partitioner", "partitioner", "choose partitions of 1,000 keys", hash_keys),
    Pair("checksum", "checksum", "CRC-32C of 64 KiB", crc),
)


def measure(general: Work | Off, fast: Work, rounds: int, calls: int) -> tuple[float, float]:
    """Return the median CPU times of one call of both, in microseconds."""
    times: tuple[list[float], list[float]] = ([], [])
    paths = (general if isinstance(general, Off) else On(general), On(fast))
    for _ in range(rounds):
        for path, path_times in zip(paths, times, strict=True):
            with path as work:
                start = time.thread_time()
                for _ in range(calls):
                    work()
                path_times.append((time.thread_time() - start) / calls * 1e6)
    return statistics.median(times[0]), statistics.median(times[1])


def main(words: list[str] | None = None) -> None:
    """Measure all pairs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, for a test")
    quick = parser.parse_args(words).quick
    rounds = 2 if quick else 200
    print("| general | fast | work | general, µs | fast, µs | gain |")
    print("|---|---|---|--:|--:|--:|")
    with (
        tempfile.TemporaryDirectory() as directory,
        embedlog.open(directory, maintenance=False) as log,
    ):
        for pair in PAIRS:
            calls = 3 if quick else pair.calls
            slow, quick_time = measure(*pair.both(log), rounds, calls)
            print(
                f"| `{pair.general}` | `{pair.fast}` | {pair.work} "
                f"| {slow:.1f} | {quick_time:.1f} | {slow / quick_time:.1f} × |"
            )


if __name__ == "__main__":
    main()
