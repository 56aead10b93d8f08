"""Kafka's protocol on a log: clients of every language, on a directory."""
