"""Publications: batches that become part of the log in many partitions at once."""
