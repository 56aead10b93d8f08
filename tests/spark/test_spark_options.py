"""Options are checked before anything is read: right names, right values, right kind of query."""

import pytest

from embedlog.errors import InvalidConfigError
from embedlog.spark.source_options import (
    EARLIEST,
    LATEST,
    OffsetBound,
    check_batch,
    check_stream,
    parse,
)

LEAST = {"path": "/data/log", "subscribe": "flights"}


def parsed(**options):
    return parse({**LEAST, **{name: str(value) for name, value in options.items()}})


def test_a_path_and_a_subscription_are_enough():
    """The rest has Kafka's defaults."""
    options = parsed()

    assert options.path == "/data/log"
    assert options.subscription == (("flights",), None, None)
    assert options.fail_on_data_loss is True
    assert options.include_headers is False
    assert (options.starting_offsets, options.ending_offsets, options.ignored) == (None, None, ())


def test_names_are_found_in_any_case():
    """Spark hands options over with lower-case names, or as they were written."""
    options = parse({"PATH": "/data/log", "SubScribe": "a, b,a", "MAXOFFSETSPERTRIGGER": "7"})

    assert options.subscription.topics == ("a", "b")
    assert options.max_offsets_per_trigger == 7


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("subscribed", "subscribe"),
        ("startingOffset", "startingOffsets"),
        ("maxOffsetPerTrigger", "maxOffsetsPerTrigger"),
        ("failondatalos", "failOnDataLoss"),
        ("topic", "writer"),
        ("xyz", "The options are path"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_known_one(name, near):
    """A typing error must not be silence."""
    with pytest.raises(InvalidConfigError, match=near):
        parse({**LEAST, name: "1"})


def test_options_about_brokers_are_taken_and_told():
    """A pipeline that comes from Kafka need not be rewritten."""
    given = {"kafka.bootstrap.servers": "a:9092", "kafkaConsumer.pollTimeoutMs": "3"}

    options = parse({**LEAST, **given, "kafka.security.protocol": "SSL"})

    assert options.ignored == (
        "kafka.bootstrap.servers",
        "kafka.security.protocol",
        "kafkaConsumer.pollTimeoutMs",
    )


@pytest.mark.parametrize(
    "name",
    [
        *("kafka.auto.offset.reset", "kafka.enable.auto.commit", "kafka.interceptor.classes"),
        *("kafka.key.deserializer", "kafka.value.deserializer", "KAFKA.Value.Deserializer"),
    ],
)
def test_what_kafkas_source_refuses_is_refused(name):
    """It would not do what it says there either."""
    with pytest.raises(InvalidConfigError, match="is not supported"):
        parse({**LEAST, name: "x"})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"subscribe": "t"}, "'path' is missing"),
        ({"path": " ", "subscribe": "t"}, "'path' is missing"),
        ({"path": "/p"}, "none is set"),
        ({"path": "/p", "subscribe": "t", "assign": '{"t": [0]}'}, "assign and subscribe are set"),
        ({"path": "/p", "subscribe": ""}, "'subscribe' is empty"),
        ({"path": "/p", "subscribe": " , "}, "names no topic"),
        ({"path": "/p", "subscribePattern": "  "}, "'subscribePattern' is empty"),
        ({"path": "/p", "subscribePattern": "("}, "regular expression"),
        ({"path": "/p", "assign": "{}"}, "JSON such as"),
        ({"path": "/p", "assign": '{"t": []}'}, "JSON such as"),
        ({"path": "/p", "assign": '{"t": [-1]}'}, "JSON such as"),
        ({"path": "/p", "assign": "[0]"}, "JSON such as"),
        ({"path": "/p", "assign": "t:0"}, "JSON such as"),
    ],
)
def test_exactly_one_subscription_that_says_something(options, told):
    """As Kafka's source has it."""
    with pytest.raises(InvalidConfigError, match=told):
        parse(options)


@pytest.mark.parametrize(
    "given",
    [
        *({"minPartitions": value} for value in (0, -1, "a", 1.5)),
        *({"maxRecordsPerPartition": value} for value in (0, "")),
        *({"maxOffsetsPerTrigger": value} for value in (0, "1e3")),
        *({"maxTriggerDelay": value} for value in ("x", "-1s", "3 weeks")),
        *({"includeHeaders": value} for value in ("yes", "1")),
        {"startingTimestamp": "yesterday"},
        {"startingTimestamp": "-1"},
        {"startingOffsets": "beginning"},
        {"startingOffsets": '{"t": {"0": -3}}'},
        {"startingOffsets": '{"t": {"a": 1}}'},
        {"startingOffsets": "{}"},
        {"startingOffsetsByTimestamp": '{"t": {"0": -1}}'},
        {"startingOffsetsByTimestampStrategy": "earliest"},
        {"visibility": "committed"},
        {"minOffsetsPerTrigger": 10, "maxOffsetsPerTrigger": 9},
    ],
    ids=str,
)
def test_a_value_that_says_nothing_is_refused_by_its_name(given):
    """The error names the option and what was wanted."""
    with pytest.raises(InvalidConfigError, match=next(iter(given))):
        parsed(**given)


def test_offsets_are_words_or_json():
    """Words in any case; -2 and -1 for single partitions; a topic as a whole."""
    assert parsed(startingOffsets="EARLIEST").starting_offsets == OffsetBound("offset", EARLIEST)
    assert parsed(endingOffsets="latest").ending_offsets == OffsetBound("offset", LATEST)
    bound = parsed(startingOffsets='{"t": {"0": 23, "1": -2}, "u": "latest"}').starting_offsets
    assert [bound.get("t", 0), bound.get("t", 1), bound.get("t", 2)] == [23, EARLIEST, None]
    assert bound.get("u", 7) == LATEST
    assert bound.get("v", 0) is None


def test_a_time_for_all_beats_times_for_each_which_beat_offsets():
    """Kafka's order, on both sides."""
    times = '{"t": {"0": 1000}}'
    assert parsed(
        startingOffsets="earliest", startingOffsetsByTimestamp=times
    ).starting_offsets == OffsetBound("time", None, {"t": {0: 1000}})
    assert parsed(endingOffsetsByTimestamp=times, endingTimestamp=5).ending_offsets == OffsetBound(
        "time", 5
    )


@pytest.mark.parametrize(
    ("text", "ms"),
    [("15m", 900_000), ("90s", 90_000), ("250", 250), ("1h", 3_600_000), ("2 d", 172_800_000)],
)
def test_durations_are_read_as_spark_reads_them(text, ms):
    """A number and a unit; milliseconds without one."""
    assert parsed(maxTriggerDelay=text).max_trigger_delay_ms == ms


@pytest.mark.parametrize("text", ["latest", '{"t": {"0": -1}}', '{"t": "latest"}'])
def test_a_batch_cannot_start_at_the_end(text):
    """There would be nothing to read."""
    with pytest.raises(InvalidConfigError, match="cannot start at the latest"):
        check_batch(parsed(startingOffsets=text))


def test_a_batch_cannot_end_at_the_beginning():
    """The same, from the other side."""
    with pytest.raises(InvalidConfigError, match="cannot end at the earliest"):
        check_batch(parsed(endingOffsets='{"t": {"0": -2}}'))


def test_a_batch_has_no_triggers():
    """They are told as ignored."""
    options = parsed(maxOffsetsPerTrigger=5, minOffsetsPerTrigger=1, maxTriggerDelay="1s")

    assert check_batch(options) == [
        "maxOffsetsPerTrigger",
        "minOffsetsPerTrigger",
        "maxTriggerDelay",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("endingOffsets", "latest"),
        ("endingTimestamp", "5"),
        ("endingOffsetsByTimestamp", '{"t": {"0": 1}}'),
    ],
)
def test_a_stream_has_no_end(name, value):
    """Only a trigger ends it."""
    with pytest.raises(InvalidConfigError, match=name):
        check_stream(parsed(**{name: value}))
