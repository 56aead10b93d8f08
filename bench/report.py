"""Turn the JSON of a benchmark run into the tables of docs/performance.md.

python -m pytest bench --benchmark-only --benchmark-json=run.json
python bench/report.py run.json [cpu.json]

The second run, with `--benchmark-timer=time.process_time`, gives the CPU time of the
work, which other programs on the machine do not change.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

Benchmark = dict[str, Any]


class Row(NamedTuple):
    """One line of the budget: the work, its benchmark and its goal."""

    work: str
    bench: str
    goal: str
    unit: str
    """``records`` in millions per second, ``bytes`` in MB per second, ``us``, ``ms``, or a fact."""


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
"""Floors of benchmarks that do not name one, with the number of its operations."""


def number(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def figure(bench: Benchmark, unit: str, seconds: float) -> str:
    """Format the figure of one row, for a time of its benchmark."""
    facts = bench["extra_info"]
    if unit == "records":
        return f"{number(facts['records'] / seconds / 1e6)} M"
    if unit == "bytes":
        return number(facts["bytes"] / seconds / 1e6)
    if unit in ("us", "ms"):
        return number(seconds * {"us": 1e6, "ms": 1e3}[unit])
    return number(facts[unit])


def ratio(bench: Benchmark, run: dict[str, Benchmark], unit: str) -> str:
    """Format the median as a multiple of its floor in the same run."""
    facts, name = bench["extra_info"], bench["name"]
    if unit in ("p50_us", "p99_us"):
        return f"{facts[unit] / run[WAKE_FLOOR]['extra_info'][unit]:.1f} ×"
    floor, times = PEERS.get(name, (facts.get("floor"), facts.get("floors", 1)))
    if floor not in run:
        return "–"
    if times is None:
        times = facts["bytes"] / run[floor]["extra_info"]["bytes"]
    return f"{bench['stats']['median'] / (run[floor]['stats']['median'] * times):.1f} ×"


def budget(run: dict[str, Benchmark], cpu: dict[str, Benchmark]) -> list[str]:
    """Return the lines of the table of the budget."""
    headings = ("work", "target", "best", "median", "by CPU time", "median to its floor")
    lines = ["| " + " | ".join(headings) + " |", "|---" + "|--:" * (len(headings) - 1) + "|"]
    for row in BUDGET:
        bench = run.get(row.bench)
        if bench is None:
            continue
        best = figure(bench, row.unit, bench["stats"]["min"])
        median = figure(bench, row.unit, bench["stats"]["median"])
        by_cpu = "–"
        if row.bench in cpu and row.unit in ("records", "bytes", "us", "ms"):
            by_cpu = figure(cpu[row.bench], row.unit, cpu[row.bench]["stats"]["median"])
        floor = ratio(bench, run, row.unit)
        lines.append(f"| {row.work} | {row.goal} | {best} | {median} | {by_cpu} | {floor} |")
    return lines


def floors(run: dict[str, Benchmark]) -> list[str]:
    """Return the lines of the table of floors."""
    lines = ["| floor | best | median | |", "|---|--:|--:|--:|"]
    for name, bench in run.items():
        if "bench_floor.py" not in bench["fullname"]:
            continue
        best, median = (bench["stats"][key] * 1e6 for key in ("min", "median"))
        size = bench["extra_info"].get("bytes")
        rate = f"{size / bench['stats']['median'] / 1e9:.2f} GB/s" if size else ""
        lines.append(f"| `{name}` | {number(best)} µs | {number(median)} µs | {rate} |")
    return lines


def growth(run: dict[str, Benchmark]) -> list[str]:
    """Return the lines of the table of `bench_scale.py`."""
    headings = (
        "stored",
        "append of 1,000, µs CPU / µs",
        "bare `pwrite` then, µs CPU",
        "cold lookup, µs best / median",
        "private MiB",
        "databases KiB",
        "segments",
    )
    lines = ["| " + " | ".join(headings) + " |", "|--:" * len(headings) + "|"]
    for bench in run.values():
        facts = bench["extra_info"]
        if "stored" not in facts:
            continue
        best, median = (bench["stats"][key] * 1e6 for key in ("min", "median"))
        lines.append(
            f"| {facts['stored']:,} | {facts['append_cpu_us']} / {facts['append_wall_us']} "
            f"| {facts['bare_cpu_us']} | {number(best)} / {number(median)} "
            f"| {facts['anonymous_mib']} "
            f"| {facts['index_kib']:,} | {facts['segments']} |"
        )
    return lines


def load(path: str) -> dict[str, Benchmark]:
    """Return the benchmarks of a run by name."""
    with open(path) as file:
        return {bench["name"]: bench for bench in json.load(file)["benchmarks"]}


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
