"""Housekeeping goes on where a disk is full, and makes room."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from support import forks, full_disk
from support.forks import tell
from support.full_disk_housekeeping import KINDS, FullDiskCase, check_full_disk_case
from support.patience import patient
from support.resource_limits import NOBODY
from support.tiers import choose, sample

import embedlog
from embedlog import batch, kv
from embedlog.errors import DiskFullError
from embedlog.files import Files


def cases(count: int, step: int) -> list[FullDiskCase]:
    every = [
        FullDiskCase(number * step, KINDS[number % 4], number // 4 % 4 != 3)
        for number in range(count)
    ]
    return sample(every, 3)


def test_a_full_disk_is_freed_by_housekeeping(directory: Path) -> None:
    """P10: by time, by size, by request and by key; nothing is lost, and appends go on."""
    with full_disk.small_disk(directory / "disk") as disk:
        if disk is None:
            pytest.skip("mounting a tmpfs is not allowed here; the model of one is tested below")
        freed = forks.spread(
            cases(24, 3), check_full_disk_case, workers=1, directory=directory, disk=disk
        )
    tell(f"{len(freed)} sizes, {sum(size > 0 for size in freed)} times some was freed")


@pytest.mark.parametrize("reported", choose(test=[0], all=[None, 0, 1 << 40]))
def test_a_model_of_a_full_disk_is_freed_whatever_is_reported_as_free(
    directory: Path, reported: int | None
) -> None:
    """P10: to the byte, wherever nothing may be mounted; also where the free space is wrong.

    A count leaves out what ext4 reserves for root, and knows of no quota.
    """
    reporting = [case._replace(reported=reported) for case in cases(24, 3)]
    freed = forks.spread(reporting, check_full_disk_case, directory=directory, disk=None)
    tell(f"{len(freed)} sizes, {sum(size > 0 for size in freed)} times some was freed")


def _refill(root: Path) -> int:
    """Append for a while to a disk that gets full, while housekeeping runs in the background."""
    log = embedlog.open(root, maintenance={"log.retention.check.interval.ms": 1000})
    log.housekeeping.run()
    part, count, full_for = log.partition("t", 0), 0, 0
    until = time.monotonic() + patient(60)
    while full_for < 3 or count < full_for * 20:
        assert time.monotonic() < until, f"{count} records, full {full_for} times"
        encoded = batch.encode_lists([b"%d" % count + b"." * 100_000], None, 1)
        try:
            assert part.append([encoded])[0].base_offset == count
        except DiskFullError:
            full_for += 1
            forks.until(lambda: _is_room(part), 30)
        else:
            count += 1
    assert log.housekeeping.verify() == []
    log.close()
    return count


def _is_room(part: Any) -> bool:
    try:
        part.context.check_appendable()
    except DiskFullError:
        return False
    return True


def test_appends_go_on_by_themselves_once_the_background_made_room(directory: Path) -> None:
    """P10: with the same handle, at the same offset, as often as the disk gets full."""
    with full_disk.small_disk(directory / "another") as disk:
        if disk is None:
            pytest.skip("mounting a tmpfs is not allowed here")
        with embedlog.open(disk.path / "root", maintenance=False) as log:
            # The records are of 1970, so what is sealed is due at once.
            log.create_topic("t", config={"retention.ms": 1, "segment.bytes": 1 << 20})
        count = forks.call(lambda: _refill(disk.path / "root"))
    tell(f"{count} records through a disk of 16 MiB")


def _error_of_opening(path: Path) -> str:
    try:
        embedlog.open(path, maintenance=False).close()
    except DiskFullError as error:
        return str(error)
    return ""


def test_a_log_is_opened_on_a_full_disk_or_that_is_an_error_and_no_death(directory: Path) -> None:
    """P10: LMDB stores to its lock files through a map, which would be a SIGBUS."""
    with full_disk.small_disk(directory / "opened") as disk:
        if disk is None:
            pytest.skip("mounting a tmpfs is not allowed here")
        root = disk.path / "root"
        assert not forks.call(lambda: _error_of_opening(root))
        locks = [root / name / "lock.mdb" for name in ("state", "live")]
        for lock in locks:  # a page each, as LMDB makes them
            lock.write_bytes(bytes(4096))
            os.truncate(lock, kv.LOCK_BYTES)
        disk.leave(0)
        assert not forks.call(lambda: _error_of_opening(root))
        disk.free()
        assert not forks.call(lambda: _error_of_opening(root))
        for lock in locks:
            lock.unlink()
        disk.leave(0)
        assert "lock.mdb" in forks.call(lambda: _error_of_opening(root))
        disk.free()
        assert not forks.call(lambda: _error_of_opening(root))


@pytest.mark.tier("all")
def test_a_log_of_root_goes_on_where_blocks_are_reserved_for_root(directory: Path) -> None:
    """P10: none are free for other users; appends went into the reserved ones until no more did."""
    with full_disk.ext4_disk(directory / "ext4", reserved_percent=20) as disk:
        if disk is None:
            pytest.skip("mounting an ext4 from a loop device is not allowed here")
        count = forks.call(lambda: _fill_and_compact(disk.path))
    tell(f"{count} records through a disk of 16 MiB")


def _fill_and_compact(path: Path) -> int:
    """Fill the disk three times; each time one round makes room, and appends go on."""
    log = embedlog.open(path / "root", maintenance=False)
    config = {"cleanup.policy": "compact", "segment.bytes": 300_000, "max.message.bytes": 60_000}
    log.create_topic("c", config=config)
    log.housekeeping.run()
    part, count, full_for = log.partition("c", 0), 0, 0
    while full_for < 3:
        encoded = batch.encode_lists([b"%d" % count + b"." * 5000], [b"%d" % (count % 50)], count)
        try:
            assert part.append([encoded])[0].base_offset == count
        except DiskFullError:
            full_for += 1
            status = os.statvfs(path)
            assert status.f_bavail == 0 < status.f_bfree
            log.housekeeping.run()
            forks.until(lambda: _is_room(part), 30)
        else:
            count += 1
    newest = {int(key): int(value.rstrip(b".")) for key, value in log.topic("c").items()}
    assert newest == {number % 50: number for number in range(count - 50, count)}
    assert log.housekeeping.verify() == []
    log.close()
    return count


def test_reserved_blocks_are_free_for_root_and_not_for_others(directory: Path) -> None:
    """What is free is what this process may use."""
    with full_disk.ext4_disk(directory / "reserved", reserved_percent=20) as disk:
        if disk is None:
            pytest.skip("mounting an ext4 from a loop device is not allowed here")
        disk.path.chmod(0o755)
        count = forks.call(lambda: (_reported(disk.path), _reported(disk.path, user=NOBODY)))
        status = os.statvfs(disk.path)
    assert count == (status.f_bfree * status.f_frsize, status.f_bavail * status.f_frsize)


def _reported(path: Path, user: int | None = None) -> int:
    files = Files(path, writable=False)
    if user is not None:
        os.setresuid(user, user, user)
    return files.free_bytes()


@pytest.mark.tier("nightly")
def test_a_thousand_sizes_of_a_full_disk_are_freed(directory: Path) -> None:
    """P10 in full."""
    with full_disk.small_disk(directory / "disk") as disk:
        every = cases(1_000, 1)
        freed = forks.spread(every, check_full_disk_case, workers=1, directory=directory, disk=disk)
        assert len(freed) == 1_000
