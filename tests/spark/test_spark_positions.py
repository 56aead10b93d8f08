"""Offsets in a checkpoint, limits per trigger, and the lag."""

import json
from types import SimpleNamespace

import pytest

from embedlog.record import TopicPartition
from embedlog.spark.micro_batch import TriggerDelay, rate_limit
from embedlog.spark.stream_offset import StreamOffset, offsets_behind_latest

T0, T1, T10, U0 = (TopicPartition(*pair) for pair in (("t", 0), ("t", 1), ("t", 10), ("u", 0)))


def test_stream_offsets_have_kafkas_shape():
    """Tools that read checkpoints of Kafka's source can read ours."""
    assert StreamOffset({T1: 40, T0: 23}).to_json() == {"t": {"0": 23, "1": 40}}


def test_equal_stream_offsets_are_equal_texts():
    """Spark compares the texts to decide whether there are new records."""
    first = StreamOffset({T10: 3, T1: 2, U0: 1}, {"u": 2, "t": 1}, {T1: 5})
    second = StreamOffset({U0: 1, T1: 2, T10: 3}, {"t": 1, "u": 2}, {T1: 5})

    assert json.dumps(first.to_json()) == json.dumps(second.to_json())
    assert list(first.to_json()["t"]) == ["1", "10"]


@pytest.mark.parametrize(
    "offset",
    [
        StreamOffset({}),
        StreamOffset({T0: 5, U0: 7}, {"t": 1, "u": 9}),
        StreamOffset({T0: 5}, {"t": 1}, {T0: 3}, is_initial=True),
        StreamOffset({T0: 5}, {"t": 1}, batch_start=StreamOffset({T0: 2}, {"t": 1}, {T0: 1})),
    ],
)
def test_stream_offsets_survive_the_checkpoint(offset):
    """Writing and reading JSON gives an equal offset."""
    assert StreamOffset.from_json(json.loads(json.dumps(offset.to_json()))) == offset


def test_a_checkpoint_of_kafkas_source_can_be_read():
    """It has only offsets, without leader epochs and topic ids."""
    offset = StreamOffset.from_json({"t": {"0": 23}})

    assert offset.offsets == {T0: 23}
    assert offset.leader_epoch(T0) is None
    assert StreamOffset({T0: 1}, {"t": 1}).leader_epoch(T0) == 0


def test_a_topic_may_be_named_like_an_extra_key():
    """Extra keys begin with "@", names of topics do not."""
    offset = StreamOffset(
        {TopicPartition("base", 0): 1, TopicPartition("topics", 0): 2}, {"base": 1}
    )

    assert StreamOffset.from_json(offset.to_json()) == offset


@pytest.mark.parametrize(
    ("limit", "backlog", "shares"),
    [
        (10, {0: 101, 1: 11, 2: 1}, {0: 8, 1: 1, 2: 1}),
        (10, {0: 5, 1: 5}, {0: 5, 1: 5}),
        (10, {0: 0, 1: 20}, {1: 10}),
        (1, {0: 1000, 1: 1000}, {0: 1, 1: 1}),
        ((1 << 63) - 1, {0: 1 << 61, 1: 1 << 61}, {0: 1 << 61, 1: 1 << 61}),
        (3, {}, {}),
        (7, {0: 3, 1: 3, 2: 3}, {0: 2, 1: 2, 2: 2}),
    ],
)
def test_a_limit_is_shared_in_proportion(limit, backlog, shares):
    """It is rounded down, but each partition with a backlog gets at least one record."""
    assert {key: size for key, size in rate_limit(limit, backlog).items() if size} == shares


def test_a_trigger_is_delayed_until_there_are_enough_records():
    """The first batch never waits."""
    delay = TriggerDelay(10, 1000)

    assert not delay.delays(0, now_ms=5000)
    assert delay.delays(9, now_ms=5100)
    assert not delay.delays(10, now_ms=5200)


def test_a_trigger_is_not_delayed_for_ever():
    """After maxTriggerDelay any number of records is enough."""
    delay = TriggerDelay(10, 1000)
    delay.delays(0, now_ms=0)

    assert delay.delays(1, now_ms=999)
    assert not delay.delays(1, now_ms=1000)
    assert delay.delays(1, now_ms=1001), "each batch starts the delay again"


@pytest.mark.parametrize("make", [dict, lambda **fields: SimpleNamespace(**fields)])
def test_lag_has_the_form_of_kafkas_metrics(make):
    """It is computed from the progress of a query, as dicts or as objects."""
    source = make(latestOffset='{"t": {"0": 10, "1": 7}, "u": {"0": 4}}', endOffset={"t": {"0": 6}})
    progress = make(sources=[source])

    assert offsets_behind_latest(progress) == {
        "minOffsetsBehindLatest": 4,
        "maxOffsetsBehindLatest": 7,
        "avgOffsetsBehindLatest": 5.0,
    }


@pytest.mark.parametrize(
    "progress",
    [
        None,
        {"sources": [{"latestOffset": None, "endOffset": "{}"}]},
        {"sources": [{"latestOffset": "null", "endOffset": None}]},
        {"sources": [{"latestOffset": "{}", "endOffset": "{}"}]},
    ],
)
def test_without_progress_there_is_no_lag(progress):
    """An unknown lag is not a lag of zero."""
    assert offsets_behind_latest(progress) == {}
