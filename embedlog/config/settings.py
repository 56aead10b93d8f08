"""`Settings`, the base of all configs: parse, compare with the defaults, and change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from typing import Any, ClassVar, NoReturn, Self

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
    """The base of all configs: immutable, and checked when they are made."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @classmethod
    def parse(cls, settings: Mapping[str, object]) -> Self:
        """Make a config from names in either spelling, and values of their type or as text.

        None means the default.

        Raises:
            InvalidConfigError: A setting is unknown (the error names the most similar one),
                given twice, of the wrong type, or contradicts another one.
        """
        values: dict[str, object] = {}
        for spelling, value in settings.items():
            name = str(spelling).replace(".", "_")
            if name not in cls.__dataclass_fields__:
                cls._refuse(str(spelling), name)
            if name in values:
                raise InvalidConfigError(f"{name} is given twice, also as {spelling}", setting=name)
            if value is not None:
                values[name] = value
        return cls(**values)

    def changed(self, settings: Mapping[str, object]) -> Self:
        """Return a copy with some settings changed; None resets a setting to its default.

        Raises:
            InvalidConfigError: As `parse`.
        """
        changes = {str(name).replace(".", "_"): value for name, value in settings.items()}
        if len(changes) < len(settings):
            self.parse(settings)  # Raises, since a setting is given twice.
        overrides = {name.replace(".", "_"): value for name, value in self.overrides().items()}
        return self.parse(overrides | changes)

    def overrides(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, by their dotted names."""
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}

    def to_dict(self) -> dict[str, Any]:
        """Return all settings, by their dotted names."""
        return {name.replace("_", "."): getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def _refuse(cls, spelling: str, name: str) -> NoReturn:
        """Raise for an unknown setting, with the most similar one or the reason."""
        if name in _NETWORK or name.startswith(_NETWORK_PREFIXES):
            raise InvalidConfigError(
                f"{spelling} is a setting for connections to brokers, and embedlog has no brokers",
                todo="Leave it out; the path of the log is an argument of embedlog.open.",
                setting=name,
            )
        from difflib import get_close_matches

        similar = get_close_matches(name, cls.__dataclass_fields__, n=1)
        separator = "." if "." in spelling else "_"
        raise InvalidConfigError(
            f"{cls.__name__} has no setting {spelling}",
            todo=f"Did you mean {similar[0].replace('_', separator)}?" if similar else None,
            setting=name,
        )

    def __post_init__(self) -> None:
        """Check every field and convert its value."""
        for field in self.__dataclass_fields__.values():
            value = getattr(self, field.name)
            # A default needs no check, and may be a value that users cannot pass.
            if value is field.default:
                continue
            try:
                self._set(field.name, field.metadata["check"](value))
            except ValueError as error:
                raise InvalidConfigError(
                    f"{field.name} must be {error}, got {value!r}", setting=field.name, value=value
                ) from None

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_pickle(self, allow_pickle: bool, *names: str) -> None:
        """Raise if one of the serializers is pickle, and that is not allowed."""
        for name in names:
            if getattr(self, name) == "pickle" and not allow_pickle:
                raise InvalidConfigError(
                    f"{name} 'pickle' needs allow_pickle=True",
                    todo="Set it if you trust everybody who writes to the topic: reading pickled "
                    "data can run any code.",
                    settings=(name, "allow_pickle"),
                )

    def _contradict(self, first: str, why: str, second: str) -> NoReturn:
        """Raise, with the values of two settings that contradict each other."""
        raise InvalidConfigError(
            f"{first} {getattr(self, first)!r} {why} {second} {getattr(self, second)!r}",
            settings=(first, second),
        )
