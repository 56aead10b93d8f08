"""OpenTelemetry: the metrics of a log, and traces that lead from producers to consumers.

    import embedlog.opentelemetry as telemetry

    telemetry.instrument(log)
    telemetry.instrument_producer(producer)
    for record in consumer:
        with telemetry.process(record, group="billing"):
            ...

A program that does not import this module loads nothing of OpenTelemetry, and no call checks
for it.  Needs ``pip install embedlog[opentelemetry]``.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import isnan
from time import monotonic
from typing import Any

from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, TracerProvider

from embedlog.api import Log
from embedlog.errors import EmbedlogError
from embedlog.forks import new_lock
from embedlog.metrics import GROUPS, Metric, MetricGroup
from embedlog.producer import Producer
from embedlog.record import Record, RecordMetadata
from embedlog.version import __version__

_NAME = "embedlog"
_SNAPSHOT_SECONDS = 1.0
"""The instruments of one collection are asked one by one; they share a snapshot."""
_log = logging.getLogger("embedlog.opentelemetry")
_snapshots: weakref.WeakKeyDictionary[MeterProvider, MetricsSnapshot] = weakref.WeakKeyDictionary()
_lock = new_lock()


# Metrics


def instrument(log: Log, meter_provider: MeterProvider | None = None) -> None:
    """Report what `Log.metrics` returns, whenever OpenTelemetry collects metrics.

    The instruments have the names that Prometheus gets from ``embedlog metrics``; the labels are
    attributes, and ``log`` is the path.  Ends when the log is closed or dropped.

    Args:
        log: The log, with the producers and consumers that this handle creates.
        meter_provider: By default the global one; set it before this call.
    """
    provider = meter_provider or metrics.get_meter_provider()
    with _lock:
        snapshot = _snapshots.get(provider)
        if snapshot is None:
            snapshot = _snapshots[provider] = MetricsSnapshot()
            _create_instruments(provider.get_meter(_NAME, __version__), snapshot)
        snapshot.logs.add(log)


class MetricsSnapshot:
    """The metrics of all logs of one meter provider, taken at most once a second."""

    def __init__(self) -> None:
        self.logs: weakref.WeakSet[Log] = weakref.WeakSet()
        self._lock = new_lock()
        self._taken_at = -_SNAPSHOT_SECONDS
        self._values: dict[tuple[str, str], list[Observation]] = {}

    def observe(self, key: str, name: str, _: CallbackOptions) -> Iterable[Observation]:
        """Return the values of one metric."""
        with self._lock:
            if monotonic() - self._taken_at >= _SNAPSHOT_SECONDS:
                self._take()
            return self._values.get((key, name), [])

    def _take(self) -> None:
        self._values = {}
        for log in list(self.logs):
            if log.root.closed:
                continue
            try:
                for key, name, value, labels in log._samples():
                    # An average of nothing is NaN, which not every backend accepts.
                    if not isnan(value):
                        observation = Observation(value, {"log": log.path, **labels})
                        self._values.setdefault((key, name), []).append(observation)
            except EmbedlogError as error:
                _log.warning("The metrics of %s are incomplete: %s", log.path, error)
        self._taken_at = monotonic()


def _create_instruments(meter: Meter, snapshot: MetricsSnapshot) -> None:
    for group in GROUPS:
        for metric in group.metrics:
            _create_instrument(meter, group, metric, snapshot)


def _create_instrument(
    meter: Meter, group: MetricGroup, metric: Metric, snapshot: MetricsSnapshot
) -> None:
    name, callback = metric.exported(group), partial(snapshot.observe, group.key, metric.name)
    if metric.kind == "counter":
        meter.create_observable_counter(name, [callback], description=metric.text)
    else:
        meter.create_observable_gauge(name, [callback], description=metric.text)


# Traces


def instrument_producer(producer: Producer, tracer_provider: TracerProvider | None = None) -> None:
    """Make a span of each `send` of a producer, and put its context into the record's headers.

    The span ends when the record is written, with its partition and offset, or failed.  Only
    this producer becomes slower.  ``send_batch`` and ``append_table`` make no spans.

    Args:
        producer: The producer.
        tracer_provider: By default the global one.
    """
    tracer = trace.get_tracer(_NAME, __version__, tracer_provider)
    vars(producer)["send"] = partial(_send, tracer, producer)


def _send(
    tracer: Tracer,
    producer: Producer,
    topic: str,
    value: Any = None,
    key: Any = None,
    headers: Sequence[tuple[str, bytes | None]] | None = None,
    partition: int | None = None,
    timestamp_ms: int | None = None,
    **expected: Any,
) -> Any:
    attributes = _attributes("send", topic, partition, value is None)
    if producer.config.client_id:
        attributes["messaging.client.id"] = producer.config.client_id
    span = tracer.start_span(f"send {topic}", kind=SpanKind.PRODUCER, attributes=attributes)
    carrier: dict[str, str] = {}
    propagate.inject(carrier, trace.set_span_in_context(span))
    pairs = [pair for pair in headers or () if pair[0] not in carrier]
    pairs += [(name, text.encode()) for name, text in carrier.items()]
    try:
        record = topic, value, key, pairs, partition, timestamp_ms
        future = Producer.send(producer, *record, **expected)
    except BaseException as error:
        _end_failed(span, error)
        raise
    future._observe(_end, span)
    return future


def _end(span: Span, outcome: RecordMetadata | BaseException) -> None:
    if isinstance(outcome, BaseException):
        _end_failed(span, outcome)
        return
    if outcome.offset >= 0:  # with acks=0 it is not known
        span.set_attribute("messaging.destination.partition.id", str(outcome.partition))
        span.set_attribute("messaging.kafka.offset", outcome.offset)
    span.end()


def _end_failed(span: Span, error: BaseException) -> None:
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(Status(StatusCode.ERROR, str(error)))
    span.end()


@contextmanager
def process(
    record: Record, group: str | None = None, tracer_provider: TracerProvider | None = None
) -> Iterator[Span]:
    """Make a span of the work on a record; its parent is the span that sent the record.

    Args:
        record: The record.
        group: The consumer group, if any.
        tracer_provider: By default the global one.
    """
    tracer = trace.get_tracer(_NAME, __version__, tracer_provider)
    attributes = _attributes("process", record.topic, record.partition, record.value is None)
    attributes["messaging.kafka.offset"] = record.offset
    if group is not None:
        attributes["messaging.consumer.group.name"] = group
    parent = extract(record)
    sent_by = trace.get_current_span(parent).get_span_context()
    with tracer.start_as_current_span(
        f"process {record.topic}",
        context=parent if sent_by.is_valid else None,
        kind=SpanKind.CONSUMER,
        attributes=attributes,
        links=[Link(sent_by)] if sent_by.is_valid else [],
    ) as span:
        try:
            yield span
        except Exception as error:
            span.set_attribute("error.type", type(error).__name__)
            raise


def extract(record: Record) -> Context:
    """Return the context of the span that sent a record; an empty one if there is none."""
    headers = {name: value.decode(errors="replace") for name, value in record.headers if value}
    return propagate.extract(headers, Context())


def _attributes(
    operation: str, topic: str, partition: int | None, is_tombstone: bool
) -> dict[str, str | int | bool]:
    """Return the attributes of the semantic conventions for Kafka."""
    attributes: dict[str, str | int | bool] = {
        "messaging.system": "kafka",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
    }
    if partition is not None:
        attributes["messaging.destination.partition.id"] = str(partition)
    if is_tombstone:
        attributes["messaging.kafka.message.tombstone"] = True
    return attributes
