"""One group of Kafka's Java consumers, clients in Python, and programs on the directory."""

from __future__ import annotations

from contextlib import closing

import pytest
from support.mixed_group import JAVA_KINDS, SERVER, MixedGroup
from support.patience import patient


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("victim", [*JAVA_KINDS, "program", "modern", SERVER])
def test_a_member_or_the_server_is_gone_for_long(tmp_path, victim, how):
    """Others have its partitions meanwhile; nothing is skipped, and no commit moves back."""
    with closing(MixedGroup(tmp_path, int(patient(1) * 1000))) as group:
        for kind in (*JAVA_KINDS, "program", "modern"):
            group.start(kind)
        group.until_shared()
        group.send(400)
        (group.kill if how == "kill" else group.stop)(victim)
        group.send(400)
        group.until_shared()
        group.until_consumed()
        if how == "stop":
            group.resume()
        elif victim != SERVER:
            group.start(victim)
        group.send(400)
        group.until_shared()
        group.until_consumed()
        group.check()
