"""Power cuts of a program: record it, cut the power everywhere, and check what is left."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from embedlog.api import Log
from support import journal_check
from support.case_workers import Outcome, Progress
from support.clock import ManualClock
from support.faulty_files import FaultyFiles, after_reboot, scratch_directory
from support.log_programs import Entry, ProgramProcess, power_cut_program
from support.power_cut import Image, Recording, materialise, materialised, remove_impossible
from support.roots import abandon, open_root
from support.tiers import choose


class Recorder:
    """Makes the files of one recording, in which a log may be closed and opened again."""

    def __init__(self, boot: str = "the first", notes: Iterable[Entry] = ()) -> None:
        self.boot = boot
        self.notes: list[Entry] = list(notes)
        """What was noted, before the recording too."""
        self._files: FaultyFiles | None = None

    def __call__(self, path: str | os.PathLike[str], **options: Any) -> FaultyFiles:
        before = self._files
        files = FaultyFiles(path, boot=self.boot, record=before is None, **options)
        if before is not None:
            files._record = before._record
            # Numbers of descriptors that are closed now belong to other files.
            files._recorded().inodes.clear()
        self._files = files
        return files

    def reboot(self) -> None:
        """Let the next files be those of another boot."""
        self.boot += "'"

    def put(self, *what: Any) -> None:
        """Note an entry; one before the first files is no part of the recording."""
        self.notes.append(list(what))
        if self._files is not None:
            self._files.note(list(what))

    def recording(self) -> Recording:
        assert self._files is not None
        return self._files.recording()


class Cut(NamedTuple):
    """One recorded program, and how many states of it to look at."""

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
        recording = _record(scratch / "first", case)
        images = materialised(recording.states(case.limit, case.seed), scratch / "after")
        check = partial(_check, scratch / "after", [])
        check_states(images, (case, case.seed), check, outcome, progress)


def cut_the_recovery(case: Cut, outcome: Outcome, progress: Progress) -> None:
    """Recover a state, go on for a while, cut that too, and recover again (P6)."""
    rng = random.Random(case.seed)
    with scratch_directory() as scratch:
        recording = _record(scratch / "first", case)
        images = list(recording.states(limit=choose(test=60, all=400), seed=case.seed, per_cut=8))
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


def _record(path: Path, case: Cut) -> Recording:
    """Record a program in an empty directory."""
    recorder = Recorder()
    process = ProgramProcess(path, journal=recorder, files=recorder, clock=ManualClock())
    try:
        process.run(power_cut_program(case.seed, case.steps, case.synced, case.uniform))
        return recorder.recording()
    finally:
        if process.log is not None:
            abandon(process.log.root)


def _record_recovery(directory: Path, image: Image, case: Cut, rng: random.Random) -> Recording:
    """Record what follows a power cut; first of all which sends it left."""
    recorder = Recorder("the second", image.notes)
    process = ProgramProcess(
        directory, journal=recorder, files=recorder, first_send=100, clock=ManualClock()
    )
    try:
        process.do(("open", "os"))
        found = journal_check.check(process.log, image.notes, goes_on=False, power_cut=True)
        topics = {topic: process.log.root.partitions(topic) for topic in process.log.topics()}
        recorder.put("recovered", topics, [(*part, sends) for part, sends in found.items()])
        seed, steps = rng.randrange(1 << 30), rng.randrange(4)
        known = topics or None
        process.run(power_cut_program(seed, steps, case.synced, case.uniform, known)[1:])
        return recorder.recording()
    finally:
        if process.log is not None:
            abandon(process.log.root)


def _check(directory: Path, notes_before: list[Entry], number: int, image: Image) -> None:
    """Open the root that a power cut left, and check that it keeps the promises."""
    boot = f"boot {number}"
    root = open_root(directory, files=after_reboot(boot))
    try:
        journal_check.check(Log(root), [*notes_before, *image.notes], power_cut=True)
        ends = _ends(root)
    finally:
        abandon(root)
    if number % 8:
        return
    # The next process finds the same, and so does the one after a clean close.
    for again in (boot if number % 16 else f"{boot} again", boot):
        root = open_root(directory, files=after_reboot(again))
        try:
            assert Log(root).housekeeping.verify() == []
            assert _ends(root) == ends
        finally:
            root.close()


def _ends(root: Any) -> dict[tuple[str, int], tuple[int, int]]:
    """Return the end of each partition, and how many records it has."""
    log = Log(root)
    keys = [(topic, n) for topic in root.topics() for n in range(root.partitions(topic))]
    return {
        key: (log.partition(*key).end_offset(), len(journal_check.rows(log, *key))) for key in keys
    }
