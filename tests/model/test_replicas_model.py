"""A log over several directories against a list of acknowledged records."""

from hypothesis import settings
from support import tiers
from support.replicas_model import ReplicasModel

TestReplicasModel = ReplicasModel.TestCase
TestReplicasModel.settings = settings(
    stateful_step_count=25, max_examples=tiers.choose(quick=4, test=7, all=300, nightly=3_000)
)


def test_of_two_copies_that_lack_their_ends_the_shorter_is_copied_again() -> None:
    """After a power cut: the longer one lacks only padding, which is read as if it was there."""
    model = ReplicasModel()
    model.begin(count=2, topics=[(2, 2, 1, False)])
    model.open_another()
    model.cancel(handle=0)
    model.power_cut(more=2, seed=10352)
    try:
        model.check()
    finally:
        model.teardown()
