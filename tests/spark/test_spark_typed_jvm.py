"""The reader in the JVM returns the rows of typed topics that embedlog's own tables have."""

import json
import shutil
import tempfile

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from model.test_typed_model import TypedTopicMachine
from support.forks import in_memory
from support.jvm_tasks import spark_values
from support.tiers import choose, sample

import embedlog
from embedlog.errors import InvalidSchemaError
from embedlog.spark import columns as spark_columns
from embedlog.spark.input_partitions import plan_batch
from embedlog.spark.options import SourceOptions
from embedlog.spark.partition_reader import read_input_partition
from embedlog.spark.query_planner import QueryPlanner
from embedlog.spark.query_schemas import QuerySchemas

pytest.importorskip("pyspark")

PROJECTIONS = st.sampled_from(["CODEGEN_ONLY", "NO_CODEGEN"])
"""How Spark copies rows; without generated code it asks some vectors for values that are null."""


@pytest.fixture(scope="module")
def planner():
    planner = QueryPlanner()
    yield planner
    planner.close()


def expected(log, fields):
    """Return the rows of topic t, by partition and offset, as Spark is to see them."""
    table = log.topic("t").to_arrow().combine_chunks()
    columns = []
    for field in fields:
        name, kind = field["name"], field["type"]
        if name == "topic":
            columns.append([b"t".hex()] * len(table))
        elif name == "timestampType":
            columns.append([0] * len(table))
        elif name == "value":
            columns.append(list(map(list, zip(*columns_of(table, kind["fields"]), strict=True))))
        else:
            columns += columns_of(table, [field])
    return list(zip(*columns, strict=True))


def columns_of(table, fields):
    columns = []
    for field in fields:
        if field["name"] == "headers" and "headers" not in table.schema.names:
            columns.append([None] * len(table))
            continue
        column = table[field["name"]]
        column = column.chunk(0) if column.num_chunks else pa.array([], column.type)
        target = spark_columns.arrow_type(field["type"])
        values = spark_values(spark_columns.to_spark(column, target))
        # A record without headers has null, as for Kafka's source.
        columns.append([v or None for v in values] if field["name"] == "headers" else values)
    return columns


def in_order(rows, fields):
    names = [field["name"] for field in fields]
    partition, offset = names.index("partition"), names.index("offset")
    return sorted(rows, key=lambda row: (row[partition], row[offset]))


def plain(rows):
    """Return rows with lists instead of tuples; a record without headers has none."""
    return json.loads(json.dumps(rows))


@settings(
    max_examples=choose(test=8, all=200, nightly=2000),
    suppress_health_check=list(HealthCheck),
    deadline=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)
@given(data=st.data())
def test_random_topics_have_the_rows_that_python_has(jvm, planner, data):
    """Any schema, any changes of it, compression, headers, tombstones, and any of the columns."""
    path = tempfile.mkdtemp(prefix="embedlog-", dir=in_memory())
    try:
        machine = TypedTopicMachine(data, f"{path}/log")
        machine.run(6)
        with machine.log as log:
            as_struct = data.draw(st.booleans())
            options = {"path": log.path, "subscribe": "t", "includeHeaders": "true"}
            options["values"] = "struct" if as_struct else "columns"
            usable = usable_columns(log, planner, options)
            fields = data.draw(st.lists(st.sampled_from(usable), unique_by=lambda f: f["name"]))
            names = {field["name"] for field in fields}
            fields += [
                f for f in usable if f["name"] in ("partition", "offset") and f["name"] not in names
            ]
            schema = {"type": "struct", "fields": fields}
            reader = planner.check_reader(options, schema=json.dumps(schema))
            plan = planner.plan_batch(options, cores=data.draw(st.integers(1, 3)))

            rows = jvm.read_typed(reader, plan, schema, projection=data.draw(PROJECTIONS))

            assert plain(in_order(rows, fields)) == plain(in_order(expected(log, fields), fields))
            if plan["rows"] is not None:
                assert plan["rows"] == len(rows)
    finally:
        shutil.rmtree(path)


def usable_columns(log, planner, options):
    """Return the columns of a topic that Spark has a type for."""
    try:
        return json.loads(planner.check_reader(options)["schema"])["fields"]
    except InvalidSchemaError:
        pass
    fields = []
    for field in log.topic("t").schema_history()[-1].columns:
        try:
            kind = spark_columns.spark_type(field.type, field.name)
        except InvalidSchemaError:
            continue
        fields.append(spark_columns.field_json(field.name, kind))
    if options["values"] == "struct":
        struct = {"type": "struct", "fields": fields}
        fields = [spark_columns.field_json("value", struct)] if fields else []
    tombstones = options.get("includeTombstones") == "true"
    names = spark_columns.record_columns(headers=True, tombstones=tombstones)
    known = spark_columns.RECORD_COLUMNS
    return [*fields, *(spark_columns.field_json(name, known[name]) for name in names)]


@settings(
    max_examples=choose(test=5, all=200, nightly=2000),
    suppress_health_check=list(HealthCheck),
    deadline=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)
@given(data=st.data())
def test_both_readers_return_the_same_rows_with_any_options(jvm, planner, data):
    """With tombstones or without, as columns or as a struct, after any changes of the schema."""
    path = tempfile.mkdtemp(prefix="embedlog-", dir=in_memory())
    try:
        machine = TypedTopicMachine(data, f"{path}/log")
        machine.run(6)
        with machine.log as log:
            options = {"path": log.path, "subscribe": "t", "includeHeaders": "true"}
            options["values"] = data.draw(st.sampled_from(["columns", "struct"]))
            options["includeTombstones"] = data.draw(st.sampled_from(["true", "false"]))
            fields = usable_columns(log, planner, options)
            schema = {"type": "struct", "fields": fields}
            reader = planner.check_reader(options, schema=json.dumps(schema))
            plan = planner.plan_batch(options, cores=data.draw(st.integers(1, 3)))

            rows = jvm.read_typed(reader, plan, schema, projection=data.draw(PROJECTIONS))
            in_jvm = plain(in_order(rows, fields))

            assert in_jvm == plain(in_order(python_rows(options, fields), fields))
            if options["includeTombstones"] == "true":
                assert len(in_jvm) == len(list(log.topic("t")))
    finally:
        shutil.rmtree(path)


def python_rows(options, fields):
    """Return the rows that the reader in Python reads."""
    parsed = SourceOptions.parse(options)
    schemas = QuerySchemas(parsed)
    schemas.select(fields)
    rows, names = [], tuple(field["name"] for field in fields)
    for partition in plan_batch(parsed, schemas=schemas):
        for batch in read_input_partition(partition, names, True, fields):
            rows += zip(*map(spark_values, batch.columns), strict=True)
    return rows


# Filters


ROWS = 4000
FILTERED = pa.schema(
    [
        pa.field("number", pa.int32()),
        pa.field("small", pa.uint8()),
        pa.field("price", pa.float64()),
        pa.field("name", pa.string()),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("ms", tz="UTC"), nullable=False),
    ]
)
CONDITIONS = (
    *("number = 17", "number >= 3990", "3990 <= number", "number in (1, 3999, null)", "number < 0"),
    *("number > 100 and number < 130 and price > 50.5", "small = 7", "price <= 1.5", "small > 254"),
    *("name = 'name 0007'", "name >= 'name 3999'", "day = date'1970-01-05'", "number is null"),
    *("at >= timestamp'1970-01-01 01:06:00Z'", "at = timestamp_micros(1500)", "number <=> 5"),
    *("number = 17 or number = 3000", "number > 5000", "not (number < 3999)"),
)


@pytest.fixture(scope="module")
def filtered_log(tmp_path_factory):
    """A topic with values that grow with the offset, in many batches and some segments."""
    with embedlog.open(tmp_path_factory.mktemp("filters") / "log", maintenance=False) as log:
        config = {"segment.bytes": 60_000, "statistics.columns": "name"}
        log.create_topic("t", 2, config, schema=FILTERED, timestamp="at")
        with log.producer() as producer:
            for start in range(0, ROWS, 100):
                numbers = list(range(start, start + 100))
                table = {
                    "number": numbers,
                    "small": [start // 200] * 100,
                    "price": [number / 2 for number in numbers],
                    "name": [f"name {number:04}" for number in numbers],
                    "day": [number // 86 for number in numbers],
                    "at": [number * 1000 for number in numbers],
                }
                columns = [pa.array(table[f.name]).cast(_number(f.type)) for f in FILTERED]
                arrays = [c.cast(f.type) for c, f in zip(columns, FILTERED, strict=True)]
                made = pa.table(arrays, schema=FILTERED)
                producer.append_table("t", made, partition=start // 100 % 2).result()
        yield log


def _number(data_type):
    if pa.types.is_date32(data_type):
        return pa.int32()
    return pa.int64() if pa.types.is_timestamp(data_type) else data_type


@pytest.mark.tier("test")
@pytest.mark.parametrize("reader", ["jvm"])
@pytest.mark.parametrize("values", choose(test=["struct"], all=["columns", "struct"]))
def test_filters_leave_out_segments_and_batches_and_no_row(spark, filtered_log, values):
    """The rows are those of a filter on the same rows elsewhere, where nothing is left out."""
    options = {"path": filtered_log.path, "subscribe": "t", "values": values}
    frame = spark.read.format("embedlog").options(**options).load()
    names = ("value.*",) if values == "struct" else tuple(FILTERED.names)
    frame = frame.selectExpr("offset", "partition", *names)
    everything = frame.collect()
    assert len(everything) == ROWS
    elsewhere = spark.createDataFrame(everything, frame.schema)
    for condition in sample(CONDITIONS, 5):
        rows = frame.filter(condition)
        if condition == "number = 17":
            assert "skips by [number = 17]" in rows._jdf.queryExecution().toString()
        expected = elsewhere.filter(condition).collect()
        assert sorted(map(repr, rows.collect())) == sorted(map(repr, expected)), condition


def test_a_plan_with_filters_reads_less(filtered_log, planner):
    """By the statistics of segments, and of the batches in sealed ones."""

    def offsets(*filters):
        options = {"path": filtered_log.path, "subscribe": "t"}
        plan = planner.plan_batch(options, column_filters=filters)
        return sum(part[3] - part[2] for task in plan["tasks"] for part in task)

    assert offsets() == ROWS
    assert 100 <= offsets(["number", "=", 17]) < ROWS / 2
    assert offsets(["number", "=", 17], ["name", ">", "name 2000"]) < ROWS / 2
    assert offsets(["at", "<", 1_000_000]) < ROWS / 2
    assert offsets(["small", "in", [1, 2]]) < ROWS / 2
    # What statistics cannot tell is read.
    assert offsets(["nothing", "=", 1]) == offsets(["small", "=", "text"]) == ROWS
    assert offsets(["at", "=", 1]) == offsets(["number", "=", 1.5]) == ROWS
