"""The command line: what it prints, which code it returns, and which modules it loads."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from support.children import PausedChild
from support.patience import patient
from support.roots import encoded, segment_files, values
from support.tiers import sample

import embedlog
from embedlog.cli.parser import parser
from embedlog.display import plural
from embedlog.keyspace import FORMAT_VERSION

COMMANDS = (
    *("topics", "produce", "consume", "tail", "sql", "groups", "offsets", "delete-records", "du"),
    *("replicas", "reassign", "elect-leaders"),
    *("export", "import", "activity", "metrics", "report", "completion"),
    *("compact", "maintain", "explain", "dump", "verify", "repair", "doctor", "share"),
)


@pytest.fixture
def root(log_path):
    """The path of the log, which commands take from the environment."""
    return log_path


@pytest.fixture
def filled(root):
    """Two partitions: 0 has five records in three batches, 1 has one with headers."""
    with embedlog.open(root) as log:
        log.create_topic("t", partitions=2)
        log.partition("t", 0).append([encoded(b"v0", b"v1", keys=[b"k0", None], at=[5, 6])])
        log.partition("t", 0).append([encoded(None, b"\xff", at=7)])
        log.partition("t", 0).append([encoded(b"v4", at=8)])
        headers = [[("a", b"1"), ("b", None)]]
        log.partition("t", 1).append([encoded(b"h", at=9, headers=headers)])
    return root


@pytest.fixture
def segment_file(filled):
    """The segment file of partition 0."""
    return next(file for file in segment_files(filled) if "/0/" in str(file))


@pytest.fixture
def run(command_line):
    """Run a command in this process; return its code, and stdout and stderr as text."""
    return command_line


def command(*arguments):
    return [sys.executable, "-m", "embedlog", *arguments]


def shell(*arguments, **options):
    """Run a command in a process of its own."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, check=False, **options
    )


# All commands


def test_help_names_every_command_and_exit_code(run):
    """`--help` lists the commands and the exit codes."""
    code, out, _ = run("--help")

    assert code == 0
    for word in (*COMMANDS, "130", "141", "exit codes"):
        assert word in out


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(run, name):
    """So `--help` works after every command."""
    code, out, _ = run(name, "--help")

    assert code == 0
    assert out.startswith(f"usage: embedlog {name}")


@pytest.mark.parametrize(
    "arguments",
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
def test_a_wrong_command_is_2_and_one_message(run, root, arguments):
    """argparse refuses some of them; the others have invalid names or settings."""
    code, out, err = run(*arguments)

    assert (code, out) == (2, "")
    assert "embedlog" in err
    assert "Traceback" not in err


def test_a_log_must_be_named(run, monkeypatch):
    """With --root, before or after the command, or by the environment."""
    monkeypatch.delenv("EMBEDLOG_ROOT", raising=False)

    code, _, err = run("topics", "list")

    assert code == 2
    assert "EMBEDLOG_ROOT" in err


def test_root_may_stand_before_and_after_the_command(run, filled, monkeypatch):
    """The option before the command and the one after it are the same."""
    monkeypatch.setenv("EMBEDLOG_ROOT", "/nonexistent")

    assert run("--root", str(filled), "topics", "list")[:2] == (0, "t\n")
    assert run("topics", "list", "--root", str(filled))[:2] == (0, "t\n")
    assert run("-r", str(filled), "--json", "topics", "list")[:2] == (0, '["t"]\n')


@pytest.mark.parametrize(
    "arguments",
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
def test_a_missing_log_is_3_and_is_not_created(run, root, arguments):
    """Only `create` and `produce` create a log."""
    code, out, err = run(*arguments)

    assert (code, out) == (3, "")
    assert err.startswith("embedlog: ")
    assert err.count("\n") == 1
    assert not root.exists()


@pytest.mark.parametrize(
    "arguments",
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
def test_a_missing_topic_partition_or_offset_is_3(run, filled, arguments):
    """The commands change nothing."""
    assert run(*arguments)[:2] == (3, "")
    assert run("topics", "list")[1] == "t\n"


def test_a_path_that_is_a_file_is_3(run, root):
    """The message is one line, and the file stays."""
    root.write_text("mine")

    for arguments in (("topics", "list"), ("topics", "create", "t"), ("verify",), ("doctor",)):
        code, _, err = run(*arguments)
        assert code == 3
        assert str(root) in err
    assert root.read_text() == "mine"


def test_a_newer_format_is_4(run, filled):
    """The message names the version, also that of the light commands."""
    file = filled / "embedlog.toml"
    file.write_text(
        file.read_text().replace(f"format = {FORMAT_VERSION}", f"format = {FORMAT_VERSION + 1}")
    )

    for arguments in (("topics", "list"), ("consume", "t"), ("topics", "create", "u")):
        code, _, err = run(*arguments)
        assert code == 4
        assert f"format {FORMAT_VERSION + 1}" in err


# Imports

LOADED = """
    import sys
    from embedlog.cli import main
    code = main(sys.argv[1:])
    heavy = {"pyarrow", "numpy", "pandas", "polars", "pyspark", "sortedcontainers"}
    heavy.add("multiprocessing")
    print(code, sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


def loaded(*arguments, stdin=""):
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOADED), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stderr.splitlines()[-1]


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("topics", "list")])
def test_commands_without_records_do_not_load_pyarrow(filled, arguments):
    """Shell completions and prompts call them often."""
    assert loaded(*arguments) == "0 []"


@pytest.mark.parametrize(
    "arguments",
    sample(
        [("consume", "t", "--json"), ("produce", "t", "-K", ":", "--json"), ("produce", "t")], 2
    ),
)
def test_records_do_not_load_pandas(filled, arguments):
    """pyarrow imports it in some cases, which takes longer than the command."""
    assert "pandas" not in loaded(*arguments, stdin='{"value": "x", "headers": {"h": "1"}}\n')


@pytest.mark.parametrize("command", ["consume", "export", "import", "produce", "offsets", "dump"])
def test_help_loads_no_code_that_reads_records(filled, command):
    """The parser and the options of the command are all that help needs."""
    code = f"{textwrap.dedent(LOADED)}print('embedlog.api' in sys.modules, file=sys.stderr)"
    process = subprocess.run(
        [sys.executable, "-c", code, command, "--help"], capture_output=True, text=True, check=True
    )
    assert process.stderr.splitlines() == ["0 []", "False"]


def test_the_light_listing_and_the_catalog_agree(run, filled):
    """The light listing reads the rows without the classes of the catalogue."""
    with embedlog.open(filled) as log:
        for name in ("a", "u", "S", "T"):
            log.create_topic(name)
        names = log.topics()

    assert run("topics", "list")[1].split() == names


# Offsets


def test_offsets_are_printed_for_topics_and_partitions(run, filled):
    """Where each partition begins and ends, as a table and as JSON."""
    embedlog_rows = [line.split() for line in run("offsets")[1].splitlines()]

    assert embedlog_rows == [
        ["TOPIC", "PARTITION", "EARLIEST", "LATEST"],
        ["t", "0", "0", "5"],
        ["t", "1", "0", "1"],
    ]
    assert json.loads(run("offsets", "t:1", "--json")[1]) == [
        {"topic": "t", "partition": 1, "earliest": 0, "latest": 1}
    ]


def test_offsets_at_a_time_are_those_of_the_first_record_since_then(run, filled):
    """At the end, if there is none; a time without a zone is UTC."""
    _, out, _ = run("offsets", "t", "--at", "1970-01-01T00:00:00.008")
    _, document, _ = run("offsets", "t:0", "--at", "1970-01-01T01:00:00.006+01:00", "--json")
    _, end, _ = run("offsets", "t:0", "--at", "1h")

    assert [line.split() for line in out.splitlines()] == [
        ["TOPIC", "PARTITION", "OFFSET", "TIMESTAMP"],
        ["t", "0", "4", "1970-01-01T00:00:00.008+00:00"],
        ["t", "1", "0", "1970-01-01T00:00:00.009+00:00"],
    ]
    assert json.loads(document) == [{"topic": "t", "partition": 0, "offset": 1, "timestamp": 6}]
    assert end.splitlines()[1].endswith("5       at the end")


@pytest.mark.parametrize(
    ("target", "start"),
    [
        (("--before", "2"), 2),
        (("--before", "5"), 5),
        (("--before", "0"), 0),
        (("--at", "1970-01-01T00:00:00.007"), 2),
        (("--at", "2100-01-01"), 5),
    ],
)
def test_records_are_deleted_only_with_yes(run, filled, target, start):
    """Without it, the command says what it would do."""
    _, dry, note = run("delete-records", "t:0", *target)
    before = run("offsets", "t:0", "--json")[1]
    _, done, deleted = run("delete-records", "t:0", *target, "--yes", "--json")

    assert dry.splitlines()[1].split() == ["t", "0", str(start), "0", "5"]
    assert note == (
        f"Dry run, {plural(start, 'offset')} would be deleted; repeat the command with --yes\n"
    )
    assert json.loads(before)[0]["earliest"] == 0
    assert deleted == f"Deleted {plural(start, 'offset')}\n"
    assert json.loads(done) == {
        "dry_run": False,
        "partitions": [{"topic": "t", "partition": 0, "after": start, "before": 0, "latest": 5}],
    }
    assert json.loads(run("offsets", "t:0", "--json")[1])[0]["earliest"] == start


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("delete-records", "t", "--before", "3", "--yes"), 3),
        (("delete-records", "t:7", "--before", "0", "--yes"), 3),
        (("delete-records", "nothing", "--before", "0", "--yes"), 3),
        (("delete-records", "t", "--yes"), 2),
        (("delete-records", "t", "--before", "-1", "--yes"), 2),
        (("delete-records", "t", "--before", "1", "--at", "2100-01-01", "--yes"), 2),
        (("offsets", "nothing"), 3),
        (("offsets", "t:9"), 3),
        (("offsets", "t:x"), 2),
        (("offsets", "t", "--at", "soon"), 2),
        (("offsets", "t", "--at", "999999w"), 2),
        (("offsets", "t", "--at", "99999999999w"), 2),
        (("du", "nothing"), 3),
    ],
)
def test_offsets_that_do_not_exist_are_refused(run, filled, arguments, code):
    """All partitions are checked first: partition 1 has no offset 3, so nothing is deleted."""
    result, out, err = run(*arguments)

    assert (result, out) == (code, "")
    assert "Traceback" not in err
    assert [part["earliest"] for part in json.loads(run("offsets", "--json")[1])] == [0, 0]


# Disk usage


def test_the_usage_of_topics_is_the_size_of_their_files(run, filled):
    """The sum is that of all files, the largest first; lock files of LMDB have holes."""
    run("topics", "create", "empty")
    document = json.loads(run("du", "--json")[1])
    files = {path: path.stat() for path in filled.rglob("*") if path.is_file()}
    sizes = {
        path: min(status.st_size, status.st_blocks * 512)
        if path.suffix == ".mdb"
        else status.st_size
        for path, status in files.items()
    }
    topics = {topic["topic"]: topic for topic in document["topics"]}

    assert document["bytes"] == sum(sizes.values())
    assert topics["t"]["bytes"] == sum(
        size for path, size in sizes.items() if path.is_relative_to(filled / "topics")
    )
    assert topics["empty"]["bytes"] == 0
    assert [part["partition"] for part in topics["t"]["partitions"]] == [0, 1]
    assert {other["name"] for other in document["others"]} >= {"state", "live"}
    for parts in (document["topics"], document["others"], topics["t"]["partitions"]):
        assert [part["bytes"] for part in parts] == sorted(
            (part["bytes"] for part in parts), reverse=True
        )


def test_the_usage_of_some_topics_has_nothing_else(run, filled):
    """With --segments a line per file."""
    _, out, _ = run("du", "t", "--segments")
    lines = out.splitlines()

    assert "topic t: 2 partitions, 2 segments" in lines[0]
    assert "partition 0: 1 segment" in lines[1]
    assert lines[2].endswith(next(file.name for file in segment_files(filled)))
    assert lines[-1].split()[:2] == lines[0].split()[:2]
    assert lines[-1].endswith("total")


# Hints


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("topic", "list"), "there is no command 'topic'; did you mean 'topics'?"),
        (("exprt", "t", "x"), "there is no command 'exprt'; did you mean 'export'?"),
        (("zzz",), "there is no command 'zzz'\n"),
        (("topics", "lst"), "there is no verb 'lst'; did you mean 'list'?"),
        (("topics",), "name a verb: create, list, describe, alter, delete"),
        (("groups", "delete-offset", "g", "t"), "did you mean 'delete-offsets'?"),
        (("consume", "t", "--fromat", "x"), "--fromat x; did you mean '--format'?"),
        (("consume", "t", "--fromat=x"), "--fromat=x; did you mean '--format'?"),
        (("topics", "list", "--intern"), "--intern; did you mean '--internal'?"),
        (("topics", "list", "--zzz"), "unrecognized arguments: --zzz\n"),
        (("topics", "list", "more"), "unrecognized arguments: more\n"),
        (("--rot=x", "topics", "list"), "did you mean '--root'?"),
        (("--json", "--rot", "x", "topics", "list"), "did you mean '--root'?"),
        (("topics", "create", "t", "-c", "retention.m=1"), "Did you mean retention.ms?"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_nearest_one(run, root, arguments, hint):
    """For commands, verbs, options and settings."""
    code, out, err = run(*arguments)

    assert (code, out) == (2, "")
    assert hint in err


PYTHON = re.compile(r"\w\(|=True|=False|=None|\w\.\w+\(|_[a-z]+=")
"""Calls and arguments of Python."""


WRONG = [
    ("topics", "create", "t"),
    ("topics", "create", "t", "-p", "3", "-c", "retention.ms=5"),
    ("topics", "create", "u", "-p", "0"),
    ("topics", "create", "u", "-p", "100000"),
    ("topics", "create", "u", "-c", "retention.ms=soon"),
    ("topics", "create", "u", "-c", "nonsense=1"),
    ("topics", "create", "u", "-c", "min.insync.replicas=2"),
    ("topics", "create", "u", "--key", "nonsense"),
    ("topics", "create", "__u"),
    ("topics", "alter", "t", "-p", "1"),
    ("topics", "alter", "t", "-c", "cleanup.policy=nonsense"),
    ("topics", "alter", "t"),
    ("topics", "alter", "nothing", "-p", "1"),
    ("topics", "delete", "nothing"),
    ("topics", "delete", "__activity"),
    ("topics", "describe", "nothing"),
    ("produce", "t", "-p", "7"),
    ("produce", "__activity"),
    ("produce", "compacted"),
    ("produce", "small"),
    ("produce", "pickled"),
    ("produce", "numbers"),
    ("import", "compacted", "-"),
    ("import", "pickled", "-"),
    ("import", "__activity", "-"),
    ("import", "t", "nothing.csv"),
    ("export", "broken", "-"),
    ("export", "broken", "-", "--format", "csv"),
    ("consume", "t", "-o", "soon"),
    ("consume", "t", "-p", "0", "-o", "99"),
    ("consume", "t", "-p", "9"),
    ("compact", "t"),
    ("compact", "nothing"),
    ("compact", "compacted"),
    ("delete-records", "t", "--before", "99"),
    ("delete-records", "compacted", "--before", "0", "--yes"),
    ("groups", "describe", "nothing"),
    ("groups", "reset", "nothing", "--to-latest"),
    ("groups", "reset", "g", "--to-offset", "5", "--topic", "nothing"),
    ("groups", "reset", "g", "--to-latest", "--execute", "--topic", "t:99"),
    ("groups", "delete-offsets", "nothing", "t"),
    ("explain", "t"),
    ("explain", "compacted"),
    ("dump", "nothing"),
    ("metrics", "--label", "x"),
    ("activity", "--kind", "nothing"),
    ("mirror", "a", "b", "--relay"),
    ("mirror", "nothing", "b"),
    ("failover", "g", "--strategy", "time"),
    ("failover", "g", "--strategy", "latest"),
    ("failover", "--strategy", "latest"),
    ("--root", "kafka://host", "topics", "list"),
    ("--root", "localhost:9092", "topics", "list"),
    ("--root", "s3://bucket", "topics", "list"),
    ("--root", "/", "topics", "create", "t"),
    ("--root", "/proc", "topics", "create", "t"),
    ("--root", "/dev/null", "verify"),
    ("--root", "", "topics", "list"),
    ("topics", "create", "t", "--if-not-exists", "-p", "3", "-c", "retention.ms=5"),
    ("topics", "create", "t", "--if-not-exists", "--schema-from", "rows.csv"),
    ("topics", "create", "rows", "--if-not-exists", "--schema-from", "others.csv"),
    ("topics", "alter", "t", "-c", "retentoin.ms=5"),
    ("produce", "t", "--from", "exported.csv"),
    ("produce", "nothing", "--from", "rows.csv"),
    ("produce", "rows", "--from", "others.csv"),
    ("produce", "rows"),
    ("import", "nothing", "rows.csv"),
    ("import", "t", "seven.csv"),
    ("sql", "select * from nothing"),
    ("sql", "select * from read_csv('rows.csv')"),
    ("sql", "drop table t"),
    ("reassign",),
    ("replicas", "remove", "log"),
    ("elect-leaders",),
    ("schemas", "describe", "nothing"),
    ("verify",),
    ("doctor",),
]
"""Commands that are refused, or say what to do."""


@pytest.fixture
def hints(run, filled, tmp_path, monkeypatch):
    """What each of these commands says to do."""
    monkeypatch.chdir(tmp_path)
    files = {
        "rows.csv": "a,b\n1,2\n",
        "others.csv": "c\nx\n",
        "seven.csv": "partition,value\n7,x\n",
        "exported.csv": "value\nx\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, "utf-8")
    assert run("topics", "create", "rows", "--schema-from", "rows.csv")[0] == 0
    with embedlog.open(filled, maintenance=False) as log:
        log.create_topic("compacted", config={"cleanup.policy": "compact"})
        log.create_topic("small", config={"max.message.bytes": 100})
        log.create_topic("pickled", value="pickle")
        log.create_topic("numbers", value="int")
        log.create_topic("broken", value="json")
        log.partition("broken", 0).append([encoded(b"{")])
    line = b'{"value": "%b"}\n' % (b"x" * 200)

    said = {}
    for arguments in WRONG:
        _, out, err = run(*arguments, stdin=line)
        said[arguments] = f"{err}{out}" if arguments[0] == "explain" else err
    return said


def test_a_range_of_offsets_is_half_open_wherever_it_is_printed():
    """As `[0, 5)`; "0 to 5" leaves open whether 5 is in it."""
    package = Path(embedlog.__file__).parent
    offenders = [
        path
        for path in package.rglob("*.py")
        if re.search(r"ffsets (\{[^}]*\}|%d) to", path.read_text(encoding="utf-8"))
    ]

    assert offenders == []


COMMAND = re.compile(r"`embedlog ([^`]+)`|To apply: embedlog (.*)")
"""A command in a hint."""


def test_each_hint_is_a_command_that_works(run, hints, filled, tmp_path, monkeypatch):
    """No call of Python; it is run as it stands, unless the user has to fill in a name."""
    assert not [
        (arguments, hint)
        for arguments, hint in hints.items()
        if PYTHON.search(hint) or re.search(r"Traceback|Errno|\. [a-z]", hint)
    ]
    monkeypatch.setenv("EMBEDLOG_ROOT", str(tmp_path / "copy"))
    commands = {words[1] or words[2] for hint in hints.values() for words in COMMAND.finditer(hint)}
    assert len(commands) > 8

    offenders = []
    for command in sorted(commands):
        words = shlex.split(command)
        if command == "export" or any(word.isupper() and word.isalpha() for word in words):
            continue  # a name in capitals, or not complete: the next test checks it
        shutil.copytree(filled, tmp_path / "copy")
        code, _, err = run(*words)
        if code:
            offenders.append((command, err))
        shutil.rmtree(tmp_path / "copy")

    assert offenders == []


def sentences(node):
    """Return a text of the code, with x for what it computes."""
    if isinstance(node, ast.BinOp):
        return sentences(node.left) + sentences(node.right)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(sentences, node.values))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "x"


def parts_of_hints(node):
    """Return what a part of the code says for the command line."""
    if isinstance(node, ast.keyword) and node.arg == "todo":
        return [node.value]
    is_hint = isinstance(node, ast.Call) and ast.unparse(node.func) == "Hint"
    return node.args[1:] if is_hint else []


def modules_with(*texts):
    """Yield the path and the syntax of each module of the package that has one of some texts."""
    for path in Path(embedlog.__file__).parent.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if any(text in source for text in texts):
            yield path, list(ast.walk(ast.parse(source)))


def test_what_a_program_is_told_has_no_command_of_the_shell_alone():
    """A command stands in the second half of a `Hint`, whose first half is the call."""
    offenders = []
    for path, nodes in modules_with("`embedlog "):
        for_shell = {
            id(part)
            for node in nodes
            if isinstance(node, ast.Call)
            for argument in parts_of_hints(node)
            for part in ast.walk(argument)
        }
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        offenders += [
            f"{path}:{node.lineno}: {node.value}"
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if "`embedlog " in node.value and id(node) not in for_shell | docs
            if path.parent.name != "cli" and path.name != "member_file.py"
        ]

    assert offenders == []


def test_each_command_in_an_error_exists():
    """Wherever the code says what to do: with its verbs, arguments and options."""
    texts = [
        sentences(part)
        for _, nodes in modules_with("todo=", "Hint(")
        for node in nodes
        for part in parts_of_hints(node)
    ]
    commands = {words[1] for text in texts for words in COMMAND.finditer(text)}
    wrong, known = [], parser()
    for command in commands:
        errors = io.StringIO()
        with contextlib.suppress(SystemExit), contextlib.redirect_stderr(errors):
            known.parse_args(shlex.split(re.sub("-p [Nx]", "-p 1", command)))
        # A hint may name a command without its arguments.
        if errors.getvalue() and not (command.islower() and "required: " in errors.getvalue()):
            wrong.append((command, errors.getvalue()))

    assert len(commands) > 20
    assert wrong == []


@pytest.mark.parametrize(
    "arguments",
    [("audit", "t", "--since"), ("offsets", "--at"), ("export", "t", "-", "--from")],
    ids=lambda arguments: arguments[0],
)
def test_a_time_that_is_none_is_answered_with_both_forms(run, filled, arguments):
    """A date, and how long ago."""
    code, _, err = run(*arguments, "yesterday")

    assert code == 2
    assert "like 2024-01-31T12:00:00Z, or how long ago, like 90m or 2d, got 'yesterday'" in err
    assert ("an offset, " in err) is (arguments[0] == "export")


# Topics


def test_topics_are_created_listed_altered_and_deleted(run, root):
    """The life of a topic in five commands."""
    assert run("topics", "create", "t", "-p", "2", "-c", "retention.ms=5") == (0, "", "")
    assert run("topics", "create", "t")[0] == 1
    assert run("topics", "create", "t", "--if-not-exists")[0] == 0
    assert run("topics", "list") == (0, "t\n", "")

    options = ("-c", "segment.bytes=4000", "--reset", "retention.ms", "-p", "3")
    assert run("topics", "alter", "t", *options) == (0, "", "")

    with embedlog.open(root) as log:
        description = log.describe_topic("t")
    assert description["overrides"] == {"segment.bytes": 4000}
    assert len(description["partitions"]) == 3
    assert run("topics", "alter", "t", "-p", "1")[0] == 2
    dry = "Dry run, t with 0 records would be deleted\nRepeat the command with --yes\n"
    assert run("topics", "delete", "t") == (0, "", dry)
    assert run("topics", "list") == (0, "t\n", "")
    run("topics", "create", "flights")
    assert "Did you mean 'flights'?" in run("topics", "delete", "flihgts")[2]
    assert run("topics", "delete", "t", "flights", "--yes") == (
        *(0, "", "Deleted t\nDeleted flights\n"),
    )
    assert run("topics", "list") == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [(("t", "--json"), b'{"valeu": 1}'), (("t", "-p", "7"), b"x")],
    ids=["a field", "a partition"],
)
def test_lines_that_are_refused_leave_no_new_topic_behind(run, root, arguments, line):
    """It would be in the way of the command that makes the right one."""
    assert run("produce", *arguments, stdin=line)[0] != 0
    assert run("topics", "list") == (0, "", "")
    assert run("produce", "t", stdin=b"x") == (0, "", "")

    assert run("produce", *arguments, stdin=line)[0] != 0
    with embedlog.open(root) as log:
        assert len(log.topic("t")) == 1


def test_a_topic_that_exists_with_other_settings_is_refused(run, root):
    """The message has the command that would apply them."""
    assert run("topics", "create", "t", "-p", "2", "-c", "retention.ms=5") == (0, "", "")
    same_options = ("-p", "2", "-c", "retention_ms=5", "-c", "segment.bytes=1073741824")
    assert run("topics", "create", "t", "--if-not-exists", *same_options) == (0, "", "")

    options = ("-p", "3", "-c", "cleanup.policy=compact", "-c", "retention.ms=5")
    code, _, output = run("topics", "create", "t", "--if-not-exists", *options)
    assert code == 1
    assert "partitions is 2, not 3; cleanup.policy is 'delete', not 'compact'" in output
    command = "embedlog topics alter t -p 3 -c cleanup.policy=compact"
    assert output.rstrip().endswith(command)
    assert run(*command.split()[1:])[0] == 0
    assert run("topics", "create", "t", "--if-not-exists", *options) == (0, "", "")

    code, _, output = run("topics", "create", "t", "--if-not-exists", "-p", "1")
    assert code == 1
    assert "The number of partitions cannot be reduced." in output
    assert "topics alter" not in output


def test_topics_are_described_for_people_and_programs(run, filled):
    """Both outputs have the same facts."""
    code, out, _ = run("topics", "describe")
    assert code == 0
    assert "t  id 1, 2 partitions, 6 records" in out
    assert "partition 0: offsets [0, 5)" in out

    code, out, _ = run("topics", "describe", "t", "--json")
    assert code == 0
    (topic,) = json.loads(out)
    assert [partition["end_offset"] for partition in topic["partitions"]] == [5, 1]
    assert topic["config"]["cleanup.policy"] == "delete"


def test_a_new_topic_verifies_before_its_first_record(run, root):
    """The first record creates the file of a segment; until then a missing file is no damage."""
    run("topics", "create", "t", "-p", "2")

    assert run("verify")[:2] == (0, "")
    assert run("consume", "t") == (0, "", "")


# Producing


def test_lines_become_records(run, root):
    """One record for each line, also for empty ones and for a last one without a newline."""
    assert run("produce", "t", stdin=b"a\n\nb b\r\n\xff\nlast") == (0, "", "")

    with embedlog.open(root) as log:
        records = [(record.key, record.value) for record in log.topic("t")]
    assert records == [
        (None, b"a"),
        (None, b""),
        (None, b"b b\r"),
        (None, b"\xff"),
        (None, b"last"),
    ]


def test_a_line_may_have_a_key(run, root):
    """Up to the first separator; a line without a separator has no key."""
    run("produce", "t", "-K", ": ", stdin=b"k: v: w\nplain\n: x\ny: \n")

    with embedlog.open(root) as log:
        records = [(record.key, record.value) for record in log.topic("t")]
    assert records == [(b"k", b"v: w"), (None, b"plain"), (b"", b"x"), (b"y", b"")]


def test_a_partition_may_be_named(run, filled):
    """The partition must exist."""
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
        first = list(log.topic("t").partition(0))[5:]
        second = list(log.topic("t").partition(1))[1:]
    assert [(record.value, record.key, record.timestamp) for record in first] == [
        ("ä".encode(), b"k", 17),
        (None, b"", 0),
        ('{"deep":[1,"ö"]}'.encode(), None, 18),
        (b"5", None, 19),
    ]
    assert [record.headers for record in first] == [[("h", b"1")], [], [], []]
    assert (second[0].value, second[0].headers) == (b"\xff", [("h", b"1"), ("h", None)])
    assert abs(second[0].timestamp - time.time() * 1000) < 60_000


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
    """The message has the number of the line, counted from 1, and the reason."""
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
    """The records are durable when the command returns."""
    assert run("produce", "t", "--sync", "-z", "zstd", stdin=b"x\n")[0] == 0

    with embedlog.open(root) as log:
        assert log.partition("t", 0).tail().durable_offset == 1
        assert values(log.partition("t", 0)) == [b"x"]


def test_long_input_is_sent_in_chunks(root):
    """A hundred thousand lines through a pipe, in order and complete, without a progress bar."""
    lines = "".join(f"line {number}\n" for number in range(100_000))

    producer = shell("produce", "t", input=lines)
    consumer = shell("consume", "t")

    assert (producer.returncode, producer.stdout, producer.stderr) == (0, "", "")
    assert consumer.stdout == lines


# Consuming


def test_consume_prints_values_from_the_beginning_to_the_end(run, filled):
    """All partitions, one after another."""
    assert run("consume", "t") == (0, "v0\nv1\n\n\\xff\nv4\nh\n", "")


@pytest.mark.parametrize(
    ("arguments", "offsets"),
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
def test_consume_begins_at_the_offset_and_ends_after_max(run, filled, arguments, offsets):
    """An offset, earliest, latest, or a number of records before the end of each partition."""
    code, out, _ = run("consume", "t", *arguments, "-f", "%p:%o ")

    assert (code, out.strip()) == (0, offsets)


def test_a_format_can_print_all_fields_of_a_record(run, filled):
    """With kcat's letters and escapes; the length of null is -1."""
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
    """One object on each line; bytes that are not UTF-8 are base64, and null is null."""
    _, out, _ = run("consume", "t", "--json")

    records = [json.loads(line) for line in out.splitlines()]
    assert records[0] == {
        "topic": "t",
        "partition": 0,
        "offset": 0,
        "timestamp": 5,
        "timestamp_type": 0,
        "key": "k0",
        "value": "v0",
        "headers": [],
    }
    assert [record["value"] for record in records[2:4]] == [None, {"base64": "/w=="}]
    assert records[5]["headers"] == [["a", "1"], ["b", None]]


def test_tail_prints_the_last_of_each_partition(run, filled):
    """Ten by default."""
    assert run("tail", "t", "-n", "1") == (0, "v4\nh\n", "")
    assert run("tail", "t", "-n", "0") == (0, "", "")
    assert run("tail", "t")[1].count("\n") == 6
    assert run("tail", "t", "-n", "1", "-p", "0", "--format", "%o;")[1] == "4;"


def test_consuming_changes_nothing(run, filled):
    """Reading does not write a byte of the log."""
    before = {file: file.stat().st_mtime_ns for file in filled.rglob("*.*") if file.is_file()}

    run("consume", "t")
    run("verify")
    run("topics", "describe")

    after = {file: file.stat().st_mtime_ns for file in filled.rglob("*.*") if file.is_file()}
    compared = {file for file in before if file.name != "lock.mdb"}
    assert {file: before[file] for file in compared} == {file: after[file] for file in compared}


@contextlib.contextmanager
def follow(*arguments):
    """Run a command beside the test, and kill it at the end."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command(*arguments), stdout=pipe, stderr=pipe, text=True, errors="backslashreplace"
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def test_tail_counts_the_records_that_compaction_left(run, filled):
    """It counts records, not offsets."""
    with embedlog.open(filled) as log:
        log.create_topic("keys", config={"cleanup.policy": "compact"})
        partition = log.partition("keys", 0)
        partition.append([encoded(b"a", b"b", *[b"c"] * 20, keys=[b"1", b"2", *[b"3"] * 20])])
        log.housekeeping.compact("keys", force=True)

    assert run("tail", "keys", "-n", "2", "--format", "%o;")[1] == "1;21;"
    assert run("consume", "keys", "-o", "-3", "--format", "%o;")[1] == "0;1;21;"


def test_tail_follows_until_it_is_interrupted(filled):
    """`tail -f` prints new records at once, and Ctrl-C ends it silently with 130."""
    with follow("tail", "-f", "t", "-n", "1", "--format", "%p:%o %s\\n") as tail:
        assert [tail.stdout.readline() for _ in range(2)] == ["0:4 v4\n", "1:0 h\n"]
        with embedlog.open(filled) as log:
            log.partition("t", 1).append([encoded(b"new")])
            assert tail.stdout.readline() == "1:1 new\n"
            log.create_partitions("t", 3)
            log.partition("t", 2).append([encoded(b"added")])
            assert tail.stdout.readline() == "2:0 added\n"
        # The command outlives the writers.
        with embedlog.open(filled) as log:
            log.partition("t", 0).append([encoded(b"again")])
        assert tail.stdout.readline() == "0:5 again\n"
        tail.send_signal(signal.SIGINT)
        out, err = tail.stdout.read(), tail.stderr.read()

        assert (tail.wait(patient(20)), out, err) == (130, "", "")


def test_follow_begins_at_the_offset_and_ends_after_max(filled):
    """--max ends it, also in the middle of a batch."""
    options = ("-m", "7", "-o", "earliest", "-f", "%s\\n")
    with follow("consume", "t", "--follow", *options) as consume:
        assert [consume.stdout.readline() for _ in range(2)] == ["v0\n", "v1\n"]
        with embedlog.open(filled) as log:
            # The batch has two records: the seventh of all, and one more.
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


# Dumps of segment files


def test_dump_shows_every_batch_of_a_file(run, segment_file):
    """Offsets, counts, times, CRCs and sizes: a line for people, an object for programs."""
    file = str(segment_file)

    code, out, _ = run("dump", file)
    assert code == 0
    assert "offsets [0, 2), 2 records  times 5 to 6" in out
    assert "not sealed, 0 damaged places" in out
    assert len(re.findall(r" nulls?\n", run("dump", file, "--columns")[1])) == 9

    _, out, _ = run("dump", "--json", file)
    batches = [json.loads(line) for line in out.splitlines()]
    assert [batch["base_offset"] for batch in batches] == [0, 2, 4]
    assert [batch["count"] for batch in batches] == [2, 2, 1]
    assert batches[0]["position"] + batches[0]["size"] == batches[1]["position"]
    assert batches[0]["size"] == batches[0]["head_size"] + batches[0]["body_size"]
    assert [column["nulls"] for column in batches[1]["columns"]] == [0, 2, 1]
    assert len(batches[0]["block_crc"]) == len(batches[0]["metadata_crc"]) == 8
    assert sum(column["bytes"] for column in batches[0]["columns"]) == batches[0]["body_size"]


def test_dump_shows_producers_headers_and_the_end_mark(run, root):
    """With the fields of the batch beside its records."""
    with embedlog.open(root) as log:
        log.create_topic("t")
        batch = encoded(b"v", headers=[[("a", b"")]], producer=(7, 2, 40), compression="lz4")
        log.partition("t", 0).append([batch])
        log.partition("t", 0).roll()
    file = str(segment_files(root)[0])

    _, out, _ = run("dump", file)

    assert "producer 7:2 from 40" in out
    assert "(compressed, headers)" in out
    assert "sealed, 0 damaged places" in out
    assert "not sealed" not in out
    batch = json.loads(run("dump", "--json", file)[1])
    assert (batch["producer_id"], batch["base_sequence"]) == (7, 40)


END = b"\xff\xff\xff\xff\0\0\0\0"
LONG = b"\xff\xff\xff\xff\0\0\x10\0"
# The change of the file, with the position of the second batch; the batches that stay; the reason.
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


def _over(data, position, replacement):
    return data[:position] + replacement + data[position + len(replacement) :]


@pytest.mark.parametrize("damage", DAMAGES)
def test_dump_reports_damage_and_continues(run, segment_file, damage):
    """Readable batches are printed, and the damage with its position; the exit code is 1."""
    apply, bases, reason = DAMAGES[damage]
    second = json.loads(run("dump", "--json", str(segment_file))[1].splitlines()[1])["position"]
    segment_file.write_bytes(apply(segment_file.read_bytes(), second))

    code, out, _ = run("dump", "--json", str(segment_file))

    entries = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert [entry["base_offset"] for entry in entries if "count" in entry] == bases
    assert any(reason in entry.get("damage", "") for entry in entries)
    ends = [entry["position"] + entry["size"] for entry in entries]
    assert [entry["position"] for entry in entries[1:]] == ends[:-1]
    assert run("dump", str(segment_file))[0] == 1


def test_dump_of_an_empty_file_is_empty(run, tmp_path):
    """A crash may leave an empty file, which is no segment."""
    (tmp_path / "empty").write_bytes(b"")

    assert run("dump", str(tmp_path / "empty"))[0] == 1


# Health


def test_verify_reports_damage_and_repair_removes_it(run, segment_file):
    """Only --yes changes the log; afterwards it is healthy, without the damaged records."""
    assert run("verify")[0] == 0
    assert run("repair")[:2] == (0, "")
    damaged = segment_file.read_bytes().replace(b"v0", b"V0")
    segment_file.write_bytes(damaged)

    code, out, err = run("verify")
    assert (code, err) == (1, "findings: 1\n")
    assert "t-0" in out
    assert "CRC of column value" in out
    (finding,) = json.loads(run("verify", "--json")[1])["findings"]
    assert (finding["topic"], finding["partition"]) == ("t", 0)

    code, out, err = run("repair")
    assert code == 1
    assert "offsets [0, 2) dropped" in out
    assert "--yes" in err
    assert segment_file.read_bytes() == damaged

    code, out, _ = run("repair", "--yes", "--json")
    assert code == 0
    assert "offsets [0, 2) dropped" in json.loads(out)["repaired"][0]
    assert run("verify")[0] == 0
    assert run("consume", "t", "-f", "%p:%o ")[1] == "0:2 0:3 0:4 1:0 "


def test_reading_a_damaged_log_is_4(run, segment_file):
    """The message names the batch; the records before it were printed."""
    segment_file.write_bytes(segment_file.read_bytes().replace(b"v4", b"V4"))

    code, _, err = run("consume", "t")

    assert code == 4
    assert "CRC" in err
    assert "topics/t-1/0/" in err


def test_doctor_checks_the_machine_and_the_log(run, filled):
    """Versions, speed, space, slots and state; a healthy log on a good machine has no findings."""
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
    """A log in use, a log after a kill, and a log of another boot."""
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
    """The message names a process that stopped in the middle of a read, and its state (P21)."""
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
    """Without one it checks the machine only, and creates nothing."""
    code, out, _ = run("doctor", "--json")

    assert code in (0, 1)
    assert "log" not in json.loads(out)
    assert not root.exists()
