"""Compaction against a dictionary, record by record: what must be left, and what may be.

`ExpectedRecords` has every record that was appended, and derives in plain Python
which of them compaction must leave, by D8, D9 and D17.  `CompactionModel` does
everything that can be done to a partition, kills included, and compares.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from functools import partial
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from embedlog.api.topic import Topic
from embedlog.api.typed_topic import TypedTopic
from embedlog.batch import Batch, EncodedBatch
from embedlog.compaction import CleanOptions, clean, inspect
from embedlog.compaction.last_records import last_record, last_records
from embedlog.config import MaintenanceConfig, TopicConfig
from embedlog.errors import FencedError
from embedlog.partition.log_start import move_log_start
from embedlog.partition.producer_state import after
from embedlog.retention import retain
from embedlog.schemas.reading import TypedReader
from support.clock import START, ManualClock
from support.faulty_files import FaultyFiles
from support.forks import in_memory
from support.random_columns import canonical
from support.roots import (
    Row,
    abandon,
    batch_rows,
    encoded,
    healthy,
    latest,
    open_root,
    rows,
)
from support.typed_bytes import RandomTopic, as_typed, random_topics, row_bytes

RETENTION = 40
CONFIG = {
    "cleanup.policy": "compact",
    "file.delete.delay.ms": 0,
    "segment.bytes": 2600,
    "index.interval.bytes": 500,
    "delete.retention.ms": RETENTION,
    "retention.ms": -1,
}

keys = st.binary(max_size=1) | st.sampled_from([b"long" * 40, b"longer" * 40])
values = st.none() | st.binary(max_size=8)
records = st.lists(st.tuples(keys, values, st.integers(0, 60)), min_size=1, max_size=6)
first_records = st.lists(
    st.tuples(records, st.integers(1, 5), st.booleans(), st.sampled_from([None, 1, 2])),
    min_size=1,
    max_size=4,
)
changes = st.sampled_from(
    [
        {"min.compaction.lag.ms": 30},
        {"min.compaction.lag.ms": None},
        {"segment.bytes": 2000},
        {"segment.bytes": 9000},
        {"delete.retention.ms": 0},
        {"delete.retention.ms": RETENTION},
        {"max.message.bytes": 1500},
        {"max.message.bytes": None},
        {"index.interval.bytes": 0},
    ]
)


class ExpectedRecords:
    """Every record that was appended, and which of them compaction must leave."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        """All that were appended and not cut, by offset: the log without compaction."""
        self.left: set[int] = set()
        """Those that compaction leaves."""
        self.horizons: dict[int, int] = {}
        """When each tombstone that a pass has cleaned over may be deleted."""
        self.start = self.end = 0

    def append(self, row: Row) -> None:
        assert row[0] == self.end
        self.rows[self.end] = row
        self.left.add(self.end)
        self.end += 1

    def cut(self, end: int, existing: set[int]) -> None:
        """Truncate; a record that a compaction removed does not come back with that."""
        self.left &= {offset for offset in existing if offset < end}
        self.rows = {offset: row for offset, row in self.rows.items() if offset in self.left}
        self.horizons = {offset: ms for offset, ms in self.horizons.items() if offset < end}
        self.end = end

    def state(self) -> dict[bytes | None, Row]:
        """Return the last record of each key that has a value."""
        offsets = range(self.start, self.end)
        rows_left = [self.rows[offset] for offset in offsets if offset in self.rows]
        return latest(row for row in rows_left if row[2] is not None)

    def compact(self, upto: int, now: int, retention: int) -> set[int]:
        """Clean all below an offset; return tombstones that may or may not be deleted already."""
        last: dict[bytes, int] = {}
        for offset in sorted(self.left):
            key = self.rows[offset][2]
            if offset < upto and key is not None:
                last[key] = offset
        unsure = set()
        for offset in sorted(self.left):
            _, _, key, value, _ = self.rows[offset]
            if offset >= upto:
                continue
            if key is None or last[key] != offset:
                self.left.remove(offset)
            elif value is None and offset not in self.horizons:
                self.horizons[offset] = now + retention
                if not retention:
                    # Stamped by one pass, and due in the next, if there was one.
                    unsure.add(offset)
            elif value is None and self.horizons[offset] <= now:
                self.left.remove(offset)
        return unsure

    def copy(self) -> ExpectedRecords:
        """Return a copy, to try something."""
        other = ExpectedRecords()
        other.rows, other.start, other.end = self.rows, self.start, self.end
        other.left, other.horizons = set(self.left), dict(self.horizons)
        return other


class Killed(BaseException):
    """The process was killed: nothing that it does later has an effect."""


class DyingFiles(FaultyFiles):
    """Raises from one operation on, as in a process that was killed there.

    `kv` takes a lock for each write, so nothing is committed either.
    """

    left: int | None = None
    dead = False

    def die_at(self, number: int) -> None:
        self.left = number

    def heal(self) -> None:
        self.left, self.dead = None, False

    def _fault(self, kind: str) -> Any:
        if self.left is not None:
            self.left -= 1
            self.dead = self.dead or self.left < 0
        if self.dead:
            raise Killed
        return super()._fault(kind)

    def _pwritev(self, fd: int, buffers: Any, position: int) -> int:  # type: ignore[override]
        if self.left == 0 and not self.dead:
            whole = b"".join(map(bytes, buffers))
            os.pwrite(fd, whole[: len(whole) // 2], position)
        return super()._pwritev(fd, buffers, position)


class SharedRoot:
    """A root that examples share, with a topic for each; a new one after a failure."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=f"embedlog-{os.getpid()}-", dir=in_memory())
        # The last one is left to the end of the process.
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        self.clock, self.boots, self.topics = ManualClock(), 0, 0
        self.root = self.open()

    def open(self) -> Any:
        files = partial(DyingFiles, boot=f"boot {self.boots}")
        self.root = open_root(f"{self.path}/root", clock=self.clock, files=files)
        return self.root

    def restart(self, reboot: bool) -> Any:
        """Open the root as after a kill, or as after a reboot that lost nothing."""
        self.root.context.files.heal()
        abandon(self.root)
        self.boots += reboot
        return self.open()

    def leave(self) -> None:
        self.root.context.files.heal()
        abandon(self.root)
        self._remove()


class CompactionModel(RuleBasedStateMachine):
    """A compacted partition, and the records that are expected in it."""

    shared_root: ClassVar[SharedRoot | None] = None
    """The root of the last example, if that passed."""

    typed: RandomTopic | None = None
    """The columns of a typed topic; bytes stand for its keys and rows."""

    def __init__(self) -> None:
        super().__init__()
        shared_root, CompactionModel.shared_root = CompactionModel.shared_root, None
        self.home = shared_root or SharedRoot()
        self.home.topics += 1
        self.name = f"t{self.home.topics}"
        self.root, self.clock = self.home.root, self.home.clock
        self.clock.set(START)
        self.log: Any = None
        self.expected = ExpectedRecords()
        self.due: dict[int, int] = {}
        self.last: dict[int, tuple[int, int, Any]] = {}
        self.producers = 0

    # Appending

    @initialize(some=first_records)
    def begin(self, some: Any) -> None:
        """Begin with some records."""
        schema = self.typed and self.typed.schema
        self.root.create_topic(self.name, 1, TopicConfig.parse(CONFIG), schema)
        self.log = self.root.partition(self.name, 0)
        self._restart_follower()
        for some_records, times, roll, producer in some:
            for _ in range(times):
                self._append(some_records, producer, None, "none")
            if roll:
                self.log.roll()

    @rule(
        some=records,
        producer=st.sampled_from([None, None, 1, 2]),
        headers=st.sampled_from([None, None, None, [("h", b"x")]]),
        compression=st.sampled_from(["none", "none", "lz4", "zstd"]),
        times=st.integers(1, 3),
        roll=st.booleans(),
    )
    def append(
        self,
        some: Any,
        producer: int | None,
        headers: Any,
        compression: str,
        times: int,
        roll: bool,
    ) -> None:
        """Keys that repeat, tombstones, batches of all sizes."""
        for _ in range(times):
            self._append(some, producer, headers, compression)
        if roll:
            self.log.roll()

    def _append(self, some: Any, producer: int | None, headers: Any, compression: str) -> None:
        if self.typed is not None:
            some = [
                (None if key is None else self.typed.key(key), self.typed.value(value), time)
                for key, value, time in some
            ]
        batch_records = [
            (key, value, START + time, list(headers or [])) for key, value, time in some
        ]
        number = None if producer is None else producer + self.producers
        who = None if number is None else (number, 0, self.due.get(number, 0))
        encoded_batch = self._encoded(
            *[value for _, value, _, _ in batch_records],
            keys=[key for key, _, _, _ in batch_records],
            at=[time for _, _, time, _ in batch_records],
            headers=None if headers is None else [headers] * len(batch_records),
            producer=who,
            compression=compression,
        )
        self.log.refresh()
        if encoded_batch.size > self.log.config.max_message_bytes:
            return
        (receipt,) = self.log.append([encoded_batch])
        assert receipt.base_offset == self.expected.end
        if who is not None:
            self.due[who[0]] = after(who[2], len(batch_records))
            self.last[who[0]] = (who[2], receipt.base_offset, encoded_batch)
        for key, value, time, heads in batch_records:
            self.expected.append((self.expected.end, time, key, value, heads))

    def _encoded(self, *items: bytes | None, **options: Any) -> EncodedBatch:
        batch = encoded(*items, **options)
        return as_typed(batch, topic=self.typed) if self.typed else batch

    @rule(some=records, gone=st.booleans())
    def change_the_policy(self, some: Any, gone: bool) -> None:
        """D9, D27: without compaction there may be records without keys."""
        self.root.alter_topic(self.name, {"cleanup.policy": "delete"})
        try:
            clean(self.log, self.clock())
            raise AssertionError("what is not compacted was compacted")
        except FencedError:
            pass
        self._append([(None, value, time) for _, value, time in some], None, None, "none")
        self.root.alter_topic(self.name, {"cleanup.policy": "compact,delete"})
        if gone:
            self.log.roll()

    @rule(gap=st.integers(1, 9))
    def mirror(self, gap: int) -> None:
        """D14: a mirror leaves gaps."""
        key, value = b"m", b"v"
        if self.typed is not None:
            key, value = self.typed.key(key), self.typed.value(value)  # type: ignore[assignment]
        encoded_batch = self._encoded(value, keys=[key])
        offset = self.expected.end + gap
        self.log.append_at([(offset, encoded_batch)])
        self.expected.end = offset
        self.expected.append((offset, START, key, value, []))

    # Other changes

    @rule(some=changes)
    def alter(self, some: Any) -> None:
        """Settings apply immediately."""
        self.root.alter_topic(self.name, some)

    @rule(ms=st.sampled_from([1, 20, 50]))
    def wait(self, ms: int) -> None:
        """Tombstones and lags."""
        self.clock.advance(ms)

    @rule(percent=st.integers(0, 100))
    def cut(self, percent: int) -> None:
        """A34, D26: at the beginning of a batch, so that none goes because of its neighbour."""
        self._cut(percent)

    def _cut(self, percent: int) -> None:
        bounds = [batch.base_offset for batch in self._batches()] + [self.expected.end]
        bounds = [bound for bound in bounds if bound > self.expected.start]
        if not bounds:
            return
        offset = bounds[percent * len(bounds) // 101]
        existing = {row[0] for row in self._check_state()}
        self.log.truncate_to(offset)
        self.expected.cut(offset, existing)
        # Another test covers producers after a truncation; these are new ones.
        self.producers += 2
        self.due.clear()
        self.last.clear()
        self._restart_follower()

    @rule(share=st.integers(0, 100), whole=st.booleans())
    def delete_records(self, share: int, whole: bool) -> None:
        """C8, D22: the start moves, also into a segment."""
        self._delete(share, whole)

    def _delete(self, share: int, whole: bool) -> None:
        start, end = self.expected.start, self.expected.end
        move_log_start(self.log, start + (end - start) * share // 250, whole=whole)
        self._moved()

    @rule(keep=st.integers(2000, 9000))
    def retain(self, keep: int) -> None:
        """C3, C6: between compactions, by size."""
        change = {"cleanup.policy": "compact,delete", "retention.bytes": keep}
        self.root.alter_topic(self.name, change)
        retain(self.root, self.clock())
        self.root.alter_topic(self.name, {"retention.bytes": None})
        self._moved()

    def _moved(self) -> None:
        assert self.expected.start <= self.log.start_offset() <= self.expected.end
        self.expected.start = self.log.start_offset()
        self._restart_follower()

    @rule(reboot=st.booleans())
    def reboot(self, reboot: bool) -> None:
        """A process that is killed, or a machine that restarts with all that was written."""
        self.log.flush()
        self._restart(reboot)

    def _restart(self, reboot: bool) -> None:
        self.root = self.home.restart(reboot)
        self.log = self.root.partition(self.name, 0)
        self.follower = self.log.reader(self.follower.offset)

    # Compacting

    @rule(
        slots=st.sampled_from([1, 2, 5, 1000, 1000]),
        chunk=st.sampled_from([1, 700, 1 << 20]),
        roll=st.booleans(),
        die=st.none() | st.integers(0, 150),
        meanwhile=st.sampled_from([None, None, None, "append", "cut", "delete", "off"]),
        number=st.integers(0, 100),
    )
    def compact(
        self,
        slots: int,
        chunk: int,
        roll: bool,
        die: int | None,
        meanwhile: str | None,
        number: int,
    ) -> None:
        """A reader gets the same state; afterwards exactly the expected records are left."""
        if roll:
            self.log.roll()
        calls = 0

        def progress(done: int, total: int) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                if meanwhile is not None:
                    self._disturb(meanwhile, number)
                self._check_state()

        limits = MaintenanceConfig(
            log_cleaner_dedupe_buffer_size=24 * slots, log_cleaner_io_buffer_size=chunk
        )
        if die is not None:
            self.root.context.files.die_at(die)
            progress = None  # type: ignore[assignment]
        done = False
        try:
            options = CleanOptions(settings=limits, progress=progress)
            clean(self.log, self.clock(), options)
            done = True
        except Killed:
            self._restart(number < 50)
        except FencedError:
            assert meanwhile in ("cut", "delete", "off")
        self.root.context.files.heal()
        if meanwhile == "off":
            self.root.alter_topic(self.name, {"cleanup.policy": "compact"})
        self._compacted(done)
        if not number % 4:
            self.ask_for_all()

    def _disturb(self, how: str, number: int) -> None:
        if how == "append":
            self._append([(b"", b"meanwhile", 5), (b"a", None, 6)], 1, None, "none")
        elif how == "cut":
            self._cut(number)
        elif how == "delete":
            self._delete(number, number % 2 == 0)
        else:
            self.root.alter_topic(self.name, {"cleanup.policy": "delete"})

    def _compacted(self, done: bool) -> None:
        """Check the records left: those that must, or, if it was interrupted, those that may be."""
        expected, now, retention = self.expected, self.clock(), self.log.config.delete_retention_ms
        cleanable = inspect(self.log, now)
        upto = cleanable.first_dirty if done else cleanable.log.tail().log_end_offset
        if done:
            assert cleanable.cleanable_bytes == 0
            # Of the clean part only whole segments were read.
            ends = [info.next_offset or 0 for info in self.log.segments.values()]
            upto = max((end for end in ends if end <= upto), default=expected.start)
        cleaned = expected.copy()
        unsure = cleaned.compact(upto, now, retention)
        most = cleaned if done else expected
        present = {row[0] for row in rows(self.log)}
        must = {offset for offset in cleaned.left - unsure if offset >= expected.start}
        if not done:
            # One pass may have stamped a tombstone, and a later one removed it.
            must -= {offset for offset in must if self._is_due(offset, now, retention)}
        may = {offset for offset in most.left if offset >= expected.start}
        assert must <= present <= may, f"lost {must - present}, kept {present - may}"
        expected.left = {offset for offset in most.left if offset < expected.start} | present
        self._adopt_horizons(most.horizons if done else expected.horizons, now + retention)
        self._check_producers(cleanable.first_dirty if done else 0)
        self.check()

    def _is_due(self, offset: int, now: int, retention: int) -> bool:
        if self.expected.rows[offset][3] is not None:
            return False
        return self.expected.horizons.get(offset, now + retention) <= now

    def _adopt_horizons(self, stamped: dict[int, int], new: int) -> None:
        """D17: stamped once, by the first pass that cleans over it."""
        horizons = {}
        for batch in self._batches():
            for row in batch_rows(batch):
                if row[3] is None and row[2] is not None and batch.delete_horizon is not None:
                    horizons[row[0]] = batch.delete_horizon
        for offset, horizon in horizons.items():
            if offset >= self.expected.start:
                assert horizon == stamped.get(offset, new), f"the horizon of {offset}"
        for offset in stamped:
            if self.expected.start <= offset and offset in self.expected.left:
                assert offset in horizons, f"the horizon of {offset} is lost"
        self.expected.horizons = horizons

    def _check_producers(self, upto: int) -> None:
        """D11: the last batch of a producer keeps its place and numbers."""
        present = {
            (batch.producer_id, batch.base_offset, batch.base_sequence) for batch in self._batches()
        }
        for number, (first, base, _) in self.last.items():
            if self.expected.start <= base < upto:
                assert (number, base, first) in present

    def _batches(self) -> list[Any]:
        batches, reader = [], self.log.reader(self.expected.start)
        while some := reader.read():
            batches += some
        return batches

    # Looking

    def check(self) -> None:
        """The same state, of records that were appended, at their offsets, in order."""
        present_rows = self._check_state()
        assert all(self.expected.rows[row[0]] == row for row in present_rows)
        offsets = [row[0] for row in present_rows]
        assert offsets == sorted(
            offset for offset in self.expected.left if offset >= self.expected.start
        )
        ends = (self.log.start_offset(), self.log.end_offset())
        assert ends == (self.expected.start, self.expected.end)

    def _check_state(self) -> list[Row]:
        left = rows(self.log)
        state = latest(row for row in left if row[2] is not None)
        assert state == self.expected.state()
        return left

    def ask_for_all(self) -> None:
        """`items`, `get` and `to_arrow(latest=True)` agree, compacted or not."""
        topic, state = self._topic(), self.expected.state()
        expected = {key: row[3] for key, row in state.items()}
        items = {self._key_bytes(key): self._row_bytes(value) for key, value in topic.items()}
        assert items == expected
        asked = {row[2] for row in self.expected.rows.values() if row[2] is not None}
        for key in sorted(asked)[:6]:
            assert self._row_bytes(topic.get(self._key_value(key))) == expected.get(key)
        names = self.typed.schema.key if self.typed else ["key"]
        table = topic.to_arrow(["offset", *names], latest=True).to_pylist()
        offsets = {self._key_bytes(tuple(row[n] for n in names)): row["offset"] for row in table}
        assert offsets == {key: row[0] for key, row in state.items()}

    def _key_value(self, key: bytes) -> Any:
        """Return a key as programs have it."""
        parts = self.typed.keys[key] if self.typed else [key]
        return parts[0] if len(parts) == 1 else tuple(parts)

    def _key_bytes(self, key: Any) -> bytes:
        """Return the bytes of a key as programs have it."""
        parts = key if isinstance(key, tuple) else (key,)
        if self.typed is None:
            return parts[0]  # type: ignore[no-any-return]
        known = self.typed.keys.items()
        return next(name for name, value in known if canonical(value) == canonical(parts))

    def _row_bytes(self, value: Any) -> bytes | None:
        """Return the bytes that stand for a value as programs have it."""
        if value is None or self.typed is None:
            return value  # type: ignore[no-any-return]
        return row_bytes([value[name] for name in value if name in "xyz"])

    @rule(start=st.integers(0, 400), count=st.integers(0, 400))
    def ask_for_a_part(self, start: int, count: int) -> None:
        """The last record of each key of any part, compacted or not; tombstones too."""
        first, end = self.expected.start, self.expected.end
        if first == end:
            return
        start = first + start % (end - first)
        stop = min(start + count, end)
        part_rows = [row for row in rows(self.log) if start <= row[0] < stop and row[2] is not None]
        last = {row[2]: row for row in part_rows}
        offsets = {}
        reader = TypedReader(self.typed.schema) if self.typed else None
        read = Batch.columns if reader is None else reader.keyed_columns
        for table in last_records(self.log, start, stop, read=read):
            offsets.update({row["key"]: row["offset"] for row in table.to_pylist()})
        assert offsets == {key: row[0] for key, row in last.items()}
        for key, row in list(last.items())[:3]:
            assert key is not None
            found = last_record(self.log, key, start, stop, reader)
            assert found is not None
            assert (found.offset, found.timestamp) == row[:2]
            assert self._row_bytes(found.value) == row[3]
        assert last_record(self.log, b"nobody", start, stop) is None

    def _topic(self) -> Any:
        return (TypedTopic if self.typed else Topic)(self.root, self.name)

    @rule(offset=st.integers(0, 400))
    def read_from(self, offset: int) -> None:
        """D10: a removed offset is a legal position; times are found as well (B10)."""
        present_rows = rows(self.log)
        offset = self.expected.start + offset % (self.expected.end - self.expected.start + 1)
        assert rows(self.log, offset) == [row for row in present_rows if row[0] >= offset]
        time = START + offset % 62
        first = next((row[0] for row in present_rows if row[1] >= time), None)
        position = self.log.offset_for_timestamp(time)
        assert (position and position.offset) == first

    @rule()
    def repeat(self) -> None:
        """G16: what was sent is known, though compaction left nothing of it."""
        for number, (first, base, last_batch) in self.last.items():
            last_batch.set_producer(number, 0, first)
            (receipt,) = self.log.append([last_batch])
            assert receipt.duplicate
            assert receipt.base_offset == base

    @rule(some=st.integers(1, 300))
    def follow(self, some: int) -> None:
        """A reader goes on through it all (P20)."""
        first = self.follower.offset
        read_rows = [row for batch in self.follower.read(some) for row in batch_rows(batch)]
        self.followed += [row for row in read_rows if row[0] >= first]

    def _restart_follower(self) -> None:
        self.follower = self.log.reader(self.log.start_offset())
        self.followed: list[Row] = []

    def teardown(self) -> None:
        """At the end everything is healthy, and the follower saw what it had to."""
        if self.log is None:  # Hypothesis gave the first step up.
            self.home.leave()
            return
        fine = False
        try:
            self.check()
            self.ask_for_all()
            before = -1
            while self.follower.offset != before:  # A cut may have left a gap before the end.
                before = self.follower.offset
                self.follow(1 << 20)
            seen = [row[0] for row in self.followed]
            assert seen == sorted(set(seen))
            got = {row[2]: row for row in self.followed}
            # What it read before may have been deleted meanwhile: tombstones do not wait for ever.
            assert all(got.get(key) == row for key, row in self.expected.state().items())
            assert healthy(self.root)
            self.root.delete_topic(self.name)
            fine = self.home.topics < 100
        finally:
            if fine:
                CompactionModel.shared_root = self.home
            else:
                self.home.leave()


class TypedCompactionModel(CompactionModel):
    """The same of a typed topic of random columns; tombstones are in a column of their own."""

    @initialize(typed=random_topics(), some=first_records)
    def begin(self, typed: RandomTopic, some: Any) -> None:  # type: ignore[override]
        """Begin with some columns and records."""
        self.typed = typed
        super().begin(some)


def run_some(examples: int) -> None:
    """Try some examples, the same each time, and do not look for a smaller one."""
    try:
        run_state_machine_as_test(
            CompactionModel,
            settings=settings(
                max_examples=examples,
                stateful_step_count=12,
                derandomize=True,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        # In a forked child nothing runs at the end of the process.
        last, CompactionModel.shared_root = CompactionModel.shared_root, None
        if last is not None:
            last.leave()
