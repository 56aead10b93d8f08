"""An append and a flush do not wait for each other; each keeps what the other wrote (A22, P9)."""

import pytest
from support.faulty_files import FaultyFiles
from support.roots import abandon, encoded, fill, make_log, open_root, rows, values

from embedlog.errors import DurabilityError, StorageError
from embedlog.partition import append, flush
from embedlog.partition.producer_state import LAST_SEQUENCE


class CallsInBetween(FaultyFiles):
    """Runs a call before the next write, or before the next flush, of a segment."""

    before_write = before_sync = None

    def _pwritev(self, fd, buffers, position):
        call, self.before_write = self.before_write, None
        if call:
            call()
        return super()._pwritev(fd, buffers, position)

    def sync(self, fd):
        call, self.before_sync = self.before_sync, None
        if call:
            call()
        super().sync(fd)


@pytest.fixture
def log(tmp_path):
    """A log of two unflushed records; its files can run a call in between."""
    root = open_root(tmp_path / "root", files=CallsInBetween)
    log = make_log(root)
    fill(log, 2)
    yield log
    abandon(root)


@pytest.fixture
def other(log):
    """The same log in another process."""
    root = open_root(log.context.root)
    yield root.partition("t", 0)
    abandon(root)


def flush_all(log):
    flush.flush_to(log, log.tail())


def test_what_was_flushed_while_an_append_was_written_is_durable(log, other):
    """The append publishes its own end, and leaves the durable offset of the flush."""
    log.context.files.before_write = lambda: flush_all(other)
    log.append([encoded(b"new")])

    tail = other.tail()
    assert (tail.durable_offset, tail.high_watermark, tail.log_end_offset) == (2, 3, 3)
    assert tail == log.tail()
    assert log.append([encoded(b"newer")])[0].base_offset == 3
    assert values(other) == [b"v0", b"v1", b"new", b"newer"]


def test_what_a_flush_published_while_an_append_was_written_stays(log, other):
    """Two writers wait for their flush: the second does not hide again what the first published."""
    files, high_watermarks = log.context.files, []

    def first_is_flushed():
        flush_all(other)
        high_watermarks.append(other.tail().high_watermark)

    def second_is_written():
        high_watermarks.append(other.tail().high_watermark)

    def kill():
        raise StorageError("killed")

    # The first writer writes its batch, and is killed before its flush.
    files.before_sync = kill
    with pytest.raises(StorageError, match="killed"):
        log.append([encoded(b"first")], durability="fsync")
    assert (other.tail().log_end_offset, other.tail().high_watermark) == (3, 2)
    files.before_write, files.before_sync = first_is_flushed, second_is_written
    log.append([encoded(b"second")], durability="fsync")

    assert high_watermarks == [3, 3]
    assert values(other) == [b"v0", b"v1", b"first", b"second"]
    assert other.tail().durable_offset == 4


def test_a_flush_that_fails_while_an_append_is_written_fails_it(log, other):
    """The partition is read-only afterwards, and the written bytes are truncated (P9)."""
    size = log.active_file().size()
    log.context.files.before_write = lambda: other.mark_flush_failed(StorageError("a bad disk"))
    with pytest.raises(DurabilityError):
        log.append([encoded(b"new")])

    assert log.active_file().size() == size
    assert other.tail().failed
    assert values(other) == [b"v0", b"v1"]
    with pytest.raises(DurabilityError):
        log.append([encoded(b"newer")])


SENT = {
    "plain": [{"at": 5}, {"at": 9}, {"at": 7}],
    "numbered": [{"producer": (7, 0, n % (1 << 31))} for n in range(8)],
    "wrapping": [{"producer": (7, 0, (LAST_SEQUENCE - 1 + n) % (1 << 31))} for n in range(4)],
    "a new epoch": [{"producer": (7, 0, 0)}, {"producer": (7, 1, 0)}, {"producer": (7, 1, 1)}],
    "a repeat": [{"producer": (7, 0, n)} for n in (0, 1, 1, 2)],
    "two producers": [{"producer": (n % 2, 0, n // 2)} for n in range(6)],
    "compressed": [{"compression": "lz4"}] * 3,
    "headers": [{}, *[{"headers": [[("h", b"%d" % n)]]} for n in range(6)], {}, {}],
    "an index entry": [{}, {}, {}],
    "old and new": [{"at": 1}, {"at": 2}, {"at": 1 + (8 << 24)}, {"at": 3}],
    "a full segment": [{}] * 20,
}
"""The batches to append, by case, to a log that rolls early and indexes every other batch."""


@pytest.mark.parametrize("name", SENT)
def test_append_fast_leaves_the_same_state_as_the_general_append(tmp_path, monkeypatch, name):
    """The rows, receipts and bytes are equal."""
    results = []
    for path in ("fast", "general"):
        if path == "general":
            monkeypatch.setattr(append, "append_fast", lambda *_: None)
        root = open_root(tmp_path / path)
        log = make_log(
            root, {"segment.bytes": 4096, "index.interval.bytes": 800, "segment.ms": 8 << 20}
        )
        receipts = [log.append([encoded(b"v", **options)]) for options in SENT[name]]
        rows_in_live = root.context.live.read(lambda txn: list(txn.cursor()))
        results.append((receipts, rows(log), rows_in_live))
        abandon(root)

    assert results[0] == results[1]


def test_records_with_headers_are_appended_fast_once_the_segment_has_the_column(log, monkeypatch):
    """So one header does not double the cost of an append."""
    receipts, append_fast = [], append.append_fast

    def note(*arguments):
        receipts.append(append_fast(*arguments))
        return receipts[-1]

    monkeypatch.setattr(append, "append_fast", note)
    for headers in (None, [[("h", b"1")]], [[("h", b"2")]], None):
        log.append([encoded(b"v", headers=headers)])
    assert [receipt and receipt.base_offset for receipt in receipts] == [2, None, 4, None]
