"""Power cuts as cases: record a workload, cut it everywhere, and check what is left."""

from __future__ import annotations

import random
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from support.case_workers import ENOUGH, Outcome, Progress
from support.durability_check import check, promised, recovered
from support.faulty_files import scratch_directory
from support.power_cut import Image, Recording, materialise
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
        _check_states(recording, case, case.limit, scratch / "after", outcome, progress, case.seed)


def cut_the_recovery(case: Cut, outcome: Outcome, progress: Progress) -> None:
    """Recover a state, go on for a while, cut that too, and recover again (P6)."""
    rng = random.Random(case.seed)
    with scratch_directory() as scratch:
        recording = record(scratch / "first", case.seed, case.steps, case.synced, case.uniform)
        images = list(recording.states(limit=400, seed=case.seed, per_cut=8))
        each = 25
        for image in rng.sample(images, min(len(images), case.limit // each)):
            directory = scratch / "second"
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            _without_impossible(image)
            materialise(image, directory)
            progress.report(f"the first recovery of {image.explain()}")
            again = _record_recovery(directory, image, case, rng)
            _check_states(
                again,
                case,
                each,
                scratch / "after",
                outcome,
                progress,
                (case.seed, image.key),
                image.notes,
            )
            if len(outcome.findings) >= ENOUGH:
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


def _check_states(
    recording: Recording,
    case: Cut,
    limit: int,
    directory: Path,
    outcome: Outcome,
    progress: Progress,
    key: Any,
    before: list[Any] | None = None,
) -> None:
    directory.mkdir(exist_ok=True)
    previous = None
    for number, image in enumerate(recording.states(limit, case.seed, 24)):
        progress.report(f"state {number} of {image.explain()}")
        _without_impossible(image)
        materialise(image, directory, previous)
        previous = image
        notes = [*(before or ()), *image.notes]
        outcome.count += 1
        outcome.keys.add((key, image.key, len(notes)))
        _guarded(lambda n=number, told=notes: check(directory, told, n), case, image, outcome)
        if len(outcome.findings) >= ENOUGH:
            return


def _without_impossible(image: Image) -> None:
    """The record keeps no order of what is volatile, but the format file is there before it."""
    if "embedlog.toml" not in image.files:
        for name in [name for name in image.files if name.startswith(("locks/", "live/", "wake"))]:
            del image.files[name]
        image.directories[:] = [name for name in image.directories if name not in ("locks", "live")]


def _guarded(work: Callable[[], None], case: Cut, image: Image, outcome: Outcome) -> None:
    try:
        work()
    except Exception:  # noqa: BLE001 - whatever it is, it is what this state leads to
        trace = traceback.format_exc().splitlines()
        told = "\n".join([f"{case}:", *trace[-12:], image.explain()])
        outcome.findings.append(told)
