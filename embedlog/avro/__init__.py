"""Avro's schemas and binary encoding, as columns of Arrow: no Python code runs per record."""
