"""What docs/format.md says is what the code writes: its dump, decoded twice."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pyarrow as pa
import pytest

from embedlog import batch
from embedlog.checksum import crc32c

PAGE = Path(__file__).parent.parent / "docs" / "format.md"
LINE = re.compile(r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} ?)+?)(?:  |$)", re.MULTILINE)
HEADER = "<4sIIHHIHHIqqqIhhiqqqq"
FIRST = 1_700_000_000_000


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def dump(page):
    """The bytes of the worked example."""
    text = page.split("```hexdump\n")[1].split("```")[0]
    found = bytearray()
    for place, digits in LINE.findall(text):
        assert int(place, 16) == len(found)
        found += bytes.fromhex(digits)
    return bytes(found)


def test_the_dump_can_be_read_with_struct_alone(dump, page):
    """P12: the page is enough to write another reader; the header is as it says."""
    assert f"`{HEADER}`" in page
    assert struct.calcsize(HEADER) == 96

    marker, extent = struct.unpack_from("<Ii", dump, 0)
    body = 8 + extent
    block_length, end_magic = struct.unpack_from("<I4s", dump, body - 8)
    block = body - block_length
    fields = struct.unpack_from(HEADER, dump, block)

    assert (marker, end_magic) == (0xFFFFFFFF, b"embl")
    assert fields == (
        *(b"EMBL", crc32c(dump[block + 8 : body]), crc32c(dump[:block]), 1, 0, 2, 3, 0),
        *(block_length, len(dump), 42, 44, 7, -1, 0, -1, FIRST, FIRST + 1, -1, -1),
    )


def test_the_columns_of_the_dump_lie_where_its_table_says(dump):
    """P12: each column's bytes, padding included, are under its own CRC."""
    body = 8 + struct.unpack_from("<i", dump, 4)[0]
    table = body - 8 - 3 * 16
    columns, begin = [], 0
    for i in range(3):
        end, crc, nulls = struct.unpack_from("<QII", dump, table + 16 * i)
        columns.append((dump[body + begin : body + end], nulls))
        assert crc == crc32c(columns[-1][0])
        begin = end
    (times, _), (keys, null_keys), (values, null_values) = columns

    assert body + begin == len(dump)
    assert struct.unpack("<2q", times) == (FIRST, FIRST + 1)
    assert (null_keys, null_values) == (1, 0)
    assert struct.unpack("<B7x3i4x8s", keys) == (1, 0, 1, 1, b"k".ljust(8, b"\0"))
    assert struct.unpack("<3i4x8s", values) == (0, 5, 5, b"hello".ljust(8, b"\0"))


def test_embedlog_reads_the_dump(dump):
    """A3: null and empty are told apart."""
    schema = batch.schema()
    found = batch.parse(
        pa.py_buffer(dump), 0, len(dump), path="format.md", position=0, schema=schema
    )

    found.verify()
    assert (found.base_offset, found.next_offset, found.leader_epoch) == (42, 44, 7)
    assert found.lists() == ([FIRST, FIRST + 1], [b"k", None], [b"hello", b""], None)


@pytest.mark.parametrize("way", ["lists", "arrow"])
def test_the_records_of_the_dump_encode_to_the_same_bytes(dump, way):
    """The format is what the code writes today; a change of it is a new version."""
    records = ([b"hello", b""], [b"k", None], [FIRST, FIRST + 1])
    if way == "lists":
        encoded = batch.encode_lists(*records)
    else:
        encoded = batch.encode(batch.from_lists(*records))

    assert b"".join(map(bytes, encoded.stamp(42, 7))) == dump


def test_plain_arrow_reads_a_segment(dump):
    """A segment is an Arrow IPC stream: schema, batches, end of stream, our block skipped."""
    stream = batch.schema().serialize().to_pybytes() + 2 * dump + batch.wire.END_OF_STREAM

    table = pa.ipc.open_stream(stream).read_all()

    assert table["key"].to_pylist() == [b"k", None] * 2
    assert table["value"].to_pylist() == [b"hello", b""] * 2
    assert table["timestamp"].cast(pa.int64()).to_pylist() == [FIRST, FIRST + 1] * 2


def test_the_tables_of_the_page_are_those_of_the_code(page):
    """The offsets in the header's table are those struct computes."""
    sizes = {"4 bytes": 4, "u16": 2, "i16": 2, "u32": 4, "i32": 4, "u64": 8, "i64": 8}
    rows = re.findall(r"^\| (\d+) \| (\d bytes|[ui]\d+) \|", page, re.MULTILINE)
    place = 0
    for at, kind in rows:
        assert int(at) == place
        place += sizes[kind]

    assert place == 96
    for name in ("COMPRESSED", "HEADERS", "EXPLICIT_OFFSETS", "LOG_APPEND_TIME", "CONTROL"):
        assert f"\n| {getattr(batch, name)} | " in page
