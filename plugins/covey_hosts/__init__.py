"""Several processes: what they tell each other, and how a command is started as several, here or on a cluster."""

from covey_hosts.jobs import JOBS, JobOptions
from covey_hosts.local import LocalOptions, launch

__all__ = ["JOBS", "JobOptions", "LocalOptions", "launch"]
