"""Maintenance: the background jobs of a log, done by one of its attached processes.

`owner` decides which process that is and runs the threads; `jobs` lists the jobs;
`job_context` is what a job gets; `activity` records what happened.
"""

from embedlog.maintenance.job_context import (
    OWNER,
    JobContext,
    MaintenanceJob,
    MaintenanceOwner,
    current_owner,
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
    "current_owner",
    "jobs_of",
]
