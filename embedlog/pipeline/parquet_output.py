"""The directory of Parquet files, to which each micro-batch is published exactly once.

Plain readers list the directory and do not read the log of files that Spark would
keep beside it.  So files are finished in a hidden directory and then renamed:

1. Spark writes a micro-batch to a new directory under ``.pipeline/staging``.
2. The files are flushed.
3. One small file, ``.pipeline/published``, is replaced: it says up to which offsets
   the directory is loaded, and the new name of each staged file.  From here on the
   micro-batch is published.
4. The files are renamed and the directories flushed, before the next micro-batch.

If the process dies before 3, the next one deletes the staged files; after 3, the
next one finishes the renames.  What is published is known by its offsets, not by
Spark's batch id, so even the checkpoint may be deleted.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from embedlog.batch import MINUTE_MS
from embedlog.errors import CorruptionError, DataLossError, LockTimeoutError
from embedlog.files import Files
from embedlog.pipeline.parquet_audit import AuditedTopic, is_hidden
from embedlog.record import TopicPartition
from embedlog.spark.stream_offset import StreamOffset

HIDDEN = ".pipeline"
_PUBLISHED, _LOCK, _STAGING = f"{HIDDEN}/published", f"{HIDDEN}/lock", f"{HIDDEN}/staging"
_COMPARED = f"{HIDDEN}/compared"


@dataclass(frozen=True, slots=True)
class PublishedState:
    """What all micro-batches so far have published; the content of ``.pipeline/published``."""

    number: int = 0
    """The number of micro-batches."""
    offset: StreamOffset = field(default_factory=lambda: StreamOffset({}))
    """The next offset to load of each partition."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """The new name of each staged file of the last micro-batch."""

    @property
    def ends(self) -> Mapping[TopicPartition, int]:
        """The next offset to load of each partition."""
        return self.offset.offsets

    def to_json(self) -> dict[str, Any]:
        """Return JSON for the file."""
        positions = self.offset.to_json()
        return {"number": self.number, "positions": positions, "moves": dict(self.renames)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PublishedState:
        """Inverse of `to_json`."""
        return cls(value["number"], StreamOffset.from_json(value["positions"]), value["moves"])

    def after(self, end: StreamOffset, renames: Mapping[str, str]) -> PublishedState:
        """Return the state with one more micro-batch.

        Raises:
            DataLossError: A topic is not the one that was loaded before.
        """
        topic_ids = self.offset.topic_ids
        for topic, topic_id in end.topic_ids.items():
            if topic_ids.get(topic, topic_id) != topic_id:
                raise DataLossError(
                    "The topic was deleted and created again since it was loaded",
                    todo="Load it into another directory.",
                    topic=topic,
                )
        # After the checkpoint was deleted, a micro-batch may end before what is published.
        ends = {key: max(offset, self.ends.get(key, 0)) for key, offset in end.offsets.items()}
        offset = StreamOffset({**self.ends, **ends}, {**topic_ids, **end.topic_ids})
        return PublishedState(self.number + 1, offset, renames)


class ParquetOutput(AbstractContextManager["ParquetOutput"]):
    """The directory, locked by this process; ``rows`` counts the rows that it published.

    Args:
        path: The directory; created if it does not exist.

    Raises:
        LockTimeoutError: Another pipeline loads into it.
        CorruptionError: A published file is gone.
    """

    def __init__(self, path: str) -> None:
        self.path, self.rows = os.path.abspath(path), 0
        os.makedirs(os.path.join(self.path, HIDDEN), exist_ok=True)
        # As any data set it may be on a remote file system, or in a directory that others may
        # write to; protecting it is up to its owner.
        self._files = Files(self.path, unsafe_filesystem=True)
        try:
            if not self._files.try_lock(self._files.open(_LOCK, write=True, create=True)):
                raise LockTimeoutError(
                    "Another pipeline loads into this directory",
                    path=self.path,
                    todo="Stop it, or wait until it is done.",
                )
            self.published = PublishedState()
            if self._files.exists(_PUBLISHED):
                value = json.loads(self._files.read_file(_PUBLISHED))
                self.published = PublishedState.from_json(value)
            self._rename_files()
        except BaseException:
            self.close()
            raise
        shutil.rmtree(os.path.join(self.path, _STAGING), ignore_errors=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock the directory."""
        self._files.close_all()

    def new_stage(self) -> str:
        """Return the path for a micro-batch; Spark creates the directory.

        The path is new, since the Spark of a killed process may continue writing to its own.
        """
        return os.path.join(self.path, _STAGING, uuid.uuid4().hex)

    def publish(self, stage: str, end: StreamOffset) -> None:
        """Publish a staged micro-batch, which ends at an offset."""
        renames = self._plan_renames(os.path.relpath(stage, self.path))
        published = self.published.after(end, renames)
        rows = sum(map(self._flush, renames))
        self._files.write_file(_PUBLISHED, json.dumps(published.to_json()).encode())
        self.published = published
        self.rows += rows
        self._rename_files()
        shutil.rmtree(stage, ignore_errors=True)

    def read_compared(self) -> dict[str, AuditedTopic]:
        """Return the ranges that the last audit without problems compared, by topic.

        Empty if the file is missing or unreadable; it may be deleted at any time.
        """
        if not self._files.exists(_COMPARED):
            return {}
        try:
            topics = json.loads(self._files.read_file(_COMPARED))
            return {topic: AuditedTopic.from_json(value) for topic, value in topics.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            return {}

    def write_compared(self, topics: Mapping[str, AuditedTopic]) -> None:
        """Keep what an audit without problems compared, for the next one."""
        value = {topic: audited.to_json() for topic, audited in topics.items()}
        self._files.write_file(_COMPARED, json.dumps(value).encode())

    def _plan_renames(self, stage: str) -> dict[str, str]:
        renames: dict[str, str] = {}
        for directory, _, names in sorted(os.walk(os.path.join(self.path, stage))):
            for name in sorted(names):
                if name.endswith(".parquet") and not is_hidden(name):
                    staged = os.path.relpath(os.path.join(directory, name), self.path)
                    target = os.path.relpath(os.path.dirname(staged), stage)
                    new_name = f"{self.published.number:08d}-{len(renames):05d}.parquet"
                    renames[staged] = os.path.join(target, new_name)
        return renames

    def _flush(self, name: str) -> int:
        """Flush a file to the disk, and return how many rows it has."""
        fd = self._files.open(name)
        try:
            self._files.sync(fd)
        finally:
            self._files.close(fd)
        rows: int = parquet.read_metadata(os.path.join(self.path, name)).num_rows
        return rows

    def _rename_files(self) -> None:
        """Do the renames of the last micro-batch that were not done yet."""
        directories = set()
        for staged, name in self.published.renames.items():
            directory = os.path.dirname(name)
            if self._files.exists(staged):
                os.makedirs(os.path.join(self.path, directory), exist_ok=True)
                self._files.rename(staged, name)
                directories |= {directory, os.path.dirname(directory), ""}
            elif not self._files.exists(name):
                raise CorruptionError(
                    "A file of the last micro-batch is gone",
                    path=os.path.join(self.path, name),
                    todo="Restore it, or load everything into another directory.",
                )
        for directory in sorted(directories):
            self._files.sync_directory(directory)


def count_rows(stage: str, topics: Collection[str]) -> dict[TopicPartition, dict[int, list[int]]]:
    """Return how many rows the staged files of topics have, by partition and minute.

    Next to each number is that of bytes, which is 0: a file has other bytes than the log.
    """
    counts: dict[TopicPartition, dict[int, list[int]]] = {}
    for topic in topics:
        directory = os.path.join(stage, f"topic={quote(topic)}")
        if not os.path.isdir(directory):
            continue
        # Not as a data set, whose directories would become columns.
        for folder, _, names in sorted(os.walk(directory)):
            for name in sorted(names):
                if name.endswith(".parquet") and not is_hidden(name):
                    path = os.path.join(folder, name)
                    table = parquet.ParquetFile(path).read(["partition", "timestamp"])
                    _count_table(counts, topic, table)
    return counts


def _count_table(
    counts: dict[TopicPartition, dict[int, list[int]]], topic: str, table: pa.Table
) -> None:
    times = table["timestamp"].cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64())
    minutes, numbers = times.to_numpy() // MINUTE_MS, table["partition"].to_numpy()
    pairs, records = np.unique(np.stack([numbers, minutes]), axis=1, return_counts=True)
    for (number, minute), count in zip(pairs.T.tolist(), records.tolist(), strict=True):
        of_partition = counts.setdefault(TopicPartition(topic, number), {})
        of_partition.setdefault(minute, [0, 0])[0] += count
