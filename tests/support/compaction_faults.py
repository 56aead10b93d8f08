"""A compaction that is killed, fails, is interrupted by a truncation, or loses power (D24, D25).

The program compacts, appends, deletes the oldest records and compacts again.
A kill leaves what the files hold at that moment: so one run is watched, and what
the files hold before each operation, and in the middle of each write, is restored
and checked; equal states are checked once.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from embedlog import kv
from embedlog.compaction import CleanOptions, clean, inspect
from embedlog.config import MaintenanceConfig, TopicConfig
from embedlog.errors import DurabilityError, EmbedlogError, FencedError
from embedlog.partition import PartitionLog, unnamed_files
from embedlog.partition.log_start import move_log_start
from embedlog.root.repair import repair_root
from embedlog.root.root import Root
from support import forks
from support.clock import START
from support.faulty_files import CHANGES, FALLIBLE, FaultyFiles, after_reboot
from support.power_cut import Recording, materialised
from support.roots import (
    Row,
    abandon,
    encoded,
    healthy,
    latest,
    no_stray_files,
    open_root,
    rows,
)
from support.tiers import sample
from support.typed_bytes import as_typed, first_schema

CONFIG = {
    "cleanup.policy": "compact",
    "file.delete.delay.ms": 0,
    "segment.bytes": 2600,
    "index.interval.bytes": 600,
    "delete.retention.ms": 50,
}
typed = False
"""Whether the topic is typed; a test sets it before it forks."""
BUILT, BATCHES, EACH = 14, 16, 4
"""Batches before the compaction, in all, and records of each."""
DELETED = 13
"""Up to where the oldest records are deleted; less where a segment does not end there."""
SMALL = MaintenanceConfig(log_cleaner_dedupe_buffer_size=24 * 8, log_cleaner_io_buffer_size=1500)

Contents = dict[str, bytes]
Acknowledge = Callable[[tuple[int, int]], None]


# The program


def records_of(number: int) -> list[tuple[bytes, bytes | None]]:
    """Return the keys and values of a batch."""
    return [
        (
            b"k%d" % ((number * 5 + row * row) % 9),
            None if (number + row) % 7 == 0 else b"%d-%d" % (number, row),
        )
        for row in range(EACH)
    ]


def batch_of(number: int) -> Any:
    """Return a batch with repeated keys, tombstones, producers and headers."""
    keys, values = zip(*records_of(number), strict=True)
    producer = (number % 3, 0, number // 3 * EACH) if number % 3 else None
    headers = [[("h", b"x")]] * EACH if number > 10 else None
    batch = encoded(*values, keys=list(keys), at=START + number, producer=producer, headers=headers)
    return as_typed(batch) if typed else batch


def build(path: Path, kind: Any = FaultyFiles, **options: Any) -> tuple[Root, PartitionLog]:
    """Create a root with sealed segments, some of them compacted, all flushed."""
    root = open_root(path, files=partial(kind, **options))
    root.create_topic("t", 1, TopicConfig.parse(CONFIG), first_schema() if typed else None)
    log = root.partition("t", 0)
    for number in range(BUILT):
        log.append([batch_of(number)])
        if number == 5:
            clean(log, START, CleanOptions(settings=SMALL))
    log.roll()
    log.flush()
    return root, log


def run_program(log: PartitionLog, acknowledge: Acknowledge = lambda ends: None) -> None:
    """Compact twice, the second time without tombstones; report the acknowledged start and end."""
    clean(log, START + 20, CleanOptions(settings=SMALL))
    for number in range(BUILT, BATCHES):
        log.append([batch_of(number)])
        acknowledge((log.start_offset(), EACH * (number + 1)))
    log.roll()
    move_log_start(log, DELETED, whole=True)
    acknowledge((log.start_offset(), EACH * BATCHES))
    clean(log, START + 100, CleanOptions(settings=SMALL))


# What must be true of it


@cache
def all_rows() -> list[Row]:
    """Return all records that are ever appended, as `rows` returns them."""
    appended: list[Row] = []
    for number in range(BATCHES):
        for row, (key, value) in enumerate(records_of(number)):
            headers = [("h", b"x")] if number > 10 else []
            appended.append((EACH * number + row, START + number, key, value, headers))
    return appended


def judge(root: Root, promised: tuple[int, int]) -> int:
    """Raise AssertionError unless the log is the old one, the new one, or on the way between.

    Returns where it ends.

    Args:
        root: What is left.
        promised: The start and the end that were acknowledged.
    """
    log = root.partition("t", 0)
    assert healthy(root)
    start, end = log.start_offset(), log.end_offset()
    assert promised[0] <= start <= DELETED
    assert promised[1] <= end <= EACH * BATCHES
    assert end % EACH == 0
    left, appended = rows(log), all_rows()
    assert all(appended[row[0]] == row for row in left), "a record that was never appended"
    offsets = [row[0] for row in left]
    assert offsets == sorted(set(offsets))
    expected = latest(appended[:end])
    assert latest(left) == {key: row for key, row in expected.items() if row[0] >= start}
    reader = log.reader(start)
    while reader.read():
        pass
    assert reader.offset == end, "a reader does not come to the end"
    return end


def go_on(root: Root, end: int, thorough: bool) -> None:
    """Compact again, append, and check that no stray file is left."""
    log = root.partition("t", 0)
    log.roll()
    for now in (START + 120, START + 500):
        clean(log, now, CleanOptions(settings=SMALL) if thorough else CleanOptions())
    judge(root, (0, end))
    cleanable = inspect(log, START + 500)
    assert (cleanable.cleanable_bytes, cleanable.first_dirty) == (0, end)
    keys = [row[2] for row in rows(log)]
    assert len(set(keys)) == len(keys)
    assert len(keys) == len(latest(rows(log))), "a tombstone that is not needed any more"
    _repeat(log, end)
    batch = encoded(b"v", keys=[b"new"])
    (receipt,) = log.append([as_typed(batch) if typed else batch])
    assert receipt.base_offset == end
    unnamed_files.sweep(log.context, early=True)
    assert no_stray_files(root)


def _repeat(log: PartitionLog, end: int) -> None:
    """D11, G16: the last batch of a producer is known, though compaction left no record of it."""
    reader, batches = log.reader(log.start_offset()), set()
    while some := reader.read():
        batches |= {(batch.producer_id, batch.base_offset) for batch in some}
    for producer in (1, 2):
        last = max(number for number in range(end // EACH) if number % 3 == producer)
        assert (producer, EACH * last) in batches
        (receipt,) = log.append([batch_of(last)])
        assert receipt.duplicate
        assert receipt.base_offset == EACH * last


def check_left(
    path: Path, promised: tuple[int, int], thorough: bool, boot: str | None = None
) -> None:
    """Open the root that is left, check it, and go on."""
    root = open_root(path, files=after_reboot(boot))
    try:
        end = judge(root, promised)
        go_on(root, end, thorough)
    finally:
        abandon(root)


# Kills


class WatchedFiles(FaultyFiles):
    """Calls `watch` before each operation, and also in the middle of each write."""

    watch: Callable[[str], None] | None = None

    def _fault(self, kind: str) -> Any:
        if self.watch is not None:
            self.watch(kind)
        return super()._fault(kind)

    def _pwritev(  # type: ignore[override]
        self, fd: int, buffers: Sequence[Any], position: int
    ) -> int:
        if self.watch is not None:
            whole = b"".join(map(bytes, buffers))
            self.watch("write")
            os.pwrite(fd, whole[: len(whole) // 2], position)
            self.watch("half a write")
        return super()._pwritev(fd, buffers, position)


class FilesState(NamedTuple):
    """The contents of all files at one operation."""

    number: int
    what: str
    promised: tuple[int, int]
    files: Contents


def read_all(path: Path) -> Contents:
    """Return the contents of all files, without the wake page and LMDB's lock files."""
    contents = {}
    for directory, _, names in os.walk(path):
        for name in names:
            if name not in ("wake", "lock.mdb"):
                file = f"{directory}/{name}"
                contents[file[len(str(path)) + 1 :]] = Path(file).read_bytes()
    return contents


def restore(path: Path, image: Contents) -> None:
    """Give the files of a closed root these contents again, in the same directory."""
    for name in read_all(path).keys() - image.keys():
        (path / name).unlink()
    for name, data in image.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


def file_states(path: Path) -> tuple[int, list[FilesState]]:
    """Run the program once; return the number of its operations, and the distinct states."""
    root, log = build(path, WatchedFiles)
    files: Any = root.context.files
    seen: set[int] = set()
    states: list[FilesState] = []
    promised, count = (0, EACH * BUILT), 0

    def watch(kind: str) -> None:
        nonlocal count
        count += 1
        contents = read_all(path)
        key = hash((promised, frozenset(contents.items())))
        if key not in seen:
            seen.add(key)
            states.append(FilesState(count, kind, promised, contents))

    def acknowledge(ends: tuple[int, int]) -> None:
        nonlocal promised
        promised = ends

    files.watch = watch
    run_program(log, acknowledge)
    files.watch = None
    abandon(root)
    return count, states


def check_file_states(
    part: int, directory: Path, parts: int = 1, thorough: int = 12, most: int | None = None
) -> tuple[int, int, int]:
    """Check a part of the states; return the numbers of operations, states, and checked states.

    The small tiers check a sample of `most` states, if given.
    """
    path = directory / f"states-{part}-{os.getpid()}"
    operations, states = file_states(path)
    chosen = (states if most is None else sample(states, most))[part::parts]
    for number, state in enumerate(chosen):
        restore(path, state.files)
        try:
            check_left(path, state.promised, number % thorough == 0)
        except Exception as error:
            error.add_note(f"killed before operation {state.number}, {state.what}")
            raise
    shutil.rmtree(path, ignore_errors=True)
    return operations, len(states), len(chosen)


def _fresh(directory: Path) -> Path:
    path = directory / f"run-{os.getpid()}"
    shutil.rmtree(path, ignore_errors=True)
    return path


def check_truncation(number: int, directory: Path, batches: int = 9) -> bool:
    """D22: truncate the log while it is compacted; the truncation stands, and all before it.

    Returns whether the compaction was fenced; it may have been past that part.
    """
    root, log = build(_fresh(directory))
    calls, before = 0, list[Row]()

    def progress(done: int, total: int) -> None:
        nonlocal calls, before
        calls += 1
        if calls == number:
            log.truncate_to(max(base for base in _base_offsets(log) if base <= EACH * batches))
            # A compaction removed records before; they do not come back.
            before = rows(log)

    fenced = False
    try:
        clean(log, START + 20, CleanOptions(settings=SMALL, progress=progress))
    except FencedError:
        fenced = True
    end = log.end_offset()
    assert end <= EACH * batches or calls < number
    expected = latest(before if calls >= number else all_rows()[:end])
    assert latest(rows(log)) == expected
    assert (inspect(log, START).first_dirty or 0) <= end
    assert healthy(root)
    abandon(root)
    return fenced


def check_lost_answer(number: int, directory: Path) -> None:
    """P1: Ctrl-C right after a commit of the compaction; the commit stands."""
    path = _fresh(directory)
    root, log = build(path)
    write, calls = kv.LmdbStore.write, 0

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
        run_program(log)
    except KeyboardInterrupt:
        pass
    finally:
        kv.LmdbStore.write = write  # type: ignore[method-assign]
    go_on(root, judge(root, (0, EACH * BUILT)), True)
    abandon(root)


def _base_offsets(log: PartitionLog) -> list[int]:
    """Return the base offsets of all batches."""
    reader, offsets = log.reader(0), [0]
    while batches := reader.read():
        offsets += [batch.base_offset for batch in batches]
    return offsets


# Failures


class Failure(NamedTuple):
    """One operation of the program fails, and with ``forever`` all that follow."""

    number: int
    errno: int
    forever: bool
    thorough: bool


ERRORS = (errno.EIO, errno.ENOSPC)


def failures(directory: Path, step: int, *, forever: bool) -> list[Failure]:
    """Return failures of every operation that changes something, and of one in `step` others."""

    def work() -> list[str]:
        kinds: list[str] = []
        root, log = _prepared(directory, WatchedFiles)
        root.context.files.watch = kinds.append  # type: ignore[attr-defined]
        run_program(log)
        return [kind for kind in kinds if kind in FALLIBLE]

    kinds = _once(forks.call(work))
    chosen = [number for number, kind in enumerate(kinds) if kind in CHANGES or number % step == 0]
    if forever:
        chosen = chosen[:: 2 * step]
    return [
        Failure(number, ERRORS[index % 2], forever, index % 12 == 0)
        for index, number in enumerate(chosen)
    ]


def _once(kinds: list[str]) -> Iterator[str]:
    """Drop the second report of each write: watched files report a write twice."""
    writes = 0
    for kind in kinds:
        writes += kind == "write"
        if kind != "write" or writes % 2:
            yield kind


@cache
def _built(path: Path, pid: int) -> Contents:
    root, _ = build(path)
    abandon(root)
    return read_all(path)


def _prepared(directory: Path, kind: Any = FaultyFiles) -> tuple[Root, PartitionLog]:
    """Open a root as `build` leaves it, built once; one directory for each process."""
    path = directory / f"built-{os.getpid()}"
    restore(path, _built(path, os.getpid()))
    root = open_root(path, files=kind)
    log = root.partition("t", 0)
    assert log.tail().log_end_offset == EACH * BUILT
    return root, log


def check_failure(case: Failure, directory: Path) -> str:
    """Let an operation of a compaction fail; return the name of the error that it raised."""
    root, log = _prepared(directory)
    files: Any = root.context.files
    files.fail_at(case.number, case.errno, case.forever)
    promised = (0, EACH * BUILT)

    def acknowledge(ends: tuple[int, int]) -> None:
        nonlocal promised
        promised = ends

    raised = ""
    try:
        run_program(log, acknowledge)
    except EmbedlogError as error:
        raised = type(error).__name__
    files.heal()
    try:
        if log.tail().failed:
            # A directory that could not be flushed: read-only until it is repaired (P9).
            assert raised == DurabilityError.__name__
            repair_root(root, dry_run=False)
        go_on(root, judge(root, promised), case.thorough)
    finally:
        abandon(root)
    return raised


# Power cuts


def record(directory: Path) -> Recording:
    """Record the file operations of the program."""
    root, log = build(directory / "recorded", record=True)
    files: Any = root.context.files
    files.note((0, EACH * BUILT))
    # Its appends wait for no flush: only the one before the second compaction covers them.
    run_program(log, lambda ends: files.note((ends[0], EACH * BUILT)))
    files.note((log.start_offset(), EACH * BATCHES))
    recording: Recording = files.recording()
    abandon(root)
    return recording


def check_power_cuts(
    part: int, directory: Path, limit: int, parts: int = 1, thorough: int = 12
) -> int:
    """Cut the power everywhere in the program; return how many states of the disk were checked."""
    scratch = directory / f"cuts-{part}-{os.getpid()}"
    scratch.mkdir()
    recording, path, seen = record(scratch), scratch / "after", 0
    images = islice(recording.states(limit), part, None, parts)
    for seen, image in enumerate(materialised(filter(attrgetter("notes"), images), path), 1):
        try:
            check_left(path, image.notes[-1], seen % thorough == 0, f"boot {seen}")
        except Exception as error:
            error.add_note(image.explain())
            raise
    shutil.rmtree(scratch)
    return seen
