"""What all configs do: parse, show, and change by making a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any, NoReturn, Self

from embedlog.errors import InvalidConfigError

_NETWORK = frozenset(
    "api_version api_version_auto_timeout_ms bootstrap_servers bootstrap_topics_filter "
    "client_dns_lookup connections_max_idle_ms kafka_client receive_buffer_bytes "
    "reconnect_backoff_max_ms reconnect_backoff_ms selector send_buffer_bytes "
    "sock_chunk_bytes sock_chunk_buffer_count socket_connection_setup_timeout_ms "
    "socket_connection_setup_timeout_max_ms socket_options socks5_proxy proxy_url "
    "wakeup_timeout_ms zookeeper_connect".split()
)
_NETWORK_PREFIXES = ("sasl_", "security_", "ssl_")


class Settings:
    """What all three configs do: parse, show, and change by making a new one."""

    __slots__ = ()

    @classmethod
    def parse(cls, settings: Mapping[str, object]) -> Self:
        """Make a config from names in either spelling and values typed or as text.

        None means the default, except for settings that can be None.

        Raises:
            InvalidConfigError: A setting is unknown (the nearest known one is
                named), given twice, of the wrong type, or contradicts another.
        """
        given: dict[str, object] = {}
        for spelling, value in settings.items():
            name = str(spelling).replace(".", "_")
            if name not in cls._fields():
                cls._refuse(str(spelling), name)
            if name in given:
                raise InvalidConfigError(f"{name} is given twice, as {spelling} too", setting=name)
            if value is not None:
                given[name] = value
        return cls(**given)

    def changed(self, settings: Mapping[str, object]) -> Self:
        """Return a copy with some settings changed; a value of None resets to the default.

        Raises:
            InvalidConfigError: As `parse`.
        """
        changes = {str(name).replace(".", "_"): value for name, value in settings.items()}
        if len(changes) < len(settings):
            self.parse(settings)  # which says what is given twice
        kept = {name.replace(".", "_"): value for name, value in self.overrides().items()}
        return self.parse(kept | changes)

    def overrides(self) -> dict[str, object]:
        """Return the settings that differ from their defaults, by their dotted names."""
        usual = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != usual[name]}

    def to_dict(self) -> dict[str, object]:
        """Return all settings by their dotted names."""
        return {name.replace("_", "."): getattr(self, name) for name in self._fields()}

    @classmethod
    def _fields(cls) -> dict[str, Field[Any]]:
        known: dict[str, Field[Any]] = cls.__dataclass_fields__  # type: ignore[attr-defined]
        return known

    @classmethod
    def _refuse(cls, spelling: str, name: str) -> NoReturn:
        """Say why there is no such setting, and which one was perhaps meant."""
        if name in _NETWORK or name.startswith(_NETWORK_PREFIXES):
            raise InvalidConfigError(
                f"{spelling} is about connecting to brokers, and a log root has no brokers",
                todo="Leave it out: embedlog.open(path) says where the log is.",
                setting=name,
            )
        from difflib import get_close_matches

        near = get_close_matches(name, cls._fields(), n=1)
        style = "." if "." in spelling else "_"
        raise InvalidConfigError(
            f"{cls.__name__} has no setting {spelling}",
            todo=f"Did you mean {near[0].replace('_', style)}?" if near else None,
            setting=name,
        )

    def _check_each(self) -> None:
        """Put every field into its type and range; called once, from ``__post_init__``."""
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            # A default needs no check, and may be one that no user can give.
            if value is each.default:
                continue
            try:
                self._settle(each.name, each.metadata["check"](value))
            except ValueError as error:
                raise InvalidConfigError(
                    f"{each.name} {value!r} is {error}", setting=each.name, value=value
                ) from None

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _require(self, fits: bool, first: str, why: str, second: str) -> None:
        """Refuse two settings that contradict each other, with both values."""
        if not fits:
            here, there = getattr(self, first), getattr(self, second)
            raise InvalidConfigError(
                f"{first} {here!r} {why} {second} {there!r}", settings=(first, second)
            )
