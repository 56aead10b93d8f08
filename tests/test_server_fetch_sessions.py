"""Fetch sessions of clients on the wire: a request names what changes, an answer too (KIP-227)."""

from __future__ import annotations

from typing import Any

import pytest
from support.wire_client import WireClient
from test_server_batches import batch_of

import embedlog
from embedlog.record import TopicPartition
from embedlog.server import fetch_session
from embedlog.server.cluster import topic_id
from embedlog.server.error_codes import ErrorCode

OLD, NEW = 12, 17
"""Versions of requests that have names, and ids, of topics."""


@pytest.fixture
def client(embedlog_log, kafka_server):
    embedlog_log.create_topic("orders", partitions=3)
    with WireClient(kafka_server.bootstrap_servers) as client:
        yield client


class Session:
    """What a client with a session sends."""

    def __init__(self, client: WireClient, log: embedlog.Log, version: int) -> None:
        self.id, self.epoch, self._client, self._version = 0, 0, client, version
        number = topic_id(log, log.root.topic("orders").id)
        self.topic = {"topic": "orders"} if version == OLD else {"topic_id": number}

    def fetch(self, *offsets: tuple[int, int], forget: tuple[int, ...] = (), **fields: Any) -> Any:
        """Ask for these partitions from these offsets on, besides those of before."""
        partitions = [
            {"partition": number, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
            for number, offset in offsets
        ]
        named = {"session_id": self.id, "session_epoch": self.epoch, "max_bytes": 1 << 20}
        answer = self._client.ask(
            "Fetch",
            self._version,
            topics=[{**self.topic, "partitions": partitions}] if partitions else [],
            forgotten_topics_data=[{**self.topic, "partitions": forget}] if forget else [],
            **{**named, **fields},
        )
        if not answer.error_code:
            self.id, self.epoch = answer.session_id, self.epoch + 1
        return answer

    def found(self, *offsets: tuple[int, int], **fields: Any) -> dict[int, tuple[bool, int]]:
        """Return whether each partition that is answered has records, and where it ends."""
        answer = self.fetch(*offsets, **fields)
        assert not answer.error_code
        return {
            each.partition_index: (bool(each.records), each.high_watermark)
            for topic in answer.responses
            for each in topic.partitions
        }


@pytest.fixture(params=[OLD, NEW])
def session(request, embedlog_log, client):
    return Session(client, embedlog_log, request.param)


def produce(log: embedlog.Log, partition: int) -> None:
    log.producer().send("orders", b"v", partition=partition).result()


def test_an_answer_has_what_changed(embedlog_log, session):
    """Records that were not asked for again, and nothing of partitions without any."""
    produce(embedlog_log, 1)
    assert session.found((0, 0), (1, 0), (2, 0)) == {0: (False, 0), 1: (True, 1), 2: (False, 0)}
    assert session.found((1, 1)) == {}
    produce(embedlog_log, 2)
    assert session.found() == {2: (True, 1)}
    assert session.found() == {2: (True, 1)}
    assert session.found((2, 1)) == {}
    assert session.found((1, 0)) == {1: (True, 1)}


def test_a_start_that_moves_is_told(embedlog_log, session):
    produce(embedlog_log, 0)
    session.found((0, 1))
    embedlog_log.delete_records({TopicPartition("orders", 0): 1})
    assert session.found() == {0: (False, 1)}
    assert session.found() == {}


def test_partitions_are_forgotten(embedlog_log, session):
    """And may come again."""
    session.found((0, 0), (1, 0))
    produce(embedlog_log, 0)
    produce(embedlog_log, 1)
    assert session.found(forget=(0, 2)) == {1: (True, 1)}
    assert session.found((1, 1), (0, 1)) == {0: (False, 1)}


def test_those_without_records_come_first_the_next_time(embedlog_log, session):
    """A partition with many records does not hold up the others."""
    for partition in range(3):
        produce(embedlog_log, partition)
    session.found((0, 1), (1, 1), (2, 1))
    assert [*session.found((0, 0), (1, 0), (2, 0), max_bytes=1)] == [0]
    assert [*session.found(max_bytes=1)] == [1]
    assert [*session.found(max_bytes=1)] == [2]
    assert [*session.found(max_bytes=1)] == [0]


def test_an_error_is_told_each_time(session):
    """That of one partition is no reason to end the session."""
    for _ in range(2):
        answer = session.fetch((7, 0))
        assert answer.responses[0].partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_what_is_no_next_request_is_refused(embedlog_log, client, session):
    """The session goes on; a client that has lost count begins another one."""
    session.fetch((0, 0))
    number, epoch = session.id, session.epoch
    session.epoch = 7
    assert session.fetch().error_code == ErrorCode.INVALID_FETCH_SESSION_EPOCH
    session.id, session.epoch = number ^ 1, epoch
    assert session.fetch().error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    other = Session(client, embedlog_log, NEW if "topic" in session.topic else OLD)
    other.id, other.epoch = number, epoch
    assert other.fetch().error_code == ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR
    session.id = number
    assert session.found() == {}


@pytest.mark.parametrize("epoch", [0, -1])
def test_a_full_request_ends_a_session(session, epoch):
    """It begins another one, or none."""
    session.fetch((0, 0))
    before = session.id, session.epoch
    session.epoch = epoch
    assert session.found((1, 0)) == {1: (False, 0)}
    assert (session.id == 0) == (epoch < 0)
    session.id, session.epoch = before
    assert session.fetch().error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND


def test_a_session_of_too_many_partitions_is_none(session, monkeypatch):
    """Its client names all of them each time, and gets them."""
    monkeypatch.setattr(fetch_session, "_MAX_PARTITIONS", 2)
    session.fetch((0, 0), (1, 0))
    assert session.fetch((2, 0)).error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    session.id = session.epoch = 0
    assert len(session.found((0, 0), (1, 0), (2, 0))) == 3
    assert session.id == 0


def test_the_number_after_the_last_one_is_the_first(client, session, monkeypatch):
    """Requests are counted in 31 bits."""
    monkeypatch.setattr(fetch_session, "_LAST_EPOCH", 2)
    for epoch in (0, 1, 2, 1, 2):
        session.epoch = epoch
        assert not session.fetch((0, 0)).error_code


def test_records_of_a_session_are_those_of_the_log(embedlog_log, session, kafka_server):
    """What a producer on the wire sends is there in the next answer."""
    session.fetch((0, 0))
    with WireClient(kafka_server.bootstrap_servers) as producer:
        partition = {"index": 0, "records": batch_of()}
        topics = [{"name": "orders", "partition_data": [partition]}]
        producer.ask("Produce", 9, acks=-1, timeout_ms=1000, topic_data=topics)
    assert session.found(max_wait_ms=5000, min_bytes=1) == {0: (True, 1)}
