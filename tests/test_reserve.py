"""A file of reserved disk space for housekeeping; appends wait until it exists again."""

from __future__ import annotations

import errno
import json
import os
from typing import Any

import pytest
from support import forks
from support.clock import START, ManualClock
from support.faulty_files import FaultyFiles
from support.full_disk import SmallDiskFiles
from support.roots import encoded, fill, healthy, make_log, offsets, open_root, values

from embedlog import batch, compaction
from embedlog.cli import main
from embedlog.errors import DiskFullError
from embedlog.files.reserve import RESERVE_BYTES, RESERVE_FILE, Reserve
from embedlog.partition import unnamed_files
from embedlog.retention import retain

pytestmark = pytest.mark.disk  # what it promises depends on the file system


@pytest.fixture
def root(tmp_path):
    """A root on a model of a disk with enough space."""
    root = open_root(tmp_path / "root", files=SmallDiskFiles, clock=ManualClock())
    files(root).room = 8 << 20
    yield root
    files(root).room = None
    assert healthy(root)
    root.close()


def files(root) -> Any:
    return root.context.files


def test_only_housekeeping_creates_it(root):
    """P10: a log without housekeeping reserves no space."""
    make_log(root)
    assert RESERVE_FILE not in os.listdir(root.path)
    retain(root, START)
    reserve = root.context.reserve
    assert reserve.held() == reserve.size() == SmallDiskFiles.disk // 16
    assert files(root).room < 8 << 20


def test_it_takes_four_mebibytes_and_never_much_of_a_disk(root, monkeypatch):
    """On a disk of less than 4 MiB there is none."""
    for disk, size in ((1 << 40, RESERVE_BYTES), (32 << 20, 2 << 20), (4 << 20, 256 << 10)):
        monkeypatch.setattr(SmallDiskFiles, "disk", disk)
        assert root.context.reserve.size() == size
    monkeypatch.setattr(SmallDiskFiles, "disk", 3 << 20)
    assert root.context.reserve.size() == 0
    assert root.context.reserve.keep() is False


def test_it_is_not_created_if_it_would_fill_the_disk(root):
    """Its size and a quarter more must be free."""
    files(root).room = root.context.reserve.size()
    assert root.context.reserve.keep() is False
    assert root.context.reserve.held() == 0
    files(root).room += root.context.reserve.size() // 4
    assert root.context.reserve.keep() is True


@pytest.mark.parametrize("reported", [0, 1 << 40])
def test_space_is_what_can_be_allocated_first_without_the_reserve(root, reported):
    """P10: the reserve is given up only if the space then suffices."""
    reserve, files(root).reported = root.context.reserve, reported
    assert reserve.keep()
    files(root).room = 500_000
    assert reserve.room(200_000, trusting=not reported) == 200_000
    assert reserve.held() == reserve.size()
    assert reserve.room(10 << 20, trusting=not reported) <= 0
    assert reserve.held() == reserve.size()
    assert reserve.room(400_000, trusting=not reported) == 400_000
    assert reserve.held() == 0


@pytest.mark.parametrize("reported", [0, 1 << 40])
def test_appends_continue_once_it_can_be_allocated_whatever_is_reported(root, reported):
    """P10: the reported free space neither blocks them forever, nor lets them use the reserve."""
    log = make_log(root)
    fill(log, 10)
    assert root.context.reserve.keep()
    files(root).reported, files(root).room = reported, 0
    with pytest.raises(DiskFullError):
        fill(log, 1)
    assert root.context.reserve.give_up()
    space = files(root).room

    with pytest.raises(DiskFullError, match="what is left is reserved for housekeeping"):
        fill(log, 1)
    assert files(root).room == space

    files(root).room = 8 << 20
    forks.until(lambda: not raises_disk_full(root))
    fill(log, 1, first=10)
    assert offsets(log) == list(range(11))


def raises_disk_full(root) -> bool:
    try:
        root.context.check_appendable()
    except DiskFullError:
        return True
    return False


def test_the_process_that_gave_it_up_creates_it_before_it_appends(root):
    """P10: otherwise the disk could fill up again before the next round of housekeeping."""
    log = make_log(root)
    assert root.context.reserve.keep()
    assert root.context.reserve.give_up()
    fill(log, 1)
    assert root.context.reserve.held() == root.context.reserve.size()


def test_a_reserve_that_cannot_be_allocated_is_removed(root):
    """The part that was allocated is removed as well."""
    files(root).fail_at(0, errno.ENOSPC, only={"allocate"})
    assert root.context.reserve.keep() is False
    assert RESERVE_FILE not in os.listdir(root.path)


def test_holes_are_filled(root):
    """After a copy or a power cut the file may have its size without its blocks."""
    assert root.context.reserve.keep()
    os.truncate(f"{root.path}/{RESERVE_FILE}", 0)
    assert root.context.reserve.held() == 0
    assert root.context.reserve.keep()
    assert root.context.reserve.held() == root.context.reserve.size()


def test_a_step_is_tried_again_without_it(root):
    """The error is raised if that does not help, or if there is no reserve."""
    tries = []

    def step():
        tries.append(root.context.reserve.held())
        raise DiskFullError("full")

    root.context.reserve.keep()
    for _ in range(2):
        with pytest.raises(DiskFullError):
            root.context.reserve.used_by(step)
    assert tries == [root.context.reserve.size(), 0, 0]


def test_appends_wait_until_it_can_be_created_again(root):
    """P10: a process that found the disk full does not use the space of housekeeping."""
    log = make_log(root, {"retention.ms": 1, "segment.bytes": 2000})
    retain(root, START)
    fill(log, 10)
    files(root).room = 0
    with pytest.raises(DiskFullError):
        fill(log, 1)
    assert root.context.reserve.give_up()

    with pytest.raises(DiskFullError, match="what is left is reserved for housekeeping") as caught:
        fill(log, 1)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.retriable

    files(root).room = 8 << 20
    fill(log, 1, first=10)
    assert offsets(log) == list(range(11))
    assert root.context.reserve.short is False


def test_retention_deletes_fewer_segments_if_a_transaction_does_not_fit(root, monkeypatch):
    """P10: the transaction is made smaller until it fits."""
    log = make_log(root, {"retention.ms": 1, "segment.bytes": encoded(b"v0").size})
    fill(log, 64)
    rows = []
    put = unnamed_files.schedule_delete

    def limited_put(txn, *rest):
        rows.append(1)
        if len(rows) > 10:
            raise DiskFullError("too many rows for the disk")
        put(txn, *rest)

    monkeypatch.setattr(unnamed_files, "schedule_delete", limited_put)
    write = root.context.live.write

    def limited_write(step):
        rows.clear()
        return write(step)

    monkeypatch.setattr(root.context.live, "write", limited_write)
    deletions = retain(root, START + 1_000_000)
    assert [deletion.segments for deletion in deletions] == [8]
    assert values(log) == [b"v%d" % number for number in range(8, 64)]


def compacted_log(root, segments: int, size: int, keys: int) -> Any:
    """Create a compacted topic with sealed segments that are still to be compacted."""
    config: dict[str, object] = {
        "cleanup.policy": "compact",
        "segment.bytes": size,
        "max.message.bytes": size,
    }
    log = make_log(root, config)
    count = 0
    while len(log.segments) <= segments:
        record_keys = [b"%d" % (count % keys)]
        log.append([batch.encode_lists([b"%d" % count + b"." * 2000], record_keys, START)])
        log.refresh()
        count += 1
    return log


def test_compaction_chooses_segments_that_fit(root):
    """P10: with space for one segment, it compacts one after the other."""
    log = compacted_log(root, 8, 100_000, 5)
    before = log.size_bytes()
    files(root).room = 400_000
    done = compaction.clean(log, START)
    assert done.segments_before == 8
    assert log.size_bytes() < before / 4


def test_compaction_reports_segments_that_do_not_fit(root):
    """P10: they stay dirty, and are compacted once there is space."""
    log = compacted_log(root, 4, 100_000, 10_000)
    before = offsets(log)
    files(root).room = 300_000
    done = compaction.clean(log, START)
    assert done.segments_before == 0
    assert done.first_dirty == 0
    assert "the disk is too full: 4 segments (at 0, " in done.why
    assert offsets(log) == before
    files(root).room = 8 << 20
    assert compaction.clean(log, START).segments_before == 4
    assert offsets(log) == before


def test_a_compaction_that_fills_the_disk_changes_nothing(root, monkeypatch):
    """P10: another program used the space: the written files are removed, other segments tried."""
    log = compacted_log(root, 4, 100_000, 5)
    before = dict(zip(offsets(log), values(log), strict=True))
    monkeypatch.setattr(Reserve, "room", lambda self, needed, **_: 1 << 30)
    files(root).room = 5_000
    done = compaction.clean(log, START)
    assert "the disk is too full" in done.why
    assert done.records_kept == done.records_read == 0
    assert dict(zip(offsets(log), values(log), strict=True)) == before


def test_a_tombstone_outlives_older_values_that_could_not_be_removed(root, monkeypatch):
    """D17: it stays while skipped segments may hold an older value of its key."""
    log = make_log(
        root,
        {"cleanup.policy": "compact", "segment.bytes": 4_000, "delete.retention.ms": 0},
    )

    def put(*pairs: tuple[bytes, bytes | None]) -> None:
        keys, record_values = zip(*pairs, strict=True)
        log.append([batch.encode_lists(list(record_values), list(keys), START)])
        log.roll()

    large = [(b"a%d" % number, b"." * 900) for number in range(3)]
    put(*large, (b"k", b"old"))
    put((b"k", None), (b"b0", b"old"), (b"b1", b"old"), (b"b2", b"old"))
    space = [2_400]
    monkeypatch.setattr(Reserve, "room", lambda self, needed, **_: space[0])
    for number in range(3):
        # Make the segment of the tombstone worth compacting each time.
        put((b"b%d" % number, b"new"))
        done = compaction.clean(log, START)
        assert "1 segments (at 0) were not compacted" in done.why
        assert values(log)[3:] == [b"old", None, *[b"old"] * (2 - number), *[b"new"] * (number + 1)]
    space[0] = 1 << 30
    compaction.clean(log, START)
    assert values(log) == [*(value for _, value in large), b"new", b"new", b"new"]


def test_the_reserve_lets_a_root_on_a_full_disk_be_opened(tmp_path):
    """P10: otherwise housekeeping could not run after a reboot."""
    root = open_root(tmp_path / "root")
    assert root.context.reserve.keep()
    fill(make_log(root), 3)
    root.close()
    tries = []

    class Full(FaultyFiles):
        def make_directory(self, path: str, exist_ok: bool = True) -> None:
            if RESERVE_FILE in os.listdir(self.root):
                tries.append(path)
                raise DiskFullError("full", path=path)
            super().make_directory(path, exist_ok)

    reopened = open_root(tmp_path / "root", files=Full)
    assert len(tries) == 1
    assert offsets(reopened.partition("t", 0)) == [0, 1, 2]
    assert healthy(reopened)
    reopened.close()


def test_doctor_reports_its_size(root, capsys):
    """The reserve is not a stray file."""
    make_log(root)
    retain(root, START)
    assert root.startup_report == [] and healthy(root)
    size = root.context.reserve.size()
    main(["--root", root.path, "doctor", "--json"])
    assert json.loads(capsys.readouterr().out)["storage"]["reserve_bytes"] == size
    root.context.reserve.give_up()
    main(["--root", root.path, "doctor", "--json"])
    assert json.loads(capsys.readouterr().out)["storage"]["reserve_bytes"] == 0
