"""Sharing a log with the users of a group, who read its records and stage others."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from support import forks
from support.roots import values

import embedlog
from embedlog.api import Log
from embedlog.errors import InvalidConfigError, StorageError
from embedlog.spark import batch_write
from embedlog.spark.input_partitions import plan_batch
from embedlog.spark.options import SinkOptions, SourceOptions
from embedlog.spark.partition_reader import read_input_partition

GROUP, STRANGER = 65533, 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def log() -> Iterator[Log]:
    """A log in a directory that every user can reach, with the records b"0" to b"9" of "t"."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        with embedlog.open(f"{directory}/log") as log:
            log.create_topic("t", config={"segment.bytes": 4096})
            append(log, range(10))
            yield log
            assert log.housekeeping.verify() == []


def append(log: Log, numbers: range) -> None:
    with log.producer() as producer:
        for number in numbers:
            producer.send("t", b"%d" % number)


def as_stranger(work, groups=(GROUP,)):
    """Return what some work returns in a process of another user."""

    def stranger():
        os.setgroups(groups)
        os.setresgid(STRANGER, STRANGER, STRANGER)
        os.setresuid(STRANGER, STRANGER, STRANGER)
        os.umask(0o077)
        return work()

    return forks.call(stranger)


def read(plan):
    """Return the values that the tasks of a query read."""
    batches = [batch for task in plan for batch in read_input_partition(task, ("value",), True)]
    return [value for batch in batches for value in batch.column(0).to_pylist()]


def stage(log: Log):
    """Return what stages a row, as a task does, and what publishes it, as the driver does."""
    options = SinkOptions.parse({"path": log.path, "topic": "t"})
    task = batch_write.plan_write(options, [{"name": "value", "type": "binary"}])
    rows = pa.RecordBatch.from_pydict({"value": pa.array([b"staged"])})
    return partial(task.stage, [rows], 0, 0), partial(batch_write.publish, options)


def permissions(root: Path) -> dict[str, int]:
    return {
        str(path.relative_to(root)): stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*")
    }


def test_a_group_reads_and_stages_and_nothing_else(log: Log) -> None:
    """Also what is made later, regardless of the umask; databases and locks stay private (F4)."""
    log.housekeeping.share(GROUP)
    mask = os.umask(0o077)
    try:
        log.create_topic("later")
        append(log, range(10, 500))
        stages, publish = stage(log)
        staged = as_stranger(stages)
        made = permissions(Path(log.path))
        publish([staged], None)
    finally:
        os.umask(mask)

    assert as_stranger(partial(read, plan_of(log))) == values(log.partition("t", 0))
    assert values(log.partition("t", 0))[-1] == b"staged"
    for path, mode in made.items():
        shared = path.split("/")[0] in ("topics", "staging")
        assert bool(mode & 0o077) is shared, (path, oct(mode))
        assert not mode & 0o007, path
        assert not (path.startswith("topics") and mode & 0o020), path
    assert sum(path.endswith(".arrows") for path in made) > 2


def plan_of(log: Log):
    return plan_batch(SourceOptions.parse({"path": log.path, "subscribe": "t"}))


def test_a_group_that_may_only_read_cannot_stage(log: Log) -> None:
    """Nor can a user outside of the group read; the error is about permissions."""
    log.housekeeping.share(GROUP, "r")
    (stages, _), plan = stage(log), plan_of(log)
    denied = partial(pytest.raises, StorageError, match=r"EACCES.*share\(group\)")

    assert len(as_stranger(partial(read, plan_of(log)))) == 10
    as_stranger(lambda: expect(denied, stages))
    as_stranger(lambda: expect(denied, partial(read, plan)), groups=())
    as_stranger(lambda: expect(denied, partial(plan_of, log)), groups=())


def expect(denied, work):
    with denied():
        work()


def test_sharing_ends(log: Log) -> None:
    """With mode "none" files and directories have their first permissions, but for the root's."""
    before = permissions(Path(log.path))
    log.housekeeping.share(GROUP)
    log.housekeeping.share(GROUP, "none")

    assert {"staging": 0o700, **before} == permissions(Path(log.path))


def test_a_log_over_several_directories_is_shared_in_each(tmp_path: Path) -> None:
    """Executors read whichever copy works."""
    paths = [tmp_path / name for name in ("a", "b")]
    with embedlog.open(paths) as log:
        log.create_topic("t", replication_factor=2)
        log.housekeeping.share(GROUP, "r")
        append(log, range(3))
    for path in paths:
        made = permissions(path)
        assert all(mode & 0o040 for name, mode in made.items() if name.startswith("topics"))


def test_the_command_line_shares_a_log(log: Log, command_line) -> None:
    """With the number of a group, or its name; one that does not exist is refused."""
    topics = Path(log.path, "topics")
    assert command_line("--root", log.path, "share", GROUP, "--mode", "r") == (0, "", "")
    assert (topics.stat().st_gid, stat.S_IMODE(topics.stat().st_mode)) == (GROUP, 0o2750)
    assert command_line("--root", log.path, "share", "root")[0] == 0
    assert topics.stat().st_gid == 0
    with pytest.raises(InvalidConfigError, match="no group 'nonesuch'"):
        log.housekeeping.share("nonesuch")
