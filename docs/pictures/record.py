"""Records how a group continues after a kill: `python docs/pictures/record.py` draws killed.svg.

The run is real: two processes share a topic, one of them is killed with an order in its hands.
The picture shows when each process worked on which order, slowed down, in the reader's colours.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import embedlog

HERE = Path(__file__).parent
ORDERS, EVERY, WORK = 14, 0.15, 0.1
"""How many orders are sent, how long after one another, and how long each takes, in seconds."""
KILLED = 6
"""While worker A is at work on this order it is killed."""

Event = dict[str, Any]


def work(root: str, journal: str, name: str) -> None:
    """Handle orders as one member of the group, and write down when."""
    descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(what: str, **details: object) -> None:
        event = {"what": what, "worker": name, "time": time.monotonic(), **details}
        os.write(descriptor, json.dumps(event).encode() + b"\n")

    settings = {"auto_offset_reset": "earliest", "enable_auto_commit": False, "max_poll_records": 1}
    with (
        embedlog.open(root) as log,
        log.consumer("orders", group_id="kitchen", **settings) as member,
    ):
        while True:
            for records in member.poll(timeout_ms=50).values():
                for record in records:
                    note("begin", order=record.value, partition=record.partition)
                    begun = Path(journal).read_text(encoding="utf-8").count(f'"order": {KILLED},')
                    # The first one that has this order works on it until it is killed.
                    time.sleep(60 if record.value == KILLED and begun == 1 else WORK)
                    member.commit()
                    note("end", order=record.value)
            note("poll", partitions=len(member.assignment()))


def record(directory: Path) -> list[Event]:
    """Run the group, kill a member, and return what happened, in order."""
    journal = directory / "journal"

    def events() -> list[Event]:
        lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for(**wanted: object) -> None:
        while not any(wanted.items() <= event.items() for event in events()):
            time.sleep(0.005)

    with embedlog.open(directory / "log") as log:
        log.create_topic("orders", partitions=2, value="json")
        workers = {}
        for name, partitions in [("A", 2), ("B", 1)]:
            command = [sys.executable, __file__, str(directory / "log"), str(journal), name]
            workers[name] = subprocess.Popen(command)
            wait_for(what="poll", worker=name, partitions=partitions)
        wait_for(what="poll", worker="A", partitions=1)
        producer = log.producer()
        # Two orders before the recording, since a process imports pyarrow for its first one.
        for order in range(-2, ORDERS):
            producer.send("orders", order, partition=order % 2).result()
            if order < 0:
                wait_for(what="end", order=order)
            if order == KILLED:
                wait_for(what="begin", order=order)
                (victim,) = (event["worker"] for event in events() if event.get("order") == order)
                time.sleep(WORK / 2)
                killed = {"what": "kill", "worker": victim, "time": time.monotonic()}
                workers[victim].send_signal(signal.SIGKILL)
            time.sleep(EVERY)
        wait_for(what="end", order=ORDERS - 1)
        for worker in workers.values():
            worker.kill()
            worker.wait()
        assert sum(log.groups["kitchen"].lag().values()) == 0
    recorded = [event for event in events() if event.get("order", -1) >= 0]
    for event in (*recorded, killed):
        # Which of the two has the partition of that order is decided by the group.
        event["worker"] = "A" if event["worker"] == victim else "B"
    return sorted([*recorded, killed], key=lambda event: event["time"])


STYLE = """
text { font: 13px Helvetica, Arial, 'Liberation Sans', sans-serif; fill: var(--ink) }
.soft { fill: var(--soft) } .bold { font-weight: bold } .middle { text-anchor: middle }
svg { --ink: #22303c; --soft: #5b6b78; --card: #fbfaf7; --edge: #c9ccd1;
  --p0: #d6e6f5; --p1: #d8eddc; --line0: #4a7fb0; --line1: #4d9160; --red: #b9544a }
@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --soft: #9aa7b4; --card: #161b22;
  --edge: #3d444d; --p0: #1f3a56; --p1: #1f4229; --line0: #6ea8dc; --line1: #6cbf82; --red: #f0857a } }
@media (prefers-reduced-motion: reduce) { * { animation: none !important } }
.p0 { fill: var(--p0); stroke: var(--line0) } .p1 { fill: var(--p1); stroke: var(--line1) }
.lane { stroke: var(--edge); stroke-width: 2 } .dead { stroke: var(--red); stroke-width: 2.5 }
.again { stroke: var(--red); stroke-width: 2 } .red { fill: var(--red) }
"""
SLOWER, BEFORE, AFTER = 3, 2, 3
"""The picture takes so many times as long as the run, and is there as a whole for so many seconds
before and after: a preview is the first frame."""
LEFT, RIGHT = 100, 830
LANES = {"A": 62, "B": 122}


def draw(events: list[Event]) -> str:
    """Return the picture of a run."""
    first = next(event["time"] for event in events if event["what"] == "begin")
    ends = {
        (event["worker"], event["order"]): event["time"]
        for event in events
        if event["what"] == "end"
    }
    (killed,) = (event["time"] for event in events if event["what"] == "kill")
    total = max(ends.values()) - first
    length = BEFORE + total * SLOWER + AFTER
    hold = BEFORE / length * 100
    parts, frames = [], []

    def x(moment: float) -> float:
        return LEFT + (moment - first) / total * (RIGHT - LEFT)

    def appear(moment: float, *drawn: str) -> None:
        """Let something appear when it happened."""
        percent = hold + 0.01 + (moment - first) * SLOWER / length * 100
        number = len(frames)
        frames.append(
            f"@keyframes k{number} {{ 0%, {hold:.2f}% {{ opacity: 1 }} {hold + 0.01:.2f}%, {percent:.2f}% "
            f"{{ opacity: 0 }} {percent + 0.6:.2f}%, 100% {{ opacity: 1 }} }}"
        )
        parts.append(f'<g style="animation: k{number} {length:.1f}s infinite">{"".join(drawn)}</g>')

    begun = [event for event in events if event["what"] == "begin"]
    for event in begun:
        name, order, top = event["worker"], event["order"], LANES[event["worker"]] - 17
        end = ends.get((name, order), killed)
        again = name == "B" and order == KILLED
        left, width = x(event["time"]), x(end) - x(event["time"])
        kind = f"p{event['partition']}{' again' if again else ''}"
        box = f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="34" rx="4" class="{kind}"/>'
        label = f'<text x="{left + width / 2:.1f}" y="{top + 22}" class="middle">{order + 1}</text>'
        appear(event["time"], box, label)
    (again,) = (
        event["time"] for event in begun if event["worker"] == "B" and event["order"] == KILLED
    )
    left, y = x(killed), LANES["A"]
    cross = f'<path d="M{left:.1f} {y - 8}l16 16m0 -16l-16 16" class="dead"/>'
    appear(killed, cross, f'<text x="{left + 24:.1f}" y="{y + 5}" class="red bold">kill -9</text>')
    milliseconds = (again - killed) * 1000
    say = f"{milliseconds:.0f} ms after the kill, worker B receives order {KILLED + 1} again (it was not committed)"
    appear(again, f'<text x="{LEFT}" y="172" class="bold">{say}</text>')
    done = f"{ORDERS} of {ORDERS} orders are done; no timeout was involved"
    appear(max(ends.values()), f'<text x="{LEFT}" y="192">{done}</text>')

    about = (
        f"Orders of two partitions, one each for worker A and worker B. A is killed. {say}; {done}."
    )
    still = [
        '<rect x="1" y="1" width="858" height="208" rx="10" fill="var(--card)" stroke="var(--edge)"/>',
        '<text x="22" y="28" class="soft">one recording, slowed down three times: a group of two processes, a topic of two partitions (blue and green)</text>',
    ]
    for name, y in LANES.items():
        still.append(f'<text x="22" y="{y + 5}" class="bold">worker {name}</text>')
        still.append(
            f'<path d="M{LEFT} {y}H{x(killed) if name == "A" else RIGHT:.1f}" class="lane"/>'
        )
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 210" width="860" height="210" role="img">'
        f"<title>A worker is killed, and its group continues</title><desc>{about}</desc>"
    )
    return (
        "\n".join([head, f"<style>{STYLE}{chr(10).join(frames)}</style>", *still, *parts, "</svg>"])
        + "\n"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(*sys.argv[1:])
    with tempfile.TemporaryDirectory() as directory:
        (HERE / "killed.svg").write_text(draw(record(Path(directory))), encoding="utf-8")
