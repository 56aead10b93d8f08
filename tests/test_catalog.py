"""The catalogue: names, settings, and the manifest of segment files."""

from itertools import combinations

import pytest
from support.children import in_child
from support.interleaving import Pair

from embedlog import catalog, keyspace, kv
from embedlog.catalog import Catalog, PartitionInfo, SegmentInfo
from embedlog.config import TopicConfig
from embedlog.errors import (
    CorruptionError,
    InvalidPartitionsError,
    InvalidTopicError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
)
from embedlog.files import Files
from embedlog.partition.producer_state import SNAPSHOTS, remembered

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


# Topics


def test_a_new_topic_is_found_with_its_settings(topics):
    """What was created is read back, also by another catalogue."""
    created = make(topics, "flights", 3, segment_bytes=1000)

    assert topics.topic("flights") == created
    assert topics.topics() == {"flights": created}
    assert (created.partitions, created.created_ms, created.config.segment_bytes) == (3, NOW, 1000)


def test_a_new_topic_has_one_empty_segment_in_each_partition(topics, state):
    """The manifest names the first segment before its file exists."""
    created = make(topics, partitions=2)

    segments = [state.read(lambda txn, n=n: catalog.segments(txn, created.key(n))) for n in (0, 1)]
    assert [[segment.base_offset for segment in manifest] for manifest in segments] == [[0], [0]]
    assert segments[0][0].id != segments[1][0].id
    assert not segments[0][0].sealed
    assert state.read(lambda txn: catalog.PARTITIONS.get(txn, created.key(1))) == PartitionInfo()


def test_a_topic_cannot_be_created_twice(topics):
    """The second call fails, and the topic stays as it is."""
    first = make(topics)
    with pytest.raises(TopicAlreadyExistsError, match=r"\[t\]"):
        make(topics, partitions=5)

    assert topics.topic("t") == first


def test_an_unknown_topic_names_the_nearest_one(topics):
    """The error suggests the closest name."""
    make(topics, "flights")

    with pytest.raises(UnknownTopicOrPartitionError, match="Did you mean 'flights'"):
        topics.topic("fligths")
    with pytest.raises(UnknownTopicOrPartitionError, match="create_topic"):
        topics.topic("zzz")


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "/etc", "a/b", "a\n", "-a", ".a", "ä", "a b", "a" * 201, "a.tmp",
     "a.deleted", "a\0", None, 3, b"a"],
)  # fmt: skip
def test_a_name_that_kafka_or_a_path_would_not_take_is_refused(topics, name):
    """No name of a topic can escape from the root (P22)."""
    with pytest.raises(InvalidTopicError):
        make(topics, name)
    assert topics.topics() == {}


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "_x", "9", "a" * 200, "__consumer_offsets"])
def test_a_name_that_kafka_takes_is_taken(topics, name):
    """Letters, digits, dots, underscores and dashes, up to 200."""
    assert make(topics, name).name == name


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


def test_a_topic_grows_but_does_not_shrink(topics, state):
    """New partitions get their first segment; the old ones keep theirs (G5)."""
    created = make(topics, partitions=2)
    grown = topics.grow_topic("t", 4, NOW)

    assert (grown.id, grown.partitions) == (created.id, 4)
    assert len(state.read(lambda txn: catalog.segments(txn, created.key(3)))) == 1
    with pytest.raises(InvalidPartitionsError, match="4 partitions cannot shrink to 3"):
        topics.grow_topic("t", 3, NOW)
    assert topics.topic("t").partitions == 4


def test_a_setting_is_changed_and_reset(topics):
    """None returns a setting to its default; the others stay."""
    make(topics, segment_bytes=1000)
    topics.alter_topic("t", {"retention.ms": 5})
    changed = topics.alter_topic("t", {"segment.bytes": None})

    assert changed.config.overrides() == {"retention.ms": 5}
    assert topics.topic("t") == changed


def test_a_topic_that_is_created_again_has_another_id_and_directory(topics, state):
    """Files and commits of the old topic cannot be mistaken for those of the new one (A38)."""
    old = make(topics)
    topics.delete_topic(old)
    with pytest.raises(UnknownTopicOrPartitionError):
        topics.topic("t")
    new = make(topics)

    assert new.id > old.id
    assert new.directory != old.directory
    assert state.read(lambda txn: catalog.segments(txn, old.key(0))) == []
    assert state.read(lambda txn: catalog.PARTITIONS.get(txn, old.key(0))) is None


@pytest.mark.parametrize("created_again", [False, True], ids=["deleted", "created again"])
def test_a_topic_that_another_process_deleted_first_is_not_deleted_twice(topics, created_again):
    """Nor is the new topic of the same name."""
    old = make(topics)
    topics.delete_topic(old)
    new = make(topics) if created_again else None
    with pytest.raises(UnknownTopicOrPartitionError, match="just deleted"):
        topics.delete_topic(old)

    assert topics.topics() == ({"t": new} if created_again else {})


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


def test_a_change_of_another_process_is_seen_at_once(topics):
    """A cached catalogue is valid until the next commit of any process."""
    make(topics)
    assert topics.topic("t").config.retention_ms == TopicConfig().retention_ms
    in_child(lambda: topics.alter_topic("t", {"retention.ms": 5}) and None)

    assert topics.topic("t").config.retention_ms == 5


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


def test_a_producer_without_a_name_is_new_each_time(topics):
    """An anonymous producer has its own id and epoch 0."""
    first_id, first_epoch = topics.producer_identity(None)
    second_id, second_epoch = topics.producer_identity(None)

    assert first_id != second_id
    assert (first_epoch, second_epoch) == (0, 0)


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
PRODUCERS = {7: remembered(1, NOW)}


def test_segments_come_back_in_offset_order(state):
    """Every field is restored, None stays None, and the order does not depend on ids."""

    def step(txn):
        for segment in reversed(SEGMENTS):
            catalog.put_segment(txn, KEY, segment)

    state.write(step)

    assert state.read(lambda txn: catalog.segments(txn, KEY)) == SEGMENTS
    assert [segment.sealed for segment in SEGMENTS] == [True, True, True, False]
    assert SEGMENTS[1].file_name == "00000000000000000010-2.arrows"


def test_a_partition_does_not_see_its_neighbours_segments(state):
    """Keys are fixed-width and big-endian: partitions 1 and 256, topics 1 and 256."""
    keys = [
        keyspace.PARTITION_KEY.pack(*numbers) for numbers in ((1, 1), (1, 256), (256, 1), (257, 1))
    ]

    def step(txn):
        for number, key in enumerate(keys):
            catalog.put_segment(txn, key, SegmentInfo(number, number, NOW))

    state.write(step)

    for number, key in enumerate(keys):
        segments = state.read(lambda txn, key=key: catalog.segments(txn, key))
        assert [segment.id for segment in segments] == [number]


def test_one_segment_is_found_without_the_others(state):
    """By a seek, which agrees with the whole manifest at every edge and beside other partitions."""
    others = [keyspace.PARTITION_KEY.pack(*numbers) for numbers in ((0, 9), (1, 1), (2, 0))]

    def step(txn):
        for segment in SEGMENTS:
            catalog.put_segment(txn, KEY, segment)
        for key in others[:2]:
            catalog.put_segment(txn, key, SegmentInfo(15, 99, NOW))

    state.write(step)

    def read(lookup, *arguments):
        return state.read(lambda txn: lookup(txn, *arguments))

    for offset, number in ((0, 0), (9, 0), (10, 1), (19, 1), (29, 2), (30, 3), ((1 << 63) - 1, 3)):
        assert read(catalog.segment_at, KEY, offset) == SEGMENTS[number]
    assert read(catalog.last_segment, KEY) == SEGMENTS[-1]
    for number, next_segment in enumerate([*SEGMENTS[1:], None]):
        assert read(catalog.segment_after, KEY, SEGMENTS[number].base_offset) == next_segment
    # An offset before the first segment, which retention moved, is in the first one.
    assert read(catalog.segment_at, others[1], 3).id == 99
    assert read(catalog.last_segment, others[2]) is None
    assert read(catalog.segment_at, others[2], 0) is None
    assert read(catalog.segment_after, others[2], 0) is None


def test_the_segments_of_a_range_are_those_that_overlap_it(state):
    """One scan agrees with the whole manifest at every edge and beside other partitions."""
    others = [keyspace.PARTITION_KEY.pack(*numbers) for numbers in ((0, 9), (1, 1), (2, 0))]

    def step(txn):
        for segment in SEGMENTS:
            catalog.put_segment(txn, KEY, segment)
        for key in others[:2]:
            catalog.put_segment(txn, key, SegmentInfo(15, 99, NOW))

    state.write(step)

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
    assert between(others[1], 3, 20) == [15]
    assert between(others[1], 3, 15) == []
    assert between(others[2], 0, 1 << 63) == []


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


def test_a_partitions_row_its_producers_and_epochs_come_back(state):
    """The other durable rows of a partition."""
    info = PartitionInfo(5, 1 << 40, 3)

    def step(txn):
        catalog.PARTITIONS.put(txn, KEY, value=info)
        SNAPSHOTS.put(txn, KEY, value=PRODUCERS)
        keyspace.LEADER_EPOCHS.put(txn, KEY, value=[(0, 0), (2, 10)])

    assert state.read(lambda txn: catalog.epochs(txn, KEY)) == [(0, 0)]
    state.write(step)

    assert state.read(lambda txn: catalog.PARTITIONS.get(txn, KEY)) == info
    assert state.read(lambda txn: SNAPSHOTS.get(txn, KEY)) == PRODUCERS
    assert state.read(lambda txn: catalog.epochs(txn, KEY)) == [(0, 0), (2, 10)]


@pytest.mark.parametrize(
    "table",
    [
        *(keyspace.TOPICS, keyspace.SEGMENTS, keyspace.PARTITIONS),
        *(keyspace.PRODUCER_SNAPSHOTS, keyspace.LEADER_EPOCHS, keyspace.SEGMENT_INDEXES),
    ],
    ids=lambda table: table.name,
)
def test_a_row_with_a_changed_byte_is_corruption_not_nonsense(topics, state, table):
    """Every durable row has its own checksum, because LMDB has none."""
    info = make(topics)
    key = info.key(0)

    def fill(txn):
        SNAPSHOTS.put(txn, key, value=PRODUCERS)
        keyspace.LEADER_EPOCHS.put(txn, key, value=[(0, 0)])
        segment = catalog.segments(txn, key)[0]
        keyspace.SEGMENT_INDEXES.put(txn, key, *segment.key, value=b"entries")

    def damage(txn):
        for row_key, row in list(kv.rows(txn, table.prefix())):
            txn.put(row_key, row[:-1] + bytes([row[-1] ^ 1]))

    def read(txn):
        segment = catalog.segments(txn, key)[0]
        catalog.PARTITIONS.get(txn, key)
        SNAPSHOTS.get(txn, key)
        catalog.epochs(txn, key)
        keyspace.SEGMENT_INDEXES.get(txn, key, *segment.key)

    state.write(fill)
    state.read(read)
    state.write(damage)

    with pytest.raises(CorruptionError, match="damaged"):
        (topics.topics() if table is keyspace.TOPICS else state.read(read))


def test_a_manifest_key_that_lost_a_byte_is_corruption_not_nonsense(topics, state):
    """After a flipped bit in LMDB's length of a key: the checksum covers the key too."""
    key = make(topics).key(0)

    def shorten(txn):
        [(row_key, row)] = kv.rows(txn, keyspace.SEGMENTS.prefix(key))
        txn.delete(row_key)
        txn.put(row_key[:-1], row)

    state.write(shorten)

    for read in (catalog.segments, catalog.last_segment):
        with pytest.raises(CorruptionError, match="damaged"):
            state.read(lambda txn, read=read: read(txn, key))


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
