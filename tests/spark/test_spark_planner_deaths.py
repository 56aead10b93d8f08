"""The planner of Spark's JVM dies, is stopped or prints garbage: no query notices, none hangs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support import planner_faults
from support.forks import until
from support.patience import patient
from support.spark_copy import PARTITIONS
from support.spark_rounds import EXCEPTIONS, OFTEN, ROUNDS, Rounds

import embedlog
from embedlog.api import Log
from embedlog.spark.errors import to_embedlog_error
from embedlog.spark.query_planner import QueryPlanner

pytestmark = pytest.mark.parametrize("reader", ["jvm"], indirect=True)

TIMEOUT = "spark.embedlog.planner.timeout"


@contextmanager
def fails(name: str, pattern: str) -> Iterator[None]:
    """Check that a call fails with an embedlog error of a class, in an exception of PySpark."""
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException, match=f"(?s){pattern}") as info:
        yield
    assert type(to_embedlog_error(info.value)).__name__ == name


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        yield log
        assert log.housekeeping.verify() == []


@pytest.fixture
def rounds(spark: Any, log: Log, tmp_path: Path) -> Rounds:
    return Rounds(spark, log, tmp_path)


@pytest.fixture
def planner_of(spark: Any) -> Callable[[], int]:
    """Return the pid of the session's planner, or 0."""
    jvm = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()

    def planner_of() -> int:
        for children in Path(f"/proc/{jvm}/task").glob("*/children"):
            for pid in children.read_text().split():
                if b"embedlog.spark.planner" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
        return 0

    return planner_of


@pytest.fixture
def kill_planner(planner_of: Callable[[], int]) -> Callable[[int], None]:
    """Send the session's planner a signal, and wait until it is gone; there may be none."""

    def kill_planner(signal_number: int) -> None:
        pid = planner_of()
        if pid:
            os.kill(pid, signal_number)
            until(lambda: planner_of() != pid, 60)

    return kill_planner


@pytest.fixture
def timeout(spark: Any, kill_planner: Callable[[int], None]) -> Iterator[None]:
    """A planner is silent for too long sooner than a user would like it; a test must not hang."""
    seconds = int(patient(5))
    hung = []

    def end_hang() -> None:
        hung.append(True)
        while not finished.wait(1):
            kill_planner(signal.SIGKILL)

    finished, timer = threading.Event(), threading.Timer(10 * seconds + patient(60), end_hang)
    spark.conf.set(TIMEOUT, f"{seconds}s")
    timer.start()
    yield
    finished.set()
    timer.cancel()
    spark.conf.unset(TIMEOUT)
    assert not hung, "Spark waited for a planner that was silent"


def points() -> list[tuple[str, int]]:
    """Return where to kill, and after how many calls."""
    return [
        (f"{when} {method}", skip)
        for method in ROUNDS
        for when in ("before", "after")
        for skip in ((0, 1) if method in OFTEN else (0,))
    ]


FIRST = {("before plan_batch", 0)}
"""Those for the tier `test`."""


def test_every_method_of_the_planner_has_a_round(reader: str) -> None:
    assert set(QueryPlanner.METHODS) == ROUNDS.keys() | EXCEPTIONS.keys()
    assert not ROUNDS.keys() & EXCEPTIONS.keys()


@pytest.mark.parametrize(
    ("point", "skip"),
    [
        pytest.param(*case, marks=pytest.mark.tier("test" if case in FIRST else "all"))
        for case in points()
    ],
)
def test_no_query_notices_that_its_planner_is_killed(rounds, faults, point, skip):
    """Each record is read and copied once, and the successor releases the lease."""
    method = point.split()[1]
    for round_ in ROUNDS[method]:
        planner_faults.order(faults, point, skip=skip)
        round_(rounds)
        assert not (faults / point).exists(), f"no planner came to {point!r}"
        (faults / "journal").write_text("")
        # Nobody asks a planner again to close a stream: the lease ends by its time.
        left = rounds.leases_of_streams()
        assert len(left) <= (point == "before close_stream"), left
        for name in left:
            rounds.end_lease(name)


@pytest.mark.tier("all")
def test_a_planner_that_is_gone_between_two_queries(rounds, faults, kill_planner):
    """Nobody has asked it anything when it dies."""
    for round_ in (Rounds.count, Rounds.copy_what_there_is):
        rounds.count()
        kill_planner(signal.SIGKILL)
        round_(rounds)


@pytest.mark.tier("all")
@pytest.mark.parametrize("fault", ["kill", "print"])
def test_a_planner_that_dies_or_prints_while_it_starts(rounds, faults, kill_planner, fault):
    """One dies before it tells its version; what is printed before that is no answer.

    A third death would be an error, and the JVM may not have noticed the first one yet.
    """
    kill_planner(signal.SIGKILL)
    planner_faults.order(faults, "start", fault, times=1 if fault == "kill" else 2)
    rounds.count()
    if fault == "print":
        kill_planner(signal.SIGKILL)
        rounds.count()
    assert not (faults / "start").exists()


@pytest.mark.tier("all")
def test_garbage_between_the_answers_is_none(rounds, faults):
    planner_faults.order(faults, "after latest_offset", "print", times=3)
    rounds.copy_what_there_is()
    assert not (faults / "after latest_offset").exists()


@pytest.mark.tier("all")
@pytest.mark.parametrize("point", ["start", "before plan_batch"])
def test_planners_that_die_again_and_again_are_an_error(rounds, faults, kill_planner, point):
    """Three of them; the query after that may have better luck."""
    kill_planner(signal.SIGKILL)
    planner_faults.order(faults, point, times=4)
    with fails("ProcessDiedError", "3 planners died"):
        rounds.count()
    rounds.count()
    assert not (faults / point).exists()


@pytest.mark.tier("all")
def test_a_stream_whose_planners_die_again_and_again_ends_with_an_error(rounds, faults):
    """It does so soon, and its planner serves other queries."""
    planner_faults.order(faults, "before plan_micro_batch", times=1000)
    with fails("ProcessDiedError", "3 planners died"):
        rounds.copy_what_there_is()
    (faults / "before plan_micro_batch").unlink()
    (faults / "journal").write_text("")
    rounds.copy_what_there_is()


@pytest.mark.tier("all")
def test_a_python_that_fails_to_start_the_planner_is_an_error_at_once(rounds, faults, kill_planner):
    """It would fail again: the message says what to set."""
    kill_planner(signal.SIGKILL)
    planner_faults.order(faults, "start", "exit")
    with fails("SparkSetupError", "exit status 3.*Set spa"):
        rounds.count()
    rounds.count()


@pytest.mark.tier("all")
@pytest.mark.parametrize(("when", "written"), [("before", 0), ("after", 600)])
def test_a_write_that_must_not_be_repeated_is_an_error(rounds, faults, when, written):
    """Only the user can know whether to write the rows again, unless they have a txnVersion."""
    planner_faults.order(faults, f"{when} publish_batch")
    with fails("ProcessDiedError", "look at the end of"):
        rounds.write_once()
    assert rounds.written_once() == written
    rounds.write_once()


@pytest.mark.tier("all")
def test_a_write_that_was_not_asked_for_is_repeated(rounds, faults, kill_planner):
    """The planner dies while it starts, and so cannot have created anything."""
    kill_planner(signal.SIGKILL)
    planner_faults.order(faults, "start")
    rounds.create_table("new")
    assert not (faults / "start").exists()


@pytest.mark.tier("all")
@pytest.mark.parametrize(("when", "exists"), [("before", False), ("after", True)])
def test_create_table_is_not_repeated(rounds, faults, log, when, exists):
    """It would find the topic that it has created itself."""
    planner_faults.order(faults, f"{when} create_table")
    with fails("ProcessDiedError", "see SHOW TABLES"):
        rounds.create_table("new")
    assert ("new" in log.topics()) == exists


@pytest.mark.tier("all")
@pytest.mark.parametrize(("when", "columns"), [("before", ["a"]), ("after", ["a", "b"])])
def test_a_change_of_columns_is_not_repeated(rounds, faults, log, when, columns):
    """It would find the column that it has added itself."""
    log.create_topic("typed", schema=pa.schema([("a", pa.int32())]))
    planner_faults.order(faults, f"{when} alter_columns")
    with fails("ProcessDiedError", "see DESCRIBE TABLE"):
        rounds.add_column("typed")
    assert [c.name for c in log.topic("typed").schema_history()[-1].columns] == columns


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("point", ["start", "before plan_batch", "after latest_offset"])
def test_a_stopped_planner_is_replaced(rounds, faults, kill_planner, timeout, point):
    """As by SIGSTOP: it neither answers nor ends."""
    kill_planner(signal.SIGKILL)
    planner_faults.order(faults, point, "stop")
    rounds.copy_what_there_is() if "offset" in point else rounds.count()
    assert not (faults / point).exists()


@pytest.mark.tier("nightly")
def test_planners_that_stop_again_and_again_are_an_error(rounds, faults, timeout):
    planner_faults.order(faults, "before plan_batch", "stop", times=3)
    with fails("ProcessDiedError", "no sign of life for"):
        rounds.count()
    rounds.count()


@pytest.mark.tier("nightly")
def test_a_query_can_be_stopped_while_its_planner_is_silent(rounds, faults, planner_of):
    """By default, a planner may be silent for two minutes."""
    planner_faults.order(faults, "before plan_micro_batch", "stop")
    _, query = rounds.start("earliest", processingTime="50 milliseconds")
    until(lambda: not (faults / "before plan_micro_batch").exists(), patient(30))
    query.stop()
    assert not query.isActive
    os.kill(planner_of(), signal.SIGKILL)
    rounds.count()


@pytest.mark.tier("all")
def test_a_long_request_is_no_silence(spark, rounds, faults):
    """Another process may hold a lock for longer than a planner may be silent."""
    rounds.count()
    spark.conf.set(TIMEOUT, "1s")
    try:
        planner_faults.order(faults, "before plan_batch", "sleep")
        rounds.count()
    finally:
        spark.conf.unset(TIMEOUT)
    assert len(planner_faults.journal(faults, "plan_batch")) == 2


@pytest.mark.tier("all")
@pytest.mark.parametrize("value", ["soon", "5 parsecs"])
def test_a_wrong_timeout_is_an_error(spark, rounds, value):
    spark.conf.set(TIMEOUT, value)
    try:
        with fails("InvalidConfigError", TIMEOUT):
            rounds.count()
    finally:
        spark.conf.unset(TIMEOUT)


@pytest.mark.tier("all")
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_retention_waits_for_a_query_whose_planner_is_gone(
    rounds, faults, kill_planner, log, signal_number
):
    """A batch is being processed: no planner has to be there for its lease to hold."""
    log.alter_topic("from", config={"retention.ms": 1, "file.delete.delay.ms": 0})
    starts = []

    def process(frame, number):
        if number < 2:
            kill_planner(signal_number)
        log.housekeeping.run()
        starts.append([log.partition("from", n).start_offset() for n in range(PARTITIONS)])
        frame.write.format("noop").mode("append").save()

    rounds.process_what_there_is(process)
    assert len(starts) > 3
    assert starts[0] == [0] * PARTITIONS
    assert sum(starts[-1]) > 0, "retention deleted nothing, so the lease kept nothing"
    # Statistics of the whole log would take a lease on all of it.
    assert planner_faults.journal(faults, "plan_batch") == []
