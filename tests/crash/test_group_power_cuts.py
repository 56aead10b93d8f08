"""P4, P5: what a group committed survives a power cut, as far as was promised."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.case_workers import Outcome, Progress, share_out
from support.faulty_files import after_reboot, scratch_directory
from support.group_consumers import RecordingListener, drained
from support.power_cut import Recording, materialised
from support.power_cut_workload import Recorder, check_states
from support.roots import abandon, encoded, open_root
from support.tiers import choose

from embedlog.config import TopicConfig
from embedlog.consumer.consumer import Consumer
from embedlog.groups import offsets
from embedlog.record import TopicPartition

T0 = TopicPartition("t", 0)


class CommitCut(NamedTuple):
    """One recorded life of a group, and how many states of it to check."""

    durability: str
    subscribed: bool
    limit: int
    steps: int = 12
    seed: int = 1


def cut_commits(case: CommitCut, outcome: Outcome, progress: Progress) -> None:
    """Check the commits in every state that a power cut may leave."""
    with scratch_directory() as scratch:
        recording, after = _record(scratch / "first", case), scratch / "after"
        images = materialised(recording.states(case.limit, case.seed, 16), after)
        check_states(
            (image for image in images if "embedlog.toml" in image.files),
            (case,),
            lambda number, image: _check(after, image.notes, number, case),
            outcome,
            progress,
        )


def _record(path: Path, case: CommitCut) -> Recording:
    recorder = Recorder()
    root = open_root(path, files=recorder, durability=case.durability)
    root.create_topic("t", 1, TopicConfig.parse({"segment.bytes": 2000}))
    recorder.put("created")
    log, member = root.partition("t", 0), _consumer(root, case.subscribed)
    dice = random.Random(case.seed)
    for _ in range(case.steps):
        log.append([encoded(*[b"v" * 50] * dice.randint(1, 5))])
        drained(member)
        position = member.position(T0)
        recorder.put("begun", position)
        member.commit()
        recorder.put("done" if case.durability == "fsync" else "volatile", position)
        if dice.random() < 0.2:
            offsets.checkpoint(root.context.live, root.context.state)
            recorder.put("done", position)
    member.close()
    recorder.put("done", position)
    recording = recorder.recording()
    abandon(root)
    return recording


def _consumer(root: Any, subscribed: bool) -> Consumer:
    options: dict[str, Any] = {"auto_offset_reset": "earliest", "enable_auto_commit": False}
    if subscribed:
        member = Consumer(root, group_id="g", **options)
        # So that the poll which joins returns nothing yet.
        member.subscribe(
            ["t"], listener=RecordingListener(assigned=lambda partitions: member.pause(*partitions))
        )
        member.poll(0)
        member.resume(T0)
    else:
        member = Consumer(root, group_id="g", **options)
        member.assign([T0])
    return member


def _check(directory: Path, notes: list[Any], number: int, case: CommitCut) -> None:
    root = open_root(directory, files=after_reboot(f"boot {number}"))
    try:
        positions = {kind: details[0] for kind, *details in notes if details}
        if "t" not in root.topics():
            assert ["created"] not in notes
            return
        end = root.partition("t", 0).end_offset()
        most, least = positions.get("begun", 0), min(positions.get("done", 0), end)
        assert case.durability == "os" or end >= positions.get("done", 0)
        committed = _committed(root)
        assert least <= committed <= min(most, end), (
            f"{committed} is not in {least} to {most}, end {end}"
        )
        member = _consumer(root, case.subscribed)
        position = member.position(T0)
        assert position == committed, f"it begins at {position}, not {committed}; end {end}"
        log = root.partition("t", 0)
        log.append([encoded(b"after")])
        read_offsets = [record.offset for record in drained(member)]
        assert read_offsets == list(range(committed, end + 1)), (
            f"{read_offsets}, from {committed} to {end}"
        )
        assert _committed(root) == committed
        member.commit()
        assert _committed(root) == end + 1
        member.close()
    finally:
        abandon(root)


def _committed(root: Any) -> int:
    consumer = Consumer(root, group_id="g")
    try:
        return consumer.committed(T0) or 0
    finally:
        consumer.close()


EACH = choose(test=15, all=150)
"""States of each life of a group."""


@pytest.mark.parametrize(
    "states",
    [2 * EACH, pytest.param(6_000, marks=pytest.mark.tier("nightly"))],
    ids="states={}".format,
)
@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_commits_survive_a_power_cut(durability, states, record_property):
    """P4: with fsync, each that returned; P5: with os, those of the last checkpoint, and never
    one past the end of the log; and the group reads on from there."""
    lives = [
        (seed, subscribed) for seed in range(states // (2 * EACH)) for subscribed in (True, False)
    ]
    cases = [CommitCut(durability, subscribed, EACH, seed=seed) for seed, subscribed in lives]
    outcome = share_out(cut_commits, cases)
    record_property("states", str(outcome))

    assert not outcome.findings, str(outcome)
    assert outcome.distinct >= states * 0.8, f"-> {outcome.distinct} states"
