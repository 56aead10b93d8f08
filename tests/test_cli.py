"""The command line: what it prints, what it returns, and what it does not load."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from support.children import PausedChild
from support.patience import patient
from support.roots import encoded, segment_files, values

import embedlog
from embedlog.cli import main
from embedlog.keyspace import FORMAT_VERSION

COMMANDS = (
    *("topics", "produce", "consume", "tail", "groups", "activity"),
    *("compact", "maintain", "explain", "dump", "verify", "repair", "doctor"),
)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Where the log of a test is; commands know it from the environment."""
    path = tmp_path / "log"
    monkeypatch.setenv("EMBEDLOG_ROOT", str(path))
    return path


@pytest.fixture
def filled(root):
    """Two partitions: 0 has five records in three batches, 1 has one with headers."""
    with embedlog.open(root) as log:
        log.create_topic("t", partitions=2)
        log.partition("t", 0).append([encoded(b"v0", b"v1", keys=[b"k0", None], at=[5, 6])])
        log.partition("t", 0).append([encoded(None, b"\xff", at=7)])
        log.partition("t", 0).append([encoded(b"v4", at=8)])
        heads = [[("a", b"1"), ("b", None)]]
        log.partition("t", 1).append([encoded(b"h", at=9, headers=heads)])
    return root


@pytest.fixture
def run(capfdbinary, monkeypatch):
    """Run a command in this process: its code, stdout as text, stderr as text."""

    def command(*words, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(list(words))
        out, err = capfdbinary.readouterr()
        return code, out.decode("utf-8", "backslashreplace"), err.decode()

    return command


def command(*words):
    return [sys.executable, "-m", "embedlog", *words]


def shell(*words, **options):
    """Run a command as a user does."""
    return subprocess.run(command(*words), capture_output=True, text=True, check=False, **options)


# What all commands have in common


def test_help_names_every_command_and_exit_code(run):
    """`--help` is the manual: what there is, and what each number means."""
    code, out, _ = run("--help")

    assert code == 0
    for word in (*COMMANDS, "130", "141", "exit codes"):
        assert word in out


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(run, name):
    """Also for who only types the command and --help."""
    code, out, _ = run(name, "--help")

    assert code == 0
    assert out.startswith(f"usage: embedlog {name}")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("nothing",),
        ("topics",),
        ("topics", "create"),
        ("topics", "create", "../x"),
        ("topics", "create", "t", "-p", "0"),
        ("topics", "create", "t", "-p", "two"),
        ("topics", "create", "t", "-c", "retention.ms"),
        ("topics", "create", "t", "-c", "retention.mss=1"),
        ("topics", "alter", "t"),
        ("consume", "t", "-o", "soon"),
        ("consume", "t", "-f", "%q"),
        ("consume", "t", "-m", "-1"),
        ("consume", "t", "--from-beginning", "-o", "1"),
    ],
)
def test_a_wrong_command_is_2_and_one_message(run, root, words):
    """Usage: argparse's own, and names and settings that are refused."""
    code, out, err = run(*words)

    assert (code, out) == (2, "")
    assert "embedlog" in err
    assert "Traceback" not in err


def test_a_log_must_be_named(run, monkeypatch):
    """By --root, before or after the command, or by the environment."""
    monkeypatch.delenv("EMBEDLOG_ROOT", raising=False)

    code, _, err = run("topics", "list")

    assert code == 2
    assert "EMBEDLOG_ROOT" in err


def test_root_may_stand_before_and_after_the_command(run, filled, monkeypatch):
    """As people type it."""
    monkeypatch.setenv("EMBEDLOG_ROOT", "/nonexistent")

    assert run("--root", str(filled), "topics", "list")[:2] == (0, "t\n")
    assert run("topics", "list", "--root", str(filled))[:2] == (0, "t\n")
    assert run("-r", str(filled), "--json", "topics", "list")[:2] == (0, '["t"]\n')


@pytest.mark.parametrize(
    "words",
    [
        ("topics", "list"),
        ("topics", "describe"),
        ("topics", "delete", "t"),
        ("consume", "t"),
        ("consume", "t", "--follow"),
        ("tail", "t"),
        ("verify",),
        ("repair", "--yes"),
        ("dump", "nothing.arrows"),
    ],
)
def test_a_missing_log_is_3_and_is_not_created(run, root, words):
    """Only `create` and `produce` make a log."""
    code, out, err = run(*words)

    assert (code, out) == (3, "")
    assert err.startswith("embedlog: ")
    assert err.count("\n") == 1
    assert not root.exists()


@pytest.mark.parametrize(
    "words",
    [
        ("topics", "describe", "other"),
        ("topics", "delete", "t", "other"),
        ("topics", "alter", "other", "-p", "2"),
        ("consume", "other"),
        ("consume", "t", "-p", "7"),
        ("consume", "t", "-p", "0", "-o", "99"),
        ("tail", "other"),
    ],
)
def test_a_missing_topic_partition_or_offset_is_3(run, filled, words):
    """And nothing was changed."""
    assert run(*words)[:2] == (3, "")
    assert run("topics", "list")[1] == "t\n"


def test_a_path_that_is_a_file_is_3(run, root):
    """One line, and the file is left alone."""
    root.write_text("mine")

    for words in (("topics", "list"), ("topics", "create", "t"), ("verify",), ("doctor",)):
        code, _, err = run(*words)
        assert code == 3
        assert str(root) in err
    assert root.read_text() == "mine"


def test_a_newer_format_is_4(run, filled):
    """Storage: the versions are told, by the light commands too."""
    file = filled / "embedlog.toml"
    file.write_text(
        file.read_text().replace(f"format = {FORMAT_VERSION}", f"format = {FORMAT_VERSION + 1}")
    )

    for words in (("topics", "list"), ("consume", "t"), ("topics", "create", "u")):
        code, _, err = run(*words)
        assert code == 4
        assert f"format {FORMAT_VERSION + 1}" in err


# How heavy it is

LOADED = """
    import sys
    from embedlog.cli import main
    code = main(sys.argv[1:])
    heavy = {"pyarrow", "numpy", "pandas", "polars", "pyspark", "sortedcontainers"}
    print(code, sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


def loaded(*words):
    code = textwrap.dedent(LOADED)
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("topics", "list")])
def test_commands_without_records_do_not_load_pyarrow(filled, words):
    """A shell's completion, or a prompt, calls them often."""
    assert loaded(*words) == "0 []"


def test_reading_records_does_not_load_pandas(filled):
    """pyarrow imports it at a whim, and that takes longer than the command."""
    assert "pandas" not in loaded("consume", "t", "--json")


def test_the_light_listing_and_the_catalog_agree(run, filled):
    """It reads the catalogue's rows by their own name for them."""
    with embedlog.open(filled) as log:
        for name in ("a", "u", "S", "T"):
            log.create_topic(name)
        names = log.topics()

    assert run("topics", "list")[1].split() == names


def test_a_command_that_reads_no_records_loads_nothing_heavy(filled):
    """`topics list` starts in a few times what Python takes (bench_start.py tells how many)."""
    script = (
        "import sys; from embedlog.cli import main; main(['topics', 'list']); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert not {"pyarrow", "pyspark", "numpy", "pandas", "multiprocessing"} & {*done.stdout.split()}


# Topics


def test_topics_are_created_listed_altered_and_deleted(run, root):
    """The life of a topic in five commands."""
    assert run("topics", "create", "t", "-p", "2", "-c", "retention.ms=5") == (0, "", "")
    assert run("topics", "create", "t")[0] == 1
    assert run("topics", "create", "t", "--if-not-exists")[0] == 0
    assert run("topics", "list") == (0, "t\n", "")

    words = ("-c", "segment.bytes=4000", "--reset", "retention.ms", "-p", "3")
    assert run("topics", "alter", "t", *words) == (0, "", "")

    with embedlog.open(root) as log:
        found = log.describe_topic("t")
    assert found["overrides"] == {"segment.bytes": 4000}
    assert len(found["partitions"]) == 3
    assert run("topics", "alter", "t", "-p", "1")[0] == 2
    assert run("topics", "delete", "t") == (0, "", "Deleted t\n")
    assert run("topics", "list") == (0, "", "")


def test_a_topic_that_exists_with_other_settings_is_refused(run, root):
    """The message has the command that would apply them."""
    assert run("topics", "create", "t", "-p", "2", "-c", "retention.ms=5") == (0, "", "")
    same = ("-p", "2", "-c", "retention_ms=5", "-c", "segment.bytes=1073741824")
    assert run("topics", "create", "t", "--if-not-exists", *same) == (0, "", "")

    words = ("-p", "3", "-c", "cleanup.policy=compact", "-c", "retention.ms=5")
    code, _, output = run("topics", "create", "t", "--if-not-exists", *words)
    assert code == 1
    assert "partitions is 2, not 3; cleanup.policy is 'delete', not 'compact'" in output
    command = "embedlog topics alter t -p 3 -c cleanup.policy=compact"
    assert output.rstrip().endswith(command)
    assert run(*command.split()[1:])[0] == 0
    assert run("topics", "create", "t", "--if-not-exists", *words) == (0, "", "")

    code, _, output = run("topics", "create", "t", "--if-not-exists", "-p", "1")
    assert code == 1
    assert "The number of partitions cannot be reduced." in output
    assert "topics alter" not in output


def test_topics_are_described_for_people_and_programs(run, filled):
    """The same facts twice."""
    code, out, _ = run("topics", "describe")
    assert code == 0
    assert "t  id 1, 2 partitions, 6 records" in out
    assert "partition 0: offsets 0 to 5" in out

    code, out, _ = run("topics", "describe", "t", "--json")
    assert code == 0
    (topic,) = json.loads(out)
    assert [part["end_offset"] for part in topic["partitions"]] == [5, 1]
    assert topic["config"]["cleanup.policy"] == "delete"


def test_a_new_topic_is_verified_before_anything_is_in_it(run, root):
    """Its file is named, and made with the first record: that is no damage."""
    run("topics", "create", "t", "-p", "2")

    assert run("verify")[:2] == (0, "")
    assert run("consume", "t") == (0, "", "")


# Producing


def test_lines_become_records(run, root):
    """One a line, empty ones too, and the last without its newline; the topic is made."""
    assert run("produce", "t", stdin=b"a\n\nb b\r\n\xff\nlast") == (0, "", "")

    with embedlog.open(root) as log:
        found = [(record.key, record.value) for record in log.topic("t")]
    assert found == [(None, b"a"), (None, b""), (None, b"b b\r"), (None, b"\xff"), (None, b"last")]


def test_a_line_may_have_a_key(run, root):
    """Up to the first separator; a line without one has no key."""
    run("produce", "t", "-K", ": ", stdin=b"k: v: w\nplain\n: x\ny: \n")

    with embedlog.open(root) as log:
        found = [(record.key, record.value) for record in log.topic("t")]
    assert found == [(b"k", b"v: w"), (None, b"plain"), (b"", b"x"), (b"y", b"")]


def test_a_partition_may_be_named(run, filled):
    """And must exist."""
    assert run("produce", "t", "-p", "1", stdin=b"x\n")[0] == 0
    assert run("produce", "t", "-p", "9", stdin=b"x\n")[0] == 3

    with embedlog.open(filled) as log:
        assert values(log.partition("t", 1)) == [b"h", b"x"]


def test_json_lines_set_all_fields_of_a_record(run, filled):
    """Value, key, headers, partition, timestamp; bytes in base64, other JSON as its text."""
    lines = [
        {"value": "ä", "key": "k", "partition": 0, "timestamp": 17, "headers": {"h": "1"}},
        {"value": {"base64": "/w=="}, "partition": 1, "headers": [["h", "1"], ["h", None]]},
        {"value": None, "key": {"base64": ""}, "partition": 0, "timestamp": 0},
        {"value": {"deep": [1, "ö"]}, "partition": 0, "timestamp": 18},
        {"partition": 0, "value": 5, "timestamp": 19},
    ]
    text = "\n\n".join(json.dumps(line) for line in lines)

    code, out, _ = run("produce", "t", "--json", stdin=text.encode())

    assert (code, json.loads(out)) == (0, {"records": 5})
    with embedlog.open(filled) as log:
        zero = list(log.topic("t").partition(0))[5:]
        one = list(log.topic("t").partition(1))[1:]
    assert [(record.value, record.key, record.timestamp) for record in zero] == [
        ("ä".encode(), b"k", 17),
        (None, b"", 0),
        ('{"deep":[1,"ö"]}'.encode(), None, 18),
        (b"5", None, 19),
    ]
    assert [record.headers for record in zero] == [[("h", b"1")], [], [], []]
    assert (one[0].value, one[0].headers) == (b"\xff", [("h", b"1"), ("h", None)])
    assert abs(one[0].timestamp - time.time() * 1000) < 60_000


HEADERS = "headers must be {name: value} or [[name, value], ...]"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("nonsense", "Line 2"),
        ("[1]", "Line 2: must be a JSON object"),
        ('{"valu": 1}', "Line 2: unknown field 'valu'"),
        ('{"value": {"base64": "?"}}', "Line 2: base64"),
        ('{"value": "x", "partition": "0"}', "Line 2: partition must be a whole number"),
        ('{"value": "x", "timestamp": true}', "Line 2: timestamp must be a whole number"),
        ('{"headers": [1]}', f"Line 2: {HEADERS}, got [1]"),
        ('{"headers": 5}', f"Line 2: {HEADERS}, got 5"),
        ('{"headers": "h"}', f"Line 2: {HEADERS}, got 'h'"),
        ('{"headers": [["h"]]}', f"Line 2: {HEADERS}, got [['h']]"),
        ('{"headers": [[1, "x"]]}', f"Line 2: {HEADERS}, got [[1, 'x']]"),
    ],
)
def test_an_invalid_line_is_named(run, root, line, reason):
    """With its number, counted from 1, and what is wrong with it."""
    code, _, err = run("produce", "t", "--json", stdin=f'{{"value": 1}}\n{line}\n'.encode())

    assert code == 1
    assert run("consume", "t")[1] == ""
    assert err.startswith(f"embedlog: {reason}")


def test_the_json_of_consume_can_be_produced(run, filled):
    """A topic is copied, or moved to another log, through a pipe."""
    _, lines, _ = run("consume", "t", "--json")

    assert run("topics", "create", "u", "-p", "2")[0] == 0
    assert run("produce", "u", "--json", stdin=lines.encode())[0] == 0

    _, copied, _ = run("consume", "u", "--json")
    assert copied.replace('"topic": "u"', '"topic": "t"') == lines


def test_sync_is_durability_fsync(run, root):
    """When it returns, the records would survive a power cut."""
    assert run("produce", "t", "--sync", "-z", "zstd", stdin=b"x\n")[0] == 0

    with embedlog.open(root) as log:
        assert log.partition("t", 0).tail().durable_offset == 1
        assert values(log.partition("t", 0)) == [b"x"]


def test_long_input_is_sent_in_chunks(root):
    """A hundred thousand lines through a pipe, in order, nothing lost; no bar in a pipe."""
    lines = "".join(f"line {number}\n" for number in range(100_000))

    done = shell("produce", "t", input=lines)
    again = shell("consume", "t")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert again.stdout == lines


# Consuming


def test_consume_prints_values_from_the_beginning_to_the_end(run, filled):
    """The whole topic, partition by partition, and then it stops."""
    assert run("consume", "t") == (0, "v0\nv1\n\n\\xff\nv4\nh\n", "")


@pytest.mark.parametrize(
    ("words", "offsets"),
    [
        ((), "0:0 0:1 0:2 0:3 0:4 1:0"),
        (("--from-beginning",), "0:0 0:1 0:2 0:3 0:4 1:0"),
        (("-o", "earliest", "-m", "2"), "0:0 0:1"),
        (("-o", "latest"), ""),
        (("-o", "3"), "0:3 0:4"),
        (("-o", "0"), "0:0 0:1 0:2 0:3 0:4 1:0"),
        (("-o", "-2"), "0:3 0:4 1:0"),
        (("-o", "-0"), ""),
        (("-o", "-99", "-p", "0"), "0:0 0:1 0:2 0:3 0:4"),
        (("-p", "0", "-o", "1", "-m", "3"), "0:1 0:2 0:3"),
        (("-p", "1"), "1:0"),
        (("-p", "1", "-o", "1"), ""),
        (("-m", "0"), ""),
    ],
)
def test_consume_begins_at_the_offset_and_ends_after_max(run, filled, words, offsets):
    """An offset, earliest, latest, or so many before the end of each partition."""
    code, out, _ = run("consume", "t", *words, "-f", "%p:%o ")

    assert (code, out.strip()) == (0, offsets)


def test_a_format_can_print_all_fields_of_a_record(run, filled):
    """kcat's letters and escapes; a null has length -1."""
    text = r"%t/%p/%o k=%k(%K) v=%s(%S) %T [%h] 100%%\t\x41\n"

    _, out, _ = run("consume", "t", "-f", text)

    assert out.splitlines() == [
        "t/0/0 k=k0(2) v=v0(2) 5 [] 100%\tA",
        "t/0/1 k=(-1) v=v1(2) 6 [] 100%\tA",
        "t/0/2 k=(-1) v=(-1) 7 [] 100%\tA",
        "t/0/3 k=(-1) v=\\xff(1) 7 [] 100%\tA",
        "t/0/4 k=(-1) v=v4(2) 8 [] 100%\tA",
        "t/1/0 k=(-1) v=h(1) 9 [a=1,b=] 100%\tA",
    ]


def test_json_has_all_fields_of_a_record(run, filled):
    """One object a line; what is not UTF-8 is base64, and null is null."""
    _, out, _ = run("consume", "t", "--json")

    found = [json.loads(line) for line in out.splitlines()]
    assert found[0] == {
        "topic": "t",
        "partition": 0,
        "offset": 0,
        "timestamp": 5,
        "timestamp_type": 0,
        "key": "k0",
        "value": "v0",
        "headers": [],
    }
    assert [record["value"] for record in found[2:4]] == [None, {"base64": "/w=="}]
    assert found[5]["headers"] == [["a", "1"], ["b", None]]


def test_tail_prints_the_last_of_each_partition(run, filled):
    """Ten, unless told otherwise."""
    assert run("tail", "t", "-n", "1") == (0, "v4\nh\n", "")
    assert run("tail", "t", "-n", "0") == (0, "", "")
    assert run("tail", "t")[1].count("\n") == 6
    assert run("tail", "t", "-n", "1", "-p", "0", "--format", "%o;")[1] == "4;"


def test_consuming_changes_nothing(run, filled):
    """Reading a log is not joining it: not a byte of it is another afterwards."""
    before = {file: file.stat().st_mtime_ns for file in filled.rglob("*.*") if file.is_file()}

    run("consume", "t")
    run("verify")
    run("topics", "describe")

    after = {file: file.stat().st_mtime_ns for file in filled.rglob("*.*") if file.is_file()}
    ours = {file for file in before if file.name != "lock.mdb"}
    assert {file: before[file] for file in ours} == {file: after[file] for file in ours}


@contextlib.contextmanager
def follow(*words):
    """Run a command beside the test; it is ended, and its pipes closed, whatever happens."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command(*words), stdout=pipe, stderr=pipe, text=True, errors="backslashreplace"
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def test_tail_counts_the_records_that_compaction_left(run, filled):
    """As many as were asked for, if there are so many: not so many offsets."""
    with embedlog.open(filled) as log:
        log.create_topic("keys", config={"cleanup.policy": "compact"})
        part = log.partition("keys", 0)
        part.append([encoded(b"a", b"b", *[b"c"] * 20, keys=[b"1", b"2", *[b"3"] * 20])])
        log.compact("keys", force=True)

    assert run("tail", "keys", "-n", "2", "--format", "%o;")[1] == "1;21;"
    assert run("consume", "keys", "-o", "-3", "--format", "%o;")[1] == "0;1;21;"


def test_tail_follows_until_it_is_interrupted(filled):
    """`tail -f` prints what comes when it comes, and Ctrl-C ends it silently with 130."""
    with follow("tail", "-f", "t", "-n", "1", "--format", "%p:%o %s\\n") as tail:
        assert [tail.stdout.readline() for _ in range(2)] == ["0:4 v4\n", "1:0 h\n"]
        with embedlog.open(filled) as log:
            log.partition("t", 1).append([encoded(b"new")])
            assert tail.stdout.readline() == "1:1 new\n"
            log.create_partitions("t", 3)
            log.partition("t", 2).append([encoded(b"added")])
            assert tail.stdout.readline() == "2:0 added\n"
        # Writers come and go; it stays.
        with embedlog.open(filled) as log:
            log.partition("t", 0).append([encoded(b"again")])
        assert tail.stdout.readline() == "0:5 again\n"
        tail.send_signal(signal.SIGINT)
        out, err = tail.stdout.read(), tail.stderr.read()

        assert (tail.wait(patient(20)), out, err) == (130, "", "")


def test_follow_begins_at_the_offset_and_ends_after_max(filled):
    """With --max it ends by itself, in the midst of what came."""
    words = ("-m", "7", "-o", "earliest", "-f", "%s\\n")
    with follow("consume", "t", "--follow", *words) as consume:
        assert [consume.stdout.readline() for _ in range(2)] == ["v0\n", "v1\n"]
        with embedlog.open(filled) as log:
            # Two in one batch: the first is the seventh of all.
            log.partition("t", 1).append([encoded(b"7th", b"8th")])
        out, err = consume.stdout.read(), consume.stderr.read()

        assert (consume.wait(patient(20)), err) == (0, "")
        assert out == "\n\\xff\nv4\nh\n7th\n"


def test_a_closed_pipe_ends_the_command_silently(root):
    """`embedlog consume t | head -1`: no traceback, no message."""
    with embedlog.open(root) as log:
        log.create_topic("t")
        for _ in range(20):
            log.partition("t", 0).append([encoded(*[b"x" * 100] * 1000)])

    reader = subprocess.Popen(
        command("consume", "t"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert reader.stdout.readline() == b"x" * 100 + b"\n"
    reader.stdout.close()
    err = reader.stderr.read()
    reader.stderr.close()

    assert (reader.wait(patient(20)), err) == (141, b"")


# Looking into files


def test_dump_shows_every_batch_of_a_file(run, filled):
    """Offsets, counts, times, CRCs, sizes; for people a line, for programs an object."""
    file = str(next(file for file in segment_files(filled) if "/0/" in str(file)))

    code, out, _ = run("dump", file)
    assert code == 0
    assert "offsets 0 to 2, 2 records  times 5 to 6" in out
    assert "not sealed, 0 damaged places" in out
    assert run("dump", file, "--columns")[1].count(" nulls\n") == 9

    _, out, _ = run("dump", "--json", file)
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["base_offset"] for one in found] == [0, 2, 4]
    assert [one["count"] for one in found] == [2, 2, 1]
    assert found[0]["position"] + found[0]["size"] == found[1]["position"]
    assert found[0]["size"] == found[0]["head_size"] + found[0]["body_size"]
    assert [column["nulls"] for column in found[1]["columns"]] == [0, 2, 1]
    assert len(found[0]["block_crc"]) == len(found[0]["metadata_crc"]) == 8
    assert sum(column["bytes"] for column in found[0]["columns"]) == found[0]["body_size"]


def test_dump_shows_producers_headers_and_the_end_mark(run, root):
    """What a batch says about itself beside its records."""
    with embedlog.open(root) as log:
        log.create_topic("t")
        one = encoded(b"v", headers=[[("a", b"")]], producer=(7, 2, 40), compression="lz4")
        log.partition("t", 0).append([one])
        log.partition("t", 0).roll()
    file = str(segment_files(root)[0])

    _, out, _ = run("dump", file)

    assert "producer 7:2 from 40" in out
    assert "(compressed, headers)" in out
    assert "sealed, 0 damaged places" in out
    assert "not sealed" not in out
    facts = json.loads(run("dump", "--json", file)[1])
    assert (facts["producer_id"], facts["base_sequence"]) == (7, 40)


END = b"\xff\xff\xff\xff\0\0\0\0"
LONG = b"\xff\xff\xff\xff\0\0\x10\0"
# What is done to the file, at the second batch's place; the batches that stay; the reason told.
DAMAGES = {
    "a value": (lambda data, at: data.replace(b"v0", b"V0"), [0, 2, 4], "CRC of column value"),
    "a beginning": (lambda data, at: _over(data, at, b"xxxx"), [0, 4], "no batch begins here"),
    "a block": (lambda data, at: data.replace(b"EMBL", b"EMBX", 1), [2, 4], "block's CRC"),
    "the schema": (lambda data, at: _over(data, 0, b"xxxx"), [0, 2, 4], "Arrow schema"),
    "the end": (lambda data, at: data[:-20], [0, 2], "truncated"),
    "an end mark": (lambda data, at: _over(data, at, END), [0, 4], "end mark"),
    "a length": (lambda data, at: _over(data, at, LONG), [0, 4], "truncated"),
    "nine bytes more": (lambda data, at: data[:at] + b"9" * 9 + data[at:], [0, 2, 4], "no batch"),
    "everything": (lambda data, at: bytes(len(data)), [], "Arrow schema"),
}


def _over(data, place, new):
    return data[:place] + new + data[place + len(new) :]


@pytest.mark.parametrize("damage", DAMAGES)
def test_dump_reports_damage_and_continues(run, filled, damage):
    """Whatever is still whole is shown; the rest by its place; the exit code is 1."""
    spoil, bases, reason = DAMAGES[damage]
    file = next(file for file in segment_files(filled) if "/0/" in str(file))
    second = json.loads(run("dump", "--json", str(file))[1].splitlines()[1])["position"]
    file.write_bytes(spoil(file.read_bytes(), second))

    code, out, _ = run("dump", "--json", str(file))

    found = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert [one["base_offset"] for one in found if "count" in one] == bases
    assert any(reason in one.get("damage", "") for one in found)
    ends = [one["position"] + one["size"] for one in found]
    assert [one["position"] for one in found[1:]] == ends[:-1]
    assert run("dump", str(file))[0] == 1


def test_dump_of_an_empty_file_is_empty(run, tmp_path):
    """A file that was made and never written, as a crash leaves it, is not a segment."""
    (tmp_path / "empty").write_bytes(b"")

    assert run("dump", str(tmp_path / "empty"))[0] == 1


# Health


def test_verify_reports_damage_and_repair_removes_it(run, filled):
    """Nothing is changed before --yes; afterwards it is well, without the damaged records."""
    assert run("verify")[0] == 0
    assert run("repair")[:2] == (0, "")
    file = next(file for file in segment_files(filled) if "/0/" in str(file))
    spoiled = file.read_bytes().replace(b"v0", b"V0")
    file.write_bytes(spoiled)

    code, out, err = run("verify")
    assert (code, err) == (1, "findings: 1\n")
    assert "t-0" in out
    assert "CRC of column value" in out
    (finding,) = json.loads(run("verify", "--json")[1])["findings"]
    assert (finding["topic"], finding["partition"]) == ("t", 0)

    code, out, err = run("repair")
    assert code == 1
    assert "offsets 0 to 1 dropped" in out
    assert "--yes" in err
    assert file.read_bytes() == spoiled

    code, out, _ = run("repair", "--yes", "--json")
    assert code == 0
    assert "offsets 0 to 1 dropped" in json.loads(out)["repaired"][0]
    assert run("verify")[0] == 0
    assert run("consume", "t", "-f", "%p:%o ")[1] == "0:2 0:3 0:4 1:0 "


def test_reading_a_damaged_log_is_4(run, filled):
    """The batch is named; what was before it was printed."""
    file = next(file for file in segment_files(filled) if "/0/" in str(file))
    file.write_bytes(file.read_bytes().replace(b"v4", b"V4"))

    code, _, err = run("consume", "t")

    assert code == 4
    assert "CRC" in err
    assert "topics/t-1/0/" in err


def test_doctor_checks_the_machine_and_the_log(run, filled):
    """Versions, speeds, space, slots and state; a healthy log on a good machine has no findings."""
    code, out, _ = run("doctor", "--json")

    report = json.loads(out)
    assert report["versions"]["embedlog"] == embedlog.__version__
    assert report["checksum"]["mb_per_second"] > 0
    assert report["storage"]["root"] == str(filled)
    assert report["storage"]["free_bytes"] > 0
    assert report["storage"]["fsync_us"] >= 0
    assert report["log"]["format"] == FORMAT_VERSION
    assert (report["log"]["in_use"], report["log"]["closed_cleanly"]) == (False, True)
    assert report["log"]["live_is_of_this_boot"] is True
    assert report["log"]["state"]["reader_slots"] >= 2048
    assert code == (1 if report["findings"] else 0)
    assert "findings" in run("doctor")[1]
    assert not [name for name in os.listdir(filled) if "doctor" in name]


def test_doctor_reports_processes_and_unclean_ends(run, filled):
    """A log in use, one that a killed process left, and one of another boot."""
    with embedlog.open(filled):
        assert json.loads(run("doctor", "--json")[1])["log"]["in_use"] is True
        assert run("verify")[0] == 0
    (filled / "closed").unlink()
    assert "was not closed cleanly" in run("doctor")[1]
    (filled / "live" / "boot").write_text("another")
    code, out, _ = run("doctor")
    assert code == 1
    assert "another boot" in out


def test_doctor_reports_long_reads(run, filled, monkeypatch):
    """A stopped process in the middle of a read is named, and its state (P21)."""
    monkeypatch.setattr("embedlog.cli.doctor._LONG_READ_SECONDS", 0.05)
    with embedlog.open(filled) as log:
        assert "has been reading" not in run("doctor")[1]
        with PausedChild(lambda ready: log.root.context.live.read(lambda txn: ready())) as child:
            log.create_topic("new")
            log.partition("new", 0).append([encoded(b"x")])
            child.stop()
            code, out, _ = run("doctor")
            output = f"Process {child.pid} (state T) has been reading live for more than 0.05 s"

    assert code == 1
    assert output in out


def test_doctor_needs_no_log(run, root):
    """It tells about the machine, and makes nothing."""
    code, out, _ = run("doctor", "--json")

    assert code in (0, 1)
    assert "log" not in json.loads(out)
    assert not root.exists()
