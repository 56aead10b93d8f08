"""The only room that starts threads for the housekeeping: of all processes one does it.

`owning` settles who, `turns` is by which right, and `jobs` are what there is to do.
"""

from embedlog.maintenance.jobs import JOBS, jobs_of
from embedlog.maintenance.owning import Maintenance
from embedlog.maintenance.turns import OWNER, Job, Owner, Turn, owner

__all__ = ["JOBS", "OWNER", "Job", "Maintenance", "Owner", "Turn", "jobs_of", "owner"]
