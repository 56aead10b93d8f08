"""Settings: Kafka's names, units and defaults, validated once and by name."""

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedlog.config import (
    LONG_MAX,
    ConsumerConfig,
    ProducerConfig,
    TopicConfig,
    describe_network_settings,
)
from embedlog.errors import InvalidConfigError

CONFIGS = [TopicConfig, ProducerConfig, ConsumerConfig]


def test_a_topic_has_kafkas_defaults():
    """Except where columns need another value."""
    config = TopicConfig()

    assert (config.segment_bytes, config.segment_ms) == (1073741824, 604800000)
    assert (config.retention_ms, config.retention_bytes) == (604800000, -1)
    assert (config.max_message_bytes, config.cleanup_policy) == (1048588, "delete")
    assert (config.flush_messages, config.flush_ms) == (LONG_MAX, LONG_MAX)
    assert (config.index_interval_bytes, config.compression_type) == (65536, "producer")
    assert config.message_timestamp_type == "CreateTime"


def test_a_producer_and_a_consumer_have_kafkas_defaults():
    """Only `batch_size` differs, for columns."""
    producer, consumer = ProducerConfig(), ConsumerConfig()

    assert (producer.acks, producer.enable_idempotence, producer.retries) == (
        "all",
        True,
        2**31 - 1,
    )
    assert (producer.batch_size, producer.linger_ms) == (262144, 0)
    assert (producer.buffer_memory, producer.max_block_ms) == (33554432, 60000)
    assert (producer.delivery_timeout_ms, producer.request_timeout_ms) == (120000, 30000)
    assert (consumer.auto_offset_reset, consumer.enable_auto_commit) == ("latest", True)
    assert (consumer.max_poll_records, consumer.max_poll_interval_ms) == (500, 300000)
    assert (consumer.session_timeout_ms, consumer.heartbeat_interval_ms) == (45000, 3000)
    assert consumer.consumer_timeout_ms is None


@pytest.mark.parametrize("spelling", ["retention.ms", "retention_ms"])
@pytest.mark.parametrize("value", [60000, "60000", " 60000 ", 60000.0])
def test_both_spellings_and_text_are_accepted(spelling, value):
    """A topic's configuration may come from a shell, from Kafka, or from Python."""
    assert TopicConfig.parse({spelling: value}).retention_ms == 60000


@pytest.mark.parametrize(
    ("settings", "field", "expected"),
    [
        ({"preallocate": "FALSE"}, "preallocate", False),
        ({"min.insync.replicas": "1"}, "min_insync_replicas", 1),
        ({"segment.index.bytes": 10485760}, "segment_index_bytes", 10485760),
        ({"cleanup.policy": "delete, compact"}, "cleanup_policy", "compact,delete"),
        ({"cleanup.policy": ["compact"]}, "cleanup_policy", "compact"),
        ({"compression.type": "uncompressed"}, "compression_type", "none"),
        ({"compression.type": "gzip"}, "compression_type", "zstd"),
        ({"compression.type": "snappy"}, "compression_type", "lz4"),
        ({"compression.type": "producer"}, "compression_type", "producer"),
        ({"min.cleanable.dirty.ratio": "0.1"}, "min_cleanable_dirty_ratio", 0.1),
        ({"flush.ms": str(LONG_MAX)}, "flush_ms", LONG_MAX),
        ({"retention.ms": None}, "retention_ms", 604800000),
    ],
)
def test_values_are_normalised(settings, field, expected):
    """Each value has one form inside, whatever form the caller uses."""
    assert getattr(TopicConfig.parse(settings), field) == expected


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (TopicConfig, {"retention.mss": 1}, "Did you mean retention.ms?"),
        (TopicConfig, {"segment_byte": 1}, "Did you mean segment_bytes?"),
        (TopicConfig, {"retention.ms": 1, "retention_ms": 1}, "given twice"),
        (TopicConfig, {"retention.ms": "soon"}, "retention_ms must be a whole number, got 'soon'"),
        (TopicConfig, {"retention.ms": 1.5}, "must be a whole number"),
        (TopicConfig, {"retention.ms": True}, "must be a whole number"),
        (TopicConfig, {"retention.ms": -2}, "must be at least -1, got -2"),
        (TopicConfig, {"segment.bytes": 0}, "segment_bytes must be at least 1, got 0"),
        (TopicConfig, {"min.cleanable.dirty.ratio": math.nan}, "between 0 and 1"),
        (TopicConfig, {"min.cleanable.dirty.ratio": math.inf}, "between 0 and 1"),
        (TopicConfig, {"preallocate": True}, "must be false, since durable appends preallocate"),
        (TopicConfig, {"preallocate": "maybe"}, "must be false"),
        (TopicConfig, {"min.insync.replicas": 0}, "min_insync_replicas must be at least 1, got 0"),
        (TopicConfig, {"unclean.leader.election.enable": "maybe"}, "got 'maybe'"),
        (TopicConfig, {"replica.lag.time.max.ms": 0}, "must be at least 1, got 0"),
        (TopicConfig, {"segment.index.bytes": 4096}, "must be 10485760, since the index is"),
        (TopicConfig, {"bootstrap.servers": "kafka:9092"}, "no brokers"),
        (TopicConfig, {"cleanup.policy": "archive"}, "must be one of delete, compact"),
        (TopicConfig, {"cleanup.policy": ""}, "must be one of delete, compact"),
        (TopicConfig, {"compression.type": "bzip2"}, "none, gzip, snappy, lz4, zstd"),
        (TopicConfig, {"message.timestamp.type": "createtime"}, "CreateTime, LogAppendTime"),
        (
            TopicConfig,
            {"segment.ms": 5, "segment.jitter.ms": 6},
            "6 must not be more than segment_ms 5",
        ),
        (
            TopicConfig,
            {"min.compaction.lag.ms": 9, "max.compaction.lag.ms": 8},
            "min_compaction_lag_ms 9 must not be more than max_compaction_lag_ms 8",
        ),
        (ProducerConfig, {"acks": 2}, "acks must be one of 0, 1, all, got 2"),
        (ProducerConfig, {"acks": True}, "must be one of 0, 1, all"),
        (ProducerConfig, {"producer_name": ""}, "at least one character"),
        (ProducerConfig, {"key_serializer": "jsn"}, "must be one of bytes, str"),
        (ProducerConfig, {"partitioner": "sticky"}, "round_robin"),
        (ProducerConfig, {"client_id": 5}, "must be a str, got 5"),
        (ProducerConfig, {"strict": "maybe"}, "must be true or false"),
        (ProducerConfig, {"transaction_timeout_ms": 1}, "no setting transaction_timeout_ms. Leav"),
        (ProducerConfig, {"transactional_id": "t", "acks": 1}, "transactional_id .* acks"),
        (ProducerConfig, {"transactional_id": "t", "producer_name": "p"}, "producer_name"),
        (
            ProducerConfig,
            {"delivery_timeout_ms": 10, "request_timeout_ms": 9, "linger_ms": 2},
            "delivery_timeout_ms 10 must not be less than linger_ms 2 plus request_timeout_ms 9",
        ),
        (ConsumerConfig, {"auto_offset_reset": "smallest"}, "latest, earliest, none"),
        (ConsumerConfig, {"value_deserializer": 5}, "must be one of bytes, str"),
        (ConsumerConfig, {"consumer_timeout_ms": -5}, "must be None or at least 0"),
        (ConsumerConfig, {"group_instance_id": "a"}, "'a' needs a group"),
        (
            ConsumerConfig,
            {"session_timeout_ms": 3000},
            "heartbeat_interval_ms 3000 must be less than session_timeout_ms 3000",
        ),
    ],
)
def test_an_invalid_setting_is_refused_by_name(kind, settings, message):
    """The message names the setting and its value, or both values, or the closest name."""
    with pytest.raises(InvalidConfigError, match=message):
        kind.parse(settings)


@pytest.mark.parametrize("kind", [ProducerConfig, ConsumerConfig])
@pytest.mark.parametrize(
    "name", ["bootstrap_servers", "bootstrap.servers", "security_protocol", "sasl_mechanism"]
)
def test_settings_of_a_network_are_ignored_unless_strict(kind, name):
    """A program that comes from Kafka runs as it is; with `strict` the error says why not."""
    assert kind.parse({name: "localhost:9092"}) == kind()
    for strict in (True, "true"):
        assert kind.parse({name: None, "strict": strict}).strict is True
        with pytest.raises(InvalidConfigError, match=r"no brokers.*Leave it out"):
            kind.parse({name: "localhost:9092", "strict": strict})


def test_the_ignored_settings_are_described_without_secrets():
    """Only the address is shown, since others may be passwords; None is no setting."""
    settings = {
        "bootstrap.servers": "kafka:9092",
        "sasl_plain_password": "secret",
        "ssl_cafile": None,
        "linger_ms": 5,
    }

    assert describe_network_settings(settings) == (
        "bootstrap.servers ('kafka:9092' is not contacted), sasl_plain_password"
    )
    assert describe_network_settings({"linger_ms": 5}) == ""


@pytest.mark.parametrize(
    "conflict", [{"acks": 1}, {"retries": 0}, {"max_in_flight_requests_per_connection": 6}]
)
def test_idempotence_is_turned_off_by_a_conflict_unless_it_was_set(conflict):
    """G20: an implicit conflict turns it off; if it was set, the error has both values."""
    assert ProducerConfig.parse(conflict).enable_idempotence is False
    assert ProducerConfig.parse(conflict | {"enable_idempotence": False}).acks is not None
    (name,) = conflict
    for explicit in ({"enable_idempotence": True}, {"producer_name": "sensor"}):
        with pytest.raises(InvalidConfigError, match=rf"{next(iter(explicit))} .* {name} "):
            ProducerConfig.parse(conflict | explicit)


def test_a_named_producer_is_idempotent():
    """G17, G20: a producer with a name needs an identity, so it is idempotent."""
    assert ProducerConfig(producer_name="sensor").enable_idempotence is True
    with pytest.raises(InvalidConfigError, match="producer_name 'sensor' cannot be combined with"):
        ProducerConfig(producer_name="sensor", enable_idempotence=False)


def test_the_delivery_timeout_grows_with_the_linger():
    """G11: by default it is at least linger plus request timeout."""
    assert ProducerConfig(linger_ms=100_000).delivery_timeout_ms == 130_000


@pytest.mark.parametrize("value", [None, -1, "-1", math.inf])
def test_forever_has_many_spellings(value):
    """kafka-python uses infinity, Kafka 0.8 used -1."""
    assert ConsumerConfig.parse({"consumer_timeout_ms": value}).consumer_timeout_ms is None
    assert ProducerConfig.parse({"retries": math.inf}).retries == 2**31 - 1


def test_changing_a_config_returns_a_new_one():
    """Overrides are combined, and None removes one; the old config does not change."""
    old = TopicConfig.parse({"retention.ms": 5, "segment.ms": 7})

    new = old.changed({"retention_ms": None, "segment.bytes": 100})

    assert new.overrides() == {"segment.bytes": 100, "segment.ms": 7}
    assert old.overrides() == {"segment.ms": 7, "retention.ms": 5}
    with pytest.raises(InvalidConfigError, match="segment_ms 7"):
        old.changed({"segment.jitter.ms": 8})
    with pytest.raises(InvalidConfigError, match="twice"):
        old.changed({"segment.ms": 8, "segment_ms": 8})
    with pytest.raises(AttributeError):
        old.retention_ms = 6


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_survives_serialization_and_pickling(kind):
    """`to_dict` and `overrides` parse back to the same config; Spark workers get it too."""
    config = kind()

    assert config.overrides() == {}
    assert kind.parse(config.to_dict()) == config
    assert pickle.loads(pickle.dumps(config)) == config


@given(st.integers(-1, LONG_MAX), st.integers(1, LONG_MAX), st.sampled_from(["compact", "delete"]))
def test_the_overrides_are_enough_to_restore_a_config(retention, segment, policy):
    """A topic stores only its overrides."""
    config = TopicConfig(retention_ms=retention, segment_bytes=segment, cleanup_policy=policy)

    assert TopicConfig.parse(config.overrides()) == config
    assert TopicConfig.parse({k: str(v) for k, v in config.overrides().items()}) == config


def test_the_policies_can_be_queried():
    """C6: compaction and deletion are separate properties."""
    both = TopicConfig.parse({"cleanup.policy": "compact,delete"})

    assert (both.compacts, both.deletes) == (True, True)
    assert (TopicConfig().compacts, TopicConfig().deletes) == (False, True)
