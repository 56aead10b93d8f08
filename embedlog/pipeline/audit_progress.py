"""What an audit without findings has seen: the next one need not look at it again.

A file that is written is never written again, and records of a log do not
change.  So while the same files are there, with the same sizes and times, and
the log is the same one, they agree as they did.  On any doubt all is read.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedlog.api import Log

Stamp = tuple[int, int]
"""Bytes of a file, and when it was written, in nanoseconds."""

_FORM = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedTopic:
    """One topic, as it was compared."""

    topic_id: int | None = None
    ends: Mapping[int, int] = field(default_factory=dict)
    """Up to where, by partition."""

    epochs: Mapping[int, int] = field(default_factory=dict)
    """The leader epochs of the partitions: a new one begins where a log was cut."""

    files: Mapping[str, Stamp] = field(default_factory=dict)
    hours: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)
    """Records by hour: in the files, of these compared, in the log."""

    def counters(self) -> tuple[Counter[int], Counter[int], Counter[int]]:
        """Return the hours as three counters."""
        files, compared, log = (
            Counter({hour: each[place] for hour, each in self.hours.items() if each[place]})
            for place in range(3)
        )
        return files, compared, log

    def still(self, now: AuditedTopic) -> bool:
        """Whether all of it is as it was, and there is at most more of it."""
        return (
            self.topic_id == now.topic_id
            and self.files.items() <= now.files.items()
            and self.epochs.items() <= now.epochs.items()
            and all(end <= now.ends.get(partition, 0) for partition, end in self.ends.items())
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as a file has it."""
        return {
            "form": _FORM,
            "topic_id": self.topic_id,
            **{name: list(getattr(self, name).items()) for name in _MAPS},
        }


_MAPS = ("ends", "epochs", "files", "hours")
NOTHING = AuditedTopic()


def look(log: Log, topic: str, folder: str, ends: Mapping[int, int]) -> AuditedTopic:
    """Return what there is of a topic now, not compared yet."""
    there = log.root.topics().get(topic)
    epochs = {}
    if there is not None:
        numbers = range(there.partitions)
        epochs = {one: log.root.partition(topic, one).tail().leader_epoch for one in numbers}
    return AuditedTopic(
        topic_id=None if there is None else there.id, ends=ends, epochs=epochs, files=files(folder)
    )


def files(folder: str) -> dict[str, Stamp]:
    """Return the files below a directory that readers of data sets see."""
    found = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_hidden(name)]
        for name in names:
            if not is_hidden(name):
                path = os.path.join(place, name)
                facts = os.stat(path)
                found[os.path.relpath(path, folder)] = facts.st_size, facts.st_mtime_ns
    return found


def from_json(found: Mapping[str, Any]) -> AuditedTopic:
    """Return what `to_json` made; nothing, of another form than this one's."""
    if found.get("form") != _FORM:
        return NOTHING
    ends, epochs, stamps, hours = (dict(found[name]) for name in _MAPS)
    return AuditedTopic(
        topic_id=found["topic_id"],
        ends=ends,
        epochs=epochs,
        files={name: (size, time) for name, (size, time) in stamps.items()},
        hours={hour: (here, compared, log) for hour, (here, compared, log) in hours.items()},
    )


def is_hidden(name: str) -> bool:
    """Whether readers of data sets pass over a file or directory of that name."""
    return name.startswith((".", "_"))
