"""The schema registry in the log, and the serializers of Avro that use it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embedlog.root.root import Root
    from embedlog.serializers import Action, Adapter, Bind, Field


def binder(root: Root) -> Bind:
    """Return a function that connects serializers to the registry of a log."""
    return partial(_bind, root)


def _bind(root: Root, setting: object, action: Action, field: Field, topic: str) -> Adapter:
    from embedlog.registry.avro_serializers import bind

    return bind(root, setting, action, field, topic)
