"""A random attack on a log over several directories, each on a disk of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import forks
from support.faulty_files import scratch_directory
from support.forks import tell
from support.loop_disks import loop_disks
from support.mutants import Behaviour, Change
from support.replica_disks import DiskRun, as_text, check_replica_disks, nightly_case
from support.replicas import notice
from support.tiers import choose

import embedlog
from embedlog.replication import catch_up
from embedlog.replication import root as replicated_root
from embedlog.replication.files import ReplicatedFiles


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


SEEDS = choose(all=[1, 2, 3, 4], nightly=range(40))
"""In the tier `nightly` they take half an hour on two idle cores."""


@pytest.mark.tier("all")
@pytest.mark.parametrize("seed", SEEDS)
def test_disks_power_and_programs_fail_and_no_acknowledged_record_is_lost(
    scratch: Path, seed: int
) -> None:
    """Nor doubled or reordered, whatever an administrator does meanwhile; all copies are equal.

    What was flushed survives the power cuts; of the rest, the end of a partition may be lost.
    Without two of three disks writes are refused until one of them is back, with what it had or
    empty.  Half of the runs have two copies of each partition; then one disk fails at a time.  No
    call takes longer than `LONGEST_SECONDS`; the output has the longest of each program.
    """
    faults = 10
    case = nightly_case(seed, faults)
    done = check_replica_disks(case, scratch)
    tell(f"seed {seed}: {as_text(done)}")
    assert sum(done[kind] for kind in case.kinds) >= faults
    assert done["kills"] + done["stops"] > 0
    assert done["power cuts"] > 0 or case.power_cuts < 1
    assert done["acknowledged"] > 10 * faults


def _sync_leader(files: ReplicatedFiles, fd: int, *_: Any, **__: Any) -> None:
    directory, copy = files.copies(fd)[0]
    directory.files.sync(copy)


BUGS = {
    "a copy joins the ISR before it is flushed": Change(
        "embedlog.replication.mend:SegmentCopy.close", {"files.sync(fd)": "..."}
    ),
    "the recovery point moves past what followers have flushed": Behaviour(
        "embedlog.replication.files:ReplicatedFiles.sync", _sync_leader
    ),
}


@pytest.mark.tier("all")
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_that_only_power_cuts_show_is_found(scratch: Path, bug: str) -> None:
    """One of two copies does not come back after the power cut, so that the other must be whole."""

    def find() -> None:
        BUGS[bug]()
        for seed in range(4):
            directory = scratch / str(seed)
            directory.mkdir()
            kinds = ("replaced", "unmounted")
            case = DiskRun(6, kinds, copies=2, both=0.0, power_cuts=0.8, seed=seed)
            check_replica_disks(case, directory)

    error = forks.run(find, patience=400).error or ""
    tell(f"{bug}: {error}")
    assert "_compare_at_boot" in error, error or "no check found it"


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
            assert replicated_root.try_bring_back(log.root) == []
            assert list(mounted.iterdir()) == []
            mount()
            assert replicated_root.try_bring_back(log.root) == [2]
            catch_up.replicate(log.root)
            assert log.housekeeping.verify() == log.housekeeping.verify(replicas=True) == []
    finally:
        unmount()
