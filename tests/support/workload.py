"""A random workload of a log, recorded: appends, copies, rolls, truncations, recoveries."""

from __future__ import annotations

import os
import random
from errno import EIO
from typing import Any

from embedlog.config import TopicConfig
from embedlog.errors import StorageError
from embedlog.root.root import Root
from support.clock import ManualClock
from support.durability_check import PartitionPromise, Promise, Sent, is_typed, promised
from support.faulty_files import FaultyFiles
from support.power_cut import Recording
from support.roots import abandon, open_root
from support.typed_bytes import first_schema

MOST_PARTITIONS = 4


class Recorder:
    """Makes the files of one recording, in which a log may be closed and opened again."""

    def __init__(self, boot: str = "the first") -> None:
        self.boot = boot
        self.notes: list[Any] = []
        self._files: FaultyFiles | None = None

    def __call__(self, path: str | os.PathLike[str], **options: Any) -> FaultyFiles:
        before = self._files
        files = FaultyFiles(path, boot=self.boot, record=before is None, **options)
        if before is not None:
            files._record = before._record
            # Numbers of descriptors that are closed now belong to other files.
            files._recorded().inodes.clear()
        self._files = files
        return files

    def note(self, *what: Any) -> None:
        assert self._files is not None
        self.notes.append(what)
        self._files.note(what)

    def recording(self) -> Recording:
        assert self._files is not None
        return self._files.recording()


class Workload:
    """Random operations of users, and notes of what was acknowledged.

    Args:
        synced: The share of appends with ``durability="fsync"``.
        uniform: Make all batches alike, so that one fits exactly where another one was.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        recorder: Recorder,
        seed: int,
        synced: float,
        uniform: bool = False,
    ) -> None:
        self._path, self._recorder, self._synced = path, recorder, synced
        self._uniform = uniform
        self._rng, self._gaps = random.Random(seed), random.Random(seed)
        self._seed, self._count, self._names = seed, 0, 0
        self._sequences: dict[tuple[str, int], int] = {}
        self._clock = ManualClock()
        self.root = self._open()
        self.promise = Promise()

    def _open(self) -> Root:
        return open_root(self._path, files=self._recorder, clock=self._clock)

    def _note(self, *what: Any) -> None:
        self._recorder.note(*what)

    def run(self, steps: int) -> None:
        """Create a topic, and do so many steps."""
        self.create()
        for _ in range(steps):
            self.step()

    def resume(self, promise: Promise) -> None:
        """Continue in a root that another workload filled."""
        self._names = max((int(name[1:]) for name in promise.topics), default=0)
        for topic, parts in promise.topics.items():
            self._sequences[topic, 0] = _sequence_after(parts[0].sent)

    def step(self) -> None:
        self._clock.advance(7)
        self.promise = promised(self._recorder.notes)
        room = MOST_PARTITIONS - sum(len(parts) for parts in self.promise.topics.values())
        dice = self._rng.random()
        if (dice < 0.06 and room > 0) or not self.promise.topics:
            self.create()
        elif dice < 0.09 and len(self.promise.topics) > 1:
            self.delete()
        elif dice < 0.15:
            self.truncate()
        elif dice < 0.19:
            self.reopen()
        elif dice < 0.27:
            self.flush()
        elif dice < 0.31:
            self.roll()
        elif dice < 0.36:
            self.die_writing() if self._rng.random() < 0.6 else self.fail_writing()
        else:
            self.append()

    # The things that are done

    def create(self) -> None:
        self._names += 1
        name, count = f"t{self._names}", self._rng.randint(1, 2) + (self._names == 1)
        config = TopicConfig.parse({"segment.bytes": 3000, "index.interval.bytes": 700})
        self._note("create", name, count)
        schema = first_schema() if is_typed(name) else None
        self.root.create_topic(name, count, config, schema)
        self._note("created", name)

    def delete(self) -> None:
        name = self._rng.choice(sorted(self.promise.topics))
        self._note("delete", name)
        self.root.delete_topic(name)
        self._note("deleted", name)

    def append(self, where: tuple[str, int] | None = None) -> None:
        topic, number = where or self._choose()[:2]
        log = self.root.partition(topic, number)
        synced = self._rng.random() < self._synced
        tail = log.tail()
        base, batches = tail.log_end_offset, []
        copied = not self._uniform and self._gaps.random() < 0.3
        for _ in range(self._rng.choice((1, 1, 1, 2))):
            base += self._gaps.choice((0, 1, 70_000)) if copied else 0
            batches.append(self._batch(base, topic, number))
            base = batches[-1].next
        self._note("append", topic, number, batches)
        durability = "fsync" if synced else "os"
        encoded = [batch.encode() for batch in batches]
        if copied:
            encoded[-1].leader_epoch = tail.leader_epoch + self._gaps.choice((0, 0, 1))
            placed = [(sent.base, batch) for sent, batch in zip(batches, encoded, strict=True)]
            receipts = log.append_at(placed, durability=durability, identical=True)
        else:
            receipts = log.append(encoded, durability=durability)
        assert [receipt.base_offset for receipt in receipts] == [batch.base for batch in batches]
        self._note("acked", topic, number)
        if synced:
            self._note("durable", topic, number)

    def _batch(self, base: int, topic: str, number: int) -> Sent:
        values = []
        for _ in range(1 if self._uniform else self._rng.choice((1, 1, 2, 5))):
            self._count += 1
            text = b"%d/%d/%s/%d " % (self._seed, self._count, topic.encode(), number)
            size = 60 if self._uniform else self._rng.choice((20, 60, 400))
            values.append(text.ljust(size, b"."))
        producer = None
        if number == 0 and not self._uniform:
            sequence = self._sequences.get((topic, number), 0)
            self._sequences[topic, number] = sequence + len(values)
            producer = (77, 0, sequence)
        return Sent(base, tuple(values), producer, is_typed(topic))

    def fail_writing(self) -> None:
        """Append batches of which the disk takes some bytes and refuses the rest."""
        topic, number, _ = self._choose()
        log = self.root.partition(topic, number)
        log.roll()  # Then they go into one file, in one write.
        batches = self._unpublished(topic, number, log.tail().log_end_offset)
        encoded, files = [batch.encode() for batch in batches], log.context.files
        written = self._rng.choice((1, 2, self._rng.random() * 3))
        files.short_at(0, int(written * encoded[0].size))
        files.fail_at(1, EIO, only=("write",))
        try:
            log.append(encoded)
        except StorageError:
            self._note("refused", topic, number)
        files.heal()
        self.append((topic, number))

    def _unpublished(self, topic: str, number: int, base: int) -> list[Sent]:
        text = b"unpublished".ljust(60, b".")
        batches = [Sent(base + row, (text,), None, is_typed(topic)) for row in range(3)]
        self._note("unpublished", topic, number, batches)
        return batches

    def die_writing(self) -> None:
        """Write batches, be killed before they are published, and append in another process."""
        topic, number, _ = self._choose()
        log = self.root.partition(topic, number)
        log.refresh()
        tail = log.tail()
        batches = self._unpublished(topic, number, tail.log_end_offset)
        data: list[Any] = []
        for batch in batches:
            data += batch.encode().stamp(batch.base, tail.leader_epoch)
        log.active_file().write(data, tail.log_end_position)
        abandon(self.root)
        self.root = self._open()
        self.append((topic, number))

    def truncate(self) -> None:
        topic, number, part = self._choose()
        if not part.sent:
            return
        count = self._rng.randrange(max(len(part.sent) - 3, 0), len(part.sent))
        first = part.sent[count]
        offset = self._rng.randrange(first.base, first.next)
        self._note("cut", topic, number, count)
        assert self.root.partition(topic, number).truncate_to(offset)
        if number == 0:
            # What was cut may be sent again: numbers go on after what is left.
            self._sequences[topic, number] = _sequence_after(part.sent[:count])
        self._note("was cut", topic, number, count)

    def flush(self) -> None:
        topic, number, _ = self._choose()
        self.root.partition(topic, number).flush()
        self._note("durable", topic, number)

    def roll(self) -> None:
        topic, number, _ = self._choose()
        self.root.partition(topic, number).roll()

    def reopen(self) -> None:
        """Leave cleanly or as a killed process does, and come back in this boot or another."""
        if self._rng.random() < 0.5:
            flushed = [key for key, log in self.root._partitions.items() if log.dirty]
            self.root.close()
            for key in flushed:
                self._note("durable", *key)
            self.root = self._open()
        else:
            abandon(self.root)
            if self._rng.random() < 0.3:
                self._recorder.boot += "'"
            self.root = self._open()
        if self._rng.random() < 0.5:
            for topic, parts in self.promise.topics.items():
                for number in range(len(parts)):
                    self.root.partition(topic, number).tail()

    def _choose(self) -> tuple[str, int, PartitionPromise]:
        topic = self._rng.choice(sorted(self.promise.topics))
        number = self._rng.randrange(len(self.promise.topics[topic]))
        return topic, number, self.promise.part(topic, number)


def _sequence_after(sent: list[Sent]) -> int:
    ends = [batch.producer[2] + len(batch.values) for batch in sent if batch.producer]
    return ends[-1] if ends else 0


def record(
    path: str | os.PathLike[str], seed: int, steps: int, synced: float, uniform: bool = False
) -> Recording:
    """Record a workload in an empty directory."""
    recorder = Recorder()
    workload = Workload(path, recorder, seed, synced, uniform)
    try:
        workload.run(steps)
        return recorder.recording()
    finally:
        abandon(workload.root)
