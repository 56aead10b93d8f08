"""The audit: counts of records per topic and window of time, at every tier, and their differences.

The audit listens to the clients of topics with ``audit=true`` (`embedlog.listeners`).
`producer_counts` and `group_counts` count what they do; it is reported to the topic
``__audit`` (`audit_topic`, `reporter`).  The log is counted when it is asked for, from the heads
of its batches (`log_counts`).  `comparison` names every difference.

A report says which offsets it is about.  So a difference is exact, and a tier that has read
only a part, or was killed before it reported, is distinguished from a loss.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, TypeVar

from embedlog.listeners import COPY, GROUP, PRODUCER, Client

if TYPE_CHECKING:
    from embedlog.audit.reporter import Counts
    from embedlog.root.root import Root

R = TypeVar("R", bound="Root")


def subscribe(root: R) -> R:
    """Count what the clients of an open log do in topics with ``audit=true``; return the log."""
    reference: weakref.ref[Root] = weakref.ref(root)  # the root holds its listeners

    def create(client: Client) -> Counts:
        # Imported here: most logs have no such topic.
        from embedlog.audit.group_counts import GroupCounts
        from embedlog.audit.producer_counts import ProducerCounts, RangeCounts

        counts = {PRODUCER: ProducerCounts, COPY: ProducerCounts, GROUP: GroupCounts}
        opened = reference()
        assert opened is not None, "a client holds the log that it uses"
        return counts.get(client.kind, RangeCounts)(opened, client)

    if root.mode == "rw":
        root.listeners.subscribe(lambda config: config.audit, create)
    return root
