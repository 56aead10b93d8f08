"""The output and the audit of the pipeline, and its command; without Spark."""

from __future__ import annotations

import json
import os
import signal
import threading
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.clock import START
from support.patience import patient

import embedlog
from embedlog.errors import CorruptionError, DataLossError, InvalidConfigError, SparkSetupError
from embedlog.partition.leases import leases
from embedlog.pipeline import __main__ as command
from embedlog.pipeline import audit, load, load_query, parquet_audit
from embedlog.pipeline.load_query import planned_end, stop_requests, unpublished_filter
from embedlog.pipeline.parquet_audit import NOT_AUDITED, AuditedTopic
from embedlog.pipeline.parquet_output import ParquetOutput
from embedlog.record import TopicPartition
from embedlog.spark.errors import to_embedlog_error
from embedlog.spark.stream_offset import StreamOffset

HOUR = 3_600_000
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture
def log(tmp_path):
    """A topic with one record per hour in two partitions: twenty and ten."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t", partitions=2)
        with log.producer() as producer:
            for partition, count in ((0, 20), (1, 10)):
                for hour in range(count):
                    at = START + hour * HOUR
                    producer.send("t", b"v", key=b"k", partition=partition, timestamp_ms=at)
        yield log


@pytest.fixture
def out(tmp_path):
    """The directory of the output."""
    return str(tmp_path / "out")


@pytest.fixture
def day(out):
    """The directory in which `write` puts the files of the topic."""
    return Path(out, "topic=t", "date=2023-11-14")


def write(directory, rows, name="a.parquet"):
    """Write a file of rows, pairs of partition and offset, at the hours that the log has."""
    times = [START + offset * HOUR for _, offset in rows]
    columns = {
        "partition": pa.array([partition for partition, _ in rows], pa.int32()),
        "offset": pa.array([offset for _, offset in rows], pa.int64()),
        "timestamp": pa.array(times, pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC")),
    }
    directory.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), directory / name)


def all_rows():
    return [(0, offset) for offset in range(20)] + [(1, offset) for offset in range(10)]


ENDS = {T0: 20, T1: 10}
DIFFERENCES = [
    (lambda rows: rows, []),
    (lambda rows: rows[1:], ["1 record of the log are in no file", "has 1 in the files, 2 in log"]),
    (lambda rows: rows + rows[:2], ["2 records are in the files again"]),
    (lambda rows: [*rows, (0, 20)], ["1 record in the files are past what was loaded"]),
    (lambda rows: [*rows, (2, 0)], ["1 record in the files are past what was loaded"]),
    (lambda rows: [], ["30 records of the log are in no file"]),
]


@pytest.mark.parametrize(("change", "expected"), DIFFERENCES)
def test_the_audit_compares_every_record(log, out, day, change, expected):
    """It finds lost, duplicate and unexpected records in any file."""
    rows = change(all_rows())
    write(day, rows[::2], "a.parquet")
    write(day, rows[1::2], "b.parquet")

    report = audit(log, out, ENDS)

    for message in expected:
        assert any(message in problem for problem in report.problems)
    assert bool(report.problems) == bool(expected)
    assert report.records == len(rows)


def test_the_audit_compares_the_hours(log, out, day):
    """It finds a wrong timestamp even if the offsets are right."""
    write(day, all_rows())
    table = parquet.read_table(day / "a.parquet", partitioning=None)
    moved = table["timestamp"].to_pylist()
    moved[0] = datetime(2020, 1, 1, tzinfo=UTC)
    table = table.set_column(2, "timestamp", pa.array(moved, pa.timestamp("us", "UTC")))
    parquet.write_table(table, day / "a.parquet")

    problems = audit(log, out, ENDS).problems

    assert problems[0] == "t: 2020-01-01 00:00 has 1 in the files, 0 in log"
    assert len(problems) == 2


def test_records_removed_from_the_log_are_not_compared(log, out, day):
    """Records removed by retention, compaction or with the topic are counted, not reported."""
    write(day, all_rows())
    log.delete_records({T0: 15})
    report = audit(log, out, ENDS)
    assert (report.problems, report.gone, report.records) == ([], 15, 30)

    log.alter_topic("t", {"cleanup.policy": "compact"})
    log.housekeeping.compact("t", force=True)
    report = audit(log, out, ENDS)
    assert report.problems == []
    assert report.gone > 15

    log.delete_topic("t")
    assert (audit(log, out, ENDS).gone, audit(log, out, ENDS).problems) == (30, [])


@pytest.fixture
def compared(log, out, day):
    """What an audit without problems compared: two files with all of the log."""
    write(day, all_rows()[:9], "a.parquet")
    write(day, all_rows()[9:], "b.parquet")
    report = audit(log, out, ENDS)
    assert report.problems == []
    return {
        name: AuditedTopic.from_json(json.loads(json.dumps(audited.to_json())))
        for name, audited in report.seen.items()
    }


def send_more(log, count=5):
    """Send more records to partition 1, one per hour; return the new ends."""
    with log.producer() as producer:
        for hour in range(10, 10 + count):
            at = START + hour * HOUR
            producer.send("t", b"v", key=b"k", partition=1, timestamp_ms=at)
    return {T0: 20, T1: 10 + count}


def test_what_was_compared_is_not_read_again(log, out, day, compared):
    """Overwriting the old files with zeros goes unnoticed; the report covers all records."""
    for path in day.iterdir():
        status = path.stat()
        path.write_bytes(bytes(status.st_size))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    ends = send_more(log)
    write(day, [(1, offset) for offset in range(10, 15)], "c.parquet")

    report = audit(log, out, ends, 5, compared)

    assert (report.problems, report.records, report.known, report.gone) == ([], 35, 30, 0)
    assert command.table(report)[-1].endswith(
        "in files 35, 30 of them compared before: files and log agree"
    )
    with pytest.raises(pa.ArrowInvalid):
        audit(log, out, ends)


CHANGED = [
    (lambda day: (day / "a.parquet").unlink(), "9 records of the log are in no file"),
    (lambda day: write(day, all_rows()[:10], "a.parquet"), "1 record are in the files again"),
    (lambda day: write(day, all_rows()[:8], "a.parquet"), "1 record of the log are in no file"),
    (lambda day: write(day, [(0, 3)], "d.parquet"), "1 record are in the files again"),
    (lambda day: write(day, [(0, 20)], "d.parquet"), "1 record in the files are past"),
    (lambda day: write(day, [(7, 0)], "d.parquet"), "1 record in the files are past"),
    (lambda day: write(day, [(1, 11)], "d.parquet"), "1 record are in the files again"),
    (lambda day: write(day, [(1, 12), (1, 13)], "c.parquet"), "3 records of the log are in no"),
    (lambda day: (day / "c.parquet").unlink(), "5 records of the log are in no file"),
]


@pytest.mark.parametrize(("change", "message"), CHANGED)
def test_changes_are_found_as_if_everything_were_read(log, out, day, compared, change, message):
    """An incremental audit finds the same changes of old and new files as a full audit."""
    ends = send_more(log)
    write(day, [(1, offset) for offset in range(10, 15)], "c.parquet")

    change(day)
    report = audit(log, out, ends, 0, compared)

    assert any(message in problem for problem in report.problems)
    assert report.problems == audit(log, out, ends).problems


def test_a_changed_log_is_compared_again(log, out, compared):
    """A truncation starts a leader epoch, and a topic that is created again has another id."""
    assert audit(log, out, ENDS, 0, compared).known == 30
    log.root.partition("t", 0).truncate_to(18)
    report = audit(log, out, ENDS, 0, compared)
    assert report.known == 0
    assert report.problems == audit(log, out, ENDS).problems != []
    log.delete_topic("t")
    assert (audit(log, out, ENDS, 0, compared).known, audit(log, out, ENDS).gone) == (0, 30)


def test_a_lease_keeps_the_log_while_it_is_compared(log, out, compared, monkeypatch):
    """The lease begins at the first offset that the audit reads, and is released afterwards."""
    leased, read_files = [], parquet_audit._read_files

    def read_and_note_leases(paths):
        leased.append([lease.offsets for lease in leases(log.root)])
        return read_files(paths)

    monkeypatch.setattr(parquet_audit, "_read_files", read_and_note_leases)
    log.delete_records({T0: 7})
    audit(log, out, ENDS)
    audit(log, out, send_more(log, 2), 0, compared)

    # The second audit misses two records in the files, and reads everything to report them.
    assert leased == [[{T0: 7, T1: 0}], [{T1: 10}], [{T0: 7, T1: 0}]]
    assert leases(log.root) == []
    with embedlog.open(log.path, mode="r") as reader:
        assert audit(reader, out, ENDS).problems == []


def test_the_output_keeps_what_was_compared(tmp_path, out, compared):
    """If the file is unreadable or of another version, everything is read."""
    with ParquetOutput(out) as output:
        assert output.read_compared() == {}
        output.write_compared(compared)
        assert output.read_compared() == compared
        for text in ("", "[]", '{"t": 3}', '{"t": {"form": 1}}'):
            (tmp_path / "out" / ".pipeline" / "compared").write_text(text)
            assert output.read_compared() == {}
        (tmp_path / "out" / ".pipeline" / "compared").write_text('{"t": {"form": 2}}')
        assert output.read_compared() == {"t": NOT_AUDITED}


def test_a_report_is_a_table_and_json(log, out, day):
    """The table has the last hours, the JSON all of them."""
    write(day, all_rows())
    report = audit(log, out, ENDS, loaded=30)

    lines = command.table(report)
    assert lines[0].split() == ["topic", "hour", "(UTC)", "in", "files", "in", "the", "log"]
    assert lines[1].split() == ["t", "2023-11-14", "22:00", "2", "2"]
    assert lines[-1] == "loaded 30, in files 30: files and log agree"
    value = json.loads(json.dumps(report.to_json()))
    assert value["hours"][0] == {"topic": "t", "hour": "2023-11-14 22:00", "records": 2, "log": 2}
    assert sum(hour["records"] for hour in value["hours"]) == value["records"] == 30


# The output


def stage(output, days=("2023-11-14",)):
    """Stage a micro-batch as Spark does, with a file for each day."""
    path = output.new_stage()
    for day in days:
        directory = os.path.join(path, "topic=t", f"date={day}")
        os.makedirs(directory)
        parquet.write_table(pa.table({"offset": [1, 2]}), os.path.join(directory, "part.parquet"))
        for name in ("_SUCCESS", ".part.parquet.crc"):
            (open(os.path.join(directory, name), "w")).close()
    return path


def published_files(out):
    return sorted(path.relative_to(out).as_posix() for path in out.glob("topic=*/date=*/*"))


def test_a_micro_batch_is_published_under_new_names(tmp_path):
    """The next process continues with the published offsets and the next number."""
    with ParquetOutput(str(tmp_path)) as output:
        output.publish(stage(output), StreamOffset({T0: 2}, {"t": 1}))
        output.publish(stage(output), StreamOffset({T0: 1, T1: 4}, {"t": 1}))
        assert output.rows == 4

    with ParquetOutput(str(tmp_path)) as output:
        assert output.published.ends == {T0: 2, T1: 4}
        assert (output.published.number, output.rows) == (2, 0)
        with pytest.raises(DataLossError, match="created again"):
            output.publish(stage(output), StreamOffset({T0: 9}, {"t": 2}))
    day = "topic=t/date=2023-11-14"
    assert published_files(tmp_path) == [
        f"{day}/00000000-00000.parquet",
        f"{day}/00000001-00000.parquet",
    ]


@pytest.mark.parametrize("step", ["write_file", "rename", "sync_directory"])
def test_a_process_that_dies_while_publishing_leaves_all_or_nothing(tmp_path, monkeypatch, step):
    """Nothing before the file `published` is replaced; after it, the next process finishes."""
    with ParquetOutput(str(tmp_path)) as output:
        path = stage(output, ("2023-11-14", "2023-11-15"))
        calls = []

        def die(*args):
            calls.append(args)
            raise KeyboardInterrupt

        rename = output._files.rename
        if step == "rename":
            # Of three renames, the file `published` and the first Parquet file's are done.
            def die(*args):
                calls.append(args)
                if len(calls) == 3:
                    raise KeyboardInterrupt
                rename(*args)

        monkeypatch.setattr(output._files, step, die)
        with pytest.raises(KeyboardInterrupt):
            output.publish(path, StreamOffset({T0: 2}))
    before = len(published_files(tmp_path))

    with ParquetOutput(str(tmp_path)) as output:
        assert output.published.number == (0 if step == "write_file" else 1)
        assert (before, len(published_files(tmp_path))) == {
            "write_file": (0, 0),
            "rename": (1, 2),
            # The directory of the file `published` is flushed first.
            "sync_directory": (0, 2),
        }[step]
        assert not os.path.exists(tmp_path / ".pipeline" / "staging")


def test_a_published_file_that_is_gone_is_an_error(tmp_path):
    """Only the user can have deleted it."""
    with ParquetOutput(str(tmp_path)) as output:
        output.publish(stage(output), StreamOffset({T0: 2}))
    (tmp_path / published_files(tmp_path)[0]).unlink()

    with pytest.raises(CorruptionError, match="gone"):
        ParquetOutput(str(tmp_path))


# Arguments, signals, and the command


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"follow": -1.0}, "must be a number of seconds"),
        ({"follow": float("nan")}, "must be a number of seconds"),
        ({"max_records_per_trigger": 0}, "at least 1"),
        ({"checkpoint": "s3://bucket/checkpoint"}, "not URLs"),
    ],
)
def test_invalid_arguments_are_errors_before_spark_starts(tmp_path, options, message):
    """Spark's own error would be about a trigger interval."""
    with pytest.raises(InvalidConfigError, match=message):
        load(tmp_path, tmp_path / "out", ["t"], **options)


def test_a_url_is_not_an_output(tmp_path):
    """As a path it would be a directory of this machine."""
    with pytest.raises(InvalidConfigError, match="not URLs"):
        load(tmp_path, "s3://bucket/flights", ["t"])


def test_a_stop_request_does_not_wait_for_spark_to_start(monkeypatch):
    """The session is stopped when it has started; without a request it is returned."""
    started, stopped, stop = threading.Event(), threading.Event(), threading.Event()
    session = SimpleNamespace(stop=stopped.set)
    monkeypatch.setattr(load_query, "_new_session", lambda: started.wait() and session)
    stop.set()
    assert load_query._start_session(stop) is None
    assert not stopped.is_set()
    started.set()
    assert stopped.wait(patient(10))

    assert load_query._start_session(threading.Event()) is session

    def fail():
        raise SparkSetupError("no Java")

    monkeypatch.setattr(load_query, "_new_session", fail)
    with pytest.raises(SparkSetupError):
        load_query._start_session(threading.Event())


def test_the_second_signal_does_not_wait():
    """The first Ctrl-C is a request, and SIGTERM too with follow; the handlers are restored."""
    before = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
    with stop_requests(True) as stop:
        assert not stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with stop_requests(False) as stop:
        assert signal.getsignal(signal.SIGTERM) == before[1]
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
    assert [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)] == before


def test_the_end_of_a_micro_batch_is_in_sparks_offset_log(tmp_path):
    """Spark writes the file before it runs a batch."""
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "3").write_text('v1\n{"batchWatermarkMs":0}\n{"t":{"0":7}}')

    assert planned_end(str(tmp_path), 3).offsets == {T0: 7}


def test_published_rows_are_filtered_out():
    """The filter is SQL with a condition for each partition."""
    assert unpublished_filter({}) == "true"
    assert unpublished_filter({T1: 2, T0: 7}).count(" and not (") == 1


def test_sparks_errors_become_embedlog_errors():
    """The last embedlog error in the text counts, otherwise the cause that Spark states."""
    data_loss = "org.x.Y: bad\n  at z\nembedlog.errors.DataLossError: records are gone [t-0]\n"
    assert type(to_embedlog_error(RuntimeError(data_loss))) is DataLossError
    disk = "x\nCaused by: java.io.IOException: No space left on device\n\tat java"
    assert str(to_embedlog_error(RuntimeError(disk))) == "Spark failed: No space left on device"
    assert str(to_embedlog_error(ValueError())) == "Spark failed: ValueError"


def test_the_command_reports_invalid_usage(tmp_path, out, capsys):
    """The error is one sentence, and comes before Spark starts."""
    options = ["--root", str(tmp_path / "log"), "--into", out]
    assert command.main(["--help"]) == 0
    assert "exactly" in capsys.readouterr().out
    for invalid in (["--max-records-per-trigger", "0"], ["--every", "-1"], ["--every", "x"]):
        assert command.main(["t", *options, *invalid]) == 2
        assert f", got {invalid[1]!r}" in capsys.readouterr().err
    assert command.main(options) == 2
    assert command.main([*options, "--pattern", "["]) == 2
    assert "'[' is not a regular expression" in capsys.readouterr().err
    assert command.main(["t", *options]) == 3
    message = capsys.readouterr().err
    assert message.startswith("embedlog.pipeline: There is no log")
    assert message.count("\n") == 1


def test_the_exit_code_says_whether_files_and_log_agree(log, out, day, capsys, monkeypatch):
    """It is 1, with a message on stderr, if the audit finds a problem."""
    write(day, all_rows()[1:])
    monkeypatch.setattr(command, "_load", lambda _: audit(log, out, ENDS))

    assert command.main(["t", "--root", log.path, "--into", "x"]) == 1
    output = capsys.readouterr()
    assert "embedlog.pipeline: t: 1 record of the log are in no file" in output.err
    assert output.out.endswith("they do not agree\n")
