"""`embedlog.testing`: the fixtures, the clock and the disk faults that users test with."""

from __future__ import annotations

import errno
import re
import shutil
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from embedlog.errors import DiskFullError, StorageError, TimeoutError  # noqa: A004 - it is one
from embedlog.testing import DiskFaults, ManualClock, open_log

pytest_plugins = ["pytester"]

REPOSITORY = Path(__file__).parent.parent
EXAMPLES, PAGE = REPOSITORY / "examples", REPOSITORY / "docs" / "testing.md"


def test_each_test_has_an_empty_log_with_a_clock_that_stands_still(embedlog_log, embedlog_clock):
    """Timestamps are those that the test chose."""
    assert embedlog_log.topics() == []
    embedlog_clock.set("2026-01-01T12:00:00Z")
    with embedlog_log.producer() as producer:
        producer.send("orders", b"first")
        embedlog_clock.advance(minutes=5)
        producer.send("orders", b"second")
    first, second = embedlog_log.topic("orders")
    assert datetime.fromtimestamp(first.timestamp / 1000, UTC) == datetime(
        2026, 1, 1, 12, tzinfo=UTC
    )
    assert second.timestamp - first.timestamp == 300_000


def test_retention_follows_the_clock(embedlog_log, embedlog_clock):
    """Eight days pass without waiting: what is older than seven is deleted."""
    embedlog_log.create_topic("orders", config={"segment.ms": 3_600_000})
    with embedlog_log.producer() as producer:
        producer.send("orders", b"old").result()
        embedlog_clock.advance(days=8)
        producer.send("orders", b"new").result()
    embedlog_log.housekeeping.run()
    assert [record.value for record in embedlog_log.topic("orders")] == [b"new"]


def test_records_of_sees_what_was_sent_without_a_flush(embedlog_log, records_of):
    """A test need not know whether the program has flushed."""
    producer = embedlog_log.producer(linger_ms=60_000, delivery_timeout_ms=120_000)
    producer.send("orders", b"1")
    assert [record.value for record in records_of("orders")] == [b"1"]
    assert records_of("payments") == []


def test_records_of_waits_for_a_number_of_records(embedlog_log, records_of):
    """Another thread or process may be a moment late."""

    def send_later():
        time.sleep(0.05)
        embedlog_log.producer().send("orders", b"1").result()

    thread = threading.Thread(target=send_later)
    thread.start()
    assert len(records_of("orders", count=1)) == 1
    thread.join()
    with pytest.raises(pytest.fail.Exception, match="1 of 2 records"):
        records_of("orders", count=2, timeout=0.01)


def test_the_next_append_fails_and_the_one_after_it_works(embedlog_log, embedlog_faults):
    """The failed append leaves nothing behind."""
    producer = embedlog_log.producer()
    producer.send("orders", b"1").result()
    embedlog_faults.fail_next_append()
    with pytest.raises(StorageError) as failure:
        producer.send("orders", b"2").result()
    assert failure.value.errno == errno.EIO
    producer.send("orders", b"3").result()
    assert [record.value for record in embedlog_log.topic("orders")] == [b"1", b"3"]
    assert embedlog_faults.failed_appends == 1


def test_a_fault_may_be_for_one_topic(embedlog_log, embedlog_faults):
    """Appends to other topics work, also to one whose name begins the same."""
    producer = embedlog_log.producer()
    embedlog_faults.fail_next_append("orders")
    producer.send("orders-1", b"1").result()
    producer.send("payments", b"1").result()
    with pytest.raises(StorageError):
        producer.send("orders", b"1").result()


def test_a_full_disk_is_waited_for(embedlog_log, embedlog_faults):
    """A producer retries, so the record is there once the disk has space."""
    producer = embedlog_log.producer(retry_backoff_ms=1)
    with embedlog_faults.full_disk():
        future = producer.send("orders", b"1")
        with pytest.raises(TimeoutError):
            future.result(timeout=0.02)
        with pytest.raises(DiskFullError):
            embedlog_log.producer(retries=0).send("orders", b"2").result()
    assert future.result().offset == 0


def test_faults_that_did_not_happen_are_forgotten():
    """`clear` leaves a disk that works, and a bad count is refused."""
    faults = DiskFaults()
    faults.fail_next_append()
    faults.clear()
    faults.check("topics/orders-1/0/0.arrows")
    with pytest.raises(ValueError, match="at least 1"):
        faults.fail_next_append(times=0)


def test_the_clock_takes_times_in_each_form():
    """Milliseconds, text and datetimes, without a zone in UTC."""
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    clock = ManualClock("2026-01-01")
    assert clock() == clock.now_ms == moment.timestamp() * 1000
    assert clock.now == moment
    assert clock.set(datetime(2026, 1, 2)) - clock.set(moment) == 86_400_000  # noqa: DTZ001
    assert clock.advance(0.5) == clock.set(moment + timedelta(milliseconds=500))
    assert clock.advance(-0.5) == clock.set(moment)
    assert repr(clock) == "<ManualClock 2026-01-01T00:00:00+00:00>"
    with pytest.raises(ValueError, match="A time must be like"):
        clock.set("tomorrow")
    assert clock.now == moment


def test_a_log_for_tests_needs_no_pytest(tmp_path):
    """`open_log` serves unittest as well."""
    with open_log(tmp_path) as log:
        assert log.producer().send("orders", b"1").result().offset == 0


@pytest.mark.tier("test")
def test_the_fixtures_are_there_without_an_import(pytester):
    """The wheel has an entry point for pytest; starting pytest does not load pyarrow."""
    pytester.makepyfile(
        """
        import sys

        def test_nothing_heavy_is_loaded():
            assert "pyarrow" not in sys.modules

        def test_the_log(embedlog_log, kafka_bootstrap, records_of):
            embedlog_log.producer().send("orders", b"1")
            assert len(records_of("orders")) == 1
            assert kafka_bootstrap == f"embedlog://{embedlog_log.path}"
        """
    )
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)


@pytest.mark.tier("all")
def test_a_log_may_last_for_a_session(pytester):
    """Fixtures of a session may use it, and every fixture is about the same log."""
    pytester.makeini("[pytest]\nembedlog_scope = session")
    pytester.makepyfile(
        """
        import pytest
        from embedlog.errors import StorageError

        @pytest.fixture(scope="session")
        def producer(kafka_bootstrap, embedlog_log):
            return embedlog_log.producer()

        def test_a_record(producer, records_of, embedlog_clock):
            embedlog_clock.set(1_000)
            producer.send("orders", b"1")
            assert [record.timestamp for record in records_of("orders")] == [1_000]

        def test_another_one(producer, records_of, embedlog_faults):
            embedlog_faults.fail_next_append()
            with pytest.raises(StorageError):
                producer.send("orders", b"2").result()
            assert len(records_of("orders")) == 1
        """
    )
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)


@pytest.mark.tier("all")
def test_the_address_is_that_of_the_log_in_any_directory(pytester):
    """A `#` or a `%` in it would make it the address of another log."""
    pytester.makepyfile(
        """
        from embedlog.kafka import KafkaProducer

        def test_a_record_arrives(kafka_bootstrap, records_of):
            with KafkaProducer(bootstrap_servers=kafka_bootstrap) as producer:
                producer.send("orders", b"1")
            assert len(records_of("orders")) == 1
        """
    )
    directory = pytester.path / "build #2, 50%25?"
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", "--basetemp", directory)
    result.assert_outcomes(passed=1)


@pytest.mark.tier("all")
def test_records_of_refuses_another_address_than_that_of_its_log(pytester):
    """A suite that keeps its own `kafka_bootstrap` would see an empty topic."""
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def kafka_bootstrap():
            return "localhost:9092"

        def test_no_order_is_rejected(kafka_bootstrap, records_of):
            assert records_of("rejected-orders") == []
        """
    )
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*kafka_bootstrap is 'localhost:9092', but records_of reads *"])


@pytest.mark.tier("test")
def test_the_page_about_testing_is_right(pytester):
    """Its tests pass, in a suite that imports nothing else."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    tests = [block for block in blocks if "KafkaContainer" not in block]
    assert len(tests) >= 4
    pytester.makepyfile("\n".join(tests))
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=4)


@pytest.mark.tier("all")
def test_the_example_passes_its_tests(pytester):
    """A service that uses kafka-python runs unchanged, on a log."""
    for path in (EXAMPLES / "invoices").glob("*.py"):
        shutil.copy(path, pytester.path)
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=7)
