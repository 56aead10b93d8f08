"""The clients of Kafka that programs know, on a log."""
