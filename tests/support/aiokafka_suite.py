"""aiokafka's own tests, run on a log: fetched from its repository, and not copied.

As a program it fetches the release, runs its tests of the clients and compares the failures with
the list below::

    python tests/support/aiokafka_suite.py [directory with the unpacked repository]

The release on PyPI has no tests.  Its ``conftest.py``, which starts brokers in containers, is
replaced by one that makes a log, and `embedlog.kafka.patch` replaces the clients.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

RELEASE = "v0.14.0"
REPOSITORY = "https://github.com/aio-libs/aiokafka"
TESTS = (
    "tests/test_admin.py",
    "tests/test_consumer.py",
    "tests/test_pep492.py",
    "tests/test_producer.py",
    "tests/test_transactional_consumer.py",
    "tests/test_transactional_producer.py",
)

_PRIVATE = "mocks or reads a private object of aiokafka, which a log does not have"
_BROKERS = "is about connections to brokers: their client, leaders that move, TLS"
_TRANSACTIONS = "a transaction of a log blocks no reader, and has no offsets before its commit"
_LISTENERS = "counts the calls of listeners; with an eager assignor those of a log come twice (M19)"

_REASONS = {
    _PRIVATE: """
        test_describe_cluster test_describe_configs_broker
        test_consumer_cleanup_unassigned_data_getmany test_consumer_cleanup_unassigned_data_getone
        test_consumer_compacted_topic test_consumer_compressed_returns_older_msgs
        test_consumer_invalid_crc_in_records test_consumer_position
        test_consumer_propagates_commit_refresh_errors test_consumer_propagates_coordinator_errors
        test_consumer_propagates_heartbeat_errors test_consumer_seek_backward
        test_consumer_seek_forward_getmany test_consumer_seek_forward_getone
        test_kafka_consumer_sets_coordinator_values
        test_rebalance_listener_with_coroutines test_producer_context_manager
        test_producer_correct_time_returned
        test_producer_send_empty_batch test_producer_send_error
        test_producer_send_reenque_resets_waiters test_producer_send_timeout
        test_producer_sender_errors_propagate_to_producer
        test_producer_transactional_aborting_previous_failure
        test_producer_transactional_cancel_txn_methods
        test_producer_transactional_raise_out_of_sequence
        test_producer_transactional_restart_reaquire_pid
        """,
    _BROKERS: """
        test_consumer_rebalance_on_new_topic test_exclude_internal_topics test_ssl_consume
        test_producer_invalid_leader_retry_metadata test_producer_leader_change_preserves_order
        test_producer_send_leader_notfound test_producer_ssl
        """,
    _TRANSACTIONS: """
        test_consumer_simple_read_only_control_record test_consumer_transactional_abort
        test_consumer_transactional_commit test_consumer_transactional_read_only_control_record
        test_producer_transactional_simple
        """,
    _LISTENERS: "test_kip_345_disabled test_kip_345_enabled test_max_poll_interval_ms",
    "a log has no bounds for sessions (M8)": "test_consumer_invalid_session_timeout",
    "this suite has topics created when they are named": "test_producer_notopic",
    "other tests leave members in its group": "test_manual_subscribe_pattern",
}
FAILING = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""The tests that fail, and why."""

CONFTEST = """
import asyncio, gc, sys, tempfile, types

import pytest

sys.modules["docker"] = types.ModuleType("docker")
import embedlog.kafka
from embedlog.config import TopicConfig
from embedlog.errors import TopicAlreadyExistsError, UnknownTopicOrPartitionError
from embedlog.root.root import Root

embedlog.kafka.patch()


def ensure_topic(self, name):
    try:
        return self.topic(name)
    except UnknownTopicOrPartitionError:
        try:
            # As the brokers of these tests create topics.
            return self.create_topic(name, 2, TopicConfig())
        except TopicAlreadyExistsError:
            return self.topic(name)


Root.ensure_topic = ensure_topic


@pytest.fixture(scope="class")
def loop():
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    gc.collect()
    asyncio.set_event_loop(None)


@pytest.fixture(scope="class")
def setup_test_class_serverless(request, loop):
    request.cls.loop = loop


@pytest.fixture(scope="class")
def setup_test_class(request, loop, tmp_path_factory):
    path = tmp_path_factory.mktemp("log")
    with embedlog.open(path, maintenance=False):
        request.cls.loop, request.cls.hosts = loop, f"embedlog://{path}?maintenance=false"
        request.cls.kafka_version = "4.1.0"
        yield


@pytest.fixture(autouse=True)
def time_limit(monkeypatch, request):
    if request.cls is not None:
        monkeypatch.setattr(request.cls, "TEST_TIMEOUT", 10, raising=False)
"""


def fetch(directory: Path) -> Path:
    """Download the repository at the release, and return its directory."""
    clone = ["git", "clone", "--quiet", "--depth=1", "--branch", RELEASE, REPOSITORY]
    subprocess.run([*clone, str(directory / "aiokafka")], check=True, timeout=300)
    return directory / "aiokafka"


def run(repository: Path) -> tuple[dict[str, str], str]:
    """Run the tests; return the outcome of each, and the output."""
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as directory:
        # Without the package beside them, whose extensions are not built.
        shutil.copytree(repository / "tests", Path(directory, "tests"))
        Path(directory, "tests", "conftest.py").write_text(CONFTEST, encoding="utf-8")
        options = [
            "-v",
            "--tb=native",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-c",
            os.devnull,
        ]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "--rootdir", directory, *TESTS],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            timeout=1800,
        )
    outcomes = re.findall(
        r"^tests/\S+::(\w+) (PASSED|FAILED|ERROR|SKIPPED)", done.stdout, re.MULTILINE
    )
    return dict(outcomes), done.stdout + done.stderr


def unexpected(outcomes: dict[str, str]) -> list[str]:
    """Return what differs from the list, in words."""
    findings = []
    for name, outcome in outcomes.items():
        if outcome == "FAILED" and name not in FAILING:
            findings.append(f"{name} fails")
        if outcome == "ERROR":
            findings.append(f"{name} cannot be set up")
        if outcome == "PASSED" and name in FAILING:
            findings.append(f"{name} passes, and is listed as failing: {FAILING[name]}")
    missing = FAILING.keys() - outcomes.keys()
    return findings + [f"{name} is listed, and does not exist" for name in sorted(missing)]


def main() -> None:
    """Fetch, run and compare."""
    with tempfile.TemporaryDirectory() as directory:
        given = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
        outcomes, output = run(given or fetch(Path(directory)))
    findings = unexpected(outcomes)
    passed = sum(outcome == "PASSED" for outcome in outcomes.values())
    print(output if findings or not passed else "", end="")
    for test, reason in sorted(FAILING.items()):
        print(f"fails as expected: {test}: {reason}")
    skipped = sum(outcome == "SKIPPED" for outcome in outcomes.values())
    print(f"{passed} of {len(outcomes) - skipped} tests of aiokafka {RELEASE} pass on a log")
    if findings or not passed:
        sys.exit("\n".join(findings) or "no test ran")


if __name__ == "__main__":
    main()
