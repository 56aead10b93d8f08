"""Compaction against a dictionary: a reader from 0 to the end always gets the same state (D8).

Whatever is appended, rolled, cut, deleted, reconfigured, killed or compacted, wholly
or in part: before, during and after, the last value of each key is the one of a log
without compaction; and the records that are left are those of the rules.
"""

from __future__ import annotations

from hypothesis import settings
from support import tiers
from support.compaction_model import CompactionModel, TypedCompactionModel

TestCompactionModel = CompactionModel.TestCase
TestCompactionModel.settings = settings(stateful_step_count=10)
TestTypedCompactionModel = TypedCompactionModel.TestCase
TestTypedCompactionModel.settings = settings(
    stateful_step_count=10, max_examples=tiers.choose(quick=4, all=100, nightly=1_000)
)
