"""Opening a log: what is accepted, what is refused and how, and who may share it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from functools import partial
from itertools import product
from pathlib import Path

import lmdb
import pytest
from support import forks
from support.clock import START, ManualClock
from support.patience import patient
from support.roots import encoded, segment_files, values
from support.tiers import choose, sample

import embedlog
from embedlog import errors
from embedlog.files import Files
from embedlog.kafka import KafkaProducer
from embedlog.kafka.errors import KafkaError
from embedlog.keyspace import FORMAT_VERSION
from embedlog.spark.log_cache import open_existing_log

UNPRIVILEGED = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def log(path):
    """A log that is verified at the end of the test."""
    log = embedlog.open(path, clock=ManualClock())
    yield log
    if not log.root.closed:
        assert log.housekeeping.verify() == []
    log.close()


@pytest.fixture
def public():
    """A directory that every user can reach; pytest's own are for one user only."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def run(code, *arguments, **options):
    """Run a program in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def write(path, *rows, topic="t"):
    """Write rows to a log; create the log and the topic if they do not exist."""
    with embedlog.open(path) as log:
        log.create_topic(topic, exist_ok=True)
        log.partition(topic, 0).append([encoded(*rows)])


# Opening


def test_a_new_log_is_private_to_its_user(path):
    """0700 and 0600: only their owner may read the records (P22)."""
    write(path, b"secret")

    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / "state.copy" / "data.mdb").exists()
    for file in path.rglob("*"):
        assert file.stat().st_mode & 0o077 == 0, file


def test_a_path_may_be_relative_or_of_a_home(path, monkeypatch):
    """Any path as typed; the log stores the absolute path."""
    path.mkdir()
    monkeypatch.chdir(path)
    monkeypatch.setenv("HOME", str(path))

    with embedlog.open("a") as first, embedlog.open("~/b") as second:
        assert (first.path, second.path) == (str(path / "a"), str(path / "b"))


@pytest.mark.parametrize("mode", ["rw", "r"])
def test_a_file_is_no_log(path, mode):
    """The error says that the path is a file, and the file stays."""
    path.write_text("mine")

    with pytest.raises(errors.NotALogError, match="is a file"):
        embedlog.open(path, mode=mode)
    assert path.read_text() == "mine"


def test_a_directory_of_something_else_is_refused(path):
    """A log is never mixed with other files: nothing is written there."""
    path.mkdir()
    (path / "thesis.tex").write_text("mine")

    with pytest.raises(errors.NotALogError, match="other files"):
        embedlog.open(path)
    assert os.listdir(path) == ["thesis.tex"]


@pytest.mark.parametrize(("content", "is_taken"), [(bytes(4 << 20), True), (b"mine", False)])
def test_a_directory_with_nothing_but_a_reserve_is_taken_for_an_empty_one(path, content, is_taken):
    """A program may make it after all other files were deleted; a user's file is no reserve."""
    path.mkdir()
    (path / "reserve").write_bytes(content)

    if is_taken:
        embedlog.open(path).close()
    else:
        with pytest.raises(errors.NotALogError, match="other files"):
            embedlog.open(path)
        assert (path / "reserve").read_bytes() == content


def test_mode_r_creates_nothing(path):
    """Mode "r" of a path without a log is an error, not a new log."""
    with pytest.raises(errors.EmbedlogError):
        embedlog.open(path, mode="r")
    assert not path.exists()

    path.mkdir()
    with pytest.raises(errors.NotALogError, match="no log here"):
        embedlog.open(path, mode="r")
    assert os.listdir(path) == []


@pytest.mark.parametrize("mode", ["rw", "r"])
def test_a_newer_format_is_refused(path, mode):
    """Refused rather than misread (P21); the error names both versions."""
    write(path, b"x")
    file = path / "embedlog.toml"
    file.write_text(file.read_text().replace(f"format = {FORMAT_VERSION}", "format = 99"))

    match = rf"format 99.* knows {FORMAT_VERSION}.*newer embedlog"
    with pytest.raises(errors.UnsupportedFormatError, match=match):
        embedlog.open(path, mode=mode)


@pytest.mark.parametrize("older", [1, FORMAT_VERSION - 1])
@pytest.mark.parametrize("mode", ["rw", "r"])
def test_a_format_before_the_first_release_is_refused(path, mode, older):
    """P21: its rows would be misread; the error says what to do."""
    write(path, b"x")
    file = path / "embedlog.toml"
    file.write_text(file.read_text().replace(f"format = {FORMAT_VERSION}", f"format = {older}"))

    match = rf"format {older}.* knows {FORMAT_VERSION}.*create a new root"
    with pytest.raises(errors.UnsupportedFormatError, match=match):
        embedlog.open(path, mode=mode)


@pytest.mark.parametrize("text", ["", "format = [", "id = 'x'", "format = 'one'", "\xff"])
def test_a_damaged_format_file_is_refused(path, text):
    """A file that cannot be parsed is not accepted as a format file."""
    write(path, b"x")
    (path / "embedlog.toml").write_bytes(text.encode("latin-1"))

    with pytest.raises((errors.NotALogError, errors.UnsupportedFormatError)):
        embedlog.open(path)


@needs_root
@pytest.mark.parametrize(("directories", "mode"), sample([*product([1, 2], ["rw", "r"])], 2))
def test_permission_denied_is_a_storage_error(public, mode, directories):
    """Another user's log: the error has the errno and the path, and is no bare OSError."""
    path = public / "private" / "log"
    path.parent.mkdir(mode=0o700)
    paths = [path, public / "private" / "copy"][:directories]
    with embedlog.open(paths) as log:
        log.create_topic("t")
    code = """
        import os, sys, embedlog
        mode, user, *paths = sys.argv[1:]
        embedlog.open(paths, mode="r").close()  # loads every module, while they may be read
        os.seteuid(int(user))
        try:
            embedlog.open(paths, mode=mode)
        except embedlog.errors.StorageError as error:
            print(error.errno, error)
    """
    process = run(code, mode, UNPRIVILEGED, *paths)

    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("13 ")
    assert str(path) in process.stdout


DOORS = {
    "open": embedlog.open,
    "open to read": partial(embedlog.open, mode="r"),
    "several directories": lambda path: embedlog.open([path, f"{path}2"]),
    "one of several directories": lambda path: embedlog.open([f"{path}2", path], mode="r"),
    "mirror": lambda path: embedlog.mirror(path, f"{path}2", topics="t"),
    "Kafka's client": lambda path: KafkaProducer(bootstrap_servers=f"embedlog://{path}"),
    "Spark's planner": open_existing_log,
}


@pytest.fixture
def on_nfs(path, monkeypatch):
    """A log whose file system says it is NFS; to open one of its databases fails the test."""
    with embedlog.open(path) as log:
        log.create_topic("t")
    magic = Files._magic
    monkeypatch.setattr(
        Files, "_magic", lambda files: 0x6969 if files.root == str(path) else magic(files)
    )
    opened = lmdb.open
    monkeypatch.setattr(
        lmdb, "open", lambda name, **options: opened(name, **unless_below(path, name, options))
    )


def unless_below(path, name, options):
    """Return the options, unless a database is below a path."""
    assert not str(name).startswith(f"{path}/")
    return options


@pytest.mark.parametrize("door", DOORS)
def test_a_log_on_a_remote_file_system_is_refused(path, on_nfs, door):
    """Even a reader breaks the databases of the host that writes (P23), through any door."""
    refused = errors.UnsupportedFilesystemError, KafkaError
    with pytest.raises(refused, match=r"\(nfs\).*on the host that has"):
        DOORS[door](path).close()


@pytest.mark.parametrize(
    "arguments",
    ["topics list", "topics describe", "consume t", "verify", "repair", "doctor", "import t -"],
)
def test_a_command_does_not_open_a_log_on_a_remote_file_system(
    path, on_nfs, command_line, arguments
):
    """The command line opens no database there either (P23), and does not name a Python option."""
    code, *said = command_line("--root", path, *arguments.split())
    said = "".join(said)
    assert code != 0
    assert "nfs" in said
    assert "on the host that has its disk" in said
    assert "unsafe" not in said


def test_a_remote_file_system_can_be_accepted(path):
    """With `unsafe_filesystem` a log on a remote file system opens in both modes (P23)."""

    class OnNfs(Files):
        def _magic(self):
            return 0x6969

    for mode in ("rw", "r"):
        embedlog.open(path, files=OnNfs, mode=mode, unsafe_filesystem=True).close()


@pytest.mark.parametrize(
    ("setting", "value"), [("mode", "w"), ("durability", "maybe"), ("visibility", "all")]
)
def test_an_unknown_mode_is_refused(path, setting, value):
    """The error lists the known values."""
    with pytest.raises(
        errors.InvalidConfigError, match=f"{setting} must be one of .* got '{value}'"
    ):
        embedlog.open(path, **{setting: value})
    assert not path.exists()


# Close, display and pickling


def test_a_closed_log_refuses_every_call_but_close(log):
    """`close` is idempotent; every call of a closed log raises `ClosedError`."""
    log.create_topic("t")
    partition, view = log.partition("t", 0), log.topic("t")
    log.close()
    log.close()

    assert repr(log) == f"<Log {log.path}: closed>"
    for call in (
        log.topics,
        lambda: log.create_topic("u"),
        lambda: log.topic("t"),
        lambda: len(view),
        lambda: partition.append([encoded(b"x")]),
        lambda: partition.reader(0),
        lambda: partition.end_offset(),
        log.housekeeping.verify,
    ):
        with pytest.raises(errors.ClosedError):
            call()


@pytest.mark.parametrize("operation", ["append", "fsync", "read", "wait", "flush", "list"])
def test_closing_under_another_thread_raises_closed_error_there(path, operation):
    """`close` waits for a write; every later call raises `ClosedError` and nothing else."""
    raised = []

    def repeat(step):
        try:
            while True:
                step()
        except BaseException as error:  # noqa: BLE001 - the test checks its type
            raised.append(error)

    for _ in range(choose(quick=3, all=8)):
        log = embedlog.open(path)
        log.create_topic("t", exist_ok=True)
        partition = log.partition("t", 0)
        partition.append([encoded(b"x")])
        consumer = log.consumer("t")
        step = {
            "append": partial(partition.append, [encoded(b"x")]),
            "fsync": partial(partition.append, [encoded(b"x")], durability="fsync"),
            "read": lambda: partition.reader(partition.end_offset() - 1).read(),  # noqa: B023
            "wait": partial(consumer.poll, 100),
            "flush": partition.flush,
            "list": log.topics,
        }[operation]
        threads = [
            threading.Thread(target=repeat, args=[step]) for _ in range(1 + (operation != "wait"))
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.005)
        log.close()
        for thread in threads:
            thread.join(patient(10))
            assert not thread.is_alive()

    assert {type(error) for error in raised} == {errors.ClosedError}, raised
    with embedlog.open(path) as log:
        assert log.housekeeping.verify() == []


def test_an_error_of_closing_does_not_hide_the_one_before(path):
    """Both are in the traceback."""
    with pytest.raises(errors.LogDeletedError) as raised, embedlog.open(path, maintenance=False):
        shutil.rmtree(path)
        raise ZeroDivisionError
    text = "".join(traceback.format_exception(raised.value))
    assert "ZeroDivisionError" in text


def test_a_reader_keeps_its_file_open_when_the_log_is_closed(path, tmp_path):
    """Otherwise its descriptor could belong to another file at the next read."""
    write(path, b"here")
    log = embedlog.open(path)
    partition = log.partition("t", 0)
    partition.refresh()
    file = partition.open_segment(partition.active_segment)
    before = file.bytes(0, 1000)
    log.close()
    others = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(10)]

    assert file.fd not in others
    assert file.bytes(0, 1000) == before
    file.close()
    for fd in others:
        os.close(fd)


def test_a_log_shows_what_it_is(log):
    """Path, topics, durability and mode on one line."""
    assert repr(log) == f"<Log {log.path}: no topics; durability='os', mode='rw'>"
    for name in "abcdef":
        log.create_topic(name)
        if name == "a":
            assert "log: 1 topic: a;" in repr(log)

    assert "6 topics: a, b, c, d, e, …;" in repr(log)


def test_each_noun_shows_what_it_is(path):
    """As a table, in a terminal and in a notebook; housekeeping says whether it works."""
    with embedlog.open(path, maintenance=False) as log:
        log.schema_registry.register("t-value", '"string"')
        with embedlog.mirror(path, path.parent / "copy", name="backup") as run:
            run.wait()
        with embedlog.open(path.parent / "copy", mode="r") as copy:
            assert repr(copy.mirrors).splitlines()[1].split()[:2] == ["backup", "finished"]
            assert "<td>backup</td>" in copy.mirrors._repr_html_()
        assert repr(log.schema_registry).splitlines() == [
            *("subject  version  id  compatibility", "t-value  1        1   BACKWARD")
        ]
        assert "<td>t-value</td>" in log.schema_registry._repr_html_()
        assert repr(log.mirrors) == "No mirrors"
        assert "not the owner; retention, " in repr(log.housekeeping.background)
        assert "another process, or none" in repr(log.housekeeping)
        housekeeping = log.housekeeping
        with pytest.raises(AttributeError, match="retention_byte"):
            housekeeping.retention_byte = 1 << 30
    assert repr(housekeeping) == f"<Housekeeping of {path}: closed>"


def test_a_producer_and_a_consumer_pickle_as_path_and_options(path):
    """Handles pickle as path and options, as a worker of another process needs them."""
    with embedlog.open(path) as log, log.producer(linger_ms=3) as producer:
        producer.send("t", b"here").result()
        with pickle.loads(pickle.dumps(producer)) as copied_producer:
            copied_producer.send("t", b"there").result()
        consumer = log.consumer("t", auto_offset_reset="earliest", consumer_timeout_ms=0)
        with pickle.loads(pickle.dumps(consumer)) as copied_consumer:
            assert [record.value for record in copied_consumer] == [b"here", b"there"]
        copied_producer.root.close()
        copied_consumer._root.close()


def test_a_log_pickles_as_its_path_and_options(path):
    """A Spark worker opens the same log in the same way, and shares nothing with the sender."""
    with embedlog.open(path, durability="fsync", lock_timeout=3.0) as log:
        log.create_topic("t")
        log.partition("t", 0).append([encoded(b"x")])

        with pickle.loads(pickle.dumps(log)) as copy:
            assert (copy.path, copy.durability) == (log.path, "fsync")
            copy.partition("t", 0).append([encoded(b"y")])

        assert values(log.partition("t", 0)) == [b"x", b"y"]


def test_a_log_that_was_renamed_while_it_was_open_is_closed(path, tmp_path, caplog):
    """With a warning; its records are where it is now."""
    with embedlog.open(path, maintenance=False) as log:
        log.producer().send("t", b"v").result()
        os.rename(path, tmp_path / "renamed")
        log.producer().send("t", b"w").result()
    assert "moved while it was open" in caplog.text
    with embedlog.open(tmp_path / "renamed", maintenance=False) as log:
        assert [record.value for record in log.topic("t")] == [b"v", b"w"]
        assert log.housekeeping.verify() == []


def test_a_log_that_is_created_again_is_independent_of_the_deleted_one(path):
    """In one process, as in a notebook: each has its own records and changes only its own files."""
    old = embedlog.open(path, maintenance=False)
    old.create_topic("t")
    old.partition("t", 0).append([encoded(b"old")])
    shutil.rmtree(path)
    with embedlog.open(path, maintenance=False) as new:
        assert new.topics() == []
        new.create_topic("t")
        new.partition("t", 0).append([encoded(b"new")])
        with pytest.raises(errors.LogDeletedError):
            old.partition("t", 0).append([encoded(b"lost")])
        with pytest.raises(errors.LogDeletedError):
            old.close()

        assert new.housekeeping.verify() == []
    with embedlog.open(path) as reopened:
        assert values(reopened.partition("t", 0)) == [b"new"]
        assert reopened.housekeeping.verify() == []


def append_in_child(log, number):
    for turn in range(20):
        log.partition("t", 0).append([encoded(b"%d-%d" % (number, turn))])


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    "method", choose(test=["fork", "spawn"], all=["fork", "spawn", "forkserver"])
)
def test_children_append_and_the_parent_goes_on(log, method):
    """With every start method: a forked child reopens by itself, others unpickle the log."""
    context = multiprocessing.get_context(method)
    with embedlog.open(log.path) as shared:
        shared.create_topic("t")
        append_in_child(shared, 9)
        children = [
            context.Process(target=append_in_child, args=(shared, number)) for number in range(2)
        ]
        for child in children:
            child.start()
        append_in_child(shared, 8)
        for child in children:
            child.join(patient(30))

        assert [child.exitcode for child in children] == [0, 0]
        append_in_child(shared, 7)
        stored = values(shared.partition("t", 0))
    assert len(stored) == 100
    for number in (9, 8, 7, 0, 1):
        of_process = [value for value in stored if value.startswith(b"%d-" % number)]
        assert of_process == [b"%d-%d" % (number, turn) for turn in range(20)]


@pytest.mark.tier("test")
def test_a_reader_follows_writers_that_come_and_go(path):
    """A log opened to read sees records of all later writers, also after the last one closed."""
    write(path, b"1")
    with embedlog.open(path, mode="r") as reader:
        for turn in (b"2", b"3", b"4", b"5"):
            assert run_writer(path, turn) == 0
            assert values(reader.partition("t", 0))[-1] == turn
        assert values(reader.partition("t", 0)) == [b"1", b"2", b"3", b"4", b"5"]


def run_writer(path, row):
    code = """
        import sys, embedlog
        from embedlog import batch
        with embedlog.open(sys.argv[1]) as log:
            log.partition("t", 0).append([batch.encode_lists([sys.argv[2].encode()], None, 5)])
    """
    process = run(code, path, row.decode())
    assert process.stderr == ""
    return process.returncode


# Topics


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "a/b", "/etc", "a\nb", "a\n", "a b", "a\0", "-a", ".a"),
        *("ä", "a.tmp", "a.deleted", "x" * 201, "a\\b", "a:b", None, 5, b"a"),
    ],
)
def test_a_name_that_could_be_a_path_is_no_topic(log, name):
    """Names become directories: none leads out of the log, or looks like a file of embedlog."""
    for call in (log.create_topic, log.topic, log.delete_topic, lambda n: log.partition(n, 0)):
        with pytest.raises(errors.InvalidTopicError):
            call(name)
    assert log.topics() == []


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "_internal", "0", "x" * 200, "a..b", "con"])
def test_a_name_that_kafka_takes_is_taken(log, name):
    """Letters, digits, '.', '_' and '-'."""
    log.create_topic(name)
    log.partition(name, 0).append([encoded(b"x")])

    assert log.topics() == [name]
    assert name in log
    assert "other" not in log


def test_an_unknown_setting_names_the_nearest_name(log):
    """The error suggests the closest name."""
    with pytest.raises(errors.InvalidConfigError, match=r"Did you mean retention\.ms"):
        log.create_topic("t", config={"retention.mss": 1})
    assert log.topics() == []


def test_an_unknown_topic_names_the_nearest_name(log):
    """The error is also a LookupError, for programs that do not know embedlog."""
    log.create_topic("flights")

    with pytest.raises(LookupError, match="Did you mean 'flights'"):
        log.topic("flihgts")
    with pytest.raises(errors.UnknownTopicOrPartitionError):
        log.delete_topic("nothing")
    with pytest.raises(errors.UnknownTopicOrPartitionError):
        log.alter_topic("nothing", {"retention.ms": 1})


def test_a_topic_is_created_once(log):
    """With `exist_ok` the topic is returned as it is."""
    log.create_topic("t", partitions=2, config={"retention.ms": 5})

    with pytest.raises(errors.TopicAlreadyExistsError) as caught:
        log.create_topic("t")
    existing = log.create_topic("t", exist_ok=True)

    assert caught.value.differences is None
    assert existing.partitions == 2
    assert existing.config["retention.ms"] == 5
    assert log.create_topic("new", exist_ok=True).partitions == 1


@pytest.mark.parametrize(
    ("partitions", "config"),
    [
        (2, None),
        (None, {}),
        (None, {"retention_ms": "86400000"}),
        (2, {"retention.ms": 86_400_000.0, "cleanup.policy": ["delete", "compact"]}),
        (None, {"cleanup.policy": "delete, compact", "segment.bytes": None}),
        (None, {"segment.bytes": 1 << 30}),
        # Alone it would be more than the default of segment.ms.
        (None, {"segment.jitter.ms": 700_000_000}),
    ],
)
def test_a_topic_that_exists_may_be_created_with_what_it_has(log, partitions, config):
    """Only arguments that are given are compared, after they are parsed."""
    first = {
        "retention.ms": 86_400_000,
        "cleanup.policy": "compact,delete",
        "segment.ms": 800_000_000,
        "segment.jitter.ms": 700_000_000,
    }
    log.create_topic("t", 2, first)

    assert log.create_topic("t", partitions, config, exist_ok=True).partitions == 2


@pytest.mark.parametrize(
    ("partitions", "config", "differences", "todo"),
    [
        (7, None, {"partitions": (2, 7)}, "call log.create_partitions('t', 7)"),
        (1, None, {"partitions": (2, 1)}, "A topic cannot lose partitions"),
        (
            None,
            {"retention_ms": "9"},
            {"retention.ms": (5, 9)},
            "call log.alter_topic('t', {'retention.ms': 9})",
        ),
        (
            2,
            {"retention.ms": None, "segment.bytes": 1 << 30},
            {"retention.ms": (5, 604_800_000)},
            "call log.alter_topic('t', {'retention.ms': None})",
        ),
        (
            3,
            {"cleanup.policy": "compact", "retention.ms": 5},
            {"partitions": (2, 3), "cleanup.policy": ("delete", "compact")},
            "log.create_partitions('t', 3) and log.alter_topic('t', {'cleanup.policy': 'compact'})",
        ),
        (
            1,
            {"retention.ms": 6},
            {"partitions": (2, 1), "retention.ms": (5, 6)},
            "to apply the rest, call log.alter_topic('t', {'retention.ms': 6})",
        ),
    ],
)
def test_a_topic_that_exists_with_other_settings_is_refused(
    log, partitions, config, differences, todo
):
    """Otherwise the program would go on with another topic than it asked for."""
    log.create_topic("t", partitions=2, config={"retention.ms": 5})
    before = log.describe_topic("t")

    with pytest.raises(errors.TopicAlreadyExistsError) as caught:
        log.create_topic("t", partitions, config, exist_ok=True)

    assert caught.value.differences == differences
    assert caught.value.todo.endswith(f"{todo}.")
    for name, (actual, requested) in differences.items():
        assert f"{name} is {actual!r}, not {requested!r}" in str(caught.value)
    unpickled = pickle.loads(pickle.dumps(caught.value))
    assert unpickled.differences == differences
    assert log.describe_topic("t") == before


@pytest.mark.parametrize("partitions", [0, "2", True])
def test_invalid_settings_are_refused_before_they_are_compared(log, partitions):
    """Whether or not the topic exists."""
    log.create_topic("t", partitions=2)
    for settings in ({"retention.mss": 1}, {"segment.bytes": 0}):
        with pytest.raises(errors.InvalidConfigError):
            log.create_topic("t", config=settings, exist_ok=True)
    with pytest.raises(errors.InvalidPartitionsError):
        log.create_topic("t", partitions, exist_ok=True)


def test_processes_that_create_a_topic_at_once_all_have_it(tmp_path):
    """If they agree; a process that asks for something else is refused, before or after."""
    names = [f"t{number}" for number in range(40)]
    with embedlog.open(tmp_path / "root") as log:
        log.create_topic("begin")

    def create(start, partitions):
        count = 0
        with embedlog.open(tmp_path / "root") as log:
            start.wait()
            for name in names:
                try:
                    topic = log.create_topic(name, partitions, {"retention.ms": 5}, exist_ok=True)
                except errors.TopicAlreadyExistsError as error:
                    count += set(error.differences) == {"partitions"}
                else:
                    assert topic.partitions == partitions
        return count

    def refused(*partitions):
        start = multiprocessing.get_context("fork").Barrier(len(partitions))
        return sum(forks.spread(partitions, partial(create, start), workers=len(partitions)))

    assert refused(3, 3, 3) == 0
    with embedlog.open(tmp_path / "root") as log:
        for name in names:
            log.delete_topic(name)
    assert refused(3, 4) == len(names)


def test_a_log_that_is_only_read_returns_a_topic_that_exists(tmp_path):
    """No write is needed to return it."""
    embedlog.open(tmp_path / "root").create_topic("t", 2)
    with embedlog.open(tmp_path / "root", mode="r") as log:
        assert log.create_topic("t", 2, exist_ok=True).partitions == 2
        with pytest.raises(errors.ReadOnlyError):
            log.create_topic("u", exist_ok=True)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_a_number_of_partitions_is_a_number(log, count):
    """It must be an int, and at least 1."""
    with pytest.raises(errors.InvalidPartitionsError):
        log.create_topic("t", partitions=count)
    assert log.topics() == []
    log.create_topic("t")
    with pytest.raises(errors.InvalidPartitionsError):
        log.create_topic("t", partitions=count, exist_ok=True)


def test_altering_changes_the_settings_named_and_no_others(log):
    """None restores the default; an invalid value changes nothing."""
    log.create_topic("t", config={"retention.ms": 5, "segment_bytes": 4000})

    log.alter_topic("t", {"retention.ms": None, "cleanup.policy": "compact"})
    with pytest.raises(errors.InvalidConfigError):
        log.alter_topic("t", {"segment.bytes": 0, "retention.ms": 9})

    description = log.describe_topic("t")
    assert description["overrides"] == {"segment.bytes": 4000, "cleanup.policy": "compact"}
    assert description["config"]["retention.ms"] == 7 * 86_400_000


def test_a_topic_grows_and_does_not_shrink(log):
    """Records stay where they are (G5)."""
    log.create_topic("t", partitions=2)
    log.partition("t", 1).append([encoded(b"x")])

    log.create_partitions("t", 3)

    log.partition("t", 2).append([encoded(b"y")])
    assert [values(log.partition("t", number)) for number in range(3)] == [[], [b"x"], [b"y"]]
    with pytest.raises(errors.InvalidPartitionsError, match="can only grow"):
        log.create_partitions("t", 2)


def test_describing_returns_offsets_bytes_and_segments(log):
    """For each partition, as numbers."""
    log.create_topic("t", partitions=2, config={"segment.bytes": 1000})
    for _ in range(3):
        log.partition("t", 0).append([encoded(b"x", b"y")])

    description = log.describe_topic("t")

    first, second = description["partitions"]
    assert (description["name"], description["created_ms"]) == ("t", START)
    assert (first["start_offset"], first["end_offset"], second["end_offset"]) == (0, 6, 0)
    assert first["segments"] > 1 == second["segments"]
    assert first["bytes"] > 1000


def test_a_deleted_topic_is_gone_and_its_name_free(log):
    """A38: a new topic of the name begins at offset 0, with another id and without old records."""
    log.create_topic("t", config={"segment.bytes": 1000})
    old = log.partition("t", 0)
    for row in range(5):
        old.append([encoded(b"%d" % row)])
    before = log.describe_topic("t")["id"]

    log.delete_topic("t")

    assert log.topics() == []
    assert os.listdir(os.path.join(log.path, "topics")) == []
    log.create_topic("t")
    assert log.describe_topic("t")["id"] != before
    assert log.partition("t", 0).append([encoded(b"new")])[0].base_offset == 0
    assert values(log.partition("t", 0)) == [b"new"]


def test_the_handles_of_a_deleted_topic_fail(log):
    """A38: an open reader returns what it has or fails by name; no append reaches the new topic."""
    log.create_topic("t")
    old = log.partition("t", 0)
    old.append([encoded(b"1"), encoded(b"2")])
    reader = old.reader(0)
    batches = reader.read()
    log.delete_topic("t")

    with pytest.raises(errors.UnknownTopicOrPartitionError):
        old.append([encoded(b"lost")])
    log.create_topic("t")
    for call in (lambda: old.append([encoded(b"lost")]), reader.read, old.end_offset):
        with pytest.raises(errors.UnknownTopicOrPartitionError):
            call()
    assert [batch.lists()[2] for batch in batches] == [[b"1"], [b"2"]]
    assert values(log.partition("t", 0)) == []


def test_another_process_deletes_and_creates_a_topic(log):
    """The catalogue is shared by all processes."""
    log.create_topic("t")
    log.partition("t", 0).append([encoded(b"old")])
    code = """
        import sys, embedlog
        with embedlog.open(sys.argv[1]) as log:
            log.delete_topic("t")
            log.create_topic("t", partitions=2)
    """

    assert run(code, log.path).returncode == 0

    assert log.topic("t").partitions == 2
    assert len(log.topic("t")) == 0
    log.partition("t", 1).append([encoded(b"new")])
    assert log.topic("t")[0].value == b"new"


def test_a_topic_is_created_by_the_first_write_unless_that_is_off(path):
    """auto.create.topics.enable is on by default, as in Kafka."""
    with embedlog.open(path, auto_create_topics=False) as log:
        with pytest.raises(errors.UnknownTopicOrPartitionError):
            log.root.ensure_topic("t")
        assert log.topics() == []
    with embedlog.open(path) as log:
        assert log.root.ensure_topic("t").partitions == 1
        assert log.root.ensure_topic("t").id == log.root.topic("t").id
        with pytest.raises(errors.InvalidTopicError):
            log.root.ensure_topic("../t")


# Read-only logs


def test_a_log_opened_to_read_refuses_every_change(path):
    """Mode "r": every read works, every write raises `ReadOnlyError`."""
    write(path, b"x", b"y")
    before = {
        file: file.read_bytes()
        for file in path.rglob("*")
        if file.name != "lock.mdb"
        if file.is_file()
    }

    with embedlog.open(path, mode="r") as log:
        partition = log.partition("t", 0)
        assert values(partition) == [b"x", b"y"]
        assert (len(log.topic("t")), log.topics(), log.housekeeping.verify()) == (2, ["t"], [])
        assert log.describe_topic("t")["partitions"][0]["end_offset"] == 2
        for call in (
            lambda: partition.append([encoded(b"z")]),
            lambda: log.create_topic("u"),
            lambda: log.delete_topic("t"),
            lambda: log.alter_topic("t", {"retention.ms": 1}),
            lambda: log.create_partitions("t", 2),
            lambda: log.housekeeping.repair(dry_run=False),
            lambda: partition.truncate_to(0),
            lambda: partition.flush(),
            lambda: log.housekeeping.rebuild_index(),
            lambda: log.root.producer_identity(None),
        ):
            with pytest.raises(errors.ReadOnlyError):
                call()
        with pytest.raises(errors.UnknownTopicOrPartitionError):
            log.root.ensure_topic("u")

    assert before == {file: file.read_bytes() for file in before}


@needs_root
def test_reading_needs_no_right_to_write(public):
    """Another user's log, readable: mode "r" reads it."""
    path = public / "log"
    write(path, b"x")
    for file in [path, *path.rglob("*")]:
        os.chmod(file, 0o755 if file.is_dir() else 0o644)
    code = """
        import os, sys, embedlog
        def read():
            with embedlog.open(sys.argv[1], mode="r") as log:
                return [record.value for record in log.topic("t")]
        read()  # loads every module, while they may be read
        os.seteuid(int(sys.argv[2]))
        print(read())
    """

    process = run(code, path, UNPRIVILEGED)

    assert (process.stdout, process.stderr) == ("[b'x']\n", "")


def test_a_topic_directory_that_is_a_link_is_refused(path, tmp_path):
    """No link inside a log leads out of it (P22)."""
    write(path, b"x")
    directory = next((path / "topics").iterdir())
    directory.rename(tmp_path / "elsewhere")
    directory.symlink_to(tmp_path / "elsewhere")

    with embedlog.open(path) as log:
        with pytest.raises(errors.StorageError):
            log.partition("t", 0).append([encoded(b"y")])
        with pytest.raises(errors.EmbedlogError):
            log.topic("t")[0]
        assert log.housekeeping.verify() != []
    assert directory.is_symlink()
    assert len(segment_files(tmp_path / "elsewhere" / "..")) == 0


# Verify and repair


def test_verify_reports_its_progress(log):
    """`progress(done, total)` in bytes, up to the total."""
    log.create_topic("t")
    for _ in range(5):
        log.partition("t", 0).append([encoded(*[bytes(1000)] * 100)])
    steps = []

    assert log.housekeeping.verify(progress=lambda *step: steps.append(step)) == []

    totals = {total for _, total in steps}
    assert len(totals) == 1
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert 0.95 < steps[-1][0] / steps[-1][1] <= 1


def test_repair_reports_what_it_would_drop(log):
    """A dry run changes nothing; the repair drops the damaged records and no others."""
    log.create_topic("t")
    partition = log.partition("t", 0)
    for row in range(3):
        partition.append([encoded(b"row %d" % row)])
    partition.roll()
    file = segment_files(log.path)[0]
    data = file.read_bytes().replace(b"row 1", b"ROW 1")
    file.write_bytes(data)

    findings, report = log.housekeeping.verify(), log.housekeeping.repair()

    assert len(findings) == 1
    assert "CRC" in str(findings[0])
    assert len(report) == 1
    assert "offsets [1, 2) dropped" in report[0]
    assert file.read_bytes() == data
    assert log.housekeeping.repair(dry_run=False) == report
    assert values(log.partition("t", 0)) == [b"row 0", b"row 2"]
    assert partition.append([encoded(b"next")])[0].base_offset == 3


def test_the_index_can_be_rebuilt(log):
    """B5: it is derived; reads return the same with and without it."""
    log.create_topic("t", config={"index.interval.bytes": 0, "segment.bytes": 4000})
    for row in range(12):
        log.partition("t", 0).append([encoded(b"%d" % row)])

    assert log.housekeeping.rebuild_index() > 5
    assert log.housekeeping.rebuild_index("t") == log.housekeeping.rebuild_index()
    with pytest.raises(errors.UnknownTopicOrPartitionError):
        log.housekeeping.rebuild_index("other")
    assert [log.topic("t")[row].value for row in range(12)] == [b"%d" % row for row in range(12)]


@pytest.mark.parametrize("mark", [b"\xff\xff\xff\xff\0\0\0\0"])
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "active"])
def test_an_end_mark_before_the_end_is_damage(log, mark, sealed):
    """Arrow's end mark over a batch hides what follows: an error, not an early end or a hang."""
    log.create_topic("t")
    partition = log.partition("t", 0)
    for row in range(3):
        partition.append([encoded(b"row %d" % row)])
    second = partition.reader(1).read()[0].position
    if sealed:
        partition.roll()
    file = segment_files(log.path)[0]
    original = file.read_bytes()
    file.write_bytes(original[:second] + mark + original[second + 8 :])

    reader = log.partition("t", 0).reader(0)
    assert [batch.lists()[2] for batch in reader.read()] == [[b"row 0"]]
    with pytest.raises(errors.CorruptBatchError):
        reader.read()
    assert len(log.housekeeping.verify()) == 1
    assert len(log.housekeeping.repair()) == 1

    file.write_bytes(original)


def test_a_name_that_a_log_does_not_have_says_what_to_call(log):
    """Those of Kafka's clients, and those that belong to a noun; what they name exists."""
    from embedlog.api.log import _HINTS

    for name, hint in _HINTS.items():
        with pytest.raises(AttributeError) as error:
            getattr(log, name)
        assert hint in str(error.value)
        found = log
        for part in hint.split()[1].split("(")[0].split("[")[0].rstrip(",").split(".")[1:]:
            found = getattr(found, part)
