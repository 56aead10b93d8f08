"""What a consumer group keeps in the databases: members, partition owners, committed offsets."""

LOCKS = "locks/member-"
"""Prefix of the paths of members' lock files."""
