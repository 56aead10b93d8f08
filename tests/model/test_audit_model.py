"""The audit against a model: producers, groups, kills, and differences planted in a copy.

The model is a list of what each client did.  The audit must say the same for each window, tier
and client, with and without reports, and name what was planted, and nothing else.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from support import forks
from support.audit_faults import double, lose
from support.tiers import choose

import embedlog
from embedlog import TopicPartition
from embedlog.audit.reporter import reporter_of
from embedlog.compaction.rebatch import rebatch

HOUR, MINUTE = 3_600_000, 60_000
NOON = 1_700_049_600_000 // HOUR * HOUR
PARTITIONS = 2
SCHEMA = pa.schema([("a", pa.int64()), ("at", pa.timestamp("ms", tz="UTC"))])


def in_child(work: Callable[[], Any]) -> Any:
    """Run work in a child that is killed at the end of it; return what it sent before."""
    reading, writing = os.pipe()

    def run() -> None:
        os.write(writing, json.dumps(work()).encode())
        os.kill(os.getpid(), signal.SIGKILL)

    child = forks.Child(run)
    os.close(writing)
    assert child.end().was_killed()
    with os.fdopen(reading) as answer:
        return json.loads(answer.read())


class Model:
    """A log with an audited topic, and what was done to it."""

    def __init__(self, path: Any, dice: random.Random) -> None:
        self.dice = dice
        self.log = embedlog.open(path, clock=lambda: NOON, maintenance=False)
        self.typed = dice.random() < 0.5
        config = {"audit": True, "segment.bytes": dice.choice([6_000, 1 << 30])}
        typed = {"schema": SCHEMA, "timestamp": "at"} if self.typed else {}
        self.log.create_topic("t", PARTITIONS, config, **typed)
        self.times: dict[int, list[int]] = {number: [] for number in range(PARTITIONS)}
        """The timestamp of each record, by offset."""
        self.writers: dict[int, list[tuple[str, bool]]] = {n: [] for n in range(PARTITIONS)}
        """Who wrote it, and whether that was reported."""
        self.producers: dict[str, Any] = {}
        self.started = 0
        self.gathered = False
        self.starts = dict.fromkeys(range(PARTITIONS), 0)
        """Below which offset retention has deleted all."""
        self.ranges: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        """By group, partition and what happened: ``read`` and committed, the same but
        ``unreported``, ``return``, or ``commit`` of a position."""

    # Producers

    def random_times(self) -> list[int]:
        """Return timestamps in one minute, in order over hours, or in any order."""
        count, dice = self.dice.choice([1, 3, 40]), self.dice
        kind = dice.randrange(3)
        if kind == 0:
            return [NOON + dice.randrange(3) * HOUR] * count
        times = [NOON + dice.randrange(4 * HOUR) for _ in range(count)]
        return sorted(times) if kind == 1 else times

    def table(self, times: list[int]) -> pa.Table:
        if self.typed:
            return pa.table({"a": range(len(times)), "at": pa.array(times, SCHEMA.field(1).type)})
        at = pa.array(times, pa.timestamp("ms", tz="UTC"))
        return pa.table({"value": [b"v"] * len(times), "timestamp": at})

    def send(self, producer: Any, number: int, times: list[int]) -> None:
        """Write records in one of the ways."""
        how = self.dice.randrange(3)
        if how == 0:
            producer.append_table("t", self.table(times), partition=number).result()
        elif how == 1 and not self.typed:
            values = [b"v"] * len(times)
            producer.send_batch("t", values, timestamps=times, partition=number).result()
        else:
            for row, time in enumerate(times):
                at = datetime.fromtimestamp(time / 1000, UTC)
                value = {"a": row, "at": at} if self.typed else b"v"
                timestamp = None if self.typed else time
                future = producer.send("t", value, partition=number, timestamp_ms=timestamp)
                if self.dice.random() < 0.3:
                    future.result()
            producer.flush()

    def write(self) -> None:
        """Let a producer that runs, or a new one, write."""
        name = self.dice.choice([*self.producers, ""])
        if not name:
            self.started += 1
            name = f"p{self.started}"
            codec = self.dice.choice(["none", "lz4"])
            self.producers[name] = self.log.producer(client_id=name, compression_type=codec)
        times, number = self.random_times(), self.dice.randrange(PARTITIONS)
        self.send(self.producers[name], number, times)
        self.wrote(name, number, times)

    def wrote(self, name: str, number: int, times: list[int], reported: bool = True) -> None:
        self.times[number] += times
        self.writers[number] += [(name, reported)] * len(times)

    def close_producer(self) -> None:
        if self.producers:
            self.producers.pop(self.dice.choice(list(self.producers))).close()

    def kill_producer(self) -> None:
        """Let a producer write in a child that is killed; it may have reported before."""
        self.started += 1
        name, number = f"k{self.started}", self.dice.randrange(PARTITIONS)
        batches = [self.random_times() for _ in range(self.dice.randrange(1, 4))]
        reports = [self.dice.random() < 0.4 for _ in batches]

        def work() -> None:
            producer = self.log.producer(client_id=name)
            for times, reported in zip(batches, reports, strict=True):
                self.send(producer, number, times)
                if reported:
                    reporter_of(self.log.root).report_all()

        in_child(work)
        for row, times in enumerate(batches):
            self.wrote(name, number, times, any(reports[row:]))

    # Groups

    def consume(self, group: str, kill: bool) -> list[tuple[str, int, int, int]]:
        """Poll, commit and seek; return which ranges were committed, and given back."""
        dice = random.Random(self.dice.random())
        settings = {"auto_offset_reset": "earliest", "enable_auto_commit": False}
        consumer = self.log.consumer("t", group_id=group, **settings)
        facts: list[tuple[str, int, int, int]] = []
        reported = 0
        pending: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for _ in range(dice.randrange(1, 6)):
            for tp, records in consumer.poll(0, dice.choice([1, 10, 100])).items():
                pending[tp.partition].append((records[0].offset, records[-1].offset + 1))
            if dice.random() < 0.6:
                positions = {tp: consumer.position(tp) for tp in consumer.assignment()}
                consumer.commit(positions)
                for tp, position in positions.items():
                    facts.append(("commit", tp.partition, position, position))
                    ranges, pending[tp.partition] = pending[tp.partition], []
                    for first, stop in ranges:
                        if first < position:
                            facts.append(("read", tp.partition, first, min(stop, position)))
                        if stop > position:
                            pending[tp.partition].append((max(first, position), stop))
            # Of a killed member only the last commit is known, not one before it seeked back.
            if not kill and dice.random() < 0.2:
                tp = TopicPartition("t", dice.randrange(PARTITIONS))
                if tp in consumer.assignment():
                    consumer.seek(tp, max(consumer.position(tp) - dice.randrange(1, 20), 0))
            if dice.random() < 0.2:
                reporter_of(self.log.root).report_all()
                reported = len(facts)
        if kill:
            return facts[:reported] + [
                fact if fact[0] == "commit" else ("unreported", *fact[1:])
                for fact in facts[reported:]
            ]
        consumer.close()
        for number, ranges in pending.items():
            facts += [("return", number, *part) for part in ranges]
        return facts

    def read(self) -> None:
        """Let a member of a group read; it may be killed."""
        group, kill = self.dice.choice("gh"), self.dice.random() < 0.3
        facts = in_child(lambda: self.consume(group, True)) if kill else self.consume(group, False)
        for kind, number, first, stop in facts:
            self.ranges[group, number, kind].append((first, stop))

    # Housekeeping

    def gather(self) -> None:
        """Let housekeeping gather small batches, which drops the ids of their producers."""
        for number in range(PARTITIONS):
            partition = self.log.root.partition("t", number)
            partition.roll()
            self.gathered |= bool(rebatch(partition, 1000).segments)

    def expire(self) -> None:
        """Delete records, also those that groups have not read."""
        number = self.dice.randrange(PARTITIONS)
        start = self.dice.randint(self.starts[number], len(self.times[number]))
        self.log.delete_records({TopicPartition("t", number): start})
        self.starts[number] = start

    def report(self) -> None:
        reporter_of(self.log.root).report_all()

    def run(self, steps: int) -> None:
        """Do random steps."""
        actions = [self.write] * 6 + [self.read] * 4 + [self.kill_producer, self.close_producer]
        actions += [self.report, *[self.dice.choice([self.gather, self.expire, self.expire])] * 3]
        for _ in range(steps):
            self.dice.choice(actions)()
        for name in list(self.producers):
            self.producers.pop(name).close()

    # What the audit must say

    def check(self, result: Any, lost: dict[int, set[int]], doubled: Counter[Any]) -> None:
        """Compare a result with the model."""
        expected: dict[Any, Counter[str]] = defaultdict(Counter)
        for number, times in self.times.items():
            for offset, time in enumerate(times):
                hour, (writer, reported) = time // HOUR, self.writers[number][offset]
                here = offset not in lost.get(number, ()) and offset >= self.starts[number]
                expected[hour, "producer", writer]["records"] += here or reported
                is_lost = reported and not here and offset >= self.starts[number]
                expected[hour, "producer", writer]["missing"] += is_lost
                expected[hour, "log", ""]["records"] += here
        for (hour, writer), count in doubled.items():
            expected[hour, "producer", writer]["doubled"] += count
            expected[hour, "log", ""]["records"] += count
        with_groups = not lost and not doubled and not any(self.starts.values())
        if with_groups:
            self.expect_groups(expected)
        elif not lost and not doubled:
            self.check_deleted_unread(result)
        found: dict[Any, Counter[str]] = defaultdict(Counter)
        for row in result.rows:
            counts, who = row.counts, row.who
            if who.tier != "group" or with_groups:
                key = row.window // HOUR, who.tier, who.client or who.name
                found[key].update(
                    records=counts.records,
                    missing=counts.missing,
                    doubled=counts.doubled,
                    unread=counts.unread,
                )
        self.forget_gathered(expected, found)
        assert {key: +counts for key, counts in found.items() if +counts} == {
            key: +counts for key, counts in expected.items() if +counts
        }

    def forget_gathered(self, *results: dict[Any, Counter[str]]) -> None:
        """Add up producers: whose the gathered batches of a killed one are is not known."""
        for counts in results if self.gathered else ():
            for hour, tier, name in [key for key in counts if key[1] == "producer"]:
                counts[hour, tier, ""].update(counts.pop((hour, tier, name)))

    def check_deleted_unread(self, result: Any) -> None:
        """What was deleted before a group had read it is missing; in all windows together."""
        for group in "gh":
            least = most = 0
            for number, start in self.starts.items():
                facts = {
                    kind: {o for part in self.ranges[group, number, kind] for o in range(*part)}
                    for kind in ("read", "unreported")
                }
                read = facts["read"] | facts["unreported"]
                known = sum(reported for _, reported in self.writers[number][:start])
                left = len(self.times[number]) - start
                first_read = min(read, default=start)
                # A group that has only committed so far may be known to have begun, or not.
                begin = min([first_read, *(o for o, _ in self.ranges[group, number, "commit"])])
                counts = [
                    min(len(unread), known) if known else len(unread) * bool(left)
                    for unread in (
                        set(range(first_read, start)) - read,
                        set(range(begin, start)) - facts["read"],
                    )
                ]
                # Of a killed member it is not known what it has read, and what it has left out.
                least += 0 if facts["unreported"] else counts[0]
                most += counts[1]
            rows = [row.counts for row in result.rows if row.who[:2] == ("group", group)]
            assert least <= sum(counts.deleted_unread for counts in rows) <= most
            assert all(counts.missing == counts.deleted_unread for counts in rows)

    def expect_groups(self, expected: dict[Any, Counter[str]]) -> None:
        for group in "gh":
            for number, times in self.times.items():
                count = {}
                for kind in ("read", "unreported", "return"):
                    count[kind] = Counter[int]()
                    for part in self.ranges[group, number, kind]:
                        count[kind].update(range(*part))
                committed = count["read"].keys() | count["unreported"].keys()
                if not committed:
                    continue
                for offset, time in enumerate(times):
                    row, reads = expected[time // HOUR, "group", group], count["read"][offset]
                    again = max(reads + count["return"][offset] - 1, 0)
                    row["records"] += reads or offset in committed
                    row["doubled"] += again
                    row["unread"] += offset > max(committed)


def plant(model: Model, copy: Any) -> None:
    """Lose and double records of a copy, and check that they are named."""
    dice, doubled, lost = model.dice, Counter[Any](), {}
    for number, times in model.times.items():
        partition = copy.root.partition("t", number)
        offsets = range(len(times))
        for offset in dice.sample(offsets, min(len(times), dice.randrange(3))):
            name, reported = model.writers[number][offset]
            closed = reported and not name.startswith("k")
            if closed and partition.reader(offset).read(1)[0].producer_id is not None:
                for minute, count in double(partition, offset)[1].items():
                    doubled[minute * MINUTE // HOUR, name] += count
        count = min(len(times), dice.randrange(30))
        if model.gathered and not all(reported for _, reported in model.writers[number]):
            count = 0  # What is gathered of a killed producer may hide a loss of another one.
        lost[number] = lose(partition, dice.sample(offsets, count))
    model.check(copy.audit("t", "1h"), lost, doubled)


@pytest.mark.parametrize("seed", range(choose(quick=2, test=4, all=80, nightly=800)))
def test_the_audit_agrees_with_the_model(tmp_path, seed):
    """Every window of every tier, after any order of writes, reads, kills and reports."""
    dice = random.Random(seed)
    model = Model(tmp_path / "log", dice)
    model.run(dice.randrange(5, 30))

    model.check(model.log.audit("t", "1h"), {}, Counter())

    model.log.close()
    if any(model.starts.values()):
        return
    shutil.copytree(model.log.path, tmp_path / "copy")
    with embedlog.open(tmp_path / "copy", clock=lambda: NOON, maintenance=False) as copy:
        plant(model, copy)
