"""One group of real programs: in Python on the directory, and clients of librdkafka on the wire."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from support.mixed_group import KINDS, MixedGroup
from support.patience import patient


@pytest.fixture
def new_group(tmp_path):
    with ExitStack() as stack:

        def make(session_seconds: float) -> MixedGroup:
            group = MixedGroup(tmp_path, int(patient(session_seconds) * 1000))
            stack.callback(group.close)
            return group

        yield make


def test_a_server_is_killed_and_nobody_notices(new_group):
    """No rebalance, no commit lost, and all records are read by a program and a client."""
    group = new_group(session_seconds=20)
    for kind in ("modern", "program"):
        group.start(kind)
    group.send(200)
    group.until_shared()
    number = group.generation()
    group.restart_server()
    group.send(200)
    group.until_consumed()
    assert group.generation() == number
    group.check()


@pytest.mark.tier("all")
@pytest.mark.parametrize("killed", KINDS)
def test_members_of_all_kinds_are_killed(new_group, killed):
    """And so is the server: the others go on from the last commit."""
    group = new_group(session_seconds=1)
    # librdkafka's eager and cooperative assignors have none in common.
    for kind in [each for each in KINDS if {each, killed} != {"classic", "cooperative"}]:
        if kind != "cooperative" or killed == "cooperative":
            group.start(kind)
    group.send(400)
    group.until_shared()
    group.kill(killed)
    group.send(400)
    group.restart_server()
    group.until_shared()
    group.start(killed)
    group.send(400)
    group.until_shared()
    group.until_consumed()
    group.check()
