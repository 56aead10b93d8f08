"""What the three clients share: where they go, their settings, and the log that they hold."""

from __future__ import annotations

import logging
from abc import ABCMeta
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from embedlog.kafka.bootstrap import attach, log_address
from embedlog.kafka.cluster import LogCluster
from embedlog.kafka.errors import kafka_errors
from embedlog.kafka.installed import broker_client, kafka_python
from embedlog.serializers import Action, Adapter, Field, adapt

LOGGER = logging.getLogger("embedlog.kafka")

BROKER_VERSION = (4, 1)
"""The release of Kafka whose behavior clients can expect; in ``config["api_version"]``."""

NETWORK_DEFAULTS: Mapping[str, Any] = {
    "api_version": None,
    "bootstrap_timeout_ms": 30_000,
    "client_dns_lookup": "use_all_dns_ips",
    "connections_max_idle_ms": 540_000,
    "kafka_client": None,
    "metric_reporters": [],
    "metrics_num_samples": 2,
    "metrics_sample_window_ms": 30_000,
    "proxy_url": None,
    "receive_buffer_bytes": None,
    "receive_message_max_bytes": 100_000_000,
    "reconnect_backoff_max_ms": 30_000,
    "reconnect_backoff_ms": 50,
    "sasl_kerberos_domain_name": None,
    "sasl_kerberos_name": None,
    "sasl_kerberos_service_name": "kafka",
    "sasl_mechanism": None,
    "sasl_oauth_token_provider": None,
    "sasl_plain_password": None,
    "sasl_plain_username": None,
    "security_protocol": "PLAINTEXT",
    "selector": None,
    "send_buffer_bytes": None,
    "socket_options": None,
    "socks5_proxy": None,
    "ssl_cafile": None,
    "ssl_certfile": None,
    "ssl_check_hostname": True,
    "ssl_ciphers": None,
    "ssl_context": None,
    "ssl_crlfile": None,
    "ssl_keyfile": None,
    "ssl_password": None,
}
"""The settings of all clients that are about connections; a log ignores them."""


def adapted(serializer: Any, action: Action, field: Field) -> Adapter | None:
    """Return a serializer or deserializer of kafka-python as the log calls it; None if not set.

    Raises:
        TypeError: It is neither callable, nor an object with such a method.
    """
    if serializer is None:
        return None
    try:
        return adapt(serializer, action, field, pass_none=True)
    except ValueError as error:
        raise TypeError(f"{field}_{action}r: {error}") from None


class ClientType(ABCMeta):
    """Makes a client of a log, or kafka-python's own client, depending on the address.

    Both count as instances of the class in `embedlog.kafka`.
    """

    if not TYPE_CHECKING:  # kafka-python's clients have no types, and the same methods

        def __call__(cls, *args: Any, **configs: Any) -> Any:
            """Make a client."""
            with kafka_errors():
                address = log_address(configs.get("bootstrap_servers"))
            if address is not None:
                return super().__call__(*args, **configs)
            client = broker_client(_client_name(cls))
            if cls.__bases__ != (LogClient,):
                raise TypeError(
                    f"{cls.__name__} extends a client of a log, but bootstrap_servers is brokers; "
                    f"extend kafka.{_client_name(cls)} for these"
                )
            # Not by calling it: `patch` makes the class lead here.
            instance = object.__new__(client)
            instance.__init__(*args, **configs)
            return instance

    def __instancecheck__(cls, instance: Any) -> bool:
        """Return whether an object is a client of this kind, of a log or of brokers."""
        if super().__instancecheck__(instance):
            return True
        kafka = kafka_python() if cls.__bases__ == (LogClient,) else None
        return kafka is not None and isinstance(instance, broker_client(_client_name(cls)))


def _client_name(cls: type) -> str:
    """Return the name of the class of kafka-python that a class stands for."""
    return next(kind.__name__ for kind in cls.__mro__ if kind.__bases__ == (LogClient,))


class LogClient(metaclass=ClientType):
    """A client of kafka-python on a log."""

    DEFAULT_CONFIG: ClassVar[Mapping[str, Any]] = {}

    config: dict[str, Any]
    """All settings, as in kafka-python."""

    def _open(self, configs: Mapping[str, Any]) -> None:
        """Set `config` and attach to the log."""
        self.config = {**self.DEFAULT_CONFIG, **configs}
        self.config["api_version"] = self.config["api_version"] or BROKER_VERSION
        address = log_address(configs.get("bootstrap_servers"))
        assert address is not None
        ignored = sorted(configs.keys() & NETWORK_DEFAULTS.keys())
        if ignored:
            LOGGER.info("A log has no connections, so these are ignored: %s", ", ".join(ignored))
        with kafka_errors():
            self._handle = attach(address)
        self._log = self._handle.log
        self._client = self._manager = LogCluster(self._log)
        self._closed = False

    def bootstrap_connected(self) -> bool:
        """Return whether the log is open."""
        return not self._closed and not self._log.root.closed

    def _close_serializers(self, *names: str) -> None:
        for name in names:
            close = getattr(self.config[name], "close", None)
            if callable(close):
                close()

    def __enter__(self) -> Self:
        return self
