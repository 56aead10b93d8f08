"""A log over several directories against a list of acknowledged records."""

from hypothesis import settings
from support import tiers
from support.replicas_model import ReplicasModel

TestReplicasModel = ReplicasModel.TestCase
TestReplicasModel.settings = settings(
    stateful_step_count=25, max_examples=tiers.choose(quick=4, test=7, all=300, nightly=3_000)
)
