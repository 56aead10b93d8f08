"""A log over three directories: losing one, bringing it back, and comparing the copies."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import embedlog
from embedlog.record import RecordMetadata, TopicPartition
from embedlog.replication import catch_up
from embedlog.replication import root as replicated_root
from embedlog.replication.isr import PartitionAssignment


class Directories:
    """The directories of a log, which a test can take away and put back.

    >>> directories = Directories(tmp_path)                                 # doctest: +SKIP
    >>> with directories.open() as log:                                     # doctest: +SKIP
    ...     directories.lose(log, 1)
    """

    def __init__(self, base: Path, count: int = 3) -> None:
        self.paths = [base / f"disk{number}" / "log" for number in range(1, count + 1)]
        for path in self.paths:
            path.parent.mkdir(parents=True)

    def open(self, **options: Any) -> embedlog.Log:
        """Open the log without housekeeping: a test calls its steps itself."""
        return embedlog.open(self.paths, **{"maintenance": False, **options})

    def alone(self, directory: int) -> embedlog.Log:
        """Open the log at the path of one directory."""
        return embedlog.open(self.path(directory), maintenance=False)

    def path(self, directory: int) -> Path:
        """Return where a directory, counted from 1 as in the log, is."""
        return self.paths[directory - 1]

    def take(self, directory: int) -> None:
        """Take a directory away, as when its disk is unmounted; no process notices yet."""
        self.path(directory).rename(self.aside(directory))

    def lose(self, log: embedlog.Log, directory: int) -> None:
        """Take a directory away, and have the log notice it."""
        self.take(directory)
        notice(log)

    def put_back(self, directory: int) -> None:
        """Put it back as it was."""
        self.aside(directory).rename(self.path(directory))

    def replace(self, directory: int) -> None:
        """Put a new, empty directory in its place."""
        shutil.rmtree(self.aside(directory))
        self.path(directory).mkdir()

    def aside(self, directory: int) -> Path:
        """Return where a directory is that was taken away."""
        return self.path(directory).with_name("unmounted")

    def copies(self, topic: str) -> dict[int, dict[str, str]]:
        """Return the checksums of the segment files of a topic, by directory and path."""
        return {
            number: {
                str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
                for file in sorted(path.glob(f"topics/{topic}-*/*/*.arrows"))
            }
            for number, path in enumerate(self.paths, start=1)
            if path.exists()
        }

    def assert_equal_copies(self, topic: str, count: int | None = None) -> None:
        """Fail unless so many directories (by default all) have files of a topic, and equal ones.

        The others may be there, but must have no files of the topic.
        """
        expected = len(self.paths) if count is None else count
        copies = {number: files for number, files in self.copies(topic).items() if files}
        assert len(copies) == expected, f"{topic} is in directories {[*copies]}, not in {expected}"
        first, *others = copies.values()
        assert all(other == first for other in others), f"the copies of {topic} differ: {copies}"


def notice(log: embedlog.Log) -> None:
    """Have the log look at its directories, as the housekeeping does."""
    log.root.controller.check_directories()


def bring_back(log: embedlog.Log) -> list[int]:
    """Bring back all directories that work, and have them catch up; return which came back."""
    returned = replicated_root.try_bring_back(log.root)
    catch_up.replicate(log.root)
    return sorted(returned)


def assignment(log: embedlog.Log, topic: str, partition: int = 0) -> PartitionAssignment:
    """Return the assignment of a partition."""
    found = log.root.controller.assignment(log.root.topic(topic).key(partition))
    assert found is not None
    return found


def send(
    log: embedlog.Log, topic: str, sent: Iterable[bytes], **config: Any
) -> list[RecordMetadata]:
    """Send values with a producer of their own, each after the one before is acknowledged."""
    with log.producer(**config) as producer:
        return [producer.send(topic, value).result() for value in sent]


def numbered(prefix: bytes, count: int) -> list[bytes]:
    """Return values that begin with a prefix and end with their number."""
    return [b"%s-%d" % (prefix, number) for number in range(count)]


def values(log: embedlog.Log, topic: str) -> list[bytes]:
    """Return the values of a topic, by partition and offset."""
    partitions = range(log.root.partitions(topic))
    records = {TopicPartition(topic, number): [] for number in partitions}
    for record in log.topic(topic):
        records[TopicPartition(topic, record.partition)].append(record.value)
    return [value for partition in sorted(records) for value in records[partition]]
