"""docs/format.md describes what the code writes: its example is decoded in two ways."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from embedlog import batch
from embedlog.checksum import crc32c

PAGE = Path(__file__).parent.parent / "docs" / "format.md"
LINE = re.compile(r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} ?)+?)(?:  |$)", re.MULTILINE)
HEADER = "<4sIIHHIHHIqqqIhHiqqqq"
FIRST = 1_700_000_000_000


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def dump(page):
    """Return the bytes of the worked example."""
    text = page.split("```hexdump\n")[1].split("```")[0]
    data = bytearray()
    for position, digits in LINE.findall(text):
        assert int(position, 16) == len(data)
        data += bytes.fromhex(digits)
    return bytes(data)


def test_the_dump_can_be_read_with_struct_alone(dump, page):
    """P12: the page is enough to write another reader."""
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


def test_the_columns_of_the_dump_are_where_its_table_says(dump):
    """P12: each column's bytes, padding included, are under its own CRC."""
    body = 8 + struct.unpack_from("<i", dump, 4)[0]
    table = body - 8 - 3 * 16
    columns, start = [], 0
    for number in range(3):
        end, crc, nulls = struct.unpack_from("<QII", dump, table + 16 * number)
        columns.append((dump[body + start : body + end], nulls))
        assert crc == crc32c(columns[-1][0])
        start = end
    (times, _), (keys, null_keys), (values, null_values) = columns

    assert body + start == len(dump)
    assert struct.unpack("<2q", times) == (FIRST, FIRST + 1)
    assert (null_keys, null_values) == (1, 0)
    assert struct.unpack("<B7x3i4x8s", keys) == (1, 0, 1, 1, b"k".ljust(8, b"\0"))
    assert struct.unpack("<3i4x8s", values) == (0, 5, 5, b"hello".ljust(8, b"\0"))


@pytest.mark.parametrize("encoder", ["lists", "arrow"])
def test_the_records_of_the_dump_encode_to_the_same_bytes(dump, encoder):
    """A change of the bytes that the code writes needs a new version of the format."""
    records = ([b"hello", b""], [b"k", None], [FIRST, FIRST + 1])
    if encoder == "lists":
        encoded = batch.encode_lists(*records)
    else:
        encoded = batch.encode(batch.from_lists(*records))

    assert b"".join(map(bytes, encoded.stamp(42, 7))) == dump


def test_the_tables_of_the_page_are_those_of_the_code(page):
    """The offsets in the table of the header are those of struct."""
    sizes = {"4 bytes": 4, "u16": 2, "i16": 2, "u32": 4, "i32": 4, "u64": 8, "i64": 8}
    rows = re.findall(r"^\| (\d+) \| (\d bytes|[ui]\d+) \|", page, re.MULTILINE)
    position = 0
    for at, kind in rows:
        assert int(at) == position
        position += sizes[kind]

    assert position == 96
    for name in (
        "COMPRESSED",
        "HEADERS",
        "EXPLICIT_OFFSETS",
        "LOG_APPEND_TIME",
        "CONTROL",
        "MERGED",
    ):
        assert f"\n| {getattr(batch, name)} | " in page
