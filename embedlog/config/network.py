"""The settings of Kafka's clients that are about connections to brokers."""

from __future__ import annotations

from collections.abc import Mapping

_NAMES = frozenset(
    "api_version api_version_auto_timeout_ms bootstrap_servers bootstrap_timeout_ms "
    "bootstrap_topics_filter broker_address_family broker_address_ttl broker_version_fallback "
    "client_dns_lookup client_rack client_software_name client_software_version "
    "connections_max_idle_ms enable_incremental_fetch_sessions kafka_client log_connection_close "
    "metadata_broker_list metadata_max_idle_ms metadata_recovery_rebootstrap_trigger_ms "
    "metadata_recovery_strategy proxy_url raise_on_slow_task receive_buffer_bytes "
    "receive_message_max_bytes selector send_buffer_bytes slow_task_threshold_secs "
    "sock_chunk_buffer_count sock_chunk_bytes socks5_proxy topic_metadata_refresh_interval_ms "
    "wakeup_timeout_ms zookeeper_connect".split()
)
_PREFIXES = ("api_version_", "reconnect_backoff_", "sasl_", "security_", "socket_", "ssl_")


def is_network_setting(name: str) -> bool:
    """Return whether a setting, spelled with underscores, is about connections to brokers."""
    return name in _NAMES or name.startswith(_PREFIXES)


def describe_network_settings(settings: Mapping[str, object]) -> str:
    """Return the names of the settings that a client ignores; empty if there are none.

    Only the value of ``bootstrap_servers`` is shown, since others may be passwords.
    """
    names = []
    for spelling, value in settings.items():
        name = str(spelling).replace(".", "_")
        if value is not None and is_network_setting(name):
            servers = f" ({value!r} is not contacted)" if name == "bootstrap_servers" else ""
            names.append(f"{spelling}{servers}")
    return ", ".join(names)
