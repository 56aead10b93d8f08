"""Maintenance: the background jobs of a log, done by one of its attached processes.

`owner` decides which process that is and runs the threads; `jobs` has the jobs and what
they run with; `activity` records what happened.
"""

from embedlog.maintenance.jobs import jobs_of
from embedlog.maintenance.owner import Maintenance

__all__ = ["Maintenance", "jobs_of"]
