"""How long does a conversion take: columns to Avro and JSON, and back?"""

from itertools import count

import pytest
from flights import flights

import embedlog

ROWS = 100_000


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Return a log with flights of 19 columns as columns, as Avro and as JSON."""
    with embedlog.open(tmp_path_factory.mktemp("convert") / "log", maintenance=False) as log:
        table = flights().slice(0, ROWS)
        log.create_topic("typed", schema=table.schema)
        with log.producer() as producer:
            producer.append_table("typed", table)
        log.convert("typed", "avro")
        log.convert("typed", "json", to="json")
        yield log


@pytest.mark.parametrize(
    ("source", "to"), [("typed", "avro"), ("avro", "typed"), ("typed", "json"), ("json", "typed")]
)
def bench_convert(benchmark, note, log, source, to):
    """A new topic for each round."""
    schema = flights().schema if source == "json" else None
    numbers = count()

    def convert():
        return log.convert(source, f"{source}-{to}-{next(numbers)}", to=to, schema=schema)

    assert benchmark.pedantic(convert, rounds=3, warmup_rounds=1).records == ROWS
    note(records_per_second=ROWS / benchmark.stats.stats.min)
