"""Planted bugs, by which the checks of kills, faults, flushes and forks prove themselves."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import failed_flush, fork_in_operation, forks, program_faults
from support.faulty_files import FaultyFiles
from support.forks import tell
from support.log_programs import BIRTH
from support.program_faults import Scenario, Templates

from embedlog.errors import StorageError
from embedlog.partition import PartitionLog
from embedlog.partition.tail import Tail
from embedlog.record import Appended
from embedlog.segment import END_MARK, SegmentFile

SCENARIOS = [Scenario(tuple(BIRTH))]


# The checks: each is a function of the templates, which runs case after case.


def by_deaths(templates: Templates) -> Iterator[Callable[[], Any]]:
    for case in program_faults.kill_series(400, torn=True, at_once=25):
        yield functools.partial(program_faults.check_kill_series, case, templates=templates)


def by_kills(templates: Templates) -> Iterator[Callable[[], Any]]:
    cases = program_faults.kill_cases(SCENARIOS, [templates.count(SCENARIOS[0])])
    for case in cases[100:400:3]:
        yield functools.partial(
            program_faults.check_kill, case, templates=templates, scenarios=SCENARIOS
        )


def by_short_writes(templates: Templates) -> Iterator[Callable[[], Any]]:
    for case in program_faults.short_cases([templates.count(SCENARIOS[0])]):
        if case.full:
            yield functools.partial(
                program_faults.check_short, case, templates=templates, scenarios=SCENARIOS
            )


def by_failed_flushes(templates: Templates) -> Iterator[Callable[[], Any]]:
    for case in failed_flush.flush_cases(templates.count(failed_flush.SCENARIO)):
        yield functools.partial(failed_flush.check_failed_flush, case, templates=templates)


def by_forks(templates: Templates) -> Iterator[Callable[[], Any]]:
    for case in fork_in_operation.fork_cases(templates):
        yield functools.partial(fork_in_operation.check_fork, case, templates=templates)


# The bugs: each is planted in a process of its own.


def leave_an_unpublished_tail() -> None:
    """A writer does not truncate what a killed one left behind the end, and neither does a roll."""
    real = PartitionLog.file_at

    def file_at(self: PartitionLog, tail: Tail) -> SegmentFile:
        cut, SegmentFile.truncate = SegmentFile.truncate, lambda self, size: None
        try:
            return real(self, tail)
        finally:
            SegmentFile.truncate = cut  # type: ignore[method-assign]

    def seal(self: SegmentFile, position: int) -> None:
        self.write([END_MARK], position)

    PartitionLog.file_at, SegmentFile.seal = file_at, seal  # type: ignore[method-assign]


def publish_before_the_write() -> None:
    """The end is published before the bytes are written."""

    def commit(
        self: PartitionLog,
        file: SegmentFile,
        buffers: Any,
        position: int,
        _: int,
        publish: Any,
        synced: bool = False,
    ) -> Any:
        published = self.context.live.write(publish)
        file.write(buffers, position)
        return published

    PartitionLog.commit_locked = commit  # type: ignore[method-assign]


def acknowledge_before_the_publish() -> None:
    """An append returns while another thread has yet to do it."""
    real, threads = PartitionLog.append, list[threading.Thread]()

    def append(self: PartitionLog, encoded: Any, **options: Any) -> list[Appended]:
        while threads:
            threads.pop().join()
        base, receipts = self.tail().log_end_offset, []
        for batch in encoded:
            receipts.append(Appended(base, base + batch.count, None))
            base += batch.count
        threads.append(threading.Thread(target=lambda: real(self, encoded, **options)))
        threads[-1].start()
        return receipts

    PartitionLog.append = append  # type: ignore[method-assign]


def advance_over_a_failed_write() -> None:
    """The position moves on although the bytes were not all written."""
    real = PartitionLog.commit_locked

    def commit(self: PartitionLog, *what: Any) -> Any:
        try:
            return real(self, *what)
        except StorageError:
            self.context.live.write(what[4])
            raise

    PartitionLog.commit_locked = commit  # type: ignore[method-assign]


def try_a_failed_flush_again() -> None:
    """The second fsync reports success, while the data is gone."""

    def sync(self: PartitionLog, file: SegmentFile) -> None:
        try:
            file.sync()
        except StorageError:
            file.sync()

    PartitionLog.sync = sync  # type: ignore[method-assign]


def ignore_a_failed_flush() -> None:
    """An acknowledgement although the flush failed."""

    def sync(self: PartitionLog, file: SegmentFile) -> None:
        try:
            file.sync()
        except StorageError:
            pass

    PartitionLog.sync = sync  # type: ignore[method-assign]


def use_the_lock_of_the_parent() -> None:
    """A forked child goes on with the descriptor, and so the lock, that it inherited."""
    real, inherited = PartitionLog.acquire, dict[str, int]()

    def acquire(self: PartitionLog, *arguments: Any, **options: Any) -> None:
        if self._lock_fd is None:
            self._lock_fd = inherited.get(self._lock_path)
        real(self, *arguments, **options)
        assert self._lock_fd is not None
        inherited[self._lock_path] = self._lock_fd

    def after_fork(self: FaultyFiles) -> None:
        self._mutex, self._paths = threading.RLock(), {}

    PartitionLog.acquire = acquire  # type: ignore[method-assign]
    FaultyFiles.after_fork = after_fork  # type: ignore[method-assign]


def hunt(bug: Callable[[], None], cases: list[Callable[[], Any]]) -> str | None:
    """Run cases until one fails; returns what it said."""
    # Every case forks its processes, so the bug is planted again in each of them.
    program_faults.planted.append(bug)
    for number, case in enumerate(cases):
        try:
            case()
        except AssertionError as error:
            return f"case {number + 1} of {len(cases)}: {str(error).strip().splitlines()[-1]}"
    return None


MUTANTS = [
    (leave_an_unpublished_tail, by_deaths),
    (publish_before_the_write, by_deaths),
    (acknowledge_before_the_publish, by_kills),
    (advance_over_a_failed_write, by_short_writes),
    (try_a_failed_flush_again, by_failed_flushes),
    (ignore_a_failed_flush, by_failed_flushes),
    (use_the_lock_of_the_parent, by_forks),
]


@pytest.mark.tier("all")
@pytest.mark.parametrize(("bug", "check"), MUTANTS, ids=[bug.__name__ for bug, _ in MUTANTS])
def test_a_planted_bug_is_caught(
    templates: Templates,
    bug: Callable[[], None],
    check: Callable[[Templates], Iterator[Callable[[], Any]]],
) -> None:
    """P1, P2, P8, P9, P11, P18: a check that never failed proves nothing."""
    cases = list(check(templates))
    bug_found = forks.call(lambda: hunt(bug, cases), patience=300)
    tell(f"{bug.__name__}: {bug_found}")
    assert bug_found is not None, f"no check found it in {len(cases)} cases"
