"""Turns an exception of Spark into an error of embedlog, in one sentence.

Spark's text is pages of Java and of other processes' tracebacks.  An embedlog
error that was raised in one of Spark's processes arrives as a line of it, or as the end of one.
"""

from __future__ import annotations

import re

from embedlog import errors
from embedlog.errors import EmbedlogError, SparkQueryError

_EMBEDLOG_ERROR = re.compile(
    r"(?:^|: )embedlog\.errors\.(\w+): (.+?)(?: SQLSTATE: \w+)?$", re.MULTILINE
)
_CAUSE = re.compile(r"^(?:Caused by: )?[\w.$]+(?:Exception|Error): (.+)$", re.MULTILINE)
_MAX_CHARACTERS = 300


def to_embedlog_error(error: BaseException) -> EmbedlogError:
    """Return the embedlog error in the text of a Spark exception, else a `SparkQueryError`.

    >>> to_embedlog_error(
    ...     RuntimeError("SparkException: no\\nembedlog.errors.NotALogError: no log [a]\\n at x")
    ... )
    NotALogError('no log [a]')
    """
    # PySpark shows an error of embedlog without its class, which Java's text of it begins with.
    text = f"{error}\n{getattr(error, '_stackTrace', '')}"
    result: EmbedlogError
    if matches := _EMBEDLOG_ERROR.findall(text):
        name, message = matches[-1]
        result = getattr(errors, name, SparkQueryError)(message)
    else:
        causes = _CAUSE.findall(text) or text.strip().splitlines()[:1] or [type(error).__name__]
        result = SparkQueryError(f"Spark failed: {causes[-1][:_MAX_CHARACTERS]}")
    result.__cause__ = error
    return result
