"""A segment file: a stream of batches that any Arrow can read."""

import os

import pyarrow as pa
import pytest
from support.clock import START
from support.roots import batch_rows, encoded

from embedlog import batch, segment
from embedlog.errors import CorruptBatchError, CorruptionError, StorageError
from embedlog.files import Files

PATH = "00000000000000000000-1.arrows"


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


@pytest.fixture
def file(files):
    return segment.create(files, PATH, batch.schema())


def write(file, count, *, position=None, size=10):
    """Write batches of ``size`` records one after the other; returns their places, and the end."""
    places = [file.start if position is None else position]
    for number in range(count):
        values = [b"v%d" % (number * size + row) for row in range(size)]
        one = encoded(*values, at=START + number)
        places.append(places[-1] + file.write(one.stamp(number * size, 0), places[-1]))
    return places


def bases(found):
    return [one.base_offset for one in found]


def test_a_new_segment_holds_its_schema_and_nothing_else(file):
    """The first batch begins where the schema ends."""
    assert file.size() == file.start > 0
    assert file.schema.equals(batch.schema())
    assert file.read(file.start, file.size()) == []


def test_creating_over_an_old_file_cuts_it(files, file):
    """A file that is named and not yet written to is made again from nothing (A14)."""
    write(file, 3)
    again = segment.create(files, PATH, batch.schema())

    assert again.size() == again.start


def test_batches_are_read_back_in_order(file):
    """What was written is read, from any batch's position."""
    places = write(file, 5)

    found = file.read(file.start, places[-1])
    assert bases(found) == [0, 10, 20, 30, 40]
    assert [row[3] for one in found for row in batch_rows(one)] == [b"v%d" % n for n in range(50)]
    assert bases(file.read(places[3], places[-1])) == [30, 40]
    assert [one.position for one in found] == places[:-1]


def test_nothing_past_the_stop_is_looked_at(file):
    """Bytes past the published end may be anything (A20)."""
    places = write(file, 3)
    file.write([b"garbage" * 100], places[-1])
    file.truncate(places[-1] + 300)

    assert bases(file.read(file.start, places[-1])) == [0, 10, 20]
    assert bases(file.read(file.start, places[1])) == [0]


@pytest.mark.parametrize("most", [1, 100, 1000, 3000])
def test_a_read_returns_at_least_one_batch_however_little_is_asked_for(file, most):
    """A batch is never split (A18)."""
    places = write(file, 5)
    found, place = [], file.start
    while got := file.read(place, places[-1], most):
        found += got
        place = got[-1].position + got[-1].size

    assert bases(found) == [0, 10, 20, 30, 40]


def test_a_batch_larger_than_what_is_asked_for_is_read_whole(files):
    """The read grows until the batch fits."""
    file = segment.create(files, PATH, batch.schema())
    end = file.start + file.write(encoded(bytes(5 << 20)).stamp(0, 0), file.start)

    assert bases(file.read(file.start, end, 1)) == [0]


def test_a_batch_longer_than_the_first_look_is_read_once(file, monkeypatch):
    """Its block says how long it is: a few bytes, then all of it, parsed once."""
    places = write(file, 2, size=3000)
    looks, parsed = [], []
    read, whole = Files.read, segment.SegmentFile._whole

    def noted(files, fd, length, position):
        looks.append(length)
        return read(files, fd, length, position)

    monkeypatch.setattr(Files, "read", noted)
    monkeypatch.setattr(
        segment.SegmentFile, "_whole", lambda *args: parsed.append(1) or whole(*args)
    )
    assert bases(file.read(places[0], places[2], 1)) == [0]
    assert looks[-1] == places[1] - places[0] > looks[-2]
    assert (len(looks), len(parsed)) == (2, 1)


def test_good_batches_come_before_the_damaged_one(file):
    """The damaged batch is an error only when it is the first (E10)."""
    places = write(file, 3)
    file.write([b"x"], places[1] + 40)

    assert bases(file.read(file.start, places[-1])) == [0]
    with pytest.raises(CorruptBatchError) as caught:
        file.read(places[1], places[-1])
    assert (caught.value.path, caught.value.position) == (PATH, places[1])
    assert bases(file.read(places[2], places[-1])) == [20]


def test_a_scan_yields_every_batch_over_many_reads(file, monkeypatch):
    """`scan` is `read` until the stop."""
    monkeypatch.setattr(segment, "CHUNK_BYTES", 1500)
    places = write(file, 20)

    assert bases(file.scan(file.start, places[-1])) == [n * 10 for n in range(20)]


def test_a_sealed_segment_is_read_from_a_map(files, file):
    """The same batches, without copies, also after the file was unlinked (A21)."""
    places = write(file, 5)
    file.write([segment.END_MARK], places[-1])
    sealed = segment.SegmentFile(files, PATH)
    first = sealed.mapped(file.start, places[-1])[:1]
    files.unlink(PATH)

    assert sealed.fd is None
    assert bases(sealed.mapped(places[1], places[-1])) == [10, 20, 30, 40]
    assert batch_rows(first[0])[9][3] == b"v9"


@pytest.mark.parametrize("most", [1, 1000])
def test_a_few_batches_of_a_sealed_segment_are_not_worth_a_map(files, file, most):
    """They are read, which is faster than to map and to unmap, with the same result."""
    places = write(file, 5)
    file.write([segment.END_MARK], places[-1])
    sealed = segment.SegmentFile(files, PATH)
    first = sealed.mapped(file.start, places[-1], most)
    files.unlink(PATH)

    assert sealed.fd is not None
    assert bases(first) == [0, 10][: 1 if most == 1 else 2]
    assert bases(sealed.mapped(places[1], places[-1], 1)) == [10]
    assert bases(sealed.mapped(places[1], places[-1])) == [10, 20, 30, 40]
    assert batch_rows(first[0])[9][3] == b"v9"


def test_arrays_of_a_map_outlive_the_segment(files, file):
    """An array keeps what it points into (A21)."""
    places = write(file, 1)
    sealed = segment.SegmentFile(files, PATH)
    column = sealed.mapped(file.start, places[-1])[0].columns(["value"]).column(0)
    sealed.close()
    del sealed

    assert column[9].as_py() == b"v9"


@pytest.mark.parametrize("most", [1, 1 << 20])
def test_a_sealed_file_that_was_cut_is_corruption_not_a_signal(files, file, most):
    """Nothing past the end of the map is touched: no SIGBUS (P20)."""
    places = write(file, 2)
    file.truncate(places[1])

    with pytest.raises(CorruptionError, match="were published"):
        segment.SegmentFile(files, PATH).mapped(file.start, places[-1], most)


def test_any_arrow_reads_a_sealed_segment(tmp_path, file):
    """It is an Arrow IPC stream: our blocks are padding to others (docs/format.md)."""
    places = write(file, 3)
    file.write([segment.END_MARK], places[-1])

    table = pa.ipc.open_stream((tmp_path / PATH).read_bytes()).read_all()

    assert table.column("value").to_pylist() == [b"v%d" % n for n in range(30)]


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 4, b"hello, this is no segment", bytes(5000), b"\xff" * 5000,
     b"\xff\xff\xff\xff\x10\x00\x00\x00" + bytes(16)],
    ids=["empty", "four bytes", "text", "zeros", "ones", "damaged schema"],
)  # fmt: skip
def test_a_file_that_is_no_segment_is_refused_with_its_path(files, tmp_path, content):
    """Whatever stands where a segment should be: a typed error, in bounded memory (P22)."""
    (tmp_path / PATH).write_bytes(content)

    with pytest.raises(CorruptionError, match=r"Not a segment") as caught:
        assert segment.SegmentFile(files, PATH).start
    assert caught.value.path == PATH


def test_a_missing_file_is_a_storage_error(files):
    """With its number and its path."""
    with pytest.raises(StorageError) as caught:
        segment.SegmentFile(files, PATH)
    assert caught.value.errno == 2


def test_a_descriptor_is_closed_when_nobody_refers_to_the_segment(files, file):
    """No descriptor is leaked; closing twice is closing once."""
    fd = file.fd
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    other = segment.SegmentFile(files, PATH)
    fd = other.fd
    del other
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
