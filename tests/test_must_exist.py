"""Logs that are opened only if they exist: a disk that is not mounted begins no new log."""

from __future__ import annotations

import os
import pickle
import shutil

import pytest
from support.children import in_child
from support.replicas import send, values

import embedlog
from embedlog.cli import main
from embedlog.errors import EmbedlogError, NotALogError
from embedlog.kafka import KafkaProducer
from embedlog.kafka import errors as kafka_errors
from embedlog.spark import batch_write
from embedlog.spark.options import SinkOptions


def contents(path):
    """Return all files below a directory; None if it does not exist."""
    if not path.exists():
        return None
    return sorted(str(each) for each in path.rglob("*"))


@pytest.fixture(params=["missing", "empty", "other files", "three missing", "three empty"])
def nothing(request, tmp_path):
    """Paths at which there is no log, and what is there."""
    count = 3 if request.param.startswith("three") else 1
    paths = [tmp_path / f"mount{number}" for number in range(count)]
    for path in paths:
        if "missing" not in request.param:
            path.mkdir()
        if request.param == "other files":
            (path / "lost+found").mkdir()
    yield [str(path) for path in paths]
    assert contents(tmp_path) == sorted(
        str(each) for path in paths if path.exists() for each in (path, *path.rglob("*"))
    )
    assert not list(tmp_path.rglob("embedlog.toml"))


def doors(paths):
    """Yield what opens a log for writing, and creates it by default."""
    first = paths[0]
    yield lambda: embedlog.open(paths, must_exist=True)
    yield lambda: embedlog.open(first, must_exist=True)
    yield lambda: KafkaProducer(bootstrap_servers=f"embedlog://{first}?must_exist=true")
    options = SinkOptions.parse({"path": first, "topic": "t", "mustExist": "true"})
    yield lambda: batch_write.open_log(options).__enter__()


def test_no_log_is_created_where_it_must_exist(nothing):
    """Not in one directory, nor in several; nothing is written there."""
    for door in doors(nothing):
        with pytest.raises((NotALogError, kafka_errors.KafkaError), match=r"log|directory"):
            door()


@pytest.mark.parametrize(
    "command",
    [
        ("topics", "create", "t"),
        ("produce", "t"),
        ("import", "t", "rows.csv"),
        ("schemas", "register", "t", "schema.avsc"),
        ("mirror", "source", "ROOT"),
    ],
)
def test_no_command_creates_a_log_that_must_exist(nothing, tmp_path, command, monkeypatch, capsys):
    """Before it reads its input."""
    command = [nothing[0] if word == "ROOT" else word for word in command]
    for order in (["--must-exist", *command], [*command, "--must-exist"]):
        assert main(["--root", nothing[0], *order]) == 3
        assert "embedlog: " in capsys.readouterr().err


def test_a_log_that_exists_is_opened(tmp_path, directories):
    """Also in several directories of which some are missing, and to add others."""
    path = tmp_path / "log"
    embedlog.open(path, maintenance=False).close()
    with embedlog.open(path, must_exist=True, maintenance=False) as log:
        send(log, "t", [b"x"])
    assert main(["--root", str(path), "--must-exist", "topics", "create", "u"]) == 0
    with directories.open() as log:
        send(log, "t", [b"x"])
    directories.take(2)
    with directories.open(must_exist=True) as log:
        assert values(log, "t") == [b"x"]
    more = [path, tmp_path / "disk4"]
    with embedlog.open(more, must_exist=True, maintenance=False) as log:
        assert [each.path for each in log.replicas] == list(map(str, more))


@pytest.mark.parametrize("count", [1, 3])
def test_a_log_that_is_gone_is_not_begun_again_by_a_fork_or_a_pickle(tmp_path, count):
    """It existed when this handle was opened, whatever `must_exist` was."""
    paths = [str(tmp_path / f"disk{number}") for number in range(count)]
    log = embedlog.open(paths if count > 1 else paths[0], maintenance=False)
    pickled = pickle.dumps(log)
    for path in paths:
        shutil.move(path, f"{path}.unmounted")

    def use() -> str:
        try:
            return str(log.topics())
        except EmbedlogError as error:
            return type(error).__name__

    assert in_child(use) == "NotALogError"
    with pytest.raises(NotALogError):
        pickle.loads(pickled)
    assert not any(map(os.path.exists, paths))
    for path in paths:
        shutil.move(f"{path}.unmounted", path)
    log.close()
