"""The ids of Avro's schemas in copied records, where a target has others than its source."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from embedlog.batch import PlacedBatch, with_columns
from embedlog.errors import MirrorConflictError
from embedlog.lazy import np, pa
from embedlog.mirrors.ends import SourceTopic
from embedlog.registry.schema_copies import copy_registry
from embedlog.root.root import Root

_PREFIX_BYTES = 5
"""A zero and the id of the schema, big-endian, before each key or value."""


class SchemaIds:
    """Writes the ids of the target into the keys and values of a topic.

    Args:
        topic: The name of the copy.
        fields: Which of ``key`` and ``value`` are Avro.
        ids: The id of each schema at the target, by its id at the source.
    """

    def __init__(self, topic: str, fields: Collection[str], ids: Mapping[int, int]) -> None:
        self._topic, self._fields, self._ids = topic, fields, ids

    @property
    def are_equal(self) -> bool:
        """Whether records can be copied as they are."""
        return all(before == after for before, after in self._ids.items())

    def of_batch(self, placed: PlacedBatch) -> PlacedBatch:
        """Return a batch of bytes with the ids of the target.

        Raises:
            MirrorConflictError: A record has an id that the registry of the source lacks.
        """
        return PlacedBatch(placed.offset, with_columns(placed.batch, self.of_columns))

    def of_columns(self, columns: Any) -> Any:
        """Return columns, a `pyarrow.RecordBatch`, with the ids of the target.

        Raises:
            MirrorConflictError: As for `of_batch`.
        """
        for field in self._fields:
            index = columns.schema.names.index(field)
            column = self._changed(columns.column(index))
            columns = columns.set_column(index, columns.schema.field(index), column)
        return columns

    def _changed(self, column: Any) -> Any:
        count, (valid, offsets, data) = len(column), column.buffers()
        if not count or data is None:
            return column
        ends = np.frombuffer(offsets, np.int32, count + 1, 4 * column.offset)
        starts = ends[:-1][np.diff(ends) >= _PREFIX_BYTES]
        content = np.frombuffer(data, np.uint8).copy()
        # A null has no bytes; what does not begin with a zero is no Avro.
        places = (starts[content[starts] == 0][:, None] + np.arange(1, _PREFIX_BYTES)).ravel()
        stored, numbers = np.unique(content[places].view(">u4"), return_inverse=True)
        known = np.array([self._target_id(number) for number in stored.tolist()], ">u4")
        content[places] = known[numbers].view(np.uint8)
        buffers = [valid, offsets, pa.py_buffer(content)]
        return pa.Array.from_buffers(column.type, count, buffers, offset=column.offset)

    def _target_id(self, number: int) -> int:
        if number not in self._ids:
            raise MirrorConflictError(
                f"A record begins with {number}, which is the id of no schema at the source, and "
                "may be that of another one here",
                topic=self._topic,
                todo="Mirror to a log that has no other schemas.",
            )
        return self._ids[number]


def prepare_schemas(root: Root, topic: SourceTopic, name: str, *, own: bool) -> SchemaIds | None:
    """Copy the schemas that a topic needs; return the mapping of ids, None if they are equal.

    Args:
        root: The log to copy to.
        topic: The topic of the source.
        name: The name of the copy.
        own: Whether the log has records of its own in it.
    """
    if topic.registry is None:
        return None
    copied = copy_registry(root, name, topic.registry, own=own)
    ids = SchemaIds(name, topic.registry.subjects, copied)
    return None if ids.are_equal else ids
