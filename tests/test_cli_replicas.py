"""`embedlog replicas`, `reassign`, `elect-leaders`, and other commands on several directories."""

from __future__ import annotations

import json
import shutil

import pytest

import embedlog
from embedlog.errors import NotEnoughReplicasError


@pytest.fixture
def disks(tmp_path, monkeypatch):
    """Three directories of a log with a topic of three partitions and a hundred records."""
    paths = [str(tmp_path / f"disk{number}") for number in (1, 2, 3)]
    with embedlog.open(paths, maintenance=False) as log:
        log.create_topic("flights", 3)
        with log.producer() as producer:
            for number in range(100):
                producer.send("flights", value=b"%d" % number, partition=number % 3)
    monkeypatch.setenv("EMBEDLOG_ROOT", paths[0])
    return paths


def replicas_of(path, topic="flights"):
    with embedlog.open(path, mode="r") as log:
        return [part["replicas"] for part in log.describe_topic(topic)["partitions"]]


def test_a_log_gets_directories_and_loses_them(command_line, tmp_path, monkeypatch):
    """From one directory to two, and back to the second one alone."""
    first, second = str(tmp_path / "disk1"), str(tmp_path / "disk2")
    monkeypatch.setenv("EMBEDLOG_ROOT", first)
    command_line("topics", "create", "flights")
    code, out, err = command_line("replicas", "add", second, "--rack", "b")
    assert (code, out) == (0, "")
    assert f"Added {second} as directory 2" in err
    assert command_line("reassign", "flights:0=1,2", "--execute")[0] == 0
    code, out, err = command_line("replicas", "list")
    assert code == 0
    assert out.splitlines()[0].split()[:4] == ["ID", "PATH", "RACK", "STATE"]
    assert out.splitlines()[2].split()[:4] == ["2", second, "b", "online"]
    assert "2 of 2 directories online" in err
    assert command_line("replicas", "remove", first)[0] == 0
    assert command_line("--root", second, "replicas", "list")[0] == 0
    assert replicas_of(second) == [[2]]


def test_json_lists_all_facts_of_directories(command_line, disks):
    """As `log.replicas` has them."""
    code, out, _ = command_line("--json", "replicas", "list")
    document = json.loads(out)
    assert code == 0
    assert [each["path"] for each in document["directories"]] == disks
    assert document["directories"][0]["in_sync"] == 3
    assert document["leaderless"] == []


def test_an_offline_directory_makes_the_listing_fail(command_line, disks):
    """So that a script can watch it."""
    shutil.rmtree(disks[1])
    code, out, err = command_line("replicas", "list")
    assert code == 1
    assert "offline: " in out
    assert "2 of 3 directories online" in err


def test_any_directory_leads_to_the_log(command_line, disks):
    """Also when others are gone; and a command to write says what it would need."""
    shutil.rmtree(disks[0])
    shutil.rmtree(disks[1])
    code, out, _ = command_line("--root", disks[2], "consume", "flights")
    assert code == 0
    assert sorted(map(int, out.split())) == list(range(100))
    assert command_line("--root", disks[2], "topics", "list")[1] == "flights\n"
    code, out, err = command_line("--root", disks[2], "produce", "flights", stdin=b"x\n")
    assert (code, out) == (4, "")
    assert "1 of 3 directories of the log are online" in err


def test_a_survivor_gives_up_the_others_only_with_force(command_line, disks):
    """Then it goes on alone."""
    shutil.rmtree(disks[0])
    shutil.rmtree(disks[1])
    remove = ("--root", disks[2], "replicas", "remove", *disks[:2])
    assert command_line(*remove)[0] == 4
    with pytest.raises(NotEnoughReplicasError):
        embedlog.open(disks[2])
    code, _, err = command_line(*remove, "--force")
    assert code == 0
    assert "1 of 1 directory online" in err
    with embedlog.open(disks[2], maintenance=False) as log:
        assert len(log["flights"]) == 100


def test_topics_are_created_and_described_with_copies(command_line, disks):
    """Leader, replicas and ISR of each partition; too many copies are a wrong command."""
    assert command_line("topics", "create", "fleet", "--replication-factor", "2")[0] == 0
    code, _, err = command_line("topics", "create", "u", "--replication-factor", "4")
    assert code == 2
    assert "larger than the number of directories, 3" in err
    _, out, _ = command_line("topics", "describe", "fleet")
    replicas = ",".join(map(str, replicas_of(disks[0], "fleet")[0]))
    assert f"leader {replicas[0]}, replicas {replicas}, isr {replicas}" in out
    document = json.loads(command_line("--json", "topics", "describe", "fleet")[1])
    assert document[0]["partitions"][0]["isr"] == replicas_of(disks[0], "fleet")[0]


def test_a_plan_is_printed_and_changed_by_execute_only(command_line, disks, tmp_path):
    """Moves come from the plan, the command line, or a file of kafka-reassign-partitions."""
    before = replicas_of(disks[0])
    code, out, err = command_line("reassign", "flights:0=1", "flights:1=2,1")
    assert code == 0
    assert out.splitlines()[1].split()[:2] == ["flights", "0"]
    assert err.count("ry run") == 1
    assert replicas_of(disks[0]) == before
    execute = ("--execute", "--throttle", "1e9")
    code, _, err = command_line("reassign", "flights:0=1", "flights:1=2,1", *execute)
    assert code == 0
    assert "done" in err
    assert replicas_of(disks[0])[:2] == [[1], [2, 1]]

    partitions = [{"topic": "flights", "partition": 2, "replicas": [3], "log_dirs": ["any"]}]
    moves = tmp_path / "moves.json"
    moves.write_text(json.dumps({"version": 1, "partitions": partitions}))
    assert command_line("reassign", "--from", str(moves), "--execute")[0] == 0
    assert replicas_of(disks[0])[2] == [3]
    moves.write_text("[]")
    code, _, err = command_line("reassign", "--from", str(moves))
    assert code == 2
    assert "moves.json has no moves" in err
    assert command_line("reassign", "--cancel")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("reassign", "flights:0"), 2, "A move must be TOPIC:N=ID,ID"),
        (("reassign", "flights:0=x"), 2, "Replicas must be ids of directories"),
        (("reassign", "flights:0=1,9"), 2, "The log has no directory 9"),
        (("reassign", "flights:0=1,1"), 2, "distinct replicas"),
        (("reassign", "flights:9=1"), 3, "The topic has partitions 0 to 2"),
        (("reassign", "fleet:0=1"), 3, "fleet"),
        (("reassign", "--throttle", "0"), 2, "must be a positive number of bytes"),
        (("elect-leaders", "flights:9"), 3, "The topic has partitions 0 to 2"),
        (("elect-leaders", "--election-type", "best"), 2, "invalid choice"),
        (("replicas", "remove", "/nowhere"), 1, "The log has no such directory"),
        (("replicas",), 2, "name a verb: list, add, remove"),
    ],
)
def test_wrong_commands_change_nothing_and_say_what_is_wrong(
    command_line, disks, arguments, code, message
):
    """In one line, without a traceback."""
    before = replicas_of(disks[0])
    assert command_line(*arguments)[:2] == (code, "")
    assert message in command_line(*arguments)[2]
    assert replicas_of(disks[0]) == before


def test_leaders_are_elected(command_line, disks):
    """The preferred ones by default; the output names what changed."""
    assert command_line("elect-leaders")[:2] == (0, "")
    with embedlog.open(disks[0], maintenance=False) as log:
        leader = log.describe_topic("flights")["partitions"][0]["leader"]
        log.replicas.reassign({embedlog.TopicPartition("flights", 0): (leader % 3 + 1, leader)})
    code, out, _ = command_line("elect-leaders", "flights:0")
    assert (code, out) == (0, f"flights-0: directory {leader % 3 + 1} leads\n")


def test_verify_compares_copies(command_line, disks, tmp_path):
    """A difference is one line, and the exit code says that there is one."""
    assert command_line("verify", "--replicas")[0] == 0
    with embedlog.open(disks[0], mode="r") as log:
        follower = log.describe_topic("flights")["partitions"][0]["isr"][1]
    directory = next((tmp_path / f"disk{follower}" / "topics").iterdir()) / "0"
    (segment,) = directory.glob("*.arrows")
    data = bytearray(segment.read_bytes())
    data[-9] ^= 1
    segment.write_bytes(data)
    code, out, err = command_line("verify", "--replicas")
    assert code == 1
    assert out.startswith(f"flights-0: {disks[follower - 1]} ")
    assert "differences: 1" in err
    code, out, _ = command_line("verify", "--replicas", "--json")
    assert json.loads(out)["differences"][0]["copy"] == disks[follower - 1]
    assert command_line("dump", str(segment))[0] == 1


def test_doctor_looks_at_every_directory(command_line, disks):
    """One that is missing, and those that would break together."""
    code, out, _ = command_line("doctor", "--json")
    report = json.loads(out)
    assert [each["state"] for each in report["directories"].values()] == ["present"] * 3
    assert report["copies"]["under_replicated"] == 0
    assert any("are on one file system" in finding for finding in report["findings"])
    shutil.rmtree(disks[2])
    code, out, _ = command_line("doctor", "--json")
    report = json.loads(out)
    assert code == 1
    assert f"{disks[2]} is missing" in report["findings"]
    assert "1 directory offline" in report["findings"]
    assert "3 partitions with copies that are not in sync" in report["findings"]


def test_the_usage_of_a_topic_is_that_of_all_its_copies(command_line, disks):
    """What the disks have less of."""
    usage = json.loads(command_line("du", "flights", "--json")[1])
    with embedlog.open(disks[0], mode="r") as log:
        assert usage["bytes"] == 3 * log["flights"].size_bytes()


def test_directories_are_completed(command_line, disks):
    """For `replicas remove`."""
    _, out, _ = command_line("__complete", "replicas", "remove", "")
    assert [line.split("\t")[0] for line in out.splitlines()] == disks


def test_topics_get_more_copies(command_line, disks):
    """Those that are named, or all; a move beside it is a wrong command."""
    command_line("topics", "create", "one", "--replication-factor", "1")
    assert command_line("reassign", "--replication-factor", "2", "one")[0] == 0
    assert len(replicas_of(disks[0], "one")[0]) == 1  # it was a dry run
    assert command_line("reassign", "--replication-factor", "2", "one", "--execute")[0] == 0
    assert len(replicas_of(disks[0], "one")[0]) == 2
    assert command_line("reassign", "--replication-factor", "1", "--execute")[0] == 0
    assert len(replicas_of(disks[0], "flights")[0]) == 1
    for wrong in (["one:0=1"], ["--cancel"], ["--from", "moves.json"]):
        code, _, err = command_line("reassign", "--replication-factor", "2", *wrong)
        assert (code, "not both" in err) == (2, True)


def test_a_reassignment_that_another_process_cancels_fails(command_line, disks, monkeypatch):
    """It does not say that it is done; nor does --cancel of what is not moved exit with 0."""
    from embedlog.replication import reassign

    begin = reassign.begin

    def begin_and_cancel(root, moves):
        count = begin(root, moves)
        assert command_line("reassign", "--cancel")[0] == 0
        return count

    monkeypatch.setattr(reassign, "begin", begin_and_cancel)
    code, out, err = command_line("reassign", "flights:0=1", "--execute")
    assert code == 1
    assert "superseded" in out
    assert "done" not in err
    assert len(replicas_of(disks[0])[0]) == 3
    assert command_line("reassign", "--cancel", "flights:0")[0] == 1
    assert command_line("reassign", "--cancel", "--json")[1] == '{"cancelled": 0}\n'
