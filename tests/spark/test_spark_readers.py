"""The reader in the JVM and the one in Python return the same rows; so does embedlog's consumer."""

import json
import random
import tempfile

import pytest
from support.clock import START
from support.forks import in_memory
from support.jvm_tasks import JvmTasks, consumer_rows, python_rows
from support.random_topics import fill_topics
from support.spark_reads import ALL
from support.tiers import choose

import embedlog
from embedlog.spark.input_partitions import plan_batch
from embedlog.spark.source_options import parse

SEEDS = range(choose(test=6, all=60, nightly=1000))


@pytest.fixture(scope="module")
def jvm(tmp_path_factory):
    """A JVM that reads input partitions."""
    tasks = JvmTasks(tmp_path_factory.mktemp("jvm"))
    yield tasks
    tasks.close()


@pytest.fixture
def random_log():
    """Return a log with the random topics of a seed; in memory, since it flushes often."""
    with tempfile.TemporaryDirectory(prefix="embedlog-", dir=in_memory()) as directory:
        logs = []

        def random_log(dice, **options):
            logs.append(embedlog.open(f"{directory}/{len(logs)}", maintenance=False))
            fill_topics(logs[-1], dice, **options)
            assert logs[-1].verify() == []
            return logs[-1]

        yield random_log
        for log in logs:
            log.close()


def random_options(log, dice):
    """Return options of a reader that select some of the rows."""
    options = {"path": log.path, "subscribe": "a,b", "includeHeaders": "true"}
    for name, most in (("minPartitions", 9), ("maxRecordsPerPartition", 200)):
        if dice.random() < 0.3:
            options[name] = str(dice.randint(1, most))
    if dice.random() < 0.2:
        options["maxBytesPerPartition"] = str(dice.choice([300, 3000, 50_000]))
    kind = dice.randrange(6)
    partitions = [(topic, part) for topic in "ab" for part in range(log.root.partitions(topic))]
    bounds = {}
    for topic, number in partitions:
        part = log.partition(topic, number)
        first, end = part.start_offset(), part.end_offset()
        start = dice.randint(first, end)
        bounds.setdefault(topic, {})[str(number)] = start, dice.randint(start, end)
    if kind in (1, 2):
        starts = {t: {p: bound[0] for p, bound in of.items()} for t, of in bounds.items()}
        options["startingOffsets"] = json.dumps(starts)
    if kind in (2, 3):
        ends = {t: {p: bound[1] for p, bound in of.items()} for t, of in bounds.items()}
        options["endingOffsets"] = json.dumps(ends) if kind == 2 else "latest"
    if kind == 4:
        options["startingTimestamp"] = str(START + dice.randrange(-60, 60))
        options["startingOffsetsByTimestampStrategy"] = "latest"
    if kind == 5:
        options["endingTimestamp"] = str(START + dice.randrange(-60, 560))
    return options


def sorted_rows(rows):
    return sorted(rows, key=repr)


# Rows


@pytest.mark.parametrize("seed", SEEDS)
def test_tasks_return_the_rows_that_python_and_a_consumer_return(jvm, random_log, seed):
    """Any columns of any ranges of any topics."""
    dice = random.Random(seed)
    log = random_log(dice)
    tasks = plan_batch(parse({"path": log.path, "subscribe": "a,b"}))
    rows = jvm.read(tasks)
    assert rows == python_rows(tasks)
    assert sorted_rows(rows) == sorted_rows(consumer_rows(log, "a", "b"))

    for _ in range(12):
        tasks = plan_batch(parse(random_options(log, dice)), cores=dice.randint(1, 3))
        names = tuple(dice.sample(ALL, dice.randint(1, len(ALL))))
        expected = python_rows(tasks, names)
        assert jvm.read(tasks, names) == expected, names
        assert len(jvm.read(tasks, ())) == len(expected)
