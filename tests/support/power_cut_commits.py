"""What a power cut leaves of what a group committed (P4, P5)."""

from __future__ import annotations

import random
import traceback
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from embedlog.config import TopicConfig
from embedlog.consumer import Consumer
from embedlog.groups import offsets
from embedlog.record import TopicPartition
from support.case_workers import ENOUGH, Outcome, Progress
from support.durability_check import Rebooted
from support.faulty_files import scratch_directory
from support.group_consumers import Diary, drained
from support.power_cut import Recording, materialise
from support.roots import abandon, encoded, open_root
from support.workload import Recorder

T0 = TopicPartition("t", 0)


class Commits(NamedTuple):
    """One recorded life of a group, and how many states of it to look at."""

    durability: str
    subscribed: bool
    limit: int
    steps: int = 12
    seed: int = 1


def cut_commits(case: Commits, outcome: Outcome, progress: Progress) -> None:
    """Check what every state a power cut may leave has of the commits."""
    with scratch_directory() as scratch:
        recording = _record(scratch / "first", case)
        after, previous = scratch / "after", None
        after.mkdir()
        for number, image in enumerate(recording.states(case.limit, case.seed, 16)):
            if "embedlog.toml" not in image.files:
                continue
            progress.report(f"state {number} of {image.explain()}")
            materialise(image, after, previous)
            previous = image
            outcome.count += 1
            outcome.keys.add((case, image.key, len(image.notes)))
            try:
                _check(after, image.notes, number, case)
            except Exception:  # noqa: BLE001 - whatever it is, it is what this state leads to
                told = [f"{case}:", *traceback.format_exc().splitlines()[-12:], image.explain()]
                outcome.findings.append("\n".join(told))
            if len(outcome.findings) >= ENOUGH:
                return


def _record(path: Path, case: Commits) -> Recording:
    recorder = Recorder()
    root = open_root(path, files=recorder, durability=case.durability)
    root.create_topic("t", 1, TopicConfig.parse({"segment.bytes": 2000}))
    recorder.note("created")
    log, member = root.partition("t", 0), _consumer(root, case.subscribed)
    dice = random.Random(case.seed)
    for _ in range(case.steps):
        log.append([encoded(*[b"v" * 50] * dice.randint(1, 5))])
        drained(member)
        place = member.position(T0)
        recorder.note("begun", place)
        member.commit()
        recorder.note("done" if case.durability == "fsync" else "volatile", place)
        if dice.random() < 0.2:
            offsets.checkpoint(root.context.live, root.context.state)
            recorder.note("done", place)
    member.close()
    recorder.note("done", place)
    recording = recorder.recording()
    abandon(root)
    return recording


def _consumer(root: Any, subscribed: bool) -> Consumer:
    options: dict[str, Any] = {"auto_offset_reset": "earliest", "enable_auto_commit": False}
    if subscribed:
        member = Consumer(root, group_id="g", **options)
        # So that the poll which joins returns nothing yet.
        member.subscribe(["t"], listener=Diary(assigned=lambda given: member.pause(*given)))
        member.poll(0)
        member.resume(T0)
    else:
        member = Consumer(root, group_id="g", **options)
        member.assign([T0])
    return member


def _check(directory: Path, notes: list[Any], number: int, case: Commits) -> None:
    root = open_root(directory, files=partial(Rebooted, boot=f"boot {number}"))
    try:
        places = {kind: place[0] for kind, *place in notes if place}
        if "t" not in root.topics():
            assert ("created",) not in notes
            return
        end = root.partition("t", 0).end_offset()
        most, least = places.get("begun", 0), min(places.get("done", 0), end)
        assert case.durability == "os" or end >= places.get("done", 0)
        asked = _asked(root)
        assert least <= asked <= min(most, end), f"{asked} is not in {least} to {most}, end {end}"
        member = _consumer(root, case.subscribed)
        place = member.position(T0)
        assert place == asked, f"it begins at {place}, not {asked}; end {end}"
        log = root.partition("t", 0)
        log.append([encoded(b"after")])
        found = [record.offset for record in drained(member)]
        assert found == list(range(asked, end + 1)), f"{found}, from {asked} to {end}"
        assert _asked(root) == asked
        member.commit()
        assert _asked(root) == end + 1
        member.close()
    finally:
        abandon(root)


def _asked(root: Any) -> int:
    consumer = Consumer(root, group_id="g")
    try:
        return consumer.committed(T0) or 0
    finally:
        consumer.close()
