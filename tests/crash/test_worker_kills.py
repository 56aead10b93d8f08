"""Records are handled and put aside while processes are killed; and planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from support import forks
from support.faulty_files import scratch_directory
from support.forks import tell
from support.mutants import Change
from support.tiers import choose, sample
from support.worker_kills import Workload, check

RECORDS = {"test": 300, "all": 10_000}
KINDS = list(product([False, True], [1, 4]))


@pytest.mark.parametrize(("is_async", "concurrency"), sample(list(KINDS), 2))
def test_no_record_is_lost_and_each_poison_one_is_one_dead_letter(
    tmp_path: Path, is_async: bool, concurrency: int
) -> None:
    """E31 to E33, P15: whenever processes are killed, in handlers and around commits."""
    work = Workload(
        choose(**RECORDS),
        is_async,
        concurrency,
        kills=choose(test=0.05, all=0.05),
        poisoned=choose(test=20, all=100),
    )
    done = check(work, tmp_path)
    tell(f"{work}: {done}")


IN_FLIGHT = "embedlog.workers.in_flight:InFlight"
WORKER = "embedlog.workers.record_worker:RecordWorker"
BUGS = {
    "the position passes a record that is not finished": Change(
        f"{IN_FLIGHT}.committable",
        {"break": "record.outputs = ()"},
    ),
    "a record that is retried counts as finished": Change(
        f"{IN_FLIGHT}.postpone",
        {"self._stop(record)": "self._stop(record)\n        record.outputs = ()"},
    ),
    "the dead letter is sent before the position is committed": Change(
        f"{WORKER}._commit",
        {
            "self._publish(positions, outputs)": (
                "self._publish({}, outputs)\n            self._consumer.commit(positions)"
            )
        },
    ),
    "the dead letter is sent after the position was committed": Change(
        f"{WORKER}._commit",
        {
            "self._publish(positions, outputs)": (
                "self._consumer.commit(positions)\n            self._publish({}, outputs)"
            )
        },
    ),
    "dead letters are forgotten where nothing else is sent": Change(
        f"{IN_FLIGHT}.committable",
        {"outputs += record.outputs": "outputs = list(record.outputs)"},
    ),
    "records of a key are handled in any order": Change(
        f"{IN_FLIGHT}.add", {"if key is not None:": "if key is not None and False:"}
    ),
}


def hunt(bug: Callable[[], None]) -> str | None:
    """Run workloads with a bug until one is found to be wrong; return what was said."""
    bug()
    for seed, (is_async, concurrency) in enumerate(KINDS * 3):
        with scratch_directory() as directory:
            try:
                check(Workload(800, is_async, concurrency, 0.2, seed, 20), directory)
            except AssertionError as error:
                return f"run {seed + 1}: {error}"
    return None


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str) -> None:
    """A check that never failed proves nothing."""
    found = forks.call(lambda: hunt(BUGS[name]), patience=120)
    tell(f"{name}: {found}")
    assert found is not None
