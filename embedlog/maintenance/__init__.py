"""The only room that starts threads for the housekeeping: of all processes one does it.

`owning` settles who, `turns` is by which right, and `jobs` are what there is to do.
"""

from embedlog.maintenance.job_context import (
    OWNER,
    JobContext,
    MaintenanceJob,
    MaintenanceOwner,
    owner,
)
from embedlog.maintenance.jobs import JOBS, jobs_of
from embedlog.maintenance.owner import Maintenance

__all__ = [
    "JOBS",
    "OWNER",
    "JobContext",
    "Maintenance",
    "MaintenanceJob",
    "MaintenanceOwner",
    "jobs_of",
    "owner",
]
