"""A Kafka cluster as the source of a mirror: batches at Kafka's offsets, read committed.

One consumer reads all partitions, without a group.  What it returns is kept by partition until
`fetch` takes it.  The offsets of records have gaps where Kafka has the markers of transactions,
records of aborted ones, or compaction; an event at the end of a partition tells that
nothing but those follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from threading import Event
from time import monotonic
from typing import Any

from embedlog import batch as batches
from embedlog.batch import EncodedBatch, PlacedBatch
from embedlog.batch.encode import from_lists
from embedlog.catalog import INTERNAL
from embedlog.config import TopicConfig
from embedlog.errors import (
    EmbedlogError,
    InvalidConfigError,
    KafkaClusterError,
    LogTruncatedError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)
from embedlog.lazy import pa
from embedlog.mirrors.ends import Bounds, Fetch, MirrorPosition, SourceTopic
from embedlog.mirrors.hops import HEADER, is_written_to
from embedlog.mirrors.kafka_cluster import (
    GROUP_PREFIX,
    REQUEST_SECONDS,
    KafkaCluster,
    StoredPosition,
    admin_library,
    client_library,
)
from embedlog.mirrors.offset_translation import stretches
from embedlog.record import OffsetAndMetadata, TopicPartition

_TOPICS_SECONDS = 5.0
"""How long the topics and their settings are taken to be the same."""
_FETCH_SECONDS = 30.0
"""How long to wait for records that Kafka says it has."""
_MESSAGES = 10_000
"""How many messages to take from the client at once."""
_KEPT_BYTES = 128 << 20
"""How many bytes of messages may be kept for all partitions together."""
_MESSAGE_BYTES = 200
"""About what a message takes in memory besides its bytes."""
_BATCH_ROWS, _BATCH_BYTES = 8192, 1 << 20
"""The most of one batch, but for a record that is larger."""
_FEW_ROWS = 256
"""With shorter runs of offsets on average, batches get a column of offsets."""
_DEFAULT = 5
"""The source of a setting that nobody has set."""


class PartitionBuffer:
    """What was read of a partition and not fetched yet."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        """Where the next fetch begins."""
        self.messages: deque[Any] = deque()
        self.bytes = 0
        self.end_offset = -1
        """The offset at which nothing followed the last time; -1 if that is unknown."""
        self.error: Any = None
        self.paused = self.has_headers = self.has_offsets = False

    def take(self, max_bytes: int) -> list[Any]:
        """Return the next messages: about so many bytes, at least one if there is one."""
        taken, size = [], 0
        while self.messages and size < max_bytes:
            message = self.messages.popleft()
            taken.append(message)
            size += _size(message)
        self.bytes -= size
        if taken:
            self.offset = taken[-1].offset() + 1
        if not self.messages and self.end_offset > self.offset:
            self.offset = self.end_offset
        return taken


def _size(message: Any) -> int:
    key = message.key()
    return len(message) + (0 if key is None else len(key)) + _MESSAGE_BYTES


class KafkaSource:
    """A Kafka cluster to copy from."""

    def __init__(self, address: str) -> None:
        self._cluster = KafkaCluster(address)
        self.address, self.site_id = self._cluster.address, self._cluster.id
        self._consumer = self._cluster.consumer(
            isolation_level="read_committed",
            enable_partition_eof=True,
            auto_offset_reset="error",
            queued_max_messages_kbytes=64 << 10,
            fetch_message_max_bytes=8 << 20,
        )
        self._buffers: dict[TopicPartition, PartitionBuffer] = {}
        self._topics: dict[str, SourceTopic] = {}
        self._listed_at = float("-inf")
        self._bounds: dict[TopicPartition, Bounds] = {}
        """Those of this round, which begins with `topics`."""
        self._epochs: dict[TopicPartition, int | None] = {}
        """The leader epochs of partitions, as of the last `bounds`."""
        self._closed = Event()

    # Topics

    def topics(self) -> dict[str, SourceTopic]:
        """Return the topics by name, without internal ones."""
        self._bounds = {}
        if monotonic() - self._listed_at >= _TOPICS_SECONDS:
            with self._cluster.errors("The topics cannot be listed"):
                self._topics = self._list_topics()
            self._listed_at = monotonic()
        return self._topics

    def _list_topics(self) -> dict[str, SourceTopic]:
        admin, library = self._cluster.admin, admin_library()
        names = [
            name
            for name in admin.list_topics(timeout=REQUEST_SECONDS).topics
            if not name.startswith((INTERNAL, GROUP_PREFIX))
        ]
        if not names:
            return {}
        wait = {"request_timeout": REQUEST_SECONDS}
        described = admin.describe_topics(client_library().TopicCollection(names), **wait)
        resources = [library.ConfigResource(library.ResourceType.TOPIC, name) for name in names]
        configs = admin.describe_configs(resources, **wait)
        topics, paths = {}, self._paths()
        for resource, answer in configs.items():
            topic = described[resource.name].result(REQUEST_SECONDS)
            settings = _known_settings(answer.result(REQUEST_SECONDS).values())
            path = paths.get(topic.name, ())
            topics[topic.name] = SourceTopic(
                topic.name, str(topic.topic_id), len(topic.partitions), settings, path=path
            )
        return topics

    def _paths(self) -> dict[str, tuple[str, ...]]:
        """Return where the records of copies were before, as the groups of their mirrors say."""
        paths = {}
        for group in self._cluster.groups():
            if group.startswith(GROUP_PREFIX):
                for key, commit in self._cluster.committed(group).items():
                    path = StoredPosition.of_commit(commit).path
                    if path:
                        paths[key.topic] = path
        return paths

    def bounds(self, topic: str, partition: int) -> Bounds:
        """Return the start and the last stable offset of a partition."""
        key = TopicPartition(topic, partition)
        if key not in self._bounds:
            known = self._topics.get(topic)
            count = max(partition + 1, known.partitions if known else 0)
            # All of the topic at once: each round asks for each of them.
            keys = [TopicPartition(topic, number) for number in range(count)]
            starts = self._cluster.offsets(keys, latest=False)
            ends = self._cluster.offsets(keys, latest=True)
            for each in keys:
                self._bounds[each] = Bounds(starts[each].offset, ends[each].offset)
                self._epochs[each] = ends[each].leader_epoch
        return self._bounds[key]

    # Records

    def is_current(self, topic: str, partition: int, position: MirrorPosition) -> bool:
        """Return whether the partition is in the epoch of a position.

        Of one that it reads, the client compares the epochs itself.
        """
        key = TopicPartition(topic, partition)
        buffer = self._buffers.get(key)
        if buffer is not None:
            return buffer.error is None
        return position.leader_epoch in (None, self._epochs.get(key))

    def fetch(self, topic: str, partition: int, position: MirrorPosition, max_bytes: int) -> Fetch:
        """Return the batches from a position on; see `MirrorSource.fetch`.

        Raises:
            OffsetOutOfRangeError, LogTruncatedError: As for `MirrorSource.fetch`.
            KafkaClusterError: No broker answers, or it refuses the request.
        """
        key = TopicPartition(topic, partition)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.offset != position.offset:
            buffer = self._assign(key, position)
        deadline = monotonic() + _FETCH_SECONDS
        while not buffer.messages and buffer.error is None and buffer.end_offset < buffer.offset:
            if not self._read(0.1) and monotonic() >= deadline:
                raise self._cluster.error(
                    "The next records do not arrive", f"for {_FETCH_SECONDS:.0f} s", **key._asdict()
                )
        if buffer.error is not None and not buffer.messages:
            self._unassign(key)
            raise self._error(key, position, buffer.error)
        if buffer.end_offset == buffer.offset:
            buffer.end_offset = -1  # Used: the next fetch waits for what follows.
        messages = buffer.take(max_bytes)
        if buffer.paused and buffer.bytes < self._most_bytes() // 2:
            self._consumer.resume([client_library().TopicPartition(*key)])
            buffer.paused = False
        epoch = messages[-1].leader_epoch() if messages else position.leader_epoch
        end = self._bounds[key].end_offset if key in self._bounds else buffer.offset
        return Fetch(
            list(self._batches(key, messages, buffer)),
            buffer.offset,
            max(end, buffer.offset),
            0 if epoch is None or epoch < 0 else epoch,
        )

    def _assign(self, key: TopicPartition, position: MirrorPosition) -> PartitionBuffer:
        """Read a partition from a position on."""
        self._unassign(key)
        epoch = -1 if position.leader_epoch is None else position.leader_epoch
        begin = client_library().TopicPartition(*key, position.offset, leader_epoch=epoch)
        with self._cluster.errors("A partition cannot be read", **key._asdict()):
            self._consumer.incremental_assign([begin])
        buffer = self._buffers[key] = PartitionBuffer(position.offset)
        return buffer

    def _unassign(self, key: TopicPartition) -> None:
        if self._buffers.pop(key, None) is not None:
            self._consumer.incremental_unassign([client_library().TopicPartition(*key)])

    def _read(self, seconds: float) -> bool:
        """Take messages from the client, and wait for the first; return whether there was one."""
        with self._cluster.errors("The cluster cannot be read"):
            # A call for many waits until it has them all.
            messages = self._consumer.consume(_MESSAGES, 0)
            if not messages:
                messages = self._consumer.consume(1, seconds)
                messages += self._consumer.consume(_MESSAGES, 0) if messages else []
        for message in messages:
            buffer = self._buffers.get(TopicPartition(message.topic(), message.partition()))
            error = message.error()
            if buffer is None:
                if error is not None and message.topic() is None:
                    raise self._cluster.error("The cluster cannot be read", error)
            elif error is None:
                buffer.messages.append(message)
                buffer.bytes += _size(message)
            elif error.code() == client_library().KafkaError._PARTITION_EOF:
                buffer.end_offset = message.offset()
            else:
                buffer.error = error
        most = self._most_bytes()
        for key, each in self._buffers.items():
            if each.bytes > most and not each.paused:
                self._consumer.pause([client_library().TopicPartition(*key)])
                each.paused = True
        return bool(messages)

    def _most_bytes(self) -> int:
        return max(_KEPT_BYTES // max(len(self._buffers), 1), 1 << 20)

    def _error(self, key: TopicPartition, position: MirrorPosition, error: Any) -> EmbedlogError:
        """Return the error of a partition as one of embedlog."""
        codes, facts = client_library().KafkaError, {**key._asdict(), "offset": position.offset}
        if error.code() == codes._AUTO_OFFSET_RESET:
            bounds = self.bounds(*key)
            return OffsetOutOfRangeError(
                f"Kafka has offsets [{bounds.start_offset}, {bounds.end_offset})",
                **facts,
                todo="Retention has deleted the records, or the topic was created again.",
            )
        if error.code() == codes._LOG_TRUNCATION:
            return LogTruncatedError(
                f"Kafka lost records that were read before: {error.str()}",
                **facts,
                next_offset=min(self.bounds(*key).end_offset, position.offset),
                todo="An unclean leader election does that.",
            )
        if error.code() in (codes.UNKNOWN_TOPIC_OR_PART, codes._UNKNOWN_PARTITION):
            return UnknownTopicOrPartitionError("The partition is gone", **facts)
        return self._cluster.error("A partition cannot be read", error, **facts)

    def _batches(
        self, key: TopicPartition, messages: Sequence[Any], buffer: PartitionBuffer
    ) -> Iterator[PlacedBatch]:
        if not messages:
            return
        offsets = [message.offset() for message in messages]
        runs = offsets[-1] + 1 - offsets[0] - len(offsets) and list(stretches(offsets))
        if runs and len(messages) < _FEW_ROWS * len(runs):
            # From now on: batches of either kind are in segments of their own.
            buffer.has_offsets = True
        headers = [message.headers() for message in messages]
        buffer.has_headers = buffer.has_headers or any(headers)
        topic = self._topics.get(key.topic)
        codec = _codec(topic)
        merged = [_is_merged(pairs, topic, key.partition) for pairs in headers]
        whole = [(0, len(messages))]
        for first, stop in whole if buffer.has_offsets or not runs else runs:
            for begin, end in _pieces(messages, merged, first, stop):
                part = messages[begin:end]
                encoded = _encoded(
                    part,
                    headers[begin:end] if buffer.has_headers else None,
                    offsets[begin:end] if buffer.has_offsets else None,
                    codec,
                )
                if True in merged[begin:end]:
                    encoded.set_merged()
                yield PlacedBatch(offsets[begin], encoded)

    def wait(self, seconds: float) -> None:
        """Return once there may be something new, or after some time."""
        if any(buffer.messages for buffer in self._buffers.values()):
            # Of partitions that cannot be copied at the moment.
            self._closed.wait(min(seconds, 0.05))
        if not self._buffers:
            self._closed.wait(seconds)
            return
        try:
            self._read(seconds)
        except KafkaClusterError:
            self._closed.wait(min(seconds, 0.5))  # The next round reports it.

    # Groups

    def groups(self) -> list[str]:
        """Return the names of the consumer groups, without those of mirrors."""
        return [group for group in self._cluster.groups() if not group.startswith(GROUP_PREFIX)]

    def committed(self, group: str) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the committed offsets of a group by partition."""
        return self._cluster.committed(group)

    def close(self) -> None:
        """Close the consumer."""
        self._closed.set()
        self._consumer.close()


def _known_settings(entries: Iterable[Any]) -> dict[str, object]:
    """Return the settings of a topic that embedlog has, too, and that are no defaults."""
    settings: dict[str, object] = {}
    for entry in entries:
        if entry.source == _DEFAULT or entry.value is None:
            continue
        try:
            settings |= TopicConfig.parse({entry.name: entry.value}).overrides()
        except InvalidConfigError:
            continue  # One that a log does not have, or not with this value.
    return settings


def _codec(topic: SourceTopic | None) -> str:
    """Return how to compress the batches of a topic: as it does, if that is known."""
    codec = None if topic is None else topic.config.get("compression.type")
    return codec if codec in ("lz4", "zstd") else "none"


def _is_merged(
    headers: Sequence[tuple[str, bytes]] | None, topic: SourceTopic | None, partition: int
) -> bool | None:
    """Return whether a mirror wrote a message, by its header; None if it has no such header."""
    values = [value for name, value in headers or () if name == HEADER]
    return is_written_to(values[-1], topic.id, partition) if values and topic else None


def _pieces(
    messages: Sequence[Any], merged: Sequence[bool | None], first: int, stop: int
) -> Iterator[tuple[int, int]]:
    """Yield stretches of messages that make a batch each.

    None has messages of a mirror, and others with the header of one.
    """
    begin, size, kind = first, 0, None
    for number in range(first, stop):
        more, other = _size(messages[number]) - _MESSAGE_BYTES, merged[number]
        is_full = number - begin >= _BATCH_ROWS or size + more > _BATCH_BYTES
        if number > begin and (is_full or {kind, other} == {True, False}):
            yield begin, number
            begin, size, kind = number, 0, None
        size += more
        kind = other if kind is None else kind
    yield begin, stop


def _encoded(
    messages: Sequence[Any],
    headers: Sequence[Any] | None,
    offsets: Sequence[int] | None,
    codec: str,
) -> EncodedBatch:
    """Return messages as a batch; with ``offsets`` it has them as its last column."""
    values = [message.value() for message in messages]
    keys = [message.key() for message in messages]
    stamps = [message.timestamp() for message in messages]
    # Kind 0: the message has no timestamp.
    times = [time if kind else -1 for kind, time in stamps]
    if offsets is None:
        return batches.encode_lists(values, keys, times, headers, codec)
    columns = from_lists(values, keys, times, headers)
    arrays = [*columns.columns, pa.array(offsets, pa.int64())]
    target = batches.schema(headers=headers is not None, offsets=True)
    columns = pa.RecordBatch.from_arrays(arrays, schema=target)
    encoded = batches.encode(columns, codec)
    encoded.set_span(offsets[-1] + 1 - offsets[0])
    return encoded
