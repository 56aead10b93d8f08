"""What a log must, may and must not hold, according to the journals of its writers.

Acknowledged records are at their offsets, once; there is no hole before them, and
no record that was never sent; what a truncation removed does not come back; and
the next append continues at the right offset.  After a power cut each partition has a
prefix of what was sent, with all that was flushed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embedlog.errors import OutOfOrderSequenceError
from support.log_programs import Entry, encode, entries, values_of
from support.typed_bytes import lists

SENDS = ("send", "many", "produce")


@dataclass(slots=True)
class PartitionModel:
    """What the journal says about one partition."""

    sent: dict[int, Entry] = field(default_factory=dict)
    acked: dict[int, tuple[int, str]] = field(default_factory=dict)
    unsure: set[int] = field(default_factory=set)
    """Sends that may have been removed, by a truncation or deletion, or not."""
    removed: set[int] = field(default_factory=set)
    """Sends that were removed or refused: no reader may see them."""
    durable: set[int] = field(default_factory=set)
    """Sends that were flushed."""
    left: set[int] = field(default_factory=set)
    """Sends that a killed writer wrote and never published; the next append truncates them."""
    at: dict[int, int] = field(default_factory=dict)
    """The offsets of sends that may have a gap before them."""
    end_after_gap: int | None = None
    """Where a truncation ended the log, until something is appended, if a gap was before it."""
    cut: bool = False

    def truncate(self, offset: int, done: bool) -> None:
        """Note a truncation."""
        self.cut = True
        self.end_after_gap = offset if offset in self.at.values() else None
        for send, entry in self.sent.items():
            ack = self.acked.get(send)
            if ack is None or ack[0] + entry[3] > offset:
                self.unsure.add(send)
                self.durable.discard(send)
                if done:
                    self.removed.add(send)

    def repaired(self) -> None:
        """Note a repair after a failed flush: what was never flushed may be lost."""
        durable = max((send for send, (_, how) in self.acked.items() if how == "fsync"), default=-1)
        self.unsure.update(send for send in self.sent if send > durable)

    def flushed(self) -> None:
        """Note that all acknowledged sends are durable."""
        self.durable.update(self.acked.keys() - self.removed)

    def acknowledge(self, send: int, base: int, durability: str) -> None:
        """Note that a send is at an offset."""
        self.acked[send] = base, durability
        self.end_after_gap = None
        self.removed |= self.left
        self.left = set()
        if durability == "fsync":
            self.flushed()

    def recovered(self, present: list[int]) -> None:
        """Note which sends were there when the log was opened: they stay, others do not return."""
        self.removed |= self.sent.keys() - set(present)
        self.acked = {send: ack for send, ack in self.acked.items() if send in present}
        self.durable, self.unsure, self.left = set(present), set(), set()

    def is_prefix(self, order: list[int]) -> bool:
        """Whether these are the first sends that may be there, with or without those left."""
        possible = [send for send in self.sent if send not in self.removed]
        published = [send for send in possible if send not in self.left]
        return order in (published[: len(order)], possible[: len(order)])

    def last_unsure(self) -> Entry | None:
        """Return the last send, if an idempotent producer made it and its outcome is unknown."""
        if self.cut or not self.sent:
            return None
        send = max(self.sent)
        entry = self.sent[send]
        unsure = send not in self.acked and send not in self.removed and send not in self.unsure
        return entry if unsure and entry[6] is not None else None


@dataclass(slots=True)
class LogModel:
    """What the journal says about a whole root."""

    parts: dict[tuple[str, int], PartitionModel] = field(default_factory=dict)
    topics: dict[str, int] = field(default_factory=dict)
    """Topics that must exist, with at least so many partitions."""
    unsure: set[str] = field(default_factory=set)
    """Topics that may exist or not."""
    appended: set[tuple[str, int]] = field(default_factory=set)
    """Partitions that the process has appended to: `flush` and `close` flush those."""

    def part(self, topic: str, partition: int) -> PartitionModel:
        return self.parts.setdefault((topic, partition), PartitionModel())

    def of_topic(self, topic: str) -> list[PartitionModel]:
        return [part for (name, _), part in self.parts.items() if name == topic]

    def recovered(self, topics: dict[str, int], present: list[tuple[str, int, list[int]]]) -> None:
        """Note what was there when the log was opened."""
        self.topics, self.unsure, self.appended = dict(topics), set(), set()
        sends = {(topic, partition): found for topic, partition, found in present}
        for key, part in self.parts.items():
            part.recovered(sends.get(key, []))


def replay(journal: list[Entry]) -> LogModel:
    """Derive what must and may be in the log."""
    model = LogModel()
    opened: list[tuple[str, int, int]] = []
    partitions: dict[int, tuple[str, int]] = {}
    for kind, *what in journal:
        if kind == "do":
            _begin(model, what)
            opened = []
        elif kind == "send":
            part = model.part(what[0], what[1])
            part.sent[what[2]] = what
            at = what[8] if len(what) > 8 else part.end_after_gap
            if at is not None:
                part.at[what[2]] = at
            opened.append((what[0], what[1], what[2]))
            partitions[what[2]] = what[0], what[1]
        elif kind == "acked":
            model.part(*partitions[what[0]]).acknowledge(*what)
            model.appended.add(partitions[what[0]])
        elif kind in ("cut", "cut done"):
            model.part(what[0], what[1]).truncate(what[2], done=kind == "cut done")
        elif kind == "repaired":
            model.part(what[0], what[1]).repaired()
        elif kind == "refused":
            model.part(what[0], what[1]).removed.update(what[2])
        elif kind == "left":
            model.part(what[0], what[1]).left = set(what[2])
        elif kind == "recovered":
            model.recovered(*what)
        elif kind == "did":
            _finish(model, what)
        elif kind == "failed":
            _fail(model, what, opened)
    return model


def _begin(model: LogModel, step: Entry) -> None:
    name, *rest = step
    if name == "create" and rest[0] not in model.topics:
        model.unsure.add(rest[0])
    elif name == "drop":
        model.topics.pop(rest[0], None)
        model.unsure.add(rest[0])
        for part in model.of_topic(rest[0]):
            part.unsure.update(part.sent)
            part.durable.clear()
            part.cut = True
    elif name in ("open", "die", "leave"):
        # Of another process: what the one before wrote is not flushed by this one.
        model.appended = set()


def _finish(model: LogModel, step: Entry) -> None:
    name, *rest = step
    if name in ("create", "grow"):
        model.topics[rest[0]] = max(rest[1], model.topics.get(rest[0], 0))
        model.unsure.discard(rest[0])
    elif name == "drop":
        model.unsure.discard(rest[0])
        for part in model.of_topic(rest[0]):
            part.removed.update(part.sent)
            # Another topic of that name begins at 0.
            part.acked.clear()
    elif name in ("flush", "close"):
        for key in [(rest[0], rest[1])] if rest else model.appended:
            model.part(*key).flushed()


def _fail(model: LogModel, what: Entry, opened: list[tuple[str, int, int]]) -> None:
    _, _, _, name, *_ = what
    if name not in SENDS:
        return
    single = len(opened) == 1
    for topic, partition, send in opened:
        part = model.part(topic, partition)
        if single and part.sent[send][7] == "os" and send not in part.acked:
            part.removed.add(send)  # A failed append leaves nothing that a reader can see.


# Judging


def check(
    log: Any,
    journal: Path | list[Entry],
    *,
    company: bool = False,
    goes_on: bool = True,
    power_cut: bool = False,
) -> dict[tuple[str, int], list[int]]:
    """Return the sends in each partition, if the log is as the journal says, and goes on so.

    Args:
        journal: The file that `ProgramProcess` wrote, or its entries.
        company: Other processes have the root open, so files of killed ones may be left.
        goes_on: Whether to append and read that; the journal can then not be used again.
        power_cut: Whether the last sends may be lost that were not flushed.

    Raises:
        AssertionError: It is not.
    """
    model = replay(entries(journal) if isinstance(journal, Path) else journal)
    findings = [
        str(finding) for finding in log.housekeeping.verify() if finding.topic or not company
    ]
    assert findings == [], findings
    present = log.topics()
    for topic, partitions in model.topics.items():
        assert topic in present, f"{topic} is gone"
        assert log.root.partitions(topic) >= partitions
    assert set(present) <= {*model.topics, *model.unsure}, present
    found = {}
    for (topic, partition), part in sorted(model.parts.items()):
        if topic in present and partition < log.root.partitions(topic):
            bases = _check_part(log, topic, partition, part, power_cut)
            found[topic, partition] = list(bases)
            if power_cut and goes_on:
                _check_resending(log, topic, partition, part, bases)
            if goes_on:
                unsure = None if power_cut else part.last_unsure()
                _check_goes_on(log, topic, partition, part, unsure)
        else:
            assert topic not in model.topics or partition >= model.topics[topic]
    return found


def rows(log: Any, topic: str, partition: int, offset: int = 0) -> list[tuple[int, bytes]]:
    """Read everything: (offset, value) of each record."""
    reader = log.partition(topic, partition).reader(offset)
    records: list[tuple[int, bytes]] = []
    while batches := reader.read():
        for batch in batches:
            records += zip(batch.offsets().to_pylist(), lists(batch)[2], strict=True)
    return records


def sends_of(records: list[tuple[int, bytes]], at: Mapping[int, int] = {}) -> dict[int, int]:
    """Check that records are whole sends without a hole between; return their base offsets.

    Args:
        at: The offsets of sends that may have a gap before them.
    """
    bases: dict[int, int] = {}
    due = records[0][0] if records else 0
    for offset, value in records:
        send, row = map(int, value.split(b"/")[2:4])
        assert offset == due or (row == 0 and at.get(send) == offset), f"a hole before {offset}"
        due = offset + 1
        if row == 0:
            assert send not in bases, f"send {send} is there twice, at {bases[send]} and {offset}"
            bases[send] = offset
        assert bases.get(send) == offset - row, f"send {send} is not whole at {offset}"
    return bases


def _check_part(
    log: Any, topic: str, partition: int, part: PartitionModel, power_cut: bool
) -> dict[int, int]:
    records = rows(log, topic, partition)
    bases = sends_of(records, part.at)
    end = log.partition(topic, partition).end_offset()
    if not part.at:
        assert len(records) == end, f"{topic}-{partition} ends at {end}, {len(records)} were read"
    if power_cut:
        order = list(bases)
        assert part.is_prefix(order), f"{topic}-{partition} has no prefix of what was sent: {order}"
    for writer in (0, 1):
        # Two may write at once; each has 50 numbers of every 100 to itself.
        order = [send for send in bases if send // 50 % 2 == writer]
        assert order == sorted(order), f"{topic}-{partition} is out of order: {order}"
    values = dict(records)
    for send, base in bases.items():
        assert send in part.sent, f"{topic}-{partition}: {send} was never sent there"
        assert send not in part.removed, f"{topic}-{partition}: {send} is back at {base}"
        _, _, _, count, size, *_ = part.sent[send]
        expected = values_of(topic, partition, send, count, size)
        assert [values[base + row] for row in range(count)] == expected
    for send, (base, _) in part.acked.items():
        if send in bases:
            assert bases[send] == base, f"{send} was acked at {base} and is at {bases[send]}"
        elif send in part.durable if power_cut else send not in part.unsure:
            raise AssertionError(f"{topic}-{partition}: {send}, acked at {base}, is lost")
    return bases


def _check_resending(
    log: Any, topic: str, partition: int, part: PartitionModel, bases: dict[int, int]
) -> None:
    """A producer that repeats its last batches gets each of them once into the log (G16)."""
    numbered = [entry for entry in part.sent.values() if entry[6] and entry[2] not in part.removed]
    for entry in numbered[-4:]:
        send, here = entry[2], log.partition(topic, partition)
        try:
            (receipt,) = here.append([encode(*entry[:7])])
        except OutOfOrderSequenceError:
            # More than one append was lost: the producer has to go on from where the log ends.
            assert send not in bases, f"{here}: {send} is there, and its repetition was refused"
            return
        assert receipt.duplicate == (send in bases), f"{here}: {send} was repeated: {receipt}"
        assert receipt.base_offset == bases.get(send, receipt.base_offset)


def _check_goes_on(
    log: Any, topic: str, partition: int, part: PartitionModel, unsure: Entry | None
) -> None:
    """Repeat a send without an answer, append another, read both."""
    here = log.partition(topic, partition)
    if unsure is not None:
        [receipt] = here.append([encode(*unsure[:7])])
        bases = sends_of(rows(log, topic, partition), part.at)
        assert bases[unsure[2]] == receipt.base_offset
    due = here.tail().log_end_offset
    send = 1_000_000 + due
    receipts = [
        here.append([encode(topic, partition, send + n, 2, 30)], durability=how)[0]
        for n, how in enumerate(("os", "fsync"))
    ]
    assert [receipt.base_offset for receipt in receipts] == [due, due + 2]
    bases = sends_of(rows(log, topic, partition, due))
    assert (bases[send], bases[send + 1]) == (due, due + 2)
    assert here.end_offset() == due + 4
