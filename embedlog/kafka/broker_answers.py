"""A log answers the requests that kafka-python's admin client sends to the brokers of a cluster."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from embedlog.api import Log
from embedlog.errors import EmbedlogError, InvalidConfigError
from embedlog.kafka.cluster import BROKER_VERSION, HOST, PORT, LogCluster
from embedlog.kafka.errors import translated
from embedlog.kafka.kafka_python import kafka
from embedlog.record import TopicPartition
from embedlog.server.answers import Answers, Caller, Fields, by_topic
from embedlog.server.cluster import controller_id
from embedlog.server.error_codes import ApiError, ErrorCode

_failures: ContextVar[list[EmbedlogError | ApiError]] = ContextVar("failures")
"""The errors that answers have as codes, of the call of the admin client that runs."""


class _LogAnswers(Answers):
    """Also answers what clients of a server ask otherwise, or not at all."""

    def describe_groups(self, request: Any, caller: Caller) -> Fields:
        """Answer: groups with their members."""
        return {"groups": [self.described_group(name, caller) for name in request.groups]}

    def leave_group(self, request: Any, caller: Caller) -> Fields:
        """Answer: removes members of a group."""
        group = self.log.groups[request.group_id]

        def remove(member: Any) -> None:
            group.remove_members(member.member_id or member.group_instance_id)

        identity = ("member_id", "group_instance_id")
        return {"members": self.each(request.members, identity, remove)}

    def alter_replica_log_dirs(self, request: Any, caller: Caller) -> Fields:
        """Accept the directory of a broker, which is its only one.

        AlterPartitionReassignments moves copies to other directories.
        """
        path = self._broker(caller.node).path
        other = int(ErrorCode.LOG_DIR_NOT_FOUND)
        results = (
            (TopicPartition(topic.name, n), {"error_code": 0 if directory.path == path else other})
            for directory in request.dirs
            for topic in directory.topics
            for n in topic.partitions
        )
        return {"results": by_topic(results, "topic_name")}


class LogBrokers(LogCluster):
    """The brokers of a log, in the place of kafka-python's connections to those of a cluster.

    `_LogAnswers` has the answers.  A request without one is refused: it asks for what only a
    cluster has.
    """

    broker_version = BROKER_VERSION
    broker_version_data = kafka.protocol.broker_version_data.BrokerVersionData(BROKER_VERSION)
    config = kafka.net.manager.KafkaConnectionManager.DEFAULT_CONFIG

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self._answers = _LogAnswers(log, lambda error: _failures.get().append(error))

    # What kafka-python calls

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run a coroutine of the admin client, and return its result.

        Raises:
            KafkaError: What it raises; for an error of embedlog that one with the same sentence.
        """
        _failures.set([])
        try:
            call(*args).send(None)
        except StopIteration as done:
            return done.value
        except kafka.errors.KafkaError as error:
            for cause in _failures.get():
                if type(_as_kafka(cause)) is type(error):
                    raise _as_kafka(cause) from cause
            raise
        raise AssertionError("nothing on a log is waited for")

    async def send(self, request: Any, node_id: int | None = None) -> Any:
        """Return the answer of a broker, by default of the controller."""
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", request.name.removesuffix("Request")).lower()
        answer = getattr(self._answers, name, None)
        if answer is None:
            raise kafka.errors.UnsupportedVersionError(
                f"{request.name} asks for what only a cluster of brokers has"
            )
        version = self.broker_version_data.api_version(request)
        # As a broker gets it: with structs for tuples, and text for numbers.
        request = type(request).decode(request.encode(version=version), version=version)
        request.with_header()
        kind = request.header.get_response_class()
        try:
            node = controller_id(self._log) if node_id is None else node_id
            fields = answer(request, Caller(HOST, PORT, node, is_admin=True))
        except (EmbedlogError, ApiError) as error:
            raise _as_kafka(error) from error
        if name == "describe_configs" and (failures := _failures.get()):
            # kafka-python does not look at the codes of this answer.
            raise _as_kafka(failures[0]) from failures[0]
        known = fields.keys() & kind.fields.keys()
        return kind(**{name: _structs(kind.fields[name], fields[name], version) for name in known})

    async def sleep(self, seconds: float) -> None:
        """Wait before a request is repeated."""
        threading.Event().wait(seconds)

    async def get_connection(self, node_id: int) -> LogBrokers:
        """Return the object that knows the versions of a broker."""
        return self

    def get_coordinator(self, key: str, key_type: Any) -> int:
        """Return the broker that answers for a group."""
        return controller_id(self._log)


def _as_kafka(error: EmbedlogError | ApiError) -> Any:
    """Return an error as kafka-python's admin client raises it."""
    if isinstance(error, ApiError):
        return kafka.errors.for_code(int(error.code))(str(error))
    if isinstance(error, InvalidConfigError):
        return kafka.errors.InvalidConfigurationError(str(error))
    return translated(error)


def _structs(field: Any, value: Any, version: int) -> Any:
    """Return a value of a message with kafka-python's structs in the place of dicts."""
    if field.is_struct_array():
        return [_structs(field.array_of, item, version) for item in value]
    if not isinstance(value, dict):
        return value
    parts = {
        name: _structs(field.fields[name], part, version)
        for name, part in value.items()
        if name in field.fields
    }
    return field.data_class(version=version, **parts)
