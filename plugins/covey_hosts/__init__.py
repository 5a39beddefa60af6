"""Several processes: the channel between them, and commands started as several processes, here or on a cluster."""

from covey_hosts.jobs import JOBS, JobOptions
from covey_hosts.local import LocalOptions, launch

__all__ = ["JOBS", "JobOptions", "LocalOptions", "launch"]
