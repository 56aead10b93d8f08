"""Which settings a typed topic may have."""

from __future__ import annotations

from embedlog.config import TopicConfig
from embedlog.errors import InvalidConfigError
from embedlog.schemas.topic_schema import TopicSchema

MESSAGE_BYTES = 4 << 20
"""``max.message.bytes`` of a new typed topic: columns are read faster from large batches."""


def with_typed_defaults(config: TopicConfig) -> TopicConfig:
    """Return the settings of a new typed topic, some of which have other defaults."""
    if "max.message.bytes" in config.overrides():
        return config
    return config.changed({"max.message.bytes": MESSAGE_BYTES})


def check_typed_config(topic: str, config: TopicConfig, schema: TopicSchema) -> None:
    """Raise unless a typed topic may have these settings.

    Raises:
        InvalidConfigError: The error names the setting.
    """
    for name, serializer in (("key", config.key_serializer), ("value", config.value_serializer)):
        if serializer != "bytes":
            raise InvalidConfigError(
                f"A typed topic stores columns, so {name}.serializer={serializer} has no effect",
                topic=topic,
                setting=f"{name}.serializer",
                todo="Leave it out.",
            )
    if config.compacts and not schema.key:
        raise InvalidConfigError(
            "A compacted topic needs a key, and the topic has no key column",
            topic=topic,
            setting="cleanup.policy",
            todo="Create it with key=….",
        )
    if config.message_timestamp_type == "LogAppendTime" and schema.timestamp is not None:
        raise InvalidConfigError(
            f"The timestamps of the topic are in its column {schema.timestamp}, which "
            "message.timestamp.type=LogAppendTime would change",
            topic=topic,
            setting="message.timestamp.type",
            todo="Create the topic without timestamp=….",
        )
