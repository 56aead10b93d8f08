"""The key index: look-ups of keys by one sorted file per segment (D28)."""

import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.interleaving import Pair, watched_locks
from support.mutants import Change
from support.patience import patient
from support.replicas import Directories, assignment, bring_back
from support.roots import healthy_log
from support.tiers import choose, sample

import embedlog
from embedlog.compaction.last_records import last_record
from embedlog.errors import StorageError
from embedlog.partition import key_index, replace, unnamed_files
from embedlog.partition.key_index import SegmentKeys, load
from embedlog.replication.root import try_bring_back

COMPACTED = {"cleanup.policy": "compact", "file.delete.delay.ms": 0}
INDEXED = {"key.index.enable": "true", "file.delete.delay.ms": 0}

log = healthy_log


def send(log, *pairs, topic="t"):
    with log.producer() as producer:
        for key, value in pairs:
            producer.send(topic, value, key=key).result(patient(5))


def sealed(log, topic="t"):
    """Seal what was sent, and let housekeeping index it; return the files of the index."""
    log.partition(topic, 0).roll()
    log.housekeeping.run()
    return index_files(log, topic)


def index_files(log, topic="t"):
    return sorted(Path(log.path, log.partition(topic, 0).directory, "0").glob("*.keys*"))


def by_scan(topic, key):
    """Look a key up without the index."""
    table = topic.to_arrow(["key", "value"], latest=True, raw=True)
    return dict(zip(*(table[name].to_pylist() for name in ("key", "value")), strict=True)).get(key)


@pytest.mark.parametrize("seed", range(choose(quick=2, all=60, nightly=1000)))
@pytest.mark.parametrize("collide", [False, True])
def test_each_key_has_the_value_that_a_scan_finds(log, monkeypatch, seed, collide):
    """D28: repeated keys, empty ones, none, tombstones, rolls and compactions; also if the hashes
    of all keys are equal."""
    if collide:
        monkeypatch.setattr(key_index, "murmur2", lambda key: -7)
        monkeypatch.setattr(
            key_index, "murmur2_of_keys", lambda keys: np.full(len(keys), -7, np.int32)
        )
    rng = random.Random(seed)
    monkeypatch.setattr(key_index, "_RUN", rng.choice([3, 4 << 20]))
    compacts = rng.random() < 0.5
    topic = log.create_topic("t", 1, COMPACTED if compacts else INDEXED)
    keys = [b"", *(b"k%d" % number for number in range(12))]
    expected = {}
    for step in range(25):
        action = rng.random()
        if action < 0.6:
            pairs = [
                (rng.choice(keys), rng.choice([None, b"", b"%d" % step]))
                for _ in range(rng.randrange(1, 6))
            ]
            send(log, *pairs)
            expected.update(pairs)
            if not compacts:
                send(log, (None, b"without a key"))
        elif action < 0.8:
            sealed(log)
        elif compacts:
            log.housekeeping.compact("t", force=True)
        key = rng.choice([*keys, b"never sent"])
        assert topic.get(key) == expected.get(key)
    for key in keys:
        assert topic.get(key) == expected.get(key) == by_scan(topic, key)
    monkeypatch.undo()
    log.housekeeping.rebuild_index()


def test_it_is_on_where_a_topic_compacts_and_a_setting_changes_that(log):
    """D28: `key.index.enable`."""
    for name, config, on in [
        ("compacted", COMPACTED, True),
        ("deleted", {}, False),
        ("off", {**COMPACTED, "key.index.enable": "false"}, False),
        ("on", INDEXED, True),
    ]:
        log.create_topic(name, 1, config)
        send(log, (b"a", b"1"), topic=name)
        assert bool(sealed(log, name)) is on
        assert log.topic(name).get(b"a") == b"1"
    log.alter_topic("on", {"key.index.enable": "false"})
    assert log.topic("on").get(b"a") == b"1"


def test_a_look_up_reads_no_other_record(log, monkeypatch):
    """D28: with a file, the keys of the segment are not read."""
    topic = log.create_topic("t", 1, COMPACTED)
    send(log, *[(b"%d" % number, b"v") for number in range(50)])
    sealed(log)
    with embedlog.open(log.path) as other:
        monkeypatch.setattr(SegmentKeys, "add", None)
        topic = other.topic("t")
        assert (topic.get(b"7"), topic.get(b"none")) == (b"v", None)


def test_the_active_segment_is_looked_up_too(log):
    """D28: each look-up sees what was appended before it, and what a truncation removed."""
    topic = log.create_topic("t", 1, COMPACTED)
    for number in range(40):
        send(log, (b"k%d" % (number % 7), b"%d" % number))
        assert topic.get(b"k%d" % (number % 7)) == b"%d" % number
    log.partition("t", 0).truncate_to(33)
    assert topic.get(b"k4") == b"32"
    assert topic.get(b"k5") == b"26"
    send(log, *[(b"new%d" % number, b"") for number in range(7)])
    assert topic.get(b"new6") == b""
    assert topic.get(b"k5") == b"26"


def truncate(log, topic):
    log.partition(topic, 0).truncate_to(5)


def compact(log, topic):
    log.housekeeping.compact(topic, force=True)


def roll(log, topic):
    log.partition(topic, 0).roll()


def build(log, topic):
    roll(log, topic)
    log.housekeeping.run()


def delete(log, topic):
    log.partition(topic, 0).flush()
    log.delete_records({embedlog.TopicPartition(topic, 0): 3})


def look_up(log, topic):
    log.topic(topic).get(b"b")


SECONDS = [truncate, compact, roll, build, delete, look_up]
LINES = range(0, 340, choose(quick=1, all=2, nightly=1))


@pytest.mark.parametrize("second", SECONDS)
@pytest.mark.parametrize("line", sample(LINES, 4))
def test_a_look_up_goes_on_beside_any_other_operation(tmp_path, line, second):
    """D28: stopped at any line, it finds the value of before or of after; the next one finds the
    new one."""
    with watched_locks(), embedlog.open(tmp_path, maintenance=False) as log:
        topic = log.create_topic("t", 1, {**COMPACTED, "cleanup.policy": "compact,delete"})
        send(log, (b"a", b"0"), (b"d", b"1"))
        sealed(log)
        send(log, (b"a", b"2"), (b"b", b"3"))
        assert topic.get(b"a") == b"2"
        send(log, (b"c", b"4"), (b"a", b"5"))
        found = []

        def first():
            found.extend(topic.get_many([b"a", b"none"]))

        def change():
            second(log, "t")
            send(log, (b"a", b"new"), (b"c", b""))

        pair = Pair(first, change, ("embedlog.partition.key_index", "embedlog.api.latest"), line)
        pair.run()
        assert pair.errors == [None, None], pair.stopped_at
        assert found[0] in {truncate: (b"2", b"5", b"new")}.get(second, (b"5", b"new"))
        assert found[1] is None
        assert topic.get(b"a") == b"new", pair.stopped_at
        assert topic.get(b"b") == b"3"


@pytest.mark.parametrize("line", sample(range(60), choose(quick=6, test=12)))
def test_an_index_that_is_written_while_its_segment_goes_is_removed(tmp_path, line):
    """D28: retention does not wait for the lock of rewrites."""
    with watched_locks(), embedlog.open(tmp_path, maintenance=False) as log:
        log.create_topic("t", 1, INDEXED)
        send(log, (b"a", b"0"), (b"b", b"1"))
        partition = log.partition("t", 0)
        partition.roll()
        partition.flush()
        send(log, (b"a", b"2"), (b"b", b"3"))

        def build_index():
            with replace.rewrite_lock(partition), suppress(StorageError):
                partition.key_index.build_missing(replace.no_fence)

        Pair(build_index, lambda: delete(log, "t"), "embedlog.partition.key_index", line).run()
        assert index_files(log) == []
        assert log.housekeeping.verify() == []


def test_keys_of_several_columns_are_looked_up(log):
    """D28: typed topics, by their key columns."""
    schema = pa.schema(
        [
            pa.field("site", pa.string(), nullable=False),
            pa.field("number", pa.int32(), nullable=False),
            pa.field("x", pa.float64()),
        ]
    )
    topic = log.create_topic("t", 1, COMPACTED, schema=schema, key=["site", "number"])
    with log.producer() as producer:
        for number in range(30):
            row = {"site": "ab"[number % 2], "number": number % 5, "x": float(number)}
            producer.send("t", row).result(patient(5))
    for _ in range(2):
        assert topic.get(("a", 3))["x"] == 28.0
        assert topic.get(("b", 4))["x"] == 29.0
        assert topic.get(("c", 3)) is None
        assert sealed(log)


# Files


def facts(log):
    partition = log.partition("t", 0)
    partition.refresh()
    return partition, partition.segments.peekitem(0)[1]


def test_a_file_with_any_damage_is_refused_and_answers_stay(log):
    """D28: a checksum covers the whole file, and its name alone proves nothing."""
    topic = log.create_topic("t", 1, COMPACTED)
    send(log, *[(b"%d" % number, b"v%d" % number) for number in range(9)])
    (file,) = sealed(log)
    whole = file.read_bytes()
    partition, info = facts(log)
    assert load(partition, info) is not None
    damaged = [whole[:-8], whole + bytes(8), b"", whole[:20]]
    for position in range(0, len(whole), 3):
        changed = bytearray(whole)
        changed[position] ^= 0x10
        damaged.append(bytes(changed))
    for data in damaged:
        file.write_bytes(data)
        assert load(partition, info) is None
    with embedlog.open(log.path, mode="r") as other:
        assert [other.topic("t").get(b"%d" % number) for number in (0, 8, 9)] == [
            *(b"v0", b"v8", None)
        ]
    (finding,) = log.housekeeping.verify()
    assert "key index" in finding.what
    assert log.housekeeping.repair(dry_run=False)
    assert file.read_bytes() == whole
    assert log.housekeeping.verify() == []
    file.unlink()
    log.housekeeping.rebuild_index("t")
    assert file.read_bytes() == whole
    assert topic.get(b"3") == b"v3"


def lagging(log):
    """Compact two segments into one, and give it the index of the first of them; return it."""
    log.create_topic("t", 1, COMPACTED)
    send(log, (b"a", b"1"), (b"b", b"2"))
    (old,) = sealed(log)
    before = old.read_bytes()
    send(log, (b"a", b"3"), (b"c", b"4"))
    log.housekeeping.compact("t", force=True)
    (new,) = index_files(log)
    assert new != old
    new.write_bytes(before)


def looked_up(path):
    with embedlog.open(path, mode="r") as log:
        return [log.topic("t").get(key) for key in (b"a", b"b", b"c")]


def test_an_index_that_lags_behind_compaction_is_refused(log):
    """D28: it names the id and the size of its segment."""
    lagging(log)
    assert looked_up(log.path) == [b"3", b"2", b"4"]
    assert "key index" in str(log.housekeeping.verify())
    log.housekeeping.repair(dry_run=False)


def test_a_planted_index_that_lags_behind_compaction_is_found(log, monkeypatch):
    """The test above fails if a file is taken for that of any segment."""
    lagging(log)
    change = Change(
        "embedlog.partition.key_index:SegmentKeys.unpack",
        {"or facts[:3] != [info.id, info.base_offset, info.size]": ""},
    )
    module, owner, name, source = change.plan()
    namespace = {}
    exec(compile(source, "<mutant>", "exec"), vars(module), namespace)
    monkeypatch.setattr(owner, name, namespace[name])
    with pytest.raises((AssertionError, IndexError)):
        assert looked_up(log.path) == [b"3", b"2", b"4"]
    monkeypatch.undo()
    log.housekeeping.repair(dry_run=False)


def test_files_go_with_their_segments(log):
    """D28: compaction, retention, truncation, and the deletion of the topic."""
    topic = log.create_topic("t", 1, {**COMPACTED, "min.cleanable.dirty.ratio": 1})
    for value in (b"1", b"2", b"3"):
        send(log, (b"a", value), (value, value))
        sealed(log)
    assert len(index_files(log)) == 3
    log.housekeeping.compact("t", force=True)
    assert len(index_files(log)) == 1
    for _ in range(2):
        send(log, (b"b", b"4"))
        sealed(log)
    assert len(index_files(log)) == 3
    log.partition("t", 0).truncate_to(7)
    assert len(index_files(log)) == 2
    log.alter_topic("t", {"cleanup.policy": "compact,delete"})
    log.partition("t", 0).flush()
    log.delete_records({embedlog.TopicPartition("t", 0): 6})
    assert len(index_files(log)) == 1
    assert topic.get(b"b") == b"4"
    log.delete_topic("t")
    assert not list(Path(log.path).rglob("*.keys"))


def test_a_repair_that_replaces_a_segment_takes_its_index_along(log):
    """D28: also if the damage is in the segment."""
    topic = log.create_topic("t", 1, INDEXED)
    send(log, (b"a", b"1"), (b"b", b"2"))
    (old,) = sealed(log)
    segment = old.with_suffix(".arrows")
    data = bytearray(segment.read_bytes())
    data[data.rindex(b"b" + bytes(7))] ^= 1
    segment.write_bytes(data)
    log.housekeeping.repair(dry_run=False)
    assert (topic.get(b"a"), topic.get(b"b")) == (b"1", None)
    assert log.housekeeping.verify() == []
    assert not old.exists()


def test_a_kill_while_a_file_is_written_leaves_nothing_for_long(log):
    """D28: a half-written file has another name, and the next round removes it."""
    log.create_topic("t", 1, COMPACTED)
    send(log, (b"a", b"1"))
    (file,) = sealed(log)
    half = file.with_name(f"{file.name}.0.tmp")
    half.write_bytes(file.read_bytes()[:30])
    file.unlink()
    assert log.housekeeping.verify() == []
    with embedlog.open(log.path) as other:
        assert other.topic("t").get(b"a") == b"1"
        other.housekeeping.run()
    assert index_files(log) == [file]


def test_a_close_removes_the_index_of_an_uncommitted_segment(tmp_path):
    """D28: a killed compaction left both, and another process closes the log."""
    with embedlog.open(tmp_path, maintenance=False) as log:
        log.create_topic("t", 1, INDEXED)
        send(log, (b"a", b"1"))
        (file,) = sealed(log)
        partition, info = facts(log)
        new = unnamed_files.new_file(partition, info)
        for suffix in (".keys", ".arrows"):
            left = file.with_name(new.file_name).with_suffix(suffix)
            left.write_bytes(file.with_suffix(suffix).read_bytes())
    assert left.with_suffix(".keys").exists() is left.exists() is False


def test_an_index_without_its_segment_is_a_stray(log):
    """D28: a kill between two unlinks, or a power cut, leaves one."""
    log.create_topic("t", 1, COMPACTED)
    send(log, (b"a", b"1"))
    (file,) = sealed(log)
    stray = file.with_name(f"{99:020d}-99.keys")
    stray.write_bytes(file.read_bytes())
    (finding,) = log.housekeeping.verify()
    assert stray.name in finding.path
    log.housekeeping.repair(dry_run=False)
    assert index_files(log) == [file]


def test_a_log_in_several_directories_has_one_in_each(tmp_path):
    """D28: beside each copy that is in sync."""
    with Directories(tmp_path).open() as log:
        topic = log.create_topic("t", 1, COMPACTED)
        for _ in range(2):
            send(log, (b"a", b"1"), (b"b", b"2"), (b"a", b"3"))
            (name,) = {path.name for path in sealed(log)}
            assert len(list(tmp_path.rglob(name))) == 3
            assert [topic.get(key) for key in (b"a", b"b", b"c")] == [b"3", b"2", None]
        assert log.housekeeping.verify() == []


def test_a_copy_that_was_not_in_sync_loses_its_index(tmp_path):
    """D28: the next leader may have other records in a segment of the same id, base offset and
    size."""
    directories = Directories(tmp_path)
    with directories.open() as log:
        topic = log.create_topic("t", 1, INDEXED, replication_factor=2)
        send(log, (b"a", b"1"), (b"b", b"2"))
        leader, follower = assignment(log, "t").isr
        directories.lose(log, follower)
        send(log, (b"c", b"3"))
        (name,) = {path.name for path in sealed(log)}
        (stale,) = directories.path(leader).rglob(name)
        directories.put_back(follower)
        try_bring_back(log.root)
        directories.lose(log, leader)  # before the other one has caught up
        log.replicas.elect_leaders(election="unclean")
        expected = [b"1", b"2", None, b"4"]
        send(log, (b"d", b"4"))
        assert topic.get_many([b"a", b"b", b"c", b"d"]) == expected
        sealed(log)
        directories.put_back(leader)
        bring_back(log)
        assert not stale.exists()
        directories.lose(log, follower)
        assert assignment(log, "t").leader == leader
        assert topic.get_many([b"a", b"b", b"c", b"d"]) == expected
        sealed(log)
        assert topic.get_many([b"a", b"b", b"c", b"d"]) == expected


def test_a_range_of_offsets_limits_a_look_up(log):
    """D28: in a view, also where compaction has left gaps."""
    topic = log.create_topic("t", 1, {**INDEXED, "index.interval.bytes": 0})
    send(log, *[(b"a", b"%d" % number) for number in range(6)])
    for _ in range(2):
        partition = log.partition("t", 0)
        assert topic.in_ranges([(0, 0, 2), (0, 3, 5)]).get(b"a") == b"4"
        for stop in range(1, 6):
            assert last_record(partition, b"a", 0, stop).value == b"%d" % (stop - 1)
        assert topic[2:4].get(b"a") == b"3"
        assert topic[4:4].get(b"a") is None
        sealed(log)


# What topics do with it


@pytest.fixture(params=["indexed", "not indexed"])
def config(request):
    return INDEXED if request.param == "indexed" else {}


def test_all_records_of_a_key_are_found_in_order(log, config):
    """D28: `records_of`, with headers and tombstones, before and after a compaction."""
    topic = log.create_topic("t", 1, config)
    with log.producer() as producer:
        for number in range(30):
            value = None if number == 13 else b"%d" % number
            headers = [("n", b"%d" % number)] if number % 4 == 0 else None
            key = b"k%d" % (number % 3)
            producer.send("t", value, key=key, headers=headers, timestamp_ms=number).result()
            if number % 10 == 9:
                log.partition("t", 0).roll()
    assert topic[3:9].records_of(b"k1") == list(topic[4:5]) + list(topic[7:8])
    assert topic.records_of(b"k1", as_of=10) == list(topic[1:10])[::3]
    for _ in range(2):
        for key in (b"k0", b"k1", b"k2"):
            assert topic.records_of(key) == [record for record in topic if record.key == key]
        assert topic.records_of(b"k3") == []
        log.alter_topic("t", {"cleanup.policy": "compact"})
        log.housekeeping.compact("t", force=True)
    assert [record.value for record in topic.records_of(b"k1")] == [b"28"]


def test_records_of_a_key_in_two_partitions_are_merged_by_time(log, config):
    """D28: when the topic has grown, or the producer chose the partition."""
    topic = log.create_topic("t", 3, config)
    with log.producer() as producer:
        for number in range(9):
            producer.send("t", b"%d" % number, key=b"k", partition=number % 3, timestamp_ms=number)
    assert [record.value for record in topic.records_of(b"k")] == [
        b"%d" % number for number in range(9)
    ]


def test_many_keys_are_looked_up_at_once(log, config):
    """D28: `get_many` answers in the order of the keys."""
    topic = log.create_topic("t", 3, config)
    send(log, (b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (b"c", None))
    assert topic.get_many([b"b", b"x", b"a", b"c", b"b"]) == [b"2", None, b"3", None, b"2"]
    assert topic.get_many(iter([b"x", b"b"]), b"none") == [b"none", b"2"]
    assert topic.get_many([]) == []


def test_a_look_up_as_of_a_time(log, config):
    """D28: as if nothing had been written from that time on."""
    topic = log.create_topic("t", 1, config)
    with log.producer() as producer:
        for number, key in enumerate(b"ab ab ab".split()):
            for each in key:
                value = b"%d" % number
                producer.send("t", value, key=bytes([each]), timestamp_ms=1000 * number).result()
    assert [topic.get(b"a", as_of=time) for time in (0, 1, 1000, 1001, 9999)] == [
        *(None, b"0", b"0", b"1", b"2")
    ]
    assert topic.get_many([b"a", b"b"], as_of=2000) == [b"1", b"1"]
    here, other = embedlog.TopicPartition("t", 0), embedlog.TopicPartition("other", 0)
    ends = [topic.get(b"a", as_of={here: end, other: 0}) for end in (0, 1, 3, 9)]
    assert ends == [None, b"0", b"1", b"2"]
    assert topic.get(b"a", as_of={other: 0}) == b"2"
    assert dict(topic.items(as_of=1500)) == {b"a": b"1", b"b": b"1"}
    assert list(topic.keys(as_of=0)) == []


def test_keys_and_items_with_a_prefix(log, config):
    """D28: of the stored bytes; without the keys that were deleted."""
    topic = log.create_topic("t", 2, {**config, "key.serializer": "str"})
    with log.producer() as producer:
        for key, value in [("ä/1", b"1"), ("ä/2", b"2"), ("b/1", b"3"), ("ä/3", None), ("ä", b"")]:
            producer.send("t", value, key=key).result()
    assert sorted(topic.keys()) == ["b/1", "ä", "ä/1", "ä/2"]
    assert dict(topic.items(prefix="ä/")) == {"ä/1": b"1", "ä/2": b"2"}
    assert dict(topic.items(prefix="ä/".encode())) == {"ä/1": b"1", "ä/2": b"2"}
    assert list(topic.keys(prefix="c")) == []
    with pytest.raises(TypeError, match="str or bytes"):
        list(topic.keys(prefix=1))


def test_typed_topics_have_the_same(log, config):
    """D28: keys of one column or several; a prefix is of the first one."""
    schema = pa.schema([("site", pa.string()), ("number", pa.int32()), ("x", pa.int64())])
    one = log.create_topic("one", 1, config, schema=schema, key="site")
    two = log.create_topic("two", 1, config, schema=schema, key=["site", "number"])
    number = log.create_topic("number", 1, config, schema=schema, key="number")
    with log.producer() as producer:
        for name in ("one", "two", "number"):
            for step in range(8):
                row = {"site": ["a1", "a2", "b1"][step % 3], "number": step % 2, "x": step}
                producer.send(name, row).result()
        producer.send("one", None, key="a2").result()
    assert [record.value and record.value["x"] for record in one.records_of("a2")] == [
        1,
        4,
        7,
        None,
    ]
    assert one.records_of("a2") == [record for record in one if record.key == "a2"]
    assert two.records_of(("b1", 0)) == [record for record in two if record.key == ("b1", 0)]
    assert [value and value["x"] for value in one.get_many(["b1", "a2", "c"])] == [5, None, None]
    assert [value["x"] for value in two.get_many([("b1", 1), {"site": "a1", "number": 0}])] == [
        5,
        6,
    ]
    assert sorted(one.keys()) == ["a1", "b1"]
    assert sorted(two.keys(prefix="a")) == [("a1", 0), ("a1", 1), ("a2", 0), ("a2", 1)]
    with pytest.raises(TypeError, match="int32"):
        list(number.keys(prefix="a"))
