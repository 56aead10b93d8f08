"""A record that is not written is reported: to its future, to the log of the program, to flush."""

import errno
import gc
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress

import pytest
from support import forks
from support.faulty_files import FaultyFiles
from support.patience import patient
from support.producer_calls import totals
from support.roots import open_root, values

import embedlog
from embedlog.config import TopicConfig
from embedlog.errors import (
    BufferExhaustedError,
    ClosedError,
    DeliveryFailedError,
    LockTimeoutError,
    LogDeletedError,
    StorageError,
    TimeoutError,  # noqa: A004 - it is one
)
from embedlog.files.files import LINK_CHECK_SECONDS
from embedlog.partitioner import partition_for_key
from embedlog.producer import Producer, batcher, partition_writer

LOGGER = "embedlog.producer"
EXPIRING = {"delivery_timeout_ms": 60, "request_timeout_ms": 10, "retry_backoff_ms": 5}


@pytest.fixture
def root(tmp_path):
    """A root with faulty files, and topics of one and of two partitions."""
    root = open_root(tmp_path / "log", files=FaultyFiles)
    root.create_topic("one", 1, TopicConfig())
    root.create_topic("two", 2, TopicConfig())
    root.create_topic("compacted", 1, TopicConfig.parse({"cleanup.policy": "compact"}))
    yield root
    if not root.closed:
        root.context.files.heal()
        root.close()


@pytest.fixture
def producer(root):
    # No record is written before a flush.
    with Producer(root, linger_ms=60_000, delivery_timeout_ms=120_000) as producer:
        yield producer


@pytest.fixture
def warnings(caplog):
    """Return the warnings of the producer so far."""
    caplog.set_level(logging.INFO, LOGGER)
    return lambda level=logging.WARNING: [
        record.getMessage() for record in caplog.records if record.levelno == level
    ]


def break_writes(root):
    """Let every write fail for good."""
    root.context.files.fail_at(0, errno.EIO, forever=True, only={"write"})


def fail(root, producer, count=1):
    """Send records that fail for good; return their futures."""
    futures = [producer.send("one", b"%d" % row) for row in range(count)]
    break_writes(root)
    producer.flush()
    root.context.files.heal()
    return futures


# The log of the program


def test_failed_records_that_no_caller_waits_for_are_logged_at_once(root, producer, warnings):
    """One warning per failed batch, with topic, partition, number and reason."""
    fail(root, producer, count=3)

    (line,) = warnings()
    assert "3 records for one-0 failed" in line and os.strerror(errno.EIO) in line
    assert (
        totals(producer)["record-error-total"]
        == totals(producer)["record-unretrieved-error-total"]
        == 3
    )


def test_the_background_thread_logs_what_it_could_not_write(root, warnings):
    """A program that only sends learns of a failure while it runs."""
    with Producer(root) as producer:
        break_writes(root)
        producer.send("one", b"v")
        deadline = time.monotonic() + patient(5)
        while not warnings() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert len(warnings()) == 1
        root.context.files.heal()


def only_record(root, producer):
    """Fail a record by the fast path, which must know the sequence number."""
    producer.send("one", b"written").result()
    break_writes(root)
    producer.send("one", b"v")
    producer.flush()


def several_records(root, producer):
    for _ in range(3):
        producer.send("one", b"v")
    break_writes(root)
    producer.flush()


def other_record(root, producer):
    """Look at one of two records that fail together."""
    futures = [producer.send("one", b"v"), producer.send("one", b"v")]
    break_writes(root)
    producer.flush()
    with suppress(StorageError):
        futures.pop().result()
    futures.clear()


def callback(root, producer):
    """Have a callback fail, which its program keeps for a while."""

    def broken(error):
        kept = []
        try:
            raise ZeroDivisionError("a bug")
        except ZeroDivisionError as bug:
            kept.append(bug)

    producer.send("one", b"v").add_errback(broken)
    several_records(root, producer)


def written_batch(root, producer):
    break_writes(root)
    producer.send_batch("two", [b"1", b"2"], partition=0)


def closed(root, producer):
    producer.send("one", b"v")
    break_writes(root)
    producer.close()


FAILURES = [only_record, several_records, other_record, callback, written_batch, closed]


@pytest.mark.parametrize("fails", FAILURES)
def test_a_failure_is_logged_at_once_though_a_frame_of_its_write_is_kept(
    root, producer, warnings, monkeypatch, fails
):
    """A cycle in a program or a library keeps frames, with their callers', until a collection."""
    write = root.context.files._pwritev

    def keep_frames(*arguments):
        kept = []
        try:
            raise LookupError
        except LookupError as error:
            kept.append(error)
        return write(*arguments)

    monkeypatch.setattr(root.context.files, "_pwritev", keep_frames)
    gc.disable()
    try:
        fails(root, producer)
        assert len(warnings()) == 1
    finally:
        gc.enable()


def raises(future):
    with pytest.raises(StorageError):
        future.result()


LOOKS = {
    "result": raises,
    "exception": lambda future: future.exception,
    "failed": lambda future: future.failed(),
    "succeeded": lambda future: future.succeeded(),
    "retriable": lambda future: future.retriable(),
    "add_errback": lambda future: future.add_errback(lambda error: None),
    "add_both": lambda future: future.add_both(lambda outcome: None),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_failure_that_a_caller_looks_at_is_not_logged(root, producer, warnings, look):
    """Whoever got the error, or is called with it, has been told."""
    (future,) = fail(root, producer)
    LOOKS[look](future)
    del future

    assert warnings() == []
    assert totals(producer)["record-unretrieved-error-total"] == 0


@pytest.mark.parametrize("add", ["add_errback", "add_both"])
def test_a_failure_that_a_callback_gets_is_not_logged(root, producer, warnings, add):
    """The callback was added before the record failed, and the future was dropped."""
    errors = []
    getattr(producer.send("one", b"v"), add)(errors.append)
    break_writes(root)
    producer.flush()
    root.context.files.heal()

    assert [type(error) for error in errors] == [StorageError]
    assert warnings() == []


@pytest.mark.parametrize("glance", ["done", "value", "add_callback", "repr"])
def test_a_look_that_shows_no_error_does_not_count(root, producer, warnings, glance):
    """A record is done when it failed, too, and a callback for successes is not called then."""
    (future,) = fail(root, producer)
    if glance == "add_callback":
        future.add_callback(print)
    elif glance == "repr":
        repr(future)
    else:
        assert future.done() and future.value is None
    assert warnings() == []
    del future

    assert len(warnings()) == 1


def test_records_whose_futures_were_looked_at_do_not_count(root, producer, warnings):
    """The warning comes with the last future of the batch, and counts the other records."""
    futures = fail(root, producer, count=5)
    assert futures[1].failed() and futures[3].failed() and futures[3].failed()
    del futures

    (line,) = warnings()
    assert "3 records for one-0" in line
    assert totals(producer)["record-unretrieved-error-total"] == 3


def test_each_failed_batch_is_a_line_and_written_ones_are_none(root, producer, warnings):
    """Records of another partition that were written are not counted as failed."""
    for partition in range(2):
        producer.send("two", b"v", partition=partition).result()
    futures = [producer.send("two", b"v", key=b"%d" % row) for row in range(20)]
    root.context.files.fail_at(1, errno.EIO, forever=True, only={"write"})
    producer.flush()
    root.context.files.heal()
    written = sum(future.value is not None for future in futures)
    futures.clear()

    (line,) = warnings()
    assert 0 < written < 20 and f"{20 - written} records for two-" in line


def test_rows_are_counted_where_they_were_written_to(root, producer, warnings):
    """A look at a record marks it in the batch of its partition, whatever the order there."""
    futures = [producer.send("two", b"v", key=b"%d" % row) for row in range(20)]
    break_writes(root)
    producer.flush()
    root.context.files.heal()
    unseen = Counter(partition_for_key(b"%d" % row, 2) for row in range(1, 20, 2))
    assert all(future.failed() for future in futures[::2])
    futures.clear()

    expected = {f"{count} records for two-{partition}" for partition, count in unseen.items()}
    assert {line.partition(" failed")[0] for line in warnings()} == expected


def test_a_failed_send_batch_is_logged_once(root, producer, warnings):
    """Its one future stands for all records."""
    break_writes(root)
    producer.send_batch("one", [b"1", b"2"])
    assert ["2 records for one-0" in line for line in warnings()] == [True]
    future = producer.send_batch("one", [b"3"])
    raises(future)
    del future
    assert len(warnings()) == 1


@pytest.mark.parametrize("topic", ["one", "compacted"])
def test_a_refused_record_that_no_caller_looks_at_is_logged(root, warnings, topic):
    """G7, A6: too large, or without a key in a compacted topic."""
    with Producer(root, max_request_size=1000) as producer:
        future = producer.send(topic, bytes(2000), key=b"k" if topic == "one" else None)
        assert warnings() == []
        del future
        (line,) = warnings()
        assert f"1 record for {topic} failed" in line
        assert producer.send(topic, bytes(2000), key=b"k").failed()
        assert len(warnings()) == 1


def test_acks_0_logs_a_failure_once(root, warnings):
    """No caller can look at it."""
    with Producer(root, acks=0, linger_ms=60_000, delivery_timeout_ms=120_000) as producer:
        future = producer.send("one", b"v")
        break_writes(root)
        producer.flush()
        root.context.files.heal()
        assert future.succeeded()
    assert len(warnings()) == 1


def test_a_bug_is_logged_with_its_traceback(root, producer, monkeypatch, caplog):
    """An error that is not embedlog's own would otherwise say too little."""

    def broken(*_, **__):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(type(root.partition("one", 0)), "append", broken)
    producer.send("one", b"v")
    producer.flush()
    monkeypatch.undo()

    (record,) = [record for record in caplog.records if record.name == LOGGER]
    assert record.exc_info[0] is ZeroDivisionError


def test_a_handler_may_send_the_warning_with_the_same_producer(root, producer):
    """Logging happens without a lock that a send needs."""

    class Sending(logging.Handler):
        def emit(self, record):
            root.context.files.heal()
            producer.send("two", record.getMessage().encode(), partition=0)

    handler = Sending()
    logging.getLogger(LOGGER).addHandler(handler)
    try:
        thread = threading.Thread(target=fail, args=(root, producer), daemon=True)
        thread.start()
        thread.join(patient(10))
        assert not thread.is_alive()
    finally:
        logging.getLogger(LOGGER).removeHandler(handler)
    producer.flush()
    assert b"1 record for one-0" in values(root.partition("two", 0))[0]


def test_a_failure_is_logged_at_the_end_of_the_process(tmp_path):
    """The program still has the future, and never looks."""
    program = f"""
import sys; sys.path[:0] = {sys.path!r}
import errno
from support.faulty_files import FaultyFiles
from support.roots import open_root
from embedlog.producer import Producer
root = open_root({str(tmp_path / "log")!r}, files=FaultyFiles)
producer = Producer(root)
producer.send("one", b"v").result()
root.context.files.fail_at(0, errno.EIO, forever=True, only={{"write"}})
failed, unsent = producer.send("one", b"v"), None
producer.flush()
unsent = producer.send("one", b"v")
refused = producer.send("one", bytes(2 << 20))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    lines = [line for line in done.stderr.splitlines() if "no caller looked" in line]
    assert done.returncode == 0 and len(lines) == 3, done.stderr


def test_a_forked_child_does_not_log_the_failures_of_its_parent(root, producer, warnings):
    """The parent has the same futures, and logs them."""
    futures = fail(root, producer)

    def child():
        futures.clear()
        gc.collect()
        return warnings()

    assert forks.call(child) == []
    assert warnings() == []
    futures.clear()
    assert len(warnings()) == 1


# flush and close


def test_flush_raises_what_failed_if_it_is_asked_to(root, producer, warnings):
    """Once, with the number of records by topic and all reasons; then it counts as looked at."""
    futures = [producer.send(topic, b"v", partition=0) for topic in ("one", "two", "one")]
    break_writes(root)
    with pytest.raises(DeliveryFailedError) as caught:
        producer.flush(raise_errors=True)
    root.context.files.heal()
    producer.flush(raise_errors=True)

    error = caught.value
    assert (error.count, error.topics) == (3, {"one": 2, "two": 1})
    assert [type(reason) for reason in error.errors] == [StorageError, StorageError]
    assert error.__cause__ is error.errors[0]
    assert "3 records failed (2 of one, 1 of two)" in str(error)
    assert pickle.loads(pickle.dumps(error)).topics == error.topics
    assert all(future.failed() for future in futures)
    del futures
    assert warnings() == []


def test_flush_raises_what_failed_before_and_was_logged(root, producer, warnings):
    """A failure between two flushes is not lost; one that a caller looked at is not raised."""
    assert all(future.failed() for future in fail(root, producer))
    producer.flush(raise_errors=True)
    fail(root, producer, count=2)
    assert len(warnings()) == 1
    with pytest.raises(DeliveryFailedError, match="2 records failed"):
        producer.flush(raise_errors=True)
    producer.flush(raise_errors=True)


def test_flush_that_does_not_finish_loses_no_failure(root, warnings):
    """After its TimeoutError the failures are logged, and the next call raises them."""
    with Producer(root, retry_backoff_ms=5, request_timeout_ms=20) as producer:
        log = root.partition("two", 0)
        log.tail()
        producer.send("one", b"v")
        producer.send("two", b"v", partition=0)
        break_writes(root)
        log.acquire()
        try:
            with pytest.raises(TimeoutError):
                producer.flush(0.1, raise_errors=True)
        finally:
            log.release()
        assert sum("1 record for one-0" in line for line in warnings()) == 1
        root.context.files.heal()
        with pytest.raises(DeliveryFailedError, match="1 of one"):
            producer.flush(raise_errors=True)


def test_close_raises_what_failed_if_it_is_asked_to(root, warnings):
    """Also the records that it did not write; the producer is closed all the same."""
    producer = Producer(root, linger_ms=60_000, delivery_timeout_ms=120_000)
    future = producer.send("one", b"v")
    with pytest.raises(DeliveryFailedError) as caught:
        producer.close(0, raise_errors=True)
    assert type(caught.value.__cause__) is ClosedError and future.failed()
    producer.close(raise_errors=True)
    with pytest.raises(ClosedError):
        producer.send("one", b"v")
    assert warnings() == []


# Causes


def exception_of(future):
    """Wait until a future is done; return its exception."""
    while not future.done():
        try:
            future.result(0.2)
        except TimeoutError:
            pass
    return future.exception


def test_an_expired_record_fails_with_what_held_it_up(root):
    """G11: the error of the last attempt, with the time and the number of attempts."""
    with Producer(root, **EXPIRING) as producer:
        log = root.partition("one", 0)
        log.tail()
        with log.locked():
            error = exception_of(producer.send("one", b"lost"))
    assert type(error) is LockTimeoutError
    assert re.search(r" attempts? in \d+\.\d+ s \(delivery_timeout_ms 60\)", str(error))
    assert "[one-0, " in str(error)


def test_a_record_that_could_not_be_encoded_in_time_fails_with_the_cause(root):
    """G11: the catalogue was locked, so it was never in a batch."""

    def held(topic):
        raise LockTimeoutError("The catalogue is held", path="locks/state")

    with Producer(root, **EXPIRING) as producer:
        producer.send("one", b"written").result()
        # So that the next drain looks at the catalogue.
        root.create_topic("other", 1, TopicConfig())
        ensure_topic, root.ensure_topic = root.ensure_topic, held
        error = exception_of(producer.send("one", b"lost"))
        root.ensure_topic = ensure_topic
    assert type(error) is LockTimeoutError
    assert "The catalogue is held; the record was not written after" in str(error)
    assert "(delivery_timeout_ms 60)" in str(error)


# Waiting


def test_retries_that_take_long_are_logged_once(root, warnings, monkeypatch):
    """A warning with the reason while they go on, and a line when appends succeed again."""
    monkeypatch.setattr(partition_writer, "LONG_WAIT", 0.05)
    with Producer(root, retry_backoff_ms=5, request_timeout_ms=10) as producer:
        log = root.partition("one", 0)
        log.tail()
        with log.locked():
            future = producer.send("one", b"v")
            deadline = time.monotonic() + patient(5)
            while not warnings() and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(0.1)
        future.result(patient(5))
        future = producer.send("one", b"v").result()
    (line,) = warnings()
    assert "Appends to one-0 have failed for" in line and "delivery_timeout_ms 120000" in line
    assert "Another thread holds the partition" in line
    (line,) = warnings(logging.INFO)
    assert "Appends to one-0 succeed again" in line


def test_records_that_cannot_be_encoded_for_long_are_logged_once(root, warnings, monkeypatch):
    """Such as while the catalogue is locked: they are in no batch that an append could retry."""
    monkeypatch.setattr(batcher, "LONG_WAIT", 0.05)

    def held(topic):
        raise LockTimeoutError("The catalogue is held", path="locks/state")

    # It lingers until the catalogue is held, however slow the machine is.
    with Producer(root, retry_backoff_ms=5, linger_ms=int(patient(100))) as producer:
        future = producer.send("one", b"v")
        root.create_topic("other", 1, TopicConfig())
        ensure_topic, root.ensure_topic = root.ensure_topic, held
        deadline = time.monotonic() + patient(5)
        while not warnings() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        root.ensure_topic = ensure_topic
        future.result(patient(5))
    (line,) = warnings()
    assert "Records for one have waited" in line and "The catalogue is held" in line


def test_retries_that_are_over_soon_are_not_logged(root, warnings):
    """A partition that is busy for a moment is nothing to report."""
    with Producer(root, retry_backoff_ms=5, request_timeout_ms=10) as producer:
        log = root.partition("one", 0)
        log.tail()
        with log.locked():
            future = producer.send("one", b"v")
            time.sleep(0.05)
        future.result(patient(5))
        assert totals(producer)["record-retry-total"] > 0
    assert warnings() == warnings(logging.INFO) == []


@pytest.mark.tier("test")
@pytest.mark.parametrize("records", [1, 2])
def test_an_append_that_waits_for_the_disk_is_logged_once_a_minute(
    tmp_path, warnings, monkeypatch, records
):
    """However often appends are fast in between; the only line about the slow disk."""
    pause = 0.0

    class SlowFiles(FaultyFiles):
        def sync(self, fd):
            time.sleep(pause)

    monkeypatch.setattr(partition_writer, "LONG_WAIT", 0.2)
    root = open_root(tmp_path / "log", files=SlowFiles, durability="fsync")
    with Producer(root, linger_ms=60_000, delivery_timeout_ms=120_000) as producer:
        producer.send("one", b"v").result()
        for pause in (0.3, 0.0, 0.3):  # noqa: B007 - `sync` reads it
            for _ in range(records):
                producer.send("one", b"v")
            producer.flush()
        pause = 0.0
    root.close()
    (line,) = warnings()
    assert "An append to one-0 took" in line


@pytest.mark.parametrize("way", ["send", "send_batch"])
def test_a_handler_may_wait_for_what_it_sends_while_appends_are_retried(root, monkeypatch, way):
    """The warning is logged without a lock, and not only after the retries of a large call."""
    monkeypatch.setattr(partition_writer, "LONG_WAIT", 0.05)
    free, sent = threading.Event(), []

    class Sending(logging.Handler):
        def emit(self, record):
            free.set()
            sent.append(producer.send("one", record.getMessage().encode()).result())

    handler = Sending(logging.WARNING)
    with Producer(root, retry_backoff_ms=5, request_timeout_ms=10, batch_size=1) as producer:
        log = root.partition("one", 0)
        log.tail()
        logging.getLogger(LOGGER).addHandler(handler)
        arguments = ("one", b"v") if way == "send" else ("one", [b"v"] * 20)
        write = threading.Thread(target=getattr(producer, way), args=arguments, daemon=True)
        try:
            with log.locked():
                write.start()
                assert free.wait(patient(10))
            write.join(patient(10))
            producer.flush(patient(10))
        finally:
            logging.getLogger(LOGGER).removeHandler(handler)
    assert len(sent) == 1


@pytest.mark.tier("test")
def test_a_send_that_waits_for_memory_is_logged_once(root, warnings, monkeypatch):
    """G8: one warning a minute for all threads that wait."""
    monkeypatch.setattr(batcher, "LONG_WAIT", 0.05)
    config = {"buffer_memory": 4000, "max_block_ms": 200, "request_timeout_ms": 20}
    with Producer(root, **config) as producer:
        log = root.partition("one", 0)
        log.tail()
        with log.locked():
            for _ in range(2):
                with pytest.raises(BufferExhaustedError):
                    for _ in range(100):
                        producer.send("one", bytes(100))
        (line,) = [line for line in warnings() if "buffer_memory" in line]
        assert "send to one has waited" in line and "max_block_ms 200" in line
        producer.flush(patient(5))


# A log that is deleted


def delete_contents(path):
    shutil.rmtree(path)
    path.mkdir()


def delete_and_make_again(path):
    shutil.rmtree(path)
    embedlog.open(path).close()


def delete_topics(path):
    shutil.rmtree(path / "topics")
    # These few files may be deleted faster than appends look again.
    time.sleep(LINK_CHECK_SECONDS)


DELETIONS = {
    "the root": shutil.rmtree,
    "its contents": delete_contents,
    "and another log is there": delete_and_make_again,
    "the topics": delete_topics,
}


@pytest.mark.parametrize("mode", ["rw", "r"])
def test_monitoring_a_deleted_log_fails(tmp_path, mode):
    """A dashboard or an exporter would show the numbers of that moment for ever."""
    with embedlog.open(tmp_path / "log", maintenance=False) as writer:
        writer.create_topic("one", 1)
        writer.groups["g"].reset_offsets("earliest", topics="one", dry_run=False)
    log = embedlog.open(tmp_path / "log", mode=mode, maintenance=False)
    group = log.groups["g"]
    assert group.describe().lag == 0
    delete_and_make_again(tmp_path / "log")
    time.sleep(LINK_CHECK_SECONDS)

    for ask in (log.metrics, group.describe, group.lag):
        with pytest.raises(LogDeletedError):
            ask()
    assert "g" in repr(group) and "g" in group._repr_html_()
    with suppress(LogDeletedError):
        log.close()


@pytest.mark.parametrize("durability", ["os", "fsync"])
@pytest.mark.parametrize("deletion", DELETIONS)
def test_an_append_after_the_log_was_deleted_fails(tmp_path, warnings, deletion, durability):
    """The very next one, instead of being acknowledged and lost when the file is closed."""
    log = embedlog.open(tmp_path / "log", durability=durability, maintenance=False)
    log.create_topic("one", 1)
    producer = log.producer()
    producer.send("one", b"1").result()
    DELETIONS[deletion](tmp_path / "log")

    for _ in range(3):
        with pytest.raises(LogDeletedError, match="deleted while it was open"):
            producer.send("one", b"2").result()
    for _ in range(3):
        with pytest.raises(LogDeletedError):
            producer.send_batch("one", [b"2", b"3"]).result()
    producer.send("one", b"4")
    with pytest.raises(DeliveryFailedError) as caught:
        producer.close(raise_errors=True)
    assert type(caught.value.__cause__) is LogDeletedError
    with suppress(StorageError):
        log.close()


def test_polls_and_commits_after_the_log_was_deleted_fail(tmp_path):
    """A consumer would otherwise wait for ever for records of a log that does not exist."""
    log = embedlog.open(tmp_path / "log", maintenance=False)
    log.create_topic("one", 1)
    log.producer().send("one", b"1").result()
    tail, member = (log.consumer("one", group_id=name) for name in (None, "g"))
    assert not tail.poll(0) and not member.poll(0)
    shutil.rmtree(tmp_path / "log")

    for poll in (tail.poll, member.poll):
        with pytest.raises(LogDeletedError):
            poll(patient(5) * 1000)
    with pytest.raises(LogDeletedError):
        member.commit()
    for closed in (member, log):
        with pytest.raises(LogDeletedError):
            closed.close()


def test_a_topic_that_is_deleted_is_not_taken_for_a_deleted_log(root, tmp_path):
    """Its files are deleted, too; `send` makes the topic again."""
    with Producer(root) as producer:
        producer.send("one", b"1").result()
        other = open_root(tmp_path / "log")
        other.delete_topic("one")
        other.close()
        assert producer.send("one", b"2").result(patient(5)).offset == 0
