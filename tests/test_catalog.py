"""The catalogue: names, settings, and the manifest of segment files."""

from itertools import combinations

import pytest
from support.interleaving import Pair

from embedlog import catalog, keyspace, kv
from embedlog.catalog import Catalog, SegmentInfo
from embedlog.config import TopicConfig
from embedlog.errors import InvalidPartitionsError, UnknownTopicOrPartitionError
from embedlog.files import Files

NOW = 1_700_000_000_000


@pytest.fixture
def state(tmp_path):
    files = Files(tmp_path)
    files.make_directory("locks")
    kv.create(files, "state", durable=True, rows={})
    state = kv.LmdbStore(files, "state", durable=True, timeout=5)
    yield state
    state.close()


@pytest.fixture
def topics(state):
    return Catalog(state)


def make(topics, name="t", partitions=1, **config):
    return topics.create_topic(name, partitions, TopicConfig.parse(config), NOW)


@pytest.mark.parametrize("partitions", [0, -1, 1.5, "2", None, True, 20_001, 2**31])
def test_a_number_of_partitions_is_a_positive_int_and_bounded(topics, partitions):
    """Other values are refused before anything is written; more partitions would take minutes."""
    with pytest.raises(InvalidPartitionsError):
        make(topics, partitions=partitions)
    assert topics.topics() == {}
    created = make(topics)
    with pytest.raises(InvalidPartitionsError):
        topics.grow_topic("t", partitions, NOW)
    assert topics.topics() == {"t": created}


@pytest.mark.parametrize("created_again", [False, True], ids=["deleted", "created again"])
def test_a_topic_that_another_process_deleted_first_is_not_deleted_twice(topics, created_again):
    """Nor is the new topic of the same name."""
    old = make(topics)
    topics.delete_topic(old)
    new = make(topics) if created_again else None
    with pytest.raises(UnknownTopicOrPartitionError, match="just deleted"):
        topics.delete_topic(old)

    assert topics.topics() == ({"t": new} if created_again else {})


# Topics


def test_a_deletion_is_noted_until_all_of_the_topic_is_gone(topics, state):
    """Partitions that another process added in the meantime are deleted too."""
    old = make(topics)
    topics.grow_topic("t", 5, 0)
    last = topics.delete_topic(old)

    assert last.partitions == 5
    (noted,) = state.read(catalog.deleted_topics)
    assert (noted.name, noted.id, noted.partitions) == ("t", old.id, 5)
    assert noted.directory == old.directory
    state.write(lambda txn: keyspace.DELETED_TOPICS.delete(txn, noted.id))
    assert state.read(catalog.deleted_topics) == []


# Numbers


def test_numbers_are_never_given_out_twice(state):
    """Segment ids, topic ids and producer ids are unique for the life of the root."""
    numbers = [state.write(lambda txn: catalog.next_number(txn, "segment")) for _ in range(3)]
    state.write(lambda txn: catalog.raise_number(txn, "segment", 10))
    numbers.append(state.write(lambda txn: catalog.next_number(txn, "segment")))
    state.write(lambda txn: catalog.raise_number(txn, "segment", 4))
    numbers.append(state.write(lambda txn: catalog.next_number(txn, "segment")))

    assert numbers[:4] == [1, 2, 3, 11]
    assert numbers[4] == 12


def test_a_producer_with_a_name_keeps_its_id_and_its_epoch_grows(topics):
    """The epoch fences the older producer of that name (G17)."""
    identities = [topics.producer_identity("importer") for _ in range(3)]

    assert identities == [(identities[0][0], epoch) for epoch in (0, 1, 2)]
    assert topics.producer_identity("other")[0] != identities[0][0]


def test_a_producer_whose_epochs_are_used_up_gets_a_new_id(topics, state):
    """An epoch is 16 bits (KIP-360)."""
    number, _ = topics.producer_identity("p")
    state.write(lambda txn: keyspace.NAMED_PRODUCERS.put(txn, "p", value=(number, 0x7FFE)))

    new, epoch = topics.producer_identity("p")

    assert new != number
    assert epoch == 0


# The manifest

SEGMENTS = [
    SegmentInfo(0, 1, NOW, 10, 500, 492, NOW + 5),
    SegmentInfo(10, 2, NOW, 20, 600, 592, -3, True),
    SegmentInfo(20, 7, NOW, 30, 600, 592, None),
    SegmentInfo(30, 3, NOW),
]
KEY = keyspace.PARTITION_KEY.pack(1, 0)
OTHERS = [keyspace.PARTITION_KEY.pack(*numbers) for numbers in ((0, 9), (1, 1), (2, 0))]


def put_segments(state):
    """Write the manifest of a partition beside others, of which the last one has no segment."""

    def step(txn):
        for segment in SEGMENTS:
            catalog.put_segment(txn, KEY, segment)
        for key in OTHERS[:2]:
            catalog.put_segment(txn, key, SegmentInfo(15, 99, NOW))

    state.write(step)


def test_one_segment_is_found_without_the_others(state):
    """By a seek, which agrees with the whole manifest at every edge and beside other partitions."""
    put_segments(state)

    def read(lookup, *arguments):
        return state.read(lambda txn: lookup(txn, *arguments))

    for offset, number in ((0, 0), (9, 0), (10, 1), (19, 1), (29, 2), (30, 3), ((1 << 63) - 1, 3)):
        assert read(catalog.segment_at, KEY, offset) == SEGMENTS[number]
    assert read(catalog.last_segment, KEY) == SEGMENTS[-1]
    for number, next_segment in enumerate([*SEGMENTS[1:], None]):
        assert read(catalog.segment_after, KEY, SEGMENTS[number].base_offset) == next_segment
    # An offset before the first segment, which retention moved, is in the first one.
    assert read(catalog.segment_at, OTHERS[1], 3).id == 99
    assert read(catalog.last_segment, OTHERS[2]) is None
    assert read(catalog.segment_at, OTHERS[2], 0) is None
    assert read(catalog.segment_after, OTHERS[2], 0) is None


def test_the_segments_of_a_range_are_those_that_overlap_it(state):
    """One scan agrees with the whole manifest at every edge and beside other partitions."""
    put_segments(state)

    def between(key, first, stop):
        segments = state.read(lambda txn: catalog.segments_between(txn, key, first, stop))
        return [segment.base_offset for segment in segments]

    bases = [segment.base_offset for segment in SEGMENTS]
    ends = [*bases[1:], 1 << 63]
    edges = sorted({offset + step for offset in (*bases, 35) for step in (-1, 0, 1)} - {-1})
    for first, stop in combinations([*edges, (1 << 63) - 1], 2):
        overlapping = [
            base for base, end in zip(bases, ends, strict=True) if base < stop and first < end
        ]
        assert between(KEY, first, stop) == overlapping
    # An offset before the first segment, which retention moved, is in the first one.
    assert between(OTHERS[1], 3, 20) == [15]
    assert between(OTHERS[1], 3, 15) == []
    assert between(OTHERS[2], 0, 1 << 63) == []


def test_dropping_a_segment_drops_its_index(state):
    """No index without a segment (A28)."""
    segment = SEGMENTS[0]

    def step(txn):
        catalog.put_segment(txn, KEY, segment)
        keyspace.SEGMENT_INDEXES.put(txn, KEY, *segment.key, value=b"entries")

    state.write(step)
    assert (
        state.read(lambda txn: keyspace.SEGMENT_INDEXES.get(txn, KEY, *segment.key)) == b"entries"
    )
    state.write(lambda txn: catalog.drop_segment(txn, KEY, segment))

    assert state.read(lambda txn: catalog.segments(txn, KEY)) == []
    assert state.read(lambda txn: keyspace.SEGMENT_INDEXES.get(txn, KEY, *segment.key)) is None


def test_settings_that_change_while_a_topic_is_looked_up_are_not_forgotten(root):
    """A thread that is stopped anywhere in a lookup caches no older settings over newer ones."""
    root.create_topic("t", 1, TopicConfig())
    topics, other_catalog = root.context.catalog, Catalog(root.context.state)
    line, stopped = 0, True
    while stopped:
        segment_ms = 1000 + line

        def alter_and_look(segment_ms=segment_ms):
            other_catalog.alter_topic("t", {"segment.ms": segment_ms})
            topics.topic("t")

        # A change, so that the lookup reads the row.
        other_catalog.alter_topic("t", {"retention.ms": 1000 + line})
        pair = Pair(lambda: topics.topic("t"), alter_and_look, "embedlog.catalog", line)
        pair.run()
        assert pair.errors == [None, None]
        assert topics.topic("t").config.segment_ms == segment_ms, pair.stopped_at
        stopped, line = pair.stopped_at != "after the end", line + 1
    assert line > 5
