"""The same requests to a Kafka broker and to the server: codes and answers are compared.

`DIFFERENCES` lists how the two differ on purpose.  An answer that differs
otherwise fails the test, and so does an entry that no answer needs any more.
"""

from __future__ import annotations

import random
from collections import Counter
from fnmatch import fnmatchcase
from typing import NamedTuple

import pytest
from support.tiers import choose
from support.wire_pair import Found, Pair, Side
from support.wire_steps import AREAS, Script

import embedlog
from embedlog.server.protocol import api_names


class Difference(NamedTuple):
    """How an answer of the server may differ, as patterns of names."""

    step: str
    field: str
    reason: str
    kafka: str = "*"
    embedlog: str = "*"

    def covers(self, found: Found) -> bool:
        """Whether a difference is this one."""
        texts = (found.step, found.field, str(found.kafka), str(found.embedlog))
        patterns = (self.step, self.field, self.kafka, self.embedlog)
        # Names of settings are in brackets, which are no sets of characters here.
        pairs = zip(texts, (each.replace("[", "[[]") for each in patterns), strict=True)
        return all(fnmatchcase(text, pattern) for text, pattern in pairs)


_TEST_BROKER = "The broker of the tests has its own default"
_DEFAULTS = "Another default: docs/differences-from-kafka.md"
_COPIES = "A log in one directory ignores where copies are to be: docs/serve.md"
_NO_BROKER_SETTINGS = "Settings of topics have no counterpart of brokers on a log"
_NAMED = "Groups have names: Kafka lets the empty one commit"
_SESSION = "Sessions may be as short as a client likes"
_ASSIGNED = "The server assigns, as Kafka's in a group that moves to KIP-848: docs/serve.md"
_UNKNOWN_ID = "An id that a member was told to join with is not kept until it does"
_OWN_ERROR = "Kafka fails by itself"
DIFFERENCES = [
    Difference("*", "*configs[index.interval.bytes]*value", _DEFAULTS, "4096", "65536"),
    Difference("*", "*configs[message.timestamp.after.max.ms]*value", _DEFAULTS, "3600000"),
    Difference("*", "*configs[min.insync.replicas].config_source", _TEST_BROKER, "3", "5"),
    Difference("*", "*configs[retention.ms].*", _TEST_BROKER),
    Difference("*", "*configs[*].synonyms.name", _NO_BROKER_SETTINGS),
    Difference("*", "*configs[*].synonyms#", _NO_BROKER_SETTINGS),
    Difference("*", "*configs[broker.id].value", "Brokers have other numbers"),
    Difference("*", "*configs[num.partitions].config_source", "All are fixed", "5", "4"),
    Difference("DescribeConfigs: all brokers", "*", "There are no defaults of a cluster"),
    Difference(
        *("CreateTopics: *", "topics.topic_id"),
        *("Kafka gives an id to what it only checks", "an id", "00000000-*"),
    ),
    Difference("CreateTopics: too many copies", "*", _COPIES),
    Difference("CreateTopics: assignment to no broker", "*", _COPIES),
    Difference("CreateTopics: name '__consumer_offsets'", "*", "Like any topic of a log"),
    Difference("CreatePartitions: twice", "*", "Kafka answers once"),
    Difference("CreatePartitions: *assignment*", "*", _COPIES),
    Difference("DeleteTopics: two of one name", "*", "Kafka answers once"),
    Difference("IncrementalAlterConfigs: append *", "*", "Another check comes first", "4?", "3"),
    Difference("Metadata: by neither", "*", _OWN_ERROR),
    Difference("Fetch: later fetched epoch", "*", "Only followers say what they fetched last"),
    Difference("Produce: *", "*.log_start_offset", "Kafka says it with an error, too", "0", "-1"),
    Difference("Produce: codec *", "*", _OWN_ERROR, "-1", "*"),
    Difference("Produce: base offset 7", "*", "Kafka wants 0 where the log writes its own"),
    Difference("Produce: internal topic", "*", "Like any topic of a log"),
    Difference("Produce: sequence *duplicate", "*.log_append_time_ms", "Not kept", "a time", "-1"),
    Difference("Produce: a byte more", "*", "Kafka drops what follows a batch"),
    Difference("Produce: sent with append time", "*", "Kafka keeps such timestamps"),
    Difference("Produce: in the future", "*", _DEFAULTS),
    Difference("Produce: producer with a negative epoch", "*", "Kafka takes it for none"),
    Difference("OffsetCommit: *negative offset", "*", "Offsets begin at 0", "0", "42"),
    Difference("OffsetCommit: no group", "*", _NAMED),
    Difference("OffsetFetch: no group", "*", _NAMED),
    Difference("D*Groups: without a name", "*", _NAMED),
    Difference("JoinGroup: short session", "*", _SESSION),
    Difference("JoinGroup: unknown id*", "*", _UNKNOWN_ID),
    Difference("ListGroups: with a member", "groups.group_state", _UNKNOWN_ID, "Empty", "Stable"),
    Difference("JoinGroup: *", "leader", _ASSIGNED, "<member>", ""),
    Difference("JoinGroup: *", "members#", _ASSIGNED, "*", "[]"),
    Difference("SyncGroup: *", "assignment", _ASSIGNED),
    Difference("DescribeGroups: *", "groups.members.member_*", _ASSIGNED),
    Difference("OffsetCommit: before the sync", "*", _ASSIGNED, "27", "0"),
    Difference("ShareGroupHeartbeat: joins", "*interval_ms", _TEST_BROKER),
    Difference("ShareGroupHeartbeat: joins", "assignment.*", "At once; Kafka begins first", "[]"),
    Difference("ShareAcknowledge: not held", "*", "Kafka must have fetched before"),
]
"""Differences on purpose, by the first that covers one."""


OTHER_VERSIONS = {
    "AddPartitionsToTxn": ((0, 5), (0, 3)),
    "ApiVersions": ((0, 5), (0, 4)),
    "DeleteGroups": ((0, 3), (0, 2)),
    "TxnOffsetCommit": ((0, 6), (0, 5)),
}
"""The versions of Kafka and of the server, where they differ; only those of both are compared.
Those from 4 on of the first are for brokers, and the others are newer than the schemas of 4.3.1."""


def listed(found: Found) -> Difference | None:
    """Return the entry for a difference."""
    return next((each for each in DIFFERENCES if each.covers(found)), None)


def run(broker, server, seed: int, number: int | None) -> list[Found]:
    """Run a script, of all scenarios or of so many at random; return the differences."""
    prefix = f"diff-{seed}-{'all' if number is None else 'some'}-"
    pair = Pair(broker.address, server.bootstrap_servers, prefix)
    try:
        script = Script(pair, random.Random(seed), lambda found: listed(found) is not None)
        script.every() if number is None else script.some(number)
        least = len(AREAS) * 20 if number is None else number
        assert pair.steps >= least, f"only {pair.steps} requests were sent"
        return script.found
    finally:
        pair.close()


def unlisted(found: list[Found]) -> str:
    """Return the differences that are not listed, as lines."""
    counts = Counter(
        f"{each.step}: {each.field}: Kafka {str(each.kafka)[:200]}, embedlog "
        f"{str(each.embedlog)[:200]} (as in version {each.version})"
        for each in found
        if listed(each) is None
    )
    return "\n".join(f"{count} x {line}" for line, count in counts.items())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server on an empty log."""
    directory = tmp_path_factory.mktemp("log")
    with embedlog.open(directory) as log, embedlog.serve(log) as server:
        yield server


def test_versions_are_those_of_kafka(broker, server):
    kafka, ours = Side(broker.address, "").versions, Side(server.bootstrap_servers, "").versions
    others = {
        api_names()[key]: (kafka.get(key), versions)
        for key, versions in ours.items()
        if kafka.get(key) != versions
    }
    assert others == OTHER_VERSIONS


def test_every_request_is_answered_as_by_kafka(broker, server):
    """Each case in three versions; and each listed difference is there."""
    found = run(broker, server, 1, None)
    assert not unlisted(found), unlisted(found)
    needed = {listed(each) for each in found}
    gone = [f"{each.step}: {each.field}" for each in DIFFERENCES if each not in needed]
    assert not gone, f"these differences are no longer there: {gone}"


@pytest.mark.parametrize("seed", range(2, choose(test=3, all=6, nightly=20)))
def test_random_requests_are_answered_as_by_kafka(broker, server, seed):
    """In any order and version."""
    found = run(broker, server, seed, choose(test=60, all=200))
    assert not unlisted(found), unlisted(found)
