"""Snapshots that are read from their files: from any process, host and store, without the log."""

from __future__ import annotations

import http.server
import json
import pickle
import re
import shutil
import threading
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from support.children import run_python

import embedlog
from embedlog.errors import (
    CorruptBatchError,
    CorruptionError,
    DataLossError,
    InvalidConfigError,
    StorageError,
    UnknownTopicOrPartitionError,
    UnsupportedFormatError,
)
from embedlog.record import TopicPartition
from embedlog.snapshots import manifest

COLUMNS = pa.schema([("n", pa.int64()), ("text", pa.string())])
SMALL = {"segment.bytes": 3000, "file.delete.delay.ms": 0}


class Files(http.server.SimpleHTTPRequestHandler):
    """Serves files, and parts of them, as a web server does."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if wanted is None or not path.is_file():
            super().do_GET()
            return
        data, first, last = path.read_bytes(), int(wanted[1]), int(wanted[2])
        part = data[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def end_headers(self):
        self.send_header("Accept-Ranges", "bytes")
        super().end_headers()


@pytest.fixture
def serve():
    """Serve a directory, and return its URL."""
    servers = []

    def serve(directory):
        handler = partial(Files, directory=str(directory))
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def log(tmp_path):
    """A log with a snapshot of topics of each kind, and records that came later."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("plain", 3, SMALL)
        log.create_topic("json", 2, SMALL, key="int", value="json")
        log.create_topic(
            "typed", 2, {**SMALL, "cleanup.policy": "compact"}, schema=COLUMNS, key="n"
        )
        log.create_topic("empty", 2)
        send(log, range(300))
        log.housekeeping.compact("typed", force=True, progress=False)
        log.alter_topic("typed", schema=COLUMNS.append(pa.field("more", pa.int8())))
        send(log, range(300, 400))
        log.snapshot("s")
        send(log, range(400, 700))
        yield log


def send(log, numbers):
    with log.producer() as producer:
        for number in numbers:
            headers = [("h", b"x")] if number % 50 == 0 else None
            producer.send("plain", b"%d" % number, key=b"k", headers=headers, partition=number % 3)
            producer.send("json", {"n": number}, key=number)
            producer.send("typed", {"n": number % 200, "text": f"t{number}"})


def file_of(log):
    return f"{log.path}/snapshots/s.json"


def check_equal(opened, log):
    """What was opened has what `log.at` shows."""
    at = log.at(log.snapshots["s"])
    assert opened.topics() == at.topics() == ["empty", "json", "plain", "typed"]
    for name in opened:
        expected = at[name].to_arrow()
        assert opened[name].to_arrow().equals(expected)
        assert list(opened[name]) == list(at[name])
        splits = pickle.loads(pickle.dumps(opened[name].splits(3)))
        assert sum(split.to_table().num_rows for split in splits) == expected.num_rows
    assert opened["typed"].to_polars(where="n > 150").equals(at["typed"].to_polars(where="n > 150"))
    query = "select count(*) as c, max(n) as m from typed"
    assert opened.sql(query).equals(at.sql(query))
    assert opened["plain"].scan().collect().equals(at["plain"].scan().collect())
    assert opened["typed"].dataset().count_rows() == at["typed"].dataset().count_rows()
    assert opened["plain"].schema().equals(at["plain"].schema())


def test_a_snapshot_is_read_from_its_file(log):
    """By its path, or a file URL; also when the log goes on."""
    opened = embedlog.open_snapshot(file_of(log))
    check_equal(opened, log)
    check_equal(embedlog.open_snapshot(f"file://{file_of(log)}"), log)
    send(log, range(100))
    log.housekeeping.run()
    check_equal(opened, log)
    assert (opened.name, opened.created_ms) == ("s", log.snapshots["s"].created_ms)


READS = """
import sys, embedlog
opened = embedlog.open_snapshot(sys.argv[1])
print(opened["typed"].to_arrow().num_rows, sum(1 for _ in opened["plain"]))
"""


def test_reading_opens_no_database_and_changes_nothing(log, tmp_path):
    """Another host sees nothing but the files, and may not write there."""
    expected = len(log.at(log.snapshots["s"])["typed"])
    log.close()
    copy = tmp_path / "mount"
    shutil.copytree(log.path, copy)
    for name in ("state", "live", "locks", "embedlog.toml"):
        target = copy / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    before = sorted(path for path in copy.rglob("*"))
    found = run_python("-c", READS, str(copy / "snapshots/s.json")).split()
    assert found == [str(expected), "400"]
    assert sorted(path for path in copy.rglob("*")) == before


@pytest.mark.tier("all")
def test_a_snapshot_is_read_over_http(log, serve):
    """And from a store in memory, by fsspec."""
    url = f"{serve(log.path)}/snapshots/s.json"
    check_equal(embedlog.open_snapshot(url), log)
    with pytest.raises(StorageError) as caught:
        embedlog.open_snapshot(url.replace("s.json", "missing.json"))
    assert caught.value.missing

    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.put(log.path, "/bucket/log", recursive=True)
    try:
        check_equal(embedlog.open_snapshot("memory://bucket/log/snapshots/s.json"), log)
    finally:
        memory.rm("/bucket", recursive=True)


def test_what_needs_the_log_says_so(log):
    """Look-ups, slices and the last records of keys."""
    opened = embedlog.open_snapshot(file_of(log))
    for call in (
        lambda: opened["plain"][3],
        lambda: opened["plain"][3:7],
        lambda: opened["plain"].get(b"k"),
        lambda: opened["plain"].since("1h"),
        lambda: opened["plain"].to_arrow(latest=True),
        lambda: list(opened["typed"].items()),
        lambda: opened["typed"].in_ranges([(0, 0, 1)]),
    ):
        with pytest.raises(UnsupportedFormatError, match="where the log is"):
            call()
    with pytest.raises(UnknownTopicOrPartitionError):
        opened["missing"]
    with pytest.raises(InvalidConfigError):
        opened.topic("typed", raw=True)
    assert opened.topic("json", raw=True).to_arrow().num_rows == 400
    assert "json" in opened
    assert "missing" not in opened


def test_avro_needs_the_registry_of_the_log(tmp_path):
    """The bytes can be read."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("avro", value="avro")
        log.snapshot("s")
        opened = embedlog.open_snapshot(file_of(log))
        with pytest.raises(UnsupportedFormatError, match="registry"):
            opened["avro"].to_arrow()
        assert opened.topic("avro", raw=True).to_arrow().num_rows == 0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", CorruptionError),
        ("[]", CorruptionError),
        ("{", CorruptionError),
        ('{"format": 2, "root_format": 5}', UnsupportedFormatError),
    ],
)
def test_a_file_that_is_no_manifest_is_refused(tmp_path, text, error):
    """Whatever it holds."""
    folder = tmp_path / "log/snapshots"
    folder.mkdir(parents=True)
    (folder / "s.json").write_text(text)
    with pytest.raises(error):
        embedlog.open_snapshot(folder / "s.json")


def test_a_manifest_cannot_name_files_outside(log):
    """Its paths are below the directory (F3)."""
    document = json.loads(Path(file_of(log)).read_text())
    for part in document["topics"]["plain"]["partitions"]:
        for segment in part["segments"]:
            segment["path"] = f"../{segment['path']}"
    Path(file_of(log)).write_text(json.dumps(document))
    with pytest.raises(CorruptionError, match="not as it was written"):
        embedlog.open_snapshot(file_of(log))
    del document["crc"]
    manifest.write(log.root.context.files, "s", document)
    with pytest.raises(StorageError, match="not a path below the root"):
        embedlog.open_snapshot(file_of(log))["plain"].to_arrow()


def test_records_that_are_gone_or_damaged_are_an_error(log):
    """Nothing is missing in silence."""
    opened = embedlog.open_snapshot(file_of(log))
    log.snapshots.delete("s")
    with pytest.raises(StorageError):
        embedlog.open_snapshot(file_of(log))
    log.delete_records({TopicPartition("plain", 0): -1})
    with pytest.raises(DataLossError, match="was deleted"):
        opened["plain"].to_arrow()
    path = min(Path(log.path).glob("topics/json-*/0/*.arrows"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptBatchError):
        list(opened.topic("json", raw=True))
