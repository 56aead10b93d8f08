"""What a log promised before a power cut, and whether the root that is left keeps it.

A workload notes what it is about to do and what was acknowledged; a `Promise`
follows from the notes before the cut.  Each partition must hold a prefix of what
was sent: no hole, no duplicate, nothing else, and at least what was flushed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from embedlog.errors import OutOfOrderSequenceError
from embedlog.files import Files
from embedlog.partition.partition_log import PartitionLog
from embedlog.root.root import Root
from embedlog.root.verify import verify_root
from support.roots import abandon, encoded, open_root, rows
from support.typed_bytes import as_typed


class Sent(NamedTuple):
    """One batch as it was handed to the log."""

    base: int
    values: tuple[bytes, ...]
    producer: tuple[int, int, int] | None = None
    typed: bool = False
    """Whether it is for a typed topic."""

    @property
    def next(self) -> int:
        return self.base + len(self.values)

    def encode(self) -> Any:
        batch = encoded(*self.values, producer=self.producer)
        return as_typed(batch) if self.typed else batch


@dataclass
class PartitionPromise:
    """What was sent to a partition, in order, and how many of those batches must be there."""

    sent: list[Sent] = field(default_factory=list)
    floor: int = 0
    stray: list[Sent] | None = None
    """The batches sent, and those that a killed writer wrote and never published."""


def is_typed(topic: str) -> bool:
    """Whether a topic of a workload is typed: every other one is."""
    return int(topic[1:]) % 2 == 0


def records(batches: list[Sent]) -> list[tuple[int, bytes]]:
    return [
        (batch.base + row, value) for batch in batches for row, value in enumerate(batch.values)
    ]


@dataclass
class Promise:
    """The topics that may exist, and those that must."""

    topics: dict[str, list[PartitionPromise]] = field(default_factory=dict)
    must: set[str] = field(default_factory=set)

    def part(self, topic: str, number: int) -> PartitionPromise:
        return self.topics[topic][number]


def promised(notes: list[Any]) -> Promise:
    """Work out what follows from the notes of a workload."""
    promise = Promise()
    for kind, *facts in notes:
        _FOLD[kind](promise, *facts)
    return promise


def _create(promise: Promise, topic: str, count: int) -> None:
    promise.topics[topic] = [PartitionPromise() for _ in range(count)]


def _created(promise: Promise, topic: str) -> None:
    promise.must.add(topic)


def _delete(promise: Promise, topic: str) -> None:
    promise.must.discard(topic)


def _deleted(promise: Promise, topic: str) -> None:
    del promise.topics[topic]


def _append(promise: Promise, topic: str, number: int, batches: list[Sent]) -> None:
    promise.part(topic, number).sent += batches


def _acked(promise: Promise, topic: str, number: int) -> None:
    # A refused append leaves nothing.
    promise.part(topic, number).stray = None


def _unpublished(promise: Promise, topic: str, number: int, batches: list[Sent]) -> None:
    part = promise.part(topic, number)
    part.stray = [*part.sent, *batches]


def _durable(promise: Promise, topic: str, number: int) -> None:
    part = promise.part(topic, number)
    part.floor = len(part.sent)


def _cut(promise: Promise, topic: str, number: int, count: int) -> None:
    part = promise.part(topic, number)
    part.floor = min(part.floor, count)


def _was_cut(promise: Promise, topic: str, number: int, count: int) -> None:
    del promise.part(topic, number).sent[count:]


def _recovered(promise: Promise, partitions: dict[tuple[str, int], list[Sent]]) -> None:
    """The log was opened: what it had then stays, and the rest does not come back."""
    promise.topics = {name: promise.topics[name] for name in {name for name, _ in partitions}}
    promise.must = set(promise.topics)
    for (topic, number), batches in partitions.items():
        part = promise.part(topic, number)
        part.sent, part.floor, part.stray = list(batches), len(batches), None


_FOLD = {
    "create": _create,
    "created": _created,
    "delete": _delete,
    "deleted": _deleted,
    "append": _append,
    "acked": _acked,
    "refused": _acked,
    "unpublished": _unpublished,
    "durable": _durable,
    "cut": _cut,
    "was cut": _was_cut,
    "recovered": _recovered,
}


class Rebooted(Files):
    """Files after a reboot: another boot id."""

    def __init__(self, root: str | os.PathLike[str], *, boot: str, **options: Any) -> None:
        self._boot = boot
        super().__init__(root, **options)

    def boot_id(self) -> str:
        return self._boot


def check(directory: str | os.PathLike[str], notes: list[Any], number: int) -> None:
    """Open the root that a power cut left, and check that it keeps the promises."""
    promise = promised(notes)
    boot = f"boot {number}"
    root = open_root(directory, files=partial(Rebooted, boot=boot))
    try:
        _healthy(root)
        partitions = recovered(root, promise)
        for (topic, partition), survivors in partitions.items():
            _check_resending(
                root.partition(topic, partition), promise.part(topic, partition), survivors
            )
        ends = {key: _append_one(root, *key) for key in partitions}
    finally:
        abandon(root)
    if number % 8 == 0:
        _check_again(directory, boot if number % 16 else f"{boot} again", ends, number)


def _healthy(root: Root) -> None:
    findings = verify_root(root)
    assert findings == [], "\n".join(map(str, findings))


def recovered(root: Root, promise: Promise) -> dict[tuple[str, int], list[Sent]]:
    """Check every partition; return the sent batches that each one still has."""
    present = set(root.topics())
    assert present <= set(promise.topics), f"topics {present - set(promise.topics)} came back"
    assert promise.must <= present, f"topics {promise.must - present} are lost"
    return {
        (topic, number): _kept(root.partition(topic, number), part)
        for topic in present
        for number, part in enumerate(promise.topics[topic])
    }


def _kept(log: PartitionLog, part: PartitionPromise) -> list[Sent]:
    stored = [(row[0], row[3]) for row in rows(log)]
    end = stored[-1][0] if stored else -1
    survivors = [sent for sent in part.sent if sent.base <= end]
    assert len(survivors) >= part.floor, (
        f"{log}: {part.floor - len(survivors)} durable batches are lost"
    )
    if stored != records(survivors) and part.stray is not None:
        # After a reboot what was written looks like what was published.
        survivors = [sent for sent in part.stray if sent.base <= end]
    right = records(survivors)
    assert stored == right, f"{log}: not a prefix of what was sent: {stored[-3:]} for {right[-3:]}"
    return survivors


def _check_resending(log: PartitionLog, part: PartitionPromise, survivors: list[Sent]) -> None:
    """A producer that repeats its last batches gets each of them once into the log (G16)."""
    again = [sent for sent in part.sent if sent.producer][-4:]
    for sent in again:
        try:
            receipt = log.append([sent.encode()])[0]
        except OutOfOrderSequenceError:
            # More than one append was lost: the producer has to go on from where the log ends.
            assert sent not in survivors, f"{log}: {sent} is there, and its repetition was refused"
            return
        if sent in survivors:
            assert receipt.duplicate, f"{log}: {sent} is there twice"
            assert receipt.base_offset == sent.base, f"{log}: {receipt} for {sent}"
        else:
            assert not receipt.duplicate, f"{log}: {sent} was lost, and is said to be there"


def _append_one(root: Root, topic: str, number: int) -> tuple[int, bytes]:
    log = root.partition(topic, number)
    end, value = log.end_offset(), f"after {topic} {number}".encode()
    receipt = log.append([Sent(end, (value,), typed=is_typed(topic)).encode()])[0]
    assert receipt.base_offset == end, f"{log}: got offset {receipt.base_offset}, not {end}"
    last = rows(log, end)
    assert [(row[0], row[3]) for row in last] == [(end, value)], f"{log}: {last} after an append"
    return end, value


def _check_again(
    directory: Any, boot: str, ends: dict[tuple[str, int], tuple[int, bytes]], number: int
) -> None:
    """Check that the next process, and the one after a clean close, find the same."""
    root = open_root(directory, files=partial(Rebooted, boot=boot))
    try:
        _healthy(root)
        for (topic, partition), (end, value) in ends.items():
            last = rows(root.partition(topic, partition), end)
            assert [(row[0], row[3]) for row in last] == [(end, value)], (
                f"{topic}-{partition}: {last}"
            )
    finally:
        abandon(root) if number % 32 else root.close()
