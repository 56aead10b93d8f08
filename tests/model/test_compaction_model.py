"""Compaction against a dictionary: a reader from 0 to the end always gets the same state (D8).

Whatever is appended, rolled, cut, reconfigured or compacted, wholly or in part:
before, during and after, the last value of each key is what it would be in the
log that nobody compacted.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support.clock import START, ManualClock
from support.cruel import CruelFiles
from support.roots import abandon, batch_rows, encoded, healthy, make_log, open_root, rows

from embedlog.compaction import clean, look
from embedlog.compaction.latest import last_record, last_records
from embedlog.config import MaintenanceConfig, TopicConfig
from embedlog.log.sequence import after

CONFIG = {
    "cleanup.policy": "compact",
    "file.delete.delay.ms": 0,
    "segment.bytes": 2600,
    "index.interval.bytes": 500,
    "delete.retention.ms": 40,
}

keys = st.binary(max_size=1) | st.sampled_from([b"long" * 40, b"longer" * 40])
values = st.none() | st.binary(max_size=8)
records = st.lists(st.tuples(keys, values, st.integers(0, 60)), min_size=1, max_size=6)
changes = st.sampled_from(
    [
        {"min.compaction.lag.ms": 30},
        {"min.compaction.lag.ms": None},
        {"segment.bytes": 2000},
        {"segment.bytes": 9000},
        {"delete.retention.ms": 0},
        {"delete.retention.ms": 40},
        {"max.message.bytes": 1500},
        {"max.message.bytes": None},
        {"index.interval.bytes": 0},
    ]
)


def state_of(found: list[Any]) -> dict[bytes, Any]:
    """What a reader makes of records: the last value of each key, unless it is a tombstone."""
    state: dict[bytes, Any] = {}
    for row in found:
        state.pop(row[2], None)
        if row[3] is not None:
            state[row[2]] = row
    return state


class CompactionModel(RuleBasedStateMachine):
    """A compacted partition, and all that was ever appended to it."""

    def __init__(self) -> None:
        super().__init__()
        self.path = tempfile.mkdtemp(prefix="embedlog-compaction-")
        self.clock, self.boots = ManualClock(), 0
        self.root = self._open()
        self.log = make_log(self.root, CONFIG)
        self.all: list[Any] = []
        self.due: dict[int, int] = {}
        self.last: dict[int, tuple[int, int, Any]] = {}
        self.follower = self.log.reader(0)
        self.followed: list[Any] = []

    def _open(self) -> Any:
        files = partial(CruelFiles, boot=f"boot {self.boots}")
        files.create_root = CruelFiles.create_root  # type: ignore[attr-defined]
        return open_root(f"{self.path}/root", clock=self.clock, files=files)

    @initialize()
    def begin(self) -> None:
        """There is always something."""
        self._append([(b"a", b"1", 0)], None, None, "none")

    @rule(
        some=records,
        producer=st.sampled_from([None, None, 1, 2]),
        headers=st.sampled_from([None, None, None, [("h", b"x")]]),
        compression=st.sampled_from(["none", "none", "lz4", "zstd"]),
        times=st.integers(1, 3),
    )
    def append(
        self, some: Any, producer: int | None, headers: Any, compression: str, times: int
    ) -> None:
        """Keys that repeat, tombstones, batches of all sizes."""
        for _ in range(times):
            self._append(some, producer, headers, compression)

    def _append(self, some: Any, producer: int | None, headers: Any, compression: str) -> None:
        found = [(key, value, START + time, list(headers or [])) for key, value, time in some]
        who = None if producer is None else (producer, 0, self.due.get(producer, 0))
        one = encoded(
            *[value for _, value, _, _ in found],
            keys=[key for key, _, _, _ in found],
            at=[time for _, _, time, _ in found],
            headers=None if headers is None else [headers] * len(found),
            producer=who,
            compression=compression,
        )
        if one.size > self.log.config.max_message_bytes:
            return
        (receipt,) = self.log.append([one])
        assert receipt.base_offset == (self.all[-1][0] + 1 if self.all else 0)
        if who is not None:
            self.due[who[0]] = after(who[2], len(found))
            self.last[who[0]] = (who[2], receipt.base_offset, one)
        self.all += [
            (receipt.base_offset + place, time, key, value, heads)
            for place, (key, value, time, heads) in enumerate(found)
        ]

    @rule()
    def roll(self) -> None:
        """What is in the active segment can be compacted."""
        self.log.roll()

    @rule(some=changes)
    def alter(self, some: Any) -> None:
        """Settings apply at once."""
        self.root.alter_topic("t", some)

    @rule(ms=st.sampled_from([1, 20, 50]))
    def wait(self, ms: int) -> None:
        """Tombstones and lags."""
        self.clock.advance(ms)

    @rule(some=st.integers(1, 300))
    def follow(self, some: int) -> None:
        """A reader goes on through it all (P20)."""
        first = self.follower.offset
        found = [row for one in self.follower.read(some) for row in batch_rows(one)]
        self.followed += [row for row in found if row[0] >= first]

    @rule(
        slots=st.sampled_from([1, 2, 5, 1000]),
        chunk=st.sampled_from([1, 700, 1 << 20]),
        roll=st.booleans(),
    )
    def compact(self, slots: int, chunk: int, roll: bool) -> None:
        """During it a reader gets the same state; after it each key is in the clean part once."""
        if roll:
            self.log.roll()
        seen = []

        def progress(done: int, total: int) -> None:
            if len(seen) < 3:
                seen.append(state_of(rows(self.log)))

        limits = MaintenanceConfig(
            log_cleaner_dedupe_buffer_size=24 * slots, log_cleaner_io_buffer_size=chunk
        )
        clean(self.log, self.clock(), settings=limits, progress=progress)

        wanted = state_of(self.all)
        assert all(each == wanted for each in seen)
        section = look(self.log, self.clock())
        assert section.cleanable_bytes == 0
        clean_part = [row[2] for row in rows(self.log) if row[0] < section.first_dirty]
        assert len(set(clean_part)) == len(clean_part)
        self.check()

    @rule()
    def check(self) -> None:
        """The same state, of records that were appended, at their offsets, in order."""
        found = rows(self.log)
        known = {row[0]: row for row in self.all}
        assert all(known[row[0]] == row for row in found)
        assert [row[0] for row in found] == sorted({row[0] for row in found})
        assert state_of(found) == state_of(self.all)
        assert (self.log.start_offset(), self.log.end_offset()) == (0, self.all[-1][0] + 1)

    @rule(place=st.integers(0, 400))
    def read_from(self, place: int) -> None:
        """D10: a removed offset is a legal position; times are found as well (B10)."""
        found = rows(self.log)
        place %= self.log.end_offset() + 1
        assert rows(self.log, place) == [row for row in found if row[0] >= place]
        time = START + place % 62
        first = next((row[0] for row in found if row[1] >= time), None)
        told = self.log.offset_for_timestamp(time)
        assert (told and told.offset) == first

    @rule(start=st.integers(0, 400), count=st.integers(0, 400))
    def ask_for_the_latest(self, start: int, count: int) -> None:
        """The last record of each key of any part, compacted or not."""
        end = self.log.end_offset()
        start %= end
        stop = min(start + count, end)
        last = {row[2]: row for row in rows(self.log) if start <= row[0] < stop}
        found = {}
        for table in last_records(self.log, start, stop):
            found.update({row["key"]: row["offset"] for row in table.to_pylist()})
        assert found == {key: row[0] for key, row in last.items()}
        for key, row in last.items():
            told = last_record(self.log, key, start, stop)
            assert told == (row[0], row[1], row[3])
        assert last_record(self.log, b"nobody", start, stop) is None

    @rule()
    def repeat(self) -> None:
        """G16: what was sent is known, though compaction left nothing of it."""
        for number, (first, base, one) in self.last.items():
            one.sequence(number, 0, first)
            (receipt,) = self.log.append([one])
            assert receipt.duplicate and receipt.base_offset == base

    @rule(clean_up=st.booleans())
    def reboot(self, clean_up: bool) -> None:
        """A process that is killed, or a machine that restarts with all that was written."""
        self.log.flush()
        abandon(self.root)
        self.boots += clean_up
        self.root = self._open()
        self.log = self.root.partition("t", 0)
        self.follower = self.log.reader(self.follower.offset)

    def teardown(self) -> None:
        """At the end everything is healthy, and the follower saw what it had to."""
        try:
            self.check()
            while self.follower.offset < self.log.end_offset():
                self.follow(1 << 20)
            seen = [row[0] for row in self.followed]
            assert seen == sorted(set(seen))
            wanted, got = state_of(self.all), state_of(self.followed)
            # What it read before may have been deleted meanwhile: tombstones do not wait for ever.
            assert all(got.get(key) == row for key, row in wanted.items())
            assert healthy(self.root)
            assert TopicConfig.parse(CONFIG).compacts
            self.root.close()
        finally:
            shutil.rmtree(self.path, ignore_errors=True)


TestCompactionModel = CompactionModel.TestCase
TestCompactionModel.settings = settings(stateful_step_count=25)
