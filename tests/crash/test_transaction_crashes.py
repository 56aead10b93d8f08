"""A transaction that is killed, fails or loses power: outputs and positions move together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.faulty_files import FALLIBLE
from support.faulty_roots import COMPANY, Acknowledge, Case, PublishedFaults
from support.roots import encoded, healthy, no_stray_files, values
from support.staged_files import stage
from support.tiers import choose, sample

from embedlog.config import TopicConfig
from embedlog.consumer.open_group import open_group
from embedlog.errors import EmbedlogError, StorageError
from embedlog.groups import offsets as group_offsets
from embedlog.keyspace import PENDING_OFFSETS
from embedlog.partition import checkpoint, journal
from embedlog.publish import live_commit, staging, transaction
from embedlog.publish.transaction import GroupOffsets
from embedlog.record import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition
from embedlog.root.root import Root

INPUTS = [TopicPartition("in", number) for number in range(2)]
COUNT = 4
"""Transactions; each reads a record of both inputs."""
OUTPUTS = {"out": 3, "audit": 1}
"""How many batches each writes to a topic."""


def outputs_of(number: int, topic: str) -> list[bytes]:
    return [b"t%d %s %d" % (number, topic.encode(), row) for row in range(OUTPUTS[topic])]


def after(number: int) -> bytes:
    """Return the value that another writer appends after a transaction."""
    return b"n%d" % number


def position(root: Root) -> int:
    """Return how many transactions the group has committed; the same in both partitions."""
    committed = open_group(root, "g").committed(INPUTS)
    found = {0 if row is None else row.position.offset for row in committed.values()}
    assert len(found) == 1, f"a part of the positions moved: {found}"
    return found.pop()


def offsets_of(root: Root, number: int) -> GroupOffsets:
    group = open_group(root, "g")
    rows = group.encode(dict.fromkeys(INPUTS, OffsetAndMetadata(number)))
    return GroupOffsets(group, ConsumerGroupMetadata("g"), rows)


def append(root: Root, number: int, durability: str) -> None:
    root.partition("out", 0).append([encoded(after(number))], durability=durability)


def done(root: Root) -> int:
    """Return how many transactions are there; fail if outputs and positions differ."""
    committed = position(root)  # First: it finishes what a killed process has committed.
    for topic in OUTPUTS:
        expected = [
            value for number in range(1, committed + 1) for value in outputs_of(number, topic)
        ]
        content = [value for value in values(root.partition(topic, 0)) if value[:1] == b"t"]
        assert content == expected, f"{topic} at position {committed}: {content}"
    return committed


class TransactionFaults(PublishedFaults):
    """Transactions, each followed by an append of another writer."""

    parts: ClassVar = [*INPUTS, ("out", 0), ("audit", 0)]

    def transform(self, root: Root, number: int) -> None:
        """Publish the outputs of a transaction, and commit its positions."""
        staged = stage(root, **{f"{topic}_0": outputs_of(number, topic) for topic in OUTPUTS})
        try:
            transaction.publish(root, [staged], offsets=offsets_of(root, number))
        finally:
            staging.remove(root.context.files, [staged])

    def fill(self, root: Root) -> None:
        """Create the topics; the outputs of two transactions fill a segment."""
        root.create_topic("in", 2, TopicConfig())
        small = {"segment.bytes": 2500, "index.interval.bytes": 500}
        root.create_topic("out", 1, TopicConfig.parse(small))
        root.create_topic("audit", 1, TopicConfig())
        for part in INPUTS:
            for number in range(COUNT):
                root.partition(*part).append([encoded(b"%d" % number)], durability="fsync")
        root.flush()

    def work(self, root: Root, durability: str, acknowledge: Acknowledge) -> EmbedlogError | None:
        """Transform, append, and save what was committed, as a heartbeat does."""
        try:
            for number in range(1, COUNT + 1):
                self.transform(root, number)
                acknowledge(f"t{number}")
                append(root, number, durability)
                acknowledge(f"n{number}")
                open_group(root, "g").checkpoint(always=number == 2)
        except EmbedlogError as error:
            return error
        return None

    def check_between(self, root: Root, acked: set[str]) -> None:
        """What was acknowledged is there."""
        there = {f"t{number}" for number in range(1, done(root) + 1)}
        assert acked <= there | {value.decode() for value in values(root.partition("out", 0))}

    def check_state(self, root: Root, acked: set[str], durability: str) -> None:
        """With "os", what another writer appended may be lost, and what was committed in `live`."""
        lost = {"os": "n"} if type(self) is TransactionFaults else {"os": "tn", "mixed": "t"}
        kept = {step for step in acked if step[0] not in lost.get(durability, "")}
        super().check_state(root, kept, durability)

    def check_done(self, root: Root, durability: str) -> None:
        """Who goes on at the positions ends with each output once."""
        for number in range(done(root) + 1, COUNT + 1):
            self.transform(root, number)
            assert done(root) == number
        for part in self.parts:
            with root.partition(*part).owned():
                pass  # A roll of a killed writer is finished.
        assert not root.context.live.read(lambda txn: list(PENDING_OFFSETS.keys(txn)))
        assert healthy(root)
        assert no_stray_files(root)

    def check_reopened(self, root: Root) -> None:
        """Everything is still there."""
        assert done(root) == COUNT


class LiveCommitFaults(TransactionFaults):
    """The same for transactions that are committed in `live`.

    The durability is that of the log: ``"mixed"`` is ``"os"``, with appends that are flushed.
    """

    def transform(self, root: Root, number: int) -> None:
        """Commit a transaction, again if it is not known whether that succeeded."""
        batches = [
            ((topic, root.topic(topic).id, 0), encoded(*outputs_of(number, topic)))
            for topic in OUTPUTS
        ]
        version = 1, time.monotonic_ns()
        done = live_commit.commit(
            root,
            batches,
            "name",
            version,
            conditions=(),
            offsets=offsets_of(root, number),
            report=lambda published: None,
        )
        assert done is True, "it is small enough, and nobody fences it"

    def work(self, root: Root, durability: str, acknowledge: Acknowledge) -> EmbedlogError | None:
        """As above, in a log with this durability."""
        root.context.durability = "fsync" if durability == "fsync" else "os"
        return super().work(root, "os" if durability == "os" else "fsync", acknowledge)

    def check_failure(
        self, root: Root, error: EmbedlogError | None, number: int, failed: bool, acked: set[str]
    ) -> None:
        """With "os", a failed flush may have lost what was committed before it.

        A flush that fails for a partition of somebody else is logged, so the error may be of what
        failed next.
        """
        if root.context.durability == "fsync" or not failed:
            self.check_between(root, acked)
            assert isinstance(error, StorageError) or not failed, error

    def check_done(self, root: Root, durability: str) -> None:
        """Nothing waits for a checkpoint after the last one."""
        super().check_done(root, durability)
        assert not root.context.state.read(checkpoint.points_of)


FAULTS = {"published": TransactionFaults(), "in live": LiveCommitFaults()}
MODES = {"published": ("os", "fsync"), "in live": ("os", "fsync", "mixed")}
WAYS = pytest.mark.parametrize("way", list(FAULTS))


def kills(directory: Path, way: str, company: bool, step: int) -> list[Case]:
    """Return kills at one in ``step`` operations, in all modes."""
    return [
        Case(number, "after", company, durability=mode)
        for shift, mode in enumerate(MODES[way])
        for number in range(shift, sum(FAULTS[way].count(directory, mode).values()), step)
    ]


def faults(directory: Path, way: str, step: int) -> list[Case]:
    """Return failures of one in ``step`` operations, in all modes."""
    counts = {mode: FAULTS[way].count(directory, mode) for mode in MODES[way]}
    return [
        Case(n, ("once", "forever")[n % 2], durability=mode)
        for shift, mode in enumerate(MODES[way])
        for n in range(shift, sum(counts[mode].get(kind, 0) for kind in FALLIBLE), step)
    ]


@WAYS
@COMPANY
def test_outputs_and_positions_move_together_whenever_the_process_is_killed(
    directory: Path, company: bool, way: str
) -> None:
    """P1, G22: whoever goes on at the positions ends with each output once."""
    cases = sample(kills(directory, way, company, choose(test=4, all=1)), 4)
    assert FAULTS[way].check_kills(directory, cases) >= choose(test=2, all=100)


@WAYS
def test_outputs_and_positions_move_together_whatever_fails(directory: Path, way: str) -> None:
    """P8, P9, P10: any operation, once or from then on."""
    cases = sample(faults(directory, way, choose(test=4, all=1)), 4)
    assert FAULTS[way].check_faults(directory, cases) >= choose(test=1, all=50)


@pytest.mark.parametrize(
    ("way", "durability"),
    sample([*((way, mode) for way, modes in MODES.items() for mode in modes)], 2),
)
def test_outputs_and_positions_move_together_wherever_the_power_is_cut(
    directory: Path, way: str, durability: str
) -> None:
    """P4: what is published is flushed; what is committed in `live` is there as a whole."""
    limit, faults = choose(test=10, all=400, nightly=10_000), FAULTS[way]
    place = directory / way
    place.mkdir(exist_ok=True)
    recording = faults.record(place, durability)
    assert faults.check_power_cuts(recording, limit, place, durability) >= min(limit, 300) * 0.8


# Planted bugs: what the checks above are worth


def positions_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positions are committed, and then the outputs."""
    carry_out = transaction._carry_out

    def wrong(context: Any, plans: Any, target: Any, offsets: Any, *rest: Any) -> Any:
        offsets.group.context.live.write(
            lambda txn: group_offsets._put(txn, offsets.group.key, offsets.rows)
        )
        return carry_out(context, plans, target, None, *rest)

    monkeypatch.setattr(transaction, "_carry_out", wrong)


def outputs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs are published, and then the positions."""
    carry_out = transaction._carry_out

    def wrong(context: Any, plans: Any, target: Any, offsets: Any, *rest: Any) -> Any:
        before = carry_out(context, plans, target, None, *rest)
        offsets.group.context.live.write(
            lambda txn: group_offsets._put(txn, offsets.group.key, offsets.rows)
        )
        return before

    monkeypatch.setattr(transaction, "_carry_out", wrong)


def a_journal_without_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finishes a publication moves the ends only."""
    monkeypatch.setattr(group_offsets, "journaled", lambda txn, group, number: {})


def a_commit_without_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut the outputs are there, and the positions are older."""
    monkeypatch.setattr(group_offsets.CHECKPOINTS, "put", lambda *_, **__: None)


def a_finish_without_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who needs the positions moves them only."""
    finish = journal.finish_publication
    monkeypatch.setattr(
        journal,
        "finish_publication",
        lambda context, number, partners, group: finish(context, number, (), group),
    )


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "bug", [positions_first, outputs_first, a_journal_without_positions, a_finish_without_outputs]
)
def test_kills_find_what_was_planted(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """A checker that never found anything proves nothing."""
    cases = kills(directory, "published", True, 1)
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        FAULTS["published"].check_kills(directory, cases, enough=1)


@pytest.mark.tier("all")
@pytest.mark.parametrize("bug", [a_commit_without_checkpoints, positions_first])
def test_power_cuts_find_what_was_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """The same for what only the disk shows."""
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        faults = FAULTS["published"]
        faults.check_power_cuts(faults.record(tmp_path, "fsync"), 400, tmp_path, "fsync")
