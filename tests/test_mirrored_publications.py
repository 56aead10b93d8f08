"""A copy knows what was published to its source: a query that goes on there repeats nothing."""

import pytest
from support.staged_files import publish, stage

import embedlog
from embedlog.errors import RestartedApplicationError
from embedlog.mirrors.ends import Fetch, MirrorPosition
from embedlog.mirrors.root_source import RootSource
from embedlog.mirrors.root_target import RootTarget


@pytest.fixture
def source(tmp_path):
    with embedlog.open(tmp_path / "source", maintenance=False) as log:
        log.create_topic("t", partitions=2)
        log.create_topic("u")
        yield log


@pytest.fixture
def standby(tmp_path):
    """A log whose topics have other ids than those of the source."""
    with embedlog.open(tmp_path / "standby", maintenance=False) as log:
        log.create_topic("own")
        yield log


def write(log, version, source="q", **options):
    """Publish a micro-batch of query ``source`` to two partitions; return how many records."""
    staged = stage(log.root, t_0=[b"%d" % version], t_1=[b"%d" % version])
    return publish(
        log.root, [staged], version, source=source, place="/checkpoint", **options
    ).records


def test_a_batch_that_was_copied_is_recognised_after_a_failover(source, standby):
    """By the id of the query, as at the source; the next batch is new."""
    for version in range(3):
        assert write(source, version) == 2
    embedlog.mirror(source, standby, progress=False)
    standby.mirrors.failover(dry_run=False)

    assert write(standby, 2) == 0
    assert write(standby, 3) == 2
    assert len(standby.topic("t")) == 8
    with pytest.raises(RestartedApplicationError, match="started over"):
        write(standby, 0, source="another")


def test_a_batch_is_not_recognised_before_all_of_it_is_copied(source, standby):
    """The copies of its partitions are written one after the other."""
    embedlog.mirror(source, standby, progress=False)
    write(source, 7)
    end, target = RootSource(source.root), RootTarget(standby.root)
    target.prepare(end.topics()["t"], "t", end)

    def copy(partition):
        position = target.position("t", partition)
        fetch = end.fetch("t", partition, MirrorPosition(position.offset), 1 << 20)
        assert isinstance(fetch, Fetch)
        target.append("t", partition, fetch)

    copy(0)
    assert not known(standby)
    copy(1)
    assert known(standby) == {("q", 7), ("app", 7), ("at /checkpoint", 7)}
    end.close()


def known(log):
    """Return the applications and versions that a log knows."""
    from embedlog.publish.app_versions import APP_VERSIONS

    rows = log.root.context.state.read(lambda txn: list(APP_VERSIONS.scan_valid(txn)))
    return {(name, row.version) for (name, _), row in rows}


def test_the_rows_of_topics_that_are_not_copied_stay_behind(source, standby):
    """A publication to several topics is known by those of it that are copied."""
    publish(source.root, [stage(source.root, u_0=[b"x"])], 1, source="only-u")
    both = {"source": "both", "restart": True}  # of the same name as the other query
    publish(source.root, [stage(source.root, t_0=[b"x"], u_0=[b"x"])], 5, **both)
    embedlog.mirror(source, standby, topics="t", progress=False)

    assert known(standby) == {("both", 5), ("app", 5)}
    standby.mirrors.failover(dry_run=False)
    assert publish(standby.root, [stage(standby.root, t_0=[b"x"])], 5, source="both").records == 0


def test_rows_follow_without_records_and_never_go_back(source, standby):
    """A mirror that was killed before the row copies it the next time; a query counts on here."""
    write(source, 1)
    embedlog.mirror(source, standby, progress=False)
    rows = known(standby)
    forget(standby)
    embedlog.mirror(source, standby, progress=False)
    assert known(standby) == rows

    standby.mirrors.failover(dry_run=False)
    write(standby, 2)
    standby.alter_topic("u", {"mirror.source": f"{source.root.id}/u"})
    write(source, 1, restart=True)
    embedlog.mirror(source, standby, topics="u", progress=False)
    assert ("q", 2) in known(standby)


def forget(log):
    from embedlog.publish.app_versions import APP_VERSIONS

    def step(txn):
        for key, _ in list(APP_VERSIONS.scan_valid(txn)):
            APP_VERSIONS.delete(txn, *key)

    log.root.context.state.write(step)


def test_a_batch_that_the_copy_lost_again_is_not_recognised(source, standby):
    """A truncation of the copy cuts it; the next mirror copies it, and then it is known again."""
    write(source, 1)
    embedlog.mirror(source, standby, progress=False)
    standby.partition("t", 0).truncate_to(0)
    with_loss = known(standby)
    embedlog.mirror(source, standby, progress=False)
    assert known(standby) == with_loss
    standby.mirrors.failover(dry_run=False)

    assert write(standby, 1) == 0
    assert len(standby.topic("t")) == 2
