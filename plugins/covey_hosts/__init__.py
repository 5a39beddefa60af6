"""Start a training command as several processes: on this machine, or as a job file for a cluster."""

from covey_hosts.jobs import JOBS, JobOptions
from covey_hosts.local import LocalOptions, launch

__all__ = ["JOBS", "JobOptions", "LocalOptions", "launch"]
