"""Publications against what they may do: whatever is repeated, started over, deleted or set.

Queries publish micro-batches to topics, batch writes publish numbers; topics are deleted
and created again, clocks jump, machines boot.  After each step the topics hold what the
model says, and independently of it: no micro-batch is stored twice.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.clock import ManualClock
from support.forks import in_memory
from support.roots import abandon, open_root, values
from support.staged_files import stage

from embedlog.config import TopicConfig
from embedlog.errors import RestartedApplicationError
from embedlog.files import Files
from embedlog.publish import app_versions, transaction
from embedlog.publish.transaction import Publication

DAY = 86_400_000
TOPICS = "abc"
targets = st.sets(st.sampled_from(TOPICS), max_size=2)
some_targets = st.sets(st.sampled_from(TOPICS), min_size=1, max_size=2)
which = st.integers(0, 7)


class Machine(Files):
    """A machine whose uptime and boot the model sets."""

    up, boot = 0, 0

    def uptime_ms(self) -> int:
        return Machine.up

    def boot_id(self) -> str:
        return f"boot {Machine.boot}"


@dataclass
class Query:
    """A query: where its checkpoint is, and which ids each of its micro-batches went to."""

    id: str
    checkpoint: str
    batches: list[set[int]] = field(default_factory=list)


class PublicationModel(RuleBasedStateMachine):
    """One root; what was published in it, and what may come."""

    def __init__(self) -> None:
        super().__init__()
        self.path = tempfile.mkdtemp(prefix="embedlog-model-", dir=in_memory())
        Machine.up, Machine.boot = 1_000, 0
        self.clock = ManualClock()
        # As if there were so many that each marker is dropped that may be.
        self.limits = patch.multiple(app_versions, MAX_ROWS=0, CHECK_INTERVAL=1)
        self.limits.start()
        self.root = open_root(f"{self.path}/root", files=Machine, clock=self.clock)
        self.held: dict[int, list[bytes]] = {}
        """What each topic holds, by its id."""
        self.ids: dict[str, int] = {}
        for topic in TOPICS:
            self._create(topic)
        self.queries: list[Query] = []
        self.owners: dict[tuple[str, int], str] = {}
        """Which query published last from the path of a checkpoint to a topic."""
        self.numbers: dict[tuple[str, int], int] = {}
        """The last number of a batch write's name in a topic."""

    def teardown(self) -> None:
        """Remove everything."""
        self.limits.stop()
        abandon(self.root)
        shutil.rmtree(self.path, ignore_errors=True)

    def _create(self, topic: str) -> None:
        self.ids[topic] = self.root.create_topic(topic, 1, TopicConfig()).id
        self.held[self.ids[topic]] = []

    def _publish(
        self, who: Publication, value: bytes, topics: set[str], restart: bool = False
    ) -> str:
        staged = [stage(self.root, **{f"{topic}_0": [value] for topic in sorted(topics)})]
        try:
            published = transaction.publish(self.root, staged, who, restart=restart)
        except RestartedApplicationError:
            return "refused"
        if published.repeated is not None:
            return "repeated"
        for topic in topics:
            self.held[self.ids[topic]].append(value)
        return "published"

    # Queries

    @rule(checkpoint=st.sampled_from(["/x", "/y"]))
    def start(self, checkpoint: str) -> None:
        """A query without a checkpoint: the first one, or one whose checkpoint was deleted."""
        self.queries.append(Query(f"query {len(self.queries)}", checkpoint))

    @rule(number=which, topics=targets, restart=st.integers(0, 5))
    @precondition(lambda self: self.queries)
    def go_on(self, number: int, topics: set[str], restart: int) -> None:
        """The next micro-batch of a query; from time to time one that may start over."""
        query = self.queries[number % len(self.queries)]
        self._run(query, len(query.batches), topics, restart=not restart)

    @rule(number=which, topics=targets, back=st.integers(1, 3), same=st.integers(0, 3))
    @precondition(lambda self: any(query.batches for query in self.queries))
    def repeat(self, number: int, topics: set[str], back: int, same: int) -> None:
        """A micro-batch comes again, mostly to the topics that it went to."""
        queries = [query for query in self.queries if query.batches]
        query = queries[number % len(queries)]
        version = max(len(query.batches) - back, 0)
        if same:
            went_to = query.batches[version]
            topics = {topic for topic, id_ in self.ids.items() if id_ in went_to}
        self._run(query, version, topics, restart=False)

    def _run(self, query: Query, version: int, topics: set[str], restart: bool) -> None:
        last = len(query.batches) - 1
        went_to = query.batches[version] if version <= last else set()
        alive = went_to & set(self.ids.values())
        owners = {self.owners.get((query.checkpoint, self.ids[topic])) for topic in topics}
        if version < last or (version == last and (alive or not went_to)):
            expected = "repeated"
        elif owners - {None, query.id} and not restart:
            expected = "refused"
        else:
            expected = "published"
        value = b"%s %d" % (query.id.encode(), version)
        who = Publication(query.id, version, query.id, "r", query.checkpoint)

        assert self._publish(who, value, topics, restart) == expected
        if expected == "published":
            query.batches[version:] = [{self.ids[topic] for topic in topics}]
            self.owners |= {(query.checkpoint, self.ids[topic]): query.id for topic in topics}

    # Batch writes

    @rule(name=st.sampled_from(["m", "n"]), number=st.integers(0, 6), topics=some_targets)
    def write(self, name: str, number: int, topics: set[str]) -> None:
        """A write with a name and a number, new or not."""
        last = [self.numbers.get((name, self.ids[topic]), -1) for topic in topics]
        expected = "repeated" if max(last) >= number else "published"

        assert (
            self._publish(Publication(name, number), b"%s %d" % (name.encode(), number), topics)
            == expected
        )
        if expected == "published":
            self.numbers |= {(name, self.ids[topic]): number for topic in topics}

    # What happens to them

    @rule(topic=st.sampled_from(TOPICS))
    def create_again(self, topic: str) -> None:
        """A topic is deleted, and created again."""
        self.root.delete_topic(topic)
        del self.held[self.ids[topic]]
        self._create(topic)

    @rule(days=st.sampled_from([-800, -31, 31, 800]))
    def jump(self, days: int) -> None:
        """The clock is set."""
        self.clock.advance(days * DAY)

    @rule(days=st.sampled_from([-800, 31, 800]))
    @precondition(lambda self: Machine.boot < 20)
    def boot(self, days: int) -> None:
        """The machine boots, with a clock that is wrong."""
        Machine.boot, Machine.up = Machine.boot + 1, 500
        self.clock.advance(days * DAY)

    # What must hold

    @invariant()
    def topics_hold_what_was_published(self) -> None:
        """In each topic, in order; nothing that was refused or skipped."""
        for topic, number in self.ids.items():
            assert values(self.root.partition(topic, 0)) == self.held[number]

    @invariant()
    def nothing_is_there_twice(self) -> None:
        """Neither a micro-batch nor a numbered write, in any topic."""
        for topic in TOPICS:
            counted = Counter(values(self.root.partition(topic, 0)))
            assert set(counted.values()) <= {1}, (topic, counted.most_common(1))


TestPublicationModel = PublicationModel.TestCase
TestPublicationModel.settings = settings(stateful_step_count=20)


def by_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A jump of the clock drops markers."""
    monkeypatch.setattr(app_versions, "advance_clock", lambda txn, clocks: max(clocks.time_ms, 0))


def without_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name has one marker for all topics, also for those that were created again."""
    get, put, any_topic = app_versions.get, app_versions.put, app_versions.ANY_TOPIC
    monkeypatch.setattr(app_versions, "get", lambda txn, name, *_: get(txn, name, any_topic))
    monkeypatch.setattr(
        app_versions, "put", lambda txn, name, _, row: put(txn, name, any_topic, row)
    )


def without_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query has a count in each topic only."""
    get = app_versions.get
    wrong: Any = lambda txn, name, *topic: get(txn, name, *topic) if topic else None  # noqa: E731
    monkeypatch.setattr(app_versions, "get", wrong)


def without_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query that starts over is always allowed to."""
    before = transaction._published_before
    monkeypatch.setattr(
        transaction,
        "_published_before",
        lambda txn, intent: before(txn, intent._replace(restart=True)),
    )


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "bug", [by_the_wall_clock, without_topics, without_counters, without_refusals]
)
def test_the_model_finds_what_was_planted(
    monkeypatch: pytest.MonkeyPatch, bug: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """A checker that never found anything proves nothing."""
    bug(monkeypatch)
    # It ends with the first failure; whether 30 examples have one depends on their seed.
    enough = settings(
        max_examples=1_000,
        stateful_step_count=20,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(PublicationModel, settings=enough)
