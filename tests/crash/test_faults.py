"""Operations of the system that fail, fall short, or find the disk full."""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import sleep

import pytest
from support import failed_flush, forks, full_disk, journal_check, program_faults, resource_limits
from support.faulty_files import FaultyFiles
from support.forks import tell
from support.log_programs import BIRTH, LIFE, ProgramProcess, encode, journal_of, random_program
from support.program_faults import Scenario, Templates
from support.tiers import choose, sample

import embedlog

# What a life finds matters until it has opened the root, and recovered each partition.
SCENARIOS = [
    Scenario(tuple(BIRTH)),
    Scenario(tuple(LIFE), "killed"),
    Scenario(tuple(LIFE), "closed", first=30),
    Scenario(tuple(LIFE), "rebooted", first=80),
]


def faults(templates: Templates, scenarios: list[Scenario], *, full: bool = False) -> int:
    """Let every operation of every scenario fail; returns how many faults there were."""
    cases = program_faults.fault_cases(
        scenarios, [templates.count(scenario) for scenario in scenarios], full=full
    )
    cases = sample(cases, 6)
    raised = forks.spread(
        cases, program_faults.check_fault, templates=templates, scenarios=scenarios
    )
    tell(f"{len(cases)} faults, of which {sum(raised)} were reported")
    return len(cases)


def shorts(templates: Templates, scenarios: list[Scenario], ways: int = 5) -> tuple[int, int]:
    """Shorten every write of every scenario, in some ways; returns how many writes and cases."""
    counts = [templates.count(scenario) for scenario in scenarios]
    cases = program_faults.short_cases(counts, ways)
    chosen = sample(cases, 4)
    forks.spread(chosen, program_faults.check_short, templates=templates, scenarios=scenarios)
    writes = sum(counted["write"] for counted in counts)
    tell(f"{len(chosen)} short writes, of {len(cases)} at all of {writes} writes")
    return writes, len(cases)


def test_a_failing_operation_is_an_error_and_loses_nothing(templates: Templates) -> None:
    """P8: the error has its errno, nothing acked is lost; others go on, and a new opening works."""
    assert faults(templates, SCENARIOS) >= choose(test=6, all=600)


def test_one_process_goes_on_after_every_error_that_it_meets(templates: Templates) -> None:
    """P8: with the same handle; a partition whose flush failed after its repair."""
    cases = program_faults.fault_series(1_600, most=16)
    raised = forks.spread(cases, program_faults.check_fault_series, templates=templates)
    total = sum(len(case.faults) for case in cases)
    tell(f"{total} faults, of which {sum(raised)} were reported")
    # With those of the test before these are 2,000 in the larger tiers.
    assert total >= choose(test=16, all=1_600)
    assert sum(raised) >= 0.6 * total


def test_signals_interrupt_nothing(tmp_path: Path) -> None:
    """P8: EINTR never reaches a caller; a signal every 200 µs changes nothing."""

    def work() -> int:
        hits = []
        signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
        process = ProgramProcess(tmp_path / "root")
        process.run([*BIRTH, ("open", "os"), *LIFE_AFTER_BIRTH])
        signal.setitimer(signal.ITIMER_REAL, 0)
        journal_check.check(process.log, journal_of(tmp_path / "root"))
        return len(hits)

    signals = forks.call(work)
    tell(f"{signals} signals")
    assert signals >= 20


class Interrupted(FaultyFiles):
    """Ctrl-C as soon as an append is committed."""

    interrupt = False

    def unlock(self, fd: int) -> None:
        super().unlock(fd)
        if self.interrupt and self._paths[fd] == "locks/live":
            self.interrupt = False
            raise KeyboardInterrupt


def test_an_interrupt_after_the_commit_takes_nothing_back(tmp_path: Path) -> None:
    """P8: what was published stays, though the append did not return; nothing is cut under it."""
    with embedlog.open(tmp_path / "root", files=Interrupted) as log:
        log.create_topic("t")
        log.partition("t", 0).append([encode("t", 0, 1, 2, 20)])
        log.root.context.files.interrupt = True
        with pytest.raises(KeyboardInterrupt):
            log.partition("t", 0).append([encode("t", 0, 2, 2, 20)])
        assert log.housekeeping.verify() == []
        log.partition("t", 0).append([encode("t", 0, 3, 1, 20)])
        assert journal_check.sends_of(journal_check.rows(log, "t", 0)) == {1: 0, 2: 2, 3: 4}


LIFE_AFTER_BIRTH = [
    ("send", "a", number % 3, 2, ("os", "fsync")[number % 2]) for number in range(60)
]


def test_a_failed_flush_is_final_until_a_repair(templates: Templates) -> None:
    """P9: read-only for all processes, never retried, and repaired from what the disk has."""
    cases = failed_flush.flush_cases(templates.count(failed_flush.SCENARIO))
    assert len(cases) >= 200
    cases = sample(cases, 3)
    failed = forks.spread(cases, failed_flush.check_failed_flush, templates=templates)
    tell(f"{len(cases)} failed flushes, {sum(failed)} partitions repaired")


def test_a_full_disk_is_an_error_before_any_acknowledgement(directory: Path) -> None:
    """P10: readers go on, and when there is space again the log does, at the same offset."""
    with full_disk.small_disk(directory / "disk") as disk:
        kind = "small tmpfs" if disk else "model of a disk, since mounting one is not allowed"
        step = 1 if disk else 997
        cases = [full_disk.FreeSpace(size * step, ("os", "fsync")[size % 2]) for size in range(100)]
        cases = sample(cases, 3)
        # One disk, so one at a time.
        room = forks.spread(
            cases, full_disk.check_full_disk, workers=1, directory=directory, disk=disk
        )
    tell(f"{len(cases)} sizes of a {kind}, with room for {min(room)} to {max(room)} appends")
    # The first ones fit in what was preallocated.
    assert room[0] < 12 and max(room) > 20


@pytest.mark.tier("all")
def test_a_disk_that_fills_up_within_a_write(directory: Path) -> None:
    """P10, P11: as the kernel shows it, a short write and then ENOSPC, to the byte."""
    cases = [full_disk.FreeSpace(size * 131, ("os", "fsync")[size % 2]) for size in range(30)]
    cases = sample(cases, 5)
    room = forks.spread(cases, full_disk.check_full_disk, directory=directory, disk=None)
    tell(f"{len(cases)} sizes, with room for {min(room)} to {max(room)} appends")


def test_a_short_write_is_completed_or_cut_back_off(templates: Templates) -> None:
    """P11: at every write, whatever its first part was."""
    writes, cases = shorts(templates, SCENARIOS[:2], ways=3)
    assert cases == 3 * writes


def test_running_out_of_descriptors_or_memory_is_a_typed_error(templates: Templates) -> None:
    """P19: nothing is left half done, and with enough of it again all goes on."""
    for kind, amounts in ("descriptors", range(36)), ("bytes", range(0, 180 << 20, 5 << 20)):
        cases = [resource_limits.Limit(kind, more) for more in sample(amounts, 2)]
        failed = forks.spread(cases, resource_limits.check_limit, templates=templates)
        tell(f"{len(cases)} limits of {kind}, {sum(failed)} steps failed by them")
        assert failed[0] > 0 and failed[-1] == 0


def send(log: embedlog.Log) -> None:
    """Send a record that only the background thread writes."""
    producer = log.producer()
    with suppress(RuntimeError):
        producer.send("t", b"refused")
    future = producer.send("t", b"sent")
    while not future.done():
        sleep(0.01)
    producer.close()


def consume(log: embedlog.Log) -> None:
    """Read with a consumer of a group, which no other one need wait for if it cannot join."""
    with log.consumer("t", group_id="g", auto_offset_reset="earliest") as consumer:
        try:
            consumer.poll(1000)
        except RuntimeError:
            assert not log.groups["g"].describe().members
        while not consumer.assignment():
            consumer.poll(100)


def mirror(log: embedlog.Log) -> None:
    """Follow the log with a mirror."""
    target = f"{log.path}-copy"
    with suppress(RuntimeError):
        embedlog.mirror(log, target, topics="t", follow=True).stop()
    with embedlog.mirror(log, target, topics="t", follow=True) as run:
        log.producer().send_batch("t", [b"another"])
        while not run.status.records:
            sleep(0.01)


def handle(log: embedlog.Log) -> None:
    """Start processes of a group."""
    with suppress(RuntimeError):
        embedlog.run_group(log, "t", "g", len, until="end").stop()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("name", "use"),
    sample(
        [
            ("embedlog-producer", send),
            ("embedlog-heartbeat", consume),
            ("embedlog-audit", send),
            ("embedlog-maintenance", send),
            ("embedlog-open", send),
            ("embedlog-mirror", mirror),
            ("embedlog-run", handle),
        ],
        2,
    ),
)
def test_a_thread_that_cannot_start_once_is_started_later(
    tmp_path: Path, name: str, use: Callable[[embedlog.Log], None]
) -> None:
    """P19: a call raises, and changes nothing, or works without the thread; later ones work."""

    def work() -> None:
        with embedlog.open(tmp_path / "root", maintenance=False) as log:
            log.create_topic("t", config={"audit": True})
            log.producer().send_batch("t", [b"first"])
        with resource_limits.no_thread(name, times=1) as refused:
            log = embedlog.open(tmp_path / "root")
            use(log)
            # Background jobs start a second after the log was opened.
            forks.until(lambda: refused, 10)
        use(log)
        assert log.housekeeping.verify() == []
        log.close()

    forks.call(work)


def test_lost_permissions_are_a_typed_error(templates: Templates) -> None:
    """P19: of any file or directory; and a root that may only be read can be read."""
    cases = resource_limits.permission_cases(templates)
    # With the 72 limits above these are 100 faults in the larger tiers.
    assert len(cases) >= 28
    cases = [*cases[:2], *sample(cases[2:], 3)]
    errors = forks.spread(cases, resource_limits.check_lost_permissions, templates=templates)
    tell(f"{len(cases)} paths: {dict(sorted(Counter(errors).items()))}")
    assert errors[0] == errors[1] == "StorageError"


@pytest.mark.tier("nightly")
def test_failing_operations_of_many_programs(templates: Templates) -> None:
    """P8 in full: as above, with random programs and every error at every operation."""
    total = faults(templates, SCENARIOS, full=True)
    for seed in range(1_000):
        if total >= 50_000:
            break
        kind = ("killed", "closed", "rebooted")[seed % 3]
        total += faults(templates, [Scenario(tuple(random_program(seed)), kind)], full=True)


@pytest.mark.tier("nightly")
def test_short_writes_of_many_programs(templates: Templates) -> None:
    """P11 in full: all writes of eight programs."""
    scenarios = [
        *SCENARIOS,
        *(Scenario(tuple(random_program(seed)), "killed") for seed in range(4)),
    ]
    assert shorts(templates, scenarios)[0] >= 8


@pytest.mark.tier("nightly")
def test_a_thousand_sizes_of_a_full_disk(directory: Path) -> None:
    """P10 in full."""
    cases = [full_disk.FreeSpace(size * 61, ("os", "fsync")[size % 2]) for size in range(1_000)]
    assert (
        len(forks.spread(cases, full_disk.check_full_disk, directory=directory, disk=None)) == 1_000
    )
