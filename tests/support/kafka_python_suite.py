"""kafka-python's own tests, run on a log: fetched from PyPI, and not copied.

As a program it fetches the release, runs its integration tests and compares the failures with
the lists below::

    python tests/support/kafka_python_suite.py [directory with the unpacked release]

As a pytest plugin (in the process that it starts) it has `embedlog.kafka.patch` replace the
clients, and the module of kafka-python's tests that starts brokers by one that makes a log.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

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
    "test_alter_partition_reassignments": "a log has no replicas to move",
    "test_kafka_consumer_unsupported_encoding": "gzip is stored as zstd, which needs no library",
    "test_group": "reads the heartbeats to the coordinator, a private object",
    "test_transactional_producer_offsets": "commits for the second partition of a topic that a log "
    "creates with one",
    "test_heartbeat_thread": "reads the heartbeats to the coordinator, a private object",
}
"""The tests that fail, and why."""


# The plugin


class LogBroker:
    """Stands for a broker in kafka-python's fixtures."""

    node_id, partitions, replicas, zookeeper = 0, 4, 1, None

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)

    @classmethod
    def instance(cls, *_args, **_params):
        """Make one; there is nothing to configure."""
        return cls()

    def client_params(self, client_id="client", **params):
        """Return the settings of a client."""
        return {"client_id": client_id, **params, "bootstrap_servers": self._directory.name}

    def close(self):
        """Remove the log."""
        self._directory.cleanup()


def create_topics(broker, names, num_partitions=None, replication_factor=None):
    """Create topics on the log of a broker."""
    from embedlog.kafka import KafkaAdminClient

    with KafkaAdminClient(**broker.client_params()) as admin:
        admin.create_topics({name: {"num_partitions": broker.partitions} for name in names})


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    """Replace the clients, and the fixtures that start brokers."""
    import embedlog.kafka

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


def run(release: Path) -> tuple[dict[str, str], str]:
    """Run the tests of an unpacked release; return the outcome of each, and the output."""
    support, root = Path(__file__).parent, Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (support, root, *os.environ.get("PYTHONPATH", "").split(":"))))
    command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-p", "no:cacheprovider"]
    options = ["-v", "--tb=short", "-o", "addopts=", "-p", "no:xdist", "-p", "no:randomly"]
    done = subprocess.run(
        [*command, *options, *TESTS],
        cwd=release,
        env={**os.environ, "KAFKA_VERSION": KAFKA_VERSION, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    outcomes = re.findall(r"^test/\S+::(\S+) (\w+)", done.stdout, re.MULTILINE)
    return dict(outcomes), done.stdout + done.stderr


def unexpected(outcomes: dict[str, str]) -> list[str]:
    """Return what differs from the lists, in words."""
    findings = []
    for test, outcome in outcomes.items():
        name = test.partition("[")[0]
        if outcome == "FAILED" and name not in FAILING:
            findings.append(f"{test} fails")
        if outcome == "ERROR":
            findings.append(f"{test} cannot be set up")
        if outcome == "PASSED" and name in FAILING:
            findings.append(f"{test} passes, and is listed as failing: {FAILING[name]}")
    missing = FAILING.keys() - {test.partition("[")[0] for test in outcomes}
    return findings + [f"{test} is listed, and does not exist" for test in sorted(missing)]


def main() -> None:
    """Fetch, run and compare."""
    with tempfile.TemporaryDirectory() as directory:
        release = Path(sys.argv[1]) if len(sys.argv) > 1 else fetch(Path(directory))
        outcomes, output = run(release)
    findings = unexpected(outcomes)
    passed = sum(outcome == "PASSED" for outcome in outcomes.values())
    print(output if findings or not passed else "", end="")
    for test, reason in sorted(FAILING.items()):
        print(f"fails as expected: {test}: {reason}")
    print(f"{passed} of {len(outcomes)} tests of kafka-python {RELEASE} pass on a log")
    if findings or not passed:
        sys.exit("\n".join(findings) or "no test ran")


if __name__ == "__main__":
    main()
