"""`Topic.new`: the records that a group has not read, committed when the block ends well."""

from __future__ import annotations

import signal
import subprocess
import sys

import pyarrow as pa
import pytest

import embedlog
from embedlog import TopicPartition
from embedlog.errors import InvalidConfigError

DIES = """
import os, signal, sys
import embedlog

with embedlog.open(sys.argv[1]) as log, log.topic("t").new("report") as new:
    assert len(new) == 6
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def log(tmp_path):
    """A log with six records in two partitions."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t", 2)
        with log.producer() as producer:
            for number in range(6):
                producer.send("t", b"%d" % number, partition=number % 2)
        yield log


def values(view):
    """Return the values of a view, in order."""
    return sorted(view.to_arrow(["value"])["value"].to_pylist())


def test_a_block_gets_what_the_group_has_not_read(log):
    """From the beginning at first, then from its commit on."""
    topic = log.topic("t")
    with topic.new("report") as new:
        log.producer().send("t", b"later").result()
        assert values(new) == [b"0", b"1", b"2", b"3", b"4", b"5"]
        assert new.scan().collect().height == new.dataset().count_rows() == len(new) == 6
    with topic.new("report") as new:
        assert values(new) == [b"later"]
    with topic.new("report") as new:
        assert values(new) == []
    with topic.new("other") as new:
        assert len(new) == 7
    assert sum(log.groups["report"].lag().values()) == 0


def test_a_block_that_fails_commits_nothing(log):
    """Whether it raises or its process is killed: the next one gets the records again."""
    topic = log.topic("t")
    with pytest.raises(ZeroDivisionError), topic.new("report"):
        raise ZeroDivisionError
    assert subprocess.run([sys.executable, "-c", DIES, log.path]).returncode == -signal.SIGKILL
    with topic.new("report") as new:
        assert len(new) == 6


def test_blocks_of_one_group_share_nothing(log):
    """A member that holds the partitions keeps them until its block ends."""
    topic = log.topic("t")
    with topic.new("report") as first, topic.new("report") as second:
        assert (len(first), len(second)) == (6, 0)
    with topic.new("report") as new:
        assert len(new) == 0


def test_records_that_were_deleted_are_not_new(log):
    """The block begins where the log begins."""
    topic = log.topic("t")
    with topic.new("report"):
        pass
    with log.producer() as producer:
        for number in range(4):
            producer.send("t", b"new %d" % number, partition=0)
    log.delete_records({TopicPartition("t", 0): 6})
    with topic.new("report") as new:
        assert values(new) == [b"new 3"]


def test_the_records_are_decoded_by_the_topic(log):
    """Columns of a typed topic; and a record that cannot be decoded does not end a raw view."""
    log.create_topic("typed", schema=pa.schema([("n", pa.int64())]))
    log.create_topic("json", value="json")
    log.producer().send("typed", {"n": 1}).result()
    log.producer(value_serializer="bytes").send("json", b"no {JSON}").result()

    with log.topic("typed").new("report") as new:
        assert new.to_pandas()["n"].tolist() == [1]
    with log.topic("json", raw=True).new("report") as new:
        assert values(new) == [b"no {JSON}"]


def test_a_group_must_have_a_name(log):
    """As that of a consumer."""
    with pytest.raises(InvalidConfigError), log.topic("t").new(""):
        pass
