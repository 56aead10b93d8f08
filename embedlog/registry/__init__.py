"""The schema registry in the log, and the serializers of Avro that use it."""

from __future__ import annotations

from embedlog.registry.avro_schema import Schema as Schema
from embedlog.registry.schema_registry import RegisteredSchema as RegisteredSchema
from embedlog.registry.schema_registry import SchemaRegistry as SchemaRegistry
