"""What a log must, may and must not hold, according to the journals of its writers.

Acknowledged records are at their offsets, once; there is no hole before them, and
no record that was never sent; what a truncation removed does not come back; and
the next append continues at the right offset.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embedlog.errors import UnknownTopicOrPartitionError
from support.log_programs import Entry, encode, entries, values_of

SENDS = ("send", "many", "produce")


@dataclass(slots=True)
class Part:
    """What is known of one partition."""

    sent: dict[int, Entry] = field(default_factory=dict)
    acked: dict[int, tuple[int, str]] = field(default_factory=dict)
    loose: set[int] = field(default_factory=set)
    """Sends that a truncation or deletion may have removed, or not."""
    gone: set[int] = field(default_factory=set)
    """Sends that were removed, or were refused: nobody may see them."""
    cut: bool = False

    def put(self, offset: int, done: bool) -> None:
        """Note a truncation."""
        self.cut = True
        for send, entry in self.sent.items():
            place = self.acked.get(send)
            if place is None or place[0] + entry[3] > offset:
                self.loose.add(send)
                if done:
                    self.gone.add(send)

    def repaired(self) -> None:
        """Note a repair after a failed flush: what was never flushed may be lost."""
        durable = max((send for send, (_, how) in self.acked.items() if how == "fsync"), default=-1)
        self.loose.update(send for send in self.sent if send > durable)

    def last_unsure(self) -> Entry | None:
        """The last send, if it was an idempotent producer's and nobody knows what became of it."""
        if self.cut or not self.sent:
            return None
        send = max(self.sent)
        entry = self.sent[send]
        unsure = send not in self.acked and send not in self.gone and send not in self.loose
        return entry if unsure and entry[6] is not None else None


@dataclass(slots=True)
class Model:
    """What the journal says about a whole root."""

    parts: dict[tuple[str, int], Part] = field(default_factory=dict)
    there: dict[str, int] = field(default_factory=dict)
    """Topics that must be there, with at least so many partitions."""
    unsure: set[str] = field(default_factory=set)
    """Topics that may be there or not."""
    durability_errors: set[tuple[str, int]] = field(default_factory=set)

    def part(self, topic: str, partition: int) -> Part:
        return self.parts.setdefault((topic, partition), Part())

    def of_topic(self, topic: str) -> list[Part]:
        return [part for (name, _), part in self.parts.items() if name == topic]


def replay(journal: list[Entry]) -> Model:
    """Work out what must and may be there."""
    model = Model()
    opened: list[tuple[str, int, int]] = []
    places: dict[int, tuple[str, int]] = {}
    for kind, *what in journal:
        if kind == "do":
            opened = _begin(model, what)
        elif kind == "send":
            model.part(what[0], what[1]).sent[what[2]] = what
            opened.append((what[0], what[1], what[2]))
            places[what[2]] = what[0], what[1]
        elif kind == "acked":
            model.part(*places[what[0]]).acked[what[0]] = what[1], what[2]
        elif kind in ("cut", "cut done"):
            model.part(what[0], what[1]).put(what[2], done=kind == "cut done")
        elif kind == "repaired":
            model.part(what[0], what[1]).repaired()
        elif kind == "did":
            _finish(model, what)
        elif kind == "failed":
            _fail(model, what, opened)
    return model


def _begin(model: Model, step: Entry) -> list[tuple[str, int, int]]:
    name, *rest = step
    if name == "create" and rest[0] not in model.there:
        model.unsure.add(rest[0])
    elif name == "drop":
        model.there.pop(rest[0], None)
        model.unsure.add(rest[0])
        for part in model.of_topic(rest[0]):
            part.loose.update(part.sent)
            part.cut = True
    return []


def _finish(model: Model, step: Entry) -> None:
    name, *rest = step
    if name in ("create", "grow"):
        model.there[rest[0]] = max(rest[1], model.there.get(rest[0], 0))
        model.unsure.discard(rest[0])
    elif name == "drop":
        model.unsure.discard(rest[0])
        for part in model.of_topic(rest[0]):
            part.gone.update(part.sent)
            # Another topic of that name begins at 0.
            part.acked.clear()


def _fail(model: Model, what: Entry, opened: list[tuple[str, int, int]]) -> None:
    error, _, _, name, *rest = what
    if name in ("create", "grow") and name == "create":
        return
    if error == "DurabilityError" and name in (*SENDS, "roll", "cut"):
        model.durability_errors.add((rest[0], rest[1]))
    if name not in SENDS:
        return
    single = len(opened) == 1
    for topic, partition, send in opened:
        part = model.part(topic, partition)
        if single and part.sent[send][7] == "os" and send not in part.acked:
            part.gone.add(send)  # A failed append leaves nothing that a reader can see.


# Judging


def check(log: Any, journal: Path, *, company: bool = False, goes_on: bool = True) -> None:
    """Raise AssertionError unless the log is as the journal says, and goes on so.

    Args:
        journal: The file that `ProgramProcess` wrote.
        company: Other processes have the root open, so files of killed ones may be left.
        goes_on: Whether to append and read that; the journal can then not be used again.
    """
    model = replay(entries(journal))
    findings = [str(finding) for finding in log.verify() if finding.topic or not company]
    assert findings == [], findings
    present = log.topics()
    for topic, partitions in model.there.items():
        assert topic in present, f"{topic} is gone"
        assert log.root.partitions(topic) >= partitions
    assert set(present) <= {*model.there, *model.unsure}, present
    for (topic, partition), part in sorted(model.parts.items()):
        if topic in present and partition < log.root.partitions(topic):
            _check_part(log, topic, partition, part)
            if goes_on:
                _check_goes_on(log, topic, partition, part)
        else:
            assert topic not in model.there or partition >= model.there[topic]


def rows(log: Any, topic: str, partition: int, offset: int = 0) -> list[tuple[int, bytes]]:
    """Read everything: (offset, value) of each record."""
    reader = log.partition(topic, partition).reader(offset)
    found: list[tuple[int, bytes]] = []
    while batches := reader.read():
        for one in batches:
            found += zip(one.offsets().to_pylist(), one.lists()[2], strict=True)
    return found


def sends_of(found: list[tuple[int, bytes]]) -> dict[int, int]:
    """Check that records are whole sends without a hole between; returns their base offsets."""
    bases: dict[int, int] = {}
    for place, (offset, value) in enumerate(found):
        assert offset == found[0][0] + place, f"a hole before offset {offset}"
        send, row = map(int, value.split(b"/")[2:4])
        if row == 0:
            assert send not in bases, f"send {send} is there twice, at {bases[send]} and {offset}"
            bases[send] = offset
        assert bases.get(send) == offset - row, f"send {send} is not whole at {offset}"
    return bases


def _check_part(log: Any, topic: str, partition: int, part: Part) -> None:
    found = rows(log, topic, partition)
    bases = sends_of(found)
    end = log.partition(topic, partition).end_offset()
    assert len(found) == end, f"{topic}-{partition} ends at {end}, {len(found)} were read"
    for writer in (0, 1):
        # Two may write at once; each has 50 numbers of every 100 to itself.
        order = [send for send in bases if send // 50 % 2 == writer]
        assert order == sorted(order), f"{topic}-{partition} is out of order: {order}"
    values = dict(found)
    for send, base in bases.items():
        assert send in part.sent, f"{topic}-{partition}: {send} was never sent there"
        assert send not in part.gone, f"{topic}-{partition}: {send} is back at {base}"
        _, _, _, count, size, *_ = part.sent[send]
        wanted = values_of(topic, partition, send, count, size)
        assert [values[base + row] for row in range(count)] == wanted
    for send, (base, _) in part.acked.items():
        if send in bases:
            assert bases[send] == base, f"{send} was acked at {base} and is at {bases[send]}"
        elif send not in part.loose:
            raise AssertionError(f"{topic}-{partition}: {send}, acked at {base}, is lost")


def _check_goes_on(log: Any, topic: str, partition: int, part: Part) -> None:
    """Repeat what nobody answered, append another, read both."""
    here = log.partition(topic, partition)
    unsure = part.last_unsure()
    if unsure is not None:
        [receipt] = here.append([encode(*unsure[:7])])
        bases = sends_of(rows(log, topic, partition))
        assert bases[unsure[2]] == receipt.base_offset
    due = here.tail().log_end_offset
    send = 1_000_000 + due
    receipts = [
        here.append([encode(topic, partition, send + n, 2, 30)], durability=how)[0]
        for n, how in enumerate(("os", "fsync"))
    ]
    assert [one.base_offset for one in receipts] == [due, due + 2]
    bases = sends_of(rows(log, topic, partition, due))
    assert (bases[send], bases[send + 1]) == (due, due + 2)
    assert here.end_offset() == due + 4


def topic_is_gone(log: Any, topic: str) -> bool:
    try:
        log.topic(topic)
    except UnknownTopicOrPartitionError:
        return True
    return False
