"""Kafka's protocol on a log: clients of every language, on a directory that Python uses too.

`protocol` has the messages, `record_batches` the batches of records, `answers` what a log answers
as a cluster, and `server` the connections.
"""
