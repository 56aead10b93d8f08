"""The same random steps on a share group of Kafka and on one of a log, and what each shows.

`LogSide` is a log on the disk, whose uptime stands still; `KafkaSide` drives Kafka's own Java
clients (``ShareMembers.java``) on a broker.  `Script` takes the steps on both, and compares after
each one.  Records are named by numbers, since control records of transactions take offsets in
Kafka, and none in a log.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any, NamedTuple

from embedlog.api.consumer_group import ConsumerGroup
from embedlog.config import TopicConfig
from embedlog.errors import EmbedlogError
from embedlog.producer import Producer
from embedlog.record import Record, TopicPartition
from embedlog.retention import delete_records
from embedlog.root.root import Root
from embedlog.share.share_consumer import ShareConsumer
from support.clock import MovedUptime
from support.kafka_broker import java_command
from support.patience import patient

DRIVER = Path(__file__).parent / "ShareMembers.java"
VERDICTS = ("accept", "release", "reject", "renew")
_LATE = "InvalidRecordStateException"
Delivery = tuple[int, int]
"""The number of a record, and its number of deliveries."""


class Frozen(MovedUptime):
    """A machine whose uptime stands still."""

    def uptime_ms(self) -> int:
        return 10_000_000 + MovedUptime.ms


class RefusedError(Exception):
    """A side refuses a step; its argument is the kind of error, by Kafka's name."""


class Side:
    """A share group, as scripts use it.

    Args:
        name: What the group and its topic are named after.
    """

    def __init__(self, name: str) -> None:
        self.topic, self.group = f"{name}-t", f"{name}-g"
        self._at: list[tuple[int, int]] = []
        """Partition and offset of each record."""
        self._numbers: dict[tuple[int, int], int] = {}
        self.results: Counter[tuple[int, str]] = Counter()
        """What callbacks said became of records."""

    def at(self, number: int) -> tuple[int, int]:
        """Return the partition and the offset of a record."""
        return self._at[number]

    def _note(self, partition: int, offsets: Sequence[int]) -> None:
        for offset in offsets:
            self._numbers[partition, offset] = len(self._at)
            self._at.append((partition, offset))


class LogSide(Side):
    """A group of a log."""

    def __init__(self, root: Root, name: str, partitions: int, settings: Mapping[str, str]) -> None:
        super().__init__(name)
        self.root = root
        root.create_topic(self.topic, partitions, TopicConfig())
        self.settings = ConsumerGroup(root, self.group)
        self.settings.alter(dict(settings))
        self.members: dict[str, ShareConsumer[Any, Any]] = {}

    def produce(self, count: int, partition: int = 0, how: str = "plain") -> None:
        """Write records, plain or in a transaction that is committed or aborted."""
        first = len(self._at)
        options: Any = {} if how == "plain" else {"transactional_id": "scripts"}
        end = self.root.partition(self.topic, partition).end_offset()
        with Producer(self.root, **options) as producer:
            if how != "plain":
                producer.init_transactions()
                producer.begin_transaction()
            for number in range(first, first + count):
                producer.send(self.topic, b"%d" % number, partition=partition)
            if how == "commit":
                producer.commit_transaction()
            elif how == "abort":
                producer.abort_transaction()
        # What was aborted is nowhere.
        self._note(partition, range(end, end + count) if how != "abort" else [-1] * count)

    def open(self, member: str, mode: str, limit: int) -> None:
        """Let a member join."""
        consumer = self.members[member] = ShareConsumer(
            self.root,
            self.topic,
            group=self.group,
            share_acknowledgement_mode=mode,
            max_poll_records=limit,
        )
        consumer.set_acknowledgement_commit_callback(self._note_results)

    def _note_results(
        self, offsets: dict[TopicPartition, set[int]], error: EmbedlogError | None
    ) -> None:
        for where, each in offsets.items():
            for offset in each:
                self.results[self._numbers[where.partition, offset], _kind(error)] += 1

    def poll(self, member: str) -> list[Delivery]:
        """Return what a member gets, without waiting."""
        records = _in_words_of_kafka(self.members[member].poll)
        assert all(int(each.value) == self._numbers[each[1:3]] for each in records)
        return [(int(each.value), each.delivery_count) for each in records]

    def acknowledge(self, member: str, number: int, verdict: str) -> None:
        """Say what becomes of a record."""
        where = Record(self.topic, *self._at[number], 0, 0, None, None, [])
        _in_words_of_kafka(self.members[member].acknowledge, where, verdict)

    def commit(self, member: str) -> dict[int, str]:
        """Return the kinds of errors by partition."""
        results = _in_words_of_kafka(self.members[member].commit)
        return {where.partition: _kind(error) for where, error in results.items()}

    def close(self, member: str) -> None:
        """Let a member leave."""
        self.members.pop(member).close()

    def delete_before(self, number: int) -> None:
        """Delete the records before one."""
        partition, offset = self._at[number]
        delete_records(self.root.partition(self.topic, partition), offset)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        MovedUptime.ms += int(seconds * 1000)


def _kind(error: BaseException | None) -> str:
    """Return the class of an error, by Kafka's name."""
    return "-" if error is None else type(error).__name__.removesuffix("Error") + "Exception"


def _in_words_of_kafka(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except EmbedlogError as error:
        raise RefusedError(_kind(error)) from error


class Members:
    """A process with Kafka's Java clients.

    Args:
        servers: The address of the broker.
        keeps_aborted: Whether aborted records have offsets there.
    """

    def __init__(self, servers: str, *, keeps_aborted: bool = True) -> None:
        self.servers, self.keeps_aborted = servers, keeps_aborted
        command = [*java_command(), str(DRIVER), servers]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, *words: object) -> list[str]:
        """Send a command; return the words of the answer."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(" ".join(map(str, words)) + "\n")
        process.stdin.flush()
        first, _, rest = process.stdout.readline().strip().partition(" ")
        if first == "ok":
            return rest.split()
        if first.endswith("Exception"):
            raise RefusedError(first, rest)
        raise AssertionError(f"the driver died at {words}: {first} {rest}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


class KafkaSide(Side):
    """A group of a broker."""

    def __init__(
        self, members: Members, name: str, partitions: int, settings: Mapping[str, str]
    ) -> None:
        super().__init__(name)
        self._members = members
        members.ask("topic", self.topic, partitions)
        members.ask("alter", self.group, *(f"{key}={value}" for key, value in settings.items()))

    def produce(self, count: int, partition: int = 0, how: str = "plain") -> None:
        """Do as `LogSide.produce`."""
        values = range(len(self._at), len(self._at) + count)
        offsets = self._members.ask("produce", self.topic, partition, how, *values)
        is_nowhere = how == "abort" and not self._members.keeps_aborted
        self._note(partition, [-1 if is_nowhere else int(each) for each in offsets])

    def open(self, member: str, mode: str, limit: int) -> None:
        """Do as `LogSide.open`."""
        self._members.ask("open", f"{self.group}-{member}", self.group, self.topic, mode, limit)

    def poll(self, member: str, *, waits: bool = False) -> list[Delivery]:
        """Return what a member gets; if it ``waits``, something must come soon."""
        seconds = min(patient(2), 30) if waits else 0
        pause = min(patient(0.05), 1)
        times = int(seconds * 1000), int(pause * 1000)
        words = self._members.ask("poll", f"{self.group}-{member}", *times)
        found = []
        for word in words:
            partition, offset, count, value = map(int, word.split(":"))
            assert self._numbers[partition, offset] == value
            found.append((value, count))
        return found

    def acknowledge(self, member: str, number: int, verdict: str) -> None:
        """Do as `LogSide.acknowledge`."""
        where = self.topic, *self._at[number]
        self._members.ask("acknowledge", f"{self.group}-{member}", *where, verdict)

    def commit(self, member: str) -> dict[int, str]:
        """Do as `LogSide.commit`."""
        words = self._members.ask("commit", f"{self.group}-{member}")
        return {int(where): kind for where, kind in (word.split(":") for word in words)}

    def close(self, member: str) -> None:
        """Do as `LogSide.close`."""
        self._members.ask("close", f"{self.group}-{member}")

    def delete_before(self, number: int) -> None:
        """Do as `LogSide.delete_before`."""
        self._members.ask("delete", self.topic, *self._at[number])

    def wait(self, seconds: float) -> None:
        """Do as `LogSide.wait`; Kafka looks at locks a little later."""
        sleep(seconds)

    def collect(self) -> None:
        """Note what callbacks said."""
        for word in self._members.ask("results", self.group):
            partition, offset, kind = word.split(":")
            number = self._numbers.get((int(partition), int(offset)))
            if number is not None:  # and not a control record
                self.results[number, kind] += 1


class TooSlowError(Exception):
    """Locks may have ended on the broker that must not end yet."""


class Plan(NamedTuple):
    """What scripts of a kind do."""

    steps: Mapping[str, int]
    """The methods of `Script`, each with its weight."""
    modes: Sequence[str] = ("explicit",)
    limits: Sequence[int] = (1, 2, 3, 50)
    """One of them is the most that a poll of a member returns."""
    settings: Mapping[str, str] = {}
    """Of the group."""
    members: int = 3


class Script:
    """Takes random steps on both sides.

    A poll of Kafka's consumer that finds nothing goes on in its background, and takes records that
    are written later.  So a member that found nothing is closed, and opened again when it polls the
    next time; it holds no records.

    Args:
        dice: Chooses.
        plan: What may happen.
        ours: The group of the log.
        theirs: The group of the broker.
        lock_seconds: How long the locks of records last.
    """

    def __init__(
        self, dice: Random, plan: Plan, ours: LogSide, theirs: KafkaSide, lock_seconds: float
    ) -> None:
        self._dice, self._plan, self._ours, self._theirs = dice, plan, ours, theirs
        self._lock_seconds = lock_seconds
        self._modes: dict[str, str] = {}
        """By open member."""
        self._held: dict[str, dict[int, str | None]] = {}
        """By member, the records that it has, and what it said of them."""
        self._away: dict[str, set[int]] = {}
        """By member, those of them that it must poll again."""
        self._since: dict[int, float] = {}
        """When the record was delivered last."""
        self._late: set[int] = set()
        """Records whose locks ended while a member had them."""
        self.done: Counter[str] = Counter()
        """What happened."""
        self.lines: list[str] = []
        self._kept: list[int] = []
        """The records that were not aborted."""
        self._batches: list[int] = []
        """The first record of each batch of them."""
        self._count = self._first = 0

    def run(self, steps: int) -> None:
        """Take so many steps, and what is left at the end.

        Raises:
            AssertionError: The sides differ; it has the steps so far.
            TooSlowError: Nothing is known.
        """
        self._begin()
        for _ in range(steps):
            [step] = self._dice.choices(*zip(*self._plan.steps.items(), strict=True))
            getattr(self, step)(self._dice.choice("abcdef"[: self._plan.members]))
        self._finish()

    def end(self) -> None:
        """Close all members of a script that did not end."""
        for member in self._modes:
            self._ours.close(member)
            self._theirs.close(member)

    def _begin(self) -> None:
        """Let both begin, one behind the records that are there before."""
        self.produce("a")
        if "share.auto.offset.reset" not in self._plan.settings:
            # Kafka keeps where it begins with the first acknowledgement, so it must get one.
            self.poll("a", stays=True)
            self.produce("a")
            for number, _ in self.poll("a"):
                if self._modes["a"] == "explicit":
                    self._acknowledge("a", number, "accept")
            self.commit("a")
            self.close("a")

    def _finish(self) -> None:
        for member in list(self._modes):
            self.close(member)
        while self.poll("a"):
            if self._modes["a"] == "explicit":
                for number in self._held["a"]:
                    self._acknowledge("a", number, "accept")
            self.commit("a")
        self._theirs.collect()
        ours, theirs = self._ours.results, self._theirs.results
        for number in self._late:  # See `commit`.
            silent = ours[number, _LATE] - theirs[number, _LATE]
            if silent > 0:
                theirs[number, _LATE] += silent
                theirs[number, "-"] -= silent
        self._check("the callbacks", ours, theirs)

    def _check(self, what: str, ours: object, theirs: object) -> None:
        self.lines.append(f"{what}: {ours}")
        now = monotonic()
        if any(
            now - self._since[number] > 0.7 * self._lock_seconds
            for held in self._held.values()
            for number in held
            if number in self._since
        ):
            raise TooSlowError("\n".join(self.lines))
        if ours != theirs:
            raise AssertionError("\n".join([*self.lines, f"but Kafka: {theirs}"]))

    def _both(self, what: str, ours: Callable[[], Any], theirs: Callable[[], Any]) -> Any:
        outcomes = []
        for call in (ours, theirs):
            try:
                outcomes.append(call())
            except RefusedError as error:
                outcomes.append(error.args[0])
                self.lines += [f"  {each}" for each in error.args[1:]]
        self._check(what, *outcomes)
        self.done[what.split()[0]] += 1
        return outcomes[0]

    def _open(self, member: str) -> None:
        if member not in self._modes:
            mode, limit = self._dice.choice(self._plan.modes), self._dice.choice(self._plan.limits)
            self.lines.append(f"open {member}, {mode}, at most {limit}")
            self._modes[member], self._held[member], self._away[member] = mode, {}, set()
            self._ours.open(member, mode, limit)
            self._theirs.open(member, mode, limit)

    # Steps

    def produce(self, _: str, how: str = "plain") -> None:
        """Write a few records."""
        count = self._dice.randint(1, 6)
        self.lines.append(f"produce {count}, {how}")
        self._ours.produce(count, how=how)
        self._theirs.produce(count, how=how)
        if how != "abort":
            self._kept += range(self._count, self._count + count)
            self._batches.append(self._count)
        self._count += count

    def commit_transaction(self, _: str) -> None:
        """Write records in a transaction."""
        self.produce(_, "commit")

    def abort_transaction(self, _: str) -> None:
        """Write records in a transaction that is aborted."""
        self.produce(_, "abort")

    def poll(self, member: str, *, stays: bool = False) -> list[Delivery]:
        """Ask for records; by one that must acknowledge others before, too.

        Renewals and releases are committed before.  A poll that sends renewals lets Kafka's
        consumer take further records in its background; one that sends releases may return what
        it releases, or not, as the broker is fast or slow.  So is what was said if a record is
        left: a poll that is refused sends it, but only Kafka's.
        """
        self._open(member)
        said = {*self._held[member].values()}
        if {"release", "renew"} & said or (None in said and said != {None}):
            self.commit(member)
        found: list[Any] = []

        def ours() -> Any:
            found.append(self._ours.poll(member))
            return found[0]

        def theirs() -> Any:
            return self._theirs.poll(member, waits=found != [[]])

        records = self._both(f"poll {member}", ours, theirs)
        if isinstance(records, str):
            return []
        before, self._held[member] = self._held[member], dict.fromkeys(dict(records))
        self._away[member] = set()
        self._since |= {number: monotonic() for number, _ in records if number not in before}
        if not records and not stays:
            self.close(member)
        return records

    def acknowledge(self, member: str) -> None:
        """Say what becomes of some records of a member, in any order."""
        held = self._may_judge(member)
        some = self._dice.sample(held, self._dice.randint(0, len(held)))
        for number in some:
            self._acknowledge(member, number, self._dice.choice(VERDICTS))

    def acknowledge_all(self, member: str) -> None:
        """Say what becomes of all records of a member of which it did not say so."""
        for number in self._may_judge(member):
            if self._held[member][number] is None:
                self._acknowledge(member, number, self._dice.choice(VERDICTS))

    def acknowledge_other(self, member: str) -> None:
        """Acknowledge a record that the member may not have."""
        number = self._dice.choice(self._kept)
        if self._modes.get(member) == "explicit" and number not in self._away[member]:
            self._acknowledge(member, number, "accept")

    def _may_judge(self, member: str) -> list[int]:
        # Kafka's consumer refuses all in implicit mode, and those of records that a commit renewed
        # until they are polled again.
        if self._modes.get(member) != "explicit":
            return []
        return [number for number in self._held[member] if number not in self._away[member]]

    def _acknowledge(self, member: str, number: int, verdict: str) -> None:
        outcome = self._both(
            f"acknowledge {number} of {member}, {verdict}",
            lambda: self._ours.acknowledge(member, number, verdict),
            lambda: self._theirs.acknowledge(member, number, verdict),
        )
        if outcome is None:
            self._held[member][number] = verdict

    def commit(self, member: str) -> None:
        """Commit what the member said.

        Kafka accepts a late acknowledgement of a record below the start of the group.
        """
        if member not in self._modes:
            return
        held, found = self._held[member], dict[int, str]()

        def ours() -> Any:
            found.update(self._ours.commit(member))
            return found

        def theirs() -> Any:
            results = self._theirs.commit(member)
            if self._late & held.keys():
                silent = {where for where, kind in results.items() if kind == "-"}
                results |= {where: found[where] for where in silent if found.get(where) == _LATE}
            return results

        self._both(f"commit {member}", ours, theirs)
        if self._modes[member] == "implicit":
            held.clear()
        renewed = {number for number, said in held.items() if said == "renew"}
        self._since |= dict.fromkeys(renewed, monotonic())
        self._away[member] |= renewed
        self._held[member] = {
            number: None if number in renewed else said
            for number, said in held.items()
            if said is None or number in renewed
        }

    def close(self, member: str) -> None:
        """Let a member leave; it may come again."""
        if member in self._modes:
            self.lines.append(f"close {member}")
            self._ours.close(member)
            self._theirs.close(member)
            del self._modes[member]
            del self._held[member]

    def end_locks(self, _: str) -> None:
        """Let the locks of all records end."""
        self.lines.append("all locks end")
        self._since.clear()
        self._late.update(*self._held.values())
        for side in (self._ours, self._theirs):
            side.wait(self._lock_seconds + 0.5)

    def delete(self, _: str) -> None:
        """Delete batches, also those of which members have records.

        Kafka's share groups deliver deleted records if the log starts in the middle of a batch.
        """
        later = [number for number in self._batches if number > self._first][:3]
        if later:
            self._first = self._dice.choice(later)
            self.lines.append(f"delete what is before {self._first}")
            self._ours.delete_before(self._first)
            self._theirs.delete_before(self._first)
