"""A compaction that is killed, fails, is interrupted, or loses power: the old log or the new (D24).

It compacts, appends, deletes the oldest records and compacts again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
from support import forks
from support.clock import START
from support.compaction_model import run_some
from support.faulty_files import CHANGES
from support.faulty_roots import COMPANY, Acknowledge, RootFaults
from support.forks import tell
from support.mutants import Behaviour, Change
from support.roots import Row, abandon, encoded, healthy, latest, no_stray_files, rows
from support.tiers import choose, sample
from support.typed_bytes import as_typed, first_schema

from embedlog import kv
from embedlog.compaction import CleanOptions, clean, inspect
from embedlog.config import MaintenanceConfig, TopicConfig
from embedlog.errors import EmbedlogError, FencedError
from embedlog.forks import cached_property
from embedlog.partition import PartitionLog, unnamed_files
from embedlog.partition.log_start import move_log_start
from embedlog.record import TopicPartition
from embedlog.root.root import Root

CONFIG = {
    "cleanup.policy": "compact",
    "file.delete.delay.ms": 0,
    "segment.bytes": 2600,
    "index.interval.bytes": 600,
    "delete.retention.ms": 50,
}
BUILT, BATCHES, EACH = 14, 16, 4
"""Batches before the compaction, in all, and records of each."""
DELETED = 13
"""Up to where the oldest records are deleted; less where a segment does not end there."""
SMALL = MaintenanceConfig(log_cleaner_dedupe_buffer_size=24 * 8, log_cleaner_io_buffer_size=1500)
SMALL_STEPS = CleanOptions(settings=SMALL)
STATES_CHANGE = CHANGES | {"unlock"}
"""The operations after which a kill leaves other files: LMDB commits before an unlock."""


def records_of(number: int) -> list[tuple[bytes, bytes | None]]:
    """Return the keys and values of a batch."""
    return [
        (
            b"k%d" % ((number * 5 + row * row) % 9),
            None if (number + row) % 7 == 0 else b"%d-%d" % (number, row),
        )
        for row in range(EACH)
    ]


class CompactionFaults(RootFaults):
    """Sealed segments, some of them compacted, of repeated keys, tombstones and producers."""

    parts: ClassVar = [TopicPartition("t", 0)]

    def __init__(self, typed: bool) -> None:
        super().__init__()
        self.typed = typed

    def _stored(self, batch: Any) -> Any:
        return as_typed(batch) if self.typed else batch

    def _batch(self, number: int) -> Any:
        keys, values = zip(*records_of(number), strict=True)
        producer = (number % 3, 0, number // 3 * EACH) if number % 3 else None
        headers = [[("h", b"x")]] * EACH if number > 10 else None
        at = START + number
        return self._stored(
            encoded(*values, keys=list(keys), at=at, producer=producer, headers=headers)
        )

    @cached_property
    def appended(self) -> list[Row]:
        """All records that are ever appended, as `rows` returns them."""
        return [
            (EACH * number + row, START + number, key, value, [("h", b"x")] if number > 10 else [])
            for number in range(BATCHES)
            for row, (key, value) in enumerate(records_of(number))
        ]

    def fill(self, root: Root) -> None:
        """Append and compact."""
        schema = first_schema() if self.typed else None
        root.create_topic("t", 1, TopicConfig.parse(CONFIG), schema)
        log = root.partition("t", 0)
        for number in range(BUILT):
            log.append([self._batch(number)])
            if number == 5:
                clean(log, START, SMALL_STEPS)
        log.roll()
        log.flush()

    def work(self, root: Root, durability: str, acknowledge: Acknowledge) -> EmbedlogError | None:
        """Compact twice, the second time without tombstones; report the start and the end."""
        log = root.partition("t", 0)
        try:
            clean(log, START + 20, SMALL_STEPS)
            for number in range(BUILT, BATCHES):
                log.append([self._batch(number)])
                acknowledge(f"{log.start_offset()}:{EACH * (number + 1)}")
            log.roll()
            move_log_start(log, DELETED, whole=True)
            acknowledge(f"{log.start_offset()}:{EACH * BATCHES}")
            clean(log, START + 100, SMALL_STEPS)
        except EmbedlogError as error:
            return error
        acknowledge("done")
        return None

    def check_between(self, root: Root, acked: set[str]) -> None:
        """The log is the old one, the new one, or on the way between."""
        ends = [tuple(map(int, step.split(":"))) for step in acked - {"done"}]
        self._judge(
            root,
            max((start for start, _ in ends), default=0),
            max((end for _, end in ends), default=EACH * BUILT),
        )

    def _judge(self, root: Root, least_start: int, least_end: int) -> None:
        log = root.partition("t", 0)
        assert healthy(root)
        start, end = log.start_offset(), log.end_offset()
        assert least_start <= start <= DELETED
        assert least_end <= end <= EACH * BATCHES
        assert end % EACH == 0
        left = rows(log)
        assert all(self.appended[row[0]] == row for row in left), "a record never appended"
        offsets = [row[0] for row in left]
        assert offsets == sorted(set(offsets))
        expected = latest(self.appended[:end])
        assert latest(left) == {key: row for key, row in expected.items() if row[0] >= start}
        reader = log.reader(start)
        while reader.read():
            pass
        assert reader.offset == end, "a reader does not come to the end"

    def repair(self, root: Root, acked: set[str]) -> None:
        """It is as it was."""
        super().repair(root, acked)
        self.check_between(root, acked)

    def check_state(self, root: Root, acked: set[str], durability: str) -> None:
        """Appends wait for no flush: only the one before the second compaction covers them."""
        if "done" not in acked:
            acked = {f"{step.partition(':')[0]}:{EACH * BUILT}" for step in acked}
        super().check_state(root, acked, durability)

    def check_done(self, root: Root, durability: str) -> None:
        """Compactions go through, appends go on, and no stray file is left."""
        log = root.partition("t", 0)
        end = log.end_offset()
        log.roll()
        clean(log, START + 120, SMALL_STEPS)
        clean(log, START + 500)
        self._judge(root, 0, end)
        cleanable = inspect(log, START + 500)
        assert (cleanable.cleanable_bytes, cleanable.first_dirty) == (0, end)
        keys = [row[2] for row in rows(log)]
        assert len(set(keys)) == len(keys)
        assert len(keys) == len(latest(rows(log))), "a tombstone that is not needed any more"
        self._check_resending(log, end)
        (receipt,) = log.append([self._stored(encoded(b"v", keys=[b"new"]))])
        assert receipt.base_offset == end
        unnamed_files.sweep(log.context, early=True)
        assert no_stray_files(root)

    def _check_resending(self, log: PartitionLog, end: int) -> None:
        """D11, G16: the last batch of a producer is known, though no record of it is left."""
        batches = {(batch.producer_id, batch.base_offset) for batch in batches_of(log)}
        for producer in (1, 2):
            last = max(number for number in range(end // EACH) if number % 3 == producer)
            assert (producer, EACH * last) in batches
            (receipt,) = log.append([self._batch(last)])
            assert (receipt.duplicate, receipt.base_offset) == (True, EACH * last)


def batches_of(log: PartitionLog) -> list[Any]:
    reader, found = log.reader(log.start_offset()), list[Any]()
    while batches := reader.read():
        found += batches
    return found


FAULTS, TYPED_FAULTS = CompactionFaults(typed=False), CompactionFaults(typed=True)


@pytest.fixture(
    params=[FAULTS, pytest.param(TYPED_FAULTS, marks=pytest.mark.tier("all"))],
    ids=["bytes", "typed"],
)
def faults(request: pytest.FixtureRequest) -> CompactionFaults:
    """A compaction of a topic of bytes, and of a typed one."""
    chosen: CompactionFaults = request.param
    return chosen


def fresh(faults: CompactionFaults, directory: Path) -> Root:
    """Return a root before the compaction, in the one directory of this process."""
    return faults.begin(directory / f"run-{os.getpid()}", lambda files: None)


def check_truncation(
    number: int, *, directory: Path, faults: CompactionFaults = FAULTS, batches: int = 9
) -> bool:
    """Truncate the log while it is compacted; the truncation stands, and all before it.

    Returns whether the compaction was fenced; it may have been past that part.
    """
    root = fresh(faults, directory)
    log, calls, before = root.partition("t", 0), 0, list[Row]()

    def progress(done: int, total: int) -> None:
        nonlocal calls, before
        calls += 1
        if calls == number:
            bases = [batch.base_offset for batch in batches_of(log)]
            log.truncate_to(max((base for base in bases if base <= EACH * batches), default=0))
            # A compaction removed records before; they do not come back.
            before = rows(log)

    fenced = False
    try:
        clean(log, START + 20, CleanOptions(settings=SMALL, progress=progress))
    except FencedError:
        fenced = True
    end = log.end_offset()
    assert end <= EACH * batches or calls < number
    assert latest(rows(log)) == latest(before if calls >= number else faults.appended[:end])
    assert (inspect(log, START).first_dirty or 0) <= end
    assert healthy(root)
    abandon(root)
    return fenced


def check_lost_answer(number: int, *, directory: Path, faults: CompactionFaults = FAULTS) -> None:
    """Ctrl-C right after a commit of the compaction; the commit stands."""
    root = fresh(faults, directory)
    log, write, calls = root.partition("t", 0), kv.LmdbStore.write, 0

    def interrupted(store: kv.LmdbStore, step: Any) -> Any:
        nonlocal calls
        result = write(store, step)
        # Under the partition's lock: a swap.
        if store is log.context.state and log.thread_lock.locked():
            calls += 1
            if calls == number:
                raise KeyboardInterrupt
        return result

    kv.LmdbStore.write = interrupted  # type: ignore[method-assign]
    try:
        faults.work(root, "os", lambda step: None)
    except KeyboardInterrupt:
        pass
    finally:
        kv.LmdbStore.write = write  # type: ignore[method-assign]
    faults.check_between(root, set())
    faults.check_done(root, "os")
    abandon(root)


@COMPANY
def test_whatever_a_kill_leaves_is_the_old_log_or_the_new_one(directory, faults, company):
    """D24, D25, P1: it opens by itself, reads the same, has no stray file, and compacts again."""
    killed = faults.kill_everywhere(directory, 4, company, STATES_CHANGE)
    assert killed >= choose(test=3, all=120)


def test_every_operation_of_a_compaction_may_fail(directory, faults):
    """P8, P9, P10: the log is as it was; when the fault is over the next one goes through."""
    raised = faults.fail_everywhere(directory, 5, step=choose(test=6, nightly=1))
    assert raised >= choose(test=1, all=60)


def test_a_compaction_may_be_interrupted_after_any_commit(directory, faults):
    """P1: what was swapped in stays, even if the call never returned."""
    calls = sample(range(1, 12), 2)
    forks.spread(calls, check_lost_answer, directory=directory, faults=faults)


def test_a_compaction_may_be_cut_short_anywhere(directory, faults):
    """D22, D26: a truncation at any of its chunks stands, and loses nothing that was before it."""
    chunks = sample(range(1, 30), 3)
    fenced = forks.spread(chunks, check_truncation, directory=directory, faults=faults)
    assert sum(fenced) >= choose(test=1, all=5)


def test_the_power_may_go_at_any_moment(directory, faults):
    """D24, P4: what was flushed before the compaction is readable after it, by its last values."""
    limit = choose(test=10, all=900, nightly=20_000)
    assert faults.cut_everywhere(directory / str(faults.typed), limit) >= 0.4 * limit


# Planted bugs: what the checks above are worth


def by_kills(directory: Path) -> None:
    kills = FAULTS.kills(directory, kinds={"unlink"})
    for case in [*kills, *FAULTS.kills(directory, kinds=STATES_CHANGE)]:
        FAULTS.check_kill(case, directory=directory)


def by_power_cuts(directory: Path) -> None:
    FAULTS.cut_everywhere(directory, 500)


def by_lost_answers(directory: Path) -> None:
    for number in range(1, 4):
        check_lost_answer(number, directory=directory)


def by_a_truncation(directory: Path) -> None:
    for number in range(1, 30):
        check_truncation(number, directory=directory)


def by_many_truncations(directory: Path) -> None:
    for end in range(2, 14):
        for number in range(1, 30, 3):
            check_truncation(number, directory=directory, batches=end)


def by_the_model(directory: Path) -> None:
    run_some(60)


CLEANER, REPLACE = "embedlog.compaction.cleaner", "embedlog.partition.replace"
Check = Callable[[Path], object]


class Mutant(NamedTuple):
    """A planted bug, and the check that finds it."""

    name: str
    check: Check
    where: str
    edits: dict[str, str]
    besides: tuple[Callable[[], None], ...] = ()


NO_EPOCH = Behaviour(f"{REPLACE}:_check_epoch", lambda log, tail, epoch: None)
MUTANTS = [
    Mutant(
        "swapped in before it is on the disk",
        by_power_cuts,
        f"{REPLACE}:Replacement._seal",
        {"self._file.sync()": "..."},
    ),
    Mutant(
        "its name is not on the disk",
        by_power_cuts,
        f"{REPLACE}:Replacement.swap",
        {"log.sync_directory(": "str("},
        # Which flushes the directory, too.
        besides=(Behaviour("embedlog.partition.key_index:write", lambda log, info, keys: None),),
    ),
    Mutant(
        "what is replaced is unlinked first",
        by_kills,
        f"{REPLACE}:Replacement.swap",
        {"log.sync_directory(": "[log.context.files.unlink(log.path_of(s)) for s in old], str("},
    ),
    Mutant(
        "what is given up is not asked of the manifest",
        by_lost_answers,
        f"{REPLACE}:Replacement.abandon",
        {"[file for file in files if file.id in ids]": "[self.info]"},
    ),
    Mutant(
        "the checkpoint moves before the swap",
        by_kills,
        f"{CLEANER}:CleanPass.rewrite",
        {"limit = ": "replace.note_cleaned(self._log, self.end, sources[-1:])\n    limit = "},
    ),
    Mutant(
        "what is not flushed is replaced",
        by_power_cuts,
        f"{REPLACE}:_check_segments",
        {"end > info.recovery_offset": "False"},
        (Behaviour("embedlog.partition.flush:flush_up_to", lambda log, offset: None),),
    ),
    Mutant(
        "what is replaced is not doomed",
        by_kills,
        f"{REPLACE}:_retire",
        {"log.context.live.write(step)": "..."},
    ),
    Mutant(
        "a horizon is not kept",
        by_the_model,
        "embedlog.compaction.rewriter:Rewriter._encode",
        {"delete_horizon=horizon": "delete_horizon=None"},
    ),
    Mutant(
        "a tombstone goes in the first pass",
        by_the_model,
        f"{CLEANER}:CleanPass._split_by_horizon",
        {"horizon is not None and self._has_passed(horizon)": "self._has_passed(horizon or 0)"},
    ),
    Mutant(
        "the last offset of a key is the wrong one",
        by_the_model,
        "embedlog.compaction.offset_map:OffsetMap._enter",
        {"table_ends[places] = new_ends": "table_ends[places] = new_ends[::-1]"},
    ),
    Mutant(
        "the last batch of a producer is dropped",
        by_kills,
        f"{CLEANER}:CleanPass._is_last_of_producer",
        {"producer_id is not None\n": "False\n"},
    ),
    Mutant(
        "what lies past a full map counts as seen",
        by_the_model,
        f"{CLEANER}:CleanPass._add_keys",
        {"self.end = int(offsets[fitting])": "..."},
    ),
    Mutant(
        "a cut of what is rewritten is not seen",
        by_a_truncation,
        f"{REPLACE}:_check_segments",
        # A cut takes the recovery point with it, and raises the epoch: each look would see it.
        {
            "current.get(segment.base_offset) != segment": "False",
            "end > info.recovery_offset": "False",
        },
        (NO_EPOCH,),
    ),
    Mutant(
        "a cut of what replaced something is not seen",
        by_many_truncations,
        f"{REPLACE}:_check_epoch",
        {"epoch not in (None, tail.leader_epoch)": "False"},
    ),
]


@pytest.mark.tier("all")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_planted_bug_is_found(mutant: Mutant, tmp_path: Path) -> None:
    """D7-D25: a check that never failed proves nothing."""

    def work() -> str | None:
        for change in (Change(mutant.where, mutant.edits), *mutant.besides):
            change()
        try:
            mutant.check(tmp_path)
        except Exception as error:  # noqa: BLE001 - whatever it is, it was found
            return f"{type(error).__name__}: {' '.join(getattr(error, '__notes__', ()))[:60]}"
        return None

    bug_found = forks.call(work, patience=120)
    tell(f"{mutant.name}: {bug_found}")
    assert bug_found is not None, "no check found it"
