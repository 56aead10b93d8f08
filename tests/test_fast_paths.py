"""Each fast path does what its general form does, and docs/fast-paths.md lists them all."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from support.children import run_python
from support.roots import abandon, open_root, rows

from embedlog.config import TopicConfig
from embedlog.producer import Producer

REPOSITORY = Path(__file__).parent.parent
PAGE = REPOSITORY / "docs" / "fast-paths.md"
SCRIPT = REPOSITORY / "bench" / "bench_fast_paths.py"


def sent_and_stored(path, records, **config):
    """Send records one by one; return the results of the futures and the rows of the partitions."""
    root = open_root(path)
    root.create_topic("t", 3, TopicConfig.parse({}))
    with Producer(root, **{"partitioner_sticky_bytes": 1 << 20, **config}) as producer:
        sent = []
        for number, record in enumerate(records):
            sent.append(producer.send("t", **{"value": b"v%d" % number, **record}).result())
    stored = [rows(root.partition("t", number)) for number in range(3)]
    abandon(root)
    return sent, stored


@pytest.fixture(scope="module")
def script():
    """The benchmark of the pairs, imported as a module."""
    if not SCRIPT.exists():
        pytest.skip("a source distribution has no benchmarks")
    spec = importlib.util.spec_from_file_location("bench_fast_paths", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_plain_send_equals_one_with_all_arguments(tmp_path):
    """The fast `send` of bytes and the general `send` store the same records."""
    plain = [{"key": b"k%d" % (number % 5)} for number in range(12)]
    sent, stored = sent_and_stored(tmp_path / "plain", plain)
    explicit = [
        {
            **record,
            "partition": metadata.partition,
            "timestamp_ms": metadata.timestamp,
            "headers": None,
        }
        for record, metadata in zip(plain, sent, strict=True)
    ]

    assert sent_and_stored(tmp_path / "explicit", explicit) == (sent, stored)


def test_the_page_lists_every_pair_that_is_measured(script):
    """The tests on the page exist."""
    text = PAGE.read_text(encoding="utf-8")
    listed = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]

    for pair in script.PAIRS:
        assert any(f"`{pair.general}`" in row[0] and f"`{pair.fast}`" in row[1] for row in listed)
    for name in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert (REPOSITORY / name).is_file(), name


@pytest.mark.tier("all")
def test_every_pair_can_be_measured(script):
    """The script runs a few rounds of each, in a process of its own."""
    assert run_python(SCRIPT, "--quick").count("\n") == 2 + len(script.PAIRS)
