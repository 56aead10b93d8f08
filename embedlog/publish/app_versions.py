"""How far each application has published, so that a repetition is recognised.

A marker is a row of `state`, written in the transaction that publishes.  There
are two kinds:

- *By counter*, such as a query (`Publication.source`): its last publication,
  whichever topics that wrote to.  A counter never gives a version twice, so
  what is at or below this one was published.
- *By name and topic*: the last publication under a name, such as the path of a
  checkpoint or a ``txnAppId``, to this topic.  It tells a query that starts
  over (another counter under the same name) from one that goes on.  A topic
  that is deleted and created again has another id, so it has no markers: what
  starts over there publishes nothing twice.

Markers are kept for as long as there are few (`KEPT`).  Beyond that, those go
that were not written for `IDLE_MS`, by a clock that a change of the wall clock
does not move (P17).
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from embedlog import catalog, kv
from embedlog.checksum import seal, unseal
from embedlog.errors import CorruptionError

ROWS = b"M"
ANY_TOPIC = 0
"""Stands in the key for a topic's id in a marker by counter; ids of topics begin at 1."""
KEPT = 1000
"""So many markers are kept however old they are."""
IDLE_MS = 30 * 24 * 60 * 60 * 1000
"""Of more than `KEPT` markers, those are dropped that were not written for so long."""
CHECK_INTERVAL = 64
"""After so many publications it is checked whether there are too many markers."""

_TOPIC = struct.Struct(">Q")
_CLOCK_KEY = catalog.ROOT + b"publications"
_CLOCK = struct.Struct(">QQq")
_BELIEVED_OFF_MS = 24 * 60 * 60 * 1000
"""How long, at most, a machine is believed to have been switched off between two boots."""

_logger = logging.getLogger("embedlog")


class AppVersion(NamedTuple):
    """The last publication by a counter, or under a name to one topic."""

    version: int
    """Its number by the application's count, such as a batch id."""
    source: str
    """The counter, such as a query's id: versions of another one cannot be compared with it."""
    run: str
    """The process, or attempt, that published it; for messages."""
    records: int
    time_ms: int
    """When, by the wall clock; for messages."""
    elapsed_ms: int = 0
    """When, as `advance_clock` returned it."""
    ends: tuple[tuple[bytes, int, int], ...] = ()
    """Where it ended in each partition, by its key: leader epoch and offset."""

    def pack(self) -> bytes:
        """Return the row as stored, without its checksum."""
        ends = [[key.hex(), epoch, offset] for key, epoch, offset in self.ends]
        return json.dumps(self._replace(ends=())._asdict() | {"ends": ends}).encode()


def _unpack(row: bytes) -> AppVersion:
    fields: dict[str, Any] = json.loads(row)
    ends = tuple((bytes.fromhex(key), epoch, offset) for key, epoch, offset in fields["ends"])
    return AppVersion(**fields | {"ends": ends})


def _key(name: str, topic_id: int) -> bytes:
    data = name.encode()
    # A key of LMDB has at most 511 bytes; a name may be a path.
    data = data if len(data) <= 400 else hashlib.sha256(data).hexdigest().encode()
    return ROWS + data + _TOPIC.pack(topic_id)


def get(txn: kv.Txn, name: str, topic_id: int = ANY_TOPIC) -> AppVersion | None:
    """Return a marker; None if there was no such publication.

    Args:
        txn: A transaction of `state`.
        name: The counter, or the name that was published under.
        topic_id: The topic; left out for a marker by counter.

    Raises:
        CorruptionError: The row is damaged.
    """
    key = _key(name, topic_id)
    row = txn.get(key)
    return None if row is None else _unpack(unseal(row, f"marker {name}", key))


def put(txn: kv.Txn, name: str, topic_id: int, marker: AppVersion) -> None:
    """Write a marker over the one before it."""
    key = _key(name, topic_id)
    txn.put(key, seal(marker.pack(), key))


def every(txn: kv.Txn) -> dict[tuple[str, int], AppVersion]:
    """Return all markers that are not damaged, by name and topic id."""
    return {(key[1:-8].decode(), _TOPIC.unpack(key[-8:])[0]): one for key, one in _readable(txn)}


def _readable(txn: kv.Txn) -> Iterator[tuple[bytes, AppVersion]]:
    """Leave out damaged rows: the application that asks for one gets the error."""
    for key, row in kv.rows(txn, ROWS):
        try:
            yield bytes(key), _unpack(unseal(row, "a marker", bytes(key)))
        except CorruptionError:
            continue


def is_lost(txn: kv.Txn, marker: AppVersion) -> bool:
    """Return whether the publication of a marker is not in the log as it was published.

    A power cut or a truncation took a part of it, or all its topics were deleted.
    """
    there = [end for end in marker.ends if catalog.partition(txn, end[0]) is not None]
    if marker.ends and not there:
        return True
    return any(
        later > epoch and start < offset
        for key, epoch, offset in there
        for later, start in catalog.epochs(txn, key)
    )


# Dropping markers


class ClockState(NamedTuple):
    """What the clocks of a machine show at one instant."""

    boot: str
    uptime_ms: int
    time_ms: int
    """The wall clock, which may jump."""


def advance_clock(txn: kv.Txn, clocks: ClockState) -> int:
    """Return how long publications were made in this log, and note what the clocks show.

    It counts milliseconds, and never counts more of them than have passed,
    however the wall clock is set.  Within a boot it follows the uptime.  From one
    boot to the next it follows the wall clock, but for at most a day more than
    the machine has been up.
    """
    before = _clock_row(txn)
    if before is None:
        elapsed = max((marker.elapsed_ms for _, marker in _readable(txn)), default=0)
    else:
        elapsed, uptime_ms, time_ms = _CLOCK.unpack_from(before)
        if before[_CLOCK.size :].decode() == clocks.boot:
            passed = clocks.uptime_ms - uptime_ms
        else:
            passed = min(clocks.time_ms - time_ms, clocks.uptime_ms + _BELIEVED_OFF_MS)
        elapsed += max(passed, 0)
    value = _CLOCK.pack(elapsed, clocks.uptime_ms, clocks.time_ms) + clocks.boot.encode()
    txn.put(_CLOCK_KEY, seal(value, _CLOCK_KEY))
    return elapsed


def _clock_row(txn: kv.Txn) -> bytes | None:
    row = txn.get(_CLOCK_KEY)
    if row is None:
        return None
    try:
        return unseal(row, "the clock of publications", _CLOCK_KEY)
    except CorruptionError:
        _logger.warning("the clock of publications is damaged; it continues from the last marker")
        return None


def expire(txn: kv.Txn, elapsed_ms: int) -> None:
    """Drop the markers of deleted topics, and the oldest idle ones if there are too many.

    Args:
        txn: A transaction of `state`.
        elapsed_ms: Now, as `advance_clock` returned it.
    """
    kept: list[tuple[int, bytes]] = []
    for key, marker in list(_readable(txn)):
        topic_id = _TOPIC.unpack(key[-8:])[0]
        first = catalog.PARTITION + catalog.PARTITION_KEY.pack(topic_id, 0)
        if topic_id != ANY_TOPIC and txn.get(first) is None:
            txn.delete(key)
        else:
            kept.append((marker.elapsed_ms, key))
    too_many = max(len(kept) - KEPT, 0)
    for written_ms, key in sorted(kept)[:too_many]:
        if written_ms + IDLE_MS < elapsed_ms:
            txn.delete(key)
