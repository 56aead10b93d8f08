"""What programs pass by mistake, coming from Kafka or from pandas: refused, with what to do."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.children import run_python

import embedlog
from embedlog import Consumer, Log, Producer, Topic
from embedlog.errors import InvalidTopicError, NotALogError


@pytest.fixture
def log(tmp_path):
    """A log with one record in topic "t"."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        with log.producer() as producer:
            producer.send("t", b"v", key=b"k")
        yield log


# Paths


@pytest.mark.parametrize(
    ("path", "todo"),
    [
        ("localhost:9092", "A directory of that name is './localhost:9092'"),
        ("kafka-1:9092,kafka-2.example.com:9092", "Pass a directory"),
        ("[::1]:9092", "Pass a directory"),
        ("kafka://localhost:9092", "Pass a directory"),
        ("kafka://localhost:9092?acks=all", "Pass a directory"),
        ("s3://bucket/log", "Pass a directory on a local disk"),
        ("hdfs://name/log", "Pass a directory on a local disk"),
        ("gs://bucket", "Pass a directory on a local disk"),
        ("abfs://c@account/log", "Pass a directory on a local disk"),
        ("https://example.com/log", "Pass a directory on a local disk"),
        ("anything://", "Pass a directory on a local disk"),
        (r"C:\data\log", "WSL 2"),
        ("C:/data/log", "WSL 2"),
        (r"\\server\share", "WSL 2"),
        ("", "pass '.'"),
        ("file://data/log", "with three slashes"),
        ("file://otherhost/data/log", "with three slashes"),
        ("embedlog://data", "with three slashes"),
        ("file:data", "with three slashes"),
        ("embedlog:///data?durability=fsync", "Pass options as arguments"),
        ("data\0log", "Pass a directory on a local disk"),
        ("file:///data%00log", "Pass a directory on a local disk"),
        (Path("data\0log"), "Pass a directory on a local disk"),
    ],
)
def test_an_address_is_refused_as_a_path(tmp_path, monkeypatch, path, todo):
    """It would otherwise become a directory of that name, in which nobody looks for a log."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(NotALogError) as refused:
        embedlog.open(path, maintenance=False)

    assert todo in str(refused.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", [None, 5, [7], {"bootstrap.servers": "k:9092"}])
def test_what_is_no_path_is_refused(path):
    """The error has what was passed, and what to pass."""
    with pytest.raises(TypeError, match="path must be a str or a Path of a directory, got "):
        embedlog.open(path)


def test_addresses_of_brokers_are_no_directories(tmp_path, monkeypatch):
    """Nor in a list, where several directories of a log may be."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotALogError, match="address of a broker"):
        embedlog.open(["localhost:9092", "localhost:9093"])
    assert os.listdir(tmp_path) == []


def test_a_url_of_this_machine_names_a_directory(tmp_path):
    """With `file` or `embedlog`, an empty host or localhost, and percent-encoded characters."""
    spellings = [
        tmp_path / "a b#c",
        str(tmp_path / "a b#c"),
        f"file://{tmp_path}/a%20b%23c",
        f"FILE:{tmp_path}/a%20b%23c",
        f"file://localhost{tmp_path}/a b%23c",
        f"embedlog://{tmp_path}/a%20b%23c",
        os.fsencode(tmp_path / "a b#c"),
    ]

    for spelling in spellings:
        with embedlog.open(spelling, maintenance=False) as log:
            assert log.path == str(tmp_path / "a b#c")


@pytest.mark.parametrize(
    "path", ["./localhost:9092", Path("localhost:9092"), "data:1/log", "data", "host:name"]
)
def test_a_relative_path_stays_a_path(tmp_path, monkeypatch, path):
    """Also one with a colon, if it says that it is a path."""
    monkeypatch.chdir(tmp_path)

    with embedlog.open(path, maintenance=False) as log:
        assert log.path == os.path.abspath(tmp_path / path)


def test_the_command_line_refuses_addresses_too(tmp_path):
    """It takes the same paths."""
    command = [sys.executable, "-m", "embedlog", "--root", "localhost:9092", "topics", "list"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode != 0
    assert "address of a broker" in done.stderr


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_other_systems_are_refused_in_one_sentence(platform):
    """The import says what is supported, before a module of the system is missing."""
    error = run_python(
        "-c",
        "import sys\n"
        f"sys.platform = {platform!r}\n"
        "try:\n"
        "    import embedlog\n"
        "except ImportError as error:\n"
        "    print(error)\n",
    )

    assert str(error).startswith("embedlog runs on Linux only")


# Constructors


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda log: Consumer(), "consumer(topic, ...)"),
        (lambda log: Consumer(group_id="g"), "consumer(topic, ...)"),
        (lambda log: Consumer("t"), "consumer(topic, ...)"),
        (lambda log: Consumer(log, "t"), "consumer(topic, ...)"),
        (lambda log: Producer(acks=1), "producer(...)"),
        (lambda log: Producer("path"), "producer(...)"),
        (lambda log: Producer({"acks": "all"}), "producer(...)"),
        (lambda log: Topic("t"), "topic(name)"),
        (lambda log: Topic(log, "t"), "topic(name)"),
    ],
)
def test_a_constructor_names_the_method_to_call_instead(log, make, call):
    """A log makes its producers, consumers and views."""
    with pytest.raises(TypeError) as refused:
        make(log)
    assert str(refused.value).endswith(f"; call embedlog.open(path).{call}")


@pytest.mark.parametrize("arguments", [(), ("path",)])
def test_a_log_is_opened_not_made(arguments):
    """Its constructor names the function."""
    with pytest.raises(TypeError, match=r"; call embedlog\.open\(path\)$"):
        Log(*arguments)


# Lookups


@pytest.mark.parametrize("key", [b"k", "k", None])
def test_in_does_not_scan_a_topic(log, key):
    """`in` on a view would read every record, and find none, since records are no keys."""
    for view in (log.topic("t"), log.topic("t")[:1]):
        with pytest.raises(TypeError, match=r"call get\(key\)"):
            assert key in view


@pytest.mark.parametrize("key", [b"k", "k"])
def test_a_key_is_no_row(log, key):
    """A view has rows; `get` has values by key."""
    with pytest.raises(TypeError, match=r"use get\(key\)"):
        log.topic("t")[key]


def test_a_log_contains_topics_by_name(log):
    """Names are str; others are refused instead of not found."""
    assert "t" in log
    assert "u" not in log
    for name in (b"t", 5, None, log.topic("t")):
        with pytest.raises(TypeError, match="topic must be the name of a topic as a str"):
            assert name in log
    for name in (b"t", 5):
        with pytest.raises(InvalidTopicError, match="Topic name must be a str"):
            log[name]


@pytest.mark.parametrize(
    ("get", "hint"),
    [
        (lambda log: log.t, r"call log\.topic\('t'\)"),
        (lambda log: log.topic("t").value, r"to_pandas\(\)\['value'\].*record\.value"),
        (lambda log: log.topic("t").key, r"to_pandas\(\)\['key'\]"),
        (lambda log: log.topic("t")[:1].headers, r"to_pandas\(\)\['headers'\]"),
        (lambda log: log.producer().produce("t", b"v"), r"call send\(topic, value, key=\.\.\.\)"),
        (lambda log: log.producer().poll(0), "leave it out"),
        (lambda log: log.consumer("t").consume(5), r"call poll\(timeout_ms, max_records\)"),
        (lambda log: log.create_topics([]), r"call log.create_topic\(name, partitions, config\)"),
    ],
)
def test_an_attribute_of_another_library_is_refused_with_a_hint(log, get, hint):
    """Of confluent-kafka, or of pandas."""
    with pytest.raises(AttributeError, match=hint):
        get(log)


@pytest.mark.parametrize("name", ["nonsense", "_t", "__len__"])
def test_other_attributes_are_refused_as_ever(log, name):
    """Also of a log whose constructor failed."""
    for thing in (log, log.topic("t"), log.producer(), log.consumer("t"), Log.__new__(Log)):
        assert not hasattr(thing, name) or name == "__len__"


def test_hints_cost_nothing(log):
    """With a `__getattr__` each attribute that `send` and iterations read would be slower."""
    for client in (log.producer(), log.consumer("t")):
        assert not hasattr(type(client), "__getattr__")
        assert not {"produce", "consume", "list_topics"} & set(dir(client))


def test_the_arguments_of_a_consumer_are_refused_with_a_hint(log):
    """A list of topics, or settings as a dict, as confluent-kafka takes them."""
    for argument in (["t"], {"group.id": "g"}):
        with pytest.raises(InvalidTopicError, match="Pass each topic and setting by itself"):
            log.consumer(argument)
    with pytest.raises(embedlog.errors.InvalidConfigError, match="Did you mean group_id"):
        log.consumer(group="g")


@pytest.mark.parametrize("argument", ["t", {"acks": 1}])
def test_the_arguments_of_a_producer_are_refused_with_a_hint(log, argument):
    """A topic, or settings as a dict."""
    with pytest.raises(TypeError, match=r"passed by name.*producer\(\*\*config\).*topic to send"):
        log.producer(argument)


# Errors


def test_an_error_is_found_where_the_others_are(log):
    """`embedlog.errors` has them; a guess says so, which `except` would otherwise hide."""
    with pytest.raises(AttributeError, match=r"it is embedlog\.errors\.DiskFullError$"):
        embedlog.DiskFullError  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'NoSuchError'$"):
        embedlog.NoSuchError  # noqa: B018


def test_a_missing_directory_is_named_by_a_reader(tmp_path):
    """Only `mode="r"` needs one that exists."""
    with pytest.raises(embedlog.errors.StorageError, match="no such directory") as missing:
        embedlog.open(tmp_path / "no", mode="r")
    assert "mode='r'" in str(missing.value)
    assert missing.value.errno == errno.ENOENT


def test_a_second_create_names_the_way_to_join(log):
    """Every process of a service creates its topics when it starts."""
    with pytest.raises(embedlog.errors.TopicAlreadyExistsError, match="exist_ok=True"):
        log.create_topic("t")


# Values


@pytest.mark.parametrize("values", ["abc", b"abc", {"a": 1}, {"a"}])
@pytest.mark.parametrize("argument", ["values", "keys"])
def test_a_single_value_is_no_batch(log, values, argument):
    """Its characters, numbers or keys would become records, which JSON accepts silently."""
    log.create_topic("json", key="json", value="json")
    batch = {"values": ["x"], "keys": ["x"], argument: values}

    with (
        log.producer() as producer,
        pytest.raises(embedlog.errors.InvalidRecordError, match=f"{argument} must be a list"),
    ):
        producer.send_batch("json", **batch)

    assert len(log.topic("json")) == 0


@pytest.mark.parametrize(
    ("record", "todo"),
    [
        ({"value": "text"}, 'value_serializer="str" of the producer'),
        ({"value": {"a": 1}}, "value.serializer=json of the topic"),
        ({"key": "text"}, 'key_serializer="str" of the producer'),
        ({"headers": [("name", "text")]}, "Encode it."),
    ],
)
def test_what_is_not_bytes_is_refused_with_what_to_set(log, record, todo):
    """The advice names settings that exist: headers have none."""
    with log.producer() as producer, pytest.raises(embedlog.errors.SerializationError) as refused:
        producer.send("t", **record)
    assert str(refused.value).endswith(".")
    assert todo in str(refused.value)
    assert "header_serializer" not in str(refused.value)
