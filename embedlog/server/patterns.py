"""Patterns of clients: as in Kafka they are those of RE2, which no pattern makes slow."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from embedlog.lazy import pa, pc
from embedlog.server.error_codes import ApiError, ErrorCode


def matching(pattern: str, names: Collection[str]) -> list[str]:
    """Return the names that a pattern matches as a whole, in their order.

    Raises:
        ApiError: It is no regular expression of RE2.
    """
    _check(pattern)
    found = pc.match_substring_regex(pa.array(names, pa.string()), rf"\A(?:{pattern})\z")
    return [name for name, is_match in zip(names, found.to_pylist(), strict=True) if is_match]


@lru_cache(maxsize=1000)
def _check(pattern: str) -> None:
    try:
        # By itself: the group around it could close one that is left open.
        pc.match_substring_regex(pa.array([""]), pattern)
    except pa.ArrowInvalid as error:
        raise ApiError(ErrorCode.INVALID_REGULAR_EXPRESSION, str(error)) from None
