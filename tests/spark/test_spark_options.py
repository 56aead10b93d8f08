"""Options of a reader: names, values and kind of query are checked before the log is opened."""

import json
import time

import pytest

from embedlog.errors import InvalidConfigError
from embedlog.spark.options import EARLIEST, LATEST, OffsetBound, SourceOptions

REQUIRED = {"path": "/data/log", "subscribe": "flights"}


def parsed(**options):
    return SourceOptions.parse(
        {**REQUIRED, **{name: str(value) for name, value in options.items()}}
    )


def test_a_path_and_a_subscription_are_enough():
    """The other options have Kafka's defaults."""
    options = parsed()

    assert options.path == "/data/log"
    assert options.subscription == (("flights",), None, None)
    assert options.fail_on_data_loss is True
    assert options.include_headers is False
    assert (options.starting_offsets, options.ending_offsets, options.ignored) == (None, None, ())


def test_names_may_be_in_any_case():
    """Spark passes names in lower case, or as they were written."""
    options = SourceOptions.parse(
        {"PATH": "/data/log", "SubScribe": "a, b,a", "MAXOFFSETSPERTRIGGER": "7"}
    )

    assert options.subscription.topics == ("a", "b")
    assert options.max_offsets_per_trigger == 7


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("subscribed", "subscribe"),
        ("startingOffset", "startingOffsets"),
        ("maxOffsetPerTrigger", "maxOffsetsPerTrigger"),
        ("failondatalos", "failOnDataLoss"),
        ("xyz", "The options are path"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_known_one(name, suggestion):
    """A typing error must not pass silently."""
    with pytest.raises(InvalidConfigError, match=suggestion):
        SourceOptions.parse({**REQUIRED, name: "1"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"maxoffsetspertrigger": "0"}, "'maxOffsetsPerTrigger' must be"),
        ({"txnappid": "a"}, "no option 'txnAppId'.*That is an option of a writer"),
        ({"sTARTINGoFFSET": "1"}, "'sTARTINGoFFSET'.*Did you mean 'startingOffsets'"),
    ],
)
def test_messages_spell_names_as_the_documentation_does(options, message):
    """Spark passes them in lower case; an unknown name is spelled as it was passed."""
    with pytest.raises(InvalidConfigError, match=message):
        SourceOptions.parse({**REQUIRED, **options})


def test_options_about_brokers_are_accepted_and_listed():
    """A pipeline for Kafka need not be rewritten."""
    ineffective = {"kafka.bootstrap.servers": "a:9092", "kafkaconsumer.polltimeoutms": "3"}

    options = SourceOptions.parse({**REQUIRED, **ineffective, "kafka.security.protocol": "SSL"})

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
def test_options_that_kafkas_source_refuses_are_refused(name):
    """They would have no effect in Kafka's source either."""
    with pytest.raises(InvalidConfigError, match="is not supported"):
        SourceOptions.parse({**REQUIRED, name: "x"})


@pytest.mark.parametrize(
    ("options", "message"),
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
def test_exactly_one_valid_subscription_is_required(options, message):
    """This is the rule of Kafka's source."""
    with pytest.raises(InvalidConfigError, match=message):
        SourceOptions.parse(options)


@pytest.mark.parametrize(
    "options",
    [
        *({"minPartitions": value} for value in (0, -1, "a", 1.5)),
        *({"maxRecordsPerPartition": value} for value in (0, "")),
        *({"maxOffsetsPerTrigger": value} for value in (0, "1e3")),
        *({"maxTriggerDelay": value} for value in ("x", "-1s", "3 weeks")),
        *({"includeHeaders": value} for value in ("yes", "1")),
        {"startingTimestamp": "yesterday"},
        {"startingTimestamp": "-1"},
        {"startingTimestamp": "1969-12-31"},
        {"startingTimestamp": "2026-13-01"},
        {"startingTimestamp": str(1 << 63)},
        {"endingTimestamp": "100000w"},
        {"endingTimestamp": "99999999999999w"},
        {"startingOffsets": "beginning"},
        {"startingOffsets": '{"t": {"0": -3}}'},
        {"startingOffsets": '{"t": {"a": 1}}'},
        {"startingOffsets": "{}"},
        {"startingOffsetsByTimestamp": '{"t": {"0": -1}}'},
        {"startingOffsetsByTimestamp": '{"t": {"0": "tomorrow"}}'},
        {"startingOffsetsByTimestamp": '{"t": {"0": Infinity}}'},
        {"startingOffsetsByTimestampStrategy": "earliest"},
        {"visibility": "committed"},
        {"minOffsetsPerTrigger": 10, "maxOffsetsPerTrigger": 9},
    ],
    ids=str,
)
def test_an_invalid_value_is_refused_by_the_name_of_its_option(options):
    """The error names the option."""
    with pytest.raises(InvalidConfigError, match=next(iter(options))):
        parsed(**options)


def test_offsets_are_names_or_json():
    """Names in any case; JSON with -2 and -1 for single partitions, or names for whole topics."""
    assert parsed(startingOffsets="EARLIEST").starting_offsets == OffsetBound("offset", EARLIEST)
    assert parsed(endingOffsets="latest").ending_offsets == OffsetBound("offset", LATEST)
    bound = parsed(startingOffsets='{"t": {"0": 23, "1": -2}, "u": "latest"}').starting_offsets
    assert [bound.get("t", 0), bound.get("t", 1), bound.get("t", 2)] == [23, EARLIEST, None]
    assert bound.get("u", 7) == LATEST
    assert bound.get("v", 0) is None


def test_one_timestamp_takes_precedence_over_several_and_those_over_offsets():
    """This is Kafka's order, for the start and the end."""
    times = '{"t": {"0": 1000}}'
    assert parsed(
        startingOffsets="earliest", startingOffsetsByTimestamp=times
    ).starting_offsets == OffsetBound("time", None, {"t": {0: 1000}})
    assert parsed(endingOffsetsByTimestamp=times, endingTimestamp=5).ending_offsets == OffsetBound(
        "time", 5
    )


NOON_MS = 1_769_860_800_000


@pytest.mark.parametrize(
    "text",
    [
        *("2026-01-31T12:00:00Z", "2026-01-31T13:00+01:00", "2026-01-31T12:00"),
        *("2026-01-31 12:00:00", "1769860800000"),
    ],
)
@pytest.mark.parametrize("side", ["starting", "ending"])
def test_a_time_is_a_date_or_milliseconds(side, text):
    """A time without a zone is in UTC."""
    for_all = parsed(**{f"{side}Timestamp": text})
    by_topic = {"t": {"0": text, "1": NOON_MS}, "u": "2026-01-31"}
    by_partition = parsed(**{f"{side}OffsetsByTimestamp": json.dumps(by_topic)})

    assert getattr(for_all, f"{side}_offsets") == OffsetBound("time", NOON_MS)
    expected = {"t": {0: NOON_MS, 1: NOON_MS}, "u": NOON_MS - 12 * 3_600_000}
    assert getattr(by_partition, f"{side}_offsets") == OffsetBound("time", None, expected)


def test_a_time_may_be_how_long_ago():
    """The texts are those of the rest of the library."""
    earliest_ms = time.time_ns() // 1_000_000 - 5_400_000
    bound = parsed(startingTimestamp="90m").starting_offsets

    assert earliest_ms <= bound.for_all <= time.time_ns() // 1_000_000 - 5_400_000


@pytest.mark.parametrize(
    ("text", "ms"),
    [("15m", 900_000), ("90s", 90_000), ("250", 250), ("1h", 3_600_000), ("2 d", 172_800_000)],
)
def test_durations_are_read_as_spark_reads_them(text, ms):
    """A duration is a number and a unit, by default milliseconds."""
    assert parsed(maxTriggerDelay=text).max_trigger_delay_ms == ms


@pytest.mark.parametrize("text", ["latest", '{"t": {"0": -1}}', '{"t": "latest"}'])
def test_a_batch_cannot_start_at_the_latest_offset(text):
    """It would read nothing."""
    with pytest.raises(InvalidConfigError, match="cannot start at the latest"):
        parsed(startingOffsets=text).check_batch()


def test_a_batch_cannot_end_at_the_earliest_offset():
    """It would read nothing."""
    with pytest.raises(InvalidConfigError, match="cannot end at the earliest"):
        parsed(endingOffsets='{"t": {"0": -2}}').check_batch()


def test_a_batch_warns_of_the_options_of_triggers(caplog):
    """They have no effect."""
    names = ["maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"]
    parsed(**dict.fromkeys(names, "1")).check_batch()

    assert [name for name in names if name in caplog.text] == names


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("endingOffsets", "latest"),
        ("endingTimestamp", "5"),
        ("endingOffsetsByTimestamp", '{"t": {"0": 1}}'),
    ],
)
def test_a_stream_has_no_end(name, value):
    """The trigger ends it."""
    with pytest.raises(InvalidConfigError, match=name):
        parsed(**{name: value}).check_stream()
