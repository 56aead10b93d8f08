"""Plans of batch queries: filters and limits, numbers of rows, and their JSON; without Spark."""

import json
import operator
import random
import subprocess
import sys
from itertools import count

import pytest
from support import tiers
from support.clock import START
from support.manual_compaction import keep
from support.roots import encoded
from support.spark_reads import read_all

import embedlog
from embedlog.errors import DataLossError, InvalidConfigError, OffsetOutOfRangeError
from embedlog.record import TopicPartition
from embedlog.spark import filters
from embedlog.spark.input_partitions import plan_batch
from embedlog.spark.micro_batch import MicroBatchStream
from embedlog.spark.options import SourceOptions
from embedlog.spark.plan import LogInputPartition, plan_to_json
from embedlog.splits.slices import FileChunk, PartitionSlice

NAMES = ("topic", "partition", "offset", "timestamp")
MATCHES = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, values: value in values,
}


def microseconds(time):
    """Return a time as Spark counts it; exact, unlike `timestamp`."""
    return (time - type(time).fromisoformat("1970-01-01T00:00:00+00:00")) // type(time - time)(
        microseconds=1
    )


def keys_of(tasks):
    """Return topic, partition, offset and time of each record that tasks read, sorted."""
    rows = read_all(tasks, NAMES)
    return sorted((*map(row.get, NAMES[:3]), microseconds(row["timestamp"])) for row in rows)


def matching(keys, filters):
    """Return the records for which all filters hold."""
    return [
        key
        for key in keys
        if all(MATCHES[op](key[NAMES.index(column)], value) for column, op, value in filters)
    ]


def slices_of(tasks):
    return [part for task in tasks for part in task.slices]


# Random logs and filters


def random_log(path, dice):
    """Fill topics with small segments: gaps, rolls, compaction, times in any order or none."""
    values = count()
    with embedlog.open(path, maintenance=False) as log:
        for topic in ("a", "b"):
            config = {"segment.bytes": dice.choice([1500, 1 << 20]), "index.interval.bytes": 500}
            log.create_topic(topic, dice.randint(1, 3), config)
            for partition in range(log.root.partitions(topic)):
                part = log.partition(topic, partition)
                for _ in range(dice.randrange(30)):
                    times = [
                        dice.choice([-1, START + dice.randrange(40)])
                        for _ in range(dice.randint(1, 8))
                    ]
                    batch = encoded(*[b"%d" % next(values) for _ in times], at=times)
                    gap = dice.choice([0] * 9 + [1, 20])
                    part.append_at([(part.end_offset() + gap, batch)])
                if dice.random() < 0.5:
                    part.roll()
                if dice.random() < 0.4 and any(info.sealed for info in part.segments.values()):
                    keep(part, {offset for offset in range(300) if dice.random() < 0.5})
        assert log.housekeeping.verify() == []


def random_filter(dice, keys):
    """Return a filter whose value is of a record, or near it."""
    topic, partition, offset, time = dice.choice(keys)
    column = dice.choice(NAMES)
    near = {
        "topic": lambda: dice.choice([topic, "a", "aa", "ö"]),
        "partition": lambda: partition + dice.choice([-1, 0, 0, 0, 1]),
        "offset": lambda: offset + dice.choice([-50, -1, 0, 1, 50]),
        "timestamp": lambda: time + dice.choice([-5000, -1000, -1, 0, 0, 1, 999, 1000]),
    }[column]
    op = dice.choice(list(MATCHES))
    return column, op, [near() for _ in range(dice.randint(1, 5))] if op == "in" else near()


@pytest.mark.parametrize("seed", range(tiers.choose(test=2, all=25, nightly=300)))
def test_filters_that_are_pushed_down_select_as_filters_of_the_rows(tmp_path, seed):
    """Those on topic, partition and offset alone leave exactly the matching records."""
    dice = random.Random(seed)
    random_log(tmp_path / "log", dice)
    options = {"path": str(tmp_path / "log"), "subscribe": "a,b"}
    rows = keys_of(plan_batch(SourceOptions.parse(options)))

    for _ in range(15 if rows else 0):
        filters = [random_filter(dice, rows) for _ in range(dice.randint(1, 3))]
        settings = {
            name: str(dice.randint(1, 30))
            for name in ("minPartitions", "maxRecordsPerPartition")
            if dice.random() < 0.3
        }

        tasks = plan_batch(
            SourceOptions.parse({**options, **settings}), filters, cores=dice.randint(1, 4)
        )

        planned, wanted = keys_of(tasks), matching(rows, filters)
        exact = [part for part in filters if part[0] != "timestamp"]
        assert matching(planned, filters) == wanted, filters
        assert matching(planned, exact) == planned, filters
        if exact == filters:
            assert planned == wanted


@pytest.mark.parametrize("seed", range(tiers.choose(test=2, all=25, nightly=300)))
def test_a_slice_with_a_known_number_of_rows_has_that_many(tmp_path, seed):
    """It is not known where an offset has no record; a limit leaves at least that many rows."""
    dice = random.Random(seed)
    random_log(tmp_path / "log", dice)
    options = {"path": str(tmp_path / "log"), "subscribe": "a,b", "failOnDataLoss": "false"}
    rows = keys_of(plan_batch(SourceOptions.parse(options)))

    for _ in range(15 if rows else 0):
        filters = [random_filter(dice, rows) for _ in range(dice.randint(0, 2))]
        limit = dice.choice([None, dice.randint(0, len(rows) + 5)])
        minimum = str(dice.randint(1, 9))
        tasks = plan_batch(
            SourceOptions.parse({**options, "minPartitions": minimum}), filters, limit
        )

        for part in slices_of(tasks):
            read = keys_of([LogInputPartition(tasks[0].root, (part,))])
            assert part.rows in (None, len(read))
            has_gaps = len(read) < part.until_offset - part.from_offset
            assert part.rows is None if has_gaps else True
        wanted = matching(rows, filters)
        left = matching(keys_of(tasks), filters)
        assert len(left) >= min(len(wanted), len(wanted) if limit is None else limit)
        assert set(left) <= set(wanted)


# Filters


def test_a_filter_selects_partitions_and_their_lease(log, options, send):
    """Records that no task reads are not kept from retention."""
    log.create_topic("u")
    send("t", {0: range(10), 1: range(10)})
    send("u", {0: range(10)})

    tasks = plan_batch(
        SourceOptions.parse(options(subscribe="t,u")),
        [("topic", "in", ["t", "x"]), ("partition", ">", 0), ("offset", ">=", 4)],
    )

    assert [key[:3] for key in keys_of(tasks)] == [("t", 1, offset) for offset in range(4, 10)]
    (lease,) = log.housekeeping.leases()
    assert lease.offsets == {TopicPartition("t", 1): 4}


def test_listed_offsets_are_read_in_runs(log, options, send):
    """Consecutive offsets share a slice, and the lease begins with the first of them."""
    send("t", {0: range(100)})

    tasks = plan_batch(
        SourceOptions.parse(options()), [("offset", "in", [70, 3, 5, 4, 1000, 99, 3])], cores=1
    )

    (task,) = tasks
    bounds = [(part.from_offset, part.until_offset, part.rows) for part in task.slices]
    assert bounds == [(3, 6, 3), (70, 71, 1), (99, 100, 1)]
    (lease,) = log.housekeeping.leases()
    assert lease.offsets == {TopicPartition("t", 0): 3}

    both = [("offset", "in", [5, 6, 7, 9]), ("offset", "in", [9, 6, 7, 8]), ("offset", "<", 9)]
    assert [key[2] for key in keys_of(plan_batch(SourceOptions.parse(options()), both))] == [6, 7]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"startingOffsets": '{"t": {"0": 11, "1": 0}}'}, DataLossError),
        ({"endingOffsets": '{"t": {"0": 11, "1": 0}}'}, OffsetOutOfRangeError),
        (
            {
                "startingOffsets": '{"t": {"0": 9, "1": 0}}',
                "endingOffsets": '{"t": {"0": 3, "1": 0}}',
            },
            OffsetOutOfRangeError,
        ),
    ],
    ids=["start", "end", "order"],
)
@pytest.mark.parametrize(
    "filters", [[], [("partition", "=", 1)], [("offset", "<", 0)], [("timestamp", ">", 1 << 62)]]
)
def test_filters_neither_cause_nor_hide_an_error(options, send, settings, error, filters):
    """The bounds of the query are checked as if there were no filter."""
    send("t", {0: range(10), 1: []})

    with pytest.raises(error):
        plan_batch(SourceOptions.parse(options(**settings)), filters)
    plan_batch(SourceOptions.parse(options()), filters)


@pytest.mark.parametrize(
    ("column", "op", "value", "problem"),
    [
        ("value", "=", "x", "cannot be pushed down"),
        ("offset", "<>", 1, "cannot be pushed down"),
        ("offset", "=", None, "cannot have the value None"),
        ("partition", "<", "1", "cannot have the value '1'"),
        ("topic", "in", ["t", 1], "cannot have the value"),
        ("offset", "in", 1, "cannot have the value 1"),
        ("timestamp", ">", True, "cannot have the value True"),
    ],
)
def test_other_filters_are_refused(options, send, column, op, value, problem):
    """Whoever pushes them would otherwise not apply them again."""
    send("t", {0: range(10)})

    with pytest.raises(InvalidConfigError, match=problem):
        plan_batch(SourceOptions.parse(options()), [(column, op, value)])


def test_no_value_is_in_an_empty_list(options, send):
    """Nor is a time."""
    send("t", {0: range(10)})

    assert plan_batch(SourceOptions.parse(options()), [("offset", "in", [])]) == []
    assert filters.parse([("timestamp", "in", [])]).earliest_ms is None


# Limits and rows


def test_a_limit_plans_no_more_records_than_it_needs(log, options, send):
    """As many as possible from the first partitions; an exact filter comes first."""
    send("t", {0: range(10), 1: range(10)})

    def bounds(limit, *filters):
        tasks = plan_batch(SourceOptions.parse(options()), filters, limit, cores=2)
        parts = sorted(slices_of(tasks), key=lambda part: part.partition)
        return [(part.partition, part.from_offset, part.until_offset, part.rows) for part in parts]

    assert bounds(0) == []
    assert bounds(3) == [(0, 0, 3, 3)]
    assert bounds(10) == [(0, 0, 10, 10)]
    assert bounds(12) == [(0, 0, 10, 10), (1, 0, 2, 2)]
    assert bounds(50) == bounds(None) == [(0, 0, 10, 10), (1, 0, 10, 10)]
    assert bounds(3, ("offset", ">", 7)) == [(0, 8, 10, 2), (1, 8, 9, 1)]
    # Spark filters again, and must find enough.
    assert bounds(3, ("timestamp", "<", 0)) == bounds(None)


def test_a_limit_counts_only_offsets_that_have_a_record(log, options):
    """In a segment with a gap none is counted; behind it, it counts on."""
    partition_log = log.partition("t", 0)
    partition_log.append_at([(5, encoded(b"5", b"6"))])
    partition_log.roll()
    partition_log.append([encoded(b"7", b"8", b"9")])
    log.partition("t", 1).append([encoded(b"x")])

    def planned(limit):
        tasks = plan_batch(SourceOptions.parse(options()), limit=limit, cores=1)
        return [(part.partition, part.until_offset, part.rows) for part in slices_of(tasks)]

    assert planned(2) == [(0, 9, None)]
    assert planned(3) == [(0, 10, None)]
    assert planned(4) == [(0, 10, None), (1, 1, 1)]


# JSON and imports


def test_the_plan_as_json_has_all_that_a_task_needs(log, options, send):
    """Lists instead of objects, since there is one for each segment."""
    log.alter_topic("t", {"segment.bytes": 2000})
    send("t", {0: range(50), 1: range(50)})
    for number in range(50):
        log.partition("t", 1).append([encoded(b"%d" % number, headers=[[("h", b"1")]])])
    tasks = plan_batch(SourceOptions.parse(options(minPartitions=4)))

    plan = json.loads(json.dumps(plan_to_json(log.path, tasks)))

    assert plan.keys() == {"root", "size", "rows", "schemas", "tasks"}
    assert (plan["root"], plan["rows"]) == (log.path, 150)
    assert plan["size"] == sum(part.size for part in slices_of(tasks)) > 0
    assert [
        LogInputPartition(
            plan["root"],
            tuple(
                PartitionSlice(
                    *(*part[:5], tuple(FileChunk(*chunk) for chunk in part[7]), *part[5:7]),
                    tuple(part[8]),
                )
                for part in task
            ),
        )
        for task in plan["tasks"]
    ] == tasks
    assert {len(task) for task in plan["tasks"]} >= {1}
    assert plan_to_json(log.path, []) == {
        "root": log.path,
        "size": 0,
        "rows": 0,
        "schemas": {},
        "tasks": [],
    }


def test_a_stream_plans_for_the_cores_that_it_is_told(log, options, send):
    """The planner does not run where the tasks do."""
    log.create_topic("many", 9)
    send("many", {number: [1] for number in range(9)})
    stream = MicroBatchStream(
        SourceOptions.parse(options(subscribe="many", startingOffsets="earliest"))
    )
    start = stream.initial_offset()
    end = stream.latest_offset(start)

    tasks = stream.plan_input_partitions(start, end, cores=4)

    assert sorted(len(task.slices) for task in tasks) == [2, 2, 2, 3]
    stream.close()


def test_planning_imports_neither_pyarrow_nor_spark(log, options, send):
    """So a planner starts sooner; only times, and partitions never used, need pyarrow."""
    send("t", {0: range(10), 1: range(10)})
    program = (
        "import sys, json\n"
        "from embedlog.spark import input_partitions, micro_batch, plan\n"
        "from embedlog.spark.options import SourceOptions\n"
        "options = SourceOptions.parse(json.loads(sys.argv[1]))\n"
        "tasks = input_partitions.plan_batch(options, [('offset', '<', 5)])\n"
        "assert plan.plan_to_json(options.path, tasks)['rows'] == 10\n"
        "stream = micro_batch.MicroBatchStream(options)\n"
        "stream.latest_offset(stream.initial_offset())\n"
        "print(sorted({'pyarrow', 'numpy', 'pyspark', 'pandas'} & sys.modules.keys()))\n"
    )
    command = [sys.executable, "-c", program, json.dumps(options())]

    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n", done.stderr
