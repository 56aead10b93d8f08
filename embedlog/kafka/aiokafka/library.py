"""The library aiokafka, whose types, errors and records the clients of this package use."""

from __future__ import annotations

from typing import Any

from embedlog.kafka.library import load

aiokafka: Any = load("aiokafka")
"""The package; untyped, as most of aiokafka is."""
admin: Any = load("aiokafka.admin")
errors: Any = load("aiokafka.errors")
structs: Any = load("aiokafka.structs")
util: Any = load("aiokafka.util")
