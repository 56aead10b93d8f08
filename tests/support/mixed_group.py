"""One group of consumers in several programs: in Python, and clients of servers.

Each child writes a line for each record that it has read, and for each offset whose commit was
acknowledged, to the same file; what is written first happened first.  `check` reads it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import embedlog
from embedlog.errors import CommitFailedError, EmbedlogError
from support.patience import patient

TOPIC, GROUP = "t", "g"
KINDS = ("program", "classic", "cooperative", "modern")


class Events:
    """The file that all members write to."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, what: str, partition: int, offset: int) -> None:
        """Write one line, in one call."""
        os.write(self._file, f"{what} {partition} {offset}\n".encode())


def serve(log: str, port: str, session_ms: str) -> None:
    """Serve a log; clients are missed sooner than usual."""
    from embedlog.cli import main
    from embedlog.server import consumer_group_answers

    consumer_group_answers.SESSION_MS = int(session_ms)
    sys.exit(main(["serve", log, "--listen", f"127.0.0.1:{port}"]))


def consume(kind: str, place: str, events: str, session_ms: str) -> None:
    """Read and commit record by record, until SIGTERM."""
    going = [True]
    signal.signal(signal.SIGTERM, lambda *_: going.clear())
    note = Events(events).note
    if kind == "program":
        with embedlog.open(place) as log:
            _read_log(log, going, note, int(session_ms))
        return
    from confluent_kafka import Consumer, KafkaException

    options: dict[str, Any] = {"group.protocol": "consumer"}
    if kind != "modern":
        options = {"session.timeout.ms": int(session_ms), "heartbeat.interval.ms": 200}
        options["partition.assignment.strategy"] = (
            "cooperative-sticky" if kind == "cooperative" else "range,roundrobin"
        )
    consumer = Consumer(
        {
            **options,
            "bootstrap.servers": place,
            "group.id": GROUP,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "reconnect.backoff.max.ms": 500,
            "log_level": 0,
        }
    )
    consumer.subscribe([TOPIC])
    while going:
        message = consumer.poll(0.1)
        if message is None or message.error():
            continue
        note("read", message.partition(), message.offset())
        try:
            consumer.commit(message=message, asynchronous=False)
            note("committed", message.partition(), message.offset() + 1)
        except KafkaException:
            continue  # It lost the partition, or the server; the next one reads it again.
    consumer.close()


def _read_log(log: Any, going: list[bool], note: Any, session_ms: int) -> None:
    with log.consumer(
        TOPIC,
        group_id=GROUP,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        session_timeout_ms=session_ms,
        heartbeat_interval_ms=200,
        max_poll_records=1,
        partition_assignment_strategy=["cooperative-sticky", "range"],
    ) as consumer:
        while going:
            for records in consumer.poll(timeout_ms=100).values():
                for record in records:
                    note("read", record.partition, record.offset)
            try:
                consumer.commit()
            except CommitFailedError:
                continue
            for tp in consumer.assignment():
                position = consumer.committed(tp)
                if position is not None:
                    note("committed", tp.partition, position)


class MixedGroup:
    """The log, a server, and the members of a group, each a child.

    Args:
        directory: Where the log and the events are.
        session_ms: How long members may be silent.
        partitions: How many partitions the topic has.
    """

    def __init__(self, directory: Path, session_ms: int, partitions: int = 4) -> None:
        self._session = str(session_ms)
        self.path, self._events = str(directory / "log"), directory / "events"
        self._stack = ExitStack()
        self.log = self._stack.enter_context(embedlog.open(self.path))
        self.log.create_topic(TOPIC, partitions)
        self.count, self._sent = partitions, 0
        self._port = "0"
        self.server = self._serve()
        self.members: dict[str, subprocess.Popen[str]] = {}

    def _child(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "support.mixed_group", *arguments]
        child = subprocess.Popen(command, cwd=Path(__file__).parents[1], text=True, **options)
        self._stack.callback(child.wait)
        self._stack.callback(child.kill)
        return child

    def _serve(self) -> subprocess.Popen[str]:
        server = self._child("serve", self.path, self._port, self._session, stdout=subprocess.PIPE)
        assert server.stdout is not None
        with server.stdout:
            line = server.stdout.readline()
        assert " at " in line, line
        self._port = line.split()[-1].rpartition(":")[2]
        return server

    def restart_server(self) -> None:
        """Kill the server (SIGKILL), and start another one at its address."""
        self.server.kill()
        self.server.wait()
        self.server = self._serve()

    def start(self, kind: str) -> None:
        """Start a member."""
        place = self.path if kind == "program" else f"127.0.0.1:{self._port}"
        name = f"{kind}-{len(self.members)}"
        self.members[name] = self._child("consume", kind, place, str(self._events), self._session)

    def kill(self, kind: str) -> None:
        """Kill the first member of a kind (SIGKILL)."""
        name = next(name for name in self.members if name.startswith(kind))
        member = self.members.pop(name)
        member.kill()
        member.wait()

    def send(self, count: int) -> None:
        """Append records to all partitions."""
        with self.log.producer() as producer:
            for number in range(count):
                producer.send(TOPIC, b"v", partition=number % self.count)
        self._sent += count

    def until_shared(self) -> None:
        """Wait until each of the living members owns a partition, and all are owned."""
        self._until(self._is_shared)

    def _is_shared(self) -> bool:
        members = self.log.groups[GROUP].members()
        owned = [len(member.partitions) for member in members]
        return len(owned) == len(self.members) and min(owned) > 0 and sum(owned) == self.count

    def until_consumed(self) -> None:
        """Wait until the group has committed the end of each partition."""
        self._until(lambda: self._lags() == [0] * self.count)

    def _lags(self) -> list[int | None]:
        return [part.lag for part in self.log.groups[GROUP].describe().partitions]

    def _until(self, done: Any) -> None:
        deadline = time.monotonic() + patient(40)
        while not _holds(done):
            state = self.log.groups[GROUP]
            assert time.monotonic() < deadline, repr(state)
            time.sleep(0.02)

    def generation(self) -> int:
        """Return the number of rebalances."""
        return int(self.log.groups[GROUP].describe().generation)

    def check(self) -> None:
        """Check that every record was read, and none after its offset was committed."""
        read: dict[int, set[int]] = defaultdict(set)
        committed: dict[int, int] = defaultdict(int)
        for what, partition, offset in self._lines():
            if what == "read":
                # Whoever reads earlier ones began before that, or a commit was lost.
                assert offset >= committed[partition], (partition, offset, committed[partition])
                read[partition].add(offset)
            else:
                committed[partition] = max(committed[partition], offset)
        assert sum(map(len, read.values())) == self._sent

    def _lines(self) -> Iterator[tuple[str, int, int]]:
        for line in self._events.read_text(encoding="ascii").splitlines():
            what, partition, offset = line.split()
            yield what, int(partition), int(offset)

    def close(self) -> None:
        """Kill all, and close the log."""
        self._stack.close()


def _holds(done: Any) -> bool:
    try:
        return bool(done())
    except EmbedlogError:
        return False  # The group is not there yet.


if __name__ == "__main__":
    {"serve": serve, "consume": consume}[sys.argv[1]](*sys.argv[2:])
