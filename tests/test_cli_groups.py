"""`embedlog groups`: its output for people and for programs, and what it refuses."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from datetime import timedelta
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import START
from support.patience import patient
from support.roots import encoded

import embedlog
from embedlog.cli import printing
from embedlog.cli.parser import parser
from embedlog.record import OffsetAndMetadata, TopicPartition

T0, T1, U0 = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("u", 0)
VERBS = ("list", "describe", "lag", "reset", "alter", "delete", "delete-offsets")


@pytest.fixture
def root(log_path):
    """Topics t (5 and 2 records) and u (1); group g is at 2 of 5 and 2 of 2, h is at 0 of u."""
    with embedlog.open(log_path) as log:
        log.create_topic("t", partitions=2)
        log.create_topic("u")
        for tp, count in ((T0, 5), (T1, 2), (U0, 1)):
            for number in range(count):
                log.partition(*tp).append([encoded(b"v", at=START + number)])
        commit(log, "g", {T0: OffsetAndMetadata(2, "a note"), T1: OffsetAndMetadata(2)})
        commit(log, "h", {U0: OffsetAndMetadata(0)})
    return log_path


def commit(log, group, positions):
    with log.consumer(group_id=group, enable_auto_commit=False) as consumer:
        consumer.commit(positions)


@pytest.fixture
def run(command_line):
    """Run a verb of `embedlog groups` in this process; return its code, stdout and stderr."""
    return partial(command_line, "groups")


def table(text):
    """Return the cells of a printed table, without its header."""
    return [line.split() for line in text.splitlines()[1:]]


@pytest.mark.parametrize("verb", [(), *((verb,) for verb in VERBS)])
def test_each_verb_has_help(run, verb):
    """So has `groups` itself."""
    code, out, _ = run(*verb, "--help")

    assert code == 0
    assert out.startswith(" ".join(("usage: embedlog groups", *verb)))


def test_names_are_listed(run, root):
    """One on each line; a table with --state; nothing without groups."""
    assert run("list") == (0, "g\nh\n", "")
    assert run("list", "--json")[1] == '["g", "h"]\n'
    assert table(run("list", "--state")[1]) == [
        ["g", "Empty", "0", "consumer"],
        ["h", "Empty", "0", "consumer"],
    ]
    assert json.loads(run("list", "--state", "--json")[1])[0] == {
        "group": "g",
        "state": "Empty",
        "members": 0,
        "kind": "consumer",
    }
    run("delete", "g", "h")
    assert run("list") == (0, "", "")


def test_the_first_columns_are_those_of_kafka(run, root):
    """In Kafka's order, so that scripts which count columns still work."""
    code, out, err = run("describe", "g")

    title, _, *lines = out.splitlines()
    assert (code, err) == (0, "")
    assert title == "g: Empty, generation 0, 0 members, lag 3 in 2 partitions"
    assert lines[0].split() == [
        *("GROUP", "TOPIC", "PARTITION", "CURRENT-OFFSET", "LOG-END-OFFSET", "LAG"),
        *("CONSUMER-ID", "PID", "CLIENT-ID", "LAG-MS", "COMMITTED", "METADATA"),
    ]
    assert lines[1].split()[:9] == ["g", "t", "0", "2", "5", "3", "-", "-", "-"]
    assert lines[1].endswith("  a note")
    assert lines[2].split()[:10] == ["g", "t", "1", "2", "2", "0", "-", "-", "-", "0"]
    assert len(lines) == 3


def test_members_are_described(run, root):
    """With their partitions, beside the partitions and in a table of their own."""
    with embedlog.open(root) as log, log.consumer("u", group_id="h", client_id="me") as consumer:
        consumer.poll(timeout_ms=0)
        member_id = consumer.group_metadata().member_id
        _, out, _ = run("describe", "h")
        _, output, _ = run("describe", "--json")

    (title, partition, member) = (part.splitlines() for part in out.split("\n\n"))
    assert title[0].startswith("h: Stable, generation 1 by range, 1 member, ")
    assert partition[1].split()[6:9:2] == [member_id, "me"]
    assert member[1].split()[:2] == ["h", member_id]
    assert member[1].split()[-2:] == ["1", "u"]
    groups = {group["group"]: group for group in json.loads(output)}
    assert groups["g"]["partitions"][0]["lag"] == 3
    assert groups["h"]["members"][0]["partitions"] == [{"topic": "u", "partition": 0}]


def test_lag_is_printed_for_all_groups_or_some(run, root):
    """A line for each partition; in JSON an object for each."""
    code, out, _ = run("lag")
    assert code == 0
    assert [row[:6] for row in table(out)] == [
        ["g", "t", "0", "2", "5", "3"],
        ["g", "t", "1", "2", "2", "0"],
        ["h", "u", "0", "0", "1", "1"],
    ]
    assert [row[0] for row in table(run("lag", "h")[1])] == ["h"]
    (lag,) = json.loads(run("lag", "h", "--json")[1])
    assert lag.pop("lag_ms") > 0
    assert lag == {
        "group": "h",
        "topic": "u",
        "partition": 0,
        "current_offset": 0,
        "log_end_offset": 1,
        "lag": 1,
    }


def test_lag_is_watched_until_it_is_interrupted(root):
    """Each line is flushed, also into a pipe; Ctrl-C ends the command with code 130."""
    command = [sys.executable, "-m", "embedlog", "groups", "lag", "g", "--json", "-w", "0.05"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            assert [lag["lag"] for lag in json.loads(child.stdout.readline())] == [3, 0]
            with embedlog.open(root) as log:
                log.partition("t", 1).append([encoded(b"x")])
            while [lag["lag"] for lag in json.loads(child.stdout.readline())] != [3, 1]:
                pass
            # A watch goes on after the group was deleted.
            with embedlog.open(root) as log:
                log.groups["g"].delete()
            while json.loads(child.stdout.readline()) != []:
                pass
            child.send_signal(signal.SIGINT)
            assert child.wait(patient(20)) == 130
            assert child.stderr.read() == ""
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("arguments", "offsets"),
    [
        (("--to-earliest",), [0, 0]),
        (("--to-latest",), [5, 2]),
        (("--to-current",), [2, 2]),
        (("--to-offset", "4"), [4, 2]),
        (("--shift-by", "-1"), [1, 1]),
        (("--shift-by", "2", "--topic", "t:0"), [4]),
        (("--to-earliest", "--topic", "t:1,0"), [0, 0]),
        (("--to-earliest", "--topic", "u", "--topic", "t:1"), [0, 0]),
        (("--to-datetime", "2023-11-14T22:13:20.001Z"), [1, 1]),
        (("--to-datetime", "2023-11-14T22:13:20.001"), [1, 1]),
        (("--to-datetime", "2023-11-15T00:13:20.003+02:00"), [3, 2]),
        (("--to-datetime", "2099-01-01"), [5, 2]),
        (("--by-duration", "P9999D"), [0, 0]),
        (("--by-duration", "1s"), [5, 2]),
    ],
)
def test_reset_is_a_dry_run_without_execute(run, root, arguments, offsets):
    """The command prints the same with --execute, which makes the change."""
    before = run("lag", "g")[1]

    code, output, err = run("reset", "g", *arguments)

    assert (code, err) == (0, "Dry run, nothing was changed; repeat the command with --execute\n")
    assert [int(row[3]) for row in table(output)] == offsets
    # The ages of the records change between the calls.
    assert [row[:6] for row in table(run("lag", "g")[1])] == [row[:6] for row in table(before)]
    assert run("reset", "g", *arguments, "--execute") == (0, output, "")
    committed = {tuple(row[1:3]): row[3] for row in table(run("lag", "g")[1])}
    assert [int(committed[tuple(row[1:3])]) for row in table(output)] == offsets


def test_reset_prints_json(run, root):
    """A new group has no offset before the reset."""
    _, out, _ = run("reset", "new", "--to-latest", "--topic", "u", "--json")

    assert json.loads(out) == {
        "group": "new",
        "dry_run": True,
        "partitions": [{"topic": "u", "partition": 0, "before": None, "after": 1}],
    }
    assert table(run("reset", "new", "--to-latest", "--topic", "u")[1]) == [
        ["new", "u", "0", "1", "-"]
    ]


def test_groups_are_deleted_all_or_none(run, root):
    """With --topic, only their offsets of that topic are deleted."""
    assert run("delete", "g", "nobody")[0] == 3
    assert run("list")[1] == "g\nh\n"

    assert run("delete", "g", "--topic", "t:0") == (0, "", "Deleted offsets of g\n")
    assert [row[2] for row in table(run("lag", "g")[1])] == ["1"]
    assert run("delete", "g", "h", "--json") == (
        0,
        '{"deleted": ["g", "h"]}\n',
        "Deleted g\nDeleted h\n",
    )
    assert run("list")[1] == ""


def test_offsets_of_topics_and_partitions_are_deleted(run, root):
    """Others stay; an active group, and one that does not exist, keep theirs."""
    assert run("delete-offsets", "g", "t:0", "--json") == (
        0,
        '{"group": "g", "topics": [], "partitions": ["t-0"]}\n',
        "Deleted offsets of g: t-0\n",
    )
    assert [row[2] for row in table(run("lag", "g")[1])] == ["1"]
    assert run("delete-offsets", "g", "t") == (0, "", "Deleted offsets of g: t\n")
    assert table(run("lag", "g")[1]) == []


def test_an_active_group_is_not_changed(run, root):
    """The code is 1, and the message names the active members or their topics."""
    with embedlog.open(root) as log, log.consumer("u", group_id="h", client_id="me") as consumer:
        consumer.poll(timeout_ms=0)
        for arguments in (
            ("reset", "h", "--to-latest"),
            ("reset", "h", "--to-latest", "--execute"),
            ("delete", "h"),
            ("delete", "h", "--topic", "u"),
            ("delete-offsets", "h", "u"),
        ):
            code, out, err = run(*arguments)
            assert (code, out) == (1, "")
            assert "me-" in err or "subscribed to u" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("reset", "g"),
        ("reset", "g", "--to-earliest", "--to-latest"),
        ("reset", "g", "--to-offset", "-1"),
        ("reset", "g", "--to-offset", "x"),
        ("reset", "g", "--to-datetime", "soon"),
        ("reset", "g", "--by-duration", "soon"),
        ("reset", "g", "--by-duration", "99999999999w"),
        ("reset", "g", "--to-latest", "--topic", "t:"),
        ("reset", "g", "--to-latest", "--topic", "t:x"),
        ("reset", "g", "--to-latest", "--topic", "t:-1"),
        ("reset", "", "--to-latest", "--topic", "t"),
        ("delete",),
        ("delete-offsets", "g"),
        ("delete-offsets", "g", "t:x"),
        ("lag", "--watch", "g"),
        ("lag", "--watch", "0"),
        ("lag", "--watch", "nan"),
    ],
)
def test_a_wrong_command_is_2_and_one_message(run, root, arguments):
    """Nothing is changed, and no traceback is printed."""
    code, out, err = run(*arguments)

    assert (code, out) == (2, "")
    assert "embedlog" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("describe", "nobody"),
        ("lag", "g", "nobody"),
        ("delete", "nobody"),
        ("delete-offsets", "nobody", "t"),
        ("reset", "nobody", "--to-latest"),
        ("reset", "g", "--to-latest", "--topic", "nothing"),
        ("reset", "g", "--to-latest", "--topic", "t:7"),
    ],
)
def test_a_missing_group_topic_or_partition_is_3(run, root, arguments):
    """Asking for a group does not create it."""
    assert run(*arguments)[:2] == (3, "")
    assert run("list")[1] == "g\nh\n"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("PT1H", 3600),
        ("P1DT2H3M4.5S", 93784.5),
        ("P2W", 14 * 86400),
        ("pt5m", 300),
        ("1h", 3600),
        ("1h30m", 5400),
        ("90s", 90),
        ("0.25s", 0.25),
        ("2d", 172800),
    ],
)
def test_a_duration_is_iso_or_short(text, seconds):
    """ISO 8601, as Java and Kafka write durations, or numbers with units."""
    arguments = parser().parse_args(["groups", "reset", "g", "--by-duration", text])

    assert arguments.by_duration == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "P", "PT", "1", "1M2", "P1M", "P1H", "-1h", "1h 30m", "s"])
def test_an_invalid_duration_is_refused(text, capsys):
    """A month has no fixed length, and a number needs a unit."""
    with pytest.raises(SystemExit):
        parser().parse_args(["groups", "reset", "g", f"--by-duration={text}"])
    assert "--by-duration" in capsys.readouterr().err


def shown(columns, *arguments):
    """Return what a command prints to a terminal of so many columns."""
    monitor, terminal = pty.openpty()
    try:
        subprocess.run(
            [sys.executable, "-m", "embedlog", *arguments],
            stdout=terminal,
            env={**os.environ, "COLUMNS": str(columns)},
            check=True,
        )
        return os.read(monitor, 1 << 16).decode().replace("\r\n", "\n")
    finally:
        os.close(monitor)
        os.close(terminal)


def test_tables_fit_the_terminal(run, root):
    """Long cells lose their middle there; pipes and files get all of them."""
    name = "a-group-with-a-long-name-" + "x" * 60 + "-and-an-end"
    with embedlog.open(root) as log:
        commit(log, name, {T1: OffsetAndMetadata(2)})

    narrow = shown(60, "groups", "lag", name)
    piped = run("lag", name)[1]

    assert max(map(len, narrow.splitlines())) <= 60
    assert narrow.splitlines()[1].startswith("a-g")
    assert "…" in narrow
    assert name in piped
    assert shown(200, "groups", "lag", name) == piped


WORDS = st.text("abc-", min_size=1, max_size=30)


@given(
    heads=st.lists(WORDS, min_size=1, max_size=9, unique=True),
    data=st.data(),
    columns=st.integers(10, 120),
)
def test_a_heading_is_whole_or_named_as_left_out(heads, data, columns):
    """Every line fits, unless the first column alone is too wide."""
    rows = data.draw(st.lists(st.tuples(*[WORDS] * len(heads)), max_size=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        patch.setenv("COLUMNS", str(columns))
        lines = printing.table(heads, rows)

    shown = lines[0].split()
    assert shown == heads[: len(shown)] != []
    assert len(lines) == 1 + len(rows) + (len(shown) < len(heads))
    if len(shown) < len(heads):
        named = lines.pop().removeprefix("No room for ").partition(": ")[0]
        assert named.split(", ") == heads[len(shown) :]
    assert max(map(len, lines)) <= columns or len(shown) == 1


def test_a_share_group(run, root):
    """S18: it is listed with its type, and its settings can be altered."""
    settings = ("-c", "share.auto.offset.reset=earliest", "-c", "share.delivery.count.limit=3")
    run("alter", "s", *settings)
    assert run("alter", "s", "--reset", "share.delivery.count.limit") == (
        *(0, "share.auto.offset.reset=earliest\n", ""),
    )
    with embedlog.open(root) as log:
        log.create_topic("jobs")
        with log.producer() as producer:
            producer.send_batch("jobs", [b"1", b"2", b"3"])
        with log.share_consumer("jobs", group="s") as consumer:
            consumer.acknowledge(consumer.poll(max_records=1)[0])
            consumer.poll(max_records=1)
            described = run("describe", "s")[1]
            title = "s: share group, Stable, 1 member, lag 2 in 1 partition, 1 in flight"
            assert title in described
    listed = table(run("list", "--state")[1])
    assert ["s", "Empty", "0", "share"] in listed
    assert table(run("lag", "s")[1])[0][:6] == ["s", "jobs", "0", "1", "3", "2"]
    assert run("reset", "s", "--to-earliest", "--execute")[0] == 0
    assert json.loads(run("describe", "s", "--json")[1])[0]["partitions"][0]["current_offset"] == 0
    assert run("delete", "s")[0] == 0
    assert run("alter", "s") == (0, "", "")
