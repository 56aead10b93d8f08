"""Roots as each release wrote them, which every later release must read: see docs/format.md.

``make keep-roots`` (or ``python tests/support/released_roots.py``) writes those of this version
into ``tests/released/VERSION.tar.xz``: a log, and a mirror of it over two directories, with what
programs must read in them.  It is called once, when a version is released.
"""

from __future__ import annotations

import json
import random
import re
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

import embedlog
from embedlog import keyspace, kv
from embedlog.api import Log
from support.random_topics import fill_topics
from support.staged_files import publish, stage

RELEASED = Path(__file__).parents[1] / "released"
CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"
_LOG, _COPIES = "log", ("copy-1", "copy-2")
_AVRO = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
# But for those of what was not finished: every kind of row must be in a root.
_TABLES = [
    table
    for table in keyspace.TABLES
    if table.database == "state"
    and table.name
    not in {
        *("uncommitted files", "log locked", "deleted topics"),
        *("journal", "offset journal", "rollback points"),
    }
]
_COLUMNS = pa.schema([("id", pa.int64()), ("name", pa.string())])


def released_versions() -> list[str]:
    """Return the versions that CHANGELOG.md has a date for, from the newest."""
    heads = re.findall(r"^## (\S+) \((.+)\)$", CHANGELOG.read_text(encoding="utf-8"), re.MULTILINE)
    return [version for version, date in heads if date != "unreleased"]


def keep(archive: Path) -> None:
    """Write roots and what must be read in them, and pack them."""
    with tempfile.TemporaryDirectory() as directory:
        roots = Path(directory)
        with embedlog.open(roots / _LOG, maintenance=False) as log:
            _write(log)
            with _open_copies(roots) as copies:
                _mirror(log, copies)
                contents = {"log": what_is_read(log), "copies": what_is_read(copies)}
        (roots / "contents.json").write_text(json.dumps(contents))
        with tarfile.open(archive, "w:xz") as packed:
            for path in sorted(roots.iterdir()):
                packed.add(path, path.name)


def _open_copies(roots: Path) -> Log:
    return embedlog.open([roots / name for name in _COPIES], maintenance=False)


def _mirror(log: Log, copies: Log) -> None:
    embedlog.mirror(log, copies, topics="a|b|rows|orders", groups=".*")
    copies.create_topic("queries", exist_ok=True)
    embedlog.mirror(log, copies, topics="queries", merge=True)


def _write(log: Log) -> None:
    fill_topics(log, random.Random(7), steps=60)
    log.create_topic("rows", schema=_COLUMNS, key="id", config={"segment.bytes": 4000})
    with log.producer(producer_name="loader") as producer:
        for number in range(40):
            rows = pa.table({"id": range(10), "name": [f"name {number}"] * 10}, schema=_COLUMNS)
            producer.append_table("rows", rows, sequence=10 * number)
    wider = _COLUMNS.append(pa.field("price", pa.float64()))
    log.alter_topic("rows", schema=wider, defaults={"price": 1.5})
    log.create_topic("orders", key="str", value="avro")
    log.schema_registry.register("orders-value", _AVRO)
    log.schema_registry.set_compatibility("FULL", "orders-value")
    with log.producer() as producer:
        producer.send_batch("orders", [{"id": number} for number in range(5)])
        producer.append_table("rows", pa.table({"id": [1], "name": [None], "price": [2.0]}))
    log.create_topic("queries")
    publish(log.root, [stage(log.root, queries_0=[b"published"])], version=1)
    log.housekeeping.retention_bytes = 1 << 40
    with log.consumer("orders", group_id="billing") as consumer:
        consumer.poll(1.0)
        consumer.commit()
    with (
        log.consumer("orders", group_id="copies", enable_auto_commit=False) as consumer,
        log.transaction("copies") as t,
    ):
        consumer.poll(1.0)
        t.send("queries", b"copied")
        t.commit_offsets(consumer)
    log.groups["workers"].alter({"share.auto.offset.reset": "earliest"})
    with log.share_consumer("queries", group="workers") as consumer:
        consumer.poll(1.0)
        consumer.commit()
    log.housekeeping.run()
    log.snapshot("kept", expires=None)


def what_is_read(log: Log) -> dict[str, Any]:
    """Return all that programs can read in the log, as JSON."""
    topics = {}
    for name in log.topics():
        topic = log.topic(name)
        topics[name] = {
            "config": log.describe_topic(name)["overrides"],
            "starts": [log.partition(name, n).start_offset() for n in range(topic.partitions)],
            "records": {
                column.name: str(table[column.name].to_pylist())
                for table in [topic.to_arrow(topic.schema().names)]
                for column in table.schema
            },
        }
    groups = {
        name: [
            [each.topic, each.partition, each.current_offset]
            for each in group.describe().partitions
        ]
        for name, group in log.groups.items()
    }
    subjects = {
        subject: [log.schema_registry.version(subject, n).schema for n in versions]
        for subject in log.schema_registry.subjects()
        for versions in [log.schema_registry.versions(subject)]
    }
    snapshots = {
        name: {topic: len(log.at(snapshot)[topic]) for topic in snapshot.topics}
        for name, snapshot in log.snapshots.items()
    }
    contents = {"topics": topics, "groups": groups, "subjects": subjects, "snapshots": snapshots}
    return json.loads(json.dumps(contents, default=str))  # type: ignore[no-any-return]


def _filled_tables(log: Log) -> list[str]:
    def step(txn: kv.Txn) -> list[str]:
        return [table.name for table in _TABLES if table.any(txn)]

    return log.root.context.state.read(step)


def check(archive: Path, roots: Path) -> None:
    """Unpack roots, and read, check and continue them."""
    with tarfile.open(archive) as packed:
        packed.extractall(roots, filter="data")
    contents = json.loads((roots / "contents.json").read_text())
    with embedlog.open(roots / _LOG, maintenance=False) as log, _open_copies(roots) as copies:
        tables = {name for opened in (log, copies) for name in _filled_tables(opened)}
        assert tables == {table.name for table in _TABLES}
        for opened, name in ((log, "log"), (copies, "copies")):
            assert what_is_read(opened) == contents[name]
            assert opened.housekeeping.verify() == []
        with log.producer(producer_name="loader") as producer:
            assert producer.last_sequence("rows", 0) == 399
            producer.send("rows", {"id": 1, "name": "new", "price": None}).result()
        publish(log.root, [stage(log.root, queries_0=[b"published"])], version=1)
        assert len(log.topic("queries")) == 2, "it was published before"
        _mirror(log, copies)
        assert len(copies.topic("queries")) == 2
        assert len(copies.topic("rows")) == len(log.topic("rows")) == 402


if __name__ == "__main__":
    RELEASED.mkdir(exist_ok=True)
    keep(RELEASED / f"{embedlog.__version__}.tar.xz")
