"""What a consumer group keeps in the databases: members, partition owners, committed offsets."""
