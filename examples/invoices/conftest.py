"""The tests run the service on a log: no broker, no container, no port."""

import pytest

import embedlog.kafka

# Before the service is imported: its `from kafka import ...` gets embedlog's clients.
embedlog.kafka.patch()

from invoices import InvoiceService  # noqa: E402


@pytest.fixture
def start_service(kafka_bootstrap):
    """Return a function that starts the service on the log of this test."""
    services = []

    def start():
        services.append(InvoiceService(kafka_bootstrap))
        return services[-1]

    yield start
    for service in services:
        service.close()
