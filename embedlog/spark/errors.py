"""What an exception of Spark's is about, in a sentence: it is pages of Java and of other processes.

An error of ours that was raised in one of Spark's Python processes comes home
as text, somewhere in these pages.
"""

from __future__ import annotations

import re

from embedlog import errors
from embedlog.errors import EmbedlogError, SparkQueryError

_OURS = re.compile(r"^embedlog\.errors\.(\w+): (.+)$", re.MULTILINE)
_REASON = re.compile(r"^(?:Caused by: )?[\w.$]+(?:Exception|Error): (.+)$", re.MULTILINE)
_LONGEST = 300


def typed(error: BaseException) -> EmbedlogError:
    """Return an error of ours for one of Spark's; the cause stays with it.

    >>> typed(RuntimeError("SparkException: no\\nembedlog.errors.NotALogError: no log [a]\\n at x"))
    NotALogError('no log [a]')
    """
    text = str(error)
    found = _OURS.findall(text)
    if found:
        name, told = found[-1]
        kind = getattr(errors, name, SparkQueryError)
        made: EmbedlogError = kind(told)
    else:
        reasons = _REASON.findall(text) or text.strip().splitlines()[:1]
        told = reasons[-1] if reasons else type(error).__name__
        made = SparkQueryError(f"Spark failed: {told[:_LONGEST]}")
    made.__cause__ = error
    return made
