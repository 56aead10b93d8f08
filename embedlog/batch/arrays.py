"""Arrow values laid out by hand, since what pyarrow makes of Python's values looks for pandas.

`pyarrow.array` and `pyarrow.scalar` ask whether they were given something of pandas, and
so import it where it is installed, and compute functions do the same with any value
that is not Arrow's: 300 ms for whoever is the first in a process to read a table,
or in one of Spark's workers.  Nothing on the way of a record calls them.
"""

from __future__ import annotations

from struct import pack
from typing import Any

import numpy as np
import pyarrow as pa

TRUE = pa.Array.from_buffers(pa.bool_(), 1, [None, pa.py_buffer(b"\1")])
"""An array of one row."""


def numbers(rows: Any, kind: Any) -> Any:
    """Return numpy's integers as an array of integers or times, without a copy where it can be."""
    flat = np.ascontiguousarray(rows, f"i{kind.bit_width // 8}")
    return pa.Array.from_buffers(kind, len(flat), [None, pa.py_buffer(flat)], 0)


def number(value: int, kind: Any) -> Any:
    """Return an integer or time as a scalar."""
    return repeated(value, kind, 1)[0]


def repeated(value: int, kind: Any, count: int) -> Any:
    """Return an array of so many times the same integer or time."""
    return numbers(np.full(count, value, f"i{kind.bit_width // 8}"), kind)


def data(value: bytes, kind: Any) -> Any:
    """Return bytes, or text as its UTF-8, as a scalar."""
    ends = pa.py_buffer(pack("<ii", 0, len(value)))
    return pa.Array.from_buffers(kind, 1, [None, ends, pa.py_buffer(value)], 0)[0]


def empty(schema: Any) -> Any:
    """Return a table without a row."""
    return pa.Table.from_batches([], schema)
