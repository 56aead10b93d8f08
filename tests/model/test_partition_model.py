"""One partition against a plain list: whatever is done to it, in whatever order (A1–A37, B2–B10).

The model is a list of batches.  The real one is opened by one or two handles
at once, rolled, flushed, cut, crashed by kill, reboot and power cut, reopened,
and loses its index from time to time; after each step it answers as the list does.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support import tiers
from support.clock import START, ManualClock
from support.faulty_files import after_reboot
from support.roots import (
    abandon,
    batch_rows,
    encoded,
    healthy,
    open_root,
    rows,
    segment_files,
)
from support.typed_bytes import as_typed, first_schema, wider_schema

from embedlog import catalog, index, keyspace
from embedlog.config import TopicConfig
from embedlog.errors import (
    InvalidProducerEpochError,
    LogTruncatedError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
)
from embedlog.partition.producer_state import LAST_SEQUENCE, REMEMBERED, after
from embedlog.schemas.evolution import changed_schema

CONFIG = {"segment.bytes": 2600, "index.interval.bytes": 700, "segment.ms": 50}

texts = st.one_of(st.none(), st.binary(max_size=6))
headers = st.lists(st.tuples(st.sampled_from(["a", "b", ""]), texts), max_size=2)
records = st.tuples(st.integers(0, 60), texts, texts)
some_records = st.lists(records, min_size=1, max_size=4)
batches = st.tuples(
    some_records,
    st.one_of(st.none(), st.none(), st.none(), headers),
    st.sampled_from(["none", "none", "lz4", "zstd"]),
)
durabilities = st.sampled_from([None, None, None, "fsync"])


class ModelBatch(NamedTuple):
    """A batch as the model has it."""

    base: int
    next: int
    rows: list[Any]


class Producer:
    """The state of a producer: its epoch, its next number, its last batches."""

    def __init__(self, number: int, first: int) -> None:
        self.number, self.epoch, self.next = number, 0, first
        self.sent: list[tuple[int, int, int, Any]] = []


class PartitionModel(RuleBasedStateMachine):
    """A partition, and the list that it must equal."""

    typed = False
    """Whether the topic is typed."""

    def __init__(self) -> None:
        super().__init__()
        self.path = tempfile.mkdtemp(prefix="embedlog-model-")
        self.clock = ManualClock()
        self.boots = 0
        self.roots = [self._open()]
        schema = first_schema() if self.typed else None
        self.roots[0].create_topic("t", 1, TopicConfig.parse(CONFIG), schema)
        self.batches: list[ModelBatch] = []
        self.end = 0
        self.flushed = self.flushed_end = 0
        self.floor: dict[str, int] = {}
        self.producers: list[Producer] = []
        self.followers: list[Any] = []
        self.cuts = 0

    def _open(self) -> Any:
        files = after_reboot(f"boot {self.boots}")
        return open_root(f"{self.path}/root", clock=self.clock, files=files)

    def log(self, handle: int = 0) -> Any:
        return self.roots[handle % len(self.roots)].partition("t", 0)

    @property
    def expected(self) -> list[Any]:
        return [row for batch in self.batches for row in batch.rows]

    # Changes

    def _encode(self, batch: Any, producer: tuple[int, int, int] | None = None) -> Any:
        lines, heads, compression = batch
        encoded_batch = encoded(
            *[value for _, _, value in lines],
            keys=[key for _, key, _ in lines],
            at=[START + time for time, _, _ in lines],
            headers=None if heads is None else [heads] * len(lines),
            producer=producer,
            compression=compression,
        )
        return as_typed(encoded_batch) if self.typed else encoded_batch

    def _note(self, batch: Any) -> int:
        lines, heads, _ = batch
        base, self.end = self.end, self.end + len(lines)
        expected = [
            (offset, START + time, key, value, list(heads or []))
            for offset, (time, key, value) in enumerate(lines, base)
        ]
        self.batches.append(ModelBatch(base, self.end, expected))
        return base

    def _all_flushed(self) -> None:
        self.flushed = self.batches[-1].next if self.batches else 0
        self.flushed_end = self.end
        self.floor = {str(path): path.stat().st_size for path in segment_files(f"{self.path}/root")}

    @rule(
        many=st.lists(batches, min_size=1, max_size=4), handle=st.integers(0, 1), how=durabilities
    )
    def append(self, many: Any, handle: int, how: str | None) -> None:
        """Offsets are dense, and the receipts have them (A1, A10)."""
        receipts = self.log(handle).append([self._encode(batch) for batch in many], durability=how)
        for receipt, batch in zip(receipts, many, strict=True):
            assert (receipt.base_offset, receipt.duplicate) == (self._note(batch), False)
            assert receipt.next_offset == self.end
        if how == "fsync":
            self._all_flushed()

    @rule(first=st.sampled_from([0, 0, 7, LAST_SEQUENCE - 3, LAST_SEQUENCE]))
    @precondition(lambda self: len(self.producers) < 4)
    def begin_producer(self, first: int) -> None:
        """A new producer may begin at any number (G17)."""
        self.producers.append(Producer(100 + len(self.producers) + 10 * self.cuts, first))

    @rule(which=st.integers(0, 3), batch=batches, handle=st.integers(0, 1), how=durabilities)
    @precondition(lambda self: self.producers)
    def send(self, which: int, batch: Any, handle: int, how: str | None) -> None:
        """The next number is appended (G15, G16)."""
        producer = self.producers[which % len(self.producers)]
        identity = (producer.number, producer.epoch, producer.next)
        (receipt,) = self.log(handle).append([self._encode(batch, identity)], durability=how)
        assert not receipt.duplicate
        assert receipt.base_offset == self._note(batch)
        producer.sent.append((producer.next, receipt.base_offset, receipt.next_offset, batch))
        del producer.sent[:-REMEMBERED]
        producer.next = after(producer.next, len(batch[0]))
        if how == "fsync":
            self._all_flushed()

    @rule(which=st.integers(0, 3), back=st.integers(0, 4), handle=st.integers(0, 1))
    @precondition(lambda self: any(producer.sent for producer in self.producers))
    def repeat(self, which: int, back: int, handle: int) -> None:
        """One of the last five again: the offsets it got then, and nothing appended (G16)."""
        able = [producer for producer in self.producers if producer.sent]
        producer = able[which % len(able)]
        first, base, following, batch = producer.sent[-1 - back % len(producer.sent)]
        identity = (producer.number, producer.epoch, first)
        (receipt,) = self.log(handle).append([self._encode(batch, identity)])
        assert receipt[:2] == (base, following)
        assert receipt.duplicate

    @rule(which=st.integers(0, 3), gap=st.integers(1, 9), batch=batches)
    @precondition(lambda self: any(producer.sent for producer in self.producers))
    def skip(self, which: int, gap: int, batch: Any) -> None:
        """A gap in the numbers is refused, and nothing is appended (G16)."""
        able = [producer for producer in self.producers if producer.sent]
        producer = able[which % len(able)]
        identity = (producer.number, producer.epoch, after(producer.next, gap))
        with pytest.raises(OutOfOrderSequenceError):
            self.log().append([self._encode(batch, identity)])

    @rule(which=st.integers(0, 3), batch=batches)
    @precondition(lambda self: self.producers)
    def take_over(self, which: int, batch: Any) -> None:
        """A higher epoch begins at 0 and fences the lower one (G17)."""
        producer = self.producers[which % len(self.producers)]
        old, producer.epoch, producer.next, producer.sent = (
            producer.epoch,
            producer.epoch + 1,
            0,
            [],
        )
        self.send(self.producers.index(producer), batch, 0, None)
        with pytest.raises(InvalidProducerEpochError):
            self.log().append([self._encode(batch, (producer.number, old, 0))])

    @rule(handle=st.integers(0, 1))
    def roll(self, handle: int) -> None:
        """No record moves by it (A14)."""
        self.log(handle).roll()

    @rule(handle=st.integers(0, 1))
    def flush(self, handle: int) -> None:
        """What is flushed survives every power cut (A22)."""
        self.log(handle).flush()
        self._all_flushed()

    @rule(handle=st.integers(0, 1), ms=st.integers(1, 100))
    def wait(self, handle: int, ms: int) -> None:
        """Time goes by."""
        self.clock.advance(ms)

    @rule(part=st.floats(0, 1), handle=st.integers(0, 1))
    @precondition(lambda self: self.end > 0)
    def truncate(self, part: float, handle: int) -> None:
        """Every record at or past the offset goes, a straddling batch entirely (A34)."""
        offset = min(int(self.end * part), self.end - 1)
        assert self.log(handle).truncate_to(offset)
        self.end = offset
        self.batches = [batch for batch in self.batches if batch.next <= offset]
        self._forget_producers()
        self._all_flushed()

    def _forget_producers(self) -> None:
        last = self.batches[-1].next if self.batches else 0
        self.cuts += 1
        for producer in list(self.producers):
            before = len(producer.sent)
            producer.sent = [sent for sent in producer.sent if sent[2] <= last]
            if producer.sent and len(producer.sent) < before:
                producer.next = after(producer.sent[-1][0], len(producer.sent[-1][3][0]))
            elif not producer.sent:
                self.producers.remove(producer)

    # Losing things

    @rule(active=st.booleans(), sealed=st.booleans(), empty=st.booleans())
    def lose_the_index(self, active: bool, sealed: bool, empty: bool) -> None:
        """Reads are the same with the index whole, empty or missing (B5)."""
        log = self.log()
        if active:
            log.tail()
            log.context.live.write(lambda txn: index.remove(txn, log.key))
        if sealed:

            def step(txn: Any) -> None:
                for segment in catalog.segments(txn, log.key):
                    if segment.sealed and empty:
                        keyspace.SEGMENT_INDEXES.put(txn, log.key, *segment.key, value=b"")
                    elif segment.sealed:
                        keyspace.SEGMENT_INDEXES.delete(txn, log.key, *segment.key)

            log.context.state.write(step)

    @rule()
    def open_again(self) -> None:
        """A second handle in the same process (A31)."""
        if len(self.roots) < 2:
            self.roots.append(self._open())

    @rule(handle=st.integers(0, 1))
    def close_one(self, handle: int) -> None:
        """The other handle is not disturbed."""
        if len(self.roots) == 2:
            self.roots.pop(handle).close()
            self.followers = []

    @rule()
    def reopen(self) -> None:
        """After a clean close everything is as it was (A24)."""
        for root in self.roots:
            root.close()
        self.followers, self.roots = [], [self._open()]
        assert self.roots[0].startup_report == []
        self._all_flushed()

    @rule()
    def kill(self) -> None:
        """All processes are killed: nothing that was acknowledged is lost (P1)."""
        self._crash()
        self.roots = [self._open()]
        assert self.log().end_offset() == self.end

    @rule(gone=st.booleans())
    def reboot(self, gone: bool) -> None:
        """Another boot, and the kernel wrote everything in time: nothing is lost."""
        self._crash()
        self._another_boot(gone)
        self._recovered(self.batches[-1].next if self.batches else 0)

    @rule(seed=st.integers(0, 1 << 32), gone=st.booleans(), garbage=st.booleans())
    def power_cut(self, seed: int, gone: bool, garbage: bool) -> None:
        """What was not flushed is lost from some batch on, and nothing else (A25, A27)."""
        self._crash()
        chance = random.Random(seed)
        for path in segment_files(f"{self.path}/root"):
            size = path.stat().st_size
            keep = chance.randint(min(self.floor.get(str(path), 0), size), size)
            if keep == size:
                continue
            data = path.read_bytes()[:keep]
            path.write_bytes(data + (chance.randbytes(chance.randint(0, 40)) if garbage else b""))
            if not keep and chance.random() < 0.5:
                path.unlink()
        self._another_boot(gone)
        self._recovered(self.flushed)

    def _crash(self) -> None:
        self.followers = []
        for root in self.roots:
            abandon(root)

    def _another_boot(self, gone: bool) -> None:
        self.boots += 1
        if gone:
            shutil.rmtree(f"{self.path}/root/live")
        self.roots = [self._open()]

    def _recovered(self, least: int) -> None:
        """The log ends after some batch, at or past what was certain."""
        end = self.log().end_offset()
        batches = [batch for batch in self.batches if batch.next <= end]
        assert sum(batch.next <= least for batch in self.batches) <= len(batches)
        # A truncation inside a batch leaves the end past the last batch, durably (A34).
        last = batches[-1].next if batches else 0
        assert end in (self.end, max(last, self.flushed_end))
        self.end = end
        if len(batches) < len(self.batches):
            self.batches = batches
            self._forget_producers()
        self._all_flushed()

    # Looking

    @rule(part=st.floats(0, 1), handle=st.integers(0, 1), most=st.sampled_from([1, 700, 1 << 20]))
    def read(self, part: float, handle: int, most: int) -> None:
        """Every record from an offset on, once and in order (A17, A19)."""
        offset = round(self.end * part)
        read = rows(self.log(handle), offset, most)
        assert read == [row for row in self.expected if row[0] >= offset]

    @rule(past=st.integers(1, 5))
    def read_past_the_end(self, past: int) -> None:
        """Past the end is out of range, the end itself is not (A17)."""
        with pytest.raises(OffsetOutOfRangeError):
            self.log().reader(self.end + past)
        assert self.log().reader(self.end).read() == []

    @rule(time=st.integers(-1, 61), handle=st.integers(0, 1))
    def look_up_a_time(self, time: int, handle: int) -> None:
        """The first record in offset order that is not older (B10)."""
        expected = [row[:2] for row in self.expected if row[1] >= START + time]
        entry = self.log(handle).offset_for_timestamp(START + time)
        assert (entry and entry[:2]) == (expected[0] if expected else None)

    @rule(part=st.floats(0, 1), handle=st.integers(0, 1))
    def follow_from(self, part: float, handle: int) -> None:
        """A reader that stays."""
        self.followers = self.followers[-2:]
        self.followers.append(self.log(handle).reader(round(self.end * part)))

    @rule(which=st.integers(0, 2), most=st.sampled_from([1, 1 << 20]))
    @precondition(lambda self: self.followers)
    def follow(self, which: int, most: int) -> None:
        """It goes on where it was, or an error says that the log was cut (A36)."""
        reader = self.followers[which % len(self.followers)]
        offset = reader.offset
        try:
            read = [row for batch in reader.read(most) for row in batch_rows(batch)]
        except (OffsetOutOfRangeError, LogTruncatedError):
            assert self.cuts
            self.followers.remove(reader)
            return
        read = [row for row in read if row[0] >= offset]
        assert read == [row for row in self.expected if row[0] >= offset][: len(read)]
        assert read or not [row for row in self.expected if row[0] >= offset]

    @initialize()
    def begin(self) -> None:
        """An empty log has nothing to read (A29)."""
        assert rows(self.log()) == []

    def teardown(self) -> None:
        try:
            assert rows(self.log()) == self.expected
            assert self.log().end_offset() == self.end
            assert healthy(self.roots[0])
        finally:
            for root in self.roots:
                root.close()
            shutil.rmtree(self.path)


class TypedPartitionModel(PartitionModel):
    """The same of a typed topic; its schema changes, and batches still have the first version."""

    typed = True

    @rule(handle=st.integers(0, 1))
    def change_the_schema(self, handle: int) -> None:
        """Each segment has one version, and readers see the columns of all of them."""
        root = self.roots[handle % len(self.roots)]
        columns = wider_schema(root.topic("t").schema_version)
        root.alter_schema("t", lambda before, earlier: changed_schema(before, columns))


TestPartitionModel = PartitionModel.TestCase
TestPartitionModel.settings = settings(stateful_step_count=25)
TestTypedPartitionModel = TypedPartitionModel.TestCase
TestTypedPartitionModel.settings = settings(
    stateful_step_count=25, max_examples=tiers.choose(quick=4, all=100, nightly=1_000)
)
