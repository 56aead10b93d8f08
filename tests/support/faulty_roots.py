"""Work on a root that is killed, fails, or loses power at any of its file operations."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from embedlog.errors import DurabilityError, EmbedlogError
from embedlog.root.repair import repair_root
from embedlog.root.root import Root
from support import forks
from support.faulty_files import FALLIBLE, OPERATIONS, FaultyFiles
from support.forks import tell
from support.power_cut import Recording, materialised
from support.roots import abandon, healthy, open_root
from support.tiers import sample

COMPANY = pytest.mark.parametrize(
    "company",
    [
        pytest.param(False, id="alone"),
        pytest.param(True, id="beside another", marks=pytest.mark.tier("all")),
    ],
)
"""Whether another process has the log open while one is killed."""

Order = Callable[[FaultyFiles], None]
Acknowledge = Callable[[str], None]


class Case(NamedTuple):
    """A fault at the `n`-th operation of these kinds."""

    n: int
    what: str
    """When to kill (``"before"``, ``"middle"``, ``"after"``), or how to fail (``"once"``...)."""
    company: bool = False
    """Whether another process has the log open, so that no process recovers it."""
    only: tuple[str, ...] = tuple(sorted(OPERATIONS))
    durability: str = "os"


class FastUptimeFiles(FaultyFiles):
    """The files of a machine whose uptime passes every delay at once."""

    def uptime_ms(self) -> int:
        self.ups = getattr(self, "ups", 0) + 10
        return super().uptime_ms() + self.ups


class RootFaults:
    """Some work on a root, with its faults; subclasses say what is done and what must be true.

    The checks run in child processes.
    """

    parts: Sequence[tuple[str, int]]
    """The partitions of the root, which are opened before operations count."""
    files: type[FaultyFiles] = FaultyFiles

    def __init__(self) -> None:
        self._counted: dict[str, dict[str, int]] = {}

    def fill(self, root: Root) -> None:
        """Create what the work begins with, and flush it."""
        raise NotImplementedError

    def work(self, root: Root, durability: str, acknowledge: Acknowledge) -> EmbedlogError | None:
        """Do the work, and report each step that was acknowledged; return the first error."""
        raise NotImplementedError

    def check_between(self, root: Root, acked: set[str]) -> None:
        """Check that each step is done or not done, and that acknowledged ones are done."""
        raise NotImplementedError

    def check_failure(
        self, root: Root, error: EmbedlogError | None, number: int, failed: bool, acked: set[str]
    ) -> None:
        """Check the error of a failed operation, and the root; ``failed`` if a flush failed."""
        assert error is None or error.errno == number, error  # type: ignore[attr-defined]
        if not failed or number != errno.EIO:
            self.check_between(root, acked)

    def repair(self, root: Root, acked: set[str]) -> None:
        """Repair partitions whose flush failed: that is final until a repair (P9)."""
        repair_root(root, dry_run=False)

    def check_done(self, root: Root, durability: str) -> None:
        """Do the work that is left, and check that all is done, once, without stray files."""
        raise NotImplementedError

    def check_state(self, root: Root, acked: set[str], durability: str) -> None:
        """Check a root after a power cut."""
        self.check_between(root, acked)
        assert healthy(root)
        self.check_done(root, durability)

    # How the work runs

    def begin(self, path: Path, order: Order) -> Root:
        """Fill a root, leave it as a killed process does, and open it with a fault."""
        shutil.rmtree(path, ignore_errors=True)
        root = open_root(path)
        self.fill(root)
        abandon(root)
        return self._join(path, order)

    def _join(self, path: Path, order: Order, **options: Any) -> Root:
        """Open a root with a fault, which counts from when its partitions were opened."""
        root = open_root(path, files=partial(self.files, **options))
        for part in self.parts:
            root.partition(*part).tail()
        files: Any = root.context.files
        files.counts.clear()
        order(files)
        return root

    def count(self, directory: Path, durability: str = "os") -> dict[str, int]:
        """Return how many operations of each kind the work makes; it runs once for that."""

        def run() -> dict[str, int]:
            root = self.begin(directory / f"count-{durability}", lambda files: None)
            assert self.work(root, durability, lambda step: None) is None
            self.check_between(root, set())
            return dict(root.context.files.counts)  # type: ignore[attr-defined]

        if durability not in self._counted:
            self._counted[durability] = forks.call(run)
        return self._counted[durability]

    # Kills

    def kill_everywhere(
        self,
        directory: Path,
        most: int,
        company: bool = False,
        kinds: Collection[str] = OPERATIONS,
    ) -> int:
        """Kill after each operation of some kinds; return how many processes were killed.

        The small tiers kill a sample of `most`.
        """
        return self.check_kills(directory, sample(self.kills(directory, company, kinds), most))

    def kills(
        self, directory: Path, company: bool = False, kinds: Collection[str] = OPERATIONS
    ) -> list[Case]:
        """Return a kill after each operation of some kinds, and in the middle of each write."""
        counted, only = self.count(directory), tuple(sorted(kinds))
        total = sum(counted.get(kind, 0) for kind in only)
        cases = [Case(n, "after", company, only) for n in range(total)]
        writes = range(counted["write"] if "write" in kinds else 0)
        return cases + [Case(n, "middle", company, ("write",)) for n in writes]

    def check_kills(
        self, directory: Path, cases: Sequence[Case], enough: int = forks.ENOUGH
    ) -> int:
        """Kill at many operations; return how many processes were killed."""
        killed = forks.spread(cases, self.check_kill, enough=enough, directory=directory)
        tell(f"{sum(killed)} kills at {len(cases)} operations")
        return sum(killed)

    def check_kill(self, case: Case, *, directory: Path) -> bool:
        """Kill the process at one operation; return whether it was killed."""
        path = directory / f"kill-{case.n}-{case.what}-{case.durability}-{case.company}"
        journal = path.with_suffix(".acked")
        company = None
        if case.company:
            company = open_root(path, files=self.files)
            self.fill(company)

        def order(files: FaultyFiles) -> None:
            files.kill_at(case.n, case.what, case.only)

        def acknowledge(step: str) -> None:
            with journal.open("a") as file:
                file.write(f"{step}\n")

        def run() -> None:
            root = self._join(path, order) if case.company else self.begin(path, order)
            self.work(root, case.durability, acknowledge)

        killed = forks.was_killed(run)
        acked = set(journal.read_text().split()) if journal.exists() else set()
        if company is None:
            forks.call(lambda: self._check_opened(path, acked, case.durability))
        else:
            self.check_between(company, acked)
            assert healthy(company)
            self.check_done(company, case.durability)
            company.close()
        shutil.rmtree(path, ignore_errors=True)
        journal.unlink(missing_ok=True)
        return killed

    def _check_opened(self, path: Path, acked: set[str], durability: str) -> None:
        root = open_root(path, files=self.files)
        assert healthy(root)
        # Before the first write: reading alone finishes and undoes nothing.
        self.check_between(root, acked)
        self.check_done(root, durability)
        self.check_appends(root)
        root.close()
        self._reopen(path, self.check_reopened)

    def check_appends(self, root: Root) -> None:
        """Check that appends go on after the work."""

    def check_reopened(self, root: Root) -> None:
        """Check a root that was closed after everything."""
        assert healthy(root)

    def _reopen(self, path: Path, check: Callable[[Root], None]) -> None:
        root = open_root(path)
        assert root.startup_report == []
        check(root)
        root.close()

    # Failing operations

    def fail_everywhere(self, directory: Path, most: int, step: int = 1) -> int:
        """Let one in `step` operations fail, once and for ever; return how many errors there were.

        The small tiers let a sample of `most` fail.
        """
        counted = self.count(directory)
        total = sum(counted.get(kind, 0) for kind in FALLIBLE)
        cases = [Case(n, how) for n in range(0, total, step) for how in ("once", "forever")]
        return self.check_faults(directory, sample(cases, most))

    def check_faults(self, directory: Path, cases: Sequence[Case]) -> int:
        """Let many operations fail; return how often an error was raised."""
        raised = forks.spread(cases, self.check_fault, directory=directory)
        tell(f"{len(cases)} faults, of which {sum(raised)} raised an error")
        return sum(raised)

    def check_fault(self, case: Case, *, directory: Path) -> bool:
        """Let one operation fail; return whether the work raised an error."""
        path = directory / f"fault-{case.n}-{case.what}-{case.durability}"
        number = (errno.EIO, errno.ENOSPC, errno.EDQUOT)[case.n % 3]

        def order(files: FaultyFiles) -> None:
            files.fail_at(case.n, number, case.what == "forever", FALLIBLE)

        def run() -> bool:
            root = self.begin(path, order)
            acked: set[str] = set()
            error = self.work(root, case.durability, acked.add)
            root.context.files.heal()  # type: ignore[attr-defined]
            failed = any(root.partition(*part).tail().failed for part in self.parts)
            self.check_failure(root, error, number, failed, acked)
            if failed:
                self.repair(root, acked)
            self.check_done(root, case.durability)
            root.close()
            return error is not None

        raised = forks.call(run)
        forks.call(lambda: self._reopen(path, self.check_reopened_after_fault))
        shutil.rmtree(path, ignore_errors=True)
        return bool(raised)

    def check_reopened_after_fault(self, root: Root) -> None:
        """Check a root that was closed without an append after the work."""
        self.check_reopened(root)

    # Power cuts

    def record(self, directory: Path, durability: str = "os") -> Recording:
        """Record the file operations of the work, from a root that is all on the disk."""
        path = directory / f"recorded-{durability}"
        root = open_root(path)
        self.fill(root)
        root.close()
        root = self._join(path, lambda files: None, record=True)
        files: Any = root.context.files
        assert self.work(root, durability, files.note) is None
        recording: Recording = files.recording()
        abandon(root)
        return recording

    def cut_everywhere(self, directory: Path, limit: int, durability: str = "os") -> int:
        """Check states that a power cut may leave during the work; return their number."""
        recording = self.record(directory, durability)
        return self.check_power_cuts(recording, limit, directory, durability)

    def check_power_cuts(
        self, recording: Recording, limit: int, directory: Path, durability: str = "os"
    ) -> int:
        """Check states that a power cut may leave; return their number."""
        path, count = directory / f"after-{durability}", 0
        for count, image in enumerate(materialised(recording.states(limit), path), 1):
            root = open_root(path, files=partial(self.files, boot=f"boot {count}"))
            try:
                self.check_state(root, set(image.notes), durability)
            except Exception as error:
                raise AssertionError(f"{error!r} after {image.explain()}") from error
            finally:
                abandon(root)
        tell(f"{count} states")
        return count


class PublishedFaults(RootFaults):
    """Work that publishes: what holds between its steps holds after a failure and a repair, too."""

    def check_failure(
        self, root: Root, error: EmbedlogError | None, number: int, failed: bool, acked: set[str]
    ) -> None:
        """The same holds; a failed flush was reported."""
        self.check_between(root, acked)
        if failed:
            assert isinstance(error, DurabilityError), error

    def repair(self, root: Root, acked: set[str]) -> None:
        super().repair(root, acked)
        self.check_between(root, acked)
