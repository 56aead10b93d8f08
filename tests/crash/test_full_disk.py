"""Housekeeping goes on where a disk is full, and makes room."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import forks, full
from support.cramped import KINDS, Cramped, check_cramped
from support.cruel import scratch_directory
from support.forks import tell
from support.patience import patient

import embedlog
from embedlog import batch
from embedlog.errors import DiskFullError


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with scratch_directory() as path:
        yield path


def cases(count: int, step: int) -> list[Cramped]:
    return [
        Cramped(number * step, KINDS[number % 4], number // 4 % 4 != 3) for number in range(count)
    ]


def test_a_full_disk_is_freed_by_housekeeping(directory: Path) -> None:
    """P10: by time, by size, by request and by key; nothing is lost, and appends go on."""
    with full.small_disk(directory / "disk") as disk:
        if disk is None:
            pytest.skip("mounting a tmpfs is not allowed here; the model of one is tested below")
        check = partial(check_cramped, place=directory, disk=disk)
        freed = forks.spread(cases(24, 3), check, workers=1)
    tell(f"{len(freed)} sizes, {sum(one > 0 for one in freed)} times some was freed")


def test_a_model_of_a_full_disk_is_freed_by_housekeeping(directory: Path) -> None:
    """P10: the same, wherever nothing may be mounted; to the byte."""
    check = partial(check_cramped, place=directory, disk=None)
    freed = forks.spread(cases(24, 3), check)
    tell(f"{len(freed)} sizes, {sum(one > 0 for one in freed)} times some was freed")


def _refill(root: Path) -> int:
    """Append for a while to a disk that gets full, with whoever keeps house beside."""
    log = embedlog.open(root, maintenance={"log.retention.check.interval.ms": 1000})
    log.maintain()
    part, told, full_for = log.partition("t", 0), 0, 0
    until = time.monotonic() + patient(60)
    while full_for < 3 or told < full_for * 20:
        assert time.monotonic() < until, f"{told} records, full {full_for} times"
        one = batch.encode_lists([b"%d" % told + b"." * 100_000], None, 1)
        try:
            assert part.append([one])[0].base_offset == told
        except DiskFullError:
            full_for += 1
            forks.until(lambda: _is_room(part), 30)
        else:
            told += 1
    assert log.verify() == []
    log.close()
    return told


def _is_room(part: Any) -> bool:
    try:
        part.context.check_appendable()
    except DiskFullError:
        return False
    return True


def test_appends_go_on_by_themselves_once_the_background_made_room(directory: Path) -> None:
    """P10: with the same handle, at the same offset, as often as the disk gets full."""
    with full.small_disk(directory / "another") as disk:
        if disk is None:
            pytest.skip("mounting a tmpfs is not allowed here")
        with embedlog.open(disk.path / "root", maintenance=False) as log:
            # The records are of 1970, so what is sealed is due at once.
            log.create_topic("t", config={"retention.ms": 1, "segment.bytes": 1 << 20})
        end = forks.run(lambda: _refill(disk.path / "root"))
        assert end.finding() is None, end.finding()
    tell(f"{end.value} records through a disk of 16 MiB")


@pytest.mark.full
def test_a_thousand_sizes_of_a_full_disk_are_freed(directory: Path) -> None:
    """P10 in full."""
    with full.small_disk(directory / "disk") as disk:
        check = partial(check_cramped, place=directory, disk=disk)
        assert len(forks.spread(cases(1_000, 1), check, workers=1)) == 1_000
