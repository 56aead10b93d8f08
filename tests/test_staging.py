"""Staged files: nobody's part of the log, and removed when nobody will publish them."""

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
    """So that whoever stages may be killed at any instant, and hold up nobody."""
    path = tmp_path / "bare"
    path.mkdir()
    files = Files(path)
    stage = StagedFileWriter(files, directory(), "one")
    stage.add("t", 1, 0, encoded(b"value"))
    stage.finish()
    files.close_all()

    assert os.listdir(path) == ["staging"]


def test_a_stage_without_batches_makes_no_file(root, files):
    """Most tasks of a small write have nothing to do."""
    staged = StagedFileWriter(files, directory(), "empty").finish()

    assert staged == staging.StagedFile("", (), (), 0)
    assert not files.exists("staging")
    staging.remove(files, [staged])


def test_two_attempts_of_a_task_do_not_meet(root, files):
    """A file that is there is not written again."""
    first = StagedFileWriter(files, directory(), "same")
    first.add("t", 1, 0, encoded(b"1"))
    second = StagedFileWriter(files, directory(), "same")

    with pytest.raises(Exception, match="File exists"):
        second.add("t", 1, 0, encoded(b"2"))
    second.abandon()
    first.abandon()
    assert staged_files(root) == []


def test_what_was_staged_is_read_as_it_was_written(root, files):
    """Each batch with where it goes; the bytes are those of the batch."""
    staged = stage(root, t_0=[b"1", b"2" * 5000], t_1=[b"3"])

    found = list(staging.read(files, staged))

    assert [(place[2], one.count) for place, one in found] == [(0, 1), (0, 1), (1, 1)]
    assert staged.records == 3
    wanted = encoded(b"2" * 5000)
    one = found[1][1]
    assert b"".join(map(bytes, one.stamp(7, 1))) == b"".join(map(bytes, wanted.stamp(7, 1)))


def test_a_job_is_removed_with_what_its_lost_attempts_left(root, files):
    """Nobody hears of an attempt that was killed."""
    staged = stage(root, t_0=[b"1"])
    stage(root, t_0=[b"lost"])
    assert len(staged_files(root)) == 2

    staging.remove(files, [staged])

    assert staged_files(root) == []
    assert files.list("staging") == []


def test_the_stages_of_a_dead_owner_are_swept_up(root, files):
    """At once: nobody will publish them."""

    def work():
        stage(root, t_0=[b"1"])
        return str(process_id.process())

    owner = forks.run(work).value
    living = stage(root, t_0=[b"2"])

    swept = staging.sweep(files, MAX_AGE_MS)

    assert [path.split("/")[1] for path in swept] == [owner]
    assert files.exists(living.path)


def test_the_stages_of_an_owner_elsewhere_are_swept_up_late(root, files):
    """Of another machine, or of another boot of this one: nobody here can tell."""
    owner = ProcessId("another.0", 1, 1)
    path = staging.job_directory(str(owner), 1000, "job")
    one = StagedFileWriter(files, path, "file")
    one.add("t", 1, 0, encoded(b"1"))
    one.finish()

    assert staging.sweep(files, 1000 + MAX_AGE_MS) == []
    assert staging.sweep(files, 1001 + MAX_AGE_MS) == [path]
    assert staged_files(root) == []


def test_what_a_living_owner_forgot_is_swept_up_at_last(root, files):
    """A driver that runs for months."""
    staged = stage(root, t_0=[b"1"])

    assert staging.sweep(files, 7 * MAX_AGE_MS) == []
    assert staging.sweep(files, 7 * MAX_AGE_MS + 1) == [staged.path.rpartition("/")[0]]


def test_names_that_are_nobodys_are_swept_up(root, files):
    """Whatever is there has an end."""
    staging.make_directories(files, "staging/what/ever")

    assert staging.sweep(files, 0) == ["staging/what/ever"]


def test_no_stage_is_a_stray_file(root, files):
    """`verify` and `repair` know the directory."""
    staged = stage(root, t_0=[b"1"])

    assert startup.strays(files, root.context.state) == []
    assert publish(root, [staged]).records == 1


def test_a_process_is_known_by_more_than_its_number():
    """Numbers are given again: after a fork of the same number the start differs."""
    here = process_id.process()

    assert process_id.parse(str(here)) == here
    assert here.here
    assert here.alive
    assert not here._replace(started=here.started - 1).alive
    assert not here._replace(boot="x").here
    assert process_id.parse("no-name") is None


def test_the_nearest_ancestor_of_a_name_is_found():
    """As a Spark driver's JVM is by its Python processes."""
    name = Path("/proc/self/comm").read_text().strip()

    assert forks.run(lambda: process_id.ancestor(name).pid == os.getpid()).value
    assert process_id.ancestor("no such program") is None


def test_repair_and_doctor_tell_what_nobody_will_publish(root, files, clock, capsys, monkeypatch):
    """They leave alone what a living owner has staged."""
    clock.set(0)  # when these jobs began
    monkeypatch.setattr("time.time_ns", lambda: 0)
    living = stage(root, t_0=[b"1"])
    forks.run(lambda: stage(root, t_0=[b"2"]))

    (told,) = repair_root(root, dry_run=True)
    assert "it will not be published" in told
    main(["--root", root.path, "doctor"])
    assert "1 jobs have left staged files" in capsys.readouterr().out
    assert repair_root(root, dry_run=False) == [told]

    assert staged_files(root) == [living.path.rpartition("/")[2]]
    assert repair_root(root, dry_run=False) == []
