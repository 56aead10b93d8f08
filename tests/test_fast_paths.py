"""Each fast path does what its general twin does, and docs/fast-paths.md lists them all."""

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
    """Send records one by one; return what the futures and the partitions say."""
    root = open_root(path)
    root.create_topic("t", 3, TopicConfig.parse({}))
    with Producer(root, **{"partitioner_sticky_bytes": 1 << 20, **config}) as producer:
        told = []
        for number, record in enumerate(records):
            told.append(producer.send("t", **{"value": b"v%d" % number, **record}).result())
    stored = [rows(root.partition("t", number)) for number in range(3)]
    abandon(root)
    return told, stored


@pytest.fixture(scope="module")
def script():
    """The benchmark of the pairs, as a module."""
    if not SCRIPT.exists():
        pytest.skip("a source distribution has no benchmarks")
    spec = importlib.util.spec_from_file_location("bench_fast_paths", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_plain_send_is_one_with_everything_spelled_out(tmp_path):
    """`send` of bytes in line, and with a partition given, store the same records."""
    plain = [{"key": b"k%d" % (n % 5)} for n in range(12)]
    told, stored = sent_and_stored(tmp_path / "plain", plain)
    spelled = [
        {**record, "partition": one.partition, "timestamp_ms": one.timestamp, "headers": None}
        for record, one in zip(plain, told, strict=True)
    ]

    assert sent_and_stored(tmp_path / "spelled", spelled) == (told, stored)


def test_the_page_lists_every_pair_that_is_measured(script):
    """And every test that it names is there."""
    text = PAGE.read_text(encoding="utf-8")
    listed = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]

    for pair in script.PAIRS:
        assert any(f"`{pair.general}`" in one[0] and f"`{pair.fast}`" in one[1] for one in listed)
    for name in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert (REPOSITORY / name).is_file(), name


def test_every_pair_can_be_measured(script):
    """A few rounds of each, in a process of its own."""
    assert run_python(SCRIPT, "--quick").count("\n") == 2 + len(script.PAIRS)
