"""Room that is kept back for housekeeping, and who waits until it is there again."""

from __future__ import annotations

import errno
import json
import os
from typing import Any

import pytest
from support import forks
from support.clock import START, ManualClock
from support.faulty_files import FaultyFiles
from support.full_disk_housekeeping import SmallDiskFiles
from support.roots import encoded, fill, healthy, make_log, offsets, open_root, values

from embedlog import batch, compaction
from embedlog.cli import main
from embedlog.errors import DiskFullError
from embedlog.files.reserve import RESERVE_BYTES, RESERVE_FILE, Reserve
from embedlog.partition import pending_deletes
from embedlog.retention import retain


@pytest.fixture
def root(tmp_path):
    """A root on a disk as a model, which has room enough."""
    root = open_root(tmp_path / "root", files=SmallDiskFiles, clock=ManualClock())
    files(root).room = 8 << 20
    yield root
    files(root).room = None
    assert healthy(root)
    root.close()


def files(root) -> Any:
    return root.context.files


def test_it_is_made_by_housekeeping_and_not_by_others(root):
    """P10: a log that nobody keeps house in takes no more room than it needs."""
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


def test_it_is_not_made_where_it_would_take_the_last_room(root):
    """It and a quarter more must be free."""
    files(root).room = root.context.reserve.size()
    assert root.context.reserve.keep() is False
    assert root.context.reserve.held() == 0
    files(root).room += root.context.reserve.size() // 4
    assert root.context.reserve.keep() is True


@pytest.mark.parametrize("reported", [0, 1 << 40])
def test_an_allocation_decides_whether_there_is_room_for_it(root, reported):
    """P10: what the file system reports as free may be too little for root, and too much."""
    reserve, files(root).reported = root.context.reserve, reported
    files(root).room = reserve.size()
    assert reserve.keep() is False
    assert reserve.held() == 0
    assert files(root).room == reserve.size()
    files(root).room += reserve.size() // 4
    assert reserve.keep() is True
    assert os.listdir(root.path).count(RESERVE_FILE) == 1
    assert "reserve.trial" not in os.listdir(root.path)


@pytest.mark.parametrize("reported", [0, 1 << 40])
def test_room_is_what_can_be_allocated_and_then_with_the_reserve(root, reported):
    """P10: it is given up only if it makes the difference."""
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
def test_appends_go_on_once_it_can_be_allocated_whatever_is_reported(root, reported):
    """P10: with too little reported they would wait for ever; with too much, eat what it gave."""
    log = make_log(root)
    fill(log, 10)
    assert root.context.reserve.keep()
    files(root).reported, files(root).room = reported, 0
    with pytest.raises(DiskFullError):
        fill(log, 1)
    assert root.context.reserve.give_up()
    given = files(root).room

    with pytest.raises(DiskFullError, match="what is left is reserved for housekeeping"):
        fill(log, 1)
    assert files(root).room == given

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


def test_who_gives_it_up_appends_only_once_it_is_there_again(root):
    """P10: else the next full disk finds none, as housekeeping makes it only now and then."""
    log = make_log(root)
    assert root.context.reserve.keep()
    assert root.context.reserve.give_up()
    fill(log, 1)
    assert root.context.reserve.held() == root.context.reserve.size()


def test_half_of_it_is_none(root):
    """Where there is no room for it after all, what there is of it goes."""
    files(root).fail_at(0, errno.ENOSPC, only={"allocate"})
    assert root.context.reserve.keep() is False
    assert RESERVE_FILE not in os.listdir(root.path)


def test_holes_are_filled(root):
    """What was copied, or lived through a power cut, may have the size and not the bytes."""
    assert root.context.reserve.keep()
    os.truncate(f"{root.path}/{RESERVE_FILE}", 0)
    assert root.context.reserve.held() == 0
    assert root.context.reserve.keep()
    assert root.context.reserve.held() == root.context.reserve.size()


def test_a_step_is_tried_again_without_it(root):
    """And told of if that does not help, or if there was none."""
    tries = []

    def step():
        tries.append(root.context.reserve.held())
        raise DiskFullError("full")

    root.context.reserve.keep()
    for _ in range(2):
        with pytest.raises(DiskFullError):
            root.context.reserve.used_by(step)
    assert tries == [root.context.reserve.size(), 0, 0]


def test_appends_wait_until_it_can_be_made_again(root):
    """P10: who found the disk full does not eat what housekeeping was given."""
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


def test_what_was_let_go_is_unlinked_at_once_on_a_full_disk(root):
    """P10: nobody waits for file.delete.delay.ms."""
    log = make_log(root, {"retention.ms": 1, "segment.bytes": 1, "file.delete.delay.ms": 60_000})
    root.alter_topic("t", {"segment.bytes": encoded(b"v0").size})
    fill(log, 10)
    files(root).room = pending_deletes.LITTLE_SPACE - 1
    retain(root, START + 1_000_000)
    assert len(os.listdir(f"{root.path}/{log.directory}/0")) == 1
    assert pending_deletes.paths(root.context.live) == set()


def test_retention_is_content_with_less_where_there_is_no_room_for_all(root, monkeypatch):
    """P10: a transaction that does not fit is made smaller until it does."""
    log = make_log(root, {"retention.ms": 1, "segment.bytes": encoded(b"v0").size})
    fill(log, 64)
    rows = []
    put = pending_deletes.put

    def counted(txn, *rest):
        rows.append(1)
        if len(rows) > 10:
            raise DiskFullError("no room for so many")
        put(txn, *rest)

    monkeypatch.setattr(pending_deletes, "put", counted)
    write = root.context.live.write

    def begun(step):
        rows.clear()
        return write(step)

    monkeypatch.setattr(root.context.live, "write", begun)
    done = retain(root, START + 1_000_000)
    assert [one.segments for one in done] == [8]
    assert values(log) == [b"v%d" % number for number in range(8, 64)]


def compacted(root, segments: int, size: int, keys: int) -> Any:
    config: dict[str, object] = {
        "cleanup.policy": "compact",
        "segment.bytes": size,
        "max.message.bytes": size,
    }
    log = make_log(root, config)
    count = 0
    while len(log.segments) <= segments:
        names = [b"%d" % (count % keys)]
        log.append([batch.encode_lists([b"%d" % count + b"." * 2000], names, START)])
        log.refresh()
        count += 1
    return log


def test_compaction_chooses_runs_that_fit(root):
    """P10: on a disk with room for one segment it goes on, one after the other."""
    log = compacted(root, 8, 100_000, 5)
    before = log.size_bytes()
    files(root).room = 400_000
    done = compaction.clean(log, START)
    assert done.segments_before == 8
    assert log.size_bytes() < before / 4


def test_compaction_says_what_it_left_for_want_of_room(root):
    """P10: it is not begun; nothing is lost, nothing counts as compacted, and later it is done."""
    log = compacted(root, 4, 100_000, 10_000)
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


def test_a_run_for_which_the_room_ends_changes_nothing(root, monkeypatch):
    """P10: somebody else took it; what was written goes, and the others are tried."""
    log = compacted(root, 4, 100_000, 5)
    before = dict(zip(offsets(log), values(log), strict=True))
    monkeypatch.setattr(Reserve, "room", lambda self, needed, **_: 1 << 30)
    files(root).room = 5_000
    done = compaction.clean(log, START)
    assert "the disk is too full" in done.why
    assert done.records_kept == done.records_read == 0
    assert dict(zip(offsets(log), values(log), strict=True)) == before


def test_a_tombstone_outlives_what_there_was_no_room_to_remove(root, monkeypatch):
    """D17: as long as an older value of its key may be in what was left out."""
    log = make_log(
        root,
        {"cleanup.policy": "compact", "segment.bytes": 4_000, "delete.retention.ms": 0},
    )

    def put(*pairs: tuple[bytes, bytes | None]) -> None:
        keys, some = zip(*pairs, strict=True)
        log.append([batch.encode_lists(list(some), list(keys), START)])
        log.roll()

    large = [(b"a%d" % number, b"." * 900) for number in range(3)]
    put(*large, (b"k", b"old"))
    put((b"k", None), (b"b0", b"old"), (b"b1", b"old"), (b"b2", b"old"))
    room = [2_400]
    monkeypatch.setattr(Reserve, "room", lambda self, needed, **_: room[0])
    for number in range(3):
        # So that each time there is something to gain where the tombstone is.
        put((b"b%d" % number, b"new"))
        done = compaction.clean(log, START)
        assert "1 segments (at 0) were not compacted" in done.why
        assert values(log)[3:] == [b"old", None, *[b"old"] * (2 - number), *[b"new"] * (number + 1)]
    room[0] = 1 << 30
    compaction.clean(log, START)
    assert values(log) == [*(value for _, value in large), b"new", b"new", b"new"]


def test_a_full_disk_can_be_opened_with_what_was_kept_back(tmp_path):
    """P10: else nobody could keep house after a reboot."""
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

    again = open_root(tmp_path / "root", files=Full)
    assert len(tries) == 1
    assert offsets(again.partition("t", 0)) == [0, 1, 2]
    assert healthy(again)
    again.close()


def test_the_doctor_knows_it(root, capsys):
    """It is no stray, and its size is told."""
    make_log(root)
    retain(root, START)
    assert root.startup_report == [] and healthy(root)
    size = root.context.reserve.size()
    main(["--root", root.path, "doctor", "--json"])
    assert json.loads(capsys.readouterr().out)["storage"]["reserve_bytes"] == size
    root.context.reserve.give_up()
    main(["--root", root.path, "doctor", "--json"])
    assert json.loads(capsys.readouterr().out)["storage"]["reserve_bytes"] == 0
