"""Describe what a run was computed with: versions, commit, machine and devices, for `summary.json`."""

import os
import platform
import subprocess
from pathlib import Path

import jax
import psutil

from covey import __version__
from covey.parallel.checks import versions


def describe_environment() -> dict[str, str]:
    """Return names and texts; nothing in them names the machine or its user."""
    devices = jax.devices()
    found = {"covey": __version__, "commit": _commit(), **versions(), "python": platform.python_version()}
    found |= {
        "system": f"{platform.system()} {platform.machine()}",
        "devices": f"{len(devices)} × {devices[0].device_kind} ({devices[0].platform})",
        "processes": str(jax.process_count()),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
    }
    return {name: text for name, text in found.items() if text}


def _commit() -> str:
    """Return the commit of the checkout that Covey runs from, marked when files were changed; empty elsewhere."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=, with changes", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
