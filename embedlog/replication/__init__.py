"""Replication: where the copies of partitions are, which one leads, and where they part.

A replica is identified by the id of its directory, as Kafka identifies it by the id of its
broker; the rack of a directory is a label, or None.  These are pure functions over values: no
files, no databases, no clock, and chance only from a generator that the caller passes in.

- `placement`: the directories of a new topic's partitions.
- `reassignment`: the fewest moves that make an assignment even again.
- `election`: the leader of a partition, and the preferred leaders.
- `isr`: the in-sync replicas of a partition, and the state that changes with them.

And one that reads logs:

- `compare`: the first offset at which copies of a partition differ.
"""
