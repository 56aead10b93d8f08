"""`embedlog.kafka` against the originals: kafka-python's own tests, and a real broker.

Needs the network: PyPI, and Maven Central with Java 17.
"""

from __future__ import annotations

import subprocess

import pytest
from support import kafka_python_suite

pytestmark = pytest.mark.tier("nightly")


def test_the_tests_of_kafka_python_pass_on_a_log(tmp_path):
    """All but those that are listed, with the reason."""
    try:
        release = kafka_python_suite.fetch(tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"pip does not bring kafka-python: {error}")

    outcomes, output = kafka_python_suite.run(release)

    assert outcomes, output
    assert kafka_python_suite.unexpected(outcomes) == [], output
