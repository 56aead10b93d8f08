"""Queries of a log in several directories go on when one of them fails."""

import errno
import os
import shutil
from contextlib import suppress

import pytest
from support.damaged_copies import DAMAGES, Place
from support.failing_disks import FailingDisks
from support.jvm_tasks import consumer_rows, python_rows
from support.replicas import assignment, numbered, send, values
from support.roots import encoded
from support.tiers import sample

from embedlog.errors import CorruptBatchError, DataLossError, NotALogError
from embedlog.files import Files
from embedlog.segment import SegmentFile
from embedlog.spark.input_partitions import plan_batch
from embedlog.spark.options import SourceOptions
from embedlog.spark.spark_session import READER
from embedlog.splits import read_slice


@pytest.fixture(params=[pytest.param("jvm", marks=pytest.mark.xdist_group("spark")), "python"])
def read(request):
    """Return a function that reads input partitions, in the JVM or in Python."""
    return request.getfixturevalue("jvm").read if request.param == "jvm" else python_rows


@pytest.fixture
def log(replicated_log):
    """A log over three directories with a topic in two, of a sealed and an active segment."""
    replicated_log.create_topic("t", partitions=2, replicas=[(1, 2), (2, 1)])
    for prefix in (b"a", b"b"):
        for number in (0, 1):
            replicated_log.partition("t", number).append(
                [encoded(value) for value in numbered(prefix, 30)]
            )
        if prefix == b"a":
            replicated_log.partition("t", 0).roll()
    return replicated_log


def plan(log, **options):
    """Return the input partitions of a batch query."""
    return plan_batch(SourceOptions.parse({"path": log.path, "subscribe": "t", **options}))


def test_a_task_knows_the_directories_with_in_sync_replicas(log, directories):
    """That of the leader comes first."""
    paths = {number: str(directories.path(number)) for number in (1, 2)}
    slices = {part.partition: part for task in plan(log) for part in task.slices}
    assert [slices[number].directories for number in (0, 1)] == [
        (paths[1], paths[2]),
        (paths[2], paths[1]),
    ]
    directories.lose(log, 2)
    slices = {part.partition: part for task in plan(log) for part in task.slices}
    assert {part.directories for part in slices.values()} == {(paths[1],)}
    directories.put_back(2)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_query_that_is_planned_goes_on_without_a_directory(log, directories, read, lost):
    """No program has noticed yet that it is gone."""
    tasks = plan(log)
    expected = sorted(consumer_rows(log, "t"))
    directories.take(lost)
    assert sorted(read(tasks)) == expected
    directories.put_back(lost)


def test_a_task_goes_on_when_a_file_can_be_opened_but_not_read(log, directories, read):
    """Here it is a directory, whose read fails."""
    tasks = plan(log)
    expected = sorted(consumer_rows(log, "t"))
    files = sorted(directories.path(1).glob("topics/t-*/*/*.arrows"))
    for file in files:
        os.rename(file, f"{file}.kept")
        file.mkdir()
    try:
        assert sorted(read(tasks)) == expected
    finally:
        for file in files:
            file.rmdir()
            os.rename(f"{file}.kept", file)


@pytest.mark.parametrize("size", [0, 700])
def test_a_copy_that_is_being_made_again_is_not_read(log, directories, read, size):
    """It is shorter than what the task reads; the other one has everything."""
    tasks = plan(log)
    expected = sorted(consumer_rows(log, "t"))
    files = sorted(directories.path(1).glob("topics/t-*/*/*.arrows"))
    whole = {file: file.read_bytes() for file in files}
    for file in files:
        os.truncate(file, size)
    assert sorted(read(tasks)) == expected
    for file, data in whole.items():
        file.write_bytes(data)


def batches_of(file):
    """Return where the batches of a segment file are."""
    segment = SegmentFile(Files(file.parent, writable=False), file.name)
    with suppress(CorruptBatchError):  # the end mark
        for batch in segment.scan(segment.start, segment.size()):
            yield Place(str(file), batch.position, batch.head_size, batch.size)


@pytest.mark.parametrize("damage", sample(list(DAMAGES), 3))
@pytest.mark.parametrize("disk", [1, 2])
def test_a_task_goes_on_in_another_copy_of_what_is_damaged(log, directories, read, damage, disk):
    """H14: whichever of them leads."""
    tasks = plan(log)
    expected = sorted(consumer_rows(log, "t"))
    for file in sorted(directories.path(disk).glob("topics/t-*/*/*.arrows")):
        DAMAGES[damage](file, [*batches_of(file)][-1])
        if damage == "a deleted partition":
            break
    assert sorted(read(tasks)) == expected
    log.housekeeping.repair(dry_run=False)


@pytest.mark.parametrize("damage", ["a bit in a head", "a bit in a column"])
def test_a_task_reads_each_batch_where_it_is_whole(log, directories, read, damage):
    """H14: by turns one is damaged in one copy, the next one in the other copy."""
    tasks = plan(log)
    expected = sorted(consumer_rows(log, "t"))
    for disk in (1, 2):
        (file,) = directories.path(disk).glob("topics/t-*/1/*.arrows")
        for place in [*batches_of(file)][disk:20:2]:
            DAMAGES[damage](file, place)
    assert sorted(read(tasks)) == expected
    log.housekeeping.repair(dry_run=False)


def test_a_task_goes_on_where_a_read_failed(log, directories, monkeypatch):
    """Each record is read once, wherever that is."""
    tasks = plan(log)
    expected = sorted(consumer_rows(log, "t"))
    disks = FailingDisks()
    monkeypatch.setattr(read_slice, "Files", disks)
    failed = 0
    for after in range(100):
        disks.break_disk(str(directories.path(1)), errno.EIO, after=after)
        assert sorted(python_rows(tasks)) == expected
        if disks.broken[str(directories.path(1))].left:
            break
        failed += 1
    assert failed > 3


def test_an_error_says_what_is_wrong_with_the_leader(log, directories, read):
    """If no directory has the file, it is that of the first."""
    tasks = plan(log)
    for number in (1, 2):
        directories.take(number)
    with pytest.raises(NotALogError, match="disk1/log"):
        read([task for task in tasks if task.slices[0].partition == 0])
    for number in (1, 2):
        directories.put_back(number)
    log.partition("t", 0).truncate_to(0)
    log.partition("t", 1).truncate_to(0)
    with pytest.raises(DataLossError):
        read(tasks)


def test_what_only_the_leader_has_is_a_loss(log, directories, read):
    """The other copy was cut short before the leader was lost."""
    log.partition("t", 0).append([encoded(b"leader")])
    *_, file = sorted(directories.path(2).glob("topics/t-*/0/*.arrows"))
    os.truncate(file, [*batches_of(file)][-1].position)
    expected = consumer_rows(log, "t")[:60]
    tasks = [task for task in plan(log) if task.slices[0].partition == 0]
    directories.take(1)
    with pytest.raises(DataLossError, match="truncated"):
        read(tasks)
    assert read(tasks, fail_on_data_loss=False) == expected
    directories.put_back(1)


@pytest.mark.tier("all")
def test_a_stream_goes_on_while_directories_fail(spark_session, log, directories, tmp_path):
    """The leader of a partition is lost between two batches, and comes back."""
    spark_session.conf.set(READER, "jvm")
    stream = (
        spark_session.readStream.format("embedlog")
        .options(path=log.path, subscribe="t", startingOffsets="earliest")
        .load()
    )
    query = (
        stream.select("value")
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start(str(tmp_path / "out"))
    )
    try:
        query.processAllAvailable()
        leader = assignment(log, "t").leader
        directories.take(leader)
        send(log, "t", numbered(b"lost", 20))
        query.processAllAvailable()
        directories.put_back(leader)
        send(log, "t", numbered(b"back", 20))
        query.processAllAvailable()
    finally:
        query.stop()
    rows = spark_session.read.parquet(str(tmp_path / "out")).collect()
    assert sorted(bytes(row.value) for row in rows) == sorted(values(log, "t"))
    shutil.rmtree(tmp_path / "out")
