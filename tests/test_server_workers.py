"""Several processes that serve one log: who answers what, and what happens when one dies."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
import test_server
import test_server_transactions
import trustme
from support.children import in_threads
from support.forks import until
from support.patience import patient
from support.replicas import Directories
from support.tiers import choose
from support.wire_client import WireClient, request_bytes
from support.wire_members import Classic, Modern
from test_server_authentication import users_file
from test_server_batches import stored
from test_server_share import ACCEPT, Sharer
from test_server_transactions import BOTH, Transformer, WireProducer, committed, values

import embedlog
from embedlog import batch
from embedlog.cli import main
from embedlog.server.cluster import topic_id
from embedlog.server.error_codes import ErrorCode
from embedlog.server.record_batches import write_batches
from embedlog.server.server import KafkaServer
from embedlog.server.workers import new_workers

pytestmark = pytest.mark.tier("test")

IN_MEMORY = [{"name": "of a program", "metadata": b""}]
"""What a member says whose clients alone know how to assign its partitions."""
_NUMBERS = {"num_partitions": 1, "replication_factor": 1}


@contextmanager
def serving(log: embedlog.Log, count: int = 2, **options: Any) -> Iterator[list[KafkaServer]]:
    """Serve by workers that are servers of this process."""
    with ExitStack() as stack:
        workers = new_workers("127.0.0.1", 0, count)
        yield [stack.enter_context(KafkaServer(log, worker=each, **options)) for each in workers]


@pytest.fixture
def log(embedlog_log):
    for topic in ("in", "out"):
        embedlog_log.create_topic(topic, 1)
    return embedlog_log


@pytest.fixture
def servers(log):
    with serving(log) as servers:
        yield servers


@pytest.fixture
def clients(servers):
    with ExitStack() as stack:
        yield [stack.enter_context(WireClient(each.bootstrap_servers)) for each in servers]


def key_of(servers: list[KafkaServer], worker: int, prefix: str) -> str:
    """Return a name that a worker has in its memory."""
    names = (f"{prefix}-{number}" for number in range(100))
    return next(name for name in names if servers[0].answers.cluster.worker_of(name) == worker)


def coordinator(client: WireClient, key: str, kind: int = 0) -> Any:
    """Return the answer for a group, or with 1 for a transactional id."""
    answer = client.ask("FindCoordinator", 4, key_type=kind, coordinator_keys=[key])
    return answer.coordinators[0]


# What clients find


def test_each_worker_is_a_broker_that_leads_partitions_and_coordinates(log, servers, clients):
    """All of them say the same, and each says that it is itself."""
    log.create_topic("orders", 5)
    answers = [each.ask("Metadata", 12, topics=[{"name": "orders"}]) for each in clients]
    assert answers[0] == answers[1]
    ports = {each.node_id: (each.host, each.port) for each in answers[0].brokers}
    assert ports == {n: ("127.0.0.1", server.port) for n, server in enumerate(servers)}
    partitions = answers[0].topics[0].partitions
    leaders = [each.leader_id for each in partitions]
    assert sorted([leaders.count(0), leaders.count(1)]) == [2, 3]
    assert all(each.replica_nodes == each.isr_nodes == [each.leader_id] for each in partitions)
    for worker in range(2):
        for kind in range(2):
            key = key_of(servers, worker, "key")
            assert coordinator(clients[0], key, kind) == coordinator(clients[1], key, kind)
            found = coordinator(clients[0], key, kind)
            assert (found.node_id, found.port) == (worker, servers[worker].port)
    refused = coordinator(clients[0], "key", 7)
    assert (refused.error_code, refused.node_id) == (ErrorCode.INVALID_REQUEST, -1)


def test_each_worker_lists_what_it_coordinates(log, servers, clients):
    """As brokers do: clients ask all, and put the answers together."""
    groups = [key_of(servers, worker, "group") for worker in range(2)]
    names = [key_of(servers, worker, "name") for worker in range(2)]
    with ExitStack() as stack:
        for group, name in zip(groups, names, strict=True):
            member = Classic(servers[0].bootstrap_servers, "in", group=group, protocols=IN_MEMORY)
            stack.callback(member.close)
            member.join()
            with log.transaction(name) as transaction:
                transaction.send("out", b"v")
        log.consumer("in", group_id="of-python").poll(0)
        listed = [[g.group_id for g in each.ask("ListGroups", 5).groups] for each in clients]
        assert sorted(listed[0] + listed[1]) == sorted([*groups, "of-python"])
        assert [groups[worker] in listed[worker] for worker in range(2)] == [True, True]
        known = [each.ask("ListTransactions", 1).transaction_states for each in clients]
        assert [[each.transactional_id for each in some] for some in known] == [[n] for n in names]
        sizes = [each.ask("DescribeLogDirs", 4, topics=None).results[0] for each in clients]
        described = [topic.name for each in sizes for topic in each.topics]
        assert sorted(described) == sorted(log.topics())


def test_any_worker_serves_any_partition(log, servers, clients):
    """A client whose metadata is old is not refused, and one that waits is woken."""
    for client in clients:
        fetch = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20}
        topics = [{"topic": "out", "partitions": [fetch]}]
        answer = client.ask("Fetch", 11, max_wait_ms=0, max_bytes=1 << 20, topics=topics)
        assert answer.responses[0].partitions[0].error_code == 0
    (wire,) = map(b"".join, write_batches([stored([(b"k", b"v", 5, [])], 0)]))
    for client in clients:
        part = {"index": 0, "records": wire}
        topics = [{"name": "out", "partition_data": [part]}]
        answer = client.ask("Produce", 9, acks=-1, timeout_ms=1000, topic_data=topics)
        assert answer.responses[0].partition_responses[0].error_code == 0
    assert values(log) == [b"v", b"v"]


def test_a_client_has_records_of_a_share_group_from_each_worker(log, servers):
    """A session with one of them ends by itself, and leaves the records of the others' alone."""
    log.groups["g"].alter({"share.auto.offset.reset": "earliest"})
    log.create_topic("jobs", 2)
    for number in range(2):
        log.partition("jobs", number).append([batch.encode_lists([b"v"], None, 1)])
    addresses = [each.bootstrap_servers for each in servers]
    topic = topic_id(log, log.root.topic("jobs").id)
    with ExitStack() as stack:

        def client(worker: int, name: str, partition: int) -> Sharer:
            sharer = Sharer(addresses[worker], topic, name)
            sharer.partitions = range(partition, partition + 1)
            stack.callback(sharer.client.close)
            return sharer

        first, second = client(0, "a", 0), client(1, "a", 1)
        assert first.beat() == 0
        assert first.fetch() == second.fetch() == [(0, 1, b"v")]
        others = [client(worker, "b", worker) for worker in range(2)]
        assert others[0].beat() == 0
        assert [each.fetch(wait=0.3) for each in others] == [[], []]
        first.client.close()
        assert others[0].fetch(wait=10) == [(0, 2, b"v")]
        assert others[1].fetch(wait=0.3) == []
        assert second.acknowledge((0, 0, ACCEPT), partition=1) == 0


def test_of_several_directories_each_is_a_broker_at_the_address_of_a_worker(tmp_path):
    """Replicas are directories, as without workers."""
    with Directories(tmp_path).open() as log:
        log.create_topic("orders", 6, replication_factor=2)
        with serving(log) as servers, WireClient(servers[1].bootstrap_servers) as client:
            answer = client.ask("Metadata", 12, topics=[{"name": "orders"}])
            ports = {each.node_id: each.port for each in answer.brokers}
            assert ports == {n: servers[n % 2].port for n in (1, 2, 3)}
            leaders = {each.partition_index: each.leader_id for each in answer.topics[0].partitions}
            placed = {n: log.root.partition("orders", n).placement for n in range(6)}
            assert leaders == {n: each.leader for n, each in placed.items()}
            for worker in range(2):
                found = coordinator(client, key_of(servers, worker, "key"))
                assert found.port == ports[found.node_id] == servers[worker].port


@pytest.mark.parametrize(
    ("listens_at", "hosts"), [("0.0.0.0", ["127.0.0.1", "127.0.0.2"]), ("::1", ["::1"])]
)
def test_each_client_is_told_the_address_that_it_has_connected_to(embedlog_log, listens_at, hosts):
    """With the port of each worker."""
    workers = new_workers(listens_at, 0, 2)
    with ExitStack() as stack:
        for worker in workers:
            server = KafkaServer(embedlog_log, listens_at, worker=worker, insecure=True)
            stack.enter_context(server)
        for host in hosts:
            with WireClient(f"{host}:{server.port}") as client:
                brokers = client.ask("Metadata", 12, topics=[]).brokers
                assert [(each.host, each.port) for each in brokers] == [
                    (host, port) for port in workers[0].ports
                ]
                assert coordinator(client, "g").host == host


@pytest.mark.parametrize(
    "program",
    [
        test_server.test_confluent_kafka_reads_what_python_writes,
        test_server.test_kafka_python_over_the_wire,
        test_server.test_aiokafka_over_the_wire,
        test_server.test_two_consumers_share_the_partitions,
        test_server.test_confluent_kafka_administers,
    ],
    ids=lambda program: program.__name__,
)
def test_clients_do_with_workers_what_they_do_with_one_process(embedlog_log, program):
    """Whichever broker is asked for what."""
    with serving(embedlog_log, 3) as servers:
        program(embedlog_log, servers[2].bootstrap_servers)


@pytest.mark.parametrize(
    "program",
    [
        test_server_transactions.test_kafka_python_in_transactions,
        test_server_transactions.test_aiokafka_in_transactions,
    ],
    ids=lambda program: program.__name__,
)
def test_clients_do_the_same_in_transactions(log, program):
    """Their groups and names are in other workers than the records."""
    with serving(log, 3) as servers:
        program(log, servers[2])


# What is in the memory of one


@BOTH
@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("kind", ["classic", "KIP-848", "in memory"])
def test_a_transaction_is_one_whichever_workers_are_asked(log, servers, versions, worker, kind):
    """Its name and its group are coordinated by two workers, and its client asks only one.

    The other workers know what it has pending, and which member may commit.
    """
    name, group = key_of(servers, worker, "name"), key_of(servers, 1 - worker, "group")
    address, other = servers[0].bootstrap_servers, servers[1].bootstrap_servers
    producer = WireProducer(address, versions, name)
    with ExitStack() as stack:
        stack.callback(producer.client.close)
        if kind == "KIP-848":
            member: Any = Modern(other, "in", group=group)
            member.join()
            epoch = member.epoch
        else:
            options = {"protocols": IN_MEMORY} if kind == "in memory" else {}
            member = Classic(other, "in", group=group, **options)
            member.join()
            assert member.sync() == 0
            epoch = member.generation
        stack.callback(member.close)
        who = {"group": group, "member_id": member.id, "generation_id": epoch}
        assert producer.init() == 0
        assert producer.begin(b"x") == (0, 0)
        wrong = producer.send_offset(4, **{**who, "generation_id": epoch + 1})
        assert wrong == ErrorCode.ILLEGAL_GENERATION
        unknown = producer.send_offset(4, **{**who, "member_id": "nobody"})
        assert unknown in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION)
        assert producer.send_offset(4, **who) == 0
        assert [pending(each, group) for each in servers] == [ErrorCode.UNSTABLE_OFFSET_COMMIT] * 2
        assert (values(log), committed(log, group)) == ([], None)
        assert producer.end() == 0
        assert [pending(each, group) for each in servers] == [0, 0]
    assert (values(log), committed(log, group)) == ([b"x"], 4)


def pending(server: KafkaServer, group: str) -> int:
    """Return the code of the offset of a group, for who wants no pending one."""
    topics = [{"name": "in", "partition_indexes": [0]}]
    fields = {"group_id": group, "topics": topics, "require_stable": True}
    with WireClient(server.bootstrap_servers) as client:
        return int(client.ask("OffsetFetch", 7, **fields).topics[0].partitions[0].error_code)


@pytest.mark.parametrize("worker", [0, 1])
def test_the_members_of_a_group_in_memory_may_ask_different_workers(servers, worker):
    """They are of one group."""
    group = key_of(servers, worker, "group")
    members = [
        Classic(each.bootstrap_servers, "in", group=group, protocols=IN_MEMORY) for each in servers
    ]
    joined = [members[0].join()]
    again = threading.Thread(target=lambda: joined.append(members[1].join()))
    again.start()
    until(lambda: members[0].heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS)
    joined.append(members[0].join())
    again.join()
    assert {each.error_code for each in joined} == {0}
    assert members[0].generation == members[1].generation == 2
    for member in members:
        member.close()


def test_records_of_a_transaction_without_acks_are_not_waited_for(log, servers):
    """Nobody answers them; the client goes on."""
    producer = WireProducer(
        servers[0].bootstrap_servers, {"Produce": 9, "EndTxn": 3}, key_of(servers, 1, "name")
    )
    part = {"index": 0, "records": None}
    data = [{"name": "out", "partition_data": [part]}]
    fields = {"transactional_id": producer.name, "acks": 0, "timeout_ms": 9, "topic_data": data}
    producer.client.send(request_bytes("Produce", 9, **fields))
    assert producer.client.ask("Metadata", 12, topics=[]).brokers
    producer.client.close()


def test_a_server_ends_while_its_requests_wait_for_another_worker(log):
    """As while they wait for records."""
    with serving(log) as servers:
        group = key_of(servers, 1, "group")
        address = servers[0].bootstrap_servers
        members = [Classic(address, "in", group=group, protocols=IN_MEMORY) for _ in range(2)]
        members[0].join()
        ended: list[str] = []

        def join() -> None:
            try:
                members[1].join()
            except AssertionError as error:
                ended.append(str(error))

        waiting = threading.Thread(target=join)
        waiting.start()
        until(lambda: members[0].heartbeat())
        servers[0].close()
        waiting.join(patient(30))
        assert ended == ["the server closed the connection"]
        for member in members:
            member.close()


def test_only_the_user_of_the_server_reaches_workers_by_their_links(log, servers, monkeypatch):
    """They ask nobody who is there for a password."""
    monkeypatch.setattr("embedlog.server.server.may_use", lambda uid, path: False)
    with pytest.raises(ConnectionError):
        servers[0].workers._ask(1, "ListGroups", 3)


# The command


class Command:
    """``embedlog serve --workers 2``, until it is closed.

    Args:
        path: The log.
        options: Of the command.
    """

    def __init__(self, path: Path, *options: str, listen: str = "127.0.0.1:0") -> None:
        command = [sys.executable, "-m", "embedlog", "serve", str(path), "--json", "--workers", "2"]
        self.process = subprocess.Popen(
            [*command, "--listen", listen, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.address = json.loads(self.process.stdout.readline())["bootstrap_servers"]
        self.addresses = self.address.split(",")

    def workers(self) -> list[int]:
        """Return the processes of the workers, in the order of their start."""
        return [pid for pid in children(self.process.pid) if is_worker(pid)]

    def close(self) -> None:
        """End it, unless it has ended."""
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_worker(pid: int) -> bool:
    """Whether a process is one of multiprocessing, and is alive."""
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)]
)
def test_all_processes_end_with_the_command(tmp_path, number, code):
    """Whatever ends it; what was acknowledged is there."""
    with Command(tmp_path / "log") as command:
        workers = command.workers()
        assert len(workers) == 2
        for topic, address in zip("ab", command.addresses, strict=True):
            with WireClient(address) as client:
                answer = client.ask("CreateTopics", 7, topics=[{"name": topic, **_NUMBERS}])
                assert answer.topics[0].error_code == 0
        command.process.send_signal(number)
        assert command.process.wait(patient(60)) == code
        until(lambda: not any(map(is_worker, workers)), 60)
    with embedlog.open(tmp_path / "log") as log:
        assert log.topics() == ["a", "b"]


def test_clients_spread_over_the_workers_and_go_on_when_one_is_killed(tmp_path):
    """It comes back at its port, with its number, and knows the same users."""
    users = users_file(tmp_path / "users", "alice:wonder\n")
    config = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "alice",
        "sasl.password": "wonder",
    }
    with (
        embedlog.open(tmp_path / "log") as log,
        Command(tmp_path / "log", "--users", users) as command,
    ):
        os.remove(users)  # They are those with which the command was started.
        log.create_topic("orders", 4)
        config["bootstrap.servers"] = command.addresses[0]
        producer = confluent_kafka.Producer({**config, "enable.idempotence": True, "linger.ms": 1})
        group = {"group.id": "g", "auto.offset.reset": "earliest", "enable.auto.commit": False}
        consumer = confluent_kafka.Consumer({**config, **group})
        consumer.subscribe(["orders"])
        expected, seen = 0, set()
        for victim in (None, *command.workers()):
            if victim is not None:
                os.kill(victim, signal.SIGKILL)
            for _ in range(40):
                producer.produce("orders", b"%d" % expected, partition=expected % 4)
                expected += 1
            assert producer.flush(patient(60)) == 0
            deadline = time.monotonic() + patient(60)
            while len(seen) < expected:
                assert time.monotonic() < deadline
                seen |= {each.value() for each in consumer.consume(50, 0.2) if not each.error()}
            consumer.commit(asynchronous=False)
        assert {int(each) for each in seen} == set(range(expected))
        consumer.close()
        assert len(list(log.topic("orders"))) == expected
        brokers = producer.list_topics(timeout=patient(30)).brokers
        ports = [f"127.0.0.1:{brokers[n].port}" for n in range(2)]
        assert ports == command.addresses
        for address in command.addresses:
            with WireClient(address) as stranger:
                stranger.send(request_bytes("Metadata", 12, topics=[]))
                assert stranger.answer() is None


def test_records_are_transformed_exactly_once_while_workers_are_killed(tmp_path):
    """By librdkafka; the name, the group and the partitions are of both workers."""
    count, kills, dice = choose(test=60, all=1000), choose(test=2, all=20), random.Random(7)
    with embedlog.open(tmp_path / "log") as log, Command(tmp_path / "log") as command:
        for topic in ("in", "out"):
            log.create_topic(topic, 2)
        with log.producer() as python:
            for number in range(count):
                python.send("in", b"%d" % number, partition=number % 2)
        transformer = Transformer(command.address)
        with in_threads(transformer.run):
            try:
                deadline = time.monotonic() + patient(60 + 4 * kills)
                for kill in range(kills):
                    before = len(values(log))
                    while len(values(log)) < min(before + dice.randrange(5, 20), count - 5):
                        assert time.monotonic() < deadline, transformer.outcomes
                        time.sleep(0.01)
                    until(lambda: len(command.workers()) == 2, 60)
                    os.kill(command.workers()[kill % 2], signal.SIGKILL)
                while len(values(log)) < count:
                    assert time.monotonic() < deadline, transformer.outcomes
                    time.sleep(0.05)
            finally:
                transformer.stopped.set()
        assert sorted(values(log), key=int) == [b"%d" % number for number in range(count)]
        group = log.groups["g"].describe()
        assert sum(each.current_offset for each in group.partitions) == count


def test_a_worker_that_cannot_start_again_is_tried_again(tmp_path):
    """The other one serves meanwhile; both encrypt, and so pass requests on."""
    authority, certificate = trustme.CA(), tmp_path / "server.pem"
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("orders", 2)
    with Command(tmp_path / "log", "--cert", str(certificate)) as command:
        certificate.rename(tmp_path / "away")
        os.kill(command.workers()[1], signal.SIGKILL)
        assert command.process.stderr is not None
        while b"Worker 1: " not in (line := command.process.stderr.readline()):
            assert line
        (tmp_path / "away").rename(certificate)
        for number, address in enumerate(command.addresses):
            producer = confluent_kafka.Producer(
                {
                    "bootstrap.servers": address,
                    "security.protocol": "SSL",
                    "ssl.ca.location": str(tmp_path / "ca.pem"),
                    "transactional.id": f"name-{number}",
                }
            )
            producer.init_transactions(patient(60))
            producer.begin_transaction()
            for partition in range(2):
                producer.produce("orders", b"v", partition=partition)
            producer.commit_transaction(patient(60))
    with embedlog.open(tmp_path / "log") as log:
        assert len(list(log.topic("orders"))) == 4


def test_workers_of_a_log_that_is_read_only(tmp_path):
    """Each refuses every change; the ports follow each other."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("orders")
    first = free_ports()
    with Command(tmp_path / "log", "--read-only", listen=f"127.0.0.1:{first}") as command:
        assert command.addresses == [f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"]
        for address in command.addresses:
            with WireClient(address) as client:
                answer = client.ask("CreateTopics", 7, topics=[{"name": "new", **_NUMBERS}])
                assert answer.topics[0].error_code == ErrorCode.POLICY_VIOLATION


def free_ports() -> int:
    """Return a port that is free, as the next one is."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
        return int(port)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workers", "0"], "must be a number from 1 to 100"),
        (["--workers", "2", "--listen", "127.0.0.1:65535"], "more than there are"),
        (["--workers", "2", "--listen", "0.0.0.0:0"], "can be reached from other hosts"),
        (["--workers", "2", "--listen", "127.0.0.1:0", "--cert", __file__], "no certificate"),
        (["--workers", "2", "--listen", "127.0.0.1:0", "--read-only"], "log"),
    ],
)
def test_the_command_refuses_what_cannot_be(tmp_path, options, words):
    """Also what only a worker finds, in the words of the command, and none is left."""
    command = [sys.executable, "-m", "embedlog", "serve", str(tmp_path / "log"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
    assert done.returncode > 0
    assert words in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_port_that_is_taken_is_named(tmp_path, capsys):
    """No worker is started."""
    first = free_ports()
    with socket.create_server(("127.0.0.1", first + 1)):
        options = ["--workers", "2", "--listen", f"127.0.0.1:{first}"]
        assert main(["serve", str(tmp_path / "log"), *options]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "in use" in line and "port 0" in line
