"""Replication: where the copies of partitions are, which one leads, and what makes them equal.

A replica is identified by the id of its directory, as Kafka identifies it by the id of its
broker; the rack of a directory is a label, or None.  These are pure functions over values: no
files, no databases, no clock, and chance only from a generator that the caller passes in.

- `placement`: the directories of a new topic's partitions.
- `reassignment`: the fewest moves that make an assignment even again.
- `isr`: the replicas of a partition, its leader, and the changes of both.

And these work on the copies.

- `segment_copies`: what the copies of a segment have, and which is right.
- `mend`: damaged in-sync copies are written again from good ones.
- `catch_up`: a copy that is not in sync becomes equal to the leader's, and joins the ISR.
"""
