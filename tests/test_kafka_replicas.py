"""The admin clients of kafka-python and confluent_kafka on a log in several directories."""

from __future__ import annotations

import shutil

import pytest

import embedlog
from embedlog.kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition, errors
from embedlog.kafka import confluent as clients
from embedlog.kafka.admin import ConfigResource, NewTopic
from embedlog.kafka.cluster import LogCluster
from embedlog.kafka.confluent import admin as confluent

T0 = TopicPartition("flights", 0)


@pytest.fixture
def disks(tmp_path):
    """Three directories, with racks and a topic of three partitions."""
    paths = [str(tmp_path / f"disk{number}") for number in (1, 2, 3)]
    racks = dict(zip(paths, "abc", strict=True))
    with embedlog.open(paths, racks=racks, maintenance=False) as log:
        log.create_topic("flights", replicas=[(1, 2, 3), (2, 3, 1), (3, 1, 2)])
    return paths


@pytest.fixture
def admin(disks):
    client = KafkaAdminClient(bootstrap_servers=f"embedlog://{disks[0]}")
    yield client
    client.close()


@pytest.fixture
def confluent_admin(disks):
    with confluent.AdminClient({"bootstrap.servers": f"embedlog://{disks[1]}"}) as client:
        yield client


def test_each_directory_is_a_broker(admin, confluent_admin, disks):
    """With its rack; the controller is the directory that is read."""
    cluster = admin.describe_cluster()
    assert [broker["broker_id"] for broker in cluster["brokers"]] == [1, 2, 3]
    assert [broker["rack"] for broker in cluster["brokers"]] == ["a", "b", "c"]
    assert cluster["controller_id"] == 1
    described = confluent_admin.describe_cluster().result()
    assert [(node.id, node.rack) for node in described.nodes] == [(1, "a"), (2, "b"), (3, "c")]
    assert described.controller.id == 1
    # Whichever directory a program names.
    assert described.cluster_id == cluster["cluster_id"]
    assert sorted(confluent_admin.list_topics().brokers) == [1, 2, 3]
    resource = ConfigResource("BROKER", "2")
    settings = admin.describe_configs([resource], config_filter="all")["broker"]["2"]
    assert settings["log.dirs"]["value"] == disks[1]
    assert settings["broker.rack"]["value"] == "b"
    with pytest.raises(errors.InvalidRequestError):
        admin.describe_configs([ConfigResource("BROKER", "4")])


def test_partitions_have_leaders_replicas_and_isrs(admin, confluent_admin):
    """In the metadata of both clients, and of kafka-python's producers."""
    partitions = admin.describe_topics(["flights"])[0]["partitions"]
    assert [part["leader_id"] for part in partitions] == [1, 2, 3]
    assert [part["replica_nodes"] for part in partitions] == [[1, 2, 3], [2, 3, 1], [3, 1, 2]]
    assert [part["isr_nodes"] for part in partitions] == [[1, 2, 3], [2, 3, 1], [3, 1, 2]]
    names = clients.TopicCollection(["flights"])
    (future,) = confluent_admin.describe_topics(names).values()
    described = future.result().partitions
    assert [part.leader.id for part in described] == [1, 2, 3]
    assert [[node.id for node in part.isr] for part in described][1] == [2, 3, 1]
    metadata = confluent_admin.list_topics("flights").topics["flights"].partitions
    assert [metadata[number].replicas for number in range(3)][2] == [3, 1, 2]
    cluster = LogCluster(admin._log)
    assert {broker.node_id for broker in cluster.brokers()} == {1, 2, 3}
    assert cluster.leader_for_partition(TopicPartition("flights", 1)) == 2
    assert cluster.leader_for_partition(TopicPartition("flights", 3)) is None


def test_topics_are_created_with_a_factor_or_with_assignments(admin, confluent_admin):
    """And with too many copies, or on a broker that does not exist, not at all."""
    admin.create_topics([NewTopic("two", 3, 2)])
    assert [len(p["replica_nodes"]) for p in admin.describe_topics(["two"])[0]["partitions"]] == [
        *(2, 2, 2)
    ]
    placed = NewTopic("placed", replica_assignments={0: [3, 1], 1: [2]})
    result = admin.create_topics([placed])["topics"][0]
    assert (result["num_partitions"], result["replication_factor"]) == (2, 2)
    partitions = admin.describe_topics(["placed"])[0]["partitions"]
    assert [part["replica_nodes"] for part in partitions] == [[3, 1], [2]]
    with pytest.raises(errors.InvalidReplicationFactorError):
        admin.create_topics([NewTopic("four", 1, 4)])
    with pytest.raises(errors.InvalidReplicationFactorError):
        admin.create_topics([NewTopic("four", 1, 4)], validate_only=True)
    with pytest.raises(errors.InvalidReplicationAssignmentError):
        admin.create_topics([NewTopic("four", replica_assignments={0: [4]})])
    with pytest.raises(errors.InvalidReplicationAssignmentError):
        admin.create_topics([NewTopic("four", replica_assignments={1: [1]})])
    assert "four" not in admin.list_topics()

    topics = [confluent.NewTopic("one", 2, 1), confluent.NewTopic("four", 2, 4)]
    futures = confluent_admin.create_topics(topics)
    futures["one"].result()
    with pytest.raises(confluent.KafkaException) as refused:
        futures["four"].result()
    assert refused.value.args[0].name() == "INVALID_REPLICATION_FACTOR"


def test_copies_move_and_moves_are_listed_and_cancelled(admin, disks):
    """As kafka-reassign-partitions does it: the request only begins the move."""
    lonely = NewTopic("lonely", replica_assignments={0: [1]})
    admin.create_topics([lonely])
    partition = TopicPartition("lonely", 0)
    assert admin.list_partition_reassignments() == {}
    assert admin.alter_partition_reassignments({partition: [2, 3]}) == {partition: None}
    moving = {"replicas": [2, 3, 1], "adding_replicas": [2, 3], "removing_replicas": [1]}
    assert admin.list_partition_reassignments() == {partition: moving}
    assert admin.list_partition_reassignments([T0]) == {}
    assert admin.alter_partition_reassignments({partition: None}) == {partition: None}
    refused = admin.alter_partition_reassignments(
        {partition: None, T0: [1, 9], TopicPartition("nothing", 0): [1]}
    )
    assert list(refused.values()) == [
        errors.NoReassignmentInProgressError,
        errors.InvalidReplicationAssignmentError,
        errors.UnknownTopicOrPartitionError,
    ]
    admin.alter_partition_reassignments({partition: [3]})
    with embedlog.open(disks[0], maintenance=False) as log:
        log.housekeeping.run()
    assert admin.list_partition_reassignments() == {}
    assert admin.describe_topics(["lonely"])[0]["partitions"][0]["replica_nodes"] == [3]


def test_leaders_are_elected(admin, confluent_admin):
    """The preferred ones; where that changes nothing, the answer says so."""
    admin.alter_partition_reassignments({T0: [2, 3, 1]})
    needed = admin.elect_leaders(0, {"flights": [0, 1]}, raise_errors=False)
    assert needed.replica_election_results == [
        ("flights", [(0, 0, ""), (1, errors.ElectionNotNeededError.errno, "")])
    ]
    assert admin.describe_topics(["flights"])[0]["partitions"][0]["leader_id"] == 2
    admin.elect_leaders(1, {"flights": [0]})  # Not needed, which is not raised.
    kind = clients.ElectionType.PREFERRED
    partition = clients.TopicPartition("flights", 0)
    results = confluent_admin.elect_leaders(kind, [partition]).result()
    assert results[partition].args[0].name() == "ELECTION_NOT_NEEDED"
    assert len(confluent_admin.elect_leaders(kind).result()) >= 3


def test_a_broker_that_is_lost_is_listed_no_more(admin, disks):
    """Its partitions have other leaders; with too few copies for acks=all, a send is refused."""
    with embedlog.open(disks[0], maintenance=False) as log:
        log.alter_topic("flights", {"min.insync.replicas": 3})
        with log.producer() as producer:
            producer.send("flights", value=b"1", partition=0)
    shutil.rmtree(disks[2])
    with embedlog.open(disks[0], maintenance=False):
        assert [each["broker_id"] for each in admin.describe_cluster()["brokers"]] == [1, 2]
        (topic,) = admin.describe_topics(["flights"])
        assert [part["leader_id"] for part in topic["partitions"]] == [1, 2, 1]
        assert [part["offline_replicas"] for part in topic["partitions"]] == [[3], [3], [3]]
        servers = f"embedlog://{disks[0]}"
        with KafkaProducer(bootstrap_servers=servers, acks="all", retries=0) as producer:
            future = producer.send("flights", b"2", partition=0)
            with pytest.raises(errors.NotEnoughReplicasError):
                future.get(10)
        with KafkaProducer(bootstrap_servers=servers, acks=1) as producer:
            assert producer.send("flights", b"3", partition=0).get(10).offset == 1
        consumer = KafkaConsumer(
            "flights",
            bootstrap_servers=servers,
            auto_offset_reset="earliest",
            consumer_timeout_ms=500,
        )
        with consumer:
            assert [message.value for message in consumer] == [b"1", b"3"]


def test_sizes_are_listed_by_directory(admin, disks):
    """Only of the copies that a directory has."""
    admin.create_topics([NewTopic("lonely", replica_assignments={0: [2]})])
    described = sorted(admin.describe_log_dirs(["lonely"]), key=lambda each: each["broker"])
    assert [each["broker"] for each in described] == [1, 2, 3]
    assert [each["log_dirs"][0]["log_dir"] for each in described] == disks
    assert [len(each["log_dirs"][0]["topics"]) for each in described] == [0, 1, 0]
    assert admin.describe_log_dirs(["lonely"], brokers=[2])[0]["broker"] == 2
