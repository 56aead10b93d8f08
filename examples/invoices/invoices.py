"""A service that writes an invoice for each order, with kafka-python; it knows nothing of embedlog.

Orders that make no sense go to the topic ``rejected-orders``.  Start it with the addresses of
the brokers:

    KAFKA_BOOTSTRAP_SERVERS=localhost:9092 python invoices.py
"""

from __future__ import annotations

import json
import os
from decimal import Decimal, InvalidOperation

from kafka import KafkaConsumer, KafkaProducer

ORDERS, INVOICES, REJECTED = "orders", "invoices", "rejected-orders"


class InvoiceService:
    """Reads orders and sends invoices, each order at least once."""

    def __init__(self, bootstrap_servers: str) -> None:
        self._consumer = KafkaConsumer(
            ORDERS,
            bootstrap_servers=bootstrap_servers,
            group_id="invoice-service",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        self._producer = KafkaProducer(
            bootstrap_servers=bootstrap_servers,
            key_serializer=str.encode,
            value_serializer=lambda invoice: json.dumps(invoice).encode(),
        )

    def handle_orders(self, timeout_ms: int = 1000) -> int:
        """Handle the orders of one poll; return how many they were."""
        orders = [
            record for records in self._consumer.poll(timeout_ms).values() for record in records
        ]
        sends = [self._handle(record) for record in orders]
        for send in sends:
            send.get(timeout=30)
        # Only now: an order whose invoice was not written is read again after a restart.
        self._consumer.commit()
        return len(sends)

    def _handle(self, record):
        key = (record.key or b"").decode(errors="replace")
        try:
            order = json.loads(record.value)
            total = sum(Decimal(item["price"]) * int(item["count"]) for item in order["items"])
        except (ValueError, TypeError, KeyError, InvalidOperation) as error:
            rejection = {"reason": f"{type(error).__name__}: {error}", "offset": record.offset}
            return self._producer.send(REJECTED, rejection, key=key)
        invoice = {"order": order["id"], "total": str(total), "date_ms": record.timestamp}
        return self._producer.send(INVOICES, invoice, key=key)

    def close(self) -> None:
        """Leave the group."""
        self._consumer.close()
        self._producer.close()


if __name__ == "__main__":
    service = InvoiceService(os.environ.get("KAFKA_BOOTSTRAP_SERVERS", "localhost:9092"))
    try:
        while True:
            service.handle_orders()
    except KeyboardInterrupt:
        service.close()
