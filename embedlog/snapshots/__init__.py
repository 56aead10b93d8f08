"""Snapshots of a log, the files that describe them, backups, and the logs that are made of those.

`snapshot` takes and deletes them, `manifest` describes one so that it can be read without the
log's databases, `portable` reads that, and `backup` and `restore` do what their names say.
"""
