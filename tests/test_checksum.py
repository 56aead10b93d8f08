"""CRC-32C: every library computes the same value, for every kind of buffer."""

import mmap

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedlog import checksum
from embedlog.checksum import BACKEND, crc32c

# RFC 3720, B.4, and the check value of the catalogues.
VECTORS = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


def computed_by(extend):
    """Return `crc32c` with another library."""

    def compute(data, value=0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checksum, "extend", extend)
            return crc32c(data, value)

    return compute


def backends():
    """Return every usable library as a function like `crc32c`, fastest first."""
    return {name: computed_by(extend) for name, extend in checksum.backends()}


@pytest.mark.parametrize("name", backends())
@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_every_library_gets_the_published_values_right(name, data, expected):
    """A checksum outlives the library that computed it."""
    assert backends()[name](data) == expected


@given(st.binary(max_size=300), st.integers(0, 300))
def test_all_libraries_agree_and_continue_each_other(data, cut):
    """A batch that one library wrote is verified by any other one, in pieces too."""
    expected = crc32c(data)

    for first in backends().values():
        for second in backends().values():
            assert second(data[cut:], first(data[:cut])) == expected


def test_crcmod_and_google_crc32c_are_installed():
    """The reference implementation is always installed, and the fast one is used."""
    assert {"crcmod", "google_crc32c"} <= set(backends())
    assert next(iter(backends())) == BACKEND


def mapped(data):
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memory


BUFFERS = {
    "bytearray": bytearray,
    "memoryview": memoryview,
    "writable memoryview": lambda data: memoryview(bytearray(data)),
    "strided memoryview": lambda data: memoryview(bytes(b for c in data for b in (c, 0)))[::2],
    "wide memoryview": lambda data: memoryview(data).cast("I"),
    "arrow buffer": pa.py_buffer,
    "arrow slice": lambda data: pa.py_buffer(b"12" + data).slice(2),
    "mmap": mapped,
}


@pytest.mark.parametrize("name", backends())
@pytest.mark.parametrize("buffer", BUFFERS)
def test_any_buffer_is_summed(name, buffer, monkeypatch):
    """A buffer that a library refuses is copied in bounded pieces."""
    monkeypatch.setattr(checksum, "_COPY_BYTES", 7)
    data = b"a batch of records, written"[:24]

    assert backends()[name](BUFFERS[buffer](data), 5) == crc32c(data, 5)


@pytest.mark.parametrize("name", backends())
def test_bytes_and_arrow_buffers_are_not_copied(name):
    """The libraries read them in place: `extend` itself accepts them."""
    extend = dict(checksum.backends())[name]

    for data in (VECTORS[1][0], pa.py_buffer(VECTORS[1][0])):
        assert extend(0, data) == VECTORS[1][1]


def test_an_object_without_a_buffer_is_refused():
    """A number is not a count of zero bytes."""
    for value in (5, "text", None):
        with pytest.raises(TypeError):
            crc32c(value)


def test_a_library_that_computes_another_value_is_not_used(monkeypatch):
    """The check value decides, not the name."""
    monkeypatch.setitem(checksum._LOADERS, "crc32c", lambda: lambda value, data: 1)

    assert "crc32c" not in backends()
    assert checksum._choose()[0] != "crc32c"


# The checksums of durable rows


@pytest.mark.parametrize("value", [b"value", b""])
def test_a_sealed_row_is_recognised(value):
    """`is_sealed` accepts what `seal` returned, under the same key only."""
    row = checksum.seal(value, b"key")

    assert row.endswith(value)
    assert checksum.is_sealed(row, b"key")
    assert not checksum.is_sealed(row, b"Key")


@pytest.mark.parametrize("position", range(4 + 5))
def test_a_sealed_row_with_any_byte_changed_is_refused(position):
    """LMDB has no checksums, so a durable row carries its own."""
    row = bytearray(checksum.seal(b"value", b"key"))
    row[position] ^= 1

    assert not checksum.is_sealed(bytes(row), b"key")


@pytest.mark.parametrize("length", range(4))
def test_a_sealed_row_that_was_cut_is_refused(length):
    """Too short for a checksum is damage, not an empty value."""
    assert not checksum.is_sealed(checksum.seal(b"", b"key")[:length], b"key")
