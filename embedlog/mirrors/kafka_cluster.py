"""A Kafka cluster as an end of a mirror: its address, its clients, and its errors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from time import monotonic, sleep
from typing import Any
from urllib.parse import parse_qsl

from embedlog.display import need
from embedlog.errors import InvalidConfigError, KafkaClusterError
from embedlog.record import OffsetAndMetadata, TopicPartition

SCHEME = "kafka://"
REQUEST_SECONDS = 30.0
GROUP_PREFIX = "embedlog.mirror."
"""Begins the names of the groups, transactional ids and topics that mirrors use themselves."""
_NO_LEADER = (5, 6)
"""Codes of errors: the partition has no leader yet, or another one."""
_EXACTLY_ONCE = "exactly.once"
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_SWITCH = {"true": True, "false": False}


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
        servers, _, options = address.removeprefix(SCHEME).partition("?")
        servers = servers.rstrip("/")
        if not address.startswith(SCHEME) or not servers or "/" in servers:
            raise InvalidConfigError(
                f"The address of a Kafka cluster must be kafka://HOST:PORT, got {address!r}"
            )
        self.address = SCHEME + servers
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
            raise self.error(what, error.args[0], **facts) from error
        except (library.KafkaError, TimeoutError) as error:
            raise self.error(what, error, **facts) from error

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

    # Offsets of groups

    def committed(
        self, group: str, *, stable: bool = False
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return what a group committed; with ``stable`` once no transaction can change it."""
        library = client_library()
        with self.errors("The offsets of a group cannot be read", group=group):
            request = [library.ConsumerGroupTopicPartitions(group)]
            answers = self.admin.list_consumer_group_offsets(
                request, require_stable=stable, request_timeout=REQUEST_SECONDS
            )
            partitions = answers[group].result(REQUEST_SECONDS).topic_partitions
        return {
            TopicPartition(part.topic, part.partition): OffsetAndMetadata(
                part.offset, part.metadata or "", part.leader_epoch
            )
            for part in partitions
            if part.offset >= 0 and part.error is None
        }

    def offsets(
        self, partitions: Iterable[TopicPartition], *, latest: bool
    ) -> dict[TopicPartition, int]:
        """Return where partitions begin, or where their last stable offsets are."""
        library, deadline = client_library(), monotonic() + REQUEST_SECONDS
        keys = list(partitions)
        with self.errors("The ends of partitions cannot be read"):
            while True:
                try:
                    return self._list_offsets(keys, latest)
                except library.KafkaException as error:
                    # The leader of a new partition takes a moment to begin, or it moves.
                    if error.args[0].code() not in _NO_LEADER or monotonic() >= deadline:
                        raise
                    sleep(0.1)

    def _list_offsets(
        self, partitions: Sequence[TopicPartition], latest: bool
    ) -> dict[TopicPartition, int]:
        library, spec = client_library(), admin_library().OffsetSpec
        answers = self.admin.list_offsets(
            {
                library.TopicPartition(*part): spec.latest() if latest else spec.earliest()
                for part in partitions
            },
            isolation_level=library.IsolationLevel.READ_COMMITTED,
            request_timeout=REQUEST_SECONDS,
        )
        return {
            TopicPartition(part.topic, part.partition): answer.result(REQUEST_SECONDS).offset
            for part, answer in answers.items()
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
