"""Which settings a typed topic may have."""

from __future__ import annotations

from embedlog.catalog import TopicInfo
from embedlog.config import TopicConfig
from embedlog.errors import InvalidConfigError, TopicAlreadyExistsError
from embedlog.schemas.topic_schema import TopicSchema


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


def refuse_other_schema(
    info: TopicInfo, schema: TopicSchema | None, asked: TopicSchema | None
) -> None:
    """Raise unless a topic that exists has the schema that was asked for, if any was.

    Raises:
        TopicAlreadyExistsError: It has another.
    """
    if asked is None:
        return
    same = schema is not None and (
        schema.plain.equals(asked.plain)
        and schema.key == asked.key
        and schema.timestamp == asked.timestamp
    )
    if same:
        return
    columns = "bytes" if schema is None else str(schema.plain).replace("\n", ", ")
    raise TopicAlreadyExistsError(
        f"The topic exists with another schema: {columns}",
        todo=f"To change it, call alter_topic({info.name!r}, schema=…)."
        if schema is not None
        else "Choose another name: a topic of bytes cannot become a typed one.",
        topic=info.name,
        differences={"schema": (schema, asked)},
    )
