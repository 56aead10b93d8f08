"""Quix Streams' exactly-once mode on a log, with `embedlog.kafka.patch()`: `make engines`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from support import forks
from support.patience import patient

import embedlog

HOME = Path(__file__).parents[1] / ".venv" / "quixstreams"
pytestmark = [
    pytest.mark.tier("all"),
    pytest.mark.skipif(not HOME.exists(), reason=f"{HOME.name} is not installed: `make engines`"),
]

PROGRAM = """
import sys, embedlog.kafka
embedlog.kafka.patch()
from quixstreams import Application

app = Application(
    broker_address=f"embedlog://{sys.argv[1]}", consumer_group="g", auto_offset_reset="earliest",
    processing_guarantee="exactly-once", commit_every=7, state_dir=sys.argv[2],
    use_changelog_topics=False, loglevel="WARNING",
)
frame = app.dataframe(app.topic("in", value_deserializer="bytes"))
frame.apply(lambda value: b"of " + value).to_topic(app.topic("out", value_serializer="bytes"))
app.run(timeout=float(sys.argv[3]))
"""
COUNT = 600


def test_quix_streams_transforms_each_record_exactly_once(tmp_path):
    """G22: its process is killed again and again, and the last one ends by itself."""
    with embedlog.open(tmp_path / "log") as log:
        for topic in ("in", "out"):
            log.create_topic(topic, 2)
        with log.producer() as producer:
            for number in range(COUNT):
                producer.send("in", b"%d" % number, b"%d" % number)

        def start(seconds):
            command = [sys.executable, "-c", PROGRAM, log.path, tmp_path / "state", str(seconds)]
            return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(HOME)})

        killed = 0
        for _ in range(5):
            done = len(log.topic("out"))
            program = start(60)
            forks.until(lambda done=done: len(log.topic("out")) > done, patient(60))
            time.sleep(0.02)
            os.kill(program.pid, signal.SIGKILL)
            program.wait()
            killed += len(log.topic("out")) < COUNT
            if len(log.topic("out")) == COUNT:
                break
        assert start(3).wait(patient(60)) == 0
        values = Counter(record.value for record in log.topic("out"))
        assert values == Counter(b"of %d" % number for number in range(COUNT))
        assert killed
        assert log.housekeeping.verify() == []
