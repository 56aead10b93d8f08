"""Durable appends write zeros ahead of the log end, and no reader takes them for records."""

from __future__ import annotations

import logging
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from support import forks
from support.faulty_files import REBOOTED, FaultyFiles
from support.full_disk import SmallDiskFiles
from support.replicas import Directories
from support.roots import (
    abandon,
    encoded,
    fill,
    healthy,
    make_log,
    open_root,
    segment_files,
    values,
)
from support.staged_files import publish, stage

import embedlog
from embedlog.cli import main
from embedlog.errors import DiskFullError, DurabilityError, StorageError
from embedlog.partition import PartitionLog, partition_log
from embedlog.partition.preallocation import LEAST_AHEAD
from embedlog.root.repair import repair_root
from embedlog.root.root import Root
from embedlog.segment import MOST_AHEAD


@pytest.fixture
def root(tmp_path: Path) -> Any:
    """A root that counts its operations."""
    root = open_root(tmp_path / "root", files=FaultyFiles)
    yield root
    if not root.closed:
        assert healthy(root)
        root.close()


@pytest.fixture
def log(root: Root, monkeypatch: pytest.MonkeyPatch) -> PartitionLog:
    """A partition with three durable records, and zeros behind them."""
    monkeypatch.setattr(partition_log, "UNDISPUTED", 1)
    log = make_log(root)
    fill(log, 3, durability="fsync")
    return log


def ahead(log: PartitionLog) -> int:
    """How many bytes the file of the active segment has behind the end of the log."""
    return log.active_file().size() - log.tail().log_end_position


def counted(log: PartitionLog, kind: str) -> int:
    return log.context.files.counts[kind]  # type: ignore[attr-defined, no-any-return]


def leave_batch(log: PartitionLog, *left: bytes) -> None:
    """Write batches behind the end, as a process that is killed before it publishes them."""
    tail, data = log.tail(), list[Any]()
    for number, value in enumerate(left):
        data += encoded(value).stamp(tail.log_end_offset + number, tail.leader_epoch)
    log.active_file().write(data, tail.log_end_position)


# When, and how far


def test_durable_appends_overwrite_zeros_and_others_write_none(root):
    """The file grows once for many appends; with durability="os" it grows with each."""
    log = make_log(root)
    fill(log, 2)
    assert ahead(log) == 0
    fill(log, 1, durability="fsync")
    size = log.active_file().size()
    assert size == log.active_file().start + LEAST_AHEAD + 2 * encoded(b"v0").size
    fill(log, 20, durability="fsync")
    fill(log, 20)
    assert log.active_file().size() == size
    assert len(values(log)) == 43


def test_the_longer_a_segment_the_more_is_written_ahead_up_to_a_mebibyte(root):
    """As much as it has; a batch that is large beside that is not written twice."""
    log = make_log(root)
    log.append([encoded(b"v" * LEAST_AHEAD)], durability="fsync")
    assert ahead(log) == 0
    fill(log, 1, durability="fsync")
    assert LEAST_AHEAD < ahead(log) < 2 * LEAST_AHEAD
    for _ in range(4):
        log.append([encoded(b"v" * (1 << 19))])
    fill(log, 1, durability="fsync")
    assert ahead(log) == MOST_AHEAD - encoded(b"v0").size


def test_a_segment_is_never_extended_past_its_size(root):
    """The roll comes where it came before, and the sealed file has what the manifest says."""
    log = make_log(root, {"segment.bytes": 3000})
    fill(log, 14, durability="fsync")
    *sealed, active = log.segments.values()
    assert [len(sealed), active.next_offset] == [2, None]
    for info in sealed:
        file = log.open_segment(info)
        assert file.size() == info.size <= file.start + 3000 + 8
    assert 0 < log.active_file().size() <= log.active_file().start + 3000


@pytest.mark.parametrize("how", ["roll", "publication"])
def test_a_sealed_segment_has_no_zeros(root, how):
    """A15: it is truncated behind its end mark, also if a publication seals it."""
    log = make_log(root)
    fill(log, 1, durability="fsync")
    root.alter_topic("t", {"segment.bytes": 2000})
    log.refresh()
    if how == "roll":
        log.roll()
    else:
        publish(root, [stage(root, t_0=[b"p%d" % number for number in range(5)])])
    log.refresh()
    first = log.segments[0]
    assert first.sealed
    assert log.open_segment(first).size() == first.size


# Who comes next


def test_another_process_writes_over_the_zeros(log):
    """With either durability; the first one goes on after it."""

    def other(durability: str) -> int:
        root = open_root(log.context.root)
        part = root.partition("t", 0)
        fill(part, 1, first=len(values(part)), durability=durability)
        size = part.active_file().size()
        abandon(root)
        return size

    for durability in ("os", "fsync"):
        assert forks.call(lambda how=durability: other(how)) == log.active_file().size()
    fill(log, 1, first=5, durability="fsync")
    assert values(log) == [b"v%d" % number for number in range(6)]


@pytest.mark.parametrize("next_writer", ["append", "publication"])
def test_what_a_killed_writer_left_over_the_zeros_is_truncated(root, log, next_writer):
    """P1: a batch behind the one that overwrites the first of them would be read as a record."""
    leave_batch(log, b"v3", b"ghost")
    if next_writer == "append":
        fill(log, 1, first=3, durability="fsync")
    else:
        publish(root, [stage(root, t_0=[b"v3"])])
    path = segment_files(log.context.root)[0]
    assert b"ghost" not in path.read_bytes()


def test_a_write_that_fails_leaves_nothing(log):
    """P8: the zeros are truncated with what was written over them."""
    files = log.context.files
    files.short_at(0, 100)
    files.fail_at(1, 5, only={"write"})
    with pytest.raises(StorageError):
        fill(log, 1, durability="fsync")
    assert ahead(log) == 0
    fill(log, 1, first=3, durability="fsync")
    assert values(log) == [b"v0", b"v1", b"v2", b"v3"]


# Recovery, and other readers


def test_a_recovery_truncates_the_zeros_and_warns_of_nothing(root, log, tmp_path, caplog):
    """A27: they are no damage."""
    abandon(root)
    with caplog.at_level(logging.WARNING):
        again = open_root(tmp_path / "root", files=REBOOTED)
        recovered = again.partition("t", 0)
        assert values(recovered) == [b"v0", b"v1", b"v2"]
    assert not caplog.records
    assert ahead(recovered) == 0
    fill(recovered, 1, first=3, durability="fsync")
    assert ahead(recovered) > 0
    again.close()


def test_a_reader_that_may_not_write_sees_no_zeros(root, log, tmp_path):
    """R8: it computes the end without truncating anything."""
    abandon(root)
    size = segment_files(tmp_path / "root")[0].stat().st_size
    again = open_root(tmp_path / "root", files=REBOOTED, mode="r")
    assert values(again.partition("t", 0)) == [b"v0", b"v1", b"v2"]
    assert segment_files(tmp_path / "root")[0].stat().st_size == size
    again.close()


def test_readers_of_arrow_streams_take_the_zeros_for_the_end(log):
    """D1: pyarrow, Polars and DuckDB read the file as it is."""
    (path,) = segment_files(log.context.root)
    assert path.read_bytes().endswith(bytes(1000))
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    assert table["value"].to_pylist() == [b"v0", b"v1", b"v2"]
    assert pl.read_ipc_stream(path)["value"].to_list() == [b"v0", b"v1", b"v2"]
    with pa.OSFile(str(path)) as file:
        rows = duckdb.from_arrow(pa.ipc.open_stream(file)).project("value").fetchall()
    assert rows == [(b"v0",), (b"v1",), (b"v2",)]


def test_a_dump_and_a_repair_find_no_damage(root, log, capsys):
    """The command that reads a damaged file does not take the zeros for damage."""
    (path,) = segment_files(log.context.root)
    assert main(["dump", str(path), "--json"]) == 0
    assert "damage" not in capsys.readouterr().out
    assert repair_root(root, dry_run=True) == []


# The flush


def test_a_lone_append_is_published_once(log):
    """One commit of `live` and one flush: what it wrote is durable when it becomes visible."""
    version, flushes = log.context.live.version(), counted(log, "sync")
    fill(log, 5, first=3, durability="fsync")
    assert log.context.live.version() - version == 5
    assert counted(log, "sync") - flushes == 5
    tail = log.tail()
    assert tail.durable_offset == tail.high_watermark == tail.log_end_offset == 8


def test_only_one_who_was_alone_for_a_while_keeps_the_lock_during_its_flush(log, monkeypatch):
    """After an append of another process, or thread, the next ones are published twice."""
    monkeypatch.setattr(partition_log, "UNDISPUTED", 3)

    def commits() -> list[int]:
        """How many commits each of some appends makes."""
        made = [log.context.live.version()]
        for _ in range(5):
            fill(log, 1, durability="fsync")
            made.append(log.context.live.version())
        return [after - before for before, after in pairwise(made)]

    assert commits()[-1] == 1
    other = open_root(log.context.root)
    fill(other.partition("t", 0), 1)
    abandon(other)
    assert commits() == [2, 2, 2, 1, 1]
    thread = threading.Thread(target=fill, args=(log, 1), kwargs={"durability": "fsync"})
    thread.start()
    thread.join()
    assert commits() == [2, 2, 2, 1, 1]


def test_one_who_waits_for_the_lock_is_let_in_by_the_next_append(log, monkeypatch):
    """Another process says in the lock file that it waits; a flush is then shared, as before."""
    files, other, commits = log.context.files, open_root(log.context.root), list[int]()
    waiter = threading.Thread(target=fill, args=(other.partition("t", 0), 1))
    sync = type(files).sync

    def until_another_waits(self: Any, fd: int) -> None:
        monkeypatch.undo()
        waiter.start()
        with files.opened(lock_path, write=True) as lock:
            forks.until(lambda: files.is_awaited(lock), 30)
        sync(self, fd)

    lock_path = log.context.catalog.topic("t").lock_path(0)
    with files.opened(lock_path, write=True) as lock:
        assert not files.is_awaited(lock)
    fill(log, 1, durability="fsync")
    monkeypatch.setattr(type(files), "sync", until_another_waits)
    monkeypatch.setattr(partition_log, "UNDISPUTED", 1)
    for _ in range(2):
        commits.append(log.context.live.version())
        fill(log, 1, durability="fsync")
    waiter.join()
    commits.append(log.context.live.version())
    assert [after - before for before, after in pairwise(commits)] == [1, 2 + 1]
    abandon(other)


def test_appends_of_several_threads_share_a_flush(log, monkeypatch):
    """Those that wait while another one flushes are flushed together (group commit)."""
    files, first, flushes = log.context.files, threading.Event(), counted(log, "sync")
    sync = type(files).sync

    def slow(self: Any, fd: int) -> None:
        flush = counted(log, "sync") - flushes
        if flush == 0:
            first.set()
            forks.until(lambda: all(thread.is_alive() for thread in threads), 30)
        elif flush == 1:
            forks.until(lambda: log.tail().log_end_offset == 11, 30)
        sync(self, fd)

    monkeypatch.setattr(type(files), "sync", slow)
    threads = [
        threading.Thread(target=fill, args=(log, 1), kwargs={"durability": "fsync"})
        for _ in range(8)
    ]
    threads[0].start()
    assert first.wait(30)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(values(log)) == 11
    assert counted(log, "sync") - flushes <= 3


def test_a_lone_append_whose_flush_fails_is_not_visible(root, log):
    """P9: the partition is read-only; what was written stays as it is until the repair."""
    log.context.files.fail_at(0, 5, only={"sync"})
    with pytest.raises(DurabilityError):
        fill(log, 1, first=3, durability="fsync")
    assert log.tail().failed
    assert values(log) == [b"v0", b"v1", b"v2"]
    with pytest.raises(DurabilityError):
        fill(log, 1, first=3)
    repair_root(root, dry_run=False)
    fill(log, 1, first=9, durability="fsync")
    assert values(log)[:3] + values(log)[-1:] == [b"v0", b"v1", b"v2", b"v9"]


# Full disks


@pytest.fixture
def small(tmp_path: Path) -> Any:
    """A root on a model of a disk that has much space at first."""
    root = open_root(tmp_path / "small", files=SmallDiskFiles)
    root.context.files.room = 64 << 20
    yield root
    root.context.files.room = None
    assert healthy(root)
    root.close()


def test_an_append_does_without_on_a_disk_that_is_nearly_full(small):
    """P10: it extends the file by what it writes."""
    small.context.files.room = MOST_AHEAD
    log = make_log(small)
    fill(log, 5, durability="fsync")
    assert ahead(log) == 0


def test_a_disk_that_is_fuller_than_it_says_refuses_no_append(small):
    """P10: as with a quota; the zeros that were written are truncated."""
    files, log = small.context.files, make_log(small)
    files.reported, files.room = 1 << 40, 10_000
    fill(log, 5, durability="fsync")
    assert ahead(log) == 0
    assert files.room > 5_000


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_full_disk_is_given_what_was_preallocated(small, durability):
    """P10: no append fails while another partition, or another process, has bytes in reserve."""
    files, logs = small.context.files, [make_log(small, topic=name) for name in ("t", "u", "v")]
    for log in logs:
        fill(log, 1, durability="fsync")
    last, free = logs[2], ahead(logs[0]) + ahead(logs[1])
    last.append([encoded(b"v" * ahead(last))], durability=durability)
    files.room = 0
    size = encoded(b"v" * 1000).size
    for _ in range(free // size):
        last.append([encoded(b"v" * 1000)], durability=durability)
    assert ahead(logs[0]) == ahead(logs[1]) == 0
    with pytest.raises(DiskFullError):
        for _ in range(2 + LEAST_AHEAD // size):
            last.append([encoded(b"v" * 1000)], durability=durability)


def test_a_partition_that_is_in_use_keeps_its_zeros(small):
    """A writer relies on nothing else; it is not waited for."""
    files, log, busy = small.context.files, make_log(small), make_log(small, topic="busy")
    fill(busy, 1, durability="fsync")
    fill(log, 1)
    files.room = 0
    with busy.locked(), pytest.raises(DiskFullError):
        fill(log, 1)
    assert ahead(busy) > 0
    files.room = 64 << 20
    fill(busy, 1, durability="fsync")


def test_copies_on_several_disks_are_not_extended(tmp_path):
    """What was written ahead while there was one copy is truncated when the second one is made."""
    first, second = Directories(tmp_path, 2).paths
    with embedlog.open(first, durability="fsync", maintenance=False) as log:
        log.create_topic("t")
        fill(log.partition("t", 0), 3)
        assert ahead(log.partition("t", 0)) > 0
        log.replicas.add(second)
        log.replicas.reassign(replication_factor=2)
        assert [each.lag_bytes for each in log.replicas] == [0, 0]
        assert ahead(log.partition("t", 0)) == 0
        fill(log.partition("t", 0), 3)
        assert ahead(log.partition("t", 0)) == 0
