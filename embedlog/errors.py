"""All errors of embedlog.

They have Kafka's names, as kafka-python spells them, where Kafka has the error.  The text of
an error says what happened, where, and what to do.  Errors carry their facts as attributes,
survive pickling, as from a Spark worker, and say by ``retriable`` whether a retry may help.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from errno import ENOENT, ENOTDIR
from functools import partial
from typing import Any, ClassVar, NoReturn, TypeVar

E = TypeVar("E", bound=BaseException)

_PLACES = {
    "offset": "offset {}",
    "path": "{}",
    "position": "byte {}",
    "group": "group {}",
    "member": "member {}",
}
"""The facts that say where an error happened, besides topic and partition."""


class EmbedlogError(Exception):
    """The base of all errors of embedlog.

    The text of an error is "What happened [where]. What to do."

    Args:
        what: What happened, as a sentence without the place and without the final period.
        todo: What the caller can do about it, as one or more sentences.
        facts: Where it happened, and other facts; they become attributes.
    """

    retriable: ClassVar[bool] = False
    """Whether the same call may succeed later without any other change."""

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
        return partial(type(self), todo=self.todo, **self.facts), (self.what,)

    @property
    def problem(self) -> str:
        """What happened, and where, without what to do."""
        facts = ((text, getattr(self, name)) for name, text in _PLACES.items())
        where = [text.format(fact) for text, fact in facts if fact is not None]
        if self.topic is not None:
            partition = "" if self.partition is None else f"-{self.partition}"
            where.insert(0, f"{self.topic}{partition}")
        return f"{self.what} [{', '.join(where)}]" if where else self.what

    def __str__(self) -> str:
        return f"{self.problem}. {self.todo}" if self.todo else self.problem


def no_attribute(owner: object, name: str, hint: str = "") -> AttributeError:
    """Return the error for a missing attribute, with what to do instead."""
    text = f"{type(owner).__name__} has no attribute {name!r}"
    return AttributeError(f"{text}; {hint}" if hint else text, name=name, obj=owner)


class _MissingMethod:
    def __init__(self, name: str, hint: str) -> None:
        self._name, self._hint = name, hint

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise no_attribute(owner if instance is None else instance, self._name, self._hint)


def hint_at_missing(owner: type, hints: Mapping[str, str]) -> None:
    """Have a class say what to call instead of methods of other libraries, by their names.

    A `__getattr__` could do it too, but would make each attribute of the objects slower, such as
    those that ``send`` reads for each record.
    """
    for name, hint in hints.items():
        setattr(owner, name, _MissingMethod(name, hint))


def raised_in_body(error: E) -> E:
    """Return the error of a ``with`` body, without the generator's frame in its traceback.

    For generators that suppress it, or raise another error instead.  From Python 3.12 on, their
    frame keeps its caller, which has the error in a variable: a cycle that would keep all
    callers, with their variables, until the garbage collector runs.
    """
    traceback = error.__traceback__
    return error.with_traceback(traceback and traceback.tb_next)


# Usage


class ClosedError(EmbedlogError):
    """The log, producer or consumer was closed, perhaps by another thread.

    A retry does not help: open the log, or make the producer or consumer, again.
    """


class IllegalStateError(EmbedlogError):
    """The call is not possible in this state, such as polling without an assignment.

    A retry does not help: make the missing call first, which the error names.
    """


class ReadOnlyError(EmbedlogError):
    """A change was requested of a log that was opened with ``mode="r"``.

    A retry does not help: open the log with ``mode="rw"``.
    """


class InvalidTopicError(EmbedlogError, ValueError):
    """The name of a topic is not valid, or reserved.

    A retry does not help: use a name that matches ``[A-Za-z0-9_][A-Za-z0-9._-]{0,199}`` and
    does not begin with ``__``.
    """


class InvalidConfigError(EmbedlogError, ValueError):
    """A setting is unknown, has an invalid value, or contradicts another one.

    Nothing was changed.  A retry does not help: correct the setting that the error names.
    """


class InvalidSchemaError(EmbedlogError, ValueError):
    """A schema is not valid, or a topic cannot have these columns, or cannot change to them.

    ``column`` is the one to blame, if there is one.  Nothing was changed.  A retry does not help:
    do what the error says.
    """

    column: str | None = None


class IncompatibleSchemaError(InvalidSchemaError):
    """A schema is not compatible with earlier versions of its subject; ``reasons`` says why.

    Nothing was registered.  A retry does not help: change the schema, or the compatibility level
    of the subject.
    """

    subject: str | None = None
    reasons: Sequence[str] = ()


class UnknownSchemaError(EmbedlogError, LookupError):
    """The schema registry has no such subject, version or id.

    A retry does not help: register the schema first.
    """

    subject: str | None = None


class UnknownSnapshotError(EmbedlogError, LookupError):
    """There is no such snapshot, or it was deleted, or has expired.

    A retry does not help: take another one.
    """


class SnapshotAlreadyExistsError(EmbedlogError):
    """There is a snapshot of this name.

    Nothing was changed.  A retry does not help: delete that one, or take another name.
    """


class InvalidQueryError(EmbedlogError, ValueError):
    """A query in SQL, or a filter, is not valid.

    Nothing was read.  A retry does not help: correct the query as the error says.
    """


class InvalidPartitionsError(EmbedlogError, ValueError):
    """The number of partitions is not positive, too large, or less than before.

    Nothing was changed.  A retry does not help: pass a valid number.
    """


class InvalidPartitionError(EmbedlogError, TypeError):
    """An argument is not a partition: wrong type, or a number that no partition can have.

    A retry does not help: pass a `TopicPartition`, or the number of a partition as an int.
    """


class InvalidRecordError(EmbedlogError, ValueError):
    """A record is not valid for its topic, such as one without a key in a compacted topic.

    Nothing was written.  A retry does not help: correct the records, whose ``indices`` the
    error may have, or the settings of the topic.
    """


class InvalidTimestampError(InvalidRecordError):
    """A timestamp is further from the clock than ``message.timestamp.before.max.ms`` or
    ``message.timestamp.after.max.ms`` of the topic allow.

    Nothing was written.  A retry does not help: correct the timestamps, or the settings.
    """


class OffsetsOutOfOrderError(EmbedlogError, ValueError):
    """Batches with given offsets do not have ascending offsets.

    Nothing was written.  A retry does not help: sort the batches.
    """


class UnexpectedAppendOffsetError(EmbedlogError, ValueError):
    """A batch with given offsets begins below the log end, or the log ends elsewhere.

    Nothing was written.  A retry does not help: skip the batches that the log has already, or
    append those that it lacks first.
    """


class SerializationError(EmbedlogError, TypeError):
    """A key, value or header is not bytes, and no serializer converts it.

    The record was not sent.  A retry does not help: pass bytes, or set a serializer.
    """


class RecordTooLargeError(EmbedlogError, ValueError):
    """A batch is larger than ``max.message.bytes``, or a record than ``max_request_size``.

    Both limits count bytes as Kafka would (`embedlog.batch.limits`).  Nothing was written.  A
    retry does not help: split the data, or raise the limit.
    """


class RecordBatchTooLargeError(RecordTooLargeError):
    """A batch takes more bytes on the disk than ``segment.bytes``.

    Nothing was written.  A retry does not help: append smaller batches, or raise the setting.
    """


class TopicAlreadyExistsError(EmbedlogError):
    """The topic to create exists; with ``exist_ok``, it exists with other settings.

    Nothing was changed.  A retry does not help: use the topic, or apply the differences.
    """

    differences: dict[str, tuple[object, object]] | None = None
    """With ``exist_ok``: by setting, or "partitions", the topic's value and the requested one."""


class UnknownTopicOrPartitionError(EmbedlogError, LookupError):
    """The topic does not exist, or has fewer partitions.

    A retry helps only once the topic was created: check the name, or create it.
    """


class OffsetOutOfRangeError(EmbedlogError, LookupError):
    """The offset is below the log start offset or past the log end.

    A retry does not help: seek to an offset between `beginning_offsets` and `end_offsets`.
    """


class NoOffsetForPartitionError(EmbedlogError, LookupError):
    """There is no committed offset, and ``auto_offset_reset`` is ``"none"``.

    A retry does not help: seek, reset the offsets of the group, or set
    ``auto_offset_reset``.
    """


class LogTruncatedError(OffsetOutOfRangeError):
    """The log was truncated below a position that was read already (KIP-320).

    Records before the position are lost, perhaps in a power cut, and others may have their
    offsets now.  A retry does not help: seek to ``next_offset``, where the log was truncated.
    All records below it are unchanged, and reading continues there without a gap.
    """

    next_offset: int | None = None


class RecordDeserializationError(EmbedlogError):
    """A deserializer failed.

    ``key_bytes`` and ``value_bytes`` hold the stored bytes.  A retry reads the same record:
    correct the deserializer, or seek past the record.
    """

    key_bytes: bytes | None = None
    value_bytes: bytes | None = None


class WakeupError(EmbedlogError):
    """``wakeup()`` was called while, or before, the consumer waited.

    Nothing is wrong: continue or close the consumer.
    """


# Groups


class InconsistentGroupProtocolError(EmbedlogError):
    """The members of a group have no assignor in common.

    A retry does not help: let all members list at least one assignor in common.
    """


class InvalidGroupIdError(EmbedlogError, ValueError):
    """A group id is missing or not valid.

    A retry does not help: pass a ``group_id`` of 1 to 360 bytes.
    """


class UnknownMemberIdError(EmbedlogError):
    """The group does not have this member: its session ended, or it was removed.

    The consumer joins the group again at its next ``poll``.
    """


class MaxPollExceededError(UnknownMemberIdError):
    """The consumer did not poll for longer than ``max_poll_interval_ms``, and was removed.

    It joins the group again at its next ``poll``.
    """


class FencedInstanceIdError(EmbedlogError):
    """Another member took over the ``group_instance_id``.

    A retry does not help: close this consumer, or give each member its own id.
    """


class FencedError(EmbedlogError):
    """Another process took over this work while this process was silent.

    Nothing was changed by the refused call.  A retry does not help: the work continues in the
    other process.
    """


class CommitFailedError(EmbedlogError):
    """The partitions belong to another member, so nothing was committed.

    A retry does not help: call ``poll``, and expect the records again in the new owner.
    """


class OffsetMetadataTooLargeError(EmbedlogError, ValueError):
    """The metadata of a commit is longer than 4096 bytes.

    Nothing was committed.  A retry does not help: shorten the metadata.
    """


class InvalidRecordStateError(EmbedlogError):
    """A share consumer does not hold the locks of records that it acknowledges: they have ended.

    ``offsets`` are those of the records, which others get, or have got.  A retry does not help; the
    other records of the same call are acknowledged.
    """

    offsets: tuple[int, ...] = ()


class NonEmptyGroupError(EmbedlogError):
    """A group with members cannot be deleted, and its offsets cannot be reset.

    Nothing was changed.  Stop all consumers of the group first.
    """


class GroupSubscribedToTopicError(EmbedlogError):
    """The committed offsets of a topic that a member reads cannot be deleted.

    Nothing was changed.  Stop the consumers of the topic first.
    """


class GroupIdNotFoundError(EmbedlogError, LookupError):
    """The group does not exist: it has no members and no committed offsets.

    A retry does not help: check the name; `embedlog groups list` prints all of them.
    """


class GroupMaxSizeReachedError(EmbedlogError):
    """The group has its maximum of members.

    Never raised at present: embedlog has no limit for the size of a group.
    """


class ProcessDiedError(EmbedlogError):
    """Processes of a run ended unexpectedly too often, or with an error that cannot be pickled.

    Start the run again: it continues from the committed offsets.
    """


class AssignorError(EmbedlogError):
    """An assignor failed, or returned an invalid assignment; ``problems`` lists why.

    A retry does not help: correct the assignor.
    """

    assignor: str | None = None
    problems: tuple[str, ...] = ()


# Spark and splits


class DataLossError(EmbedlogError):
    """Records that a split or a Spark query has to read are gone: deleted, truncated, or replaced.

    A retry does not help: plan splits again, or begin a new query; in Spark,
    ``failOnDataLoss=false`` skips them.
    """


class SparkSetupError(EmbedlogError):
    """Spark, Java, pyarrow or the Python of Spark's workers is missing, or has a wrong version.

    A retry does not help: install what the error names.
    """


class SparkQueryError(EmbedlogError):
    """Spark failed in a query; the text is the first line of its error.

    The ``__cause__`` is the complete exception of Spark, which says whether a retry may help.
    """


# Producing


class TimeoutError(EmbedlogError, builtins.TimeoutError):  # noqa: A001 - Kafka's name, and it is one
    """The call did not finish in its time limit.

    A retry may help, and so may a longer timeout.
    """

    retriable = True


class BufferExhaustedError(TimeoutError):
    """``buffer_memory`` was full for ``max_block_ms``.

    The record was not sent.  A retry may help: send more slowly, or raise one of the settings.
    """


class DeliveryFailedError(EmbedlogError):
    """Records failed, and no caller looked at their futures.

    Raised by ``flush`` and ``close`` of a producer with ``raise_errors=True``.  ``count`` says
    how many records failed, ``topics`` how many of each topic, and ``errors`` why (the first
    ten errors); the first one is also the ``__cause__``.  Whether sending them again
    may help depends on these errors: see their ``retriable``.
    """

    count: int = 0
    topics: dict[str, int] | None = None
    errors: tuple[BaseException, ...] = ()


class OutOfOrderSequenceError(EmbedlogError):
    """A producer skipped sequence numbers, or repeated only a part of a batch.

    Nothing was written.  A retry does not help: make a new producer.
    """


class ConflictError(EmbedlogError):
    """The partition, or the key, does not end where a conditional append expected it to.

    Another record was appended first.  ``offset`` is what was found: the log end offset, or the
    offset of the last record of ``key``, None if it has none.  Nothing was written, and what was
    found can be read.  A retry does not help: read it, and decide anew.
    """

    key: bytes | None = None


class FencedLeaderEpochError(EmbedlogError, ValueError):
    """A batch that keeps its leader epoch follows one of a later epoch.

    Nothing was written.  A retry does not help: the histories of the two logs part below the
    batch; truncate the copy to there, and copy from there on.
    """


class InvalidProducerEpochError(EmbedlogError):
    """A newer producer with the same ``producer_name`` has taken over.

    Nothing was written.  A retry does not help: close this producer.
    """


class RestartedApplicationError(EmbedlogError):
    """An application that publishes has started over, and would publish records again.

    ``application`` is its name, ``version`` the version of the refused publication, and
    ``published`` the last version that it published to ``topic``.  Nothing was written.  A
    retry does not help: use a new application name, or continue with a higher version.
    """

    application: str | None = None
    version: int | None = None
    published: int | None = None


# Replication


class InvalidReplicationFactorError(EmbedlogError, ValueError):
    """The replication factor is less than 1, or larger than the number of directories.

    Nothing was changed.  A retry does not help: ask for fewer replicas, or add a directory.
    """


class InvalidReplicationAssignmentError(EmbedlogError, ValueError):
    """A partition cannot have these replicas: there are none, or one occurs twice.

    Nothing was changed.  A retry does not help: pass distinct ids of directories of the log.
    """


class NotEnoughReplicasError(EmbedlogError):
    """Too few copies are in sync, or too few directories are online; nothing was written.

    Retriable: an append succeeds once a directory has come back and caught up.  ``in_sync`` and
    ``required`` are the numbers of copies, or of directories.
    """

    retriable = True
    in_sync: int = 0
    required: int = 0


class NotEnoughReplicasAfterAppendError(NotEnoughReplicasError):
    """Copies failed in the flush after an append: the records are in the log, in too few copies.

    Retriable: an idempotent producer does not write them twice.
    """


class NotLeaderOrFollowerError(EmbedlogError):
    """Another directory became the leader of the partition during the call; nothing was written.

    Retriable: the next call goes to the new leader.
    """

    retriable = True


class ReplicaNotAvailableError(EmbedlogError):
    """No copy of the partition can be read: the directories that have one are offline.

    Retriable: it succeeds once one of the directories ``replicas`` has come back.
    """

    retriable = True
    replicas: tuple[str, ...] = ()


class EligibleLeadersNotAvailableError(EmbedlogError):
    """An election outside the in-sync replicas would lose records that another copy has.

    Nothing was changed.  A retry does not help: bring back the directory that has more records,
    or give it up with ``embedlog replicas remove``.
    """


class ReplicasDivergedError(EmbedlogError):
    """Two directories of a log were written to without each other, and neither has all of it.

    A retry does not help: say which one counts, with ``embedlog replicas remove`` of the other.
    """


# Mirrors


class MirroredTopicError(EmbedlogError):
    """The topic is a copy, and only the mirror of its ``source`` may write to it.

    Nothing was written.  A retry does not help: write to the source, or, if that is lost, make the
    copy the place to write to with a failover.
    """

    source: str | None = None
    """The setting ``mirror.source`` of the topic."""


class MirrorConflictError(EmbedlogError):
    """A mirror cannot write to a topic: it is not a copy of the topic of the source.

    It is another topic, or it was a copy until a failover, or another process writes to it.
    Nothing was written.  A retry does not help: do what the error says.
    """


class KafkaClusterError(EmbedlogError):
    """A Kafka cluster, which is an end of a mirror, does not answer, or refuses a request.

    Nothing is lost or doubled: the mirror continues where it was.  A retry may help; a mirror that
    follows tries again by itself.
    """

    retriable = True


class MirrorDivergedError(EmbedlogError):
    """The source does not have the records any more from which a copy was made.

    It was truncated, restored, or created again, and may have other records at the same offsets.
    Nothing was written.  A retry does not help: truncate the copy at ``next_offset``, where it
    begins to differ, or delete it.
    """

    next_offset: int | None = None


# Storage


class StorageError(EmbedlogError):
    """The file system refused an ``operation``; ``errno`` says why.

    A retry may help once the cause is gone; ``path`` names the file.
    """

    errno: int | None = None
    operation: str | None = None

    @property
    def missing(self) -> bool:
        """Whether the file does not exist, rather than that it cannot be read."""
        return self.errno in (ENOENT, ENOTDIR)


class DiskFullError(StorageError):
    """The disk is full, or a quota is exceeded.

    The log is as before the call.  A retry helps once there is space again.
    """

    retriable = True


class LogDeletedError(StorageError):
    """The files of the log were deleted, or replaced by others, while it was open.

    Nothing was changed by the refused call.  A retry does not help: close the log, restore the
    directory if there is a copy, and open it again.
    """


class DurabilityError(StorageError):
    """A flush failed, so the partition is read-only for all processes.

    A failed fsync is final, so a retry does not help: check the disk, then call
    `Housekeeping.repair`.
    """


class LockTimeoutError(TimeoutError):
    """Another process held a lock for too long; ``pid`` and ``state`` say which one.

    A retry may help.  If the process is stopped, resume or kill it.
    """

    pid: int | None = None
    state: str | None = None


class CorruptionError(EmbedlogError):
    """Bytes below the recovery point, or metadata, are not those that were written.

    Nothing was changed.  A retry does not help: see `Housekeeping.verify` and
    `Housekeeping.repair`.
    """


class CorruptBatchError(CorruptionError):
    """The bytes of a batch are not those that were written.

    A retry does not help: seek past the batch, or call `Housekeeping.repair`.  ``reason`` says
    what is wrong with it.
    """

    reason: str | None = None


class UnsupportedFilesystemError(EmbedlogError):
    """The log is on a remote file system (NFS, SMB, 9p, FUSE, …), where opening it can destroy it.

    A retry does not help: open it on the host that has its disk, or accept the risk with
    ``unsafe_filesystem=True``.  The same for a directory whose files any user may replace.
    """


class UnsupportedFormatError(EmbedlogError):
    """Another version of embedlog wrote the log, or a batch, in a format that is not supported.

    A retry does not help: use the version that wrote it, or a newer one.
    """


class NotALogError(EmbedlogError):
    """The path is a file, a directory with other contents, or the address of something else.

    A retry does not help: pass the directory of a log, or an empty or new one.
    """
