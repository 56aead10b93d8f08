"""The error codes of Kafka's protocol, and which one an error of embedlog has."""

from __future__ import annotations

from enum import IntEnum

from embedlog.errors import EmbedlogError
from embedlog.server.protocol import snake_case


class ErrorCode(IntEnum):
    """Kafka's names and numbers; those that a server of one log returns."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    MESSAGE_TOO_LARGE = 10
    OFFSET_METADATA_TOO_LARGE = 12
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    INVALID_REQUEST = 42
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    LOG_DIR_NOT_FOUND = 57
    SASL_AUTHENTICATION_FAILED = 58
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_ID_NOT_FOUND = 70
    INVALID_FETCH_SESSION_EPOCH = 71
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    UNSUPPORTED_COMPRESSION_TYPE = 76
    MEMBER_ID_REQUIRED = 79
    PREFERRED_LEADER_NOT_AVAILABLE = 80
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    ELIGIBLE_LEADERS_NOT_AVAILABLE = 83
    ELECTION_NOT_NEEDED = 84
    NO_REASSIGNMENT_IN_PROGRESS = 85
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    PRODUCER_FENCED = 90
    UNKNOWN_TOPIC_ID = 100
    TRANSACTIONAL_ID_NOT_FOUND = 105
    FETCH_SESSION_TOPIC_ID_ERROR = 106
    FENCED_MEMBER_EPOCH = 110
    UNRELEASED_INSTANCE_ID = 111
    UNSUPPORTED_ASSIGNOR = 112
    STALE_MEMBER_EPOCH = 113
    MISMATCHED_ENDPOINT_TYPE = 114
    UNSUPPORTED_ENDPOINT_TYPE = 115
    TRANSACTION_ABORTABLE = 120
    INVALID_RECORD_STATE = 121
    SHARE_SESSION_NOT_FOUND = 122
    INVALID_SHARE_SESSION_EPOCH = 123
    INVALID_REGULAR_EXPRESSION = 128
    SHARE_SESSION_LIMIT_REACHED = 133


class ApiError(Exception):
    """A request, or a part of one, has this code for an answer."""

    def __init__(self, code: ErrorCode, text: str | None = None) -> None:
        super().__init__(text)
        self.code, self.text = code, text


_OTHER_NAMES = {
    "AssignorError": ErrorCode.UNKNOWN_SERVER_ERROR,
    "CommitFailedError": ErrorCode.UNKNOWN_MEMBER_ID,
    "CorruptionError": ErrorCode.CORRUPT_MESSAGE,
    "DurabilityError": ErrorCode.KAFKA_STORAGE_ERROR,
    "InvalidPartitionError": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    "InvalidReplicationAssignmentError": ErrorCode.INVALID_REPLICA_ASSIGNMENT,
    "InvalidSchemaError": ErrorCode.INVALID_CONFIG,
    "InvalidTopicError": ErrorCode.INVALID_TOPIC_EXCEPTION,
    "LockTimeoutError": ErrorCode.REQUEST_TIMED_OUT,
    "LogTruncatedError": ErrorCode.OFFSET_OUT_OF_RANGE,
    "MirroredTopicError": ErrorCode.POLICY_VIOLATION,
    "OutOfOrderSequenceError": ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
    "ReadOnlyError": ErrorCode.POLICY_VIOLATION,
    "RecordBatchTooLargeError": ErrorCode.RECORD_LIST_TOO_LARGE,
    "RecordTooLargeError": ErrorCode.MESSAGE_TOO_LARGE,
    "ReplicaNotAvailableError": ErrorCode.LEADER_NOT_AVAILABLE,
    "SerializationError": ErrorCode.INVALID_RECORD,
    "StorageError": ErrorCode.KAFKA_STORAGE_ERROR,
    "TimeoutError": ErrorCode.REQUEST_TIMED_OUT,
}
"""The codes of errors whose names are not those that Kafka has for them."""


def code_of(error: EmbedlogError | ApiError) -> ErrorCode:
    """Return the code of an error: that of the nearest class that Kafka has one for."""
    if isinstance(error, ApiError):
        return error.code
    for kind in type(error).__mro__:
        name = kind.__name__
        kafkas = snake_case(name.removesuffix("Error")).upper()
        code = _OTHER_NAMES.get(name) or ErrorCode.__members__.get(kafkas)
        if code is not None:
            return code
    return ErrorCode.UNKNOWN_SERVER_ERROR
