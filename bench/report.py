"""Turn the JSON of a benchmark run into the tables of docs/performance.md.

python -m pytest bench --benchmark-only --benchmark-json=run.json
python bench/report.py run.json [cpu.json]

The second run, with `--benchmark-timer=time.process_time`, tells what the work
takes when it does not have to share the processors.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

Found = dict[str, Any]


class Row(NamedTuple):
    """One line of the budget: which benchmark shows it, and what is asked."""

    work: str
    bench: str
    goal: str
    unit: str
    """``records``: millions of them a second; ``bytes``: MB a second; ``us``, ``ms``; or a fact."""


BUDGET = (
    Row("append lists of bytes, records/s", "bench_append_lists", "4 M", "records"),
    Row("the same through a producer", "bench_send_batch[records=100000-p1]", "4 M", "records"),
    Row("append an Arrow table, MB/s", "bench_append_table[no key-p1]", "1,500", "bytes"),
    Row("`send()` one at a time, records/s", "bench_send[no key-p1]", "0.5 M", "records"),
    Row("`send().result()`, µs", "bench_send_and_wait[p1]", "40", "us"),
    Row("one encoded record appended, µs", "bench_append[records=1-os]", "25", "us"),
    Row("scan to Arrow, records/s", "bench_scan[all]", "25 M", "records"),
    Row("`Topic.batches()`, records/s", "bench_view_batches[all]", "25 M", "records"),
    Row("`Topic.to_arrow()`, records/s", "bench_to_arrow", "25 M", "records"),
    Row("scan keys and timestamps, records/s", "bench_scan[timestamp+key]", "60 M", "records"),
    Row("consume as record objects, records/s", "bench_iterate_records", "2 M", "records"),
    Row("lookup and first batch, cold handle, µs", "bench_first_batch[cold]", "200", "us"),
    Row("another process sees it, µs p50", "bench_wake[os]", "100", "p50_us"),
    Row("another process sees it, µs p99", "bench_wake[os]", "1,000", "p99_us"),
    Row("… as columns, µs p50", "bench_wake[os-columns]", "–", "p50_us"),
    Row("open 1,000 partitions, closed cleanly, ms", "bench_open_clean", "150", "ms"),
    Row("reopen after `kill -9`, ms", "bench_reopen_after_kill", "100", "ms"),
    Row("private memory a scan adds, KiB", "bench_memory_of_a_scan", "O(batch)", "added_kib"),
    Row("append with fsync, 1 record, µs", "bench_append[records=1-fsync]", "–", "us"),
    Row("append with fsync, 1,000 records, µs", "bench_append[records=1000-fsync]", "–", "us"),
    Row("CPU of an idle tail, %", "bench_idle_tail", "–", "cpu_percent"),
)
WAKE_FLOOR = "bench_floor_of_a_wake"
PEERS = {
    "bench_send_batch[records=100000-p1]": ("bench_pwrite[bytes=126488]", 100),
    "bench_append_table[no key-p1]": ("bench_pwrite[bytes=126488]", None),
    "bench_send[no key-p1]": ("bench_pwrite[bytes=126488]", 50),
    "bench_send_and_wait[p1]": ("bench_append_by_hand", 1),
}
"""Floors of benchmarks that do not name one: which, and how many of its operations."""


def number(value: float) -> str:
    """Three digits that mean something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def told(found: Found, unit: str, seconds: float) -> str:
    """The figure of one row, for a time of the benchmark."""
    facts = found["extra_info"]
    if unit == "records":
        return f"{number(facts['records'] / seconds / 1e6)} M"
    if unit == "bytes":
        return number(facts["bytes"] / seconds / 1e6)
    if unit in ("us", "ms"):
        return number(seconds * {"us": 1e6, "ms": 1e3}[unit])
    return number(facts[unit])


def ratio(found: Found, run: dict[str, Found], unit: str) -> str:
    """How many times the floor of the same run the median is."""
    facts, name = found["extra_info"], found["name"]
    if unit in ("p50_us", "p99_us"):
        return f"{facts[unit] / run[WAKE_FLOOR]['extra_info'][unit]:.1f} ×"
    floor, times = PEERS.get(name, (facts.get("floor"), facts.get("floors", 1)))
    if floor not in run:
        return "–"
    if times is None:
        times = facts["bytes"] / run[floor]["extra_info"]["bytes"]
    return f"{found['stats']['median'] / (run[floor]['stats']['median'] * times):.1f} ×"


def budget(run: dict[str, Found], cpu: dict[str, Found]) -> list[str]:
    """The budget's table."""
    heads = ("work", "target", "best", "median", "by CPU time", "median to its floor")
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|--:" * (len(heads) - 1) + "|"]
    for row in BUDGET:
        found = run.get(row.bench)
        if found is None:
            continue
        best = told(found, row.unit, found["stats"]["min"])
        middle = told(found, row.unit, found["stats"]["median"])
        alone = "–"
        if row.bench in cpu and row.unit in ("records", "bytes", "us", "ms"):
            alone = told(cpu[row.bench], row.unit, cpu[row.bench]["stats"]["median"])
        floor = ratio(found, run, row.unit)
        lines.append(f"| {row.work} | {row.goal} | {best} | {middle} | {alone} | {floor} |")
    return lines


def floors(run: dict[str, Found]) -> list[str]:
    """What the machine gave in the same run."""
    lines = ["| floor | best | median | |", "|---|--:|--:|--:|"]
    for name, found in run.items():
        if "bench_floor.py" not in found["fullname"]:
            continue
        best, middle = (found["stats"][each] * 1e6 for each in ("min", "median"))
        size = found["extra_info"].get("bytes")
        rate = f"{size / found['stats']['median'] / 1e9:.2f} GB/s" if size else ""
        lines.append(f"| `{name}` | {number(best)} µs | {number(middle)} µs | {rate} |")
    return lines


def growth(run: dict[str, Found]) -> list[str]:
    """The table of `bench_scale.py`."""
    heads = (
        "stored",
        "append of 1,000, µs CPU / µs",
        "bare `pwrite` then, µs CPU",
        "cold lookup, µs best / median",
        "private MiB",
        "databases KiB",
        "segments",
    )
    lines = ["| " + " | ".join(heads) + " |", "|--:" * len(heads) + "|"]
    for found in run.values():
        facts = found["extra_info"]
        if "stored" not in facts:
            continue
        best, middle = (found["stats"][each] * 1e6 for each in ("min", "median"))
        lines.append(
            f"| {facts['stored']:,} | {facts['append_cpu_us']} / {facts['append_wall_us']} "
            f"| {facts['bare_cpu_us']} | {number(best)} / {number(middle)} "
            f"| {facts['anonymous_mib']} "
            f"| {facts['index_kib']:,} | {facts['segments']} |"
        )
    return lines


def load(path: str) -> dict[str, Found]:
    """The benchmarks of a run, by name."""
    with open(path) as file:
        return {found["name"]: found for found in json.load(file)["benchmarks"]}


def main(path: str, cpu: str | None = None) -> None:
    """Print the tables of a run."""
    run = load(path)
    tables = {
        "Budget": budget(run, load(cpu) if cpu else {}),
        "Floors": floors(run),
        "Growth": growth(run),
    }
    for title, table in tables.items():
        print(f"### {title}\n", *table, sep="\n", end="\n\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
