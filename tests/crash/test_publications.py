"""A publication that is killed, fails or loses power anywhere: all of it or nothing, and once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
from support.faulty_files import FALLIBLE
from support.faulty_roots import Acknowledge, Case, PublishedFaults
from support.roots import encoded, healthy, no_stray_files, values
from support.staged_files import escalation, publish, stage
from support.tiers import choose, sample

from embedlog.config import TopicConfig
from embedlog.errors import EmbedlogError
from embedlog.partition import PartitionLog, journal
from embedlog.publish import app_versions, staging, transaction
from embedlog.publish.transaction import Publication
from embedlog.root.root import Root

CONFIG: dict[str, tuple[int, dict[str, object]]] = {
    "a": (2, {}),
    # So small that a publication takes several segments.
    "b": (1, {"segment.bytes": 1700, "index.interval.bytes": 500}),
    # Empty before the first publication.
    "c": (1, {}),
}
VERSIONS = {
    1: {"a_0": 3, "a_1": 1, "b_0": 7},
    2: {"a_1": 2, "b_0": 1, "c_0": 2},
    3: {"a_0": 1, "b_0": 5, "c_0": 1},
}
"""The number of batches of each publication for each partition."""
ESCALATED = 2
"""The publication that holds the lock of the log."""
DAY = 86_400_000
PARTS = ("a_0", "a_1", "b_0", "c_0")
EVERYTHING = [f"{kind}{version}" for version in VERSIONS for kind in "pn"]
"""The steps of the work in order: publication 1, the append after it, publication 2..."""


def values_for(version: int, part: str) -> list[bytes]:
    """Return the values of a publication for a partition."""
    return [b"p%d %s %d" % (version, part.encode(), row) for row in range(VERSIONS[version][part])]


def value_after(version: int) -> bytes:
    """Return the value that is appended after a publication."""
    return b"n%d" % version


def send(root: Root, version: int, durability: str) -> Any:
    """Stage a publication and publish it, as a task and its driver do; one of them escalates."""
    staged = stage(root, **{part: values_for(version, part) for part in VERSIONS[version]})
    try:
        with escalation() if version == ESCALATED else nullcontext():
            return publish(root, [staged], version, durability=durability)
    finally:
        staging.remove(root.context.files, [staged])


def append(root: Root, version: int, durability: str) -> None:
    root.partition("a", 0).append([encoded(value_after(version))], durability=durability)


def steps_done(root: Root) -> set[str]:
    """Return the steps whose records are in the log; fail if a publication is there in part."""
    # The ends first, and all at one instant: that is what a reader begins with.
    root.topics()
    contents = {part: values(partition(root, part)) for part in PARTS}
    steps: set[str] = set()
    for version in VERSIONS:
        have = {part: values_for(version, part)[0] in contents[part] for part in VERSIONS[version]}
        assert len(set(have.values())) == 1, f"publication {version} is there in part: {have}"
        steps |= {f"p{version}"} if all(have.values()) else set()
        steps |= {f"n{version}"} if value_after(version) in contents["a_0"] else set()
    for part in PARTS:
        assert contents[part] == expected(part, steps), f"{part}: {contents[part]}"
    return steps


def partition(root: Root, part: str) -> PartitionLog:
    return root.partition(part[0], int(part[2:]))


def expected(part: str, steps: set[str]) -> list[bytes]:
    """Return the values of a partition after some steps."""
    appended = [b"first"] if part in ("a_0", "b_0") else []
    for version, batches in VERSIONS.items():
        if f"p{version}" in steps and part in batches:
            appended += values_for(version, part)
        if f"n{version}" in steps and part == "a_0":
            appended.append(value_after(version))
    return appended


def jump(root: Root) -> None:
    """Set the clock far ahead and back, while other applications publish (P17).

    The limits are such that every app version is dropped that may be.
    """
    clock: Any = root.clock
    with patch.multiple(app_versions, MAX_ROWS=0, CHECK_INTERVAL=1):
        for days in (40, 700, -1000, 260):
            clock.advance(days * DAY)
            for number in range(2):
                name = f"other {number}"
                last = app_versions.get(root.context.state, name)
                version = 0 if last is None else last.version
                transaction.publish(root, [], Publication(name, version + 1, name))


class PublicationFaults(PublishedFaults):
    """Three publications, each followed by an append of another writer."""

    parts: ClassVar = [(part[0], int(part[2:])) for part in PARTS]

    def fill(self, root: Root) -> None:
        """Create the topics, with a record in two of them."""
        for name, (partitions, config) in CONFIG.items():
            root.create_topic(name, partitions, TopicConfig.parse(config))
        for name in ("a", "b"):
            root.partition(name, 0).append([encoded(b"first")], durability="fsync")
        root.flush()

    def work(self, root: Root, durability: str, acknowledge: Acknowledge) -> EmbedlogError | None:
        """Publish and append."""
        try:
            for version in VERSIONS:
                assert send(root, version, durability).repeated is None
                acknowledge(f"p{version}")
                append(root, version, durability)
                acknowledge(f"n{version}")
        except EmbedlogError as error:
            return error
        return None

    def check_between(self, root: Root, acked: set[str]) -> None:
        """Each publication is there completely or not at all, and acknowledged steps are there."""
        steps = steps_done(root)
        assert acked <= steps, f"{acked - steps} were acknowledged"
        assert steps == set(EVERYTHING[: len(steps)]), f"{steps} are not the first steps"

    def check_done(self, root: Root, durability: str) -> None:
        """A repetition of everything skips what is there and publishes the rest, each once."""
        # An append that died before its flush is published by the next one.
        root.partition("a", 0).flush()
        jump(root)
        for version in VERSIONS:
            published = f"p{version}" in steps_done(root)
            receipt = send(root, version, durability)
            # A killed process may have published without making it visible.
            assert receipt.repeated is not None or not published, f"{version}: {receipt}"
            assert f"p{version}" in steps_done(root)
            if f"n{version}" not in steps_done(root):
                append(root, version, durability)
        steps = steps_done(root)
        assert steps == set(EVERYTHING)
        assert healthy(root)
        jump(root)
        for version in VERSIONS:
            assert send(root, version, durability).repeated is not None
        assert steps_done(root) == steps
        assert no_stray_files(root)

    def check_reopened(self, root: Root) -> None:
        """Everything is still there."""
        assert steps_done(root) == set(EVERYTHING)

    def check_state(self, root: Root, acked: set[str], durability: str) -> None:
        """With fsync as after a kill; without, each partition may lose the end of its records."""
        if durability == "fsync":
            super().check_state(root, acked, durability)
            return
        assert healthy(root)
        for part in PARTS:
            content = values(partition(root, part))
            assert content == expected(part, set(EVERYTHING))[: len(content)], f"{part}: {content}"
        # An application repeats its last version, and none before that.
        last = app_versions.get(root.context.state, "q")
        for version in VERSIONS:
            if last is None or version >= last.version:
                send(root, version, "os")
                for part in VERSIONS[version]:
                    lost = set(values_for(version, part)) - set(values(partition(root, part)))
                    assert not lost, f"publication {version} is not in {part} after all: {lost}"
        assert healthy(root)


FAULTS = PublicationFaults()


MODES = ("os", "fsync")


@pytest.fixture(scope="module")
def counted(directory: Path) -> dict[str, dict[str, int]]:
    return {mode: FAULTS.count(directory, mode) for mode in MODES}


def kills(counted: dict[str, dict[str, int]], company: bool, step: int) -> list[Case]:
    """Return kills at one in ``step`` operations, in both modes."""
    cases = []
    for shift, mode in enumerate(MODES):
        kinds = counted[mode]
        total = sum(kinds.values())
        numbers = range(shift, total, step)
        cases += [Case(n, "after", company, durability=mode) for n in numbers]
        writes = range(shift, kinds["write"], 2 * step)
        cases += [Case(n, "middle", company, ("write",), mode) for n in writes]
    return sample(cases, 5)


def faults(counted: dict[str, dict[str, int]], step: int) -> list[Case]:
    """Return failures of one in ``step`` operations, in both modes."""
    cases = []
    for shift, mode in enumerate(MODES):
        total = sum(counted[mode].get(kind, 0) for kind in FALLIBLE)
        cases += [
            Case(n, ("once", "forever")[n % 2], durability=mode) for n in range(shift, total, step)
        ]
    return sample(cases, 8)


def check_power_cuts(directory: Path, durability: str, limit: int) -> int:
    recording = FAULTS.record(directory, durability)
    return FAULTS.check_power_cuts(recording, limit, directory, durability)


# Here the small tiers have the company that other files leave out.
@pytest.mark.parametrize(
    "company",
    [
        pytest.param(False, id="alone", marks=pytest.mark.tier("all")),
        pytest.param(True, id="beside another"),
    ],
)
def test_a_publication_that_is_killed_is_there_in_all_partitions_or_in_none(
    directory: Path, counted: dict[str, dict[str, int]], company: bool
) -> None:
    """P1, P2: a repetition publishes what is missing, and nothing else."""
    assert FAULTS.check_kills(directory, kills(counted, company, 8)) >= choose(test=3, all=35)


@pytest.mark.tier("all")
def test_a_publication_that_fails_is_there_in_all_partitions_or_in_none(
    directory: Path, counted: dict[str, dict[str, int]]
) -> None:
    """P8, P9, P10: any operation, once or from then on; with the same handle all is done after."""
    assert FAULTS.check_faults(directory, faults(counted, step=8)) >= choose(test=2, all=20)


@pytest.mark.parametrize("durability", choose(test=["fsync"], all=MODES))
def test_after_a_power_cut_a_publication_is_there_in_all_partitions_or_in_none(
    directory: Path, durability: str
) -> None:
    """P4: at every cut.  P5: without flushes a prefix of each, and a repetition loses nothing."""
    limit = choose(test=8, all=100)
    assert check_power_cuts(directory, durability, limit) >= 0.8 * limit


@pytest.mark.tier("nightly")
def test_a_publication_may_be_killed_and_fail_at_every_operation(
    directory: Path, counted: dict[str, dict[str, int]]
) -> None:
    """As above, at all of them; each fault once and for ever."""
    for company in (False, True):
        assert FAULTS.check_kills(directory, kills(counted, company, step=1)) >= 300
    cases = faults(counted, step=1)
    other = {"once": "forever", "forever": "once"}
    cases += [case._replace(what=other[case.what]) for case in cases]
    assert FAULTS.check_faults(directory, cases) > 400


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("durability", MODES)
def test_power_cuts_of_publications_in_full(tmp_path: Path, durability: str) -> None:
    """As above."""
    assert check_power_cuts(tmp_path, durability, 10_000) >= 5_000


# Planted bugs: what the checks above are worth


def no_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery takes whole batches for published ones."""
    monkeypatch.setattr(journal.JOURNAL, "get", lambda *_: None)


def nothing_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says it is durable, and is not."""
    monkeypatch.setattr(transaction, "_flush", lambda plan, files: None)


def ends_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publication is finished in one of its partitions only."""
    finish = journal.finish_publication

    def wrong(context: Any, number: int, partners: Any, group: bytes) -> None:
        finish(context, number, partners[:1], group)

    monkeypatch.setattr(journal, "finish_publication", wrong)


def marker_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The markers are not in the transaction that publishes, but in one before it."""
    carry_out = transaction._carry_out

    def wrong(context: Any, plans: Any, target: Any, *rest: Any) -> Any:
        if target is not None:
            put = transaction._put_app_versions
            context.state.write(lambda txn: put(txn, target, plans, 0, 0))
        return carry_out(context, plans, None, *rest)

    monkeypatch.setattr(transaction, "_carry_out", wrong)


def markers_by_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A jump of the clock by 30 days drops the markers of all that have not published since."""
    monkeypatch.setattr(app_versions, "advance_clock", lambda txn, clocks: max(clocks.time_ms, 0))


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "bug",
    [
        marker_apart,
        markers_by_the_wall_clock,
        pytest.param(ends_one_by_one, marks=pytest.mark.tier("nightly")),
    ],
)
def test_kills_find_what_was_planted(
    directory: Path,
    counted: dict[str, dict[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """A checker that never found anything proves nothing."""
    bug(monkeypatch)
    total = sum(counted["os"].values())
    with pytest.raises(AssertionError):
        FAULTS.check_kills(
            directory, sample([Case(n, "after", True) for n in range(50, total, 2)], 16)
        )


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "bug", [nothing_flushed, pytest.param(no_journal, marks=pytest.mark.tier("nightly"))]
)
def test_power_cuts_find_what_was_planted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """The same for what only the disk shows."""
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        check_power_cuts(tmp_path, "fsync", 200)
