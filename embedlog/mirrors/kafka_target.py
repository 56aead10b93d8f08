"""A Kafka cluster as the target of a mirror.

Kafka gives records offsets of its own.  So the position of the mirror, the next offset of the
source, is an offset that a group named for the source has committed for the copy.  In order:

1. A transaction begins, and the records are sent.
2. Once Kafka has told their offsets, the `OffsetSync` is sent: which offset became which.
3. The position is added to the transaction, and it is committed.

Killed anywhere before the commit, none of it is visible, and the next mirror, whose
transactions fence those of this one, sends all of it again; after it, all is there.  Without
transactions (``exactly.once=false``) a kill between 1 and 3 leaves records that are sent again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from threading import Thread
from time import monotonic
from typing import Any

from embedlog.batch import CONTROL, EXPLICIT_OFFSETS, MERGED, EncodedBatch, PlacedBatch
from embedlog.batch.add_headers import add_headers, to_batch
from embedlog.config.values import setting_text
from embedlog.errors import FencedError, MirrorConflictError, MirrorDivergedError, raised_in_body
from embedlog.hints import AS_SITE, Hint
from embedlog.lazy import np, pa
from embedlog.mirrors.ends import Fetch, MirrorPosition, MirrorSource, MirrorTarget, SourceTopic
from embedlog.mirrors.hops import Hop, Place, with_hop
from embedlog.mirrors.kafka_cluster import (
    GROUP_PREFIX,
    REQUEST_SECONDS,
    KafkaCluster,
    StoredPosition,
    admin_library,
    client_library,
)
from embedlog.mirrors.mirrored_topic import would_loop
from embedlog.mirrors.offset_translation import OffsetRun, OffsetSync, OffsetTranslation, runs_of
from embedlog.mirrors.root_target import hold_lock, hold_topic_lock
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.root.root import Root

_logger = logging.getLogger("embedlog.mirrors")
_COMMIT_SECONDS = 60.0
"""How long to try to commit a transaction whose outcome is not known."""
_SYNCS = f"{GROUP_PREFIX}offsets"
"""The topic with the `OffsetSync` of each transaction."""
_SYNCS_MS = 30 * 86_400_000
"""How long they are kept: older offsets are not translated."""
_BATCH_BYTES = 128 << 10
"""The most bytes of a batch of the producer, unless a topic takes less."""
_OWN_SETTINGS = frozenset(
    {
        *("retention.clock", "retention.topic.bytes", "retention.min.consumed"),
        *("retention.bytes.hard", "segment.max.offset.span", "key.serializer"),
        *("value.serializer", "statistics.columns", "rebatch.min.rows", "mirror.source"),
        *("producer.id.expiration.ms", "message.timestamp.type", "audit", "key.index.enable"),
        "errors.deadletterqueue.group.enable",  # Kafka has it since 4.4
    }
)
"""Settings of a topic that Kafka does not have; and the one with which it would replace the
timestamps of the records."""


class _Delivery:
    """The offsets that Kafka gave the first and the last record of a batch."""

    __slots__ = ("count", "error", "first", "last", "source_offsets")

    def __init__(self, source_offsets: Sequence[int]) -> None:
        self.source_offsets, self.count = source_offsets, len(source_offsets)
        self.first = self.last = -1
        self.error: Any = None

    def note_first(self, error: Any, message: Any) -> None:
        """Take the report of the first record."""
        self.error, self.first = error or self.error, message.offset()

    def note_last(self, error: Any, message: Any) -> None:
        """Take the report of the last record."""
        self.error, self.last = error or self.error, message.offset()

    def runs(self) -> Iterator[OffsetRun]:
        """Yield the runs of its records."""
        if self.last - self.first == self.count - 1:
            yield from runs_of(self.source_offsets, self.first)
        else:
            # Others write to the topic, too: a reader in the middle continues at the first record.
            yield OffsetRun(self.source_offsets[0], self.first, 1)


class KafkaTarget(MirrorTarget):
    """A Kafka cluster to copy to.

    Args:
        address: See `KafkaCluster`.
        root: The source, with the locks of its mirrors.
        merge: Append to topics that others write to, too, and that are copied back.
        relay: With ``merge``, also send records that came to the source from other sites.
    """

    def __init__(
        self, address: str, root: Root, *, merge: bool = False, relay: bool = False
    ) -> None:
        self._cluster, self._root = KafkaCluster(address), root
        self.address, self.site_id = self._cluster.address, self._cluster.id
        self._merge, self._relay = merge, relay
        self._mirror = self._group = ""
        self._producer: Any = None
        self._batch_bytes = _BATCH_BYTES
        self._group_metadata: Any = None
        self._source_id = ""
        self._source_topics: dict[str, SourceTopic] = {}
        self._topic_ids: dict[str, str] = {}
        """The ids that copies have at the cluster."""
        self._positions: dict[TopicPartition, StoredPosition] = {}
        self._translations: dict[tuple[str, int], OffsetTranslation] | None = None
        self._locks, self._held = ExitStack(), set[str]()

    @contextmanager
    def exclusive(self, mirror: str) -> Iterator[None]:
        """Hold the lock of a mirror at the source; see `MirrorTarget.exclusive`."""
        with hold_lock(self._root, mirror):
            self._mirror = mirror
            try:
                yield
            finally:
                self._drop_producer()

    # The producer

    def _open_producer(self) -> Any:
        """Return the producer; the first call ends what another process left of a transaction."""
        if self._producer is not None:
            return self._producer
        settings: dict[str, object] = {
            "enable_idempotence": True,
            "linger_ms": 5,
            "batch_size": self._batch_bytes,
            "compression_type": "lz4",
            "queue_buffering_max_messages": 1_000_000,
            "queue_buffering_max_kbytes": 256 << 10,
            "message_max_bytes": 64 << 20,
        }
        if self._cluster.exactly_once:
            settings["transactional_id"] = self._transactional_id()
        producer = self._cluster.producer(**settings)
        if self._cluster.exactly_once:
            with self._cluster.errors("Transactions cannot begin"):
                producer.init_transactions(_COMMIT_SECONDS)
        self._producer = producer
        return producer

    def _transactional_id(self) -> str:
        # One for each mirror: it fences an earlier process of the same one, whatever it does.
        name = sha256(f"{self._root.id} {self._mirror}".encode()).hexdigest()[:32]
        return f"{GROUP_PREFIX}{name}"

    def _drop_producer(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            with suppress(client_library().KafkaException):
                producer.purge()
                # Their reports; without this call they come while the producer is destroyed.
                producer.flush(1)

    # Topics

    def prepare(self, topic: SourceTopic, name: str, source: MirrorSource) -> bool:
        """Create the topic ``name`` as a copy of a topic; see `MirrorTarget.prepare`.

        Raises:
            MirrorConflictError: A topic of that name exists and is not a copy of this one, or the
                topic of the source is typed.
            MirrorDivergedError: It is a copy of an earlier topic of that name.
            KafkaClusterError: The cluster does not answer, or refuses the topic.
        """
        if would_loop(self.site_id, source.site_id, topic.path):
            return False
        if topic.schemas:
            raise MirrorConflictError(
                "The values of the topic are columns, and those of Kafka are bytes",
                topic=topic.name,
                todo=Hint(
                    "Copy it to a topic of Avro or JSON with log.convert, and mirror that.",
                    "Copy it to a topic of Avro or JSON with `embedlog convert`, and mirror that.",
                ),
            )
        if topic.registry is not None and name not in self._source_topics:
            _logger.warning(
                "The records of %s name Avro's schemas by the ids of %s; a registry of the cluster "
                "needs the same schemas with the same ids",
                *(topic.name, source.address),
            )
        self._group = f"{GROUP_PREFIX}{source.site_id}"
        self._source_id = source.site_id
        if name not in self._held:
            lock = f"{self.site_id} {name}"
            self._locks.enter_context(hold_topic_lock(self._root, lock, name, source.address))
            self._held.add(name)
        # Before the position is read: a transaction of a killed process ends first.
        self._open_producer()
        existing = self._described(name)
        if existing is None:
            existing = self._create(name, topic)
        else:
            self._update(name, topic, existing)
        self._topic_ids[name], self._source_topics[name] = str(existing.topic_id), topic
        self._read_positions()
        if self._is_new(name, topic):
            self._begin(name, topic, source)
        self._limit_batches(name)
        return True

    def _described(self, name: str) -> Any:
        """Return a topic of the cluster; None if there is none."""
        library = client_library()
        names = library.TopicCollection([name])
        answer = self._cluster.admin.describe_topics(names, request_timeout=REQUEST_SECONDS)
        with self._cluster.errors("A topic cannot be described", topic=name):
            try:
                return answer[name].result(REQUEST_SECONDS)
            except library.KafkaException as error:
                if error.args[0].code() == library.KafkaError.UNKNOWN_TOPIC_OR_PART:
                    return None
                raise

    def _create(self, name: str, topic: SourceTopic) -> Any:
        """Create a topic with the settings of the source, without those that Kafka refuses."""
        config = {key: setting_text(value) for key, value in topic.config.items()}
        config = {key: value for key, value in config.items() if key not in _OWN_SETTINGS}
        return self._create_topic(name, topic.partitions, config)

    def _create_topic(self, name: str, partitions: int, config: Mapping[str, str | None]) -> Any:
        library, codes = admin_library(), client_library().KafkaError
        while True:
            new = library.NewTopic(name, partitions, replication_factor=-1, config=config)
            answers = self._cluster.admin.create_topics([new], request_timeout=REQUEST_SECONDS)
            try:
                answers[name].result(REQUEST_SECONDS)
            except client_library().KafkaException as error:
                code, text = error.args[0].code(), error.args[0].str()
                refused = [key for key in config if f"configuration {key}:" in text]
                if code == codes.TOPIC_ALREADY_EXISTS:
                    return self._await_topic(name)
                if code != codes.INVALID_CONFIG or not refused:
                    what = "The topic cannot be created"
                    raise self._cluster.error(what, error.args[0], topic=name) from error
                # Kafka has different limits: its segments, for example, have at least 1 MiB.
                config = {key: value for key, value in config.items() if key not in refused}
            else:
                return self._await_topic(name)

    def _await_topic(self, name: str) -> Any:
        """Return a topic that was just created, once the brokers know it."""
        deadline = monotonic() + REQUEST_SECONDS
        while (topic := self._described(name)) is None:
            if monotonic() >= deadline:
                raise self._cluster.error("The topic is not there", "in time", topic=name)
            self._cluster.pause()
        return topic

    def _update(self, name: str, topic: SourceTopic, existing: Any) -> None:
        """Apply partitions and settings of the source to a copy."""
        library, admin = admin_library(), self._cluster.admin
        if len(existing.partitions) < topic.partitions:
            with self._cluster.errors("Partitions cannot be added", topic=name):
                more = library.NewPartitions(name, topic.partitions)
                admin.create_partitions([more])[name].result(REQUEST_SECONDS)
        current = self._config_of(name)
        changes = {
            key: setting_text(value)
            for key, value in topic.config.items()
            if key not in _OWN_SETTINGS and current.get(key) not in (None, setting_text(value))
        }
        for key, value in changes.items() if not self._merge else ():
            entry = library.ConfigEntry(
                key, value, incremental_operation=library.AlterConfigOpType.SET
            )
            resource = library.ConfigResource(
                library.ResourceType.TOPIC, name, incremental_configs=[entry]
            )
            # One by one: Kafka refuses some values that a log takes.
            with suppress(client_library().KafkaException):
                for answer in admin.incremental_alter_configs([resource]).values():
                    answer.result(REQUEST_SECONDS)

    def _config_of(self, name: str) -> dict[str, str]:
        library = admin_library()
        resource = library.ConfigResource(library.ResourceType.TOPIC, name)
        with self._cluster.errors("The settings of a topic cannot be read", topic=name):
            answers = self._cluster.admin.describe_configs([resource])
            entries = answers[resource].result(REQUEST_SECONDS)
        return {entry.name: entry.value for entry in entries.values() if entry.value is not None}

    def _read_positions(self) -> None:
        commits = self._cluster.committed(self._group, stable=True)
        for key, commit in commits.items():
            if key.topic in self._source_topics:
                self._positions[key] = StoredPosition.of_commit(commit)

    def _is_new(self, name: str, topic: SourceTopic) -> bool:
        """Return whether a copy has no position yet; raise if it can have none."""
        stored = [position for key, position in self._positions.items() if key.topic == name]
        if any(position.topic_id != topic.id for position in stored):
            raise MirrorDivergedError(
                "The topic of the source was deleted and created again since it was copied",
                topic=name,
                next_offset=0,
                todo="Delete the copy to begin a new one.",
            )
        if stored or self._merge:
            return False
        partitions = [TopicPartition(name, number) for number in range(topic.partitions)]
        if any(end.offset for end in self._cluster.offsets(partitions, latest=True).values()):
            raise MirrorConflictError(
                "There is such a topic, which is not a copy, and has records of its own",
                topic=name,
                todo=AS_SITE,
            )
        return True

    def _begin(self, name: str, topic: SourceTopic, source: MirrorSource) -> None:
        """Commit where the copy begins, before the first record.

        Records of a transaction that was aborted would make it look like a topic of others.
        """
        for partition in range(topic.partitions):
            self.skip_to(name, partition, source.bounds(topic.name, partition).start_offset)

    def _limit_batches(self, name: str) -> None:
        """Let the producer make no batches that are larger than a topic takes."""
        limit = int(self._config_of(name).get("max.message.bytes", _BATCH_BYTES))
        if limit < self._batch_bytes:
            self._batch_bytes = limit
            self._drop_producer()

    # Records

    def position(self, name: str, partition: int) -> MirrorPosition | None:
        """Return the next offset of the source, as of the last transaction."""
        key = TopicPartition(name, partition)
        self._open_producer()
        commit = self._cluster.committed(self._group, stable=True).get(key)
        if commit is None:
            self._positions.pop(key, None)
            return None
        stored = self._positions[key] = StoredPosition.of_commit(commit)
        return MirrorPosition(stored.offset, stored.leader_epoch)

    def append(self, name: str, partition: int, fetch: Fetch) -> int:
        """Send what was fetched, and move the position, in one transaction.

        Raises:
            MirrorConflictError: The position is another one.
            FencedError: Another process runs the same mirror.
            KafkaClusterError: Nothing was written, or it is not known; `position` tells.
        """
        key = TopicPartition(name, partition)
        before, first = self._positions.get(key), fetch.batches[0].offset if fetch.batches else 0
        if before is not None and fetch.batches and first < before.offset:
            raise MirrorConflictError(
                f"The next offset to copy from the source is {before.offset}",
                **key._asdict(),
                offset=first,
                todo="Is another mirror running that copies the same topic?",
            )
        start = before.offset if before is not None else first
        after = self._stored(name, fetch.next_offset, fetch.leader_epoch)
        with self._transaction(key) as producer:
            deliveries = [
                delivery
                for placed in fetch.batches
                if (delivery := self._send(producer, key, placed)) is not None
            ]
            self._await(producer, deliveries, key)
            runs = [run for delivery in deliveries for run in delivery.runs()]
            sync = OffsetSync(start, runs)
            if runs and not self._merge:
                self._send_sync(producer, key, sync)
            self._commit_position(producer, key, after)
        self._positions[key] = after
        if self._translations is not None and runs:
            self._translation(key).add(sync)
        return sum(delivery.count for delivery in deliveries)

    def _stored(self, name: str, offset: int, epoch: int | None) -> StoredPosition:
        topic = self._source_topics[name]
        path = () if self._merge else (*topic.path, self._source_id)
        return StoredPosition(offset, epoch, topic.id, path)

    @contextmanager
    def _transaction(self, key: TopicPartition) -> Iterator[Any]:
        """Run a transaction, which is aborted if anything fails."""
        producer, library = self._open_producer(), client_library()
        exactly_once = self._cluster.exactly_once
        try:
            if exactly_once:
                producer.begin_transaction()
            try:
                yield producer
            except SystemError as error:
                # A fatal error that the client raised before its delivery callbacks ran.
                if not isinstance(error.__cause__, library.KafkaException):
                    raise
                raise error.__cause__ from None
            if exactly_once:
                self._commit(producer)
        except library.KafkaException as error:
            codes = library.KafkaError
            reasons = {error.args[0].code(), self._abort(producer)}
            if reasons & {codes._FENCED, codes.PRODUCER_FENCED, codes.INVALID_PRODUCER_EPOCH}:
                raise FencedError(
                    "Another process runs the same mirror",
                    **key._asdict(),
                    todo="Stop this process; the other one continues.",
                ) from raised_in_body(error)
            what = "The records cannot be written"
            raise self._cluster.error(what, error.args[0], **key._asdict()) from (
                raised_in_body(error)
            )
        except BaseException:
            self._abort(producer)
            raise

    def _commit(self, producer: Any) -> None:
        """Commit a transaction; again, as long as its outcome is not known."""
        library, deadline = client_library(), monotonic() + _COMMIT_SECONDS
        while True:
            try:
                producer.commit_transaction(REQUEST_SECONDS)
                return
            except library.KafkaException as error:
                if not error.args[0].retriable() or monotonic() >= deadline:
                    raise

    def _abort(self, producer: Any) -> int | None:
        """Abort the transaction; the next one has a new producer if this one cannot continue.

        Returns the code of the error that kept it from being aborted.
        """
        if producer is not self._producer:
            return None
        try:
            producer.purge()
            if self._cluster.exactly_once:
                producer.abort_transaction(REQUEST_SECONDS)
        except client_library().KafkaException as second:
            self._drop_producer()
            code: int = second.args[0].code()
            return code
        return None

    def _send(self, producer: Any, key: TopicPartition, placed: PlacedBatch) -> _Delivery | None:
        """Send the records of a batch; None if there are none to send."""
        offsets, times, keys, values, headers = self._records(key, placed)
        if not len(offsets):
            return None
        delivery, last = _Delivery(offsets), len(offsets) - 1
        topic, partition = key
        rows = zip(times, keys, values, headers or [None] * len(times), strict=True)
        for number, (time, record_key, value, record_headers) in enumerate(rows):
            options = {"timestamp": time}
            if record_headers:
                options["headers"] = record_headers
            if number == last:
                options["on_delivery"] = delivery.note_last
            if number == 0 and last:
                options["on_delivery"] = delivery.note_first
            while True:
                try:
                    producer.produce(topic, value, record_key, partition, **options)
                    break
                except BufferError:
                    producer.poll(0.1)
        producer.poll(0)
        return delivery

    def _records(self, key: TopicPartition, placed: PlacedBatch) -> tuple[Any, Any, Any, Any, Any]:
        """Return offsets, timestamps, keys, values and headers of the records to send."""
        encoded = placed.batch
        if encoded.flags & CONTROL:
            return (), [], [], [], None
        if self._merge:
            return self._merged(key, encoded, placed.offset)
        stored = to_batch(encoded)
        if encoded.flags & EXPLICIT_OFFSETS:
            offsets: Sequence[int] = stored.offsets().to_pylist()
        else:
            offsets = range(placed.offset, placed.offset + encoded.count)
        return offsets, *stored.lists(verify=False)

    def _merged(
        self, place: TopicPartition, encoded: EncodedBatch, offset: int
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Return the records that were not at the cluster before, with a header that says so."""
        stored = to_batch(encoded if encoded.has_headers else add_headers(encoded))
        if encoded.flags & EXPLICIT_OFFSETS:
            offsets = np.asarray(stored.offsets())
        else:
            offsets = np.arange(offset, offset + encoded.count)
        name, partition = place
        numbers = pa.array(np.arange(len(offsets)))
        columns = with_hop(
            stored.columns(verify=False).append_column("number", numbers),
            "headers",
            offsets,
            Hop(*Place.of(self._source_id, self._source_topics[name].id, partition), 0, 0),
            Place.of(self.site_id, self._topic_ids[name], partition),
            merged=bool(encoded.flags & MERGED),
            relay=self._relay,
        )
        numbers = np.asarray(columns.column("number"))
        time, key, value = (columns.column(index) for index in range(3))
        headers = [
            [(entry["key"], entry["value"]) for entry in record]
            for record in columns.column("headers").to_pylist()
        ]
        times = time.cast(pa.int64()).to_pylist()
        return offsets[numbers].tolist(), times, key.to_pylist(), value.to_pylist(), headers

    def _await(self, producer: Any, deliveries: Sequence[_Delivery], key: TopicPartition) -> None:
        """Wait until Kafka has told the offsets of all records.

        Raises:
            KafkaException: It refuses one.
            KafkaClusterError: It does not answer.
        """
        left, deadline = producer.flush(REQUEST_SECONDS), monotonic() + _COMMIT_SECONDS
        while left and monotonic() < deadline:
            left = producer.flush(REQUEST_SECONDS)
        for delivery in deliveries:
            if delivery.count == 1:
                delivery.first = delivery.last
            if delivery.error is not None:
                raise client_library().KafkaException(delivery.error)
            if delivery.last < 0 or delivery.first < 0:
                what = "The records are not acknowledged"
                raise self._cluster.error(what, f"in {_COMMIT_SECONDS:.0f} s", **key._asdict())

    def _commit_position(self, producer: Any, key: TopicPartition, after: StoredPosition) -> None:
        library, (offset, metadata) = client_library(), after.to_commit()
        commits = [library.TopicPartition(*key, offset, metadata)]
        if self._cluster.exactly_once:
            self._send_offsets(producer, key, commits)
        else:
            producer.flush(REQUEST_SECONDS)
            self._alter_offsets(self._group, commits)

    def _send_offsets(self, producer: Any, key: TopicPartition, commits: Sequence[Any]) -> None:
        """Add offsets to the transaction.

        Raises:
            KafkaException: Kafka refuses them.
            KafkaClusterError: It does not answer.
        """
        done: Future[None] = Future()

        def send(member: Any) -> None:
            try:
                producer.send_offsets_to_transaction(commits, member, REQUEST_SECONDS)
                done.set_result(None)
            except BaseException as error:  # noqa: BLE001 - it is raised below
                done.set_exception(error)

        # librdkafka ignores the timeout if the coordinator breaks meanwhile (its issue 5456).
        Thread(target=send, args=[self._member()], daemon=True).start()
        try:
            done.result(2 * REQUEST_SECONDS)
        except TimeoutError:
            self._producer = None  # The call never gives it back; the next producer fences it.
            what, seconds = "The position cannot be written", f"in {2 * REQUEST_SECONDS:.0f} s"
            raise self._cluster.error(what, seconds, **key._asdict()) from None

    def _member(self) -> Any:
        """Return the group metadata of the mirror, which is not a member of its group."""
        if self._group_metadata is None:
            consumer = self._cluster.consumer(group_id=self._group)
            self._group_metadata = consumer.consumer_group_metadata()
            consumer.close()
        return self._group_metadata

    def _alter_offsets(self, group: str, commits: Sequence[Any]) -> list[Any]:
        request = [client_library().ConsumerGroupTopicPartitions(group, list(commits))]
        answers = self._cluster.admin.alter_consumer_group_offsets(
            request, request_timeout=REQUEST_SECONDS
        )
        done: list[Any] = answers[group].result(REQUEST_SECONDS).topic_partitions
        return done

    def skip_to(self, name: str, partition: int, offset: int) -> None:
        """Move the position forward; see `MirrorTarget.skip_to`."""
        key = TopicPartition(name, partition)
        after = self._stored(name, offset, None)
        with self._transaction(key) as producer:
            self._commit_position(producer, key, after)
        self._positions[key] = after

    # Offsets

    def _send_sync(self, producer: Any, key: TopicPartition, sync: OffsetSync) -> None:
        """Send which offsets became which, as a part of the transaction."""
        self._read_syncs()
        name = json.dumps([self._group, self._topic_ids[key.topic], key.partition])
        for part in sync.parts():
            producer.produce(_SYNCS, part.pack(), name.encode(), 0)

    def _translation(self, key: TopicPartition) -> OffsetTranslation:
        assert self._translations is not None
        place = self._topic_ids[key.topic], key.partition
        return self._translations.setdefault(place, OffsetTranslation())

    def _read_syncs(self) -> None:
        """Read what earlier transactions of mirrors from this source did, once."""
        if self._translations is not None:
            return
        if self._described(_SYNCS) is None:
            self._create_topic(_SYNCS, 1, {"retention.ms": str(_SYNCS_MS)})
        self._translations = {}
        library = client_library()
        consumer = self._cluster.consumer(
            isolation_level="read_committed", enable_partition_eof=True
        )
        try:
            with self._cluster.errors("The offsets of earlier transactions cannot be read"):
                consumer.assign([library.TopicPartition(_SYNCS, 0, library.OFFSET_BEGINNING)])
                for message in _until_end(consumer):
                    group, topic_id, partition = json.loads(message.key())
                    sync = OffsetSync.unpack(message.value())
                    if group == self._group and sync is not None:
                        place = topic_id, partition
                        self._translations.setdefault(place, OffsetTranslation()).add(sync)
        except BaseException:
            self._translations = None
            raise
        finally:
            consumer.close()

    def translate(self, name: str, partition: int, offset: int) -> int | None:
        """Return the offset of the copy, exactly; None if it is unknown, or with ``merge``."""
        if self._merge:
            return None
        self._read_syncs()
        return self._translation(TopicPartition(name, partition)).translate(offset)

    def commit(
        self, group: str, positions: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> dict[TopicPartition, int]:
        """Commit offsets for a group; see `MirrorTarget.commit`."""
        library = client_library()
        with self._cluster.errors("The offsets of a group cannot be written", group=group):
            described = self._cluster.admin.describe_consumer_groups([group])[group]
            state = described.result(REQUEST_SECONDS).state.name
            if state not in ("EMPTY", "DEAD"):
                return {}  # Its members commit themselves.
            before = self._cluster.committed(group)
            ahead = {
                key: position
                for key, position in positions.items()
                if key not in before or position.offset > before[key].offset
            }
            if not ahead:
                return {}
            commits = [
                library.TopicPartition(*key, position.offset, position.metadata)
                for key, position in ahead.items()
            ]
            done = self._alter_offsets(group, commits)
        return {
            TopicPartition(part.topic, part.partition): part.offset
            for part in done
            if part.error is None
        }

    # The end

    def close(self) -> None:
        """End the producer, and release the locks."""
        self._drop_producer()
        self._locks.close()


def _until_end(consumer: Any) -> Iterator[Any]:
    """Yield the messages of the one partition of a consumer, up to where it ends now."""
    library, deadline = client_library(), monotonic() + _COMMIT_SECONDS
    while True:
        message = consumer.poll(REQUEST_SECONDS)
        if message is None:
            if monotonic() > deadline:
                raise TimeoutError(f"for {_COMMIT_SECONDS:.0f} s")
            continue
        error = message.error()
        if error is None:
            yield message
        elif error.code() == library.KafkaError._PARTITION_EOF:
            return
        else:
            raise library.KafkaException(error)
