"""Disks of a log over several directories that fail, while many processes use the log."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faulty_files import scratch_directory
from support.forks import tell
from support.loop_disks import FAULTS, loop_disks
from support.replica_disks import DiskRun, as_text, check_replica_disks
from support.replicas import notice
from support.tiers import choose

import embedlog
from embedlog.replication import catch_up, recovery


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory in memory for the images and mount points, on a machine that may mount them."""
    with scratch_directory() as directory:
        try:
            with loop_disks(directory, 1):
                pass
        except OSError as error:
            pytest.skip(f"disks on loop devices cannot be mounted here: {error}")
        yield directory


def run(case: DiskRun, directory: Path) -> Counter[str]:
    done = check_replica_disks(case, directory)
    tell(f"seed {case.seed}: {as_text(done)}")
    assert sum(done[fault] for fault in FAULTS) >= case.faults
    assert done["kills"] + done["stops"] > 0
    assert done["acknowledged"] > 100 * case.faults
    return done


@pytest.mark.parametrize("seed", choose(test=[1], all=[1, 2, 3]))
def test_disks_fail_one_after_another_and_no_acknowledged_record_is_lost(
    scratch: Path, seed: int
) -> None:
    """Nor doubled; commits stay, all copies are equal, and nobody dies of SIGBUS."""
    run(DiskRun(faults=choose(test=2, all=12), both=0.0, seed=seed), scratch)


@pytest.mark.tier("all")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_without_two_of_three_disks_writes_are_refused_until_one_is_back(
    scratch: Path, seed: int
) -> None:
    """Whichever it is, with what it had or empty; running programs then go on."""
    done = run(DiskRun(faults=6, both=1.0, seed=seed), scratch)
    assert done["both"] > 0


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("seed", range(10, 70))
def test_disks_fail_for_hours(scratch: Path, seed: int) -> None:
    """The same with 60 times 40 faults, one or two at once."""
    run(DiskRun(faults=40, kill_pause=0.2 + seed % 3 * 0.2, seed=seed), scratch)


def test_an_empty_mount_point_is_no_new_disk(scratch: Path) -> None:
    """Otherwise the log would be copied to the system's disk; a file system there is filled."""
    paths = [scratch / f"disk{number}" for number in range(3)]
    mounted = paths[1]
    mounted.mkdir()

    def mount() -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", mounted], check=True)

    def unmount() -> None:
        subprocess.run(["umount", "--lazy", mounted], check=True)

    mount()
    try:
        with embedlog.open(paths, maintenance=False) as log:
            log.create_topic("t")
            log.producer().send("t", b"x").result()
            unmount()
            notice(log)
            assert recovery.try_bring_back(log.root) == []
            assert list(mounted.iterdir()) == []
            mount()
            assert recovery.try_bring_back(log.root) == [2]
            catch_up.replicate(log.root)
            assert log.verify() == log.verify(replicas=True) == []
    finally:
        unmount()
