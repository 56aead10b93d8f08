"""Housekeeping on a full disk: a small tmpfs, or a model of one (P10)."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import embedlog
from embedlog import batch, kv
from embedlog.errors import DiskFullError
from embedlog.files import Files
from embedlog.record import TopicPartition
from support import forks
from support.clock import START, ManualClock
from support.full_disk import PAGE, Disk, SmallDiskFiles

DAY = 86_400_000
KEYS = 50
RECORD = b"." * 500
ROWS = 10
SEGMENT = 60_000
_CONFIG: dict[str, dict[str, object]] = {
    "time": {"retention.ms": DAY},
    "size": {},
    "asked": {},
    "compact": {"cleanup.policy": "compact", "max.message.bytes": 50_000},
}
KINDS = tuple(_CONFIG)


class FullDiskCase(NamedTuple):
    """Housekeeping of one kind that begins when so many pages are free."""

    pages: int
    kind: str
    reserved: bool = True
    """Whether there is a reserve to give up."""
    reported: int | None = None
    """The free space that the file system reports, if not the real one; for a model only."""


def _transact(self: Any, step: Any) -> Any:
    """A commit on the model of a disk."""
    files = self._files
    if isinstance(files, SmallDiskFiles) and files.room is not None and files.room < 2 * PAGE:
        raise DiskFullError("the model of a disk is full", errno=errno.ENOSPC)
    return _real(self, step)


_real = kv.LmdbStore.transact_locked


def check_full_disk_case(case: FullDiskCase, *, directory: Path, disk: Disk | None) -> int:
    """Run housekeeping on a full disk; return how many bytes smaller the log is afterwards."""
    root = (disk.path if disk else directory) / f"root-{os.getpid()}"
    shutil.rmtree(root, ignore_errors=True)
    end = forks.run(lambda: _keep(root, case, disk))
    if disk:
        disk.free()
    shutil.rmtree(root, ignore_errors=True)
    return int(end.result())


def _keep(root: Path, case: FullDiskCase, disk: Disk | None) -> int:
    with mock.patch.object(kv.LmdbStore, "transact_locked", _transact):
        return _Life(root, case, disk).run()


class _Life:
    """A log that fills a disk, and is freed again."""

    def __init__(self, root: Path, case: FullDiskCase, disk: Disk | None) -> None:
        self.case, self.disk, self.clock = case, disk, ManualClock()
        files = Files if disk else SmallDiskFiles
        self.log = embedlog.open(root, clock=self.clock, maintenance=False, files=files)
        self.files: Any = self.log.root.context.files
        config: dict[str, object] = {
            "retention.ms": -1,
            "segment.bytes": SEGMENT,
            "delete.retention.ms": 0,
        }
        self.log.create_topic("t", config=config | _CONFIG[case.kind])
        self.part = self.log.partition("t", 0)
        self.acked: dict[int, bytes] = {}
        """The first value of each batch that was acknowledged, by its offset."""
        self.last: dict[bytes, bytes] = {}

    def run(self) -> int:
        if self.case.reserved:
            self.log.housekeeping.run()
            assert self.log.root.context.reserve.held() > 0
        for _ in range(120):
            self.append()
        self.leave(self.case.pages)
        self.fill()
        before = self.part.size_bytes()
        self.work()
        self.check()
        freed = before - self.part.size_bytes()
        if self.case.reserved:
            assert freed > 0, "nothing became free"
            # By themselves, with the same handle, at the same offset.
            forks.until(self.try_to_append)
            assert self.log.root.context.reserve.short is False
        self.free()
        forks.until(self.try_to_append)
        self.check()
        self.log.housekeeping.run()
        self.check()
        assert self.log.root.context.reserve.held() > 0, "the reserve is not there again"
        self.log.close()
        return freed

    def append(self) -> None:
        number, end = len(self.acked), self.part.tail().log_end_offset
        keys = [b"%d" % ((number * ROWS + row) % KEYS) for row in range(ROWS)]
        values = [b"%d-%d" % (number, row) + RECORD for row in range(ROWS)]
        encoded_batch = batch.encode_lists(values, keys, START + number)
        receipt = self.part.append([encoded_batch])[0]
        assert receipt.base_offset == end
        self.acked[end] = values[0]
        self.last.update(zip(keys, values, strict=True))

    def try_to_append(self) -> bool:
        try:
            self.append()
        except DiskFullError:
            return False
        return True

    def leave(self, pages: int) -> None:
        if self.disk:
            self.disk.leave(pages)
        else:
            self.files.room = pages * PAGE
            self.files.reported = self.case.reported

    def free(self) -> None:
        if self.disk:
            self.disk.free()
        else:
            self.files.room = 12 << 20

    def fill(self) -> None:
        """Append until the disk is full; then no append succeeds."""
        for _ in range(1000):
            try:
                self.append()
            except DiskFullError:
                break
        end = self.part.end_offset()
        try:
            self.append()
        except DiskFullError:
            assert self.part.end_offset() == end

    def work(self) -> None:
        """Run one kind of housekeeping by hand, with the space that is free."""
        steps: dict[str, Callable[[], object]] = {
            "time": self.by_time,
            "size": self.by_size,
            "asked": self.by_request,
            "compact": self.by_key,
        }
        try:
            steps[self.case.kind]()
        except DiskFullError:
            if self.case.reserved:
                raise

    def by_time(self) -> None:
        self.clock.advance(2 * DAY)
        self.log.housekeeping.run()

    def by_size(self) -> None:
        self.log.root.context.reserve.used_by(
            lambda: self.log.alter_topic("t", {"retention.bytes": 200_000})
        )
        self.log.housekeeping.run()

    def by_request(self) -> None:
        self.log.delete_records({TopicPartition("t", 0): self.part.end_offset() // 2})

    def by_key(self) -> None:
        done = self.log.housekeeping.compact("t", force=True)[0]
        if not done.segments_before and self.case.reserved:
            raise AssertionError(done.why)

    def check(self) -> None:
        """Check that no acknowledged record is lost, except those that were to be deleted."""
        assert self.log.housekeeping.verify() == []
        start = self.part.start_offset()
        records = {record.offset: record for record in self.log.topic("t")}
        if self.case.kind == "compact":
            assert dict(self.log.topic("t").items()) == self.last
            return
        assert sorted(records) == list(range(start, self.part.end_offset()))
        for offset, value in self.acked.items():
            assert offset < start or records[offset].value == value
