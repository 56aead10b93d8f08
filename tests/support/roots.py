"""Roots for tests: made in one line, filled in one line, abandoned as a crash would."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import embedlog
from embedlog import audit, batch, kv
from embedlog.batch import EncodedBatch
from embedlog.config import TopicConfig
from embedlog.files import Files
from embedlog.partition import PartitionLog
from embedlog.root import startup
from embedlog.root.root import Root
from embedlog.root.verify import verify_root
from support.clock import START, ManualClock
from support.patience import patient
from support.typed_bytes import lists


def open_root(path: str | os.PathLike[str], **overrides: Any) -> Root:
    """Open a root with the defaults of `embedlog.open`, but a clock that stands still."""
    options: dict[str, Any] = {
        "mode": "rw",
        "durability": "os",
        "visibility": "append",
        "clock": ManualClock(),
        "lock_timeout": patient(10),
        "auto_create": True,
        "unsafe_filesystem": False,
        "files": Files,
    }
    return audit.subscribe(Root(os.fspath(path), **{**options, **overrides}))


def make_store(
    path: str | os.PathLike[str], name: str = "live", rows: Any = None, **options: Any
) -> kv.LmdbStore:
    """Open a store; create its environment, with a first row, if there is none."""
    Files.create_root(path)
    files = Files(path)
    files.make_directory("locks")
    if not files.exists(name):
        first = {b"first": b"row"} if rows is None else rows
        kv.create(files, name, durable=name == "state", rows=first)
    return kv.LmdbStore(files, name, **{"durable": name == "state", "timeout": 5.0, **options})


def make_log(root: Root, config: dict[str, object] | None = None, topic: str = "t") -> PartitionLog:
    """Create a topic of one partition and return its log."""
    root.create_topic(topic, 1, TopicConfig.parse(config or {}))
    return root.partition(topic, 0)


def encoded(
    *values: bytes | None,
    keys: list[bytes | None] | None = None,
    at: int | list[int] = START,
    headers: Any = None,
    producer: tuple[int, int, int] | None = None,
    compression: str = "none",
) -> EncodedBatch:
    """Return a batch of values; ``producer`` is (id, epoch, base sequence)."""
    encoded_batch = batch.encode_lists(list(values), keys, at, headers, compression)
    if producer is not None:
        encoded_batch.set_producer(*producer)
    return encoded_batch


def fill(log: PartitionLog, count: int, *, first: int = 0, size: int = 1, **options: Any) -> None:
    """Append ``count`` batches of ``size`` records, each its own append: v0, v1, …"""
    for number in range(first, first + count):
        values = [b"v%d" % (number * size + row) for row in range(size)]
        log.append([encoded(*values, at=START + number)], **options)


Row = tuple[int, int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]


def rows(log: PartitionLog, offset: int | None = None, max_bytes: int = 1 << 20) -> list[Row]:
    """Read everything from an offset: (offset, timestamp, key, value, headers) of each record."""
    reader = log.reader(log.start_offset() if offset is None else offset)
    records: list[Row] = []
    start = reader.offset
    while got := reader.read(max_bytes):
        for decoded in got:
            records += [row for row in batch_rows(decoded) if row[0] >= start]
    return records


def batch_rows(decoded: batch.Batch) -> list[Row]:
    times, keys, values, headers = lists(decoded)
    offsets = decoded.offsets().to_pylist()
    heads = headers or [[]] * len(times)
    return [
        (offset, time, key, value, [(name, data) for name, data in (head or [])])
        for offset, time, key, value, head in zip(offsets, times, keys, values, heads, strict=True)
    ]


def values(log: PartitionLog, offset: int | None = None) -> list[bytes | None]:
    """Read the values from an offset on."""
    return [row[3] for row in rows(log, offset)]


def offsets(log: PartitionLog, offset: int | None = None) -> list[int]:
    """Read the offsets from an offset on."""
    return [row[0] for row in rows(log, offset)]


def bases(log: PartitionLog) -> list[int]:
    """The base offsets of the segments."""
    log.refresh()
    return list(log.segments)


def abandon(root: Root) -> None:
    """Leave as a killed process does: nothing flushed, nothing marked clean."""
    context, root._context, root.closed = root._context, None, True
    if context is None:
        return
    for log in root._partitions.values():
        # One that was killed in the middle holds a lock of this process, for ever.
        log.thread_lock = threading.Lock()
        log.close()
    root._partitions.clear()
    context.live.close()
    context.wake.close()
    context.state.close()
    context.files.close_all()


def segment_files(root: str | os.PathLike[str]) -> list[Path]:
    """The segment files of a root, in the order of names."""
    return sorted(Path(root).glob("topics/*/*/*.arrows"))


def healthy(root: Root) -> bool:
    """Fail if `verify` has findings; return True."""
    findings = [str(finding) for finding in verify_root(root)]
    assert findings == [], "\n".join(findings)
    return True


@pytest.fixture
def healthy_log(tmp_path: Path) -> Iterator[embedlog.Log]:
    """An empty log without housekeeping; healthy when the test is done."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        yield log
        assert log.housekeeping.verify() == []


def no_stray_files(root: Root) -> bool:
    """Fail unless the segment files are those that the manifests name; return True."""
    named = set()
    for topic in root.topics():
        for number in range(root.partitions(topic)):
            log = root.partition(topic, number)
            log.refresh()
            named |= {log.path_of(segment) for segment in log.segments.values()}
    existing = {str(path.relative_to(root.path)) for path in segment_files(root.path)}
    assert existing == named, "a stray file, or a missing one"
    return True


def latest(records: Iterable[Row]) -> dict[bytes | None, Row]:
    """Return what a reader makes of records: the last one of each key that has a value."""
    state: dict[bytes | None, Row] = {}
    for row in records:
        state.pop(row[2], None)
        if row[3] is not None:
            state[row[2]] = row
    return state


def copy_root(source: Path, target: Path) -> None:
    """Copy a root; the copy would otherwise count as another one, as after a reboot."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    files = Files(target)
    (target / startup.BOOT_FILE).write_bytes(startup._boot(files))
    files.close_all()
