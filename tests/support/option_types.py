"""The types of settings in embedlog/config/options.py, made from the configs.

``make option-types`` (or ``python tests/support/option_types.py``) writes the file.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from embedlog import config
from embedlog.config import (
    ConsumerConfig,
    GroupConfig,
    MaintenanceConfig,
    ProducerConfig,
    ShareConsumerConfig,
    TopicConfig,
)
from embedlog.config.documentation import field_docstrings
from embedlog.config.settings import Settings

FILE = Path(config.__file__).with_name("options.py")
"""Of the package that is imported: `make wheel` tests an installed one."""

CONFIGS = {
    ProducerConfig: "ProducerOptions",
    ConsumerConfig: "ConsumerOptions",
    TopicConfig: "TopicOptions",
    MaintenanceConfig: "MaintenanceOptions",
}
"""The types of the settings of each config."""

RUN_GROUP_SETS = ("group_id", "enable_auto_commit", "consumer_timeout_ms")
"""Settings of consumers that `run_group` has no use for, since it sets them itself."""

_OF_MEMBERS = (
    *("group_instance_id", "partition_assignment_strategy", "auto_offset_reset"),
    *("auto_commit_interval_ms", "max_poll_interval_ms", "session_timeout_ms"),
    *("heartbeat_interval_ms", "exclude_internal_topics", "allow_auto_create_topics"),
)
READING = [
    name for name in ConsumerConfig.__settings__ if name not in (*RUN_GROUP_SETS, *_OF_MEMBERS)
]
"""Settings of consumers that share consumers have, too."""

_CODECS = '"none", "gzip", "snappy", "lz4", "zstd"'
TAKES = {
    ("ProducerOptions", "acks"): 'Literal[0, 1, -1, "all"]',
    ("ProducerOptions", "compression_type"): f"Literal[{_CODECS}]",
    ("ProducerOptions", "key_serializer"): "Serializer[K] | SerializerName",
    ("ProducerOptions", "value_serializer"): "Serializer[V] | SerializerName",
    ("ProducerOptions", "partitioner"): 'Literal["round_robin"] | Partitioner',
    ("ConsumerOptions", "consumer_timeout_ms"): "float",
    ("_ReadingOptions", "consumer_timeout_ms"): "float",
    ("_ReadingOptions", "key_deserializer"): "Deserializer[K] | SerializerName",
    ("_ReadingOptions", "value_deserializer"): "Deserializer[V] | SerializerName",
    ("GroupOptions", "key_deserializer"): "Deserializer[K] | SerializerName",
    ("GroupOptions", "value_deserializer"): "Deserializer[V] | SerializerName",
    ("GroupOptions", "partition_assignment_strategy"): "Assignors",
    ("TopicOptions", "cleanup_policy"): (
        'Literal["delete", "compact", "compact,delete", "delete,compact"]'
    ),
    ("TopicOptions", "compression_type"): f'Literal["producer", {_CODECS}]',
}
"""What a setting takes, where that is more than the config then holds."""

HEADER = '''"""The settings by name, for type checkers and editors.

Made from the configs by tests/support/option_types.py.  None means the default of a setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypedDict

from embedlog.record import K, TopicPartition, V
from embedlog.serializers import Deserializer, Serializer, SerializerName

Partitioner = Callable[[bytes | None, list[int], list[int]], int]
"""Called with the bytes of a key, all partitions, and the available ones (again all)."""


class CustomAssignor(Protocol):
    """An assignor of a program; see `embedlog.assignor.Assignor`."""

    @property
    def name(self) -> str:
        """The name that members vote for."""

    @property
    def cooperative(self) -> bool:
        """Whether a rebalance revokes only partitions that move."""

    def assign(
        self, partitions: Mapping[str, int], members: Sequence[Any], /
    ) -> Mapping[str, Iterable[TopicPartition]]:
        """Return the partitions of each member, by its id."""


Assignors = str | CustomAssignor | Sequence[str | CustomAssignor]
"""Names, which a str separates by commas, or assignors; the preferred one first."""
'''


def render() -> str:
    """Return the file as it must be."""
    shared = [name for name in ConsumerConfig.__settings__ if name not in RUN_GROUP_SETS]
    generic = "TypedDict, Generic[K, V], total=False"
    parts = [
        HEADER,
        *_class("ProducerOptions", generic, "The settings of a producer.", ProducerConfig),
        *_class(
            *("GroupOptions", generic, "The settings of a consumer in a group."),
            *(ConsumerConfig, shared),
        ),
        *_class(
            *("RunGroupOptions", "GroupOptions[K, V], total=False"),
            *("The settings of a group of `run_group`, and of its consumers.", GroupConfig),
        ),
        *_class(
            *("ConsumerOptions", "GroupOptions[K, V], total=False"),
            *("The settings of a consumer.", ConsumerConfig, RUN_GROUP_SETS),
        ),
        *_class(
            *(
                "_ReadingOptions",
                generic,
                "The settings of consumers that share consumers have, too.",
            ),
            *(ConsumerConfig, [*READING, "consumer_timeout_ms"]),
        ),
        *_class(
            *("ShareConsumerOptions", "_ReadingOptions[K, V], total=False"),
            *("The settings of a share consumer.", ShareConsumerConfig),
        ),
        *_both_spellings("TopicOptions", "a topic", TopicConfig),
        *_both_spellings("MaintenanceOptions", "the maintenance jobs", MaintenanceConfig),
    ]
    return _formatted("\n".join(parts) + "\n")


def _class(
    name: str,
    bases: str,
    docstring: str,
    config: type[Settings],
    names: Iterable[str] | None = None,
) -> Iterator[str]:
    yield f'\n\nclass {name}({bases}):\n    """{docstring}"""\n'
    for setting in config.__settings__ if names is None else names:
        yield f"    {setting}: {_takes(name, config, setting)}"
        if effect := field_docstrings(config).get(setting):
            yield textwrap.indent(f'"""{effect}"""', "    ")


def _both_spellings(name: str, of_what: str, config: type[Settings]) -> Iterator[str]:
    """Yield a class with dots and underscores; only the syntax of a call allows dots."""
    docstring = f"The settings of {of_what}, with underscores."
    yield from _class(f"_Underscored{name}", "TypedDict, total=False", docstring, config)
    yield f'\n\n_Dotted{name} = TypedDict(\n    "_Dotted{name}",\n    {{'
    for setting in config.__settings__:
        yield f"{setting.replace('_', '.')!r}: {_takes(name, config, setting)!r},"
    yield "    },\n    total=False,\n)"
    yield f"\n\nclass {name}(_Underscored{name}, _Dotted{name}, total=False):"
    yield f'    """The settings of {of_what}, with dots or underscores."""'


def _takes(options: str, config: type[Settings], name: str) -> str:
    setting = config.__settings__[name]
    only = f"Literal[{setting.default!r}]"
    type_ = only if setting.only_default else config.__annotations__[name]
    takes = TAKES.get((options.removeprefix("_Underscored"), name), type_)
    return takes if takes.endswith("| None") else f"{takes} | None"


def _formatted(source: str) -> str:
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(FILE), "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
    sys.stdout.write(f"wrote {FILE.name}\n")
