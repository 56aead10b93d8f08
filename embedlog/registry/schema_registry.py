"""`SchemaRegistry`: subjects, versions and compatibility, with the rules of Confluent's registry.

A schema has an id, which every serialized record begins with.  Equal schemas have one id, also
under different subjects, and ids stay readable when versions or subjects are deleted.  What
must be true of several rows is checked and written in one transaction, so any number of
processes may register at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

from embedlog import kv
from embedlog.catalog import next_number
from embedlog.display import html_table, public_names, text_table
from embedlog.errors import (
    IncompatibleSchemaError,
    InvalidConfigError,
    InvalidSchemaError,
    UnknownSchemaError,
)
from embedlog.hints import Hint
from embedlog.keyspace import (
    COMPATIBILITY_LEVELS,
    REGISTERED_SCHEMAS,
    SCHEMA_FINGERPRINTS,
    SUBJECT_VERSIONS,
)
from embedlog.registry.avro_schema import (
    AvroSchema,
    Schema,
    parse_avro,
    parse_stored,
    reasons_not_readable,
)
from embedlog.root.root import Root

DEFAULT_LEVEL = "BACKWARD"
LEVELS = (
    "NONE",
    *(
        f"{direction}{scope}"
        for direction in ("BACKWARD", "FORWARD", "FULL")
        for scope in ("", "_TRANSITIVE")
    ),
)
"""What a new version must be compatible with; ``_TRANSITIVE`` with all versions, not the last."""
MAX_SUBJECT_BYTES = 400
MAX_ID = (1 << 31) - 1
"""Ids are written with 31 bits."""
_ALL_SUBJECTS = ""


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """A version of a subject."""

    id: int
    """The id of the schema, which records have."""
    subject: str
    version: int
    """From 1; numbers of deleted versions are not used again."""
    schema: str
    """The schema, as JSON."""


class _Version(NamedTuple):
    number: int
    schema_id: int
    deleted: bool


class _Subject(NamedTuple):
    """What decides whether a schema is compatible, as of one transaction."""

    versions: tuple[_Version, ...]
    level: str

    @property
    def current(self) -> list[_Version]:
        return [version for version in self.versions if not version.deleted]

    def to_compare(self) -> list[_Version]:
        """Return the versions that a new one must be compatible with, the latest one first."""
        current = self.current[::-1]
        if self.level == "NONE":
            return []
        return current if self.level.endswith("_TRANSITIVE") else current[:1]


class SchemaRegistry:
    """The schemas of a log: what `Log.schema_registry` returns.

    A subject, such as ``orders-value`` for the values of a topic ``orders``, has versions.
    """

    def __init__(self, root: Root) -> None:
        self._root = root

    # Reading

    def subjects(self) -> list[str]:
        """Return the subjects that have versions, sorted."""

        def step(txn: kv.Txn) -> list[str]:
            return [
                subject
                for subject in SUBJECT_VERSIONS.first_fields(txn)
                if any(not version.deleted for version in _versions(txn, subject))
            ]

        return self._root.context.state.read(step)

    def versions(self, subject: str) -> list[int]:
        """Return the numbers of a subject's versions, in order.

        Raises:
            UnknownSchemaError: There is no such subject.
        """
        return [version.number for version in self._current(subject)]

    def version(self, subject: str, number: int) -> RegisteredSchema:
        """Return a version of a subject.

        Raises:
            UnknownSchemaError: There is no such subject or version, or it was deleted.
        """
        versions = self._current(subject)
        for version in versions:
            if version.number == number:
                return self._registered(subject, version)
        numbers = ", ".join(str(version.number) for version in versions)
        raise UnknownSchemaError(
            f"The subject {subject!r} has no version {number!r}, only {numbers}",
            todo="Pass one of these, or call latest().",
            subject=subject,
        )

    def latest(self, subject: str) -> RegisteredSchema:
        """Return the latest version of a subject.

        Raises:
            UnknownSchemaError: There is no such subject.
        """
        return self._registered(subject, self._current(subject)[-1])

    def get(self, id: int) -> str:  # noqa: A002 - as everybody calls it
        """Return the schema with an id as JSON, also if its versions were deleted.

        Raises:
            UnknownSchemaError: No schema has this id.
        """
        if isinstance(id, bool) or not isinstance(id, int):
            raise UnknownSchemaError(f"The id of a schema must be an int, got {id!r}")
        schema = None
        if 0 < id <= MAX_ID:
            schema = REGISTERED_SCHEMAS.get(self._root.context.state, id)
        if schema is None:
            raise UnknownSchemaError(
                f"The registry has no schema with the id {id}",
                todo="Records from another log need the schemas of that log.",
            )
        return schema

    def lookup(self, subject: str, schema: Schema) -> RegisteredSchema:
        """Return the version of a subject that has this schema.

        Raises:
            InvalidSchemaError: It is not a schema of Avro.
            UnknownSchemaError: There is no such subject, or it does not have the schema.
        """
        fingerprint, versions = parse_avro(schema).fingerprint, self._current(subject)
        number = SCHEMA_FINGERPRINTS.get(self._root.context.state, fingerprint)
        for version in versions:
            if version.schema_id == number:
                return self._registered(subject, version)
        raise UnknownSchemaError(
            f"The subject {subject!r} does not have this schema",
            todo="Register it with register().",
            subject=subject,
        )

    # Registering

    def register(self, subject: str, schema: Schema) -> int:
        """Register a schema as the next version of a subject, and return its id.

        A schema that the subject has already keeps its id and version.

        Raises:
            IncompatibleSchemaError: It is not compatible with earlier versions, as the level of
                the subject requires; the ``reasons`` say why.  Nothing was registered.
            InvalidSchemaError: It is not a schema of Avro, or the name of the subject is not
                valid.
            EmbedlogError: fastavro or avro is not installed.
        """
        parsed = parse_avro(schema)
        _check_subject(subject)
        context = self._root.context
        while True:
            before = context.state.read(lambda txn: _subject(txn, subject))
            schema_id = SCHEMA_FINGERPRINTS.get(context.state, parsed.fingerprint)
            if any(version.schema_id == schema_id for version in before.current):
                assert schema_id is not None
                return schema_id
            context.check_writable()
            # Not in the transaction, since no process can roll a segment meanwhile.
            reasons = self._reasons(before, parsed)
            if reasons:
                _refuse(subject, before.level, reasons)
            step = partial(_add, subject=subject, before=before, schema=parsed)
            registered = context.state.write(step)
            if registered is not None:
                return registered

    def check(self, subject: str, schema: Schema) -> list[str]:
        """Return why a schema cannot be registered under a subject; empty if it can.

        Raises:
            InvalidSchemaError: It is not a schema of Avro.
            EmbedlogError: fastavro or avro is not installed.
        """
        parsed = parse_avro(schema)
        return self._reasons(
            self._root.context.state.read(lambda txn: _subject(txn, subject)), parsed
        )

    def _reasons(self, subject: _Subject, schema: AvroSchema) -> list[str]:
        reasons: list[str] = []
        backward = subject.level.startswith(("BACKWARD", "FULL"))
        forward = subject.level.startswith(("FORWARD", "FULL"))
        for version in subject.to_compare():
            earlier, name = parse_stored(self.get(version.schema_id)), f"version {version.number}"
            if backward:
                reasons += [
                    f"it cannot read {name}: {reason}"
                    for reason in reasons_not_readable(schema, earlier)
                ]
            if forward:
                reasons += [
                    f"{name} cannot read it: {reason}"
                    for reason in reasons_not_readable(earlier, schema)
                ]
        return reasons

    # Compatibility

    def compatibility(self, subject: str | None = None) -> str:
        """Return the compatibility level of a subject, or without one that of all others."""
        return self._root.context.state.read(lambda txn: _level(txn, subject or _ALL_SUBJECTS))

    def set_compatibility(self, level: str | None, subject: str | None = None) -> None:
        """Set the compatibility level of a subject, or of all that have none of their own.

        Args:
            level: One of ``NONE``, ``BACKWARD`` (the default: a new version can read what the
                latest one wrote), ``FORWARD`` (the latest one can read what a new one writes),
                ``FULL`` (both), and each of these with ``_TRANSITIVE``: with all versions, not
                only the latest one.  None returns to the default.
            subject: The subject, which need not exist; by default all without a level.

        Raises:
            InvalidConfigError: There is no such level.
        """
        name = level.upper() if isinstance(level, str) else level
        if name is not None and name not in LEVELS:
            raise InvalidConfigError(
                f"A compatibility level must be one of {', '.join(LEVELS)}, got {level!r}"
            )
        key = _ALL_SUBJECTS if subject is None else _check_subject(subject)
        self._root.context.check_writable()

        def step(txn: kv.Txn) -> None:
            if name is None:
                COMPATIBILITY_LEVELS.delete(txn, key)
            else:
                COMPATIBILITY_LEVELS.put(txn, key, value=name)

        self._root.context.state.write(step)

    # Deleting

    def delete(self, subject: str, version: int | None = None) -> list[int]:
        """Delete a version of a subject, or the subject; return the numbers of the versions.

        The schemas stay readable by their ids, since records may have these.  With the subject
        its own compatibility level is deleted.

        Raises:
            UnknownSchemaError: There is no such subject or version.
        """
        self._root.context.check_writable()

        def step(txn: kv.Txn) -> list[int]:
            current = _subject(txn, subject).current
            deleted = [entry for entry in current if version in (None, entry.number)]
            for entry in deleted:
                value = entry.schema_id, True
                SUBJECT_VERSIONS.put(txn, subject, entry.number, value=value)
            if version is None:
                COMPATIBILITY_LEVELS.delete(txn, subject)
            return [entry.number for entry in deleted]

        self._current(subject)
        numbers = self._root.context.state.write(step)
        if not numbers and version is not None:
            self.version(subject, version)  # raises
        return numbers

    # Views

    def rows(self) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
        """Return the heads and the rows of a table of the subjects, with their latest versions."""
        latest = map(self.latest, self.subjects())
        return ("subject", "version", "id", "compatibility"), [
            (entry.subject, entry.version, entry.id, self.compatibility(entry.subject))
            for entry in latest
        ]

    def __dir__(self) -> list[str]:
        """Return the names that completion offers."""
        return public_names(self)

    def __repr__(self) -> str:
        heads, rows = self.rows()
        return "\n".join(text_table(heads, rows)) if rows else "No schemas"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html_table("Schemas", *self.rows())

    # Rows

    def _current(self, subject: str) -> list[_Version]:
        """Return the versions of a subject that were not deleted; at least one."""
        if isinstance(subject, str) and subject:
            current = self._root.context.state.read(lambda txn: _subject(txn, subject)).current
            if current:
                return current
        raise UnknownSchemaError(
            f"The registry has no subject {subject!r}",
            todo=Hint(
                "Register a schema with log.schema_registry.register(subject, schema).",
                "Register a schema with `embedlog schemas register`.",
            ),
            subject=subject,
        )

    def _registered(self, subject: str, version: _Version) -> RegisteredSchema:
        schema = self.get(version.schema_id)
        return RegisteredSchema(version.schema_id, subject, version.number, schema)


def _check_subject(subject: str) -> str:
    """Return a valid name of a subject.

    Raises:
        InvalidSchemaError: It is not valid.
    """
    if (
        not isinstance(subject, str)
        or not subject
        or not subject.isprintable()
        or len(subject.encode()) > MAX_SUBJECT_BYTES
    ):
        raise InvalidSchemaError(
            f"A subject must be a str of 1 to {MAX_SUBJECT_BYTES} bytes without control "
            f"characters, got {subject!r}",
            todo="The subject of a topic's values is TOPIC-value, that of its keys TOPIC-key.",
        )
    return subject


def _refuse(subject: str, level: str, reasons: list[str]) -> NoReturn:
    raise IncompatibleSchemaError(
        f"The schema is not compatible with the subject {subject!r} ({level}): "
        + "; ".join(reasons),
        todo="Change the schema, such as by defaults for new fields, or the level with "
        "set_compatibility().",
        subject=subject,
        reasons=reasons,
    )


def _versions(txn: kv.Txn, subject: str) -> Iterator[_Version]:
    for (_, number), (schema_id, deleted) in SUBJECT_VERSIONS.scan(txn, subject):
        yield _Version(number, schema_id, bool(deleted))


def _level(txn: kv.Txn, subject: str) -> str:
    own = COMPATIBILITY_LEVELS.get(txn, subject)
    return own or COMPATIBILITY_LEVELS.get(txn, _ALL_SUBJECTS) or DEFAULT_LEVEL


def _subject(txn: kv.Txn, subject: str) -> _Subject:
    return _Subject(tuple(_versions(txn, subject)), _level(txn, subject))


def _add(txn: kv.Txn, subject: str, before: _Subject, schema: AvroSchema) -> int | None:
    """Add a version; return the id of its schema, or None if the subject has changed."""
    if _subject(txn, subject) != before:
        return None
    schema_id = SCHEMA_FINGERPRINTS.get(txn, schema.fingerprint)
    if schema_id is None:
        schema_id = next_number(txn, "schema")
        if schema_id > MAX_ID:
            raise InvalidSchemaError("All ids of schemas are in use", todo="Use another log.")
        REGISTERED_SCHEMAS.put(txn, schema_id, value=schema.text)
        SCHEMA_FINGERPRINTS.put(txn, schema.fingerprint, value=schema_id)
    number = max((version.number for version in before.versions), default=0) + 1
    value: tuple[Any, ...] = schema_id, False
    SUBJECT_VERSIONS.put(txn, subject, number, value=value)
    return schema_id
