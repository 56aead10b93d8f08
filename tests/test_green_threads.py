"""Programs whose threads are greenlets of gevent or eventlet: a wait lets the others run."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from support.children import run_python
from support.tiers import sample

pytestmark = pytest.mark.tier("test")  # each test starts a process

PROGRAM = """
import sys
if sys.argv[1] == "gevent":
    from gevent import monkey, sleep, spawn
    monkey.patch_all()
else:
    import eventlet
    from eventlet import sleep, spawn
    eventlet.monkey_patch()

import embedlog

log = embedlog.open(sys.argv[2])
log.create_topic("t")
ticks = 0

def tick():
    global ticks
    while True:
        ticks += 1
        sleep(0.001)

def produce():
    with log.producer() as producer:
        for number in range(3):
            # If the wait of the consumer stopped the others, the next record would never come.
            until = ticks + 20
            while ticks < until:
                sleep(0.001)
            producer.send("t", b"%d" % number).result()

got = []
spawn(tick)
with log.consumer("t", group_id="g", auto_offset_reset="earliest") as consumer:
    assert consumer.poll(0) == {}
    producing = spawn(produce)
    while len(got) < 3:
        for records in consumer.poll(None).values():
            got += [record.value for record in records]
assert got == [b"0", b"1", b"2"]
log.close()
"""


@pytest.mark.parametrize("library", sample(["gevent", "eventlet"], 1))
def test_a_waiting_consumer_lets_other_greenlets_run(tmp_path, library):
    """Members of groups, their heartbeats and the housekeeping run as greenlets, too."""
    if find_spec(library) is None:  # not imported here: eventlet would warn of later forks
        pytest.skip(f"pip install {library}")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run_python("-W", "ignore", program, library, tmp_path / "log", seconds=30)
