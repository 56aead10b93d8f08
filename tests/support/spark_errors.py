"""What a mistake looks like in PySpark."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from embedlog.errors import EmbedlogError, SparkQueryError
from embedlog.spark.errors import to_embedlog_error


def error_of(call: Callable[..., object], *args: object, **kwargs: object) -> EmbedlogError:
    """Return the embedlog error that a call fails with, in an exception without Java's stack."""
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as info:
        call(*args, **kwargs)
    text = str(info.value)
    assert "\tat " not in text and "JVM stacktrace" not in text, text
    return to_embedlog_error(info.value)


def sentence_of(call: Callable[..., object]) -> EmbedlogError:
    """Return the embedlog error that a call fails with, whose sentence is the whole text."""
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as info:
        call()
    error = to_embedlog_error(info.value)
    assert not isinstance(error, SparkQueryError), str(info.value)
    assert str(info.value) == str(error)
    assert info.value.getMessageParameters() == {
        "error": type(error).__name__,
        "message": str(error),
    }
    words = info.value.getCondition().split("_")
    assert words[0] == "EMBEDLOG"
    assert f"{''.join(words[1:])}ERROR" == type(error).__name__.upper()
    return error
