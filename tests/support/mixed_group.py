"""One group of consumers in several programs: in Python, and clients of servers.

Each child writes a line for each record that it has read, for each commit that it asks for, and
for each that was acknowledged, to the same file; what is written first happened first.  `check`
reads it.
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
from embedlog.consumer.open_group import open_group
from embedlog.errors import CommitFailedError, EmbedlogError, LockTimeoutError
from embedlog.group import Group
from embedlog.groups import offsets
from embedlog.record import TopicPartition
from support.kafka_broker import java_command
from support.mutants import Behaviour
from support.patience import patient

TOPIC, GROUP = "t", "g"
KINDS = ("program", "classic", "cooperative", "modern")
JAVA_KINDS = {"java": "consumer", "java-classic": "classic"}
"""Members with Kafka's own client, and their protocols."""
SERVER = "server"
_JAVA_PROGRAM = Path(__file__).with_name("MixedMember.java")


_PYTHON = [sys.executable, "-m", "support.mixed_group"]


class Events:
    """The file that all members write to.

    Args:
        path: The file.
        name: The member that writes.
    """

    def __init__(self, path: str, name: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._name, self._flag = name, Path(f"{path}-{name}")

    def note(self, what: str, partition: int = 0, offset: int = 0) -> None:
        """Write one line, in one call."""
        os.write(self._file, f"{self._name} {what} {partition} {offset}\n".encode())

    def stop_if_told(self) -> None:
        """Stop this process (SIGSTOP), if there is a file that says so."""
        if self._flag.exists():
            self._flag.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)


def serve(log: str, port: str, session_ms: str, bug: str = "") -> None:
    """Serve a log; clients are missed sooner than usual."""
    from embedlog.cli import main
    from embedlog.server import heartbeat_answers

    heartbeat_answers.SESSION_MS = int(session_ms)
    if bug:
        Behaviour("embedlog.server.remote_members:RemoteMembers.commit", _commit_always)()
    sys.exit(main(["serve", log, "--listen", f"127.0.0.1:{port}"]))


def _commit_always(
    self: Any, group: Group, member: str, instance: str | None, epoch: int, positions: Any
) -> Any:
    """A planted bug: who lost a partition commits it still."""
    rows = group.encode(positions)
    group.context.live.write(lambda txn: offsets.put(txn, group.key, rows))
    return dict.fromkeys(positions)


def consume(name: str, kind: str, place: str, events: str, session_ms: str) -> None:
    """Read and commit record by record."""
    notes = Events(events, name)
    if kind == "program":
        with embedlog.open(place) as log:
            _read_log(log, notes, int(session_ms))
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
    while True:
        message = consumer.poll(0.1)
        if message is None or message.error():
            continue
        notes.note("read", message.partition(), message.offset())
        notes.stop_if_told()
        notes.note("commits", message.partition(), message.offset() + 1)
        try:
            consumer.commit(message=message, asynchronous=False)
            notes.note("committed", message.partition(), message.offset() + 1)
        except KafkaException:
            continue  # It lost the partition, or the server; the next one reads it again.


def _read_log(log: Any, notes: Events, session_ms: int) -> None:
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
        while True:
            for tp, records in consumer.poll(timeout_ms=100).items():
                for record in records:
                    notes.note("read", tp.partition, record.offset)
                    notes.stop_if_told()
                    notes.note("commits", tp.partition, record.offset + 1)
                    try:
                        consumer.commit({tp: embedlog.OffsetAndMetadata(record.offset + 1)})
                    except CommitFailedError:
                        continue
                    notes.note("committed", tp.partition, record.offset + 1)


class MixedGroup:
    """The log, a server, and the members of a group, each a child.

    Args:
        directory: Where the log and the events are.
        session_ms: How long members may be silent.
        partitions: How many partitions the topic has.
        bug: Whether the server takes commits of those who lost the partition.
    """

    def __init__(
        self, directory: Path, session_ms: int, partitions: int = 4, *, bug: bool = False
    ) -> None:
        self.session_seconds = session_ms / 1000
        self._session, self._bug = str(session_ms), ["bug"] if bug else []
        self.path, self._events = str(directory / "log"), directory / "events"
        self._stack = ExitStack()
        self.log = self._stack.enter_context(embedlog.open(self.path))
        self.log.create_topic(TOPIC, partitions)
        self.count, self._sent = partitions, 0
        self._seen = {TopicPartition(TOPIC, number): 0 for number in range(partitions)}
        """The last commits that were seen."""
        self._port = "0"
        self.server = self._serve()
        self.members: dict[str, subprocess.Popen[str]] = {}
        """Those that run."""
        self._stopped: dict[str, subprocess.Popen[str]] = {}
        self._may_repeat = False
        """Whether the server was stopped: librdkafka delivers what it fetched before, also after it
        has joined again, and then commits that as the owner."""
        self._started = 0

    def _child(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        child = subprocess.Popen(command, cwd=Path(__file__).parents[1], text=True, **options)
        self._stack.callback(child.wait)
        self._stack.callback(child.kill)
        return child

    def _serve(self) -> subprocess.Popen[str]:
        arguments = "serve", self.path, self._port, self._session, *self._bug
        server = self._child(*_PYTHON, *arguments, stdout=subprocess.PIPE)
        assert server.stdout is not None
        with server.stdout:
            line = server.stdout.readline()
        assert " at " in line, line
        self._port = line.split()[-1].rpartition(":")[2]
        return server

    def start(self, kind: str) -> None:
        """Start a member."""
        address = f"127.0.0.1:{self._port}"
        self._started += 1
        name, events = f"{kind}-{self._started}", str(self._events)
        if kind in JAVA_KINDS:
            arguments = name, address, TOPIC, GROUP, events, JAVA_KINDS[kind], self._session
            command = [*java_command(), str(_JAVA_PROGRAM), *arguments]
        else:
            place = self.path if kind == "program" else address
            command = [*_PYTHON, "consume", name, kind, place, events, self._session]
        self.members[name] = self._child(*command)

    def kill(self, kind: str) -> None:
        """Kill the first member of a kind, or the server (SIGKILL); another server is started."""
        if kind == SERVER:
            self.server.kill()
            self.server.wait()
            self._note_silent(self._clients())
            self.server = self._serve()
            return
        member = self.members.pop(self._first(kind))
        member.kill()
        member.wait()

    def _first(self, kind: str) -> str:
        return next(name for name in self.members if name.rpartition("-")[0] == kind)

    def _clients(self) -> list[str]:
        return [name for name in self.members if not name.startswith("program")]

    def _note_silent(self, names: list[str]) -> None:
        """Note that others may have the partitions of members from now on."""
        for name in names:
            Events(str(self._events), name).note("silent")

    def stop(self, kind: str) -> None:
        """Stop the first member of a kind, or the server (SIGSTOP), but not in a write to the log.

        All would wait for that one (P16).
        """
        name = kind if kind == SERVER else self._first(kind)
        child = self.server if kind == SERVER else self.members.pop(name)
        self._may_repeat |= kind == SERVER
        while True:
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            try:
                self.log.root.context.live.write(lambda txn: None, timeout=0.2)
                break
            except LockTimeoutError:
                child.send_signal(signal.SIGCONT)
                time.sleep(0.01)
        self._stopped[name] = child
        self._note_silent(self._clients() if kind == SERVER else [name])

    def stop_before_it_commits(self, kind: str) -> None:
        """Let the first member of a kind stop when it has read a record; it commits too late."""
        name = self._first(kind)
        child = self.members.pop(name)
        Path(f"{self._events}-{name}").touch()

        def stops() -> bool:
            self.send(self.count)
            return os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOHANG) is not None

        self._until(stops)
        self._stopped[name] = child
        self._note_silent([name])

    def resume(self) -> None:
        """Let those go on that were stopped (SIGCONT)."""
        for name, child in self._stopped.items():
            child.send_signal(signal.SIGCONT)
            if name != SERVER:
                self.members[name] = child
        self._stopped.clear()

    def send(self, count: int) -> None:
        """Append records to all partitions."""
        with self.log.producer() as producer:
            for number in range(count):
                producer.send(TOPIC, b"v", partition=number % self.count)
        self._sent += count

    def until_shared(self) -> None:
        """Wait until each of the members that can owns a partition, and all are owned."""
        self._until(self._is_shared)

    def _is_shared(self) -> bool:
        members = self.log.groups[GROUP].members()
        owned = [len(member.partitions) for member in members]
        able = len(self.members) - (len(self._clients()) if SERVER in self._stopped else 0)
        return len(owned) == able and min(owned) > 0 and sum(owned) == self.count

    def until_consumed(self) -> None:
        """Wait until the group has committed the end of each partition."""
        self._until(lambda: self._lags() == [0] * self.count)

    def _lags(self) -> list[int | None]:
        return [part.lag for part in self.log.groups[GROUP].describe().partitions]

    def _until(self, done: Any) -> None:
        deadline = time.monotonic() + patient(40)
        while not _holds(done):
            self._watch()
            state = self.log.groups[GROUP]
            assert time.monotonic() < deadline, repr(state)
            time.sleep(0.02)

    def _watch(self) -> None:
        """Check that no commit moved back since the last look."""
        found = open_group(self.log.root, GROUP).committed(self._seen)
        for partition, row in found.items():
            offset = 0 if row is None else row.position.offset
            is_back = offset < self._seen[partition] and not self._may_repeat
            assert not is_back, f"{partition}: {self._seen} became {offset}"
            self._seen[partition] = offset

    def generation(self) -> int:
        """Return the number of rebalances."""
        return int(self.log.groups[GROUP].describe().generation)

    def check(self) -> None:
        """Check that every record was read, and none after its offset was committed.

        Nor is any offset committed by one who lost the partition: it would move back.
        """
        read: dict[int, set[int]] = defaultdict(set)
        committed: dict[int, int] = defaultdict(int)
        asked: dict[tuple[str, int], int] = {}
        """What was committed when a member asked to commit."""
        following: dict[tuple[str, int], int] = {}
        silent: dict[str, dict[int, int]] = {}
        """What was committed before a member was silent, until it commits again: it may have
        begun to read before, and not know that others have its partitions."""
        for name, what, partition, offset in self._lines():
            place = name, partition
            if what == "silent":
                silent[name] = dict(committed)
                asked = {each: known for each, known in asked.items() if each[0] != name}
            elif what == "read":
                known = silent.get(name, committed).get(partition, 0)
                if offset != following.get(place) and not self._may_repeat:
                    assert offset >= known, f"{name} reads {place} at {offset} after {known}"
                following[place] = offset + 1
                read[partition].add(offset)
            elif what == "commits":
                asked[place] = committed[partition]
            else:
                if place in asked:
                    known = asked.pop(place)
                    is_back = offset < known and not self._may_repeat
                    assert not is_back, f"{name} commits {place} at {offset} after {known}"
                    silent.pop(name, None)
                committed[partition] = max(committed[partition], offset)
        for partition in range(self.count):
            count = self.log.root.partition(TOPIC, partition).end_offset()
            assert read[partition] == set(range(count)), f"of {partition} some were not read"
        assert sum(map(len, read.values())) == self._sent

    def _lines(self) -> Iterator[tuple[str, str, int, int]]:
        for line in self._events.read_text(encoding="ascii").splitlines():
            name, what, partition, offset = line.split()
            yield name, what, int(partition), int(offset)

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
