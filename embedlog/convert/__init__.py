"""Copies the records of a topic to one of another form: of Avro or JSON to columns, and back."""

from embedlog.convert.conversion import Conversion, ConversionOptions, ConversionResult

__all__ = ["Conversion", "ConversionOptions", "ConversionResult"]
