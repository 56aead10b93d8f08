"""What producers, groups, publications, pipelines and mirrors report to the listeners of a log.

One event per batch or commit, never per record.  A listener subscribes to topics by their
settings; where none has subscribed, a client has an empty tuple of listeners, and that is all that
it pays.  The audit is a listener.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from embedlog.batch import CONTROL, MINUTE_MS, Batch, EncodedBatch
from embedlog.config import TopicConfig
from embedlog.partition import PartitionLog
from embedlog.record import Appended

if TYPE_CHECKING:
    from embedlog.publish.transaction import PublishedBatches

PRODUCER, COPY, GROUP, PIPELINE, MIRROR = "producer", "copy", "group", "pipeline", "mirror"
"""Kinds of clients.  A mirror is a `MIRROR` in the log that it reads, and a `COPY` in the log that
it writes."""

NO_MINUTE = -(1 << 40)
"""In place of a minute: the records of batches that span minutes, as readers count them."""


class Client:
    """A client of a log, as its listeners know it.

    Args:
        kind: `PRODUCER`, `COPY`, `GROUP`, `PIPELINE` or `MIRROR`.
        name: The name of the producer, the group, the publication, the pipeline or the mirror.
        client_id: The ``client_id``.
    """

    def __init__(self, kind: str, name: str, client_id: str = "") -> None:
        self.kind, self.name, self.client_id = kind, name, client_id
        self._listeners: dict[Callable[[Client], Listener], Listener] = {}

    @property
    def listeners(self) -> list[Listener]:
        """All that subscribed to a topic that the client has used."""
        return list(self._listeners.values())

    def listener(self, create: Callable[[Client], Listener]) -> Listener:
        """Return the listener of a subscription, which is created for the first topic."""
        if create not in self._listeners:
            return self._listeners.setdefault(create, create(self))
        return self._listeners[create]

    def close(self) -> None:
        """Notify the listeners that no more events follow."""
        listeners, self._listeners = self.listeners, {}
        for listener in listeners:
            listener.closed()


class Listener:
    """Receives the events of one client; the methods do nothing here.

    They run in the client's thread, of which there may be several: they must be fast, safe in
    threads, and must not raise.
    """

    # Producers, publications, and what mirrors write

    def identified(self, log: PartitionLog, identity: tuple[int, int]) -> None:
        """The producer is about to write its first batch with an id and an epoch."""

    def written(
        self, log: PartitionLog, receipt: Appended, batch: EncodedBatch, identity: Identity
    ) -> None:
        """The log has a batch; the id and epoch of its producer, if it has any."""

    # Members of groups

    def assigned(self, log: PartitionLog, committed: int | None, *, late: bool) -> None:
        """The member is about to return its first records of a partition.

        Args:
            log: The partition.
            committed: The committed offset at which it begins; None if it begins elsewhere.
            late: Whether it returned records before the listener subscribed to the topic.
        """

    def read(self, log: PartitionLog, batch: Batch, first: int, stop: int) -> None:
        """A poll returns the records of a batch in a range of offsets."""

    def recalled(self, log: PartitionLog, offset: int) -> None:
        """The records from an offset on, of the batch that was read last, are taken back."""

    def committing(self, positions: Mapping[Any, Any]) -> None:
        """The member is about to commit positions, by partition."""

    def committed(self, positions: Mapping[Any, Any]) -> None:
        """The positions are committed."""

    # Pipelines and mirrors, which read whole ranges

    def began(self, log: PartitionLog, offset: int) -> None:
        """The client is about to copy records from an offset on."""

    def copied(self, copied: CopiedRange) -> None:
        """A range of offsets is safe where it was copied to."""

    def skipped(self, log: PartitionLog, first: int, stop: int) -> None:
        """A range of offsets is left out: it was deleted, or a group was set behind it."""

    # Ends

    def ceased(self, log: PartitionLog) -> None:
        """The partition is not assigned any more, or the subscription does not hold any more."""

    def closed(self) -> None:
        """No more events follow."""


Identity = tuple[int, int] | None
"""The id and the epoch of a producer, if it has any."""


class CopiedRange(NamedTuple):
    """What a pipeline or a mirror copied of a partition."""

    log: PartitionLog
    first_offset: int
    next_offset: int
    minutes: Mapping[int, Sequence[int]]
    """Records and bytes by the minute of their timestamps, since 1970."""


class Listeners:
    """The subscriptions of an open log."""

    def __init__(self) -> None:
        self._all: list[tuple[Callable[[TopicConfig], bool], Callable[[Client], Listener]]] = []

    def subscribe(
        self, wants: Callable[[TopicConfig], bool], create: Callable[[Client], Listener]
    ) -> None:
        """Subscribe to the topics with some settings.

        Args:
            wants: Returns whether to listen to a topic.
            create: Returns what listens to a client; called for its first such topic.
        """
        self._all.append((wants, create))

    def of(self, config: TopicConfig, client: Client) -> tuple[Listener, ...]:
        """Return the listeners to a client in a topic with these settings."""
        return tuple([client.listener(create) for wants, create in self._all if wants(config)])

    def published(self, client: Client, published: Iterable[PublishedBatches]) -> None:
        """Report a publication that is visible."""
        for state, batches in published:
            for listener in self.of(state.config, client):
                for receipt, batch in batches:
                    listener.written(state, receipt, batch, None)
        client.close()


def count_minutes(batches: Iterable[Batch | EncodedBatch]) -> dict[int, list[int]]:
    """Return records and bytes of batches by minute, from their heads.

    The records of a batch that spans minutes count as those of `NO_MINUTE`.
    """
    minutes: dict[int, list[int]] = {}
    for batch in batches:
        if batch.count and not batch.flags & CONTROL:
            minute = batch.min_timestamp // MINUTE_MS
            if batch.max_timestamp // MINUTE_MS != minute:
                minute = NO_MINUTE
            count = minutes.setdefault(minute, [0, 0])
            count[0] += batch.count
            count[1] += batch.size
    return minutes
