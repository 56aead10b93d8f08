"""Functions that a program passes are refused if a call would not run them."""

from __future__ import annotations

import logging
from functools import partial

import pytest

import embedlog


async def coroutine(*_):
    raise AssertionError("it runs")


def generator(*_):
    yield


async def async_generator(*_):
    yield


class AsyncObject:
    async def __call__(self, *_):
        raise AssertionError("it runs")


class AsyncListener(embedlog.ConsumerRebalanceListener):
    async def on_partitions_lost(self, lost):
        raise AssertionError("it runs")


NOT_RUN = [coroutine, generator, async_generator, partial(coroutine, 1), AsyncObject()]


@pytest.fixture
def log(tmp_path):
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t")
        yield log


@pytest.mark.parametrize("function", NOT_RUN)
def test_a_function_that_a_call_does_not_run_is_refused(log, function):
    """At every door, before anything happens; the call says why."""
    with log.producer() as producer, log.consumer("t", group_id="g") as consumer:
        future = producer.send("t", b"1")
        doors = [
            future.add_callback,
            future.add_errback,
            future.add_both,
            partial(consumer.commit_async, None),
            # A list of records is not awaited; single ones are.
            partial(embedlog.run_group, log, "t", "g", batch=True),
        ]
        for door in doors:
            with pytest.raises(TypeError, match="must do its work when it is called"):
                door(function)
        with pytest.raises(TypeError, match="on_partitions_lost of the listener must"):
            consumer.subscribe(["t"], listener=AsyncListener())
    assert list(log.groups) == []


def test_a_callback_that_returns_a_coroutine_is_logged(log, caplog):
    """What a lambda returns is known only when it was called."""
    with caplog.at_level(logging.ERROR, "embedlog.producer"), log.producer() as producer:
        producer.send("t", b"1").add_callback(lambda metadata: coroutine(metadata)).result()
    assert "must do its work when it is called" in caplog.text


@pytest.mark.tier("test")  # starts processes
def test_a_record_whose_handler_returned_a_coroutine_is_not_committed(log):
    """The run ends with an error, and the record is handled by the next run."""
    log.producer().send("t", b"1").result()
    options = {"start_method": "fork", "until": "end", "auto_offset_reset": "earliest"}
    run = embedlog.run_group(log, "t", "g", lambda record: coroutine(record), **options)
    with pytest.raises(TypeError, match="must do its work when it is called"):
        run.wait()
    with log.consumer(group_id="g") as consumer:
        assert consumer.committed(("t", 0)) is None
