"""Power cuts of a workload: record it, cut the power everywhere, and check what is left."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from support.case_workers import Outcome, Progress
from support.durability_check import check, promised, recovered
from support.faulty_files import scratch_directory
from support.power_cut import Image, Recording, materialise, materialised, remove_impossible
from support.roots import abandon
from support.workload import Recorder, Workload, record


class Cut(NamedTuple):
    """One recorded workload, and how many states of it to look at."""

    seed: int
    limit: int
    synced: float
    """The share of appends under ``durability="fsync"``."""
    steps: int = 20
    uniform: bool = False
    """All batches alike: one that is lost leaves room for exactly one."""


def cut_everywhere(case: Cut, outcome: Outcome, progress: Progress) -> None:
    """Check that every state a power cut may leave keeps what was promised (P4, P5)."""
    with scratch_directory() as scratch:
        recording = record(scratch / "first", case.seed, case.steps, case.synced, case.uniform)
        images = materialised(recording.states(case.limit, case.seed), scratch / "after")
        check = partial(_check, scratch / "after", [])
        check_states(images, (case, case.seed), check, outcome, progress)


def cut_the_recovery(case: Cut, outcome: Outcome, progress: Progress) -> None:
    """Recover a state, go on for a while, cut that too, and recover again (P6)."""
    rng = random.Random(case.seed)
    with scratch_directory() as scratch:
        recording = record(scratch / "first", case.seed, case.steps, case.synced, case.uniform)
        images = list(recording.states(limit=400, seed=case.seed, per_cut=8))
        states_per_image = 25
        for image in rng.sample(images, min(len(images), case.limit // states_per_image)):
            directory = scratch / "second"
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            remove_impossible(image)
            materialise(image, directory)
            progress.report(f"the first recovery of {image.explain()}")
            recovery = _record_recovery(directory, image, case, rng)
            after = materialised(recovery.states(states_per_image, case.seed), scratch / "after")
            check = partial(_check, scratch / "after", image.notes)
            check_states(after, (case, image.key), check, outcome, progress)
            if outcome.enough:
                return


def _check(directory: Path, notes_before: list[Any], number: int, image: Image) -> None:
    check(directory, [*notes_before, *image.notes], number)


def check_states(
    images: Iterable[Image],
    key: tuple[Any, ...],
    check: Callable[[int, Image], None],
    outcome: Outcome,
    progress: Progress,
) -> None:
    """Check states of the disk until there are enough findings; the key names their recording."""
    for number, image in enumerate(images):
        progress.report(f"state {number} of {image.explain()}")
        outcome.count += 1
        outcome.keys.add((key, image.key, len(image.notes)))
        with outcome.finding(lambda image=image: f"{key}: {image.explain()}"):
            check(number, image)
        if outcome.enough:
            return


def _record_recovery(directory: Path, image: Image, case: Cut, rng: random.Random) -> Recording:
    recorder = Recorder(boot="the second")
    recorder.notes = list(image.notes)
    workload = None
    try:
        seed = rng.randrange(1 << 30)
        workload = Workload(directory, recorder, seed, case.synced, case.uniform)
        promise = promised(image.notes)
        recorder.note("recovered", recovered(workload.root, promise))
        workload.resume(promised(recorder.notes))
        for _ in range(rng.randrange(4)):
            workload.step()
        return recorder.recording()
    finally:
        if workload is not None:
            abandon(workload.root)
