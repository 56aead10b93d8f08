"""`Settings`, the base of all configs: parse, compare with the defaults, and change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn, Self, dataclass_transform

from embedlog.config.network import is_network_setting
from embedlog.config.values import Setting
from embedlog.errors import InvalidConfigError
from embedlog.hints import Hint

_HINTS = {
    "default_offset_commit_callback": "Pass a callback to commit_async.",
    "transaction_timeout_ms": "Leave it out: a transaction that is not committed is not in the "
    "log, and delays no reader.",
    "interceptor_classes": "Call the function where the program sends or polls.",
    "group_protocol": "Leave it out: every consumer follows the group without stopping it.",
}
"""What to use instead of settings of Kafka's clients that embedlog does not have."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Settings:
    """The base of all configs: immutable, and checked when they are made.

    Not dataclasses: to make four of them takes a short program as long as to open its log.
    """

    __settings__: ClassVar[dict[str, Setting]]
    """Those that a config and its bases declare; an object has only those that it was given."""

    def __init_subclass__(cls) -> None:
        declared = {name: each for name, each in vars(cls).items() if isinstance(each, Setting)}
        cls.__settings__ = {**getattr(cls, "__settings__", {}), **declared}
        for name, setting in declared.items():
            setattr(cls, name, setting.default)

    def __init__(self, **values: object) -> None:
        if unknown := values.keys() - self.__settings__.keys():
            raise TypeError(f"{type(self).__name__} has no setting {min(unknown)}")
        for name, value in values.items():
            self._set(name, value)
        self.__post_init__()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"A config cannot be changed: {name}")

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(tuple(self.to_dict().values()))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__settings__)
        return f"{type(self).__name__}({values})"

    @classmethod
    def parse(cls, settings: Mapping[str, object]) -> Self:
        """Make a config from names in either spelling, and values of their type or as text.

        None means the default.  Configs of clients, which have a setting ``strict``, ignore
        settings for connections to brokers unless it is set.

        Raises:
            InvalidConfigError: A setting is unknown (the error names the most similar one),
                given twice, of the wrong type, or contradicts another one.
        """
        values: dict[str, object] = {}
        lenient = "strict" in cls.__settings__ and not _is_true(settings.get("strict"))
        for spelling, value in settings.items():
            name = str(spelling).replace(".", "_")
            if name not in cls.__settings__:
                if is_network_setting(name) and (lenient or value is None):
                    continue
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
        changed = {str(name).replace(".", "_") for name in settings}
        kept = {
            name: value
            for name, value in self.overrides().items()
            if name.replace(".", "_") not in changed
        }
        return self.parse({**kept, **settings})

    def overrides(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, by their dotted names."""
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}

    def to_dict(self) -> dict[str, Any]:
        """Return all settings, by their dotted names."""
        return {name.replace("_", "."): getattr(self, name) for name in self.__settings__}

    @classmethod
    def _refuse(cls, spelling: str, name: str) -> NoReturn:
        """Raise for an unknown setting, with the most similar one or the reason."""
        if is_network_setting(name):
            raise InvalidConfigError(
                f"{spelling} is a setting for connections to brokers, and embedlog has no brokers",
                todo=Hint(
                    "Leave it out; the path of the log is an argument of embedlog.open.",
                    "Leave it out; the path of the log is --root.",
                ),
                setting=name,
            )
        if name in _HINTS:
            raise InvalidConfigError(
                f"embedlog has no setting {spelling}", todo=_HINTS[name], setting=name
            )
        from difflib import get_close_matches

        similar = get_close_matches(name, cls.__settings__, n=1)
        separator = "." if "." in spelling else "_"
        raise InvalidConfigError(
            f"A {cls.__name__.removesuffix('Config').lower()} has no setting {spelling}",
            todo=f"Did you mean {similar[0].replace('_', separator)}?" if similar else None,
            setting=name,
        )

    def __post_init__(self) -> None:
        """Check every value, and convert it."""
        for name, value in [*vars(self).items()]:
            # A default needs no check, and may be a value that users cannot pass.
            if value is self.__settings__[name].default:
                continue
            try:
                self._set(name, self.__settings__[name].check(value))
            except ValueError as error:
                raise InvalidConfigError(
                    f"{name} must be {error}, got {value!r}", setting=name, value=value
                ) from None

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_pickle(self, allow_pickle: bool, *names: str) -> None:
        """Raise if one of the serializers is pickle, and that is not allowed."""
        for name in names:
            if getattr(self, name) == "pickle" and not allow_pickle:
                raise InvalidConfigError(
                    f"{name} 'pickle' needs allow_pickle=True",
                    todo="Set it if you trust everyone who writes to the topic: reading pickled "
                    "data can run any code.",
                    settings=(name, "allow_pickle"),
                )

    def _contradict(self, first: str, why: str, second: str) -> NoReturn:
        """Raise, with the values of two settings that contradict each other."""
        raise InvalidConfigError(
            f"{first} {getattr(self, first)!r} {why} {second} {getattr(self, second)!r}",
            settings=(first, second),
        )


def _is_true(value: object) -> bool:
    return str(value).lower() == "true"
