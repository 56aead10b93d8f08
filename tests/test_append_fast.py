"""An append and a flush do not wait for each other: each keeps what the other noted (A22, P9)."""

import pytest
from support.faulty_files import FaultyFiles
from support.roots import abandon, encoded, fill, make_log, open_root, rows, values

from embedlog.errors import DurabilityError, StorageError
from embedlog.partition import append, flush
from embedlog.partition.producer_state import LAST_SEQUENCE


class Between(FaultyFiles):
    """Calls somebody before the next write, or the next flush, of a segment."""

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
def here(tmp_path):
    """A log of two records that nobody flushed; its files call somebody in between."""
    root = open_root(tmp_path / "root", files=Between)
    log = make_log(root)
    fill(log, 2)
    yield log
    abandon(root)


@pytest.fixture
def there(here):
    """The same log, as another process has it."""
    root = open_root(here.context.root)
    yield root.partition("t", 0)
    abandon(root)


def flush_there(there):
    flush.flush_to(there, there.tail())


def test_what_was_flushed_while_an_append_was_written_is_durable(here, there):
    """The append publishes its own end, and does not take the durable one back."""
    here.context.files.before_write = lambda: flush_there(there)
    here.append([encoded(b"new")])

    now = there.tail()
    assert (now.durable_offset, now.high_watermark, now.log_end_offset) == (2, 3, 3)
    assert now == here.tail()
    assert here.append([encoded(b"newer")])[0].base_offset == 3
    assert values(there) == [b"v0", b"v1", b"new", b"newer"]


def test_what_a_flush_published_while_an_append_was_written_stays(here, there):
    """Two writers that wait for their flush: the first one's is not hidden again by the second."""
    files, seen = here.context.files, []

    def first_is_flushed():
        flush_there(there)
        seen.append(there.tail().high_watermark)

    def second_is_written():
        seen.append(there.tail().high_watermark)

    def killed():
        raise StorageError("killed")

    # The first one wrote its batch, and does not get as far as its flush.
    files.before_sync = killed
    with pytest.raises(StorageError, match="killed"):
        here.append([encoded(b"first")], durability="fsync")
    assert (there.tail().log_end_offset, there.tail().high_watermark) == (3, 2)
    files.before_write, files.before_sync = first_is_flushed, second_is_written
    here.append([encoded(b"second")], durability="fsync")

    assert seen == [3, 3]
    assert values(there) == [b"v0", b"v1", b"first", b"second"]
    assert there.tail().durable_offset == 4


def test_a_flush_that_fails_while_an_append_is_written_fails_it(here, there):
    """The partition is read-only from then on, and what was written is cut back off (P9)."""
    size = here.active_file().size()
    here.context.files.before_write = lambda: there.mark_flush_failed(StorageError("a bad disk"))
    with pytest.raises(DurabilityError):
        here.append([encoded(b"new")])

    assert here.active_file().size() == size
    assert there.tail().failed
    assert values(there) == [b"v0", b"v1"]
    with pytest.raises(DurabilityError):
        here.append([encoded(b"newer")])


SENT = {
    "plain": [{"at": 5}, {"at": 9}, {"at": 7}],
    "numbered": [{"producer": (7, 0, n % (1 << 31))} for n in range(8)],
    "wrapping": [{"producer": (7, 0, (LAST_SEQUENCE - 1 + n) % (1 << 31))} for n in range(4)],
    "a new epoch": [{"producer": (7, 0, 0)}, {"producer": (7, 1, 0)}, {"producer": (7, 1, 1)}],
    "a repeat": [{"producer": (7, 0, n)} for n in (0, 1, 1, 2)],
    "two producers": [{"producer": (n % 2, 0, n // 2)} for n in range(6)],
    "compressed": [{"compression": "lz4"}] * 3,
    "headers": [{}, {"headers": [[("h", b"1")]]}, {}],
    "an index entry": [{}, {}, {}],
    "old and new": [{"at": 1}, {"at": 2}, {"at": 1 + (8 << 24)}, {"at": 3}],
    "a full segment": [{}] * 20,
}
"""What is appended, batch by batch, in a log that rolls early and indexes every other batch."""


@pytest.mark.parametrize("name", SENT)
def test_a_batch_alone_is_appended_as_a_draft_would(tmp_path, monkeypatch, name):
    """The short way leaves the same rows, receipts and bytes behind."""
    found = []
    for place in ("short", "general"):
        if place == "general":
            monkeypatch.setattr(append, "append_fast", lambda *_: None)
        root = open_root(tmp_path / place)
        log = make_log(
            root, {"segment.bytes": 4096, "index.interval.bytes": 800, "segment.ms": 8 << 20}
        )
        receipts = [log.append([encoded(b"v", **one)]) for one in SENT[name]]
        stored = root.context.live.read(lambda txn: list(txn.cursor()))
        found.append((receipts, rows(log), stored))
        abandon(root)

    assert found[0] == found[1]
