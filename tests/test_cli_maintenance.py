"""`embedlog compact`, `maintain` and `explain`."""

from __future__ import annotations

import json

import pytest
from support.roots import encoded

import embedlog
from embedlog.cli import main

OLD = 1_000_000
"""A time in 1970, so old that all records of it are due."""


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A compacted topic with two records of one key, and one whose records are old."""
    monkeypatch.setenv("EMBEDLOG_ROOT", str(tmp_path / "log"))
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("fleet", config={"cleanup.policy": "compact"})
        log.create_topic("old", config={"segment.ms": 1, "retention.clock": "record"})
        for value in (b"1", b"2"):
            log.partition("fleet", 0).append([encoded(value, keys=[b"N1"], at=OLD)])
            log.partition("old", 0).append([encoded(value, at=OLD)])
    return tmp_path / "log"


def run(capsys, *arguments):
    code = main(list(arguments))
    output = capsys.readouterr()
    return code, output.out, output.err


def test_compact_cleans_due_partitions_and_with_force_all(root, capsys):
    """The output says which of the two it was."""
    assert run(capsys, "compact", "fleet")[::2] == (
        0,
        "No partition is due; see embedlog explain, or use --force\n",
    )
    code, out, _ = run(capsys, "compact", "fleet", "--force", "--json")
    (result,) = json.loads(out)
    assert code == 0
    assert (result["topic"], result["records_read"], result["records_kept"]) == ("fleet", 2, 1)
    with embedlog.open(root) as log:
        assert list(log.topic("fleet").items()) == [(b"N1", b"2")]


def test_compacting_another_topic_is_a_wrong_command(root, capsys):
    """The exit code is 2, and the message names the setting to change."""
    code, _, err = run(capsys, "compact", "old")
    assert code == 2
    assert "cleanup.policy" in err


def test_maintain_deletes_due_segments(root, capsys):
    """The second call has nothing to delete."""
    code, out, _ = run(capsys, "maintain")
    assert (code, out.split(":")[0]) == (0, "old-0")
    assert "begins at 2" in out
    assert run(capsys, "maintain")[::2] == (0, "Nothing was due\n")
    assert json.loads(run(capsys, "--json", "maintain")[1])["deleted"] == []


def test_explain_describes_each_topic(root, capsys):
    """As lines, and as JSON by topic."""
    code, out, _ = run(capsys, "explain", "fleet")
    assert code == 0
    assert "active segment, which is never compacted" in out
    output = json.loads(run(capsys, "explain", "--json")[1])
    assert list(output) == ["fleet", "old"]
    assert any("in the next round" in line for line in output["old"])
    assert run(capsys, "explain", "none")[0] == 3
