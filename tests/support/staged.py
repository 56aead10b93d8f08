"""Staging and publishing in tests: small files of known records."""

from __future__ import annotations

import itertools
from typing import Any

from embedlog.files import processes
from embedlog.log import publishing, staging
from embedlog.log.publishing import Publication
from embedlog.log.root import Root
from embedlog.log.staging import Stage, Staged
from support.roots import encoded

_numbers = itertools.count()


def stage(root: Root, **parts: list[bytes]) -> Staged:
    """Stage values for partitions, given as ``t_0=[b"a", b"b"]``, one batch for each value."""
    writer = Stage(root.context.files, directory(), f"{next(_numbers)}.stage")
    for name, values in parts.items():
        topic, _, number = name.rpartition("_")
        for value in values:
            writer.add(topic, root.topic(topic).id, int(number), encoded(value))
    return writer.finish()


def directory(job: str = "job") -> str:
    owner = processes.process()
    assert owner is not None
    return staging.job_directory(str(owner), 0, job)


def publish(root: Root, staged: list[Staged], version: int | None = None, **options: Any) -> Any:
    """Publish as application ``app``, if there is a version."""
    source = options.pop("source", "q")
    who = None
    if version is not None:
        who = Publication(
            "app", version, source, options.pop("run", "r1"), options.pop("place", "")
        )
    return publishing.publish(root, staged, who, **options)
