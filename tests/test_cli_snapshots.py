"""`embedlog snapshots`, `backup`, `restore` and `clone`."""

from __future__ import annotations

import json
import os

import pytest

import embedlog


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A log with a hundred records in three partitions."""
    path = str(tmp_path / "log")
    with embedlog.open(path, maintenance=False) as log:
        log.create_topic("flights", 3)
        log.create_topic("other")
        with log.producer() as producer:
            for number in range(100):
                producer.send("flights", value=b"%d" % number, partition=number % 3)
    monkeypatch.setenv("EMBEDLOG_ROOT", path)
    # The command runs in this process, which would be slow in all later tests, too.
    monkeypatch.setattr(os, "nice", lambda _: 0)
    return path


def test_a_snapshot_is_taken_listed_and_deleted(command_line, path):
    """As by `log.snapshot` and `log.snapshots`."""
    code, out, err = command_line("snapshots", "take", "report", "flights", "--expires", "never")
    assert (code, out) == (0, "")
    assert "100 offsets" in err
    assert f"{path}/snapshots/report.json" in err
    assert command_line("snapshots", "take", "all")[0] == 0

    code, out, _ = command_line("snapshots", "list")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == ["snapshot", "created", "expires", "topics", "offsets"]
    assert [line.split()[0] for line in lines[1:]] == ["all", "report"]
    code, out, _ = command_line("--json", "snapshots", "list")
    first, second = json.loads(out)
    assert first["expires_ms"] == first["created_ms"] + 7 * 86_400_000
    assert second["expires_ms"] is None
    assert second["topics"]["flights"]["ranges"] == [[0, 34], [0, 33], [0, 33]]

    code, _, err = command_line("snapshots", "take", "all")
    assert code == 1
    assert "embedlog snapshots delete all" in err
    assert command_line("snapshots", "delete", "all", "report") == (0, "", "")
    code, _, err = command_line("snapshots", "delete", "report")
    assert code == 3
    assert "`embedlog snapshots list` lists all" in err
    for words in (("take", "a/b"), ("take", "x", "--expires", "soon")):
        assert command_line("snapshots", *words)[0] == 2
    assert command_line("snapshots", "take", "x", "missing")[0] == 3


def test_a_backup_is_restored(command_line, path, tmp_path):
    """The last one, or one of before; and a clone is a log."""
    target, restored = str(tmp_path / "backup"), str(tmp_path / "restored")
    code, out, _ = command_line("--json", "backup", target, "--verify", "--max-rate", "1e9")
    first = json.loads(out)
    assert code == 0
    assert first["files"] == first["copied_files"] == 3
    code, out, _ = command_line("backup", target)
    assert code == 0
    assert "3 files" in out
    assert "copied 0 files" in out

    time = str(int(first["name"].removeprefix("backup-")))
    at = embedlog.open(path, mode="r").root.clock() - int(time)
    assert command_line("restore", target, restored, "--at", f"{at + 10**6}s")[0] == 3
    code, out, _ = command_line("restore", target, restored)
    assert code == 0
    assert restored in out
    code, out, _ = command_line("--root", restored, "verify")
    assert (code, out) == (0, "")
    code, out, _ = command_line("--root", restored, "consume", "flights")
    assert sorted(map(int, out.split())) == list(range(100))
    assert command_line("restore", target, restored)[0] == 1

    clone = str(tmp_path / "clone")
    assert command_line("clone", clone) == (0, "", "")
    code, out, _ = command_line("--root", clone, "consume", "flights")
    assert len(out.split()) == 100
    assert command_line("clone", str(tmp_path))[0] == 3
