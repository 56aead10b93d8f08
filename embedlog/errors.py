"""Every error embedlog raises: what happened, where, and what to do about it.

The names are Kafka's (as kafka-python spells them) where Kafka has the error.
Each error carries the facts it has as fields, survives pickling (a Spark
worker sends them home), and says through ``retriable`` whether the same call
may succeed later.
"""

from __future__ import annotations

import builtins
from errno import ENOENT, ENOTDIR
from typing import Any, ClassVar


class EmbedlogError(Exception):
    """The root of all errors of embedlog.

    Args:
        what: What happened, as a sentence without the place.
        todo: What the caller can do about it.
        facts: Where it happened; unknown facts are left out.
    """

    retriable: ClassVar[bool] = False
    """Whether the same call may succeed later without anything being changed."""

    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    path: str | None = None
    position: int | None = None
    group: str | None = None
    member: str | None = None

    def __init__(self, what: str, *, todo: str | None = None, **facts: Any) -> None:
        super().__init__(what)
        self.what, self.todo, self.facts = what, todo, facts
        for name, fact in facts.items():
            setattr(self, name, fact)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.todo, self.facts)

    def __str__(self) -> str:
        place = self._place()
        told = f"{self.what} [{place}]" if place else self.what
        return f"{told}. {self.todo}" if self.todo else told

    def _place(self) -> str:
        parts = []
        if self.topic is not None:
            parts.append(self.topic if self.partition is None else f"{self.topic}-{self.partition}")
        if self.offset is not None:
            parts.append(f"offset {self.offset}")
        if self.path is not None:
            parts.append(self.path)
        if self.position is not None:
            parts.append(f"byte {self.position}")
        if self.group is not None:
            parts.append(f"group {self.group}")
        if self.member is not None:
            parts.append(f"member {self.member}")
        return ", ".join(parts)


def _rebuild(
    kind: type[EmbedlogError], what: str, todo: str | None, facts: dict[str, Any]
) -> EmbedlogError:
    return kind(what, todo=todo, **facts)


# Usage


class ClosedError(EmbedlogError):
    """The log, producer or consumer was closed, perhaps by another thread."""


class IllegalStateError(EmbedlogError):
    """The call does not fit the state, such as polling without an assignment (E8)."""


class ReadOnlyError(EmbedlogError):
    """The log was opened with ``mode="r"``."""


class InvalidTopicError(EmbedlogError, ValueError):
    """A topic name Kafka would refuse: it must match ``[A-Za-z0-9_][A-Za-z0-9._-]{0,199}``."""


class InvalidConfigError(EmbedlogError, ValueError):
    """A setting is unknown, has the wrong type, or contradicts another one."""


class InvalidPartitionsError(EmbedlogError, ValueError):
    """A partition count that is not positive, or would shrink a topic."""


class InvalidPartitionError(EmbedlogError, TypeError):
    """What should be a partition is none, such as a text in place of its number."""


class InvalidRecordError(EmbedlogError, ValueError):
    """A record the topic refuses, such as one without a key in a compacted topic (A6)."""


class OffsetsOutOfOrderError(EmbedlogError, ValueError):
    """Batches with offsets of their own are not in the order of these (A8)."""


class UnexpectedAppendOffsetError(EmbedlogError, ValueError):
    """A batch with an offset of its own lies below the end of the log (A8)."""


class SerializationError(EmbedlogError, TypeError):
    """A key, value or header is not bytes, and no serializer made it so."""


class RecordTooLargeError(EmbedlogError, ValueError):
    """A batch is larger than ``max.message.bytes``, or a record than ``max_request_size`` (A4).

    Both count the bytes that Kafka would (`embedlog.batch.limits`).
    """


class RecordBatchTooLargeError(RecordTooLargeError):
    """A batch takes more bytes on the disk than ``segment.bytes`` (A4)."""


class TopicAlreadyExistsError(EmbedlogError):
    """The topic to create exists already; with ``exist_ok``, it has other settings."""

    differences: dict[str, tuple[object, object]] | None = None
    """With ``exist_ok``: what differs, "partitions" or a setting; as it is, and as asked for."""


class UnknownTopicOrPartitionError(EmbedlogError, LookupError):
    """There is no such topic, or it has fewer partitions."""


class OffsetOutOfRangeError(EmbedlogError, LookupError):
    """The offset is below the log start or past its end (A17)."""


class NoOffsetForPartitionError(EmbedlogError, LookupError):
    """There is no position, and ``auto_offset_reset`` is ``"none"`` (E1)."""


class LogTruncatedError(OffsetOutOfRangeError):
    """The log was cut below the position since that was read (A36, KIP-320).

    Records before it are gone, in a power cut perhaps; others may have their
    offsets by now.  ``next_offset`` is where the log was cut: all below it is
    as it was, and reading goes on there without a gap.
    """

    next_offset: int | None = None


class RecordDeserializationError(EmbedlogError):
    """A deserializer failed; ``key_bytes`` and ``value_bytes`` hold what it was given (E10)."""

    key_bytes: bytes | None = None
    value_bytes: bytes | None = None


class WakeupError(EmbedlogError):
    """``wakeup()`` was called while, or before, the consumer blocked (E12)."""


# Groups


class InconsistentGroupProtocolError(EmbedlogError):
    """The members of a group have no assignor in common (M5)."""


class InvalidGroupIdError(EmbedlogError, ValueError):
    """A group id is missing, or cannot name a group (E18)."""


class UnknownMemberIdError(EmbedlogError):
    """The group does not have this member any more: its session ended, or it was removed (M11)."""


class FencedInstanceIdError(EmbedlogError):
    """Another member took over the ``group_instance_id`` (M13)."""


class FencedError(EmbedlogError):
    """Somebody else took this work over while this process was silent: it must not go on (P14)."""


class CommitFailedError(EmbedlogError):
    """The partitions belong to another member by now, so nothing was committed (E23)."""


class OffsetMetadataTooLargeError(EmbedlogError, ValueError):
    """The note of a commit is longer than 4096 bytes."""


class NonEmptyGroupError(EmbedlogError):
    """A group with members cannot be changed from outside."""


class GroupSubscribedToTopicError(EmbedlogError):
    """Offsets of a topic that a member reads cannot be deleted."""


class GroupIdNotFoundError(EmbedlogError, LookupError):
    """There is no such group."""


class GroupMaxSizeReachedError(EmbedlogError):
    """The group has as many members as it may have (M12)."""


class ProcessDiedError(EmbedlogError):
    """Processes of a run were killed too often, or one failed in a way that cannot be sent."""


class AssignorError(EmbedlogError):
    """An assignor failed, or broke its promise; ``problems`` says in what, each as a sentence."""

    assignor: str | None = None
    problems: tuple[str, ...] = ()


# Spark


class DataLossError(EmbedlogError):
    """Records that a query was to read are gone: deleted, cut off, or their topic was made anew."""


class SparkSetupError(EmbedlogError):
    """Spark, Java, pyarrow or the Python of Spark's workers is missing, or not the right one."""


class SparkQueryError(EmbedlogError):
    """Spark failed in a query, for a reason of its own; the text is the first line of what it said.

    The exception of Spark, pages long, is the ``__cause__``.
    """


# Producing


class TimeoutError(EmbedlogError, builtins.TimeoutError):  # noqa: A001 - Kafka's name, and it is one
    """The call did not finish in the time given; nothing is known to be wrong."""

    retriable = True


class BufferExhaustedError(TimeoutError):
    """``buffer_memory`` stayed full for ``max_block_ms`` (G8)."""


class OutOfOrderSequenceError(EmbedlogError):
    """A producer skipped or repeated sequence numbers in part (G16)."""


class InvalidProducerEpochError(EmbedlogError):
    """A newer producer of the same name took over (G17)."""


class RestartedApplicationError(EmbedlogError):
    """An application started over: it would publish again what it has published to a topic.

    ``application`` is its name, ``version`` the version it came with, and
    ``published`` the last version that it published to ``topic``.
    """

    application: str | None = None
    version: int | None = None
    published: int | None = None


# Storage


class StorageError(EmbedlogError):
    """The file system refused an operation; ``errno`` is its number."""

    errno: int | None = None
    operation: str | None = None

    @property
    def missing(self) -> bool:
        """Whether there is no such file, rather than one that cannot be read for now."""
        return self.errno in (ENOENT, ENOTDIR)


class DiskFullError(StorageError):
    """No space is left, or a quota is used up; the log is as it was before the call."""

    retriable = True


class DurabilityError(StorageError):
    """A flush failed: the partition is read-only until ``repair`` (a failed fsync is final)."""


class LockTimeoutError(TimeoutError):
    """Another process holds a lock for too long; ``pid`` and its ``state`` say which."""

    pid: int | None = None
    state: str | None = None


class CorruptionError(EmbedlogError):
    """Bytes below the recovery point are not those written; nothing was cut."""


class CorruptBatchError(CorruptionError):
    """The bytes of a batch are not those written; reading again will not help."""

    reason: str | None = None


class UnsupportedFilesystemError(EmbedlogError):
    """A file system on which locks or shared maps cannot be trusted (NFS, SMB, 9p, FUSE)."""


class UnsupportedFormatError(EmbedlogError):
    """A root or a batch was written by a version of embedlog that has another format."""


class NotALogError(EmbedlogError):
    """The path is a file, or a directory that holds something else."""
