"""`embedlog.kafka` against the originals: kafka-python's own tests, and a real broker.

Needs the network: PyPI, and Maven Central with Java 17.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support import kafka_python_suite
from support.children import run_python
from support.kafka_broker import broker
from support.patience import patient

pytestmark = pytest.mark.tier("nightly")

PROGRAM = Path(__file__).parent / "support" / "kafka_program.py"


def test_the_tests_of_kafka_python_pass_on_a_log(tmp_path):
    """All but those that are listed, with the reason."""
    try:
        release = kafka_python_suite.fetch(tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"pip does not bring kafka-python: {error}")

    outcomes, output = kafka_python_suite.run(release)

    assert outcomes, output
    assert kafka_python_suite.unexpected(outcomes) == [], output


def test_a_program_prints_the_same_on_a_broker_and_on_a_log(tmp_path):
    """Chosen by one environment variable."""

    def output(servers):
        environment = {**os.environ, "KAFKA_BOOTSTRAP_SERVERS": servers}
        return run_python(PROGRAM, seconds=60, env=environment).splitlines()

    with broker(patient(60)) as address:
        on_a_broker = output(address)

    assert output(f"embedlog://{tmp_path}/log") == on_a_broker
    assert output(f"{tmp_path}/other") == on_a_broker
