"""Programs for a log: lists of steps that a process runs until it is killed, and their journal.

A `ProgramProcess` runs the steps and writes each to its journal before and after; the
journal outlives the process, as a file or in a recording.  From it `journal_check`
derives what must, what may and what must not be in the log.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from errno import EIO
from pathlib import Path
from typing import Any

import embedlog.api.consumer_group
import embedlog.api.reset_offsets

# Imported before a fork: `embedlog` itself would import them in each child again.
import embedlog.consumer
import embedlog.maintenance.jobs
import embedlog.partition.log_start
import embedlog.partition.partition_log
import embedlog.retention.retain
from embedlog import batch
from embedlog.batch import EncodedBatch
from embedlog.errors import EmbedlogError, StorageError, TopicAlreadyExistsError
from embedlog.files import Files
from embedlog.schemas.topic_schema import TopicSchema
from support.faulty_files import FaultInjector
from support.patience import patient
from support.roots import abandon
from support.typed_bytes import KEY, as_typed, first_schema, wider_schema

# Programs are short: their second append in succession is flushed alone.
embedlog.partition.partition_log.UNDISPUTED = 1

Step = tuple[Any, ...]
Entry = list[Any]

TIME = 1_700_000_000_000
TYPED_TOPICS = ("b", "c")
"""Topics with columns; the others are topics of bytes."""
PRODUCER = 7_000_000
"""The first id of the idempotent producers, one for each partition and process."""
THREE = [(1, 60, False, None)] * 3
"""The sizes of batches that are not published."""


class Journal:
    """A file of what a process is about to do, and of the results."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def put(self, *entry: Any) -> None:
        """Write one line, completely or not at all."""
        os.write(self._fd, json.dumps(entry).encode() + b"\n")

    def close(self) -> None:
        os.close(self._fd)


def entries(path: str | os.PathLike[str]) -> list[Entry]:
    """Read a journal."""
    return [json.loads(line) for line in Path(path).read_bytes().splitlines()]


def journal_of(root: str | os.PathLike[str]) -> Path:
    """Return the path of the journal beside a root."""
    return Path(root).with_suffix(".journal")


def values_of(topic: str, partition: int, send: int, count: int, size: int) -> list[bytes]:
    """Return the values of one send; each identifies itself and has at least `size` bytes."""
    return [
        f"{topic}/{partition}/{send}/{row}/".encode().ljust(size, b"%d" % (send % 10))
        for row in range(count)
    ]


def encode(
    topic: str,
    partition: int,
    send: int,
    count: int,
    size: int,
    headers: bool = False,
    producer: list[int] | None = None,
    schema: TopicSchema | None = None,
) -> EncodedBatch:
    """Return the batch of one send, always the same for the same arguments.

    For a typed topic it has its first version, or one that is passed.
    """
    header_lists = [[("h", b"x")]] * count if headers else None
    values = values_of(topic, partition, send, count, size)
    encoded = batch.encode_lists(values, [b"k"] * count, TIME + send, header_lists)
    if producer is not None:
        encoded.set_producer(*producer)
    return as_typed(encoded, schema) if topic in TYPED_TOPICS else encoded


class ProgramProcess:
    """A process that runs a program on a log.

    Args:
        journal: A file, or an object with `put` of a `Journal`; by default beside the root.
        files: Creates the `Files` of the log, in which faults can be injected.
        forgiving: Whether to record errors of embedlog and continue, rather than raise them.
        options: Of `embedlog.open`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        journal: Any = None,
        files: Callable[..., Files] = Files,
        forgiving: bool = False,
        first_send: int = 0,
        lock_timeout: float | None = None,
        **options: Any,
    ) -> None:
        self.path, self.files, self.options = os.fspath(path), files, options
        is_file = journal is None or isinstance(journal, Path)
        self.journal = Journal(journal or journal_of(path)) if is_file else journal
        self.forgiving, self.lock_timeout = forgiving, lock_timeout or patient(10)
        self.sends = self.first_send = first_send
        self.sequences: dict[tuple[str, int], int] = {}
        self.unsure: set[tuple[str, int]] = set()
        self.log: Any = None
        self.durability = "os"
        self.errors: list[EmbedlogError] = []

    def run(self, program: Iterable[Step]) -> ProgramProcess:
        for step in program:
            self.do(step)
        return self

    def heal(self) -> None:
        """End the faults that were injected."""
        if isinstance(self.files, FaultInjector):
            self.files.heal()

    def do(self, step: Step) -> None:
        name, *arguments = step
        self.journal.put("do", *step)
        try:
            if self.log is None and name != "open":
                self._open("os")
            getattr(self, f"_{name}")(*arguments)
        except EmbedlogError as error:
            self.errors.append(error)
            number = getattr(error, "errno", None)
            self.journal.put("failed", type(error).__name__, number, str(error), *step)
            if not self.forgiving:
                raise
            self.after_error(step)
        else:
            self.journal.put("did", *step)

    def after_error(self, step: Step) -> None:
        """Repeat a step that later steps depend on; its fault may be over."""
        if step[0] in ("create", "grow") and self.log is not None:
            try:
                getattr(self, f"_{step[0]}")(*step[1:])
                self.journal.put("did", *step)
            except EmbedlogError as error:
                self.errors.append(error)

    def _open(self, durability: str) -> None:
        self.durability = durability
        self.log = embedlog.open(
            self.path,
            durability=durability,
            files=self.files,
            lock_timeout=self.lock_timeout,
            # The operations are counted: no thread may add its own.
            maintenance=False,
            **self.options,
        )

    def _close(self) -> None:
        log, self.log = self.log, None
        log.close()

    def _create(self, topic: str, partitions: int, segment_bytes: int) -> None:
        config = {"segment.bytes": segment_bytes, "index.interval.bytes": 300}
        # A topic that could not be dropped before still exists.
        with suppress(TopicAlreadyExistsError):
            typed = topic in TYPED_TOPICS
            arguments = {"schema": first_schema().plain, "key": KEY} if typed else {}
            self.log.create_topic(topic, partitions, config, **arguments)
        self.log.create_partitions(topic, max(partitions, self.log.root.partitions(topic)))

    def _drop(self, topic: str) -> None:
        self.sequences = {key: at for key, at in self.sequences.items() if key[0] != topic}
        self.log.delete_topic(topic)

    def _grow(self, topic: str, partitions: int) -> None:
        self.log.create_partitions(topic, partitions)

    def _alter(self, topic: str, segment_bytes: int) -> None:
        self.log.alter_topic(topic, {"segment.bytes": segment_bytes})
        if topic in TYPED_TOPICS:
            # Batches go on to be encoded with the first version.
            version = self.log.root.topic(topic).schema_version
            self.log.alter_topic(topic, schema=wider_schema(version))

    def _send(
        self,
        topic: str,
        partition: int,
        count: int = 1,
        durability: str | None = None,
        size: int = 20,
        headers: bool = False,
    ) -> None:
        """Append one batch."""
        self._append(topic, partition, [(count, size, headers, None)], durability)

    def _many(self, topic: str, partition: int, batches: int, durability: str | None) -> None:
        """Append several batches at once; the log may roll between them."""
        sizes = [(1 + number % 3, 20 + 40 * (number % 2), False, None) for number in range(batches)]
        self._append(topic, partition, sizes, durability)

    def _produce(
        self, topic: str, partition: int, count: int, durability: str | None, size: int = 20
    ) -> None:
        """Append one batch of the partition's idempotent producer."""
        key = topic, partition
        if key in self.unsure:
            return
        at = self.sequences.get(key, 0)
        identity = [PRODUCER + 10 * self.first_send + partition, 0, at]
        self.unsure.add(key)
        self._append(topic, partition, [(count, size, False, identity)], durability)
        self.unsure.discard(key)
        self.sequences[key] = at + count

    def _append(self, topic: str, partition: int, sizes: list[Any], durability: str | None) -> None:
        encoded = self._encoded(topic, partition, sizes, durability)
        receipts = self.log.partition(topic, partition).append(encoded, durability=durability)
        self._acknowledge(receipts, durability)

    def _encoded(
        self,
        topic: str,
        partition: int,
        sizes: list[Any],
        durability: str | None = None,
        at: Sequence[int] = (),
    ) -> list[EncodedBatch]:
        """Note sends, perhaps at given offsets, and return their batches."""
        encoded, schema = [], None
        if topic in TYPED_TOPICS:
            catalog = self.log.root.context.catalog
            schema = catalog.schema(self.log.root.topic(topic), 1)
        for number, (count, size, headers, producer) in enumerate(sizes):
            send = [topic, partition, self.sends, count, size, headers, producer]
            self.journal.put("send", *send, durability or self.durability, *at[number:][:1])
            encoded.append(encode(*send, schema=schema))
            self.sends += 1
        return encoded

    def _acknowledge(self, receipts: list[Any], durability: str | None) -> None:
        for send, receipt in enumerate(receipts, self.sends - len(receipts)):
            self.journal.put("acked", send, receipt.base_offset, durability or self.durability)

    def _copy(
        self, topic: str, partition: int, gaps: list[int], durability: str | None, epochs: int
    ) -> None:
        """Append batches of one record at their offsets, as a copy of another log."""
        log, at = self.log.partition(topic, partition), list[int]()
        tail = log.tail()
        for gap in gaps:
            at.append((at[-1] + 1 if at else tail.log_end_offset) + gap)
        sizes = [(1, 60, False, None) for _ in at]
        encoded = self._encoded(topic, partition, sizes, durability, at)
        encoded[-1].leader_epoch = tail.leader_epoch + epochs
        placed = list(zip(at, encoded, strict=True))
        receipts = log.append_at(placed, durability=durability, identical=True)
        assert [receipt.base_offset for receipt in receipts] == at
        self._acknowledge(receipts, durability)

    def _fail(self, topic: str, partition: int, written: float) -> None:
        """Append batches; the disk takes so many of them and refuses the rest."""
        log, files = self.log.partition(topic, partition), self.log.root.context.files
        log.roll()  # Then they go into one file, in one write.
        encoded = self._encoded(topic, partition, THREE)
        files.short_at(0, int(written * encoded[0].size))
        files.fail_at(1, EIO, only=("write",))
        with suppress(StorageError):
            log.append(encoded)
            raise AssertionError("the disk refuses it")
        self.journal.put("refused", topic, partition, self._last_three())
        files.heal()

    def _leave(self, topic: str, partition: int) -> None:
        """Write batches, and be killed before they are published."""
        log = self.log.partition(topic, partition)
        log.refresh()
        tail, data = log.tail(), list[Any]()
        for number, encoded in enumerate(self._encoded(topic, partition, THREE)):
            data += encoded.stamp(tail.log_end_offset + number, tail.leader_epoch)
        self.journal.put("left", topic, partition, self._last_three())
        log.active_file().write(data, tail.log_end_position)
        self._die()

    def _last_three(self) -> list[int]:
        return list(range(self.sends - len(THREE), self.sends))

    def _die(self, rebooted: bool = False) -> None:
        """Be killed, and open the log again in another process, perhaps after a reboot."""
        abandon(self.log.root)
        if rebooted:
            self.files.reboot()  # type: ignore[attr-defined]
        self._open(self.durability)

    def _flush(self, topic: str | None = None, partition: int = 0) -> None:
        (self.log.partition(topic, partition) if topic else self.log).flush()

    def _roll(self, topic: str, partition: int) -> None:
        self.log.partition(topic, partition).roll()

    def _cut(self, topic: str, partition: int, batches: int) -> None:
        """Truncate the last batches."""
        log = self.log.partition(topic, partition)
        reader, bases = log.reader(log.start_offset()), []
        while decoded_batches := reader.read():
            bases += [decoded.base_offset for decoded in decoded_batches]
        if not bases:
            return
        offset = bases[max(0, len(bases) - batches)]
        self.sequences.pop((topic, partition), None)
        self.unsure.add((topic, partition))
        self.journal.put("cut", topic, partition, offset)
        log.truncate_to(offset)
        self.journal.put("cut done", topic, partition, offset)

    def _index(self) -> None:
        self.log.housekeeping.rebuild_index()

    def _read(self, topic: str, partition: int) -> None:
        log = self.log.partition(topic, partition)
        reader = log.reader(log.start_offset())
        while decoded_batches := reader.read():
            for decoded in decoded_batches:
                decoded.verify()

    def _verify(self) -> None:
        assert self.log.housekeeping.verify() == []


# The programs. Segments are small, so that the third or fourth batch rolls.

BIRTH: list[Step] = [
    ("open", "os"),
    ("create", "a", 2, 1500),
    ("send", "a", 0, 3),
    ("produce", "a", 1, 2, None),
    ("send", "a", 0, 1, "fsync"),
    ("send", "a", 0, 2, None, 200),
    ("produce", "a", 1, 1, "fsync"),
    ("create", "b", 1, 1300),
    ("many", "b", 0, 4, None),
    ("send", "b", 0, 1, "fsync", 20, True),
    ("send", "a", 0, 2, "fsync", 300),
    ("flush",),
    ("produce", "a", 1, 3, None),
    ("grow", "a", 3),
    ("send", "a", 2, 1, "fsync"),
    ("many", "b", 0, 3, "fsync"),
    ("close",),
]
"""Creates, fills, flushes and closes a log."""

TEMPLATE: list[Step] = [
    ("open", "os"),
    ("create", "a", 2, 1500),
    ("create", "b", 1, 1300),
    ("create", "c", 1, 1 << 20),
    *[("send", "a", number % 2, 2, "fsync" if number == 4 else None, 60) for number in range(9)],
    ("many", "b", 0, 5, None),
    ("send", "c", 0, 2, "fsync"),
    ("send", "c", 0, 2),
]
"""Creates the log that `LIFE` finds."""

LIFE: list[Step] = [
    ("open", "os"),
    ("send", "a", 0, 2),
    ("produce", "c", 0, 2, "fsync"),
    ("roll", "a", 1),
    ("cut", "a", 0, 2),
    ("send", "a", 0, 1, None, 100),
    ("produce", "c", 0, 1, None),
    ("drop", "b"),
    ("create", "b", 2, 1300),
    ("many", "b", 1, 4, "fsync"),
    ("cut", "a", 1, 3),
    ("send", "a", 1, 2, "fsync"),
    ("index",),
    ("close",),
    ("open", "fsync"),
    ("alter", "c", 1300),
    ("produce", "c", 0, 3, None),
    ("many", "c", 0, 4, None),
    ("flush",),
    ("send", "a", 0, 1),
]
"""Recovery, truncation, deletion, creation again, a clean close and another opening."""


def short_program(seed: int) -> list[Step]:
    """Return a program for one of many processes on the topics of `TEMPLATE`: it only appends."""
    rng = random.Random(seed)
    program: list[Step] = [("open", rng.choice(["os", "fsync"]))]
    for _ in range(5):
        topic, partition = rng.choice([("a", 0), ("a", 1), ("b", 0), ("c", 0)])
        durability, count = rng.choice([None, "os", "fsync"]), rng.randint(1, 4)
        kind = rng.choice(["send", "send", "many", "produce", "produce", "roll"])
        if kind == "send":
            program.append((kind, topic, partition, count, durability, rng.choice([10, 60, 120])))
        elif kind == "roll":
            program.append((kind, topic, partition))
        else:
            program.append((kind, topic, partition, count, durability))
    return program


def random_program(seed: int, steps: int = 24) -> list[Step]:
    """Return a random program for the topics of `TEMPLATE`."""
    rng = random.Random(seed)
    program: list[Step] = [("open", rng.choice(["os", "fsync"]))]
    for _ in range(steps):
        topic, partition = rng.choice([("a", 0), ("a", 1), ("b", 0), ("c", 0)])
        durability = rng.choice([None, "os", "fsync"])
        kind = rng.choices(
            ["send", "many", "produce", "flush", "roll", "cut", "index", "reopen", "drop", "alter"],
            [30, 12, 20, 4, 5, 5, 1, 4, 2, 2],
        )[0]
        count = rng.randint(1, 4)
        if kind == "send":
            size = rng.choice([10, 60, 120])
            program.append((kind, topic, partition, count, durability, size, rng.random() < 0.1))
        elif kind in ("many", "produce"):
            program.append((kind, topic, partition, count, durability))
        elif kind in ("roll", "cut"):
            program.append((kind, topic, partition, count)[: 4 if kind == "cut" else 3])
        elif kind == "reopen":
            program += [("close",), ("open", rng.choice(["os", "fsync"]))]
        elif kind == "drop":
            program += [(kind, topic), ("create", topic, 2, 1300)]
        elif kind == "alter":
            program.append((kind, topic, rng.choice([1300, 2000])))
        else:
            program.append((kind,))
    return program


def power_cut_program(
    seed: int,
    steps: int,
    synced: float,
    uniform: bool = False,
    topics: dict[str, int] | None = None,
) -> list[Step]:
    """Return a random program whose power is cut.

    Args:
        synced: The share of appends with ``durability="fsync"``.
        uniform: Make all batches alike, so that one fits exactly where another one was.
        topics: The topics that exist, with their numbers of partitions.
    """
    rng = random.Random(seed)
    names = dict(topics or {"a": 2})
    program: list[Step] = [("open", "os")]
    if topics is None:
        program.append(("create", "a", 2, 3000))
    for _ in range(steps):
        dice, topic = rng.random(), rng.choice(sorted(names))
        where = topic, rng.randrange(names[topic])
        how = "fsync" if rng.random() < synced else None
        count = 1 if uniform else rng.choice((1, 1, 2, 5))
        size = 60 if uniform else rng.choice((20, 60, 400))
        if dice < 0.06 and len(names) < 3:
            name = next(name for name in "abc" if name not in names)
            names[name] = rng.randint(1, 2)
            program.append(("create", name, names[name], 3000))
        elif dice < 0.09 and len(names) > 1:
            del names[topic]
            program.append(("drop", topic))
        elif dice < 0.15:
            program.append(("cut", *where, rng.randint(1, 3)))
        elif dice < 0.19:
            died = ("die", rng.random() < 0.3)
            program += rng.choice(([died], [("close",), ("open", "os")]))
        elif dice < 0.27:
            program.append(("flush", *where))
        elif dice < 0.31:
            program.append(("roll", *where))
        elif dice < 0.36:
            failed = ("fail", *where, rng.choice((1, 2, rng.random() * 3)))
            program.append(("leave", *where) if rng.random() < 0.6 else failed)
            program.append(("send", *where, count, how, size))
        elif not uniform and rng.random() < 0.3:
            gaps = [rng.choice((0, 1, 70_000)) for _ in range(rng.choice((1, 1, 2)))]
            program.append(("copy", *where, gaps, how, rng.choice((0, 0, 1))))
        elif not uniform and where[1] == 0:
            program.append(("produce", *where, count, how, size))
        elif not uniform and rng.random() < 0.2:
            program.append(("many", *where, 2, how))
        else:
            program.append(("send", *where, count, how, size))
    return program
