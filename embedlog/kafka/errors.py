"""kafka-python's errors, and embedlog's as one of these.

If kafka-python is installed these are its own classes; otherwise they have the same names,
error codes and bases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from embedlog import errors as log_errors
from embedlog.kafka.installed import installed
from embedlog.kafka.structs import OffsetAndMetadata, TopicPartition
from embedlog.kafka.typed import note_for_dicts

P = ParamSpec("P")
R = TypeVar("R")

_CLIENT_ERRORS = """
    KafkaError Cancelled/r CommitFailedError IllegalArgumentError IllegalStateError
    KafkaConfigurationError KafkaConnectionError/m KafkaProtocolError KafkaTimeoutError/r
    MetadataEmptyBrokerList/r NoOffsetForPartitionError LogTruncationError NodeNotReadyError/r
    UnknownBrokerIdError QuotaViolationError StaleMetadata/m TooManyInFlightRequests/r
    UnrecognizedBrokerVersion UnsupportedCodecError TransactionAbortedError
"""
"""Errors without a code; "r" is retriable, "m" too, after a refresh of the metadata."""

_CODED_ERRORS = """
    OffsetOutOfRangeError CorruptRecordError UnknownTopicOrPartitionError/m
    InvalidFetchRequestError LeaderNotAvailableError/m NotLeaderForPartitionError/m
    RequestTimedOutError/r BrokerNotAvailableError ReplicaNotAvailableError/m
    MessageSizeTooLargeError StaleControllerEpochError OffsetMetadataTooLargeError
    NetworkExceptionError/m CoordinatorLoadInProgressError/r CoordinatorNotAvailableError/r
    NotCoordinatorError/r InvalidTopicError RecordListTooLargeError NotEnoughReplicasError/r
    NotEnoughReplicasAfterAppendError/r InvalidRequiredAcksError IllegalGenerationError
    InconsistentGroupProtocolError InvalidGroupIdError UnknownMemberIdError
    InvalidSessionTimeoutError RebalanceInProgressError InvalidCommitOffsetSizeError
    TopicAuthorizationFailedError/a GroupAuthorizationFailedError/a
    ClusterAuthorizationFailedError/a InvalidTimestampError UnsupportedSaslMechanismError
    IllegalSaslStateError UnsupportedVersionError TopicAlreadyExistsError InvalidPartitionsError
    InvalidReplicationFactorError InvalidReplicationAssignmentError InvalidConfigurationError
    NotControllerError/r InvalidRequestError UnsupportedForMessageFormatError PolicyViolationError
    OutOfOrderSequenceNumberError DuplicateSequenceNumberError InvalidProducerEpochError
    InvalidTxnStateError InvalidProducerIdMappingError InvalidTransactionTimeoutError
    ConcurrentTransactionsError/r TransactionCoordinatorFencedError
    TransactionalIdAuthorizationFailedError/a SecurityDisabledError OperationNotAttemptedError
    KafkaStorageError/m LogDirNotFoundError SaslAuthenticationFailedError UnknownProducerIdError
    ReassignmentInProgressError DelegationTokenAuthDisabledError DelegationTokenNotFoundError
    DelegationTokenOwnerMismatchError DelegationTokenRequestNotAllowedError
    DelegationTokenAuthorizationFailedError/a DelegationTokenExpiredError
    InvalidPrincipalTypeError NonEmptyGroupError GroupIdNotFoundError
    FetchSessionIdNotFoundError/r InvalidFetchSessionEpochError/r ListenerNotFoundError/m
    TopicDeletionDisabledError FencedLeaderEpochError/m UnknownLeaderEpochError/m
    UnsupportedCompressionTypeError StaleBrokerEpochError OffsetNotAvailableError/r
    MemberIdRequiredError PreferredLeaderNotAvailableError/m GroupMaxSizeReachedError
    FencedInstanceIdError EligibleLeadersNotAvailableError/m ElectionNotNeededError/m
    NoReassignmentInProgressError GroupSubscribedToTopicError InvalidRecordError
    UnstableOffsetCommitError/r ThrottlingQuotaExceededError/r ProducerFencedError
    ResourceNotFoundError DuplicateResourceError UnacceptableCredentialError
    InconsistentVoterSetError InvalidUpdateVersionError FeatureUpdateFailedError
    PrincipalDeserializationFailureError SnapshotNotFoundError PositionOutOfRangeError
    UnknownTopicIdError/m DuplicateBrokerRegistrationError BrokerIdNotRegisteredError
    InconsistentTopicIdError/m InconsistentClusterIdError TransactionalIdNotFoundError
    FetchSessionTopicIdError/r IneligibleReplicaError NewLeaderElectedError
    OffsetMovedToTieredStorageError FencedMemberEpochError UnreleasedInstanceIdError
    UnsupportedAssignorError StaleMemberEpochError MismatchedEndpointTypeError
    UnsupportedEndpointTypeError UnknownControllerIdError UnknownSubscriptionIdError
    TelemetryTooLargeError InvalidRegistrationError TransactionAbortableError
    InvalidRecordStateError ShareSessionNotFoundError/r InvalidShareSessionEpochError/r
    FencedStateEpochError InvalidVoterKeyError DuplicateVoterError VoterNotFoundError
"""
"""Errors with a code, the first with 1; "a" is about authorization."""


def _text(error: Exception) -> str:
    name = type(error).__name__
    return f"{name}: {Exception.__str__(error)}" if error.args else name


def _coded_text(error: Any) -> str:
    return f"[Error {error.errno}] {_text(error)}"


def _is_equal(error: Exception, other: object) -> bool:
    return type(error) is type(other) and error.args == getattr(other, "args", None)


def error_classes(library: ModuleType | None) -> dict[str, type[Exception]]:
    """Return kafka-python's classes, and make those that it does not have."""
    classes: dict[str, type[Exception]] = {}

    def define(name: str, *bases: str, **fields: Any) -> None:
        parents = tuple(classes[base] for base in bases) or (Exception,)
        own = getattr(library, name, None)
        classes[name] = own or type(name, parents, {"__module__": __name__, **fields})

    define("KafkaError", retriable=False, invalid_metadata=False, __str__=_text, __eq__=_is_equal)
    define("RetriableError", "KafkaError", retriable=True)
    define("InvalidMetadataError", "RetriableError", invalid_metadata=True)
    define("BrokerResponseError", "KafkaError", errno=None, __str__=_coded_text)
    define("AuthorizationError", "BrokerResponseError")
    define("UnknownError", "BrokerResponseError", errno=-1)
    define("NoError", "BrokerResponseError", errno=0)
    kinds = {"r": ("RetriableError",), "m": ("InvalidMetadataError",), "": ()}
    for word in _CLIENT_ERRORS.split()[1:]:
        name, _, kind = word.partition("/")
        define(name, *(kinds[kind] or ("KafkaError",)))
    for errno, word in enumerate(_CODED_ERRORS.split(), 1):
        name, _, kind = word.partition("/")
        base = "AuthorizationError" if kind == "a" else "BrokerResponseError"
        define(name, *kinds.get(kind, ()), base, errno=errno)
    define("IncompatibleBrokerVersion", "UnsupportedVersionError")
    return classes


_installed = installed("kafka.errors")
_classes: dict[str, Any] = dict(error_classes(_installed))
globals().update(_classes)

KafkaError: Any = _classes["KafkaError"]


def __getattr__(name: str) -> Any:
    """Return another error of kafka-python."""
    if name.startswith("_") or not hasattr(_installed, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_installed, name)


def for_code(code: int) -> Any:
    """Return the class of an error code."""
    if _installed is not None:
        return _installed.for_code(code)
    for kind in _classes.values():
        if getattr(kind, "errno", None) == code:
            return kind
    return type("UnrecognizedBrokerError", (_classes["UnknownError"],), {"errno": code})


# Translation

_NAMES = {
    "BufferExhaustedError": "KafkaTimeoutError",
    "ClosedError": "IllegalStateError",
    "CorruptionError": "CorruptRecordError",
    "InvalidConfigError": "KafkaConfigurationError",
    "InvalidProducerEpochError": "ProducerFencedError",
    "LogTruncatedError": "LogTruncationError",
    "NotALogError": "KafkaConfigurationError",
    "OutOfOrderSequenceError": "OutOfOrderSequenceNumberError",
    "ReadOnlyError": "PolicyViolationError",
    "ReplicaNotAvailableError": "LeaderNotAvailableError",
    "ReplicasDivergedError": "KafkaStorageError",
    "RecordBatchTooLargeError": "RecordListTooLargeError",
    "RecordTooLargeError": "MessageSizeTooLargeError",
    "RestartedApplicationError": "ProducerFencedError",
    "StorageError": "KafkaStorageError",
    "TimeoutError": "KafkaTimeoutError",
    "UnsupportedFormatError": "UnsupportedVersionError",
}
"""kafka-python's names where they differ."""


def translated(error: BaseException) -> BaseException:
    """Return an error of embedlog as kafka-python's clients raise it, with the same sentence.

    Others are returned as they are.  A program that raises the result sets its ``__cause__``
    to the error.
    """
    if not isinstance(error, log_errors.EmbedlogError):
        return error
    text = str(error)
    if isinstance(error, log_errors.RecordDeserializationError) and error.__cause__ is not None:
        # kafka-python lets the error of a deserializer through.
        error.__cause__.add_note(text)
        note_for_dicts(error.__cause__, error.value_bytes)
        return error.__cause__
    if isinstance(error, log_errors.SerializationError | log_errors.InvalidPartitionError):
        return TypeError(text)
    for kind in type(error).__mro__:
        name = _NAMES.get(kind.__name__, kind.__name__)
        if name == "LogTruncationError" and isinstance(error, log_errors.LogTruncatedError):
            return _log_truncation(error, text)
        if name in _classes:
            return _classes[name](text)  # type: ignore[no-any-return]
    return KafkaError(text)  # type: ignore[no-any-return]


def _log_truncation(error: log_errors.LogTruncatedError, text: str) -> BaseException:
    """Return kafka-python's error, which says where to continue in each partition."""
    assert error.topic is not None
    assert error.partition is not None
    assert error.next_offset is not None
    partition = TopicPartition(error.topic, error.partition)
    divergent_offsets = {partition: OffsetAndMetadata(error.next_offset, "", -1)}
    kind = _classes["LogTruncationError"]
    if _installed is not None:
        return kind(divergent_offsets, text)  # type: ignore[no-any-return]
    own = kind(text)
    own.divergent_offsets = divergent_offsets
    return own  # type: ignore[no-any-return]


@contextmanager
def kafka_errors() -> Iterator[None]:
    """Raise errors of embedlog in a block as kafka-python's."""
    try:
        yield
    except log_errors.EmbedlogError as error:
        raise translated(error) from log_errors.raised_in_body(error)


def raises_kafka_errors(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method: it raises errors of embedlog as kafka-python's."""

    @functools.wraps(call)
    def wrapper(*args: P.args, **named: P.kwargs) -> R:
        try:
            return call(*args, **named)
        except log_errors.EmbedlogError as error:
            raise translated(error) from error

    return wrapper
