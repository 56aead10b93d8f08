"""How far each application has published: what makes a repetition a repetition.

A row of `state` for each name under which an application publishes, written in
the transaction that publishes.  Whoever repeats what an application published
last, because it died before it heard of it, is told so by the row, and nothing
is published twice.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from embedlog import catalog, kv
from embedlog.checksum import seal, unseal

ROWS = b"M"
KEPT_MS = 30 * 24 * 60 * 60 * 1000
"""An application that published nothing for so long is forgotten."""


class Marker(NamedTuple):
    """The last publication of an application."""

    version: int
    """Its number by the application's count, such as a batch id."""
    source: str
    """What counts, such as a query's checkpoint: another one begins to count anew."""
    run: str
    """The process, or attempt, that published it: for those who read about it."""
    records: int
    time_ms: int
    ends: tuple[tuple[bytes, int, int], ...] = ()
    """Where it ended in each partition, by its key: leader epoch and offset."""

    def pack(self) -> bytes:
        """Return the row as stored, but for its checksum."""
        ends = [[key.hex(), epoch, offset] for key, epoch, offset in self.ends]
        return json.dumps(self._replace(ends=())._asdict() | {"ends": ends}).encode()


def _unpack(row: bytes) -> Marker:
    fields: dict[str, Any] = json.loads(row)
    ends = tuple((bytes.fromhex(key), epoch, offset) for key, epoch, offset in fields["ends"])
    return Marker(**fields | {"ends": ends})


def _key(name: str) -> bytes:
    data = name.encode()
    # A key of LMDB has at most 511 bytes; a name may be a path.
    return ROWS + (data if len(data) <= 400 else hashlib.sha256(data).hexdigest().encode())


def get(txn: kv.Txn, name: str) -> Marker | None:
    """Return what an application published last."""
    row = txn.get(_key(name))
    return None if row is None else _unpack(unseal(row, f"marker {name}", _key(name)))


def put(txn: kv.Txn, name: str, marker: Marker) -> None:
    """Note what an application published last."""
    txn.put(_key(name), seal(marker.pack(), _key(name)))


def every(txn: kv.Txn) -> dict[str, Marker]:
    """Return the markers of all applications, by name."""
    return {
        key[1:].decode(): _unpack(unseal(row, "a marker", bytes(key)))
        for key, row in kv.rows(txn, ROWS)
    }


def expire(txn: kv.Txn, now_ms: int, kept_ms: int) -> None:
    """Forget the applications that published nothing for a long time."""
    for name, marker in every(txn).items():
        if marker.time_ms + kept_ms < now_ms:
            txn.delete(ROWS + name.encode())


def is_lost(txn: kv.Txn, marker: Marker) -> bool:
    """Whether a power cut or a truncation took away a part of what a marker is about."""
    return any(
        later > epoch and start < offset
        for key, epoch, offset in marker.ends
        for later, start in _epochs(txn, key)
    )


def _epochs(txn: kv.Txn, key: bytes) -> list[tuple[int, int]]:
    # Of a topic that was deleted nothing is known, and nothing can be published again.
    return catalog.epochs(txn, key) if catalog.partition(txn, key) is not None else []
