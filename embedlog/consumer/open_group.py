"""The group of a consumer, which other programs open to look at it, too."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from embedlog.group import Group
from embedlog.partition import tail

if TYPE_CHECKING:
    from embedlog.root.root import Root


def open_group(root: Root, group_id: str) -> Group:
    """Return a group of an open log, with partition ends as the log's readers see them."""
    durable = root.visibility == "durable"
    return Group(root.context, group_id, partial(tail.ends, durable=durable))
