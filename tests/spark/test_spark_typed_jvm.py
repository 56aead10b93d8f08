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
from support.tiers import choose

from embedlog.errors import InvalidSchemaError
from embedlog.spark import typed_columns
from embedlog.spark.query_planner import QueryPlanner

pytest.importorskip("pyspark")


@pytest.fixture(scope="module")
def planner():
    planner = QueryPlanner()
    yield planner
    planner.close()


def expected(log, fields, *, tombstones=False):
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
        target = typed_columns.arrow_type(field["type"])
        values = spark_values(typed_columns.to_spark(column, target))
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
    max_examples=choose(test=25, all=200, nightly=2000),
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

            rows = jvm.read_typed(reader, plan, schema)

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
            kind = typed_columns.spark_type(field.type, field.name)
        except InvalidSchemaError:
            continue
        fields.append(typed_columns.field_json(field.name, kind))
    if options["values"] == "struct":
        struct = {"type": "struct", "fields": fields}
        fields = [typed_columns.field_json("value", struct)] if fields else []
    names = typed_columns.record_columns(headers=True, tombstones=False)
    known = typed_columns.RECORD_COLUMNS
    return [*fields, *(typed_columns.field_json(name, known[name]) for name in names)]
