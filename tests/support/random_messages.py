"""Random messages of Kafka's protocol, made from the schemas that the server has."""

from __future__ import annotations

import random
import struct
from typing import Any
from uuid import UUID

from embedlog.server import protocol


def random_message(name: str, version: int, dice: random.Random) -> dict[str, Any]:
    """Return the fields of a message, each with a value that its version can have."""
    fields, _ = protocol._layout(name, version)
    return _struct(fields, dice)


def _struct(fields: tuple[Any, ...], dice: random.Random) -> dict[str, Any]:
    present = (field for field in fields if field.present)
    return {field.name: _value(field, dice) for field in present}


def _value(field: Any, dice: random.Random) -> Any:
    if field.nullable and dice.random() < 0.2:
        return None
    if field.is_array:
        item = field._replace(is_array=False, nullable=False)
        return [_value(item, dice) for _ in range(dice.choice((0, 1, 3)))]
    if field.kind in protocol._FIXED:
        code = protocol._FIXED[field.kind]
        if code == "?":
            return dice.random() < 0.5
        if code == "d":
            return dice.uniform(-1e9, 1e9)
        return struct.unpack(f">{code}", dice.randbytes(struct.calcsize(code)))[0]
    if field.kind == "uuid":
        return UUID(bytes=dice.randbytes(16))
    if field.kind == "string":
        return "".join(dice.choices("abc äß€😀", k=dice.choice((0, 1, 5, 200))))
    if field.kind in ("bytes", "records"):
        return dice.randbytes(dice.choice((0, 1, 20, 300)))
    return _struct(field.fields, dice)


def plain(value: Any) -> Any:
    """Return a decoded message as dicts, lists and bytes."""
    if hasattr(value, "_asdict"):
        return {name: plain(part) for name, part in value._asdict().items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return bytes(value) if isinstance(value, memoryview) else value


def random_records(count: int, dice: random.Random) -> list[Any]:
    """Return records as keys, values, timestamps and headers; a list has one kind of each."""
    null_keys, null_values = dice.choice((0, 0.5, 1)), dice.choice((0, 0.3))
    headers, sizes = dice.choice((0, 0, 0.3)), dice.choice(((100,), (0, 1, 63, 64, 9000)))
    return [
        (
            None if dice.random() < null_keys else dice.randbytes(dice.randrange(20)),
            None if dice.random() < null_values else dice.randbytes(dice.choice(sizes)),
            1_700_000_000_000 + dice.randrange(-5_000, 5_000),
            [
                (f"name{number}", dice.choice((None, b"", b"value")))
                for number in range(dice.randrange(1, 4))
            ]
            if dice.random() < headers
            else [],
        )
        for _ in range(count)
    ]
