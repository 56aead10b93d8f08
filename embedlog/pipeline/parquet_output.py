"""The directory of Parquet files: what is published in it, and how that is done once.

Plain readers list a directory; they know no log of Spark's beside it.  So files
are finished where nobody looks, and then renamed to where everybody does:

1. Spark writes a batch to a directory of its own under ``.pipeline/staging``.
2. The files are flushed.
3. One small file is replaced, ``.pipeline/published``: from here on the batch is
   published.  It says up to which offsets, and which file goes where.
4. The files are renamed, and the directories flushed, before there is another batch.

Whoever dies before 3 leaves rubbish, which the next one removes; whoever dies
after it, renames, which the next one finishes.  What is published is known by
offsets, not by Spark's number of the batch, so a checkpoint may even be deleted.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from pyarrow import parquet

from embedlog.errors import CorruptionError, DataLossError, LockTimeoutError
from embedlog.files import Files
from embedlog.pipeline.audit_progress import AuditedTopic, is_hidden
from embedlog.pipeline.audit_progress import from_json as known_from_json
from embedlog.record import TopicPartition
from embedlog.spark.stream_offset import StreamOffset, from_json

HIDDEN = ".pipeline"
_STATE, _LOCK, _STAGING = f"{HIDDEN}/published", f"{HIDDEN}/lock", f"{HIDDEN}/staging"
_COMPARED = f"{HIDDEN}/compared"


@dataclass(frozen=True, slots=True)
class LoadedTotals:
    """What all batches so far put into the directory."""

    number: int = 0
    """How many batches."""

    positions: StreamOffset = field(default_factory=lambda: StreamOffset({}))
    """Up to where each partition is loaded."""

    moves: Mapping[str, str] = field(default_factory=dict)
    """The renames of the last batch."""

    @property
    def ends(self) -> Mapping[TopicPartition, int]:
        """The next offset of each partition."""
        return self.positions.offsets

    def to_json(self) -> dict[str, Any]:
        """Return it as the file has it."""
        found = {"number": self.number, "positions": self.positions.to_json()}
        return {**found, "moves": dict(self.moves)}

    def after(self, positions: StreamOffset, moves: Mapping[str, str]) -> LoadedTotals:
        """Return what is published with one batch more.

        Raises:
            DataLossError: A topic is not the one that was loaded before.
        """
        before = self.positions
        for topic, number in positions.topics.items():
            if before.topics.get(topic, number) != number:
                raise DataLossError(
                    "the topic was deleted and made again since it was loaded",
                    todo="load it into another directory",
                    topic=topic,
                )
        # Behind what is published where a checkpoint was deleted.
        ends = {one: max(end, self.ends.get(one, 0)) for one, end in positions.offsets.items()}
        topics = {**before.topics, **positions.topics}
        return LoadedTotals(self.number + 1, StreamOffset({**self.ends, **ends}, topics), moves)


class ParquetOutput:
    """One process's hold on the directory; there is one at a time.

    ``rows`` is how many it published since.

    Args:
        path: The directory; made if it is not there.

    Raises:
        LockTimeoutError: Another pipeline loads into it.
    """

    def __init__(self, path: str) -> None:
        self.path, self.rows = os.path.abspath(path), 0
        os.makedirs(os.path.join(self.path, HIDDEN), exist_ok=True)
        # A directory that others may write to is theirs to guard, as any data set.
        self._files = Files(self.path, unsafe_filesystem=True)
        try:
            self._lock()
            self.published = self._read()
            self._finish()
        except BaseException:
            self.close()
            raise
        shutil.rmtree(os.path.join(self.path, _STAGING), ignore_errors=True)

    def __enter__(self) -> ParquetOutput:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let another process load."""
        self._files.close_all()

    def stage(self) -> str:
        """Return a new path to write a batch to; not made yet, as Spark wants it.

        The Spark of a killed process may write for a while: to another one than this.
        """
        return os.path.join(self.path, _STAGING, uuid.uuid4().hex)

    def publish(self, stage: str, positions: StreamOffset) -> None:
        """Make a staged batch part of the directory; it is loaded up to these positions."""
        moves = self._moves(os.path.relpath(stage, self.path))
        after = self.published.after(positions, moves)
        rows = sum(map(self._flush, moves))
        self._files.write_file(_STATE, json.dumps(after.to_json()).encode())
        self.published = after
        self.rows += rows
        self._finish()
        shutil.rmtree(stage, ignore_errors=True)

    def compared(self) -> dict[str, AuditedTopic]:
        """Return what the last audit without findings saw, by topic; none where that is in doubt.

        The file is a note, and may be deleted at any time.
        """
        if not self._files.exists(_COMPARED):
            return {}
        try:
            found = json.loads(self._files.read_file(_COMPARED))
            return {topic: known_from_json(each) for topic, each in found.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            return {}

    def note_compared(self, topics: Mapping[str, AuditedTopic]) -> None:
        """Note what an audit saw that found nothing wrong."""
        told = {topic: each.to_json() for topic, each in topics.items()}
        self._files.write_file(_COMPARED, json.dumps(told).encode())

    def _moves(self, stage: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for folder, _, names in sorted(os.walk(os.path.join(self.path, stage))):
            for name in sorted(names):
                if name.endswith(".parquet") and not is_hidden(name):
                    old = os.path.relpath(os.path.join(folder, name), self.path)
                    where = os.path.relpath(os.path.dirname(old), stage)
                    new = f"{self.published.number:08d}-{len(found):05d}.parquet"
                    found[old] = os.path.join(where, new)
        return found

    def _flush(self, name: str) -> int:
        """Put a file on the disk, and return how many rows it has."""
        fd = self._files.open(name)
        try:
            self._files.sync(fd)
        finally:
            self._files.close(fd)
        rows: int = parquet.read_metadata(os.path.join(self.path, name)).num_rows
        return rows

    def _finish(self) -> None:
        """Do the renames of the last batch that are still to do."""
        folders = set()
        for old, new in self.published.moves.items():
            if self._files.exists(old):
                os.makedirs(os.path.join(self.path, os.path.dirname(new)), exist_ok=True)
                self._files.rename(old, new)
                folders |= {os.path.dirname(new), os.path.dirname(os.path.dirname(new)), ""}
            elif not self._files.exists(new):
                raise CorruptionError(
                    "a file of the last batch is gone", path=os.path.join(self.path, new)
                )
        for folder in sorted(folders):
            self._files.sync_directory(folder)

    def _read(self) -> LoadedTotals:
        if not self._files.exists(_STATE):
            return LoadedTotals()
        found = json.loads(self._files.read_file(_STATE))
        return LoadedTotals(found["number"], from_json(found["positions"]), found["moves"])

    def _lock(self) -> None:
        fd = self._files.open(_LOCK, write=True, create=True)
        if not self._files.try_lock(fd):
            raise LockTimeoutError("another pipeline loads into this directory", path=self.path)
