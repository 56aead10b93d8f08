"""Publishing staged batches in any number of partitions: all of them or none, and once."""
