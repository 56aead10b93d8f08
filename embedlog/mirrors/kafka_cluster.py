"""A Kafka cluster as an end of a mirror: its address, its clients, and its errors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from time import monotonic
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

from embedlog.display import need
from embedlog.errors import InvalidConfigError, KafkaClusterError, raised_in_body
from embedlog.mirrors.ends import KAFKA_SCHEME
from embedlog.record import OffsetAndMetadata, TopicPartition

T = TypeVar("T")

REQUEST_SECONDS = 30.0
_PAUSE_SECONDS = 0.1
GROUP_PREFIX = "embedlog.mirror."
"""Begins the names of the groups, transactional ids and topics that mirrors use themselves."""
_NOT_READY = (5, 6, 14, 15, 16, 88)
"""Codes of errors: no leader yet, or another one; the coordinator loads, is missing, or is another
one; a transaction that will change an offset has not ended."""
_EXACTLY_ONCE = "exactly.once"
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_SWITCH = {"true": True, "false": False}


class StoredPosition(NamedTuple):
    """The position of a mirror in a copy, as its group has committed it in the cluster."""

    offset: int
    leader_epoch: int | None
    topic_id: str
    """Of the topic of the source."""
    path: tuple[str, ...]
    """The ids of the sites that the records of the copy were at; none if it has others, too."""

    def to_commit(self) -> tuple[int, str]:
        """Return it as offset and metadata of a group."""
        fields = {"topic": self.topic_id, "epoch": self.leader_epoch, "path": self.path}
        return self.offset, json.dumps(fields, separators=(",", ":"))

    @classmethod
    def of_commit(cls, commit: OffsetAndMetadata) -> StoredPosition:
        """Inverse of `to_commit`."""
        fields = json.loads(commit.metadata or "{}")
        path = tuple(fields.get("path", ()))
        return cls(commit.offset, fields.get("epoch"), fields.get("topic", ""), path)


@cache
def client_library() -> Any:
    """Return the module ``confluent_kafka``.

    Raises:
        EmbedlogError: It is not installed.
    """
    return need("confluent_kafka")


@cache
def admin_library() -> Any:
    """Return the module ``confluent_kafka.admin``."""
    return need("confluent_kafka.admin")


class KafkaCluster:
    """The address of a cluster, and what creates clients of it.

    Args:
        address: ``kafka://HOST:PORT[,HOST:PORT…][?SETTING=VALUE&…]``, with settings of librdkafka;
            ``${NAME}`` in a value stands for a variable of the environment.
    """

    def __init__(self, address: str) -> None:
        servers, _, options = address.removeprefix(KAFKA_SCHEME).partition("?")
        servers = servers.rstrip("/")
        if not address.startswith(KAFKA_SCHEME) or not servers or "/" in servers:
            raise InvalidConfigError(
                f"The address of a Kafka cluster must be kafka://HOST:PORT, got {address!r}"
            )
        self.address = KAFKA_SCHEME + servers
        """Without settings, which may be secret."""
        settings = {
            name: _VARIABLE.sub(_variable, value)
            for name, value in parse_qsl(options, keep_blank_values=True)
        }
        exactly_once = settings.pop(_EXACTLY_ONCE, "true")
        if exactly_once not in _SWITCH:
            raise InvalidConfigError(f"{_EXACTLY_ONCE} must be true or false, got {exactly_once!r}")
        self.exactly_once = _SWITCH[exactly_once]
        """Whether a target writes with transactions."""
        self._settings = {"bootstrap.servers": servers, "log_level": "0", **settings}
        self.admin = self._client(admin_library().AdminClient, {})
        with self.errors("The cluster does not answer"):
            described = self.admin.describe_cluster(request_timeout=REQUEST_SECONDS)
            self.id: str = described.result(REQUEST_SECONDS).cluster_id

    def consumer(self, **settings: object) -> Any:
        """Return a consumer that is in no group; names of settings have ``_`` for ``.``."""
        group = {"group_id": f"{GROUP_PREFIX}reader", "enable_auto_commit": False}
        return self._client(client_library().Consumer, {**group, **settings})

    def producer(self, **settings: object) -> Any:
        """Return a producer."""
        return self._client(client_library().Producer, settings)

    def _client(self, kind: Any, settings: Mapping[str, object]) -> Any:
        own = {name.replace("_", "."): value for name, value in settings.items()}
        try:
            return kind({**self._settings, **own})
        except client_library().KafkaException as error:
            raise InvalidConfigError(
                f"A setting in the address of {self.address} is not valid: {error.args[0].str()}"
            ) from error

    @contextmanager
    def errors(self, what: str, **facts: Any) -> Iterator[None]:
        """Raise the errors of the client as those of embedlog.

        Raises:
            KafkaClusterError: ``what`` happened.
        """
        library = client_library()
        try:
            yield
        except library.KafkaException as error:
            raise self.error(what, error.args[0], **facts) from raised_in_body(error)
        except (library.KafkaError, TimeoutError) as error:
            # A client may keep asking a coordinator that broke, for ever: librdkafka's issue 5511.
            self.admin = self._client(admin_library().AdminClient, {})
            raise self.error(what, error, **facts) from raised_in_body(error)

    def error(self, what: str, error: Any, **facts: Any) -> KafkaClusterError:
        """Return an error of the cluster, from one of the client or words on the time."""
        is_kafka = isinstance(error, client_library().KafkaError)
        reason = f"{error.str()} ({error.name()})" if is_kafka else f"no answer {error}"
        return KafkaClusterError(
            f"{what}: {reason.strip()}",
            path=self.address,
            todo="Check that the brokers run and that their addresses can be reached from here.",
            **facts,
        )

    def retried(self, what: str, request: Callable[[], T], **facts: Any) -> T:
        """Return the result of a request, repeated until the broker in charge is ready.

        A new partition has no leader for a moment, and a coordinator first loads what it knows.

        Raises:
            KafkaClusterError: ``what`` happened.
        """
        deadline = monotonic() + REQUEST_SECONDS
        with self.errors(what, **facts):
            while True:
                try:
                    return request()
                except client_library().KafkaException as error:
                    if error.args[0].code() not in _NOT_READY or monotonic() >= deadline:
                        raise
                    self.pause()

    def pause(self) -> None:
        """Wait a moment before a request is repeated."""
        self.admin.poll(_PAUSE_SECONDS)

    # Groups and offsets

    def groups(self) -> list[str]:
        """Return the ids of the groups, those of mirrors too."""
        with self.errors("The groups cannot be listed"):
            listed = self.admin.list_consumer_groups(request_timeout=REQUEST_SECONDS)
            return [group.group_id for group in listed.result(REQUEST_SECONDS).valid]

    def committed(
        self, group: str, *, stable: bool = False
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return a group's commits; with ``stable`` wait until no transaction can change them."""
        return self.retried(
            "The offsets of a group cannot be read",
            partial(self._committed, group, stable=stable),
            group=group,
        )

    def _committed(self, group: str, *, stable: bool) -> dict[TopicPartition, OffsetAndMetadata]:
        library = client_library()
        self._check_coordinator(group)
        answers = self.admin.list_consumer_group_offsets(
            [library.ConsumerGroupTopicPartitions(group)],
            require_stable=stable,
            request_timeout=REQUEST_SECONDS,
        )
        partitions = answers[group].result(REQUEST_SECONDS).topic_partitions
        for part in partitions:
            if part.error is not None:
                raise library.KafkaException(part.error)
        return {
            TopicPartition(part.topic, part.partition): OffsetAndMetadata(
                part.offset, part.metadata or "", part.leader_epoch
            )
            for part in partitions
            if part.offset >= 0
        }

    def _check_coordinator(self, group: str) -> None:
        """Ask the coordinator of a group for something harmless first.

        librdkafka kills the process if one that is not ready is asked for offsets (its issue 5040).

        Raises:
            KafkaException: It is not ready.
        """
        try:
            self.admin.describe_consumer_groups([group])[group].result(REQUEST_SECONDS)
        except client_library().KafkaException as error:
            if error.args[0].code() in _NOT_READY:
                raise

    def offsets(
        self, partitions: Iterable[TopicPartition], *, latest: bool
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return where partitions begin, or where their last stable offsets are; with the epoch."""
        what, keys = "The ends of partitions cannot be read", list(partitions)
        return self.retried(what, partial(self._offsets, keys, latest))

    def _offsets(
        self, partitions: Sequence[TopicPartition], latest: bool
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        library, spec = client_library(), admin_library().OffsetSpec
        answers = self.admin.list_offsets(
            {
                library.TopicPartition(*part): spec.latest() if latest else spec.earliest()
                for part in partitions
            },
            isolation_level=library.IsolationLevel.READ_COMMITTED,
            request_timeout=REQUEST_SECONDS,
        )
        listed = {part: answer.result(REQUEST_SECONDS) for part, answer in answers.items()}
        return {
            TopicPartition(part.topic, part.partition): OffsetAndMetadata(
                found.offset, "", found.leader_epoch
            )
            for part, found in listed.items()
        }


def _variable(match: re.Match[str]) -> str:
    """Return a variable of the environment.

    Raises:
        InvalidConfigError: There is none of this name.
    """
    value = os.environ.get(match[1])
    if value is None:
        raise InvalidConfigError(f"The environment has no variable {match[1]!r}")
    return value
