"""What clients say of themselves when they join a group: who they are, and what they read."""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Any, NamedTuple

from embedlog.groups.membership import MemberInfo, RemoteClient
from embedlog.server.answers import Caller
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.protocol import MalformedMessageError, decode

MOST_ID_BYTES = 140
"""Of a member's id, which is part of LMDB keys."""
_NEWEST_SUBSCRIPTION = 3


class Subscription(NamedTuple):
    """What a consumer says of itself when it joins."""

    topics: tuple[str, ...]
    owned: frozenset[tuple[str, int]]
    """The partitions that it has; none if it gave up all to join."""
    rack: str | None


def subscription(protocols: Any) -> Subscription:
    """Return what a consumer says of itself.

    Raises:
        ApiError: It says nothing that a consumer would say.
    """
    topics, owned, rack = set[str](), set[tuple[str, int]](), None
    for each in protocols:
        said = consumer_metadata(each.metadata)
        topics.update(said.topics)
        parts = said.owned_partitions
        owned.update((part.topic, number) for part in parts for number in part.partitions)
        rack = rack or said.rack_id
    return Subscription(tuple(sorted(topics)), frozenset(owned), rack)


def consumer_metadata(metadata: bytes) -> Any:
    """Return the metadata of a consumer, decoded.

    Raises:
        ApiError: They are those of something else.
    """
    try:
        (version,) = struct.unpack_from(">h", metadata)
        version = min(max(version, 0), _NEWEST_SUBSCRIPTION)
        return decode("ConsumerProtocolSubscription", version, metadata[2:])
    except (MalformedMessageError, struct.error) as error:
        raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, str(error)) from None


def check_member_id(member: str) -> None:
    """Raise unless an id that a client chose can be a part of keys.

    Raises:
        ApiError: It is too long, or has other characters.
    """
    if len(member.encode()) > MOST_ID_BYTES or not member.isprintable():
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"A member id may have at most {MOST_ID_BYTES} bytes of printable characters",
        )


def remote_info(
    member: str,
    instance: str | None,
    client: RemoteClient,
    caller: Caller,
    assignors: Collection[str],
    session_ms: int,
    joined_ms: int,
) -> MemberInfo:
    """Return what the group knows of a client."""
    return MemberInfo(
        *(member, instance, caller.client_id),
        pid=0,
        lock="",
        topics=client.topics,
        assignors=tuple(assignors),
        session_ms=session_ms,
        joined_ms=joined_ms,
        remote=client,
    )
