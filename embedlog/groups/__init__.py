"""What a consumer group keeps in the databases: members, owners of partitions, committed offsets."""
