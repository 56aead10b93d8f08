"""Staged files are not part of the log, and are removed if they cannot be published any more."""

import os
from pathlib import Path

import pytest
from support import forks
from support.roots import encoded
from support.staged_files import directory, publish, stage

from embedlog.cli import main
from embedlog.config import TopicConfig
from embedlog.files import Files, process_id
from embedlog.files.process_id import ProcessId
from embedlog.publish import staging
from embedlog.publish.staging import MAX_AGE_MS, StagedFileWriter
from embedlog.root import startup
from embedlog.root.repair import repair_root


@pytest.fixture
def files(root):
    root.create_topic("t", 2, TopicConfig())
    return root.context.files


def staged_files(root):
    return [name for _, _, names in os.walk(f"{root.path}/staging") for name in names]


def test_staging_opens_no_database_and_takes_no_lock(tmp_path):
    """A task may be killed at any time while it stages, and blocks no other process."""
    path = tmp_path / "bare"
    path.mkdir()
    files = Files(path)
    writer = StagedFileWriter(files, directory(), "one")
    writer.add("t", 1, 0, encoded(b"value"))
    writer.finish()
    files.close_all()

    assert os.listdir(path) == ["staging"]


def test_a_stage_without_batches_makes_no_file(root, files):
    """Most tasks of a small write have no rows."""
    staged = StagedFileWriter(files, directory(), "empty").finish()

    assert staged == staging.StagedFile("", (), (), 0)
    assert not files.exists("staging")
    staging.remove(files, [staged])


def test_two_attempts_of_a_task_do_not_share_a_file(root, files):
    """An existing file is not written to."""
    first = StagedFileWriter(files, directory(), "same")
    first.add("t", 1, 0, encoded(b"1"))
    second = StagedFileWriter(files, directory(), "same")

    with pytest.raises(Exception, match="File exists"):
        second.add("t", 1, 0, encoded(b"2"))
    second.abandon()
    first.abandon()
    assert staged_files(root) == []


def test_what_was_staged_is_read_as_it_was_written(root, files):
    """Reading yields each batch, unchanged, with its partition."""
    staged = stage(root, t_0=[b"1", b"2" * 5000], t_1=[b"3"])

    batches = list(staging.read(files, staged))

    assert [(partition[2], batch.count) for partition, batch in batches] == [
        (0, 1),
        (0, 1),
        (1, 1),
    ]
    assert staged.records == 3
    _, batch = batches[1]
    expected = encoded(b"2" * 5000)
    assert b"".join(map(bytes, batch.stamp(7, 1))) == b"".join(map(bytes, expected.stamp(7, 1)))


def test_a_job_is_removed_with_what_its_lost_attempts_left(root, files):
    """The driver does not know the files of an attempt that was killed."""
    staged = stage(root, t_0=[b"1"])
    stage(root, t_0=[b"lost"])
    assert len(staged_files(root)) == 2

    staging.remove(files, [staged])

    assert staged_files(root) == []
    assert files.list("staging") == []


def test_the_stages_of_a_dead_owner_are_swept_up(root, files):
    """They are removed at once: no other process will publish them."""

    def stage_and_exit():
        stage(root, t_0=[b"1"])
        return str(process_id.process())

    owner = forks.run(stage_and_exit).value
    living = stage(root, t_0=[b"2"])

    swept = staging.sweep(files, MAX_AGE_MS)

    assert [path.split("/")[1] for path in swept] == [owner]
    assert files.exists(living.path)


def test_the_stages_of_an_owner_elsewhere_are_swept_up_late(root, files):
    """This machine cannot tell whether a process of another machine or boot is alive."""
    owner = ProcessId("another.0", 1, 1)
    path = staging.job_directory(str(owner), 1000, "job")
    writer = StagedFileWriter(files, path, "file")
    writer.add("t", 1, 0, encoded(b"1"))
    writer.finish()

    assert staging.sweep(files, 1000 + MAX_AGE_MS) == []
    assert staging.sweep(files, 1001 + MAX_AGE_MS) == [path]
    assert staged_files(root) == []


def test_what_a_living_owner_forgot_is_swept_up_at_last(root, files):
    """A driver may run for months."""
    staged = stage(root, t_0=[b"1"])

    assert staging.sweep(files, 7 * MAX_AGE_MS) == []
    assert staging.sweep(files, 7 * MAX_AGE_MS + 1) == [staged.path.rpartition("/")[0]]


def test_directories_without_a_valid_owner_are_swept_up(root, files):
    """Everything in the staging directory is removed some day."""
    staging.make_directories(files, "staging/what/ever")

    assert staging.sweep(files, 0) == ["staging/what/ever"]


def test_staged_files_are_no_strays(root, files):
    """`verify` and `repair` know the directory."""
    staged = stage(root, t_0=[b"1"])

    assert startup.strays(files, root.context.state) == []
    assert publish(root, [staged]).records == 1


def test_a_process_is_identified_by_more_than_its_pid():
    """A pid may be used again: boot and start time tell the processes apart."""
    process = process_id.process()

    assert process_id.parse(str(process)) == process
    assert process.here
    assert process.alive
    assert not process._replace(started=process.started - 1).alive
    assert not process._replace(boot="x").here
    assert process_id.parse("no-name") is None


def test_the_nearest_ancestor_of_a_name_is_found():
    """The Python processes of Spark identify their driver's JVM this way."""
    name = Path("/proc/self/comm").read_text().strip()

    assert forks.run(lambda: process_id.ancestor(name).pid == os.getpid()).value
    assert process_id.ancestor("no such program") is None


def test_repair_and_doctor_report_abandoned_staged_files(root, files, clock, capsys, monkeypatch):
    """They do not touch the files of a living owner."""
    clock.set(0)  # the time at which these jobs begin
    monkeypatch.setattr("time.time_ns", lambda: 0)
    living = stage(root, t_0=[b"1"])
    forks.run(lambda: stage(root, t_0=[b"2"]))

    (message,) = repair_root(root, dry_run=True)
    assert "it will not be published" in message
    main(["--root", root.path, "doctor"])
    assert "There are staged files of 1 job that" in capsys.readouterr().out
    assert repair_root(root, dry_run=False) == [message]

    assert staged_files(root) == [living.path.rpartition("/")[2]]
    assert repair_root(root, dry_run=False) == []
