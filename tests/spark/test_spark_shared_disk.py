"""A log on a disk that other hosts mount: their tasks read it and stage files for it.

The file system of these mounts checks the calling user's permissions and gives ESTALE for what
the log's host deletes, as NFS does.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from support import forks, remote_disk, shared_disk_program
from support.children import run_python
from support.jvm_tasks import JvmTasks
from support.roots import segment_files
from support.spark_reads import ALL, read_all

import embedlog
from embedlog.api import Log
from embedlog.errors import (
    DataLossError,
    NotALogError,
    StorageError,
    UnsupportedFilesystemError,
)
from embedlog.spark import batch_write
from embedlog.spark.input_partitions import plan_batch
from embedlog.spark.options import SinkOptions, SourceOptions

GROUP, STRANGER = 65533, 65534
RECORDS = 600


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file system."""
    return remote_disk.build(tmp_path_factory.mktemp("remote_disk"))


@pytest.fixture
def log() -> Iterator[Log]:
    """A log in a directory that every user can reach, with "t" in three segments of a mebibyte."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        with embedlog.open(f"{directory}/log", maintenance=False) as log:
            log.create_topic("t", config={"segment.bytes": 1 << 20})
            log.create_topic(
                "typed", schema=pa.schema({"number": "int64", "text": "string"}), partitions=2
            )
            with log.producer() as producer:
                for start in range(0, RECORDS, 100):
                    numbers = range(start, start + 100)
                    rows = [b"%d " % number + os.urandom(4000) for number in numbers]
                    producer.send_batch("t", rows).result()
            log.flush()
            yield log


@pytest.fixture
def mount(program: Path, log: Log) -> Iterator[Path]:
    """The log as another host sees it."""
    with remote_disk.mounted(program, log.path, Path(log.path).with_name("mount")) as mount:
        yield mount


@pytest.fixture(params=["python", pytest.param("jvm", marks=pytest.mark.xdist_group("spark"))])
def read(request: pytest.FixtureRequest) -> Any:
    """A function that reads input partitions with one of the readers, and returns the values."""
    if request.param == "python":
        return lambda tasks, loss=True: [row["value"] for row in read_all(tasks, ALL, loss)]
    jvm: JvmTasks = request.getfixturevalue("jvm")
    return lambda tasks, loss=True: [row[0] for row in jvm.read(tasks, ["value"], loss)]


def plan(log: Log, mount: Path) -> list[Any]:
    """Plan a query on the log's host for tasks of another one."""
    tasks = plan_batch(SourceOptions.parse({"path": log.path, "subscribe": "t"}))
    return [replace(task, root=str(mount)) for task in tasks]


def numbers(values: list[bytes]) -> list[int]:
    return sorted(int(value.split(b" ")[0]) for value in values)


def test_tasks_on_another_host_read_what_was_planned(log: Log, mount: Path, read: Any) -> None:
    """The mount is remote, so no segment is mapped; the log itself is refused there (P23)."""
    assert numbers(read(plan(log, mount))) == list(range(RECORDS))
    with pytest.raises(UnsupportedFilesystemError, match="fuse"):
        embedlog.open(mount, mode="r")


@pytest.mark.parametrize("is_open", [True, False])
def test_a_file_that_the_host_deletes_is_data_loss(
    log: Log, mount: Path, read: Any, is_open: bool
) -> None:
    """Whether a task has it open (ESTALE) or not (ENOENT); failOnDataLoss=false goes on."""
    tasks = plan(log, mount)
    first, second, *_ = segment_files(log.path)
    in_first = int(second.name.partition("-")[0])
    if is_open:
        remote_disk.delete_while_read(first)
    else:
        first.unlink()

    with pytest.raises(DataLossError, match="was deleted after the query was planned"):
        read(tasks)
    assert not first.exists()
    assert set(numbers(read(tasks, False))) == set(range(in_first, RECORDS))


def test_a_host_that_has_not_mounted_the_disk_says_so(log: Log, tmp_path: Path, read: Any) -> None:
    """An empty directory is no log whose files were all deleted, also with failOnDataLoss=false."""
    for loss in (True, False):
        with pytest.raises(NotALogError, match="The log is not on this host"):
            read(plan(log, tmp_path), loss)


@pytest.mark.parametrize("topic", ["t", "typed"])
@pytest.mark.parametrize("groups", [(GROUP,), ()])
def test_another_user_stages_for_the_host_to_publish(
    log: Log, mount: Path, topic: str, groups: tuple[int, ...]
) -> None:
    """In a log that is shared with its group; others have no permission, and nothing is staged."""
    log.housekeeping.share(GROUP)
    rows = {"value": [b"x"] * 10} if topic == "t" else {"number": range(10), "text": ["é"] * 10}
    batch = pa.RecordBatch.from_pydict(rows)
    options = SinkOptions.parse({"path": log.path, "topic": topic})
    fields = spark_fields(value="binary") if topic == "t" else spark_fields()
    task = batch_write.plan_write(options, fields)
    before = len(log[topic])

    def stage() -> Any:
        os.setgroups(groups)
        os.setresgid(STRANGER, STRANGER, STRANGER)
        os.setresuid(STRANGER, STRANGER, STRANGER)
        os.umask(0o077)
        return replace(task, path=str(mount)).stage([batch], 0, 0)

    if not groups:
        with pytest.raises(AssertionError, match=r"EACCES.*share\(group\)"):
            forks.call(stage)
        return
    assert batch_write.publish(options, [forks.call(stage)], None).records == 10
    assert len(log[topic]) == before + 10
    assert log.housekeeping.verify() == []


def spark_fields(**types: str) -> list[dict[str, Any]]:
    types = types or {"number": "long", "text": "string"}
    return [
        {"name": name, "type": kind, "nullable": True, "metadata": {}}
        for name, kind in types.items()
    ]


def test_a_user_without_permission_is_told_so(log: Log, mount: Path) -> None:
    """Not that there is no such directory; the sentence names what helps."""
    tasks = plan(log, mount)

    def work() -> Any:
        os.setgroups([])
        os.setresuid(STRANGER, STRANGER, STRANGER)
        with pytest.raises(StorageError, match=r"EACCES.*share\(group\)"):
            read_all(tasks)

    forks.call(work)


# A cluster


@contextmanager
def daemon(command: list[str], output: Path, started: str, **environment: str) -> Iterator[str]:
    """Run a process of Spark until the end of the block; yields what it said when it started."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        yield forks.until(lambda: re.search(started, output.read_text()), 60)[1]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def cluster(program: Path, disk: Path, directory: Path) -> Iterator[str]:
    """Start a master, and a worker of another user on a host that mounts a disk.

    Yields the address of the master.
    """
    home = Path(pyspark.__file__).parent
    java = [str(home / "bin" / "spark-class"), "org.apache.spark.deploy"]
    options = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    work = directory / "work"
    work.mkdir()
    work.chmod(0o777)
    settings = {"SPARK_HOME": str(home), "SPARK_LOCAL_DIRS": str(work), "SPARK_NO_DAEMONIZE": "1"}
    with ExitStack() as daemons:
        master = daemons.enter_context(
            daemon(
                [java[0], f"{java[1]}.master.Master", *options],
                directory / "master.log",
                r"Starting Spark master at (spark://\S+)",
                **settings,
            )
        )
        worker = [java[0], f"{java[1]}.worker.Worker", *options, "--cores", "2", "--memory", "1g"]
        worker += ["--work-dir", str(work), master]
        worker = remote_disk.as_user(STRANGER, GROUP, *worker)
        daemons.enter_context(
            daemon(
                remote_disk.on_another_host(program, disk, *worker),
                directory / "worker.log",
                r"(Successfully registered with master)",
                **settings,
            )
        )
        yield master


@pytest.mark.tier("all")
def test_a_cluster_uses_a_log_over_a_shared_disk(program: Path) -> None:
    """Executors of another user and host read and write, the driver's host plans and publishes.

    Batches and streams of bytes and of columns, in both languages, each record once; files that
    the host deletes are data loss; without permission the error is about permissions.
    """
    rows = shared_disk_program.ROWS
    with tempfile.TemporaryDirectory() as name, ExitStack() as logs:
        directory = Path(name)
        directory.chmod(0o755)
        disk = directory / "disk"
        disk.mkdir()
        private = logs.enter_context(embedlog.open(disk / "log-private", maintenance=False))
        private.create_topic("t")
        with private.producer() as producer:
            producer.send_batch("t", [b"v"] * 100).result()
        log = logs.enter_context(embedlog.open(disk / "log", maintenance=False))
        for language in ("jvm", "python"):
            create_topics(log, language)
        log.housekeeping.share(GROUP)
        with cluster(program, disk, directory) as master:
            for language in ("jvm", "python"):
                (directory / language).mkdir()
                program_file = Path(shared_disk_program.__file__)
                paths = os.pathsep.join(
                    str(path)
                    for path in (program_file.parents[1], Path(embedlog.__file__).parents[1])
                )
                found = json.loads(
                    run_python(
                        *(program_file, master, log.path, directory / language, language),
                        env={**os.environ, "PYTHONPATH": paths},
                        seconds=200,
                    ).splitlines()[-1]
                )
                check(found, language, rows)
        for topic in log.topics():
            if "doomed" not in topic:
                assert len(log[topic]) == rows, topic


def create_topics(log: Log, language: str) -> None:
    """Create the topics of `shared_disk_program`, with records in those to be deleted."""
    columns = pa.schema({"number": "int64", "text": "string"})
    for suffix in (language, f"{language}-copy"):
        log.create_topic(f"t-{suffix}", partitions=3)
        log.create_topic(f"typed-{suffix}", schema=columns, partitions=2)
    log.create_topic(f"doomed-{language}", config={"segment.bytes": 1 << 20})
    with log.producer() as producer:
        for _ in range(6):
            values = [os.urandom(4000) for _ in range(100)]
            producer.send_batch(f"doomed-{language}", values).result()
    log.flush()


def check(found: dict[str, Any], language: str, rows: int) -> None:
    """Check what the program counted, of records and of distinct ones."""
    assert found["where"] == ["fuse"]
    assert len(found["counts"]) == 4
    assert set(map(tuple, found["counts"].values())) == {(rows, rows)}, found["counts"]
    assert found["deleted"] == [True, True]
    assert found["loss"].startswith("DataLossError"), found["loss"]
    assert 0 < found["left"] < 600
    for work in ("read", "write"):
        error = found[f"no permission to {work}"]
        assert error.startswith("StorageError"), (language, error)
        assert "EACCES" in error, error
        assert "share(group)" in error, error
