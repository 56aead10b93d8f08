"""What a checkpoint keeps, and the arithmetic of limits."""

import json
from types import SimpleNamespace

import pytest

from embedlog.record import TopicPartition
from embedlog.spark.micro_batch import TriggerDelay, rate_limit
from embedlog.spark.stream_offset import StreamOffset, offsets_behind_latest

T0, T1, T10, U0 = (TopicPartition(*one) for one in (("t", 0), ("t", 1), ("t", 10), ("u", 0)))


def test_positions_have_kafkas_shape():
    """So that what reads a checkpoint of Kafka's source reads ours."""
    assert StreamOffset({T1: 40, T0: 23}).to_json() == {"t": {"0": 23, "1": 40}}


def test_equal_positions_are_equal_texts():
    """Spark compares texts to see whether there is something to do."""
    one = StreamOffset({T10: 3, T1: 2, U0: 1}, {"u": 2, "t": 1}, {T1: 5})
    other = StreamOffset({U0: 1, T1: 2, T10: 3}, {"t": 1, "u": 2}, {T1: 5})

    assert json.dumps(one.to_json()) == json.dumps(other.to_json())
    assert list(one.to_json()["t"]) == ["1", "10"]


@pytest.mark.parametrize(
    "made",
    [
        StreamOffset({}),
        StreamOffset({T0: 5, U0: 7}, {"t": 1, "u": 9}),
        StreamOffset({T0: 5}, {"t": 1}, {T0: 3}, is_initial=True),
        StreamOffset({T0: 5}, {"t": 1}, batch_start=StreamOffset({T0: 2}, {"t": 1}, {T0: 1})),
    ],
)
def test_positions_survive_their_text(made):
    """Through the checkpoint and back."""
    assert StreamOffset.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_a_checkpoint_of_kafkas_source_is_understood():
    """It knows offsets only: no epoch, no number of the topic."""
    found = StreamOffset.from_json({"t": {"0": 23}})

    assert found.offsets == {T0: 23}
    assert found.leader_epoch(T0) is None
    assert StreamOffset({T0: 1}, {"t": 1}).leader_epoch(T0) == 0


def test_topics_may_have_the_names_of_our_own_keys():
    """No topic begins with "@"."""
    made = StreamOffset({TopicPartition("base", 0): 1, TopicPartition("topics", 0): 2}, {"base": 1})

    assert StreamOffset.from_json(made.to_json()) == made


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
    """Rounded down, but a small partition is not starved."""
    assert {one: size for one, size in rate_limit(limit, backlog).items() if size} == shares


def test_patience_lasts_until_there_is_enough():
    """The first batch never waits."""
    delay = TriggerDelay(10, 1000)

    assert not delay.delays(0, now_ms=5000)
    assert delay.delays(9, now_ms=5100)
    assert not delay.delays(10, now_ms=5200)


def test_patience_has_an_end():
    """After maxTriggerDelay any number of rows is enough."""
    delay = TriggerDelay(10, 1000)
    delay.delays(0, now_ms=0)

    assert delay.delays(1, now_ms=999)
    assert not delay.delays(1, now_ms=1000)
    assert delay.delays(1, now_ms=1001), "the time begins anew with each batch"


@pytest.mark.parametrize("kind", [dict, lambda **facts: SimpleNamespace(**facts)])
def test_lag_is_told_as_kafkas_source_tells_it(kind):
    """From what Spark shows of a query."""
    told = kind(latestOffset='{"t": {"0": 10, "1": 7}, "u": {"0": 4}}', endOffset={"t": {"0": 6}})
    progress = kind(sources=[told])

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
    """Not zero: nobody knows."""
    assert offsets_behind_latest(progress) == {}
