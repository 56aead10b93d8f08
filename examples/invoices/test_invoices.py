"""The tests of the service: each one has an empty log, a clock, and a disk that can fail."""

import json
import threading

import pytest
from kafka import KafkaProducer
from kafka.errors import KafkaError

ORDER = {"id": "A-1", "items": [{"price": "2.50", "count": 2}, {"price": "0.99", "count": 1}]}


@pytest.fixture
def place_order(kafka_bootstrap):
    """Return a function that sends an order, as the shop does."""
    with KafkaProducer(bootstrap_servers=kafka_bootstrap) as producer:

        def place(order):
            value = order if isinstance(order, bytes) else json.dumps(order).encode()
            producer.send("orders", value, key=b"customer-1").get(timeout=10)

        yield place


def test_an_order_becomes_an_invoice(start_service, place_order, records_of, embedlog_clock):
    """The invoice has the total, the customer as its key, and the date of the order."""
    date_ms = embedlog_clock.set("2026-03-01T12:00:00Z")
    place_order(ORDER)

    assert start_service().handle_orders() == 1

    (invoice,) = records_of("invoices")
    assert json.loads(invoice.value) == {"order": "A-1", "total": "5.99", "date_ms": date_ms}
    assert invoice.key == b"customer-1"


@pytest.mark.parametrize(
    "order", [b"no JSON", {"id": "A-2"}, {"id": "A-3", "items": [{"price": "x", "count": 1}]}]
)
def test_an_order_that_makes_no_sense_is_rejected(start_service, place_order, records_of, order):
    """The orders after it are handled."""
    place_order(order)
    place_order(ORDER)

    service = start_service()
    while service.handle_orders(timeout_ms=100):
        pass

    assert len(records_of("rejected-orders")) == 1
    assert len(records_of("invoices")) == 1


def test_a_restarted_service_continues_after_its_last_order(start_service, place_order, records_of):
    """Its group has the position."""
    place_order(ORDER)
    service = start_service()
    service.handle_orders()
    service.close()

    place_order({**ORDER, "id": "A-2"})
    assert start_service().handle_orders() == 1

    orders = [json.loads(invoice.value)["order"] for invoice in records_of("invoices")]
    assert orders == ["A-1", "A-2"]


def test_an_order_is_read_again_if_its_invoice_was_not_written(
    start_service, place_order, records_of, embedlog_faults
):
    """The position is committed after the invoice is written, never before."""
    place_order(ORDER)
    service = start_service()
    embedlog_faults.fail_next_append("invoices")
    with pytest.raises(KafkaError):
        service.handle_orders()
    service.close()

    assert start_service().handle_orders() == 1
    assert len(records_of("invoices")) == 1


def test_a_full_disk_only_delays_an_invoice(
    start_service, place_order, records_of, embedlog_faults
):
    """The producer retries until there is space."""
    place_order(ORDER)
    worker = threading.Thread(target=start_service().handle_orders)
    with embedlog_faults.full_disk():
        worker.start()
        worker.join(timeout=0.2)
        assert worker.is_alive()
    worker.join(timeout=10)
    assert len(records_of("invoices", count=1)) == 1
