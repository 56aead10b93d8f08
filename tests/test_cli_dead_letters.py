"""`embedlog dead-letters`: list, show and replay."""

from __future__ import annotations

import json

import pytest

import embedlog
from embedlog.config import GroupConfig
from embedlog.dead_letter_queue import ENABLED, Failure, letter

FAILED_MS = 1_700_000_000_000


@pytest.fixture
def root(log_path):
    """Topics t, d with two dead letters of it, one of which is no UTF-8, and e with none."""
    with embedlog.open(log_path, maintenance=False) as log:
        log.create_topic("t", partitions=2)
        for topic in ("d", "e"):
            log.create_topic(topic, partitions=2, config={ENABLED: True})
        config = GroupConfig.parse({"errors.deadletterqueue.topic.name": "d"})
        with log.producer() as producer:
            for number, value in enumerate((b"text", b"\xff")):
                sent = producer.send("t", value, b"key", [("h", b"1")], number).result()
                (record,) = log.topic("t").in_ranges([(number, sent.offset, sent.offset + 1)])
                error = ValueError(f"bad {value!r}\nreally")
                times = {"first_failed_ms": FAILED_MS, "last_failed_ms": FAILED_MS + 1500}
                failure = Failure.of(record, "g", error, delivery_count=3, **times)
                producer.send(*letter(record, failure, 2, config))
    return log_path


def values(path):
    with embedlog.open(path, mode="r") as log:
        return [record.value for record in log.topic("t")]


def test_the_list_says_where_they_came_from_and_why(command_line, root):
    """Of the named topics, or of all for dead letters."""
    code, out, _ = command_line("dead-letters", "list")
    assert code == 0
    head, first, second = (line.split() for line in out.splitlines())
    assert head[:4] == ["TOPIC", "PARTITION", "OFFSET", "ORIGIN"]
    assert first[:6] == ["d", "0", "0", "t:0:0", "g", "3"]
    assert first[6] == "2023-11-14T22:13:21.500+00:00"
    assert first[7:] == ["no", "ValueError", "bad", "b'text'"]
    assert second[:4] == ["d", "1", "0", "t:1:0"]
    code, out, _ = command_line("dead-letters", "list", "d", "e", "--max", 1, "--json")
    assert json.loads(out) == [
        {
            "topic": "d",
            "partition": 0,
            "offset": 0,
            "origin": "t:0:0",
            "group": "g",
            "attempts": 3,
            "last_failed_ms": FAILED_MS + 1500,
            "replayed": False,
            "exception": "ValueError",
            "message": "bad b'text'",
        }
    ]
    assert command_line("dead-letters", "list", "missing")[0] == 3


def test_one_is_shown_with_its_record_and_the_stack(command_line, root):
    """As JSON, or a line for each field."""
    code, out, _ = command_line("dead-letters", "show", "d", "1:0", "0:0", "--json")
    assert code == 0
    second, first = json.loads(out)
    assert second["value"] == {"base64": "/w=="}
    assert first["value"] == "text"
    assert first["headers"] == [["h", "1"]]
    assert (first["original_topic"], first["original_partition"]) == ("t", 0)
    assert first["message"] == "bad b'text'\nreally"
    code, out, _ = command_line("dead-letters", "show", "d", "0:0")
    assert 'headers:            [["h", "1"]]\n' in out
    assert out.endswith("ValueError: bad b'text'\nreally\n")
    assert command_line("dead-letters", "show", "d", "0:7")[0] == 3
    assert command_line("dead-letters", "show", "d", "7:0")[0] == 3
    assert command_line("dead-letters", "show", "t", "0:0")[0] == 3  # a record, but no dead letter
    assert command_line("dead-letters", "show", "d", "first")[0] == 2


def test_they_are_replayed_once_and_single_ones_as_often_as_asked(command_line, root):
    """A dry run sends nothing."""
    _, out, err = command_line("dead-letters", "replay", "d", "--json")
    assert json.loads(out) == {"topic": "d", "dry_run": True, "replayed": 2}
    assert "Dry run" in err
    assert values(root) == [b"text", b"\xff"]
    assert command_line("dead-letters", "replay", "d", "--execute") == (
        *(0, "", "Replayed 2 records\n"),
    )
    assert values(root) == [b"text", b"text", b"\xff", b"\xff"]
    assert command_line("dead-letters", "replay", "d", "--execute")[2] == "Replayed 0 records\n"
    assert command_line("dead-letters", "list")[1].count(" yes ") == 2
    arguments = ("dead-letters", "replay", "d", "--only", "0:0", "--execute")
    assert command_line(*arguments)[2] == "Replayed 1 record\n"
    assert values(root)[:3] == [b"text"] * 3
    assert command_line("dead-letters", "replay", "d", "--only", "0:9")[0] == 3
    assert values(root)[3:] == [b"\xff"] * 2


def test_a_replay_to_a_topic_that_is_gone_says_so(command_line, root):
    """And sends nothing; the next one goes on there."""
    with embedlog.open(root, maintenance=False) as log:
        log.delete_topic("t")
    code, _, err = command_line("dead-letters", "replay", "d", "--execute")
    assert code == 3
    assert "t" in err
    assert command_line("dead-letters", "list")[1].count(" no ") == 2
