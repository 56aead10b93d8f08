"""Stages and publishes small files of known records."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

from embedlog.files import process_id
from embedlog.publish import staging, transaction
from embedlog.publish.staging import StagedFile, StagedFileWriter
from embedlog.publish.transaction import Publication
from embedlog.root.root import Root
from support.roots import encoded

_file_numbers = itertools.count()


def stage(root: Root, **values_by_partition: list[bytes]) -> StagedFile:
    """Stage values for partitions, as ``t_0=[b"a", b"b"]``, in one batch for each value."""
    name = f"{next(_file_numbers)}.stage"
    writer = StagedFileWriter(root.context.files, directory(), name)
    for partition_name, values in values_by_partition.items():
        topic, _, number = partition_name.rpartition("_")
        for value in values:
            writer.add(topic, root.topic(topic).id, int(number), encoded(value))
    return writer.finish()


def directory(job: str = "job") -> str:
    """Return the directory of the files that this process stages."""
    owner = process_id.process()
    assert owner is not None
    return staging.job_directory(str(owner), 0, job)


def escalation() -> Any:
    """Let publications escalate to the lock of the log, as those over very many partitions."""
    return patch.object(transaction, "_DESCRIPTORS", 1 << 30)


def publish(
    root: Root, staged: list[StagedFile], version: int | None = None, **options: Any
) -> Any:
    """Publish staged files; with a version, as that version of the application ``app``."""
    source = options.pop("source", "q")
    publication = None
    if version is not None:
        publication = Publication(
            "app", version, source, options.pop("run", "r1"), options.pop("place", "")
        )
    return transaction.publish(root, staged, publication, **options)
