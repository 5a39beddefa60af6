"""The files of the watchdog in a run folder."""

from covey.monitor.run_files import RunFile

HEARTBEAT, STACKS = "heartbeat.json", "stacks.txt"
FILES = (
    RunFile(HEARTBEAT, "present phase and step, or how the run ended"),
    RunFile(STACKS, "stacks of all threads in a phase that took too long", optional=True),
)
