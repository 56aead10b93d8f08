"""Where a handler is that does not return."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any


def stack_of(runner: Any) -> str:
    """Return where a handler is, as text: the id of its thread, or its task."""
    if isinstance(runner, int):
        frame = sys._current_frames().get(runner)
        return "" if frame is None else "".join(traceback.format_stack(frame))
    lines = [
        line
        for frame in _awaiting(runner.get_coro())
        for line in traceback.format_list([_summary(frame)])
    ]
    return "".join(lines)


def _summary(frame: FrameType) -> traceback.FrameSummary:
    code = frame.f_code
    return traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name)


def _awaiting(awaited: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of those that it awaits, the innermost last."""
    while awaited is not None:
        for prefix in ("cr", "gi", "ag"):
            frame = getattr(awaited, f"{prefix}_frame", None)
            if frame is not None:
                yield frame
                awaited = getattr(
                    awaited, f"{prefix}_await", getattr(awaited, "gi_yieldfrom", None)
                )
                break
        else:
            return
