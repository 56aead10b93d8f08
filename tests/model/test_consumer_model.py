"""The positions and commits of a consumer in a group, against a model (E1-E5, E20).

The model knows the position of each partition, and whether auto-commit may commit it.
After each step the committed offsets equal those of the model, and a poll returns the
records that come next.
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
from embedlog.consumer.consumer import Consumer
from embedlog.consumer.open_group import open_group
from embedlog.record import OffsetAndMetadata, TopicPartition

PARTITIONS = [TopicPartition("t", number) for number in range(2)]
FIRST = 4
"""Records of each partition at the beginning."""

which = st.sampled_from(PARTITIONS)
offsets = st.integers(0, FIRST)


@dataclass
class PartitionState:
    """One partition, as the model expects it."""

    start: int | str
    """Where to begin without a commit: an offset, or "earliest" or "latest"."""
    position: int | None = None
    sought: bool = False
    """Whether a seek takes precedence over the committed offset."""
    polled: bool = False
    committed: bool = False
    """Whether the program committed and no record was returned since."""
    paused: bool = False


class ConsumerModel(RuleBasedStateMachine):
    """One consumer at a time, of one group and two partitions."""

    def __init__(self) -> None:
        super().__init__()
        self.path = tempfile.mkdtemp(prefix="embedlog-model-", dir=in_memory())
        self.root = open_root(f"{self.path}/root")
        self.root.create_topic("t", len(PARTITIONS), TopicConfig())
        self.ends = dict.fromkeys(PARTITIONS, 0)
        for tp in PARTITIONS:
            self._append(tp, FIRST)
        self.committed: dict[TopicPartition, int] = {}

    def _append(self, tp: TopicPartition, count: int) -> None:
        fill(self.root.partition(*tp), 1, size=count)
        self.ends[tp] += count

    @initialize(subscribes=st.booleans(), reset=st.sampled_from(["earliest", "latest"]))
    def begin(self, subscribes: bool, reset: str) -> None:
        """Begin with a consumer."""
        self._begin(subscribes, reset, True)

    def _begin(self, subscribes: bool, reset: str, automatic: bool) -> None:
        self.consumer = Consumer(
            self.root, group_id="g", auto_offset_reset=reset, enable_auto_commit=automatic,
            auto_commit_interval_ms=3_600_000,
        )  # fmt: skip
        self.automatic = automatic
        starts = {tp: self.ends[tp] if reset == "latest" else reset for tp in PARTITIONS}
        self.states = {tp: PartitionState(starts[tp]) for tp in PARTITIONS}
        if subscribes:
            self.consumer.subscribe(["t"])
            self.poll(1)
        else:
            self.consumer.assign(PARTITIONS)

    # What the model expects

    def _resolve(self, tp: TopicPartition) -> int:
        state = self.states[tp]
        if state.position is None:
            start = state.start
            if not state.sought and tp in self.committed:
                start = self.committed[tp]
            if isinstance(start, str):
                start = 0 if start == "earliest" else self.ends[tp]
            state.position = start
        return state.position

    def _leave(self) -> None:
        if not self.automatic:
            return
        for tp, state in self.states.items():
            if state.polled and not state.committed and state.position is not None:
                self.committed[tp] = state.position

    # Steps

    @rule(tp=which, count=st.integers(1, 3))
    def append(self, tp: TopicPartition, count: int) -> None:
        """Append records."""
        self._append(tp, count)

    @rule(max_records=st.integers(1, 4))
    def poll(self, max_records: int) -> None:
        """A poll resolves every position, and returns the next records of partitions not paused."""
        for tp in PARTITIONS:
            self._resolve(tp)
            self.states[tp].polled = True
        polled = self.consumer.poll(0, max_records=max_records)
        for tp, records in polled.items():
            state = self.states[tp]
            assert not state.paused
            expected = range(self._resolve(tp), self._resolve(tp) + len(records))
            assert [record.offset for record in records] == list(expected)
            state.position, state.committed = expected.stop, False
        left = sum(
            self.ends[tp] - self._resolve(tp)
            for tp, state in self.states.items()
            if not state.paused
        )
        count = sum(map(len, polled.values()))
        assert count <= max_records
        assert count or not left

    @rule(tp=which)
    def position(self, tp: TopicPartition) -> None:
        """`position` resolves, and commits nothing."""
        assert self.consumer.position(tp) == self._resolve(tp)

    @rule(tp=which, offset=offsets)
    def commit(self, tp: TopicPartition, offset: int) -> None:
        """What the program commits stays until further records are returned."""
        self.consumer.commit({tp: OffsetAndMetadata(offset)})
        self.committed[tp], self.states[tp].committed = offset, True

    @rule()
    def commit_all(self) -> None:
        """Commit every position that is resolved."""
        self.consumer.commit()
        for tp, state in self.states.items():
            if state.position is not None:
                self.committed[tp], state.committed = state.position, True

    @rule(tp=which, offset=offsets)
    def seek(self, tp: TopicPartition, offset: int) -> None:
        """A seek takes effect at once."""
        self.consumer.seek(tp, offset)
        state = self.states[tp]
        state.position, state.sought, state.polled = offset, True, True

    @rule(tp=which, to=st.sampled_from(["earliest", "latest"]))
    def seek_lazily(self, tp: TopicPartition, to: str) -> None:
        """A lazy seek is resolved by a poll or by `position`."""
        seek = "seek_to_beginning" if to == "earliest" else "seek_to_end"
        getattr(self.consumer, seek)(tp)
        state = self.states[tp]
        state.position, state.start, state.sought, state.polled = None, to, True, False

    @rule(tp=which, paused=st.booleans())
    def pause(self, tp: TopicPartition, paused: bool) -> None:
        """Pausing keeps the position."""
        (self.consumer.pause if paused else self.consumer.resume)(tp)
        self.states[tp].paused = paused

    @rule(
        how=st.sampled_from(["close", "unsubscribe", "close without a commit"]),
        subscribes=st.booleans(),
        reset=st.sampled_from(["earliest", "latest"]),
        automatic=st.booleans(),
    )
    def begin_again(self, how: str, subscribes: bool, reset: str, automatic: bool) -> None:
        """Leaving commits what polls returned, and the next consumer continues there."""
        if how == "unsubscribe":
            self.consumer.unsubscribe()
        self.consumer.close(autocommit=how == "close")
        if how != "close without a commit":
            self._leave()
        self.check_committed()
        self._begin(subscribes, reset, automatic)

    @invariant()
    def check_committed(self) -> None:
        """Only commits and leaving change the committed offsets."""
        commits = open_group(self.root, "g").committed(PARTITIONS)
        offsets = {tp: None if at is None else at.position.offset for tp, at in commits.items()}
        assert offsets == {tp: self.committed.get(tp) for tp in PARTITIONS}

    def teardown(self) -> None:
        try:
            self.consumer.close(autocommit=False)
            assert healthy(self.root)
        finally:
            abandon(self.root)
            shutil.rmtree(self.path)


TestConsumerModel = ConsumerModel.TestCase
TestConsumerModel.settings = settings(stateful_step_count=20)
