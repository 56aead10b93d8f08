"""Random topics with everything that readers must agree on; the same ones for the same seed."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import count

from embedlog.api import Log
from embedlog.batch import EncodedBatch
from embedlog.errors import InvalidRecordError, RecordTooLargeError
from embedlog.partition import PartitionLog
from embedlog.record import TopicPartition
from support.clock import START
from support.manual_compaction import keep
from support.roots import encoded
from support.staged_files import publish, stage

COMPRESSIONS = ("none", "none", "lz4", "zstd")
_NAMES = ("h", "h", "", "ö", "name")


def fill_topics(log: Log, dice: random.Random, steps: int = 25) -> None:
    """Create the topics "a" and "b" and write to them.

    Headers, nulls and empty values, bodies of all compressions, gaps, rolls, compaction by keys
    and by chance, leader epochs, truncations, deleted records, times of producers and of the
    log, runs of tiny batches, publications.  The second one may begin as a copy of the first.
    """
    for topic in ("a", "b"):
        compacted = dice.random() < 0.4
        config = {
            "segment.bytes": dice.choice([4000, 20_000, 1 << 20]),
            "index.interval.bytes": dice.choice([100, 4096]),
            "message.timestamp.type": dice.choice(["CreateTime"] * 3 + ["LogAppendTime"]),
            "cleanup.policy": "compact" if compacted else "delete",
            "file.delete.delay.ms": 0,
        }
        copied = topic == "b" and dice.random() < 0.4
        count = log.root.partitions("a") if copied else dice.randint(1, 3)
        log.create_topic(topic, count, config)
        if copied:
            for number in range(count):
                _copy(log.partition("a", number), log.partition(topic, number), dice)
        filler = TopicFiller(log, topic, dice, keyed=compacted)
        for number in range(log.root.partitions(topic)):
            for _ in range(dice.randrange(steps + 1)):
                filler.step(log.partition(topic, number))
        if compacted and dice.random() < 0.7:
            log.housekeeping.compact(topic, force=True, progress=False)
            for number in range(log.root.partitions(topic)):
                filler.append(log.partition(topic, number))


class TopicFiller:
    """Does random things to one topic; ``keyed`` says whether its records need keys."""

    def __init__(self, log: Log, topic: str, dice: random.Random, *, keyed: bool) -> None:
        self._log, self._topic, self._dice, self._keyed = log, topic, dice, keyed
        self._numbers = count()

    def step(self, part: PartitionLog) -> None:
        """Do one thing to a partition."""
        dice, start, end = self._dice, part.start_offset(), part.end_offset()
        action = dice.randrange(24)
        if action == 0:
            part.append(self._tiny_batches(dice.choice([3, 40, 150])))
        elif action == 1:
            part.roll()
        elif action == 2 and end > start:
            part.truncate_to(dice.randint(max(start, end - 30), end))
        elif action == 3:
            kind = dice.choice(["CreateTime", "LogAppendTime"])
            self._log.alter_topic(self._topic, {"message.timestamp.type": kind})
        elif action == 4:
            self._compact_by_chance(part)
        elif action == 5 and not self._keyed:
            values = [b"p%d" % next(self._numbers) for _ in range(dice.randint(1, 5))]
            staged = stage(self._log.root, **{f"{self._topic}_{part.partition}": values})
            publish(self._log.root, [staged])
        elif action == 6 and end > start and dice.random() < 0.3:
            key = TopicPartition(self._topic, part.partition)
            self._log.delete_records({key: dice.randint(start, end)})
        elif action == 7:
            part.append_at([(end + dice.choice([1, 20]), self._tiny_batches(1)[0])])
        else:
            self.append(part)

    def append(self, part: PartitionLog) -> None:
        """Append one batch, unless it is larger than a segment may be."""
        dice = self._dice
        values = self._values(dice.choice([1, 1, 2, 3, 7, 8, 9, 64, 65, 300]))
        keys = [_key(dice, self._keyed) for _ in values]
        first = START + dice.choice([0, 0, -50, 500])
        times = [first + dice.randrange(50) if dice.random() < 0.95 else -1 for _ in values]
        headers = [_headers(dice) for _ in values] if dice.random() < 0.35 else None
        batch = encoded(
            *values, keys=keys, at=times, headers=headers, compression=dice.choice(COMPRESSIONS)
        )
        if headers is not None and len(values) % 2:
            batch.set_merged()  # As a mirror that merges does.
        with suppress(RecordTooLargeError):
            part.append([batch])

    def _tiny_batches(self, size: int) -> list[EncodedBatch]:
        keys = [_key(self._dice, self._keyed) for _ in range(size)]
        return [encoded(b"%d" % next(self._numbers), keys=[key]) for key in keys]

    def _compact_by_chance(self, part: PartitionLog) -> None:
        part.roll()
        part.refresh()
        sealed = [info for info in part.segments.values() if info.sealed]
        start, end = part.start_offset(), part.end_offset()
        # Those that were compacted before may have no record.
        candidates = [
            number for number, info in enumerate(sealed) if info.base_offset >= start and info.dense
        ]
        if candidates:
            number = self._dice.choice(candidates)
            share = self._dice.choice([0.0, 0.1, 0.5, 0.95])
            kept = {offset for offset in range(end) if self._dice.random() < share}
            keep(part, kept, slice(number, number + 1), parts=self._dice.randint(1, 4))

    def _values(self, size: int) -> list[bytes | None]:
        dice = self._dice
        nulls = dice.choice([0.0, 0.0, 0.1, 1.0])
        values = [None if dice.random() < nulls else self._value() for _ in range(size)]
        if dice.random() < 0.04:
            large = dice.choice([3000, 70_000, 300_000])
            values[dice.randrange(size)] = dice.choice([dice.randbytes(large), b"x" * large])
        return values

    def _value(self) -> bytes:
        kind = self._dice.randrange(8)
        if kind == 0:
            return b""
        if kind < 6:
            return b"%d" % next(self._numbers)
        return self._dice.randbytes(self._dice.randrange(40))


def _copy(source: PartitionLog, target: PartitionLog, dice: random.Random) -> None:
    """Copy a partition at its offsets."""
    reader, identical = source.reader(source.start_offset()), dice.random() < 0.5
    while placed := reader.read_encoded(dice.choice([1, 5000, 1 << 20])):
        with suppress(RecordTooLargeError, InvalidRecordError):
            target.append_at(placed, identical=identical)


def _key(dice: random.Random, required: bool) -> bytes | None:
    keys = [b"", b"k%d" % dice.randrange(12), dice.randbytes(dice.randrange(9))]
    return dice.choice(keys if required else [None, *keys])


def _headers(dice: random.Random) -> list[tuple[str, bytes | None]]:
    value = [None, b"", b"1", b"x" * 30]
    size = dice.choice([0, 0, 1, 1, 2, 5])
    return [(dice.choice(_NAMES), dice.choice(value)) for _ in range(size)]
