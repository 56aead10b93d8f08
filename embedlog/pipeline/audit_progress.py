"""What an audit without problems has compared, so that the next one need not read it again.

A published file is never written again, and the records of a log do not change.
So while the same files exist, with the same sizes and times, and the log is the
same one, they still agree.  In any doubt everything is read.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedlog.api import Log

FileStamp = tuple[int, int]
"""The size of a file in bytes, and its modification time in nanoseconds."""

_JSON_VERSION = 1
_MAPS = ("ends", "epochs", "files", "hours")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedTopic:
    """One topic, its log and its files, when they were compared."""

    topic_id: int | None = None
    ends: Mapping[int, int] = field(default_factory=dict)
    """The offset before which each partition was compared."""

    epochs: Mapping[int, int] = field(default_factory=dict)
    """The leader epoch of each partition: a new one begins where a log was truncated."""

    files: Mapping[str, FileStamp] = field(default_factory=dict)
    """The files of the topic, by their paths relative to its directory."""

    hours: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)
    """Records by hour: in the files, those of them that were compared, and in the log."""

    def counters(self) -> tuple[Counter[int], Counter[int], Counter[int]]:
        """Return the three numbers of `hours` as counters by hour."""
        files, compared, log = (
            Counter({hour: counts[i] for hour, counts in self.hours.items() if counts[i]})
            for i in range(3)
        )
        return files, compared, log

    def is_prefix_of(self, current: AuditedTopic) -> bool:
        """Whether nothing of this has changed, though there may be more now."""
        return (
            self.topic_id == current.topic_id
            and self.files.items() <= current.files.items()
            and self.epochs.items() <= current.epochs.items()
            and all(end <= current.ends.get(number, 0) for number, end in self.ends.items())
        )

    def to_json(self) -> dict[str, Any]:
        """Return JSON for the file ``.pipeline/compared``."""
        return {
            "form": _JSON_VERSION,
            "topic_id": self.topic_id,
            **{name: list(getattr(self, name).items()) for name in _MAPS},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AuditedTopic:
        """Return what `to_json` wrote, or `NOT_AUDITED` for another version of the JSON."""
        if value.get("form") != _JSON_VERSION:
            return NOT_AUDITED
        ends, epochs, stamps, hours = (dict(value[name]) for name in _MAPS)
        return cls(
            topic_id=value["topic_id"],
            ends=ends,
            epochs=epochs,
            files={name: (size, time_ns) for name, (size, time_ns) in stamps.items()},
            hours={hour: (files, both, log) for hour, (files, both, log) in hours.items()},
        )


NOT_AUDITED = AuditedTopic()


def current_state(log: Log, topic: str, directory: str, ends: Mapping[int, int]) -> AuditedTopic:
    """Return the topic, its log and its files as they are now, before they are compared."""
    info = log.root.topics().get(topic)
    numbers = range(0 if info is None else info.partitions)
    return AuditedTopic(
        topic_id=None if info is None else info.id,
        ends=ends,
        epochs={n: log.root.partition(topic, n).tail().leader_epoch for n in numbers},
        files=visible_files(directory),
    )


def visible_files(directory: str) -> dict[str, FileStamp]:
    """Return the files below a directory that readers of Parquet data sets see."""
    stamps = {}
    for parent, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if not is_hidden(name)]
        for name in names:
            if not is_hidden(name):
                path = os.path.join(parent, name)
                status = os.stat(path)
                stamps[os.path.relpath(path, directory)] = status.st_size, status.st_mtime_ns
    return stamps


def is_hidden(name: str) -> bool:
    """Whether readers of Parquet data sets skip a file or directory of that name."""
    return name.startswith((".", "_"))
