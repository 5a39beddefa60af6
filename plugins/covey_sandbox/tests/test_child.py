"""Child processes that answer calls; those of rewards and of templates are tested where they are used."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

HANDLER = """
import os, pathlib, threading, time

def answer(message):
    threading.Thread(target=time.sleep, args=(60,)).start()
    file = pathlib.Path(__file__).with_name("pid")
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file)
    time.sleep(0.5)
    return {}
"""


@pytest.mark.slow
def test_a_child_ends_with_its_run_though_a_thread_goes_on(tmp_path: Path) -> None:
    """The run is killed during a call, and the function has left a thread, for which Python would wait."""
    (tmp_path / "handler.py").write_text(HANDLER)
    code = f"from covey_sandbox.child import Child; Child('handler:answer', folder={str(tmp_path)!r}).call({{}})"
    with subprocess.Popen([sys.executable, "-c", code]) as run:
        while not (tmp_path / "pid").exists():
            assert run.poll() is None
            time.sleep(0.02)
        child = psutil.Process(int((tmp_path / "pid").read_text()))
        run.kill()
    child.wait(10)
