"""P22: hostile names and bytes are refused by a typed error, in little memory and time."""

from __future__ import annotations

import os
import random
import resource
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
from support.case_workers import Outcome, Progress, share_out
from support.damage import OneFile
from support.hostile_batches import CHANGES, with_right_checksums
from support.patience import patient
from support.roots import encoded
from support.tiers import choose

from embedlog import batch
from embedlog.batch.wire import MAX_BATCH_BYTES, layout_of
from embedlog.catalog import check_topic_name
from embedlog.errors import CorruptBatchError, CorruptionError, InvalidTopicError
from embedlog.errors import UnsupportedFormatError as Newer
from embedlog.segment import SegmentFile

ROOM = 64 << 20
"""Bytes over the limit of a decoded batch that a hostile one may take."""
PATIENCE = 2.0
"""Seconds for one input; a busy machine takes long for nothing at times."""


def healthy() -> list[tuple[Any, bytes]]:
    """Batches of every kind, with the schema they are read by."""
    made = []
    for compression in ("none", "lz4", "zstd"):
        for headers in (None, [[("k", b"v")], [], [("a", None), ("b", b"")]]):
            encoded_batch = encoded(
                b"value" * 40, None, b"", keys=[b"k", b"", None], at=[1, 2, 3],
                headers=headers, compression=compression, producer=(5, 0, 0),
            )  # fmt: skip
            data = b"".join(map(bytes, encoded_batch.stamp(10, 3)))
            made.append((batch.schema(headers=headers is not None), data))
    return made


def read_hostile(case: tuple[int, int], outcome: Outcome, progress: Progress) -> None:
    """Each input must be refused, or be a batch that can be read; nothing else may happen."""
    seed, count = case
    rng = random.Random(seed)
    inputs = healthy()
    for schema, data in inputs:
        touch(data, schema, 0)
    limit_memory()
    for number in range(count):
        schema, data = rng.choice(inputs)
        changed = rng.choice(CHANGES)(data, rng)
        if rng.random() < 0.8:
            changed = with_right_checksums(changed, len(schema.names))
        if number % 32 == 0:
            progress.report(f"{case}: {number}")
        outcome.count += 1
        outcome.keys.add((changed, schema.names[-1]))
        started = time.perf_counter()
        try:
            touch(changed, schema, number)
            outcome.note("readable")
        except (CorruptBatchError, CorruptionError, Newer):
            outcome.note("refused")
        except Exception as error:  # noqa: BLE001 - a MemoryError too is a finding
            where = "\n".join(traceback.format_exc().splitlines()[-4:])
            outcome.findings.append(f"{case} {number}: {error!r}\n{where}\n{changed.hex()}")
        if time.perf_counter() - started > patient(PATIENCE):
            outcome.findings.append(f"{case} {number}: slow: {changed.hex()}")
        if outcome.enough:
            break
    outcome.keys = set(map(hash, outcome.keys))
    outcome.note("peak MiB over the start", grown())


def touch(data: bytes, schema: Any, number: int) -> None:
    """Do with a batch what readers do."""
    prefix = schema.serialize().to_pybytes()
    file = SegmentFile(OneFile(prefix + data), "hostile", expected=lambda: (layout_of(schema),))  # type: ignore[arg-type]
    read = file.mapped if number % 2 else file.read
    for hostile in read(file.start, file.start + len(data)):
        if number % 3 == 0:
            hostile.verify()
        hostile.columns()
        hostile.offsets()
        hostile.lists()
        hostile.columns(["timestamp"])


_start = 0


def limit_memory() -> None:
    """Let this process have the decoded limit and some room, and no more."""
    global _start
    _start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 2 * MAX_BATCH_BYTES + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def grown() -> int:
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - _start) >> 10


@pytest.mark.parametrize(
    "count",
    [choose(test=1_000, all=100_000), pytest.param(10_000_000, marks=pytest.mark.tier("nightly"))],
    ids="count={}".format,
)
def test_hostile_batches_are_refused_in_little_memory_and_time(count, record_property):
    """P22: also below good checksums, lengths, counts and raw sizes are not believed."""
    inputs = min(count // 4 * 11 // 10, 250_000)
    cases = [(seed, inputs) for seed in range(count * 11 // 10 // inputs)]
    outcome = share_out(read_hostile, cases)
    record_property("states", str(outcome))

    assert not outcome.findings, str(outcome)[:5000]
    assert outcome.count >= count, f"-> {outcome.count} inputs"
    assert outcome.distinct >= 0.5 * count, f"-> {outcome.distinct} distinct inputs"
    peak = outcome.tally["peak MiB over the start"] // len(cases)
    assert peak < (MAX_BATCH_BYTES + ROOM) >> 20, f"{peak} MiB"


# Names


def test_random_names_are_refused_or_stay_below_the_root(tmp_path):
    """P22: what is accepted is one plain directory name."""
    rng = random.Random(22)
    alphabet = "aZ09._-/\\\0\n~ :ä\u2028"
    accepted = 0
    for _ in range(20_000):
        name = "".join(rng.choice(alphabet) for _ in range(rng.randrange(12)))
        try:
            check_topic_name(name)
        except InvalidTopicError:
            continue
        accepted += 1
        path = os.path.normpath(tmp_path / "topics" / f"{name}-1")
        assert os.path.dirname(path) == str(tmp_path / "topics")
    assert accepted > 100
