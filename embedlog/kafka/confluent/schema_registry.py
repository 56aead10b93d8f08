"""`confluent_kafka.schema_registry`: its client, on the schema registry of a log.

Confluent's own `AvroSerializer` and `AvroDeserializer` work with it.  Without references to
other schemas, rules, metadata and modes, and with schemas of Avro only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from embedlog.errors import (
    IncompatibleSchemaError,
    InvalidConfigError,
    InvalidSchemaError,
    UnknownSchemaError,
    raised_in_body,
)
from embedlog.kafka.bootstrap import LogAddress, attach, log_address
from embedlog.kafka.client_type import Client
from embedlog.kafka.library import load, public_name
from embedlog.registry.schema_registry import RegisteredSchema as Registered
from embedlog.registry.schema_registry import SchemaRegistry

library: Any = load("confluent_kafka.schema_registry")
"""The library's module, with its types and errors."""

_SUBJECT_NOT_FOUND, _VERSION_NOT_FOUND, _SCHEMA_NOT_FOUND = 40401, 40402, 40403
_INVALID_SCHEMA, _INVALID_LEVEL, _INCOMPATIBLE = 42201, 42203, 409


def _schema(text: str) -> Any:
    return library.Schema(text, "AVRO")


def _registered(entry: Registered) -> Any:
    fields = {"subject": entry.subject, "version": entry.version, "schema_id": entry.id}
    schema = _schema(entry.schema)
    try:
        return library.RegisteredSchema(**fields, guid=None, schema=schema)
    except TypeError:
        return library.RegisteredSchema(**fields, schema=schema)  # older versions have none


def _error(code: int, error: Exception) -> Exception:
    status = code if code == _INCOMPATIBLE else code // 100
    refused: Exception = library.SchemaRegistryError(status, code, str(error))
    return refused


@contextmanager
def _translated(missing: int = _SUBJECT_NOT_FOUND) -> Iterator[None]:
    """Raise the errors of embedlog as those of Confluent's registry."""
    try:
        yield
    except IncompatibleSchemaError as error:
        raise _error(_INCOMPATIBLE, error) from raised_in_body(error)
    except InvalidSchemaError as error:
        raise _error(_INVALID_SCHEMA, error) from raised_in_body(error)
    except UnknownSchemaError as error:
        raise _error(missing, error) from raised_in_body(error)
    except InvalidConfigError as error:
        raise _error(_INVALID_LEVEL, error) from raised_in_body(error)


def _text_of(schema: Any) -> str:
    """Return the JSON of a schema that the registry of a log can have."""
    refused = {
        f"schemas of the type {schema.schema_type}": schema.schema_type not in (None, "AVRO"),
        "references to other schemas": getattr(schema, "references", None),
        "rules": getattr(schema, "rule_set", None),
        "metadata": getattr(schema, "metadata", None),
    }
    for what, is_set in refused.items():
        if is_set:
            raise InvalidSchemaError(f"The registry of a log has no {what}")
    text: str = schema.schema_str
    return text


def __getattr__(name: str) -> Any:
    """Return a name of the library's module."""
    return public_name(library, name)


class SchemaRegistryClient(Client):
    """The schema registry of a log; ``url`` names the log, as ``embedlog:///path``.

    With the url of a registry the constructor returns confluent_kafka's own client.
    """

    _original = library.SchemaRegistryClient

    @classmethod
    def _address_of(cls, args: tuple[Any, ...], configs: Mapping[str, Any]) -> LogAddress | None:
        conf = args[0] if args else configs.get("conf")
        return log_address(conf.get("url") if isinstance(conf, Mapping) else None)

    def __init__(self, conf: dict[str, Any]) -> None:
        address = self._address_of((conf,), {})
        assert address is not None
        self._conf, self._handle = conf, attach(address, self)

    @staticmethod
    def new_client(conf: dict[str, Any]) -> SchemaRegistryClient:
        """Return a client."""
        return SchemaRegistryClient(conf)

    @property
    def _schemas(self) -> SchemaRegistry:
        return self._handle.log.schema_registry

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the log back; may be repeated."""
        self._handle.close()

    def config(self) -> dict[str, Any]:
        """Return the settings."""
        return self._conf

    # Schemas

    def register_schema(
        self, subject_name: str, schema: Any, normalize_schemas: bool = False
    ) -> int:
        """Register a schema, and return its id."""
        with _translated():
            return self._schemas.register(subject_name, _text_of(schema))

    def register_schema_full_response(
        self, subject_name: str, schema: Any, normalize_schemas: bool = False
    ) -> Any:
        """Register a schema, and return the `RegisteredSchema`."""
        self.register_schema(subject_name, schema)
        return self.lookup_schema(subject_name, schema)

    def lookup_schema(
        self,
        subject_name: str,
        schema: Any,
        normalize_schemas: bool = False,
        fmt: str | None = None,
        deleted: bool = False,
    ) -> Any:
        """Return the version of a subject that has a schema."""
        with _translated():
            self._schemas.versions(subject_name)
        with _translated(_SCHEMA_NOT_FOUND):
            return _registered(self._schemas.lookup(subject_name, _text_of(schema)))

    def get_schema(
        self,
        schema_id: int,
        subject_name: str | None = None,
        fmt: str | None = None,
        reference_format: str | None = None,
    ) -> Any:
        """Return the schema with an id."""
        with _translated(_SCHEMA_NOT_FOUND):
            return _schema(self._schemas.get(schema_id))

    def get_schema_types(self) -> list[str]:
        """Return the types of schemas: Avro only."""
        return ["AVRO"]

    # Subjects

    def get_subjects(self, subject_prefix: str | None = None, **_: Any) -> list[str]:
        """Return the subjects that begin with a prefix."""
        return [
            subject
            for subject in self._schemas.subjects()
            if subject.startswith(subject_prefix or "")
        ]

    def get_versions(self, subject_name: str, **_: Any) -> list[int]:
        """Return the numbers of the versions of a subject."""
        with _translated():
            return self._schemas.versions(subject_name)

    def get_version(
        self,
        subject_name: str,
        version: int | str = "latest",
        deleted: bool = False,
        fmt: str | None = None,
    ) -> Any:
        """Return a version of a subject."""
        if version == "latest":
            return self.get_latest_version(subject_name)
        with _translated():
            self._schemas.versions(subject_name)
        with _translated(_VERSION_NOT_FOUND):
            return _registered(self._schemas.version(subject_name, int(version)))

    def get_latest_version(self, subject_name: str, fmt: str | None = None) -> Any:
        """Return the latest version of a subject."""
        with _translated():
            return _registered(self._schemas.latest(subject_name))

    def delete_subject(self, subject_name: str, permanent: bool = False) -> list[int]:
        """Delete a subject; return the numbers of its versions.  Nothing is deleted for good."""
        with _translated():
            return self._schemas.delete(subject_name)

    def delete_version(self, subject_name: str, version: int, permanent: bool = False) -> int:
        """Delete a version of a subject, and return it."""
        with _translated(_VERSION_NOT_FOUND):
            return self._schemas.delete(subject_name, version)[0]

    def get_associations_by_resource_name(self, *_: Any, **__: Any) -> list[Any]:
        """Return no associations, so that the subject of a topic's values is TOPIC-value."""
        return []

    # Compatibility

    def set_compatibility(self, subject_name: str | None = None, level: str | None = None) -> str:
        """Set the compatibility level of a subject, or of all without one."""
        with _translated():
            if level is None:
                raise InvalidConfigError("level must be a compatibility level, got None")
            self._schemas.set_compatibility(str(level), subject_name)
        return str(level)

    def get_compatibility(self, subject_name: str | None = None) -> str:
        """Return the compatibility level of a subject, or of all without one."""
        return self._schemas.compatibility(subject_name)

    def test_compatibility(
        self, subject_name: str, schema: Any, version: int | str = "latest", **_: Any
    ) -> bool:
        """Return whether a schema can be registered, whatever the version."""
        with _translated():
            return not self._schemas.check(subject_name, _text_of(schema))

    def test_compatibility_all_versions(self, subject_name: str, schema: Any, **_: Any) -> bool:
        """Return whether a schema can be registered."""
        return self.test_compatibility(subject_name, schema)

    # Caches

    def clear_latest_caches(self) -> None:
        """Do nothing: each call reads the log, so there is no cache to clear."""

    def clear_caches(self) -> None:
        """Do nothing: each call reads the log, so there is no cache to clear."""
