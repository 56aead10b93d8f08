"""One compaction with one fault in it, and what must be true of what is left (D24, D25).

The program compacts, appends, deletes the oldest records and compacts again.
What a kill leaves is what the files hold at that moment: so one run is watched,
and what they hold before each operation, and in the middle of each write, is
put back and judged; the same bytes are judged once.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from embedlog import kv
from embedlog.compaction import clean, inspect
from embedlog.config import MaintenanceConfig
from embedlog.errors import DurabilityError, EmbedlogError, FencedError
from embedlog.partition import PartitionLog, pending_deletes
from embedlog.partition.log_start import trim
from embedlog.root.repair import repair_root
from embedlog.root.root import Root
from support import forks
from support.clock import START, ManualClock
from support.faulty_files import CHANGES, FALLIBLE, FaultyFiles, materialise
from support.power_cut import Recording
from support.roots import abandon, encoded, healthy, make_log, open_root, rows, segment_files
from support.tiers import sample

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

Image = dict[str, bytes]
Say = Callable[[tuple[int, int]], None]


def seam(boot: str | None = None, kind: Any = FaultyFiles, **options: Any) -> Any:
    """Make `FaultyFiles` of a boot, as a root takes them."""
    made = partial(kind, boot=boot, **options)
    made.create_root = FaultyFiles.create_root  # type: ignore[attr-defined]
    return made


# The program


def batch_of(number: int) -> Any:
    """One batch: keys that repeat, tombstones, producers, headers."""
    keys = [b"k%d" % ((number * 5 + row * row) % 9) for row in range(EACH)]
    values = [None if (number + row) % 7 == 0 else b"%d-%d" % (number, row) for row in range(EACH)]
    producer = (number % 3, 0, number // 3 * EACH) if number % 3 else None
    headers = [[("h", b"x")]] * EACH if number > 10 else None
    return encoded(*values, keys=keys, at=START + number, producer=producer, headers=headers)


def build(path: Path, **options: Any) -> tuple[Root, PartitionLog]:
    """A root with some sealed segments, a part of them compacted; all of it flushed."""
    root = open_root(path, files=seam(**options), clock=ManualClock())
    log = make_log(root, CONFIG)
    for number in range(BUILT):
        log.append([batch_of(number)])
        if number == 5:
            clean(log, START, settings=SMALL)
    log.roll()
    log.flush()
    return root, log


def squeeze(log: PartitionLog, say: Say = lambda ends: None) -> None:
    """Compact twice, the second time tombstones go; and tell what is acknowledged."""
    clean(log, START + 20, settings=SMALL)
    for number in range(BUILT, BATCHES):
        log.append([batch_of(number)])
        say((log.start_offset(), EACH * (number + 1)))
    log.roll()
    trim(log, DELETED, whole=True)
    say((log.start_offset(), EACH * BATCHES))
    clean(log, START + 100, settings=SMALL)


# What must be true of it


Row = tuple[Any, ...]


@cache
def all_rows() -> list[Row]:
    """All records that are ever appended, as `rows` returns them."""
    found: list[Row] = []
    for number in range(BATCHES):
        for row in range(EACH):
            key = b"k%d" % ((number * 5 + row * row) % 9)
            value = None if (number + row) % 7 == 0 else b"%d-%d" % (number, row)
            headers = [("h", b"x")] if number > 10 else []
            found.append((EACH * number + row, START + number, key, value, headers))
    return found


def state_of(found: Sequence[Row]) -> dict[Any, Row]:
    """What a reader makes of records: the last one of each key that has a value."""
    state: dict[Any, Row] = {}
    for row in found:
        state.pop(row[2], None)
        if row[3] is not None:
            state[row[2]] = row
    return state


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
    found = rows(log)
    known = all_rows()
    assert all(known[row[0]] == row for row in found), "a record that was never there"
    offsets = [row[0] for row in found]
    assert offsets == sorted(set(offsets))
    wanted = state_of(known[:end])
    assert state_of(found) == {key: row for key, row in wanted.items() if row[0] >= start}
    reader = log.reader(start)
    while reader.read():
        pass
    assert reader.offset == end, "a reader does not come to the end"
    return end


def go_on(root: Root, end: int, thorough: bool) -> None:
    """Compact it again, append, and look that no file is left that nothing names."""
    log = root.partition("t", 0)
    log.roll()
    for now in (START + 120, START + 500):
        clean(log, now, settings=SMALL if thorough else None)
    judge(root, (0, end))
    cleanable = inspect(log, START + 500)
    assert (cleanable.cleanable_bytes, cleanable.first_dirty) == (0, end)
    keys = [row[2] for row in rows(log)]
    assert len(set(keys)) == len(keys)
    assert len(keys) == len(state_of(rows(log))), "a tombstone that nobody needs any more"
    _repeat(log, end)
    (receipt,) = log.append([encoded(b"v", keys=[b"new"])])
    assert receipt.base_offset == end
    pending_deletes.sweep(log.context, early=True)
    named = {log.path_of(info) for info in log.segments.values()}
    there = {str(path.relative_to(root.path)) for path in segment_files(root.path)}
    assert there == named, "a stray file"


def _repeat(log: PartitionLog, end: int) -> None:
    """D11, G16: what a producer sent last is known, though compaction left no record of it."""
    reader, there = log.reader(log.start_offset()), set()
    while found := reader.read():
        there |= {(one.producer_id, one.base_offset) for one in found}
    for producer in (1, 2):
        last = max(number for number in range(end // EACH) if number % 3 == producer)
        assert (producer, EACH * last) in there
        (receipt,) = log.append([batch_of(last)])
        assert receipt.duplicate
        assert receipt.base_offset == EACH * last


def after(path: Path, promised: tuple[int, int], thorough: bool, boot: str | None = None) -> None:
    """Open what is left, judge it, and go on."""
    root = open_root(path, files=seam(boot), clock=ManualClock())
    try:
        end = judge(root, promised)
        go_on(root, end, thorough)
    finally:
        abandon(root)


# Kills


class Watched(FaultyFiles):
    """Tells what it is about to do, and of a write also when half of it is done."""

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


class Moment(NamedTuple):
    """What the files held at one moment."""

    number: int
    what: str
    promised: tuple[int, int]
    files: Image


def take(path: Path) -> Image:
    """Return what all files hold, but for the page that wakes and LMDB's own locks."""
    found = {}
    for directory, _, names in os.walk(path):
        for name in names:
            if name not in ("wake", "lock.mdb"):
                place = f"{directory}/{name}"
                found[place[len(str(path)) + 1 :]] = Path(place).read_bytes()
    return found


def put_back(path: Path, image: Image) -> None:
    """Let the files of a root, which is closed, hold that again; the directory stays the same."""
    for name in take(path).keys() - image.keys():
        (path / name).unlink()
    for name, data in image.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


def moments(path: Path) -> tuple[int, list[Moment]]:
    """Run the program once; how many operations it has, and what differs between them."""
    root, log = build(path, kind=Watched)
    files: Any = root.context.files
    seen: set[int] = set()
    found: list[Moment] = []
    promised, count = (0, EACH * BUILT), 0

    def watch(kind: str) -> None:
        nonlocal count
        count += 1
        image = take(path)
        key = hash((promised, frozenset(image.items())))
        if key not in seen:
            seen.add(key)
            found.append(Moment(count, kind, promised, image))

    def say(ends: tuple[int, int]) -> None:
        nonlocal promised
        promised = ends

    files.watch = watch
    squeeze(log, say)
    files.watch = None
    abandon(root)
    return count, found


def check_moments(
    directory: Path, part: int, parts: int, thorough: int, most: int | None = None
) -> tuple[int, int, int]:
    """Judge each moment of a part of them; how many operations, moments, and looked at.

    In the small tiers a sample of `most` of them, where that is given.
    """
    path = directory / f"moments-{part}-{os.getpid()}"
    total, found = moments(path)
    mine = (found if most is None else sample(found, most))[part::parts]
    for place, moment in enumerate(mine):
        put_back(path, moment.files)
        try:
            after(path, moment.promised, place % thorough == 0)
        except Exception as error:
            error.add_note(f"killed before operation {moment.number}, {moment.what}")
            raise
    shutil.rmtree(path, ignore_errors=True)
    return total, len(found), len(mine)


def check_kill(number: int, directory: Path) -> bool:
    """Kill a compaction for real; whether it was still going on."""
    path = _fresh(directory)

    def work() -> None:
        root, log = build(path)
        root.context.files.kill_at(number)  # type: ignore[attr-defined]
        squeeze(log)

    killed = forks.was_killed(work)
    after(path, (0, EACH * BUILT), True)
    return killed


def _fresh(directory: Path) -> Path:
    path = directory / f"run-{os.getpid()}"
    shutil.rmtree(path, ignore_errors=True)
    return path


def check_cut(number: int, directory: Path, batches: int = 9) -> bool:
    """D22: cut the log while it is compacted; the cut stands, and all before it.

    Returns whether the compaction noticed; it may have been past that part.
    """
    root, log = build(_fresh(directory))
    calls, before = 0, list[Row]()

    def progress(done: int, total: int) -> None:
        nonlocal calls, before
        calls += 1
        if calls == number:
            log.truncate_to(max(one for one in _bounds(log) if one <= EACH * batches))
            # What a compaction removed before does not come back.
            before = rows(log)

    noticed = False
    try:
        clean(log, START + 20, settings=SMALL, progress=progress)
    except FencedError:
        noticed = True
    end = log.end_offset()
    assert end <= EACH * batches or calls < number
    wanted = state_of(before if calls >= number else all_rows()[:end])
    assert state_of(rows(log)) == wanted
    assert (inspect(log, START).first_dirty or 0) <= end
    assert healthy(root)
    abandon(root)
    return noticed


def check_lost_answer(number: int, directory: Path) -> None:
    """P1: Ctrl-C comes right after a commit of the compaction; it stands."""
    path = _fresh(directory)
    root, log = build(path)
    write, calls = kv.Store.write, 0

    def interrupted(store: kv.Store, step: Any) -> Any:
        nonlocal calls
        result = write(store, step)
        # Under the partition's lock: a swap.
        if store is log.context.state and log.thread_lock.locked():
            calls += 1
            if calls == number:
                raise KeyboardInterrupt
        return result

    kv.Store.write = interrupted  # type: ignore[method-assign]
    try:
        squeeze(log)
    except KeyboardInterrupt:
        pass
    finally:
        kv.Store.write = write  # type: ignore[method-assign]
    go_on(root, judge(root, (0, EACH * BUILT)), True)
    abandon(root)


def _bounds(log: PartitionLog) -> list[int]:
    """Where batches begin."""
    reader, found = log.reader(0), [0]
    while some := reader.read():
        found += [one.base_offset for one in some]
    return found


# Failures


class Failure(NamedTuple):
    """One operation of the program fails, and with ``forever`` all that follow."""

    number: int
    errno: int
    forever: bool
    thorough: bool


ERRORS = (errno.EIO, errno.ENOSPC)


def failures(directory: Path, each: int, *, forever: bool) -> list[Failure]:
    """Every operation that changes something, and of those that look at something one in `each`."""

    def work() -> list[str]:
        kinds: list[str] = []
        root, log = _prepared(directory, Watched)
        root.context.files.watch = kinds.append  # type: ignore[attr-defined]
        squeeze(log)
        return [kind for kind in kinds if kind in FALLIBLE]

    result = forks.call(work)
    chosen = [
        number for number, kind in enumerate(_once(result)) if kind in CHANGES or number % each == 0
    ]
    if forever:
        chosen = chosen[:: 2 * each]
    return [
        Failure(number, ERRORS[place % 2], forever, place % 12 == 0)
        for place, number in enumerate(chosen)
    ]


def _once(kinds: list[str]) -> Iterator[str]:
    """Watched files tell of a write twice."""
    writes = 0
    for kind in kinds:
        writes += kind == "write"
        if kind != "write" or writes % 2:
            yield kind


@cache
def _built(path: Path, pid: int) -> Image:
    root, _ = build(path)
    abandon(root)
    return take(path)


def _prepared(directory: Path, kind: Any = FaultyFiles) -> tuple[Root, PartitionLog]:
    """The root as `build` leaves it, without its price; one directory for each process."""
    path = directory / f"built-{os.getpid()}"
    put_back(path, _built(path, os.getpid()))
    root = open_root(path, files=seam(kind=kind), clock=ManualClock())
    log = root.partition("t", 0)
    assert log.tail().log_end_offset == EACH * BUILT
    return root, log


def check_failure(case: Failure, directory: Path) -> str:
    """Let an operation of a compaction fail; the name of the error that was raised."""
    root, log = _prepared(directory)
    files: Any = root.context.files
    files.fail_at(case.number, case.errno, case.forever)
    promised = (0, EACH * BUILT)

    def say(ends: tuple[int, int]) -> None:
        nonlocal promised
        promised = ends

    told = ""
    try:
        squeeze(log, say)
    except EmbedlogError as error:
        told = type(error).__name__
    files.heal()
    try:
        if log.tail().failed:
            # A directory that could not be flushed: read-only until it is repaired (P9).
            assert told == DurabilityError.__name__
            repair_root(root, dry_run=False)
        go_on(root, judge(root, promised), case.thorough)
    finally:
        abandon(root)
    return told


# Power cuts


def record(directory: Path) -> Recording:
    """Record what the program does to the disk."""
    root, log = build(directory / "recorded", record=True)
    files: Any = root.context.files
    files.note((0, EACH * BUILT))
    # Its appends wait for no flush: only the one before the second compaction covers them.
    squeeze(log, lambda ends: files.note((ends[0], EACH * BUILT)))
    files.note((log.start_offset(), EACH * BATCHES))
    recording: Recording = files.recording()
    abandon(root)
    return recording


def check_power_cuts(
    directory: Path, limit: int, part: int = 0, parts: int = 1, thorough: int = 12
) -> int:
    """Cut the power everywhere in it; how many states of the disk were looked at."""
    place = directory / f"cuts-{part}-{os.getpid()}"
    place.mkdir()
    recording = record(place)
    path, previous, seen = place / "after", None, 0
    path.mkdir()
    for number, image in enumerate(recording.states(limit, 1, 24)):
        if number % parts != part or not image.notes:
            continue
        materialise(image, path, previous)
        previous = image
        seen += 1
        try:
            after(path, image.notes[-1], seen % thorough == 0, f"boot {number}")
        except Exception as error:
            error.add_note(image.explain())
            raise
    shutil.rmtree(place)
    return seen
