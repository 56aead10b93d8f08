"""Consumers: positions, polling and iteration, as records or as Arrow columns.

- `consumer`: `Consumer`, what programs use.
- `assignment`, `cursor`: the assigned partitions, and position and buffer of each.
- `deserialize`: what a call returns, as records or as columns.
- `metrics`: what is counted, and under which names.
- `waiter`: sleeps until there may be new records.
- `static_assignment`: all partitions of given topics, without a group.
- `group_client`, `group_member`, `heartbeat`, `committer`, `rebalance_notifier`: the
  membership in a consumer group.
"""
