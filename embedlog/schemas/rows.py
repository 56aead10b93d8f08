"""Rows of a typed topic: from what programs send to columns, and from columns to objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from embedlog.batch.encode import headers_array
from embedlog.batch.key_bytes import key_bytes
from embedlog.batch.wire import timestamp_type
from embedlog.errors import InvalidRecordError, SerializationError
from embedlog.forks import cached_property
from embedlog.lazy import pa
from embedlog.schemas.segment_schema import segment_schema
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.schemas.typed_row import TypedRow
from embedlog.schemas.values import (
    FieldError,
    arrow_array,
    check_fields,
    checker_of,
    from_ms,
    nullable,
    python_values,
    to_ms,
)

_WORD_BYTES = 8
"""What a value takes in a buffer, about, besides the bytes of text."""


class RowEncoder:
    """Checks the records that programs send to a typed topic, and makes columns of them.

    Args:
        topic: The name of the topic, for errors.
        schema: The current version of its schema.
    """

    def __init__(self, topic: str, schema: TopicSchema) -> None:
        self.topic, self.schema = topic, schema
        self._checks = {field.name: self._check_of(field) for field in schema.columns}
        names = schema.columns.names
        self._key_rows = [names.index(name) for name in schema.key]
        self._defaults = {
            name: python_values(default)[0] for name, default in schema.defaults.items()
        }
        self._time_row = None if schema.timestamp is None else names.index(schema.timestamp)

    def _check_of(self, field: Any) -> Callable[[Any], Any]:
        check = checker_of(field.type)
        if field.nullable:
            return nullable(check)

        def check_present(value: Any) -> Any:
            if value is None:
                raise ValueError("it must not be null")
            return check(value)

        return check_present

    @cached_property
    def key_checks(self) -> dict[str, Callable[[Any], Any]]:
        """What checks the value of each key column."""
        return {name: self._checks[name] for name in self.schema.key}

    def row(self, value: Any, key: Any, timestamp_ms: int | None, now_ms: int) -> TypedRow:
        """Return a record.

        Args:
            value: A dict or an instance of a dataclass; None for a tombstone.
            key: The key of a tombstone: a value, or for several key columns a tuple or a dict.
            timestamp_ms: What the program passed.
            now_ms: The current time.

        Raises:
            SerializationError: A column is unknown, or cannot hold its value; ``column`` names it.
            InvalidRecordError: A key was passed with a value, or a tombstone has none.
        """
        if value is None:
            return self._tombstone(key, now_ms if timestamp_ms is None else timestamp_ms)
        if key is not None:
            raise InvalidRecordError(
                f"The key of a record is in its {self._key_columns()}",
                topic=self.topic,
                todo="Pass key only with the value None, which deletes the key.",
            )
        if timestamp_ms is not None and self._time_row is not None:
            raise InvalidRecordError(
                f"The timestamp of a record is in its column {self.schema.timestamp}",
                topic=self.topic,
                todo="Leave timestamp_ms out.",
            )
        try:
            if self._defaults and isinstance(value, Mapping):
                value = {**self._defaults, **value}
            values = check_fields(value, self._checks)
        except (TypeError, ValueError) as error:
            raise self._refused(error) from error
        time = None if self._time_row is None else values[self._time_row]
        return TypedRow(values, tuple(values[row] for row in self._key_rows), time, self)

    def _key_columns(self) -> str:
        names = self.schema.key
        if not names:
            return "columns, and the topic has no key column"
        return f"{'column' if len(names) == 1 else 'columns'} {', '.join(names)}"

    def _refused(self, error: Exception) -> SerializationError:
        column = error.field if isinstance(error, FieldError) else None
        reason = error.reason if isinstance(error, FieldError) else str(error)
        what = f"Column {column}: {reason}" if column else f"The value: {reason}"
        todo = "Correct the value."
        if column is None or (column not in self._checks and "." not in column):
            todo = f"The topic's columns are {', '.join(self.schema.columns.names)}."
        return SerializationError(what, topic=self.topic, column=column, todo=todo)

    def _tombstone(self, key: Any, timestamp_ms: int) -> TypedRow:
        time = None
        if self._time_row is not None:
            time = from_ms(timestamp_ms, self.schema.columns.field(self._time_row).type)
        return TypedRow(None, self.key_of(key), time, self)

    def key_of(self, key: Any) -> tuple[Any, ...]:
        """Return the values of the key columns.

        Args:
            key: A value, or for several key columns a tuple or a dict of them.

        Raises:
            SerializationError: It cannot be a key of the topic.
            InvalidRecordError: It is None, or the topic has no key columns.
        """
        checks = self.key_checks
        if key is None or not checks:
            raise InvalidRecordError(
                "A tombstone needs a key" if checks else "The topic has no key column",
                topic=self.topic,
                todo="Pass key=…." if checks else "Create it with key=….",
            )
        if len(checks) == 1 and not isinstance(key, Mapping):
            key = {next(iter(checks)): key}
        elif isinstance(key, tuple | list) and len(key) == len(checks):
            key = dict(zip(checks, key, strict=True))
        try:
            return check_fields(key, checks)
        except (TypeError, ValueError) as error:
            refused = self._refused(error)
            todo = f"A key must have a value for {', '.join(checks)}."
            raise SerializationError(
                f"The key: {refused.what}",
                topic=self.topic,
                column=refused.facts["column"],
                todo=todo,
            ) from error

    def key_bytes(self, keys: Sequence[tuple[Any, ...]]) -> Any:
        """Return the bytes of keys, of which there is at least one, as a `pyarrow.BinaryArray`."""
        if not self._key_rows:
            return pa.nulls(len(keys), pa.binary())
        types_ = [self.schema.columns.field(row).type for row in self._key_rows]
        columns = zip(*keys, strict=True)
        return key_bytes(
            [arrow_array(column, kind) for column, kind in zip(columns, types_, strict=True)]
        )

    def timestamp_ms(self, row: TypedRow) -> int | None:
        """Return the timestamp of a row; None if the topic has no timestamp column."""
        if self._time_row is None:
            return None
        return to_ms(row.time, self.schema.columns.field(self._time_row).type)

    def size_of(self, row: TypedRow) -> int:
        """Return about how many bytes a row takes in a batch."""
        return _size(row.key if row.values is None else row.values)

    def columns(
        self,
        rows: Sequence[TypedRow],
        timestamps: Sequence[int],
        headers: Sequence[Any] | None = None,
    ) -> Any:
        """Return rows, of which there is at least one, with the columns of a segment.

        Args:
            rows: The rows.
            timestamps: The timestamp of each, in ms; used if the topic has no timestamp column.
            headers: A list of pairs, or None, for each row.
        """
        count, schema = len(rows), self.schema
        tombstones = [row.values is None for row in rows]
        deletes = any(tombstones)
        target = segment_schema(schema, headers=headers is not None, tombstones=deletes)
        width = len(schema.columns)
        if deletes:
            values = [self._values_of(row, width) for row in rows]
        else:
            values = [row.values for row in rows]  # type: ignore[misc]
        arrays = [
            arrow_array(column, field.type)
            for column, field in zip(zip(*values, strict=True), schema.columns, strict=True)
        ]
        if schema.timestamp is None:
            arrays.insert(0, arrow_array(timestamps, timestamp_type()))
        if deletes:
            arrays.append(pa.array(tombstones, pa.bool_()))
        if headers is not None:
            arrays.append(headers_array(headers))
        assert all(len(array) == count for array in arrays)
        return pa.RecordBatch.from_arrays(arrays, schema=target)

    def _values_of(self, row: TypedRow, width: int) -> Sequence[Any]:
        if row.values is not None:
            return row.values
        values: list[Any] = [None] * width
        for index, value in zip(self._key_rows, row.key, strict=True):
            values[index] = value
        if self._time_row is not None:
            values[self._time_row] = row.time
        return values


def _size(values: Any) -> int:
    size = _WORD_BYTES * len(values)
    for value in values:
        kind = type(value)
        if kind is bytes:
            size += len(value)
        elif kind is tuple or kind is list:
            size += _size(value)
    return size


# To Python


def python_rows(columns: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a `pyarrow.RecordBatch` as dicts of some of its columns."""
    lists = [python_values(columns.column(name)) for name in names]
    return [dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True)]
