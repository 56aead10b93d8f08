"""Processes that are killed while they register schemas."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path

from support.forks import Child
from support.patience import patient
from support.tiers import choose

import embedlog

PAUSES = random.Random(5)


def schema_of(number: int) -> dict[str, object]:
    """Return a schema that no other number has."""
    fields = [{"name": f"f{number}", "type": "int", "default": 0}]
    return {"type": "record", "name": "R", "fields": fields}


def register(root: Path, journal: Path, first: int) -> None:
    """Register schemas under two subjects until the process is killed; note each id."""
    log = embedlog.open(root, maintenance=False)
    log.schema_registry.set_compatibility("NONE")
    with journal.open("ab", buffering=0) as file:
        for number in range(first, first + 100_000):
            for subject in ("a", "b"):
                schema_id = log.schema_registry.register(subject, schema_of(number))
                file.write(b"%d %d %b\n" % (number, schema_id, subject.encode()))


def test_a_kill_while_schemas_are_registered_loses_none_and_assigns_no_id_twice(
    tmp_path: Path,
) -> None:
    """P1: what was acknowledged is in the registry; a version never lacks its schema."""
    root, journal = tmp_path / "log", tmp_path / "journal"
    for kill in range(choose(test=2, all=60)):
        before = journal.stat().st_size if journal.exists() else 0
        child = Child(partial(register, root, journal, kill * 100_000))
        deadline = time.monotonic() + patient(30)
        while not (journal.exists() and journal.stat().st_size > before):
            assert time.monotonic() < deadline, "it registers nothing"
            time.sleep(0.005)
        time.sleep(PAUSES.random() * 0.03)
        child.kill()
        with embedlog.open(root, maintenance=False) as log:
            acknowledged: dict[int, int] = {}
            for line in journal.read_bytes().splitlines():
                number, schema_id, subject = line.split()
                entry = log.schema_registry.lookup(subject.decode(), schema_of(int(number)))
                assert entry.id == int(schema_id)
                assert acknowledged.setdefault(int(number), int(schema_id)) == int(schema_id)
            assert len({*acknowledged.values()}) == len(acknowledged)
            for subject in log.schema_registry.subjects():
                numbers = log.schema_registry.versions(subject)
                assert numbers == list(range(1, len(numbers) + 1))
                # At most one more than was acknowledged: the one in flight.
                assert len(numbers) <= len(acknowledged) + kill + 1
                for number in numbers:
                    log.schema_registry.version(subject, number)
            assert log.housekeeping.verify() == []
