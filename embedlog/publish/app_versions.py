"""How far each application has published, so that a repeated publication is recognised.

An `AppVersion` is a row of `state`, written in the transaction that publishes.  There
are two kinds:

- *By source*, such as a query (`Publication.source`): its last publication to any topics.
  A source never uses a version twice, so all versions up to this one were published.
- *By name and topic*: the last publication under a name, such as the path of a
  checkpoint or a ``txnAppId``, to this topic.  It shows whether a query starts over
  (another source under the same name) or continues.  A topic that is deleted and created
  again has another id and no rows, so an application that starts over there publishes
  nothing twice.

Up to `MAX_ROWS` rows stay however old they are.  If there are more, those that were not
written for `IDLE_MS` are deleted, by a clock that setting the wall clock does not move.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any, NamedTuple

from embedlog import catalog, keyspace, kv
from embedlog.catalog import PARTITIONS
from embedlog.errors import CorruptionError
from embedlog.keyspace import PARTITION_KEY, PUBLICATION_CLOCK

ANY_TOPIC = 0
"""Stands for a topic's id in the key of a row by source; ids of topics begin at 1."""
MAX_ROWS = 1000
IDLE_MS = 30 * 24 * 60 * 60 * 1000
CHECK_INTERVAL = 64
"""Publications between two checks for too many rows."""

_MOST_OFF_MS = 24 * 60 * 60 * 1000
"""How long, at most, a machine counts as switched off between two boots."""

_logger = logging.getLogger("embedlog.publish")


class AppVersion(NamedTuple):
    """The last publication by a source, or under a name to one topic."""

    version: int
    """Its number, counted by the application, such as a batch id."""
    source: str
    """What counts the versions, such as a query's id; only its own versions are comparable."""
    run: str
    """The process, or attempt, that published it; for messages."""
    records: int
    time_ms: int
    """When, by the wall clock; for messages."""
    elapsed_ms: int = 0
    """When, as `advance_clock` returned it."""
    ends: tuple[tuple[bytes, int, int], ...] = ()
    """Where it ended in each partition, by its key: leader epoch and offset."""


def _from_fields(fields: dict[str, Any]) -> AppVersion:
    ends = tuple((bytes.fromhex(key), epoch, offset) for key, epoch, offset in fields["ends"])
    return AppVersion(**fields | {"ends": ends})


def _to_fields(row: AppVersion) -> tuple[dict[str, Any]]:
    ends = [[key.hex(), epoch, offset] for key, epoch, offset in row.ends]
    return (row._asdict() | {"ends": ends},)


APP_VERSIONS = keyspace.APP_VERSIONS.typed(_from_fields, _to_fields)


def name_field(name: str) -> bytes:
    """Return a name as it stands in keys."""
    data = name.encode()
    # A key of LMDB has at most 511 bytes; a name may be a path.
    return data if len(data) <= 400 else hashlib.sha256(data).hexdigest().encode()


def get(txn: kv.Txn | kv.Store, name: str, topic_id: int = ANY_TOPIC) -> AppVersion | None:
    """Return a row; None if there was no such publication.

    Args:
        txn: A transaction of `state`, or `state` itself.
        name: The source, or the name of the application.
        topic_id: The topic; left out for a row by source.

    Raises:
        CorruptionError: The row is damaged.
    """
    return APP_VERSIONS.get(txn, name_field(name), topic_id)


def put(txn: kv.Txn, name: str, topic_id: int, row: AppVersion) -> None:
    """Write a row, replacing the previous one."""
    APP_VERSIONS.put(txn, name_field(name), topic_id, value=row)


def is_lost(txn: kv.Txn, row: AppVersion) -> bool:
    """Return whether the log no longer has all of the publication of a row.

    A power cut or a truncation removed a part of it, or all its topics were deleted.
    """
    ends = [end for end in row.ends if PARTITIONS.exists(txn, end[0])]
    if row.ends and not ends:
        return True
    return any(
        later > epoch and start < offset
        for key, epoch, offset in ends
        for later, start in catalog.epochs(txn, key)
    )


# Deleting old rows


class ClockState(NamedTuple):
    """What the clocks of a machine show at the same time."""

    boot: str
    uptime_ms: int
    time_ms: int
    """The wall clock, which may jump."""


def advance_clock(txn: kv.Txn, clocks: ClockState) -> int:
    """Return the time of this log's clock of publications in ms, and store what the clocks show.

    It never advances by more than the time that has passed, however the wall clock is
    set.  Within a boot it follows the uptime.  From one boot to the next it follows the
    wall clock, but at most for a day more than the machine has been up.
    """
    try:
        before = PUBLICATION_CLOCK.get(txn)
    except CorruptionError:
        _logger.warning(
            "The clock of publications is damaged; it continues from the last publication"
        )
        before = None
    if before is None:
        elapsed_ms = max((row.elapsed_ms for _, row in APP_VERSIONS.scan_valid(txn)), default=0)
    else:
        if before.boot_id == clocks.boot:
            passed = clocks.uptime_ms - before.uptime_ms
        else:
            passed = min(clocks.time_ms - before.time_ms, clocks.uptime_ms + _MOST_OFF_MS)
        elapsed_ms = before.elapsed_ms + max(passed, 0)
    PUBLICATION_CLOCK.put(txn, value=(elapsed_ms, clocks.uptime_ms, clocks.time_ms, clocks.boot))
    return int(elapsed_ms)


def expire(txn: kv.Txn, elapsed_ms: int) -> None:
    """Delete the rows of deleted topics, and the oldest idle ones if there are too many.

    Args:
        txn: A transaction of `state`.
        elapsed_ms: Now, as `advance_clock` returned it.
    """
    rows: list[tuple[int, tuple[str, int]]] = []
    # An application that reads a damaged row gets the error.
    for key, row in list(APP_VERSIONS.scan_valid(txn)):
        topic_id = key[1]
        if topic_id == ANY_TOPIC or PARTITIONS.exists(txn, PARTITION_KEY.pack(topic_id, 0)):
            rows.append((row.elapsed_ms, key))
        else:
            APP_VERSIONS.delete(txn, *key)
    for written_ms, key in sorted(rows)[: max(len(rows) - MAX_ROWS, 0)]:
        if written_ms + IDLE_MS < elapsed_ms:
            APP_VERSIONS.delete(txn, *key)
