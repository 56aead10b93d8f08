"""`run_group` runs a handler over topics in several processes, at least once per record."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial

import pytest
from support import forks
from support.children import in_threads, run_python
from support.patience import patient
from support.tiers import choose, sample

import embedlog
from embedlog.consumer.open_group import open_group
from embedlog.errors import (
    InvalidConfigError,
    InvalidGroupIdError,
    ProcessDiedError,
    UnknownTopicOrPartitionError,
)

pytestmark = pytest.mark.tier("test")  # each test starts processes

RECORDS = 400
EARLIEST = {"auto_offset_reset": "earliest"}
POISON = b"13"
run_group = partial(embedlog.run_group, start_method="fork")
"""The handlers do not use Polars, which other tests of this process may have used."""


@pytest.fixture
def log(tmp_path):
    """A log with 400 numbers in four partitions of a topic."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t", partitions=4)
        fill(log, range(RECORDS))
        yield log
        assert log.housekeeping.verify() == []


@pytest.fixture
def seen(tmp_path):
    """A file to which handlers write a line for each record, which survives their process."""
    return Lines(tmp_path / "seen")


class Lines:
    def __init__(self, path):
        self.path = path
        path.touch()

    def add(self, *fields):
        line = " ".join(map(str, fields)) + "\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(fd, line.encode())
        os.close(fd)

    def read(self):
        return [line.split() for line in self.path.read_text().splitlines()]

    def note(self, record):
        """A handler that writes the number of a record and its process id."""
        self.add(int(record.value), os.getpid())

    @property
    def numbers(self):
        return Counter(int(fields[0]) for fields in self.read())

    @property
    def pids(self):
        return {int(fields[1]) for fields in self.read()}


def fill(log, numbers):
    with log.producer() as producer:
        for number in numbers:
            producer.send("t", b"%d" % number, partition=number % 4)


def until(condition):
    forks.until(condition, 30.0)


def run_to_end(log, handler):
    assert run_group(log, "t", "g", handler, until="end", **EARLIEST).wait(patient(60))


def committed(log):
    """Return the sum of the group's committed offsets."""
    with log.consumer(group_id="g") as consumer:
        return sum(consumer.committed(("t", number)) or 0 for number in range(4))


def members(log):
    return open_group(log.root, "g").read().members


def test_processes_share_the_records_and_stop_at_the_end(log, seen):
    """Each record is handled once and committed, and all members leave the group."""
    run = run_group(log, "t", "g", seen.note, processes=2, until="end", **EARLIEST)

    assert run.wait(patient(60))
    assert seen.numbers == Counter(range(RECORDS))
    assert os.getpid() not in seen.pids
    assert committed(log) == RECORDS
    assert not members(log)


def test_a_handler_of_batches_gets_lists_of_one_partition_in_order(log, seen):
    """A list has at most max_poll_records records."""

    def handle(records):
        assert [record.offset for record in records] == list(
            range(records[0].offset, records[0].offset + len(records))
        )
        seen.add(len(records), len({record.partition for record in records}))

    run_group(
        log, ["t"], "g", handle, batch=True, until="end", max_poll_records=30, **EARLIEST
    ).wait(patient(60))

    assert sum(int(count) for count, _ in seen.read()) == RECORDS
    assert max(int(count) for count, _ in seen.read()) <= 30
    assert {partitions for _, partitions in seen.read()} == {"1"}


def test_a_second_run_continues_where_the_first_ended(log, seen):
    """Committed records are not handled again; a run without new records ends at once."""
    run_to_end(log, seen.note)
    run_to_end(log, seen.note)
    fill(log, range(RECORDS, RECORDS + 40))
    run_to_end(log, seen.note)

    assert seen.numbers == Counter(range(RECORDS + 40))


def test_a_run_handles_new_records_until_it_is_stopped(log, seen):
    """Without `until` it does not end; `stop` commits the handled records."""
    with run_group(log, "t", "g", seen.note, **EARLIEST) as run:
        until(lambda: len(seen.numbers) == RECORDS)
        fill(log, range(RECORDS, RECORDS + 40))
        until(lambda: len(seen.numbers) == RECORDS + 40)
        assert run.running
        assert not run.wait(0.01)

    assert not run.running
    assert run.pids == []
    assert committed(log) == RECORDS + 40


def test_a_stop_finishes_the_current_record_only(log, seen):
    """Records that were polled but not handled are not committed."""

    def slow(record):
        time.sleep(0.1)
        seen.note(record)

    with run_group(log, "t", "g", slow, processes=1, **EARLIEST):
        until(lambda: seen.numbers)

    assert committed(log) == sum(seen.numbers.values()) < 10


class UnluckyError(Exception):
    """An error whose `args` differ from the arguments of its constructor."""

    def __init__(self, number):
        super().__init__(f"not {number}")


def fail_at_13(record):
    if record.value == POISON:
        raise ValueError("thirteen")


def test_an_error_of_a_handler_is_raised_with_its_traceback(log):
    """The parent raises the handler's error; its cause has the traceback of the child."""
    run = run_group(log, "t", "g", fail_at_13, processes=2, **EARLIEST)

    with pytest.raises(ValueError, match="thirteen") as caught:
        run.wait(patient(60))

    assert "in fail_at_13" in str(caught.value.__cause__)
    assert not run.running


def test_nothing_after_a_record_that_failed_is_committed(log):
    """Its partition is committed up to it, and no other process continues after it."""
    for _ in range(2):
        with pytest.raises(ValueError, match="thirteen"):
            run_group(log, "t", "g", fail_at_13, processes=3, **EARLIEST).wait(patient(60))

    with log.consumer(group_id="g") as consumer:
        assert consumer.committed(("t", 1)) == 3


def test_a_failed_batch_is_handled_again_as_a_whole(log, seen):
    """If a handler of batches raises, nothing of its batch is committed."""

    def handle(records):
        seen.add(records[0].partition, records[0].offset, len(records))
        if any(record.value == POISON for record in records):
            raise ValueError("thirteen")

    for _ in range(2):
        with pytest.raises(ValueError, match="thirteen"):
            run_group(log, "t", "g", handle, batch=True, processes=1, **EARLIEST).wait(patient(60))

    assert [fields for fields in seen.read() if fields[0] == "1"] == [["1", "0", "100"]] * 2


@pytest.mark.parametrize("error", [UnluckyError(13), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_an_error_that_does_not_pickle_is_reported(log, error):
    """So is an error that does not unpickle, or that would end the parent."""

    def handle(record):
        raise error

    run = run_group(log, "t", "g", handle, processes=1, **EARLIEST)

    expected = UnluckyError if isinstance(error, UnluckyError) else ProcessDiedError
    with pytest.raises(expected) as caught:
        run.wait(patient(60))
    assert "in handle" in str(caught.value.__cause__)


def test_an_error_before_the_first_record_is_raised(log):
    """A process may fail before it calls the handler."""
    run = run_group(log, "t", "g", print, auto_offset_reset="none")

    with pytest.raises(embedlog.errors.NoOffsetForPartitionError):
        run.wait(patient(60))


def test_the_error_of_a_handler_is_logged_when_it_ends_the_run(log, caplog):
    """With its traceback: a service may call `wait` never, or much later."""
    run = run_group(log, "t", "g", fail_at_13, processes=1, **EARLIEST)
    until(lambda: not run.running)

    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert "Group g ends" in record.getMessage()
    assert "in fail_at_13" in str(record.exc_info[1].__cause__)
    with pytest.raises(ValueError, match="thirteen"):
        run.wait()


def test_the_end_of_a_topic_that_does_not_exist_is_an_error(log):
    """A misspelt name must not look like a topic whose records were all handled."""
    with pytest.raises(UnknownTopicOrPartitionError, match="tt"):
        run_group(log, ["t", "tt"], "g", print, until="end")


POLARS = """
import logging, sys, threading, embedlog, polars

def use_polars(record):
    frame = polars.DataFrame({"n": [int(record.value)]}).lazy().select(polars.col("n").sum())
    assert frame.collect().item() == int(record.value)

if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    log, lock = embedlog.open(sys.argv[1]), threading.Lock()
    use_polars(log.topic("t")[0])
    options = {"until": "end", "auto_offset_reset": "earliest"}

    def not_even_by_value(record):
        lock.acquire(False)

    try:
        embedlog.run_group(log, "t", "g1", not_even_by_value, **options)
    except embedlog.errors.IllegalStateError as error:
        assert "start_method='fork'" in str(error)
    else:
        raise AssertionError("it was forked")
    embedlog.run_group(log, "t", "g2", not_even_by_value, start_method="fork", **options).wait()
    embedlog.run_group(log, "t", "g", use_polars, **options).wait()
    assert sum(log.groups["g"].lag().values()) == 0
"""


@pytest.mark.tier("all")
def test_a_parent_that_used_polars_does_not_fork_unasked(log, tmp_path):
    """A forked handler that uses Polars would wait for ever for threads that it does not have."""
    pytest.importorskip("polars")
    program = tmp_path / "program.py"
    program.write_text(POLARS)
    output = run_python(program, log.path)
    assert output.count("hangs in a forked process") == 1  # by the one that asked for a fork


def test_a_killed_process_is_replaced_and_nothing_is_lost(log, seen):
    """The records that it did not commit are handled again."""

    def slow(record):
        time.sleep(0.002)
        seen.note(record)

    run = run_group(log, "t", "g", slow, processes=2, until="end", max_poll_records=20, **EARLIEST)
    until(lambda: len(seen.numbers) > 50)
    victim = run.pids[0]
    os.kill(victim, signal.SIGKILL)

    assert run.wait(patient(60))
    assert set(seen.numbers) == set(range(RECORDS))
    assert sum(seen.numbers.values()) <= RECORDS + 20


def test_too_many_killed_processes_end_the_run(log, seen, caplog):
    """More than `restarts` restarts are an error."""

    def deadly(record):
        if record.value == POISON:
            seen.note(record)
            os.kill(os.getpid(), signal.SIGKILL)

    run = run_group(log, "t", "g", deadly, processes=2, restarts=2, **EARLIEST)

    with pytest.raises(ProcessDiedError, match="SIGKILL"):
        run.wait(patient(60))
    # Both processes may have died of it before the first is missed.
    assert seen.numbers in ({13: 3}, {13: 4})
    restarts = [line for line in caplog.messages if "starting another one" in line]
    assert [line.split("; ")[-1] for line in restarts] == [
        "1 restart left within 300 s",
        "0 restarts left within 300 s",
    ]
    assert all("of group g ended with SIGKILL" in line for line in restarts)
    assert not run.running


def test_a_process_terminated_by_another_program_is_not_replaced(log):
    """SIGTERM ends it on purpose."""
    run = run_group(log, "t", "g", lambda record: None, processes=2, **EARLIEST)
    until(lambda: len(members(log)) == 2)
    for pid in run.pids:
        os.kill(pid, signal.SIGTERM)

    assert run.wait(patient(60))
    assert not members(log)


def test_a_handler_that_does_not_end_is_killed(log, seen):
    """`stop` kills it after its timeout."""

    def endless(record):
        seen.note(record)
        time.sleep(60)

    run = run_group(log, "t", "g", endless, processes=1, **EARLIEST)
    until(lambda: seen.numbers)
    begun = time.monotonic()
    run.stop(timeout=0.2)

    assert time.monotonic() - begun < patient(5)
    assert committed(log) == 0


def test_a_stop_right_after_the_start_works(log):
    """The processes may not have started to poll yet."""
    for _ in range(choose(quick=2, all=5)):
        begun = time.monotonic()
        run_group(log, "t", "g", lambda record: None, **EARLIEST).stop()
        assert time.monotonic() - begun < patient(10)
    assert not members(log)


def test_closing_the_log_stops_its_runs(tmp_path):
    """It stops producers and consumers as well."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t")
        run = run_group(log, "t", "g", lambda record: None)

    assert not run.running


def test_each_process_has_its_own_instance_id(log):
    """A group_instance_id belongs to one member only."""
    with run_group(log, "t", "g", print, group_instance_id="host"):
        until(lambda: len(members(log)) == 2)

        assert {member.instance_id for member in members(log).values()} == {"host-0", "host-1"}


@pytest.mark.parametrize("method", choose(quick=["forkserver"], all=["spawn", "forkserver"]))
def test_a_handler_that_pickles_runs_by_any_start_method(log, method):
    """The new process imports it."""
    run = run_group(
        log, "t", "g", fail_at_13, processes=2, start_method=method, until="end", **EARLIEST
    )

    with pytest.raises(ValueError, match="thirteen"):
        run.wait(patient(60))


def test_a_handler_that_does_not_pickle_is_refused_at_once(log):
    """The start method spawn must pickle it."""
    with pytest.raises((AttributeError, TypeError)):
        run_group(log, "t", "g", lambda record: None, start_method="spawn")


def test_invalid_arguments_are_refused(log):
    """The error is raised before any process is started."""
    with pytest.raises(InvalidConfigError, match="enable_auto_commit"):
        run_group(log, "t", "g", print, enable_auto_commit=True)
    with pytest.raises(InvalidConfigError, match="max_pol"):
        run_group(log, "t", "g", print, max_pol_records=1)
    with pytest.raises(InvalidGroupIdError):
        run_group(log, "t", "", print)
    with pytest.raises(ValueError, match="processes"):
        run_group(log, "t", "g", print, processes=0)
    with pytest.raises(ValueError, match="until"):
        run_group(log, "t", "g", print, until="then")
    with pytest.raises(TypeError, match="handler"):
        run_group(log, "t", "g", None)


PROGRAM = """
import os, sys, time, embedlog

def handle(record):
    time.sleep(0.01)

log = embedlog.open(sys.argv[1])
run = embedlog.run_group(log, "t", "g", handle, auto_offset_reset="earliest", max_poll_records=5)
print(*run.pids, flush=True)
{}
"""
WAITS, SLEEPS = "run.wait()", "time.sleep(60)"


@pytest.mark.parametrize(
    ("ending", "with_signal", "code"),
    sample(
        [
            (WAITS, signal.SIGTERM, -signal.SIGTERM),
            (WAITS, signal.SIGINT, -signal.SIGINT),
            (SLEEPS, signal.SIGTERM, -signal.SIGTERM),
            (SLEEPS, signal.SIGINT, -signal.SIGINT),
            (WAITS, signal.SIGKILL, -signal.SIGKILL),
            ("", None, 0),
            ("sys.exit(3)", None, 3),
        ],
        2,
    ),
)
def test_the_run_ends_with_its_program(log, ending, with_signal, code):
    """However the program ends, handled records are committed and no process is left."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(ending), log.path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 2
    if with_signal is not None:
        until(lambda: committed(log) >= 10)
        program.send_signal(with_signal)
    program.communicate(timeout=patient(60))

    assert program.returncode in (code, 1 if with_signal == signal.SIGINT else code)
    until(lambda: not members(log))
    until(lambda: not any(map(alive, pids)))
    assert committed(log) < RECORDS


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_two_runs_at_once_from_threads_are_two_runs(log, seen):
    """Each run ends independently."""

    def run_one_group(group):
        run = run_group(log, "t", group, seen.note, until="end", **EARLIEST)
        assert run.wait(patient(60))

    with in_threads(*(partial(run_one_group, group) for group in "ab")):
        pass

    assert seen.numbers == Counter(dict.fromkeys(range(RECORDS), 2))
