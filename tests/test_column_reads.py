"""How the columns of large batches are read: only those asked for, in order."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.roots import segment_files
from support.tiers import sample

import embedlog
from embedlog.errors import CorruptBatchError

ROWS, TABLES = 6_000, 8
SCHEMA = pa.schema(
    [
        ("number", pa.int64()),
        ("text", pa.string()),
        ("noise", pa.binary(64)),
        ("tags", pa.list_(pa.struct([("name", pa.string()), ("count", pa.int16())]))),
    ]
)


def rows(start):
    """A table with numbers from ``start`` on; compression does not make its noise smaller."""
    numbers = np.arange(start, start + ROWS)
    noise = np.random.default_rng(start).bytes(64 * ROWS)
    tags = [None if n % 3 else [{"name": str(n % 100), "count": n % 7}, None] for n in range(ROWS)]
    columns = [
        pa.array(numbers),
        pa.array([f"text {n % 1000}" for n in numbers]),
        pa.FixedSizeBinaryArray.from_buffers(pa.binary(64), ROWS, [None, pa.py_buffer(noise)]),
        pa.array(tags, SCHEMA.field("tags").type),
    ]
    return pa.table(columns, schema=SCHEMA)


def make(log, codec, **config):
    """A topic with some MB of rows."""
    topic = log.create_topic(
        codec, 2, {"compression.type": codec, "rebatch.min.rows": 0, **config}, schema=SCHEMA
    )
    with log.producer() as producer:
        for number in range(TABLES):
            producer.append_table(codec, rows(number * ROWS), partition=number % 2).result()
    return topic


def expected(partitions=(0, 1)):
    return pa.concat_tables(
        rows(number * ROWS) for p in partitions for number in range(p, TABLES, 2)
    )


@pytest.mark.parametrize(
    ("segment_bytes", "codec"),
    sample([*product([1 << 20, 1 << 30], ["zstd", "lz4", "none"])], 1),
)
def test_rows_come_in_order_from_large_batches(tmp_path, codec, segment_bytes):
    """All columns, and some of them, of active and of sealed segments."""
    with embedlog.open(tmp_path, maintenance=False) as log:
        topic = make(log, codec, **{"segment.bytes": segment_bytes})
        table = topic.to_arrow()
        assert table.select(SCHEMA.names).equals(expected())
        half = TABLES // 2 * ROWS
        assert table["offset"].to_pylist() == [*range(half), *range(half)]
        for names in (["number"], ["tags", "text"], ["partition", "noise"], ["timestamp"]):
            assert topic.to_arrow(names).equals(table.select(names))
        part = topic[ROWS + 150 : -150]
        read = pa.Table.from_batches(part.batches(["text", "number"]))
        assert read["number"].to_pylist() == [record.value["number"] for record in part]


def bytes_read():
    """How many bytes this process has asked the kernel to read from files."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if "rchar" in line)
    return int(line.split()[1])


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_only_the_columns_asked_for_are_read_of_an_active_segment(tmp_path, codec):
    """It is not mapped, so what is read of it is copied."""
    with embedlog.open(tmp_path, maintenance=False) as log:
        topic = make(log, codec)
        before = bytes_read()
        assert topic.to_arrow(["number"]).num_rows == TABLES * ROWS
        middle = bytes_read()
        assert topic.to_arrow().num_rows == TABLES * ROWS
        assert bytes_read() - middle > topic.size_bytes() * 0.9
        assert middle - before < topic.size_bytes() * 0.25


def test_a_damaged_batch_is_reported_after_the_good_ones(tmp_path):
    """What was before it comes first, and other columns can be read."""
    with embedlog.open(tmp_path, maintenance=False) as log:
        topic = make(log, "lz4")
        damaged = rows(4 * ROWS)["noise"].chunk(0)
        content = damaged[ROWS - 1].as_py()
        (path,) = (file for file in segment_files(tmp_path) if content in file.read_bytes())
        data = bytearray(path.read_bytes())
        data[data.index(content)] ^= 1
        path.write_bytes(data)
        read = []
        with pytest.raises(CorruptBatchError, match="noise"):
            for batch in topic.batches(["number", "noise"]):
                read += batch.column("number").to_pylist()
        good = expected([0])["number"].to_pylist()
        assert read == good[: len(read)]
        assert len(read) >= 2 * ROWS
        numbers = topic.to_arrow(["number"])["number"].to_pylist()
        assert numbers == expected()["number"].to_pylist()
