"""A segment file is a stream of batches that any Arrow implementation can read."""

import os

import pytest
from support.clock import START
from support.roots import batch_rows, encoded

from embedlog import batch, segment
from embedlog.errors import CorruptionError
from embedlog.files import Files

pytestmark = pytest.mark.disk  # what it promises depends on the file system

PATH = "00000000000000000000-1.arrows"


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


@pytest.fixture
def file(files):
    return segment.create(files, PATH, batch.schema().serialize())


def write(file, count, *, position=None, size=10):
    """Write batches of ``size`` records one after the other; return their positions and the end."""
    positions = [file.start if position is None else position]
    for number in range(count):
        values = [b"v%d" % (number * size + row) for row in range(size)]
        encoded_batch = encoded(*values, at=START + number)
        positions.append(
            positions[-1] + file.write(encoded_batch.stamp(number * size, 0), positions[-1])
        )
    return positions


def seal(files, file, end):
    """Write the end mark, and open the segment again."""
    file.write([segment.END_MARK], end)
    return segment.SegmentFile(files, PATH)


def bases(batches):
    return [decoded.base_offset for decoded in batches]


def test_a_batch_longer_than_the_first_read_is_read_once(file, monkeypatch):
    """Its header states its length: a short read, then one of the whole batch, parsed once."""
    positions = write(file, 2, size=3000)
    lengths, parsed = [], []
    read, whole = Files.read, segment.SegmentFile._whole

    def recorded_read(files, fd, length, position):
        lengths.append(length)
        return read(files, fd, length, position)

    monkeypatch.setattr(Files, "read", recorded_read)
    monkeypatch.setattr(
        segment.SegmentFile, "_whole", lambda *args: parsed.append(1) or whole(*args)
    )
    assert bases(file.read(positions[0], positions[2], 1)) == [0]
    assert lengths[-1] == positions[1] - positions[0] > lengths[-2]
    assert (len(lengths), len(parsed)) == (2, 1)


def test_a_sealed_segment_is_read_from_a_map(files, file):
    """A21: the same batches, without copies, also after the file was unlinked."""
    positions = write(file, 5)
    sealed = seal(files, file, positions[-1])
    first = sealed.mapped(file.start, positions[-1])[:1]
    files.unlink(PATH)

    assert sealed.fd is None
    assert bases(sealed.mapped(positions[1], positions[-1])) == [10, 20, 30, 40]
    assert batch_rows(first[0])[9][3] == b"v9"


@pytest.mark.parametrize("max_bytes", [1, 1000])
def test_a_few_batches_of_a_sealed_segment_are_not_worth_a_map(files, file, max_bytes):
    """They are read with the same result, which is faster than mapping and unmapping."""
    positions = write(file, 5)
    sealed = seal(files, file, positions[-1])
    first = sealed.mapped(file.start, positions[-1], max_bytes)
    files.unlink(PATH)

    assert sealed.fd is not None
    assert bases(first) == [0, 10][: 1 if max_bytes == 1 else 2]
    assert bases(sealed.mapped(positions[1], positions[-1], 1)) == [10]
    assert bases(sealed.mapped(positions[1], positions[-1])) == [10, 20, 30, 40]
    assert batch_rows(first[0])[9][3] == b"v9"


def test_arrays_of_a_map_outlive_the_segment(files, file):
    """A21: an array keeps the map that it points into."""
    positions = write(file, 1)
    sealed = segment.SegmentFile(files, PATH)
    column = sealed.mapped(file.start, positions[-1])[0].columns(["value"]).column(0)
    sealed.close()
    del sealed

    assert column[9].as_py() == b"v9"


@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
def test_a_sealed_file_that_was_cut_is_corruption_not_a_signal(files, file, max_bytes):
    """P20: nothing past the end of the map is accessed, so there is no SIGBUS."""
    positions = write(file, 2)
    file.truncate(positions[1])

    with pytest.raises(CorruptionError, match="were published"):
        segment.SegmentFile(files, PATH).mapped(file.start, positions[-1], max_bytes)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 4, b"hello, this is no segment", bytes(5000), b"\xff" * 5000,
     b"\xff\xff\xff\xff\x10\x00\x00\x00" + bytes(16)],
    ids=["empty", "four bytes", "text", "zeros", "ones", "damaged schema"],
)  # fmt: skip
def test_a_file_that_is_no_segment_is_refused_with_its_path(files, tmp_path, content):
    """P22: any content of the file gives a typed error, in bounded memory."""
    (tmp_path / PATH).write_bytes(content)

    with pytest.raises(CorruptionError, match=r"Not a segment") as caught:
        assert segment.SegmentFile(files, PATH).start
    assert caught.value.path == PATH


def test_a_descriptor_is_closed_with_the_last_reference_to_the_segment(files, file):
    """No descriptor is leaked, and a second close does nothing."""
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
