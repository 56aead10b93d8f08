"""Kafka's messages: each version of each API, as kafka-python has it, and bytes that are none."""

from __future__ import annotations

import importlib
import pkgutil
import random
import struct
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
from support.random_messages import plain, random_message
from support.tiers import choose

from embedlog.kafka.kafka_python import kafka
from embedlog.server import protocol
from embedlog.server.server import offered

ROUNDS = choose(test=1, all=30)
MESSAGES = [
    (f"{api}{kind}", version)
    for api, (first, last) in offered().items()
    for kind in ("Request", "Response")
    for version in range(first, last + 1)
]


def kafka_python_types() -> dict[str, Any]:
    """Return kafka-python's classes of messages by name."""
    found: dict[str, Any] = {}
    for module in pkgutil.walk_packages(kafka.protocol.__path__, "kafka.protocol."):
        if ".old" not in module.name:
            with suppress(ImportError):
                found |= vars(importlib.import_module(module.name))
    return found


def assert_kept(sent: Any, decoded: Any) -> None:
    """Fail unless a message has all that was encoded; it may have more, with defaults."""
    if isinstance(sent, dict):
        for name, part in sent.items():
            assert_kept(part, decoded[name])
    elif isinstance(sent, list):
        assert len(sent) == len(decoded)
        for part, of_decoded in zip(sent, decoded, strict=True):
            assert_kept(part, of_decoded)
    else:
        assert sent == decoded


def test_each_version_has_the_bytes_of_kafka_python():
    """Theirs decodes ours, and encodes the same again; ours decodes theirs to what was meant."""
    types, dice, compared = kafka_python_types(), random.Random(1), set()
    for name, version in MESSAGES:
        kind = types.get(name)
        if kind is None or not kind.min_version <= version <= kind.max_version:
            continue
        for _ in range(ROUNDS):
            message = random_message(name, version, dice)
            if name == "ApiVersionsResponse":
                message["error_code"] = 0  # kafka-python reads others as version 0.
            ours = protocol.encode(name, version, message)
            theirs = kind.decode(ours, version=version)
            theirs._header = None
            assert theirs.encode(version=version) == ours, (name, version, message)
        compared.add((name, version))
    # KIP-848 and KIP-932 are not in kafka-python.
    missing = {
        each for each in MESSAGES if each[0].startswith("ConsumerGroup") or "Share" in each[0]
    }
    assert compared == set(MESSAGES) - missing


def test_each_version_decodes_to_what_was_encoded():
    """What a version has is kept; all else has the default of the schema."""
    dice = random.Random(2)
    for name, version in MESSAGES:
        for _ in range(ROUNDS):
            message = random_message(name, version, dice)
            data = protocol.encode(name, version, message)
            assert_kept(message, plain(protocol.decode(name, version, data)))


def test_bytes_that_are_no_message_raise_one_error_in_little_memory():
    """Whatever is changed in a message, or missing at its end."""
    dice = random.Random(3)
    tracemalloc.start()
    try:
        for name, version in dice.sample(MESSAGES, choose(test=60, all=len(MESSAGES))):
            good = protocol.encode(name, version, random_message(name, version, dice))
            for _ in range(choose(test=20, all=500)):
                bad = bytearray(good[: dice.randrange(len(good) + 1)])
                for _ in range(dice.randrange(4)):
                    if bad:
                        bad[dice.randrange(len(bad))] = dice.choice((0, 127, 128, 255))
                with suppress(protocol.MalformedMessageError):
                    protocol.decode(name, version, bytes(bad))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.parametrize(
    ("name", "version", "data"),
    [
        ("MetadataRequest", 1, b"\x7f\xff\xff\xff"),
        ("MetadataRequest", 9, b"\xff\xff\xff\xff\x0f"),
        ("MetadataRequest", 9, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
        ("MetadataRequest", 1, b"\x00\x00\x00\x01\x7f\xffabc"),
        ("MetadataRequest", 1, b"\x00\x00\x00\x01\x00\x02\xff\xfe"),
        ("MetadataRequest", 1, b"\x00\x00\x00\x01\xff\xff"),
        ("MetadataRequest", 9, b"\x01\x01\x01\x01\xff\xff\xff\xff\x0f"),
        ("OffsetFetchRequest", 1, b"\x00\x01g\x00\x00\x00\x01\x00\x01t\x10\x00\x00\x00"),
    ],
    ids=[
        *("huge count", "huge compact count", "endless varint", "huge text", "no UTF-8"),
        *("null name", "many tags", "many numbers"),
    ],
)
def test_no_count_or_length_is_believed(name, version, data):
    with pytest.raises(protocol.MalformedMessageError):
        protocol.decode(name, version, data)


def test_frames_of_random_bytes_raise_one_error():
    """Whatever API and version they seem to have."""
    dice, versions = random.Random(4), offered()
    for _ in range(choose(test=5_000, all=1_000_000)):
        frame = struct.pack(">hhih", dice.randrange(70), dice.randrange(13), 1, -1)
        frame += dice.randbytes(dice.randrange(40))
        with suppress(protocol.MalformedMessageError):
            protocol.decode_request(memoryview(frame), versions)


def test_unknown_tagged_fields_are_skipped():
    data = protocol.encode("HeartbeatRequest", 4, {"group_id": "g", "member_id": "m"})
    tagged = data[:-1] + b"\x02\x05\x03abc\xc8\x01\x00"
    assert protocol.decode("HeartbeatRequest", 4, tagged).member_id == "m"
