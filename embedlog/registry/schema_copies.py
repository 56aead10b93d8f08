"""What another log needs to read the Avro of a topic: the schemas of the registry, by their ids.

Records begin with the id that their schema has in the log that they were written to.  A copy of
the topic gets the schemas with the same ids where these are free, and with other ids where they
are not; those must be written into the records then.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from embedlog import kv
from embedlog.catalog import last_number, next_number, raise_number
from embedlog.keyspace import (
    COMPATIBILITY_LEVELS,
    REGISTERED_SCHEMAS,
    SCHEMA_FINGERPRINTS,
    SUBJECT_VERSIONS,
)
from embedlog.registry.avro_schema import AvroSchema
from embedlog.root.root import Root

_FIELDS = ("key", "value")


class SubjectCopy(NamedTuple):
    """A subject of a topic: `TOPIC-key` or `TOPIC-value`."""

    versions: tuple[tuple[int, int, int], ...]
    """Number, id of the schema, and whether it was deleted."""
    level: str | None
    """Its own compatibility level."""


class RegistryCopy(NamedTuple):
    """The registry of a log, as a topic of Avro needs it."""

    schemas: tuple[tuple[int, str], ...]
    """All schemas with their ids: a record may have any of them."""
    subjects: Mapping[str, SubjectCopy]
    """Those of the topic, by ``key`` and ``value``: the fields that are Avro."""


def all_schemas(root: Root) -> tuple[tuple[int, str], ...]:
    """Return the schemas of a log with their ids."""
    state = root.context.state
    rows = state.read(lambda txn: list(REGISTERED_SCHEMAS.scan(txn)))
    return tuple((number, text) for (number,), text in rows)


def registry_of(
    root: Root, topic: str, config: Mapping[str, object], schemas: tuple[tuple[int, str], ...]
) -> RegistryCopy | None:
    """Return the part of the registry that a topic needs; None if it has no Avro.

    Its keys or values are Avro if its setting says so, or if they have a subject.

    Args:
        root: The log.
        topic: The topic.
        config: Its settings.
        schemas: As `all_schemas` returns them.
    """
    if not schemas:
        return None

    def step(txn: kv.Txn) -> dict[str, SubjectCopy]:
        subjects = {}
        for field in _FIELDS:
            subject = f"{topic}-{field}"
            rows = SUBJECT_VERSIONS.scan(txn, subject)
            versions = tuple((number, *version) for (_, number), version in rows)
            if versions or config.get(f"{field}.serializer") == "avro":
                subjects[field] = SubjectCopy(versions, COMPATIBILITY_LEVELS.get(txn, subject))
        return subjects

    subjects = root.context.state.read(step)
    return RegistryCopy(schemas, subjects) if subjects else None


def copy_registry(root: Root, topic: str, copied: RegistryCopy, *, own: bool) -> dict[int, int]:
    """Add the schemas of another log, and the versions of a topic's subjects.

    Args:
        root: The log to add them to.
        topic: The name of the topic in it.
        copied: What the topic needs.
        own: Whether the log registers versions of its own: its subjects stay as they are then.

    Returns the id that each schema has here, by its id there.
    """
    prints = {number: AvroSchema(text, None).fingerprint for number, text in copied.schemas}
    step = partial(_copy, topic=topic, copied=copied, prints=prints, own=own)
    return root.context.state.write(step)


def _copy(
    txn: kv.Txn, topic: str, copied: RegistryCopy, prints: Mapping[int, bytes], own: bool
) -> dict[int, int]:
    ids = {}
    for number, text in copied.schemas:
        known = SCHEMA_FINGERPRINTS.get(txn, prints[number])
        if known is None:
            # An id that was assigned before is never assigned again, even if its schema was lost.
            is_free = number > last_number(txn, "schema")
            known = number if is_free else next_number(txn, "schema")
            raise_number(txn, "schema", known)
            REGISTERED_SCHEMAS.put(txn, known, value=text)
            SCHEMA_FINGERPRINTS.put(txn, prints[number], value=known)
        ids[number] = known
    for field, (versions, level) in copied.subjects.items():
        subject = f"{topic}-{field}"
        present = {number: row for (_, number), row in SUBJECT_VERSIONS.scan(txn, subject)}
        if own and present:
            continue
        for number, schema_id, deleted in versions:
            before = present.get(number, (ids[schema_id], None))
            if before[0] == ids[schema_id] and before[1] != deleted:
                SUBJECT_VERSIONS.put(txn, subject, number, value=(ids[schema_id], deleted))
        if level is not None:
            COMPATIBILITY_LEVELS.put(txn, subject, value=level)
    return ids
