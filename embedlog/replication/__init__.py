"""Replication: where the copies of partitions are, which one leads, and what makes them equal.

A replica is identified by the id of its directory, as Kafka identifies it by the id of its
broker; the rack of a directory is a label, or None.  These are pure functions over values: no
files, no databases, no clock, and chance only from a generator that the caller passes in.

- `placement`: the directories of a new topic's partitions, and the fewest moves that make an
  assignment even again.
- `isr`: the replicas of a partition, its leader, and the changes of both.

And these work on the directories and the copies.

- `metadata`, `directory`, `member_file`: what is known of the directories, and one of them.
- `store`, `files`: the databases and the files of all directories, for the engine.
- `controller`: which directories are online, and what happens when one fails.
- `root`: opening them, and those that come back or are added.
- `partition`: acknowledgements, and taking over from a leader.
- `mend`: damaged in-sync copies are written again from good ones.
- `catch_up`: a copy that is not in sync becomes equal to the leader's, and joins the ISR.
- `reassign`, `jobs`, `describe`: what operators and the housekeeping do, and what they see.
"""
