"""`embedlog activity`: events as lines and as JSON, up to now and with --follow."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.clock import ManualClock
from support.patience import patient
from support.roots import encoded, fill

import embedlog
from embedlog.cli import main, monitoring
from embedlog.maintenance.activity import KINDS

SMALL = {"segment.bytes": 2 * encoded(b"v0").size, "retention.ms": 1_000}


@pytest.fixture
def root(tmp_path, monkeypatch):
    path = tmp_path / "log"
    monkeypatch.setenv("EMBEDLOG_ROOT", str(path))
    return path


@pytest.fixture
def root_with_events(root):
    """A log with a few events, one after the other."""
    clock = ManualClock()
    with embedlog.open(root, clock=clock, maintenance=False) as log:
        log.create_topic("t", config=SMALL)
        fill(log.partition("t", 0), 5)
        log.housekeeping.run()
        log.create_topic("u", partitions=2)
        log.alter_topic("t", {"segment.bytes": None})
        clock.advance(60_000)
        log.housekeeping.run()
    return root


@pytest.fixture
def run(capsys):
    def command(*arguments):
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return command


def test_an_event_is_a_line_with_time_kind_key_and_description(run, root_with_events):
    """The oldest event is the first line."""
    code, out, err = run("activity")

    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert all(line.startswith("2023-11-14T22:1") for line in lines)
    output = [line.split("  ", 1)[1] for line in lines]
    segment = SMALL["segment.bytes"]
    settings = f"segment.bytes={segment}, retention.ms=1000"
    assert output[1] == f"created     t  id 1, 1 partition, {settings}"
    assert output[2] == "rolled      t-0  2 new segments, the active one begins at 4"
    assert output[3].startswith("retained    t-0  3 segments with ")
    assert any(line.startswith("altered     t  segment.bytes from ") for line in output)
    assert any(line == "created     u  id 3, 2 partitions" for line in output)


def test_the_json_of_an_event_has_all_facts(run, root_with_events):
    """One object on each line."""
    code, out, _ = run("--json", "activity", "--kind", "rolled", "-n", "1")

    assert code == 0
    facts = json.loads(out)
    expected = {"kind": "rolled", "key": "t-0", "topic": "t", "partition": 0}
    assert expected.items() <= facts.items()
    assert isinstance(facts["timestamp"], int)


def test_events_can_be_selected(run, root_with_events):
    """By topic, by kind, and as the first or the last ones."""
    count = len(run("activity")[1].splitlines())

    assert run("activity", "--topic", "u")[1].count("\n") == 1
    assert run("activity", "--topic", "u", "--topic", "t", "--kind", "created")[1].count("\n") == 2
    assert run("activity", "-n", "2")[1] == "".join(
        f"{line}\n" for line in run("activity")[1].splitlines()[-2:]
    )
    assert run("activity", "--max", "2")[1].count("\n") == 2
    assert run("activity", "-n", "0")[1] == ""
    assert count > 4


def test_an_unknown_kind_is_a_usage_error(run, root_with_events):
    """The message lists the kinds."""
    code, out, err = run("activity", "--kind", "retention")

    assert (code, out) == (2, "")
    assert "retained" in err


def test_the_help_names_every_kind(run):
    """Each kind has a description."""
    assert run("activity", "--help")[0] == 0
    assert all(kind in monitoring.EVENTS for kind in KINDS)
    assert monitoring._DESCRIPTIONS.keys() == set(KINDS)
    assert monitoring._words_of("rolled", {"kind": "rolled", "new": 1}) == "new 1"
    assert monitoring._words_of("of a later version", {"kind": "x", "a": 1}) == "a 1"


def test_a_log_without_activity_prints_a_note(run, root):
    """The exit code is 0; a missing log is 3."""
    assert run("activity")[0] == 3
    embedlog.open(root).close()
    code, out, err = run("activity")
    assert (code, out) == (0, "")
    assert "There is no activity yet" in err


def test_follow_prints_new_events(root):
    """It waits for the topic to be created; --max ends it."""
    embedlog.open(root).close()
    command = [sys.executable, "-m", "embedlog", "activity", "-f", "--kind", "created", "-m", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            assert "There is no activity yet" in child.stderr.readline()
            with embedlog.open(root, maintenance=False) as log:
                for name in ("a", "b"):
                    log.create_topic(name)
                    log.housekeeping.run()
                    assert f"created     {name}  id" in child.stdout.readline()
            assert child.wait(patient(20)) == 0
        finally:
            child.kill()
