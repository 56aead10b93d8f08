"""OpenTelemetry: metrics by callbacks, and traces from producers to consumers."""

from __future__ import annotations

import gc
import weakref

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Sum
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from support.children import run_python
from support.forks import until
from support.wire_client import WireClient

import embedlog
from embedlog import opentelemetry as telemetry
from embedlog.producer import Producer


@pytest.fixture
def log(tmp_path):
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("orders", partitions=2)
        yield log


@pytest.fixture
def reader():
    """What OpenTelemetry collects; each call of the fixture's result is a collection."""
    return InMemoryMetricReader()


@pytest.fixture
def meters(reader):
    provider = MeterProvider(metric_readers=[reader])
    yield provider
    provider.shutdown()


@pytest.fixture
def spans():
    return InMemorySpanExporter()


@pytest.fixture
def tracers(spans):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return provider


def collected(reader):
    """Return the collected metrics by name; each is its data with a list of points."""
    data = reader.get_metrics_data()
    if data is None:
        return {}
    scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
    return {metric.name: metric.data for scope in scopes for metric in scope.metrics}


def values(data):
    """Return the values of a metric by the topic and partition of its points."""
    return {
        tuple(
            point.attributes[name] for name in ("topic", "partition") if name in point.attributes
        ): (point.value)
        for point in data.data_points
    }


def test_the_metrics_of_a_log_are_collected(log, reader, meters):
    """With the names that Prometheus gets; the path and the client id are attributes."""
    telemetry.instrument(log, meters)
    with log.producer(client_id="web") as producer:
        producer.send_batch("orders", [b"v"] * 10, partition=1)
        metrics = collected(reader)

    ends = metrics["kafka_topic_partition_current_offset"]
    assert values(ends) == {("orders", "0"): 0, ("orders", "1"): 10}
    assert all(point.attributes["log"] == log.path for point in ends.data_points)
    sent = metrics["kafka_producer_producer_metrics_record_send_total"]
    assert isinstance(sent, Sum) and sent.is_monotonic
    (point,) = sent.data_points
    assert (point.value, point.attributes["client_id"]) == (10, "web")
    # An average of nothing is left out.
    assert "kafka_producer_producer_metrics_record_queue_time_avg" not in metrics


def test_the_counts_of_a_server_are_collected_with_those_of_its_log(log, reader, meters):
    """What it is asked for, by API."""
    telemetry.instrument(log, meters)
    with embedlog.serve(log) as server, WireClient(server.bootstrap_servers) as client:
        client.ask("Metadata", 12, topics=[])
        until(lambda: "kafka.network.RequestMetrics.Metadata" in server.metrics())
        (point,) = collected(reader)["kafka_network_requestmetrics_requests_total"].data_points
        assert point.value == 1
        expected = {"log": log.path, "client_id": "server-1", "request": "Metadata"}
        assert dict(point.attributes) == expected


def test_a_log_that_was_closed_or_dropped_is_not_collected(log, reader, meters, tmp_path):
    """Neither is it kept alive; other logs of the same provider still are."""
    telemetry.instrument(log, meters)
    other = embedlog.open(tmp_path / "other", maintenance=False)
    telemetry.instrument(other, meters)
    other.create_topic("more")
    ends = collected(reader)["kafka_topic_partition_current_offset"]
    assert set(values(ends)) == {("orders", "0"), ("orders", "1"), ("more", "0")}

    reference = weakref.ref(other)
    other.close()
    del other
    gc.collect()
    assert reference() is None
    log.close()
    telemetry._snapshots[meters]._taken_at = 0.0
    assert collected(reader) == {}


def test_a_trace_leads_from_the_producer_to_the_consumer(log, spans, tracers):
    """The span of `process` is a child of that of `send`, and linked to it."""
    with log.producer(client_id="web") as producer:
        telemetry.instrument_producer(producer, tracers)
        with tracers.get_tracer("test").start_as_current_span("request"):
            metadata = producer.send("orders", b"v", headers=[("who", b"me")]).result()
    with log.consumer("orders", auto_offset_reset="earliest", group_id="g") as consumer:
        (record,) = (record for records in consumer.poll(1000).values() for record in records)
        with telemetry.process(record, "g", tracers):
            pass

    sent, request, processed = spans.get_finished_spans()
    assert [span.name for span in (sent, request, processed)] == [
        *("send orders", "request", "process orders")
    ]
    assert (sent.kind, processed.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert sent.parent.span_id == request.context.span_id
    assert processed.parent.span_id == sent.context.span_id
    assert processed.context.trace_id == request.context.trace_id
    assert [link.context.span_id for link in processed.links] == [sent.context.span_id]
    where = {
        "messaging.system": "kafka",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": str(metadata.partition),
        "messaging.kafka.offset": 0,
    }
    assert dict(sent.attributes) == {
        **where,
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.client.id": "web",
    }
    assert dict(processed.attributes) == {
        **where,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.consumer.group.name": "g",
    }
    assert record.headers[0] == ("who", b"me") and record.headers[1][0] == "traceparent"


def test_a_record_without_a_trace_begins_one(log, spans, tracers):
    """Or becomes a part of the span around it; there is no link then."""
    with log.producer() as producer:
        producer.send("orders", b"v", headers=[("who", None)]).result()
    (record,) = log.topic("orders")
    with tracers.get_tracer("test").start_as_current_span("round"):
        with telemetry.process(record, tracer_provider=tracers):
            pass
    inner, outer = spans.get_finished_spans()
    assert inner.parent.span_id == outer.context.span_id and not inner.links


def test_the_context_of_a_record_replaces_one_that_was_passed_on(log, spans, tracers):
    """A program that copies the headers of a record that it read sends no second traceparent."""
    with log.producer() as producer:
        telemetry.instrument_producer(producer, tracers)
        producer.send("orders", b"1").result()
        (first,) = log.topic("orders")
        producer.send("orders", b"2", headers=first.headers).result()
    second = max(log.topic("orders"), key=lambda record: record.value)
    assert [name for name, _ in second.headers] == ["traceparent"]
    assert second.headers != first.headers


def test_a_span_ends_with_the_error_of_a_record(log, spans, tracers):
    """That `send` raises, that the future has, or that the handler raises."""
    log.create_topic("state", config={"cleanup.policy": "compact"})
    with log.producer() as producer:
        telemetry.instrument_producer(producer, tracers)
        with pytest.raises(embedlog.errors.SerializationError):
            producer.send("orders", 5)
        producer.send("state", None)
        producer.send("orders", b"v", partition=0, expected_offset=7)
        producer.send("orders", b"v", partition=0, expected_offset=0).result()
        (record,) = log.topic("orders")
        with pytest.raises(ZeroDivisionError), telemetry.process(record, tracer_provider=tracers):
            raise ZeroDivisionError
    raised, refused, late, _, failed = spans.get_finished_spans()
    for span, error in (
        (raised, "SerializationError"),
        (late, "ConflictError"),
        (refused, "InvalidRecordError"),
        (failed, "ZeroDivisionError"),
    ):
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes["error.type"] == error
    assert refused.attributes["messaging.kafka.message.tombstone"] is True


def test_a_failure_that_only_the_span_has_is_still_logged(log, spans, tracers, caplog):
    """The program has not looked at it."""
    log.create_topic("state", config={"cleanup.policy": "compact"})
    with log.producer() as producer:
        telemetry.instrument_producer(producer, tracers)
        producer.send("state", b"no key")
    assert "1 record for state failed, and no caller looked at the future" in caplog.text
    assert len(spans.get_finished_spans()) == 1


def test_a_dropped_producer_is_collected_in_spite_of_its_spans(log, tracers):
    """Otherwise its records would be written late, and nothing would warn."""
    producer = log.producer()
    telemetry.instrument_producer(producer, tracers)
    producer.send("orders", b"v").result()
    reference = weakref.ref(producer)
    del producer
    gc.collect()
    assert reference() is None


def test_telemetry_costs_nothing_unless_it_is_used(log, tracers):
    """Nothing is loaded, and a producer that is not instrumented has the method of its class."""
    with log.producer() as one, log.producer() as other:
        telemetry.instrument_producer(one, tracers)
        assert "send" in vars(one) and other.send.__func__ is Producer.send
    code = (
        "import sys, tempfile, embedlog;"
        "log = embedlog.open(tempfile.mkdtemp(), maintenance=False);"
        "log.producer().close(); log.metrics(); log.close();"
        "print([name for name in sys.modules if 'opentelemetry' in name])"
    )
    assert run_python("-c", code) == "[]\n"
