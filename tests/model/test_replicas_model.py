"""A log over several directories against a list of acknowledged records."""

from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import settings
from support import tiers
from support.replicas_model import ReplicasModel

TestReplicasModel = ReplicasModel.TestCase
TestReplicasModel.settings = settings(
    stateful_step_count=25, max_examples=tiers.choose(quick=4, test=7, all=300, nightly=3_000)
)


def test_of_two_copies_that_lack_their_ends_the_shorter_is_copied_again() -> None:
    """After a power cut: the longer one lacks only padding, which is read as if it was there."""
    with begun((2, 2, 1, False)) as model:
        model.open_another()
        model.cancel(handle=0)
        model.power_cut(more=2, seed=10352)
        model.check()


def test_a_copy_with_a_hole_that_an_operator_elects_ends_there() -> None:
    """It was not in sync when a power cut took a part of its first segment, but not its second."""
    with begun((1, 2, 2, False)) as model:
        model.append_to_all(handle=0, size=0, which=0)
        model.diverge(before=2, handle=0, returns=True, rolls=False, size=0, which=0)
        model.power_cut(more=0, seed=0)
        model.kill_and_lose(at=1, what="reassign", which=0)
        model.elect_unclean(handle=0, which=0)
        model.check()
        (part,) = model.parts.values()
        assert len(part.records) == 2 and part.losses == 1


@contextmanager
def begun(topic: tuple[int, int, int, bool]) -> Iterator[ReplicasModel]:
    """Yield a model of two directories with one topic."""
    model = ReplicasModel()
    model.begin(count=2, topics=[topic])
    try:
        yield model
    finally:
        model.teardown()
