"""Compaction against a dictionary: a reader from 0 to the end always gets the same state (D8).

Whatever is appended, rolled, cut, deleted, reconfigured, killed or compacted, wholly
or in part: before, during and after, the last value of each key is what it would be
in the log that nobody compacted; and what is left is what the rules say.
"""

from __future__ import annotations

from hypothesis import settings
from support.compaction_model import CompactionModel

TestCompactionModel = CompactionModel.TestCase
TestCompactionModel.settings = settings(stateful_step_count=10)
