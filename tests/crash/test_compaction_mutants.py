"""Bugs planted in compaction: the checks of this folder, or the model, find each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support import compaction_faults, forks
from support.compaction_model import run_some
from support.faulty_files import scratch_directory
from support.forks import tell
from support.mutants import Behaviour, Change
from support.tiers import runs

CLEANER, REPLACE = "embedlog.compaction.cleaner", "embedlog.partition.replace"
Check = Callable[[Path], object]


@pytest.fixture
def directory() -> Iterator[Path]:
    with scratch_directory() as path:
        yield path


def by_kills(directory: Path) -> None:
    compaction_faults.check_file_states(0, directory)


def by_power_cuts(directory: Path) -> None:
    compaction_faults.check_power_cuts(0, directory, 500, thorough=1000)


def by_lost_answers(directory: Path) -> None:
    for number in range(1, 4):
        compaction_faults.check_lost_answer(number, directory)


def by_a_truncation(directory: Path) -> None:
    for number in range(1, 30):
        compaction_faults.check_truncation(number, directory)


def by_many_truncations(directory: Path) -> None:
    for end in range(2, 14):
        for number in range(1, 30, 3):
            compaction_faults.check_truncation(number, directory, end)


def by_the_model(directory: Path) -> None:
    run_some(60)


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


FEW = {
    "what is replaced is unlinked first",
    "a tombstone goes in the first pass",
    "a cut of what is rewritten is not seen",
}
"""Those that the small tiers plant."""
PLANTED = [mutant for mutant in MUTANTS if mutant.name in FEW or runs("all")]


@pytest.mark.parametrize("mutant", PLANTED, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_planted_bug_is_found(mutant: Mutant, directory: Path) -> None:
    """D7-D25: a check that never failed proves nothing."""

    def work() -> str | None:
        for change in (Change(mutant.where, mutant.edits), *mutant.besides):
            change()
        try:
            mutant.check(directory)
        except Exception as error:  # noqa: BLE001 - whatever it is, it was found
            return f"{type(error).__name__}: {' '.join(getattr(error, '__notes__', ()))[:60]}"
        return None

    bug_found = forks.call(work, patience=120)
    tell(f"{mutant.name}: {bug_found}")
    assert bug_found is not None, "no check found it"
