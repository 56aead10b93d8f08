"""A share group against a model, whatever its members do or suffer, in any order (S1 to S19).

The model has what became of each record, who holds it until when, and how often it was delivered.
The real group is in a log on the disk, whose uptime stands still; its consumers read real records,
between which retention and compaction leave gaps.  After each step what was delivered, refused and
put aside is what the model says, and at the end nothing is left.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)
from support import forks
from support.clock import MovedUptime
from support.forks import in_memory, tell
from support.manual_compaction import keep
from support.mutants import Change, hunt
from support.roots import abandon, healthy, open_root
from support.tiers import choose

from embedlog.api.consumer_group import ConsumerGroup
from embedlog.config import TopicConfig
from embedlog.dead_letter_queue import Failure
from embedlog.errors import InvalidRecordStateError, UnknownTopicOrPartitionError
from embedlog.groups.share_state import ACKNOWLEDGED, ARCHIVED, ARCHIVING
from embedlog.producer import Producer
from embedlog.record import TopicPartition
from embedlog.retention import delete_records
from embedlog.share.share_consumer import ShareConsumer

LOCK_MS, LIMIT, PARTITIONS = 1000, 3, 2
SETTINGS = {
    "share.auto.offset.reset": "earliest",
    "share.record.lock.duration.ms": LOCK_MS,
    "share.delivery.count.limit": LIMIT,
    "errors.deadletterqueue.topic.name": "dlq",
}
Where = tuple[int, int]
"""Partition and offset."""
which = st.integers(0, 7)
partitions = st.integers(0, PARTITIONS - 1)
verdicts = st.lists(
    st.sampled_from(["accept", "accept", "accept", "release", "release", "reject", "renew", ""]),
    min_size=1,
    max_size=6,
)


START_MS = 10_000_000


class Machine(MovedUptime):
    """A machine that the model reboots; its uptime stands still."""

    boot = 0

    def uptime_ms(self) -> int:
        return START_MS + MovedUptime.ms

    def boot_id(self) -> str:
        return f"boot {Machine.boot}"


class Hold(NamedTuple):
    """A record that a player has."""

    player: object
    until: int
    record: Any


class Expected:
    """What the model knows of the records."""

    def __init__(self) -> None:
        self.records: set[Where] = set()
        """Those in the log."""
        self.done: dict[Where, str] = {}
        """What became of those that are done: accepted, or given up."""
        self.counts: Counter[Where] = Counter()
        self.not_before: dict[Where, int] = {}
        self.holds: dict[Where, Hold] = {}

    def __deepcopy__(self, memo: Any) -> Expected:
        copy = Expected()
        copy.records, copy.done = set(self.records), dict(self.done)
        copy.counts = Counter(self.counts)
        return copy

    def free(self, where: Where, not_before: int = 0) -> None:
        self.holds.pop(where, None)
        if self.counts[where] >= LIMIT:
            self.done[where] = "given up"
        else:
            self.not_before[where] = not_before


class ShareModel(RuleBasedStateMachine):
    """One group, its consumers, and what is expected of them."""

    def __init__(self) -> None:
        super().__init__()
        MovedUptime.ms = 0
        self.path = tempfile.mkdtemp(prefix="embedlog-model-", dir=in_memory())
        self.root = open_root(f"{self.path}/root", files=Machine)
        self.root.create_topic("t", PARTITIONS, TopicConfig())
        self.group = ConsumerGroup(self.root, "g")
        self.group.alter(SETTINGS)
        self.expected = Expected()
        self.players: list[ShareConsumer[Any, Any]] = [self._player()]
        self.dead: set[object] = set()
        self.checkpointed = deepcopy(self.expected)
        self.players[0].poll()

    def _player(self) -> ShareConsumer[Any, Any]:
        return ShareConsumer(self.root, "t", group="g", share_acknowledgement_mode="explicit")

    def _now(self) -> int:
        return self.group._group().uptime()

    def _log(self, partition: int) -> Any:
        return self.root.partition("t", partition)

    def player(self, number: int) -> ShareConsumer[Any, Any]:
        player = self.players[number % len(self.players)]
        player._session._reaped_at = 0.0  # It looks for dead members each time.
        return player

    # The log

    @rule(partition=partitions, count=st.integers(1, 6))
    def append(self, partition: int, count: int) -> None:
        """Some records, in a batch, or after a gap."""
        first = self._log(partition).end_offset()
        with Producer(self.root) as producer:
            for _ in range(count):
                producer.send("t", b"v", partition=partition)
        self.expected.records |= {(partition, first + each) for each in range(count)}

    @rule(partition=partitions, size=st.integers(1, 20))
    def skip(self, partition: int, size: int) -> None:
        """Offsets without records."""
        self._log(partition).skip_to(self._log(partition).end_offset() + size)

    @rule(partition=partitions, part=st.integers(0, 8))
    def retain(self, partition: int, part: int) -> None:
        """Delete the first records, whoever has them."""
        log = self._log(partition)
        start, end = log.start_offset(), log.end_offset()
        below = start + (end - start) * part // 12
        delete_records(log, below)
        self._drop({each for each in self.expected.records if each < (partition, below)
                    and each[0] == partition})  # fmt: skip

    @rule(partition=partitions, every=st.integers(2, 4))
    def compact(self, partition: int, every: int) -> None:
        """Remove records in the middle; those that are held are with their players."""
        log = self._log(partition)
        log.roll()
        log.refresh()
        start = log.start_offset()
        sealed = [each for each in log.segments.values() if each.sealed]
        whole = [each for each in sealed if each.base_offset >= start]
        if not whole:
            return
        first = whole[0].base_offset
        there = {at for number, at in self.expected.records if number == partition and at >= first}
        if (whole[-1].next_offset or 0) - 1 not in there:
            return  # It is rewritten by a reader, which finds no record in a gap at the end.
        kept = {offset for offset in there if offset % every}
        keep(log, kept, slice(len(sealed) - len(whole), None))
        self._drop({(partition, offset) for offset in there - kept})

    def _drop(self, gone: set[Where]) -> None:
        self.expected.records -= gone

    # Members

    @rule()
    @precondition(lambda self: len(self.players) < 4)
    def join(self) -> None:
        """A further consumer, which joins with its first poll."""
        self.players.append(self._player())

    @rule(number=which)
    @precondition(lambda self: len(self.players) > 1)
    def die(self, number: int) -> None:
        """Its lock is free, and nothing else happens until another member looks."""
        player = self.player(number)
        self.players.remove(player)
        if player._session.member is not None:
            player._session.unlock()
            self.dead.add(player)

    @rule(number=which)
    @precondition(lambda self: len(self.players) > 1)
    def close(self, number: int) -> None:
        """What it has is released."""
        player = self.player(number)
        self.players.remove(player)
        mine = self._held(player)
        self._expire()
        player.close()
        for where in mine:
            if self._is_valid(where, player):
                self.expected.free(where)

    @rule(ms=st.sampled_from([1, 300, LOCK_MS - 1, LOCK_MS, 3 * LOCK_MS]))
    def wait(self, ms: int) -> None:
        """Time passes."""
        MovedUptime.ms += ms

    # Steps

    def _held(self, player: object) -> list[Where]:
        return sorted(where for where, hold in self.expected.holds.items() if hold.player is player)

    def _is_valid(self, where: Where, player: object) -> bool:
        hold = self.expected.holds.get(where)
        return hold is not None and hold.player is player and hold.until > self._now()

    def _expire(self) -> None:
        """Free what locks that ended held: any step does."""
        now = self._now()
        for where, hold in list(self.expected.holds.items()):
            if hold.until <= now:
                self.expected.free(where)

    @rule(number=which, chosen=verdicts, delay=st.sampled_from([0, 0, 700]))
    def commit(self, number: int, chosen: list[str], delay: int) -> None:
        """Acknowledge what it has, some of it late; exactly that is refused."""
        player = self.player(number)
        self._commit(player, chosen, delay)

    def _commit(self, player: ShareConsumer[Any, Any], chosen: list[str], delay: int) -> None:
        records = sorted(player._session.records._held.values())
        sent, late = [], set()
        starts = {number: self._log(number).start_offset() for number in range(PARTITIONS)}
        for index, record in enumerate(records):
            verdict: Any = chosen[index % len(chosen)]
            if verdict:
                player.acknowledge(record, verdict, delay=delay / 1000)
                sent.append((record[1:3], verdict))
        for where, verdict in sent:
            if self._is_valid(where, player):
                self._apply(where, verdict, delay)
            elif where[1] >= starts[where[0]]:
                late.add(where)
        self._expire()
        results = player.commit()
        refused = {
            (partition.partition, offset)
            for partition, error in results.items()
            if isinstance(error, InvalidRecordStateError)
            for offset in error.offsets
        }
        assert refused == late
        assert results.keys() == {TopicPartition("t", where[0]) for where, _ in sent}

    def _apply(self, where: Where, verdict: str, delay: int) -> None:
        expected = self.expected
        if verdict == "renew":
            hold = expected.holds[where]
            expected.holds[where] = hold._replace(until=self._now() + LOCK_MS)
        elif verdict == "release":
            expected.free(where, self._now() + delay if delay else 0)
        else:
            del expected.holds[where]
            expected.done[where] = "accepted" if verdict == "accept" else "given up"

    @rule(number=which)
    def take_longer_than_the_lock(self, number: int) -> None:
        """Which is renewed in time."""
        self.wait(300)
        self.commit(number, ["renew"], 0)
        self.wait(LOCK_MS - 1)
        self.commit(number, ["accept"], 0)

    @rule(number=which, limit=st.sampled_from([1, 2, 3, 50]), chosen=verdicts)
    def poll(self, number: int, limit: int, chosen: list[str]) -> None:
        """Records that nobody has, each with its number of deliveries."""
        player = self.player(number)
        self._poll(player, limit, chosen)

    def _poll(self, player: ShareConsumer[Any, Any], limit: int, chosen: list[str]) -> list[Where]:
        self._commit(player, [each if each != "renew" else "accept" for each in chosen if each]
                     or ["accept"], 0)  # fmt: skip
        records = player.poll(0, limit)
        if not records:
            # The first look may have found who holds records, the second frees those of the dead.
            player._session._reaped_at = 0.0
            records = player.poll(0, limit)
        self._check_delivered(player, records, limit)
        return [record[1:3] for record in records]

    def _check_delivered(self, player: Any, records: list[Any], limit: int) -> None:
        expected, now = self.expected, self._now()
        assert len(records) <= limit
        for record in records:
            where = record[1:3]
            hold = expected.holds.get(where)
            assert where in expected.records, "there is no such record"
            assert expected.done.get(where) is None, f"it was {expected.done[where]}"
            assert hold is None or hold.player in self.dead, "another consumer has it"
            assert expected.not_before.get(where, 0) <= now, "it must wait"
            expected.counts[where] += 1
            assert record.delivery_count == expected.counts[where] <= LIMIT
            if 1 < record.delivery_count == LIMIT:
                assert len(records) == 1, "a last delivery must come alone"
            expected.holds[where] = Hold(player, now + LOCK_MS, record)
        if not records:
            self._bury_the_dead()
            left = {
                where
                for where in expected.records - expected.done.keys() - expected.holds.keys()
                if expected.not_before.get(where, 0) <= now
            }
            assert not left, f"records are not delivered: {sorted(left)}"

    def _bury_the_dead(self) -> None:
        for where, hold in list(self.expected.holds.items()):
            if hold.player in self.dead:
                self.expected.free(where)

    # Power cuts

    @rule()
    def checkpoint(self) -> None:
        """What is flushed and saved now is there after a power cut."""
        for number in range(PARTITIONS):
            self._log(number).flush()
        self.root.context.checkpoint()
        self.checkpointed = deepcopy(self.expected)

    @rule()
    def cut_the_power(self) -> None:
        """The group goes back, to its last checkpoint at most, and never forward."""
        for player in self.players:
            player._session._unlock = None
        before, saved = self.expected, self.checkpointed
        abandon(self.root)
        Machine.boot += 1
        self.root = open_root(f"{self.path}/root", files=Machine)
        self.group = ConsumerGroup(self.root, "g")
        self.dead, self.players = set(), [self._player()]
        ends = {number: self._log(number).end_offset() for number in range(PARTITIONS)}
        states = self.group._group().snapshot().shares or {}
        self.expected = after = Expected()
        after.records = {where for where in before.records if where[1] < ends[where[0]]}
        assert saved.records & before.records <= after.records
        for where in after.records:
            state = states[TopicPartition("t", where[0])]
            kind = next((each for each in state.ranges if each.first <= where[1] < each.stop), None)
            count = kind.delivery_count if kind else 0
            if where[1] < state.start or (
                kind and kind.state in (ACKNOWLEDGED, ARCHIVED, ARCHIVING)
            ):
                dead = before.holds.get(where)
                is_done = where in before.done or (dead and before.counts[where] >= LIMIT)
                assert is_done, f"{where} is done, and nobody did it"
                after.done[where] = before.done.get(where, "given up")
            else:
                # Whose last delivery was to a dead member is given up once somebody looks.
                is_back = where in saved.done and where in saved.records and count < LIMIT
                assert not is_back, f"{where} came back"
                assert saved.counts[where] <= count <= before.counts[where] or not count
                after.counts[where] = count
                if count >= LIMIT:
                    after.done[where] = "given up"
        self.checkpointed = deepcopy(after)

    # What is always so

    def _letters(self) -> Counter[Where]:
        try:
            found: Counter[Where] = Counter()
            for number in range(self.root.partitions("dlq")):
                for record in _records(self.root, "dlq", number):
                    failure = Failure.parse(record.headers)
                    assert failure is not None
                    found[failure.partition, failure.offset] += 1
            return found
        except UnknownTopicOrPartitionError:
            return Counter()

    @invariant()
    def dead_letters_are_of_records_that_were_given_up(self) -> None:
        """Each once."""
        letters = self._letters()
        assert set(letters.values()) <= {1}
        self._expire()
        for where in letters:
            hold = self.expected.holds.get(where)
            is_dead = hold is not None and hold.player in self.dead
            assert (
                self.expected.done.get(where) == "given up"
                or is_dead
                or (where not in self.expected.records)
            )

    def teardown(self) -> None:
        try:
            self._finish()
        finally:
            abandon(self.root)
            shutil.rmtree(self.path, ignore_errors=True)

    def _finish(self) -> None:
        """All that is left is delivered in the end, and each record given up is one letter."""
        player = self.players[0]
        for other in self.players[1:]:
            other.close()
            for where in self._held(other):
                if self._is_valid(where, other):
                    self.expected.free(where)
        for _ in range(200):
            MovedUptime.ms += 500
            player._session._reaped_at = 0.0
            if not self._poll(player, 50, ["accept"]) and not self.expected.holds:
                break
        MovedUptime.ms += 5 * LOCK_MS
        player.poll()
        left = self.expected.records - self.expected.done.keys()
        assert not left, f"records were never done: {left}"
        letters = self._letters()
        wanted = {
            where
            for where, what in self.expected.done.items()
            if what == "given up" and where in self.expected.records
        }
        assert wanted <= letters.keys(), f"letters are missing: {wanted - letters.keys()}"
        lag = self.group.lag()
        assert sum(each or 0 for each in lag.values()) == 0, lag
        assert healthy(self.root)
        player.close()


def _records(root: Any, topic: str, number: int) -> Any:
    from embedlog.consumer.consumer import Consumer

    with Consumer(root, auto_offset_reset="earliest") as consumer:
        partition = TopicPartition(topic, number)
        consumer.assign([partition])
        return [*consumer.iter_records(until="end")]


TestShareModel = ShareModel.TestCase
TestShareModel.settings = settings(
    stateful_step_count=choose(test=30, all=60), max_examples=choose(test=5, all=300)
)

STATE, GROUP = "embedlog.groups.share_state:ShareState", "embedlog.share.share_group:ShareGroup"
BUGS = {
    "an acknowledgement after the lock has ended is accepted": Change(
        f"{STATE}.acknowledge", {" and piece.until > now": ""}
    ),
    "an acknowledgement of another member's record is accepted": Change(
        f"{STATE}.acknowledge", {" and piece.member == member": ""}
    ),
    "a lock that has ended is not freed": Change(f"{STATE}.expire", {"each.until <= now or ": ""}),
    "the records of a dead member are kept": Change(
        f"{STATE}.expire", {" or each.member in dead": ""}
    ),
    "the start passes a record that is not done": Change(
        f"{STATE}._tidy", {"each.state in _DONE": "each.state in (*_DONE, AVAILABLE)"}
    ),
    "the number of deliveries is not raised": Change(
        f"{STATE}.acquire", {"each.delivery_count + 1, until": "each.delivery_count, until"}
    ),
    "what is behind a piece of a range is lost": Change(
        f"{STATE}._change", {"high < each.stop": "False"}
    ),
    "ranges of different members are merged": Change(
        f"{STATE}._tidy",
        {"ranges[-1][2:] == each[2:]": "ranges[-1].state == each.state"},
    ),
    "a delay is not kept": Change(f"{STATE}.acquire", {" or each.until > now": ""}),
    "a record is delivered without a limit": Change(
        f"{STATE}._freed", {"piece.delivery_count >= self._limit": "False"}
    ),
    "a last delivery does not come alone": Change(
        f"{STATE}.acquire", {"each.delivery_count + 1 >= self._limit": "False"}
    ),
    "a renewed lock ends as before": Change(
        f"{STATE}.acknowledge", {"piece._replace(until=until)": "piece"}
    ),
    "a rejected record has no dead letter": Change(
        f"{STATE}._given_up", {"self._letters": "False"}
    ),
    "a dead letter is written beside the state of its record": Change(
        f"{GROUP}._archived", {"archived[key] = ": "_ = "}
    ),
    "offsets below the start of the log are not done": Change(
        f"{STATE}.trim", {"start > self.start": "False"}
    ),
}


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", BUGS)
def test_the_model_finds_a_planted_bug(name: str) -> None:
    """A model that never failed proves nothing."""
    found = forks.call(lambda: hunt(ShareModel, BUGS[name]), patience=300)
    tell(f"{name}: {found}")
    assert found is not None
