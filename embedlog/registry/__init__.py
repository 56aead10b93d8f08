"""The schema registry in the log, and the serializers of Avro that use it."""

from __future__ import annotations

from embedlog.registry.avro_schema import Schema as Schema
from embedlog.registry.avro_serializers import AvroDeserializer as AvroDeserializer
from embedlog.registry.avro_serializers import AvroSerializer as AvroSerializer
from embedlog.registry.avro_serializers import AvroToJson as AvroToJson
from embedlog.registry.avro_serializers import JsonToAvro as JsonToAvro
from embedlog.registry.avro_serializers import binder as binder
from embedlog.registry.schema_registry import RegisteredSchema as RegisteredSchema
from embedlog.registry.schema_registry import SchemaRegistry as SchemaRegistry
