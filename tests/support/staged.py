"""Staging and publishing in tests: small files of known records."""

from __future__ import annotations

import itertools
from typing import Any

from embedlog.files import process_id
from embedlog.publish import staging, transaction
from embedlog.publish.staging import StagedFile, StagedFileWriter
from embedlog.publish.transaction import Publication
from embedlog.root.root import Root
from support.roots import encoded

_numbers = itertools.count()


def stage(root: Root, **parts: list[bytes]) -> StagedFile:
    """Stage values for partitions, given as ``t_0=[b"a", b"b"]``, one batch for each value."""
    writer = StagedFileWriter(root.context.files, directory(), f"{next(_numbers)}.stage")
    for name, values in parts.items():
        topic, _, number = name.rpartition("_")
        for value in values:
            writer.add(topic, root.topic(topic).id, int(number), encoded(value))
    return writer.finish()


def directory(job: str = "job") -> str:
    owner = process_id.process()
    assert owner is not None
    return staging.job_directory(str(owner), 0, job)


def publish(
    root: Root, staged: list[StagedFile], version: int | None = None, **options: Any
) -> Any:
    """Publish as application ``app``, if there is a version."""
    source = options.pop("source", "q")
    who = None
    if version is not None:
        who = Publication(
            "app", version, source, options.pop("run", "r1"), options.pop("place", "")
        )
    return transaction.publish(root, staged, who, **options)
