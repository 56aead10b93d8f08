"""Clients in other languages, unchanged and from their registries, on the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.client_programs import PROGRAMS, Program, node_project
from support.patience import patient

from embedlog.errors import EmbedlogError

pytestmark = [pytest.mark.tier("all"), pytest.mark.xdist_group("clients")]


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Program:
    return PROGRAMS[request.param]


@pytest.fixture
def start(program, kafka_server):
    """Return a function that starts the program with a step."""
    command, running = program.command(), list[subprocess.Popen[str]]()

    def start_step(*step: object) -> subprocess.Popen[str]:
        started = subprocess.Popen(
            [*command, kafka_server.bootstrap_servers, *map(str, step)],
            env={**os.environ, **program.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(started)
        return started

    yield start_step
    for each in running:
        each.kill()
        each.communicate()


@pytest.fixture
def run(start):
    """Return a function that has the program take a step, and returns what it printed."""
    return lambda *step: printed(start(*step))


def printed(program: subprocess.Popen[str]) -> list[Any]:
    output, errors = program.communicate(timeout=patient(60))
    assert program.returncode == 0, errors
    return [json.loads(line) for line in output.splitlines()]


def as_text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def test_a_client_writes_reads_and_administers(program, run, embedlog_log):
    """Python has what it sent; its group goes on where its last member ended."""
    run("create", "orders", 3)
    expected: dict[str, str | None] = {}
    for number, codec in enumerate(program.codecs):
        run("produce", "orders", codec, 20 * number, 20 * number + 19)
        expected |= {f"k{n}": f"{n}" for n in range(20 * number, 20 * number + 19)}
        expected[f"k{20 * number + 19}"] = None
    records = [
        {
            "partition": record.partition,
            "offset": record.offset,
            "key": as_text(record.key),
            "value": as_text(record.value),
            "header": as_text(dict(record.headers).get("n")),
        }
        for record in embedlog_log.topic("orders")
    ]
    assert {each["key"]: each["value"] for each in records} == expected
    assert all(each["header"] == each["value"] for each in records)
    assert len(records) == len(expected)

    read = run("consume", "orders", "g", 15) + run("consume", "orders", "g", len(records) - 15)

    def order(record: dict[str, Any]) -> tuple[int, int]:
        return record["partition"], record["offset"]

    assert sorted(read, key=order) == sorted(records, key=order)
    (described,) = run("describe", "orders", "g")
    ends = sorted(part.log_end_offset for part in embedlog_log.groups["g"].describe().partitions)
    assert sorted(described.pop("ends")) == sorted(described.pop("committed")) == ends
    group = {"groups": ["g"], "state": "Empty"}
    assert described == {"partitions": 3, "retention": "1234567", **group}
    run("delete", "orders", "g")
    assert "orders" not in embedlog_log
    assert "g" not in embedlog_log.groups


def test_a_client_copies_in_transactions(program, run, embedlog_log):
    """What is committed is there once, with the offsets of its group; what is aborted is not."""
    for topic, count in (("orders", 3), ("copies", 2)):
        embedlog_log.create_topic(topic, count)
    with embedlog_log.producer() as producer:
        for number in range(50):
            producer.send("orders", b"%d" % number, partition=number % 3)
    for count in (20, 30):
        run("transfer", "orders", "g", "copies", count)
    values = [int(record.value) for record in embedlog_log.topic("copies")]
    assert sorted(values) == [*range(50)]
    assert sum(embedlog_log.groups["g"].lag().values()) == 0


def test_a_client_shares_a_group_with_a_program_in_python(program, start, embedlog_log):
    """Each owns a partition, and all records are read once."""
    embedlog_log.create_topic("orders", 3)
    client = start("consume", "orders", "g", 100)
    with embedlog_log.consumer(
        "orders",
        group_id="g",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        partition_assignment_strategy=list(program.assignors),
    ) as consumer:
        while owned_by_members(embedlog_log) not in ([1, 2], [2, 1]):
            assert client.poll() is None, client.communicate()
            assert not consumer.poll(timeout_ms=50)
        with embedlog_log.producer() as producer:
            for number in range(300):
                producer.send("orders", b"%d" % number, partition=number % 3)
        read: list[bytes] = []
        while len(read) < 200:
            records = consumer.poll(timeout_ms=patient(60_000))
            assert records
            read += [each.value for part in records.values() for each in part]
            consumer.commit()
    theirs = [each["value"].encode() for each in printed(client)]
    assert len(theirs) == 100
    assert sorted(read + theirs, key=int) == [b"%d" % number for number in range(300)]


def owned_by_members(log: Any) -> list[int]:
    try:
        return [len(member.partitions) for member in log.groups["g"].members()]
    except EmbedlogError:
        return []  # The group is not there yet.


def test_the_example_in_javascript_passes_its_tests():
    """A service that uses kafkajs, tested with `embedlog serve`."""
    done = subprocess.run(
        ["npm", "test"],
        cwd=node_project(),
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout
