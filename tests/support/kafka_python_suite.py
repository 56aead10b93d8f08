"""kafka-python's own tests, run on a log: fetched from PyPI, and not copied.

As a program it fetches the release, runs its integration tests and compares the failures with
the lists below, once with the clients of `embedlog.kafka`, and once with kafka-python's own, which
connect to a server::

    python tests/support/kafka_python_suite.py [directory with the unpacked release]

As a pytest plugin (in the process that it starts) it has `embedlog.kafka.patch` replace the
clients, unless they use a server, and the module of kafka-python's tests that starts brokers by one
that makes a log.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest

import embedlog
import embedlog.kafka

RELEASE = "3.0.12"
TESTS = (
    "test/integration/test_admin_integration.py",
    "test/integration/test_consumer_integration.py",
    "test/integration/test_producer_integration.py",
    "test/test_serializer.py",
    "test/test_package.py",
)
KAFKA_VERSION = "4.1.0"

FAILING = {
    "test_create_describe_delete_acls": "a log has no access control",
    "test_describe_configs_broker_resource_returns_configs": "a log has no listeners to advertise",
    "test_describe_metadata_quorum": "a log has no replicas, and so no quorum",
    "test_kafka_consumer_unsupported_encoding": "gzip is stored as zstd, which needs no library",
    "test_group": "reads the heartbeats to the coordinator, a private object",
    "test_transactional_producer_offsets": "commits for the second partition of a topic that a log "
    "creates with one",
    "test_heartbeat_thread": "reads the heartbeats to the coordinator, a private object",
}
"""The tests that fail with the clients of `embedlog.kafka`, and why."""
FAILING_ON_THE_WIRE = {
    "test_create_describe_delete_acls": "a log has no access control",
    "test_describe_configs_broker_resource_returns_configs": "a log has no listeners to advertise",
    "test_describe_metadata_quorum": "a log has no replicas, and so no quorum",
    "test_alter_replica_log_dirs": "a directory of a log has no other one beside it",
}
"""The tests that fail with kafka-python's own clients and a server, and why."""
ENDLESS = "test/integration/test_producer_integration.py::test_transactional_producer_offsets"
"""It is not run on the wire: it commits for the second partition of a topic that a log creates with
one, and kafka-python repeats that for ever."""
WIRE = "KAFKA_PYTHON_SUITE_WIRE"
"""The variable that says whether the clients use a server."""


# The plugin


class LogBroker:
    """Stands for a broker in kafka-python's fixtures."""

    node_id, partitions, replicas, zookeeper = 0, 4, 1, None

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._open, self.address = ExitStack(), self._directory.name
        if WIRE in os.environ:
            log = self._open.enter_context(embedlog.open(self.address))
            self.address = self._open.enter_context(embedlog.serve(log)).bootstrap_servers

    @classmethod
    def instance(cls, *_args, **_params):
        """Make one; there is nothing to configure."""
        return cls()

    def client_params(self, client_id="client", **params):
        """Return the settings of a client."""
        return {"client_id": client_id, **params, "bootstrap_servers": self.address}

    def close(self):
        """Remove the log."""
        self._open.close()
        self._directory.cleanup()


def create_topics(broker, names, num_partitions=None, replication_factor=None):
    """Create topics on the log of a broker."""
    from kafka import KafkaAdminClient

    with KafkaAdminClient(**broker.client_params()) as admin:
        admin.create_topics({name: {"num_partitions": broker.partitions} for name in names})


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    """Replace the clients, and the fixtures that start brokers."""
    if WIRE not in os.environ:
        embedlog.kafka.patch()
        import kafka.codec

        # A log needs none of the libraries without which these tests are skipped.
        for codec in ("snappy", "lz4", "zstd"):
            setattr(kafka.codec, f"has_{codec}", lambda: True)
    # The release has the tests without this file, and Python itself has a package of this name.
    package = sys.modules["test"] = ModuleType("test")
    package.__path__ = [str(Path.cwd() / "test")]
    fixtures = ModuleType("test.integration.fixtures")
    fixtures.KafkaFixture = fixtures.ZookeeperFixture = LogBroker
    fixtures.client_params = LogBroker.client_params
    fixtures.create_topics = create_topics
    sys.modules[fixtures.__name__] = fixtures


# The program


def fetch(directory: Path) -> Path:
    """Download the release and return the directory with its tests."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    source = ["--no-binary", ":all:", "--dest", str(directory), f"kafka-python=={RELEASE}"]
    subprocess.run([*pip, *source], check=True, timeout=300)
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        members.extractall(directory, filter="data")
    return directory / archive.name.removesuffix(".tar.gz")


def run(release: Path, *, wire: bool) -> tuple[dict[str, str], str]:
    """Run the tests of an unpacked release; return the outcome of each, and the output."""
    support, root = Path(__file__).parent, Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (support, root, *os.environ.get("PYTHONPATH", "").split(":"))))
    command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-p", "no:cacheprovider"]
    options = ["--deselect", ENDLESS] if wire else []
    options += ["-v", "--tb=short", "-o", "addopts=", "-p", "no:xdist", "-p", "no:randomly"]
    done = subprocess.run(
        [*command, *options, *TESTS],
        cwd=release,
        env={
            **os.environ,
            "PYTHONPATH": path,
            **({"KAFKA_VERSION": "4.3.0", WIRE: "1"} if wire else {"KAFKA_VERSION": KAFKA_VERSION}),
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    outcomes = re.findall(r"^test/\S+::(\S+) (\w+)", done.stdout, re.MULTILINE)
    return dict(outcomes), done.stdout + done.stderr


def unexpected(outcomes: dict[str, str], failing: Mapping[str, str]) -> list[str]:
    """Return what differs from a list, in words."""
    findings = []
    for test, outcome in outcomes.items():
        name = test.partition("[")[0]
        if outcome == "FAILED" and name not in failing:
            findings.append(f"{test} fails")
        if outcome == "ERROR":
            findings.append(f"{test} cannot be set up")
        if outcome == "PASSED" and name in failing:
            findings.append(f"{test} passes, and is listed as failing: {failing[name]}")
    missing = failing.keys() - {test.partition("[")[0] for test in outcomes}
    return findings + [f"{test} is listed, and does not exist" for test in sorted(missing)]


def main() -> None:
    """Fetch, run and compare."""
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        release = Path(sys.argv[1]) if len(sys.argv) > 1 else fetch(Path(directory))
        for wire, failing in ((False, FAILING), (True, FAILING_ON_THE_WIRE)):
            outcomes, output = run(release, wire=wire)
            findings = unexpected(outcomes, failing)
            passed = sum(outcome == "PASSED" for outcome in outcomes.values())
            if findings or not passed:
                print(output, *findings or ["no test ran"], sep="\n")
                failed = True
            for test, reason in sorted(failing.items()):
                print(f"fails as expected: {test}: {reason}")
            where = "a server" if wire else "a log"
            print(f"{passed} of {len(outcomes)} tests of kafka-python {RELEASE} pass on {where}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
