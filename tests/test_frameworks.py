"""Frameworks that know nothing of embedlog run on a directory: `make engines` installs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import forks
from support.patience import patient

import embedlog

HOMES = Path(__file__).parents[1] / ".venv"
pytestmark = pytest.mark.tier("all")

FASTSTREAM = """
import asyncio, sys
import embedlog.kafka
embedlog.kafka.patch(sys.argv[1])
from faststream import FastStream
from faststream.{kind} import KafkaBroker

broker = KafkaBroker("localhost:9092")
app = FastStream(broker)

@broker.subscriber("in", group_id="g", auto_offset_reset="earliest")
@broker.publisher("out")
async def handle(number: int) -> int:
    return number * 2

asyncio.run(app.run())
"""
# Without a table: with one, Faust seeks to the committed offsets after it has fetched from them,
# and repeats or forgets a record now and then, on a log that answers so soon.
FAUST = """
import sys
import embedlog.kafka
embedlog.kafka.patch(sys.argv[1])
import faust

app = faust.App("app", broker="kafka://localhost:9092", store="memory://", web_enabled=False)
source = app.topic("in", key_type=bytes, value_type=bytes, value_serializer="raw", partitions=1)
target = app.topic("out", value_type=bytes, value_serializer="raw", partitions=1)

@app.agent(source)
async def handle(stream):
    async for value in stream:
        await target.send(value=b"%d" % (2 * int(value)))

sys.argv[1:] = []
faust.Worker(app, loglevel="WARNING").execute_from_commandline()
"""
JSON = [("content-type", b"application/json")]
CASES = {
    "faststream, aiokafka": ("faststream", FASTSTREAM.format(kind="kafka")),
    "faststream, confluent-kafka": ("faststream", FASTSTREAM.format(kind="confluent")),
    "faust": ("faust", FAUST),
}
"""Where each framework is installed, and a program that doubles numbers."""


@pytest.mark.parametrize("name", CASES)
def test_a_program_of_a_framework_runs_on_a_log_and_goes_on_after_a_restart(name, tmp_path):
    """It only calls `patch`; what it has handled and committed is not handled again."""
    home, program = CASES[name]
    if not (HOMES / home).exists():
        pytest.skip(f"{home} is not installed: `make engines`")

    def results():
        return [int(record.value) for record in log.topic("out")]

    with embedlog.open(tmp_path / "log") as log:
        for topic in ("in", "out"):
            log.create_topic(topic)
        group = "app" if home == "faust" else "g"
        for sent in (20, 40):
            with log.producer() as producer:
                for number in range(sent - 20, sent):
                    producer.send("in", b"%d" % number, key=b"k", headers=JSON)
            process = subprocess.Popen(
                [sys.executable, "-c", program, log.path],
                env={**os.environ, "PYTHONPATH": str(HOMES / home)},
            )
            try:
                forks.until(lambda sent=sent: len(results()) >= sent, patient(60))
                forks.until(lambda sent=sent: _committed(log, group) == sent, patient(60))
                process.send_signal(signal.SIGTERM)
                assert process.wait(patient(60)) in (0, -signal.SIGTERM, 15)
            finally:
                process.kill()
                process.wait()
        assert results() == [2 * number for number in range(40)]
        assert log.housekeeping.verify() == []


def _committed(log, group):
    from embedlog.consumer.open_group import open_group

    rows = open_group(log.root, group).snapshot().committed
    row = rows.get(embedlog.TopicPartition("in", 0))
    return None if row is None else row.position.offset
