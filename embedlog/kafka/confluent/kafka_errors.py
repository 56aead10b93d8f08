"""Kafka's codes for the errors of embedlog."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from embedlog import errors
from embedlog.kafka.confluent.library import confluent_kafka

KafkaError: Any = confluent_kafka.KafkaError
KafkaException: Any = confluent_kafka.KafkaException

_NAMES: dict[type[BaseException], str] = {
    errors.ClosedError: "_DESTROY",
    errors.IllegalStateError: "_STATE",
    errors.ReadOnlyError: "_READ_ONLY",
    errors.InvalidTopicError: "TOPIC_EXCEPTION",
    errors.InvalidConfigError: "INVALID_CONFIG",
    errors.InvalidPartitionsError: "INVALID_PARTITIONS",
    errors.InvalidPartitionError: "_UNKNOWN_PARTITION",
    errors.InvalidRecordError: "INVALID_RECORD",
    errors.InvalidTimestampError: "INVALID_TIMESTAMP",
    errors.RecordTooLargeError: "MSG_SIZE_TOO_LARGE",
    errors.RecordBatchTooLargeError: "RECORD_LIST_TOO_LARGE",
    errors.TopicAlreadyExistsError: "TOPIC_ALREADY_EXISTS",
    errors.UnknownTopicOrPartitionError: "UNKNOWN_TOPIC_OR_PART",
    errors.OffsetOutOfRangeError: "OFFSET_OUT_OF_RANGE",
    errors.NoOffsetForPartitionError: "_AUTO_OFFSET_RESET",
    errors.LogTruncatedError: "_LOG_TRUNCATION",
    errors.InconsistentGroupProtocolError: "INCONSISTENT_GROUP_PROTOCOL",
    errors.InvalidGroupIdError: "INVALID_GROUP_ID",
    errors.UnknownMemberIdError: "UNKNOWN_MEMBER_ID",
    errors.MaxPollExceededError: "_MAX_POLL_EXCEEDED",
    errors.CommitFailedError: "UNKNOWN_MEMBER_ID",
    errors.FencedInstanceIdError: "FENCED_INSTANCE_ID",
    errors.OffsetMetadataTooLargeError: "OFFSET_METADATA_TOO_LARGE",
    errors.NonEmptyGroupError: "NON_EMPTY_GROUP",
    errors.GroupSubscribedToTopicError: "GROUP_SUBSCRIBED_TO_TOPIC",
    errors.GroupIdNotFoundError: "GROUP_ID_NOT_FOUND",
    errors.InvalidRecordStateError: "INVALID_RECORD_STATE",
    errors.TimeoutError: "_TIMED_OUT",
    errors.OutOfOrderSequenceError: "OUT_OF_ORDER_SEQUENCE_NUMBER",
    errors.InvalidProducerEpochError: "_FENCED",
    errors.InvalidReplicationFactorError: "INVALID_REPLICATION_FACTOR",
    errors.InvalidReplicationAssignmentError: "INVALID_REPLICA_ASSIGNMENT",
    errors.NotEnoughReplicasError: "NOT_ENOUGH_REPLICAS",
    errors.NotEnoughReplicasAfterAppendError: "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
    errors.NotLeaderOrFollowerError: "NOT_LEADER_FOR_PARTITION",
    errors.ReplicaNotAvailableError: "LEADER_NOT_AVAILABLE",
    errors.ReplicasDivergedError: "KAFKA_STORAGE_ERROR",
    errors.StorageError: "KAFKA_STORAGE_ERROR",
    errors.CorruptionError: "INVALID_MSG",
    errors.AssignorError: "INCONSISTENT_GROUP_PROTOCOL",
}
"""The most specific class of an error counts."""


def kafka_error(name: str, reason: str | None = None, **properties: bool) -> Any:
    """Return a `KafkaError` by the name of its code; ``properties`` are those of its class."""
    return KafkaError(getattr(KafkaError, name), reason, **properties)


def exception(name: str, reason: str | None = None, **properties: bool) -> Exception:
    """Return a `KafkaException` by the name of its code."""
    raised: Exception = KafkaException(kafka_error(name, reason, **properties))
    return raised


def error_of(error: BaseException, **names: str) -> Any:
    """Return the `KafkaError` of an error of embedlog.

    Args:
        error: The error.
        names: The codes of some classes of errors where they differ, by the class's name.
    """
    for kind in type(error).__mro__:
        name = names.get(kind.__name__) or _NAMES.get(kind)
        if name is not None:
            return kafka_error(
                name,
                str(error),
                fatal=name == "_FENCED",
                retriable=bool(getattr(error, "retriable", False)),
            )
    return kafka_error("_FAIL", str(error))


@contextmanager
def translated(**names: str) -> Iterator[None]:
    """Raise errors of embedlog as `KafkaException`; for the arguments see `error_of`."""
    try:
        yield
    except errors.EmbedlogError as error:
        raise KafkaException(error_of(error, **names)) from errors.raised_in_body(error)
