"""`Conversion`: copies the records of a topic to one of another form, each exactly once.

A chunk of a partition is one publication, together with the offset that it was read up to: an app
version of the target topic, under a name for each partition of the source.  A conversion that is
repeated, or was killed, continues from there.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from embedlog.catalog import TopicInfo, refuse_internal
from embedlog.config import TopicConfig
from embedlog.convert.avro_types import avro_schema, parse
from embedlog.convert.keys import KeyDecoder, check_keys
from embedlog.convert.stored_rows import RowError, StoredRows, read_rows
from embedlog.convert.stored_values import (
    AvroValues,
    JsonValues,
    ValueDecoder,
    avro_values,
    json_lines,
    json_values,
)
from embedlog.convert.targets import Batches, BatchMaker, typed_columns
from embedlog.display import plural
from embedlog.errors import (
    EmbedlogError,
    IllegalStateError,
    InvalidConfigError,
    InvalidRecordError,
    InvalidSchemaError,
    LockTimeoutError,
    RecordTooLargeError,
    SerializationError,
    TopicAlreadyExistsError,
    UnknownSchemaError,
)
from embedlog.files import process_id
from embedlog.hints import Hint, alter_topic
from embedlog.lazy import np, pa, pc
from embedlog.listeners import PRODUCER, Client
from embedlog.partition import journal
from embedlog.publish import app_versions, staging
from embedlog.publish.staging import StagedFileWriter
from embedlog.publish.transaction import Publication, publish
from embedlog.registry.schema_registry import SchemaRegistry
from embedlog.root.root import Root
from embedlog.schemas.infer import columns_of
from embedlog.schemas.json_columns import read_json
from embedlog.schemas.settings import check_typed_config
from embedlog.schemas.topic_schema import TopicSchema, first_version

Form = Literal["typed", "avro", "json"]
KEY, TIMESTAMP = "embedlog.key", "embedlog.timestamp"
"""Properties of the schema of a record: the key columns of the typed topic that it comes from, and
its column of timestamps."""
INFERRED_BYTES = 64 << 20
"""How much JSON the types of columns are inferred from."""
_ROW_ERRORS = (
    *(RowError, SerializationError, InvalidRecordError, InvalidSchemaError, UnknownSchemaError),
    *(RecordTooLargeError, ValueError),
)
"""What a record raises that does not fit the target; Arrow's own errors are ValueErrors."""
_KEY_SERIALIZERS = {"string": "str", "int64": "int", "double": "float"}
"""By the type of a key column, the serializer of the same bytes; others stay bytes."""


@dataclass(frozen=True)
class ConversionOptions:
    """What a program says about a conversion."""

    to: Form | None = None
    """The form of the target; by default typed, and Avro if the source is typed."""
    key: str | Sequence[str] | None = None
    timestamp: str | None = None
    partitions: int | None = None
    schema: Any = None
    """The columns of JSON; None infers them."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """The names of columns by those of the fields of the values."""
    skip_invalid: bool = False
    """Whether records that do not fit are left out."""


_PASS_SCHEMA = Hint("Pass schema, with the types.", "Add --schema-from FILE.")


class ConvertedPartition(NamedTuple):
    """What a conversion copied of a partition of its source."""

    partition: int
    start_offset: int
    """Where this call began to read."""
    end_offset: int
    records: int
    skipped: int


@dataclass(frozen=True)
class ConversionResult:
    """What a conversion copied; see `Log.convert`."""

    source: str
    target: str
    to: Form
    partitions: tuple[ConvertedPartition, ...]

    @property
    def records(self) -> int:
        """How many records this call copied."""
        return sum(partition.records for partition in self.partitions)

    @property
    def skipped(self) -> int:
        """How many records did not fit and were left out."""
        return sum(partition.skipped for partition in self.partitions)


Convert = Callable[[StoredRows], Batches]
Progress = Callable[[int, int], None]
"""Called with the number of records that are done, and of all."""


class Conversion:
    """Copies the records of a topic to one of another form.

    Args:
        root: The log.
        source, target: The names of the topics.
        options: What the program says.

    Raises:
        EmbedlogError: The conversion is not possible; nothing was changed.
    """

    def __init__(self, root: Root, source: str, target: str, options: ConversionOptions) -> None:
        refuse_internal(target)
        self._root, self._options = root, options
        self._registry = SchemaRegistry(root)
        self._source = root.topic(source)
        self._target_name = target
        if source == target:
            raise InvalidConfigError(
                "A topic cannot be converted into itself", topic=source, todo="Name a new topic."
            )
        self._schema = root.context.catalog.schema(self._source)
        self.to: Form = options.to or ("typed" if self._schema is None else "avro")
        self._check_forms()

    def _check_forms(self) -> None:
        is_typed, options = self._schema is not None, self._options
        if (self.to == "typed") == is_typed:
            form = "typed" if is_typed else self._source.config.value_serializer
            raise InvalidConfigError(
                f"A topic of the form {form} cannot be converted to {self.to}",
                topic=self._source.name,
                todo="Convert a typed topic to avro or json, and topics of these to typed.",
            )
        if is_typed:
            given = {
                "key": options.key,
                "timestamp": options.timestamp,
                "schema": options.schema,
                "rename": options.rename or None,
            }
            for name, value in given.items():
                if value is not None:
                    raise InvalidConfigError(
                        f"{name} is for a target of columns, and this one is {self.to}",
                        topic=self._source.name,
                        todo="Leave it out.",
                    )
        elif self._source.config.value_serializer not in ("avro", "json"):
            alter = alter_topic(self._source.name, {"value.serializer": "avro"})
            raise InvalidConfigError(
                f"The values of the topic are {self._source.config.value_serializer}, and only "
                "those of avro and json have columns",
                topic=self._source.name,
                todo=Hint(
                    f"If they are, say so: {alter}.", f"If they are, say so: `{alter.shell}`."
                ),
            )

    # What is done

    def run(self, progress: Progress | None = None) -> ConversionResult:
        """Copy all records that the source has now and that were not copied before.

        Raises:
            SerializationError: A record does not fit; the error says where.  All records of its
                partition before it were copied, and none after it.
            LockTimeoutError: Another process converts to the topic.
            IllegalStateError: The target has other records, or lost some.
        """
        self._root.context.check_appendable()
        convert, target = self._prepare()
        with self._exclusively(target):
            tasks = list(self._tasks(target))
            total = sum(max(stop - start, 0) for _, start, stop in tasks)
            done, partitions = 0, []
            for partition, start, stop in tasks:
                records = skipped = 0
                chunks = read_rows(
                    self._root, self._source.name, partition, start, stop, self._schema
                )
                for rows in chunks:
                    left_out = self._copy(rows, convert, target)
                    records, skipped = records + rows.size - left_out, skipped + left_out
                    if progress is not None:
                        progress(done + rows.next_offset - start, total)
                done += max(stop - start, 0)
                partitions.append(ConvertedPartition(partition, start, stop, records, skipped))
        return ConversionResult(self._source.name, target.name, self.to, tuple(partitions))

    def _copy(self, rows: StoredRows, convert: Convert, target: TopicInfo) -> int:
        """Publish a chunk; return how many records were left out."""
        skipped, pending = 0, rows
        while pending.size:
            try:
                batches = convert(pending)
            except _ROW_ERRORS as failure:
                row, error = _first_failure(pending, convert, failure)
            else:
                self._publish(pending, batches, target)
                return skipped
            if row:
                before = pending.slice(0, row)
                self._publish(before, convert(before), target)
            if not self._options.skip_invalid:
                raise self._refused(pending, row, error) from error
            skipped += 1
            pending = pending.slice(row + 1, pending.size)
        # The last record was left out: what is read next begins after it.
        self._publish(rows, [], target)
        return skipped

    def _publish(self, rows: StoredRows, batches: Batches, target: TopicInfo) -> None:
        files = self._root.context.files
        directory = staging.job_directory(
            str(process_id.process()), self._root.clock(), uuid.uuid4().hex[:12]
        )
        writer = StagedFileWriter(files, directory, "conversion")
        try:
            for partition, batch in batches:
                writer.add(target.name, target.id, partition, batch)
        except BaseException:
            writer.abandon()
            raise
        staged = [writer.finish()] if batches else []
        publication = Publication(
            self._application(rows.partition), rows.next_offset, topics=(target.id,)
        )
        try:
            # Flushed with the offset: otherwise a power cut could lose one without the other.
            client = Client(PRODUCER, publication.application)
            report = partial(self._root.listeners.published, client)
            publish(self._root, staged, publication, durability="fsync", report=report)
        finally:
            staging.remove(files, staged)

    def _application(self, partition: int) -> str:
        return f"conversion of {self._source.id}-{partition}"

    def _refused(self, rows: StoredRows, row: int, error: Exception) -> SerializationError:
        reason = error.what if isinstance(error, EmbedlogError) else str(error)
        column = getattr(error, "column", None) or None
        if isinstance(error, RowError):
            reason = f"{error.column}: {error.reason}" if error.column else error.reason
        reason = reason.removeprefix("Row 0 of ").removeprefix("Row 0 ")
        return SerializationError(
            f"A record does not fit the topic {self._target_name}: {reason}",
            topic=self._source.name,
            partition=rows.partition,
            offset=rows.offset(row),
            column=column,
            todo="The records before it were copied."
            + Hint(
                "Change the schema so that it fits, or leave such records out with skip_invalid.",
                "Change the schema so that it fits, or leave such records out with --skip-invalid.",
            )
            + "Then repeat the conversion: it continues here.",
        )

    # Where it begins

    def _tasks(self, target: TopicInfo) -> Iterator[tuple[int, int, int]]:
        """Yield each partition of the source with the offsets to read."""
        context, state = self._root.context, self._root.context.state
        state.catch_up()
        versions = [
            app_versions.get(state, self._application(number), target.id)
            for number in range(self._source.partitions)
        ]
        if not any(versions):
            self._check_empty(target)
        for number, version in enumerate(versions):
            log = self._root.partition(self._source.name, number)
            log.refresh()
            start, stop = log.start_offset(), log.end_offset()
            if version is not None:
                lost = state.read(partial(app_versions.is_lost, row=version))
                if lost or version.version > stop:
                    raise IllegalStateError(
                        "Records of the conversion were lost or truncated, so it cannot continue",
                        topic=target.name if lost else self._source.name,
                        partition=number,
                        todo="Delete the target, and convert again.",
                    )
                # Its process may have died before it made the publication visible.
                context.live.catch_up()
                journal.finish_committed(context, [key for key, _, _ in version.ends])
                start = max(start, version.version)
            yield number, start, stop

    def _check_empty(self, target: TopicInfo) -> None:
        for number in range(target.partitions):
            if self._root.partition(target.name, number).end_offset():
                raise IllegalStateError(
                    f"The topic has records that are no conversion of {self._source.name}",
                    topic=target.name,
                    partition=number,
                    todo="Name a new topic.",
                )

    @contextmanager
    def _exclusively(self, target: TopicInfo) -> Iterator[None]:
        """Hold the lock of conversions to a topic."""
        files = self._root.context.files
        lock = files.open(f"locks/{target.id}.convert", write=True, create=True)
        try:
            if not files.try_lock(lock):
                raise LockTimeoutError(
                    "Another process converts records to this topic",
                    topic=target.name,
                    todo="Wait for it to end.",
                )
            yield
        finally:
            files.close(lock)

    # The target

    def _prepare(self) -> tuple[Convert, TopicInfo]:
        """Create the target if there is none, and return its batch encoder."""
        if self.to == "typed":
            return self._prepare_typed()
        assert self._schema is not None
        schema = self._schema
        columns, names = schema.plain, schema.columns.names
        encode: Callable[[Any], Any] = json_values
        text = None
        if self.to == "avro":
            properties = {KEY: list(schema.key)}
            if schema.timestamp is not None:
                properties[TIMESTAMP] = schema.timestamp  # type: ignore[assignment]
            text = avro_schema(columns, self._target_name, properties, schema.defaults)
        key = "bytes"
        if len(schema.key) == 1:
            key = _KEY_SERIALIZERS.get(str(columns.field(schema.key[0]).type), "bytes")
        serializers = {"key.serializer": key, "value.serializer": self.to}
        existing = self._existing()
        if existing is not None and (
            existing.schema_version or existing.config.value_serializer != self.to
        ):
            raise self._other_form(existing)
        if text is not None:
            schema_id = self._registry.register(f"{self._target_name}-value", text)
            record = parse(text)

            def encode(columns: Any) -> Any:
                return avro_values(columns, record, schema_id)

        target = existing or self._create(serializers, None)
        maker = self._maker(target)

        def convert(rows: StoredRows) -> Batches:
            values = encode(rows.table.select(names))
            if rows.deleted.any():
                null = pa.nulls(1, pa.binary())[0]
                values = pc.if_else(pa.array(rows.deleted), null, values)
            return maker.plain(rows, values)

        return convert, target

    def _maker(self, target: TopicInfo) -> BatchMaker:
        return BatchMaker(target, target.partitions == self._source.partitions)

    def _existing(self) -> TopicInfo | None:
        info = self._root.topics().get(self._target_name)
        count = self._options.partitions
        if info is not None and count is not None and count != info.partitions:
            raise TopicAlreadyExistsError(
                f"The topic exists, and has {plural(info.partitions, 'partition')}",
                topic=info.name,
                todo="Leave the number of partitions out, or name a new topic.",
            )
        return info

    def _other_form(self, info: TopicInfo) -> TopicAlreadyExistsError:
        form = "typed" if info.schema_version else info.config.value_serializer
        return TopicAlreadyExistsError(
            f"The topic exists, and its form is {form}", topic=info.name, todo="Name a new topic."
        )

    def _create(self, serializers: dict[str, str], schema: TopicSchema | None) -> TopicInfo:
        """Create the target with the settings of the source."""
        settings = {
            name: value
            for name, value in self._source.config.overrides().items()
            # Records keep their timestamps, and the target is not a copy of a mirror.
            if not name.endswith(".serializer")
            and name not in ("message.timestamp.type", "mirror.source")
        }
        config = TopicConfig.parse(settings | serializers)
        if schema is not None:
            check_typed_config(self._target_name, config, schema)
        count = self._options.partitions or self._source.partitions
        return self._root.create_topic(self._target_name, count, config, schema)

    def _prepare_typed(self) -> tuple[Convert, TopicInfo]:
        existing = self._existing()
        if existing is not None and not existing.schema_version:
            raise self._other_form(existing)
        values, key, timestamp = self._values(existing)
        decoder = KeyDecoder(self._source.config.key_serializer, self._registry.get)
        schema = None if existing is None else self._root.context.catalog.schema(existing)
        if existing is None or schema is None:
            self._refuse_keys(key)
            schema = first_version(self._columns(values, key, decoder), key, timestamp)
            target = self._create({}, schema)
            schema = self._root.context.catalog.schema(target) or schema
        elif self._differs(schema, key, timestamp):
            raise TopicAlreadyExistsError(
                f"The topic exists, and has the key {', '.join(schema.key) or 'none'} and the "
                f"column of timestamps {schema.timestamp or 'none'}",
                topic=existing.name,
                todo="Leave key and timestamp out, or name a new topic.",
            )
        else:
            target = existing
        maker, columns = self._maker(target), TypedConverter(values, decoder, schema, self._options)

        def convert(rows: StoredRows) -> Batches:
            typed = columns.convert(rows, target.name)
            return maker.batches(rows, typed, typed.keys)

        return convert, target

    def _differs(self, schema: TopicSchema, key: Sequence[str], timestamp: str | None) -> bool:
        """Whether the program names another key or timestamp than an existing target has."""
        options = self._options
        return (options.key is not None and tuple(key) != schema.key) or (
            options.timestamp is not None and timestamp != schema.timestamp
        )

    def _values(self, existing: TopicInfo | None) -> tuple[ValueDecoder, tuple[str, ...], Any]:
        """Return the decoder of the values, and the names of the key columns and timestamps."""
        options = self._options
        key = options.key
        names = () if key is None else (key,) if isinstance(key, str) else tuple(key)
        timestamp = options.timestamp
        if self._source.config.value_serializer == "avro":
            if options.schema is not None:
                raise InvalidConfigError(
                    "schema is for values of JSON, and Avro's have one in the registry",
                    topic=self._source.name,
                    todo="Leave it out.",
                )
            reader = parse(self._registry.latest(f"{self._source.name}-value").schema)
            values: ValueDecoder = AvroValues(self._registry.get, reader)
            renamed = {self._renamed(name) for name in values.schema.names}
            names = names or _property_names(reader, KEY, renamed)
            timestamp = timestamp or next(iter(_property_names(reader, TIMESTAMP, renamed)), None)
            return values, names, timestamp
        return JsonValues(self._json_columns(existing)), names, timestamp

    def _renamed(self, name: str) -> str:
        return self._options.rename.get(name, name)

    def _columns(self, values: ValueDecoder, key: Sequence[str], decoder: KeyDecoder) -> pa.Schema:
        """Return the columns of the target: those of the values, and keys that they lack."""
        fields = [field.with_name(self._renamed(field.name)) for field in values.schema]
        names = [field.name for field in fields]
        for name in self._options.rename:
            if name not in values.schema.names:
                raise InvalidSchemaError(
                    f"There is no column {name!r}, only {', '.join(values.schema.names)}",
                    column=name,
                )
        missing = [name for name in key if name not in names]
        if missing:
            keys = self._first_keys()
            fields[:0] = [pa.field(name, decoder.added_type(name, keys)) for name in missing]
        return pa.schema(fields)

    def _json_columns(self, existing: TopicInfo | None) -> pa.Schema:
        if self._options.schema is not None:
            return columns_of(self._options.schema)
        if existing is not None:
            schema = self._root.context.catalog.schema(existing)
            assert schema is not None
            names = {new: old for old, new in self._options.rename.items()}
            fields = [field.with_name(names.get(field.name, field.name)) for field in schema.plain]
            return pa.schema(fields)
        return self._inferred()

    def _inferred(self) -> pa.Schema:
        lines: list[bytes] = []
        size = 0
        for rows in self._first_rows():
            values = rows.table.column("value").drop_null()
            with suppress(RowError):  # Which the conversion reports, with its offset.
                lines += json_lines(values)
            size += values.nbytes
            if size >= INFERRED_BYTES:
                break
        if not lines:
            raise InvalidSchemaError(
                "The topic has no values whose columns could be inferred",
                topic=self._source.name,
                todo=_PASS_SCHEMA,
            )
        try:
            schema = read_json(lines, None).schema
        except pa.ArrowException as error:
            raise InvalidSchemaError(
                f"The columns cannot be inferred from the values: {error}",
                topic=self._source.name,
                todo=_PASS_SCHEMA,
            ) from error
        for column in schema:
            if pa.types.is_null(column.type):
                raise InvalidSchemaError(
                    f"The field {column.name} of the values is always null",
                    topic=self._source.name,
                    column=column.name,
                    todo=_PASS_SCHEMA,
                )
        return schema

    def _first_rows(self) -> Iterator[StoredRows]:
        for number in range(self._source.partitions):
            log = self._root.partition(self._source.name, number)
            log.refresh()
            yield from read_rows(
                *(self._root, self._source.name, number),
                *(log.start_offset(), log.end_offset(), None),
            )

    def _first_keys(self) -> Any:
        """Return some keys of the source."""
        for rows in self._first_rows():
            keys = rows.keys.drop_null()
            if len(keys):
                return keys
        return pa.nulls(0, pa.binary())

    def _refuse_keys(self, key: Sequence[str]) -> None:
        """Refuse a source with keys whose columns are not known, before the target is created."""
        if key:
            return
        for number in range(self._source.partitions):
            log = self._root.partition(self._source.name, number)
            log.refresh()
            start = log.start_offset()
            for rows in read_rows(
                self._root, self._source.name, number, start, log.end_offset(), None
            ):
                if len(rows.keys.drop_null()):
                    row = int(np.nonzero(rows.keys.is_valid().to_numpy(zero_copy_only=False))[0][0])
                    raise InvalidConfigError(
                        "A record has a key, and a typed topic stores keys in columns",
                        topic=self._source.name,
                        partition=number,
                        offset=rows.offset(row),
                        todo=Hint("Pass key=.", "Add --key NAME.")
                        + "It is the column of the values that has the key, or the name of a "
                        "column to add for it.",
                    )
                break


class TypedConverter(NamedTuple):
    """Makes the rows of a typed topic from stored records."""

    values: ValueDecoder
    keys: KeyDecoder
    schema: TopicSchema
    options: ConversionOptions

    def convert(self, rows: StoredRows, topic: str) -> Any:
        """Return records with the columns of a segment of the topic.

        Raises:
            RowError, EmbedlogError: One does not fit.
        """
        schema = self.schema
        fields = [schema.columns.field(name) for name in schema.key]
        stored = rows.table.column("value")
        if not schema.key:
            _refuse_keyed(rows)
        present, deleted = np.nonzero(~rows.deleted)[0], np.nonzero(rows.deleted)[0]
        try:
            values = self.values.columns(stored.take(present) if len(deleted) else stored)
            names = [self.options.rename.get(name, name) for name in values.schema.names]
            values = pa.RecordBatch.from_arrays(values.columns, names=names)
            keys = rows.keys.take(present)
            missing = [field for field in fields if field.name not in names]
            if missing:
                decoded = self.keys.columns(keys, fields)
                for field, column in zip(fields, decoded, strict=True):
                    if field.name not in names:
                        values = values.append_column(field.name, column)
            if fields:
                own = {field.name: values.column(field.name).cast(field.type) for field in fields}
                check_keys(keys, own, fields, self.keys)
        except RowError as error:
            raise error.among(present.tolist()) from error
        deleted_keys = []
        if len(deleted):
            keys = rows.keys.take(deleted)
            if keys.null_count or not fields:
                row = int(np.argmin(keys.is_valid())) if fields else 0
                raise RowError(int(deleted[row]), "", "a tombstone needs a key")
            try:
                deleted_keys = self.keys.columns(keys, fields)
            except RowError as error:
                raise error.among(deleted.tolist()) from error
        return typed_columns(rows, values, deleted_keys, schema, topic)


def _refuse_keyed(rows: StoredRows) -> None:
    keyed = rows.keys.is_valid().to_numpy(zero_copy_only=False)
    if keyed.any():
        raise RowError(int(keyed.argmax()), "", "it has a key, and the topic has no key column")


def _property_names(schema: Mapping[str, Any], name: str, columns: set[str]) -> tuple[str, ...]:
    """Return the columns that a property of a record names, if they are there."""
    value = schema.get(name)
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(column, str) and column in columns for column in names):
        return ()
    return tuple(names)


def _first_failure(rows: StoredRows, convert: Convert, error: Exception) -> tuple[int, Exception]:
    """Return the first record that cannot be converted, and why; ``error`` is of all."""
    low, high = 0, rows.size
    row = error.row if isinstance(error, RowError) else high // 2
    guesses = iter((row, row + 1))
    while low < high:
        # Once there is one record left, it is tried by itself, for an error of its own.
        middle = min(max(next(guesses, (low + high) // 2), low + 1), high)
        try:
            convert(rows.slice(low, middle))
        except _ROW_ERRORS as failure:
            high, error = middle, failure
            if middle == low + 1:
                break
        else:
            low = middle
    return min(low, rows.size - 1), error
