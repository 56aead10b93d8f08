"""The audit: counts of records per topic and window of time, at every tier, and their differences.

Producers, consumer groups and others report what they counted to the topic ``__audit``
(`audit_topic`, `reporter`), if the topic has ``audit=true``: `producer_counts` and
`group_counts` count.  The log is counted when it is asked for, from the heads of its batches
(`log_counts`).  `comparison` names every difference.

A report says which offsets it is about.  So a difference is exact, and a tier that has read
only a part, or was killed before it reported, is told apart from a loss.
"""
