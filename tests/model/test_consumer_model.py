"""A consumer of a group against what its program did: its positions, and its commits (E1-E5, E20).

The model knows of each partition where the program is, and whether auto-commit may say so.
After each step the committed offsets are those of the model, and a poll returns the records
that come next.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.forks import in_memory
from support.roots import abandon, fill, healthy, open_root

from embedlog.config import TopicConfig
from embedlog.consumer import Consumer
from embedlog.consumer.group_client import open_group
from embedlog.record import OffsetAndMetadata, TopicPartition

PARTITIONS = [TopicPartition("t", number) for number in range(2)]
FIRST = 4
"""Records of each partition to begin with."""

which = st.sampled_from(PARTITIONS)
offsets = st.integers(0, FIRST)


@dataclass
class Place:
    """One partition as its program left it."""

    start: int | str
    """Where to begin without a commit: an offset, or "earliest" or "latest"."""
    position: int | None = None
    sought: bool = False
    """Whether a seek comes before what was committed."""
    polled: bool = False
    kept: bool = False
    """Whether the program committed, and nothing was returned since."""
    paused: bool = False


class ConsumerModel(RuleBasedStateMachine):
    """One consumer at a time, of one group and two partitions."""

    def __init__(self) -> None:
        super().__init__()
        self.path = tempfile.mkdtemp(prefix="embedlog-model-", dir=in_memory())
        self.root = open_root(f"{self.path}/root")
        self.root.create_topic("t", len(PARTITIONS), TopicConfig())
        self.ends = dict.fromkeys(PARTITIONS, 0)
        for one in PARTITIONS:
            self._append(one, FIRST)
        self.committed: dict[TopicPartition, int] = {}

    def _append(self, one: TopicPartition, count: int) -> None:
        fill(self.root.partition(*one), 1, size=count)
        self.ends[one] += count

    @initialize(subscribes=st.booleans(), reset=st.sampled_from(["earliest", "latest"]))
    def begin(self, subscribes: bool, reset: str) -> None:
        """There is always a consumer."""
        self._begin(subscribes, reset, True)

    def _begin(self, subscribes: bool, reset: str, automatic: bool) -> None:
        self.consumer = Consumer(
            self.root, group_id="g", auto_offset_reset=reset, enable_auto_commit=automatic,
            auto_commit_interval_ms=3_600_000,
        )  # fmt: skip
        self.automatic = automatic
        starts = {one: self.ends[one] if reset == "latest" else reset for one in PARTITIONS}
        self.places = {one: Place(starts[one]) for one in PARTITIONS}
        if subscribes:
            self.consumer.subscribe(["t"])
            self.poll(1)
        else:
            self.consumer.assign(PARTITIONS)

    # What the model expects

    def _resolve(self, one: TopicPartition) -> int:
        place = self.places[one]
        if place.position is None:
            start = place.start
            if not place.sought and one in self.committed:
                start = self.committed[one]
            if isinstance(start, str):
                start = 0 if start == "earliest" else self.ends[one]
            place.position = start
        return place.position

    def _leave(self) -> None:
        if not self.automatic:
            return
        for one, place in self.places.items():
            if place.polled and not place.kept and place.position is not None:
                self.committed[one] = place.position

    # Steps

    @rule(one=which, count=st.integers(1, 3))
    def append(self, one: TopicPartition, count: int) -> None:
        """Records come."""
        self._append(one, count)

    @rule(most=st.integers(1, 4))
    def poll(self, most: int) -> None:
        """It resolves every position, and returns the next records of what is not paused."""
        for one in PARTITIONS:
            self._resolve(one)
            self.places[one].polled = True
        found = self.consumer.poll(0, max_records=most)
        for one, records in found.items():
            place = self.places[one]
            assert not place.paused
            expected = range(self._resolve(one), self._resolve(one) + len(records))
            assert [record.offset for record in records] == list(expected)
            place.position, place.kept = expected.stop, False
        left = sum(
            self.ends[one] - self._resolve(one)
            for one, place in self.places.items()
            if not place.paused
        )
        came = sum(map(len, found.values()))
        assert came <= most
        assert came or not left

    @rule(one=which)
    def ask(self, one: TopicPartition) -> None:
        """`position` resolves, and commits nothing."""
        assert self.consumer.position(one) == self._resolve(one)

    @rule(one=which, offset=offsets)
    def commit(self, one: TopicPartition, offset: int) -> None:
        """What the program says stays until it gets more."""
        self.consumer.commit({one: OffsetAndMetadata(offset)})
        self.committed[one], self.places[one].kept = offset, True

    @rule()
    def commit_all(self) -> None:
        """Every position that is known."""
        self.consumer.commit()
        for one, place in self.places.items():
            if place.position is not None:
                self.committed[one], place.kept = place.position, True

    @rule(one=which, offset=offsets)
    def seek(self, one: TopicPartition, offset: int) -> None:
        """At once."""
        self.consumer.seek(one, offset)
        place = self.places[one]
        place.position, place.sought, place.polled = offset, True, True

    @rule(one=which, to=st.sampled_from(["earliest", "latest"]))
    def seek_lazily(self, one: TopicPartition, to: str) -> None:
        """When it is polled, or asked for."""
        seek = "seek_to_beginning" if to == "earliest" else "seek_to_end"
        getattr(self.consumer, seek)(one)
        place = self.places[one]
        place.position, place.start, place.sought, place.polled = None, to, True, False

    @rule(one=which, paused=st.booleans())
    def pause(self, one: TopicPartition, paused: bool) -> None:
        """Positions stay."""
        (self.consumer.pause if paused else self.consumer.resume)(one)
        self.places[one].paused = paused

    @rule(
        how=st.sampled_from(["close", "unsubscribe", "close without a commit"]),
        subscribes=st.booleans(),
        reset=st.sampled_from(["earliest", "latest"]),
        automatic=st.booleans(),
    )
    def begin_again(self, how: str, subscribes: bool, reset: str, automatic: bool) -> None:
        """Leaving commits what polls returned, and the next one goes on there."""
        if how == "unsubscribe":
            self.consumer.unsubscribe()
        self.consumer.close(autocommit=how == "close")
        if how != "close without a commit":
            self._leave()
        self.what_is_committed()
        self._begin(subscribes, reset, automatic)

    @invariant()
    def what_is_committed(self) -> None:
        """No step but a commit, and leaving, moves what is committed."""
        found = open_group(self.root, "g").committed(PARTITIONS)
        offsets = {one: None if at is None else at.position.offset for one, at in found.items()}
        assert offsets == {one: self.committed.get(one) for one in PARTITIONS}

    def teardown(self) -> None:
        try:
            self.consumer.close(autocommit=False)
            assert healthy(self.root)
        finally:
            abandon(self.root)
            shutil.rmtree(self.path)


TestConsumerModel = ConsumerModel.TestCase
TestConsumerModel.settings = settings(stateful_step_count=20)
